# SPDX-License-Identifier: Apache-2.0
"""Names of groups, made from what all their ranks know; pure.

torch makes some names from what only this rank knows: how many groups it is in.  Ranks of one group then look
for each other under different keys, and close their groups in different orders.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence


def digest(*values: object) -> str:
    """A short text that stands for `values`: texts and tuples of ranks."""
    texts = (",".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values)
    return hashlib.sha256("/".join(texts).encode()).hexdigest()[:16]


def hashed_name(ranks: Sequence[int], count: int) -> str:
    """torch's name, from 2.6 on, for `ranks` of a group, and a count (`_hash_ranks_to_str`)."""
    text = "_".join(map(str, (*ranks, count)))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class KnownGroups:
    """In how many groups each rank of a world is, as far as all ranks know.

    All know of what `new_group` makes on all ranks, and of splits of the world; not of groups that are made
    by their members alone, nor of a group's end.  Where each rank names its own group in one `new_group`,
    ranks know different groups; the names of splits are then alike where torch's own would be.

    Attributes:
        complete: the shim has seen all of the world's groups.
    """

    def __init__(self) -> None:
        self.complete = False
        self._memberships: Counter[int] = Counter()

    def add(self, ranks: Sequence[int]) -> None:
        """A group of `ranks` is made."""
        self._memberships.update(ranks)

    def are_even(self, ranks: Sequence[int]) -> bool:
        """Each of `ranks` is in as many groups as the others."""
        return len({self._memberships[rank] for rank in ranks}) < 2

    def name(self, ranks: Sequence[int]) -> str:
        """The name for a part of the world, the same on all of `ranks` and given once.

        It is torch's own (`_hash_ranks_to_str` of 2.10 to 2.13) where that is the same on all of them: torch
        hashes the number of groups that the rank is in, this here the largest among `ranks`.
        """
        most = max(self._memberships[rank] for rank in ranks)
        return hashed_name(sorted(ranks), most + 1)  # and the world


def nested_name(parent: str, ranks: Sequence[int], turn: int) -> str:
    """Of a part of a group that is not the world, whose `turn`-th split this is; `ranks` are the world's."""
    return f"split_{digest(parent, ranks)}_{turn}"


def part_name(name: str, ranks: tuple[int, ...]) -> str:
    """Of one part of a split, where torch gives all parts one `name`."""
    return f"{name}_{digest(ranks)}"
