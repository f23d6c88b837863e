# SPDX-License-Identifier: Apache-2.0
"""Each rank names only the group that it is in, so one call makes several groups.

torch made without a split, from an unbound world, gives these groups one name; split from a bound world
they work, since the colour tells them apart.  A shim must not break that.
https://github.com/pytorch/pytorch/issues/134314
"""

import torch.distributed as dist
from common import check_sum, finish, start

MINIMUM_RANKS = 4

rank, size = start()
half = size // 2
ranks = list(range(half)) if rank < half else list(range(half, size))
group = dist.new_group(ranks)
check_sum(ranks, group)
finish()
