# SPDX-License-Identifier: Apache-2.0
"""Splits of the world after groups that some ranks are not in, and the end of them all.

torch 2.10 to 2.13: the name of a split group has in it how many groups this rank is in, so ranks name one
group differently, and close their groups in different orders: they wait in destroy_process_group.
https://github.com/pytorch/pytorch/issues/190396
"""

import torch.distributed as dist
from common import alternate, check_sum, finish, halves, split, start

MINIMUM_RANKS = 4

_, size = start()
for ranks in ([0], [0, 1]):
    check_sum(ranks, dist.new_group(ranks))
split(halves(size))
split([range(size)])
split(alternate(size))
finish()
