# SPDX-License-Identifier: Apache-2.0
"""Arms torchcommshim in every Python that has this folder on PYTHONPATH.

For the places that the `.pth` does not reach: `pip install --target`, and virtual environments made
inside an image whose system Python has the package.  The sitecustomize that Python would have run
without this folder runs first.

Any Python that is started may meet this file, so it keeps to the syntax of Python 3.6 and, before
Python 3.9, does no more than run the other one.
"""

import os
import site
import sys

# Held by every interpreter; importlib.machinery, which offers it, would be an import at every start.
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

HERE = os.path.dirname(os.path.realpath(__file__))
PACKAGES = ("torchcommshim", "wrapt", "packaging")


class _PackageFinder:
    """Finds this package and its two requirements where this file lies, for Pythons that lack them.

    It comes last, so what the environment has wins; and it knows three names only, so nothing else of
    that site-packages (another torch, perhaps) gets into the environment.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """The spec of one of `PACKAGES`, or None."""
        return PathFinder.find_spec(name, [self.root]) if name in PACKAGES else None


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that this file hides; its errors are reported by Python's own code."""
    this = sys.modules.pop("sitecustomize", None)
    hidden = [(i, entry) for i, entry in enumerate(sys.path) if os.path.realpath(entry) == HERE]
    for _, entry in hidden:
        sys.path.remove(entry)
    site.execsitecustomize()
    # Programs hand sys.path on to their children as PYTHONPATH, so the folder goes back.
    for position, entry in hidden:
        sys.path.insert(position, entry)
    if this is not None:
        sys.modules.setdefault("sitecustomize", this)


def _package_root() -> str:
    """The folder that holds this package: one above in a checkout, two above in an installation."""
    above = os.path.dirname(HERE)
    return above if os.path.isdir(os.path.join(above, "torchcommshim")) else os.path.dirname(above)


_run_hidden_sitecustomize()
if sys.version_info >= (3, 9):
    sys.meta_path.append(_PackageFinder(_package_root()))
    import torchcommshim

    torchcommshim.arm(os.path.join(HERE, "sitecustomize.py"))
