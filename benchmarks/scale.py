# SPDX-License-Identifier: Apache-2.0
"""Megatron's groups for up to 16,384 ranks: what one rank does to make and connect them, on paper.

Two ways lead to the numbers.  `counted` applies the shim's own policy to each creation and counts what
follows from torch's rules; a test compares it with the model `torchcommshim.repair.splits`, which plays all
ranks.
`played` has a process pose as rank 0 of so many, runs torch's creation code with the shim, and counts what
torch asks of the backend and of the store.

A split is a call that every rank of the world makes.  NCCL gathers all ranks' colours for it over the
world's bootstrap ring, in which each rank sends `ranks - 1` messages (older releases gather twice:
commGetSplitInfo in NCCL's init.cc).  A group that is connected without a split exchanges an address through
the store, one operation on each of its ranks.  What connecting a group costs beyond that is the same either
way, and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from environments import ROOT, printed_by
from sampling import progress

from torchcommshim.repair.creations import ALL, COLLECTIVE, Creation
from torchcommshim.repair.policy import INDEPENDENT, Decision, decide
from torchcommshim.repair.traits import Traits

Groups = Sequence[tuple[Sequence[int], str]]


@dataclass(frozen=True)
class Layout:
    """How Megatron spreads a model: ranks of a tensor, of a pipeline, and copies of the model."""

    tensor: int
    pipeline: int
    data: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"TP {self.tensor}, PP {self.pipeline}, DP {self.data}"


LAYOUTS = (
    Layout(1, 4, 2),  # the report's
    Layout(2, 4, 4),
    Layout(4, 4, 8),
    Layout(8, 8, 8),
    Layout(8, 16, 16),
    Layout(8, 16, 64),
    Layout(8, 16, 128),
)

# What differs between releases here; the rest is equal in all of them.
RELEASES = {
    "2.3, 2.4": Traits(members_split_late=True, split_ignores_backend=True, split_tests_size=True),
    "2.6 to 2.14": Traits(split_ignores_backend=True, local_names_differ=True),
    "2.15": Traits(local_names_differ=True),
}

# Without the shim, and with each strategy; `lazy` is a world without device_id.
WAYS = ("lazy", "device_id", "auto", "split", "strip")
# The shim's store operations a rank, once a world: the agreement 4, the hang report 2, worlds kept apart 2.
OWN = 8

PLAYED_ON = (8, 512, 16_384)


def creations(layout: Layout) -> Iterator[tuple[list[int], str]]:
    """Yield (ranks, backend) for each group, as the scenario `megatron` does for TP 1 and PP 4."""
    # The axis along which ranks are next to each other comes first.
    extent = {"tp": layout.tensor, "cp": 1, "ep": 1, "dp": layout.data, "pp": layout.pipeline}
    strides = dict(zip(extent, itertools.accumulate([1, *extent.values()], lambda a, b: a * b)))

    def ranks(axes: Iterable[str], start: int = 0) -> list[int]:
        """The ranks that differ from `start` only along `axes`, ascending."""
        found = [start]
        for axis in sorted(axes, key=list(extent).index):
            found = [rank + step * strides[axis] for step in range(extent[axis]) for rank in found]
        return found

    def groups(joined: str) -> Iterator[list[int]]:
        axes = joined.split("-")
        for start in ranks(axis for axis in extent if axis not in axes):
            yield ranks(axes, start)

    def made(*several: str, backends: Sequence[str] = ("nccl",)) -> Iterator[tuple[list[int], str]]:
        for axes in several:
            for members in groups(axes):
                for backend in backends:
                    yield members, backend

    yield from made("dp", "dp-cp", backends=("nccl", "gloo"))
    yield from made("cp", "tp-pp", "tp-ep-pp", "tp")
    for stages in groups("pp"):
        yield stages, "nccl"
        yield [stages[0], stages[-1]], "nccl"  # embedding
        yield [stages[0]], "nccl"  # position embedding
    yield from made("tp-dp-cp", "tp-dp", "tp-cp", "tp-ep", "ep")
    yield from made("dp", backends=("nccl", "gloo"))  # modulo expert parallelism


@dataclass
class Counts:
    """What one rank does.

    Attributes:
        creations: calls of new_group.
        splits: of the world, with a colour.
        nocolor: splits of the world for groups of others.
        store: operations on the store for NCCL's addresses, and the shim's own.
        messages: that it sends over the world's bootstrap ring.
    """

    creations: int = 0
    splits: int = 0
    nocolor: int = 0
    store: int = 0
    messages: int = 0


def counted(groups: Groups, size: int, traits: Traits, way: str, rank: int = 0) -> Counts:
    """What `rank` of `size` does for these groups, of torch with `traits`, in one of `WAYS`."""
    bound = way not in ("lazy", "strip")
    # The world's own communicator finds its ranks through the store, once.
    counts = Counts(store=1 + (OWN if way not in ("lazy", "device_id") else 0))
    for members, backend in groups:
        counts.creations += 1
        nccl = backend == "nccl"
        creation = Creation(
            kind=COLLECTIVE,
            ranks=tuple(members),
            backend=backend,
            world_size=size,
            bound=bound,
            device_backend=backend,
            world_device_backend="nccl",
            world_splits=ALL,
        )
        decision = decide(creation, traits, way) if way not in ("lazy", "device_id") else Decision()
        source = bound and (nccl or traits.split_ignores_backend) and decision.remedy != INDEPENDENT
        if rank not in members:
            counts.nocolor += source
        elif nccl and source:
            counts.splits += 1  # at once, or on first use where members split late
        elif nccl and len(members) > 1:
            counts.store += 1
    counts.messages = (counts.splits + counts.nocolor) * (size - 1)
    return counts


def measure(quick: bool) -> dict[str, Any]:
    """Count each layout, each release and each way; play some."""
    rows = []
    layouts = LAYOUTS[:3] if quick else LAYOUTS
    for layout in layouts:
        progress(f"scale: {layout.ranks} ranks")
        groups = list(creations(layout))
        for release, traits in RELEASES.items():
            for way in WAYS:
                row = {"ranks": layout.ranks, "layout": str(layout), "torch": release, "way": way}
                hangs = way == "device_id" and traits.members_split_late  # what it would do if it did not
                counts = asdict(counted(groups, layout.ranks, traits, way))
                rows.append({**row, "hangs": hangs, **counts})
    plays = []
    for layout in layouts:
        if layout.ranks in PLAYED_ON:
            progress(f"scale: posing as one of {layout.ranks} ranks")
            shape = layout.tensor, layout.pipeline, layout.data
            plays.append({"ranks": layout.ranks, **printed_by("scale.py", *shape)})
    return {"counted": rows, "played": plays, "own": OWN}


def played(layout: Layout, way: str) -> dict[str, Any]:
    """Pose as rank 0 and make the groups; what torch asked of the backend and of the store."""
    import posing
    import recorder
    import torch.distributed as dist

    shim = posing.Shimmed(
        {
            "TORCHCOMMSHIM": "off" if way in ("lazy", "device_id") else way,
            "TORCHCOMMSHIM_AGREEMENT": "error",
        }
    )
    shim.use()
    store = posing.Store(layout.ranks)
    backend = posing.make_world("watched", layout.ranks, store)
    recorder.events.clear()
    groups = list(creations(layout))
    began = time.thread_time()
    for members, name in groups:
        dist.new_group(members, backend=backend if name == "nccl" else "other")
    seconds = time.thread_time() - began
    dist.destroy_process_group()
    return {
        "creations": len(groups),
        "nocolor": sum(kind == "nocolor" for kind, _ in recorder.events),
        "store": sum(store.operations.values()),
        "seconds": round(seconds, 3),
    }


def main() -> None:
    """Play one layout in this process, in each way, and print the result."""
    parser = argparse.ArgumentParser()
    for name in ("tensor", "pipeline", "data"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    import posing
    import torch

    posing.pretend_gpus()
    layout = Layout(args.tensor, args.pipeline, args.data)
    ways = {way: played(layout, way) for way in ("device_id", "auto", "strip")}
    print(json.dumps({"torch": torch.__version__, "ways": ways}))


if __name__ == "__main__":
    main()
