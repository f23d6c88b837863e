# SPDX-License-Identifier: Apache-2.0
"""A group that only its members make, as `use_local_synchronization` allows.

torch 2.3 to 2.15: the members split the world, and the other ranks never hear of it.
https://github.com/pytorch/pytorch/issues/129965
"""

import torch.distributed as dist
from common import check_sum, finish, start

MINIMUM_RANKS = 3

rank, _ = start()
if rank in (0, 1):
    group = dist.new_group([0, 1], use_local_synchronization=True)
    check_sum([0, 1], group)
finish()
