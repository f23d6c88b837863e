# SPDX-License-Identifier: Apache-2.0
"""Worlds that are made anew over one store: which of them get keys of their own."""

from __future__ import annotations

from datetime import timedelta

import pytest

from torchcommshim.repair import anew
from torchcommshim.repair.anew import begin

pytestmark = pytest.mark.once

SHORTLY = timedelta(seconds=1)


class Store:
    """A store in memory, in which waiting for a key that is not there fails at once."""

    def __init__(self):
        self.values = {}

    def add(self, key, amount):
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        return self.values.setdefault(key, desired.encode())

    def wait(self, keys, timeout):
        missing = [key for key in keys if key not in self.values]
        if missing:
            raise TimeoutError(missing)


def made(store, ranks, size, failed=()):
    """These ranks make a world of `size`; gives the prefix that each uses."""
    turns = [begin(store, rank, size, SHORTLY) for rank in ranks]
    for turn in turns:
        turn.end(failed=turn.rank in failed)
    return [turn.prefix for turn in turns]


def test_each_world_after_the_first_has_a_prefix():
    """The first world's keys stay torch's own, each later one's get a prefix, alike on all ranks."""
    store = Store()

    assert [set(made(store, [2, 0, 1], 3)) for _ in range(3)] == [
        {""},
        {"torchcommshim/world/1"},
        {"torchcommshim/world/2"},
    ]


def test_world_that_failed_on_a_rank():
    """After a world that failed on some rank, all ranks leave the next one's keys as they are."""
    store = Store()
    made(store, [0, 1], 2, failed=[1])

    assert made(store, [0, 1], 2) == ["", ""]
    assert len(set(made(store, [0, 1], 2))) == 1


def test_world_that_not_all_ranks_began():
    """Where a rank's mark of the world before does not come, nobody uses a prefix."""
    store = Store()
    made(store, [0], 2)

    assert made(store, [0, 1], 2) == ["", ""]


def test_world_tried_again():
    """A rank that tries again after an error meets one that makes its first world, and waits for no mark."""
    store = Store()
    made(store, [0], 2, failed=[0])
    store.wait = None

    assert made(store, [0, 1], 2) == ["", ""]


def test_rank_started_again(monkeypatch):
    """A process in another's place makes the world with those who are still in it, now and from then on."""
    store = Store()
    made(store, [0, 1], 2)
    monkeypatch.setattr(anew, "_here", "another process")

    assert made(store, [1], 2) == [""]
    assert made(store, [0, 1], 2) == ["", ""]


def test_ranks_follow_the_first():
    """What the first rank of a number has decided holds for all of that number, whatever they find."""
    store = Store()
    made(store, [0, 1], 2)
    first = begin(store, 0, 2, SHORTLY)
    store.add("torchcommshim/world/2/uneven", 1)

    assert (first.prefix, made(store, [1], 2)) == ("torchcommshim/world/1", ["torchcommshim/world/1"])


def test_first_world_asks_little():
    """A world that is the first over its store takes two operations of a rank."""
    store, operations = Store(), []
    for name in ("add", "set", "wait"):
        setattr(store, name, lambda *args, do=getattr(store, name): operations.append(args) or do(*args))
    made(store, [0], 4)

    assert len(operations) == 2
