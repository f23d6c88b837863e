# SPDX-License-Identifier: Apache-2.0
"""`torchcommshim explain`: the measured tables from traces alone, what is assumed, and what is refused."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import tracing
from conftest import ROOT, clean_environment
from fetch_torch_sources import RELEASES, source
from test_traits import probe

import torchcommshim
from torchcommshim.commands import cli
from torchcommshim.commands.explain import traces
from torchcommshim.commands.explain.program import AT_ONCE, LATER, WORLD_FIRST
from torchcommshim.commands.explain.releases import release_of, salt_of, traits_of
from torchcommshim.repair.calls import Split
from torchcommshim.repair.splits import (
    CONNECT,
    COUNTER,
    ERROR,
    HANG,
    NOCOLOR,
    OK,
    REGISTERED,
    SPLIT,
    USE,
    WRONG,
)

once = pytest.mark.once

TESTED = str(Path(torchcommshim.__file__).resolve().parent.parent)  # the folder of the package under test
MEASURED = Path(__file__).with_name("measured.py")
MEGATRON = ROOT / "torchcommshim" / "commands" / "verify" / "scenarios" / "megatron.py"


@pytest.fixture
def explain(capsys):
    """Run the command; gives its exit code, what it printed (read, with --json) and its stderr."""

    def run(*arguments):
        code = cli.main(["explain", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, json.loads(out) if "--json" in arguments and out else out, err

    return run


@pytest.fixture
def needs_torch():
    pytest.importorskip("torch", reason="needs torch")


def verdicts(found, strategy="off"):
    """How the program ends with each order of first use."""
    return {uses: played["verdict"] for uses, played in found["strategies"][strategy]["uses"].items()}


# -- the table of releases ------------------------------------------------------------------------------


@once
@pytest.mark.parametrize("version", RELEASES)
def test_traits_of_releases(version):
    """The table has for each release what the probes find in its sources."""
    assert traits_of(version) == probe(source(version), version)


@once
@pytest.mark.parametrize(
    "version", [version for version in RELEASES if traits_of(version).local_names_differ]
)
def test_salt_of_releases(version):
    """Local-synchronization names are salted with the registry's size, from 2.14 on with a counter."""
    constants = compile(source(version), version, "exec").co_consts
    (names,) = (
        constant.co_names
        for constant in constants
        if isinstance(constant, types.CodeType) and constant.co_name == "_hash_ranks_to_str"
    )
    salts = {"pg_names": REGISTERED, "group_count": COUNTER}

    assert [salt for name, salt in salts.items() if name in names] == [salt_of(version)]


@once
@pytest.mark.parametrize("version", ["2.2.2", "2.16.0", "3.0"])
def test_releases_that_are_not_known(version, tmp_path, explain):
    """A release outside the table is refused, and the range is named."""
    code, _, err = explain(tracing.job(tmp_path, [0, 1]), "--torch", version)

    assert (code, err) == (
        2,
        f"torchcommshim explain: --torch: torch {version} is not known here: only 2.3.0 to 2.15 are\n",
    )


@once
def test_local_version():
    """A build's local part does not matter."""
    assert release_of("2.4.1+cu121") == (2, 4, 1)


# -- split_group ----------------------------------------------------------------------------------------


def splits(rank, parts, parent="0", ranks=range(4), name="part", by_mesh=False):
    """The keywords of a split as `rank` makes it."""
    parts = tuple(map(tuple, parts))
    split = Split(parent, 1, tuple(ranks), parts, by_mesh=by_mesh)
    own = next((part for part in parts if rank in part), ())
    return {"kind": "split", "ranks": own, "name": name, "split": split}


def splitting_job(folder, torch, *steps, **world):
    """The trace of a job of 4 ranks; a step is a list of ranks, or gives the creation of a rank."""
    for rank in range(4):
        made = [step(rank) if callable(step) else {"ranks": step} for step in steps]
        tracing.record(tracing.trace(folder, torch, **world), rank, [each for each in made if each])
    return folder


@once
@pytest.mark.parametrize(
    ("version", "verdict", "defects"),
    [
        ("2.4.1", HANG, ["late-members"]),
        ("2.7.1", HANG, ["split-count"]),
        ("2.9.0", OK, []),
        ("2.13.0", HANG, ["split-names"]),
        ("2.15.0", OK, []),
    ],
)
def test_partial_split(tmp_path, version, verdict, defects, explain):
    """A mesh of some ranks, then one of all in a mixed world: per release, from one trace."""
    mixed = "cpu:gloo,cuda:nccl"
    steps = [
        lambda rank: {**splits(rank, [[0, 1, 2]], by_mesh=True), "backend": mixed},
        lambda rank: {**splits(rank, [[0, 1, 2, 3]], name="all", by_mesh=True), "backend": mixed},
        lambda rank: {"ranks": [0, 1, 2, 3], "backend": "gloo"},
    ]
    for rank in range(4):
        made = [step(rank) for step in steps]
        tracing.record(tracing.trace(tmp_path, "2.13.0", backend=mixed), rank, made, backend=mixed)
    _, found, _ = explain(tmp_path, "--torch", version, "--json")

    assert found["strategies"]["off"]["verdict"] == verdict
    assert [found["strategies"][strategy]["verdict"] for strategy in ("auto", "strip", "split")] == [OK] * 3
    assert [defect["name"] for defect in found["defects"] if defect["name"] != "other-backend"][:1] == defects


@once
def test_nested_split(tmp_path, explain):
    """The group that is split is found by its name; where it is in no trace, that is said."""
    halves = lambda rank: splits(rank, [[0, 1], [2, 3]], name="half")  # noqa: E731
    nested = lambda rank: splits(rank, [[0], [1]], "half", (0, 1), "one") if rank < 2 else None  # noqa: E731
    lost = lambda rank: splits(rank, [[0], [1]], "lost", (0, 1), "one") if rank < 2 else None  # noqa: E731
    _, found, _ = explain(splitting_job(tmp_path / "a", "2.14.0", halves, nested, [0, 1, 2, 3]), "--json")
    code, _, err = explain(splitting_job(tmp_path / "b", "2.14.0", halves, lost))

    assert [defect["name"] for defect in found["defects"]] == ["split-count"]
    assert (code, "the group that it splits is not in the trace" in err) == (2, True)


@once
def test_split_into_other_parts(tmp_path, explain):
    """Ranks that name different parts are named, and a part of a split is a part of the text."""
    other = lambda rank: splits(rank, [[0, 1], [2, 3]] if rank < 3 else [[0, 1], [3]])  # noqa: E731
    _, text, _ = explain(splitting_job(tmp_path, "2.13.0", other))

    assert "ranks 0-2 a split into [0,1] [2,3] nccl" in text
    assert "rank 3 a split into [0,1] [3] nccl" in text


# -- the measured tables, from traces by real torch -----------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The traces of the measured programs, each a world of its own of one dry run; their jobs, by program."""
    pytest.importorskip("torch", reason="needs torch")
    from measured import PROGRAMS

    folder = tmp_path_factory.mktemp("measured") / "traces"
    done = dry_run(4, "--keep", folder, "--", MEASURED)
    names = re.findall(r"--job (\S+):", done.stderr)
    assert len(names) == len(PROGRAMS), done.stderr
    return folder, dict(zip(PROGRAMS, names))


def dry_run(size, *arguments, timeout=200, **environment):
    """Run `explain --fake` as a process of its own."""
    command = [sys.executable, "-m", "torchcommshim", "explain", "--fake", "--world-size", size, *arguments]
    return subprocess.run(
        list(map(str, command)),
        env=clean_environment(PYTHONPATH=TESTED, **environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# Program, release, order of first use that the measured program has, verdict, exit code of the whole.
TABLE = [
    ("m0", "2.4.1", WORLD_FIRST, HANG),
    ("m0", "2.11.0", WORLD_FIRST, OK),
    ("m0", "2.14.1", WORLD_FIRST, OK),
    ("m1", "2.4.1", WORLD_FIRST, HANG),
    ("m1", "2.11.0", WORLD_FIRST, OK),
    ("m2", "2.4.1", LATER, OK),
    ("m2", "2.11.0", LATER, OK),
    ("m3", "2.4.1", LATER, WRONG),
    ("m3", "2.11.0", LATER, OK),
    ("m3", "2.14.1", LATER, OK),
    ("m4", "2.4.1", WORLD_FIRST, HANG),
    ("m4", "2.11.0", WORLD_FIRST, HANG),
    ("m4", "2.14.1", WORLD_FIRST, HANG),
    ("m4", "2.15.0", WORLD_FIRST, OK),
    ("m5", "2.4.1", LATER, HANG),
    ("m5", "2.11.0", LATER, WRONG),
    ("m5", "2.14.1", LATER, WRONG),
    ("m5", "2.15.0", LATER, OK),
    ("m6", "2.4.1", AT_ONCE, HANG),
    ("m6", "2.11.0", AT_ONCE, HANG),
    ("m6", "2.14.1", AT_ONCE, HANG),
    ("m6", "2.15.0", AT_ONCE, HANG),
    ("m6 unbound", "2.11.0", AT_ONCE, OK),
    ("m9", "2.4.1", LATER, OK),
    ("m9", "2.11.0", LATER, OK),
    ("m9", "2.14.1", LATER, OK),
    ("m10", "2.11.0", AT_ONCE, HANG),
    ("m10", "2.15.0", AT_ONCE, HANG),
    ("m11", "2.13.0", LATER, HANG),
    ("m11", "2.14.0", LATER, OK),
    ("m11 reversed", "2.13.0", LATER, OK),
    ("m11 reversed", "2.14.0", LATER, HANG),
    ("m12", "2.13.0", LATER, ERROR),
    ("m13", "2.13.0", LATER, ERROR),
    ("m14", "2.4.1", LATER, OK),
    ("m14", "2.13.0", LATER, OK),
    ("m15", "2.13.0", LATER, OK),
]


@pytest.mark.parametrize(("program", "version", "uses", "verdict"), TABLE)
def test_measured(measured, program, version, uses, verdict, explain):
    """Each measured program ends as it did on real NCCL, told from the creations that torch was asked for."""
    folder, jobs = measured
    world = "traced" if program.startswith("m11") else "auto"
    options = ("--job", jobs[program], "--torch", version, "--world", world, "--json")
    code, found, _ = explain(folder, *options)

    assert verdicts(found)[uses] == verdict
    assert code == (0 if set(verdicts(found).values()) == {OK} else 1)
    for strategy in ("auto", "strip", "split"):
        assert set(verdicts(found, strategy).values()) == {OK}, strategy


@pytest.mark.parametrize("program", [program for program, _, _, verdict in TABLE if verdict == OK])
def test_luck_is_no_alarm(measured, program, explain):
    """What was measured as ok on the last release in the table is ok with each order of first use."""
    folder, jobs = measured
    version = [version for name, version, _, verdict in TABLE if name == program and verdict == OK][-1]
    world = "traced" if program.startswith("m11") else "auto"
    code, _, _ = explain(folder, "--job", jobs[program], "--torch", version, "--world", world)

    assert code == 0


def places(found, uses):
    """Where each rank waits: (rank, creation and whether in it, place, ranks waited for)."""
    return [
        (rank, entry["creation"], entry["in"], entry["at"], entry["missing"])
        for entry in found["strategies"]["off"]["uses"][uses]["waiting"]
        for rank in entry["ranks"]
    ]


def test_m1_places(measured, explain):
    """M1: ranks 2 and 3 wait in their split for the members, and these in the world's first use for them."""
    folder, jobs = measured
    _, found, _ = explain(folder, "--job", jobs["m1"], "--torch", "2.4.1", "--json")

    assert sorted(places(found, WORLD_FIRST), key=lambda place: place[0]) == [
        (0, None, "first use", USE, [2, 3]),
        (1, None, "first use", USE, [2, 3]),
        (2, 1, "creation", NOCOLOR, [0, 1]),
        (3, 1, "creation", NOCOLOR, [0, 1]),
    ]


def test_m3_communicators(measured, explain):
    """M3: the group [0, 1] comes out as two communicators of one rank each."""
    folder, jobs = measured
    _, found, _ = explain(folder, "--job", jobs["m3"], "--torch", "2.4.1", "--json")
    (wrong,) = found["strategies"]["off"]["uses"][LATER]["wrong"]

    assert (wrong["creation"], wrong["meant"], wrong["came_out"]) == (1, [[0, 1]], [[0], [1]])
    assert wrong["site"].startswith(f"{MEASURED}:")


def test_m5_places(measured, explain):
    """M5 on 2.4.1: gloo members wait for the others, which wait in a split for them.

    Rank 0 does so at the first use of [0, 1], which the measured program does not use.
    """
    folder, jobs = measured
    _, found, _ = explain(folder, "--job", jobs["m5"], "--torch", "2.4.1", "--json")

    assert {rank: at for rank, _, _, at, _ in places(found, LATER)} == {
        0: USE,
        1: NOCOLOR,
        2: CONNECT,
        3: NOCOLOR,
    }


def test_m6_places(measured, explain):
    """M6 on 2.11.0: both members wait inside `new_group`."""
    folder, jobs = measured
    _, found, _ = explain(folder, "--job", jobs["m6"], "--torch", "2.11.0", "--json")

    assert [place for place in places(found, LATER) if place[2] == "creation"] == [
        (0, 1, "creation", SPLIT, [2, 3]),
        (1, 1, "creation", SPLIT, [2, 3]),
    ]


def test_traced_torch(measured, explain):
    """Without --torch it explains for the torch that was traced, by the traits that were probed there."""
    import torch

    folder, jobs = measured
    _, found, _ = explain(folder, "--job", jobs["m1"], "--json")
    version = found["explained"]["torch"]

    assert version == torch.__version__
    assert verdicts(found)[WORLD_FIRST] == (HANG if version.startswith(("2.3", "2.4")) else OK)


def test_megatron(tmp_path, explain):
    """Megatron's 8 ranks (TP1 PP4) on 2.4.1 hang, with the counts that were found in its group sequence."""
    pytest.importorskip("torch", reason="needs torch")
    dry_run(8, "--keep", tmp_path / "traces", "--quiet", 1, "--jobs", 8, "--", sys.executable, MEGATRON)
    code, found, _ = explain(tmp_path / "traces", "--torch", "2.4.1", "--json")

    assert (code, found["groups"]) == (1, 82)
    assert found["calls_without_colour"] == [64, 64, 66, 66, 66, 66, 65, 65]
    # In Megatron the world's barrier is the first collective.
    assert verdicts(found)[WORLD_FIRST] == HANG
    assert {at for _, _, _, at, _ in places(found, WORLD_FIRST)} == {NOCOLOR, USE}
    assert [found["strategies"][strategy]["verdict"] for strategy in ("auto", "strip", "split")] == [OK] * 3


def _run_rank_that_hangs(rank, address, folder):
    import torch
    import torch.distributed as dist

    from torchcommshim.commands.verify import simulated

    torchcommshim.uninstall()
    os.environ.update(TORCHCOMMSHIM="observe", TORCHCOMMSHIM_HANG_REPORT_S="0")
    os.environ["TORCHCOMMSHIM_TRACE"] = str(folder / "traces")
    torchcommshim.install()
    simulated.install(address, devices=4)
    store = dist.FileStore(str(folder / "store"), 4)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=4, device_id=device)
    for _ in range(2):
        dist.new_group([0, 1], backend="gloo")
    time.sleep(60)


def test_job_that_hangs(tmp_path, needs_torch, explain):
    """M4 on simulated NCCL, killed while it hangs: its trace tells where, and what would have helped."""
    from torchcommshim.commands.verify.switchboard import switchboard

    def began(rank):
        files = (tmp_path / "traces").glob(f"rank{rank:05}-*")
        return sum(file.read_text().count('"kind":"collective"') for file in files)

    processes = multiprocessing.get_context("fork")
    with switchboard() as address:
        ranks = [
            processes.Process(target=_run_rank_that_hangs, args=(rank, address, tmp_path))
            for rank in range(4)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + 60
        while [began(rank) for rank in range(4)] != [2, 2, 1, 1] and time.monotonic() < end:
            time.sleep(0.1)
        for process in ranks:
            process.kill()
            process.join()
    code, found, _ = explain(tmp_path / "traces", "--json")

    assert code == 1
    assert [note.partition(":")[0] for note in found["notes"]] == [
        "ranks 2,3 did not come back from a creation in the traced run"
    ]
    assert verdicts(found) == dict.fromkeys((AT_ONCE, LATER, WORLD_FIRST), HANG)
    assert places(found, LATER)[:2] == [
        (0, None, "first use", USE, [2, 3]),
        (1, None, "first use", USE, [2, 3]),
    ]
    assert verdicts(found, "auto") == dict.fromkeys((AT_ONCE, LATER, WORLD_FIRST), OK)


# -- what the world is taken for ------------------------------------------------------------------------


def world_of(found):
    return found["explained"]["backend"], found["explained"]["device_id"]


@once
@pytest.mark.parametrize(
    ("world", "options", "taken"),
    [
        ({"backend": "nccl"}, (), ("nccl", True)),
        ({"backend": "nccl", "bound": False}, (), ("nccl", False)),
        ({"backend": "nccl", "bound": False}, ("--world", "bound"), ("nccl", True)),
        ({"backend": "nccl"}, ("--world", "unbound"), ("nccl", False)),
        ({"backend": "nccl", "bound": False, "strategy": "strip"}, (), ("nccl", True)),
        ({"backend": "undefined"}, (), ("cpu:gloo,cuda:nccl", True)),
        ({"backend": "gloo", "bound": False}, (), ("nccl", True)),
        ({"backend": "gloo", "bound": False}, ("--world", "traced"), ("gloo", False)),
        ({"backend": "gloo", "bound": True}, (), ("gloo", True)),
        ({"backend": "fake", "bound": False}, (), ("nccl", True)),
        ({"backend": "fake", "bound": False}, ("--world", "unbound"), ("nccl", False)),
        ({"backend": "cpu:gloo,cuda:fake", "bound": False}, (), ("cpu:gloo,cuda:nccl", True)),
    ],
)
def test_world(tmp_path, world, options, taken, explain):
    """What is traced on a laptop stands for the cluster; a world of NCCL for itself."""
    _, found, _ = explain(tracing.job(tmp_path, [0, 1], **world), "--json", *options)

    assert world_of(found) == taken
    assert bool(found["explained"]["because"]) == (taken != (world["backend"], world.get("bound", True))) or (
        world["backend"] in ("undefined", "fake")
    )


@once
@pytest.mark.parametrize(
    ("world", "asked", "other_backend"),
    [
        ("fake", "fake", False),  # nothing was asked for
        ("fake", "nccl", False),
        ("fake", "gloo", True),
        ("gloo", "gloo", False),  # asked for or not: that cannot be told
        ("nccl", "gloo", True),
    ],
)
def test_backends_of_groups(tmp_path, world, asked, other_backend, explain):
    """A group that asked for the world's backend or none is taken for NCCL, gloo in a fake world for gloo."""
    creation = {"ranks": (0, 1), "backend": asked}
    bound = world == "nccl"
    folder = tracing.job(tmp_path, creation, torch="2.13.0", backend=world, bound=bound)
    code, found, _ = explain(folder, "--json")

    assert [defect["name"] for defect in found["defects"]] == ["other-backend"] * other_backend
    assert code == int(other_backend)


@once
def test_backend_that_is_not_modelled(tmp_path, explain):
    """Another backend is refused, with the rank and the line that asked for it."""
    folder = tracing.job(tmp_path, {"ranks": (0, 1), "backend": "ucc"})

    code, _, err = explain(folder)

    assert code == 2
    assert "rank 0, creation 1 (train.py:7 main): backend 'ucc' is not modelled" in err


# -- what is missing ------------------------------------------------------------------------------------


@once
def test_program_that_hung_while_traced(tmp_path, explain):
    """Ranks that did not come back from a creation are assumed to go on as the others did."""
    first, second = {"ranks": (0, 1)}, {"ranks": (0, 2)}
    for rank, creations in enumerate(([first, second], [first, second], [first, second], [first])):
        tracing.record(tracing.trace(tmp_path, strategy="observe"), rank, creations, stuck=rank == 3)
    code, found, _ = explain(tmp_path, "--json")

    assert code == 1
    assert found["notes"] == [
        "rank 3 did not come back from a creation in the traced run: assumed to go on as the ranks that did"
    ]
    assert found["strategies"]["auto"]["verdict"] == OK


@once
def test_rank_that_makes_fewer(tmp_path, explain):
    """A rank that leaves out a group that all ranks make, and was not kept from it, makes the others hang."""
    for rank in range(4):
        creations = [{"ranks": (0, 1)}] * (1 if rank == 3 else 2)
        tracing.record(tracing.trace(tmp_path, "2.13.0"), rank, creations)
    code, found, _ = explain(tmp_path, "--json")

    assert (code, found["strategies"]["auto"]["verdict"]) == (1, HANG)
    assert found["notes"] == [
        "rank 3 made fewer of the groups that all ranks make than others, which made up to 2: explained as "
        "traced, as if no more came"
    ]


@once
def test_ranks_in_different_order(tmp_path, explain):
    """Where ranks make different groups in the same place, both versions are named, with their lines."""
    pair, other = ({"ranks": ranks, "site": f"train.py:{ranks[1]} main"} for ranks in ((0, 1), (2, 3)))
    for rank in range(4):
        creations = [other, pair] if rank == 3 else [pair, other]
        tracing.record(tracing.trace(tmp_path, "2.13.0"), rank, creations)
    _, found, _ = explain(tmp_path, "--json")

    assert found["notes"] == [
        "ranks make different groups as number 1 of those that all ranks make: ranks 0-2 [0,1] nccl "
        "(train.py:1 main); rank 3 [2,3] nccl (train.py:3 main)"
    ]


@once
def test_own_groups_are_no_other_order(tmp_path, explain):
    """Ranks that each name their own group in one call do not differ."""
    for rank in range(4):
        ranks = (0, 1) if rank < 2 else (2, 3)
        tracing.record(tracing.trace(tmp_path, "2.13.0"), rank, [{"ranks": ranks}])
    code, found, _ = explain(tmp_path, "--json")

    assert (code, found["notes"], found["defects"]) == (0, [], [])


@once
def test_own_groups_without_a_device(tmp_path, explain):
    """In a world without device_id such groups share their keys: that is the cause, and auto helps."""
    for rank in range(4):
        ranks = (0, 1) if rank < 2 else (2, 3)
        tracing.record(tracing.trace(tmp_path, "2.13.0"), rank, [{"ranks": ranks}])
    code, found, _ = explain(tmp_path, "--json", "--world", "unbound")

    assert (code, found["strategies"]["auto"]["verdict"]) == (1, OK)
    assert [(defect["name"], defect["groups"]) for defect in found["defects"]] == [("own-parts", 2)]


@once
def test_no_groups(tmp_path, explain):
    """A job that made no group is told so, and one that did not even come to its world."""
    tracing.job(tmp_path, size=3)
    tracing.record(tracing.trace(tmp_path / "hung"), 0, [], size=1, stuck=True)

    assert explain(tmp_path, "--json")[1]["notes"] == ["no group was made in the traced run"]
    assert explain(tmp_path / "hung", "--json")[1]["notes"] == [
        "no group was made in the traced run",
        "on rank 0 the world itself was not made in the traced run",
    ]


@once
def test_missing_rank(tmp_path, explain):
    """A rank without a trace is named, and nothing is explained unless asked for."""
    for rank in (0, 2):
        tracing.record(tracing.trace(tmp_path), rank, [{"ranks": (0, 1)}])
    code, out, err = explain(tmp_path)

    assert (code, out) == (2, "")
    assert "has 4 ranks, and no trace of ranks 1,3; --partial explains what there is" in err


@once
def test_missing_rank_that_is_assumed(tmp_path, explain):
    """With --partial ranks without a trace are assumed to make the groups that all ranks make."""
    tracing.record(tracing.trace(tmp_path), 2, [{"ranks": (0, 1)}])
    _, found, _ = explain(tmp_path, "--partial", "--json")

    assert found["notes"] == [
        "no trace of ranks 0,1,3: assumed to make the 1 groups that all ranks make, as the other ranks do"
    ]
    assert verdicts(found) == {AT_ONCE: OK, LATER: OK, WORLD_FIRST: HANG}
    assert found["calls_without_colour"] == [0, 0, 1, 1]


@once
def test_missing_rank_of_a_local_group(tmp_path, explain):
    """When a rank without a trace makes a local-synchronization group cannot be assumed."""
    tracing.record(tracing.trace(tmp_path), 0, [{"ranks": (0, 1), "kind": "local"}])
    code, _, err = explain(tmp_path, "--partial")

    assert code == 2
    assert "no trace of rank 1, which make groups that not all ranks make" in err


@once
def test_missing_rank_that_names_its_own_group(tmp_path, explain):
    """Where each rank names its own group, one without a trace is assumed to name the one that it is in."""
    for rank in (0, 2):
        tracing.record(tracing.trace(tmp_path), rank, [{"ranks": (0, 1) if rank == 0 else (2, 3)}])
    code, found, _ = explain(tmp_path, "--partial", "--json")

    assert (code, found["calls_without_colour"]) == (0, [0] * 4)


@once
def test_dry_run_of_a_rank_that_is_behind(tmp_path):
    """A rank that was ended before it had made all groups is refused, or else taken for missing."""
    for rank in range(4):
        tracing.record(tracing.trace(tmp_path), rank, [{"ranks": (0, 1)}] * (1 if rank == 3 else 2))
    (job,) = traces.read(tmp_path)

    with pytest.raises(traces.BadTraces, match="rank 3 failed, or came to --quiet or --limit, before making"):
        traces.check_complete(job, ended=[2, 3])
    assert traces.check_complete(job, ended=[2]) is None
    job.drop(job.behind([2, 3]))
    assert job.missing == [3]


@once
def test_cut_line(tmp_path, explain):
    """A trace that ends in the middle of a line is named; --partial leaves that line out."""
    tracing.job(tmp_path, [0, 1], torch="2.13.0")
    file = sorted(tmp_path.iterdir())[1]
    file.write_bytes(file.read_bytes()[:-5])
    code, _, err = explain(tmp_path)

    assert code == 2
    assert f"cut short in the middle of the last line: {file.name}; --partial" in err
    assert explain(tmp_path, "--partial")[0] == 0


@once
def test_installed_late(tmp_path, explain):
    """That groups made before the shim came are not in the trace is said."""
    for rank in range(4):
        tracing.trace(tmp_path).begin(tracing.call(1, (0, 1), rank=rank), None)
    _, out, _ = explain(tmp_path)

    assert "on ranks 0-3 the shim was installed after the world was made" in out


# -- bad input ------------------------------------------------------------------------------------------


@once
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "its traces are empty"),
        ("not JSON\n", "line 1: not JSON, so not a trace, or a damaged one"),
        ('{"record": "wor', "line 1: not JSON, so not a trace, or a damaged one"),
        ("[]\n", "line 1: not JSON, so not a trace, or a damaged one"),
        ('{"record": "end", "number": 1}\n', "line 1: no world comes before it"),
        ('{"number": 1}\n', "line 1: not a record of a trace: KeyError('record')"),
        (
            '{"record": "world", "format": 2, "torchcommshim": "9.0"}\n',
            "line 1: in format 2, of torchcommshim 9.0; this one reads format 1",
        ),
        ('{"record": "world", "format": 1, "torch": 5}\n', "line 1: torch is 5"),
        (b"\xff\xfe\x00\n", "line 1: not JSON, so not a trace, or a damaged one"),
    ],
)
def test_file_that_is_no_trace(tmp_path, content, message, explain):
    """What is wrong with a file is said, with its name and the line."""
    file = tmp_path / "rank00000-x.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = explain(tmp_path)

    assert (code, out) == (2, "")
    assert err.endswith(f"{message}\n")
    assert err.count("\n") == 1


@once
def test_record_in_the_middle(tmp_path, explain):
    """A damaged line in the middle is named by its number."""
    tracing.job(tmp_path, [0, 1])
    file = min(tmp_path.iterdir())
    file.write_text(file.read_text().replace('{"record":"bound"', '{"record""bound"'))

    assert explain(tmp_path)[2] == (
        f"torchcommshim explain: {file.name}, line 4: not JSON, so not a trace, or a damaged one\n"
    )


@once
def test_no_folder(tmp_path, explain):
    """A folder that is missing, is a file, or holds no traces is named."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()

    assert explain(tmp_path / "gone")[::2] == (
        2,
        f"torchcommshim explain: {tmp_path / 'gone'}: no such folder\n",
    )
    assert explain(tmp_path / "file")[::2] == (
        2,
        f"torchcommshim explain: {tmp_path / 'file'}: not a folder\n",
    )
    assert "no traces (rank*.jsonl)" in explain(tmp_path / "empty")[2]


@once
def test_different_jobs(tmp_path, explain, monkeypatch):
    """Traces of several jobs in one folder are listed, and one can be chosen."""
    for job in ("monday", "tuesday"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        tracing.job(tmp_path, [0, 1], torch="2.13.0")
    code, out, err = explain(tmp_path)

    assert (code, out) == (2, "")
    assert re.findall(r"--job (\S+):", err) == ["monday", "tuesday"]
    assert explain(tmp_path, "--job", "tuesday")[0] == 0
    assert (
        "no job 'friday' in these traces; there are: monday, tuesday"
        in explain(tmp_path, "--job", "friday")[2]
    )


@once
def test_rank_traced_twice(tmp_path, explain):
    """Two runs that cannot be told apart are not mixed: the files are named."""
    tracing.job(tmp_path, [0, 1])
    tracing.job(tmp_path, [0, 1])
    code, _, err = explain(tmp_path)

    assert code == 2
    assert "rank 0 of job 'unnamed' was traced twice, in rank00000-" in err


@once
def test_ranks_that_differ(tmp_path, explain):
    """Ranks of one job that were on different builds are refused."""
    for rank in range(4):
        tracing.record(tracing.trace(tmp_path, "2.4.1" if rank else "2.13.0"), rank, [{"ranks": (0, 1)}])

    assert "but differ in torch: '2.4.1' and '2.13.0'" in explain(tmp_path)[2]


@once
def test_ranks_outside_the_world(tmp_path, explain):
    """A group with ranks that the world does not have is refused."""
    assert "its ranks [0,7] are not ranks of a world of 4" in explain(tracing.job(tmp_path, [0, 7]))[2]


@once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one folder with traces is needed"),
        (("a", "b"), "one folder with traces is needed"),
        (("a", "--jobs", "2"), "--jobs goes with --fake"),
        (("--fake", "--", "x.py"), "--fake needs --world-size"),
        (("--fake", "--world-size", "2"), "no command given"),
        (("--fake", "--world-size", "2", "--", "python3"), "must name a Python script, or a module with -m"),
        (("--fake", "--world-size", "2", "--", "python3", "-c", "1"), "must name a Python script"),
        (
            ("--fake", "--world-size", "2", "--", "torchrun", "x.py"),
            "torchrun: no such script; give a Python",
        ),
        (("--fake", "--world-size", "2", "--", "python0", "x.py"), "python0: no such interpreter"),
    ],
)
def test_bad_usage(arguments, message, explain):
    """Usage that makes no sense is refused with what is missing."""
    code, out, err = explain(*arguments)

    assert (code, out) == (2, "")
    assert message in err


# -- what is shown --------------------------------------------------------------------------------------


@once
def test_text(tmp_path, explain):
    """The text says what ends how, where each rank waits, why, and what helps."""
    code, out, _ = explain(tracing.job(tmp_path, [0, 1]))

    assert code == 1
    assert out.splitlines() == [
        "Traced:    4 ranks, up to 1 groups a rank, torch 2.4.1, world of nccl (job unnamed)",
        "Explained: torch 2.4.1, world of nccl with device_id",
        "",
        "Without the shim the program hangs.",
        "  If all groups are made, then the world is used, then the groups in that order: hangs",
        "    ranks 2,3 wait in creation 1, new_group [0,1] at train.py:7 main, which has others as members, "
        "splitting the world without a colour (perform_nocolor_split): for ranks 0,1",
        "    ranks 0,1 wait in the first use of the world: for ranks 2,3",
        "  If each group is used as soon as it is made, and the world at the end; or if all groups are made, "
        "then used in that order, then the world: ends well",
        "",
        "Known defects of torch 2.4.1 that these groups meet",
        "  late-members, 1 group: non-members split the world at once, members only on first use",
        "      https://github.com/pytorch/pytorch/issues/134314",
        "Splits that each rank makes for groups it is not in: 0 0 1 1 (not the same)",
        "",
        "What each strategy makes of it",
        "  (none)  hangs             as torch does it",
        "  auto    ends well         1 group made without splitting from the world",
        "  strip   ends well         device_id dropped, 1 group made as torch does it",
        "  split   ends well         1 group split on their members at once",
        "",
        "A trace holds creations, not collectives. When groups are first used is assumed, in three ways:",
        "  at-once      each group is used as soon as it is made, and the world at the end",
        "  later        all groups are made, then used in that order, then the world",
        "  world-first  all groups are made, then the world is used, then the groups in that order",
    ]


@once
@pytest.mark.parametrize(("strategy", "code"), [("off", 1), ("auto", 0), ("strip", 0), ("split", 0)])
def test_exit_code_of_a_strategy(tmp_path, strategy, code, explain):
    """The exit code is the verdict with the strategy that was asked for."""
    assert explain(tracing.job(tmp_path, [0, 1]), "--strategy", strategy)[0] == code


SVG = "{http://www.w3.org/2000/svg}"


def picture(folder, explain, *options):
    """The root of the picture, and its texts by class."""
    file = folder.parent / f"{folder.name}.svg"
    explain(folder, "--svg", file, *options)
    root = ET.fromstring(file.read_text())
    texts = {}
    for element in root.iter(f"{SVG}text"):
        texts.setdefault(element.get("class"), []).append(element.text)
    return root, texts


@once
def test_picture_of_a_hang(tmp_path, explain):
    """No round is complete: each rank is shown where it waits."""
    root, texts = picture(tracing.job(tmp_path, [0, 1]), explain)

    assert root.find(f"{SVG}title").text == "4 ranks on torch 2.4.1, without the shim: hangs"
    assert texts["soft right"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert texts["middle small bad"] == ["world", "world", "split 1", "split 1"]
    assert texts["soft"] == ["No split of the world is complete."]


@once
def test_picture_of_matched_rounds(tmp_path, explain):
    """Where all ranks split for the same creation the rounds are not marked; members are full cells."""
    root, texts = picture(tracing.job(tmp_path, [0, 1], [2, 3], torch="2.13.0"), explain)

    assert texts["number soft"] == ["1", "2"]
    assert texts["number on"][:-1] == ["1", "1", "2", "2"]  # the last is the legend's
    assert texts["number ink"][:-1] == ["1", "1", "2", "2"]
    assert [text.text for text in root.iter(f"{SVG}title")][1] == (
        "rank 0, round 1: with the group's colour, for creation 1, new_group [0,1]"
    )


@once
def test_picture_of_wrong_pairs(tmp_path, explain):
    """Rounds in which a communicator comes out short are marked."""
    gloo = [{"ranks": ranks, "backend": "gloo"} for ranks in ((0, 1), (2, 3))]
    folder = tracing.job(tmp_path, gloo[0], [0, 2], gloo[1], torch="2.13.0")
    _, texts = picture(folder, explain)

    assert texts["number bad"][:-1] == ["1\u2715", "2\u2715"] * 3  # with each order of first use


@once
def test_picture_escapes(tmp_path, explain):
    """Names of files may hold what XML does not."""
    folder = tracing.job(tmp_path, {"ranks": (0, 1), "site": '<a> & "b".py:1 f'}, torch="2.13.0")
    root, _ = picture(folder, explain)

    assert '<a> & "b".py:1 f' in "".join(root.itertext())


@once
def test_picture_of_many_ranks(tmp_path, explain):
    """A large world's picture is cut, and says so."""
    groups = [(rank, (rank + 1) % 80) for rank in range(80)]
    folder = tracing.job(tmp_path, *map(sorted, groups), torch="2.13.0", size=80)
    _, texts = picture(folder, explain)

    assert list(dict.fromkeys(texts["soft right"])) == [f"rank {rank}" for rank in range(64)]
    assert texts["soft"] == [
        "Cut: ranks 64 to 79 are not drawn.",
        "Cut: of 80 rounds, 1 to 62 are drawn.",
    ]


@once
def test_picture_that_cannot_be_written(tmp_path, explain):
    """A file that cannot be written is named."""
    code, _, err = explain(tracing.job(tmp_path / "traces", [0, 1]), "--svg", tmp_path / "no" / "x.svg")

    assert (code, err) == (
        2,
        f"torchcommshim explain: --svg {tmp_path / 'no' / 'x.svg'}: No such file or directory\n",
    )


# -- dry runs -------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
{before}
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
group = dist.new_group([0, 1])
dist.barrier()
tensor = torch.ones(2)
dist.all_reduce(tensor, group=group) if dist.get_rank() < 2 else None
assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), 3)
{after}
"""


def script(tmp_path, before="", after=""):
    (tmp_path / "script.py").write_text(SCRIPT.format(before=before, after=after))
    return tmp_path / "script.py"


def test_dry_run_of_ranks_that_fail(tmp_path, needs_torch):
    """Ranks that fail after they have made their groups are named, with what they said; all is explained."""
    after = "if dist.get_rank() == 1: sys.exit('no data for rank 1')"
    done = dry_run(3, "--torch", "2.4.1", "--", script(tmp_path, after=after))

    assert done.returncode == 1, done.stderr
    assert done.stderr == (
        "torchcommshim explain: rank 1 failed, exit code 1; stderr ends with:\n    no data for rank 1\n"
    )
    assert "rank 2 waits in creation 1, new_group [0,1]" in done.stdout


def test_dry_run_of_a_script_that_wants_a_gpu(tmp_path, needs_torch):
    """A script that fails for want of a GPU before it makes a world is told what a dry run needs."""
    done = dry_run(3, "--", script(tmp_path, before="torch.cuda.set_device(0)"), CUDA_VISIBLE_DEVICES="")

    assert (done.returncode, done.stdout) == (2, "")
    assert "The script wants a GPU before it makes its groups" in done.stderr
    assert done.stderr.endswith("no rank came as far as init_process_group, so there is nothing to explain\n")


def test_dry_run_of_a_module(tmp_path, needs_torch):
    """A module runs as `python -m` does, with its arguments, and a rank that takes too long is ended."""
    after = "assert sys.argv[1:] == ['--lr', '1']\nwhile True: time.sleep(0.2)"
    script(tmp_path, after=after)
    command = ("--limit", 1.5, "--jobs", 3, "--", "python", "-u", "-m", "script", "--lr", 1)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "torchcommshim", "explain", "--fake", "--world-size", "3", *map(str, command)],
        env=clean_environment(PYTHONPATH=TESTED, PATH=path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert "torchcommshim explain: ranks 0-2: ended after 1.5 s (--limit)" in done.stderr
    assert "Traced:    3 ranks" in done.stdout


def processes_with(word):
    """The running processes whose environment or command holds `word`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_dry_run_that_is_ended(tmp_path, needs_torch, number):
    """Ctrl-C, or even killing the command, leaves no process behind."""
    after = "import subprocess; subprocess.run(['sleep', '300'])"
    word = f"explain-{tmp_path.name}"
    command = [sys.executable, "-m", "torchcommshim", "explain", "--fake", "--world-size", 3, "--jobs", 3]
    command += ["--keep", tmp_path / "traces", "--quiet", 200, "--", script(tmp_path, after=after)]
    process = subprocess.Popen(
        list(map(str, command)),
        env=clean_environment(PYTHONPATH=TESTED, MARK=word, TMPDIR=str(tmp_path)),
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(list((tmp_path / "traces").glob("*"))) < 3:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    end = time.monotonic() + 60
    while processes_with(word) and time.monotonic() < end:
        time.sleep(0.1)

    assert processes_with(word) == []
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert err.endswith("interrupted; all ranks are ended\n")
