# SPDX-License-Identifier: Apache-2.0
"""torchcommshim: unmodified distributed PyTorch scripts stop hanging when NCCL communicators are made.

Every Python process that starts with the package installed runs this file, and most of them never import
torch.  So it is one file, since a second module would double what a start costs, and it imports only what
the interpreter holds already: not even `__future__`.
"""

import os
import sys

__version__ = "0.1.0"
__all__ = ["__version__", "arm", "install", "status", "uninstall"]

# A copy of settings.OFF, which may not be imported here; a test keeps the two equal.
_OFF = ("off", "0", "false", "f", "no", "n")

_armed_by: "list[str]" = []
_failures: "list[str]" = []  # why nothing could be patched


def arm(loader: str = "torchcommshim.pth") -> None:
    """Wait for torch.  Called when the interpreter starts, perhaps twice (cpython#75723); never raises."""
    if _is_off():
        return
    if loader not in _armed_by:
        _armed_by.append(loader)
    if _tripwire not in sys.meta_path:
        sys.meta_path.insert(0, _tripwire)


def install() -> None:
    """Arm the shim in this process, for those who prefer a line of code over the installed hook.

    Works before and after `import torch`.  When torch is already imported, names that other modules
    took from it (`from torch.distributed import new_group`) are replaced as well.  Calling it again
    does nothing.  The master switch `TORCHCOMMSHIM=off` still wins.
    """
    arm("install()")
    if not _is_off():
        _tripwire.trip()


def uninstall() -> None:
    """Take the shim out of this process; groups that exist are not touched."""
    _tripwire.tripped = True
    if "torchcommshim.patches" in sys.modules:
        from torchcommshim import patches

        patches.remove()


def status() -> "dict[str, object]":
    """What the shim is and has done in this process: plain values, ready for `json.dumps`.

    Keys: `version`, `armed_by` (loaders, in order), `strategy`, `agreement`, `torch` (version or
    None), `patched` (wrapped names), `traits`, `standing_aside` (reasons), `repairs` (count by defect),
    `failures` (what went wrong inside the shim).
    """
    from torchcommshim.tell import report

    return report.status()


class _Tripwire:
    """A finder that finds nothing and notices the first import of a submodule of torch.

    It waits for a name that starts with `torch.`, not for `torch`: libraries look up `torch` alone to
    learn whether it is installed.  It stays in `sys.meta_path`, since the import system is iterating
    over that list when it is called.
    """

    tripped = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing."""
        if not self.tripped and name.startswith("torch."):
            self.trip()

    def trip(self) -> None:
        """Have torch patched when it is imported; the wire stays up if now is not the time."""
        self.tripped = True  # what is imported here comes by as well
        try:
            from torchcommshim import patches

            self.tripped = patches.wait_for_torch()
        except Exception as error:  # a missing or broken wrapt must not break `import torch`
            _inactive(error)


_tripwire = _Tripwire()


def _inactive(error: Exception) -> None:
    """Note, and say, why torch is left as it is; stderr may be missing or closed."""
    _failures.append(f"inactive: {error!r}")
    why = f"inactive, torch is left as it is: {error!r} [TCS-inactive]"
    try:  # noqa: SIM105 - contextlib would be one more import at every start
        sys.stderr.write(f"torchcommshim {__version__}: {why}\n")
    except Exception:
        pass


def _is_off() -> bool:
    """The master switch: `TORCHCOMMSHIM=off`."""
    return os.environ.get("TORCHCOMMSHIM", "").strip().lower() in _OFF
