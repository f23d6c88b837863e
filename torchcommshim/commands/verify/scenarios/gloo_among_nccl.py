# SPDX-License-Identifier: Apache-2.0
"""An NCCL group between two gloo groups, then a collective of it.

torch 2.5 to 2.14: the splits of ranks outside the gloo groups pair up with those of the NCCL group, whose
communicators are short of ranks: wrong sums.  torch 2.3 and 2.4 hang.
https://github.com/pytorch/pytorch/issues/145376
"""

import torch.distributed as dist
from common import check_sum, finish, start

MINIMUM_RANKS = 4

start()
dist.new_group([0, 1], backend="gloo")
group = dist.new_group([0, 2])
dist.new_group([2, 3], backend="gloo")
check_sum([0, 2], group)
finish()
