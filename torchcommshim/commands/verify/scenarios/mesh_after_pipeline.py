# SPDX-License-Identifier: Apache-2.0
"""A pipeline's groups, its embedding groups among them, then two meshes, and the end of them all.

torch 2.10 to 2.13: the name of a mesh's group has in it how many groups this rank is in, so ranks name
one group differently, and close their groups in different orders: they wait in destroy_process_group.
https://github.com/pytorch/pytorch/issues/190396
"""

import torch.distributed as dist
from common import check_sum, finish, start
from torch.distributed.device_mesh import init_device_mesh

MINIMUM_RANKS = 4

rank, size = start()
for ranks in (list(range(size)), [0, size - 1], [0]):  # stages, embedding, position embedding
    check_sum(ranks, dist.new_group(ranks))
columns = size // 2
for names in (("replicas", "shards"), ("experts", "tensors")):  # of the dense layers, and of the sparse ones
    mesh = init_device_mesh("cuda", (2, columns), mesh_dim_names=names)
    check_sum(range(rank % columns, 2 * columns, columns), mesh.get_group(names[0]))
    check_sum(range(rank // columns * columns, (rank // columns + 1) * columns), mesh.get_group(names[1]))
finish()
