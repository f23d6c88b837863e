# SPDX-License-Identifier: Apache-2.0
"""Programs that people have reported, as jobs of several processes over gloo: each sum is right."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
import traceback
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402

import torchcommshim  # noqa: E402

DEADLINE_S = 100.0  # on a busy machine all of it takes long
SIZE = 4


def _rank(program, rank, folder, environment):
    os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torchcommshim.uninstall()
    os.environ.update({"TORCHCOMMSHIM_HANG_REPORT_S": "0", "GLOO_SOCKET_IFNAME": "lo"}, **environment)
    torchcommshim.install()
    try:
        program(rank, dist.FileStore(str(folder / "store"), SIZE))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def job(folder, program, differences=None):
    """Run `program(rank, store)` on each rank, with its variables of `differences`, until one fails.

    Returns:
        The exit code of each rank, None if it was still running, and what all wrote to stderr.
    """
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_rank, args=(program, rank, folder, (differences or {}).get(rank, {})))
        for rank in range(SIZE)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and None in (codes := [process.exitcode for process in ranks]):
        if any(codes):
            break
        time.sleep(0.05)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes, "".join((folder / f"{rank}.err").read_text() for rank in range(SIZE))


def begin(rank, store):
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=DEADLINE_S)
    )


def end():
    dist.barrier()  # gloo fails those that still connect to a rank which has left
    dist.destroy_process_group()


def check_sum(ranks, group):
    """All-reduce rank + 1, as the group and by its name, and gather objects."""
    rank, expected = dist.get_rank(), sum(member + 1 for member in ranks)
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == expected
    assert functional.all_reduce(torch.tensor([rank + 1]), "sum", group).item() == expected
    objects = [None] * len(ranks)
    dist.all_gather_object(objects, rank, group=group)
    assert objects == ranks


def _own_groups(rank, store):
    begin(rank, store)
    for _ in range(2):  # the second time, there is a group of these ranks already
        own = [0, 1] if rank < 2 else [2, 3]
        check_sum(own, dist.new_group(own))
    for own in ([0], [1, 2, 3]), ([3, 0], [1, 2]):
        ranks = next(sorted(part) for part in own if rank in part)
        check_sum(ranks, dist.new_group(ranks, backend="cpu:gloo"))
    check_sum([0, 1, 2, 3], dist.new_group())
    end()


def test_own_groups_in_one_call(tmp_path):
    """Each rank names only its own group, without a device_id: sums are right (pytorch#142356, #108732)."""
    codes, said = job(tmp_path, _own_groups)

    assert codes == [0] * SIZE, said
    assert said == ""


def _one_group(rank, store):
    begin(rank, store)
    dist.new_group([0, 1])
    end()


def _no_group(rank, store):
    begin(rank, store)
    end()


def test_strategies_that_differ(tmp_path):
    """Without a device_id too, ranks that differ are told so, not left to wait for keys that never come."""
    codes, said = job(tmp_path, _one_group, {1: {"TORCHCOMMSHIM": "observe"}})

    assert any(codes)
    assert re.search(r"AgreementError(.|\n)* rank 1\b", said), said


def test_ranks_that_differ_and_make_no_group(tmp_path):
    """Where nothing is made otherwise than torch does it, ranks may differ."""
    codes, said = job(tmp_path, _no_group, {1: {"TORCHCOMMSHIM": "off"}})

    assert (codes, said) == ([0] * SIZE, "")


def _several_worlds(rank, store):
    for _ in range(3):
        begin(rank, store)
        own = [0, 1] if rank < 2 else [2, 3]
        check_sum(own, dist.new_group(own))
        check_sum([1, 2, 3], dist.new_group([1, 2, 3])) if rank else dist.new_group([1, 2, 3])
        if rank in (0, 2):
            check_sum([0, 2], dist.new_group([0, 2], use_local_synchronization=True))
        end()
    assert torchcommshim.status()["repairs"]["earlier-world"] == 2


@pytest.mark.parametrize("strategy", ["auto", "strip", "split"])
def test_worlds_made_anew(tmp_path, strategy):
    """Init, destroy, init over one store: each world's groups have their own keys (pytorch#114585)."""
    codes, said = job(tmp_path, _several_worlds, {rank: {"TORCHCOMMSHIM": strategy} for rank in range(SIZE)})

    assert codes == [0] * SIZE, said


def _worlds_without_a_pause(rank, store):
    for number in range(3):
        time.sleep(0.2 * (rank == number))
        begin(rank, store)
        dist.destroy_process_group()


def test_worlds_made_anew_at_once(tmp_path):
    """Ranks that are ahead wait for the marks of those that still make the world before."""
    codes, said = job(tmp_path, _worlds_without_a_pause)

    assert codes == [0] * SIZE, said
