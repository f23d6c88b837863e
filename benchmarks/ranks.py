# SPDX-License-Identifier: Apache-2.0
"""Run a function as several ranks, forked from a process that has imported torch once.

Several ranks may share a GPU (see torchcommshim.commands.verify.launch).  Without a GPU, NCCL is simulated:
good for trying a benchmark out, not for its numbers.  Each run has a deadline; a rank that still runs then
shows where it is and ends, and no process is left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from sampling import progress, ratio, spread

import torchcommshim
from torchcommshim.commands.verify.launch import share_gpus
from torchcommshim.commands.verify.switchboard import switchboard

_ASK = """
import json, platform, torch
version = platform.python_version()
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "simulated"
print(json.dumps({"torch": torch.__version__, "python": version, "nccl": nccl, "gpus": gpus}))
"""


DEADLINE = 60  # seconds that one run may take
LEAST_TIME = 8  # seconds: a run that has less is not begun


class Failed(Exception):
    """The run did not end well; says how."""


@dataclass(frozen=True)
class Condition:
    """How one run is made.

    Attributes:
        strategy: value of TORCHCOMMSHIM.
        bound: init_process_group is given a device_id.
    """

    strategy: str
    bound: bool = True


def machine(*, without_gpu: bool = True) -> dict[str, Any]:
    """What the ranks will run on.  Asked in a process of its own: after a fork, CUDA must be new.

    Raises:
        SystemExit: there is no GPU, and it does not go `without_gpu`.
    """
    asked = subprocess.run([sys.executable, "-c", _ASK], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    if not (found["gpus"] or without_gpu):
        raise SystemExit("torch finds no GPU here; --quick tries it out on simulated NCCL")
    return found


def run(
    program: Callable[[Meeting, bool], Any], condition: Condition, size: int, gpus: int, deadline: float
) -> list[Any]:
    """Run `program(meeting, bound)` on `size` ranks; returns what each returned, in rank order.

    Raises:
        Failed: a rank failed, or was still running `deadline` seconds after all had started.
    """
    import torch.distributed  # noqa: F401 - before the fork, once for all

    forked = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        address = stack.enter_context(switchboard()) if not gpus else ""
        shared = (program, condition, folder, size, gpus, deadline, _free_port(), address)
        ranks = [forked.Process(target=_rank, args=(rank, *shared), daemon=True) for rank in range(size)]
        for process in ranks:
            process.start()
        limit = time.monotonic() + deadline + 20
        while any(process.is_alive() for process in ranks) and time.monotonic() < limit:
            if any(process.exitcode for process in ranks):
                limit = min(limit, time.monotonic() + 2)  # a failed rank leaves the others waiting
            time.sleep(0.05)
        for process in ranks:
            process.kill()
            process.join()
        results = [folder / f"{rank}.json" for rank in range(size)]
        if not all(path.exists() for path in results):
            raise Failed(_why(folder, size))
        return [json.loads(path.read_text()) for path in results]


class Series:
    """Runs of one program, by turns in several ways: collects what the slowest rank says of each.

    Args:
        name: of the part, for the progress.
        program: returns numbers by name, of which the largest of any rank counts.
        size: number of ranks.
        machine: as `machine()` found it.
        seconds: after which no run goes on.
    """

    def __init__(
        self,
        name: str,
        program: Callable[[Meeting, bool], dict[str, float]],
        size: int,
        machine: dict[str, Any],
        seconds: float,
    ) -> None:
        self.name, self.program, self.size, self.machine = name, program, size, machine
        self._end = time.monotonic() + seconds
        self._runs: dict[str, list[dict[str, float]]] = {}
        self._failures: list[str] = []

    def run(self, way: str, condition: Condition) -> float:
        """Run once; what comes of it is kept.  The value is of no use, and there for `alternate`."""
        left = self._end - time.monotonic()
        try:
            if left < LEAST_TIME:
                raise Failed("no time is left")
            found = run(self.program, condition, self.size, len(self.machine["gpus"]), min(left, DEADLINE))
            slowest = {name: max(rank[name] for rank in found) for name in found[0]}
        except Failed as error:
            self._failures.append(f"{way}: {error}")
            slowest = {}
        self._runs.setdefault(way, []).append(slowest)
        progress(f"{self.name}: {way}: {_in_short(slowest) or self._failures[-1]}")
        return math.nan

    def result(self, base: str, of: str) -> dict[str, Any]:
        """Every way's numbers, and the ratio of its `of` to the way `base`'s."""
        ways = {}
        for way, runs in self._runs.items():
            names = next((list(found) for found in runs if found), [])
            ways[way] = {name: spread([found.get(name, math.nan) for found in runs]) for name in names}
            ways[way]["to_base"] = ratio(self._values(way, of), self._values(base, of))
        about = {"machine": self.machine, "ranks": self.size, "base": base, "of": of}
        return {**about, "ways": ways, "failures": self._failures}

    def _values(self, way: str, name: str) -> list[float]:
        return [found.get(name, math.nan) for found in self._runs[way]]


def _in_short(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())


class Meeting:
    """Where the ranks of a run wait for each other without torch."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self.rank, self.size = folder, rank, size
        self._count = 0

    def wait(self) -> None:
        """Return when all ranks have come here as often."""
        self._count += 1
        (self._folder / f"{self.rank}.met.{self._count}").touch()
        while len(list(self._folder.glob(f"*.met.{self._count}"))) < self.size:
            time.sleep(0.002)


def _rank(
    rank: int,
    program: Callable[[Meeting, bool], Any],
    condition: Condition,
    folder: Path,
    size: int,
    gpus: int,
    deadline: float,
    port: int,
    address: str,
) -> None:
    words = open(folder / f"{rank}.err", "w")  # noqa: SIM115 - for as long as the process
    os.dup2(words.fileno(), 2)
    sys.stderr = words
    faulthandler.dump_traceback_later(deadline, exit=True, file=words)
    place = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCHCOMMSHIM=condition.strategy)
    share_gpus(os.environ, gpus)
    try:
        torchcommshim.uninstall()  # whatever has armed the process that this one is forked from
        torchcommshim.install()
        if not gpus:
            from torchcommshim.commands.verify import simulated

            simulated.install(address, devices=size)
        meeting = Meeting(folder, rank, size)
        meeting.wait()
        result = program(meeting, condition.bound)
        (folder / f"{rank}.part").write_text(json.dumps(result))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
        # The groups are left to the end of the process: torch 2.4 aborts them while others still use them.
        meeting.wait()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _why(folder: Path, size: int) -> str:
    """The last words of each rank that has no result."""
    words = []
    for rank in range(size):
        if not (folder / f"{rank}.json").exists():
            path = folder / f"{rank}.err"
            said = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
            # A dumped stack has its innermost call right under this line.
            stacks = [index for index, line in enumerate(said) if "most recent call first" in line]
            last = said[stacks[-1] + 1 :][:1] if stacks else said[-1:]
            words.append(f"rank {rank}: {''.join(last).strip() or 'no word'}")
    return "; ".join(words)
