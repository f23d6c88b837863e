# SPDX-License-Identifier: Apache-2.0
"""The world's own creation: `init_process_group`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Mapping

import torchcommshim
from torchcommshim import settings
from torchcommshim.repair import anew
from torchcommshim.repair.creations import NOBODY, Args, CallForm, Kwargs
from torchcommshim.repair.defects import EARLIER_WORLD, NONBLOCKING
from torchcommshim.repair.torch_state import TorchState
from torchcommshim.tell import agreement, report

# The backends of torch's own that connect processes; mpi has no store to compare in.
_REAL = frozenset(("nccl", "nccl2", "nccl-lazy", "nccl-legacy", "gloo", "xccl", "ucc"))

NONBLOCKING_SWITCH = "TORCH_NCCL_USE_COMM_NONBLOCKING"


@dataclass
class World:
    """One call of `init_process_group`.

    Attributes:
        args, kwargs: the call that is made.
        device: the device_id that was given, as a torch.device; None if none was.
        stripped: the shim drops it.
        bound: it is bound to a device, or was to be.
        post: what this rank told the others, where ranks compare.
        timeout_s: the world's own timeout, in seconds.
    """

    args: Args
    kwargs: Kwargs
    device: Any = None
    stripped: bool = False
    bound: bool = False
    post: agreement.Post | None = None
    timeout_s: float = 0.0


class Worlds:
    """Plans, begins and finishes worlds as the settings say."""

    def __init__(self, state: TorchState, forms: Mapping[str, CallForm], current: report.Report) -> None:
        self._state = state
        self._init, self._helper = forms["init_process_group"], forms["_new_process_group_helper"]
        self._report = current
        self._settings, self._traits = current.settings, current.traits

    def plan(self, args: Args, kwargs: Kwargs) -> World:
        """Decide on a call of `init_process_group`, before it is made."""
        world = World(args, kwargs)
        device = self._init.get(args, kwargs, "device_id")
        if not self._is_valid(device) or self._state.uses_torchcomms():
            return world
        changes: dict[str, Any] = {}
        if self._settings.acts and type(device) is int and not self._traits.accepts_int_device:
            device = changes["device_id"] = self._state.accelerator(device)
        backend = self._init.get(args, kwargs, "backend")
        if self._settings.strategy == "strip" and not self._state.is_nccl2(backend):
            world.stripped = True
            changes["device_id"] = None
            if backend is None and self._traits.device_picks_backend:
                defaults = self._state.c10d.Backend.default_device_backend_map
                changes["backend"] = defaults.get(self._state.torch.device(device).type)
        world.device = device
        world.args, world.kwargs = self._init.replace(args, kwargs, **changes)
        return world

    def begin(self, world: World, args: Args, kwargs: Kwargs) -> None:
        """Right before the world connects: its store exists, and nobody has waited for anybody yet.

        `args` and `kwargs` are those of the helper's call.
        """
        size, rank, store, timeout = (
            self._helper.get(args, kwargs, name) for name in ("group_size", "group_rank", "store", "timeout")
        )
        speak = rank == 0
        if speak:
            self._report.warn()
        backend = str(self._helper.get(args, kwargs, "backend")).lower()
        if self._state.uses_torchcomms():
            return
        world.bound = world.device is not None or self._state.is_nccl2(backend)
        if world.stripped:
            what = "init_process_group is called without its device_id (TORCHCOMMSHIM=strip)"
            self._report.repaired(["strip"], lambda: what, speak=speak)
        if world.bound:
            self._avoid_nonblocking(world, speak=speak)
        if size < 2 or not self.is_shared(backend):
            return
        if self._settings.agreement != "off":
            prefixed = self._state.c10d.PrefixStore(agreement.PREFIX, store)
            world.timeout_s = timeout.total_seconds()
            world.post = agreement.post(prefixed, rank, size, self._statement(world))

    def take_turn(self, args: Args, kwargs: Kwargs) -> anew.Turn | None:
        """Which of the worlds over its store this is; waits until the others have made the one before.

        `args` and `kwargs` are those of the helper's call.  None where nothing is done about it.
        """
        size, rank, store, timeout, backend = (
            self._helper.get(args, kwargs, name)
            for name in ("group_size", "group_rank", "store", "timeout", "backend")
        )
        is_alone = size < 2 or not self.is_shared(str(backend).lower())
        if is_alone or not self._settings.acts or self._state.uses_torchcomms():
            return None
        turn = anew.begin(store, rank, size, timeout)
        if turn.prefix:
            what = (
                f"world {turn.number + 1} over one store: its keys get a prefix. "
                f"In torch {EARLIER_WORLD.title} ({EARLIER_WORLD.upstream})"
            )
            self._report.repaired([EARLIER_WORLD.name], lambda: what, speak=rank == 0)
        elif turn.number and rank == 0:
            report.say(
                f"world {turn.number + 1} over one store: not all ranks have made the one before, so its "
                f"keys stay where torch puts them. There, {EARLIER_WORLD.title} ({EARLIER_WORLD.upstream}). "
                "Make each world over a store of its own: a new port, file or prefix. [TCS-earlier-world]"
            )
        return turn

    def keep_device(self, world: World) -> None:
        """Set what a stripped device_id told torch besides the binding: the current and barrier's device."""
        device = self._state.torch.device(world.device)
        module = getattr(self._state.torch, device.type)
        backend = self._state.world_backends().get(device.type)
        if backend in (None, "gloo", "mpi") or not module.is_available():
            return
        module.set_device(device)
        if self._traits.barrier_asks_backend and backend == "nccl":
            self._state.world._get_backend(device).bound_device_id = device

    def confirm(self, world: World, post: agreement.Post) -> None:
        """Compare with the other ranks; in a world without a device_id with those who have posted so far.

        Raises:
            AgreementError: they differ, and the user has not asked for a warning only.
        """
        try:
            if world.bound:
                agreement.confirm(post, connected=self._waited_for_all(), timeout_s=world.timeout_s)
            else:
                agreement.glance(post)
        except agreement.AgreementError as error:
            self._differ(error)
        except Exception as error:  # the store is gone, likely with the rank that held it
            why = f"comparing the ranks was cut off, perhaps since another rank has stopped: {error!r}"
            self._differ(agreement.AgreementError(f"{why} [TCS-comparison-cut-off]"))

    def _is_valid(self, device: object) -> bool:
        """Would torch take it for a device_id?  If not, torch is to say so."""
        if type(device) is int:
            return True
        return isinstance(device, self._state.torch.device) and device.index is not None

    def is_shared(self, backend: str) -> bool:
        """Other processes are on the other side: not so in a dry run, over a backend of its own or a fake."""
        names = self._state.backends(backend).values()
        return "fake" not in names and not _REAL.isdisjoint(names)

    def _differ(self, error: agreement.AgreementError) -> None:
        if self._settings.agreement == "error":
            raise error
        report.say(str(error))

    def _statement(self, world: World) -> dict[str, str]:
        return {
            "device_id": "given" if world.bound else "none",
            "torchcommshim": torchcommshim.__version__,
            "strategy": self._settings.strategy,
            "traits": self._traits.digest(),
            "check_order": "on" if self._settings.check_order else "off",
        }

    def _avoid_nonblocking(self, world: World, *, speak: bool) -> None:
        """Turn off 2.7.0's non-blocking mode, as 2.7.1 does, unless the user has chosen (pytorch#154055).

        A stripped world's backend stays bound for the barrier, which must not turn that mode on.
        """
        unwanted = self._traits.nonblocking_by_default or (
            world.stripped and self._traits.connects_without_waiting
        )
        if self._settings.acts and unwanted and NONBLOCKING_SWITCH not in os.environ:
            os.environ[NONBLOCKING_SWITCH] = "0"
            what = f"{NONBLOCKING_SWITCH}=0 is set: {NONBLOCKING.title} ({NONBLOCKING.upstream})"
            self._report.repaired([NONBLOCKING.name], lambda: what, speak=speak and not world.stripped)

    def _waited_for_all(self) -> bool:
        """Making the world has waited for every rank: all have passed `begin`, or have no shim."""
        backends = self._state.world_backends()
        if "gloo" in backends.values() and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") in ("", "0"):
            return True
        # Whether nccl2 waits is not known, so there a rank that is not heard of counts as slow.
        if self._state.is_nccl2(self._state.world_backend):
            return False
        device = self._state.world.bound_device_id
        if device is None or backends.get(device.type) != "nccl" or self._state.who_splits(device) == NOBODY:
            return False
        nonblocking = os.environ.get(NONBLOCKING_SWITCH)
        if nonblocking is None:
            return not self._traits.connects_without_waiting
        return nonblocking.lower() in settings.OFF
