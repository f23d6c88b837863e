# SPDX-License-Identifier: Apache-2.0
"""What the runs of one program say: did the shim change anything?  Pure, so it is tested alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Iterable

from frameworks.catalogue import HANGS, TRAINS, WAYS, Program
from frameworks.jobs import Run

OURS = "torchcommshim "
_ERROR = re.compile(r"^(\[rank#\]: )?\w*(Error|Exception)\b|^terminate called|^Fatal Python")
FAILS, DIFFERS = "fails", "other losses"


@dataclass(frozen=True)
class Environment:
    """Where a program has run.

    Attributes:
        choice: how its packages were chosen, `newest` or `pinned`.
        versions: of the packages that matter.
        torch: its version.
        python: its version.
    """

    choice: str
    versions: dict[str, str]
    torch: str
    python: str


@dataclass
class Row:
    """A line of the table.

    Attributes:
        without: how the program ended without the shim.
        ways: what each way gave, in a few words; `same losses` is what it should be.
        problems: for each way (`without` too), sentences that say what is not as it should be.
    """

    program: Program
    environment: Environment
    without: str = ""
    ways: dict[str, str] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)

    @property
    def green(self) -> bool:
        """Nothing is other than it should be, in any way."""
        return not any(self.problems.values())

    @property
    def passed_over(self) -> bool:
        """A release that nobody here has chosen does not train without the shim: no fault of the shim's."""
        return self.environment.choice == "newest" and not self.ways and not self.green


def ending(run: Run) -> str:
    """How a run ended."""
    return TRAINS if run.trained else HANGS if run.hung else FAILS


def judge_without(program: Program, reference: Run, without: Run) -> tuple[str, list[str]]:
    """How a program ends without the shim, and what is not as it should be.

    Args:
        program: the one that was run.
        reference: its run over gloo, without the shim: the losses that are right.
        without: its run without the shim; the same one, where its world is one of gloo.
    """
    if not reference.trained:
        return ending(reference), [f"without the shim it {ending(reference)}: {last_words(reference)}"]
    end = ending(without)
    if end != program.without:
        return end, [f"without the shim it {end}, where it {program.without} as far as is known"]
    if end == TRAINS and without.losses != reference.losses:
        return DIFFERS, ["without the shim its losses are not those over gloo"]
    return end, []


def judge(reference: Run, run: Run, known: Iterable[str], again: Run | None = None) -> tuple[str, list[str]]:
    """What a way gave, and what is not as it should be.

    Args:
        reference: the losses that are right.
        run: with the shim.
        known: the lines that the program prints without the shim.
        again: the same once more: a line is new if both have it, since some libraries print by chance.
    """
    problems = []
    if not run.trained:
        return ending(run), [f"it {ending(run)}: {last_words(run)}"]
    if not all(status["patched"] for status in run.status.values()):
        problems.append("the shim is not armed in each of its processes")
    if run.losses != reference.losses:
        problems.append("its losses are not the same")
    if any("hang report" in line for line in run.lines):
        problems.append("there is a hang report")
    lines = new_lines(run, known)
    if again is not None:
        lines = [line for line in lines if line in new_lines(again, known)]
    if lines:
        problems.append(f"it prints what it does not print without the shim: {lines[0]}")
    repairs = sum(run.repairs.values())
    words = DIFFERS if run.losses != reference.losses else "same losses"
    return f"{words}, {repairs} repaired" if run.repairs else words, problems


def new_lines(run: Run, known: Iterable[str]) -> list[str]:
    """Lines that are not known.  Each process may say in one of ours what was repaired, if something was."""
    unknown = set(run.lines) - set(known) - {""}
    ours = [line for line in unknown if line.startswith(OURS)]
    if run.repairs and sum(run.lines.count(line) for line in ours) <= len(run.status):
        unknown -= set(ours)
    return sorted(unknown)


def last_words(run: Run) -> str:
    """The exit codes of a run that has failed, and its last line that names an error, or says something."""
    said = [line.strip() for line in run.lines if line.strip()]
    errors = [line for line in said if _ERROR.search(line)]
    return f"exit codes {run.codes}: {(errors or said or ['it said nothing'])[-1]}"


def green_ways(row: Row) -> list[str]:
    """The ways in which all is as it should be."""
    return [way.name for way in WAYS if way.name in row.ways and not row.problems.get(way.name)]
