# SPDX-License-Identifier: Apache-2.0
"""Run scenarios through torchrun, each under a deadline, and leave no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torchcommshim.commands import environment
from torchcommshim.commands.verify.catalogue import Scenario
from torchcommshim.commands.verify.switchboard import switchboard
from torchcommshim.commands.verify.verdicts import ERROR, Failure, Verdict, judge

START_LIMIT = 300  # seconds until all ranks have imported torch; on a busy machine that takes its time
END_LIMIT = 60  # seconds from the deadline until torchrun is gone


@dataclass(frozen=True)
class Machine:
    """What the scenarios will run on.

    Attributes:
        torch: its version.
        python: its version.
        nccl: its version, or `simulated`.
        gpus: the names of the GPUs that are used; empty if NCCL is simulated.
    """

    torch: str
    python: str
    nccl: str
    gpus: tuple[str, ...]

    @property
    def simulated(self) -> bool:
        """There is no real NCCL here, or it is not to be used."""
        return self.nccl == "simulated"


class NoTorch(Exception):
    """There is no usable torch in this Python."""


_ASK = """
import json, platform, torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "simulated"
print(json.dumps([torch.__version__, platform.python_version(), nccl, gpus]))
"""


def look(simulate: bool) -> Machine:
    """Ask a new process what torch it finds.

    Raises:
        NoTorch: it finds none, or torch fails there; the message says how.
    """
    asked = subprocess.run(
        [sys.executable, "-c", _ASK],
        env=_environment("off", simulate),
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise NoTorch(f"verify runs torch programs, and `import torch` fails in {sys.executable}: {reason}")
    torch, python, nccl, gpus = json.loads(asked.stdout.splitlines()[-1])
    return Machine(torch, python, nccl, tuple(gpus))


def free(port: int) -> bool:
    """Nobody listens on this TCP port of the local host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Cancelled(Exception):
    """The user has interrupted the runs."""


@dataclass(frozen=True)
class Runner:
    """Runs one script at a time on `ranks` ranks; may be used from several threads.

    Attributes:
        ranks: number of ranks.
        deadline: seconds from the moment when all ranks have started the script.
        simulate: use simulated NCCL.
        cancelled: set it to end all runs.
    """

    ranks: int
    deadline: float
    simulate: bool
    cancelled: threading.Event

    def run_scenario(self, scenario: Scenario, strategy: str, port: int | None = None) -> Verdict:
        """Run a scenario with a strategy (`off`: without the shim)."""
        deadline = self.deadline * scenario.patience
        verdict = self.run(scenario.path, strategy, deadline, port)
        if port is None and any("EADDRINUSE" in failure.message for failure in verdict.failures):
            # torchrun has let go of the port that it picked, and rank 0 found it taken: nobody has started.
            verdict = self.run(scenario.path, strategy, deadline)
        return verdict

    def run(self, script: Path, strategy: str, deadline: float, port: int | None = None) -> Verdict:
        """Run a script on all ranks and judge it.

        Raises:
            Cancelled: the runs were interrupted; no process is left.
        """
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchcommshim-verify-")))
            launcher = "torch.distributed.run"
            launch = ["-m", "torchcommshim.commands.verify.launch", str(folder), str(deadline), str(script)]
            if self.simulate:
                launcher = "torchcommshim.commands.verify.forkrun"
                launch += ["--simulate", stack.enter_context(switchboard())]
            began = time.monotonic()
            with open(folder / "torchrun", "w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", launcher, *self._options(folder, port), *launch],
                    env=_environment(strategy, self.simulate),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            try:
                problem = self._wait(process, folder, deadline)
            finally:
                _end(process, folder)
            seconds = time.monotonic() - began
            verdict = judge(script, folder, _output(folder, "stdout"), process.returncode, seconds)
            if verdict.verdict == ERROR and not verdict.failures:
                verdict.failures.append(Failure(None, problem or _last_words(folder)))
            return verdict

    def _options(self, folder: Path, port: int | None) -> list[str]:
        where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        if port is None:  # what --standalone stands for
            where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={folder.name}"]
        logs = ["--redirects=3", f"--log-dir={folder / 'logs'}"]
        return [*where, "--local-addr=127.0.0.1", f"--nproc-per-node={self.ranks}", *logs]

    def _wait(self, process: subprocess.Popen[bytes], folder: Path, deadline: float) -> str:
        """Wait until torchrun ends, which the ranks' own timers bring about; says what went wrong, if."""
        limit = time.monotonic() + START_LIMIT
        started = False
        while process.poll() is None:
            if self.cancelled.wait(0.1):
                raise Cancelled
            if not started and len(list(folder.glob("*.started"))) == self.ranks:
                started, limit = True, time.monotonic() + deadline + END_LIMIT
            if time.monotonic() > limit:
                return "torchrun did not end" if started else f"not all ranks started in {START_LIMIT} s"
        return ""


# The shim's own switches, and torchrun's options (Kubeflow sets some for the job that it starts).
_FOREIGN = ("TORCHCOMMSHIM", "PET_")


def _environment(strategy: str, simulate: bool) -> dict[str, str]:
    values = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    values["TORCHCOMMSHIM"] = strategy
    values["OMP_NUM_THREADS"] = "1"
    values["PYTHONUNBUFFERED"] = "1"
    if sys.platform == "linux":  # all ranks are here; a host name need not be resolvable
        values.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if simulate:
        values["CUDA_VISIBLE_DEVICES"] = ""
    values = environment.with_checkout(values)
    return values if strategy == "off" else environment.with_shim(values)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """See to it that torchrun and all ranks are gone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks before itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    if process.returncode == 0:
        return
    for path in folder.glob("*.pid"):  # torchrun starts ranks in sessions of their own
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _output(folder: Path, stream: str) -> str:
    logs = sorted(folder.glob(f"logs/*/*/*/{stream}.log"))
    return "".join(log.read_text(errors="replace") for log in logs)


def _last_words(folder: Path) -> str:
    words = _output(folder, "stderr").strip() or (folder / "torchrun").read_text().strip()
    return words.rpartition("\n")[2] or "the ranks ended without a word"
