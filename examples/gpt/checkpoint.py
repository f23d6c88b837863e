# SPDX-License-Identifier: Apache-2.0
"""Saving and resuming, with torch.distributed.checkpoint.

    DIR/latest_checkpointed_iteration.txt     the number of the newest complete checkpoint
    DIR/iter_0000050/                         the tensors of all ranks, and progress.json

A checkpoint is written to a folder of another name, which is renamed when it is complete; only then does
the text file name it. A job killed at any moment leaves the previous checkpoint in force; one that is
replaced by a checkpoint of the same iteration is called iter_0000050.old until then. Tensors are
stored under the names they have in the whole model, so a checkpoint may be loaded by another number of
stages or replicas; in the same layout, the run goes on with the same numbers to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gpt.errors import InputError, agreed
from gpt.groups import Groups
from gpt.model import Stage
from gpt.optimizer import own_part

LATEST = "latest_checkpointed_iteration.txt"
SHAPE = (  # what must be the same in the run that saves and the run that loads
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "transformer_impl",
    "vocab_size",
)


@dataclass
class Progress:
    """How far training has come.

    Attributes:
        iteration: iterations done.
        consumed_samples: samples used up by them.
        steps: iterations that changed the weights; the others met an overflow.
        loss_scale: `LossScale.state()` under `--fp16`, else empty.
    """

    iteration: int = 0
    consumed_samples: int = 0
    steps: int = 0
    loss_scale: dict = field(default_factory=dict)


def tensors(model: Stage, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's tensors by name: all weights of the stage, and the optimizer state this replica keeps."""
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {
        f"optimizer.{names[parameter]}.{key}": value
        for parameter, state in own_part(optimizer).state.items()
        for key, value in state.items()
    }
    return {**weights, **states}


def try_writing(folder: str) -> None:
    """Make the folder that `--save` names and write there, to meet what is in the way before training.

    Raises:
        InputError: that cannot be done.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"--save {folder}: {error.strerror}") from error


def save(
    args: argparse.Namespace,
    groups: Groups,
    model: Stage,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Save to `args.save`. If a rank cannot, all leave, and the previous checkpoint stays in force."""
    final = Path(args.save, f"iter_{progress.iteration:07d}")
    draft, replaced = final.with_suffix(".tmp"), final.with_suffix(".old")
    with agreed(groups.control), cannot("save", draft):
        if args.rank == 0:
            for abandoned in Path(args.save).glob("iter_*.tmp"):
                shutil.rmtree(abandoned)
            draft.mkdir(parents=True)
    with agreed(groups.control), cannot("save", draft):
        try:
            dcp.save(tensors(model, optimizer), checkpoint_id=draft, process_group=groups.control)
        except CheckpointException:  # on all ranks, whichever could not write
            if args.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise
    with agreed(groups.control), cannot("save", final):
        if args.rank == 0:
            description = {
                "shape": {name: getattr(args, name) for name in SHAPE},
                "progress": asdict(progress),
            }
            write(draft / "progress.json", json.dumps(description, indent=1))
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.replace(final, replaced)
            os.replace(draft, final)
            write(Path(args.save, LATEST), str(progress.iteration))
            for old in Path(args.save).glob("iter_*.old"):
                shutil.rmtree(old, ignore_errors=True)


def load(
    args: argparse.Namespace, groups: Groups, model: Stage, optimizer: torch.optim.Optimizer
) -> Progress | None:
    """Load the newest checkpoint in `args.load` into `model` and `optimizer`; None if there is none."""
    latest = Path(args.load, LATEST)
    answer: list[str | None] = [None]
    with agreed(groups.control), cannot("load", latest):
        if args.rank == 0 and latest.exists():
            answer = [latest.read_text().strip()]
            if not answer[0].isdigit():
                raise InputError(f"{latest} should hold the number of an iteration, but holds {answer[0]!r}")
    # Where ranks see different folders, those that lack the checkpoint say so, instead of starting afresh.
    dist.broadcast_object_list(answer, src=0, group=groups.control)
    if answer[0] is None:
        return None
    folder = Path(args.load, f"iter_{int(answer[0]):07d}")
    if not folder.exists() and folder.with_suffix(".old").exists():
        folder = folder.with_suffix(".old")  # a save over it was killed between its two renames
    with agreed(groups.control), cannot("load", folder / "progress.json"):
        description = json.loads((folder / "progress.json").read_text())
        compare(folder, description["shape"], args)
        progress = Progress(**description["progress"])
    with agreed(groups.control), cannot("load", folder):
        dcp.load(tensors(model, optimizer), checkpoint_id=folder, process_group=groups.control)
    return progress


def compare(folder: Path, shape: dict, args: argparse.Namespace) -> None:
    """Refuse a checkpoint of another shape than this run's."""
    flags = {"vocab_size": "--tokenizer-model's padded vocabulary"}
    for name in SHAPE:
        if shape[name] != getattr(args, name):
            flag = flags.get(name, "--" + name.replace("_", "-"))
            raise InputError(
                f"checkpoint {folder} was made with {flag} {shape[name]}, not {getattr(args, name)}"
            )


@contextmanager
def cannot(do: str, path: Path) -> Iterator[None]:
    """Turn what fails in a block into an error that says so of `path`."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise InputError(f"cannot {do} {path}: rank {rank}: {cause!r}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot {do} {path}: {error!r}") from error


def write(path: Path, text: str) -> None:
    """Write a small file such that it is never seen half written."""
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
