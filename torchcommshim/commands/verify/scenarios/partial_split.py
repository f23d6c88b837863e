# SPDX-License-Identifier: Apache-2.0
"""A split that leaves a rank out, then splits of all, a gloo group, and the end of them all.

torch 2.10 to 2.13: the name of a split group has in it how many groups this rank is in, so ranks name one
group differently, and close their groups in different orders: they wait in destroy_process_group.
torch 2.5 to 2.8: the rank that was left out has counted a group less, and names the gloo group differently.
https://github.com/pytorch/pytorch/issues/190396
"""

import torch.distributed as dist
from common import alternate, check_sum, finish, halves, split, start

MINIMUM_RANKS = 4

_, size = start()
split([range(size - 1)])
split(halves(size))
split(alternate(size))
check_sum(range(size), dist.new_group(backend="gloo"), device="cpu")
finish()
