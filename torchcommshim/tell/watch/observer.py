# SPDX-License-Identifier: Apache-2.0
"""What a rank writes down of its creations, as the shim tells of them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

from torchcommshim.repair.calls import Call
from torchcommshim.repair.creations import WORLD
from torchcommshim.repair.defects import POINT_TO_POINT, striking
from torchcommshim.repair.rendezvous import Rendezvous, of_store
from torchcommshim.repair.torch_state import TorchState
from torchcommshim.tell.report import Report, say
from torchcommshim.tell.watch import hubs
from torchcommshim.tell.watch.record import Struck
from torchcommshim.tell.watch.session import Session

_WHERE = "the hang report"
_WORLD_PREFIX = "default_pg"  # under which init_process_group uses the store that it has made
_ADDRESS_IN_USE = "EADDRINUSE"
_MEANWHILE_S = 1.0  # a healthy job is through by then
_CONNECT_S = 2.0
_BRIEFLY_S = 0.1


@dataclass(frozen=True)
class Entry:
    """A world that is entered, and not begun.

    Attributes:
        call: as it was known at the entry.
        passed: set when there is a store, or when there will be none.
    """

    call: Call
    rendezvous: Rendezvous
    session: Session
    passed: threading.Event = field(default_factory=threading.Event)


class Watch:
    """Writes this rank's creations down for its watcher, which it starts when it enters a world."""

    def __init__(self, current: Report, state: TorchState) -> None:
        self._report = current
        self._state = state
        self._session: Session | None = None
        self._entry: Entry | None = None
        self._sorts: set[tuple[object, ...]] = set()
        self._struck: list[Struck] = []
        _watches.add(self)

    def enter(self, call: Call, rendezvous: Rendezvous) -> None:
        """See `Entrant`.  Its wait has begun: a rank may wait for a store, or for others to come to it."""
        try:
            self._entry = None
            self._start(call, rendezvous)
            if self._session:
                self._session.record.begin(call)
                self._entry = Entry(call, rendezvous, self._session)
                if rendezvous.serves:
                    # Its main thread is in the store's constructor until all ranks have come.
                    waits = (self._entry, self._connect)
                    threading.Thread(target=_join_meanwhile, args=waits, daemon=True).start()
        except Exception as error:
            self._report.failed(_WHERE, error)

    def leave(self, call: Call, error: BaseException | None) -> None:
        """See `Entrant`."""
        try:
            entry, self._entry = self._entry, None
            if entry and entry.call is call:  # else it has been begun
                entry.passed.set()
                entry.session.record.end(call)
                if entry.rendezvous.serves and _ADDRESS_IN_USE in str(error):
                    self._tell_who_serves(entry)
        except Exception as failure:
            self._report.failed(_WHERE, failure)

    def begin(self, call: Call, store: Any) -> None:
        try:
            if call.kind == WORLD:
                self._begin_world(call, store)
            elif self._session:
                self._session.record.begin(call)
                self._note_facts(call, self._session)
        except Exception as error:
            if call.kind == WORLD:
                self._session = None
            self._report.failed(_WHERE, error)

    def end(self, call: Call, error: BaseException | None) -> None:
        try:
            if self._session:
                self._session.record.end(call)
                self._session.settle()
        except Exception as failure:
            self._report.failed(_WHERE, failure)

    def _begin_world(self, call: Call, store: Any) -> None:
        """The rank has a store."""
        entry, self._entry = self._entry, None
        if entry and (entry.call.rank, entry.call.world_size) == (call.rank, call.world_size):
            entry.session.record.become(entry.call, call)
            entry.passed.set()
        else:
            self._start(call, of_store(store, call.rank, call.world_size))
            if self._session:
                self._session.record.begin(call)
        if self._session:
            self._session.join(store)
            self._session.pass_on()

    def _start(self, call: Call, rendezvous: Rendezvous) -> None:
        self._session = None
        self._sorts, self._struck = set(), []
        if call.shared and call.world_size > 1 and sys.platform == "linux" and _has_python():
            self._session = Session(rendezvous, self._report, getattr(self._state, "c10d", None))

    def _connect(self, rendezvous: Rendezvous) -> Any:
        """A client of its own to the store that `init_process_group` is still making."""
        client = self._state.torch.distributed.TCPStore(
            rendezvous.host,
            rendezvous.port,
            None,
            False,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )
        return self._state.c10d.PrefixStore(_WORLD_PREFIX, client)

    def _tell_who_serves(self, entry: Entry) -> None:
        """The port of the store is taken: by whom, and let them know."""
        store, end = self._connect(entry.rendezvous), time.monotonic() + _CONNECT_S
        while not (hub := hubs.look(store)):
            if time.monotonic() > end:
                return  # no ranks with torchcommshim
            time.sleep(_BRIEFLY_S)
        entry.session.visit(hub)
        say(
            f"rank {entry.call.rank} of {entry.call.world_size} cannot serve the store at "
            f"{entry.rendezvous.place}, since another process does: there, rank {hub['rank']} of "
            f"{hub['size']} is process {hub['pid']} on {hub['host']} ({hub['program']}). Two processes have "
            "the same RANK, or two jobs use one MASTER_PORT. [TCS-rank-claimed-twice]"
        )

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


def _join_meanwhile(entry: Entry, connect: Callable[[Rendezvous], Any]) -> None:
    """Find the hub while the rank waits; where that fails, its watcher reports for it alone."""
    pause = _MEANWHILE_S
    while not entry.passed.wait(pause):
        with contextlib.suppress(Exception):
            entry.session.join(connect(entry.rendezvous))
            return
        pause *= 2


_watches: WeakSet[Watch] = WeakSet()


def _let_go() -> None:
    """In a fork, which has no watcher of its own."""
    for watch in _watches:
        watch._session = None


os.register_at_fork(after_in_child=_let_go)


def _has_python() -> bool:
    """`sys.executable` is an interpreter: not so in a program that embeds Python or is frozen."""
    return bool(sys.executable) and "python" in os.path.basename(sys.executable).lower()
