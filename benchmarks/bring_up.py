# SPDX-License-Identifier: Apache-2.0
"""A real job's start on real NCCL: Megatron's groups, 82 for 8 ranks, from init until all have been used.

As many ranks as GPUs, where there are 4 or more; else 8.

Seconds, the slowest rank's: of `init_process_group`, of making the groups, and of the first barrier and a
checked all-reduce on each group.  The memory is what a rank's GPU has less of afterwards, in MiB a rank: the
communicators' own, since nothing else is allocated.
"""

from __future__ import annotations

import math
import os
import sys
import time
from functools import partial
from typing import Any

import ranks
from ranks import Condition, Meeting, Series
from sampling import alternate

from torchcommshim.commands.verify.catalogue import FOLDER

RANKS = 8
LAZY = "without device_id"  # plain lazy initialisation, the shim off
EAGER = "without the shim"  # native eager splitting; torch 2.3 and 2.4 hang


def measure(quick: bool, seconds: float = 120) -> dict[str, Any]:
    """Bring the job up in each way by turns, as often as fits into `seconds`."""
    machine = ranks.machine(without_gpu=quick)
    ways = {LAZY: Condition("off", bound=False)}
    if tuple(map(int, machine["torch"].split(".")[:2])) >= (2, 5):
        ways[EAGER] = Condition("off")
    ways.update({strategy: Condition(strategy) for strategy in ("auto", "split", "strip")})
    gpus = len(machine["gpus"])
    size = 4 if quick else gpus if gpus >= 4 else RANKS  # the layout has 4 stages
    series = Series("gpu-bring-up", bring_up, size, machine, seconds)
    alternate({way: partial(series.run, way, ways[way]) for way in ways}, 1 if quick else 20, seconds)
    return series.result(base=LAZY, of="total")


def bring_up(meeting: Meeting, bound: bool) -> dict[str, float]:
    """One rank's part."""
    sys.path.insert(0, str(FOLDER))
    import common
    import megatron
    import torch
    import torch.distributed as dist

    real = torch.cuda.is_available()
    if real:
        torch.cuda.set_device(common.GPU)
        torch.ones(1, device=common.GPU).item()  # the context, which is not to be counted
    meeting.wait()
    before = _used(torch) if real else 0
    # Apart, since a rank that comes before the store listens tries again a second later.
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), meeting.size, meeting.rank == 0)
    place = {"store": store, "rank": meeting.rank, "world_size": meeting.size}
    meeting.wait()
    clock = [time.monotonic()]
    dist.init_process_group("nccl", **place, **({"device_id": common.GPU} if bound else {}))
    clock.append(time.monotonic())
    made = [
        (members, backend, dist.new_group(members, backend=None if backend == "nccl" else backend))
        for members, backend in megatron.creations(meeting.size)
    ]
    clock.append(time.monotonic())
    dist.barrier()
    for members, backend, group in made:
        common.check_sum(members, group, common.DEVICE if backend == "nccl" else "cpu")
    clock.append(time.monotonic())
    if common._wrong:
        raise RuntimeError(f"wrong sums in groups {common._wrong}")
    meeting.wait()
    # Ranks may share a GPU: what all on it have taken, by rank.
    sharing = math.ceil(meeting.size / torch.cuda.device_count()) if real else 1
    memory = (_used(torch) - before) / sharing / 2**20 if real else 0
    meeting.wait()
    init, groups, use = (later - earlier for earlier, later in zip(clock, clock[1:]))
    return {"init": init, "groups": groups, "use": use, "total": clock[-1] - clock[0], "memory_mib": memory}


def _used(torch: Any) -> int:
    """Bytes in use on this rank's GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
