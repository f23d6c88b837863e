# SPDX-License-Identifier: Apache-2.0
"""Hybrid-sharded FSDP2, whose first replica writes checkpoints in the background, over a gloo group.

torchrun --nproc_per_node 4 fsdp2_async_checkpoint.py

torch 2.6 to 2.14: the ranks outside the gloo group split the world for it, its members do not.
https://github.com/pytorch/pytorch/issues/145376
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
if DEVICE == "cuda":
    torch.cuda.set_device(gpu)
dist.init_process_group("nccl", device_id=gpu)
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("replicate", "shard"))
writers = list(range(size // 2))
checkpointing = dist.new_group(writers, backend="gloo")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(DEVICE)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)
losses = []
for _ in range(5):
    loss = (model(torch.randn(32, 64, device=DEVICE)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder, src=0, device=torch.device(DEVICE))
weights = get_model_state_dict(model)
if rank in writers:
    dcp.async_save(weights, checkpoint_id=folder[0], process_group=checkpointing).result()
dist.barrier()
if rank == 0:
    print("losses", *(f"{loss:.6f}" for loss in losses), flush=True)
    print("files", len(os.listdir(folder[0])), flush=True)
saved = bool(os.listdir(folder[0]))
dist.barrier()
dist.destroy_process_group()
sys.exit(not saved)
