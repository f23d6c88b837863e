# SPDX-License-Identifier: Apache-2.0
"""The commonest mistake in making groups: only the members of a group call `new_group`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

RULE = (
    "Did only the members of a group call new_group? Every rank of the world has to make the call, or every "
    "member with use_local_synchronization=True."
)


def alone(made: Mapping[int, Sequence[int]], absent: Iterable[int] = ()) -> list[tuple[int, ...]]:
    """Groups that all of their members, and nobody else, make in one call of `new_group`.

    Args:
        made: the ranks of the group that each rank makes in that call.
        absent: ranks that have not come to it.

    Returns:
        The ranks of each such group, where there are others.
    """
    makers: dict[tuple[int, ...], set[int]] = {}
    for rank, ranks in made.items():
        makers.setdefault(tuple(ranks), set()).add(rank)
    if len(makers) < 2 and not set(absent):
        return []
    return [ranks for ranks, theirs in makers.items() if theirs == set(ranks)]
