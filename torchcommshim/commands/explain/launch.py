# SPDX-License-Identifier: Apache-2.0
"""Run a script once for each rank of a fake world; `fake.py` starts this, in the user's interpreter.

    python -c "from torchcommshim.commands.explain.launch import main; main()" SPEC

(not with -m: the script becomes `__main__`).  SPEC is a JSON object: `folder`, `size`, `jobs`, `limit_s`,
`quiet_s`, and `words`: the script and its arguments, or `-m`, a module and its arguments.

torch is imported once, and each rank is forked from here.  A rank's groups are torch's fake ones, which
connect to nobody and whose collectives do nothing; its trace says what the script asked for.  For each rank
that has ended a JSON line is written to stdout; what it wrote to stderr is in `RANK.stderr` in the folder.

Standard input is a pipe that nothing is written to: when it closes, whoever started this is gone, and all
ranks are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import runpy
import select
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable

import wrapt

import torchcommshim
from torchcommshim.patches import TARGET, prepare
from torchcommshim.repair.creations import CallForm
from torchcommshim.tell import trace

# How a rank's run ended.
EXIT = "exit"
LIMIT = "limit"  # it took too long
QUIET = "quiet"  # no creation came for a while

_GRACE_S = 3.0  # from SIGTERM to SIGKILL
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Run all ranks."""
    spec = json.loads(sys.argv[1])
    beat = Beat()
    if TARGET in sys.modules:
        sys.exit(
            "torch is imported while Python starts, by a .pth file or sitecustomize: too early to be faked"
        )
    # Before the shim's own hook, so that the shim wraps what is fake and sees what the script asks for.
    wrapt.register_post_import_hook(lambda c10d: make_fake(c10d, beat), TARGET)
    torchcommshim.install()
    import torch.distributed  # noqa: F401

    status = torchcommshim.status()
    if not status["patched"] or status["standing_aside"]:
        reasons = [*status["standing_aside"], *status["failures"]]  # type: ignore[misc]
        sys.exit(f"this torch cannot be traced: {'; '.join(map(str, reasons))}")
    prepare()
    Ranks(spec, beat).run()


class Beat:
    """When a rank last made a group: written by the rank, read by the process that it was forked from."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def strike(self) -> None:
        self._memory[:] = struct.pack("d", time.monotonic())

    def last(self) -> float:
        """Seconds on the clock of time.monotonic(); 0 if there was none."""
        return float(struct.unpack("d", self._memory[:])[0])

    def take(self, other: Beat) -> None:
        """Become `other`: a forked rank learns which is its own."""
        self._memory = other._memory


def make_fake(c10d: Any, beat: Beat) -> None:
    """Have `torch.distributed.distributed_c10d` make groups that connect to nobody, whatever is asked for."""
    init, helper = CallForm(c10d.init_process_group), CallForm(c10d._new_process_group_helper)

    def init_process_group(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        import torch
        from torch.distributed import HashStore
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

        from torchcommshim.tell import report

        device = init.get(args, kwargs, "device_id")
        # torch would test the device, and hand it to barriers: neither needs to be here.
        changes: dict[str, Any] = {"device_id": None} if "device_id" in init else {}
        current = report.current()
        if device is not None and init.get(args, kwargs, "backend") is None:
            kind = torch.device(device if not isinstance(device, int) else f"cuda:{device}").type
            if current and current.traits.device_picks_backend:
                changes["backend"] = c10d.Backend.default_device_backend_map.get(kind)
        trace.stands_for.update(bound=device is not None)
        for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
            if init.get(args, kwargs, name) in (None, -1):
                changes[name] = int(os.environ[variable])
        if not isinstance(c10d.default_pg_nccl_timeout, timedelta):  # a build without NCCL
            c10d.default_pg_nccl_timeout = c10d.default_pg_timeout
        args, kwargs = init.replace(args, kwargs, store=HashStore(), init_method=None, **changes)
        return wrapped(*args, **kwargs)

    def new_process_group_helper(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        beat.strike()
        options = "backend_options" if "backend_options" in helper else "pg_options"
        changes = {"backend": "fake", "device_id": None, options: None}
        args, kwargs = helper.replace(args, kwargs, **changes)
        return wrapped(*args, **kwargs)

    c10d.init_process_group = wrapt.FunctionWrapper(c10d.init_process_group, init_process_group)
    c10d._new_process_group_helper = wrapt.FunctionWrapper(
        c10d._new_process_group_helper, new_process_group_helper
    )


@dataclass
class Running:
    """One rank under way.

    Attributes:
        rank, pid: it, which leads a session of its own.
        began: on the clock of time.monotonic().
        beat: its last creation.
        how: why it is being ended; EXIT as long as it is not.
        killed_at: when SIGKILL follows the SIGTERM that it was sent.
    """

    rank: int
    pid: int
    began: float
    beat: Beat
    how: str = EXIT
    killed_at: float = float("inf")


class Ranks:
    """Runs the ranks, some at a time, and ends each when it is time."""

    def __init__(self, spec: dict[str, Any], beat: Beat) -> None:
        self._spec, self._beat = spec, beat
        self._running: list[Running] = []

    def run(self) -> None:
        """Run them all; if standard input closes, end them all and return."""
        waiting = iter(range(self._spec["size"]))
        rank = next(waiting, None)
        while rank is not None or self._running:
            while rank is not None and len(self._running) < self._spec["jobs"]:
                self._running.append(self._start(rank))
                rank = next(waiting, None)
            if select.select([sys.stdin], [], [], _POLL_S)[0]:
                rank = None
                for each in self._running:
                    self._end(each, QUIET)
            for each in list(self._running):
                self._look_at(each)

    def _start(self, rank: int) -> Running:
        beat = Beat()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._beat.take(beat)
                _become(rank, self._spec)
                code = _run(self._spec["words"])
            finally:
                os._exit(code)  # not on into the loop that it was forked from
        return Running(rank, pid, time.monotonic(), beat)

    def _look_at(self, running: Running) -> None:
        pid, status = os.waitpid(running.pid, os.WNOHANG)
        now = time.monotonic()
        if pid:
            _signal(running.pid, signal.SIGKILL)  # what it started may still run
            self._running.remove(running)
            code = os.waitstatus_to_exitcode(status)
            print(json.dumps({"rank": running.rank, "how": running.how, "code": code}), flush=True)
        elif now > running.killed_at:
            _signal(running.pid, signal.SIGKILL)
        elif now - running.began > self._spec["limit_s"]:
            self._end(running, LIMIT)
        elif running.beat.last() and now - running.beat.last() > self._spec["quiet_s"]:
            self._end(running, QUIET)

    def _end(self, running: Running, how: str) -> None:
        if running.how == EXIT:
            running.how, running.killed_at = how, time.monotonic() + _GRACE_S
            _signal(running.pid, signal.SIGTERM)


def _signal(session: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended; or has not become a session yet
        os.killpg(session, number)


def _become(rank: int, spec: dict[str, Any]) -> None:
    """Make this forked process the rank: its environment, its streams, its own session."""
    os.setsid()
    if sys.platform == "linux":  # should the process that watches it be killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(spec["size"]),
        GROUP_RANK=str(rank),
        GROUP_WORLD_SIZE=str(spec["size"]),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
    )
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(Path(spec["folder"]) / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, stream in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(descriptor, stream)


def _run(words: list[str]) -> int:
    """Run the script or module as Python itself would; returns the exit code."""
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
