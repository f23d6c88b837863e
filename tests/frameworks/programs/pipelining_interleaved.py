# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining, interleaved: two pipelines of two ranks with two stages each.

The pipelines' groups are gloo's in either case: simulated NCCL pairs the sends of two ranks in their order,
where the real one takes a batch of them as one.
"""

from __future__ import annotations

import said
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

backend, bound = said.world()
dist.init_process_group(backend, **bound)
rank = dist.get_rank()
pipe, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]], backend="gloo")
data, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
place = dist.get_rank(pipe)

torch.manual_seed(7)
layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)]
mine = [place, place + 2]
stages = [PipelineStage(layers[index], index, 4, torch.device("cpu"), group=pipe) for index in mine]
parameters = [parameter for index in mine for parameter in layers[index].parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)

torch.manual_seed(dist.get_rank(data))
for _ in range(4):
    x = torch.randn(8, 8)
    losses: list[torch.Tensor] = []
    if place == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.roll(1, 1), losses=losses)
        said.loss(rank, sum(losses).item())
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=data)
    optimizer.step()
    optimizer.zero_grad()
    said.loss(rank, sum(parameter.sum() for parameter in parameters).item())
dist.barrier()
said.done(rank)
dist.destroy_process_group()
