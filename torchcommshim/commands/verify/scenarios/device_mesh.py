# SPDX-License-Identifier: Apache-2.0
"""A 2-D DeviceMesh, then a collective of each dimension.

The groups of a dimension divide the world evenly, so this works unpatched too, if by luck on torch 2.3 and
2.4.  A shim must not break it.
https://github.com/pytorch/pytorch/issues/134314

A note says how the mesh made its groups: by `split_group` from torch 2.6 on, if the world is bound.
"""

from __future__ import annotations

from typing import Any

from common import check_sum, finish, start
from torch.distributed import device_mesh

MINIMUM_RANKS = 4

split_group: Any = getattr(device_mesh, "split_group", None)
splits = 0


def count(*arguments: Any, **named: Any) -> Any:
    """Call torch's `split_group`, and count it."""
    global splits
    splits += 1
    return split_group(*arguments, **named)


rank, size = start()
if split_group:
    device_mesh.split_group = count
rows = 2 if size % 2 == 0 else 1
columns = size // rows
mesh = device_mesh.init_device_mesh("cuda", (rows, columns), mesh_dim_names=("replicas", "shards"))
check_sum(range(rank % columns, size, columns), mesh.get_group("replicas"))
check_sum(range(rank // columns * columns, (rank // columns + 1) * columns), mesh.get_group("shards"))
if rank == 0:
    print(f"NOTE the mesh made its groups by {'split_group' if splits else 'new_group'}", flush=True)
finish()
