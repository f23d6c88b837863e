# SPDX-License-Identifier: Apache-2.0
"""The hub's part in `torchcommshim where`: it asks all watchers, and hands each answer on as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from torchcommshim.tell.watch.views import End
from torchcommshim.tell.watch.wire import Line

ANSWER_S = 3.0  # seconds in which all answer


class Inquiry:
    """One question.

    Args:
        asker: the line of the watcher whose user asks.
        number: its own number for the question.
        asked: the ranks that are to answer.
    """

    def __init__(self, asker: Line, number: int, asked: Iterable[int]) -> None:
        self._asker, self._number, self._missing = asker, number, set(asked)
        self._until = time.monotonic() + ANSWER_S

    def answer(self, rank: int, view: Any) -> None:
        """Hand on what rank's watcher says, once."""
        if rank in self._missing:
            self._missing.remove(rank)
            self._asker.send({"where": self._number, "view": view})

    def is_over(self, ended: Iterable[int]) -> bool:
        """Nobody is to answer any more."""
        self._missing.difference_update(ended)
        return not self._missing or time.monotonic() > self._until

    def close(self, ended: Mapping[int, End]) -> None:
        """Say that it is over, and who has not answered."""
        done = {"ended": ended, "silent": sorted(self._missing), "apart": ""}
        self._asker.send({"where": self._number, "done": done})
