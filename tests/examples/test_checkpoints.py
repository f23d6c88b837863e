# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of pretrain_gpt.py: exact, atomic, and refused if they do not fit."""

import json
import os
import signal

import pytest
from examples.tiny import MODEL, REST, STAGES_2, TRAINING, free_port
from gpt import checkpoint
from gpt.arguments import parse_args
from gpt.checkpoint import Progress
from gpt.groups import choose_device, make_groups
from gpt.model import Stage
from gpt.optimizer import make_optimizer

SAVE = STAGES_2 + " --train-iters 8 --save-interval 4 --save {0}"
RESUME = SAVE + " --load {0}"


def tensors(folder, tmp_path):
    """All tensors of a checkpoint, by name."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, tmp_path / "flat.pt")
    return torch.load(tmp_path / "flat.pt", weights_only=True)


def pretend_stopped_after(folder, iteration):
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


@pytest.fixture(scope="session")
def saved(train, tmp_path_factory):
    """Checkpoints after 4 and 8 iterations of 2 stages and 2 replicas, and the run that made them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, train(4, SAVE.format(folder))


@pytest.fixture
def half_done(saved, tmp_path):
    """A copy of it in which only the first checkpoint is in force."""
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "iter_0000004").symlink_to(saved[0] / "iter_0000004")
    pretend_stopped_after(folder, 4)
    return folder


def test_resume_is_exact(train, saved, half_done, tmp_path):
    """A resumed run ends with bitwise the weights and optimizer state of one that was not interrupted."""
    run = train(4, RESUME.format(half_done))
    expected = tensors(saved[0] / "iter_0000008", tmp_path)
    actual = tensors(half_done / "iter_0000008", tmp_path)

    assert run.log("lm loss") == saved[1].log("lm loss")[4:]
    assert run.log("grad norm") == saved[1].log("grad norm")[4:]
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not actual[name].equal(expected[name])] == []
    resumed = f"  loaded checkpoint from {half_done} at iteration       4; 4 of 8 iterations are left"
    assert run.out[-1].splitlines().count(resumed) == 1


def test_resume_at_the_end(train, saved):
    """A run whose checkpoint is at the last iteration says so, trains nothing, and ends well."""
    run = train(1, RESUME.format(saved[0]).replace(STAGES_2, ""))

    assert (run.codes, run.log("lm loss")) == ([0], [])
    assert run.out[-1].strip() == (
        f"loaded checkpoint from {saved[0]} at iteration       8; nothing is left to train, since "
        "--train-iters is 8"
    )


def test_other_layout_can_load(train, saved, half_done):
    """2 stages saved it, 1 process goes on with the same losses."""
    run = train(1, RESUME.format(half_done).replace(STAGES_2, ""))

    assert run.log("lm loss") == pytest.approx(saved[1].log("lm loss")[4:], rel=1e-3)


def test_kill_while_saving_loses_nothing(train, half_done):
    """Killed with its tensors written but not yet in force, a run resumes from the previous checkpoint."""
    prelude = """if rank == 0:
    import os, signal, gpt.checkpoint
    gpt.checkpoint.write = lambda path, text: os.kill(os.getpid(), signal.SIGKILL)"""
    killed = train(2, RESUME.format(half_done), prelude)
    resumed = train(2, RESUME.format(half_done))

    assert (killed.codes[0], killed.codes[1] != 0) == (-signal.SIGKILL, True)
    assert resumed.codes == [0, 0]
    assert resumed.log("lm loss") == killed.log("lm loss")
    assert sorted(path.name for path in half_done.iterdir()) == [
        "iter_0000004",
        "iter_0000008",
        "latest_checkpointed_iteration.txt",
    ]


def test_full_disk(train, half_done):
    """If one rank cannot write, all leave, one message names the folder, the previous checkpoint stays."""
    prelude = "import resource; rank == 1 and resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))"
    run = train(2, RESUME.format(half_done), prelude)

    assert 0 not in run.codes
    assert len(run.errors) == 1
    assert f"cannot save {half_done / 'iter_0000008.tmp'}: rank 1: " in run.errors[0]
    assert (half_done / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not (half_done / "iter_0000008.tmp").exists()


def test_other_shape(train, half_done):
    """A checkpoint of another shape is refused by one message that names the flag and both values."""
    run = train(2, RESUME.format(half_done) + " --hidden-size 64")

    assert 0 not in run.codes
    folder = half_done / "iter_0000004"
    assert run.errors == [
        f"[rank 0] pretrain_gpt.py: error: checkpoint {folder} was made with --hidden-size 32, not 64"
    ]


@pytest.mark.parametrize("content", ["", "release"])
def test_bad_latest_file(train, tmp_path, content):
    """A text file without a number is named."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    run = train(1, RESUME.format(tmp_path).replace(STAGES_2, ""))

    assert run.codes == [1]
    assert (
        f"latest_checkpointed_iteration.txt should hold the number of an iteration, but holds {content!r}"
        in run.err[0]
    )


def test_description(saved):
    """progress.json says what shape the model has and how far training came."""
    description = json.loads((saved[0] / "iter_0000008" / "progress.json").read_text())

    assert description["shape"]["vocab_size"] == 384
    assert description["progress"] == {
        "iteration": 8,
        "consumed_samples": 128,
        "steps": 8,
        "loss_scale": {},
    }


def test_float16_begins_its_loss_scale(train, half_done):
    """A checkpoint of a run without --fp16 knows no loss scale, so one with it begins at its own."""
    flags = "--fp16 --initial-loss-scale 4096 --train-iters 5"
    run = train(1, f"{RESUME.format(half_done)} {flags}".replace(STAGES_2, ""))

    assert run.log("loss scale") == [4096.0]


def test_unusable_folder(train, tmp_path):
    """What stands in the way of --save is told before training, by its name."""
    (tmp_path / "file").touch()
    run = train(1, f"--save {tmp_path / 'file' / 'folder'}")

    assert (run.codes, run.out) == ([1], [""])
    assert run.errors == [
        f"[rank 0] pretrain_gpt.py: error: --save {tmp_path / 'file' / 'folder'}: Not a directory"
    ]


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """What save and load need, in a world of this one process."""
    from torch.distributed import destroy_process_group

    monkeypatch.setattr("gpt.errors.leave", pytest.fail)
    environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    flags = f"{MODEL} {TRAINING} {REST} --data-path data --tokenizer-model file"
    args = parse_args(f"{flags} --save {tmp_path} --load {tmp_path}".split())
    args.vocab_size = 384
    groups = make_groups(args, choose_device(args))
    model = Stage(args, 0, args.vocab_size)
    yield args, groups, model, make_optimizer(model, args, groups)
    destroy_process_group()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.4's own use of it
def test_kill_while_replacing_loses_nothing(monkeypatch, alone, tmp_path):
    """Killed between the two renames of a save over a checkpoint, a run resumes from the old one."""
    rename = os.replace

    def killed(source, target):
        if source == tmp_path / "iter_0000004.tmp":
            raise KeyboardInterrupt
        rename(source, target)

    checkpoint.save(*alone, Progress(4, 64, 4))
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(*alone, Progress(4, 80, 4))

    assert not (tmp_path / "iter_0000004").exists()
    assert checkpoint.load(*alone) == Progress(4, 64, 4)

    checkpoint.save(*alone, Progress(4, 96, 4))

    assert checkpoint.load(*alone) == Progress(4, 96, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]
