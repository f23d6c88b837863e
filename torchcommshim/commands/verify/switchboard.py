# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a simulated job meet: who waits for whom, and what each gets when all have come.

One server serves one job, from a process that is none of its ranks: a rank that holds Python's global
lock while it waits, as a rank in a real split does, could not serve the others.

NCCL's rules are kept here.  The k-th split of each rank of a communicator pairs up with the k-th of the
other ranks, whatever each of them meant by it; a call without a colour carries no identity; a collective
runs over the ranks that the communicator really has, and its end takes all of them.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socketserver
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Union


class Join(NamedTuple):
    """Connect `size` ranks that were told the same fresh id.  The answer is a `Seat`."""

    communicator: str
    rank: int
    size: int


class Split(NamedTuple):
    """Split a communicator.  The answer is a `Seat`, or None to a rank whose `color` is None.

    Ranks of one colour make a communicator, in the order of their `key`.
    """

    communicator: str
    rank: int
    color: int | None
    key: int


class Exchange(NamedTuple):
    """Bring something and get what every rank brought: a list of bytes in rank order.

    `label` says what is being done (`allreduce`): ranks that do different things wait for ever.
    """

    communicator: str
    rank: int
    label: str
    payload: bytes


class Finalize(NamedTuple):
    """End a communicator.  The answer is None, once all its ranks have come."""

    communicator: str
    rank: int


class Seat(NamedTuple):
    """A rank's place in a communicator."""

    communicator: str
    rank: int
    size: int


Request = Union[Join, Split, Exchange, Finalize]
Answer = Union[Seat, None, "list[bytes]"]


class Call(NamedTuple):
    """A request and where its answer goes."""

    request: Any
    answer: queue.SimpleQueue[Answer]


class Rounds:
    """The k-th call of each of `size` ranks make round k."""

    def __init__(self, size: int) -> None:
        self._calls: list[deque[Call]] = [deque() for _ in range(size)]

    def add(self, call: Call) -> list[Call] | None:
        """Queue a call; the round that it completes, in rank order, or None."""
        self._calls[call.request.rank].append(call)
        if not all(self._calls):
            return None
        labels = {getattr(calls[0].request, "label", None) for calls in self._calls}
        return [calls.popleft() for calls in self._calls] if len(labels) == 1 else None


class Matcher:
    """Pairs requests up, without any input or output: the part of the switchboard that is tested alone."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._rounds: dict[tuple[str, type], Rounds] = {}
        self._waiting: set[queue.SimpleQueue[Answer]] = set()
        self._children = 0
        self._lock = threading.Lock()

    def post(self, request: Request) -> queue.SimpleQueue[Answer]:
        """Queue a request; its answer appears in the returned queue when its round is complete."""
        call = Call(request, queue.SimpleQueue())
        with self._lock:
            if isinstance(request, Join):
                self._sizes.setdefault(request.communicator, request.size)
            key = (request.communicator, type(request))
            rounds = self._rounds.setdefault(key, Rounds(self._sizes[request.communicator]))
            self._waiting.add(call.answer)
            complete = rounds.add(call)
            if complete:
                self._answer(complete)
        return call.answer

    def abandon(self) -> None:
        """Answer None to all that still wait, so that their threads end."""
        with self._lock:
            for answer in self._waiting:
                answer.put(None)
            self._waiting.clear()

    def _answer(self, calls: list[Call]) -> None:
        self._waiting.difference_update(call.answer for call in calls)
        kind = type(calls[0].request)
        if kind is Join:
            for call in calls:
                call.answer.put(Seat(*call.request))
        elif kind is Exchange:
            payloads = [call.request.payload for call in calls]
            for call in calls:
                call.answer.put(payloads)
        elif kind is Finalize:
            for call in calls:
                call.answer.put(None)
        else:
            self._split(calls)

    def _split(self, calls: list[Call]) -> None:
        colors: dict[int, list[Call]] = {}
        for call in calls:
            if call.request.color is None:
                call.answer.put(None)
            else:
                colors.setdefault(call.request.color, []).append(call)
        for members in colors.values():
            self._children += 1
            child = f"{calls[0].request.communicator}/{self._children}"
            self._sizes[child] = len(members)
            for rank, call in enumerate(sorted(members, key=lambda call: call.request.key)):
                call.answer.put(Seat(child, rank, len(members)))


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, handler: type[socketserver.BaseRequestHandler]) -> None:
        super().__init__(address, handler)
        self.matcher = Matcher()


class _Handler(socketserver.StreamRequestHandler):
    """One request, one answer.  Only this user can write to the socket, so what comes can be unpickled."""

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        with contextlib.suppress(OSError, EOFError):  # the rank is gone
            request = pickle.load(self.rfile)  # noqa: S301 - see above
            pickle.dump(self.server.matcher.post(request).get(), self.wfile)


@contextlib.contextmanager
def switchboard() -> Iterator[str]:
    """Serve the ranks of one job at the address that is yielded: a socket in a folder of this user's own."""
    with tempfile.TemporaryDirectory(prefix="simulated-nccl-") as folder:
        address = str(Path(folder, "socket"))
        with _Server(address, _Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
            try:
                yield address
            finally:
                server.shutdown()
                server.matcher.abandon()
