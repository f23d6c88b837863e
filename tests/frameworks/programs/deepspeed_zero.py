# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: an engine with ZeRO stage 2 on two ranks, and groups made through deepspeed.comm."""

from __future__ import annotations

import deepspeed
import said
import torch
import torch.distributed as dist

deepspeed.init_distributed(dist_backend="gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
torch.manual_seed(rank)
for _ in range(6):
    x = torch.randn(4, 8)
    loss = torch.nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    said.loss(rank, loss.item())
for ranks in (range(2), [1]):
    group = deepspeed.comm.new_group(ranks)
    if rank in ranks:
        total = torch.tensor([10.0**rank])
        deepspeed.comm.all_reduce(total, group=group)
        said.loss(rank, total.item())
dist.barrier()
said.done(rank)
dist.destroy_process_group()
