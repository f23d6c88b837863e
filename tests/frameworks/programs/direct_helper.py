# SPDX-License-Identifier: Apache-2.0
"""The helper called directly, as RL stacks do to send weights to processes outside the trainer's world.

Ranks 0 and 1 train in a world of their own.  Rank 0 and the process beside them, which is in no world, make a
group with the function that sglang, slime, NeMo-RL and older OpenRLHF copy, and broadcast the weights in it.
"""

from __future__ import annotations

import os
from datetime import timedelta

import said
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def init_custom_process_group(backend, store, rank, world_size, group_name):
    """As in the projects above: torch's init_process_group without the parts that make a world."""
    store = c10d.PrefixStore(group_name, store)
    limit = timedelta(minutes=5)
    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], dist.Backend(backend), store, group_name=group_name, timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


number = int(os.environ["RANK"])
address = os.environ["MASTER_ADDR"]
ports = int(os.environ["MASTER_PORT"]), int(os.environ["FRAMEWORKS_SECOND_PORT"])
backend, bound = said.world(2)
trains = number < 2
if trains:
    store = dist.TCPStore(address, ports[0], 2, is_master=number == 0)
    dist.init_process_group(backend, store=store, rank=number, world_size=2, **bound)

torch.manual_seed(7)
model = torch.nn.Linear(8, 1)
updates = None
if number != 1:
    store = dist.TCPStore(address, ports[1], 2, is_master=number == 0)
    updates = init_custom_process_group(backend, store, 0 if number == 0 else 1, 2, "weights")

for step in range(4):
    torch.manual_seed(step * 2 + number)
    if trains:
        x = torch.randn(4, 8)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        said.loss(number, loss.item())
    if updates is not None:
        for parameter in model.parameters():
            options = dist.BroadcastOptions()
            options.rootRank = 0
            work = updates.broadcast([parameter.data], options)
            work.wait()
        said.loss(number, sum(parameter.sum() for parameter in model.parameters()).item())
if updates is not None:
    updates.barrier().wait()
if trains:
    dist.barrier()
said.done(number)
if trains:
    dist.destroy_process_group()
