# SPDX-License-Identifier: Apache-2.0
"""Measure what the shim costs, and write docs/performance.md, its JSON file and its plot.

    python benchmarks/run.py                         # what needs no GPU: 6 minutes on two quiet cores
    python benchmarks/run.py start creation          # these parts only; the others keep their last results
    python benchmarks/run.py gpu --out FOLDER        # on a machine with a GPU: a JSON file a part
    python benchmarks/run.py --add FOLDER            # those files into docs/
    python benchmarks/run.py --quick --out FOLDER    # tries everything out; the numbers mean nothing

Needs a torch, the extra `bench`, and for training the extra `examples`; the peers in `start` are installed
into environments of their own.  Times are compared, never judged: everything is measured side by side in one
run, by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
sys.path.insert(2, str(Path(__file__).resolve().parent.parent / "examples"))

from environments import ROOT
from sampling import progress

DOCS = ROOT / "docs"
CPU = ("start", "import", "creation", "waits", "scale", "training")
WITHOUT_TORCH = {"start", "waits"}
GPU = ("gpu-bring-up", "gpu-training", "gpu-p2p")


def part(name: str) -> Callable[..., dict[str, Any]]:
    """The function that measures `name`; imported only now, since most of them import torch."""
    if name.endswith("training"):
        import training

        return partial(training.measure, gpu=name != "training")
    module = {"import": "torch_import", "gpu-bring-up": "bring_up", "gpu-p2p": "point_to_point"}.get(
        name, name
    )
    measure: Callable[..., dict[str, Any]] = __import__(module).measure
    return measure


def main() -> None:
    """Run the command line above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(CPU + GPU)}, cpu, gpu or all")
    parser.add_argument("--out", type=Path, help="write a JSON file a part here, and leave docs/ alone")
    parser.add_argument("--add", type=Path, help="take the JSON files in this folder into docs/")
    parser.add_argument("--quick", action="store_true", help="as little as possible")
    parser.add_argument(
        "--seconds", type=float, help="for each GPU part and training, instead of its own limit"
    )
    args = parser.parse_args()
    if args.quick and not args.out:
        parser.error("--quick goes with --out: its numbers are not for docs/")
    several = {"cpu": CPU, "gpu": GPU, "all": CPU + GPU}
    names = [name for given in args.parts for name in several.get(given, (given,))]
    if not (names or args.add):
        names = list(CPU)
    unknown = sorted(set(names) - {*CPU, *GPU})
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}")
    if not args.out and find_spec("matplotlib") is None:
        parser.error("docs/ gets a plot: install matplotlib (the extra `bench`), or give --out")
    if find_spec("torch") is None and {*names} - WITHOUT_TORCH:
        free = " and ".join(sorted(WITHOUT_TORCH))
        parser.error(f"all parts but {free} need torch, and {sys.executable} has none")
    if args.add:
        write(read(args.add))
    for name in names:
        result = take(name, args)
        if not args.out:
            write(result)


def take(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one part; the result by its key: the part, the torch that it was run on, and how many GPUs."""
    began = time.monotonic()
    limit = {"seconds": args.seconds} if args.seconds and name.endswith(("training", "up", "p2p")) else {}
    result = {**about(), **part(name)(args.quick, **limit)}
    key = f"{name}, torch {result['torch']}"
    if name in WITHOUT_TORCH:
        key = name
        del result["torch"]
    gpus = len(result.get("machine", {}).get("gpus", ()))
    if gpus > 1:  # beside the same on one
        key += f", {gpus} GPUs"
    progress(f"{name}: done in {time.monotonic() - began:.0f} s")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{key.replace(', ', '-').replace(' ', '-')}.json").write_text(_dumped({key: result}))
    return {key: result}


def about() -> dict[str, Any]:
    """When, with what, and on what kind of machine."""
    import torchcommshim

    ask = "import torch.version; print(torch.version.__version__)"
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torchcommshim": torchcommshim.__version__,
        "python": platform.python_version(),
        "torch": asked.stdout.strip().partition("+")[0] or None,
        "cores": os.cpu_count(),
    }


def read(folder: Path) -> dict[str, Any]:
    """The results that `--out` has left in `folder`."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        found |= json.loads(path.read_text())
    return found


def write(results: dict[str, Any]) -> None:
    """Put `results` in place of the same ones in docs/performance.json, and write the page and the plot."""
    import page

    path = DOCS / "performance.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    merged = dict(sorted({**kept, **results}.items()))
    path.write_text(_dumped(merged))
    (DOCS / "performance.md").write_text(page.text(merged))
    page.plot(merged, DOCS / "performance.png")


def _dumped(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=1) + "\n"


if __name__ == "__main__":
    main()
