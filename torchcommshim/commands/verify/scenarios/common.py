# SPDX-License-Identifier: Apache-2.0
"""What the scenarios share: the devices, the world, the check of a sum, the end."""

from __future__ import annotations

import os
import sys
import time
from typing import Iterable, Sequence

import torch
import torch.distributed as dist

GPU = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

# Where tensors live: on this rank's GPU; or on the CPU, where there is no GPU and NCCL is simulated.
DEVICE = GPU if torch.cuda.is_available() else torch.device("cpu")

_wrong: list[list[int]] = []


def start(backend: str = "nccl") -> tuple[int, int]:
    """Make a world bound to this rank's GPU, of NCCL by default; returns rank and number of ranks."""
    dist.init_process_group(backend, device_id=GPU)
    return dist.get_rank(), dist.get_world_size()


def check_sum(
    members: Iterable[int], group: dist.ProcessGroup | None = None, device: torch.device | str = DEVICE
) -> None:
    """All-reduce rank + 1 over a group whose members should be these, and say so if the sum is wrong."""
    ranks, rank = list(members), dist.get_rank()
    if rank not in ranks:
        return
    tensor = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(tensor, group=group)
    got = tensor.item()  # waits for the GPU
    expected = sum(member + 1 for member in ranks)
    if got != expected:
        _wrong.append(ranks)
        print(f"WRONG group {ranks}: rank {rank} got {got:.0f}, expected {expected}", flush=True)


def split(parts: Sequence[Sequence[int]], device: torch.device | str = DEVICE) -> dist.ProcessGroup | None:
    """Split the world into these parts and sum over each; this rank's group, None if it is in no part.

    Where torch has no `split_group`, or the world is not bound, it makes a group for each part, as meshes do.
    """
    if hasattr(dist, "split_group") and dist.distributed_c10d._get_default_group().bound_device_id:
        mine = dist.split_group(None, [list(ranks) for ranks in parts])
    else:
        groups = [(ranks, dist.new_group(list(ranks))) for ranks in parts]
        mine = next((group for ranks, group in groups if dist.get_rank() in ranks), None)
    for ranks in parts:
        check_sum(ranks, mine, device)
    return mine


def halves(size: int) -> list[range]:
    """The ranks of the world's first half, and the others."""
    return [range(size // 2), range(size // 2, size)]


def alternate(size: int) -> list[range]:
    """The even ranks, and the odd ones."""
    return [range(0, size, 2), range(1, size, 2)]


def finish() -> None:
    """Wait until every rank has said what it saw, then leave: with 1 if a sum was wrong here."""
    dist.barrier()
    # The first ranks out must not end their communicators yet: torch 2.4 aborts them, and what they
    # have still to send to the last ones is lost.
    _count("out of the barrier", wait=True)
    _count("leaving", wait=dist.get_rank() == 0)  # rank 0 may hold the store, so it goes last
    dist.destroy_process_group()
    sys.exit(bool(_wrong))


def _count(step: str, wait: bool) -> None:
    """Count this rank at `step`; with `wait`, return when all are."""
    store = dist.distributed_c10d._get_default_store()
    store.add(step, 1)
    while wait and store.add(step, 0) < dist.get_world_size():
        time.sleep(0.01)
