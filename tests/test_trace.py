# SPDX-License-Identifier: Apache-2.0
"""What the trace of a rank holds, and what becomes of a job whose trace cannot be written."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import threading

import pytest
import tracing
from tracing import call

import torchcommshim
from torchcommshim.tell import trace as trace_module


def lines(folder):
    """The records of each file, by rank."""
    found = {}
    for file in sorted(folder.iterdir()):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        found.setdefault(records[0]["rank"], []).append(records)
    return found


def summary(records):
    """Kind and number of each record."""
    return [(record["record"], record.get("number")) for record in records]


@pytest.mark.once
def test_records(tmp_path):
    """The world comes first, its binding before its first group, each creation when it begins and ends."""
    tracing.record(tracing.trace(tmp_path), 2, [{"ranks": (0, 1)}, {"ranks": (2, 3), "backend": "gloo"}])
    ((records,),) = lines(tmp_path).values()

    assert summary(records) == [
        ("world", None),
        ("creation", 0),
        ("end", 0),
        ("bound", None),
        ("creation", 1),
        ("end", 1),
        ("creation", 2),
        ("end", 2),
    ]
    assert records[3] == {"record": "bound", "bound": True, "splits": "all"}
    assert records[6] == {
        "record": "creation",
        "number": 2,
        "kind": "collective",
        "ranks": [2, 3],
        "backend": "gloo",
        "name": "2",
        "site": "train.py:7 main",
    }


@pytest.mark.once
def test_world(tmp_path):
    """The world's record holds what is needed to play the program again: build, strategy, rank."""
    tracing.record(tracing.trace(tmp_path, "2.13.0", "observe"), 3, [], size=8)
    ((records,),) = lines(tmp_path).values()
    world = records[0]

    expected = {
        "format": 1,
        "torchcommshim": torchcommshim.__version__,
        "torch": "2.13.0",
        "strategy": "observe",
        "rank": 3,
        "world_size": 8,
        "backend": "nccl",
        "late": False,
        "dry_run": False,
        "pid": os.getpid(),
    }
    assert {name: world[name] for name in expected} == expected
    assert [name for name, value in world["traits"].items() if value] == [
        "split_ignores_backend",
        "local_names_differ",
        "split_names_differ",
        "device_picks_backend",
        "accepts_int_device",
    ]


@pytest.mark.once
def test_a_creation_that_hangs_shows(tmp_path):
    """A creation is in the file as soon as it begins."""
    tracing.record(tracing.trace(tmp_path), 0, [{"ranks": (0,)}], stuck=True)
    ((records,),) = lines(tmp_path).values()

    assert summary(records)[-1] == ("creation", 1)


@pytest.mark.once
def test_a_creation_that_fails(tmp_path):
    """What a creation raises is written down."""
    observer = tracing.trace(tmp_path)
    observer.begin(call(0), None)
    observer.end(call(0), RuntimeError("NCCL"))
    ((records,),) = lines(tmp_path).values()

    assert records[-1] == {"record": "end", "number": 0, "error": "RuntimeError: NCCL"}


@pytest.mark.once
def test_installed_late(tmp_path):
    """Where the shim came after the world, the first group tells of the world, and that it is late."""
    observer = tracing.trace(tmp_path, backend="gloo", bound=False, splits="nobody")
    observer.begin(call(1, (0, 1), backend="gloo"), None)
    observer.begin(call(2, (0, 1), backend="gloo"), None)
    ((records,),) = lines(tmp_path).values()

    assert summary(records) == [("world", None), ("bound", None), ("creation", 1), ("creation", 2)]
    assert (records[0]["late"], records[0]["backend"]) == (True, "gloo")
    assert records[1] == {"record": "bound", "bound": False, "splits": "nobody"}


@pytest.mark.once
def test_worlds_of_one_process(tmp_path):
    """A world that is made after another was destroyed goes into the same file, with a record of its own."""
    observer = tracing.trace(tmp_path)
    for _ in range(2):
        tracing.record(observer, 0, [{"ranks": (0, 1)}])
    ((records,),) = lines(tmp_path).values()

    assert [kind for kind, _ in summary(records) if kind in ("world", "bound")] == ["world", "bound"] * 2


@pytest.mark.once
def test_runs_do_not_overwrite(tmp_path):
    """Each run writes files of its own, also where rank, host and process id are the same."""
    for _ in range(3):
        tracing.record(tracing.trace(tmp_path), 0, [])

    assert [len(files) for files in lines(tmp_path).values()] == [3]


@pytest.mark.once
def test_threads_do_not_mix(tmp_path):
    """Ranks and creations in threads of one process leave whole lines, in a file a rank."""
    observer = tracing.trace(tmp_path)
    threads = [
        threading.Thread(target=tracing.record, args=(observer, rank, [{"ranks": (0, 1)}] * 200))
        for rank in (0, 0, 1, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines(tmp_path)

    assert {rank: len(files) for rank, files in found.items()} == {0: 1, 1: 1}
    for rank in found:
        assert sum(kind == "creation" for kind, _ in summary(found[rank][0])) == 2 * 201


@pytest.mark.once
def test_forked_process(tmp_path):
    """A process that is forked from one that traces writes a file of its own."""
    observer = tracing.trace(tmp_path)
    tracing.record(observer, 0, [])
    child = multiprocessing.get_context("fork").Process(target=tracing.record, args=(observer, 0, []))
    child.start()
    child.join()
    (files,) = lines(tmp_path).values()

    assert len({records[0]["pid"] for records in files}) == 2


@pytest.mark.once
def test_job_by_environment(monkeypatch):
    """A job without a common store is named by what its launcher sets on all ranks."""
    environment = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "nightly"}

    assert trace_module._job(call(0), None, environment) == "nightly/node-0/29500"
    assert trace_module._job(call(0), None, {}) == "unnamed"


# -- what cannot be written -----------------------------------------------------------------------------


@pytest.mark.once
def test_folder_that_cannot_be_made(tmp_path, capsys):
    """Where no file can be made one line is said, once, which names the folder; creations go on."""
    (tmp_path / "file").touch()
    observer = tracing.trace(tmp_path / "file")
    for _ in range(2):
        tracing.record(observer, 0, [{"ranks": (0, 1)}])
    (line,) = capsys.readouterr().err.splitlines()

    assert "failed in trace: FileExistsError: " in line
    assert line.endswith(f"'{tmp_path / 'file'}'; torch goes on without it [TCS-failed]")


@pytest.mark.once
def test_folder_is_made_with_the_first_group(tmp_path):
    """A process that makes no group makes no folder."""
    observer = tracing.trace(tmp_path / "traces")
    before = (tmp_path / "traces").exists()
    tracing.record(observer, 0, [{"ranks": (0, 1)}])

    assert (before, len(list((tmp_path / "traces").iterdir()))) == (False, 1)


def _fill(folder, errors):
    sys.stderr = open(errors, "w", buffering=1)  # noqa: SIM115 - for as long as the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # as a full disk: a write comes short, then fails
    tracing.record(tracing.trace(folder), 0, [{"ranks": (0, 1)}] * 100)


@pytest.mark.once
def test_full_disk(tmp_path):
    """When the disk is full tracing stops with one line, and creations go on."""
    (tmp_path / "traces").mkdir()
    child = multiprocessing.get_context("fork").Process(
        target=_fill, args=(tmp_path / "traces", tmp_path / "err")
    )
    child.start()
    child.join()
    (line,) = (tmp_path / "err").read_text().splitlines()

    assert child.exitcode == 0
    assert "failed in trace: OSError" in line


# -- as a job, over real gloo -----------------------------------------------------------------------------


def _run_rank(rank, store, late):
    import torch.distributed as dist

    torchcommshim.uninstall()
    if not late:
        torchcommshim.install()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    if late:
        torchcommshim.install()
    dist.new_group([0, 1])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.barrier()  # or one rank leaves while the other still connects
    dist.destroy_process_group()


def _trace_job(tmp_path, monkeypatch, late=False):
    pytest.importorskip("torch.distributed", reason="needs torch")
    monkeypatch.setenv("TORCHCOMMSHIM_TRACE", str(tmp_path / "traces"))
    processes = multiprocessing.get_context("fork")
    ranks = [
        processes.Process(target=_run_rank, args=(rank, str(tmp_path / "store"), late)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return {rank: records for rank, (records,) in lines(tmp_path / "traces").items()}


def test_job(tmp_path, monkeypatch):
    """The ranks of a job agree on its name, and each has what it made, with the line of the script."""
    found = _trace_job(tmp_path, monkeypatch)
    made = {
        rank: [
            (record["kind"], record["ranks"], record["backend"], record["site"].rpartition(" ")[2])
            for record in records
            if record["record"] == "creation"
        ]
        for rank, records in found.items()
    }

    assert len({records[0]["job"] for records in found.values()}) == 1
    assert found[0][0]["job"] != "unnamed"
    common = [("world", [0, 1], "gloo", "_run_rank"), ("collective", [0, 1], "gloo", "_run_rank")]
    assert made == {0: [*common, ("local", [0], "gloo", "_run_rank")], 1: common}


def test_job_installed_late(tmp_path, monkeypatch):
    """A job that installs the shim after it has made its world is traced from there on."""
    found = _trace_job(tmp_path, monkeypatch, late=True)

    assert [records[0]["late"] for records in found.values()] == [True, True]
    assert [summary(records)[1:3] for records in found.values()] == [[("bound", None), ("creation", 1)]] * 2


def test_job_that_cannot_be_traced(tmp_path, monkeypatch, capfd):
    """A folder that cannot be made costs each rank one line, and nothing else."""
    (tmp_path / "traces").touch()
    with pytest.raises(NotADirectoryError):  # there is nothing to read afterwards
        _trace_job(tmp_path, monkeypatch)

    assert capfd.readouterr().err.count("failed in trace: FileExistsError") == 2
