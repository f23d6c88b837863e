# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they run before a world makes groups: in one process, and as real jobs."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
import torch.distributed as dist  # noqa: E402

import torchcommshim  # noqa: E402
from torchcommshim.commands.verify import simulated  # noqa: E402
from torchcommshim.commands.verify.switchboard import switchboard  # noqa: E402
from torchcommshim.tell import agreement  # noqa: E402
from torchcommshim.tell.agreement import AgreementError, confirm, post  # noqa: E402

SAME = {"torchcommshim": "1.0", "strategy": "auto", "traits": "none"}
OTHER = {**SAME, "strategy": "strip"}

# In one process, over each kind of store.


def _file_store(tmp_path):
    return dist.FileStore(str(tmp_path / "store"), 8)


def _hash_store(tmp_path):
    return dist.HashStore()


def _tcp_store(tmp_path):
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _prefix_store(tmp_path):
    return dist.PrefixStore("job", dist.PrefixStore("attempt", dist.HashStore()))


@pytest.fixture(params=[_file_store, _hash_store, _tcp_store, _prefix_store])
def store(request, tmp_path):
    """A store of each kind that torch offers."""
    return request.param(tmp_path)


def test_all_alike(store):
    """Ranks that posted the same go on, at once where the world has waited for all of them."""
    posts = [post(store, rank, 3, SAME) for rank in range(3)]

    assert [confirm(each, connected=True, timeout_s=0) for each in posts] == [None] * 3


@pytest.mark.parametrize("connected", [True, False])
def test_difference(store, connected):
    """A rank that differs is named, with both values, on every rank."""
    posts = [post(store, rank, 3, OTHER if rank == 2 else SAME) for rank in range(3)]
    with pytest.raises(AgreementError, match=r"rank 2 on .*'strip'; rank 0 on .*'auto'"):
        confirm(posts[0], connected=connected, timeout_s=60)
    with pytest.raises(AgreementError, match=r"rank 0 on .*'auto'; rank 2 on .*'strip'"):
        confirm(posts[2], connected=connected, timeout_s=60)


def test_missing_rank(store):
    """A rank without a post, in a world that has waited for it, has no shim, and is named."""
    posts = [post(store, rank, 3, SAME) for rank in (0, 2)]
    for each in posts:
        with pytest.raises(AgreementError, match="rank 1: posted nothing"):
            confirm(each, connected=True, timeout_s=60)


def test_slow_rank(store):
    """A rank that has not posted may be slow, where the world has not waited for it: no alarm."""
    first = post(store, 0, 2, SAME)
    late = threading.Timer(1.0, post, (store, 1, 2, SAME))
    late.start()

    assert confirm(first, connected=False, timeout_s=60) is None
    late.join()


def test_slow_rank_that_differs(store):
    """A slow rank that differs is named as soon as it has posted."""
    first = post(store, 0, 2, SAME)
    late = threading.Timer(0.5, post, (store, 1, 2, OTHER))
    late.start()
    with pytest.raises(AgreementError, match="rank 1"):
        confirm(first, connected=False, timeout_s=60)
    late.join()


def test_rank_that_never_comes(store):
    """Waiting for a rank ends with the world's own timeout, and names it."""
    with pytest.raises(AgreementError, match="rank 1: posted nothing"):
        confirm(post(store, 0, 2, SAME), connected=False, timeout_s=0.2)


def test_waiting_is_announced(store, monkeypatch, capsys):
    """A rank that waits long says once whom it waits for."""
    monkeypatch.setattr(agreement, "_FIRST_NOTICE_S", 0.05)
    with pytest.raises(AgreementError):
        confirm(post(store, 0, 2, SAME), connected=False, timeout_s=0.5)

    assert capsys.readouterr().err.count("not heard yet: rank 1") == 1


def test_store_that_serves_several_worlds(store):
    """Worlds made one after the other over one store agree anew each time, with other statements too."""
    for statement in (SAME, SAME, OTHER, OTHER, SAME):
        posts = [post(store, rank, 2, statement) for rank in range(2)]
        for each in posts:
            confirm(each, connected=True, timeout_s=60)

    posts = [post(store, rank, 2, SAME if rank else OTHER) for rank in range(2)]
    with pytest.raises(AgreementError):
        confirm(posts[0], connected=True, timeout_s=60)


def test_store_of_a_crashed_attempt(store):
    """What an attempt that died half-way has left in the store causes no alarm in the next one."""
    post(store, 0, 2, SAME)
    posts = [post(store, rank, 2, SAME) for rank in range(2)]

    assert [confirm(each, connected=True, timeout_s=60) for each in posts] == [None, None]


def test_many_ranks_are_listed_shortly(store):
    """A message about many ranks is short."""
    mine = post(store, 0, 100, SAME)
    with pytest.raises(AgreementError, match="ranks 1-99: posted nothing"):
        confirm(mine, connected=True, timeout_s=60)


def test_host_of_a_missing_rank(store, monkeypatch):
    """The host of a rank that posted nothing is known where torchrun put it beside one that did; no other."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "node-a")
    mine = post(store, 0, 6, SAME)
    with pytest.raises(AgreementError, match="rank 1 on node-a; ranks 2-5: posted nothing"):
        confirm(mine, connected=True, timeout_s=60)


# As jobs of three processes on simulated NCCL, which run the reported program.  They are forked from this
# one, which has imported torch; each installs the shim anew, as its own environment says.


def _run_rank(rank, address, store, errors, difference):
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torchcommshim.uninstall()
    os.environ.update(difference.get("environment", {}))
    torchcommshim.__version__ = difference.get("version", torchcommshim.__version__)
    if not difference.get("missing"):
        torchcommshim.install()
    time.sleep(difference.get("slow", 0))
    simulated.install(address, devices=3)
    device = torch.device("cuda", rank)
    file = dist.FileStore(store, 3)
    for attempt in ("first", "second"):  # destroyed and made anew, as after an elastic restart
        shared = dist.PrefixStore(attempt, file)
        dist.init_process_group("nccl", store=shared, rank=rank, world_size=3, device_id=device)
        dist.new_group([0])
        dist.barrier()
        dist.destroy_process_group()


def _job(tmp_path, differences=None):
    """Run the job and end it as torchrun does: when one rank has failed, the others are killed.

    Returns:
        The exit code of each rank, None if it was still running when another failed, and its stderr.
    """
    processes = multiprocessing.get_context("fork")
    with switchboard() as address:
        ranks = [
            processes.Process(
                target=_run_rank,
                args=(rank, address, str(tmp_path / "store"), str(tmp_path / f"{rank}.err"), difference),
            )
            for rank, difference in enumerate((differences or {}).get(rank, {}) for rank in range(3))
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + 30  # seconds: what the user is promised
        while time.monotonic() < end and None in (codes := [process.exitcode for process in ranks]):
            if any(codes):
                break
            time.sleep(0.05)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
    return codes, [(tmp_path / f"{rank}.err").read_text() for rank in range(3)]


def _strategy(name):
    return {"environment": {"TORCHCOMMSHIM": name}}


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ({0: {"missing": True}}, "rank 0.*: posted nothing"),
        ({2: {"missing": True}}, "rank 2.*: posted nothing"),
        ({1: _strategy("off")}, "rank 1.*: posted nothing"),
        ({1: _strategy("observe")}, "rank 1 on [^;]*strategy 'observe'"),
        ({1: _strategy("strip")}, "strategy '(strip|auto)'; .*strategy '(strip|auto)'"),
        ({0: _strategy("strip")}, "strategy '(strip|auto)'; .*strategy '(strip|auto)'"),
        ({2: {"version": "0.0.1"}}, "torchcommshim '0.0.1'"),
    ],
    ids=["missing-on-0", "missing-on-2", "off-on-1", "observe-on-1", "strip-on-1", "strip-on-0", "version"],
)
def test_job_with_a_difference(tmp_path, differences, expected):
    """A job whose ranks differ fails within 30 s, and names the rank that differs and both values."""
    codes, errors = _job(tmp_path, differences)
    failed = [error for code, error in zip(codes, errors) if code]

    assert failed, "no rank has failed"
    assert any(re.search(f"AgreementError(.|\n)*{expected}", error) for error in failed), failed[0]


@pytest.mark.parametrize("strategy", ["auto", "strip", "split"])
def test_job_with_a_slow_rank(tmp_path, strategy):
    """Ranks that are alike agree, in each of two worlds, however late one of them starts."""
    differences = {rank: _strategy(strategy) for rank in range(3)}
    differences[1] = {**differences[1], "slow": 2}
    codes, errors = _job(tmp_path, differences)

    assert not any("do not agree" in error for error in errors)
    assert codes == [0, 0, 0]


def test_warning_only(tmp_path):
    """With TORCHCOMMSHIM_AGREEMENT=warn the difference is said, and no rank fails for it."""
    warn = {"TORCHCOMMSHIM_AGREEMENT": "warn"}
    differences = {rank: {"environment": {"TORCHCOMMSHIM": "split", **warn}} for rank in range(3)}
    differences[1] = {"version": "0.0.1", **differences[1]}
    codes, errors = _job(tmp_path, differences)

    assert codes == [0, 0, 0]
    assert all("do not agree" in error for error in errors)
