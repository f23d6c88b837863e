# SPDX-License-Identifier: Apache-2.0
"""Where a thread of a rank is: what its sampler writes down, and its watcher sends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchcommshim.ranges import bracketed, expanded

_NAMES = {"default_pg": "the world"}  # torch's description of it


class Group(NamedTuple):
    """A process group as one rank has it.

    Attributes:
        name, description: torch's; the description is empty before torch 2.4.
        ranks: in the world, as `ranges.shortened` writes them.
        begun: how many of its collectives this rank has begun; None where the backend does not count.
        timeout_s: its time-out; None if that is not known.
    """

    name: str
    description: str = ""
    ranks: str = ""
    begun: int | None = None
    timeout_s: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What is equal on all ranks of the group."""
        return self.name, self.ranks

    @property
    def members(self) -> tuple[int, ...]:
        """Its ranks in the world; none if they are not known."""
        return expanded(self.ranks)

    def __str__(self) -> str:
        description = self.description if self.description != "undefined" else ""
        what = _NAMES.get(self.description) or f"group {description or self.name!r}"
        return f"{what} {bracketed(self.members)}" if self.ranks else what


class Place(NamedTuple):
    """Where one thread is.

    Attributes:
        since: when it was first seen there: in the record by the host's monotonic clock, in a
            view seconds ago.
        thread: its name; empty for the main thread.
        call: the function of torch.distributed that the user's code has called, or a library's; else empty.
        inside: all functions of torch.distributed from there to the innermost one.
        group: that it is called on, if that is known.
        peer: whom it sends to or receives from.
        site: the line outside torch, `file:line function`.
        span: where in the innermost frame's file the call in progress is written: line, last line, column and
            end, counted as `code.co_positions` does; empty if Python does not tell.
        stack: `file:line function`, the innermost frame first.
    """

    since: float
    thread: str = ""
    call: str = ""
    inside: Sequence[str] = ()
    group: Group | None = None
    peer: int | None = None
    site: str = ""
    span: Sequence[int] = ()
    stack: Sequence[str] = ()

    @classmethod
    def of(cls, values: Sequence[Any]) -> Place:
        """What was sent, or written, as a list."""
        place = cls(*values)
        return place._replace(group=Group(*place.group) if place.group else None)


class Sample(NamedTuple):
    """What a sampler has written last.

    Attributes:
        places: the main thread's first, then those of other threads that are in torch.distributed.
        counts: the groups with the most collectives, if the groups of the places do not tell enough.
    """

    places: Sequence[Place] = ()
    counts: Sequence[Group] = ()

    @classmethod
    def of(cls, values: Sequence[Any]) -> Sample:
        """What was sent, or written, as a list."""
        places, counts = values
        return cls([Place.of(each) for each in places], [Group(*each) for each in counts])

    @property
    def plain(self) -> tuple[Any, ...]:
        """Tuples that `marshal` takes."""
        places = tuple(
            tuple(each._replace(group=tuple(each.group) if each.group else None))  # type: ignore[arg-type]
            for each in self.places
        )
        return places, tuple(tuple(each) for each in self.counts)
