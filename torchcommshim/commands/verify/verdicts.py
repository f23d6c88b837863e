# SPDX-License-Identifier: Apache-2.0
"""What became of one run, read from what its ranks left behind.

| verdict    | what it means                                                                     |
| ---------- | --------------------------------------------------------------------------------- |
| ok         | every rank ended by itself and every sum was right                                |
| wrong      | a sum was wrong, whatever else happened: it is the failure that nobody notices    |
| hang       | a rank was still at work when the deadline came                                   |
| error      | a rank raised, or died                                                            |
| not judged | verify was interrupted before the run had ended                                   |
"""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

OK, WRONG, HANG, ERROR, NOT_JUDGED = "ok", "wrong", "hang", "error", "not judged"


@dataclass(frozen=True)
class Wait:
    """Where a rank was when the run was ended.

    Attributes:
        rank: the rank.
        line: of the scenario's script; None if it was not in it, before its start or after its end.
        code: that line.
        inside: what it waits in: torch's function and the call in it, `all_reduce: wait`.
    """

    rank: int
    line: int | None
    code: str
    inside: str


@dataclass(frozen=True)
class Sum:
    """A wrong sum: `rank` of the group of `ranks` got `got` where `expected` was right."""

    ranks: list[int]
    rank: int
    got: int
    expected: int


@dataclass(frozen=True)
class Failure:
    """The exception that ended a rank, in one line; `rank` is None where the launcher failed."""

    rank: int | None
    message: str


@dataclass(frozen=True)
class Verdict:
    """How one run ended.

    Attributes:
        verdict: OK, WRONG, HANG, ERROR or NOT_JUDGED.
        seconds: from the launch to the end; 0 if it was not judged.
        waits: the ranks that were ended, and where each was.
        sums: the wrong sums.
        failures: the exceptions; those that only followed from the end of the run are left out.
        notes: what the script itself had to say.
    """

    verdict: str
    seconds: float
    waits: list[Wait] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The details for people; empty if all is well."""
        found = [f"group {s.ranks}: rank {s.rank} got {s.got}, expected {s.expected}" for s in self.sums]
        found += [
            failure.message if failure.rank is None else f"rank {failure.rank}: {failure.message}"
            for failure in self.failures
        ]

        def place(wait: Wait) -> tuple[int, str, str]:
            return (wait.line or 0, wait.code, wait.inside)

        for (line, code, inside), waits in groupby(sorted(self.waits, key=place), key=place):
            ranks = sorted(wait.rank for wait in waits)
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            found.append(f"{who}: line {line}, {code} -> {inside}" if line else f"{who}: {inside}")
        return found


WRONG_SUM = re.compile(r"^WRONG group \[([\d, ]+)\]: rank (\d+) got (-?\d+), expected (-?\d+)$", re.MULTILINE)
NOTE = re.compile(r"^NOTE (.+)$", re.MULTILINE)
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
TIMEOUT = "Timeout ("  # how faulthandler's dump begins when the deadline came
CRASH = "Fatal Python error: "  # and when the process crashed
TORCH = "/torch/distributed/"


def judge(script: Path, folder: Path, output: str, code: int, seconds: float) -> Verdict:
    """Judge a run.

    Args:
        script: the scenario's script.
        folder: where the ranks left `RANK.stacks` and `RANK.error` (see launch.py).
        output: what all ranks wrote to stdout.
        code: the launcher's exit code.
        seconds: how long it took.
    """
    stacks = _left_behind(folder, "stacks")
    failures = _failures(folder, stacks)
    failed = {failure.rank for failure in failures}
    waits = [where(script, rank, text) for rank, (text, _) in stacks.items() if text and rank not in failed]
    sums = [
        Sum([int(member) for member in ranks.split(",")], int(rank), int(got), int(expected))
        for ranks, rank, got, expected in WRONG_SUM.findall(output)
    ]
    if sums:
        verdict = WRONG
    elif failures:
        verdict = ERROR
    elif any(text.startswith(TIMEOUT) for text, _ in stacks.values()):
        verdict = HANG
    else:
        verdict = ERROR if code else OK
    sums.sort(key=_by_group)
    return Verdict(verdict, round(seconds, 1), waits, sums, failures, NOTE.findall(output))


def _left_behind(folder: Path, kind: str) -> dict[int, tuple[str, int]]:
    """What ranks left in files of one kind, and when (nanoseconds); by rank."""
    paths = sorted((int(path.stem), path) for path in folder.glob(f"*.{kind}"))
    return {rank: (path.read_text(), path.stat().st_mtime_ns) for rank, path in paths}


def _failures(folder: Path, stacks: dict[int, tuple[str, int]]) -> list[Failure]:
    """Crashes and exceptions that came before the deadline.

    Later ones follow from the end of other ranks: NCCL 2.20.5 crashes in a split whose peer has gone.
    """
    deadlines = [when for text, when in stacks.values() if text.startswith(TIMEOUT)]
    crashes = {
        rank: (text.partition("\n")[0], when)
        for rank, (text, when) in stacks.items()
        if text.startswith(CRASH)
    }
    return [
        Failure(rank, text)
        for rank, (text, when) in {**crashes, **_left_behind(folder, "error")}.items()
        if not deadlines or when < min(deadlines)
    ]


def where(script: Path, rank: int, stacks: str) -> Wait:
    """Where a rank was, from faulthandler's dump of its threads (innermost frame first)."""
    threads = [list(FRAME.finditer(text)) for text in THREAD.split(stacks)[1:]]
    for frames in threads:
        inner = next((index for index, frame in enumerate(frames) if frame["file"] == str(script)), None)
        if inner is not None:
            line = int(frames[inner]["line"])
            return Wait(rank, line, _code(frames[inner]), _inside(frames[: inner + 1]))
    return Wait(rank, None, "", "not in the script")


def _inside(frames: list[re.Match[str]]) -> str:
    innermost = next((frame for frame in frames if TORCH in frame["file"]), frames[0])
    call = re.search(r"(\w+)\(", _code(innermost))
    return f"{innermost['function']}: {call[1]}" if call else str(innermost["function"])


def _code(frame: re.Match[str]) -> str:
    return linecache.getline(frame["file"], int(frame["line"])).strip()


def _by_group(wrong: Sum) -> tuple[list[int], int]:
    return wrong.ranks, wrong.rank
