# SPDX-License-Identifier: Apache-2.0
"""Pipeline steps whose unbatched sends and receives run beside a collective on the same group.

On torch 2.9 to 2.14, a group that is bound to a device has one communicator for both, so a send waits for the
collective that was started before it (pytorch#156748); otherwise each pair of ranks has one of its own.  A
step starts an all-reduce, passes micro-batches down the line of ranks while that is under way, and waits for
it.  Milliseconds a step, the slowest rank's; and each part of it alone, for comparison.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import Any

import ranks
from ranks import Condition, Meeting, Series
from sampling import alternate

RANKS = 4
STEPS = 30
WARM_UP = 5
MICRO_BATCHES = 16
ACTIVATIONS = 1 << 18  # bytes of one micro-batch
GRADIENTS = 1 << 25  # bytes that the all-reduce adds up

LAZY = "without device_id"
WAYS = {
    "bound, without the shim": Condition("off"),
    "bound, auto": Condition("auto"),
    "bound, strip": Condition("strip"),
    LAZY: Condition("off", bound=False),
}


def measure(quick: bool, seconds: float = 120) -> dict[str, Any]:
    """Run the steps in each way by turns, as often as fits into `seconds`."""
    machine = ranks.machine(without_gpu=quick)
    series = Series("gpu-p2p", steps, 2 if quick else RANKS, machine, seconds)
    alternate({way: partial(series.run, way, WAYS[way]) for way in WAYS}, 1 if quick else 10, seconds)
    shape = {"micro_batches": MICRO_BATCHES, "activations": ACTIVATIONS, "gradients": GRADIENTS}
    return {**series.result(base=LAZY, of="step"), **shape}


def steps(meeting: Meeting, bound: bool) -> dict[str, float]:
    """One rank's part: the median time of a step, of its sends alone and of its all-reduce alone, in ms."""
    import torch
    import torch.distributed as dist

    real = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    place = device if real else torch.device("cpu")
    if real:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl", **({"device_id": device} if bound else {}))
    group = dist.new_group(list(range(meeting.size)))
    gradients = torch.ones(GRADIENTS // 4, device=place)
    activations = torch.ones(ACTIVATIONS // 4, device=place)
    rank, last = meeting.rank, meeting.size - 1

    def reduce() -> Any:
        return dist.all_reduce(gradients, group=group, async_op=True)

    def pass_on() -> None:
        for _ in range(MICRO_BATCHES):
            if rank > 0:
                dist.recv(activations, rank - 1, group=group)
            if rank < last:
                dist.send(activations, rank + 1, group=group)

    def step() -> None:
        under_way = reduce()
        pass_on()
        under_way.wait()

    def timed(work: Any) -> float:
        times = []
        for number in range(WARM_UP + STEPS if real else 2):
            meeting.wait()
            began = time.perf_counter()
            work()
            if real:
                torch.cuda.synchronize()
            if number >= (WARM_UP if real else 0):
                times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)

    # Alone first: pairs of ranks connect while nothing else is under way.
    sends, all_reduce = timed(pass_on), timed(lambda: reduce().wait())
    return {"step": timed(step), "sends": sends, "all_reduce": all_reduce}
