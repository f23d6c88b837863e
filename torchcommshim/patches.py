# SPDX-License-Identifier: Apache-2.0
"""Puts wrappers around torch.distributed's group creation, and takes them out again.

What they do is in `shim.py`, which is imported when one of them is first called: most processes that import
torch make no group, and pay for the wrappers alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable

import wrapt

import torchcommshim
from torchcommshim import settings
from torchcommshim.repair.traits import OPTIONAL, WRAPPED, code_of_module, probe
from torchcommshim.tell import report

if TYPE_CHECKING:
    from torchcommshim.repair.calls import Observer
    from torchcommshim.repair.creations import Args, Kwargs, Original
    from torchcommshim.repair.torch_state import TorchState

TARGET = "torch.distributed.distributed_c10d"

# What is done in place of a function of torch: `(original, args, kwargs)`.
Action = Callable[["Original", "Args", "Kwargs"], Any]


class Actions(dict[str, Action]):
    """The action for each function of `WRAPPED`; all are made when one is first asked for.

    What is switched off in the meantime stays so.
    """

    def __init__(self, c10d: ModuleType, current: report.Report) -> None:
        self._c10d, self._report = c10d, current
        self._originals = {name: getattr(c10d, name) for name in _present(c10d)}
        self._lock = threading.RLock()
        self._is_being_made = False

    def __missing__(self, name: str) -> Action:
        with self._lock:
            if self._is_being_made:  # by this thread, in which a signal's handler now makes a group
                return _pass_on
            if name not in self:
                self._is_being_made = True
                made = self._make()
                self._is_being_made = False
                for wrapped in self._originals:
                    self.setdefault(wrapped, made.get(wrapped, _pass_on))
            return self[name]

    def _make(self) -> dict[str, Action]:
        try:
            from torchcommshim.repair.shim import Shim
            from torchcommshim.repair.torch_state import TorchState

            state = TorchState(self._c10d)
            observers = _observers(self._report, state)
            return Shim(state, self._originals, self._report, observers).actions()
        except Exception as error:  # torch goes on without us
            self._report.failed("shim", error)
            return {}


def _pass_on(original: Original, args: Args, kwargs: Kwargs) -> Any:
    return original(*args, **kwargs)


def prepare() -> None:
    """Make what the wrappers do now: to know that it can be made, or once for all forks."""
    if _replaced:
        _actions["init_process_group"]


def _observers(current: report.Report, state: TorchState) -> list[Observer]:
    """Those that the settings ask for, in the order in which they hear of a creation."""
    chosen = current.settings
    observers: list[Observer] = []
    wanted = (
        (chosen.trace, "trace", "Trace"),
        (chosen.hang_report_s, "watch.observer", "Watch"),
        (chosen.check_order, "order", "OrderCheck"),
    )
    for asked, module, name in wanted:
        if asked:  # imported only then: most jobs trace nothing
            try:
                observers.append(getattr(import_module(f"torchcommshim.tell.{module}"), name)(current, state))
            except Exception as error:  # repairs go on without it
                current.failed(module, error)
    return observers


# At the moment: pairs of an original and the wrapper in its place, and what the wrappers do.
_replaced: list[tuple[Original, Original]] = []
_actions: dict[str, Action] = {}


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
    global _actions
    chosen = settings.read(os.environ)
    if _replaced or chosen.strategy == "off":
        return
    if chosen.trace:  # the program may change its folder before it makes a group
        with contextlib.suppress(OSError):  # it is in none
            chosen = chosen._replace(trace=os.path.abspath(chosen.trace))
    version = str(import_module("torch.version").__version__)
    current = report.Report(chosen, probe(code_of_module(c10d), version), version)
    report.use(current)
    if not current.traits.missing:
        current.patched, _actions = _present(c10d), Actions(c10d, current)
    elif hasattr(c10d, "init_process_group"):
        current.patched = ("init_process_group",)
        _actions = {"init_process_group": partial(_say_why_not, current)}
    for name in current.patched:
        original = getattr(c10d, name)
        wrapper = _wrapper(original, name, _actions)
        setattr(c10d, name, wrapper)
        _replaced.append((original, wrapper))
    if late:
        _replace_everywhere(_replaced)
    wrapt.register_post_import_hook(_leave_uncompiled, "torch._dynamo")


def _present(c10d: ModuleType) -> tuple[str, ...]:
    """The functions to wrap that this build has."""
    return (*WRAPPED, *(name for name in OPTIONAL if hasattr(c10d, name)))


def _wrapper(original: Original, name: str, actions: dict[str, Action]) -> Original:
    """A function in place of `original`, as torch's own decorators make them.

    It pickles, copies and shows its signature as `original` does, and costs a fraction of a wrapt one.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _act(actions, name, original, args, kwargs)

    # inspect.getfullargspec, unlike inspect.signature, does not look beneath a wrapper.
    wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return wrapper


def _call(actions: dict[str, Action], name: str, original: Original, args: Args, kwargs: Kwargs) -> Any:
    return actions[name](original, args, kwargs)


_act = _call


def _leave_uncompiled(dynamo: ModuleType) -> None:
    """Have torch.compile break its graph at our action, and compile nothing from there on.

    It breaks there without us too, but skips torch's files, where it would compile each of our frames.  Its
    `disable` is `torch.compiler.disable`, which imports torch._dynamo: so this waits until somebody does.
    """
    global _act
    with contextlib.suppress(Exception):  # compiled, it does the same
        _act = dynamo.disable(_call)


def _say_why_not(current: report.Report, original: Original, args: Args, kwargs: Kwargs) -> Any:
    if os.environ.get("RANK", "0") == "0":
        why = "; ".join(current.traits.missing)
        report.say(f"inactive on torch {current.torch_version}: {why} [TCS-inactive]")
    return original(*args, **kwargs)


def remove() -> None:
    """Put the originals back.  Where somebody has wrapped ours since, ours stays and passes calls on."""
    wrappers = [(wrapper, original) for original, wrapper in _replaced]
    _replaced.clear()
    _actions.update(dict.fromkeys((*WRAPPED, *OPTIONAL), _pass_on))
    report.use(None)
    _replace_everywhere(wrappers)


def _replace_everywhere(replacements: list[tuple[Any, Any]]) -> None:
    """In all loaded modules: `from torch.distributed import new_group` has made copies of the name."""
    by_id = {id(old): new for old, new in replacements}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, name, by_id[id(value)])
