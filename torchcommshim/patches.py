# SPDX-License-Identifier: Apache-2.0
"""The wrappers around torch.distributed's group creation.

| wrapped                            | what the wrapper does                                               |
| ---------------------------------- | ------------------------------------------------------------------- |
| `init_process_group`               | marks the world's creation, strips it if asked, confirms agreement  |
| `new_group`, `_new_group_with_tag` | mark a creation, and whether it is by local synchronization         |
| `_process_group_name`              | names a local-synchronization group alike on all its ranks          |
| `_new_process_group_helper`        | decides by the mark, and acts on the arguments                      |
| `_get_split_source`                | answers None while an independent creation is made                  |

Collectives are not wrapped.  Each wrapper's own part is guarded: an error in it is one line on stderr,
and the original function is called as it was.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import Any, Callable, Iterator, Mapping, TypeVar
from weakref import WeakKeyDictionary

import wrapt

import torchcommshim
from torchcommshim import report, settings
from torchcommshim.agreement import PREFIX
from torchcommshim.calls import Call, Observer, observed, site
from torchcommshim.creations import COLLECTIVE, DIRECT, LOCAL, WORLD, CallForm, Creation
from torchcommshim.policy import INDEPENDENT, NONE, NOTHING, SPLIT_NOW, Decision, decide
from torchcommshim.torch_state import TorchState
from torchcommshim.traits import WRAPPED, code_of_module, probe
from torchcommshim.worlds import World, Worlds

TARGET = "torch.distributed.distributed_c10d"

T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Original = Callable[..., Any]


class Patched(wrapt.FunctionWrapper):  # type: ignore[misc, type-arg, unused-ignore]
    """A wrapper that pickles and copies as the function does: by its name in its module."""

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__wrapped__.__name__)

    def __reduce__(self) -> str:
        return self.__reduce_ex__(2)

    def __copy__(self) -> Patched:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Patched:
        return self


@dataclass
class Mark:
    """The next call of the helper belongs to this creation; `used` once it has begun."""

    kind: str
    world: World | None = None
    used: bool = False


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


class Stack(threading.local):
    """The creations under way in this thread, innermost last.

    They nest, since a backend's creator may make groups, and threads make groups at the same time.
    """

    def __init__(self) -> None:
        self._frames: list[Mark | Plan | None] = []

    @property
    def mark(self) -> Mark | None:
        """The innermost frame, if it is a mark that waits for its call of the helper."""
        top = self._frames[-1] if self._frames else None
        return top if isinstance(top, Mark) and not top.used else None

    @property
    def plan(self) -> Plan | None:
        """The innermost frame, if it is a plan."""
        top = self._frames[-1] if self._frames else None
        return top if isinstance(top, Plan) else None

    def inside(self, frame: Mark | Plan | None) -> Stack:
        """Hold `frame` as the innermost one: `with stack.inside(frame)`."""
        self._frames.append(frame)
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None:
        self._frames.pop()


@dataclass
class Memory:
    """What is known of a world as long as it lives; asking torch each time would cost more than the rest.

    Attributes:
        rank, size: of this process in the world, and of the world.
        store: the world's.
        shared: there are other processes; not so in a dry run.
        stripped: the shim dropped its device_id.
        local_creations: how often exactly these ranks have made a local-synchronization group.
        numbers: of the creations on this rank; the world's own is 0.
        decided: the first creation of each sort, and what was decided.
    """

    rank: int
    size: int
    store: Any
    shared: bool
    stripped: bool = False
    local_creations: Counter[tuple[int, ...]] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    decided: dict[tuple[object, ...], tuple[Creation, Decision]] = field(default_factory=dict)


# By world, not by process: ranks may be threads (torch's MultiThreadedTestCase), and a shim that is removed
# and installed again finds the same groups.
_memories: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


class Shim:
    """The wrappers and their common state, for one loaded `torch.distributed.distributed_c10d`."""

    def __init__(self, c10d: Any, current: report.Report) -> None:
        self.report = current
        self.traits = current.traits
        self.acts = current.settings.acts
        self.state = TorchState(c10d)
        self.forms = {name: CallForm(getattr(c10d, name)) for name in WRAPPED}
        self.worlds = Worlds(self.state, self.forms, current)
        self.stack = Stack()
        self.observers = _observers(current, self.state)

    def wrappers(self) -> dict[str, Callable[..., Any]]:
        """The wrapper of each function, in wrapt's form `(wrapped, instance, args, kwargs)`."""
        return {
            "init_process_group": self._init_process_group,
            "new_group": partial(self._mark_group, "new_group"),
            "_new_group_with_tag": partial(self._mark_group, "_new_group_with_tag"),
            "_process_group_name": self._name_group,
            "_new_process_group_helper": self._help,
            "_get_split_source": self._get_split_source,
        }

    def _init_process_group(self, wrapped: Original, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        world = self._guarded(self.worlds.plan, args, kwargs) or World(args, kwargs)
        with self.stack.inside(Mark(WORLD, world)):
            result = wrapped(*world.args, **world.kwargs)
        if world.stripped:
            self._guarded(self._note_stripped)
            self._guarded(self.worlds.keep_device, world)
        if world.post is not None:
            self.worlds.confirm(world, world.post)
        return result

    def _mark_group(self, name: str, wrapped: Original, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Both functions are marked: functional collectives call the inner one, vendors replace it."""
        mark = self.stack.mark
        if mark is not None and mark.world is None:
            return wrapped(*args, **kwargs)
        local = self.forms[name].get(args, kwargs, "use_local_synchronization")
        with self.stack.inside(Mark(LOCAL if local else COLLECTIVE)):
            return wrapped(*args, **kwargs)

    def _name_group(self, wrapped: Original, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        mark = self.stack.mark
        local = mark is not None and mark.kind == LOCAL
        if local and self.acts and self.traits.local_names_differ and not self.state.uses_torchcomms():
            name = self._guarded(self._local_name, args, kwargs)
            if name is not None:
                return name
        return wrapped(*args, **kwargs)

    def _help(self, wrapped: Original, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        mark = self.stack.mark or Mark(DIRECT)
        mark.used = True
        plan = None
        if mark.world is not None:
            self._guarded(self.worlds.begin, mark.world, args, kwargs)
        else:
            plan = self._guarded(self._plan, mark.kind, args, kwargs)
        if plan is not None:
            args, kwargs = plan.args, plan.kwargs
        with self.stack.inside(plan), self._observed(mark.kind, args, kwargs):
            result = wrapped(*args, **kwargs)
        if plan is not None and self.acts and plan.decision.remedy == SPLIT_NOW:
            self._guarded(self._forget_split_source, result)
        return result

    def _observed(self, kind: str, args: Args, kwargs: Kwargs) -> AbstractContextManager[None]:
        """Tell the observers of this call of the helper; the guard is theirs, since some may raise."""
        described = self._guarded(self._call, kind, args, kwargs) if self.observers else None
        return observed(self.observers, *described) if described else nullcontext()

    def _call(self, kind: str, args: Args, kwargs: Kwargs) -> tuple[Call, Any] | None:
        """This call of the helper, and the world's store."""
        get = partial(self.forms["_new_process_group_helper"].get, args, kwargs)
        backend, name = str(get("backend")).lower(), str(get("group_name"))
        if self.state.uses_torchcomms():
            return None
        if kind == WORLD:
            size, shared = get("group_size"), self.worlds.is_shared(backend)
            ranks = tuple(range(size))
            call = Call(0, kind, ranks, backend, name, get("group_rank"), size, shared, site())
            return call, get("store")
        world = self.state.world
        if world is None:
            return None
        memory, ranks = self._memory(world), _ranks(get("global_ranks_in_group"))
        number = next(memory.numbers)
        call = Call(number, kind, ranks, backend, name, memory.rank, memory.size, memory.shared, site())
        return call, memory.store

    def _get_split_source(self, wrapped: Original, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        source, plan = wrapped(*args, **kwargs), self.stack.plan
        if source is None or plan is None or plan.decision.remedy == NONE:
            return source
        if plan.decision.defects:  # groups of a stripped world are kept apart, which is no repair
            self._guarded(self._count, plan)
        return None if self.acts and plan.decision.remedy == INDEPENDENT else source

    def _note_stripped(self) -> None:
        self._memory(self.state.world).stripped = True

    def _memory(self, world: Any) -> Memory:
        memory = _memories.get(world)
        if memory is None:
            shared = self.worlds.is_shared(self.state.world_backend)
            fresh = Memory(world.rank(), world.size(), self.state.store, shared)
            memory = _memories.setdefault(world, fresh)
        return memory

    def _plan(self, kind: str, args: Args, kwargs: Kwargs) -> Plan | None:
        world = self.state.world
        if world is None or self.state.uses_torchcomms():
            return None
        memory, device = self._memory(world), world.bound_device_id
        if kind != LOCAL and device is None and not self.traits.split_tests_size and not memory.stripped:
            return None  # whatever the backends are, which may be of a kind that answers no questions
        helper = self.forms["_new_process_group_helper"]
        ranks = _ranks(helper.get(args, kwargs, "global_ranks_in_group"))
        backend = str(helper.get(args, kwargs, "backend")).lower()
        # Of its ranks, a decision depends on their number alone; a test holds the policy to that.
        sort = (kind, backend, device, memory.stripped, len(ranks))
        if sort not in memory.decided:
            creation = self.state.describe(kind, ranks, backend, stripped=memory.stripped)
            memory.decided[sort] = creation, decide(creation, self.traits, self.report.settings.strategy)
        creation, decision = memory.decided[sort]
        if decision == NOTHING:
            return None
        speaks = self._speaks(kind, memory, helper.get(args, kwargs, "group_rank"))
        plan = Plan(creation, ranks, decision, args, kwargs, speaks)
        if decision.rename or decision.unbind:
            self._count(plan)
        if self.acts:
            plan.args, plan.kwargs = helper.replace(args, kwargs, **self._changes(plan))
        return plan

    def _changes(self, plan: Plan) -> dict[str, Any]:
        """The helper's arguments that the decision replaces."""
        helper = self.forms["_new_process_group_helper"]
        changes: dict[str, Any] = {}
        if plan.decision.remedy == SPLIT_NOW:
            changes["device_id"] = self.state.world.bound_device_id
        if plan.decision.unbind:
            changes["device_id"] = None
        if plan.decision.remedy == INDEPENDENT:
            options = "backend_options" if "backend_options" in helper else "pg_options"
            _clear_split_source(helper.get(plan.args, plan.kwargs, options))
        if plan.decision.remedy != NONE and plan.creation.kind == COLLECTIVE:
            # Ranks may each name their own group in one call.  Split by colour that works; what then
            # connects through the store, here the group or later its pairs, needs keys of its own.
            store = helper.get(plan.args, plan.kwargs, "store")
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

    def _forget_split_source(self, result: Any) -> None:
        """Once connected, a group needs its parent no more; sends and receives would split it again."""
        group = result[0]
        device = getattr(group, "bound_device_id", None)
        if device is not None:
            _clear_split_source(group._get_backend(device).options)

    def _count(self, plan: Plan) -> None:
        if not plan.counted:
            plan.counted = True
            self.report.repaired(plan.creation, plan.ranks, plan.decision, speak=plan.speaks)

    def _speaks(self, kind: str, memory: Memory, group_rank: Any) -> bool:
        """One rank speaks of a creation: of one that all ranks make, the world's first."""
        if kind == COLLECTIVE:
            return memory.rank == 0
        return kind == DIRECT or group_rank == 0

    def _guarded(self, function: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return function(*arguments)
        except Exception as error:
            self.report.failed(function.__name__, error)
            return None


def _observers(current: report.Report, state: TorchState) -> list[Observer]:
    """Those that the settings ask for, in the order in which they hear of a creation."""
    chosen, observers = current.settings, list[Observer]()
    wanted = (
        (chosen.trace, "trace", "Trace"),
        (chosen.hang_report_s, "watch.observer", "Watch"),
        (chosen.check_order, "order", "OrderCheck"),
    )
    for asked, module, name in wanted:
        if asked:  # imported only then: most jobs trace nothing
            try:
                observers.append(getattr(import_module(f"torchcommshim.{module}"), name)(current, state))
            except Exception as error:  # repairs go on without it
                current.failed(module, error)
    return observers


def _ranks(given: Any) -> tuple[int, ...]:
    """A list of ranks as plain numbers; a direct caller may name none."""
    return () if given is None else tuple(map(int, given))


def _digest(ranks: tuple[int, ...]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def _clear_split_source(options: Any) -> None:
    """torch leaves `split_from` in the caller's options, where a later group would find it."""
    if getattr(options, "split_from", None) is not None:
        options.split_from = None


_patched: dict[str, Patched] = {}


def wait_for_torch() -> bool:
    """Patch torch.distributed when it is imported; now, if it is.

    Returns:
        False if this thread is in the middle of importing it: to be called again, once it is done.
    """
    late = TARGET in sys.modules
    if late and getattr(import_module(TARGET).__spec__, "_initializing", False):
        return False
    wrapt.register_post_import_hook(partial(_on_import, late=late), TARGET)
    return True


def _on_import(c10d: ModuleType, *, late: bool) -> None:
    try:
        _patch(c10d, late=late)
    except Exception as error:  # an error in an import hook would make `import torch` fail
        torchcommshim._inactive(error)


def _patch(c10d: ModuleType, *, late: bool) -> None:
    chosen = settings.read(os.environ)
    if _patched or chosen.strategy == "off":
        return
    version = str(import_module("torch.version").__version__)
    current = report.Report(chosen, probe(code_of_module(c10d), version), version)
    report.use(current)
    if not current.traits.missing:
        wrappers = Shim(c10d, current).wrappers()
    elif hasattr(c10d, "init_process_group"):
        wrappers = {"init_process_group": _say_why_not}
    else:
        return
    replaced = []
    for name, wrapper in wrappers.items():
        original = getattr(c10d, name)
        _patched[name] = Patched(original, wrapper, enabled=lambda: report.current() is current)
        setattr(c10d, name, _patched[name])
        replaced.append((original, _patched[name]))
    if late:
        _replace_everywhere(replaced)
    current.patched = tuple(_patched)


def _say_why_not(wrapped: Original, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    current = report.current()
    if current and os.environ.get("RANK", "0") == "0":
        report.say(f"inactive on torch {current.torch_version}: {'; '.join(current.traits.missing)}")
    return wrapped(*args, **kwargs)


def remove() -> None:
    """Put the originals back.  Where somebody has wrapped ours since, ours stays and passes calls on."""
    originals = [(wrapper, wrapper.__wrapped__) for wrapper in _patched.values()]
    _patched.clear()
    report.use(None)
    _replace_everywhere(originals)


def _replace_everywhere(replacements: list[tuple[Any, Any]]) -> None:
    """In all loaded modules: `from torch.distributed import new_group` has made copies of the name."""
    by_id = {id(old): new for old, new in replacements}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, name, by_id[id(value)])
