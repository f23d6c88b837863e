# SPDX-License-Identifier: Apache-2.0
"""Traces made without torch: the tracing observer is told of calls as the shim would tell it."""

from __future__ import annotations

from types import SimpleNamespace

from torchcommshim.commands.explain.releases import traits_of
from torchcommshim.repair.calls import Call
from torchcommshim.repair.creations import ALL, COLLECTIVE
from torchcommshim.settings import Settings
from torchcommshim.tell.report import Report
from torchcommshim.tell.trace import Trace


def state(bound=True, splits=ALL, backend="nccl"):
    """What a `TorchState` says of the world."""
    return SimpleNamespace(
        world=SimpleNamespace(bound_device_id="cuda:0" if bound else None),
        world_backend=backend,
        who_splits=lambda device: splits,
    )


def trace(folder, torch="2.4.1", strategy="auto", **world):
    """A tracing observer in a process with that torch."""
    return Trace(Report(Settings(strategy, trace=str(folder)), traits_of(torch), torch), state(**world))


def call(number, ranks=(), rank=0, size=4, backend="nccl", kind=COLLECTIVE, site="train.py:7 main", **more):
    """One creation as `rank` makes it; number 0 is the world's."""
    if number == 0:
        ranks, kind = range(size), "world"
    name = more.pop("name", str(number))
    return Call(number, kind, tuple(ranks), backend, name, rank, size, shared=False, site=site, **more)


def record(observer, rank, creations, size=4, backend="nccl", stuck=False):
    """Have `rank` make its world, and then groups, each given as the keywords of `call`.

    With `stuck` it does not come back from the last.
    """
    calls = [call(0, rank=rank, size=size, backend=backend)]
    calls += [call(n, rank=rank, size=size, **each) for n, each in enumerate(creations, 1)]
    for each in calls:
        observer.begin(each, None)
        if not (stuck and each is calls[-1]):
            observer.end(each, None)


def job(folder, *groups, size=4, **world):
    """The trace of a job all of whose ranks make `groups`, each a list of ranks or the keywords of `call`."""
    creations = [each if isinstance(each, dict) else {"ranks": each} for each in groups]
    for rank in range(size):
        record(trace(folder, **world), rank, creations, size, world.get("backend", "nccl"))
    return folder
