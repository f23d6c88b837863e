# SPDX-License-Identifier: Apache-2.0
"""What the interpreter runs at start: wait, at the least cost, for torch.

Only what the interpreter already holds is imported here, and nothing else of this package: most Python
processes never import torch.
"""

import os
import sys

# A copy of settings.OFF, which may not be imported here.
OFF = ("off", "0", "false", "f", "no", "n")

armed_by: "list[str]" = []


class _Tripwire:
    """A finder that finds nothing and notices the first import of a submodule of torch.

    It waits for a name that starts with `torch.`, not for `torch`: libraries look up `torch` alone to
    learn whether it is installed.  It stays in `sys.meta_path`, since the import system is iterating
    over that list when it is called.
    """

    tripped = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if not self.tripped and name.startswith("torch."):
            self.tripped = True
            _wait_for_torch()


_tripwire = _Tripwire()


def is_off() -> bool:
    """The master switch: `TORCHCOMMSHIM=off`."""
    return os.environ.get("TORCHCOMMSHIM", "").strip().lower() in OFF


def arm(loader: str = "torchcommshim.pth") -> None:
    """Wait for torch.  Called by the interpreter, perhaps twice (cpython#75723), never raises."""
    if is_off():
        return
    armed_by.append(loader)
    if _tripwire not in sys.meta_path:
        sys.meta_path.insert(0, _tripwire)


def install() -> None:
    """Arm in this process now; see `torchcommshim.install`."""
    if is_off():
        return
    armed_by.append("install()")
    _tripwire.tripped = True
    from torchcommshim import patches

    patches.wait_for_torch()


def uninstall() -> None:
    """Disarm in this process; see `torchcommshim.uninstall`."""
    _tripwire.tripped = True
    if "torchcommshim.patches" in sys.modules:
        from torchcommshim import patches

        patches.remove()


def _wait_for_torch() -> None:
    try:
        from torchcommshim import patches

        patches.wait_for_torch()
    except Exception as error:  # a missing or broken wrapt must not break `import torch`
        sys.stderr.write(f"torchcommshim: inactive, torch is left as it is: {error!r}\n")
