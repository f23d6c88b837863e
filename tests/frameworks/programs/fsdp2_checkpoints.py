# SPDX-License-Identifier: Apache-2.0
"""FSDP2 over a DeviceMesh of two by two ranks; a thread and then a process write checkpoints."""

from __future__ import annotations

import os

import said
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if __name__ == "__main__":  # the process that writes checkpoints imports this file
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())

    saved = []
    for step in range(8):
        x = torch.randn(4, 8)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.loss(dist.get_rank(), loss.item())
        if step in (2, 5):
            kind = AsyncCheckpointerType.THREAD if step == 2 else AsyncCheckpointerType.PROCESS
            place = f"{os.environ['FRAMEWORKS_FOLDER']}/checkpoint-{step}"
            state = {"model": get_model_state_dict(model)}
            saving = dcp.async_save(state, checkpoint_id=place, async_checkpointer_type=kind)
            saving.result()
            saved.append(place)

    for place in saved:  # what was written is what the weights were
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=place)
        for value in state["model"].values():
            said.loss(dist.get_rank(), value.to_local().sum().item())
    dist.barrier()
    said.done(dist.get_rank())
    dist.destroy_process_group()
