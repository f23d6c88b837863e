# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's groups in its order (TP 1, PP 4, 82 creations on 8 ranks), then a collective of each.

torch 2.3 and 2.4: embedding groups do not divide the world evenly, so the ranks' splits do not match.
https://github.com/NVIDIA/Megatron-LM/issues/1027

The order is that of megatron/core/parallel_state.py at Megatron-LM 85bd1f9.  With fewer than 8 ranks, and
with more that 4 does not divide, the layout is the largest that fits; the ranks left over are in no group.
"""

from __future__ import annotations

import itertools
from typing import Iterable, Iterator

import torch.distributed as dist
from common import DEVICE, check_sum, finish, start

MINIMUM_RANKS = 4
PATIENCE = 3  # times the usual deadline: so many groups take their time

PIPELINE_STAGES = 4


def creations(size: int) -> Iterator[tuple[list[int], str]]:
    """Yield (ranks, backend) for each group that Megatron makes for `size` ranks."""
    # The axis along which ranks are next to each other comes first.
    extent = {"tp": 1, "cp": 1, "ep": 1, "dp": size // PIPELINE_STAGES, "pp": PIPELINE_STAGES}

    def groups(joined: str) -> Iterable[list[int]]:
        """Ranks that differ only along these axes, for each place along the others."""
        axes = joined.split("-")
        by_place: dict[tuple[int, ...], list[int]] = {}
        for place in itertools.product(*(range(extent[axis]) for axis in reversed(extent))):
            fixed = tuple(index for axis, index in zip(reversed(extent), place) if axis not in axes)
            rank = 0
            for axis, index in zip(reversed(extent), place):
                rank = rank * extent[axis] + index
            by_place.setdefault(fixed, []).append(rank)
        return by_place.values()

    def both(axes: str) -> Iterator[tuple[list[int], str]]:
        for ranks in groups(axes):
            yield ranks, "nccl"
            yield ranks, "gloo"

    def nccl(*several: str) -> Iterator[tuple[list[int], str]]:
        for axes in several:
            for ranks in groups(axes):
                yield ranks, "nccl"

    yield from both("dp")
    yield from both("dp-cp")
    yield from nccl("cp", "tp-pp", "tp-ep-pp", "tp")
    for stages in groups("pp"):
        yield stages, "nccl"
        yield [stages[0], stages[-1]], "nccl"  # embedding
        yield [stages[0]], "nccl"  # position embedding
    yield from nccl("tp-dp-cp", "tp-dp", "tp-cp", "tp-ep", "ep")
    yield from both("dp")  # modulo expert parallelism


def main() -> None:
    """Make the groups, then use each."""
    _, size = start()
    made = [
        (ranks, backend, dist.new_group(ranks, backend=None if backend == "nccl" else backend))
        for ranks, backend in creations(size - size % PIPELINE_STAGES)
    ]
    dist.barrier()  # Megatron's first collective, in _compile_dependencies
    for ranks, backend, group in made:
        check_sum(ranks, group, DEVICE if backend == "nccl" else "cpu")
    finish()


if __name__ == "__main__":
    main()
