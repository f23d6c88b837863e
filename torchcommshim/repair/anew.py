# SPDX-License-Identifier: Apache-2.0
"""A world that is made anew over a store which has served one before: init, destroy, init.

torch names worlds and their groups alike, so ranks of the second one read what the first has left in the
store: addresses at which nobody answers, and ids of communicators that are gone (pytorch#114585).  A prefix
keeps the keys apart, if every rank uses the same one.

Each rank counts the worlds that it begins, of each size, and marks how each has ended on it.  A rank's n-th
world is the n-th of all of them if all have made the one before without an error.  A rank whose mark is not
there yet may be about to leave it, so the marks are waited for; they come where the program makes the same
worlds on all ranks.  Else the keys stay torch's own, as they are in a first world.

A store that torchrun gives anew to each attempt, or under a prefix of the attempt, has had no world before.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_PREFIX = "torchcommshim/world"


@dataclass(frozen=True)
class Turn:
    """One of the worlds over a store, on one of its ranks.

    Attributes:
        store: the world's, without a prefix for this turn.
        rank, size: of this rank, and of the world.
        number: of the worlds of this size that this rank has begun over the store before.
        alike: all ranks know that number to be the same.
    """

    store: Any
    rank: int
    size: int
    number: int
    alike: bool = True

    @property
    def prefix(self) -> str:
        """What the keys of this world get in front of them; empty for nothing."""
        return f"{_PREFIX}/{self.number}" if self.number and self.alike else ""

    def end(self, failed: bool) -> None:
        """Mark how making the world has ended on this rank."""
        if failed:  # first, so that whoever sees all marks sees this too
            self.store.add(_failed(self.size, self.number), 1)
        self.store.set(_mark(self.size, self.number, self.rank), "")


def begin(store: Any, rank: int, size: int, timeout: timedelta) -> Turn:
    """Begin a world of `size` ranks over `store` (a torch.distributed Store).

    A first world waits for nobody, a later one up to `timeout` for ranks that are making the one before.
    """
    number = store.add(f"{_PREFIX}/{size}/begun/{rank}", 1) - 1
    if not number:
        return Turn(store, rank, size, number)
    try:
        store.wait([_mark(size, number - 1, other) for other in range(size)], timeout)
        alike = store.add(_failed(size, number - 1), 0) == 0
    except Exception:  # each store has its own for a time-out
        alike = False
    return Turn(store, rank, size, number, alike)


def _mark(size: int, number: int, rank: int) -> str:
    return f"{_PREFIX}/{size}/{number}/made/{rank}"


def _failed(size: int, number: int) -> str:
    return f"{_PREFIX}/{size}/{number}/failed"
