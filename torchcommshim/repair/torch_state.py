# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed holds at the moment, read without importing it."""

from __future__ import annotations

import sys
from typing import Any

from torchcommshim.repair.calls import Split
from torchcommshim.repair.creations import ALL, MEMBERS, NOBODY, Creation


class TorchState:
    """Reads a loaded `torch.distributed.distributed_c10d`."""

    def __init__(self, c10d: Any) -> None:
        self.c10d = c10d

    @property
    def world(self) -> Any:
        """The world: torch's default process group; None if there is none."""
        return self.c10d._world.default_pg

    @property
    def store(self) -> Any:
        """The world's store."""
        return self.c10d._world.pg_map[self.world][1]

    @property
    def world_backend(self) -> str:
        """What the world was made with, e.g. `cpu:gloo,cuda:nccl`."""
        return str(self.c10d._world.pg_map[self.world][0])

    def world_backends(self) -> dict[str, str]:
        """The world's backend for each type of device."""
        return self.backends(self.world_backend)

    def backends(self, backend: str) -> dict[str, str]:
        """The backend for each type of device that `backend` (`nccl`, `cpu:gloo,cuda:nccl`) means."""
        config = self.c10d.BackendConfig(self.c10d.Backend(backend))
        return {device: str(name).lower() for device, name in config.get_device_backend_map().items()}

    def who_splits(self, device: Any) -> str:
        """Who can split from the world's backend for `device`, found as `_get_split_source` finds it."""
        try:
            backend = self.world._get_backend(self.torch.device(device))
        except RuntimeError:  # it has none for that device
            return NOBODY
        if not backend.supports_splitting:
            return NOBODY
        wrapper = getattr(self.c10d, "_ProcessGroupWrapper", ())  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        while isinstance(backend, wrapper):
            backend = backend.wrapped_pg
        return ALL if hasattr(backend, "perform_nocolor_split") else MEMBERS

    def describe(
        self, kind: str, ranks: tuple[int, ...], backend: str, *, split: Split | None = None
    ) -> Creation:
        """A creation in the world as it is now."""
        device = self.world.bound_device_id
        # As _get_split_source of 2.3 to 2.5, the only ones that ask it for a world that is not bound.
        device_type = "cuda" if device is None else device.type
        return Creation(
            kind=kind,
            ranks=ranks if split is None else split.ranks,
            backend=backend,
            world_size=self.world.size(),
            bound=device is not None,
            device_backend=self.backends(backend).get(device_type),
            world_device_backend=self.world_backends().get(device_type),
            world_splits=self.who_splits(device or device_type),
            partial=split is not None and split.partial,
            divides=split is not None and len(split.parts) > 1,
            by_mesh=split is not None and split.by_mesh,
            even=split is None or split.even,
        )

    def uses_torchcomms(self) -> bool:
        """torchcomms (2.11 on) makes groups in its own way; the shim stands aside."""
        enabled = getattr(self.c10d, "_use_torchcomms_enabled", None)
        return bool(enabled and enabled())

    def is_nccl2(self, backend: object) -> bool:
        """Is `backend` (a name, or None) nccl2 or nccl-lazy for CUDA, under whatever name it is registered?

        2.15, where `nccl` is nccl2 unless TORCH_DIST_USE_NCCL2=0, binds such a world to a device by itself;
        the split of 2.14's nccl2 needs a bound world (pytorch#192276).
        """
        if backend is not None and "nccl" not in str(backend) and "undefined" not in str(backend):
            return False
        name = self.backends(str(backend or "undefined")).get("cuda", "")
        plugin = self.c10d.Backend._plugins.get(name.upper())
        creators = ("_create_nccl2_process_group", "_create_nccl_lazy_process_group")
        return plugin is not None and plugin.creator_fn in [
            getattr(self.c10d, creator) for creator in creators if hasattr(self.c10d, creator)
        ]

    def accelerator(self, index: int) -> Any:
        """The torch.device with that index, of this build's accelerator."""
        current = self.torch.accelerator.current_accelerator() if hasattr(self.torch, "accelerator") else None
        return self.torch.device(current.type if current else "cuda", index)

    @property
    def torch(self) -> Any:
        """The torch package, which is loaded since its submodule is."""
        return sys.modules["torch"]
