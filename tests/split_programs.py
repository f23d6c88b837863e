# SPDX-License-Identifier: Apache-2.0
"""The programs of test_split_jobs: a module of its own, which a spawned rank can import."""

from __future__ import annotations

import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def _start(rank, size, store):
    """A gloo world that can be split.  Not of `gloo`, which 2.13 splits once for each type of device."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    # Not simulated NCCL's, which `Job` installs.
    c10d.torch = sys.modules["torch.distributed.device_mesh"].torch = torch
    c10d.ProcessGroup = dist.ProcessGroup
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    c10d.copy = types.SimpleNamespace(deepcopy=lambda options: options)  # gloo's cannot be copied
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=size)


def _bind():
    dist.group.WORLD.bound_device_id = torch.device("cpu", 0)


def _check(group, rank, lists):
    """The sum over the one of `lists` that holds this rank; it should be in none, if `group` is None."""
    ranks = next((ranks for ranks in lists if rank in ranks), None)
    if ranks is not None:
        number = torch.ones(1) * (rank + 1)
        dist.all_reduce(number, group=group)
        assert number.item() == sum(each + 1 for each in ranks), (number, ranks)


def _split(rank, *lists, parent=None):
    _check(dist.split_group(parent, list(lists)), rank, lists)


def _new(rank, ranks):
    _check(dist.new_group(ranks), rank, [ranks])


def uneven_groups(rank, size, store):
    """The embedding groups of a pipeline, a partial split, a mesh, and splits of all sorts after them."""
    _start(rank, size, store)
    _new(rank, [0])
    _new(rank, [0, 1])
    local = dist.new_group([1, 2], use_local_synchronization=True) if rank in (1, 2) else None
    _check(local, rank, [[1, 2]])
    _bind()
    _split(rank, [0, 1, 2])
    _split(rank, [0, 2], [1, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _check(mesh.get_group("dp"), rank, [[0, 2], [1, 3]])
    _check(mesh.get_group("tp"), rank, [[0, 1], [2, 3]])
    if rank < 2:
        _check(dist.split_group(mesh.get_group("tp"), [[0]]), rank, [[0]])
    dist.destroy_process_group(mesh.get_group("tp"))
    _split(rank, [0, 1, 2, 3])
    dist.barrier()
    dist.destroy_process_group()


def names_differ(rank, size, store):
    _start(rank, size, store)
    _new(rank, [0])
    _bind()
    _split(rank, [0, 2], [1, 3])
