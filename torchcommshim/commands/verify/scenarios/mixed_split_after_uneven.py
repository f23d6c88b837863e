# SPDX-License-Identifier: Apache-2.0
"""A split after an uneven group in a world of gloo and NCCL, as FSDP2 makes it to offload to the CPU.

torch 2.9 to 2.13: the name of a split group has in it how many groups this rank is in, so ranks name one
group differently; gloo's keys in the store have the name in them, and all wait in split_group.  torch 2.5 to
2.8: such a world cannot be split, an assertion says.
https://github.com/pytorch/pytorch/issues/189073
"""

import torch.distributed as dist
from common import check_sum, finish, halves, split, start

MINIMUM_RANKS = 4

_, size = start("cpu:gloo,cuda:nccl")
check_sum([0], dist.new_group([0]))
split([range(size)])
split(halves(size))
finish()
