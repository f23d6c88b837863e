# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's pipeline engine, with an embedding that the first and the last stage share.

torchrun --nproc_per_node 4 deepspeed_tied_pipeline.py

DeepSpeed gives init_process_group a device_id where its signature has one. torch 2.3 and 2.4: the group of
the tied embedding leaves the middle stages out. They split the world for it at once; its members split later.
https://github.com/pytorch/pytorch/issues/134314
"""

import os

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

VOCABULARY, WIDTH = 128, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.mix(self.norm(hidden)))


def logits(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.T


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.reshape(-1, VOCABULARY), labels.reshape(-1))


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed("nccl")
torch.manual_seed(0)
model = PipelineModule(
    [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        *(LayerSpec(Block) for _ in range(6)),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits),
    ],
    num_stages=int(os.environ["WORLD_SIZE"]),
    loss_fn=loss,
)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "steps_per_print": 1000},
)
generator = torch.Generator().manual_seed(0)
batch = torch.randint(VOCABULARY, (4, 17), generator=generator)
batches = iter(lambda: (batch[:, :-1], batch[:, 1:]), None)
losses = [engine.train_batch(batches).item() for _ in range(5)]
if torch.distributed.get_rank() == 0:
    print("losses", *(f"{value:.6f}" for value in losses), flush=True)
assert losses[-1] < losses[0], losses
torch.distributed.barrier()
