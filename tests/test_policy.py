# SPDX-License-Identifier: Apache-2.0
"""What is decided about a creation, for each kind of build and each strategy."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchcommshim.repair.creations import ALL, COLLECTIVE, DIRECT, LOCAL, MEMBERS, SPLIT, Creation
from torchcommshim.repair.defects import CATALOGUE, striking
from torchcommshim.repair.policy import INDEPENDENT, NONE, NOTHING, SPLIT_NOW, Decision, decide
from torchcommshim.repair.traits import Traits

pytestmark = pytest.mark.once

TORCH_2_4 = Traits(members_split_late=True, split_ignores_backend=True, split_tests_size=True)
TORCH_2_5 = replace(TORCH_2_4, members_split_late=False, point_to_point_splits=True)
TORCH_2_11 = Traits(split_ignores_backend=True, local_names_differ=True)
TORCH_2_15 = Traits(local_names_differ=True)
BUILDS = [TORCH_2_4, TORCH_2_5, TORCH_2_11, TORCH_2_15]

NCCL = Creation(
    kind=COLLECTIVE,
    ranks=(0, 1),
    backend="nccl",
    world_size=4,
    bound=True,
    device_backend="nccl",
    world_device_backend="nccl",
    world_splits=ALL,
)
WHOLE = replace(NCCL, ranks=(0, 1, 2, 3))
GLOO = replace(NCCL, backend="gloo", device_backend="gloo")
CPU_GLOO = replace(NCCL, backend="cpu:gloo", device_backend=None)
GLOO_WORLD = replace(GLOO, world_device_backend="gloo", world_splits=MEMBERS)
UNBOUND = replace(NCCL, bound=False)
LOCAL_NCCL = replace(NCCL, kind=LOCAL)
LOCAL_GLOO_UNBOUND = replace(GLOO, kind=LOCAL, bound=False)
DIRECT_NCCL = replace(NCCL, kind=DIRECT, ranks=())


@pytest.mark.parametrize(
    ("creation", "expected"),
    [
        # What each release needs: 2.4, 2.5, 2.11, 2.15.
        (NCCL, [INDEPENDENT, INDEPENDENT, NONE, NONE]),
        (WHOLE, [INDEPENDENT, INDEPENDENT, NONE, NONE]),
        (GLOO, [INDEPENDENT, INDEPENDENT, INDEPENDENT, NONE]),
        (CPU_GLOO, [INDEPENDENT, INDEPENDENT, INDEPENDENT, INDEPENDENT]),
        (GLOO_WORLD, [NONE, INDEPENDENT, INDEPENDENT, INDEPENDENT]),
        (UNBOUND, [NONE, NONE, NONE, NONE]),
        (replace(WHOLE, bound=False), [INDEPENDENT, INDEPENDENT, NONE, NONE]),
        (LOCAL_NCCL, [INDEPENDENT, INDEPENDENT, INDEPENDENT, INDEPENDENT]),
        (LOCAL_GLOO_UNBOUND, [NONE, NONE, NONE, NONE]),
        (DIRECT_NCCL, [INDEPENDENT, INDEPENDENT, INDEPENDENT, INDEPENDENT]),
        (replace(DIRECT_NCCL, bound=False), [NONE, NONE, NONE, NONE]),
    ],
)
def test_auto(creation, expected):
    """Auto makes independent what a defect of the build would break, and nothing else."""
    assert [decide(creation, build, "auto").remedy for build in BUILDS] == expected


@pytest.mark.parametrize(
    ("creation", "expected"),
    [
        (NCCL, [SPLIT_NOW, SPLIT_NOW, NONE, NONE]),
        (WHOLE, [SPLIT_NOW, SPLIT_NOW, NONE, NONE]),
        (GLOO, [INDEPENDENT, INDEPENDENT, INDEPENDENT, NONE]),
        (LOCAL_NCCL, [INDEPENDENT, INDEPENDENT, INDEPENDENT, INDEPENDENT]),
        (DIRECT_NCCL, [INDEPENDENT, INDEPENDENT, INDEPENDENT, INDEPENDENT]),
        (replace(WHOLE, bound=False), [INDEPENDENT, INDEPENDENT, NONE, NONE]),
    ],
)
def test_split(creation, expected):
    """Split keeps a split that all ranks can make together, and makes independent what cannot be split so."""
    assert [decide(creation, build, "split").remedy for build in BUILDS] == expected


@pytest.mark.parametrize("strategy", ["auto", "strip", "split"])
@pytest.mark.parametrize(
    ("creation", "apart"),
    [
        (NCCL, True),
        (GLOO, True),
        (UNBOUND, True),
        (WHOLE, False),
        (replace(WHOLE, bound=False), False),
        (LOCAL_NCCL, False),
        (DIRECT_NCCL, False),
    ],
)
def test_apart(creation, apart, strategy):
    """A call in which other ranks may name others is kept apart, bound or not, on every build."""
    assert [decide(creation, build, strategy).apart for build in BUILDS] == [apart] * len(BUILDS)


def test_what_is_kept_apart_is_no_repair():
    """A call that no defect strikes is kept apart without a word: no defect is its reason."""
    assert decide(UNBOUND, TORCH_2_11, "auto") == Decision(apart=True)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("creation", [NCCL, GLOO, LOCAL_NCCL, LOCAL_GLOO_UNBOUND, DIRECT_NCCL])
def test_observe(build, creation):
    """Observe decides as auto does."""
    assert decide(creation, build, "observe") == decide(creation, build, "auto")


@pytest.mark.parametrize("creation", [LOCAL_NCCL, LOCAL_GLOO_UNBOUND])
def test_names(creation):
    """Local-synchronization groups are renamed, bound or not, on builds whose names differ between ranks."""
    assert [decide(creation, build, "auto").rename for build in BUILDS] == [False, False, True, True]


@pytest.mark.parametrize(("creation", "expected"), [(CPU_GLOO, True), (GLOO, False), (NCCL, False)])
def test_unbind(creation, expected):
    """Only a group without a backend for the world's device is made without that device."""
    assert decide(creation, TORCH_2_5, "auto").unbind is expected


@pytest.mark.parametrize("defect", [defect for defect in CATALOGUE if defect.example], ids=lambda d: d.name)
def test_example(defect):
    """Each defect breaks its own example on the builds that have it, and on no other."""
    assert [defect in striking(defect.example, build) for build in BUILDS] == [
        defect.present(build) for build in BUILDS
    ]


def test_membership_is_not_recorded():
    """A creation holds nothing that tells members from others, so no decision can depend on it."""
    assert {field.name for field in fields(Creation)} == {
        "kind",
        "ranks",
        "backend",
        "world_size",
        "bound",
        "device_backend",
        "world_device_backend",
        "world_splits",
        "partial",
        "divides",
        "by_mesh",
        "even",
    }


TORCH_2_8 = Traits(split_counts_parent=True, split_counts_members=True, split_wants_one_backend=True)
TORCH_2_9 = Traits(split_counts_parent=True)
TORCH_2_13 = Traits(split_names_differ=True)
SPLIT_WORLD = replace(WHOLE, kind=SPLIT)
UNEVEN, PARTIAL = replace(SPLIT_WORLD, even=False), replace(SPLIT_WORLD, partial=True)


@pytest.mark.parametrize(
    ("creation", "expected"),
    [
        (SPLIT_WORLD, [[], [], []]),
        (UNEVEN, [[], [], ["split-names"]]),
        (PARTIAL, [["split-count"], [], []]),
        (replace(SPLIT_WORLD, ranks=(0, 1)), [["split-count"], ["split-count"], []]),
        (replace(SPLIT_WORLD, backend="cpu:gloo,cuda:nccl"), [["split-backend"], [], []]),
    ],
)
def test_splits(creation, expected):
    """What strikes a `split_group` of 2.8, 2.9 and 2.13; none is made without the split."""
    builds = [TORCH_2_8, TORCH_2_9, TORCH_2_13]
    decisions = [decide(creation, build, strategy) for build in builds for strategy in ("auto", "split")]

    assert [[defect.name for defect in each.defects] for each in decisions[::2]] == expected
    assert {each.remedy for each in decisions} == {NONE}


def test_healthy_creation_is_left_alone():
    """Nothing at all is decided about a creation that works, whatever other ranks name in it."""
    assert decide(WHOLE, TORCH_2_11, "auto") == NOTHING


@given(
    st.sampled_from([NCCL, WHOLE, GLOO, CPU_GLOO, GLOO_WORLD, UNBOUND, LOCAL_NCCL, LOCAL_GLOO_UNBOUND]),
    st.sampled_from(BUILDS),
    st.sampled_from(["auto", "strip", "split", "observe"]),
    st.permutations(range(8)),
    st.permutations(range(8)),
    st.integers(1, 8),
)
def test_only_the_number_of_ranks_matters(creation, traits, strategy, some, others, number):
    """Groups of as many ranks get one decision: it is made once for all of them."""
    one, other = (replace(creation, ranks=tuple(ranks[:number]), world_size=8) for ranks in (some, others))

    assert decide(one, traits, strategy) == decide(other, traits, strategy)
