# SPDX-License-Identifier: Apache-2.0
"""What a run tells: Megatron-LM's log line, a progress bar on a terminal, TensorBoard."""

from __future__ import annotations

import argparse
import math
import sys
import time
from datetime import datetime
from typing import Optional

from gpt.checkpoint import Progress
from gpt.errors import InputError


class Log:
    """The report of the last rank, which knows the loss; the other ranks say nothing.

    On a terminal a progress bar shows the newest numbers; into a file goes one line for each
    `--log-interval` iterations.
    """

    def __init__(self, args: argparse.Namespace, done: int) -> None:
        """Begin to report, `done` iterations into the run.

        Raises:
            InputError: nothing can be written to `--tensorboard-dir`.
        """
        self.args = args
        self.speaks = args.rank == args.world_size - 1
        self.bar, self.writer = None, None
        if self.speaks and sys.stdout.isatty():
            self.bar = progress_bar(args.train_iters, done)
        if self.speaks and args.tensorboard_dir:
            self.writer = tensorboard_writer(args.tensorboard_dir)
        self._begin()

    def _begin(self) -> None:
        self.started, self.iterations, self.losses, self.skipped, self.nan = time.perf_counter(), 0, [], 0, 0

    def iteration(
        self,
        progress: Progress,
        loss: float,
        updated: bool,
        norm: Optional[float],
        lr: float,
        loss_scale: float,
    ) -> None:
        """Report an iteration.

        Args:
            progress: with this iteration counted in.
            loss: mean over the global batch.
            updated: whether the weights changed; if not, the iteration was skipped.
            norm: of the gradient before clipping, None if it overflowed.
            lr: the learning rate of the next iteration, as Megatron-LM reports it.
            loss_scale: of the next iteration.
        """
        self.iterations += 1
        self.skipped += not updated
        self.nan += not math.isfinite(loss)
        if updated:
            self.losses.append(loss)
        if not self.speaks:
            return
        if self.writer:
            self._draw(progress.iteration, loss, updated, norm, lr, loss_scale)
        if self.bar:
            self.bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.2e}", refresh=False)
            self.bar.update()
        if progress.iteration % self.args.log_interval == 0:
            if not self.bar:
                print(self.line(progress, norm, lr, loss_scale), flush=True)
            self._begin()

    def line(self, progress: Progress, norm: Optional[float], lr: float, loss_scale: float) -> str:
        """The log line of the iterations since the last one."""
        args, seconds = self.args, (time.perf_counter() - self.started) / self.iterations
        fields = [
            f"iteration {progress.iteration:8d}/{args.train_iters:8d}",
            f"consumed samples: {progress.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
        ]
        if args.log_throughput:
            teraflops = floating_point_operations(args) / (seconds * 1e12 * args.world_size)
            fields.append(f"throughput per GPU (TFLOP/s/GPU): {teraflops:.1f}")
        fields += [f"learning rate: {lr:.6E}", f"global batch size: {args.global_batch_size:5d}"]
        if self.losses:
            fields.append(f"lm loss: {sum(self.losses) / len(self.losses):.6E}")
        fields.append(f"loss scale: {loss_scale:.1f}")
        if norm is not None:
            fields.append(f"grad norm: {norm:.3f}")
        fields.append(f"number of skipped iterations: {self.skipped:3d}")
        fields.append(f"number of nan iterations: {self.nan:3d}")
        return f" [{datetime.now():%Y-%m-%d %H:%M:%S}] " + " | ".join(fields) + " |"

    def _draw(
        self, iteration: int, loss: float, updated: bool, norm: Optional[float], lr: float, loss_scale: float
    ) -> None:
        self.writer.add_scalar("learning-rate", lr, iteration)
        self.writer.add_scalar("loss-scale", loss_scale, iteration)
        if updated:
            self.writer.add_scalar("lm loss", loss, iteration)
        if norm is not None:
            self.writer.add_scalar("grad-norm", norm, iteration)

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.bar:
            self.bar.write(line)
        elif self.speaks:
            print(line, flush=True)

    def validation(self, iteration: int, loss: float) -> None:
        """Report the loss on validation data."""
        self.say(f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} |")
        if self.writer:
            self.writer.add_scalar("lm loss validation", loss, iteration)

    def close(self) -> None:
        """Finish the bar and the TensorBoard file."""
        for output in (self.bar, self.writer):
            if output is not None:
                output.close()


def progress_bar(total: int, done: int):
    """A tqdm bar, or None where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, initial=done, unit="it", dynamic_ncols=True)


def tensorboard_writer(folder: str):
    """A TensorBoard writer, or None and a note where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(
            "pretrain_gpt.py: note: --tensorboard-dir has no effect: tensorboard is not installed",
            file=sys.stderr,
        )
        return None
    try:
        return SummaryWriter(folder)
    except OSError as error:
        raise InputError(f"--tensorboard-dir {folder}: {error.strerror}") from error


def floating_point_operations(args: argparse.Namespace) -> float:
    """Of one iteration, forward and backward, counted as Megatron-LM counts them."""
    layers, hidden, length = args.num_layers, args.hidden_size, args.seq_length
    attention = 2 + length / hidden
    mlp = args.ffn_hidden_size / hidden
    output = args.vocab_size / (2 * layers * hidden)
    return 12 * args.global_batch_size * length * layers * hidden**2 * (attention + mlp + output)
