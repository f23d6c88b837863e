# SPDX-License-Identifier: Apache-2.0
"""A split of a split group, which leaves ranks out, then a split of the world, and the end of them all.

This works unpatched too.  A shim must not break it: only the ranks of the parent take part.
https://github.com/pytorch/pytorch/issues/190396
"""

import torch.distributed as dist
from common import alternate, check_sum, finish, halves, split, start

MINIMUM_RANKS = 4

rank, size = start()
half = split(halves(size))
(mine,) = (ranks for ranks in halves(size) if rank in ranks)
if hasattr(dist, "split_group") and half.bound_device_id:
    check_sum(mine[:1], dist.split_group(half, [[0]]))
split(alternate(size))
finish()
