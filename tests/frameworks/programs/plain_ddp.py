# SPDX-License-Identifier: Apache-2.0
"""DDP alone, with a group by local synchronization: what instrumenting launchers are tried with."""

from __future__ import annotations

import said
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
own = dist.new_group([rank], use_local_synchronization=True)
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Linear(8, 1), process_group=pair)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(6):
    x = torch.randn(4, 8)
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    said.loss(rank, loss.item())
total = torch.ones(1)
dist.all_reduce(total, group=own)
said.loss(rank, total.item())
dist.barrier()
said.done(rank)
dist.destroy_process_group()
