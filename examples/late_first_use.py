# SPDX-License-Identifier: Apache-2.0
"""A job that hangs for a while: rank 0 is busy while the others are in the world's first barrier.

    TORCHCOMMSHIM_HANG_REPORT_S=10 torchrun --nproc-per-node 4 examples/late_first_use.py 40

While it waits, `torchcommshim where` in another terminal shows where each rank is.
"""

import sys
import time

import torch.distributed as dist


def prepare(seconds: float) -> None:
    """Stand for work that one rank does and the others wait for, such as tokenizing."""
    time.sleep(seconds)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    prepare(float(sys.argv[1]))
dist.barrier()
dist.destroy_process_group()
