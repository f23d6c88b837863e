# SPDX-License-Identifier: Apache-2.0
"""Run programs as people write them, without torchcommshim and with each strategy, and say how each run ends.

    python run.py --output programs.json PROGRAM.py...
    python run.py --nproc 4 --deadline 60 --strategy auto --simulate fsdp2_async_checkpoint.py

Each run goes through torchrun under a deadline, as in `torchcommshim verify`: on GPUs, which ranks may share,
with real NCCL, without with simulated NCCL.  Exit code 0 if every program is ok with each strategy.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torchcommshim
from torchcommshim.commands.verify.catalogue import STRATEGIES
from torchcommshim.commands.verify.runner import Runner, look


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="+", type=Path, metavar="PROGRAM")
    parser.add_argument("--nproc", type=int, default=4, help="number of ranks (4)")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds, once all have started (60)")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="may be repeated (all)")
    parser.add_argument("--simulate", action="store_true", help="simulated NCCL even where there are GPUs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--output", type=Path, help="write what was seen to this JSON file")
    chosen = parser.parse_args()
    for program in chosen.programs:
        if not program.is_file():
            parser.error(f"there is no {program}")

    machine = look(chosen.simulate)
    runner = Runner(chosen.nproc, chosen.deadline, machine.simulated, threading.Event())
    columns = ("off", *(chosen.strategy or STRATEGIES))
    cells = [(program, strategy) for program in chosen.programs for strategy in columns]
    print(f"torch {machine.torch}, NCCL {machine.nccl}, {chosen.nproc} ranks", flush=True)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        verdicts = pool.map(lambda cell: runner.run(cell[0].resolve(), cell[1], chosen.deadline), cells)
        seen = []
        for (program, strategy), verdict in zip(cells, verdicts):
            seen.append({"program": program.name, "strategy": strategy, **asdict(verdict)})
            print(f"{program.stem:28} {strategy:6} {verdict.verdict:6} {verdict.seconds:5.1f} s", flush=True)
            print(*(f"    {line}" for line in verdict.lines()), sep="\n", flush=True)
    if chosen.output:
        document = {
            "torchcommshim": torchcommshim.__version__,
            "machine": asdict(machine),
            "ranks": chosen.nproc,
            "deadline_s": chosen.deadline,
            "runs": seen,
        }
        chosen.output.write_text(json.dumps(document, indent=2) + "\n")
    return int(any(run["verdict"] != "ok" for run in seen if run["strategy"] != "off"))


if __name__ == "__main__":
    sys.exit(main())
