# SPDX-License-Identifier: Apache-2.0
"""What a watcher sees of its rank, and tells the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchcommshim.tell.watch.places import Group, Place
from torchcommshim.tell.watch.record import Struck

# How a rank's process has ended.
EXITED = "exited"
GONE = "gone (killed, or left by os._exit)"

RENDEZVOUS = "the rendezvous"  # for `View.inside`

# What comes of connecting to a store that a rank has not reached.
UNKNOWN, REFUSED, UNREACHED, MUTE = "unknown", "refused", "unreached", "mute"
# What keeps a rank from saying where it is.
STOPPED = "stopped"
LOCKED = "holds Python's global lock"
SILENT = "does not run"


class Seen(NamedTuple):
    """A creation as a watcher saw it; see `calls.Call`.

    Attributes:
        ranks: as `ranges.shortened` writes them.
        began: how many seconds ago.
        ended: how many seconds ago it returned; None if it has not.
        split: of a split, the parent's name, how often it has been split, its ranks, and those of each part.
    """

    number: int
    kind: str
    ranks: str
    backend: str
    name: str
    site: str
    began: float
    ended: float | None
    split: Sequence[Any] | None = None

    @property
    def call(self) -> tuple[str, ...]:
        """What is equal on all ranks, also where each names its own group only."""
        if self.split:
            parent, turn, ranks, _ = self.split
            return f"{parent} {turn}", self.kind, ranks
        return self.name if self.number else "", self.kind  # in the rendezvous it has no name yet

    @property
    def same(self) -> tuple[str, ...]:
        """What is equal on all ranks that make this creation."""
        if self.split:
            return (*self.call, " ".join(self.split[3]), self.backend)
        return self.name, self.kind, self.ranks, self.backend


class End(NamedTuple):
    """The end of a rank's process.

    Attributes:
        how: EXITED, EXITED after an error, or GONE.
        at: the time of day.
        last: the creation that it was in, else the last that it has made; None if that is not known.
    """

    how: str
    at: str
    last: Seen | None = None


class Claim(NamedTuple):
    """A process that says which rank it is.

    Attributes:
        rank, size: what it says: its rank, of how many.
        host, pid, program: where it is, and the name of its script.
        job: what schedulers and launchers call its job, by the variable's name.
        end: how it has ended; None if it has not.
    """

    rank: int
    size: int
    host: str
    pid: int
    program: str = ""
    job: Mapping[str, str] = {}
    end: End | None = None

    @classmethod
    def of(cls, hello: Mapping[str, Any]) -> Claim:
        """What a watcher says of its rank."""
        return cls(*(hello[name] for name in cls._fields[:-1]))


class View(NamedTuple):
    """What one rank's watcher sees.

    Attributes:
        rank, host, pid: of the rank.
        seen: its last few creations, the first to begin first.
        bound: its world has a device_id.
        struck: of creations that nothing repairs.
        stack: frames of the main thread, the innermost first, if it waits there.
        inside: what torch has called there, e.g. `perform_nocolor_split`.
        torch, strategy: torch's version, and the shim's strategy.
        job: see `Claim`.
        places: where its threads are, the main one first.
        counts: its groups with the most collectives, if those of the places do not tell enough.
        state: STOPPED, LOCKED or SILENT; empty for a rank that runs, or waits with the lock free.
        aged: seconds since it said where it is, if it does not say now.
    """

    rank: int
    host: str
    pid: int
    seen: Sequence[Seen]
    bound: bool = False
    struck: Sequence[Struck] = ()
    stack: Sequence[str] = ()
    inside: str = ""
    torch: str = ""
    strategy: str = ""
    job: Mapping[str, str] = {}
    places: Sequence[Place] = ()
    counts: Sequence[Group] = ()
    state: str = ""
    aged: float = 0.0

    @classmethod
    def of(cls, values: Sequence[Any]) -> View:
        """What was sent as a list."""
        view = cls(*values)
        return view._replace(
            seen=[Seen(*each) for each in view.seen],
            struck=[Struck(*each) for each in view.struck],
            places=[Place.of(each) for each in view.places],
            counts=[Group(*each) for each in view.counts],
        )

    @property
    def waits(self) -> Seen | None:
        """The creation that has not returned; of several, the first."""
        return next((each for each in self.seen if each.ended is None), None)

    @property
    def place(self) -> Place | None:
        """Where it is: the main thread, or one that is in torch.distributed while the main one is not."""
        return next((each for each in self.places if each.call), self.places[0] if self.places else None)
