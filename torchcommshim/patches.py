# SPDX-License-Identifier: Apache-2.0
"""The wrappers around torch.distributed's group creation.

| wrapped                             | what the wrapper does                                              |
| ----------------------------------- | ------------------------------------------------------------------ |
| `init_process_group`                | marks the world's creation, strips its device_id if asked, confirms that ranks agree |
| `new_group`, `_new_group_with_tag`  | mark a creation, and whether it is by local synchronization        |
| `_process_group_name`               | names a local-synchronization group alike on all its ranks         |
| `_new_process_group_helper`         | decides by the mark, and acts on the arguments                     |
| `_get_split_source`                 | answers None while an independent creation is made                 |

Collectives are not wrapped.  Each wrapper's own part is guarded: an error in it is one line on stderr,
and the original function is called as it was.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Callable, Iterator, Mapping, TypeVar

import wrapt

import torchcommshim
from torchcommshim import agreement, report, settings
from torchcommshim.creations import (
    ALL,
    COLLECTIVE,
    DIRECT,
    LOCAL,
    MEMBERS,
    NOBODY,
    WORLD,
    CallForm,
    Creation,
)
from torchcommshim.defects import NONBLOCKING
from torchcommshim.policy import INDEPENDENT, NONE, NOTHING, SPLIT_NOW, Decision, decide
from torchcommshim.traits import WRAPPED, code_of_module, probe

TARGET = "torch.distributed.distributed_c10d"

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
T = TypeVar("T")


class Patched(wrapt.FunctionWrapper):  # type: ignore[misc]
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
class World:
    """A call of `init_process_group`.

    Attributes:
        args, kwargs: the call that is made.
        device: the device_id that was given, as a torch.device; None if none was.
        stripped: the shim dropped it.
        post: what this rank told the others, if they compare.
        timeout_s: the world's own timeout, in seconds.
    """

    args: Args
    kwargs: Kwargs
    device: Any = None
    stripped: bool = False
    post: agreement.Post | None = None
    timeout_s: float = 0.0


@dataclass
class Mark:
    """The next call of the helper belongs to this creation; `used` once it has begun."""

    kind: str
    world: World | None = None
    used: bool = False


@dataclass
class Plan:
    """A call of the helper and what is done about it."""

    creation: Creation
    decision: Decision
    args: Args
    kwargs: Kwargs
    speaks: bool
    counted: bool = False


class _Stack(threading.local):
    """The creations under way in this thread, innermost last.

    They nest, since a backend's creator may make groups, and threads make groups at the same time.
    """

    def __init__(self) -> None:
        self.frames: list[Mark | Plan | None] = []

    @property
    def top(self) -> Mark | Plan | None:
        return self.frames[-1] if self.frames else None

    @contextmanager
    def inside(self, frame: Mark | Plan | None) -> Iterator[None]:
        self.frames.append(frame)
        try:
            yield
        finally:
            self.frames.pop()


@dataclass
class Shim:
    """The wrappers' common state, for one loaded `torch.distributed.distributed_c10d`."""

    c10d: Any
    settings: settings.Settings
    report: report.Report
    stack: _Stack = field(default_factory=_Stack)
    # Of the present world:
    stripped: bool = False
    local_creations: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.traits = self.report.traits
        self.acts = self.settings.strategy != "observe"
        self.forms = {name: CallForm(getattr(self.c10d, name)) for name in WRAPPED}

    # -- wrappers ------------------------------------------------------------------------------

    def init_process_group(self, wrapped: Callable[..., T], instance: Any, args: Args, kwargs: Kwargs) -> T:
        world = self._guarded(self._plan_world, args, kwargs) or World(args, kwargs)
        with self.stack.inside(Mark(WORLD, world)):
            result = wrapped(*world.args, **world.kwargs)
        if world.stripped:
            self._guarded(self._keep_device, world.device)
        if world.post is not None:
            self._confirm(world.post, world)
        return result

    def mark_group(
        self, name: str, wrapped: Callable[..., T], instance: Any, args: Args, kwargs: Kwargs
    ) -> T:
        """Of `new_group` and `_new_group_with_tag`: functional collectives call the second, vendors replace it."""
        top = self.stack.top
        if isinstance(top, Mark) and not top.used and top.kind != WORLD:
            return wrapped(*args, **kwargs)
        local = self.forms[name].get(args, kwargs, "use_local_synchronization")
        with self.stack.inside(Mark(LOCAL if local else COLLECTIVE)):
            return wrapped(*args, **kwargs)

    def name_group(self, wrapped: Callable[..., T], instance: Any, args: Args, kwargs: Kwargs) -> T | str:
        top = self.stack.top
        local = isinstance(top, Mark) and top.kind == LOCAL and not top.used
        if local and self.acts and self.traits.local_names_differ and not self._torchcomms():
            name = self._guarded(self._local_name, args, kwargs)
            if name is not None:
                return name
        return wrapped(*args, **kwargs)

    def new_process_group_helper(
        self, wrapped: Callable[..., T], instance: Any, args: Args, kwargs: Kwargs
    ) -> T:
        mark = self.stack.top
        if isinstance(mark, Mark) and not mark.used:
            mark.used = True
        else:
            mark = Mark(DIRECT)
        if mark.world is not None:
            self._guarded(self._begin_world, mark.world, args, kwargs)
            plan = None
        else:
            plan = self._guarded(self._plan, mark.kind, args, kwargs)
        with self.stack.inside(plan):
            if plan is None:
                return wrapped(*args, **kwargs)
            result = wrapped(*plan.args, **plan.kwargs)
        if self.acts and plan.decision.remedy == SPLIT_NOW:
            self._guarded(self._forget_split_source, result)
        return result

    def get_split_source(
        self, wrapped: Callable[..., T], instance: Any, args: Args, kwargs: Kwargs
    ) -> T | None:
        source = wrapped(*args, **kwargs)
        plan = self.stack.top
        if source is None or not isinstance(plan, Plan) or plan.decision.remedy == NONE:
            return source
        self._count(plan)
        return None if self.acts and plan.decision.remedy == INDEPENDENT else source

    # -- the world -----------------------------------------------------------------------------

    def _plan_world(self, args: Args, kwargs: Kwargs) -> World:
        form = self.forms["init_process_group"]
        device = form.get(args, kwargs, "device_id")
        world = World(args, kwargs)
        if device is None or self._torchcomms():
            return world
        changes: dict[str, Any] = {}
        if self.acts and type(device) is int and not self.traits.accepts_int_device:
            device = changes["device_id"] = self._accelerator(device)
        world.device = device
        backend = form.get(args, kwargs, "backend")
        # nccl2 has no lazily connected world: it needs the device (pytorch#192276).
        if self.settings.strategy == "strip" and "nccl2" not in str(backend).lower():
            world.stripped = True
            changes["device_id"] = None
            if backend is None and self.traits.device_picks_backend:
                changes["backend"] = self.c10d.Backend.default_device_backend_map.get(_type(device))
        world.args, world.kwargs = form.replace(args, kwargs, **changes)
        return world

    def _begin_world(self, world: World, args: Args, kwargs: Kwargs) -> None:
        """Right before the world connects: its store exists, and nobody has waited for anybody yet."""
        form = self.forms["_new_process_group_helper"]
        size, rank, store, timeout = (
            form.get(args, kwargs, name) for name in ("group_size", "group_rank", "store", "timeout")
        )
        self.stripped = world.stripped
        self.local_creations.clear()
        if rank == 0:
            for warning in self.settings.warnings:
                report.say(warning)
        if world.device is None:
            return
        if world.stripped:
            self.report.world("device_id is dropped from init_process_group (strip)", "strip", speak=rank == 0)
        self._avoid_nonblocking(rank, world)
        backend = str(form.get(args, kwargs, "backend")).lower()
        if size > 1 and backend not in ("fake", "mpi") and self.settings.agreement != "off":
            world.timeout_s = timeout.total_seconds()
            world.post = agreement.post(
                self.c10d.PrefixStore(agreement.PREFIX, store), rank, size, self._statement()
            )

    def _statement(self) -> dict[str, str]:
        return {
            "torchcommshim": torchcommshim.__version__,
            "strategy": self.settings.strategy,
            "traits": self.traits.digest(),
        }

    def _avoid_nonblocking(self, rank: int, world: World) -> None:
        """Turn off 2.7.0's non-blocking mode, as 2.7.1 does, unless the user has chosen (pytorch#154055).

        A stripped world keeps its backend bound for the barrier, which must not turn that mode on.
        """
        switch = "TORCH_NCCL_USE_COMM_NONBLOCKING"
        unwanted = self.traits.nonblocking_by_default or (
            world.stripped and self.traits.connects_without_waiting
        )
        if self.acts and unwanted and switch not in os.environ:
            os.environ[switch] = "0"
            self.report.world(f"{switch}=0 is set: {NONBLOCKING.title}", NONBLOCKING.name, speak=rank == 0)

    def _confirm(self, post: agreement.Post, world: World) -> None:
        try:
            agreement.confirm(post, connected=self._waited_for_all(world), timeout_s=world.timeout_s)
        except agreement.AgreementError as error:
            if self.settings.agreement == "error":
                raise
            report.say(str(error))
        except Exception as error:
            self.report.failed("the agreement between ranks", error)

    def _waited_for_all(self, world: World) -> bool:
        """Making this world has waited for every rank: all have reached our post, or have no shim."""
        group = self.c10d._get_default_group()
        backends = self._backends(self.c10d._world.pg_map[group][0])
        if "gloo" in backends.values() and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") in ("", "0"):
            return True
        device = group.bound_device_id
        if device is None or backends.get(device.type) != "nccl" or self._who_splits(group, device) == NOBODY:
            return False
        nonblocking = os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING")
        if nonblocking is None:
            return not self.traits.connects_without_waiting
        return nonblocking.lower() in settings.OFF

    def _keep_device(self, device: Any) -> None:
        """What device_id told torch besides the binding: the current device, and the barrier's."""
        group = self.c10d._get_default_group()
        module = getattr(sys.modules["torch"], device.type, None)
        backend = self._backends(self.c10d._world.pg_map[group][0]).get(device.type)
        if device.index is None or backend in (None, "gloo", "mpi") or not module or not module.is_available():
            return
        module.set_device(device)
        if self.traits.barrier_asks_backend and backend == "nccl":
            group._get_backend(device).bound_device_id = device

    # -- groups --------------------------------------------------------------------------------

    def _plan(self, kind: str, args: Args, kwargs: Kwargs) -> Plan | None:
        if not self.c10d.is_initialized() or self._torchcomms():
            return None
        form = self.forms["_new_process_group_helper"]
        creation = self._describe(kind, args, kwargs)
        decision = decide(creation, self.traits, self.settings.strategy)
        if decision == NOTHING:
            return None
        plan = Plan(creation, decision, args, kwargs, self._speaks(kind, form.get(args, kwargs, "group_rank")))
        if decision.rename or decision.unbind:
            self._count(plan)
        if self.acts:
            plan.args, plan.kwargs = form.replace(args, kwargs, **self._changes(plan))
        return plan

    def _describe(self, kind: str, args: Args, kwargs: Kwargs) -> Creation:
        form = self.forms["_new_process_group_helper"]
        group = self.c10d._get_default_group()
        ranks = form.get(args, kwargs, "global_ranks_in_group")
        backend = str(form.get(args, kwargs, "backend")).lower()
        device = group.bound_device_id
        # As _get_split_source of 2.3 to 2.5, the only ones that ask it for a world that is not bound.
        device_type = "cuda" if device is None else device.type
        return Creation(
            kind=kind,
            ranks=() if ranks is None else tuple(map(int, ranks)),
            backend=backend,
            world_size=group.size(),
            bound=device is not None,
            stripped=self.stripped,
            device_backend=self._backends(backend).get(device_type),
            world_device_backend=self._backends(self.c10d._world.pg_map[group][0]).get(device_type),
            world_splits=self._who_splits(group, device or device_type),
        )

    def _changes(self, plan: Plan) -> dict[str, Any]:
        """The helper's arguments that a decision replaces."""
        form = self.forms["_new_process_group_helper"]
        creation, decision = plan.creation, plan.decision
        changes: dict[str, Any] = {}
        if decision.remedy == SPLIT_NOW:
            changes["device_id"] = self.c10d._get_default_group().bound_device_id
        if decision.unbind:
            changes["device_id"] = None
        if decision.remedy == INDEPENDENT:
            options = "backend_options" if "backend_options" in form else "pg_options"
            _set_no_split_source(form.get(plan.args, plan.kwargs, options))
            if creation.kind == COLLECTIVE:
                # Ranks may each name their own group in one call: split by colour that works, by one
                # shared name in one store it would not.
                store = form.get(plan.args, plan.kwargs, "store")
                changes["store"] = self.c10d.PrefixStore(f"{agreement.PREFIX}/{_key(creation.ranks)}", store)
        return changes

    def _local_name(self, args: Args, kwargs: Kwargs) -> str:
        """A name made from what all members know: the ranks, and how often they have met before.

        torch adds a counter that not all ranks advance (pytorch#173608).  Not calling its function also
        leaves `group_count` alone, which 2.14 and later advance on members only.
        """
        ranks = tuple(map(int, self.forms["_process_group_name"].get(args, kwargs, "ranks")))
        self.local_creations[ranks] += 1
        return f"local_{_key(ranks)}_{self.local_creations[ranks]}"

    def _forget_split_source(self, result: Any) -> None:
        """Once connected, a group needs its parent no more; sends and receives would split it again."""
        group = result[0]
        device = getattr(group, "bound_device_id", None)
        if device is not None:
            _set_no_split_source(group._get_backend(device).options)

    def _count(self, plan: Plan) -> None:
        if not plan.counted:
            plan.counted = True
            self.report.repaired(plan.creation, plan.decision, speak=plan.speaks)

    def _speaks(self, kind: str, group_rank: Any) -> bool:
        """One rank speaks of a creation: of one that all ranks make, the world's first."""
        if kind == COLLECTIVE:
            return bool(self.c10d._get_default_group().rank() == 0)
        return kind == DIRECT or group_rank == 0

    # -- torch's state -------------------------------------------------------------------------

    def _backends(self, backend: str) -> dict[str, str]:
        """The backend for each type of device that `backend` (`nccl`, `cpu:gloo,cuda:nccl`) means."""
        config = self.c10d.BackendConfig(self.c10d.Backend(backend))
        return {device: str(name).lower() for device, name in config.get_device_backend_map().items()}

    def _who_splits(self, group: Any, device: Any) -> str:
        """Who can split from the group's backend for `device`, as `_get_split_source` looks for it."""
        try:
            backend = group._get_backend(sys.modules["torch"].device(device))
        except RuntimeError:  # it has none for that device
            return NOBODY
        if not backend.supports_splitting:
            return NOBODY
        wrapper = getattr(self.c10d, "_ProcessGroupWrapper", ())  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        while isinstance(backend, wrapper):
            backend = backend.wrapped_pg
        return ALL if hasattr(backend, "perform_nocolor_split") else MEMBERS

    def _torchcomms(self) -> bool:
        """torchcomms makes groups in its own way; the shim stands aside."""
        enabled = getattr(self.c10d, "_use_torchcomms_enabled", None)
        return bool(enabled and enabled())

    def _accelerator(self, index: int) -> Any:
        torch = sys.modules["torch"]
        current = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        return torch.device(current.type if current else "cuda", index)

    def _guarded(self, function: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return function(*arguments)
        except Exception as error:
            self.report.failed(function.__name__, error)
            return None


def _type(device: Any) -> str:
    return str(device.type)


def _key(ranks: tuple[int, ...]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def _set_no_split_source(options: Any) -> None:
    """torch leaves `split_from` in the caller's options, where a later group would find it."""
    if getattr(options, "split_from", None) is not None:
        options.split_from = None


_shim: Shim | None = None
_patched: dict[str, Patched] = {}


def wait_for_torch() -> None:
    """Patch torch.distributed when it is imported; now, if it is.  Never raises for what torch is."""
    late = TARGET in sys.modules
    if late:
        import_module(TARGET)  # another thread may still be importing it
    wrapt.register_post_import_hook(partial(_on_import, late=late), TARGET)


def _on_import(c10d: ModuleType, *, late: bool) -> None:
    try:
        _apply(c10d, late)
    except Exception as error:  # an error in an import hook would make `import torch` fail
        report.say(f"inactive, torch is left as it is: {error!r}")


def _apply(c10d: ModuleType, late: bool) -> None:
    global _shim
    chosen = settings.read(os.environ)
    if _patched or chosen.strategy == "off":
        return
    version = str(import_module("torch.version").__version__)
    traits = probe(code_of_module(c10d), version)
    current = report.Report(chosen, traits, version)
    report.use(current)
    if traits.missing:
        handlers = {"init_process_group": _say_why_not} if hasattr(c10d, "init_process_group") else {}
    else:
        _shim = Shim(c10d, chosen, current)
        handlers = {
            "init_process_group": _shim.init_process_group,
            "new_group": partial(_shim.mark_group, "new_group"),
            "_new_group_with_tag": partial(_shim.mark_group, "_new_group_with_tag"),
            "_process_group_name": _shim.name_group,
            "_new_process_group_helper": _shim.new_process_group_helper,
            "_get_split_source": _shim.get_split_source,
        }
    replaced = []
    for name, handler in handlers.items():
        original = getattr(c10d, name)
        _patched[name] = Patched(original, handler, enabled=lambda: bool(_patched))
        setattr(c10d, name, _patched[name])
        replaced.append((original, _patched[name]))
    if late:
        _replace_everywhere(replaced)
    current.patched = tuple(_patched)


def _say_why_not(wrapped: Callable[..., T], instance: Any, args: Args, kwargs: Kwargs) -> T:
    current = report.current()
    if current and os.environ.get("RANK", "0") == "0":
        report.say(f"inactive on torch {current.torch_version}: {'; '.join(current.traits.missing)}")
    return wrapped(*args, **kwargs)


def remove() -> None:
    """Put the originals back.  Where somebody has wrapped ours since, ours stays and passes calls on."""
    global _shim
    originals = [(wrapper, wrapper.__wrapped__) for wrapper in _patched.values()]
    _patched.clear()
    _shim = None
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
