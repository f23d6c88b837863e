# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what they create: in simulated time, as threads over torch's stores, and in real jobs."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import torchcommshim
from torchcommshim.repair.calls import Call, Split
from torchcommshim.repair.creations import COLLECTIVE, DIRECT, LOCAL, SPLIT, WORLD
from torchcommshim.repair.traits import Traits
from torchcommshim.settings import Settings
from torchcommshim.tell import members, order
from torchcommshim.tell.order import OrderCheck, OrderError
from torchcommshim.tell.report import Report

once = pytest.mark.once  # needs no torch


def _load_benchmark():
    spec = importlib.util.spec_from_file_location("store_traffic", ROOT / "benchmarks" / "store_traffic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


traffic = _load_benchmark()

# Simulated ranks.  A script is a list of creations, each its kind, ranks, backend and name.


def new_group(*ranks, backend="gloo"):
    return COLLECTIVE, ranks, backend, ""


def local(*ranks, backend="gloo"):
    return LOCAL, ranks, backend, ""


def direct(name, *ranks, backend="nccl"):
    return DIRECT, ranks, backend, name


def split(parent, *parts, backend="nccl", name="0", turn=1):
    """A split of the group `parent`, of that name."""
    return SPLIT, Split(name, turn, tuple(parent), parts), backend, ""


def make_groups(side, script, rank, size, late_s=0.0, apart=True):
    """What a rank does; local groups over gloo are those that torch waits in."""
    for number, (kind, ranks, backend, name) in enumerate(script, start=1):
        yield late_s + 0.001 * rank
        site = f"rank{rank}.py:{number} main"
        parts = ranks if kind == SPLIT else None
        own = next((part for part in parts.parts if rank in part), ()) if parts else ranks
        made = Call(number, kind, own, backend, name, rank, size, shared=True, site=site, split=parts)
        waits = kind == SPLIT or (kind == LOCAL and backend == "gloo")
        yield from side.check(made, waits=waits, apart=apart)


def play(*scripts, shared=None, timeout_s=600.0, late_s=None, apart=True):
    """Run ranks to their end over a store in memory; returns what each that failed has raised, by rank."""
    shared = {} if shared is None else shared
    sides = traffic.open_world([traffic.CountingStore(shared) for _ in scripts], timeout_s)
    return traffic.play(
        make_groups(side, script, rank, len(scripts), (late_s or {}).get(rank, 0.0), apart)
        for rank, (side, script) in enumerate(zip(sides, scripts))
    )


def message_of(errors):
    """The one message of all ranks that failed."""
    assert {type(error) for error in errors.values()} == {OrderError}, errors
    (message,) = {str(error) for error in errors.values()}
    return message


A, B, C = new_group(0, 1), new_group(0, 2), new_group(2, 3)
W = new_group(0, 1, 2, 3)
A_NCCL = new_group(0, 1, backend="nccl")

# Scripts; the first call that differs; and its versions: rank, its creation, what it makes.
DIFFERENCES = {
    "order": ([[A, B], [A, B], [B, A], [A, B]], 1, [(0, 1, "[0,1] (gloo)"), (2, 1, "[0,2] (gloo)")]),
    "ranks": ([[C, A], [C, A], [C, A], [C, B]], 2, [(0, 2, "[0,1] (gloo)"), (3, 2, "[0,2] (gloo)")]),
    "backend": ([[A], [A_NCCL], [A], [A]], 1, [(0, 1, "[0,1] (gloo)"), (1, 1, "[0,1] (nccl)")]),
    "skipped": (
        [[A, B, C], [A, B, C], [A, C], [A, B]],
        2,
        [(0, 2, "[0,2] (gloo)"), (2, 2, "[2,3] (gloo)")],
    ),
    "own": ([[A], [new_group(1)], [C], [C]], 1, [(0, 1, "[0,1] (gloo)"), (1, 1, "[1] (gloo)")]),
    "own, named by an outsider": (
        [[new_group(0)], [A], [A], [C]],
        1,
        [(0, 1, "[0] (gloo)"), (1, 1, "[0,1] (gloo)")],
    ),
    "numbers": (
        [[A, B], [local(1, 2), A, A], [local(1, 2), A, B], [A, B]],
        2,
        [(0, 2, "[0,2] (gloo)"), (1, 3, "[0,1] (gloo)")],
    ),
}


@once
@pytest.mark.parametrize(("scripts", "turn", "versions"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_difference(scripts, turn, versions):
    """Every rank raises at the first call that differs, with each version and the line of each."""
    errors = play(*scripts)
    lines = message_of(errors).splitlines()

    assert sorted(errors) == [0, 1, 2, 3]
    head = f"ranks differ in call {turn} of new_group; up to there they were alike: [TCS-order-differs]"
    assert lines[0] == head
    for rank, number, made in versions:
        line = f"  rank {rank}: creation {number}, new_group {made}, at rank{rank}.py:{number} main"
        assert line in lines


@once
def test_difference_while_a_rank_is_missing():
    """Ranks that differ are told so, though another one has not come and perhaps never will."""
    errors = play([A, B], [B, A], [A, B], [])

    assert sorted(errors) == [0, 1, 2]
    assert message_of(errors).startswith("ranks differ in call 1 of new_group;")


@once
def test_every_version_is_shown():
    """Where each rank has its own line, the message is short and still has both versions."""
    message = message_of(play(*[[A]] * 30, [new_group(0, 30)]))

    assert len(message.splitlines()) == 1 + 8 + 1
    assert message.count("[0,30]") == 1
    assert message.endswith("\n  and 23 more")


@once
def test_long_lists():
    """Lists are shown in full, however long, since two may differ at their ends only."""
    ranks = [rank for rank in range(96) if rank % 3]
    message = message_of(play(*[[new_group(*ranks)]] * 97, [new_group(*ranks[:-1], 97)]))

    assert message.count(" [1,2,4,5,7,8,") == 8
    assert message.count(",91,92,94,95] (gloo)") == 8 - 1
    assert message.count(",91,92,94,97] (gloo)") == 1


@once
def test_difference_among_members():
    """Members of a local group that ask for different backends raise, those that wait as well."""
    expected = (
        "ranks differ in call 1 of the local group [0,1]; up to there they were alike: [TCS-order-differs]\n"
        "  rank 0: creation 1, the local group [0,1] (gloo), at rank0.py:1 main\n"
        "  rank 1: creation 1, the local group [0,1] (nccl), at rank1.py:1 main"
    )
    errors = play([local(0, 1)], [local(0, 1, backend="nccl")], [])

    assert {rank: str(error) for rank, error in errors.items()} == {0: expected, 1: expected}


@once
def test_difference_among_direct_calls():
    """Direct calls of one name and the same ranks are compared, and wait for nobody."""
    errors = play([direct("a", 0, 1)], [direct("a", 0, 1, backend="gloo")])

    assert list(errors) == [1]
    assert "ranks differ in call 1 of the direct group [0,1]" in str(errors[1])


PARTS = split(range(4), (0, 1), (2, 3))


@once
def test_split_into_other_parts():
    """All ranks of a parent name the same parts of it, those that are left out too."""
    expected = (
        "ranks differ in call 1 of split_group of [0-3]; up to there they were alike: [TCS-order-differs]\n"
        "  rank 0: creation 1, split_group of [0-3] into [0,1] [2,3] (nccl), at rank0.py:1 main\n"
    )
    errors = play([PARTS], [PARTS], [PARTS], [split(range(4), (0, 1))])

    assert sorted(errors) == [0, 1, 2, 3]
    assert message_of(errors).startswith(expected)
    assert "  rank 3: creation 1, split_group of [0-3] into [0,1] (nccl), at rank3.py:1 main" in message_of(
        errors
    )


@once
def test_splits_of_several_parents():
    """Each parent's splits are compared by its own ranks, and wait for nobody else."""
    pairs = [split((0, 1), (0,), (1,), name="1"), split((2, 3), (2,), (3,), name="1")]

    assert play([PARTS, pairs[0]], [PARTS, pairs[0]], [PARTS, pairs[1]], [PARTS, pairs[1]]) == {}


@once
def test_split_of_another_parent():
    """A rank that splits another group than the others is named, with what it splits."""
    errors = play([PARTS], [PARTS], [PARTS], [split((2, 3), (2,), (3,), name="1")])

    whole, part = "[0-3] into [0,1] [2,3]", "[2,3] into [2] [3]"
    assert message_of(errors) == (
        "ranks wait for each other, so none of them can go on: [TCS-order-circle]\n"
        f"  rank 3 waits for rank 2: creation 1, split_group of {part} (nccl), at rank3.py:1 main\n"
        f"  rank 2 waits for rank 3: creation 1, split_group of {whole} (nccl), at rank2.py:1 main"
    )


@once
def test_rank_that_never_comes():
    """After the store's time-out, who waits raises, and names who has not come and where each was last."""
    errors = play([A, B], [A, B], [A, local(2)], [A, B], timeout_s=30)

    assert sorted(errors) == [0, 1, 3]
    assert message_of(errors) == (
        "ranks did not come to call 2 of new_group; here is where each was last: [TCS-order-absent]\n"
        "  rank 2: creation 2, the local group [2] (gloo), at rank2.py:2 main\n"
        "  rank 0 waits for them: creation 2, new_group [0,2] (gloo), at rank0.py:2 main"
    )


@once
def test_only_members():
    """If only members call new_group the rule is added, whether others make another group or none."""
    others_go_on = message_of(play([A, W], [A, W], [W], [W]))
    others_stay_away = message_of(play([A], [A], [], [], timeout_s=30))

    assert others_go_on.startswith("ranks differ in call 1 of new_group;")
    assert others_stay_away.startswith("ranks did not come to call 1 of new_group;")
    assert [text.splitlines()[-1] for text in (others_go_on, others_stay_away)] == [members.RULE] * 2


@once
@pytest.mark.parametrize(
    ("scripts", "timeout_s"),
    [(([A], [new_group(0, 1, 2)], [W], [W]), None), (([A], [], [A], [A]), 30), (([W], [W], [W], []), 30)],
    ids=["a-member-makes-another", "a-member-is-missing", "all-are-members"],
)
def test_not_only_members(scripts, timeout_s):
    """Elsewhere the rule is not said."""
    errors = play(*scripts, **({"timeout_s": timeout_s} if timeout_s else {}))

    assert members.RULE not in message_of(errors)


@once
def test_rank_that_makes_nothing():
    """A rank that has posted nothing may have the check off."""
    message = message_of(play([local(0, 1)], [], timeout_s=30))

    assert "  rank 1: no creation yet, or TORCHCOMMSHIM_CHECK_ORDER is off there\n" in message


@once
def test_world_that_rank_0_does_not_open():
    """Rank 0 names the world's keys; where it does not, for the check is off there, the others say so."""
    shared = {}
    side = traffic.Comparison(traffic.Board(traffic.CountingStore(shared), ""), 1, 2, 30.0)
    errors = traffic.play([make_groups(side, [A], 1, 2)])

    assert "rank 0 did not make the world" in str(errors[0])


@once
def test_slow_rank():
    """Waiting for a rank is no error before the time-out."""
    assert play([A, B], [A, B], [A, B], [A, B], late_s={2: 250.0}) == {}


@once
@pytest.mark.parametrize(
    "scripts",
    [
        [[local(0, 1), A], [A, local(0, 1)], [A]],
        [[local(0, 1), local(0, 2)], [local(1, 2), local(0, 1)], [local(0, 2), local(1, 2)]],
        [[A, local(0, 2)], [A], [local(0, 2), A], [A]],
    ],
    ids=["local-and-collective", "three-local", "collective-and-local"],
)
def test_circle(scripts):
    """Ranks that wait for each other in different creations all raise, with the line of each."""
    errors = play(*scripts)
    head, *lines = message_of(errors).splitlines()

    assert sorted(errors) == list(range(len(scripts)))
    assert head == "ranks wait for each other, so none of them can go on: [TCS-order-circle]"
    waits = [
        re.match(r"  rank (\d) waits for rank (\d): creation .* at rank(\d)\.py", line) for line in lines
    ]
    assert [wait[1] for wait in waits] == [wait[3] for wait in waits]
    assert [wait[2] for wait in waits] == [wait[1] for wait in waits[1:] + waits[:1]]


@once
def test_lookout_that_is_killed():
    """If the rank that looks out for the others dies, they time out by themselves."""

    def killed(steps):
        yield from (next(steps) for _ in range(5))

    shared = {}
    sides = traffic.open_world([traffic.CountingStore(shared) for _ in range(3)], timeout_s=30)
    errors = traffic.play([killed(make_groups(sides[0], [A], 0, 3)), make_groups(sides[1], [A], 1, 3)])

    assert list(errors) == [1]
    assert "  rank 2: no creation yet" in str(errors[1])


LEGAL = {
    "own lists": [[A, A], [A, A], [C, C], [C, C]],
    "own lists, and outsiders that name one of them": [[A], [A], [C], [C], [A], [C]],
    "two own lists in turn": [[A, new_group(0)], [A, new_group(1)], [C, C], [C, C]],
    "uneven local groups": [[local(0, 1), A, local(0, 2)], [local(0, 1), local(1), A], [A, local(0, 2)]],
    "local groups that connect on first use, in any order": [
        [local(0, 1, backend="nccl"), local(0, 2, backend="nccl"), A],
        [A, local(0, 1, backend="nccl")],
        [local(0, 2, backend="nccl"), A],
    ],
    "direct calls": [[direct("a", 0, 1), A, direct("b", 0, 1)], [direct("b", 0, 1), direct("a", 0, 1), A]],
    "direct calls that name no ranks": [[direct("a"), A], [A, direct("a", backend="gloo")]],
    "no group for some": [[local(0)], [], [local(2), local(2)]],
    "a group of nobody": [[new_group(), A], [new_group(), A]],
}


@once
@pytest.mark.parametrize("scripts", LEGAL.values(), ids=LEGAL)
def test_legal(scripts):
    """Programs in which ranks make different numbers of groups, but none waits in vain, stay silent."""
    assert play(*scripts) == {}


@once
@pytest.mark.parametrize(
    ("scripts", "fails"),
    [
        ([[A, B], [A, B], [A, B], [A, B]], False),
        ([[new_group(0)], [new_group(1)], [new_group(2)], [new_group(3)]], False),
        ([[A], [A], [C], [C]], True),
        ([[A], [A], [new_group(2)], [new_group(3)]], True),
        ([[A], [A], [A], [new_group(3)]], True),
    ],
)
def test_groups_that_torch_cannot_tell_apart(scripts, fails):
    """Where groups of one call would meet under one name, lists differ unless each is of one rank."""
    errors = play(*scripts, apart=False)

    assert sorted(errors) == ([0, 1, 2, 3] if fails else [])
    assert not fails or message_of(errors).startswith("ranks differ in call 1 of new_group;")


@once
@pytest.mark.parametrize(
    ("bound", "strategy", "backend", "apart"),
    [
        (False, "auto", "nccl", True),
        (False, "strip", "nccl", True),
        (True, "auto", "gloo", True),
        (False, "observe", "nccl", False),
        (True, "observe", "nccl", True),
        (True, "observe", "gloo", False),
    ],
)
def test_which_groups_can_be_told_apart(bound, strategy, backend, apart):
    """Groups that share a call have keys of their own by the shim, or are split by colour."""
    state = SimpleNamespace(
        backends=lambda name: {"cuda": name},
        world_backends=lambda: {"cuda": "nccl"},
        world=SimpleNamespace(bound_device_id=SimpleNamespace(type="cuda") if bound else None),
    )
    report = Report(Settings(strategy), Traits(), "2.0")
    shared = {}
    scripts = [[new_group(*pair, backend=backend)] for pair in ((0, 1), (0, 1), (2, 3), (2, 3))]
    errors = run_threads(OrderCheck(report, state), [MemoryStore(shared) for _ in range(4)], scripts)

    assert sorted(errors) == ([] if apart else [0, 1, 2, 3])


@once
def test_store_that_serves_several_worlds():
    """A world made anew over the same store begins anew, whatever the one before has made."""
    shared = {}

    assert play([A, B, A], [A, B, A], [A, B, A], shared=shared) == {}
    assert play([B], [B], [B], shared=shared) == {}
    assert sorted(play([A, B], [A, B], [B, A], shared=shared)) == [0, 1, 2]


@once
@pytest.mark.parametrize("died", [0, 1, 2])
def test_store_of_a_crashed_attempt(died):
    """What ranks have left that waited for one that died is not taken for the next attempt's."""
    shared, size = {}, 3
    sides = traffic.open_world([traffic.CountingStore(shared) for _ in range(size)], timeout_s=0.5)
    traffic.play(make_groups(side, [A], rank, size) for rank, side in enumerate(sides) if rank != died)
    # Rank 0 is last to make the new world: the others have taken the old one's keys where they could.
    late = [
        traffic.Comparison(traffic.Board(traffic.CountingStore(shared), "order/"), rank, size, 600.0)
        for rank in range(size)
    ]

    def rank_0():
        yield 5.0
        late[0].open()
        yield from make_groups(late[0], [A, B], 0, size)

    assert traffic.play([rank_0(), *(make_groups(late[rank], [A, B], rank, size) for rank in (1, 2))]) == {}


@once
def test_64_ranks():
    """Among 64 ranks, one that has swapped two calls, one of 40 rounds in, is named on all."""
    size = 64
    script = [new_group(*range(turn % 8, size, 8)) for turn in range(40)]
    swapped = [*script[:37], script[38], script[37], script[39]]
    scripts = [swapped if rank == 5 else script for rank in range(size)]
    errors = play(*scripts)
    message = message_of(errors)

    assert play(*[script] * size) == {}
    assert sorted(errors) == list(range(size))
    assert message.startswith("ranks differ in call 38 of new_group;")
    assert "  rank 5: creation 38, new_group [6-62/8]" in message


@st.composite
def programs(draw):
    """A legal program: a script for each rank, with None where only others make a group."""
    size = draw(st.integers(2, 5))
    everybody = list(range(size))
    some = st.lists(st.sampled_from(everybody), min_size=1, unique=True).map(sorted)
    scripts = [[] for _ in everybody]
    for step in range(draw(st.integers(1, 6))):
        backend = draw(st.sampled_from(["gloo", "nccl"]))
        kind = draw(st.sampled_from(["one list", "own lists", "local", "direct"]))
        ranks = draw(some)
        if kind == "one list":
            made = [new_group(*ranks, backend=backend)] * size
        elif kind == "own lists":
            others = [rank for rank in everybody if rank not in ranks]
            made = [new_group(*(ranks if rank in ranks else others), backend=backend) for rank in everybody]
        else:
            group = local(*ranks, backend=backend) if kind == "local" else direct(f"{step}", *ranks)
            made = [group if rank in ranks else None for rank in everybody]
        for script, creation in zip(scripts, made):
            script.append(creation)
    return scripts


def first_difference(scripts, apart):
    """The first call, from 1, in which ranks differ; None if there is none."""
    calls = ([made for made in script if made and made[0] == COLLECTIVE] for script in scripts)
    for turn, lists in enumerate(zip(*calls), start=1):
        one_list = len(set(lists)) == 1
        of_members = all(lists[rank] == made for made in lists for rank in made[1])
        of_one_rank = all(len(made[1]) == 1 for made in lists)
        if not (one_list or (of_members and (apart or of_one_rank))):
            return turn
    return None


def outcome(scripts, late_s, apart=True):
    """The call in which all ranks raise."""
    errors = play(*([made for made in script if made] for script in scripts), late_s=late_s, apart=apart)
    if not errors:
        return None
    assert len(errors) == len(scripts)
    return int(re.match(r"ranks differ in call (\d+) of new_group;", message_of(errors))[1])


@once
@settings(deadline=None)
@given(programs(), st.dictionaries(st.integers(0, 4), st.floats(0, 3)))
def test_legal_programs_are_silent(scripts, late_s):
    """No rank of a legal program raises or waits in vain, whoever comes first."""
    assert outcome(scripts, late_s) is None


@once
@settings(deadline=None)
@given(programs(), st.dictionaries(st.integers(0, 4), st.floats(0, 3)), st.booleans(), st.data())
def test_changed_programs(scripts, late_s, apart, data):
    """If a rank swaps two calls or names other ranks, all ranks raise at the first call that then differs."""
    script = data.draw(st.sampled_from(scripts))
    calls = [place for place, made in enumerate(script) if made and made[0] == COLLECTIVE]
    if calls:
        one, other = data.draw(st.sampled_from(calls)), data.draw(st.sampled_from(calls))
        script[one], script[other] = script[other], script[one]
        if one == other:
            script[one] = new_group(*data.draw(st.sets(st.integers(0, len(scripts) - 1))))

    assert outcome(scripts, late_s, apart) == first_difference(scripts, apart)


@once
@pytest.mark.parametrize("program", [traffic.one_list, traffic.own_lists, traffic.local_groups])
def test_traffic_is_flat(program):
    """What a rank writes for a creation does not depend on how many ranks there are."""
    (few, _, _), (many, _, _) = (traffic.count_order(size, 10, program) for size in (8, 128))

    assert many == few


@once
def test_store_does_not_grow():
    """Calls of all ranks leave no more keys behind the more of them there are."""
    (_, _, few), (_, _, many) = (traffic.count_order(8, turns, traffic.one_list) for turns in (10, 40))

    assert many == few


# Ranks as threads, of one process and one OrderCheck, over each kind of store that torch offers.

STATE = SimpleNamespace(
    backends=lambda backend: {"cpu": backend},
    world_backends=lambda: {"cpu": "gloo"},
    world=SimpleNamespace(bound_device_id=SimpleNamespace(type="cpu")),
)


def _check():
    return OrderCheck(Report(Settings(check_order=True), Traits(), "2.0"), STATE)


def run_threads(check, stores, scripts, worlds=1):
    """Run ranks as threads; returns what each that failed has raised."""
    errors, size = {}, len(scripts)

    def run(rank):
        try:
            for _ in range(worlds):
                world = Call(
                    0, WORLD, tuple(range(size)), "gloo", "0", rank, size, shared=True, site="main.py:1 main"
                )
                check.begin(world, stores[rank])
                check.end(world, None)
                for number, (kind, ranks, backend, name) in enumerate(scripts[rank], start=1):
                    made = Call(
                        number, kind, ranks, backend, name, rank, size, True, f"rank{rank}.py:{number} main"
                    )
                    check.begin(made, None)
                    check.end(made, None)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@pytest.fixture(params=["file", "hash", "tcp"])
def stores(request, tmp_path):
    """A client of one store for each of 4 ranks, of each kind that torch offers."""
    dist = pytest.importorskip("torch.distributed")
    if request.param == "file":
        clients = [dist.FileStore(str(tmp_path / "store"), 4) for _ in range(4)]
    elif request.param == "hash":
        clients = [dist.HashStore()] * 4
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        clients = [server] + [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(3)]
    for client in clients:
        client.set_timeout(timedelta(seconds=20))
    return clients


def test_legal_over_torch_stores(stores):
    """A legal program is silent in two worlds, one after the other over the same store."""
    scripts = [[local(0, 1), A, B, A], [local(0, 1), A, B, A], [A, B, C], [A, B, local(3), C]]

    assert run_threads(_check(), stores, scripts, worlds=2) == {}


@pytest.mark.parametrize(
    "scripts", [DIFFERENCES["order"][0], [[local(0, 1), A], [A], [A], [A]]], ids=["order", "circle"]
)
def test_illegal_over_torch_stores(stores, scripts):
    """An illegal program raises on all ranks."""
    errors = run_threads(_check(), stores, scripts)

    assert sorted(errors) == [0, 1, 2, 3]
    assert message_of(errors)


@once
def test_rank_of_two_threads(monkeypatch):
    """A rank that makes groups in two threads may wait in one of them and come from the other."""
    monkeypatch.setattr(order, "_LOOK_AFTER_S", 0.05)
    check, shared, errors = _check(), {}, []
    stores = [MemoryStore(shared), MemoryStore(shared)]
    for rank in range(2):
        check.begin(Call(0, WORLD, (0, 1), "gloo", "0", rank, 2, True, ""), stores[rank])

    def make(rank, *creations, after_s=0.0):
        time.sleep(after_s)
        try:
            for number, creation in creations:
                check.begin(Call(number, *creation, rank, 2, True, ""), None)
        except OrderError as error:
            errors.append(error)

    make(0, (1, local(0)))  # in this thread; then in another, which waits for one that comes much later
    threads = [
        threading.Thread(target=make, args=(0, (2, local(0, 1)))),
        threading.Thread(target=make, args=(0, (3, A)), kwargs={"after_s": 1.0}),
        threading.Thread(target=make, args=(1, (1, A), (2, local(0, 1)))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert errors == []


class MemoryStore(traffic.CountingStore):
    timeout = timedelta(seconds=20)


class LostStore(MemoryStore):
    """Loses its connection, for good or for one operation only."""

    def __init__(self, shared, for_good):
        super().__init__(shared)
        self.for_good, self.left = for_good, 12

    def add(self, key, amount):
        self.left -= 1
        if self.left == 0 or (self.left < 0 and self.for_good):
            raise ConnectionError("lost")
        return super().add(key, amount)

    def compare_set(self, key, expected, desired):
        if self.left <= 0 and self.for_good:
            raise ConnectionError("lost")
        return super().compare_set(key, expected, desired)


@once
def test_store_that_fails_one_rank(capsys):
    """A rank whose store fails says so and goes on; those that wait for it compare no more; nobody raises."""
    shared = {}
    stores = [MemoryStore(shared), LostStore(shared, for_good=False)]

    assert run_threads(_check(), stores, [[A] * 9, [A] * 9]) == {}
    said = capsys.readouterr().err
    assert said.count("failed in order: ConnectionError('lost'); torch goes on without it") == 1
    assert said.count("ranks compare the order of creations no more: rank 1: ConnectionError('lost')") == 1


@once
def test_store_that_is_lost(monkeypatch):
    """Those that wait for a rank which cannot even say that its store is lost name it in the end."""
    shared = {}
    monkeypatch.setattr(MemoryStore, "timeout", timedelta(seconds=2))
    errors = run_threads(
        _check(), [MemoryStore(shared), LostStore(shared, for_good=True)], [[A] * 9, [A] * 9]
    )

    assert list(errors) == [0]
    assert re.search(r"ranks did not come to call \d of new_group(.|\n)*rank 1: creation \d", str(errors[0]))


@once
@pytest.mark.parametrize(
    ("backend", "bound", "traits", "environment", "waits"),
    [
        ("gloo", False, {}, {}, True),
        ("gloo", False, {}, {"TORCH_GLOO_LAZY_INIT": "1"}, False),
        ("nccl", False, {}, {}, False),
        ("nccl", True, {}, {}, True),
        ("nccl", True, {"members_split_late": True}, {}, False),
        ("nccl", True, {"connects_without_waiting": True}, {}, False),
        ("nccl", True, {"connects_without_waiting": True}, {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}, True),
        ("nccl", True, {}, {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, False),
        ("xccl", True, {}, {}, False),
    ],
)
def test_where_members_wait(monkeypatch, backend, bound, traits, environment, waits):
    """Members of a local group wait for each other in the check only if torch makes them wait as well."""
    for variable in ("TORCH_GLOO_LAZY_INIT", "TORCH_NCCL_USE_COMM_NONBLOCKING"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(MemoryStore, "timeout", timedelta(0))
    device = SimpleNamespace(type="cuda") if bound else None
    state = SimpleNamespace(
        backends=lambda name: {"cuda": name},
        world_backends=lambda: {"cuda": "nccl"},
        world=SimpleNamespace(bound_device_id=device),
    )
    check = OrderCheck(Report(Settings(check_order=True), Traits(**traits), "2.0"), state)
    check.begin(Call(0, WORLD, (0, 1), "nccl", "0", 0, 2, shared=True, site=""), MemoryStore({}))
    group = Call(1, LOCAL, (0, 1), backend, "", 0, 2, shared=True, site="")

    if waits:
        with pytest.raises(OrderError, match="did not come to call 1 of the local group"):
            check.begin(group, None)
    else:
        assert check.begin(group, None) is None


@once
def test_store_that_cannot_be_used(capsys):
    """A store without the means to compare costs one line, and creations go on."""
    check, group = _check(), Call(1, *A, 0, 2, shared=True, site="")
    world = Call(0, WORLD, (0, 1), "gloo", "0", 0, 2, shared=True, site="")
    check.begin(world, object())
    check.end(world, None)

    assert check.begin(group, None) is None
    assert capsys.readouterr().err.count("failed in order: AttributeError") == 1


@once
def test_nobody_to_compare_with():
    """A world of one rank, a dry run, and a world made before the shim was installed touch no store."""
    check = _check()
    alone, dry_run, early = (
        Call(1, *A, 0, size, shared, site="") for size, shared in ((1, True), (4, False), (4, True))
    )

    assert [check.begin(call, None) for call in (alone, dry_run, early)] == [None] * 3


# Real jobs of three processes, forked from this one, which has imported torch, over gloo.


def _same(dist, rank):
    dist.new_group([0, 1])
    dist.new_group([0, 2])


def _other_order(dist, rank):
    if rank == 2:
        dist.new_group([0, 2])
        dist.new_group([0, 1])
    else:
        dist.new_group([0, 1])
        dist.new_group([0, 2])


def _other_ranks(dist, rank):
    dist.new_group([0, 1] if rank else [0, 1, 2])


def _other_backend(dist, rank):
    dist.new_group([0, 1], backend="cpu:gloo" if rank == 1 else "gloo")


def _never_arrives(dist, rank):
    if rank < 2:
        dist.new_group([0, 1])
    else:
        time.sleep(60)


def _local_against_collective(dist, rank):
    if rank == 0:
        dist.new_group([0, 1], use_local_synchronization=True)
    dist.new_group([0, 1])
    if rank == 1:
        dist.new_group([0, 1], use_local_synchronization=True)


def _two_groups_of_one_name(dist, rank):
    dist.new_group([0, 1] if rank < 2 else [2])


def _legal(dist, rank):
    if rank:
        dist.new_group([1, 2], use_local_synchronization=True)
    dist.new_group([0, 1])
    dist.new_group([rank])
    _two_groups_of_one_name(dist, rank)
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
        dist.new_group([0, 1], use_local_synchronization=True)


def _run_rank(program, rank, folder, environment, ready):
    os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torchcommshim.uninstall()
    os.environ.update({"TORCHCOMMSHIM_HANG_REPORT_S": "0", "TORCHCOMMSHIM_CHECK_ORDER": "1", **environment})
    torchcommshim.install()
    import torch.distributed as dist

    ready.wait(60)
    file = dist.FileStore(
        str(folder / "store")
    )  # of no certain number of ranks, so the last one keeps the file
    file.set_timeout(timedelta(seconds=3))
    for attempt in ("first", "second"):
        store = dist.PrefixStore(attempt, file)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
        program(dist, rank)
        dist.barrier()  # gloo fails those that still connect to a rank which has left
        dist.destroy_process_group()


def job(program, folder, ends=(0, 1, 2), environments=None):
    """Run three ranks, kill them once those that are to end have done so, or at the deadline.

    Returns:
        The exit code of each, None if it was killed, and its stderr.
    """
    pytest.importorskip("torch.distributed")
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(3)
    given = environments or {}
    ranks = [
        fork.Process(target=_run_rank, args=(program, rank, folder, given.get(rank, {}), ready))
        for rank in range(3)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120  # seconds; on a busy machine all of it takes long
    for rank in ends:
        ranks[rank].join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes, [(folder / f"{rank}.err").read_text() for rank in range(3)]


@pytest.mark.parametrize(
    ("program", "concerned", "expected"),
    [
        (
            _other_order,
            [0, 1, 2],
            ["differ in call 1 of new_group", r"ranks 0,1: .*\[0,1\]", r"rank 2: .*\[0,2\]"],
        ),
        (
            _other_ranks,
            [0, 1, 2],
            ["differ in call 1 of", r"rank 0: .*\[0-2\]", r"ranks 1,2: .*\[0,1\]"],
        ),
        (
            _other_backend,
            [0, 1, 2],
            ["differ in call 1 of", r"ranks 0,2: .*\(gloo\)", r"rank 1: .*\(cpu:gloo\)"],
        ),
        (
            _never_arrives,
            [0, 1],
            ["did not come to call 1 of", "rank 2: no creation yet", r"rank \d waits for them: "],
        ),
        (
            _local_against_collective,
            [0, 1, 2],
            ["wait for each other", "rank 1 waits .* new_group", "rank 0 waits .* local"],
        ),
    ],
)
def test_job_with_a_fault(tmp_path, program, concerned, expected):
    """Every rank that is concerned exits with the message, which names what each made and where."""
    codes, errors = job(program, tmp_path, ends=concerned)

    _check_messages(program, codes, errors, concerned, expected)


def _check_messages(program, codes, errors, concerned, expected):
    assert [rank for rank, code in enumerate(codes) if code] == concerned
    for rank in concerned:
        message = errors[rank][errors[rank].index("OrderError: ranks ") :]
        assert all(re.search(part, message) for part in expected), message
        assert f"at {Path(__file__)}:" in message
        assert f" {program.__name__}\n" in message


def test_own_groups_that_nothing_keeps_apart(tmp_path):
    """Ranks that each name their own group, without a device_id, are told where nothing is repaired."""
    environments = {rank: {"TORCHCOMMSHIM": "observe"} for rank in range(3)}
    codes, errors = job(_two_groups_of_one_name, tmp_path, environments=environments)

    expected = ["differ in call 1 of", r"ranks 0,1: .*\[0,1\]", r"rank 2: .*\[2\]"]
    _check_messages(_two_groups_of_one_name, codes, errors, [0, 1, 2], expected)


def test_legal_job(tmp_path):
    """A legal program with uneven creations is silent and finishes, in two worlds over one store."""
    codes, errors = job(_legal, tmp_path)

    assert codes == [0, 0, 0]
    assert not any(re.search("OrderError|in order|the order", error) for error in errors)


@pytest.mark.parametrize("off", [0, 2])
def test_job_with_the_check_off_on_one_rank(tmp_path, off):
    """The other ranks say so once the store's time-out is over, where ranks do not agree on it before."""
    on = [rank for rank in range(3) if rank != off]
    environments = {rank: {"TORCHCOMMSHIM_AGREEMENT": "off"} for rank in range(3)}
    environments[off]["TORCHCOMMSHIM_CHECK_ORDER"] = "0"
    codes, errors = job(_same, tmp_path, on, environments)

    assert all(codes[rank] for rank in on)
    assert all("or TORCHCOMMSHIM_CHECK_ORDER is off there" in errors[rank] for rank in on)


@pytest.mark.parametrize(("check", "expected"), [("0", 0), ("1", 2)])
def test_nothing_is_written_with_the_check_off(tmp_path, check, expected):
    """With the check off, a healthy job leaves no key of the check in the store."""
    environment = {"TORCHCOMMSHIM_CHECK_ORDER": check}
    codes, _ = job(_same, tmp_path, environments=dict.fromkeys(range(3), environment))

    assert codes == [0, 0, 0]
    assert (tmp_path / "store").read_bytes().count(b"torchcommshim/order/token") == expected
