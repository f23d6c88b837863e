# SPDX-License-Identifier: Apache-2.0
"""A 2-D DeviceMesh, then a collective of each dimension.

The groups of a dimension divide the world evenly, so this works unpatched too, if by luck on torch 2.3 and
2.4.  A shim must not break it.
https://github.com/pytorch/pytorch/issues/134314
"""

from common import check_sum, finish, start
from torch.distributed.device_mesh import init_device_mesh

MINIMUM_RANKS = 4

rank, size = start()
rows = 2 if size % 2 == 0 else 1
columns = size // rows
mesh = init_device_mesh("cuda", (rows, columns), mesh_dim_names=("replicas", "shards"))
check_sum(range(rank % columns, size, columns), mesh.get_group("replicas"))
check_sum(range(rank // columns * columns, (rank // columns + 1) * columns), mesh.get_group("shards"))
finish()
