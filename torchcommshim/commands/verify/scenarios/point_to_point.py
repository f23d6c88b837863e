# SPDX-License-Identifier: Apache-2.0
"""A group of all ranks, then a send between two of them.

torch 2.5: the group was split from the world, and the communicator that two of its ranks make for an
unbatched send or receive is split from the world once more, without the other ranks.
https://github.com/pytorch/pytorch/issues/139013
"""

import torch
import torch.distributed as dist
from common import DEVICE, check_sum, finish, start

MINIMUM_RANKS = 3

rank, size = start()
group = dist.new_group(range(size))
check_sum(range(size), group)
tensor = torch.tensor([float(rank)], device=DEVICE)
if rank == 0:
    dist.send(tensor, 1, group=group)
elif rank == 1:
    dist.recv(tensor, 0, group=group)
    assert tensor.item() == 0
finish()
