# SPDX-License-Identifier: Apache-2.0
"""Gradients, loss scale, learning rate, and AdamW."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from gpt.groups import Groups
from gpt.model import Stage


class Gradients:
    """All gradients of a stage, in one buffer, so that one call reduces, scales or clears them all.

    The word embedding comes first: its gradient is summed over the embedding group before all else,
    and left out of the norm on the last stage, where it is a copy.
    """

    def __init__(self, model: Stage, groups: Groups) -> None:
        parameters = list(model.parameters())  # in the order of registration: see `Stage.word`
        self.groups = groups
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        shared = parameters[0].numel() if groups.embedding is not None else 0
        self.shared = self.buffer[:shared]
        self.counted = self.buffer[0 if groups.first else shared :]
        offset = 0
        for parameter in parameters:
            # Autograd adds to a gradient that is there, in place.
            parameter.grad = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def clear(self) -> None:
        """Forget the last iteration's gradients."""
        self.buffer.zero_()

    def reduce(self, loss_scale: float) -> None:
        """Make them the gradients of the global batch's mean loss."""
        if self.groups.embedding is not None:
            dist.all_reduce(self.shared, group=self.groups.embedding)
        dist.all_reduce(self.buffer, group=self.groups.data)
        self.buffer.mul_(1 / (loss_scale * self.groups.replicas))

    def norm(self) -> float:
        """The norm of the whole model's gradient; the same on all stages.

        It is infinite or NaN if any element is, on any stage: so all stages agree on an overflow.
        """
        squares = torch.linalg.vector_norm(self.counted).square()
        dist.all_reduce(squares, group=self.groups.model)
        return math.sqrt(squares.item()) if squares.isfinite() else math.inf

    def clip(self, norm: float, largest: float) -> None:
        """Shorten the gradient to the norm `largest`, if it is longer."""
        if norm > largest > 0:
            self.buffer.mul_(largest / (norm + 1e-6))


@dataclass
class LossScale:
    """The factor that keeps small float16 gradients from vanishing, found by trial.

    Halved when an overflow is met after `hysteresis` chances are used up; doubled after `window`
    iterations without one.
    """

    scale: float
    smallest: float
    window: int
    hysteresis: int
    chances: int
    good: int = 0

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> LossScale:
        """As the flags say for float16; constant 1 else."""
        initial = args.initial_loss_scale if args.fp16 else 1.0
        return cls(initial, args.min_loss_scale, args.loss_scale_window, args.hysteresis, args.hysteresis)

    def update(self, overflow: bool) -> None:
        """Take note of an iteration's outcome."""
        if overflow:
            self.good = 0
            self.chances -= 1
            if self.chances <= 0:
                self.scale = max(self.scale / 2, self.smallest)
        else:
            self.good += 1
            if self.good == self.window:
                self.good = 0
                self.chances = self.hysteresis
                self.scale *= 2

    def state(self) -> dict:
        """What a checkpoint keeps of it."""
        return {key: value for key, value in asdict(self).items() if key in ("scale", "chances", "good")}

    def load(self, state: dict) -> None:
        """Go on from a checkpoint's `state`."""
        self.scale, self.chances, self.good = state["scale"], state["chances"], state["good"]


def learning_rate(args: argparse.Namespace, step: float) -> float:
    """The rate after `step` iterations: a linear warm-up, then a decay from `--lr` to `--min-lr`."""
    warmup = args.lr_warmup_fraction * args.lr_decay_iters
    if warmup > 0 and step <= warmup:
        return args.lr * step / warmup
    if args.lr_decay_style == "constant":
        return args.lr
    if step > args.lr_decay_iters:
        return args.min_lr
    progress = (step - warmup) / (args.lr_decay_iters - warmup)
    weight = (1 + math.cos(math.pi * progress)) / 2 if args.lr_decay_style == "cosine" else 1 - progress
    return args.min_lr + weight * (args.lr - args.min_lr)


def make_optimizer(model: Stage, args: argparse.Namespace, groups: Groups) -> torch.optim.Optimizer:
    """AdamW; with `--use-distributed-optimizer` each replica keeps the state of a part of the parameters."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]  # biases and norms do not decay
    sections = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    options = {
        "lr": args.lr,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_eps,
        "weight_decay": args.weight_decay,
    }
    if args.use_distributed_optimizer:
        optimizer = ZeroRedundancyOptimizer(sections, torch.optim.AdamW, process_group=groups.data, **options)
    else:
        optimizer = torch.optim.AdamW(sections, **options)
    # As AdamW would at its first step; a checkpoint is loaded into these tensors.
    own = own_part(optimizer)
    for parameter in (p for section in own.param_groups for p in section["params"]):
        averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        own.state[parameter] = {"step": torch.zeros(()), **averages}
    return optimizer


def own_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds this rank's share of the state."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
