# SPDX-License-Identifier: Apache-2.0
"""`split_group`: torch's own code on each rank of a world in turn (see `recorder`)."""

from __future__ import annotations

import copy
import importlib
import sys
import types
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")
import torch.distributed as dist  # noqa: E402
from recorder import DEVICE, Recorder, world  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import torchcommshim  # noqa: E402
from torchcommshim.repair.traits import release  # noqa: E402
from torchcommshim.tell import report  # noqa: E402

c10d = sys.modules["torch.distributed.distributed_c10d"]

pytestmark = [
    # Others have no split_group, or ask the backend for more than the recorder has.
    pytest.mark.skipif(not ((2, 10) <= release(torch.__version__) < (2, 14)), reason="not of 2.10 to 2.13"),
    pytest.mark.filterwarnings("default"),
]

SIZE = 4
EVERYBODY = list(range(SIZE))


@pytest.fixture(autouse=True)
def machine_with_gpus(monkeypatch):
    """Let torch take cuda:0 for a device of this machine, and options for something that can be copied."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda", 0))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    uncopied = types.SimpleNamespace(copy=copy.copy, deepcopy=lambda options: options)
    monkeypatch.setattr(c10d, "copy", uncopied, raising=False)
    monkeypatch.setenv("TORCHCOMMSHIM_AGREEMENT", "off")
    torchcommshim.uninstall()
    yield
    torchcommshim.uninstall()


def played(program, strategy, monkeypatch):
    """What `program`, a list of steps, makes on each rank: the names of its groups, None for those of others.

    A step is `("new", ranks)`, `("local", ranks)`, `("split", parts)`, which splits the world, `("nested",
    place, parts)`, which splits the group of an earlier step, or `("destroy", place)`.
    """
    monkeypatch.setenv("TORCHCOMMSHIM", strategy)
    torchcommshim.install()
    try:
        return [_names(program, rank) for rank in EVERYBODY]
    finally:
        torchcommshim.uninstall()


def _names(program, rank):
    names, groups = [], []
    with world(size=SIZE, rank=rank):
        for what, *details in program:
            group = _STEPS[what](rank, groups, *details)
            group = None if group in (dist.GroupMember.NON_GROUP_MEMBER, None) else group
            groups.append(group)
            names.append(None if group is None or what == "destroy" else c10d._world.pg_names[group])
    return names


def _local(rank, groups, ranks):
    return dist.new_group(ranks, use_local_synchronization=True) if rank in ranks else None


def _nested(rank, groups, place, parts):
    return dist.split_group(groups[place], parts) if groups[place] is not None else None


def _destroy(rank, groups, place):
    if groups[place] is not None:
        dist.destroy_process_group(groups[place])


_STEPS = {
    "new": lambda rank, groups, ranks: dist.new_group(ranks),
    "local": _local,
    "split": lambda rank, groups, parts: dist.split_group(None, parts),
    "nested": _nested,
    "destroy": _destroy,
}


def members(program):
    """For each step that makes groups, the ranks of each of them in the world."""
    of_step = []
    for what, *details in program:
        if what in ("new", "local"):
            of_step.append([tuple(details[0])])
        elif what == "split":
            of_step.append([tuple(part) for part in details[0]])
        elif what == "nested":
            place, parts = details
            of_step.append(
                [tuple(group[each] for each in part) for group in of_step[place] for part in parts]
            )
        else:
            of_step.append([])
    return of_step


def differing(program, names):
    """The groups whose ranks have given them different names."""
    return [
        ranks
        for step, groups in enumerate(members(program))
        for ranks in groups
        if len({names[rank][step] for rank in ranks}) != 1
    ]


EVEN = [("new", [0, 1]), ("new", [2, 3]), ("split", [[0, 1], [2, 3]]), ("split", [[0, 2], [1, 3]])]
UNEVEN = [("new", [0]), ("new", [1]), ("split", [EVERYBODY])]
PARTIAL = [("split", [[0, 1, 2]]), ("split", [[0, 2], [1, 3]]), ("new", EVERYBODY)]
LOCAL = [("local", [0, 1]), ("split", [[0, 2], [1, 3]]), ("new", EVERYBODY)]
NESTED = [("new", [0, 1]), ("nested", 0, [[0], [1]]), ("split", [[0, 2], [1, 3]]), ("new", EVERYBODY)]
GONE = [("new", [0]), ("destroy", 0), ("new", [1, 2]), ("split", [[0, 1], [2, 3]])]
TWICE = [("split", [[0, 1], [2, 3]]), ("destroy", 0), ("split", [[0, 1], [2, 3]])]
FAULTY = {"uneven": UNEVEN, "partial": PARTIAL, "local": LOCAL, "nested": NESTED, "gone": GONE}


@pytest.mark.parametrize("strategy", ["auto", "split"])
@pytest.mark.parametrize("program", [EVEN, *FAULTY.values(), TWICE])
def test_names_are_alike(monkeypatch, program, strategy):
    """All ranks of a group give it one name, whatever each of them has made or destroyed before."""
    assert differing(program, played(program, strategy, monkeypatch)) == []


def test_torchs_own_names_where_they_are_alike(monkeypatch):
    """Nothing is renamed where ranks are in equally many groups, and nothing is reported."""
    own = played(EVEN, "off", monkeypatch)

    assert played(EVEN, "auto", monkeypatch) == own
    assert differing(EVEN, own) == []


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="which are struck depends on the release"
)
@pytest.mark.parametrize("name", FAULTY)
def test_without_the_shim(monkeypatch, name):
    """Without it torch 2.13 gives some group of each of these programs different names."""
    own = played(FAULTY[name], "observe", monkeypatch)

    assert (bool(differing(FAULTY[name], own)), played(FAULTY[name], "off", monkeypatch)) == (True, own)


@st.composite
def programs(draw):
    """Random programs: groups of all sorts, splits of any parent, destroys."""
    program = []
    for _ in range(draw(st.integers(1, 7))):
        made = [step for step, groups in enumerate(members(program)) if groups]
        gone = {step[1] for step in program if step[0] == "destroy"}
        alive = [step for step in made if step not in gone]
        what = draw(st.sampled_from(["new", "local", "split", *(["nested", "destroy"] if alive else [])]))
        if what in ("new", "local"):
            ranks = sorted(draw(st.sets(st.sampled_from(EVERYBODY), min_size=1)))
            program.append((what, ranks))
        elif what == "destroy":
            program.append((what, draw(st.sampled_from(alive))))
        elif what == "split":
            program.append((what, draw(partitions(SIZE))))
        else:
            place = draw(st.sampled_from(alive))
            size = min(map(len, members(program)[place]))
            program.append((what, place, draw(partitions(size))))
    return program


@st.composite
def partitions(draw, size):
    """Some of the ranks below `size`, in parts."""
    parts = defaultdict(list)
    for rank in range(size):
        parts[draw(st.integers(0, 2))].append(rank)
    left_out = draw(st.booleans()) and len(parts) > 1 and parts.popitem()
    assert left_out is not None
    return list(parts.values())


@settings(max_examples=60, deadline=None)
@given(programs())
def test_any_program(program):
    """Names are alike on all ranks of a group, and no rank has two groups of one name."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = played(program, "auto", monkeypatch)

    assert differing(program, names) == []
    for of_rank in names:
        given_ = [name for name in of_rank if name is not None]
        assert len(set(given_)) == len(given_)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="asks for a CUDA device")
@pytest.mark.parametrize(("strategy", "alike"), [("off", False), ("auto", True), ("split", True)])
def test_mesh_in_a_world_that_cannot_split(monkeypatch, strategy, alike):
    """It makes its groups by new_group, as in a world without device_id; without the shim it raises."""
    monkeypatch.setenv("TORCHCOMMSHIM", strategy)
    monkeypatch.setattr(Recorder, "supports_splitting", False)
    importlib.import_module("torch._dynamo")  # from then on it stands between the mesh and the shim
    torchcommshim.install()
    names = []
    for rank in EVERYBODY:
        with world(size=SIZE, rank=rank) as whole:
            whole.bound_device_id = DEVICE  # which torch's own ProcessGroup is, whether it can split or not
            try:
                mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
            except RuntimeError as error:
                names.append(str(error))
            else:
                names.append([mesh.get_group(name).ranks for name in ("dp", "tp")])

    expected = [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
    assert (names == expected, "does not support splitting" in str(names)) == (alike, not alike)


def test_repairs_are_counted(monkeypatch):
    """A split whose ranks are uneven is a repair; one that torch names well is none."""
    monkeypatch.setenv("TORCHCOMMSHIM", "auto")
    torchcommshim.install()
    for program in (EVEN, UNEVEN):
        _names(program, 0)

    if report.current().traits.split_names_differ:
        assert report.current().repairs == {"split-names": 1}
