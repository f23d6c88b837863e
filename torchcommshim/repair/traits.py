# SPDX-License-Identifier: Apache-2.0
"""What this torch build does when it makes process groups.

Traits are probed in the build's own functions, not looked up by version: vendors ship builds between
releases (NGC 24.06 is 2.4.0a0), and patch releases change behaviour.  A version decides only what is
compiled and so cannot be probed.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any, Callable, Iterator, Optional

CodeOf = Callable[[str], Optional[CodeType]]

# Functions of torch.distributed.distributed_c10d that the shim wraps.
WRAPPED = (
    "init_process_group",
    "new_group",
    "_new_group_with_tag",
    "_new_process_group_helper",
    "_get_split_source",
    "_process_group_name",
)
# Those that a build need not have: 2.3 and 2.4 have no split_group.
OPTIONAL = ("split_group",)


@dataclass(frozen=True)
class Traits:
    """How one torch build makes process groups.

    Attributes:
        members_split_late: members of a new NCCL group connect on first use while non-members split
            at once (torch 2.3 and 2.4; pytorch#134314).
        split_ignores_backend: non-members split the world whatever backend the new group has (up to
            2.14; pytorch#145376).
        split_tests_size: a group as large as the world is split from it even when the world is not
            bound to a device, so perhaps not connected (2.3 to 2.5; pytorch#138781).
        point_to_point_splits: the first unbatched send or receive on a group that was split makes its
            two-rank communicator by another split (2.5; pytorch#139013; 2.4.1 was seen not to).  Compiled:
            by version.
        local_names_differ: `use_local_synchronization` groups get a name from state that differs
            between ranks (2.6 on; pytorch#173608).
        split_names_differ: `split_group` names a group by how many groups this rank is in, which differs
            between its ranks (2.10 to 2.13; pytorch#189073).
        split_counts_parent: `split_group` advances `group_count`, by which later groups are named, on the
            ranks of the parent only (2.5 to 2.9, and 2.14 on).
        split_counts_members: of those, only on ranks that are in one of the new groups (2.5 to 2.8;
            pytorch#145376).
        split_names_shared: the groups of one `split_group` have one name, and so the same keys in the store
            (2.5 to 2.9), under which pairs of ranks connect, and on 2.9 gloo.
        split_wants_one_backend: `split_group` raises for a parent made with `cuda:nccl` or
            `cpu:gloo,cuda:nccl`, which it takes for the name of one backend (2.8; pytorch#159200).
        device_picks_backend: `init_process_group(device_id=...)` without a backend takes only that
            device's default backend (2.6 on), where earlier releases take one for each device.
        accepts_int_device: `init_process_group(device_id=0)` is understood (2.8 on).
        nonblocking_by_default: NCCL's non-blocking mode is on for a bound world and hangs at random
            (2.7.0 only; pytorch#153960).  Compiled: by version.
        connects_without_waiting: creating a bound world may return before all ranks have connected,
            because non-blocking mode is the default (2.6.0 and 2.7.0).  Compiled: by version.
        barrier_asks_backend: `barrier` takes its device from the backend's own binding before it guesses
            one (2.5.0 to 2.7.0; pytorch#134617), not from the current device.  Compiled: by version.
        missing: why this build is left alone, one sentence each; empty for a build that is served.
        found: how each trait was found, by name.
    """

    members_split_late: bool = False
    split_ignores_backend: bool = False
    split_tests_size: bool = False
    point_to_point_splits: bool = False
    local_names_differ: bool = False
    split_names_differ: bool = False
    split_counts_parent: bool = False
    split_counts_members: bool = False
    split_names_shared: bool = False
    split_wants_one_backend: bool = False
    device_picks_backend: bool = False
    accepts_int_device: bool = False
    nonblocking_by_default: bool = False
    connects_without_waiting: bool = False
    barrier_asks_backend: bool = False
    missing: tuple[str, ...] = ()
    found: dict[str, str] = field(default_factory=dict, compare=False, hash=False)

    def digest(self) -> str:
        """The names of the traits that hold, joined by `+`: for comparing and for people."""
        return "+".join(name for name, value in asdict(self).items() if value is True) or "none"


def probe(code_of: CodeOf, version: str) -> Traits:
    """Probe a torch build.

    Args:
        code_of: the code object of a function of `torch.distributed.distributed_c10d`, by name, or
            None where there is no such Python function.
        version: torch's version string, e.g. `2.4.1+cu121`.

    Returns:
        The build's `Traits`.  Never raises for a build that it does not know; `missing` says why such
        a build is left alone.
    """
    missing = tuple(_reasons_to_stand_aside(code_of))
    if missing:
        return Traits(missing=missing)

    def names(function: str) -> set[str]:
        code = code_of(function)
        return set(code.co_names) if code else set()

    def arguments(function: str) -> tuple[str, ...]:
        code = code_of(function)
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()

    numbers = release(version)
    found: dict[str, str] = {}

    def by_code(trait: str, value: bool, how: str) -> bool:
        found[trait] = how
        return value

    def by_version(trait: str, value: bool, which: str) -> bool:
        found[trait] = f"torch {which}, this is {version}"
        return value

    late = "bound_device_id" not in names("_new_group_with_tag")
    hashed = names("_hash_ranks_to_str")
    splits, splits_by_hash = code_of("split_group"), _has_true(code_of("split_group"))
    return Traits(
        members_split_late=by_code(
            "members_split_late", late, "_new_group_with_tag does not read the world's bound_device_id"
        ),
        split_ignores_backend=by_code(
            "split_ignores_backend",
            "requested_backend" not in arguments("_get_split_source"),
            "_get_split_source is not told the requested backend",
        ),
        split_tests_size=by_version("split_tests_size", (2, 3) <= numbers < (2, 6), "2.3 to 2.5"),
        point_to_point_splits=by_version("point_to_point_splits", (2, 5) <= numbers < (2, 6), "2.5"),
        local_names_differ=by_code(
            "local_names_differ",
            bool(hashed & {"pg_names", "group_count"}),
            "_hash_ranks_to_str reads a counter of this process",
        ),
        split_names_differ=by_code(
            "split_names_differ",
            splits_by_hash and "pg_names" in hashed,
            "split_group hashes the number of this process's groups",
        ),
        split_counts_parent=by_code(
            "split_counts_parent",
            splits is not None and not (splits_by_hash and "group_count" not in hashed),
            "split_group advances group_count",
        ),
        split_counts_members=by_code(
            "split_counts_members",
            "perform_nocolor_split" in names("split_group"),
            "split_group returns on ranks left out before it names the group",
        ),
        split_names_shared=by_code(
            "split_names_shared",
            splits is not None and not splits_by_hash,
            "split_group does not hash the ranks of a group into its name",
        ),
        split_wants_one_backend=by_code(
            "split_wants_one_backend",
            "_plugins" in names("split_group"),
            "split_group looks the parent's whole backend string up",
        ),
        device_picks_backend=by_code(
            "device_picks_backend",
            "default_device_backend_map" in names("init_process_group"),
            "init_process_group reads default_device_backend_map",
        ),
        accepts_int_device=by_code(
            "accepts_int_device",
            {"isinstance", "int"} <= names("init_process_group"),
            "init_process_group tests for int",
        ),
        nonblocking_by_default=by_version("nonblocking_by_default", numbers[:3] == (2, 7, 0), "2.7.0"),
        connects_without_waiting=by_version(
            "connects_without_waiting", numbers[:3] in ((2, 6, 0), (2, 7, 0)), "2.6.0 and 2.7.0"
        ),
        barrier_asks_backend=by_version(
            "barrier_asks_backend", (2, 5) <= numbers < (2, 7, 1), "2.5.0 to 2.7.0"
        ),
        found=found,
    )


def _has_true(code: CodeType | None) -> bool:
    """It passes the constant True: `_process_group_name(..., use_hashed_name=True)`."""
    return code is not None and any(constant is True for constant in code.co_consts)


def _reasons_to_stand_aside(code_of: CodeOf) -> Iterator[str]:
    for name in WRAPPED:
        if code_of(name) is None:
            yield f"torch.distributed.distributed_c10d has no Python function {name}"
    helper, init = code_of("_new_process_group_helper"), code_of("init_process_group")
    if init and "device_id" not in init.co_varnames[: init.co_argcount + init.co_kwonlyargcount]:
        yield "init_process_group takes no device_id, so nothing can split"
    if helper and "_get_split_source" not in helper.co_names:
        yield "_new_process_group_helper does not consult _get_split_source"
    if helper and "perform_nocolor_split" not in helper.co_names:
        yield "_new_process_group_helper never splits on non-members"


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with; a parser of all that versions may be takes longer to import."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def code_of_module(module: Any) -> CodeOf:
    """A `CodeOf` for a loaded module; looks beneath decorators that keep `__wrapped__`."""
    import inspect

    def code_of(name: str) -> CodeType | None:
        function = getattr(module, name, None)
        return getattr(inspect.unwrap(function), "__code__", None) if function is not None else None

    return code_of
