# SPDX-License-Identifier: Apache-2.0
"""One pipeline stage of a GPT.

Parameters carry the names they have in the whole model (`layers.7.mlp.fc1.weight` is the eighth layer's
on whichever stage it lies), and each is initialised from the seed and its own name. So every layout of
stages starts from the same weights, and a checkpoint does not depend on the layout.
"""

from __future__ import annotations

import argparse
import math
import zlib

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Mlp(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, ffn_hidden)
        self.fc2 = nn.Linear(ffn_hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Layer(nn.Module):
    """A transformer layer: attention and MLP, each normalised before and added to its input."""

    def __init__(self, hidden: int, ffn_hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, ffn_hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make_layer(args: argparse.Namespace, number: int) -> nn.Module:
    """Layer `number` of the whole model, counted from 0."""
    if args.transformer_impl == "local":
        return Layer(args.hidden_size, args.ffn_hidden_size, args.num_attention_heads)
    import transformer_engine.pytorch as te

    return te.TransformerLayer(
        args.hidden_size,
        args.ffn_hidden_size,
        args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        layer_number=number + 1,
        params_dtype=torch.float32,
    )


class Stage(nn.Module):
    """Consecutive layers; the first stage embeds tokens before them, the last computes the loss after them.

    Input and output are activations of shape (micro-batch, length, hidden) in `dtype`; the first stage's
    input is token ids of shape (micro-batch, length). Weights are float32, arithmetic is in `dtype`.

    Attributes:
        word: the word embedding, which is also the output layer's weight ("tied"). First and last stage
            each hold a copy; `optimizer.Gradients` keeps the copies equal.
    """

    def __init__(self, args: argparse.Namespace, stage: int, vocab_size: int) -> None:
        super().__init__()
        stages = args.pipeline_model_parallel_size
        count = args.num_layers // stages
        self.first, self.last = stage == 0, stage == stages - 1
        self.dtype = args.params_dtype
        if self.first or self.last:
            # The first parameter, where `optimizer.Gradients` looks for it.
            self.word = nn.Embedding(vocab_size, args.hidden_size)
        if self.first:
            self.position = nn.Embedding(args.max_position_embeddings, args.hidden_size)
        numbers = range(stage * count, (stage + 1) * count)
        self.layers = nn.ModuleDict({str(number): make_layer(args, number) for number in numbers})
        if self.last:
            self.final_norm = nn.LayerNorm(args.hidden_size)

    def autocast(self, device: torch.device) -> torch.autocast:
        """Do arithmetic in `dtype` where that is safe."""
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.autocast(x.device):
            if self.first:
                x = self.word(x) + self.position.weight[: x.shape[1]]
                x = x.to(self.dtype)
            for layer in self.layers.values():
                x = layer(x)
            return self.final_norm(x).to(self.dtype) if self.last else x

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the next token, from the last stage's output and the ids that follow."""
        with self.autocast(hidden.device):
            logits = functional.linear(hidden, self.word.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@torch.no_grad()
def initialize(stage: Stage, args: argparse.Namespace) -> None:
    """Set all weights: normal with `--init-method-std`, smaller where an output is added to its input."""
    output_std = args.init_method_std / math.sqrt(2 * args.num_layers)
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{args.seed} {name}".encode()))
        is_output = name.endswith(("proj.weight", "fc2.weight", "fc2_weight"))
        parameter.normal_(std=output_std if is_output else args.init_method_std, generator=generator)
