# SPDX-License-Identifier: Apache-2.0
"""The watcher: a process beside each rank, which sees when a creation, or another wait, does not return.

It sleeps, looks at its rank's record now and then, and holds one connection to the hub.  It imports neither
torch nor wrapt, and ends with its rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import time
from itertools import count
from typing import Any, NamedTuple

from torchcommshim.ranges import shortened
from torchcommshim.tell.watch import stacks, waits
from torchcommshim.tell.watch.door import Door
from torchcommshim.tell.watch.hub import (
    FOR_ITSELF,
    Hub,
    call_on,
    end_of,
    say,
    say_alone,
    say_report,
    time_of_day,
)
from torchcommshim.tell.watch.places import Group, Place
from torchcommshim.tell.watch.process import busy_s, is_stopped, started
from torchcommshim.tell.watch.record import Entry, Reader
from torchcommshim.tell.watch.views import GONE, LOCKED, RENDEZVOUS, SILENT, STOPPED, End, Seen, View
from torchcommshim.tell.watch.wire import Line, Message

_SLOWEST_LOOK_S = 5.0
_BUSY_S = 0.05
_LOOKS = 20  # in a group's time-out
_FRAMES = 16  # of a stack, of which those that call the creation's site:
_CALLERS = 4
_WELCOME_S = 5.0  # seconds until another address is tried
_RING_S = 0.5  # seconds in which the rank's sampler says where the rank is
_AT_REST_S = 1e-3  # seconds of processor time that a rank at most uses in a wait that shows as its own line


class Told(NamedTuple):
    """A wait that the hub, or the user, was told of.

    Attributes:
        began: on the host's monotonic clock.
        creation: the creation's entry; None if it is another wait.
    """

    began: float
    creation: Entry | None = None


class Watcher:
    """One rank's watcher.

    Args:
        orders: what the rank told it; see `session.Session`.
        heard: what came after the orders.
    """

    def __init__(self, orders: Message, heard: bytes) -> None:
        self._orders, self._mine = orders, orders["mine"]
        self._size, self._limit_s = orders["world_size"], orders["limit_s"]
        self._record = Reader(orders["record"], self._size)
        self._stack = stacks.Stack(*orders["stack"]) if orders["stack"] else None
        self._rank_pid, self._rank_started = orders["pid"], orders["started"]
        self._selector = selectors.DefaultSelector()
        self._hub = Hub(self._selector, socket.socket(fileno=orders["listener"]), orders)
        self._bell = socket.socket(fileno=orders["bell"])
        self._bell.setblocking(False)
        self._look_s = max(min(self._limit_s / 4, _SLOWEST_LOOK_S), _BUSY_S)
        self._told: Told | None = None
        self._rest: tuple[float, float] = 0.0, 0.0  # the begin of a wait, and the processor time used then
        self._askers: dict[int, Line] = {}  # by the number of their question
        self._numbers = count()
        with contextlib.suppress(OSError):  # no network namespace that allows it: nobody can ask
            self._door = Door(self._selector, self._rank_pid, self._card, self._ask_all)
        self._is_reported = False
        self._passed = False  # the rank has left the rendezvous
        self._hub_at: Message | None = None  # until the rank has reached the store
        self._joined = 0.0  # when it has, on the monotonic clock
        self._line: Line | None = None  # to the hub
        self._is_welcome = False
        self._visited: Line | None = None  # to the hub of a world in which there is no place for the rank
        self._successor: Message | None = None
        self._heard, self._how = b"", GONE  # from the rank
        self._ends = False
        self._hear(heard)
        self._selector.register(0, selectors.EVENT_READ, self._hear_rank)

    def run(self) -> None:
        """Watch until the rank has ended."""
        while not self._ends and started(self._rank_pid) == self._rank_started:
            for key, events in self._selector.select(_BUSY_S if self._hub.is_busy else self._look_s):
                key.data(events)
            self._look()
            self._hub.tick()
        farewell = {"bye": self._farewell()}
        for line in filter(None, (self._line, self._visited)):
            line.send(farewell)
            line.flush()
        self._hub.tell(farewell)
        self._hub.flush()

    # -- the rank ---------------------------------------------------------------------------------------

    def _hear_rank(self, events: int) -> None:
        received = os.read(0, 4096)
        self._hear(received)
        self._ends = not received

    def _hear(self, received: bytes) -> None:
        """What the rank says: objects as `session.Session` sends them, one a line."""
        *lines, self._heard = (self._heard + received).split(b"\n")
        for message in map(json.loads, lines):
            if "join" in message:
                self._join(**message["join"])
            elif "passed" in message:
                self._passed = True
            elif "visit" in message:
                hello = {**self._mine, "visits": FOR_ITSELF}
                self._visited = call_on(
                    message["visit"], self._selector, hello, lambda *_: None, self._lose_visited
                )
            elif "bye" in message:
                self._how = message["bye"]

    def _join(self, hub: Message, other: Message | None) -> None:
        """The rank has reached the store."""
        self._joined = time.monotonic()
        self._hub.token = hub["token"]
        if self._told:
            after_s, rank = self._joined - self._told.began, self._mine["rank"]
            say(f"hang report: rank {rank} has reached the store after {after_s:.0f} s. [TCS-rendezvous]")
            self._told = None
        if other:
            self._hub.visit(other)
        self._turn_to(hub)

    def _lose_visited(self, line: Line) -> None:
        self._visited = None

    def _farewell(self) -> End:
        """How the rank has ended, and where it was."""
        entries, now = self._record.entries(), time.monotonic()
        last = _unended(entries) or (entries[-1] if entries else None)
        return End(self._how, time_of_day(), _seen(last, now) if last else None)

    def _look(self) -> None:
        """At the record: is a creation or another wait late, or has one that was late returned?"""
        entries = self._record.entries()
        now = time.monotonic()
        if self._told:
            ended = self._ended(self._told, entries, now)
            if ended is None:
                return
            if self._line:
                self._line.send({"returned": ended - self._told.began})
            self._told, self._is_reported = None, False
        if self._line and not self._is_welcome and now > self._welcome_until:
            self._line.close()
            self._connect()
        late = self._late(entries, now)
        if late and (self._is_welcome or not self._line):
            self._told = late
            if self._line:
                self._line.send({"late": True})
            elif self._hub_at:
                why = f"the watcher of rank {self._hub_at['rank']} was not reached"
                say_report(self._size, {self._mine["rank"]: self._view()}, apart=why)
            else:
                # No signal to a rank that connects to a store: it would break off, and say so at length.
                say_alone(self._view(with_stack=False), self._orders["rendezvous"])

    def _late(self, entries: list[Entry], now: float) -> Told | None:
        """What is late now, if anything is."""
        creation = _unended(entries)
        if creation:
            # What a rank has waited for the store is no delay of those who were there.
            late_s = now - max(creation.started, self._joined)
            return Told(creation.started, creation) if late_s > self._limit_s else None
        places, _ = self._places()
        for place in places:
            limit_s = waits.limit_s(place, self._limit_s)
            if limit_s is not None and now - place.since > limit_s and self._rests(place):
                return Told(place.since)
        return None

    def _rests(self, place: Place) -> bool:
        """The main thread has stood still, as far as its processor time tells.

        What waits in torch.distributed is told by its group's count; a line of the user's is not.
        """
        if place.inside:
            return True
        began, used = self._rest
        return began == place.since and busy_s(self._rank_pid) - used < _AT_REST_S

    def _ended(self, told: Told, entries: list[Entry], now: float) -> float | None:
        """When it has returned; None if it has not."""
        if told.creation is None:
            places, _ = self._places()
            return None if any(place.since == told.began for place in places) else now
        begun = [each for each in entries if each.started == told.began]
        if begun and not begun[0].ended:
            return None
        return begun[0].ended if begun else now

    def _places(self) -> tuple[list[Place], list[Group]]:
        """Where the rank's threads are, as its sampler saw them last."""
        sample = self._record.sample()
        counts = list(sample.counts)
        places = [
            waits.completed(place, "" if place.call else stacks.written(place), counts)
            for place in sample.places
        ]
        for place in places:
            if place.group and place.group.timeout_s:
                self._look_s = max(min(self._look_s, place.group.timeout_s / _LOOKS), _BUSY_S)
        if places and places[0].since != self._rest[0]:
            self._rest = places[0].since, busy_s(self._rank_pid)
        return places, counts

    def _note_wait(self) -> None:
        """The hub is about to hear of this rank's wait, late or not: it is told when that has returned."""
        creation = _unended(self._record.entries())
        if not self._told and creation:
            self._told = Told(creation.started, creation)
        elif not self._told:
            self._told = next((Told(each.since) for each in self._places()[0] if each.call), None)

    def _ring(self) -> tuple[str, float]:
        """Have the sampler look: what keeps it from that, if something does, and since how many seconds."""
        before, state = self._record.beaten(), ""
        if not before:  # it has none, or has only begun
            return state, 0.0
        if not is_stopped(self._rank_pid):
            with contextlib.suppress(OSError):
                self._bell.send(b"?")
            end = time.monotonic() + _RING_S
            while time.monotonic() < end:
                if self._record.beaten() != before:
                    return state, 0.0
                time.sleep(0.01)
        state = STOPPED if is_stopped(self._rank_pid) else LOCKED
        return state, time.monotonic() - before

    def _view(self, *, with_stack: bool = True) -> View:
        state, aged = self._ring()
        entries, now = self._record.entries(), time.monotonic()
        bound, struck = self._record.facts()
        creation = _unended(entries)
        places, counts = self._places()
        stack: list[str] = []
        is_late = creation and now - creation.started > self._limit_s / 2
        if with_stack and self._stack and (is_late or state == LOCKED):
            stack = stacks.take(self._stack)
            if state == LOCKED:
                state = LOCKED if stack else SILENT
                places = [_standing(stack, now - aged)] if stack else places
            if creation and creation.site in stack:
                stack = stack[: stack.index(creation.site) + _CALLERS]
            stack = stack[:_FRAMES]
        in_rendezvous = creation and not creation.number and not self._passed
        places = [each._replace(since=now - each.since) for each in places]
        helper = next((frame for frame in stack if frame.endswith(" _new_process_group_helper")), "")
        return View(
            rank=self._mine["rank"],
            host=socket.gethostname(),
            pid=self._rank_pid,
            seen=[_seen(entry, now) for entry in entries],
            bound=bound,
            struck=struck,
            stack=stack,
            inside=RENDEZVOUS if in_rendezvous else stacks.called(helper) if helper else "",
            torch=self._orders["torch"],
            strategy=self._orders["strategy"],
            job=self._mine["job"],
            places=places,
            counts=counts,
            state=state,
            aged=aged,
        )

    # -- the user ---------------------------------------------------------------------------------------

    def _card(self) -> Message:
        """Who this is, for those who ask.  A rank that has not reached the store is a job of its own."""
        return {
            "job": str((self._hub_at or self._mine).get("label")),
            "rank": self._mine["rank"],
            "size": self._size,
            "pid": self._rank_pid,
            "command": self._orders["command"],
        }

    def _ask_all(self, asker: Line) -> None:
        """Where are all ranks?  The hub knows; without one, this rank answers for itself."""
        if self._line and self._is_welcome:
            number = next(self._numbers)
            self._askers[number] = asker
            self._line.send({"where": number})
        else:
            asker.send({"view": self._view(with_stack=self._hub_at is not None)})
            self._excuse(asker)

    def _excuse(self, asker: Line) -> None:
        hub = f"the watcher of rank {self._hub_at['rank']}" if self._hub_at else "the world's store"
        why = f"{hub} was not reached"
        asker.send({"done": {"ended": self._hub.ended, "silent": [], "apart": why}})

    def _hand_on(self, message: Message) -> None:
        """A part of the answer."""
        asker = self._askers.get(message.pop("where"))
        if asker:
            asker.send(message)
        if "done" in message:
            self._askers = {number: each for number, each in self._askers.items() if each is not asker}

    # -- the hub ----------------------------------------------------------------------------------------

    def _turn_to(self, hub: Message) -> None:
        self._hub_at, self._addresses = hub, list(hub["addresses"])
        self._connect()

    def _connect(self) -> None:
        """Begin to connect to the hub's next address; without one, this rank is alone."""
        self._line, self._is_welcome = None, False
        self._welcome_until = time.monotonic() + _WELCOME_S
        while self._hub_at and self._addresses and not self._line:
            with contextlib.suppress(OSError):
                address, port = self._addresses.pop(0), self._hub_at["port"]
                self._line = Line.to(self._selector, address, port, self._hear_hub, self._lose_hub)
                self._line.send({**self._mine, "token": self._hub.token})

    def _hear_hub(self, line: Line, message: Message) -> None:
        if "welcome" in message:
            self._is_welcome = True
            if self._told and not self._is_reported:  # to an earlier hub
                line.send({"late": True})
        elif "reported" in message:
            self._is_reported = True
        elif "successor" in message:
            self._successor = message["successor"]
        elif "ask" in message:
            self._note_wait()
            line.send({"view": self._view()})
        elif "show" in message:
            line.send({"shown": message["show"], "view": self._view()})
        elif "where" in message:
            self._hand_on(message)
        elif "limit_s" in message:
            self._limit_s = self._hub.limit_s = message["limit_s"]
        elif "bye" in message:
            self._note_hub_end(end_of(message["bye"]))
        elif "ended" in message:
            for rank, end in message["ended"].items():
                self._hub.note_end(int(rank), end_of(end))

    def _note_hub_end(self, end: End) -> None:
        if self._hub_at:
            self._hub.note_end(self._hub_at["rank"], end)

    def _lose_hub(self, line: Line) -> None:
        for asker in self._askers.values():
            self._excuse(asker)
        self._askers.clear()
        if not self._is_welcome:
            self._connect()
            return
        self._note_hub_end(End(GONE, time_of_day()))
        successor, self._successor = self._successor, None
        if successor:
            self._turn_to(successor)
        else:
            self._line, self._is_welcome = None, False


def _unended(entries: list[Entry]) -> Entry | None:
    """The creation that the rank is in; of several, the first."""
    return next((entry for entry in entries if not entry.ended), None)


def _standing(stack: list[str], since: float) -> Place:
    """A place of which only the stack is known."""
    user = next((frame for frame in stack if "/torch/" not in frame), "")
    return Place(since, site=user, stack=stack)


def _seen(entry: Entry, now: float) -> Seen:
    return Seen(
        entry.number,
        entry.kind,
        shortened(entry.ranks),
        entry.backend,
        entry.name,
        entry.site,
        now - entry.started,
        now - entry.ended if entry.ended else None,
        _split(entry.split) if entry.split else None,
    )


def _split(split: tuple[Any, ...]) -> tuple[str, int, str, list[str]]:
    parent, turn, ranks, parts = split
    return parent, turn, shortened(ranks), [shortened(part) for part in parts]


def main() -> None:
    """Watch the process that has started this one."""
    heard = b""
    while b"\n" not in heard:
        received = os.read(0, 1 << 16)
        if not received:
            return
        heard += received
    orders, _, rest = heard.partition(b"\n")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the hub has a connection a rank
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        Watcher(json.loads(orders), rest).run()
    except Exception as error:
        say(f"failed in the hang report's watcher: {error!r}; torch goes on without it [TCS-failed]")
    os._exit(0)  # the rank, which waits for the end of this process, need not wait for its cleaning up
