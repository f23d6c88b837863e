# SPDX-License-Identifier: Apache-2.0
"""The creations of the measured programs, one world after the other; `explain --fake` runs this.

Without `device_id` and so on, each is the program of the same name in test_splits.py.  Uses are left out: no
trace holds them.
"""

from __future__ import annotations

import inspect
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store, _new_process_group_helper

GPU = torch.device("cuda", 0)
BOUND = {"backend": "nccl", "device_id": GPU}


def groups(*several, backend=None):
    for ranks in several:
        dist.new_group(ranks, backend=backend)


def local(*ranks):
    if dist.get_rank() in ranks:
        dist.new_group(ranks, use_local_synchronization=True)


def direct(*ranks):
    if dist.get_rank() in ranks:
        parameters = inspect.signature(_new_process_group_helper).parameters
        options = "backend_options" if "backend_options" in parameters else "pg_options"
        store = dist.PrefixStore("weights", _get_default_store())
        place = ranks.index(dist.get_rank())
        timeout = timedelta(minutes=5)
        _new_process_group_helper(
            len(ranks), place, [], "nccl", store, group_name="weights", timeout=timeout, **{options: None}
        )


def m5():
    groups([0, 1], backend="gloo")
    groups([0, 2])
    groups([2, 3], backend="gloo")


def m11():
    groups([0, 1])
    local(1, 2)


def m11_reversed():
    local(0, 1)
    groups([0, 2])


def m14():
    groups([0, 1] if dist.get_rank() < 2 else [2, 3])


def m15():
    groups([0, 1], [2, 3], backend="gloo")
    groups([0, 2])


# Name -> (the world, what is made in it).
PROGRAMS = {
    "m0": (BOUND, lambda: groups([0])),
    "m1": (BOUND, lambda: groups([0, 1])),
    "m2": (BOUND, lambda: groups([0, 2], [1, 3])),
    "m3": (BOUND, lambda: groups([0, 1], [0, 2])),
    "m4": (BOUND, lambda: groups([0, 1], backend="gloo")),
    "m5": (BOUND, m5),
    "m6": (BOUND, lambda: local(0, 1)),
    "m6 unbound": ({"backend": "nccl"}, lambda: local(0, 1)),
    "m9": (BOUND, lambda: init_device_mesh("cpu", (2, 2))),
    "m10": (BOUND, lambda: direct(0, 1)),
    "m11": ({"backend": "gloo"}, m11),
    "m11 reversed": ({"backend": "gloo"}, m11_reversed),
    "m12": ({"backend": "gloo", "device_id": GPU}, lambda: groups([0])),
    "m13": (BOUND, lambda: groups([0, 1], backend="cpu:gloo")),
    "m14": (BOUND, m14),
    "m15": (BOUND, m15),
}

if __name__ == "__main__":
    for world, make in PROGRAMS.values():
        dist.init_process_group(**world)
        make()
        dist.barrier()
        dist.destroy_process_group()
