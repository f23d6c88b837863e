# SPDX-License-Identifier: Apache-2.0
"""TRL: an SFTTrainer, and so transformers' Trainer, on two ranks, with a tokenizer made on the spot."""

from __future__ import annotations

import os

import said
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29))]


class Tell(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            said.loss(args.process_index, logs["loss"])


words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
torch.manual_seed(7)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
)
texts = [" ".join(f"w{(start * step) % 29}" for step in range(1, 12)) for start in range(1, 33)]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=f"{os.environ['FRAMEWORKS_FOLDER']}/sft",
        use_cpu=True,
        bf16=False,
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
        gradient_checkpointing=False,
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    callbacks=[Tell()],
)
trainer.train()
total = sum(parameter.sum() for parameter in model.parameters())
said.loss(dist.get_rank(), total.item())
dist.barrier()
said.done(dist.get_rank())
dist.destroy_process_group()
