# SPDX-License-Identifier: Apache-2.0
"""What the user gives: flags, data files, tokenizers; and the numbers made of them."""

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys

import pytest
from examples.tiny import EXAMPLES, MODEL, REST, STAGES_2, TRAINING
from gpt import errors
from gpt.arguments import parse_args
from gpt.checkpoint import Progress
from gpt.data import Samples, Tokens, load_tokenizer, padded, write_tokens
from gpt.errors import InputError
from gpt.log import Log
from gpt.optimizer import LossScale, learning_rate
from preprocess_data import main as preprocess_main


def parse(monkeypatch, flags, world_size=4, rank=0):
    for name, value in (
        ("RANK", rank),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", world_size),
        ("MASTER_ADDR", "localhost"),
    ):
        monkeypatch.setenv(name, str(value))
    return parse_args(f"{MODEL} {TRAINING} {REST} --data-path data --tokenizer-model file {flags}".split())


class Left(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def stay(monkeypatch):
    """Errors end a rank; here they raise Left instead."""

    def leave(message):
        raise Left(message)

    monkeypatch.setattr("gpt.arguments.leave", leave)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2: this example has pipeline"),
        (
            "--pipeline-model-parallel-size 3",
            "--pipeline-model-parallel-size 3 does not divide the 4 processes",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers 6",
            "--num-layers 6 is not divisible by --pipeline-model-par",
        ),
        ("--num-attention-heads 5", "--hidden-size 32 is not divisible by --num-attention-heads 5"),
        ("--seq-length 64", "--seq-length 64 exceeds --max-position-embeddings 32"),
        (
            "--global-batch-size 12",
            "--global-batch-size 12 is not divisible by --micro-batch-size 4 times the data-",
        ),
        (
            "--pipeline-model-parallel-size 4 --global-batch-size 4",
            "makes 1 micro-batches, fewer than the 4 stages",
        ),
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
        ("--split 100,0,0 --eval-iters 1", "--eval-iters 1, but --split leaves nothing for validation"),
        ("--transformer-impl transformer_engine", "--transformer-impl transformer_engine"),
        ("--split 0,1", "argument --split: '0,1' should be up to three weights such as 969,30,1"),
        ("--split a", "argument --split: 'a' should be up to three weights such as 969,30,1"),
        ("--eval-iters -1", "argument --eval-iters: invalid non_negative value"),
        ("--train-iters 0", "argument --train-iters: invalid positive value"),
        ("--num-layer 4", "unrecognized arguments: --num-layer 4"),
    ],
)
def test_flags_that_cannot_work(monkeypatch, stay, flags, message):
    """Each is refused before any process group is made, by an error that names the flag."""
    with pytest.raises(Left, match=re.escape(message)):
        parse(monkeypatch, flags)


def test_only_rank_0_tells_of_flags(monkeypatch, stay):
    """All ranks see a bad flag; the others leave without a word."""
    with pytest.raises(Left) as left:
        parse(monkeypatch, "--fp16 --bf16", rank=1)

    assert left.value.args == (None,)


@pytest.mark.parametrize(("rank", "speaks"), [(2, True), (3, False)])
def test_too_few_gpus(monkeypatch, stay, rank, speaks):
    """The first rank without a GPU says so, and names the way out; the next ones leave without a word."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Left) as left:
        parse(monkeypatch, "", rank=rank)
    message = str(left.value.args[0])

    assert ("LOCAL_RANK is 2, but this node has only 2 GPUs" in message) is speaks
    assert ("VIA=one_gpu.py" in message) is speaks


def test_started_without_torchrun(monkeypatch, stay):
    """The variables that a launcher sets are asked for by name."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(Left, match=r"MASTER_ADDR.* not set: start this script with torchrun"):
        parse_args(f"{MODEL} {TRAINING} {REST} --data-path data --tokenizer-model file".split())


def test_notes(monkeypatch, capsys):
    """Flags that mean nothing here are accepted with a note; an empty cache path is accepted too."""
    parse(monkeypatch, "--use-mcore-models --sequence-parallel --data-cache-path")
    notes = capsys.readouterr().err.splitlines()

    assert [note.split()[2] for note in notes] == ["--use-mcore-models", "--sequence-parallel"]


def test_index_format(tmp_path):
    """The bytes of an index are Megatron-LM's."""
    write_tokens(str(tmp_path / "data"), [[5, 6, 7], [8]], vocab_size=100)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 3, 1, 0, 6, 0, 1, 2)

    assert (tmp_path / "data.idx").read_bytes() == expected
    assert (tmp_path / "data.bin").read_bytes() == struct.pack("<4H", 5, 6, 7, 8)


def test_interrupted_write_leaves_the_old_files(tmp_path):
    """Data that are not complete get no name, and what had the name before stays."""
    prefix = str(tmp_path / "data")

    def documents():
        yield [1]
        raise KeyboardInterrupt

    write_tokens(prefix, [[5, 6], [7]], vocab_size=100)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(prefix, documents(), vocab_size=100)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
    assert Tokens(prefix).ids.tolist() == [5, 6, 7]


def script(folder, *arguments, **environment):
    """Run pretrain_gpt.sh up to the launch of its ranks."""
    return subprocess.run(
        ["bash", EXAMPLES / "pretrain_gpt.sh", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable, "LAUNCH": "echo launched", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_script_keeps_the_data_of_a_user(tmp_path):
    """A .bin at the prefix that was given is not written over, even if its .idx is missing."""
    (tmp_path / "mine.bin").write_bytes(b"mine")
    result = script(tmp_path, "checkpoints", "tensorboard", "mine", "mine.model")

    assert result.stdout.startswith("launched")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.bin"]
    assert (tmp_path / "mine.bin").read_bytes() == b"mine"


def test_script_knows_its_sizes(tmp_path):
    """A size of another name is refused, not taken for the small one."""
    result = script(tmp_path, SIZE="reprot")

    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "pretrain_gpt.sh: error: SIZE=reprot is neither small nor report\n"


def test_tokens_roundtrip(tmp_path):
    """What was written is read, also ids that need four bytes."""
    write_tokens(str(tmp_path / "data"), [[5, 70000], [8]], vocab_size=100_000)
    tokens = Tokens(str(tmp_path / "data"))

    assert (tokens.ids.tolist(), tokens.boundaries.tolist()) == ([5, 70000, 8], [0, 2, 3])


def test_portions(tmp_path):
    """--split shares out whole documents."""
    write_tokens(str(tmp_path / "data"), [[0] * 10 for _ in range(10)], vocab_size=100)

    assert Tokens(str(tmp_path / "data")).portions((70, 20, 10)) == [(0, 70), (70, 90), (90, 100)]


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def overwrite_end(path):
    path.write_bytes(path.read_bytes()[:-8] + struct.pack("<q", 7))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda prefix: (prefix / "data.idx").unlink(), "there is no file {}/data.idx"),
        (lambda prefix: (prefix / "data.bin").unlink(), "there is no file {}/data.bin"),
        (lambda prefix: cut(prefix / "data.bin"), "{}/data.bin has 18 bytes, but {}/data.idx describes 20"),
        (lambda prefix: cut(prefix / "data.idx"), "{}/data.idx has "),
        (
            lambda prefix: (prefix / "data.idx").write_bytes(b"text"),
            "{}/data.idx is not an index of token files",
        ),
        (lambda prefix: shutil.copy(prefix / "other.idx", prefix / "data.idx"), "describes 4"),
        (
            lambda prefix: overwrite_end(prefix / "data.idx"),
            "{}/data.idx: its documents do not lie within its 1",
        ),
    ],
)
def test_damaged_data(tmp_path, damage, message):
    """Data that is missing, cut short or of something else is named."""
    write_tokens(str(tmp_path / "data"), [list(range(10))], vocab_size=100)
    write_tokens(str(tmp_path / "other"), [[1, 2]], vocab_size=100)
    damage(tmp_path)
    with pytest.raises(InputError, match=re.escape(message.format(tmp_path, tmp_path))):
        Tokens(str(tmp_path / "data"))


def test_damaged_data_ends_all_ranks(train, prefix, tmp_path):
    """All ranks of a job see a truncated file; one says so, all exit."""
    shutil.copy(f"{prefix}.idx", tmp_path / "data.idx")
    (tmp_path / "data.bin").write_bytes(b"1234")
    run = train(2, f"{STAGES_2} --data-path {tmp_path / 'data'}")

    assert 0 not in run.codes
    assert len(run.errors) == 1
    assert run.errors[0].startswith(f"[rank 0] pretrain_gpt.py: error: {tmp_path / 'data.bin'} has 4 bytes")


def test_failure_of_one_rank_ends_all(train):
    """A failure that only rank 1 meets is told by rank 1, and rank 0 does not wait for it."""
    prelude = "if rank == 1: import sys; sys.argv[sys.argv.index('--tokenizer-model') + 1] = '/nowhere'"
    run = train(2, STAGES_2, prelude)

    assert 0 not in run.codes
    assert run.err[1].splitlines()[-1] == (
        "[rank 1] pretrain_gpt.py: error: --tokenizer-model /nowhere: there is no such file"
    )
    assert "error: " not in run.err[0]


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_tokenizer_of_another_kind(tmp_path, content):
    """A file that is no sentencepiece model is named."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(
        InputError, match=f"--tokenizer-model {tmp_path / 'file'} is not a sentencepiece model"
    ):
        load_tokenizer(str(tmp_path / "file"))


def test_too_little_data(tmp_path):
    """A portion of the data that is shorter than a sample is refused by its name."""
    write_tokens(str(tmp_path / "data"), [list(range(10))], vocab_size=100)
    tokens = Tokens(str(tmp_path / "data"))
    message = "--split leaves 10 tokens for validation, too few for --seq-length 10"
    with pytest.raises(InputError, match=message):
        Samples(tokens, (0, 10), 10, 100, 1, "validation")


def test_data_of_another_tokenizer(tmp_path):
    """An id outside the vocabulary is told before the model sees it."""
    write_tokens(str(tmp_path / "data"), [[1, 2, 99]], vocab_size=100)
    samples = Samples(Tokens(str(tmp_path / "data")), (0, 3), 2, 50, seed=1)
    with pytest.raises(InputError, match="has the id 99; --tokenizer-model has 50 ids"):
        samples[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n{"title": "two"}\n', "a.jsonl, line 2: no JSON object with a text"),
        ("a.jsonl", "one\n", "a.jsonl, line 1: no JSON object with a text"),
        ("a.jsonl", '{"text": 5}\n', "a.jsonl, line 1: no JSON object with a text"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl, line 1: no JSON object with a text"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "a.jsonl, line 1: no JSON object with a text"),
        ("a.txt", " \n", "there is no text in the input"),
        ("a.txt", None, "a.txt: No such file or directory"),
        ("a.txt", "one two", "--vocab-size 5000: "),
    ],
)
def test_text_that_cannot_be_used(monkeypatch, capsys, tmp_path, name, content, message):
    """preprocess_data.py names the file and line, or the flag."""
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    error = preprocess(monkeypatch, capsys, tmp_path / name, tmp_path / "out")

    assert message in error
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["a.txt/out", "a.txt/folder/out"])
def test_output_under_a_file(monkeypatch, capsys, tmp_path, name):
    """preprocess_data.py names the flag whose folder cannot be made."""
    (tmp_path / "a.txt").write_text("one two")
    error = preprocess(monkeypatch, capsys, tmp_path / "a.txt", tmp_path / name)

    assert f"--output-prefix {tmp_path / name}: " in error


def preprocess(monkeypatch, capsys, text, prefix):
    """The one line of error of preprocess_data.py."""
    command = ["preprocess_data.py", "--input", text, "--vocab-size", "5000"]
    command += ["--output-prefix", prefix, "--tokenizer-model", f"{prefix}.model"]
    monkeypatch.setattr("sys.argv", [str(word) for word in command])
    with pytest.raises(SystemExit) as left:
        preprocess_main()
    error = capsys.readouterr().err

    assert left.value.code == 1
    assert error.startswith("preprocess_data.py: error: ")
    assert error.count("\n") == 1
    return error


def test_an_epoch_is_all_samples(tmp_path):
    """Each epoch holds every window once, in another order; a label is the next input."""
    write_tokens(str(tmp_path / "data"), [list(range(41))], vocab_size=100)
    samples = Samples(Tokens(str(tmp_path / "data")), (0, 41), 4, 100, seed=1)
    epochs = [[samples[10 * epoch + n].tolist() for n in range(10)] for epoch in range(2)]

    assert sorted(epochs[0]) == sorted(epochs[1]) == [list(range(4 * n, 4 * n + 5)) for n in range(10)]
    assert epochs[0] != epochs[1]


def test_replicas_share_a_batch(tmp_path):
    """Replicas take turns, micro-batch by micro-batch, and together read the batch of a single process."""
    write_tokens(str(tmp_path / "data"), [list(range(41))], vocab_size=100)
    samples = Samples(Tokens(str(tmp_path / "data")), (0, 41), 4, 100, seed=1)
    alone = samples.batch(0, 4, 2, replica=0, replicas=1)
    shares = [samples.batch(0, 2, 2, replica, replicas=2) for replica in range(2)]

    first, second = (share.tolist() for share in shares)

    assert first[:2] + second[:2] + first[2:] + second[2:] == alone.tolist()


def schedule(**changes):
    flags = {"lr": 3e-4, "min_lr": 3e-5, "lr_decay_style": "cosine", "lr_decay_iters": 100}
    return argparse.Namespace(**{**flags, "lr_warmup_fraction": 0.1, **changes})


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.0), (5, 1.5e-4), (10, 3e-4), (55, 1.65e-4), (100, 3e-5), (1000, 3e-5)]
)
def test_cosine_schedule(step, rate):
    """Linear warm-up, half a cosine, then the minimum."""
    assert learning_rate(schedule(), step) == pytest.approx(rate)


@pytest.mark.parametrize(("style", "rate"), [("linear", 1.65e-4), ("constant", 3e-4)])
def test_other_schedules(style, rate):
    """Half-way through the decay."""
    assert learning_rate(schedule(lr_decay_style=style), 55) == pytest.approx(rate)


def test_loss_scale():
    """Halved when the chances are used up, doubled after a good window, never below its minimum."""
    scale = LossScale(8.0, smallest=4.0, window=2, hysteresis=2, chances=2)
    scales = []
    for overflow in (True, True, True, False, False, True, False, False):
        scale.update(overflow)
        scales.append(scale.scale)

    assert scales == [8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


def log_of(monkeypatch, flags):
    args = parse(monkeypatch, f"--pipeline-model-parallel-size 2 {flags}", rank=3)
    args.vocab_size = 384
    return Log(args, done=0)


def test_log_line(monkeypatch, capsys):
    """The format of the report's log."""
    log = log_of(monkeypatch, "--log-throughput")
    log.iteration(Progress(1, 16), loss=5.95, updated=True, norm=1.25, lr=3e-4, loss_scale=1.0)
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", capsys.readouterr().out)
    line = re.sub(r"\d+\.\d(?= \| (throughput|learning))", "N", line)

    assert line == (
        " [TIME] iteration        1/      50 | consumed samples:           16 | "
        "elapsed time per iteration (ms): N | throughput per GPU (TFLOP/s/GPU): N | "
        "learning rate: 3.000000E-04 | global batch size:    16 | "
        "lm loss: 5.950000E+00 | loss scale: 1.0 | grad norm: 1.250 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n"
    )


def test_tensorboard_under_a_file(monkeypatch, tmp_path):
    """A folder that cannot be made is told by its flag."""
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"--tensorboard-dir {tmp_path / 'file' / 'logs'}: "):
        log_of(monkeypatch, f"--tensorboard-dir {tmp_path / 'file' / 'logs'}")


def test_log_line_of_skipped_iteration(monkeypatch, capsys):
    """A skipped iteration has neither loss nor gradient norm."""
    log_of(monkeypatch, "").iteration(
        Progress(1, 16), 5.95, updated=False, norm=None, lr=3e-4, loss_scale=2.0
    )
    line = capsys.readouterr().out

    assert line.endswith(
        "| loss scale: 2.0 | number of skipped iterations:   1 | number of nan iterations:   0 |\n"
    )
    assert "lm loss" not in line


def test_progress_bar(monkeypatch, capsys):
    """On a terminal a bar moves in place of the lines."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    log = log_of(monkeypatch, "")
    log.iteration(Progress(1, 16), loss=5.95, updated=True, norm=1.25, lr=3e-4, loss_scale=1.0)
    log.close()
    output = capsys.readouterr()

    assert output.out == ""
    assert "1/50" in output.err
    assert "loss 5.9500, lr 3.00e-04" in output.err


def test_unexpected_errors_keep_their_traceback():
    """An error that is not the user's is shown whole."""
    assert errors.describe(InputError("no file")) == "pretrain_gpt.py: error: no file"
    assert errors.describe(ZeroDivisionError("x")) == "ZeroDivisionError: x"


def test_vocabulary_is_padded():
    """Up to a multiple."""
    assert [padded(size, 128) for size in (1, 128, 129)] == [128, 128, 256]
