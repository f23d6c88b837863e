# SPDX-License-Identifier: Apache-2.0
"""Which ranks talk to each other: a subset of Megatron-LM's process groups, made in its order.

Example: 8 processes, 4 stages, so 2 copies of the pipeline ("data-parallel replicas"):

    stage             0     1     2     3
    replica 0  rank   0     2     4     6     pipeline (0,2,4,6)   embedding (0,6)
    replica 1  rank   1     3     5     7     pipeline (1,3,5,7)   embedding (1,7)
                     data-parallel (0,1) (2,3) (4,5) (6,7)

`new_group` is a call of the whole world: every rank makes every group, also those it is no member of.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Groups:
    """The groups of this rank, and its place in them.

    Attributes:
        stage: this rank's pipeline stage, of `stages`.
        replica: this rank's copy of the pipeline, of `replicas`.
        data: ranks with the same stage; gradients are averaged here.
        data_gloo: the same ranks, for numbers that are on the host.
        model: ranks that hold one model together; the gradient's norm is taken here.
        pipeline: the stages of one replica, in order; activations pass here.
        embedding: first and last stage, which share the word embedding (None on other ranks).
        position_embedding: the first stage, which alone holds the position embedding.
        control: all ranks, on the host: agreement on errors, signals and checkpoints.
    """

    stage: int
    stages: int
    replica: int
    replicas: int
    data: dist.ProcessGroup
    data_gloo: dist.ProcessGroup
    model: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    embedding: dist.ProcessGroup | None
    position_embedding: dist.ProcessGroup | None
    control: dist.ProcessGroup

    @property
    def first(self) -> bool:
        """Is this the stage that reads tokens?"""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Is this the stage that computes the loss?"""
        return self.stage == self.stages - 1


def choose_device(args: argparse.Namespace) -> torch.device:
    """The GPU that the launcher gave this process, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", args.local_rank)
    torch.cuda.set_device(device)
    return device


def make_groups(args: argparse.Namespace, device: torch.device) -> Groups:
    """Connect all ranks and make every group."""
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        world_size=args.world_size,
        rank=args.rank,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    mine = {}

    def make(name: str, ranks: list[int], backend: str | None = None) -> None:
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        if args.rank in ranks:
            mine[name] = group

    stages = args.pipeline_model_parallel_size
    replicas = args.data_parallel_size
    for stage in range(stages):
        ranks = list(range(stage * replicas, (stage + 1) * replicas))
        make("data", ranks)
        make("data_gloo", ranks, "gloo")
    pipelines = [list(range(replica, args.world_size, replicas)) for replica in range(replicas)]
    for ranks in pipelines:
        make("model", ranks)
    for ranks in pipelines:
        make("pipeline", ranks)
        make("embedding", sorted({ranks[0], ranks[-1]}))
        make("position_embedding", ranks[:1])
    make("control", list(range(args.world_size)), "gloo")

    return Groups(
        stage=args.rank // replicas,
        stages=stages,
        replica=args.rank % replicas,
        replicas=replicas,
        data=mine["data"],
        data_gloo=mine["data_gloo"],
        model=mine["model"],
        pipeline=mine["pipeline"],
        embedding=mine.get("embedding"),
        position_embedding=mine.get("position_embedding"),
        control=mine["control"],
    )
