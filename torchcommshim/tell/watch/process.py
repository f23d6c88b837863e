# SPDX-License-Identifier: Apache-2.0
"""Is it still the same process?  A number is given to another one some time after its process has ended."""

from __future__ import annotations


def started(pid: int) -> str | None:
    """When the process with that number began, as the kernel counts; None if it has ended.

    One that has ended and that its parent has not asked for counts as ended.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = (
                stat.read().decode(errors="replace").rpartition(")")[2].split()
            )  # the name may hold anything
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
