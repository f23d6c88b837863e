# SPDX-License-Identifier: Apache-2.0
"""The pure model reproduces what was measured without the shim, and proves the policy with it.

M0 to M15 are small programs that were run on real NCCL (M11 to M15: on real torch code without a GPU).
M7 is a deadlock of the program's own making, with or without device_id, and not of this family.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from conftest import run as run_command
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from torchcommshim.repair import policy, splits
from torchcommshim.repair.creations import COLLECTIVE, DIRECT, LOCAL, MEMBERS, NOBODY, WORLD
from torchcommshim.repair.splits import (
    CLOSE,
    CONNECT,
    COUNTER,
    ERROR,
    HANG,
    NOCOLOR,
    OK,
    REGISTERED,
    SPLIT,
    USE,
    WRONG,
    AllReduce,
    Create,
    Program,
    SendReceive,
    SplitCall,
    World,
    run,
)
from torchcommshim.repair.traits import Traits

pytestmark = pytest.mark.once

# Releases that make groups in the same way, and the salt of their local-synchronization names.
EARLY = Traits(split_ignores_backend=True, split_tests_size=True, point_to_point_splits=True)
LATER = Traits(split_ignores_backend=True, local_names_differ=True)
COUNTS = {"split_counts_parent": True, "split_names_shared": True}
BUILDS = {
    "2.4": (replace(EARLY, members_split_late=True, point_to_point_splits=False), COUNTER),
    "2.5": (replace(EARLY, **COUNTS, split_counts_members=True), COUNTER),
    "2.8": (replace(LATER, **COUNTS, split_counts_members=True, split_wants_one_backend=True), REGISTERED),
    "2.9": (replace(LATER, **COUNTS), REGISTERED),
    "2.13": (replace(LATER, split_names_differ=True), REGISTERED),
    "2.14": (replace(LATER, split_counts_parent=True), COUNTER),
    "2.15": (replace(LATER, split_counts_parent=True, split_ignores_backend=False), COUNTER),
}
# The measured table's other columns.
BUILDS["2.11"] = BUILDS["2.13"]
# 2.11 with the members' device withheld, which makes it split as late as 2.4.
BUILDS["2.11 late"] = (replace(LATER, members_split_late=True), REGISTERED)


def play(program, build, strategy=None):
    traits, salt = BUILDS[build]
    return run(program, traits, strategy, salt)


# -- the measured programs ---------------------------------------------------------------------------


def m0():
    program = Program(World(4))
    program.new_group([0])
    program.all_reduce()
    return program


def m1():
    program = Program(World(4))
    pair = program.new_group([0, 1])
    program.all_reduce()
    program.all_reduce(pair)
    return program


def m2():
    program = Program(World(4))
    groups = [program.new_group([0, 2]), program.new_group([1, 3])]
    for group in groups:
        program.all_reduce(group)
    return program


def m3():
    program = Program(World(4))
    groups = [program.new_group([0, 1]), program.new_group([0, 2])]
    for group in groups:
        program.all_reduce(group)
    return program


def m4():
    program = Program(World(4))
    program.new_group([0, 1], "gloo")
    program.all_reduce()
    return program


def m5():
    program = Program(World(4))
    program.new_group([0, 1], "gloo")
    middle = program.new_group([0, 2])
    program.new_group([2, 3], "gloo")
    program.all_reduce(middle)
    return program


def m6(bound=True):
    program = Program(World(4, bound=bound))
    program.all_reduce(program.new_group([0, 1], kind=LOCAL))
    return program


def m9():
    """`init_device_mesh` (2, 2): rows and columns."""
    program = Program(World(4))
    groups = [program.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    for group in groups:
        program.all_reduce(group)
    return program


def m9_by_split_group():
    """The same in a release whose mesh splits a dimension in one call."""
    program = Program(World(4))
    for partition in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        program.all_reduce(program.own_groups(partition))
    return program


def m10():
    program = Program(World(4))
    program.all_reduce(program.new_group([0, 1], kind=DIRECT))
    return program


def m11():
    program = Program(World(3, "gloo", bound=False, splits=NOBODY))
    program.new_group([0, 1], "gloo")
    program.new_group([1, 2], "gloo", LOCAL)
    return program


def m11_reversed():
    program = Program(World(3, "gloo", bound=False, splits=NOBODY))
    program.new_group([0, 1], "gloo", LOCAL)
    program.new_group([0, 2], "gloo")
    return program


def m12():
    program = Program(World(4, "gloo", splits=MEMBERS))
    program.new_group([0], "gloo")
    program.all_reduce()
    return program


def m13():
    program = Program(World(4))
    program.all_reduce(program.new_group([0, 1], "cpu:gloo"))
    program.all_reduce()
    return program


def m14(bound=True):
    program = Program(World(4, bound=bound))
    program.all_reduce(program.own_groups([[0, 1], [2, 3]]))
    return program


def m14_unbound():
    return m14(bound=False)


def m15():
    program = Program(World(4))
    program.new_group([0, 1], "gloo")
    program.new_group([2, 3], "gloo")
    program.all_reduce(program.new_group([0, 2]))
    return program


MEASURED = [
    (m0, "2.4", HANG),
    (m0, "2.11", OK),
    (m0, "2.14", OK),
    (m1, "2.4", HANG),
    (m1, "2.11", OK),
    (m1, "2.11 late", HANG),  # M8
    (m2, "2.4", OK),  # by luck: unmatched calls without a colour pair up
    (m2, "2.11", OK),
    (m3, "2.4", WRONG),
    (m3, "2.11", OK),
    (m3, "2.14", OK),
    (m4, "2.4", HANG),
    (m4, "2.11", HANG),
    (m4, "2.14", HANG),
    (m4, "2.15", OK),
    (m5, "2.4", HANG),
    (m5, "2.11", WRONG),
    (m5, "2.14", WRONG),
    (m5, "2.15", OK),
    (m6, "2.4", HANG),
    (m6, "2.11", HANG),
    (m6, "2.14", HANG),
    (m6, "2.15", HANG),
    (lambda: m6(bound=False), "2.11", OK),
    (m9, "2.4", OK),
    (m9_by_split_group, "2.11", OK),
    (m9, "2.14", OK),
    (m10, "2.11", HANG),
    (m10, "2.15", HANG),
    (m11, "2.13", HANG),
    (m11, "2.14", OK),
    (m11_reversed, "2.13", OK),
    (m11_reversed, "2.14", HANG),
    (m12, "2.13", ERROR),
    (m13, "2.13", ERROR),
    (m14, "2.4", OK),
    (m14, "2.13", OK),
    (m14_unbound, "2.4", HANG),
    (m14_unbound, "2.13", HANG),
    (m15, "2.13", OK),  # by luck
]
PROVEN = ("2.4", "2.5", "2.8", "2.9", "2.13", "2.14", "2.15")
# gloo takes part in splitting, after a fashion, only in later releases.
GLOO_NEVER_SPLITS = ("2.4", "2.5")
# Up to 2.5, the first unbatched send on a split group splits the world.
SENDS_SPLIT = ("2.5",)
CURED = [
    (program, build)
    for program in dict.fromkeys(program for program, _, _ in MEASURED)
    for build in PROVEN
    if program is not m12 or build not in GLOO_NEVER_SPLITS
]


@pytest.mark.parametrize(("program", "build", "verdict"), MEASURED)
def test_measured_verdict(program, build, verdict):
    """Without the shim each measured program ends as it did when it was measured."""
    outcome = play(program(), build)

    assert outcome.verdict == verdict, outcome


@pytest.mark.parametrize("strategy", ["auto", "strip", "split"])
@pytest.mark.parametrize(("program", "build"), CURED)
def test_measured_programs_are_cured(program, build, strategy):
    """With the shim each of them ends well, in every release and with every strategy."""
    outcome = play(program(), build, strategy)

    assert outcome.verdict == OK, outcome


def waits(outcome):
    """Where each rank waits, and for which ranks."""
    return {wait.rank: (wait.at, wait.step, wait.missing) for wait in outcome.waiting}


@pytest.mark.parametrize("build", ["2.4", "2.11 late"])
def test_m1_places(build):
    """M1, M8: the outsiders wait in their split for the members, and these in the world for them."""
    pair = Create("group 1", (0, 1))

    assert waits(play(m1(), build)) == {
        0: (USE, AllReduce(), (2, 3)),
        1: (USE, AllReduce(), (2, 3)),
        2: (NOCOLOR, pair, (0, 1)),
        3: (NOCOLOR, pair, (0, 1)),
    }


@pytest.mark.parametrize("build", ["2.4", "2.11", "2.14"])
def test_m4_places(build):
    """M4: ranks outside a gloo group wait in a split that its members never make."""
    outcome = play(m4(), build)

    assert {rank: at for rank, (at, _, _) in waits(outcome).items()} == {
        0: USE,
        1: USE,
        2: NOCOLOR,
        3: NOCOLOR,
    }


@pytest.mark.parametrize(("build", "kind"), [("2.4", AllReduce), ("2.11", Create), ("2.15", Create)])
def test_m6_places(build, kind):
    """M6: members split alone, up to 2.4 on first use, later inside `new_group`."""
    outcome = play(m6(), build)

    assert [(wait.rank, wait.at, type(wait.step), wait.missing) for wait in outcome.waiting] == [
        (0, SPLIT, kind, (2, 3)),
        (1, SPLIT, kind, (2, 3)),
    ]


def wrong_sums(outcome):
    return [(entry.rank, entry.value, entry.expected) for entry in outcome.wrong_sums]


def test_m3_sums():
    """M3: over [0, 1] rank 0 gets 1 and rank 1 gets 2 instead of 3, without an error."""
    assert wrong_sums(play(m3(), "2.4")) == [(0, 1, 3), (1, 2, 3)]


def test_m3_rounds():
    """M3: in the first round rank 0's split for [0, 1] meets only calls that name no group."""
    outcome = play(m3(), "2.4")

    assert outcome.rounds[0] == (
        SplitCall(2, (0, 1)),
        SplitCall(1, None),
        SplitCall(0, None),
        SplitCall(0, None),
    )
    assert [communicator.ranks for communicator in outcome.wrong_communicators] == [(0,), (1,)]


def test_m5_places():
    """M5 on 2.4: a gloo member waits for the other, which waits in a split for the first."""
    outcome = play(m5(), "2.4")

    assert {rank: at for rank, (at, _, _) in waits(outcome).items()} == {
        0: SPLIT,
        1: NOCOLOR,
        2: CONNECT,
        3: NOCOLOR,
    }


@pytest.mark.parametrize("build", ["2.11", "2.14"])
def test_m5_sums(build):
    """M5: over [0, 2] rank 0 gets 1 and rank 2 gets 3 instead of 4."""
    assert wrong_sums(play(m5(), build)) == [(0, 1, 4), (2, 3, 4)]


@pytest.mark.parametrize(("program", "build"), [(m11, "2.13"), (m11_reversed, "2.14")])
def test_m11_places(program, build):
    """M11: the group's two ranks wait for each other in the store, under different names."""
    outcome = play(program(), build)
    left, right = program().steps[1 if program is m11 else 0][-1].ranks

    assert [(wait.rank, wait.at, wait.missing) for wait in outcome.waiting] == [
        (left, CONNECT, (right,)),
        (right, CONNECT, (left,)),
    ]


def test_m12_errors():
    """M12: every rank outside the group asks gloo for a split that it does not have."""
    outcome = play(m12(), "2.13")

    assert {rank: error.split(":")[0] for rank, error in outcome.raised.items()} == dict.fromkeys(
        (1, 2, 3), "AttributeError"
    )


def test_m13_errors():
    """M13: members raise for want of a backend for the device, outsiders wait in a split."""
    outcome = play(m13(), "2.13")

    assert sorted(outcome.raised) == [0, 1]
    assert {rank: at for rank, (at, _, _) in waits(outcome).items()} == {2: NOCOLOR, 3: NOCOLOR}


def test_m13_in_2_15():
    """In 2.15 outsiders no longer split for such a group, but members still raise."""
    assert sorted(play(m13(), "2.15").raised) == [0, 1]


def test_m14_without_split():
    """M14: made without a split under one shared name, the two groups' ranks are mixed up."""
    outcome = play(m14(bound=False), "2.4")

    assert [communicator.ranks for communicator in outcome.wrong_communicators] == [(1, 2)]


def test_groups_of_one_under_one_name():
    """Groups of one rank may share their store keys: nobody has to find anybody."""
    program = Program(World(3, bound=False))
    program.all_reduce(program.own_groups([[0], [1], [2]]))

    assert play(program, "2.13").verdict == OK


def test_keys_of_an_earlier_group():
    """A group that comes later to keys that another has used finds an address where nobody answers."""
    program = Program(World(4, bound=False))
    groups = program.own_groups([[0, 1], [2, 3]])
    for rank in (0, 1):
        program.steps[rank].append(AllReduce(groups))
    program.all_reduce()
    for rank in (2, 3):
        program.steps[rank].append(AllReduce(groups))

    assert waits(play(program, "2.13")) == dict.fromkeys((2, 3), (CONNECT, AllReduce(groups), ()))


def test_m15_on_some_ranks():
    """M15: the remedy on two of four ranks breaks a program that ran by luck without it."""
    traits, salt = BUILDS["2.13"]
    outcome = run(m15(), traits, ["auto", "auto", None, None], salt)

    assert outcome.verdict == HANG


def sending(world):
    program = Program(world)
    whole = program.new_group(range(world.size))
    program.all_reduce()
    program.send(whole, 0, 1)
    program.all_reduce()
    return program


@pytest.mark.parametrize(("build", "verdict"), [("2.4", OK), ("2.5", HANG), ("2.13", OK)])
@pytest.mark.parametrize("world", [World(4), World(4, bound=False)])
def test_sends_through_split(build, verdict, world):
    """On 2.5 the first unbatched send on a split group splits the world on two ranks only.

    From 2.3 to 2.5 a group of the whole world is split even from one that is not bound, once connected.
    """
    assert play(sending(world), build).verdict == verdict


def test_sends_before_the_world_is_connected():
    """A world that is not connected yet has nothing to split from: the two ranks connect by the store."""
    program = Program(World(4, bound=False))
    program.send(program.new_group(range(4)), 0, 1)

    assert play(program, "2.5").verdict == OK


def test_direct_groups_in_one_round():
    """Direct calls tell torch no ranks, so those of one round share a colour and a communicator."""
    program = Program(World(4))
    groups = [program.new_group(ranks, kind=DIRECT) for ranks in ([0, 1], [2, 3])]
    for group in groups:
        program.all_reduce(group)
    outcome = play(program, "2.13")

    assert [(communicator.ranks, communicator.meant) for communicator in outcome.wrong_communicators] == [
        ((0, 1, 2, 3), ((0, 1), (2, 3)))
    ]


@pytest.mark.parametrize("build", SENDS_SPLIT)
@pytest.mark.parametrize(
    "strategy",
    [
        None,
        "auto",
        "strip",
        "split",
    ],
)
def test_sends_in_own_groups(build, strategy):
    """Where each rank names only its own group, sends at the same time in all of them are right."""
    program = Program(World(4))
    groups = program.own_groups([[0, 1], [2, 3]])
    program.send(groups, 0, 1)
    program.send(groups, 2, 3)

    assert play(program, build, strategy).verdict == OK


def test_outcome_for_people():
    """An outcome reads as sentences that name ranks, steps and places."""
    assert str(play(m1(), "2.4")).splitlines() == [
        "hang",
        "rank 0 waits in all_reduce on world (a collective or send) for ranks 2,3",
        "rank 1 waits in all_reduce on world (a collective or send) for ranks 2,3",
        "rank 2 waits in new_group [0,1] nccl (perform_nocolor_split) for ranks 0,1",
        "rank 3 waits in new_group [0,1] nccl (perform_nocolor_split) for ranks 0,1",
    ]


# -- split_group ---------------------------------------------------------------------------------------


def uneven(backend):
    """The embedding group of a pipeline, then a mesh of one dimension (pytorch#189073, #190396)."""
    program = Program(World(4, backend))
    program.new_group([0])
    for parts in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]):
        program.split_group(parts)
    program.destroy()
    return program


def partial_then_gloo():
    """Ranks that a split leaves out count no group (pytorch#145376)."""
    program = Program(World(4))
    program.split_group([[0, 1]])
    program.all_reduce(program.new_group([0, 1, 2, 3], "gloo"))
    return program


def nested_then_gloo():
    """Half of the world splits itself, and then all ranks make a group."""
    program = Program(World(4))
    program.split_group([[0], [1]], program.new_group([0, 1]))
    program.all_reduce(program.new_group([0, 1, 2, 3], "gloo"))
    return program


def two_parts():
    """Both parts of a mixed world connect their gloo halves."""
    program = Program(World(4, "cpu:gloo,cuda:nccl"))
    program.split_group([[0, 1], [2, 3]])
    return program


SPLITS = {
    "uneven, mixed": (uneven("cpu:gloo,cuda:nccl"), "2.13", HANG, {CONNECT, SPLIT}),
    "uneven, nccl": (uneven("nccl"), "2.13", HANG, {CLOSE}),
    "uneven, 2.14": (uneven("nccl"), "2.14", OK, set()),
    "partial": (partial_then_gloo(), "2.8", HANG, {CONNECT}),
    "nested": (nested_then_gloo(), "2.9", HANG, {CONNECT}),
    "nested, 2.14": (nested_then_gloo(), "2.14", HANG, {CONNECT}),
    "one name": (two_parts(), "2.9", HANG, {CONNECT, SPLIT}),
    "one backend": (two_parts(), "2.8", ERROR, set()),
}


@pytest.mark.parametrize(("program", "build", "verdict", "places"), SPLITS.values(), ids=SPLITS)
def test_splits_without_and_with(program, build, verdict, places):
    """What goes wrong with splits, and where ranks wait then; with the shim all is well."""
    bare = play(program, build)

    assert (bare.verdict, {wait.at for wait in bare.waiting}) == (verdict, places), str(bare)
    assert [play(program, build, strategy).verdict for strategy in ("auto", "split")] == [OK, OK]


def test_split_of_a_stripped_world():
    """It raises, as it does without device_id; a mesh makes its groups by new_group there."""
    explicit, mesh = Program(World(4)), Program(World(4))
    explicit.split_group([[0, 1], [2, 3]])
    mesh.all_reduce(mesh.split_group([[0, 1], [2, 3]], by_mesh=True))

    assert [play(program, "2.13", "strip").verdict for program in (explicit, mesh)] == [ERROR, OK]
    assert [play(program, "2.4", "auto").verdict for program in (explicit, mesh)] == [ERROR, OK]


def test_split_that_a_rank_misses():
    """All ranks of the parent come to its split: those that do wait for the one that does not."""
    program = Program(World(4))
    parent = program.new_group([0, 1, 2])
    program.split_group([[0, 1], [2]], parent)
    program.steps[2].pop()
    waiting = play(program, "2.13", "auto").waiting

    assert [(wait.rank, wait.at, wait.missing) for wait in waiting] == [(0, SPLIT, (2,)), (1, SPLIT, (2,))]


# -- any program -------------------------------------------------------------------------------------

NCCL_BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
BACKENDS = (*NCCL_BACKENDS, "gloo", "cpu:gloo")


@st.composite
def worlds(draw, build, sizes):
    """Every kind of world that a release can make."""
    size, bound = draw(sizes), draw(st.booleans())
    backend = draw(st.sampled_from((*NCCL_BACKENDS, "gloo")))
    if backend in NCCL_BACKENDS:
        return World(size, backend, bound)
    splits = NOBODY if build in GLOO_NEVER_SPLITS else draw(st.sampled_from((NOBODY, MEMBERS)))
    return World(size, backend, bound, splits)


def subsets(size):
    """One or more of `size` ranks; drawn as one number, which is much quicker than a set."""
    return st.integers(1, 2**size - 1).map(lambda bits: [rank for rank in range(size) if bits >> rank & 1])


@st.composite
def partitions(draw, size):
    """`size` ranks in one to four parts."""
    first, second = draw(st.just([]) | subsets(size)), draw(st.just([]) | subsets(size))
    part_of = [(rank in first, rank in second) for rank in range(size)]
    return [[rank for rank in range(size) if part_of[rank] == part] for part in sorted(set(part_of))]


@st.composite
def parts_of(draw, size):
    """Some or all of `size` ranks, in one to four parts."""
    parts = draw(partitions(size))
    return parts[: draw(st.integers(1, len(parts)))]


@st.composite
def programs(draw, build, sizes=st.integers(2, 6) | st.integers(2, 16), meshes=False):
    """Programs that follow the rules: ranks agree about the order of what they do together.

    In one call each rank may name only its own group.

    A bound world is split, and so are its groups; `meshes`: only the world is, by a DeviceMesh, which can do
    without.  Not after ranks have each named their own group: the names of splits follow from the lists.
    """
    world = draw(worlds(build, sizes))
    program = Program(world)
    groups = {WORLD: [list(world.ranks)]}  # the ranks of each; of several groups where ranks name their own
    splits_by_colour = world.bound and world.backend in NCCL_BACKENDS
    kinds = (
        "new_group",
        "new_group",
        LOCAL,
        DIRECT,
        "own",
        "all_reduce",
        "all_reduce",
        "send",
        "split",
        "destroy",
    )
    splittable = {WORLD} if splits_by_colour else set()
    named_own = False
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=14)):
        if kind == "all_reduce":
            program.all_reduce(draw(st.sampled_from(sorted(groups))))
        elif kind == "send":
            label = draw(st.sampled_from(sorted(groups)))
            first = draw(st.integers(0, world.size - 1))
            for ranks in groups[label]:
                if len(ranks) > 1:
                    program.send(label, *(ranks[(first + n) % len(ranks)] for n in (0, 1)))
        elif kind == "destroy":
            if len(groups) > 1:
                label = draw(st.sampled_from(sorted(set(groups) - {WORLD})))
                program.destroy(label)
                groups.pop(label)
                splittable.discard(label)
        elif kind == "split":
            if splittable and not named_own:
                parent = WORLD if meshes else draw(st.sampled_from(sorted(splittable)))
                parts = draw(parts_of(min(map(len, groups[parent]))))
                made = program.split_group(parts, parent, by_mesh=meshes)
                groups[made] = [[ranks[each] for each in part] for ranks in groups[parent] for part in parts]
                if len(groups[made]) == 1:
                    splittable.add(made)
        elif kind != "own":
            ranks = draw(subsets(world.size) | st.just(list(world.ranks)))
            made = kind if kind in (LOCAL, DIRECT) else COLLECTIVE
            groups[program.new_group(ranks, draw(st.sampled_from(BACKENDS)), made)] = [ranks]
        else:
            partition, named_own = draw(partitions(world.size)), True
            groups[program.own_groups(partition, draw(st.sampled_from(BACKENDS)))] = partition
    if draw(st.booleans()):
        for label in groups:
            program.all_reduce(label)
    if draw(st.booleans()):
        program.destroy()
    return program


proving = settings(
    deadline=None, max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("strategy", ["auto", "strip", "split"])
@pytest.mark.parametrize("build", PROVEN)
def test_no_program_goes_wrong_with_the_shim(build, strategy):
    """Nobody waits for ever or raises; each communicator holds its group's ranks, and each sum is right."""

    @proving
    @given(programs(build, meshes=strategy == "strip" or build == "2.4"))
    def check(program):
        outcome = play(program, build, strategy)

        assert outcome.waiting == (), str(outcome)
        assert outcome.raised == {}, str(outcome)
        assert outcome.wrong_communicators == (), str(outcome)
        assert outcome.wrong_sums == (), str(outcome)
        collectives = [step for steps in program.steps for step in steps if isinstance(step, AllReduce)]
        assert len(outcome.sums) == len(collectives)

    check()


@pytest.mark.parametrize("build", PROVEN)
def test_observing_changes_nothing(build):
    """`observe` and `off` leave every program as it is without the shim."""

    @settings(proving, max_examples=30)
    @given(programs(build))
    def check(program):
        bare = play(program, build)

        assert play(program, build, "observe") == bare
        assert play(program, build, "off") == bare

    check()


def counterexample(build, strategy, goes_wrong=lambda outcome: outcome.verdict != OK):
    """How a program that goes wrong ends; fails if none is found."""
    search = settings(proving, max_examples=3000, database=None, phases=[Phase.generate])
    small = programs(build, st.integers(2, 4))
    program = find(small, lambda program: goes_wrong(play(program, build, strategy)), settings=search)
    return play(program, build, strategy)


@pytest.mark.parametrize("build", PROVEN)
def test_programs_go_wrong_without_the_shim(build):
    """The property can fail: without the shim, the same search finds such a program in every release."""
    assert counterexample(build, None).verdict != OK


def test_sums_are_wrong_without_the_shim():
    """And where unmatched splits pair up, it finds wrong sums."""
    assert counterexample("2.4", None, lambda outcome: outcome.wrong_sums).wrong_sums != ()


NO_REMEDY = {"remedy": policy.NONE, "unbind": False, "rename": False}
FORGOTTEN = {
    "a remedy for gloo groups": ("2.13", "auto", lambda creation: creation.backend == "gloo", NO_REMEDY),
    "a remedy for local groups": ("2.15", "auto", lambda creation: creation.kind == LOCAL, NO_REMEDY),
    "a remedy for direct calls": ("2.15", "auto", lambda creation: creation.kind == DIRECT, NO_REMEDY),
    "the name, salted by the registry": ("2.13", "auto", lambda creation: True, {"rename": False}),
    "the name, salted by the counter": ("2.14", "auto", lambda creation: True, {"rename": False}),
    "to unbind": ("2.15", "auto", lambda creation: True, {"unbind": False}),
    "sends": ("2.5", "auto", lambda creation: creation.spans_world, NO_REMEDY),
    "own groups in a stripped world": ("2.13", "strip", lambda creation: True, {"apart": False}),
    "own groups in an unbound world": ("2.13", "auto", lambda creation: not creation.bound, {"apart": False}),
    "own groups in a bound world": ("2.15", "split", lambda creation: creation.bound, {"apart": False}),
    "that gloo cannot split now": (
        "2.4",
        "split",
        lambda creation: creation.kind == COLLECTIVE and creation.bound and not creation.same_backend,
        {"remedy": policy.SPLIT_NOW},
    ),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_each_part_of_the_policy_is_needed(forgotten, monkeypatch):
    """Without any one part of its remedies, the policy lets some program go wrong."""
    build, strategy, where, change = FORGOTTEN[forgotten]

    def decide(creation, traits, strategy):
        decision = policy.decide(creation, traits, strategy)
        return replace(decision, **change) if where(creation) else decision

    monkeypatch.setattr(splits, "decide", decide)

    assert counterexample(build, strategy).verdict != OK


# -- checked against other reasoning --------------------------------------------------------------------


@proving
@given(st.integers(2, 6), st.data())
def test_counting_calls_without_a_colour(size, data):
    """Of groups that nobody uses, 2.4 hangs exactly if ranks differ in how many they are outside of."""
    groups = data.draw(st.lists(subsets(size), max_size=8))
    program = Program(World(size))
    for ranks in groups:
        program.new_group(ranks)
    program.all_reduce()
    outside = {sum(rank not in ranks for ranks in groups) for rank in range(size)}

    assert play(program, "2.4").verdict == (OK if len(outside) == 1 else HANG)
    assert play(program, "2.5").verdict == OK


@proving
@given(st.integers(2, 8).flatmap(lambda size: st.lists(partitions(size), min_size=1, max_size=4)))
def test_partitions_of_the_world(divisions):
    """On 2.4, groups that divide the world are right if each rank uses its own in the same place."""
    size = sum(map(len, divisions[0]))
    program = Program(World(size))
    for partition in divisions:
        for label in [program.new_group(ranks) for ranks in partition]:
            program.all_reduce(label)

    assert play(program, "2.4").verdict == OK


def test_imports_neither_torch_nor_wrapt():
    """A trace can be explained where there is no torch."""
    code = "import sys, torchcommshim.repair.splits; print({'torch', 'wrapt'} & set(sys.modules))"

    assert run_command(sys.executable, "-c", code).stdout == "set()\n"


# -- what cannot be run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([AllReduce("g")], "rank 0, step 0, all_reduce on g: this rank has no 'g' that holds {0}"),
        ([Create("g", (1,)), AllReduce("g")], "rank 0, step 1, .* this rank has no 'g' that holds {0}"),
        ([Create("g", (0, 7))], "rank 0, step 0, .* a rank is outside the world of 2"),
        ([Create("g", (0, 0))], "rank 0, step 0, .* ranks must be one or more, each once"),
        ([Create("g", ())], "rank 0, step 0, .* ranks must be one or more, each once"),
        ([Create("g", (0,)), Create("g", (0,))], "rank 0, step 1, .* the label 'g' is taken"),
        ([Create("g", (0,), "mpi")], "rank 0, step 0, .* backend 'mpi' is not modelled"),
        (
            [Create("g", (0,), kind="odd")],
            "rank 0, step 0, .* kind 'odd' is none of collective, local, direct",
        ),
        ([SendReceive(WORLD, 0)], "rank 0, step 0, .* a rank cannot send to itself"),
        ([SendReceive(WORLD, 5)], "rank 0, step 0, .* this rank has no 'world' that holds {0, 5}"),
    ],
)
def test_senseless_programs(steps, message):
    """A program that makes no sense is refused, with the rank and the step."""
    program = Program(World(2))
    program.steps[0] = steps

    with pytest.raises(ValueError, match=message.replace("{", r"[{\[]").replace("}", r"[}\]]")):
        run(program, EARLY)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (["auto"], "1 strategies for 2 ranks"),
        ("fast", "strategy 'fast' is none of auto, strip, split, observe, off"),
        (["strip", None], "strip on some ranks only: they hang inside init_process_group"),
    ],
)
def test_senseless_strategies(strategy, message):
    """Strategies that are not known, or do not fit the ranks, are refused."""
    with pytest.raises(ValueError, match=message):
        run(Program(World(2)), EARLY, strategy)
