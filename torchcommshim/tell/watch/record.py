# SPDX-License-Identifier: Apache-2.0
"""What a rank writes down of itself, and its watcher reads: a piece of memory that both map.

The last few creations have a slot each: when it ended, and the call with when it began.  One that has not
ended keeps its slot, so creations may nest, and threads may make them.  A call carries a checksum: a reader
that meets the writer half-way sees that it does not fit, and looks again.  When it ended is one number,
written at once; what the slot's last call has left there is older than the call.  Two more slots are for
what is known of the world, and for where the rank was at the sampler's last look; when that was stands where
a creation's end does.
"""

from __future__ import annotations

import fcntl
import marshal
import mmap
import os
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import adler32

from torchcommshim.tell.watch.places import Sample

if TYPE_CHECKING:
    from torchcommshim.repair.calls import Call

_CREATIONS = 8  # how many are kept
_FACTS, _SAMPLE = _CREATIONS, _CREATIONS + 1  # the slots after theirs
_SLOTS = _CREATIONS + 2
_ENDED = struct.Struct("d")
_HEAD = struct.Struct("II")  # checksum of the payload, and its length; after when it ended
_TEXTS = 8192  # bytes of a slot for names and paths, beside the ranks
_RANK = 5  # bytes that marshal takes for a rank
_LISTS = 4  # of ranks, as long as the world at most: the group's, and of a split the parent's, and the parts'
_FORMAT = 2  # marshal's, without its references, which take time to find; both sides run one Python
_LOOKS = 20  # at a slot, until one finds it whole


class Entry(NamedTuple):
    """One creation of a rank; see `calls.Call`.

    Attributes:
        split: the first four of `calls.Split`.
        started, ended: seconds on the host's monotonic clock; `ended` is 0 until it has returned.
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    backend: str
    name: str
    site: str
    split: tuple[Any, ...] | None
    started: float
    ended: float = 0.0


class Struck(NamedTuple):
    """The first creation of its sort that a defect strikes and nothing repairs; see `defects.Defect`."""

    number: int
    site: str
    defect: str
    title: str
    upstream: str


class Record:
    """The rank's side: writes.

    Attributes:
        descriptor: of the memory, for the watcher to inherit.
    """

    def __init__(self, world_size: int) -> None:
        self.descriptor = memory_file("record")
        self._slot_size = _slot_size(world_size)
        os.ftruncate(self.descriptor, _SLOTS * self._slot_size)
        self._memory = mmap.mmap(self.descriptor, 0)
        self._ends = memoryview(self._memory).cast("d")
        self._lock = threading.RLock()  # a signal's handler may make a group in the thread that is writing
        self._free = deque(range(_CREATIONS))  # slots; the one on the left has ended first
        self._open: dict[int, int] = {}  # slots, by the identity of their calls
        self._began = [0.0] * _CREATIONS

    def begin(self, call: Call) -> None:
        """`call` begins.  It goes unrecorded if its names are absurdly long, or 8 others have not ended."""
        with self._lock:
            if not self._free:
                return
            slot = self._free.popleft()
            self._began[slot] = time.monotonic()  # not before: the slot's last call may only just have ended
            if self._write(slot, (*_content(call), self._began[slot])):
                self._open[id(call)] = slot
            else:
                self._free.appendleft(slot)

    def become(self, call: Call, other: Call) -> None:
        """`call`, which goes on, is known better by now: as `other`."""
        with self._lock:
            slot = self._open.pop(id(call), None)
            if slot is not None:
                self._open[id(other)] = slot
                self._write(slot, (*_content(other), self._began[slot]))

    def end(self, call: Call) -> None:
        """`call` has returned, or raised."""
        with self._lock:
            slot = self._open.pop(id(call), None)
            if slot is not None:
                self._ends[slot * self._slot_size // _ENDED.size] = time.monotonic()
                self._free.append(slot)

    def facts(self, bound: bool, struck: list[Struck]) -> None:
        """Note what is known of the world: has it a device_id, and what strikes its creations."""
        with self._lock:
            self._write(_FACTS, (bound, [tuple(each) for each in struck]))

    def sample(self, sample: tuple[Any, ...]) -> bool:
        """Note where the rank is, `Sample.plain`, if it fits: did it?"""
        with self._lock:
            return self._write(_SAMPLE, sample)

    def beat(self) -> None:
        """The sampler has looked."""
        self._ends[_SAMPLE * self._slot_size // _ENDED.size] = time.monotonic()

    def _write(self, slot: int, content: tuple[Any, ...]) -> bool:
        """Write `content`, if it fits: did it?"""
        payload = marshal.dumps(content, _FORMAT)
        start, size = slot * self._slot_size + _ENDED.size, _HEAD.size + len(payload)
        if _ENDED.size + size > self._slot_size:
            return False
        # Adler-32 needs no tables, which a rank that has just made a group would have to fetch first.
        self._memory[start : start + size] = _HEAD.pack(adler32(payload), len(payload)) + payload
        return True


def _content(call: Call) -> tuple[Any, ...]:
    split = call.split and tuple(call.split[:4])
    return call.number, call.kind, call.ranks, call.backend, call.name, call.site, split


class Reader:
    """The watcher's side: reads."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self._slot_size = _slot_size(world_size)
        self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)

    def entries(self) -> list[Entry]:
        """The creations that are kept, the first to begin first."""
        entries = []
        for slot in range(_CREATIONS):
            content = self._read(slot)
            if content is not None:
                (ended,) = _ENDED.unpack_from(self._memory, slot * self._slot_size)
                *_, started = content
                entries.append(Entry._make((*content, ended if ended > started else 0.0)))
        return sorted(entries, key=lambda entry: entry.started)

    def facts(self) -> tuple[bool, list[Struck]]:
        """What `Record.facts` was told last."""
        bound, struck = self._read(_FACTS) or (False, [])
        return bound, [Struck(*each) for each in struck]

    def sample(self) -> Sample:
        """Where the rank was when its sampler looked last; it may have moved on since."""
        content = self._read(_SAMPLE)
        return Sample.of(content) if content else Sample()

    def beaten(self) -> float:
        """When the sampler has looked last, on the host's monotonic clock; 0 if it never has."""
        return float(_ENDED.unpack_from(self._memory, _SAMPLE * self._slot_size)[0])

    def _read(self, slot: int) -> tuple[Any, ...] | None:
        """What the slot holds; None if it was never written, or never seen whole."""
        start = slot * self._slot_size + _ENDED.size
        for _ in range(_LOOKS):
            checksum, length = _HEAD.unpack_from(self._memory, start)
            if not length:
                return None
            payload = self._memory[start + _HEAD.size : start + _HEAD.size + length]
            if adler32(payload) == checksum:
                content: tuple[Any, ...] = marshal.loads(payload)  # from the rank that started this process
                return content
            time.sleep(0.0005)
        return None


def memory_file(name: str) -> int:
    """The descriptor of a new file in memory."""
    return above_streams(os.memfd_create(f"torchcommshim-{name}"))


def above_streams(descriptor: int) -> int:
    """Another number for what `descriptor` is, above those of the standard streams; the old one is closed.

    Where a stream is closed a new file takes its number, and what writes to the stream writes to the file.
    """
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def _slot_size(world_size: int) -> int:
    size = _ENDED.size + _HEAD.size + _TEXTS + _LISTS * _RANK * world_size
    return -(-size // _ENDED.size) * _ENDED.size  # aligned, so that when it ended is written at once
