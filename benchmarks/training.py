# SPDX-License-Identifier: Apache-2.0
"""The time of a training step of the pipeline example, with and without the shim, whole runs by turns.

Milliseconds an iteration, the median of each run.  A collective costs the same either way, since it is the
same function: `collectives` names those of torch.distributed that the shim leaves the same objects.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import evidence
from environments import ROOT
from ranks import machine
from sampling import alternate, progress, ratio, spread

from torchcommshim.commands.environment import with_shim

CALLS = [
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier"),
    *("batch_isend_irecv", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "send"),
]

# In a process that begins without the shim, so that before and after can be compared.
COMPARE = f"""
import json, os, torch.distributed as dist, torchcommshim
before = {{name: getattr(dist, name) for name in {CALLS}}}
os.environ["TORCHCOMMSHIM"] = "auto"
torchcommshim.install()
assert torchcommshim.status()["patched"], torchcommshim.status()
print(json.dumps([name for name in before if getattr(dist, name) is before[name]]))
"""


def measure(quick: bool, seconds: float = 0, *, gpu: bool = False) -> dict[str, Any]:
    """Train by turns, as often as fits into `seconds`; in 4 ranks on the GPU, in 2 on the CPU."""
    found = machine()
    if gpu != bool(found["gpus"]):
        raise SystemExit(f"{'gpu-' * gpu}training: this machine has {len(found['gpus'])} GPUs")
    ranks, iterations = (4, 60) if gpu else (2, 40)
    seconds = seconds or (240 if gpu else 60)
    os.environ.update(with_shim({**os.environ, "PYTHONPATH": str(ROOT)}))  # `off` is said run by run
    same = same_collectives()
    failures: list[str] = []
    port = iter(range(29700, 29900))
    with tempfile.TemporaryDirectory() as folder:
        args = argparse.Namespace(out=Path(folder), iterations=6 if quick else iterations)

        def once(shim: str) -> float:
            run = evidence.Run(f"{shim}-run", ranks, ranks, shim, deadline=int(seconds))
            evidence.execute(run, args, next(port))
            if run.outcome != "trained":
                failures.append(f"{shim}: {run.outcome} {run.where}")
                return float("nan")
            middle = _step_ms(args.out / run.name, skip=args.iterations // 6)
            progress(f"training: {shim}: {middle:.1f} ms a step, {run.seconds} s in all")
            return middle

        once("off")  # makes the data
        times = alternate({way: partial(once, way) for way in ("off", "auto")}, 1 if quick else 10, seconds)
    return {
        "machine": found,
        "ranks": ranks,
        "iterations": args.iterations,
        "step_ms": {"without": spread(times["off"]), "auto": spread(times["auto"])},
        "to_without": ratio(times["auto"], times["off"]),
        "collectives": same,
        "failures": failures,
    }


def same_collectives() -> list[str]:
    """The functions of `CALLS` that are the same objects with and without the shim.

    Raises:
        AssertionError: one is not.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHCOMMSHIM": "off"}
    printed = subprocess.run(
        [sys.executable, "-c", COMPARE], env=variables, check=True, stdout=subprocess.PIPE
    )
    same: list[str] = json.loads(printed.stdout)
    assert same == CALLS, f"wrapped: {set(CALLS) - set(same)}"
    return same


def _step_ms(folder: Path, skip: int) -> float:
    """The median time of an iteration, from what the ranks printed."""
    log = "".join(path.read_text() for path in evidence.rank_files(folder, "stdout"))
    times = [float(time) for time in re.findall(r"elapsed time per iteration \(ms\): (\S+)", log)]
    return statistics.median(times[skip:])
