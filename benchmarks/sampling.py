# SPDX-License-Identifier: Apache-2.0
"""Things measured side by side: taken in turn, and compared round by round."""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

RESAMPLINGS = 1000


def alternate(
    conditions: Mapping[str, Callable[[], float]], rounds: int, seconds: float = float("inf")
) -> dict[str, list[float]]:
    """Take each condition once a round, every other round backwards, so that drift meets all alike.

    Args:
        conditions: what to call for a value, by name.
        rounds: how many at most.
        seconds: begin no round that would end after this, going by the longest so far; one is always made.

    Returns:
        the values of each condition, one a round.
    """
    values: dict[str, list[float]] = {name: [] for name in conditions}
    begun, longest = time.monotonic(), 0.0
    for number in range(rounds):
        start = time.monotonic()
        if number and start - begun + longest > seconds:
            break
        for name in list(conditions)[:: -1 if number % 2 else 1]:
            values[name].append(conditions[name]())
        longest = max(longest, time.monotonic() - start)
    return values


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, least and most, and how many values there are; runs that failed are NaN."""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return {"count": 0}
    several = values if len(values) > 1 else values * 2
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    found = {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {**{name: _rounded(value) for name, value in found.items()}, "count": len(values)}


def added(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """What `values` have more than `base`, round by round."""
    return [value - less for value, less in zip(values, base)]


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The ratio of two medians, and the interval that holds it in 95 % of resamplings of the rounds."""
    chance = random.Random(0)  # the same interval for the same values
    rounds = [pair for pair in zip(above, below) if not any(map(math.isnan, pair))]
    if not rounds:
        return {"count": 0}
    drawn = sorted(_of_medians(chance.choices(rounds, k=len(rounds))) for _ in range(RESAMPLINGS))
    low, high = drawn[RESAMPLINGS // 40], drawn[-RESAMPLINGS // 40 - 1]
    return {
        "ratio": _rounded(_of_medians(rounds)),
        "low": _rounded(low),
        "high": _rounded(high),
        "count": len(rounds),
    }


def _of_medians(rounds: Sequence[tuple[float, float]]) -> float:
    above, below = (statistics.median(side) for side in zip(*rounds))
    return above / below if below else math.inf


def _rounded(value: float) -> float:
    """Four digits are more than any of this is known to."""
    return float(f"{value:.4g}")


def progress(text: Any) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)
