# SPDX-License-Identifier: Apache-2.0
"""Two groups that share a rank, then a collective of each.

torch 2.3 and 2.4: the splits of different groups pair up.  Nothing hangs; the communicators are short of
ranks and the sums are wrong.
https://github.com/pytorch/pytorch/issues/134314
"""

import torch.distributed as dist
from common import check_sum, finish, start

MINIMUM_RANKS = 4

start()
first = dist.new_group([0, 1])
second = dist.new_group([0, 2])
check_sum([0, 1], first)
check_sum([0, 2], second)
finish()
