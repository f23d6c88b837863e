# SPDX-License-Identifier: Apache-2.0
"""Names that all ranks of a group make alike."""

from __future__ import annotations

import pytest

from torchcommshim.repair.names import KnownGroups, nested_name

pytestmark = pytest.mark.once


def known(*groups):
    """What all ranks know after `groups`."""
    found = KnownGroups()
    for ranks in groups:
        found.add(ranks)
    return found


def test_even():
    """Ranks are even while each is in as many groups as the others."""
    assert [known(*groups).are_even((0, 1)) for groups in ([], [(0, 2)], [(0, 2), (1, 3)])] == [
        True,
        False,
        True,
    ]


def test_name_is_given_once():
    """The same ranks get another name each time, whatever other ranks make in between."""
    found, names = known(), []
    for other in [(2, 3), (0, 2), (1, 2)]:
        names.append(found.name((0, 1)))
        found.add((0, 1))
        found.add(other)

    assert len(set(names)) == 3


def test_nested_names():
    """Parents, parts and turns tell names apart."""
    made = [
        nested_name(*what) for what in (("1", (0, 1), 1), ("2", (0, 1), 1), ("1", (0,), 1), ("1", (0, 1), 2))
    ]

    assert len(set(made)) == 4
