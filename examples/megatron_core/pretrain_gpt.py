# SPDX-License-Identifier: Apache-2.0
"""The same training on megatron-core from PyPI: model, schedule and optimizer are the library's. GPUs only.

    pip install megatron-core numpy sentencepiece psutil       # Python 3.12 and later: 0.19; before: 0.16
    SCRIPT=$PWD/pretrain_gpt.py ../pretrain_gpt.sh

It takes the flags of ../pretrain_gpt.py, reads the same data and writes the same log line, but saves no
checkpoints. Megatron-LM passed `device_id` to init_process_group for six weeks of 2024. Here it is passed
again, before megatron-core makes its groups.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from typing import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpt.arguments import parse_args
from gpt.checkpoint import Progress
from gpt.data import Samples, Tokens, load_tokenizer, padded
from gpt.errors import InputError, agreed, describe, leave
from gpt.groups import choose_device
from gpt.log import Log


def main() -> None:
    """Train as the command line says."""
    args = parse_args()
    device = choose_device(args)
    if device.type == "cpu":
        leave("pretrain_gpt.py: error: megatron-core needs GPUs" if args.rank == 0 else None)
    if args.rank == 0:
        for note in notes(args):
            print(f"pretrain_gpt.py: note: {note}", file=sys.stderr, flush=True)
    try:
        connect(args, device)
        train(args)
    except InputError as error:
        leave(f"[rank {args.rank}] {describe(error)}")
    dist.destroy_process_group()


def notes(args: argparse.Namespace) -> Iterator[str]:
    """One sentence for each flag given that has no effect in this script."""
    for flag in ("--save", "--save-interval", "--load"):
        if getattr(args, flag[2:].replace("-", "_")):
            yield f"{flag} has no effect: there are no checkpoints here"
    if args.eval_iters:
        yield "--eval-iters and --eval-interval have no effect: there is no validation here"


def connect(args: argparse.Namespace, device: torch.device) -> None:
    """Connect all ranks, and let megatron-core make its groups: more than 100 for 8 ranks."""
    dist.init_process_group(
        backend="nccl",
        world_size=args.world_size,
        rank=args.rank,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        device_id=device,
    )
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    model_parallel_cuda_manual_seed(args.seed)
    torch.manual_seed(args.seed)


def train(args: argparse.Namespace) -> None:
    """The loop."""
    with agreed(dist.group.WORLD):
        ids = load_tokenizer(args.tokenizer_model).vocab_size()
        args.vocab_size = padded(ids, args.make_vocab_size_divisible_by)
        tokens = Tokens(args.data_path)
        samples = Samples(tokens, tokens.portions(args.split)[0], args.seq_length, ids, args.seed)
    model = make_model(args)
    optimizer = make_optimizer(args, model)
    scheduler = make_scheduler(args, optimizer)
    forward_backward = get_forward_backward_func()
    progress = Progress()
    with agreed(dist.group.WORLD):
        log = Log(args, done=0)
    while progress.iteration < args.train_iters:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=micro_batches(args, samples, progress.consumed_samples),
            model=[model],
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        updated, norm, _ = optimizer.step()
        if updated:
            scheduler.step(increment=args.global_batch_size)
        progress.iteration += 1
        progress.consumed_samples += args.global_batch_size
        lr = optimizer.param_groups[0]["lr"]
        norm = (
            None if norm is None else float(norm)
        )  # the library gives a number or a tensor, None on overflow
        log.iteration(progress, mean_loss(losses), updated, norm, lr, optimizer.get_loss_scale().item())
    log.close()


def make_model(args: argparse.Namespace) -> DistributedDataParallel:
    """This rank's stage, ready for data parallelism."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=args.init_method_std,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_dtype=args.params_dtype,
        params_dtype=args.params_dtype,
        fp16=args.fp16,
        bf16=args.bf16,
        # These need apex.
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    local = args.transformer_impl == "local"
    model = GPTModel(
        config,
        get_gpt_layer_local_spec() if local else get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).cuda()
    if args.fp16 or args.bf16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    model = DistributedDataParallel(config, ddp_config, model)
    model.broadcast_params()
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return model


def make_optimizer(args: argparse.Namespace, model: DistributedDataParallel) -> MegatronOptimizer:
    """Megatron's Adam, with its loss scale."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        fp16=args.fp16,
        bf16=args.bf16,
        params_dtype=args.params_dtype,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, [model])
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def make_scheduler(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The learning rate, counted in samples."""
    decay_samples = args.lr_decay_iters * args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_fraction * decay_samples,
        lr_decay_steps=decay_samples,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )


def micro_batches(args: argparse.Namespace, samples: Samples, first: int) -> Iterator[torch.Tensor]:
    """This replica's micro-batches of the global batch that begins with sample `first`."""
    batch = samples.batch(
        first,
        args.num_microbatches,
        args.micro_batch_size,
        parallel_state.get_data_parallel_rank(),
        args.data_parallel_size,
    )
    return iter(batch.cuda().split(args.micro_batch_size))


def forward_step(batches: Iterator[torch.Tensor], model: DistributedDataParallel):
    """What the schedule calls for each micro-batch: the stage's output, and how to make a loss of it."""
    ids = next(batches)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=ids.device).expand_as(tokens)
    # Without a mask, attention is causal.
    return model(tokens, positions, None, labels=labels), mean_of_tokens


def mean_of_tokens(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's loss, to differentiate and to report."""
    loss = token_losses.float().mean()
    return loss, {"lm loss": loss.detach().clone()}  # the schedule divides the first in place


def mean_loss(losses: list[dict[str, torch.Tensor]]) -> float:
    """The loss of the global batch, on the last stage; 0 on the others."""
    mean = (
        torch.stack([loss["lm loss"] for loss in losses]).mean() if losses else torch.zeros((), device="cuda")
    )
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return mean.item() / parallel_state.get_data_parallel_world_size()


if __name__ == "__main__":
    main()
