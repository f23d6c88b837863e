# SPDX-License-Identifier: Apache-2.0
"""What a rank writes down of its creations, and its watcher reads: a piece of memory that both map.

The last few creations have a slot each: the call, when it began, and when it ended.  One that has not ended
keeps its slot, so creations may nest, and threads may make them.  A slot carries a checksum: a reader that
meets the writer half-way sees that it does not fit, and looks again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import struct
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torchcommshim.calls import Call

_CREATIONS = 8  # how many are kept
_FACTS = _CREATIONS  # the slot after theirs
_HEAD = struct.Struct("=IId")  # checksum of the rest, length of the payload, when it ended (0: it has not)
_ENDED = struct.Struct("=d")
_TEXTS = 8192  # bytes of a slot for names and paths, beside the ranks
_RANK = 5  # bytes that pickle takes for a rank
_LOOKS = 20  # at a slot, until one finds it whole


class Entry(NamedTuple):
    """One creation of a rank; see `calls.Call`.

    Attributes:
        started, ended: seconds on the host's monotonic clock; `ended` is 0 until it has returned.
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    backend: str
    name: str
    site: str
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
        os.ftruncate(self.descriptor, (_FACTS + 1) * self._slot_size)
        self._memory = mmap.mmap(self.descriptor, 0)
        self._lock = threading.Lock()
        self._next = 0
        self._open: dict[int, tuple[int, int, int]] = {}  # by call: slot, checksum of payload, its length

    def begin(self, call: Call) -> None:
        """`call` begins.  It goes unrecorded if its names are absurdly long, or 8 others have not ended."""
        entry = (call.number, call.kind, call.ranks, call.backend, call.name, call.site, time.monotonic())
        payload = pickle.dumps(entry, 4)
        with self._lock:
            taken = [slot for slot, _, _ in self._open.values()]
            if len(taken) == _CREATIONS or _HEAD.size + len(payload) > self._slot_size:
                return
            while self._next in taken:
                self._next = (self._next + 1) % _CREATIONS
            self._open[id(call)] = self._next, self._write(self._next, payload), len(payload)
            self._next = (self._next + 1) % _CREATIONS

    def end(self, call: Call) -> None:
        """`call` has returned, or raised."""
        with self._lock:
            if id(call) in self._open:
                slot, checksum, length = self._open.pop(id(call))
                ended = time.monotonic()
                head = _HEAD.pack(zlib.crc32(_ENDED.pack(ended), checksum), length, ended)
                self._memory[slot * self._slot_size : slot * self._slot_size + _HEAD.size] = head

    def facts(self, bound: bool, struck: list[Struck]) -> None:
        """Note what is known of the world: has it a device_id, and what strikes its creations."""
        payload = pickle.dumps((bound, [tuple(each) for each in struck]), 4)
        if _HEAD.size + len(payload) <= self._slot_size:
            with self._lock:
                self._write(_FACTS, payload)

    def _write(self, slot: int, payload: bytes) -> int:
        """Returns the payload's checksum."""
        checksum = zlib.crc32(payload)
        head = _HEAD.pack(zlib.crc32(_ENDED.pack(0.0), checksum), len(payload), 0.0)
        offset = slot * self._slot_size
        self._memory[offset : offset + _HEAD.size + len(payload)] = head + payload
        return checksum


class Reader:
    """The watcher's side: reads."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self._slot_size = _slot_size(world_size)
        self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)

    def entries(self) -> list[Entry]:
        """The creations that are kept, the first to begin first."""
        slots = filter(None, map(self._read, range(_CREATIONS)))
        entries = [Entry._make((*payload, ended)) for payload, ended in slots]
        return sorted(entries, key=lambda entry: entry.started)

    def facts(self) -> tuple[bool, list[Struck]]:
        """What `Record.facts` was told last."""
        found = self._read(_FACTS)
        bound, struck = found[0] if found else (False, [])
        return bound, [Struck(*each) for each in struck]

    def _read(self, slot: int) -> tuple[Any, float] | None:
        """The slot's payload, and when it ended; None if it was never written, or never seen whole."""
        offset = slot * self._slot_size
        for _ in range(_LOOKS):
            checksum, length, ended = _HEAD.unpack_from(self._memory, offset)
            if not length:
                return None
            payload = self._memory[offset + _HEAD.size : offset + _HEAD.size + length]
            if zlib.crc32(_ENDED.pack(ended), zlib.crc32(payload)) == checksum:
                return pickle.loads(payload), ended  # noqa: S301 - from the rank that started this process
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
    return _HEAD.size + _TEXTS + _RANK * world_size
