# SPDX-License-Identifier: Apache-2.0
"""What the wrappers around torch.distributed's group creation do.

| wrapped                            | what the wrapper does                                               |
| ---------------------------------- | ------------------------------------------------------------------- |
| `init_process_group`               | marks the world's creation, strips it if asked, confirms agreement  |
| `new_group`, `_new_group_with_tag` | mark a creation, and whether it is by local synchronization         |
| `_process_group_name`              | names local-synchronization and split groups alike on all ranks     |
| `_new_process_group_helper`        | describes the creation, decides, and acts on the arguments          |
| `_get_split_source`                | answers None while an independent creation is made                  |
| `split_group`, where there is one  | describes the creation; keeps torch's counter alike on all ranks    |

Collectives are not wrapped.  Each wrapper's own part is guarded: an error in it is one line on stderr,
and the original function is called as it was.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence, TypeVar, Union
from weakref import WeakKeyDictionary

from torchcommshim.ranges import bracketed
from torchcommshim.repair.calls import (
    Call,
    Entrant,
    Observer,
    Split,
    Telling,
    entered,
    observed,
    site,
)
from torchcommshim.repair.creations import (
    COLLECTIVE,
    DIRECT,
    LOCAL,
    SPLIT,
    WORLD,
    Args,
    CallForm,
    Creation,
    Kwargs,
    Original,
)
from torchcommshim.repair.defects import MESH_CANNOT_SPLIT, SPLIT_BACKEND, Defect
from torchcommshim.repair.names import KnownGroups, nested_name, part_name
from torchcommshim.repair.names import digest as _digest
from torchcommshim.repair.policy import INDEPENDENT, NONE, NOTHING, SPLIT_NOW, Decision, decide
from torchcommshim.repair.rendezvous import Rendezvous, rendezvous
from torchcommshim.repair.torch_state import TorchState
from torchcommshim.repair.worlds import World, Worlds
from torchcommshim.tell.agreement import PREFIX
from torchcommshim.tell.report import Report

T = TypeVar("T")

_DONE = {
    INDEPENDENT: "made without splitting the world's communicator",
    SPLIT_NOW: "split on its members at once, together with the other ranks",
}


class Mark(NamedTuple):
    """The next call of the helper belongs to this creation; `site` as in `Call`."""

    kind: str
    site: str
    world: World | None = None


@dataclass
class Plan:
    """What is done about one call of the helper.

    Attributes:
        creation: one of the same sort, whose ranks may be others.
        ranks: of this one.
        decision: what is done.
        args, kwargs: the call that is made.
        speaks: it is for this rank to say so.
        counted: it has been counted as a repair.
    """

    creation: Creation
    ranks: tuple[int, ...]
    decision: Decision
    args: Args
    kwargs: Kwargs
    speaks: bool
    counted: bool = False


@dataclass
class Splitting:
    """A call of `split_group` under way.

    Attributes:
        call: the creation; its number and name follow when torch names it.
        memory: of the world.
        of_world: it is the world that is split.
        plan: what is done about it; None for nothing.
        telling: to the observers.
        begun: they have been told that it begins.
    """

    call: Call
    memory: Memory
    of_world: bool
    plan: Plan | None
    telling: Telling
    begun: bool = False

    def is_struck_by(self, defect: Defect) -> bool:
        """`defect` would break it."""
        return self.plan is not None and defect in self.plan.decision.defects


Frame = Union[Mark, Plan, Splitting, None]


class _UnderWay(threading.local):
    """The innermost creation under way in this thread: a mark until its call of the helper, then the plan.

    Creations nest, since a backend's creator may make groups, and threads make groups at the same time.
    """

    frame: Frame = None


_under_way = _UnderWay()


def _within(frame: Frame, function: Callable[..., T], args: Args, kwargs: Kwargs) -> T:
    """Call `function` with `frame` as the innermost creation under way."""
    before, _under_way.frame = _under_way.frame, frame
    try:
        return function(*args, **kwargs)
    finally:
        _under_way.frame = before


@dataclass
class Memory:
    """What is known of a world as long as it lives; asking torch each time would cost more than the rest.

    Attributes:
        rank, size: of this process in the world, and of the world.
        store: the world's.
        shared: there are other processes; not so in a dry run.
        stripped: the shim dropped its device_id.
        local_creations: how often exactly these ranks have made a local-synchronization group.
        known: the groups that all ranks know of.
        seen_by: the shim that saw the world being made, if one did.
        splits: how often each group has been split, by its name.
        numbers: of the creations on this rank; the world's own is 0.
        decided: the first creation of each sort, and what is done about all of it; None for nothing.
        unconfirmed: its ranks are yet to compare what they have posted.
    """

    rank: int
    size: int
    store: Any
    shared: bool
    stripped: bool = False
    unconfirmed: World | None = None
    local_creations: Counter[tuple[int, ...]] = field(default_factory=Counter)
    known: KnownGroups = field(default_factory=KnownGroups)
    seen_by: Any = None
    splits: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    decided: dict[tuple[object, ...], tuple[Creation, Decision] | None] = field(default_factory=dict)


# By world, not by process: ranks may be threads (torch's MultiThreadedTestCase), and a shim that is removed
# and installed again finds the same groups.
_memories: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


class Shim:
    """What the wrappers do, and their common state, for one loaded `torch.distributed.distributed_c10d`."""

    def __init__(
        self,
        state: TorchState,
        originals: Mapping[str, Original],
        current: Report,
        observers: Sequence[Observer],
    ) -> None:
        self.state = state
        self.forms = {name: CallForm(function) for name, function in originals.items()}
        self.helper = self.forms["_new_process_group_helper"]
        self.report = current
        self.traits = current.traits
        self.strategy, self.acts = current.settings.strategy, current.settings.acts
        self.observers = observers
        self.entrants = [each for each in observers if isinstance(each, Entrant)]
        self.worlds = Worlds(state, self.forms, current)

    def actions(self) -> dict[str, Callable[[Original, Args, Kwargs], Any]]:
        """What is done in place of each function: `(original, args, kwargs)`."""
        return {
            "init_process_group": self._init_process_group,
            "new_group": partial(self._mark_group, self.forms["new_group"]),
            "_new_group_with_tag": partial(self._mark_group, self.forms["_new_group_with_tag"]),
            "_process_group_name": self._name_group,
            "_new_process_group_helper": self._help,
            "_get_split_source": self._get_split_source,
            "split_group": self._split_group,
        }

    def _init_process_group(self, original: Original, args: Args, kwargs: Kwargs) -> Any:
        world = self._guarded(self.worlds.plan, args, kwargs) or World(args, kwargs)
        mark = Mark(WORLD, self._site(), world)
        entry = self._guarded(self._describe_entry, mark.site, world) if self.entrants else None
        made = (mark, original, world.args, world.kwargs)
        result = entered(self.entrants, *entry, _within, *made) if entry else _within(*made)
        if "split_group" in self.forms:
            self._guarded(self._note_seen)
        if world.stripped:
            self._guarded(self._note_stripped)
            self._guarded(self.worlds.keep_device, world)
        if world.post is not None and world.bound:
            self.worlds.confirm(world, world.post)
        elif world.post is not None:
            self._guarded(self._note_unconfirmed, world)
        return result

    def _mark_group(self, form: CallForm, original: Original, args: Args, kwargs: Kwargs) -> Any:
        """Both functions are marked: functional collectives call the inner one, vendors replace it."""
        mark = _under_way.frame
        if isinstance(mark, Mark) and mark.world is None:
            return original(*args, **kwargs)
        local = form.get(args, kwargs, "use_local_synchronization")
        return _within(Mark(LOCAL if local else COLLECTIVE, self._site()), original, args, kwargs)

    def _name_group(self, original: Original, args: Args, kwargs: Kwargs) -> Any:
        mark = _under_way.frame
        if isinstance(mark, Splitting) and not mark.begun:
            return self._name_split(mark, original, args, kwargs)
        local = isinstance(mark, Mark) and mark.kind == LOCAL
        if local and self.acts and self.traits.local_names_differ and not self.state.uses_torchcomms():
            name = self._guarded(self._local_name, args, kwargs)
            if name is not None:
                return name
        return original(*args, **kwargs)

    def _split_group(self, original: Original, args: Args, kwargs: Kwargs) -> Any:
        splitting = self._guarded(self._describe_split, args, kwargs)
        if splitting is None:
            return _within(None, original, args, kwargs)
        if self.acts and splitting.is_struck_by(MESH_CANNOT_SPLIT):
            return self._make_by_groups(splitting, args, kwargs)
        with splitting.telling.until_end(), self._one_backend(splitting, args, kwargs):
            if self.traits.split_counts_members and not splitting.call.ranks:
                self._begin_split(splitting, "")  # torch will not name the group on this rank
            result = _within(splitting, original, args, kwargs)
        if splitting.plan is not None:
            self._guarded(self._keep_count, splitting)
        return result

    def _name_split(self, splitting: Splitting, original: Original, args: Args, kwargs: Kwargs) -> Any:
        """The name of a split group, and, right before torch makes it, word to the observers."""
        name = self._guarded(self._split_name, splitting) if self.acts else None
        if name is None:
            name = original(*args, **kwargs)
            if self.acts and self.traits.split_names_shared and splitting.call.ranks:
                name = _apart(str(name), splitting)
        self._begin_split(splitting, str(name))
        return name

    def _help(self, original: Original, args: Args, kwargs: Kwargs) -> Any:
        mark = _under_way.frame
        if isinstance(mark, Mark):
            _under_way.frame = None  # a mark is for one call of the helper
        else:
            mark = Mark(DIRECT, self._site())
        if mark.world is not None:
            return self._make_world(mark.world, mark.site, original, args, kwargs)
        described = self._guarded(self._describe, mark, args, kwargs)
        if described is None:
            return _within(None, original, args, kwargs)
        call, memory = described
        plan = self._guarded(self._plan, call, memory, args, kwargs)
        if plan is not None:
            args, kwargs = plan.args, plan.kwargs
            self._confirm(memory)
        told = (self.observers, call, memory.store, original, args, kwargs)
        result = _within(plan, observed, told, {})
        if plan is not None and self.acts and plan.decision.remedy == SPLIT_NOW:
            self._guarded(self._forget_split_source, result)
        return result

    def _make_world(self, world: World, site: str, original: Original, args: Args, kwargs: Kwargs) -> Any:
        self._guarded(self.worlds.begin, world, args, kwargs)
        described = self._guarded(self._describe_world, site, args, kwargs) if self.observers else None
        if described is None:
            return self._make_in_turn(original, args, kwargs)
        return observed(self.observers, *described, self._make_in_turn, (original, args, kwargs), {})

    def _make_in_turn(self, original: Original, args: Args, kwargs: Kwargs) -> Any:
        """Make a world, with keys of its own where its store has served one before."""
        turn = self._guarded(self.worlds.take_turn, args, kwargs)
        if turn is not None and turn.prefix:
            store = self.state.c10d.PrefixStore(turn.prefix, turn.store)
            args, kwargs = self.helper.replace(args, kwargs, store=store)
        failed = True
        try:
            result = original(*args, **kwargs)
            failed = False
            return result
        finally:
            if turn is not None:
                self._guarded(turn.end, failed)

    def _get_split_source(self, original: Original, args: Args, kwargs: Kwargs) -> Any:
        source, plan = original(*args, **kwargs), _under_way.frame
        if source is None or not isinstance(plan, Plan) or plan.decision.remedy == NONE:
            return source
        self._guarded(self._count, plan)
        return None if self.acts and plan.decision.remedy == INDEPENDENT else source

    def _site(self) -> str:
        """Found where a creation is marked: from the helper on, many more frames are between."""
        found = self._guarded(site) if self.observers else None
        return found or ""

    def _note_seen(self) -> None:
        """From its beginning on, all of this world's groups pass by here."""
        if self.state.world is not None:
            memory = self._memory(self.state.world)
            memory.seen_by, memory.known.complete = self, True

    def _confirm(self, memory: Memory) -> None:
        """Compare with the other ranks, in a world that was made without: before the first change.

        torch would wait for no rank outside the group here, so neither does this.
        """
        world, memory.unconfirmed = memory.unconfirmed, None
        if world is not None and world.post is not None and self.acts:
            self.worlds.confirm(world, world.post)

    def _note_unconfirmed(self, world: World) -> None:
        self._memory(self.state.world).unconfirmed = world

    def _note_stripped(self) -> None:
        self._memory(self.state.world).stripped = True

    def _memory(self, world: Any) -> Memory:
        memory = _memories.get(world)
        if memory is None:
            shared = self.worlds.is_shared(self.state.world_backend)
            fresh = Memory(world.rank(), world.size(), self.state.store, shared)
            memory = _memories.setdefault(world, fresh)
        elif memory.seen_by not in (self, None):  # a shim that has been removed in the meantime
            memory.seen_by, memory.known.complete = None, False
        return memory

    def _describe_entry(self, site: str, world: World) -> tuple[Call, Rendezvous] | None:
        """The world's creation as far as it is known when it is entered, and where its ranks meet."""
        if self.state.uses_torchcomms() or self.state.world is not None:
            return None
        form, names = self.forms["init_process_group"], ("init_method", "rank", "world_size", "store")
        arguments = {name: form.get(world.args, world.kwargs, name) for name in names}
        found = rendezvous(arguments, os.environ)
        if found is None:
            return None
        backend = str(form.get(world.args, world.kwargs, "backend") or "undefined").lower()
        shared = backend == "undefined" or self.worlds.is_shared(backend)
        ranks = tuple(range(found.size))
        return Call(0, WORLD, ranks, backend, "", found.rank, found.size, shared, site), found

    def _describe_world(self, site: str, args: Args, kwargs: Kwargs) -> tuple[Call, Any] | None:
        """The world's own creation, and the store that it is made over."""
        if self.state.uses_torchcomms():
            return None
        get = partial(self.helper.get, args, kwargs)
        backend, size = str(get("backend")).lower(), get("group_size")
        shared = self.worlds.is_shared(backend)
        name, rank = str(get("group_name")), get("group_rank")
        return Call(0, WORLD, tuple(range(size)), backend, name, rank, size, shared, site), get("store")

    def _describe(self, mark: Mark, args: Args, kwargs: Kwargs) -> tuple[Call, Memory] | None:
        """The creation that this call of the helper is, and what is known of its world."""
        world = self.state.world
        if world is None or self.state.uses_torchcomms():
            return None
        get, memory = self.helper.get, self._memory(world)
        number, ranks = next(memory.numbers), _ranks(get(args, kwargs, "global_ranks_in_group"))
        if mark.kind == COLLECTIVE and self.traits.split_names_differ:
            memory.known.add(ranks)
        backend, name = str(get(args, kwargs, "backend")).lower(), str(get(args, kwargs, "group_name"))
        rank, size, shared = memory.rank, memory.size, memory.shared
        call = Call(number, mark.kind, ranks, backend, name, rank, size, shared, mark.site)
        return call, memory

    def _plan(self, call: Call, memory: Memory, args: Args, kwargs: Kwargs) -> Plan | None:
        device = self.state.world.bound_device_id
        may_split = device is not None or (self.traits.split_tests_size and len(call.ranks) == memory.size)
        if call.kind != LOCAL and not (may_split or memory.shared or memory.stripped):
            return None  # nobody to be kept apart from, over backends that may answer no questions
        # Of its ranks, a decision depends on their number alone; a test holds the policy to that.
        sort = (call.kind, call.backend, device, len(call.ranks), self.strategy)
        if sort not in memory.decided:
            memory.decided[sort] = self._decide(call, memory)
        decided = memory.decided[sort]
        if decided is None:
            return None
        speaks = self._speaks(call, self.helper.get(args, kwargs, "group_rank"))
        creation, decision = decided
        plan = Plan(creation, call.ranks, decision, args, kwargs, speaks)
        if decision.rename or decision.unbind:
            self._count(plan)
        if self.acts:
            plan.args, plan.kwargs = self.helper.replace(args, kwargs, **self._changes(plan))
        return plan

    def _decide(self, call: Call, memory: Memory) -> tuple[Creation, Decision] | None:
        creation = self.state.describe(call.kind, call.ranks, call.backend)
        decision = decide(creation, self.traits, self.strategy)
        return None if decision == NOTHING else (creation, decision)

    def _changes(self, plan: Plan) -> dict[str, Any]:
        """The helper's arguments that the decision replaces."""
        changes: dict[str, Any] = {}
        get = partial(self.helper.get, plan.args, plan.kwargs)
        if plan.decision.remedy == SPLIT_NOW:
            changes["device_id"] = self.state.world.bound_device_id
        if plan.decision.unbind:
            changes["device_id"] = None
        if plan.decision.remedy == INDEPENDENT:
            options = "backend_options" if "backend_options" in self.helper else "pg_options"
            _clear_split_source(get(options))
        if plan.decision.apart and get("group_rank") is not None:  # others do not use it
            # Ranks may each name their own group in one call.  Split by colour that works; what
            # connects through the store, now the group or later its pairs, needs keys of its own.
            store = get("store")
            prefix = f"{PREFIX}/{_digest(plan.ranks)}"
            changes["store"] = self.state.c10d.PrefixStore(prefix, store)
        return changes

    def _local_name(self, args: Args, kwargs: Kwargs) -> str:
        """A name made from what all members know: the ranks, and how often they have met before.

        torch adds a counter that not all ranks advance (pytorch#173608).  Not calling its function also
        leaves `group_count` alone, which 2.14 and later advance on members only.
        """
        ranks = _ranks(self.forms["_process_group_name"].get(args, kwargs, "ranks"))
        made = self._memory(self.state.world).local_creations
        made[ranks] += 1
        return f"local_{_digest(ranks)}_{made[ranks]}"

    # -- split_group ---------------------------------------------------------------------------------------

    def _describe_split(self, args: Args, kwargs: Kwargs) -> Splitting | None:
        """This call of `split_group`; None for one that torch will refuse."""
        c10d, world = self.state.c10d, self.state.world
        if world is None or self.state.uses_torchcomms():
            return None
        get = partial(self.forms["split_group"].get, args, kwargs)
        parent, parts = get("parent_pg") or world, get("split_ranks")
        memory = self._memory(world)
        places = c10d._world.pg_group_ranks.get(parent)
        if not places or not parts or memory.rank not in places:
            return None
        ranks = tuple(sorted(places, key=places.__getitem__))
        named = tuple(tuple(ranks[place] for place in _ranks(part)) for part in parts)
        name = str(c10d._world.pg_names[parent])
        memory.splits[name] += 1
        even = not self.traits.split_names_differ or all(map(memory.known.are_even, named))
        split = Split(name, memory.splits[name], ranks, named, even, _is_called_by_mesh())
        own = next((part for part in named if memory.rank in part), ())
        backend = str(get("backend") or c10d._world.pg_map[parent][0]).lower()
        site = self._site()
        call = Call(0, SPLIT, own, backend, "", memory.rank, memory.size, memory.shared, site, split)
        telling = Telling(self.observers, memory.store)
        splitting = Splitting(call, memory, parent is world, None, telling)
        splitting.plan = self._plan_split(splitting, split)
        return splitting

    def _plan_split(self, splitting: Splitting, split: Split) -> Plan | None:
        call, memory = splitting.call, splitting.memory
        device = self.state.world.bound_device_id
        shape = (len(split.ranks), split.partial, len(split.parts) > 1, split.by_mesh, split.even)
        sort = (SPLIT, call.backend, device, memory.stripped, *shape)
        if sort not in memory.decided:
            creation = self.state.describe(SPLIT, (), call.backend, split=split)
            decision = decide(creation, self.traits, self.strategy)
            memory.decided[sort] = None if decision == NOTHING else (creation, decision)
        decided = memory.decided[sort]
        if decided is None:
            return None
        return Plan(decided[0], split.ranks, decided[1], (), {}, speaks=call.rank == split.ranks[0])

    def _leaves_count(self, splitting: Splitting) -> bool:
        """torch would advance its counter on the ranks of the parent, which are not all ranks."""
        call, split = splitting.call, splitting.call.split
        assert split is not None
        return self.traits.split_counts_parent and len(split.ranks) < call.world_size

    def _split_name(self, splitting: Splitting) -> str | None:
        """The name for this rank's part; None where torch's own is the same on all of its ranks."""
        split, memory = splitting.call.split, splitting.memory
        assert split is not None
        part = splitting.call.ranks or split.parts[0]  # as torch does for a rank that is left out
        if splitting.of_world and self.traits.split_names_differ and memory.known.complete:
            return memory.known.name(part)
        if self.traits.split_names_differ or self._leaves_count(splitting):
            return nested_name(split.parent, part, split.turn)
        return None

    def _begin_split(self, splitting: Splitting, name: str) -> None:
        """It is clear that torch makes the groups, and which name this rank's has."""
        splitting.begun = True
        split, memory = splitting.call.split, splitting.memory
        assert split is not None
        if splitting.of_world and self.traits.split_names_differ:
            for part in split.parts:
                memory.known.add(part)
        if splitting.plan is not None:
            self._count(splitting.plan)
        splitting.telling.begin(splitting.call._replace(number=next(memory.numbers), name=name))

    def _make_by_groups(self, splitting: Splitting, args: Args, kwargs: Kwargs) -> Any:
        """By `new_group` for each part, as a DeviceMesh makes its groups where no world can be split."""
        get, split, own = partial(self.forms["split_group"].get, args, kwargs), splitting.call.split, None
        if splitting.plan is not None:
            self._count(splitting.plan)
        for part in split.parts if split is not None else ():
            more = {name: get(name) for name in ("timeout", "pg_options", "group_desc")}
            group = self.state.c10d.new_group(list(part), **more)
            own = group if splitting.call.rank in part else own
        return own

    def _keep_count(self, splitting: Splitting) -> None:
        """Advance torch's counter on the ranks left out too, where a split of all ranks advances it."""
        call, split = splitting.call, splitting.call.split
        assert split is not None
        is_left_out = self.traits.split_counts_members and not call.ranks
        if self.acts and is_left_out and len(split.ranks) == call.world_size:
            self.state.c10d._world.group_count += 1

    @contextmanager
    def _one_backend(self, splitting: Splitting, args: Args, kwargs: Kwargs) -> Iterator[None]:
        """While `split_group` looks at the parent, its backend string is the one of the device (2.8)."""
        plan = splitting.plan
        if plan is None or not (self.acts and splitting.is_struck_by(SPLIT_BACKEND)):
            yield
            return
        known = self.state.c10d._world.pg_map
        parent = self.forms["split_group"].get(args, kwargs, "parent_pg") or self.state.world
        before = known[parent]
        known[parent] = (plan.creation.device_backend, *before[1:])
        try:
            yield
        finally:
            known[parent] = before

    def _forget_split_source(self, result: Any) -> None:
        """Once connected, a group needs its parent no more; sends and receives would split it again."""
        group = result[0]
        device = getattr(group, "bound_device_id", None)
        if device is not None:
            _clear_split_source(group._get_backend(device).options)

    def _count(self, plan: Plan) -> None:
        if not plan.counted:
            plan.counted = True
            names = [defect.name for defect in plan.decision.defects]
            self.report.repaired(names, partial(self._line, plan), speak=plan.speaks)

    def _line(self, plan: Plan) -> str:
        creation, ranks, defect = plan.creation, plan.ranks, plan.decision.defects[0]
        group = f"{creation.kind} group{f' {bracketed(ranks)}' if ranks else ''} ({creation.backend})"
        if creation.kind == SPLIT:
            group = f"split_group of {bracketed(ranks)} ({creation.backend})"
        done = _DONE.get(plan.decision.remedy, defect.cure)
        if self.strategy == "observe":
            done = f"it would be {done}, but TORCHCOMMSHIM=observe"
        return (
            f"{group}: {done}. On torch {self.report.torch_version} {defect.title} ({defect.upstream}). "
            "Further repairs are counted, not printed; TORCHCOMMSHIM=off leaves all as it was."
        )

    def _speaks(self, call: Call, group_rank: Any) -> bool:
        """One rank speaks of a creation: of one that all ranks make, the world's first."""
        if call.kind == COLLECTIVE:
            return call.rank == 0
        return call.kind == DIRECT or group_rank == 0

    def _guarded(self, function: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return function(*arguments)
        except Exception as error:
            self.report.failed(function.__name__, error)
            return None


def _ranks(given: Any) -> tuple[int, ...]:
    """A list of ranks as plain numbers; a direct caller may name none."""
    return () if given is None else tuple(map(int, given))


def _apart(name: str, splitting: Splitting) -> str:
    """A name of its own for each of several parts, where torch gives all of them one."""
    split, part = splitting.call.split, splitting.call.ranks
    return part_name(name, part) if split is not None and len(split.parts) > 1 else name


_BETWEEN = ("torchcommshim", "torch._dynamo", "contextlib")


def _is_called_by_mesh() -> bool:
    """The innermost caller is torch's DeviceMesh, beside ourselves and what keeps us from being compiled."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.distributed.device_mesh"


def _clear_split_source(options: Any) -> None:
    """torch leaves `split_from` in the caller's options, where a later group would find it."""
    if getattr(options, "split_from", None) is not None:
        options.split_from = None
