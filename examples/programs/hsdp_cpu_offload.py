# SPDX-License-Identifier: Apache-2.0
"""Hybrid-sharded FSDP2 offloaded to the CPU, in a world of gloo and NCCL, with checkpoints in the background.

torchrun --nproc_per_node 4 hsdp_cpu_offload.py

torch 2.9 to 2.13: rank 0 has a group of its own before the mesh, so ranks name the mesh's groups differently;
gloo's keys in the store have the name in them, and all wait in split_group.
https://github.com/pytorch/pytorch/issues/189073
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
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
if DEVICE == "cuda":
    torch.cuda.set_device(gpu)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=gpu)
rank, size = dist.get_rank(), dist.get_world_size()
dist.new_group([0])  # whoever logs
mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
checkpointing = dist.new_group(backend="gloo")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy() if DEVICE == "cuda" else OffloadPolicy())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + rank)
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder, src=0, group=checkpointing)
losses, saving = [], None
for step in range(6):
    loss = (model(torch.randn(32, 64, device=DEVICE)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 3 == 2:
        if saving:
            saving.result()
        place = os.path.join(folder[0], str(step))
        saving = dcp.async_save(get_model_state_dict(model), checkpoint_id=place, process_group=checkpointing)
saving.result()
dist.barrier()
if rank == 0:
    print("losses", *(f"{loss:.6f}" for loss in losses), flush=True)
good = losses[-1] < losses[0] and sorted(os.listdir(folder[0])) == ["2", "5"]
dist.barrier()
dist.destroy_process_group()
sys.exit(not good)
