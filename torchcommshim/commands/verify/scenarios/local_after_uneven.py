# SPDX-License-Identifier: Apache-2.0
"""A local-synchronization group whose members have been in different numbers of groups (gloo, not bound).

torch 2.6 to 2.15: the group's name is made from a counter that differs between the ranks, so they wait for
each other in different places.
https://github.com/pytorch/pytorch/issues/173608
"""

import torch.distributed as dist
from common import check_sum, finish

MINIMUM_RANKS = 3

dist.init_process_group("gloo")
dist.new_group([0, 1])
if dist.get_rank() in (1, 2):
    group = dist.new_group([1, 2], use_local_synchronization=True)
    check_sum([1, 2], group, device="cpu")
finish()
