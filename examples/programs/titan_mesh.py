# SPDX-License-Identifier: Apache-2.0
"""TorchTitan's mesh (pipeline x replicate x shard x tensor), flattened as it does, after tied groups.

torchrun --nproc_per_node 8 titan_mesh.py    # or 4

torch 2.10 to 2.13: the tied embedding's groups leave ranks out, so ranks name the mesh's groups differently,
close them in different orders, and may wait in destroy_process_group.
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
wrong = 0


def check(group: dist.ProcessGroup) -> None:
    """Sum the ranks of a group, and compare with what the sum of its members is."""
    global wrong
    total = torch.tensor([float(rank)], device=DEVICE)
    dist.all_reduce(total, group=group)
    wrong += total.item() != sum(dist.get_process_group_ranks(group))


stages, tensor = 2, 2 if size % 8 == 0 else 1
shape = (stages, 1, size // stages // tensor, tensor)
for column in range(size // stages):  # the first and the last stage share the embedding
    members = [column, column + size // stages]
    tied = dist.new_group(members)
    if rank in members:
        check(tied)
    if column == 0:  # one of them writes the log of the losses
        dist.new_group([members[-1]])

mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
flat = [
    mesh["dp_replicate", "dp_shard"]._flatten("dp"),  # the data loader, and the sum of losses
    mesh["dp_shard", "tp"]._flatten("dp_shard_tp"),  # experts
    mesh["pp", "dp_replicate", "dp_shard", "tp"]._flatten("loss"),
]
for group in [mesh.get_group(name) for name in mesh.mesh_dim_names] + [each.get_group() for each in flat]:
    check(group)
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank}: {wrong} wrong sums", flush=True)
sys.exit(wrong > 0)
