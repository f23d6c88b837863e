# SPDX-License-Identifier: Apache-2.0
"""A creation: one call that makes a process group, seen on one rank.

Only what is equal on every rank that takes part is recorded: whether *this* rank is a member is not,
so no decision can depend on it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable, Mapping

# A call of a function of torch, and the function.
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Original = Callable[..., Any]

# How the creation came about.
WORLD = "world"  # init_process_group
COLLECTIVE = "collective"  # new_group, called on every rank of the world
LOCAL = "local"  # new_group(use_local_synchronization=True), called on members only
DIRECT = "direct"  # _new_process_group_helper, called by somebody else than torch
SPLIT = "split"  # split_group, called on every rank of the parent

# Who can split from the world's backend.
NOBODY = "nobody"
MEMBERS = "members"
ALL = "all"


@dataclass(frozen=True)
class Creation:
    """One creation of a process group.

    Attributes:
        kind: WORLD, COLLECTIVE, LOCAL, DIRECT or SPLIT.
        ranks: the group's ranks in the world, in group order; empty where the caller named none (the
            world itself, and direct calls that span other processes).  Of a split, those of the parent.
        backend: what was asked for, lower case: `nccl`, `cpu:gloo,cuda:nccl`.
        world_size: number of ranks in the world; 0 for the world's own creation.
        bound: the world has a device_id.
        device_backend: the backend that this group will have for the world's bound device (for a world
            that is not bound: the accelerator); None if it has none.
        world_device_backend: the backend that the world has for that device, likewise.
        world_splits: who can split from that backend: NOBODY, MEMBERS or ALL (ranks outside the group
            too, which takes `perform_nocolor_split`).
        partial: of a split, some of the parent's ranks are in none of the new groups.
        divides: of a split, it makes several groups.
        by_mesh: of a split, a DeviceMesh asked for it.
        even: of a split, the ranks of each new group are in equally many groups, as far as all ranks know.
    """

    kind: str
    ranks: tuple[int, ...]
    backend: str
    world_size: int
    bound: bool = False
    device_backend: str | None = None
    world_device_backend: str | None = None
    world_splits: str = NOBODY
    partial: bool = False
    divides: bool = False
    by_mesh: bool = False
    even: bool = True

    @property
    def splits_by_color(self) -> bool:
        """Every rank of a bound world takes part in one split, non-members without a colour."""
        return self.kind == COLLECTIVE and self.bound and self.same_backend and self.world_splits == ALL

    @property
    def may_be_own_part(self) -> bool:
        """Other ranks may name other ranks in this very call, each only the part that it is in."""
        return self.kind == COLLECTIVE and bool(self.ranks) and not self.spans_world

    @property
    def spans_world(self) -> bool:
        """The group holds every rank of the world."""
        return bool(self.ranks) and len(self.ranks) == self.world_size

    @property
    def same_backend(self) -> bool:
        """The group has, for the bound device, the backend that the world has."""
        return self.device_backend is not None and self.device_backend == self.world_device_backend


class CallForm:
    """Reads and replaces arguments of one function by name, however a caller passed them.

    The signature is taken from the function itself, so parameters that later releases add need no
    change here.  A parameter that this build does not have reads as None.
    """

    def __init__(self, function: Original) -> None:
        parameters = inspect.signature(function).parameters
        self._position = {name: index for index, name in enumerate(parameters)}
        self._default = {
            name: None if parameter.default is parameter.empty else parameter.default
            for name, parameter in parameters.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._position

    def get(self, args: Args, kwargs: Kwargs, name: str) -> Any:
        """The value that the function will see for `name`."""
        if name in kwargs:
            return kwargs[name]
        position = self._position.get(name, len(args))
        return args[position] if position < len(args) else self._default.get(name)

    def replace(self, args: Args, kwargs: Kwargs, **changes: Any) -> tuple[Args, dict[str, Any]]:
        """The same call with other values: positional arguments stay positional."""
        positional, keywords = list(args), dict(kwargs)
        for name, value in changes.items():
            position = self._position[name]
            if name not in keywords and position < len(positional):
                positional[position] = value
            else:
                keywords[name] = value
        return tuple(positional), keywords
