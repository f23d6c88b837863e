# SPDX-License-Identifier: Apache-2.0
"""megatron-core's groups (two stages, tied embeddings, gloo for its optimizer), then meshes beside them.

torchrun --nproc_per_node 4 megatron_beside_mesh.py

torch 2.10 to 2.13: embedding groups leave ranks out, so ranks name the meshes' groups differently, close
them in different orders, and may wait in destroy_process_group.
https://github.com/pytorch/pytorch/issues/190396
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
if DEVICE == "cuda":
    torch.cuda.set_device(gpu)
dist.init_process_group("nccl", device_id=gpu)
rank, size = dist.get_rank(), dist.get_world_size()
half = size // 2
wrong = 0


def check(group: dist.ProcessGroup, device: str) -> None:
    """Sum the ranks of a group, and compare with what the sum of its members is."""
    global wrong
    total = torch.tensor([float(rank)], device=device)
    dist.all_reduce(total, group=group)
    wrong += total.item() != sum(dist.get_process_group_ranks(group))


mine = []
for stage in (range(half), range(half, size)):  # data parallel
    for backend in ("nccl", "gloo"):
        group = dist.new_group(list(stage), backend=backend)
        if rank in stage:
            mine.append((group, "cpu" if backend == "gloo" else DEVICE))
for first in range(half):  # pipelines; the first stage's rank alone has the position embedding
    for ranks in ([first, first + half], [first, first + half], [first]):
        group = dist.new_group(ranks)
        if rank in ranks:
            mine.append((group, DEVICE))
for names in (("dp_outer", "dp_shard"), ("ep_outer", "ep_shard")):  # Megatron-FSDP's, dense and of experts
    mesh = init_device_mesh(DEVICE, (2, half), mesh_dim_names=names)
    mine += [(mesh.get_group(name), DEVICE) for name in names]
for group, device in mine:
    check(group, device)
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank}: {wrong} wrong sums", flush=True)
sys.exit(wrong > 0)
