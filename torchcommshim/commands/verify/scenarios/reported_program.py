# SPDX-License-Identifier: Apache-2.0
"""The program of the first report: a group of one rank, then a barrier.

torch 2.3 and 2.4: all ranks but 0 split the world at once, rank 0 would on first use of the group.
https://github.com/pytorch/pytorch/issues/134314
"""

import torch.distributed as dist
from common import finish, start

MINIMUM_RANKS = 2

start()
dist.new_group([0])
dist.barrier()
finish()
