# SPDX-License-Identifier: Apache-2.0
"""What the shim adds to one creation, in one process that is a rank of a world with nobody else in it.

Microseconds of processor time of a `new_group`, without the shim and with each strategy by turns in one
world, so that all see the same number of groups: 10,000 in the end, among all.  The worlds:

- unbound: no device_id, torch's fake backend: most jobs, and nothing to repair;
- bound: a device_id, over a backend that can be split (tests/recorder.py);
- repaired: the same world, and each group is of the kind that non-members split for and members do not;
- stripped: made with a device_id that `strip` has dropped;
- watched, traced: bound and taken for a real one, with the hang report, which all real worlds have unless it
  is turned off, or with the trace.  The other worlds are measured without both.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Callable

from environments import ROOT, printed_by
from sampling import added, alternate, progress, ratio, spread

BLOCK = 10  # groups in a row: few, since torch's own cost grows with the groups that there are

WITHOUT = {"TORCHCOMMSHIM": "off"}
SILENT = {"TORCHCOMMSHIM_HANG_REPORT_S": "0"}
STRATEGIES = {name: {"TORCHCOMMSHIM": name, **SILENT} for name in ("auto", "split", "strip", "observe")}

# The variables of each condition, by world.
CONDITIONS: dict[str, dict[str, dict[str, str]]] = {
    "unbound": STRATEGIES,
    "bound": {name: STRATEGIES[name] for name in ("auto", "split", "observe")},
    "repaired": {name: STRATEGIES[name] for name in ("auto", "split", "observe")},
    "stripped": {"strip": STRATEGIES["strip"]},
    "watched": {"auto, hang report": {}},
    "traced": {"auto, trace": {**SILENT, "TORCHCOMMSHIM_TRACE": "{folder}"}},
}
MADE_WITH_THE_SHIM = ("stripped", "watched", "traced")


def measure(quick: bool, worlds: Iterable[str] = tuple(CONDITIONS)) -> dict[str, Any]:
    """Make groups in each world, each in a process of its own."""
    groups = 400 if quick else 10_000
    found = {}
    for world in worlds:
        progress(f"creation: {world}, {groups} groups, made in {1 + len(CONDITIONS[world])} ways")
        with tempfile.TemporaryDirectory() as folder:
            found[world] = printed_by("creation.py", world, groups, folder)
    return {"groups": groups, "worlds": found}


def main() -> None:
    """Measure one world in this process and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("world", choices=CONDITIONS)
    parser.add_argument("groups", type=int)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    print(json.dumps(measure_world(args.world, args.groups, args.folder)))


def measure_world(name: str, groups: int, folder: Path) -> dict[str, Any]:
    """The cost of a creation in one kind of world, which gets `groups` groups in all."""
    import posing
    import torch.distributed as dist

    posing.pretend_gpus()
    conditions: dict[str, Mapping[str, str]] = {"without": WITHOUT, **CONDITIONS[name]}
    shims = {
        condition: posing.Shimmed({key: value.format(folder=folder) for key, value in variables.items()})
        for condition, variables in conditions.items()
    }
    shims[list(conditions)[name in MADE_WITH_THE_SHIM]].use()
    backend = posing.make_world(name, size=8)

    def block(shim: posing.Shimmed) -> float:
        shim.use()
        began = time.thread_time_ns()
        for _ in range(BLOCK):
            dist.new_group([0, 1], backend=backend)
        return (time.thread_time_ns() - began) / BLOCK / 1e3

    steps: dict[str, Callable[[], float]] = {
        condition: lambda shim=shim: block(shim) for condition, shim in shims.items()
    }
    gc.collect()
    times = alternate(steps, max(2, groups // BLOCK // len(steps)))
    base = times["without"]
    rows = {}
    for condition, values in times.items():
        if condition != "without":
            extra = added(values, base)
            tenth = max(1, len(extra) // 10)
            rows[condition] = {
                "added_us": spread(extra),
                "first_tenth_us": spread(extra[:tenth])["median"],
                "last_tenth_us": spread(extra[-tenth:])["median"],
                "to_without": ratio(values, base),
            }
    return {"without_us": spread(base), "conditions": rows}


if __name__ == "__main__":
    main()
