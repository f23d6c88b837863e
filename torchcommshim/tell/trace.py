# SPDX-License-Identifier: Apache-2.0
"""A file a rank with a line a creation, for `torchcommshim explain`: `TORCHCOMMSHIM_TRACE=DIR`.

The files are JSON Lines.  Each line is an object, and its `record` says what it is:

| record     | written                           | says                                                  |
| ---------- | --------------------------------- | ----------------------------------------------------- |
| `world`    | when the world's creation begins  | the format, the job, the rank, the build of torch     |
| `bound`    | before the world's first group    | has the world a device_id, and who can split from it  |
| `creation` | when it begins, so a hang shows   | number, kind, ranks, backend, name, site; of a split: |
|            |                                   | `split`: parent (name), ranks, parts, by_mesh         |
| `end`      | when it has ended                 | number; `error` if it failed                          |

A file is one process's and one rank's, and a new one each time: nothing is overwritten, and runs in one
folder can be told apart.  A line is one write to a file opened for appending, so threads and creations
within creations do not mix.  What fails costs one line on stderr and the trace, never the job.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping

import torchcommshim
from torchcommshim.repair.calls import Call
from torchcommshim.repair.torch_state import TorchState
from torchcommshim.tell.agreement import PREFIX
from torchcommshim.tell.report import Report

FORMAT = 1

# Equal on all ranks of a job that has no store in common, as far as its launcher sets them.
_IDENTITY = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
)

# What is written of a split.
_SPLIT = ("parent", "ranks", "parts", "by_mesh")

# Made once: json.dumps makes an encoder for each call that has other separators than its own.
_encoded = json.JSONEncoder(separators=(",", ":")).encode

# What a dry run knows of the world that its fake one stands for, in place of what torch holds.
stands_for: dict[str, Any] = {}


@dataclass
class _File:
    """One rank's file: its descriptor, and what is written of the world that the rank is in."""

    descriptor: int
    has_world: bool = False
    has_bound: bool = False

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append `records` in one write, a line each."""
        lines = "".join(_encoded(record) + "\n" for record in records).encode()
        if os.write(self.descriptor, lines) < len(lines):
            raise OSError(errno.ENOSPC, "only a part of a line could be written")


@dataclass
class _Process:
    """The files of one process, by rank; a process that is forked later gets its own."""

    # Reentrant: a signal's handler may make a group in the thread that is writing.
    lock: Any = field(default_factory=threading.RLock)
    files: dict[int, _File] = field(default_factory=dict)


class Trace:
    """Writes down each creation on this rank; changes nothing, and nothing it meets reaches the user."""

    def __init__(self, current: Report, state: TorchState) -> None:
        self._report, self._state = current, state
        self._folder = Path(current.settings.trace)
        self._processes: dict[int, _Process] = {}
        self._stopped = False

    def begin(self, call: Call, store: Any) -> None:
        self._guarded(self._begin, call, store)

    def end(self, call: Call, error: BaseException | None) -> None:
        self._guarded(self._end, call, error)

    def _guarded(self, function: Callable[..., None], call: Call, detail: Any) -> None:
        if self._stopped:
            return
        try:
            process = self._processes.get(os.getpid()) or self._processes.setdefault(os.getpid(), _Process())
            with process.lock:
                if call.rank not in process.files:
                    process.files[call.rank] = self._open(call.rank)
                function(process.files[call.rank], call, detail)
        except Exception as error:
            self._stopped = True
            self._report.failed("trace", error)

    def _open(self, rank: int) -> _File:
        # In containers that share a folder neither host nor process id need differ: the time does.
        moment = time.strftime("%Y%m%dT%H%M%S") + f".{time.time_ns() // 1000 % 1_000_000:06}"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{rank:05}-{moment}-{socket.gethostname()}-{os.getpid()}.jsonl"
        return _File(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666))

    def _begin(self, file: _File, call: Call, store: Any) -> None:
        records = []
        if call.number == 0 or not file.has_world:
            records.append(self._world(call, store))
        if call.number != 0 and not (file.has_world and file.has_bound):
            records.append(self._bound())
        kept = ("number", "kind", "ranks", "backend", "name", "site")
        record = {"record": "creation", **{name: getattr(call, name) for name in kept}}
        if call.split is not None:
            record["split"] = {name: getattr(call.split, name) for name in _SPLIT}
        records.append(record)
        file.write(records)
        file.has_world, file.has_bound = True, call.number != 0

    def _end(self, file: _File, call: Call, error: BaseException | None) -> None:
        failed = {} if error is None else {"error": f"{type(error).__name__}: {error}"[:500]}
        file.write([{"record": "end", "number": call.number, **failed}])

    def _world(self, call: Call, store: Any) -> dict[str, Any]:
        late = call.number != 0  # made before the shim was installed
        traits = asdict(self._report.traits)
        del traits["found"], traits["missing"]  # for people; and empty wherever creations are seen
        return {
            "record": "world",
            "format": FORMAT,
            "torchcommshim": torchcommshim.__version__,
            "torch": self._report.torch_version,
            "traits": traits,
            "strategy": self._report.settings.strategy,
            "job": _job(call, store, os.environ),
            "rank": call.rank,
            "world_size": call.world_size,
            "backend": self._state.world_backend.lower() if late else call.backend,
            "late": late,
            "dry_run": bool(stands_for),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
        }

    def _bound(self) -> dict[str, Any]:
        device = self._state.world.bound_device_id
        # As for a creation's description: "cuda" is what _get_split_source of 2.3 to 2.5 looks at else.
        splits = self._state.who_splits(device or "cuda")
        return {"record": "bound", "bound": device is not None, "splits": splits, **stands_for}


def _job(call: Call, store: Any, environment: Mapping[str, str]) -> str:
    """The job's name, equal on all its ranks: the first of them leaves it in their store."""
    if call.shared and not stands_for:
        try:
            key = f"{PREFIX}/trace/job"
            return str(store.compare_set(key, "", uuid.uuid4().hex[:12]).decode())
        except Exception:  # a store of another kind, which cannot do that
            pass
    return "/".join(environment[name] for name in _IDENTITY if environment.get(name)) or "unnamed"
