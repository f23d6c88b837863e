# SPDX-License-Identifier: Apache-2.0
"""What comparing the ranks costs in operations on the world's store.

    python benchmarks/store_traffic.py          # 1,000 creations, 8 to 4,096 ranks: about 10 minutes
    python benchmarks/store_traffic.py --ranks 8 64 --creations 100

Every rank runs the code that real ranks run, over a store that counts.  Only time is simulated: a rank comes
to a creation at some moment of the 10 ms after it was done with the one before, and an operation takes no
time.  So the counts hold for ranks that come within 10 ms of each other; one that waits longer asks again
after pauses that double, up to a quarter of a second and more (`torchcommshim/tell/order.py`).  Where ranks
are many, fewer creations are simulated, and the rest is taken to cost what the second half of them did.

Counted is what the busiest rank does: writes (`set`, `compare_set`, `add`) + looks (`add` of nothing,
`check`, `get`).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from typing import Any, Callable, Iterable, Iterator, NamedTuple

from torchcommshim.repair.calls import Call
from torchcommshim.repair.creations import COLLECTIVE, LOCAL
from torchcommshim.tell import agreement
from torchcommshim.tell.order import Board, Comparison
from torchcommshim.tell.watch import hubs

SPREAD_S = 0.01
GROUP = 8
SIMULATED = 2**17  # creations of all ranks together


class Count(NamedTuple):
    """Operations on the store."""

    writes: int
    looks: int


class CountingStore:
    """One rank's client of a store in memory; counts its operations."""

    def __init__(self, shared: dict[str, Any]) -> None:
        self._shared = shared
        self.count = Count(0, 0)

    def set(self, key: str, value: str) -> None:
        self._wrote()
        self._shared[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._wrote()
        if self._shared.get(key, b"") == expected.encode():
            self._shared[key] = desired.encode()
        return self._shared.get(key, expected.encode())

    def add(self, key: str, amount: int) -> int:
        self._wrote() if amount else self._looked()
        self._shared[key] = self._shared.get(key, 0) + amount
        return self._shared[key]

    def check(self, keys: list[str]) -> bool:
        self._looked()
        return all(key in self._shared for key in keys)

    def get(self, key: str) -> bytes:
        self._looked()
        return self._shared[key]

    def _wrote(self) -> None:
        self.count = Count(self.count.writes + 1, self.count.looks)

    def _looked(self) -> None:
        self.count = Count(self.count.writes, self.count.looks + 1)


def play(ranks: Iterable[Iterator[float]]) -> dict[int, Exception]:
    """Run ranks together in simulated time; each yields how long it pauses, in seconds.

    Returns:
        What each rank that failed has raised, by rank.
    """
    ranks, tie, errors = list(ranks), itertools.count(), {}
    due = [(0.0, next(tie), rank) for rank in range(len(ranks))]
    while due:
        now, _, rank = heapq.heappop(due)
        try:
            heapq.heappush(due, (now + next(ranks[rank]), next(tie), rank))
        except StopIteration:
            pass
        except Exception as error:
            errors[rank] = error
    return errors


def open_world(stores: list[Any], timeout_s: float = 600.0) -> list[Comparison]:
    """Each rank's side of a new world."""
    sides = [
        Comparison(Board(store, "order/"), rank, len(stores), timeout_s) for rank, store in enumerate(stores)
    ]
    for side in sides:
        side.open()
        side.join()
    return sides


def one_list(rank: int, size: int, turn: int) -> tuple[str, tuple[int, ...]]:
    """All ranks name the same group, as most programs do."""
    first = GROUP * (turn % (size // GROUP))
    return COLLECTIVE, tuple(range(first, first + GROUP))


def own_lists(rank: int, size: int, turn: int) -> tuple[str, tuple[int, ...]]:
    """In one call, each rank names its own group."""
    first = rank - rank % GROUP
    return COLLECTIVE, tuple(range(first, first + GROUP))


def local_groups(rank: int, size: int, turn: int) -> tuple[str, tuple[int, ...]]:
    """Groups by local synchronization, whose members connect at once."""
    return LOCAL, own_lists(rank, size, turn)[1]


def count_order(size: int, creations: int, program: Callable[..., Any]) -> tuple[int, int, int]:
    """Writes and looks of the busiest rank, and the keys in the store."""
    simulated = min(creations, max(8, SIMULATED // size))
    shared: dict[str, Any] = {}
    stores = [CountingStore(shared) for _ in range(size)]
    at_half = [Count(0, 0)] * size
    random.seed(size)

    def run(rank: int, side: Comparison) -> Iterator[float]:
        for turn in range(simulated):
            if turn == simulated // 2:
                at_half[rank] = stores[rank].count
            yield random.uniform(0, SPREAD_S)
            kind, group = program(rank, size, turn)
            made = Call(turn + 1, kind, group, "gloo", "", rank, size, shared=True, site="train.py:1 main")
            yield from side.check(made, waits=True)

    errors = play(run(rank, side) for rank, side in enumerate(open_world(stores)))
    assert not errors, errors
    left_out = (creations - simulated) / (simulated - simulated // 2)
    writes = max(
        store.count.writes + left_out * (store.count.writes - half.writes)
        for store, half in zip(stores, at_half)
    )
    looks = max(
        store.count.looks + left_out * (store.count.looks - half.looks)
        for store, half in zip(stores, at_half)
    )
    return round(writes), round(looks), len(shared)


def count_agreement(size: int) -> tuple[int, int]:
    """Writes and looks of the busiest rank for the world's agreement, which is on by default."""
    stores = [CountingStore(shared) for shared in [{}] for _ in range(size)]
    posts = [agreement.post(store, rank, size, {"strategy": "auto"}) for rank, store in enumerate(stores)]
    for post in posts:
        agreement.confirm(post, connected=True, timeout_s=1)
    return max(store.count.writes for store in stores), max(store.count.looks for store in stores)


def count_hang_report(size: int) -> tuple[int, int]:
    """Writes and looks of the busiest rank to find the job's hub, once a world, also on by default."""
    shared: dict[str, Any] = {}
    stores = [CountingStore(shared) for _ in range(size)]
    for rank, store in enumerate(stores):
        hubs.find(store, size, {"rank": rank})
    return max(store.count.writes for store in stores), max(store.count.looks for store in stores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[8 << step for step in range(10)], help="world sizes"
    )
    parser.add_argument("--creations", type=int, default=1000, help="creations of each rank (1000)")
    chosen = parser.parse_args()
    programs = (one_list, own_lists, local_groups)
    # Off, torchcommshim/tell/order.py is not even imported.
    columns = [
        "ranks",
        "agreement",
        "hang report",
        "off",
        *(program.__name__.replace("_", " ") for program in programs),
    ]
    print(f"| {' | '.join(columns)} |\n|{' ---: |' * len(columns)}")
    for size in chosen.ranks:
        counts = [count_agreement(size), count_hang_report(size), (0, 0)]
        counts += [count_order(size, chosen.creations, program)[:2] for program in programs]
        print(
            f"| {size:,} | {' | '.join(f'{writes:,} + {looks:,}' for writes, looks in counts)} |", flush=True
        )


if __name__ == "__main__":
    main()
