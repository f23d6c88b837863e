# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a batch through all stages, with torch.distributed.pipelining.

Training runs one forward, one backward (1F1B): once the pipeline is full, a stage alternates between the
forward of a new micro-batch and the backward of an old one, and so keeps the activations of at most
as many micro-batches as there are stages.
"""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

from gpt.groups import Groups
from gpt.model import Stage


class Pipeline:
    """This rank's part in moving micro-batches through the stages."""

    def __init__(self, model: Stage, args: argparse.Namespace, groups: Groups, device: torch.device) -> None:
        self.model, self.groups, self.device = model, groups, device
        self.count, self.size = args.num_microbatches, args.micro_batch_size
        self.loss_scale = 1.0
        shape = (self.size, args.seq_length, args.hidden_size)

        def stage(requires_grad: bool) -> PipelineStage:
            activation = torch.empty(shape, dtype=model.dtype, device=device, requires_grad=requires_grad)
            tokens = torch.empty(shape[:2], dtype=torch.long, device=device)
            return PipelineStage(
                model,
                groups.stage,
                groups.stages,
                device,
                input_args=(tokens if groups.first else activation,),
                output_args=(activation,),
                group=groups.pipeline,
            )

        wait_for_every_send()
        # From 2.7 on, gradients are divided by the number of micro-batches unless told not to; see _loss.
        known = inspect.signature(Schedule1F1B).parameters
        options = {"scale_grads": False} if "scale_grads" in known else {}
        self.training = Schedule1F1B(stage(True), self.count, loss_fn=self._loss, **options)
        self.evaluation = ScheduleGPipe(stage(False), self.count)
        # From 2.10 on, the last stage need not keep its outputs.
        known = inspect.signature(Schedule1F1B.step).parameters
        self.step_options = {"return_outputs": False} if "return_outputs" in known else {}

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the batch's mean loss, times the loss scale."""
        return self.model.loss(hidden, labels) * (self.loss_scale / self.count)

    def _inputs(self, batch: torch.Tensor | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """What this stage needs of a batch: inputs on the first, the ids that follow them on the last."""
        tokens = (batch[:, :-1].contiguous().to(self.device),) if self.groups.first else ()
        labels = batch[:, 1:].contiguous().to(self.device) if self.groups.last else None
        return tokens, labels

    def train(self, batch: torch.Tensor | None, loss_scale: float) -> torch.Tensor:
        """Add the gradients of the batch's mean loss, times `loss_scale`, to the parameters' `.grad`.

        Args:
            batch: ids of shape (micro-batches * micro-batch size, length + 1); None on a middle stage.
            loss_scale: a power of two.

        Returns:
            the mean loss on the last stage, 0 on the others; on the host.
        """
        self.loss_scale = loss_scale
        tokens, labels = self._inputs(batch)
        losses: list[torch.Tensor] = []
        self.training.step(*tokens, target=labels, losses=losses, **self.step_options)
        return torch.stack(losses).sum().cpu() / loss_scale if losses else torch.zeros(())

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor | None) -> torch.Tensor:
        """The mean loss of a batch, as `train` returns it, without gradients."""
        tokens, labels = self._inputs(batch)
        hidden = self.evaluation.step(*tokens)
        if labels is None:
            return torch.zeros(())
        pairs = zip(hidden.split(self.size), labels.split(self.size))
        return torch.stack([self.model.loss(*pair) for pair in pairs]).mean().cpu()


class Works(list):
    """Several pending sends and receives, to be waited for as if they were one."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def wait_for_every_send() -> None:
    """Mend the schedules of torch 2.4 to 2.7 for gloo.

    They keep the last of a batch's works and drop the others. That is right for NCCL, which returns one
    for the batch; a gloo send that nobody holds is never sent. Mended in 2.8 (pytorch#132644).
    """
    if not hasattr(schedules, "_wait_batch_p2p"):
        schedules._batch_p2p = lambda ops, desc=None: Works(dist.batch_isend_irecv(ops)) if ops else None
