# SPDX-License-Identifier: Apache-2.0
"""Show each defect without and with the shim, on this machine: `torchcommshim verify`.

Scenarios are plain scripts that know nothing of the shim.  Each runs through torchrun, first without it
and then with it, under a deadline, and is judged ok, hang, wrong (a sum was wrong) or error.  On GPUs
they use real NCCL; without a GPU NCCL is simulated, and the first line says so.

Exit codes: 0 if every scenario is ok with each strategy; 1 if one is not; 2 for bad usage; 130 if
interrupted, and then what has been judged by then is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Iterator, Sequence

import torchcommshim
from torchcommshim.commands.options import positive
from torchcommshim.commands.verify import catalogue, table
from torchcommshim.commands.verify.catalogue import Scenario
from torchcommshim.commands.verify.runner import Machine, NoTorch, Runner, free, look
from torchcommshim.commands.verify.verdicts import NOT_JUDGED, OK, Verdict

SIMULATED_DEADLINE = 10.0
REAL_DEADLINE = 60.0

Results = dict[tuple[str, str], Verdict]


class BadUsage(Exception):
    """The arguments cannot be followed; the message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add verify's options to a parser."""
    parser.add_argument(
        "--strategy",
        action="append",
        metavar="NAME",
        help=f"what to run with, of {', '.join(catalogue.STRATEGIES)}; repeat, or separate by commas (auto)",
    )
    parser.add_argument(
        "--scenario", action="append", metavar="NAME", help="run this one only; may be repeated (all)"
    )
    parser.add_argument("--nproc", type=positive(int), default=4, metavar="N", help="number of ranks (4)")
    parser.add_argument(
        "--simulate", action="store_true", help="use simulated NCCL even where there are GPUs"
    )
    parser.add_argument(
        "--deadline",
        type=positive(float),
        metavar="SECONDS",
        help=f"a run that takes longer, once all ranks have started, hangs ({REAL_DEADLINE:.0f} on GPUs, "
        f"{SIMULATED_DEADLINE:.0f} simulated)",
    )
    parser.add_argument(
        "--jobs", type=positive(int), default=1, metavar="N", help="how many runs at the same time (1)"
    )
    parser.add_argument(
        "--port",
        type=positive(int),
        metavar="PORT",
        help="torchrun's port; with --jobs also those above (any)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON document to FILE as well")


def main(chosen: argparse.Namespace) -> int:
    """Run the scenarios and show what came of them; returns the exit code."""
    with _sigterm_interrupts():
        return _verify(chosen)


def _verify(chosen: argparse.Namespace) -> int:
    results: Results = {}
    interrupted = False
    try:
        scenarios, strategies = _scenarios(chosen), _strategies(chosen)
        _check_ports(chosen)
        _check_output(chosen.output)
        machine = look(chosen.simulate)
        if not chosen.json:
            print(table.first_line(machine, chosen.nproc), flush=True)
        columns = ("off", *strategies)
        results = dict.fromkeys(product((each.name for each in scenarios), columns), Verdict(NOT_JUDGED, 0.0))
        _run_all(chosen, machine, scenarios, results)
    except (BadUsage, NoTorch) as error:
        sys.stderr.write(f"torchcommshim verify: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("torchcommshim verify: interrupted; all processes that it started are gone\n")
        if not results:
            return 130
        interrupted = True
    document = _document(chosen, machine, scenarios, strategies, results, interrupted=interrupted)
    text = json.dumps(document, indent=2) + "\n"
    if chosen.output:
        chosen.output.write_text(text)
    if chosen.json:
        print(text, end="")
    else:
        color = table.wants_color(sys.stdout, os.environ)
        print("", *table.table(scenarios, strategies, results, color=color), sep="\n")
        print(*table.details(scenarios, strategies, results), sep="\n")
    if interrupted:
        return 130
    return 0 if document["ok"] else 1


def _scenarios(chosen: argparse.Namespace) -> list[Scenario]:
    names = chosen.scenario or list(catalogue.NAMES)
    for name in names:
        if name not in catalogue.NAMES:
            raise BadUsage(f"no scenario {name!r}; there are: {', '.join(catalogue.NAMES)}")
    scenarios = [catalogue.load(name) for name in dict.fromkeys(names)]
    short = [scenario for scenario in scenarios if scenario.minimum_ranks > chosen.nproc]
    if short:
        needs = ", ".join(f"{scenario.name} needs {scenario.minimum_ranks}" for scenario in short)
        raise BadUsage(f"--nproc {chosen.nproc} is too few ranks: {needs}")
    return scenarios


def _strategies(chosen: argparse.Namespace) -> list[str]:
    names = ",".join(chosen.strategy or ["auto"]).split(",")
    for name in names:
        if name not in catalogue.STRATEGIES:
            raise BadUsage(f"no strategy {name!r} that repairs; there are: {', '.join(catalogue.STRATEGIES)}")
    return list(dict.fromkeys(names))


def _ports(chosen: argparse.Namespace) -> list[int | None]:
    if chosen.port is None:
        return [None] * chosen.jobs
    return list(range(chosen.port, chosen.port + chosen.jobs))


def _check_ports(chosen: argparse.Namespace) -> None:
    for port in _ports(chosen):
        if port is not None and port > 65535:
            raise BadUsage(f"port {port} is out of range")
        if port is not None and not free(port):
            raise BadUsage(f"port {port} is taken; choose another, or leave --port out to have one found")


def _check_output(file: Path | None) -> None:
    """The runs take minutes: what would be lost after them is refused before."""
    if file is None:
        return
    try:
        existed = file.exists()
        file.open("a").close()
        if not existed:  # an interrupted run would leave it, empty
            file.unlink()
    except OSError as error:
        raise BadUsage(f"--output {file}: {error.strerror}") from error


def _run_all(
    chosen: argparse.Namespace, machine: Machine, scenarios: Sequence[Scenario], results: Results
) -> None:
    """Run all that is in `results`, and put there what comes of each run as soon as it ends."""
    by_name = {scenario.name: scenario for scenario in scenarios}
    deadline = chosen.deadline or (SIMULATED_DEADLINE if machine.simulated else REAL_DEADLINE)
    runner = Runner(chosen.nproc, deadline, machine.simulated, threading.Event())
    ports = _ports(chosen)

    def run(name: str, strategy: str) -> str:
        port = ports.pop()
        try:
            verdict = results[name, strategy] = runner.run_scenario(by_name[name], strategy, port)
        finally:
            ports.append(port)
        return f"{name} {table.how(strategy)}: {verdict.verdict}"

    with ThreadPoolExecutor(chosen.jobs) as pool:
        try:
            futures = [pool.submit(run, *each) for each in results]
            _progress(f"0/{len(results)}")
            for number, future in enumerate(as_completed(futures), 1):
                _progress(f"{number}/{len(results)} {future.result()}")
        except BaseException:
            runner.cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)  # leaving the block waits
            raise
        finally:
            _end_progress()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM, which would leave the ranks behind, act as Ctrl-C does.

    Only the first of either does: what follows, the end of all ranks and their verdicts, takes seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def interrupt(*_: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as a job in the background ignores Ctrl-C
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress(text: str) -> None:
    """One line that is written over on a terminal, a line for each run elsewhere."""
    terminal = sys.stderr.isatty()
    sys.stderr.write(f"\r\033[K{text}" if terminal else f"{text}\n")
    sys.stderr.flush()


def _end_progress() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")


def _document(
    chosen: argparse.Namespace,
    machine: Machine,
    scenarios: Sequence[Scenario],
    strategies: Sequence[str],
    results: Results,
    *,
    interrupted: bool,
) -> dict[str, Any]:
    return {
        "torchcommshim": torchcommshim.__version__,
        **asdict(machine),
        "ranks": chosen.nproc,
        "strategies": list(strategies),
        "interrupted": interrupted,
        "ok": not interrupted
        and all(found.verdict == OK for (_, strategy), found in results.items() if strategy != "off"),
        "scenarios": [
            {
                "name": scenario.name,
                "title": scenario.title,
                "upstream": scenario.upstream,
                "without": asdict(results[scenario.name, "off"]),
                "with": {strategy: asdict(results[scenario.name, strategy]) for strategy in strategies},
            }
            for scenario in scenarios
        ],
    }
