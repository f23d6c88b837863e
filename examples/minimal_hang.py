# SPDX-License-Identifier: Apache-2.0
"""The smallest program that hangs, with torch 2.3 or 2.4: torchrun --nproc_per_node 2 minimal_hang.py."""

import os

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
dist.new_group([0])  # rank 1 waits in ncclCommSplit for rank 0, which would split on first use
dist.barrier()  # and rank 0 waits here for rank 1
print(f"rank {dist.get_rank()}: done")
