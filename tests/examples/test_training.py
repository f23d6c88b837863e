# SPDX-License-Identifier: Apache-2.0
"""pretrain_gpt.py trains, whatever the layout of its ranks."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from examples.tiny import DEADLINE, EXAMPLES, STAGES_2, free_port

LAYOUTS = {"PP1": (1, 1), "PP2": (2, 2), "PP4": (4, 4), "DP2xPP2": (4, 2)}  # ranks, stages


@pytest.fixture(scope="session")
def runs(train):
    """50 iterations in each layout, with the same seed and data."""
    return {
        name: train(ranks, f"--pipeline-model-parallel-size {stages} --eval-iters 1 --eval-interval 25")
        for name, (ranks, stages) in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_falls(runs, layout):
    """In 50 iterations the loss falls by more than 1.5, from that of guessing."""
    losses = runs[layout].log("lm loss")

    assert (len(losses), losses[0] > 5.8, losses[0] - losses[-1] > 1.5) == (50, True, True)


@pytest.mark.parametrize("layout", ["PP2", "PP4", "DP2xPP2"])
def test_losses_agree(runs, layout):
    """Every layout has the losses of a single process, to float32 tolerance."""
    assert runs[layout].log("lm loss") == pytest.approx(runs["PP1"].log("lm loss"), rel=1e-5)


@pytest.mark.parametrize("layout", ["PP2", "PP4", "DP2xPP2"])
def test_gradient_norms_agree(runs, layout):
    """Every layout has the gradient norms of a single process: the shared embedding counts once."""
    expected = runs["PP1"].log("grad norm")  # printed with three decimals

    assert runs[layout].log("grad norm") == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("layout", ["PP2", "PP4", "DP2xPP2"])
def test_validation_agrees(runs, layout):
    """Every layout has the validation losses of a single process."""

    def losses(name):
        return [
            float(line.split(":")[1].strip(" |"))
            for line in runs[name].out[-1].splitlines()
            if "lm loss value" in line
        ]

    assert len(losses("PP1")) == 2
    assert losses(layout) == pytest.approx(losses("PP1"), rel=1e-5)


def test_only_last_rank_prints(runs):
    """One rank writes the log; the others are silent."""
    assert runs["PP4"].out[:-1] == ["", "", ""]


def test_shim_changes_nothing(runs, train):
    """Proof of value: on a healthy program every digit of the log is the same with the shim."""
    package = Path(importlib.util.find_spec("torchcommshim").origin).parent
    prelude = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
    prelude += "import torchcommshim; torchcommshim.install(); assert torchcommshim.status()['armed_by']"
    flags = f"{STAGES_2} --eval-iters 1 --eval-interval 25"
    with_shim = train(4, flags, prelude, TORCHCOMMSHIM="auto")

    for field in ("lm loss", "grad norm", "learning rate"):
        assert with_shim.log(field) == runs["DP2xPP2"].log(field)


def test_float16_overflow_is_agreed(train):
    """With too large a loss scale all stages skip the same iterations, halve it, and then train."""
    run = train(
        2,
        f"{STAGES_2} --fp16 --initial-loss-scale 4294967296 --hysteresis 1 --train-iters 30",
    )
    skipped, losses = run.log("number of skipped iterations"), run.log("lm loss")

    assert run.codes == [0, 0]
    assert run.log("loss scale")[-1] == 2.0 ** (32 - sum(skipped))
    assert 0 < sum(skipped) == 30 - len(losses)
    assert losses[0] - losses[-1] > 0.1


def test_script_of_the_report(tmp_path):
    """pretrain_gpt.sh makes data, trains in 4 processes of torchrun, leaves checkpoint and TensorBoard."""
    small = {"NUM_LAYERS": "4", "HIDDEN_SIZE": "32", "SEQ_LENGTH": "32", "TRAIN_ITERS": "2"}
    here = {"MASTER_PORT": str(free_port()), "PYTHON": sys.executable, "TORCHCOMMSHIM": "off"}
    paths = ["checkpoints", "tensorboard", "data/text", "data/text.model"]
    result = subprocess.run(
        ["bash", EXAMPLES / "pretrain_gpt.sh", *paths],
        cwd=tmp_path,
        env={**os.environ, "MAX_CHARACTERS": "150000", **small, **here},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert "iteration        2/       2 |" in result.stdout
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_sigterm_saves_and_exits(train, tmp_path):
    """A rank that is told to terminate makes all ranks save and exit in good order; the run can go on."""
    flags = f"{STAGES_2} --train-iters 100000 --save {tmp_path} --load {tmp_path}"
    folder = train.start(2, flags)
    deadline = time.monotonic() + DEADLINE
    while not (folder / "1.out").exists() or "iteration        3/" not in (folder / "1.out").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(int((folder / "0.pid").read_text()), signal.SIGTERM)
    run = train.finish(folder)
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())

    assert run.codes == [0, 0]
    assert saved == len(run.log("lm loss")) >= 3
    assert run.out[-1].splitlines()[-2:] == [
        f" stopped by SIGTERM after iteration {saved:7d}",
        f"  successfully saved checkpoint from iteration {saved:7d} to {tmp_path}",
    ]
