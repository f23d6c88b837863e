# SPDX-License-Identifier: Apache-2.0
"""Pre-train a GPT with pipeline and data parallelism.

4 processes on the CPU, 2 minutes, from text to checkpoint (makes its data if there is none):
    ./pretrain_gpt.sh
8 GPUs of one node, at the size of the report:
    SIZE=report ./pretrain_gpt.sh CHECKPOINTS TENSORBOARD DATA_PREFIX TOKENIZER
by hand:
    torchrun --nproc_per_node 4 pretrain_gpt.py --pipeline-model-parallel-size 4 ...

Every process runs this file. Process `rank` holds one stage of one copy of the model (see gpt/groups.py),
and each iteration all of them
1. take their samples of the global batch, cut into micro-batches,
2. send micro-batches through the stages, forward and back, which leaves gradients,
3. add the gradients up over the copies, and
4. agree on the gradient's norm and take the same optimizer step.
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch
import torch.distributed as dist
from gpt import checkpoint
from gpt.arguments import parse_args
from gpt.checkpoint import Progress
from gpt.data import Samples, Tokens, load_tokenizer, padded
from gpt.errors import InputError, agreed, describe, leave
from gpt.groups import Groups, choose_device, make_groups
from gpt.log import Log
from gpt.model import Stage, initialize
from gpt.optimizer import Gradients, LossScale, learning_rate, make_optimizer
from gpt.pipeline import Pipeline


def main() -> None:
    """Train as the command line says."""
    args = parse_args()
    device = choose_device(args)
    groups = make_groups(args, device)
    try:
        Trainer(args, groups, device).run()
    except InputError as error:
        leave(f"[rank {args.rank}] {describe(error)}")
    dist.destroy_process_group()


def resumed(folder: str, iteration: int, last: int) -> str:
    """A line that says from which checkpoint a run goes on, and how much is left."""
    from_where = f"  loaded checkpoint from {folder} at iteration {iteration:7d}"
    if iteration >= last:
        return f"{from_where}; nothing is left to train, since --train-iters is {last}"
    return f"{from_where}; {last - iteration} of {last} iterations are left"


class Trainer:
    """Everything one rank needs, and the loop."""

    def __init__(self, args: argparse.Namespace, groups: Groups, device: torch.device) -> None:
        self.args, self.groups = args, groups
        with agreed(groups.control):
            if args.save and args.rank == 0:
                checkpoint.try_writing(args.save)
            ids = load_tokenizer(args.tokenizer_model).vocab_size()
            args.vocab_size = padded(ids, args.make_vocab_size_divisible_by)
            tokens = Tokens(args.data_path)
            portions = tokens.portions(args.split)
            self.samples = Samples(tokens, portions[0], args.seq_length, ids, args.seed)
            if args.eval_iters:
                self.validation_samples = Samples(
                    tokens, portions[1], args.seq_length, ids, args.seed, "validation"
                )

        model = Stage(args, groups.stage, args.vocab_size).to(device)
        initialize(model, args)
        self.model = model
        self.pipeline = Pipeline(model, args, groups, device)
        self.gradients = Gradients(model, groups)
        self.optimizer = make_optimizer(model, args, groups)
        self.loss_scale = LossScale.from_args(args)
        self.progress = self.resume()
        self.saved = self.progress.iteration
        with agreed(groups.control):
            self.log = Log(args, self.progress.iteration)
        if self.progress.iteration:
            self.log.say(resumed(args.load, self.progress.iteration, args.train_iters))
        self.terminated = False
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def resume(self) -> Progress:
        """Load what `--load` names; begin at 0 if that is nothing."""
        if not self.args.load:
            return Progress()
        progress = checkpoint.load(self.args, self.groups, self.model, self.optimizer)
        if progress is None:
            if self.args.rank == 0:
                print(
                    f"pretrain_gpt.py: note: no checkpoint in {self.args.load}, starting from random",
                    file=sys.stderr,
                )
            return Progress()
        if self.args.fp16 and progress.loss_scale:
            self.loss_scale.load(progress.loss_scale)
        return progress

    def on_sigterm(self, *_: object) -> None:
        """Remember to stop; the loop saves first."""
        self.terminated = True

    def run(self) -> None:
        """Train to `--train-iters`, or until a rank is told to terminate."""
        args, progress, log = self.args, self.progress, self.log
        while progress.iteration < args.train_iters:
            if self.stopping():
                log.say(f" stopped by SIGTERM after iteration {progress.iteration:7d}")
                break
            loss, norm = self.iteration()
            log.iteration(progress, loss, norm is not None, norm, self.rate(), self.loss_scale.scale)
            if args.eval_iters and progress.iteration % args.eval_interval == 0:
                log.validation(progress.iteration, self.evaluate())
            if args.save_interval and progress.iteration % args.save_interval == 0:
                self.save()
        self.save()
        log.close()

    def iteration(self) -> tuple[float, float | None]:
        """Train on one global batch.

        Returns:
            its loss, and the gradient's norm, or None if it overflowed and the weights were left alone.
        """
        progress, scale = self.progress, self.loss_scale.scale
        self.gradients.clear()
        loss = self.pipeline.train(self.batch(self.samples, progress.consumed_samples), scale)
        self.gradients.reduce(scale)
        norm = self.gradients.norm()
        finite = norm < float("inf")
        if finite:
            self.gradients.clip(norm, self.args.clip_grad)
            for section in self.optimizer.param_groups:
                section["lr"] = self.rate()
            self.optimizer.step()
            progress.steps += 1
        if self.args.fp16:
            self.loss_scale.update(overflow=not finite)
        progress.iteration += 1
        progress.consumed_samples += self.args.global_batch_size
        return self.mean_over_replicas(loss), norm if finite else None

    def rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return learning_rate(self.args, self.progress.steps)

    def batch(self, samples: Samples, first: int) -> torch.Tensor | None:
        """This replica's samples of the global batch that begins with sample `first`.

        A middle stage, which needs neither tokens nor labels, gets None.
        """
        args, groups = self.args, self.groups
        if not (groups.first or groups.last):
            return None
        return samples.batch(
            first, args.num_microbatches, args.micro_batch_size, groups.replica, groups.replicas
        )

    def mean_over_replicas(self, loss: torch.Tensor) -> float:
        """The loss of the global batch, on the last stage."""
        dist.all_reduce(loss, group=self.groups.data_gloo)
        return loss.item() / self.groups.replicas

    def evaluate(self) -> float:
        """The mean loss of `--eval-iters` batches of validation data, the same ones each time."""
        firsts = range(0, self.args.eval_iters * self.args.global_batch_size, self.args.global_batch_size)
        losses = [self.pipeline.evaluate(self.batch(self.validation_samples, first)) for first in firsts]
        return self.mean_over_replicas(torch.stack(losses).mean())

    def stopping(self) -> bool:
        """Was any rank told to terminate? All ranks get the same answer."""
        told = torch.tensor(int(self.terminated))
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.groups.control)
        return bool(told)

    def save(self) -> None:
        """Save, unless that is not wanted or has just been done."""
        if self.args.save and self.saved != self.progress.iteration:
            self.progress.loss_scale = self.loss_scale.state() if self.args.fp16 else {}
            checkpoint.save(self.args, self.groups, self.model, self.optimizer, self.progress)
            self.saved = self.progress.iteration
            self.log.say(
                f"  successfully saved checkpoint from iteration {self.saved:7d} to {self.args.save}"
            )


if __name__ == "__main__":
    main()
