# SPDX-License-Identifier: Apache-2.0
"""The Python stack of a rank that is blocked, perhaps with Python's global lock held.

`faulthandler` writes it from a signal's C handler, which needs no lock and costs nothing until the signal
comes.  Its timer, `dump_traceback_later`, would do as well, but a process has one: arming it cancels a
timer of the program's own (pytest sets one), and each creation would start a thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from typing import NamedTuple

from torchcommshim.tell.watch.places import Place
from torchcommshim.tell.watch.process import started
from torchcommshim.tell.watch.record import memory_file

_PATIENCE_S = 0.5
_PASSED_OVER = (
    "/torchcommshim/patches.py",
    "/torchcommshim/repair/shim.py",
    "/torchcommshim/repair/calls.py",
    "/torch/distributed/c10d_logger.py",
)


class Stack(NamedTuple):
    """How to get the stack of a process's main thread.

    Attributes:
        pid, started: the process, see `process.started`.
        signal: that makes it write.
        descriptor: of the file that it writes to.
    """

    pid: int
    started: str | None
    signal: int
    descriptor: int


_offered: Stack | None = None  # in this process, or the one it was forked from


def offer() -> Stack | None:
    """Have this process write its main thread's stack on a signal that nobody uses.

    Returns:
        None if there is no such signal, or no /proc to learn it from.
    """
    global _offered
    number = _offered.signal if _offered else None
    if number and not _handles(os.getpid(), number):
        if not _has(os.getpid(), number, "SigIgn"):  # the program has taken the handler away, and no more
            faulthandler.unregister(number)
        number = None
    number = number or _free_signal(os.getpid())
    if number is None:
        return None
    stack = Stack(os.getpid(), started(os.getpid()), number, memory_file("stack"))
    # The stacks of other threads would be read while they run, which can go wrong; this one stands still.
    faulthandler.register(number, file=stack.descriptor, all_threads=False, chain=False)
    if _offered:
        os.close(_offered.descriptor)
    _offered = stack
    return stack


def _free_signal(pid: int) -> int | None:
    """A real-time signal that this process neither handles, ignores nor blocks, in Python or in C."""
    used = _masks(pid, "SigCgt", "SigIgn", "SigBlk")
    if not used:
        return None
    numbers = range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1)
    return next((number for number in numbers if not used >> (number - 1) & 1), None)


def take(stack: Stack) -> list[str]:
    """The innermost frames as `file:line function`, the innermost first; empty if they do not come."""
    # Whoever does not handle a real-time signal dies of it.
    if started(stack.pid) != stack.started or not _handles(stack.pid, stack.signal):
        return []
    before = written = os.fstat(stack.descriptor).st_size
    os.kill(stack.pid, stack.signal)
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        time.sleep(0.02)
        now = os.fstat(stack.descriptor).st_size
        if now == written > before:
            break
        written = now
    text = os.pread(stack.descriptor, written - before, before).decode(errors="replace")
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', text, re.MULTILINE)
    return [
        f"{file}:{line} {function}"
        for file, line, function in found
        if not file.endswith(_PASSED_OVER) and not file.startswith("<frozen ")
    ]


def called(frame: str) -> str:
    """What `frame` calls, by its line of source: `perform_nocolor_split`; empty if that cannot be read."""
    file, _, rest = frame.rpartition(":")
    call = re.search(r"(\w+)\(", linecache.getline(file, int(rest.partition(" ")[0])))
    return call[1] if call else ""


def written(place: Place) -> str:
    """The call in progress in the innermost frame, as its file has it; the line if Python tells no more."""
    if not place.stack:
        return ""
    file, _, rest = place.stack[0].rpartition(":")
    if not place.span:
        return linecache.getline(file, int(rest.partition(" ")[0])).strip()
    first, last, column, end = place.span
    if first != last:
        return linecache.getline(file, first).strip()
    return linecache.getline(file, first).encode()[column:end].decode(errors="replace")


def _handles(pid: int, number: int) -> bool:
    return _has(pid, number, "SigCgt")


def _has(pid: int, number: int, mask: str) -> bool:
    return bool(_masks(pid, mask) >> (number - 1) & 1)


def _masks(pid: int, *names: str) -> int:
    """The union of these signal masks of a process: bit n - 1 stands for signal n; 0 if they are unknown."""
    found = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            name, _, value = line.partition(":")
            found |= int(value, 16) if name in names else 0
    return found
