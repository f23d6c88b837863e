# SPDX-License-Identifier: Apache-2.0
"""`docs/compatibility.md`, from the rows.  Pure."""

from __future__ import annotations

from typing import Iterable, Sequence

from frameworks.catalogue import HANGS, WAYS_OF
from frameworks.judge import Row, green_ways

HEAD = """# Tried with your framework

This page is written by `scripts/test frameworks`; edit `tests/frameworks/page.py`, not this file.

Each line is a small training program on CPUs, run as it is: without the shim, with `TORCHCOMMSHIM` set to
`auto`, `strip` and `split`, and with `auto` and `TORCHCOMMSHIM_CHECK_ORDER=1`. **Same losses** means four
things: every loss and sum of every rank has the same bits as without the shim; nothing was printed that is
not printed without it, save the one line that says what was repaired; there was no hang report
({hang_report_s} s); and the shim was armed in each process. The number of repairs is the largest of any
rank.

A world of **gloo** is not bound to a device, so the shim has nothing to repair there and must not be
noticed. A world of **simulated NCCL** is bound to one, as `init_process_group(device_id=...)` makes it.
What is said of it was not seen on GPUs. Its losses are compared with those of the same program over gloo.

Last run: {day}, {machine}.
"""

COLUMNS = ("framework", "version", "torch", "world", "without")


def page(rows: Sequence[Row], day: str, machine: str, hang_report_s: int) -> str:
    """The whole page."""
    parts = [HEAD.format(day=day, machine=machine, hang_report_s=hang_report_s)]
    choices = list(dict.fromkeys(row.environment.choice for row in rows))
    for choice in choices:
        some = [row for row in rows if row.environment.choice == choice]
        parts += [f"## {TITLES[choice]}\n", table(some, [way.name for way in WAYS_OF[choice]])]
    parts += ["## What is not green\n", not_green(rows)]
    parts += ["## The programs\n", programs(rows)]
    return "\n".join(parts)


TITLES = {
    "newest": "The newest releases",
    "pinned": "Older releases, always the same ones",
}


def table(rows: Iterable[Row], ways: Sequence[str]) -> str:
    """One line a row."""
    columns = [*COLUMNS, *ways, "result"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        versions = ", ".join(
            version if len(row.program.packages) == 1 else f"{package} {version}"
            for package, version in row.environment.versions.items()
        )
        lines.append(
            [
                row.program.framework,
                versions or "part of torch",
                row.environment.torch,
                "simulated NCCL" if row.program.simulated else "gloo",
                row.without,
                *(row.ways.get(way, "not run") for way in ways),
                "green" if row.green else "**not green**",
            ]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def not_green(rows: Iterable[Row]) -> str:
    """The reason, and what helps, for each row that is not green."""
    lines = []
    for row in rows:
        for way, problems in row.problems.items():
            for problem in problems:
                name = f"{row.program.framework} ({row.environment.choice}), {way}"
                lines.append(f"- {name}: {problem}. {help_for(row, way)}\n")
    return "".join(lines) or "Nothing: every line above is green.\n"


def help_for(row: Row, way: str) -> str:
    """The work-around."""
    if way == "without":
        return "The shim has no part in it."
    others = green_ways(row)
    if others:
        return f"Work-around: {' or '.join(others)} is green."
    if row.without == HANGS:
        return "No way is green."
    return "Work-around: `TORCHCOMMSHIM=off`."


def programs(rows: Iterable[Row]) -> str:
    """What each program does, and why it hangs without the shim, if it does."""
    lines = []
    for program in dict.fromkeys(row.program for row in rows):
        why = f" Without the shim it hangs: `{program.why}`." if program.why else ""
        lines.append(
            f"- {program.framework} "
            f"(`tests/frameworks/programs/{program.name}.py`): {program.what}.{why}\n"
        )
    return "".join(lines)
