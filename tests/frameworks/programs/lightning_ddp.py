# SPDX-License-Identifier: Apache-2.0
"""Lightning: a Trainer with DDP that starts its own second rank, and groups made by its TorchCollective."""

from __future__ import annotations

import warnings

import lightning
import said
import torch
from lightning.fabric.plugins.collectives import TorchCollective
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", module="lightning")


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        said.loss(self.global_rank, self.all_gather(loss.detach()).mean().item())
        return loss

    def on_train_end(self):
        collective = TorchCollective()
        for ranks in ([0], [1], [0, 1]):
            group = collective.new_group(ranks=ranks)
            if self.global_rank in ranks:
                total = torch.ones(1)
                torch.distributed.all_reduce(total, group=group)
                said.loss(self.global_rank, total.item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(7, verbose=False)
inputs = torch.randn(64, 8)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), data)
said.done(trainer.global_rank)
