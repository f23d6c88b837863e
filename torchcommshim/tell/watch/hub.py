# SPDX-License-Identifier: Apache-2.0
"""The hub: the watcher to which those of the other ranks are connected, and which prints the report.

What is sent, `->` to the hub:

| message                                 | when                                                          |
| --------------------------------------- | ------------------------------------------------------------- |
| -> token, rank, host, addresses, port   | first                                                         |
| <- welcome                              | at once                                                       |
| <- successor: one of those first ones   | whom to turn to if this hub is gone; again when it changes    |
| -> late                                 | the rank's creation is late; once a creation                  |
| <- ask                                  | to all, when the first is late                                |
| -> view: a `View`                       | the answer                                                    |
| <- reported                             | to all                                                        |
| -> returned: after how many seconds     | the creation that was late, or in the view, has returned      |
| <- limit_s                              | to all, when all have returned: the next must be later still  |
| <-> bye: an `End`                       | the rank has ended; also from the hub, of its own             |
| <- ended: {rank: an `End`}              | to the successor                                              |
| -> where: a number                      | this rank's user asks where all ranks are                     |
| <- show: a number                       | to all, upon that                                             |
| -> shown: that number, and view         | the answer                                                    |
| <- where: the asker's number, and view  | the answers, as they come                                     |
| <- where: that number, and done         | no more answers come; who has ended, and who is silent        |

The hub of one world over a store may visit that of another; so may the watcher of a rank that cannot come:

| message                                 | when                                                          |
| --------------------------------------- | ------------------------------------------------------------- |
| -> the first one, with visits: why      | first                                                         |
| <- knows: was the visitor's rank here?  | at once                                                       |
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, Callable

from torchcommshim.ranges import named
from torchcommshim.tell.watch.inquiry import Inquiry
from torchcommshim.tell.watch.views import GONE, MUTE, REFUSED, UNKNOWN, UNREACHED, Claim, End, Seen, View
from torchcommshim.tell.watch.wire import Line, Message

_ANSWER_S = 2.0  # seconds in which all answer
_REACH_S = 1.0
_NEWS_S = 1.0  # seconds in which ranks that end together are counted together

# Why a watcher visits the hub of another world.
FOR_ITSELF, FOR_ITS_WORLD = "rank", "world"


class Hub:
    """Every watcher has one; that of most ranks is never used.

    Args:
        selector: of the watcher.
        listener: where others connect.
        orders: what the rank told the watcher.

    Attributes:
        limit_s: after how many seconds a creation is late.
        token: that whoever connects has to know.
        ended: ranks whose process has ended.
    """

    def __init__(self, selector: selectors.BaseSelector, listener: socket.socket, orders: Message) -> None:
        self._selector, self._listener = selector, listener
        self._size, self.token = orders["world_size"], orders["mine"]["token"]
        self._mine, self.limit_s = orders["mine"], orders["limit_s"]
        self._own_rank = self._mine["rank"]
        self._lines: dict[int, Line] = {}
        self._hellos: dict[int, Message] = {}
        self._processes: set[tuple[str, int]] = set()  # that were ever connected as ranks of this world
        self._doubles: dict[Line, Claim] = {}  # processes that say to be a rank which another one is
        self._guests: dict[Line, Claim] = {}  # ranks of other worlds over the same store
        self._earlier: Claim | None = None  # of a world that was over the same store before
        self._successor: Message | None = None
        self.ended: dict[int, End] = {}
        self._views: dict[int, View] = {}
        self._asked = 0.0  # when, on the monotonic clock; 0: nobody is late, or all was said
        self._late: set[int] = set()  # ranks that are to be reported
        self._in_creation = True  # what was reported last
        self._waiting: set[int] = set()  # of the ranks in the report, those that wait still
        self._news: list[int] = []  # ranks, of all, that have ended since
        self._news_at = 0.0
        self._inquiries: dict[int, Inquiry] = {}
        self._numbers = count()
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def is_busy(self) -> bool:
        """It has something to do soon."""
        return bool(self._asked or self._news or self._inquiries)

    def tick(self) -> None:
        """To be called now and then, soon if it `is_busy`."""
        now = time.monotonic()
        if self._late and not self._asked and not self._waiting:
            self._asked = now
            self._views.clear()
            self.tell({"ask": True})
        if self._asked and (now > self._asked + _ANSWER_S or self._lines.keys() <= self._views.keys()):
            self._print_report()
        if self._news and now > self._news_at + _NEWS_S:
            end = self.ended[self._news[0]]
            say(f"hang report: since then, {named(self._news)}: {end.how}, at {end.at} [TCS-hang-report]")
            self._news, self._news_at = [], 0.0
        over = [number for number, each in self._inquiries.items() if each.is_over(self.ended)]
        for number in over:
            self._inquiries.pop(number).close(self.ended)

    def note_end(self, rank: int, end: End) -> None:
        """A rank has ended; the first that is said of it stays."""
        if rank in self.ended:
            return
        self.ended[rank] = end
        self._tell_successor()
        if self._waiting or self._news:
            self._news.append(rank)
            self._news_at = self._news_at or time.monotonic()
        self._waiting.discard(rank)
        self._late.discard(rank)

    def visit(self, other: Message) -> None:
        """Tell the hub of another world over the same store of this one, and learn if it is still there."""
        claim, met = Claim.of(other), []

        def hear(line: Line, message: Message) -> None:
            met.append(message["knows"])
            if message["knows"]:  # the same processes were in it
                self._earlier = claim
            else:
                self._guests[line] = claim

        def lose(line: Line) -> None:
            self._guests.pop(line, None)
            if claim.size == self._size or not met:
                self._earlier = claim

        if not call_on(other, self._selector, {**self._mine, "visits": FOR_ITS_WORLD}, hear, lose):
            self._earlier = claim

    def tell(self, message: Message) -> None:
        """Send to all."""
        for line in (*self._lines.values(), *self._doubles):
            line.send(message)

    def flush(self) -> None:
        """Send what is left; this watcher ends."""
        for line in self._lines.values():
            line.flush()

    def _accept(self, events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        Line(self._selector, connection, self._greet, lambda line: None)

    def _greet(self, line: Line, message: Message) -> None:
        """The first message of a connection.  Whoever does not know the token gets no answer."""
        rank = message.get("rank")
        if message.get("token") != self.token or not isinstance(rank, int):
            line.close()
            return
        process, first = (message["host"], message["pid"]), self._hellos.get(rank)
        if message.get("visits"):
            line.send({"knows": process in self._processes})
            if process not in self._processes:
                is_ours = message["visits"] == FOR_ITSELF and message["size"] == self._size
                self._admit(line, message, self._doubles if is_ours else self._guests)
            return
        self._processes.add(process)
        if first and process != (first["host"], first["pid"]):
            line.send({"welcome": self._own_rank})
            self._admit(line, message, self._doubles)
            return
        self._lines[rank], self._hellos[rank] = line, message
        self.ended.pop(rank, None)
        line.heard = lambda _, heard: self._hear(rank, heard)
        line.lost = lambda _: self._lose(rank)
        line.send({"welcome": self._own_rank})
        if rank != self._own_rank and self._is_better(message):
            self._appoint(message)
        elif self._successor:
            line.send({"successor": self._successor})

    def _admit(self, line: Line, message: Message, place: dict[Line, Claim]) -> None:
        """A process that has no place in this world, but is perhaps why others wait."""
        claim = place[line] = Claim.of(message)

        def hear(line: Line, heard: Message) -> None:
            if "late" in heard and claim.rank in self._lines:
                self._late.add(claim.rank)
            elif "bye" in heard:
                place[line] = claim._replace(end=end_of(heard["bye"]))

        def lose(line: Line) -> None:
            place[line] = place[line]._replace(end=place[line].end or End(GONE, time_of_day()))

        line.heard, line.lost = hear, lose

    def _is_better(self, hello: Message) -> bool:
        """A successor on another host is: a host may fail as a whole."""
        here = socket.gethostname()
        return self._successor is None or self._successor["host"] == here != hello["host"]

    def _appoint(self, successor: Message) -> None:
        self._successor = successor
        self.tell({"successor": successor})
        self._tell_successor()

    def _tell_successor(self) -> None:
        if self._successor and self.ended:
            self._lines[self._successor["rank"]].send({"ended": self.ended})

    def _lose(self, rank: int) -> None:
        self._lines.pop(rank, None)
        self._hellos.pop(rank, None)
        if self._successor and self._successor["rank"] == rank:
            self._successor = None
            for other, hello in self._hellos.items():
                if other != self._own_rank and self._is_better(hello):
                    self._successor = hello
            if self._successor:
                self._appoint(self._successor)
        self.note_end(rank, End(GONE, time_of_day()))

    def _hear(self, rank: int, message: Message) -> None:
        if "late" in message:
            self._late.add(rank)
        elif "shown" in message:
            if message["shown"] in self._inquiries:
                self._inquiries[message["shown"]].answer(rank, message["view"])
        elif "view" in message:
            self._views[rank] = View.of(message["view"])
        elif "where" in message:
            number = next(self._numbers)
            self._inquiries[number] = Inquiry(self._lines[rank], message["where"], set(self._lines))
            self.tell({"show": number})
        elif "returned" in message:
            self._late.discard(rank)
            if rank in self._waiting:
                self._waiting.remove(rank)
                if not self._waiting:
                    self._resume(message["returned"])
        elif "bye" in message:
            self.note_end(rank, end_of(message["bye"]))

    def _print_report(self) -> None:
        self._asked = 0.0
        silent = self._lines.keys() - self._views.keys() - self.ended.keys()
        created = {rank for rank, view in self._views.items() if view.waits}
        waiting = created | {rank for rank, view in self._views.items() if view.place and view.place.call}
        if waiting & self._late or created:  # else it has returned in the meantime
            ranks = {claim.rank for claim in self._doubles.values()} & self._hellos.keys()
            claims = [*(Claim.of(self._hellos[rank]) for rank in sorted(ranks)), *self._doubles.values()]
            met = {"claims": claims, "others": list(self._guests.values()), "earlier": self._earlier}
            late = self._late & waiting
            say_report(self._size, self._views, self.ended, silent, late=late, **met)
            self.tell({"reported": True})
        else:
            waiting = set()
        self._in_creation = bool(created)
        self._waiting, self._late = waiting, set()

    def _resume(self, after_s: float) -> None:
        """A false alarm, or a slow network: the next one is given twice the time."""
        if not self._in_creation:
            ended = f"the wait has ended on all ranks that waited, after {after_s:.0f} s"
            say(f"hang report: {ended} [TCS-hang-report]")
            return
        say(
            f"hang report: the creation has ended on all ranks that waited, after {after_s:.0f} s. "
            f"From now on one is reported after {2 * self.limit_s:g} s. [TCS-hang-report]"
        )
        self.tell({"limit_s": 2 * self.limit_s})


def call_on(
    hub: Message,
    selector: selectors.BaseSelector,
    hello: Message,
    heard: Callable[[Line, Message], None],
    lost: Callable[[Line], None],
) -> Line | None:
    """Visit `hub`: begin to connect, to the first of its addresses to which that can be done."""
    for address in hub["addresses"]:
        with contextlib.suppress(OSError):
            line = Line.to(selector, address, hub["port"], heard, lost)
            line.send({**hello, "token": hub["token"]})
            return line
    return None


def end_of(values: Sequence[Any]) -> End:
    """An `End` that was sent as a list."""
    how, at, last = values
    return End(how, at, Seen(*last) if last else None)


def time_of_day() -> str:
    """For `End.at`."""
    return time.strftime("%H:%M:%S")


# What it takes to speak is imported when there is something to say: a healthy job's watchers stay small.


def say_report(*known: Any, **more: Any) -> None:
    """Say what a `diagnosis.Job` of these values amounts to."""
    from torchcommshim.tell.watch import diagnosis, picture

    job = diagnosis.Job(*known, **more)
    say(diagnosis.report(job) if job.waiting else picture.report(job))


def say_alone(view: View, rendezvous: Sequence[Any]) -> None:
    """Say where a rank waits that has reached no store, and so none of the others."""
    from torchcommshim.repair.rendezvous import Rendezvous
    from torchcommshim.tell.watch.diagnosis import alone

    place = Rendezvous(*rendezvous)
    say(alone(view, place, _reached(place.host, place.port) if place.host else None))


def _reached(host: str, port: int) -> str:
    """What comes of connecting to a store that a rank has not reached."""
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except socket.gaierror:
        return UNKNOWN
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return UNREACHED
    return MUTE


def say(text: str) -> None:
    """See `report.say`."""
    from torchcommshim.tell import report

    report.say(text)
