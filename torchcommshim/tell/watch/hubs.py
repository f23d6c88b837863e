# SPDX-License-Identifier: Apache-2.0
"""Which watcher is the hub of a world: what ranks leave in the store to find it.

A store may serve several worlds: one after the other in the same processes, or, by mistake, those of two
jobs.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torchcommshim.tell.agreement import PREFIX, Counter

_COUNTER = f"{PREFIX}/watch"
_SIZES = 1 << 24  # the counter's upper bits sum up the world sizes of the ranks that its lower ones count

Address = dict[str, Any]


class Found(NamedTuple):
    """What a rank finds.

    Attributes:
        hub: what the first rank of this world has written of itself.
        other: the same of another world over this store, if this rank is its own world's first.
    """

    hub: Address
    other: Address | None = None


def find(store: Any, size: int, mine: Address) -> Found:
    """Whoever comes first in this world is its hub: two store operations, neither of which waits.

    Where ranks of another world size have come to the same store, and for the first rank of a later world, it
    takes a few more.
    """
    come, sizes = _counted(store.add(_COUNTER, 1 + size * _SIZES))
    if sizes == come * size:
        before = (come - 1) // size * size
    else:
        before = Counter.join(store, f"{_COUNTER}/{size}", size).before
    hub: Address = json.loads(store.compare_set(_key(size, before), "", json.dumps(mine)))
    return Found(hub, _latest(store, come - 1, sizes - size) if hub == mine else None)


def look(store: Any) -> Address | None:
    """The hub of those that have come last, without coming oneself."""
    return _latest(store, *_counted(store.add(_COUNTER, 0)))


def _latest(store: Any, come: int, sizes: int) -> Address | None:
    """The hub of the world to which the last of `come` ranks belongs, whose world sizes sum up to `sizes`."""
    if not come or sizes % come:
        return None
    size = sizes // come
    key = _key(size, (come - 1) // size * size)
    return json.loads(store.get(key)) if store.check([key]) else None


def _counted(value: int) -> tuple[int, int]:
    """How many ranks have come, and the sum of their world sizes."""
    return value % _SIZES, value // _SIZES


def _key(size: int, before: int) -> str:
    return f"{PREFIX}/hub/{size}/{before}"
