# SPDX-License-Identifier: Apache-2.0
"""accelerate: a model, its data and its optimizer prepared, gradients accumulated, a gathered loss."""

from __future__ import annotations

import said
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(64, 8)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)

for x, y in data:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    said.loss(accelerator.process_index, accelerator.gather_for_metrics(loss.detach()).mean().item())
accelerator.wait_for_everyone()
said.done(accelerator.process_index)
accelerator.end_training()
