# SPDX-License-Identifier: Apache-2.0
"""Lists of ranks as short text: `0-31,40`, and `0-4088/8` for every eighth."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(ranks: Sequence[int]) -> str:
    """The text for `ranks`, in their order."""
    parts, start = [], 0
    while start < len(ranks):
        end = _end_of_run(ranks, start)
        if end - start > 2:
            step = ranks[start + 1] - ranks[start]
            parts.append(f"{ranks[start]}-{ranks[end - 1]}" + (f"/{step}" if step > 1 else ""))
            start = end
        else:
            parts.append(str(ranks[start]))
            start += 1
    return ",".join(parts)


def expanded(text: str) -> tuple[int, ...]:
    """The ranks that `shortened` made `text` of."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(ranks)


def _end_of_run(ranks: Sequence[int], start: int) -> int:
    """Where the ranks from `start` on that ascend by equal steps end."""
    end = start + 1
    while end < len(ranks) and ranks[end] - ranks[end - 1] == ranks[start + 1] - ranks[start] > 0:
        end += 1
    return end
