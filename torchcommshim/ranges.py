# SPDX-License-Identifier: Apache-2.0
"""Lists of ranks as short text: `0-31,40`, and `0-4088/8` for every eighth."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_PART = re.compile(r"(-?\d+)(?:-(-?\d+))?(?:/(\d+))?")


def shortened(ranks: Sequence[int]) -> str:
    """The text for `ranks`, in their order; nothing is left out."""
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
    for first, last, step in _PART.findall(text):
        ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(ranks)


def cut(ranks: Sequence[int], width: int = 60) -> str:
    """As `shortened`, for people: after `width` characters the rest is counted, `0-3,7,12 and 52 more`."""
    text = shortened(ranks)
    if len(text) <= width:
        return text
    shown = text[: width + 1].rpartition(",")[0] or text.partition(",")[0]
    return f"{shown} and {len(ranks) - len(expanded(shown))} more"


def bracketed(ranks: Sequence[int]) -> str:
    """A group, in its own order: `[0-31,40]`."""
    return f"[{cut(ranks)}]"


def named(ranks: Collection[int], one: str = "", several: str = "") -> str:
    """Ranks in a sentence, ascending, and the verb for one or several: `rank 3 waits`, `ranks 0-3,7 wait`."""
    noun, verb = ("rank", one) if len(ranks) == 1 else ("ranks", several)
    return f"{noun} {cut(sorted(ranks))} {verb}".rstrip()


def _end_of_run(ranks: Sequence[int], start: int) -> int:
    """Where the ranks from `start` on that ascend by equal steps end."""
    end = start + 1
    while end < len(ranks) and ranks[end] - ranks[end - 1] == ranks[start + 1] - ranks[start] > 0:
        end += 1
    return end
