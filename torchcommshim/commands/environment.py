# SPDX-License-Identifier: Apache-2.0
"""The environment of a child process that is to run with the shim."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping

import torchcommshim


def sitecustomize_folder() -> Path:
    """The folder for PYTHONPATH: inside the installed package, or beside it in a source checkout.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    package = Path(torchcommshim.__file__).resolve().parent
    for folder in (package / "sitecustomize", package.parent / "sitecustomize"):
        if (folder / "sitecustomize.py").is_file():
            return folder
    raise FileNotFoundError(
        f"{package / 'sitecustomize' / 'sitecustomize.py'} is missing: reinstall torchcommshim"
    )


def archive() -> Path | None:
    """The zip file (a zipapp) that this package is imported from; None if it is from a folder."""
    above = Path(torchcommshim.__file__).parents
    return next((path for path in above if path.is_file()), None)


def with_shim(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the sitecustomize folder first on PYTHONPATH."""
    folder, existing = str(sitecustomize_folder()), environment.get("PYTHONPATH", "")
    # An empty element of PYTHONPATH means the current directory, so the variable must not get one.
    elements = [folder, *(element for element in existing.split(os.pathsep) if element != folder)]
    return {**environment, "PYTHONPATH": os.pathsep.join(elements) if existing else folder}


def with_checkout(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`; where this package is a source checkout, with it first on PYTHONPATH."""
    root = Path(torchcommshim.__file__).resolve().parent.parent
    if not (root / "pyproject.toml").is_file():
        return dict(environment)
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")])),
    }
