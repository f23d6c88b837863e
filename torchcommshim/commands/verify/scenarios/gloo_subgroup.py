# SPDX-License-Identifier: Apache-2.0
"""A gloo group in an NCCL world, then a collective of the world.

torch 2.3 to 2.14: the ranks outside split the world whatever backend the group has; its members do not.
https://github.com/pytorch/pytorch/issues/145376
"""

import torch.distributed as dist
from common import check_sum, finish, start

MINIMUM_RANKS = 3

_, size = start()
group = dist.new_group([0, 1], backend="gloo")
check_sum(range(size))
check_sum([0, 1], group, device="cpu")
finish()
