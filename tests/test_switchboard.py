# SPDX-License-Identifier: Apache-2.0
"""The rules by which simulated ranks meet, without processes and without torch."""

from __future__ import annotations

import pytest

from torchcommshim.commands.verify.switchboard import Exchange, Finalize, Join, Matcher, Seat, Split

pytestmark = pytest.mark.once


def post(matcher: Matcher, *requests):
    return [matcher.post(request) for request in requests]


def answers(queues):
    return [queue.get_nowait() if not queue.empty() else "waits" for queue in queues]


def world(size: int) -> Matcher:
    matcher = Matcher()
    post(matcher, *(Join("world", rank, size) for rank in range(size)))
    return matcher


class TestMatcher:
    def test_join_waits_for_all(self):
        """Ranks with one id are connected once all have come."""
        matcher = Matcher()
        early = post(matcher, Join("id", 1, 3), Join("id", 0, 3))
        before = answers(early)
        late = post(matcher, Join("id", 2, 3))

        assert before == ["waits", "waits"]
        assert answers(early + late) == [Seat("id", 1, 3), Seat("id", 0, 3), Seat("id", 2, 3)]

    def test_split_by_color(self):
        """Ranks of one colour make a communicator in the order of their keys; no colour, no seat."""
        calls = post(
            world(4),
            Split("world", 0, 7, 9),
            Split("world", 1, 7, 8),
            Split("world", 2, 5, 0),
            Split("world", 3, None, 0),
        )

        assert answers(calls) == [Seat("world/1", 1, 2), Seat("world/1", 0, 2), Seat("world/2", 0, 1), None]

    def test_split_waits_for_every_rank(self):
        """A split waits for a rank that does not call, members or not."""
        calls = post(world(3), Split("world", 0, 7, 0), Split("world", 1, 7, 1))

        assert answers(calls) == ["waits", "waits"]

    def test_calls_pair_up_in_order_whatever_they_mean(self):
        """The first call of each rank makes the first round, so members of one group may miss each other."""
        calls = post(
            world(2),
            Split("world", 0, None, 0),
            Split("world", 0, 7, 0),
            Split("world", 1, 7, 1),
            Split("world", 1, None, 0),
        )

        assert answers(calls) == [None, Seat("world/2", 0, 1), Seat("world/1", 0, 1), None]

    def test_exchange_over_the_ranks_that_are_there(self):
        """A communicator that came out short exchanges among the ranks that it has."""
        matcher = world(2)
        post(matcher, Split("world", 0, 7, 0), Split("world", 1, None, 0))

        assert answers(post(matcher, Exchange("world/1", 0, "allreduce", b"a"))) == [[b"a"]]

    def test_different_collectives_never_meet(self):
        """A barrier does not pair up with an all-reduce."""
        calls = post(world(2), Exchange("world", 0, "barrier", b""), Exchange("world", 1, "allreduce", b"a"))

        assert answers(calls) == ["waits", "waits"]

    def test_the_end_takes_all_ranks(self):
        """Who ends a communicator waits for its other ranks, whatever they end meanwhile."""
        matcher = world(2)
        post(matcher, *(Split("world", rank, 7, rank) for rank in range(2)))
        child, parent = "world/1", "world"
        first = post(matcher, Finalize(child, 0), Finalize(parent, 1))
        before = answers(first)
        last = post(matcher, Finalize(child, 1), Finalize(parent, 0))

        assert before == ["waits", "waits"]
        assert answers(first + last) == [None] * 4

    def test_abandon(self):
        """Whoever still waits is let go at the end, so that no thread stays behind."""
        matcher = world(2)
        calls = post(matcher, Split("world", 0, 7, 0))
        matcher.abandon()

        assert answers(calls) == [None]


def test_name_of_0_1():
    """`torchcommshim.verify` and its modules are the ones in `torchcommshim.commands`, not copies of them."""
    from torchcommshim.verify.switchboard import switchboard

    from torchcommshim.commands.verify import switchboard as now
    from torchcommshim.verify import switchboard as by_attribute

    assert (by_attribute, switchboard) == (now, now.switchboard)
