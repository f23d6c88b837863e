# SPDX-License-Identifier: Apache-2.0
"""What a rank writes down of its creations, as the shim tells of them."""

from __future__ import annotations

import os
import sys
from typing import Any
from weakref import WeakSet

from torchcommshim.repair.calls import Call
from torchcommshim.repair.creations import WORLD
from torchcommshim.repair.defects import POINT_TO_POINT, striking
from torchcommshim.repair.torch_state import TorchState
from torchcommshim.tell.report import Report
from torchcommshim.tell.watch.record import Struck
from torchcommshim.tell.watch.session import Session

_WHERE = "the hang report"


class Watch:
    """Writes this rank's creations down for its watcher, which it starts with the world."""

    def __init__(self, current: Report, state: TorchState) -> None:
        self._report = current
        self._state = state
        self._session: Session | None = None
        self._sorts: set[tuple[object, ...]] = set()
        self._struck: list[Struck] = []
        _watches.add(self)

    def begin(self, call: Call, store: Any) -> None:
        try:
            if call.kind == WORLD:
                self._start(call, store)
            if self._session:
                self._session.record.begin(call)
                if call.kind != WORLD:
                    self._note_facts(call, self._session)
        except Exception as error:
            self._report.failed(_WHERE, error)

    def end(self, call: Call, error: BaseException | None) -> None:
        try:
            if self._session:
                self._session.record.end(call)
                self._session.settle()
        except Exception as failure:
            self._report.failed(_WHERE, failure)

    def _start(self, call: Call, store: Any) -> None:
        self._session = None
        self._sorts, self._struck = set(), []
        if not (call.shared and call.world_size > 1 and sys.platform == "linux" and _has_python()):
            return
        self._session = Session(call, store, self._report)

    def _note_facts(self, call: Call, session: Session) -> None:
        """Note, with the first group, if the world is bound; and where nothing is repaired, what strikes.

        That depends on what makes a creation's sort, and on the world, which stays as it is.
        """
        acts = self._report.settings.acts
        split = call.split
        shape = split and (len(split.ranks) == call.world_size, split.partial, split.even)
        sort = (call.kind, call.backend, shape or len(call.ranks) == call.world_size)
        if sort in self._sorts or (acts and self._sorts):
            return
        self._sorts.add(sort)
        if not acts:
            creation = self._state.describe(call.kind, call.ranks, call.backend, split=split)
            self._struck += [
                Struck(call.number, call.site, defect.name, defect.title, defect.upstream)
                for defect in striking(creation, self._report.traits)
                if defect is not POINT_TO_POINT  # breaks what comes after a creation
            ]
        session.record.facts(self._state.world.bound_device_id is not None, self._struck)


_watches: WeakSet[Watch] = WeakSet()


def _let_go() -> None:
    """In a fork, which has no watcher of its own."""
    for watch in _watches:
        watch._session = None


os.register_at_fork(after_in_child=_let_go)


def _has_python() -> bool:
    """`sys.executable` is an interpreter: not so in a program that embeds Python or is frozen."""
    return bool(sys.executable) and "python" in os.path.basename(sys.executable).lower()
