# SPDX-License-Identifier: Apache-2.0
"""One process that poses as one rank of a world of any size, with the shim taken in and out of torch.

torch's own creation code runs, over a backend that connects to nobody: torch's fake one, or the one that the
tests record with.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Callable

import recorder
import torch
import torch.distributed as dist

import torchcommshim
from torchcommshim import patches
from torchcommshim.repair.traits import WRAPPED
from torchcommshim.tell import report

c10d = sys.modules["torch.distributed.distributed_c10d"]

# A backend that the shim takes for a real one: a name of torch's own that this build does not have.
REAL = next(name for name in ("nccl2", "nccl-legacy", "nccl-lazy") if not hasattr(dist.Backend, name.upper()))


def pretend_gpus() -> None:
    """Let torch accept cuda:0 as a device_id on a machine without GPUs."""
    if hasattr(torch, "accelerator"):
        torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
        torch.accelerator.device_count = lambda: 8


Functions = list[tuple[Any, str, Callable[..., Any]]]


def _functions() -> Functions:
    """What is wrapped, as it is now; torch.distributed has names of its own for the public ones."""
    found = ((module, name) for module in (c10d, dist) for name in WRAPPED if hasattr(module, name))
    return [(module, name, getattr(module, name)) for module, name in found]


def _put(functions: Functions) -> None:
    for module, name, function in functions:
        setattr(module, name, function)


torchcommshim.uninstall()
TORCHS_OWN = _functions()


class Shimmed:
    """torch.distributed as some settings make it; of several, one is in use at a time."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        _put(TORCHS_OWN)
        os.environ.update({"TORCHCOMMSHIM": "auto", "TORCHCOMMSHIM_AGREEMENT": "off", **variables})
        torchcommshim.install()
        self._report, actions = report.current(), patches._actions
        self._functions = _functions()
        torchcommshim.uninstall()
        actions.clear()  # what is taken out passes calls on; now its actions are made anew
        for name in (*variables, "TORCHCOMMSHIM", "TORCHCOMMSHIM_AGREEMENT"):
            os.environ.pop(name, None)

    def use(self) -> None:
        """Put its functions in place: wrapped ones, or torch's own where the settings say `off`."""
        report.use(self._report)
        _put(self._functions)


class Store(dist.Store):
    """Counts its operations, and answers as if every rank did at once what this one does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.operations: Counter[str] = Counter()
        self._values: dict[str, bytes] = {}
        self._numbers: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.operations["set"] += 1
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.operations["get"] += 1
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        self.operations["add"] += 1
        # Not what a rank counts alone, its worlds, and not the hub's count, in which it is the first.
        others = 0 if key.endswith(("/begun/0", "/watch")) else self.size - 1
        self._numbers[key] += amount * (1 + others)
        return self._numbers[key]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.operations["compare_set"] += 1
        return self._values.setdefault(key, desired.encode() if isinstance(desired, str) else bytes(desired))

    def check(self, keys: list[str]) -> bool:
        self.operations["check"] += 1
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.operations["wait"] += 1


def _record(options: Any, _: Any) -> recorder.Recorder:
    return recorder.Recorder(options)


def make_world(kind: str, size: int, store: dist.Store | None = None) -> str:
    """Make the world that `creation` and `scale` speak of; returns the backend for its groups."""
    store = store or dist.HashStore()
    if kind == "unbound":
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

        dist.init_process_group("fake", store=store, rank=0, world_size=size)
        return "fake"
    backend = "recorder"
    if kind in ("watched", "traced"):
        backend = REAL
        if not hasattr(dist.Backend, REAL.upper()):
            dist.Backend.register_backend(REAL, _record, extended_api=True, devices=["cuda"])
    dist.init_process_group(backend, store=store, rank=0, world_size=size, device_id=recorder.DEVICE)
    return "other" if kind == "repaired" else backend
