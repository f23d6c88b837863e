# SPDX-License-Identifier: Apache-2.0
"""A call: one creation as this rank makes it, for those who watch creations and change none.

A `Creation` holds what is equal on all ranks, and decisions rest on nothing else.  A `Call` adds what is
this rank's own: its number, its name, and the line of the script that made it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Callable, NamedTuple, Protocol, TypeVar, runtime_checkable

from torchcommshim.repair.creations import Args, Kwargs
from torchcommshim.repair.rendezvous import Rendezvous

# Frames between a script and the creation: torch's own, and ours.
_PASSED_OVER = ("torch", "torchcommshim", "wrapt", "contextlib")

T = TypeVar("T")


class Split(NamedTuple):
    """What is split, and into what; equal on all ranks of the parent.

    Attributes:
        parent: torch's name of the parent.
        turn: how often it has been split, with this time.
        ranks: of the parent, in the world.
        parts: those of each new group.
        even: see `Creation`.
        by_mesh: a DeviceMesh asked for it, which makes its groups by `new_group` where it cannot split.
    """

    parent: str
    turn: int
    ranks: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    even: bool = True
    by_mesh: bool = False

    @property
    def partial(self) -> bool:
        """Some of the parent's ranks are in none of the new groups."""
        return sum(map(len, self.parts)) < len(self.ranks)


class Call(NamedTuple):
    """One creation on this rank.

    Attributes:
        number: of this rank's creations in its world, in order; the world's own is 0.
        kind: creations.WORLD, COLLECTIVE, LOCAL, DIRECT or SPLIT.
        ranks: the group's ranks in the world, in group order; empty where the caller named none, as a direct
            call that spans other processes does, and on a rank that a split leaves out.
        backend: what was asked for, lower case.
        name: torch's name of the group; on a rank that a split leaves out that of the first one, or empty.
        rank, world_size: this rank, and how many there are.
        shared: other processes are on the other side; not so in a dry run, over a fake backend.
        site: the caller outside torch, `file:line function`; empty where nobody observes.
        split: what is split; None for other kinds.
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    backend: str
    name: str
    rank: int
    world_size: int
    shared: bool
    site: str
    split: Split | None = None


class Observer(Protocol):
    """Sees each creation on this rank begin and end.  What it raises reaches the user."""

    def begin(self, call: Call, store: Any) -> None:
        """Right before torch makes the group; `store` is the world's (a torch.distributed Store)."""

    def end(self, call: Call, error: BaseException | None) -> None:
        """The group is made, or `error` was raised; called if `begin` returned, the last observer first."""


@runtime_checkable
class Entrant(Protocol):
    """An observer that sees a rank enter `init_process_group`, before there is a store.  Raises nothing."""

    def enter(self, call: Call, rendezvous: Rendezvous) -> None:
        """`call` will be the world's creation, as far as it is known: it has no name yet."""

    def leave(self, call: Call, error: BaseException | None) -> None:
        """The world is made, or `error` was raised."""


def entered(
    entrants: Sequence[Entrant],
    call: Call,
    rendezvous: Rendezvous,
    make: Callable[..., T],
    *arguments: Any,
) -> T:
    """Call `make`; `entrants` are told that the world's `call` is entered, and that it has ended."""
    error: BaseException | None = None
    for entrant in entrants:
        entrant.enter(call, rendezvous)
    try:
        return make(*arguments)
    except BaseException as raised:
        error = raised
        raise
    finally:
        for entrant in entrants:
            entrant.leave(call, error)


def observed(
    observers: Sequence[Observer],
    call: Call,
    store: Any,
    make: Callable[..., T],
    args: Args,
    kwargs: Kwargs,
) -> T:
    """Call `make`; `observers` are told that `call` begins, and that it has ended."""
    telling = Telling(observers, store)
    with telling.until_end():
        telling.begin(call)
        return make(*args, **kwargs)


class Telling:
    """Tells observers of one creation: that it begins and, when the context is left, that it has ended."""

    def __init__(self, observers: Sequence[Observer], store: Any) -> None:
        self._observers, self._store = observers, store
        self._told: list[tuple[Observer, Call]] = []

    def begin(self, call: Call) -> None:
        """`call` begins."""
        for observer in self._observers:
            observer.begin(call, self._store)
            self._told.append((observer, call))

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """The creation ends with this context; told are those who have heard of its beginning."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            for observer, call in reversed(self._told):
                observer.end(call, error)


def site() -> str:
    """The innermost caller that is neither torch nor we, as `file:line function`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_passed_over(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


@cache
def _is_passed_over(module: str) -> bool:
    return module.partition(".")[0] in _PASSED_OVER
