# SPDX-License-Identifier: Apache-2.0
"""The catalogue: each known way in which a creation goes wrong.

NCCL's rule behind most of them: when a communicator is split, every rank of the parent makes the call
(NCCL user guide, "Creating new communicators").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable

from torchcommshim.repair.creations import ALL, COLLECTIVE, DIRECT, LOCAL, MEMBERS, NOBODY, SPLIT, Creation
from torchcommshim.repair.traits import Traits

PYTORCH = "https://github.com/pytorch/pytorch/issues/"


@dataclass(frozen=True)
class Defect:
    """A known way in which a creation goes wrong.

    Attributes:
        name: a short name, used in log lines and reports.
        title: one sentence for people.
        upstream: where it is reported.
        present: does a build with these traits have it?
        strikes: would it break this creation, on a build where it is present?
        example: a creation that it breaks; None for a defect that no creation by itself shows: it concerns
            the world, or what several ranks name in one call.
        splits: it concerns the split from the world; its remedy is to make the group without one.
        cure: what is done about a group of another defect, as the end of a sentence about it.
    """

    name: str
    title: str
    upstream: str
    present: Callable[[Traits], bool]
    strikes: Callable[[Creation, Traits], bool]
    example: Creation | None = None
    splits: bool = True
    cure: str = ""


def _has_split_source(creation: Creation, traits: Traits) -> bool:
    """Members would be handed the world to split from."""
    asked = creation.bound or (traits.split_tests_size and creation.spans_world)
    return asked and creation.world_splits != NOBODY


_NCCL = Creation(
    kind=COLLECTIVE,
    ranks=(0, 1),
    backend="nccl",
    world_size=4,
    bound=True,
    device_backend="nccl",
    world_device_backend="nccl",
    world_splits=ALL,
)

LATE_MEMBERS = Defect(
    name="late-members",
    title="non-members split the world at once, members only on first use",
    upstream=PYTORCH + "134314",
    present=lambda traits: traits.members_split_late,
    strikes=lambda creation, traits: creation.splits_by_color,
    example=_NCCL,
)

OTHER_BACKEND = Defect(
    name="other-backend",
    title="non-members split the world for a group whose backend never splits (gloo)",
    upstream=PYTORCH + "145376",
    present=lambda traits: traits.split_ignores_backend,
    strikes=lambda creation, traits: (
        creation.kind == COLLECTIVE
        and creation.bound
        and creation.world_splits == ALL
        and not creation.same_backend
    ),
    example=replace(_NCCL, backend="gloo", device_backend="gloo"),
)

# From 2.5 on, where members split at creation, a group is handed the world's device, and gloo says that it
# can be split.
NO_DEVICE_BACKEND = Defect(
    name="no-device-backend",
    title="a group without a backend for the world's device (cpu:gloo) is bound to it and raises",
    upstream=PYTORCH + "145376",
    present=lambda traits: not traits.members_split_late,
    strikes=lambda creation, traits: (
        creation.kind in (COLLECTIVE, LOCAL) and creation.bound and creation.device_backend is None
    ),
    example=replace(_NCCL, backend="cpu:gloo", device_backend=None),
)

WORLD_CANNOT_SPLIT = Defect(
    name="world-cannot-split",
    title="non-members try to split a world whose backend has no split for them (gloo bound to a device)",
    upstream=PYTORCH + "145376",
    present=lambda traits: not traits.members_split_late,
    strikes=lambda creation, traits: (
        creation.kind == COLLECTIVE and creation.bound and creation.world_splits == MEMBERS
    ),
    example=replace(
        _NCCL, backend="gloo", device_backend="gloo", world_device_backend="gloo", world_splits=MEMBERS
    ),
)

LOCAL_SPLIT = Defect(
    name="local-split",
    title="members of a use_local_synchronization group split the world without its other ranks",
    upstream=PYTORCH + "129965",
    present=lambda traits: True,
    strikes=lambda creation, traits: creation.kind == LOCAL and _has_split_source(creation, traits),
    example=replace(_NCCL, kind=LOCAL),
)

LOCAL_NAMES = Defect(
    name="local-names",
    title="ranks give one use_local_synchronization group different names and wait for each other",
    upstream=PYTORCH + "173608",
    present=lambda traits: traits.local_names_differ,
    strikes=lambda creation, traits: creation.kind == LOCAL,
    example=Creation(kind=LOCAL, ranks=(0, 1), backend="gloo", world_size=4),
    splits=False,
    cure="named alike on all its ranks",
)

DIRECT_HELPER = Defect(
    name="direct-helper",
    title="a direct call of _new_process_group_helper splits the world on some of its ranks",
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/3189",
    present=lambda traits: True,
    strikes=lambda creation, traits: creation.kind == DIRECT and _has_split_source(creation, traits),
    example=replace(_NCCL, kind=DIRECT, ranks=()),
)

WHOLE_WORLD = Defect(
    name="whole-world",
    title="a group as large as the world is split from it whether or not the world has connected",
    upstream=PYTORCH + "138781",
    present=lambda traits: traits.split_tests_size,
    strikes=lambda creation, traits: (
        creation.kind == COLLECTIVE
        and creation.spans_world
        and creation.same_backend
        and creation.world_splits != NOBODY
    ),
    example=replace(_NCCL, ranks=(0, 1, 2, 3), bound=False),
)

OWN_PARTS = Defect(
    name="own-parts",
    title="groups that one call of new_group makes, each rank naming only its own, share their store keys",
    upstream=PYTORCH + "142356",
    present=lambda traits: True,
    # Seen on one rank it is like any other call.  So every call that may be such a one is kept apart
    # (policy.py), and what else goes wrong is not put down to it.
    strikes=lambda creation, traits: False,
    splits=False,
)

EARLIER_WORLD = Defect(
    name="earlier-world",
    title="a world made anew over one store reads the keys that the one before has left there",
    upstream=PYTORCH + "114585",
    present=lambda traits: True,
    strikes=lambda creation, traits: False,  # concerns the world: anew.py
    splits=False,
)

POINT_TO_POINT = Defect(
    name="point-to-point",
    title="the first unbatched send or receive on a split group splits the world on two ranks only",
    upstream=PYTORCH + "139013",
    present=lambda traits: traits.point_to_point_splits,
    strikes=lambda creation, traits: creation.splits_by_color,
    example=_NCCL,
)

_SPLIT = replace(_NCCL, kind=SPLIT, ranks=(0, 1, 2, 3))

SPLIT_NAMES = Defect(
    name="split-names",
    title="ranks that are in different numbers of groups give one group of split_group different names",
    upstream=PYTORCH + "189073",
    present=lambda traits: traits.split_names_differ,
    strikes=lambda creation, traits: creation.kind == SPLIT and not creation.even,
    example=replace(_SPLIT, even=False),
    splits=False,
    cure="named alike on all its ranks",
)

SPLIT_COUNT = Defect(
    name="split-count",
    title="split_group counts its groups on some ranks only, by which all ranks name later groups",
    upstream=PYTORCH + "145376",
    present=lambda traits: traits.split_counts_parent,
    strikes=lambda creation, traits: (
        creation.kind == SPLIT
        and not (creation.spans_world and not (traits.split_counts_members and creation.partial))
    ),
    example=replace(_SPLIT, ranks=(0, 1), partial=True),
    splits=False,
    cure="counted alike on all ranks",
)

SPLIT_KEYS = Defect(
    name="split-keys",
    title="the groups of one split_group share a name, so the gloo parts of them connect to each other",
    upstream=PYTORCH + "145376",
    present=lambda traits: traits.split_names_shared and not traits.split_counts_members,
    strikes=lambda creation, traits: (
        creation.kind == SPLIT and creation.divides and "gloo" in creation.backend
    ),
    example=replace(_SPLIT, backend="cpu:gloo,cuda:nccl", divides=True),
    splits=False,
    cure="given a name of its own",
)

SPLIT_BACKEND = Defect(
    name="split-backend",
    title="split_group of a parent made with cuda:nccl or cpu:gloo,cuda:nccl raises",
    upstream=PYTORCH + "159200",
    present=lambda traits: traits.split_wants_one_backend,
    strikes=lambda creation, traits: (
        creation.kind == SPLIT and ":" in creation.backend and creation.device_backend == "nccl"
    ),
    example=replace(_SPLIT, backend="cpu:gloo,cuda:nccl"),
    splits=False,
    cure="split with the backend of the world's device",
)

MESH_CANNOT_SPLIT = Defect(
    name="mesh-cannot-split",
    title="a DeviceMesh splits a world that has a device_id, and raises where its backend cannot (XCCL)",
    upstream=PYTORCH + "186548",
    present=lambda traits: not traits.members_split_late,
    strikes=lambda creation, traits: (
        creation.kind == SPLIT and creation.by_mesh and creation.bound and creation.world_splits == NOBODY
    ),
    example=replace(_SPLIT, by_mesh=True, world_splits=NOBODY),
    splits=False,
    cure="made by new_group, as in a world without device_id",
)

NONBLOCKING = Defect(
    name="nonblocking",
    title="NCCL's non-blocking mode, on by default for a bound world, hangs at random",
    upstream=PYTORCH + "153960",
    present=lambda traits: traits.nonblocking_by_default,
    strikes=lambda creation, traits: False,  # concerns the world: worlds.py sets the switch before it exists
    splits=False,
)

CATALOGUE = (
    LATE_MEMBERS,
    OTHER_BACKEND,
    NO_DEVICE_BACKEND,
    WORLD_CANNOT_SPLIT,
    LOCAL_SPLIT,
    LOCAL_NAMES,
    DIRECT_HELPER,
    WHOLE_WORLD,
    OWN_PARTS,
    EARLIER_WORLD,
    POINT_TO_POINT,
    SPLIT_NAMES,
    SPLIT_COUNT,
    SPLIT_KEYS,
    SPLIT_BACKEND,
    MESH_CANNOT_SPLIT,
    NONBLOCKING,
)


def striking(creation: Creation, traits: Traits) -> tuple[Defect, ...]:
    """The defects that would break `creation` on a build with `traits`, in catalogue order."""
    return tuple(
        defect for defect in CATALOGUE if defect.present(traits) and defect.strikes(creation, traits)
    )
