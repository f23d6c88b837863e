# SPDX-License-Identifier: Apache-2.0
"""Some ranks make a group by torch's inner function, as libraries for reinforcement learning do.

torch 2.3 to 2.15: these ranks split the world, and the other ranks never hear of it.
https://github.com/NVIDIA-NeMo/RL/pull/3189
"""

import inspect
from datetime import timedelta

import torch.distributed as dist
from common import check_sum, finish, start
from torch.distributed.distributed_c10d import _get_default_store, _new_process_group_helper, _world

MINIMUM_RANKS = 3

# torch 2.6 renamed the parameter.
OPTIONS = (
    "backend_options"
    if "backend_options" in inspect.signature(_new_process_group_helper).parameters
    else "pg_options"
)

rank, _ = start()
if rank in (0, 1):
    group, _ = _new_process_group_helper(
        2,
        rank,
        [],
        "nccl",
        dist.PrefixStore("weights", _get_default_store()),
        group_name="weights",
        timeout=timedelta(minutes=5),
        **{OPTIONS: None},
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    check_sum([0, 1], group)
finish()
