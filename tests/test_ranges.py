# SPDX-License-Identifier: Apache-2.0
"""How lists of ranks are written for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchcommshim.ranges import bracketed, cut, expanded, named, shortened

pytestmark = pytest.mark.once

IRREGULAR = [rank for rank in range(200) if rank % 7 in (0, 1, 3)]


@given(st.lists(st.integers(-9, 40)))
def test_ranges(ranks):
    """Every list, in any order, also one of ranks that cannot be, is read as it was written."""
    assert expanded(shortened(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0,1"),
        ([*range(32), 40], "0-31,40"),
        ([*range(0, 4096, 8)], "0-4088/8"),
        ([2, 1, 0], "2,1,0"),
    ],
)
def test_ranges_are_short(ranks, text):
    """Runs, also those with equal gaps, are written by their ends."""
    assert shortened(ranks) == text


def test_group():
    """A group is written in its own order."""
    assert bracketed([3, 1, 4, 5, 6]) == "[3,1,4-6]"


def test_ranks_in_a_sentence():
    """Ranks are written in ascending order, and noun and verb agree with their number."""
    assert named([7, 0, 2, 1], "waits", "wait") == "ranks 0-2,7 wait"
    assert named({3}, "waits", "wait") == "rank 3 waits"
    assert named((3,)) == "rank 3"


@pytest.mark.parametrize("width", [5, 24, 60])
def test_long_lists_are_cut(width):
    """What does not fit is left out whole, and counted."""
    shown, _, rest = cut(IRREGULAR, width).partition(" and ")

    assert width - len(",123") < len(shown) <= width
    assert expanded(shown) == tuple(IRREGULAR[: len(expanded(shown))])
    assert rest == f"{len(IRREGULAR) - len(expanded(shown))} more"


def test_list_that_just_fits():
    """A list that is as long as there is room is not cut."""
    assert cut([0, 1, 3, 7], len("0,1,3,7")) == "0,1,3,7"
    assert cut([0, 1, 3, 7], len("0,1,3,7") - 1) == "0,1,3 and 1 more"
