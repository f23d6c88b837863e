# SPDX-License-Identifier: Apache-2.0
"""How ranks are written for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def spans(ranks: Iterable[int]) -> str:
    """Ranks in ascending order, neighbours joined: `0-3, 7`; cut after eight spans."""
    found = list(_spans(sorted(ranks)))
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found[:8])
    return shown + (f" and {sum(last - first + 1 for first, last in found[8:])} more" if found[8:] else "")


def listed(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) != 1 else ''} {spans(ranks)}"


def group(ranks: Iterable[int]) -> str:
    """A group's ranks in its own order, shortened if they are many: `[0, 8, ... 56] of 8`."""
    ranks = list(ranks)
    if len(ranks) <= 8:
        return str(ranks)
    return f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] of {len(ranks)}"


def _spans(ranks: list[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for rank in ranks:
        if last is not None and rank == last + 1:
            last = rank
            continue
        if first is not None and last is not None:
            yield first, last
        first = last = rank
    if first is not None and last is not None:
        yield first, last
