# SPDX-License-Identifier: Apache-2.0
"""A call: one creation as this rank makes it, for those who watch creations and change none.

A `Creation` holds what is equal on all ranks, and decisions rest on nothing else.  A `Call` adds what is
this rank's own: its number, its name, and the line of the script that made it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Callable, NamedTuple, Protocol, TypeVar, runtime_checkable

from torchcommshim.repair.creations import Args, Kwargs
from torchcommshim.repair.rendezvous import Rendezvous

# Frames between a script and the creation: torch's own, and ours.
_PASSED_OVER = ("torch", "torchcommshim", "wrapt", "contextlib")

T = TypeVar("T")


class Call(NamedTuple):
    """One creation on this rank.

    Attributes:
        number: of this rank's creations in its world, in order; the world's own is 0.
        kind: creations.WORLD, COLLECTIVE, LOCAL or DIRECT.
        ranks: the group's ranks in the world, in group order; empty where the caller named none, as a direct
            call that spans other processes does.
        backend: what was asked for, lower case.
        name: torch's name of the group.
        rank, world_size: this rank, and how many there are.
        shared: other processes are on the other side; not so in a dry run, over a fake backend.
        site: the caller outside torch, `file:line function`; empty where nobody observes.
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
    told: list[Observer] = []
    error: BaseException | None = None
    try:
        for observer in observers:
            observer.begin(call, store)
            told.append(observer)
        return make(*args, **kwargs)
    except BaseException as raised:
        error = raised
        raise
    finally:
        for observer in reversed(told):
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
