# SPDX-License-Identifier: Apache-2.0
"""Do all ranks run the same shim, with the same settings, on a torch of the same traits?

A decision about a creation is only right if every rank takes it.  A shim on half of the ranks breaks
jobs that ran by luck before, so ranks compare what they are before a group is made otherwise than torch
does it: those of a world that was given a device_id as soon as it is made, others before their first such
group.

Each rank posts a statement in the world's store before it connects, and adds one to two counters: of the
ranks that posted this very statement, and of all that posted.  A rank that sees the first one full knows in
one look that all agree.  Where the two differ, somebody else posted something else; then, and where the
world has waited for all ranks and some are missing, a rank reads the posts and names who differs.  A rank
that posted nothing is an error only once it must have posted: until then it may just be slow.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Mapping

from torchcommshim.ranges import named
from torchcommshim.tell.report import say

PREFIX = "torchcommshim"
_NAMED_AT_MOST = 8
_FIRST_NOTICE_S = 20.0
_SLOWEST_POLL_S = 1.0


class AgreementError(RuntimeError):
    """Ranks do not run the same shim, settings and traits; the message names them."""


@dataclass(frozen=True)
class Counter:
    """Counts ranks in a store that may have served earlier worlds.

    Attributes:
        store, key: where it is.
        before: its value before the first rank of this world.
    """

    store: Any
    key: str
    before: int

    @classmethod
    def join(cls, store: Any, key: str, size: int) -> Counter:
        """Count this rank, of a world of `size` ranks."""
        return cls(store, key, before=(store.add(key, 1) - 1) // size * size)

    def ranks(self) -> int:
        """How many ranks of this world have been counted so far."""
        return int(self.store.add(self.key, 0)) - self.before


@dataclass(frozen=True)
class Post:
    """What one rank posted.

    Attributes:
        store: the world's store, under a prefix of ours.
        rank, size: of this rank, in the world.
        statement: what must be equal on all ranks.
        alike: counts the ranks that posted this statement.
        all: counts the ranks that posted any.
    """

    store: Any
    rank: int
    size: int
    statement: Mapping[str, str]
    alike: Counter
    all: Counter


def post(store: Any, rank: int, size: int, statement: Mapping[str, str]) -> Post:
    """Post this rank's statement in `store` (a torch.distributed Store); returns at once."""
    store.set(f"rank/{rank}", json.dumps({**statement, "host": socket.gethostname()}))
    # `add` is answered, `set` is not: once a rank is counted, its post has arrived as well.
    digest = hashlib.sha256(json.dumps(statement, sort_keys=True).encode()).hexdigest()[:16]
    alike = Counter.join(store, f"alike/{size}/{digest}", size)
    return Post(store, rank, size, dict(statement), alike, Counter.join(store, f"all/{size}", size))


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
    while (alike := mine.alike.ranks()) < mine.size:
        waited = time.monotonic() - start
        # Reading every post takes an operation a rank: not while all that has come is alike.
        if connected or mine.all.ranks() != alike or waited > timeout_s:
            differing, absent, hosts = _compare(mine)
            if differing or (absent and (connected or waited > timeout_s)):
                raise AgreementError(_message(mine, differing, absent, hosts))
            if not absent:
                return
        if waited > _FIRST_NOTICE_S and not noticed and mine.rank == 0:
            noticed, absent = True, _compare(mine)[1]
            if absent:
                say(f"rank 0 waits for the other ranks; not heard yet: {named(absent)} [TCS-ranks-late]")
        time.sleep(pause)
        pause = min(2 * pause, _SLOWEST_POLL_S)


def glance(mine: Post) -> None:
    """Compare with those who have posted so far, and wait for nobody.

    Raises:
        AgreementError: as `confirm`.
    """
    if mine.all.ranks() != mine.alike.ranks():
        differing, _, hosts = _compare(mine)
        if differing:
            raise AgreementError(_message(mine, differing, [], hosts))


def _compare(mine: Post) -> tuple[dict[int, dict[str, str]], list[int], dict[int, str]]:
    """The posts that differ from this rank's, the ranks that have not posted, and the others' hosts."""
    differing: dict[int, dict[str, str]] = {}
    absent, hosts = [], {}
    for rank in range(mine.size):
        key = f"rank/{rank}"
        if not mine.store.check([key]):
            absent.append(rank)
            continue
        theirs = json.loads(mine.store.get(key))
        hosts[rank] = str(theirs.get("host"))
        if any(theirs.get(name) != value for name, value in mine.statement.items()):
            differing[rank] = theirs
    return differing, absent, hosts


def _message(
    mine: Post, differing: dict[int, dict[str, str]], absent: list[int], hosts: dict[int, str]
) -> str:
    lines = ["ranks do not agree, so making groups would hang or give wrong sums: [TCS-ranks-differ]"]
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
        by_host: dict[str | None, list[int]] = {}
        for rank in absent:
            by_host.setdefault(_host_beside(rank, hosts), []).append(rank)
        where = "; ".join(named(ranks) + (f" on {host}" if host else "") for host, ranks in by_host.items())
        lines.append(
            f"  {where}: posted nothing: torchcommshim or its agreement is missing or off there; "
            f"rank {mine.rank} on {socket.gethostname()}: "
            + ", ".join(f"{name} {value!r}" for name, value in mine.statement.items())
        )
    lines.append(
        "Install the same torchcommshim on every node and set its variables alike; "
        "TORCHCOMMSHIM_AGREEMENT=warn goes on at your own risk."
    )
    return "\n".join(lines)


def _host_beside(rank: int, hosts: dict[int, str]) -> str | None:
    """The host of a rank that posted nothing, where torchrun puts it beside one that did."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = int(text) if text.isdigit() else 0
    if not per_node:
        return None
    first = rank - rank % per_node
    return next((hosts[near] for near in range(first, first + per_node) if near in hosts), None)
