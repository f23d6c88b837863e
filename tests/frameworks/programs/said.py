# SPDX-License-Identifier: Apache-2.0
"""What the programs share: where they leave their losses, and simulated NCCL where the job asks for it.

The job names a folder in FRAMEWORKS_FOLDER, and in FRAMEWORKS_SWITCHBOARD the address of simulated NCCL's
switchboard.  A process may write for itself (`said.loss`); a second one with the same label adds to it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["FRAMEWORKS_FOLDER"])


def loss(label: object, value: float) -> None:
    """Note a loss, or another number that the shim must not change; `label` says whose it is."""
    with open(FOLDER / f"{label}.losses", "a") as file:
        file.write(f"{float(value)!r}\n")


def done(label: object) -> None:
    """Note that this process came to its end, and what the shim did in it."""
    shim = sys.modules.get("torchcommshim")
    status = shim.status() if shim is not None else {"patched": [], "repairs": {}}
    (FOLDER / f"{label}.done").write_text(json.dumps(status))


def world(size: int | None = None) -> tuple[str, dict[str, object]]:
    """The backend for this process's world, and `device_id` for `init_process_group` if it is to be bound.

    Simulated NCCL, bound to a device as on a machine with GPUs, where the job has a switchboard; else gloo.
    """
    import torch

    address = os.environ.get("FRAMEWORKS_SWITCHBOARD")
    if address is None:
        return "gloo", {}
    from torchcommshim.commands.verify import simulated

    simulated.install(address, devices=size or int(os.environ["WORLD_SIZE"]))
    return "nccl", {"device_id": torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))}
