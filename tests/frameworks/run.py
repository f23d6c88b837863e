# SPDX-License-Identifier: Apache-2.0
"""Run all programs in all ways in the given environments, and write docs/compatibility.md.

    cd tests && python -m frameworks.run [--only NAME,...] [--page FILE] CHOICE=VENV[,VENV...] ...

CHOICE is `newest` or `pinned`.  A program runs in the first environment of a choice that has its packages.
torchcommshim is installed in each, and in the Python that runs this.  Exits 1 if a row is not green; but a
newest release that does not train without the shim either, here and on this torch, is said and passed over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Sequence

from frameworks.catalogue import PROGRAMS, WAYS_OF, WITHOUT, Program
from frameworks.jobs import HANG_REPORT_S, Run, run
from frameworks.judge import Environment, Row, judge, judge_without, new_lines
from frameworks.page import page

LIMIT_S = 240  # of a run that is to train
AT_ONCE = 2  # most of a run is starting Python on one core, or waiting

_ASK = """
import importlib.metadata, json, platform
found = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
print(json.dumps([found, platform.python_version()]))
"""


def main() -> None:
    """Run the command line above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="names of programs, with commas between them")
    parser.add_argument("--page", type=Path, help="where the page goes; without it, none is written")
    parser.add_argument("choices", nargs="+", metavar="CHOICE=VENV,...")
    arguments = parser.parse_args()
    only = arguments.only.split(",") if arguments.only else [program.name for program in PROGRAMS]
    tasks = []
    for choice, _, venvs in (each.partition("=") for each in arguments.choices):
        pythons = [Path(os.path.abspath(venv)) / "bin" / "python" for venv in venvs.split(",")]
        asked = [(python, ask(python)) for python in pythons]
        chosen = [program for program in PROGRAMS if program.name in only]
        tasks += [(program, *place(program, choice, asked)) for program in chosen]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(lambda task: try_out(*task), tasks))
    if arguments.page:
        text = page(rows, f"{date.today():%Y-%m-%d}", machine(rows), HANG_REPORT_S)
        arguments.page.write_text(text)
    failed = sum(not row.green and not row.passed_over for row in rows)
    passed_over = sum(row.passed_over for row in rows)
    print(f"{len(rows) - failed - passed_over} passed, {failed} failed, {passed_over} skipped")
    sys.exit(bool(failed))


def machine(rows: Sequence[Row]) -> str:
    """Where it ran, as far as it matters."""
    pythons = " and ".join(dict.fromkeys(row.environment.python for row in rows))
    return f"Python {pythons}, {platform.machine()}, {os.cpu_count()} cores"


def ask(python: Path) -> tuple[dict[str, str], str]:
    """The packages of an environment, and its Python's version."""
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
    found, version = json.loads(done.stdout)
    return found, version


def place(
    program: Program, choice: str, asked: Sequence[tuple[Path, tuple[dict[str, str], str]]]
) -> tuple[Path, Environment]:
    """The environment in which a program is run."""
    for python, (found, version) in asked:
        if all(package in found for package in program.packages):
            versions = {package: found[package] for package in program.packages}
            return python, Environment(choice, versions, found["torch"], version)
    raise SystemExit(f"{choice}: no environment has {' and '.join(program.packages)}")


_screen = threading.Lock()


def try_out(program: Program, python: Path, environment: Environment) -> Row:
    """Run a program in all ways."""
    row = Row(program, environment)
    reference = run(program, python, WITHOUT.variables, LIMIT_S, simulated=False)
    without = reference
    if program.simulated and reference.trained:
        without = run(program, python, WITHOUT.variables, 15 + 3 * reference.seconds, simulated=True)
    row.without, row.problems["without"] = judge_without(program, reference, without)
    tell(row, "without", row.without, without)
    if reference.trained:
        known = {*reference.lines, *without.lines}
        for way in WAYS_OF[environment.choice]:
            ended = run(program, python, way.variables, LIMIT_S, program.simulated)
            again = None
            if ended.trained and new_lines(ended, known):
                again = run(program, python, way.variables, LIMIT_S, program.simulated)
            row.ways[way.name], row.problems[way.name] = judge(reference, ended, known, again)
            tell(row, way.name, row.ways[way.name], ended)
    return row


def tell(row: Row, way: str, words: str, ended: Run) -> None:
    """A line on the screen, and all that was printed where something is wrong."""
    with _screen:
        name = f"{row.environment.choice} {row.program.framework}"
        print(f"{name:32} {way:12} {words} ({ended.seconds:.0f} s)", flush=True)
        for problem in row.problems[way]:
            print(f"    {problem}", flush=True)
        if row.problems[way]:
            print("".join(f"    | {line}\n" for line in ended.lines[-40:]), flush=True)


if __name__ == "__main__":
    main()
