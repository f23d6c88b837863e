# SPDX-License-Identifier: Apache-2.0
"""Run a script in more ranks than there are GPUs: torchrun --nproc_per_node 8 one_gpu.py SCRIPT FLAGS...

For trying things out, not for speed. NCCL refuses two ranks on one GPU of one host, so each rank is given a
host name of its own, and talks to the others over sockets. With HANG_AFTER in the environment, a rank that
still runs after as many seconds prints where it is, even if it waits in ncclCommSplit and holds the GIL.
"""

import faulthandler
import os
import runpy
import sys

import torch

gpus = torch.cuda.device_count()
if 0 < gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
    os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)
if "HANG_AFTER" in os.environ:
    faulthandler.dump_traceback_later(float(os.environ["HANG_AFTER"]))
del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
