# SPDX-License-Identifier: Apache-2.0
"""The command line: Megatron-LM's flags, with Megatron-LM's meanings and defaults.

What cannot work is refused here, before any process group is made.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from typing import Iterator, NoReturn, Optional, Sequence

import torch

from gpt.errors import leave


class Parser(argparse.ArgumentParser):
    """A parser whose errors are told once for all ranks, not once by each."""

    def error(self, message: str) -> NoReturn:
        leave(f"{self.prog}: error: {message}" if os.environ.get("RANK", "0") == "0" else None)


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line and the launcher's environment.

    Returns:
        the flags, plus what follows from them: `rank`, `local_rank`, `world_size`,
        `data_parallel_size`, `num_microbatches`, `params_dtype` (of activations; weights are float32).
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        parser.error(f"{', '.join(missing)} not set: start this script with torchrun")
    args.rank = int(os.environ["RANK"])
    args.local_rank = int(os.environ["LOCAL_RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
    complete(args)
    for problem in problems(args):
        parser.error(problem)
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and args.local_rank >= gpus:
        # Rank 0 has a GPU and knows nothing of it: the first rank without one speaks.
        message = (
            f"LOCAL_RANK is {args.local_rank}, but this node has only {gpus} GPUs: start fewer processes, "
            "or let them share with one_gpu.py (VIA=one_gpu.py ./pretrain_gpt.sh)"
        )
        leave(f"{parser.prog}: error: {message}" if args.local_rank == gpus else None)
    if args.rank == 0:
        for note in notes(args):
            print(f"{parser.prog}: note: {note}", file=sys.stderr, flush=True)
    return args


def complete(args: argparse.Namespace) -> None:
    """Fill in what follows from the flags given."""
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.params_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    args.data_parallel_size = args.world_size // args.pipeline_model_parallel_size or 1
    args.global_batch_size = args.global_batch_size or args.micro_batch_size * args.data_parallel_size
    args.num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)


def problems(args: argparse.Namespace) -> Iterator[str]:
    """The reasons why these flags cannot work together."""
    stages, micro_batches = args.pipeline_model_parallel_size, args.num_microbatches
    if args.tensor_model_parallel_size != 1:
        yield (
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}: this example has pipeline "
            "and data parallelism only, use 1"
        )
    if args.world_size % stages:
        yield f"--pipeline-model-parallel-size {stages} does not divide the {args.world_size} processes"
    if args.num_layers % stages:
        yield f"--num-layers {args.num_layers} is not divisible by --pipeline-model-parallel-size {stages}"
    heads, length, positions = args.num_attention_heads, args.seq_length, args.max_position_embeddings
    if args.hidden_size % heads:
        yield f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}"
    if length > positions:
        yield f"--seq-length {length} exceeds --max-position-embeddings {positions}"
    if args.global_batch_size % (args.micro_batch_size * args.data_parallel_size):
        yield (
            f"--global-batch-size {args.global_batch_size} is not divisible by --micro-batch-size "
            f"{args.micro_batch_size} times the data-parallel size {args.data_parallel_size}"
        )
    if micro_batches < stages:
        yield (
            f"--global-batch-size {args.global_batch_size} makes {micro_batches} micro-batches, fewer than "
            f"the {stages} stages of --pipeline-model-parallel-size: 1F1B needs at least one for each"
        )
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 exclude each other"
    if args.eval_iters and not args.split[1]:
        yield f"--eval-iters {args.eval_iters}, but --split leaves nothing for validation"
    if args.transformer_impl == "transformer_engine":
        if importlib.util.find_spec("transformer_engine") is None:
            yield "--transformer-impl transformer_engine: it is not installed; use local"
        if not torch.cuda.is_available():
            yield "--transformer-impl transformer_engine needs a GPU; use local"


def notes(args: argparse.Namespace) -> list[str]:
    """One sentence for each flag given that has no effect here."""
    lines = []
    if args.use_mcore_models:
        lines.append("--use-mcore-models has no effect: there is one model here")
    if args.sequence_parallel:
        lines.append(
            "--sequence-parallel has no effect: it shards over tensor-parallel ranks, of which there is one"
        )
    if args.data_cache_path:
        lines.append("--data-cache-path has no effect: samples are found without a cache")
    return lines


def split_weights(text: str) -> tuple[float, ...]:
    """Parse `--split`: weights of training, validation and test data."""
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    usable = all(0 <= weight < math.inf for weight in weights)
    if not 1 <= len(weights) <= 3 or not usable or not weights[0]:
        raise argparse.ArgumentTypeError(
            f"{text!r} should be up to three weights such as 969,30,1, the first above 0"
        )
    return weights + (0.0,) * (3 - len(weights))


def positive(text: str) -> int:
    """Parse a count that must be at least 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def non_negative(text: str) -> int:
    """Parse a count that may be 0."""
    if int(text) < 0:
        raise ValueError
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """The parser, its flags grouped as in the report's script."""
    parser = Parser(description="Pre-train a GPT with pipeline parallelism.", allow_abbrev=False)

    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=positive, required=True)
    model.add_argument("--hidden-size", type=positive, required=True)
    model.add_argument("--ffn-hidden-size", type=positive, help="default: 4 times the hidden size")
    model.add_argument("--num-attention-heads", type=positive, required=True)
    model.add_argument("--seq-length", type=positive, required=True, help="tokens in a sample")
    model.add_argument("--max-position-embeddings", type=positive, help="default: the sequence length")
    model.add_argument(
        "--init-method-std", type=float, default=0.02, help="standard deviation of initial weights"
    )
    model.add_argument("--make-vocab-size-divisible-by", type=positive, default=128)
    model.add_argument(
        "--transformer-impl", choices=("local", "transformer_engine"), default="transformer_engine"
    )
    model.add_argument(
        "--use-mcore-models", action="store_true", help="accepted for the report's script; no effect"
    )

    training = parser.add_argument_group("training")
    training.add_argument(
        "--micro-batch-size", type=positive, required=True, help="samples in one pass of a stage"
    )
    training.add_argument(
        "--global-batch-size", type=positive, help="samples in an iteration, over all ranks"
    )
    training.add_argument("--train-iters", type=positive, required=True)
    training.add_argument("--lr", type=float, required=True)
    training.add_argument("--min-lr", type=float, default=0.0)
    training.add_argument("--lr-decay-style", choices=("constant", "linear", "cosine"), default="linear")
    training.add_argument("--lr-decay-iters", type=positive, help="default: --train-iters")
    training.add_argument("--lr-warmup-fraction", type=float, default=0.0, help="of the decay iterations")
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument("--adam-beta1", type=float, default=0.9)
    training.add_argument("--adam-beta2", type=float, default=0.999)
    training.add_argument("--adam-eps", type=float, default=1e-8)
    training.add_argument(
        "--clip-grad", type=float, default=1.0, help="largest gradient norm; 0: no clipping"
    )
    training.add_argument("--seed", type=int, default=1234)

    precision = parser.add_argument_group("mixed precision")
    precision.add_argument("--fp16", action="store_true", help="with dynamic loss scaling")
    precision.add_argument("--bf16", action="store_true")
    precision.add_argument("--initial-loss-scale", type=float, default=2.0**32)
    precision.add_argument("--min-loss-scale", type=float, default=1.0)
    precision.add_argument(
        "--loss-scale-window", type=positive, default=1000, help="good iterations before it doubles"
    )
    precision.add_argument(
        "--hysteresis", type=positive, default=2, help="bad iterations before it is halved"
    )

    parallel = parser.add_argument_group("parallelism")
    parallel.add_argument("--tensor-model-parallel-size", type=positive, default=1)
    parallel.add_argument("--pipeline-model-parallel-size", type=positive, default=1)
    parallel.add_argument(
        "--use-distributed-optimizer", action="store_true", help="shard the optimizer's state"
    )
    parallel.add_argument("--sequence-parallel", action="store_true")
    parallel.add_argument("--distributed-timeout-minutes", type=float, default=10)

    data = parser.add_argument_group("data")
    data.add_argument("--data-path", required=True, metavar="PREFIX", help="of PREFIX.bin and PREFIX.idx")
    data.add_argument("--split", type=split_weights, default="969,30,1", help="training, validation, test")
    data.add_argument("--tokenizer-type", choices=("Llama2Tokenizer",), default="Llama2Tokenizer")
    data.add_argument("--tokenizer-model", required=True, metavar="FILE", help="a sentencepiece model")
    data.add_argument("--data-cache-path", nargs="?", help="accepted for the report's script; no effect")

    output = parser.add_argument_group("logging, evaluation, checkpoints")
    output.add_argument("--log-interval", type=positive, default=100)
    output.add_argument("--log-throughput", action="store_true")
    output.add_argument("--tensorboard-dir", metavar="DIR")
    output.add_argument("--eval-interval", type=positive, default=1000)
    output.add_argument("--eval-iters", type=non_negative, default=100)
    output.add_argument("--save", metavar="DIR")
    output.add_argument("--save-interval", type=positive)
    output.add_argument("--load", metavar="DIR")
    return parser
