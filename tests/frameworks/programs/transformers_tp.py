# SPDX-License-Identifier: Apache-2.0
"""transformers: a small random Llama, saved and loaded again with its tensor-parallel plan over two ranks."""

from __future__ import annotations

import os

import said
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

rank = int(os.environ["RANK"])
place = f"{os.environ['FRAMEWORKS_FOLDER']}/llama-{rank}"
torch.manual_seed(7)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
LlamaForCausalLM(config).save_pretrained(place)
model = LlamaForCausalLM.from_pretrained(place, tp_plan="auto", dtype=torch.float32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.randint(0, 64, (4, 16))
for _ in range(4):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    said.loss(rank, loss.item())
dist.barrier()
said.done(rank)
dist.destroy_process_group()
