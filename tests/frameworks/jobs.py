# SPDX-License-Identifier: Apache-2.0
"""Run one program in one way, under a time limit, and leave no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Mapping

from frameworks.catalogue import Program

PROGRAMS = Path(__file__).resolve().parent / "programs"

# A creation that takes as long is reported.  Starting the slowest program takes less on two cores.
HANG_REPORT_S = 30


@dataclass(frozen=True)
class Run:
    """How a run ended.

    Attributes:
        losses: what each process noted, as text, so that equal means the same bits.
        lines: all that its processes printed, with numbers, addresses and colours taken out.
        status: what `torchcommshim.status()` was at the end of each process.
        codes: the exit codes of the processes that were started; None for one that was ended.
        seconds: how long it took.
    """

    losses: dict[str, list[str]]
    lines: list[str]
    status: dict[str, dict[str, Any]]
    codes: list[int | None]
    seconds: float

    @property
    def hung(self) -> bool:
        """It did not end in time, and no process of it has failed."""
        return None in self.codes and not any(self.codes)

    @property
    def trained(self) -> bool:
        """All its processes came to their end."""
        return not any(code != 0 for code in self.codes) and set(self.status) == set(self.losses) != set()

    @property
    def repairs(self) -> dict[str, int]:
        """The largest count of each defect's repairs on a process."""
        counts: dict[str, int] = {}
        for status in self.status.values():
            for name, count in status["repairs"].items():
                counts[name] = max(count, counts.get(name, 0))
        return counts


@dataclass
class Started:
    """The processes of a run."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: list[str], environment: Mapping[str, str]) -> None:
        with open(self.folder / f"output-{len(self.processes)}", "wb") as output:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=dict(environment),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def wait(self, limit_s: float) -> list[int | None]:
        """Wait for all, or until one has failed or time is up; then end what is left."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            codes = [process.poll() for process in self.processes]
            if None not in codes or any(codes):
                break
            time.sleep(0.05)
        if any(process.poll() for process in self.processes):
            time.sleep(2)  # the others may be about to say what they saw
        codes = [process.poll() for process in self.processes]
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started as well
            process.wait()
        return codes


def run(
    program: Program,
    python: Path,
    variables: Mapping[str, str],
    limit_s: float,
    simulated: bool,
) -> Run:
    """Run a program in an environment's Python with these variables of the shim."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="frameworks-")))
        common = environment(folder, python, variables)
        if simulated:
            from torchcommshim.commands.verify.switchboard import switchboard

            common["FRAMEWORKS_SWITCHBOARD"] = stack.enter_context(switchboard())
        started = Started(folder)
        command = [str(python.parent / program.launcher[0]), *program.launcher[1:]]
        began = time.monotonic()
        for ranks in ranks_of(program):
            started.start([*command, str(PROGRAMS / f"{program.name}.py")], {**common, **ranks})
        codes = started.wait(limit_s)
        seconds = time.monotonic() - began
        losses = {path.stem: path.read_text().splitlines() for path in sorted(folder.glob("*.losses"))}
        status = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.done"))}
        outputs = [path.read_text(errors="replace") for path in sorted(folder.glob("output-*"))]
        lines = [normal(line, folder) for output in outputs for line in output.splitlines()]
        return Run(losses, lines, status, codes, seconds)


def ranks_of(program: Program) -> Iterator[dict[str, str]]:
    """The variables that torchrun would set for each process; none for a program that starts its own."""
    if program.processes == 1:
        yield {}
        return
    first, second = free_ports(2)
    for rank in range(program.processes):
        yield {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(program.processes),
            "LOCAL_WORLD_SIZE": str(program.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(first),
            "FRAMEWORKS_SECOND_PORT": str(second),
        }


def environment(folder: Path, python: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """A clean environment: nothing of this machine steers the program, nothing is asked of the network."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "LD_LIBRARY_PATH") if name in os.environ}
    return {
        **kept,
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "FRAMEWORKS_FOLDER": str(folder),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # says where a process was that C++ has ended
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(python.parent.parent / "torch-extensions"),  # DeepSpeed compiles one
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_TRACE_ENABLED": "false",  # there is no agent to send to
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",  # which lines stand for which others depends on the moment
        "TORCHCOMMSHIM_HANG_REPORT_S": str(HANG_REPORT_S),
        **variables,
    }


def free_ports(number: int) -> list[int]:
    """TCP ports of the local host on which nobody listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


_CHANGING = re.compile(
    r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"  # a UUID
    r"|0x[0-9a-f]+|\b[0-9a-f]{12,}\b"
    r"|\d+([.:,_-]\d+)*(e[-+]?\d+)?"
)


def normal(line: str, folder: Path) -> str:
    """A line without what differs from run to run: numbers, addresses, this run's folder, colours."""
    line = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line.split("\r")[-1])
    return _CHANGING.sub("#", line.replace(str(folder), "FOLDER")).rstrip()
