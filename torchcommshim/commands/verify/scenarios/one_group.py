# SPDX-License-Identifier: Apache-2.0
"""One group, then a collective of the world.

torch 2.3 and 2.4: the ranks outside split the world at once, the members on first use of the group,
which comes after the world's collective.
https://github.com/pytorch/pytorch/issues/134314
"""

import torch.distributed as dist
from common import check_sum, finish, start

MINIMUM_RANKS = 3

_, size = start()
group = dist.new_group([0, 1])
check_sum(range(size))
check_sum([0, 1], group)
finish()
