# SPDX-License-Identifier: Apache-2.0
"""Virtual environments with and without the shim, and with what a user would have instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Start:
    """One way to start Python.

    Attributes:
        command: the interpreter, behind a launcher if there is one.
        variables: added to the environment.
    """

    command: Sequence[object]
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """This process's environment without what steers Python, the shim or an agent."""
        foreign = ("PYTHON", "TORCHCOMMSHIM", "VIRTUAL_ENV", "DD_", "OTEL_", "AUTOWRAPT")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        # Agents' launchers look for `python` on the path.
        kept["PATH"] = f"{Path(str(self.command[-1])).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
        return {**kept, **self.variables}

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Start it and wait.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        return subprocess.run(
            [str(word) for word in (*self.command, *arguments)],
            env=self.environment(),
            check=True,
            capture_output=True,
            text=True,
        )

    def modules(self, code: str = "pass") -> dict[str, int]:
        """The modules that are imported until `code` has run, and the microseconds of each one's own body."""
        report = self.run("-X", "importtime", "-c", code).stderr.splitlines()
        rows = [line.partition(":")[2].split("|") for line in report if line.startswith("import time:")]
        return {name.strip(): int(own) for own, _, name in rows if own.strip().isdigit()}


def printed_by(script: str, *arguments: object) -> Any:
    """The JSON that a script of this folder prints, in a process that starts without the shim.

    Raises:
        subprocess.CalledProcessError: it failed; what it said is on stderr.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHCOMMSHIM": "off"}
    try:
        done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr)
        raise
    return json.loads(done.stdout)


def wheel(folder: Path) -> Path:
    """The wheel of this checkout, built into `folder`."""
    _pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("torchcommshim-*.whl")
    return built


def environment(folder: Path, *requirements: object, pth: str = "") -> Path:
    """Make a virtual environment with `requirements` and a `.pth` file of these lines; gives its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    if requirements:
        _pip("--python", python, "install", *requirements)
    if pth:
        (packages(python) / "benchmark.pth").write_text(pth)
    return python


def packages(python: Path) -> Path:
    """The site-packages folder of a virtual environment."""
    (folder,) = python.parent.parent.glob("lib/python3.*/site-packages")
    return folder


def beside(package: str) -> str:
    """A line for a `.pth` file that lends what lies beside `package`, without running the `.pth` files there.

    Raises:
        ModuleNotFoundError: this Python does not have it.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is needed, and {sys.executable} does not have it")
    return f"{Path(spec.origin).parent.parent}\n"


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([str(word) for word in (*command, *arguments)], check=True, capture_output=True, text=True)
