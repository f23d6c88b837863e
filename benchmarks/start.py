# SPDX-License-Identifier: Apache-2.0
"""What an installation adds to the start of a Python that never imports torch, beside its peers.

- empty: a `.pth` that imports one empty module, the least that any start-up hook costs;
- shim: torchcommshim's wheel; folder: nothing installed, torchcommshim's folder on PYTHONPATH;
- wrapt: a `.pth` that imports wrapt, as a package must that wraps at start;
- ddtrace-run, opentelemetry-instrument, autowrapt: agents that arm a process from outside.

The figure is the processor time of `site.main()` in a new interpreter in milliseconds, which is all that a
`.pth` or sitecustomize can add to: a launcher's own start is left out, and the wall-clock time of a whole
start would drown the difference in noise.
"""

from __future__ import annotations

import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from environments import Start, environment, packages, wheel
from sampling import added, alternate, progress, ratio, spread

# Under -S, so that site does not run before the clock does.
TIMED = "import site, time; t = time.process_time_ns(); site.main(); print(time.process_time_ns() - t)"

QUIET = {
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    **{f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")},
}

GOAL_EMPTY = 1.5  # times what the empty module adds
GOAL_PEERS = 20  # times cheaper than each peer


def measure(quick: bool) -> dict[str, Any]:
    """Start each kind of Python many times."""
    with tempfile.TemporaryDirectory() as folder:
        ours = _ours(Path(folder))
        agents = _agents(Path(folder))
        progress(f"start: {', '.join([*ours, *agents])}")
        # An agent's start takes a second, so it is timed less often.
        near = _compared(ours, 20 if quick else 250)
        far = _compared({"bare": ours["bare"], "shim": ours["shim"], **agents}, 2 if quick else 12)
        bare = ours["bare"].modules()
        starts = {**ours, **agents}
        modules = {name: len(start.modules().keys() - bare.keys()) for name, start in starts.items()}
    peers = {"wrapt": near, **dict.fromkeys(agents, far)}
    return {
        "bare_ms": near["bare_ms"],
        "added_ms": {**far["added_ms"], **near["added_ms"]},
        "modules": modules,
        "shim_to_empty": ratio(near["raw"]["shim"], near["raw"]["empty"]),
        "peer_to_shim": {
            name: ratio(times["raw"][name], times["raw"]["shim"]) for name, times in peers.items()
        },
        "goals": {"empty": GOAL_EMPTY, "peers": GOAL_PEERS},
    }


def _compared(starts: dict[str, Start], rounds: int) -> dict[str, Any]:
    times = alternate({name: partial(_time, start) for name, start in starts.items()}, rounds)
    raw = {name: added(values, times["bare"]) for name, values in times.items() if name != "bare"}
    return {
        "bare_ms": spread(times["bare"]),
        "added_ms": {name: spread(values) for name, values in raw.items()},
        "raw": raw,
    }


def _time(start: Start) -> float:
    return int(start.run("-S", "-c", TIMED).stdout) / 1e6


def _ours(folder: Path) -> dict[str, Start]:
    progress("start: making virtual environments")
    bare, empty = environment(folder / "bare"), environment(folder / "empty", pth="import empty_module\n")
    (packages(empty) / "empty_module.py").touch()
    shim = environment(folder / "shim", wheel(folder))
    wrapt = environment(folder / "wrapt", "wrapt", pth="import wrapt\n")
    on_path = packages(shim) / "torchcommshim" / "sitecustomize"
    return _warm(
        {
            "bare": Start([bare]),
            "empty": Start([empty]),
            "shim": Start([shim]),
            "folder": Start([bare], {"PYTHONPATH": str(on_path)}),
            "wrapt": Start([wrapt]),
        }
    )


def _agents(folder: Path) -> dict[str, Start]:
    """The agents that can be installed here."""
    made: dict[str, Start] = {}
    for name, requirement, variables in (
        ("ddtrace-run", "ddtrace", QUIET),
        ("opentelemetry-instrument", "opentelemetry-distro", QUIET),
        ("autowrapt", "autowrapt", {"AUTOWRAPT_BOOTSTRAP": "benchmark"}),
    ):
        progress(f"start: installing {requirement}")
        try:
            python = environment(folder / name, requirement)
        except subprocess.CalledProcessError as error:
            progress(f"start: {requirement} cannot be installed: {error.stderr.strip().splitlines()[-1:]}")
            continue
        launcher = python.parent / name
        made[name] = Start([launcher, python] if launcher.exists() else [python], variables)
    return _warm(made)


def _warm(starts: dict[str, Start]) -> dict[str, Start]:
    for start in starts.values():  # the first start compiles what it imports
        _time(start)
    return starts
