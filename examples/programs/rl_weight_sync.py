# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning: the trainer's first rank sends weights to a server that is no rank of its world.

torchrun --nproc_per_node 4 rl_weight_sync.py: ranks 0 to 2 train, the last process serves.

torch 2.3 to 2.15: the trainer's rank splits its world for the group of two; its other ranks never hear of it.
https://github.com/NVIDIA-NeMo/RL/pull/3189
"""

import inspect
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
STEPS = 3


def store(port: int, ranks: int, serve: bool) -> dist.Store:
    """A store beside torchrun's own, which the trainer and the server share."""
    return dist.TCPStore(HOST, port, ranks, serve, timedelta(minutes=2))


def weight_group(rank: int) -> dist.ProcessGroup:
    """A group of the trainer's rank 0 and the server, beside the world that each of them has."""
    parameters = inspect.signature(c10d._new_process_group_helper).parameters
    options = "backend_options" if "backend_options" in parameters else "pg_options"  # renamed in torch 2.6
    group, _ = c10d._new_process_group_helper(
        2,
        rank,
        [],
        c10d.Backend("nccl"),
        dist.PrefixStore("weight_sync", store(PORT + 1, 2, rank == 0)),
        group_name="weight_sync",
        timeout=timedelta(minutes=2),
        **{options: None},
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
if DEVICE == "cuda":
    torch.cuda.set_device(gpu)
if rank == trainers:
    dist.init_process_group("nccl", store=store(PORT + 2, 1, serve=True), world_size=1, rank=0)
    weights = torch.zeros(8, device=DEVICE)
    group = weight_group(1)
    for step in range(STEPS):
        dist.broadcast(weights, 0, group)
        expected = sum(range(1, trainers + 1)) * (step + 1)
        assert weights.tolist() == [expected] * 8, (weights, expected)
    print("the server has the weights of", STEPS, "steps", flush=True)
else:
    trainer = store(PORT + 3, trainers, serve=rank == 0)
    dist.init_process_group("nccl", store=trainer, world_size=trainers, rank=rank, device_id=gpu)
    weights = torch.zeros(8, device=DEVICE)
    group = weight_group(0) if rank == 0 else None
    for _ in range(STEPS):
        gradient = torch.full((8,), rank + 1.0, device=DEVICE)
        dist.all_reduce(gradient)
        weights += gradient
        if group is not None:
            dist.broadcast(weights, 0, group)
        dist.barrier()
if DEVICE == "cuda":
    torch.cuda.synchronize()
sys.exit(0)
