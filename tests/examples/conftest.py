# SPDX-License-Identifier: Apache-2.0
"""A little data, made once for all trainings."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def prefix(tmp_path_factory) -> Path:
    """Data made by preprocess_data.py; the tokenizer lies at PREFIX.model."""
    from examples.tiny import DEADLINE

    prefix = tmp_path_factory.mktemp("data") / "stdlib"
    command = f"{EXAMPLES / 'preprocess_data.py'} --output-prefix {prefix} --tokenizer-model {prefix}.model"
    command += " --vocab-size 384 --max-characters 150000"
    subprocess.run([sys.executable, *command.split()], check=True, timeout=DEADLINE)
    return prefix


@pytest.fixture(scope="session")
def train(prefix, tmp_path_factory):
    """A function that trains the tiny model."""
    from examples.tiny import Trainer

    trainer = Trainer(prefix, tmp_path_factory.mktemp("runs"))
    yield trainer
    trainer.stop()
