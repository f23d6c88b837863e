# SPDX-License-Identifier: Apache-2.0
"""A world that is made anew over a store which has served one before: init, destroy, init.

torch names worlds and their groups alike, so ranks of the second one read what the first has left in the
store: addresses at which nobody answers, and ids of communicators that are gone (pytorch#114585).  A prefix
keeps the keys apart, if every rank uses the same one.

Each rank counts the worlds that it begins, of each size, and marks each that it has made.  The first rank to
begin its n-th world decides for all whether the keys of n-th worlds get a prefix: they do if it has made the
one before itself, in this process, and all other ranks have made that one too.  Where a world failed on a
rank, a process took another's place, or a mark does not come, counts may differ from rank to rank: from then
on all keys over that store stay torch's own, as they are in a first world.

A store that torchrun gives anew to each attempt, or under a prefix of the attempt, has had no world before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_PREFIX = "torchcommshim/world"
_PATIENCE = timedelta(seconds=10)  # a rank marks a world as soon as it has made it
_APART, _TORCHS_OWN = "apart", "torch's own"
_here = os.urandom(8).hex()


@dataclass(frozen=True)
class Turn:
    """One of the worlds over a store, on one of its ranks.

    Attributes:
        store: the world's, without a prefix for this turn.
        rank, size: of this rank, and of the world.
        number: of the worlds of this size that this rank has begun over the store before.
        apart: its keys are kept apart from those of earlier worlds; the same on all ranks of that number.
    """

    store: Any
    rank: int
    size: int
    number: int
    apart: bool = False

    @property
    def prefix(self) -> str:
        """What the keys of this world get in front of them; empty for nothing."""
        return f"{_PREFIX}/{self.number}" if self.apart else ""

    def end(self, failed: bool) -> None:
        """Mark how making the world has ended on this rank."""
        if failed:
            self.store.add(_uneven(self.size), 1)
        else:
            self.store.set(_mark(self.size, self.number, self.rank), _process())


def begin(store: Any, rank: int, size: int, timeout: timedelta) -> Turn:
    """Begin a world of `size` ranks over `store` (a torch.distributed Store).

    A first world waits for nobody; a later one for a moment, up to `timeout`, for ranks that are making the
    one before.
    """
    number = store.add(f"{_PREFIX}/{size}/begun/{rank}", 1) - 1
    if not number:
        return Turn(store, rank, size, number)
    wanted = _APART if _are_even(store, rank, size, number - 1, timeout) else _TORCHS_OWN
    if wanted == _TORCHS_OWN:
        store.add(_uneven(size), 1)
    decided = store.compare_set(f"{_PREFIX}/{size}/{number}/decided", "", wanted)
    return Turn(store, rank, size, number, apart=bytes(decided) == _APART.encode())


def _are_even(store: Any, rank: int, size: int, before: int, timeout: timedelta) -> bool:
    """All ranks have made world `before`, this one in this process, and no rank is ahead of the others."""
    own = _mark(size, before, rank)
    if store.add(_uneven(size), 0) or not store.check([own]) or bytes(store.get(own)) != _process().encode():
        return False
    try:
        store.wait([_mark(size, before, other) for other in range(size)], min(timeout, _PATIENCE))
    except Exception:  # each store has its own for a time-out
        return False
    return bool(store.add(_uneven(size), 0) == 0)


def _process() -> str:
    return f"{_here}/{os.getpid()}"


def _mark(size: int, number: int, rank: int) -> str:
    return f"{_PREFIX}/{size}/{number}/made/{rank}"


def _uneven(size: int) -> str:
    return f"{_PREFIX}/{size}/uneven"
