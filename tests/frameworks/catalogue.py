# SPDX-License-Identifier: Apache-2.0
"""The programs, what each uses, and how it ends without the shim; and the ways in which each is run."""

from __future__ import annotations

from typing import Mapping, NamedTuple

TRAINS, HANGS = "trains", "hangs"


class Program(NamedTuple):
    """One training program in `programs/`.

    Attributes:
        name: of its file.
        framework: as the table says it.
        packages: whose versions matter, as PyPI names them; empty where torch itself is meant.
        what: what it does, in a line.
        processes: how many are started with torchrun's variables; 1 for one that starts its own ranks.
        simulated: its world is one of simulated NCCL, bound to a device; else it is one of gloo.
        without: how it ends without the shim.
        why: where it hangs without the shim, the defect that does it.
        launcher: what starts it in place of `python`, from the environment's `bin`.
    """

    name: str
    framework: str
    packages: tuple[str, ...]
    what: str
    processes: int = 2
    simulated: bool = False
    without: str = TRAINS
    why: str = ""
    launcher: tuple[str, ...] = ("python",)


PROGRAMS = (
    Program(
        "accelerate_ddp",
        "accelerate",
        ("accelerate",),
        "model, data and optimizer prepared, gradients accumulated, a gathered loss",
    ),
    Program(
        "lightning_ddp",
        "Lightning",
        ("lightning",),
        "Trainer with DDP that starts its own second rank, groups by TorchCollective",
        processes=1,
    ),
    Program(
        "fsdp2_checkpoints",
        "FSDP2",
        (),
        "DeviceMesh of 2 x 2 ranks, asynchronous checkpoints by a thread and by a process",
        processes=4,
    ),
    Program(
        "pipelining_interleaved",
        "torch.distributed.pipelining",
        (),
        "interleaved 1F1B, two pipelines of two ranks with two stages each",
        processes=4,
        simulated=True,
    ),
    Program(
        "transformers_tp",
        "transformers",
        ("transformers",),
        "random Llama, loaded with its tensor-parallel plan over two ranks",
    ),
    Program(
        "trl_sft",
        "TRL",
        ("trl", "transformers", "accelerate"),
        "SFTTrainer, and so transformers' Trainer, on two ranks",
    ),
    Program(
        "ray_train",
        "Ray Train",
        ("ray",),
        "TorchTrainer with two workers",
        processes=1,
    ),
    Program(
        "megatron_core",
        "megatron-core",
        ("megatron-core",),
        "its groups on two tensor-parallel times two pipeline ranks, its parallel layers",
        processes=4,
        simulated=True,
    ),
    Program(
        "deepspeed_zero",
        "DeepSpeed",
        ("deepspeed",),
        "engine with ZeRO stage 2 on two ranks",
    ),
    Program(
        "deepspeed_device",
        "DeepSpeed, NCCL world",
        ("deepspeed",),
        "init_distributed, which passes device_id where the signature has it; groups by deepspeed.comm",
        processes=4,
        simulated=True,
        without=HANGS,
        why="other-backend",
    ),
    Program(
        "torchtitan_meshes",
        "TorchTitan",
        ("torchtitan",),
        "its init_distributed, meshes, clipping and means, two by two ranks; its Trainer asks for a GPU",
        processes=4,
    ),
    Program(
        "direct_helper",
        "RL stacks (direct helper call)",
        (),
        "weights broadcast from one trainer to a process outside the trainers' world",
        processes=3,
        simulated=True,
        without=HANGS,
        why="direct-helper",
    ),
    Program(
        "plain_ddp",
        "ddtrace-run",
        ("ddtrace",),
        "DDP and two groups, started by Datadog's launcher, which brings a sitecustomize",
        launcher=("ddtrace-run", "python"),
    ),
    Program(
        "plain_ddp",
        "opentelemetry-instrument",
        ("opentelemetry-distro",),
        "the same, started by OpenTelemetry's launcher, which brings a sitecustomize too",
        launcher=("opentelemetry-instrument", "python"),
    ),
    Program(
        "plain_ddp",
        "coverage run",
        ("coverage",),
        "the same, measured",
        launcher=("coverage", "run", "--parallel-mode"),
    ),
)


class Way(NamedTuple):
    """One way to run a program.

    Attributes:
        name: as the table says it.
        variables: the environment variables of the shim.
    """

    name: str
    variables: Mapping[str, str]


WITHOUT = Way("without", {"TORCHCOMMSHIM": "off"})
WAYS = (
    Way("auto", {"TORCHCOMMSHIM": "auto"}),
    Way("strip", {"TORCHCOMMSHIM": "strip"}),
    Way("split", {"TORCHCOMMSHIM": "split"}),
    Way("order check", {"TORCHCOMMSHIM": "auto", "TORCHCOMMSHIM_CHECK_ORDER": "1"}),
)

# By how the packages were chosen.  The pinned ones have two, so that all of it takes 20 minutes.
WAYS_OF = {"newest": WAYS, "pinned": tuple(way for way in WAYS if way.variables["TORCHCOMMSHIM"] == "auto")}
