# SPDX-License-Identifier: Apache-2.0
"""torchcommshim: unmodified distributed PyTorch scripts stop hanging when NCCL communicators are made.

This file imports nothing, not even `__future__`: every Python process that starts with the package
installed runs it.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "install", "status", "uninstall"]


def install() -> None:
    """Arm the shim in this process, for those who prefer a line of code over the installed hook.

    Works before and after `import torch`.  When torch is already imported, names that other modules
    took from it (`from torch.distributed import new_group`) are replaced as well.  Calling it again
    does nothing.  The master switch `TORCHCOMMSHIM=off` still wins.
    """
    from torchcommshim import startup

    startup.install()


def uninstall() -> None:
    """Take the shim out of this process; groups that exist are not touched."""
    from torchcommshim import startup

    startup.uninstall()


def status() -> "dict[str, object]":
    """What the shim is and has done in this process: plain values, ready for `json.dumps`.

    Keys: `version`, `armed_by` (loaders, in order), `strategy`, `agreement`, `torch` (version or
    None), `patched` (wrapped names), `traits`, `standing_aside` (reasons), `repairs` (count by defect),
    `failures` (what went wrong inside the shim).
    """
    from torchcommshim import report

    return report.status()
