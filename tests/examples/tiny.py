# SPDX-License-Identifier: Apache-2.0
"""A tiny model, and a way to train it in several ranks."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
DEADLINE = 120  # seconds until a run counts as hung

# The last one warns of its own deprecated parts when it is first imported; importorskip hides that.
for module in ("torch", "numpy", "sentencepiece", "torch.distributed.optim"):
    pytest.importorskip(module)

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
TRAINING = (
    "--micro-batch-size 4 --global-batch-size 16 --train-iters 50 --lr 4e-3 --min-lr 4e-4 "
    "--lr-decay-style cosine --lr-warmup-fraction .2 --weight-decay .1 --adam-beta1 .9 --adam-beta2 .95 "
    "--init-method-std .02 --clip-grad 1.0"
)
REST = "--use-distributed-optimizer --split 90,10,0 --transformer-impl local --log-interval 1 --eval-iters 0"
STAGES_2 = "--pipeline-model-parallel-size 2"


@dataclass
class Run:
    """One training: what each rank printed, and how it ended."""

    codes: list[int]
    out: list[str]
    err: list[str]

    def log(self, field: str) -> list[float]:
        """The numbers of `field` in the log lines, in order."""
        return [float(number) for number in re.findall(rf"{re.escape(field)}: *(\S+) \|", self.out[-1])]

    @property
    def errors(self) -> list[str]:
        """The error messages of all ranks."""
        return [line for text in self.err for line in text.splitlines() if "error: " in line]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Trainer:
    """Trains the tiny model on the data at `prefix`, one run after the other."""

    def __init__(self, prefix: Path, folder: Path) -> None:
        self.prefix, self.folder, self.runs, self.process = prefix, folder, 0, None

    def start(self, ranks: int, flags: str = "", prelude: str = "", **environment: str) -> Path:
        """Start a run; returns the folder of its output."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "ranks.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHCOMMSHIM": "off"},
            )
        self.runs += 1
        folder = self.folder / f"run{self.runs}"
        folder.mkdir()
        data = f"--data-path {self.prefix} --tokenizer-model {self.prefix}.model"
        job = {
            "folder": str(folder),
            "ranks": ranks,
            "port": free_port(),
            "flags": f"{MODEL} {TRAINING} {REST} {data} {flags}".split(),
            "environment": environment,
            "prelude": prelude,
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return folder

    def finish(self, folder: Path) -> Run:
        """Wait for the run that was started last; a hung one fails the test."""
        if not select.select([self.process.stdout], [], [], DEADLINE)[0]:
            self.stop()
            pytest.fail(f"still running after {DEADLINE} s: " + (folder / "0.err").read_text())
        codes = json.loads(self.process.stdout.readline())
        out, err = (
            [(folder / f"{rank}.{name}").read_text() for rank in range(len(codes))] for name in ("out", "err")
        )
        return Run(codes, out, err)

    def __call__(self, ranks: int, flags: str = "", prelude: str = "", **environment: str) -> Run:
        return self.finish(self.start(ranks, flags, prelude, **environment))

    def stop(self) -> None:
        """End all processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None
