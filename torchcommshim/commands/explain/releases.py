# SPDX-License-Identifier: Apache-2.0
"""The traits of torch's releases, for explaining a trace as if it were of another one.

A build that runs is probed (`traits.py`); this table is for builds that are not here.  A test compares each
row with what the probes find in that release's sources.
"""

from __future__ import annotations

from dataclasses import replace

from torchcommshim.repair.splits import COUNTER, REGISTERED
from torchcommshim.repair.traits import Traits

OLDEST, NEWEST = (2, 3), (2, 15)

_V2_3 = Traits(members_split_late=True, split_ignores_backend=True, split_tests_size=True)
_V2_5 = Traits(
    split_ignores_backend=True,
    split_tests_size=True,
    point_to_point_splits=True,
    barrier_asks_backend=True,
    split_counts_parent=True,
    split_counts_members=True,
    split_names_shared=True,
)
_V2_6 = replace(
    _V2_5,
    split_tests_size=False,
    point_to_point_splits=False,
    local_names_differ=True,
    device_picks_backend=True,
    connects_without_waiting=True,
)
_V2_7_0 = replace(_V2_6, nonblocking_by_default=True)
_V2_7_1 = replace(_V2_6, connects_without_waiting=False, barrier_asks_backend=False)
_V2_8 = replace(_V2_7_1, accepts_int_device=True, split_wants_one_backend=True)
_V2_9 = replace(_V2_8, split_counts_members=False, split_wants_one_backend=False)
_V2_10 = replace(_V2_9, split_counts_parent=False, split_names_shared=False, split_names_differ=True)
_V2_14 = replace(_V2_10, split_names_differ=False, split_counts_parent=True)
_V2_15 = replace(_V2_14, split_ignores_backend=False)

# Each from the release named on; newest first.
_SINCE = (
    ((2, 15), _V2_15),
    ((2, 14), _V2_14),
    ((2, 10), _V2_10),
    ((2, 9), _V2_9),
    ((2, 8), _V2_8),
    ((2, 7, 1), _V2_7_1),
    ((2, 7), _V2_7_0),
    ((2, 6), _V2_6),
    ((2, 5), _V2_5),
    ((2, 3), _V2_3),
)


def traits_of(version: str) -> Traits:
    """The traits of a release such as `2.4.1`, from 2.3.0 to 2.15.

    Raises:
        ValueError: the version is none, or outside that range.
    """
    release = release_of(version)
    if not OLDEST <= release[:2] <= NEWEST:
        raise ValueError(f"torch {version} is not known here: only 2.3.0 to 2.15 are")
    return next(traits for since, traits in _SINCE if release >= since)


def salt_of(version: str) -> str:
    """What local-synchronization names are salted with, from 2.6 on: a registry's size, 2.14 on a counter."""
    return REGISTERED if release_of(version) < (2, 14) else COUNTER


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a version: `2.4.1+cu121` is `(2, 4, 1)`.

    Raises:
        ValueError: it is no version.
    """
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release
    except InvalidVersion:
        raise ValueError(f"{version!r} is no version of torch") from None
