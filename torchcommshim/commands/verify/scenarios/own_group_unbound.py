# SPDX-License-Identifier: Apache-2.0
"""Each rank names only the group that it is in, in a world without device_id.

torch gives these groups one name, and so one set of store keys: their ranks find each other's addresses.
https://github.com/pytorch/pytorch/issues/142356
"""

import torch.distributed as dist
from common import check_sum, finish

MINIMUM_RANKS = 4

dist.init_process_group("cpu:gloo,cuda:nccl")
rank, size = dist.get_rank(), dist.get_world_size()
half = size // 2
ranks = list(range(half)) if rank < half else list(range(half, size))
group = dist.new_group(ranks, backend="nccl")
check_sum(ranks, group)
again = dist.new_group(ranks)
check_sum(ranks, again)
check_sum(ranks, again, device="cpu")
finish()
