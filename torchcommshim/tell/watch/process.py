# SPDX-License-Identifier: Apache-2.0
"""Is it still the same process?  A number is given to another one some time after its process has ended."""

from __future__ import annotations


def started(pid: int) -> str | None:
    """When the process with that number began, as the kernel counts; None if it has ended.

    One that has ended and that its parent has not asked for counts as ended.
    """
    fields = _fields(pid)
    return None if not fields or fields[0] in "ZX" else fields[19]


def is_stopped(pid: int) -> bool:
    """A signal or a debugger has stopped it."""
    return _fields(pid)[:1] in (["T"], ["t"])


def busy_s(pid: int) -> float:
    """Seconds of processor time that the process's main thread has used; 0 if that is not known."""
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", "rb") as schedule:
            return int(schedule.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, those after the name; none if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return (
                stat.read().decode(errors="replace").rpartition(")")[2].split()
            )  # the name may hold anything
    except OSError:
        return []
