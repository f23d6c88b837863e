# SPDX-License-Identifier: Apache-2.0
"""The sampler: a thread in the rank that writes down, every few seconds, where the rank is.

All of c10d's calls but `perform_nocolor_split` give up Python's global lock while they wait, so this thread
runs then.  Where it does not run, the lock is held, or the process is stopped: its watcher sees that from
outside.  It asks for nothing and waits for nobody: it reads the frames of the threads, and torch's own counts
of collectives.  Frames are looked at and let go; nothing of them is kept but numbers and text.

That a thread stands still is told by its instructions, from the innermost frame outwards, and by the counts
of collectives: Python uses frames again, so that a frame is the same one proves nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any, Callable, NamedTuple

from torchcommshim.ranges import shortened
from torchcommshim.tell.watch.places import Group, Place, Sample
from torchcommshim.tell.watch.record import Record

PERIOD_S = 5.0
_SHORTEST_S = 0.2
_FIRST_S = 1.0  # the first look is early: by then a world's time-out is known
_LOOKS = 20  # in a group's time-out
_DEEPEST = 64  # frames that tell where a thread is
_FRAMES = 24  # that are written down
_THREADS = 3  # beside the main one
_COUNTED = 256  # groups whose counts tell that a rank moves
_TOLD = 16  # groups whose counts are written down
_PARTING_S = 0.5
_C10D = "torch.distributed.distributed_c10d"
# Where a thread that is in torch.distributed waits.  Frames of other modules call these.
_WAITING = frozenset(
    (
        _C10D,
        "torch.distributed.utils",
        "torch.distributed.rendezvous",
        "torch.distributed._functional_collectives",
    )
)
_PASSED_OVER = frozenset(("torch.distributed.c10d_logger", "torch.utils._contextlib", "contextlib", "wrapt"))
_STANDARD = os.path.dirname(os.__file__) + "/"
_WRAPPER = "torch.nn.parallel.distributed"  # calls collectives from C++, on its own group
_GROUPS = ("group", "process_group", "group_to_use", "pg")  # names of the argument, the likeliest first
_PEERS = ("src", "dst", "group_src", "group_dst")


class _Seen(NamedTuple):
    """A thread at the last look."""

    instructions: int
    counts: int | None
    since: float


class Sampler:
    """Where this process is, in `record`.

    Args:
        record: is written to.
        c10d: `torch.distributed.distributed_c10d`; without it no groups are named.
        bell: a socket: whoever rings at its other end is told where the process is at once.
        period_s: seconds between two looks.
        failed: is called with what goes wrong.
    """

    def __init__(
        self,
        record: Record,
        c10d: Any,
        bell: socket.socket,
        period_s: float,
        failed: Callable[[Exception], None],
    ) -> None:
        self._record, self._c10d, self._bell, self._failed = record, c10d, bell, failed
        self._main = threading.main_thread().ident
        self._seen: dict[int, _Seen] = {}
        self._written = Sample()
        self._thread: int | None = None
        self._running = _thread.allocate_lock()
        self._usual_s, self._period_s = period_s, min(period_s, _FIRST_S)

    def start(self) -> None:
        """Begin.  `threading` does not know the thread: a program that counts its threads finds its own."""
        self._running.acquire()
        self._record.beat()  # from now on a rank that does not look is one that cannot
        try:
            self._thread = _thread.start_new_thread(self._run, ())
        except BaseException:
            self._running.release()
            raise

    def stop(self) -> None:
        """End; in a fork, which has no such thread, there is only the socket to close."""
        with contextlib.suppress(OSError):
            self._bell.shutdown(socket.SHUT_RDWR)
        if self._thread not in (None, _thread.get_ident()) and self._running.acquire(timeout=_PARTING_S):
            self._running.release()
        self._bell.close()

    def leave(self) -> None:
        """In a fork: close what it has got."""
        self._bell.close()

    def _run(self) -> None:
        try:
            while True:
                asked = b""
                self._bell.settimeout(self._period_s)
                try:
                    asked = self._bell.recv(64)
                    if not asked:
                        return
                except socket.timeout:  # Python 3.9 has a class of its own for it
                    pass
                try:
                    self.look(asked=bool(asked))
                except OSError:
                    raise
                except Exception as error:  # it looks again
                    self._failed(error)
                    self._record.beat()
        except OSError:  # the socket is closed
            return
        finally:
            self._running.release()

    def look(self, *, asked: bool = False) -> None:
        """Look once; if `asked`, also at what is moving."""
        now = time.monotonic()
        frames = sys._current_frames()
        frames.pop(_thread.get_ident(), None)
        before, self._seen = self._seen, {}
        places, groups = [], not asked
        try:
            for ident, frame in islice(self._worth(frames), 1 + _THREADS):
                place, known = self._place(ident, frame, before.get(ident), now, asked)
                groups = groups and known
                if place:
                    places.append(place)
        finally:
            frames.clear()
            frame = None  # type: ignore[assignment]
        counts = [] if groups or not places else self._most_used()
        self._hurry(places)
        sample = Sample(places, counts)
        if sample != self._written:
            self._write(sample)
            self._written = sample
        self._record.beat()

    def _hurry(self, places: list[Place]) -> None:
        """Look often enough for groups with a short time-out."""
        world = self._c10d._world.default_pg if self._c10d is not None else None
        limits = [each.group.timeout_s for each in places if each.group and each.group.timeout_s]
        limits += [limit] if world is not None and (limit := _timeout_s(world)) else []
        self._period_s = min([self._usual_s, *(max(each / _LOOKS, _SHORTEST_S) for each in limits)])

    def _worth(self, frames: dict[int, FrameType]) -> Iterator[tuple[int, FrameType]]:
        """The main thread, and those that are in torch.distributed."""
        if self._main in frames:
            yield self._main, frames[self._main]
        for ident, frame in frames.items():
            if ident != self._main and _module(frame) in (_C10D, "torch.distributed.utils"):
                yield ident, frame

    def _place(
        self, ident: int, frame: FrameType, before: _Seen | None, now: float, asked: bool
    ) -> tuple[Place | None, bool]:
        """Where a thread is, if it stands or we are `asked`, and whether its group is known."""
        stack = _outwards(frame)
        instructions = hash(tuple([(id(each.f_code), each.f_lasti) for each in stack]))
        stands = before is not None and before.instructions == instructions
        if not (stands or asked):
            self._seen[ident] = _Seen(instructions, None, now)
            return None, True
        dist = _in_distributed(stack)
        group = self._group(dist)
        counts = _count(group) if group is not None else self._all_counts()
        since = before.since if stands and before and before.counts in (None, counts) else now
        self._seen[ident] = _Seen(instructions, counts, since)
        if since == now and not asked:
            return None, True
        name = "" if ident == self._main else _thread_name(ident)
        user = next((each for each in stack if not (_is_torch(each) or _is_standard(each))), None)
        place = Place(
            since,
            name,
            call=dist[-1].f_code.co_name if dist else "",
            inside=tuple(each.f_code.co_name for each in reversed(dist)),
            group=self._described(group) if group is not None else None,
            peer=_local(dist, _PEERS, int),
            site=_text(user) if user else "",
            span=_span(frame),
            stack=tuple(_text(each) for each in stack if not _is_passed_over(each))[:_FRAMES],
        )
        return place, group is not None

    def _write(self, sample: Sample) -> None:
        """Without what does not fit: outer frames, then the ranks of large groups."""
        if self._record.sample(sample.plain):
            return
        short = [each._replace(stack=each.stack[:6], group=None) for each in sample.places]
        self._record.sample(Sample(short).plain)

    # -- groups -----------------------------------------------------------------------------------------

    def _group(self, dist: list[FrameType]) -> Any:
        """The group that the innermost frame of torch.distributed that has one is called on."""
        if self._c10d is None:
            return None
        for frame in dist:
            for name in _GROUPS:
                if name in frame.f_code.co_varnames:
                    # Before Python 3.13 the frame keeps what this makes until it ends, and it is torch's.
                    values = frame.f_locals
                    if name in values:
                        group = values[name]
                        group = self._c10d._world.default_pg if group is None else group
                        return group if group in self._c10d._world.pg_group_ranks else None
            if _module(frame) == _WRAPPER:
                return getattr(frame.f_locals.get("self"), "process_group", None)
        return None

    def _groups(self) -> list[Any]:
        """The groups that this rank is in, the newest first."""
        return list(self._c10d._world.pg_map)[::-1] if self._c10d is not None else []

    def _all_counts(self) -> int:
        """A number that changes when a collective begins on one of the newer groups or the world."""
        groups = self._groups()
        return sum(_count(each) or 0 for each in groups[:_COUNTED] + groups[_COUNTED:][-1:])

    def _most_used(self) -> list[Group]:
        groups = [(count, str(each.group_name), each) for each in self._groups() if (count := _count(each))]
        groups.sort(key=lambda each: (-each[0], each[1]))
        return [self._described(group) for _, _, group in groups[:_TOLD]]

    def _described(self, group: Any) -> Group:
        ranks = self._c10d._world.pg_group_ranks.get(group, {})
        return Group(
            str(getattr(group, "group_name", "")),
            str(getattr(group, "group_desc", "") or ""),
            shortened(sorted(ranks, key=ranks.__getitem__)),
            _count(group),
            _timeout_s(group),
        )


def is_possible() -> bool:
    """May this process have a sampler: has it a global lock, and is it its main interpreter?"""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False  # frames of running threads cannot be read
    for name in ("_interpreters", "_xxsubinterpreters"):
        try:
            module = __import__(name)
            return bool(module.get_current() == module.get_main())
        except (ImportError, AttributeError):
            continue
    return True


def _outwards(frame: FrameType | None) -> list[FrameType]:
    """The frames from `frame` on, the innermost first."""
    stack: list[FrameType] = []
    while frame is not None and len(stack) < _DEEPEST:
        stack.append(frame)
        frame = frame.f_back
    return stack


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_standard(frame: FrameType) -> bool:
    """Of Python's own library, in which the user's code waits as well."""
    file = frame.f_code.co_filename
    return file.startswith(_STANDARD) and "/site-packages/" not in file


def _is_passed_over(frame: FrameType) -> bool:
    return _module(frame) in _PASSED_OVER or frame.f_code.co_filename.startswith("<frozen ")


def _is_torch(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] in ("torch", "torchcommshim", "wrapt", "contextlib")


def _in_distributed(stack: list[FrameType]) -> list[FrameType]:
    """Frames of torch.distributed's own functions that wait, the innermost first; none if it is elsewhere."""
    found: list[FrameType] = []
    for frame in stack:
        module = _module(frame)
        if module in _WAITING or (module == _WRAPPER and not found):
            found.append(frame)
        elif not _is_torch(frame) or not (found or _is_beneath(module)):
            break
    return found


def _is_beneath(module: str) -> bool:
    """Functions of torch.distributed may call it and wait in it."""
    return module == "torch._ops" or module in _PASSED_OVER or module.startswith("torchcommshim.")


def _local(frames: list[FrameType], names: tuple[str, ...], kind: type) -> Any:
    """The innermost frame's argument of that name and type, as the caller has given it."""
    for frame in frames[:1]:
        for name in names:
            if name in frame.f_code.co_varnames:
                value = frame.f_locals.get(name)
                if type(value) is kind:
                    return value
    return None


def _text(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def _span(frame: FrameType) -> tuple[int, ...]:
    """Where the instruction in progress is written; empty before Python 3.11, and where that is left out."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None or frame.f_lasti < 0:
        return ()
    found = next(islice(positions(), frame.f_lasti // 2, None), ())
    return () if None in found else tuple(found)


def _count(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except Exception:  # a backend that does not count, or a group that is gone
        return None


def _timeout_s(group: Any) -> float | None:
    """The shortest of the group's backends' time-outs."""
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return float(min(backend.options._timeout.total_seconds() for backend in backends))
    except Exception:  # a backend without options
        return None


def _thread_name(ident: int) -> str:
    for thread in threading.enumerate():
        if thread.ident == ident:
            return thread.name
    return f"thread {ident}"
