# SPDX-License-Identifier: Apache-2.0
"""What the shim adds to `import torch`, in two virtual environments that share one torch.

Seconds of a whole `python -c "import torch"`: processor time (user and system), which is what the shim can
add to, and wall-clock time.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from environments import Start, beside, environment, wheel
from sampling import added, alternate, progress, ratio, spread

GOAL = 1.01


def measure(quick: bool) -> dict[str, Any]:
    """Import torch without and with the shim, in turn."""
    wall: dict[str, list[float]] = {"without": [], "with": []}

    def timed(name: str, start: Start) -> float:
        began = time.monotonic()
        processor = _processor_s(start)
        wall[name].append(time.monotonic() - began)
        return processor

    with tempfile.TemporaryDirectory() as folder:
        progress("import: making virtual environments")
        place = Path(folder)
        starts = {
            "without": Start([environment(place / "without", pth=beside("torch"))]),
            "with": Start([environment(place / "with", wheel(place), pth=beside("torch"))]),
        }
        for start in starts.values():
            _processor_s(start)
        progress("import: alternating")
        rounds, seconds = (2, 60.0) if quick else (40, 70.0)
        times = alternate(
            {name: lambda name=name, start=start: timed(name, start) for name, start in starts.items()},
            rounds,
            seconds,
        )
        shares = [_share(starts["without"], starts["with"]) for _ in range(1 if quick else 9)]
    return {
        "share_percent": spread(shares),
        "processor_s": {name: spread(values) for name, values in times.items()},
        "wall_s": {name: spread(values) for name, values in wall.items()},
        "added_ms": spread([1e3 * value for value in added(times["with"], times["without"])]),
        "processor": ratio(times["with"], times["without"]),
        "wall": ratio(wall["with"], wall["without"]),
        "goal": GOAL,
    }


def _share(without: Start, having: Start) -> float:
    """Of an import with the shim, the percentage of its time in modules that are not imported without."""
    import_torch = "import torch"
    plain, modules = without.modules(import_torch), having.modules(import_torch)
    return 100 * sum(own for name, own in modules.items() if name not in plain) / sum(modules.values())


def _processor_s(start: Start) -> float:
    command = [str(word) for word in (*start.command, "-c", "import torch")]
    process = subprocess.Popen(command, env=start.environment())
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)
    process.returncode = 0  # it has been waited for
    return usage.ru_utime + usage.ru_stime
