# SPDX-License-Identifier: Apache-2.0
"""A tiny model, and a way to train it in several ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
DEADLINE = 120  # seconds until a run counts as hung

sys.path.insert(0, str(EXAMPLES))
for module in ("torch", "numpy", "sentencepiece"):
    pytest.importorskip(module)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch 2.4's ZeroRedundancyOptimizer imports what is deprecated
    import pretrain_gpt  # noqa: F401

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 50 --lr 1e-2 --min-lr 1e-3 "
    "--lr-decay-style cosine --lr-warmup-fraction .02 --weight-decay .1 --adam-beta1 .9 --adam-beta2 .95 "
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


@dataclass
class Trainer:
    """Trains the tiny model on the data at `prefix`."""

    prefix: Path
    folder: Path
    runs: int = 0

    def start(self, ranks: int, flags: str = "", prelude: str = "", **environment: str):
        """Start a run; returns its process and the folder of its output."""
        self.runs += 1
        folder = self.folder / f"run{self.runs}"
        folder.mkdir()
        data = ["--data-path", str(self.prefix), "--tokenizer-model", f"{self.prefix}.model"]
        words = [*MODEL.split(), *TRAINING.split(), *REST.split(), *data, *flags.split()]
        process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "ranks.py"),
                str(ranks),
                str(free_port()),
                str(folder),
                prelude,
                *words,
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHCOMMSHIM": "off", **environment},
        )
        return process, folder

    def finish(self, process, folder: Path) -> Run:
        """Wait for a run; a hung one fails the test."""
        try:
            output, _ = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            pytest.fail(f"still running after {DEADLINE} s: " + (folder / "0.err").read_text())
        codes = json.loads(output.splitlines()[-1])
        texts = [
            [(folder / f"{rank}.{name}").read_text() for rank in range(len(codes))] for name in ("out", "err")
        ]
        return Run(codes, *texts)

    def __call__(self, ranks: int, flags: str = "", prelude: str = "", **environment: str) -> Run:
        return self.finish(*self.start(ranks, flags, prelude, **environment))
