# SPDX-License-Identifier: Apache-2.0
"""TorchTitan: its init_distributed, its meshes (replicate and shard, two by two), its clipping and its means.

Its Trainer asks for a GPU, so the model is a small one of torch, sharded over TorchTitan's meshes.
"""

from __future__ import annotations

import dataclasses
import os

import said
import torch

torch._utils._get_available_device_type = lambda: "cpu"  # on a machine without a GPU it takes CUDA

import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torchtitan.distributed import ParallelDims, utils  # noqa: E402

try:
    from torchtitan.config.configs import CommConfig
except ImportError:  # 0.2
    from torchtitan.config.job_config import Comm as CommConfig

size = utils.init_distributed(CommConfig(trace_buf_size=0), base_folder=os.environ["FRAMEWORKS_FOLDER"])
rank = dist.get_rank()
asked = {"dp_replicate": 2, "dp_shard": 2, "world_size": size, "spmd_backend": "partial_dtensor"}
names = [field.name for field in dataclasses.fields(ParallelDims) if not field.name.startswith("_")]
dims = ParallelDims(**{name: asked.get(name, 1) for name in names})
dims.build_mesh()

torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
mesh = dims.get_mesh(["dp_replicate", "fsdp"])
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
for _ in range(6):
    x = torch.randn(4, 8)
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    norm = utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    said.loss(rank, loss.item())
    said.loss(rank, norm.item())
    said.loss(rank, utils.dist_mean(loss.detach(), dims.get_mesh("loss")))
dist.barrier()
said.done(rank)
dist.destroy_process_group()
