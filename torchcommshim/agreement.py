# SPDX-License-Identifier: Apache-2.0
"""Do all ranks run the same shim, strategy and traits?

A decision about a creation is only right if every rank takes it.  A shim on half of the ranks breaks
jobs that ran by luck before, so ranks of a world that was given a device_id compare what they are
before it makes a group.

Each rank posts a statement in the world's store before it connects, then adds one to a counter named
by that statement.  Where making the world waits for all ranks, a rank that sees the counter full knows
in one look that all agree; else it reads the posts and names who differs.  A rank that posted nothing
is an error only once it must have posted: until then it may just be slow.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Mapping

from torchcommshim.report import say

PREFIX = "torchcommshim"
_NAMED_AT_MOST = 8
_FIRST_NOTICE_S = 20.0
_SLOWEST_POLL_S = 1.0


class AgreementError(RuntimeError):
    """Ranks do not run the same shim, strategy and traits; the message names them."""


@dataclass(frozen=True)
class Post:
    """What one rank posted.

    Attributes:
        store: the world's store, under a prefix of ours.
        rank, size: of this rank, in the world.
        statement: what must be equal on all ranks.
        counter: the key that counts the ranks that posted this statement.
        target: the value of `counter` once all ranks have; a store may have served earlier worlds.
    """

    store: Any
    rank: int
    size: int
    statement: Mapping[str, str]
    counter: str
    target: int


def post(store: Any, rank: int, size: int, statement: Mapping[str, str]) -> Post:
    """Post this rank's statement in `store` (a torch.distributed Store); returns at once."""
    text = json.dumps({**statement, "host": socket.gethostname()}, sort_keys=True)
    counter = "agree/" + hashlib.sha256(json.dumps(statement, sort_keys=True).encode()).hexdigest()[:16]
    store.set(f"rank/{rank}", text)
    # `add` is answered, `set` is not: once it returns, the post above has arrived as well.
    order = store.add(counter, 1)
    return Post(store, rank, size, dict(statement), counter, target=-(-order // size) * size)


def confirm(mine: Post, *, connected: bool, timeout_s: float) -> None:
    """Return when all ranks have posted what this one has.

    Args:
        mine: this rank's post.
        connected: making the world has waited for all ranks, so a rank without a post has no shim.
        timeout_s: how long to wait for posts otherwise, in seconds.

    Raises:
        AgreementError: names each rank that differs, its host and both values.
    """
    start, pause, noticed = time.monotonic(), 0.02, False
    while mine.store.add(mine.counter, 0) < mine.target:
        differing, absent = _compare(mine)
        waited = time.monotonic() - start
        if differing or (absent and (connected or waited > timeout_s)):
            raise AgreementError(_message(mine, differing, absent))
        if not absent:
            return
        if waited > _FIRST_NOTICE_S and not noticed:
            noticed = True
            say(f"rank {mine.rank} waits for the other ranks; not heard yet: {_listed(absent)}")
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL_S)


def _compare(mine: Post) -> tuple[dict[int, dict[str, str]], list[int]]:
    """The posts that differ from this rank's, and the ranks that have not posted."""
    differing: dict[int, dict[str, str]] = {}
    absent = []
    for rank in range(mine.size):
        key = f"rank/{rank}"
        if not mine.store.check([key]):
            absent.append(rank)
            continue
        theirs = json.loads(mine.store.get(key))
        if any(theirs.get(name) != value for name, value in mine.statement.items()):
            differing[rank] = theirs
    return differing, absent


def _message(mine: Post, differing: dict[int, dict[str, str]], absent: list[int]) -> str:
    lines = ["ranks do not agree, so making groups would hang or give wrong sums:"]
    for rank, theirs in list(differing.items())[:_NAMED_AT_MOST]:
        lines += [
            f"  rank {rank} on {theirs.get('host')}: {name} {theirs.get(name)!r}; "
            f"rank {mine.rank} on {socket.gethostname()}: {name} {value!r}"
            for name, value in mine.statement.items()
            if theirs.get(name) != value
        ]
    if len(differing) > _NAMED_AT_MOST:
        lines.append(f"  and {len(differing) - _NAMED_AT_MOST} more ranks")
    if absent:
        host = _host_beside(mine, absent[0])
        lines.append(
            f"  rank {_listed(absent)}{f' on {host}' if host else ''}: posted nothing, so torchcommshim is "
            f"missing or off there; rank {mine.rank} on {socket.gethostname()}: "
            + ", ".join(f"{name} {value!r}" for name, value in mine.statement.items())
        )
    lines.append(
        "Install the same torchcommshim on every node and set TORCHCOMMSHIM alike; "
        "TORCHCOMMSHIM_AGREEMENT=warn goes on at your own risk."
    )
    return "\n".join(lines)


def _host_beside(mine: Post, rank: int) -> str | None:
    """The host of a rank that posted nothing, where torchrun puts it beside one that did."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if not per_node:
        return None
    first = rank - rank % per_node
    for neighbour in range(first, min(first + per_node, mine.size)):
        key = f"rank/{neighbour}"
        if mine.store.check([key]):
            return str(json.loads(mine.store.get(key)).get("host"))
    return None


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED_AT_MOST]))
    return shown + (f" and {len(ranks) - _NAMED_AT_MOST} more" if len(ranks) > _NAMED_AT_MOST else "")
