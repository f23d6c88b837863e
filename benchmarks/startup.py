# SPDX-License-Identifier: Apache-2.0
"""What an installation of torchcommshim adds to the start of a Python that never imports torch.

    python benchmarks/startup.py                # 300 starts of each, some minutes
    python benchmarks/startup.py --runs 1000 --json

Four environments, started in turn so that whatever else the machine does meets all of them alike:

- bare: a virtual environment with nothing in it;
- empty: one with a `.pth` that imports one empty module, the least that any start-up hook costs;
- shim: one with torchcommshim's wheel;
- folder: the bare one, with torchcommshim's folder on PYTHONPATH.

Times are milliseconds of processor time that `site.main()` takes in a new interpreter, which is all that a
`.pth` can add to; the median of each.  Wall-clock time of a whole start drowns the difference in noise.
`ratio` is what the shim adds over what the empty module adds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Under -S, so that site does not run before the clock does.
TIMED = "import site, time; t = time.thread_time_ns(); site.main(); print(time.thread_time_ns() - t)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300, help="starts of each environment (300)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        medians = measure(make_environments(Path(folder)), chosen.runs)
    added = {name: median - medians["bare"] for name, median in medians.items() if name != "bare"}
    ratio = added["shim"] / added["empty"]
    if chosen.json:
        result = {"python": sys.version, "runs": chosen.runs, "median_ms": medians, "added_ms": added}
        print(json.dumps({**result, "ratio": ratio}, indent=2))
        return
    print(f"Python {sys.version.split()[0]}, {chosen.runs} starts of each, medians")
    for name, median in medians.items():
        print(f"{name:8}{median:8.2f} ms" + (f"{added[name]:+8.2f} ms" if name in added else ""))
    print(f"ratio of shim to empty: {ratio:.2f}")


def make_environments(folder: Path) -> dict[str, tuple[Path, dict[str, str]]]:
    """The interpreter to start and the variables to start it with, for each environment by name."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    for name in ("bare", "empty", "shim"):
        venv.create(folder / name, symlinks=True)
    subprocess.run([*pip, "--python", folder / "shim/bin/python", "install", wheel], check=True)
    (packages,) = (folder / "empty").glob("lib/python3.*/site-packages")
    (packages / "empty_module.py").touch()
    (packages / "empty.pth").write_text("import empty_module\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", packages], check=True)
    (on_path,) = (folder / "shim").glob("lib/python3.*/site-packages/torchcommshim/sitecustomize")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environments = {name: (folder / name / "bin/python", clean) for name in ("bare", "empty", "shim")}
    environments["folder"] = (folder / "bare/bin/python", {**clean, "PYTHONPATH": str(on_path)})
    return environments


def measure(environments: dict[str, tuple[Path, dict[str, str]]], runs: int) -> dict[str, float]:
    """The median time of a start in milliseconds, for each environment by name."""
    times: dict[str, list[float]] = {name: [] for name in environments}
    for _ in range(runs):
        for name, (python, variables) in environments.items():
            command = [python, "-S", "-c", TIMED]
            printed = subprocess.run(command, env=variables, check=True, capture_output=True).stdout
            times[name].append(int(printed) / 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
