# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's way to make an NCCL world: bound to a device, since init_process_group has the parameter.

Its accelerator is the one for CUDA, so init_distributed passes `device_id`; groups and collectives are made
through deepspeed.comm.
"""

from __future__ import annotations

import os

if "FRAMEWORKS_SWITCHBOARD" in os.environ:
    os.environ["DS_ACCELERATOR"] = "cuda"

import deepspeed
import said
import torch
import torch.distributed as dist

backend, bound = said.world()
deepspeed.init_distributed(dist_backend=backend)
rank, size = dist.get_rank(), dist.get_world_size()
was_bound = dist.group.WORLD.bound_device_id is not None
if os.environ["TORCHCOMMSHIM"] != "strip":
    assert was_bound == bool(bound), "DeepSpeed has not passed device_id"

torch.manual_seed(7)
weight = torch.randn(8)
groups = [(ranks, deepspeed.comm.new_group(ranks)) for ranks in (range(size), [0, 1], [2, 3], [0, 2])]
gloo = dist.new_group([0, 1, 2], backend="gloo")  # as checkpoint engines make one
for _ in range(4):
    for ranks, group in groups:
        if rank in ranks:
            gradient = weight * (rank + 1)
            deepspeed.comm.all_reduce(gradient, group=group)
            weight -= 0.01 * gradient
            said.loss(rank, weight.sum().item())
if rank < 3:
    dist.all_reduce(weight, group=gloo)
    said.loss(rank, weight.sum().item())
dist.barrier()
said.done(rank)
dist.destroy_process_group()
