# SPDX-License-Identifier: Apache-2.0
"""`split_group` and DeviceMesh in real jobs over gloo, which splits as well and needs no GPU."""

from __future__ import annotations

import re
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
import torch.distributed as dist  # noqa: E402
from test_watch_jobs import Job  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

pytestmark = pytest.mark.skipif(
    # Older ones ask for CUDA's backend, and later ones for a device that a gloo world cannot be bound to.
    not torch.__version__.startswith("2.13."),
    reason="splits gloo on a CPU that is taken for an accelerator, as 2.13 can",
)


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


def _uneven_groups(rank, size, store):
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


@pytest.mark.parametrize("strategy", ["auto", "strip", "split"])
def test_uneven_groups(tmp_path, strategy):
    """Split groups and meshes after uneven groups work, and the world closes, with each strategy."""
    job = Job(_uneven_groups, 4, tmp_path, TORCHCOMMSHIM=strategy, TORCHCOMMSHIM_CHECK_ORDER="1").run()

    assert (job.codes, job.said.count("split_group of [0-3]")) == ([0] * 4, 1), job.said


def _names_differ(rank, size, store):
    _start(rank, size, store)
    _new(rank, [0])
    _bind()
    _split(rank, [0, 2], [1, 3])


def test_names_that_differ(tmp_path):
    """Where nothing is repaired, the one report names the defect and the first creation that it breaks."""
    job = Job(_names_differ, 4, tmp_path, TORCHCOMMSHIM="observe").run(until="innermost call first")

    assert re.search(
        r"likely cause: split-names: on torch \S+ ranks that are in different numbers of groups "
        r".*issues/189073\)\. The first creation that it breaks is #2 at \S*:\d+ _split",
        job.text,
    ), job.said
