# SPDX-License-Identifier: Apache-2.0
"""What `torchcommshim verify --simulate` says of this torch, obtained once and shared by the tests."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conftest import clean_environment

from torchcommshim.commands.verify import catalogue
from torchcommshim.commands.verify.runner import Runner
from torchcommshim.commands.verify.verdicts import Verdict

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
LATE = RELEASE < (2, 5)  # members of an NCCL group split on first use

RANKS = 4

PRELUDE = f"""
import sys
sys.path.insert(0, {str(catalogue.FOLDER)!r})
import torch
import torch.distributed as dist
from common import check_sum, finish, start
rank, size = start(BACKEND)
"""


@cache
def document() -> dict[str, Any]:
    """The JSON document of all scenarios without the shim and with `auto`."""
    command = [sys.executable, "-m", "torchcommshim.commands.verify", "--simulate", "--json", "--jobs=2"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def verdict(scenario: str, strategy: str = "off") -> dict[str, Any]:
    """How a scenario ended, without the shim or with it."""
    (found,) = (each for each in document()["scenarios"] if each["name"] == scenario)
    return found["without"] if strategy == "off" else found["with"][strategy]


def sums(found: dict[str, Any]) -> list[tuple[list[int], int, int]]:
    """The wrong sums of a verdict: ranks of the group, rank, what it got."""
    return [(each["ranks"], each["rank"], each["got"]) for each in found["sums"]]


def waits(found: dict[str, Any]) -> dict[int, str]:
    """What each rank of a verdict waits in."""
    return {each["rank"]: each["inside"].split(": ")[-1] for each in found["waits"]}


def run_program(folder: Path, program: str, deadline: float = 60, backend: str = "nccl") -> Verdict:
    """Run the body of a program on `RANKS` ranks of a bound world of simulated NCCL, without the shim.

    The deadline is there for programs that are expected to hang; the others are to end before it.
    """
    script = folder / "program.py"
    script.write_text(PRELUDE.replace("BACKEND", repr(backend)) + program)
    return Runner(RANKS, deadline, simulate=True, cancelled=threading.Event()).run(script, "off", deadline)
