# SPDX-License-Identifier: Apache-2.0
"""What verify shows: a first line, a table, and what is behind each verdict that is not ok."""

from __future__ import annotations

from typing import Mapping, Sequence, TextIO

from torchcommshim.commands.verify.catalogue import Scenario
from torchcommshim.commands.verify.runner import Machine
from torchcommshim.commands.verify.verdicts import NOT_JUDGED, OK, Verdict

GREEN, RED, YELLOW, PLAIN = "\033[32m", "\033[31m", "\033[33m", "\033[0m"

COLUMN = 16  # characters

# Verdicts by (scenario's name, strategy); the strategy `off` is the run without the shim.
Results = Mapping["tuple[str, str]", Verdict]


def first_line(machine: Machine, ranks: int) -> str:
    """What the scenarios run on; says so where NCCL is simulated."""
    versions = f"torch {machine.torch}, Python {machine.python}"
    if machine.simulated:
        return f"SIMULATED NCCL (no GPU is used): {ranks} ranks, {versions}"
    gpus = len(machine.gpus)
    return (
        f"Real NCCL {machine.nccl}: {ranks} ranks on {min(ranks, gpus)} of {gpus} "
        f"GPU{'s' if gpus > 1 else ''} ({machine.gpus[0]}), {versions}"
    )


def how(strategy: str) -> str:
    """A run's strategy in words: `without` the shim, or `with auto`."""
    return "without" if strategy == "off" else f"with {strategy}"


def table(
    scenarios: Sequence[Scenario], strategies: Sequence[str], results: Results, *, color: bool
) -> list[str]:
    """The table's lines: a row for each scenario, a column without the shim and one for each strategy."""
    columns = ["off", *strategies]
    width = max(len(scenario.name) for scenario in scenarios) + 2
    lines = ["scenario".ljust(width) + "".join(how(strategy).ljust(COLUMN) for strategy in columns)]
    for scenario in scenarios:
        cells = [_cell(results[scenario.name, strategy], strategy, color=color) for strategy in columns]
        lines.append(scenario.name.ljust(width) + "".join(cells))
    return [line.rstrip() for line in lines]


def details(scenarios: Sequence[Scenario], strategies: Sequence[str], results: Results) -> list[str]:
    """What is behind each verdict that is not ok, and what scenarios had to say."""
    lines = []
    for scenario in scenarios:
        for strategy in ("off", *strategies):
            found = results[scenario.name, strategy]
            lines += [f"{scenario.name} {how(strategy)}: {note}" for note in found.notes]
            if found.verdict in (OK, NOT_JUDGED):
                continue
            lines += [
                "",
                f"{scenario.name} {how(strategy)}: {found.verdict}  ({scenario.title}; {scenario.upstream})",
            ]
            lines += [f"  {line}" for line in found.lines()]
    return lines


def wants_color(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """NO_COLOR and FORCE_COLOR, if not empty, decide in this order; else whether it is a terminal."""
    if environment.get("NO_COLOR"):
        return False
    return bool(environment.get("FORCE_COLOR")) or (stream.isatty() and environment.get("TERM") != "dumb")


def _cell(found: Verdict, strategy: str, *, color: bool) -> str:
    if found.verdict == NOT_JUDGED:
        return found.verdict.ljust(COLUMN)
    text = f"{found.verdict} {found.seconds:.0f} s".ljust(COLUMN)
    if not color:
        return text
    shade = GREEN if found.verdict == OK else YELLOW if strategy == "off" else RED
    return f"{shade}{text}{PLAIN}"
