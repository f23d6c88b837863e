# SPDX-License-Identifier: Apache-2.0
"""megatron-core: its groups for two tensor-parallel times two pipeline ranks, and its parallel layers.

Its schedules want a GPU, so activations go from stage to stage by plain sends.
"""

from __future__ import annotations

import said
import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

TENSOR, STAGES = 2, 2

backend, bound = said.world()
dist.init_process_group(backend, **bound)
parallel_state.initialize_model_parallel(TENSOR, STAGES, create_gloo_process_groups=True)
rank = dist.get_rank()
pipe = parallel_state.get_pipeline_model_parallel_group()
first = parallel_state.is_pipeline_first_stage()
other = parallel_state.get_pipeline_model_parallel_next_rank()  # of two stages

GROUPS = (
    parallel_state.get_model_parallel_group(),
    parallel_state.get_tensor_model_parallel_group(),
    pipe,
    parallel_state.get_embedding_group(),
    parallel_state.get_data_parallel_group(with_context_parallel=True),
    parallel_state.get_data_parallel_group_gloo(with_context_parallel=True),
    parallel_state.get_expert_data_parallel_group(),
)
for group in GROUPS:  # who is in it
    total = torch.tensor([10.0**rank])
    dist.all_reduce(total, group=group)
    said.loss(rank, total.item())

config = ModelParallelConfig(
    tensor_model_parallel_size=TENSOR,
    pipeline_model_parallel_size=STAGES,
    pipeline_dtype=torch.float32,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
)
torch.manual_seed(7 + (not first))
initial = torch.nn.init.xavier_uniform_
up = ColumnParallelLinear(8, 32, config=config, init_method=initial, gather_output=False)
down = RowParallelLinear(
    32, 8, config=config, init_method=initial, input_is_parallel=True, bias=True, skip_bias_add=False
)
parameters = [*up.parameters(), *down.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.05)

torch.manual_seed(3)
for _ in range(4):
    x = torch.randn(4, 1, 8)
    target = x.roll(1, 2)
    if not first:
        x = torch.zeros(4, 1, 8)
        dist.recv(x, other, group=pipe)
        x.requires_grad_()
    out = down(torch.tanh(up(x)[0]))[0]
    if first:
        dist.send(out.detach(), other, group=pipe)
        gradient = torch.zeros_like(out)
        dist.recv(gradient, other, group=pipe)
        out.backward(gradient)
    else:
        loss = torch.nn.functional.mse_loss(out, target)
        loss.backward()
        dist.send(x.grad, other, group=pipe)
        said.loss(rank, loss.item())
    optimizer.step()
    optimizer.zero_grad()
    said.loss(rank, sum(parameter.sum() for parameter in parameters).item())
dist.barrier()
said.done(rank)
dist.destroy_process_group()
