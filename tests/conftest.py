# SPDX-License-Identifier: Apache-2.0
"""Fixtures to build the wheel, make virtual environments and start new interpreters in them."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# An expression for `Venv.evaluate`: what armed the shim in that interpreter, empty if nothing did.  A set,
# since a virtual environment's `.pth` runs twice (cpython#75723).
ARMED_BY = "sorted(set(getattr(sys.modules.get('torchcommshim'), '_armed_by', ())))"
PTH = ["torchcommshim.pth"]


def _collect_garbage():
    """Leave none to a fork.

    It would destroy a store or group that is garbage here, and wait for its threads, which a fork lacks.
    What is left stays frozen, here too: the next fork has little to look through.
    """
    gc.collect()
    gc.freeze()


os.register_at_fork(before=_collect_garbage)


def pytest_addoption(parser):
    parser.addoption("--wheel", type=Path, help="the wheel that is installed here; without it, one is built")


def pytest_report_header(config):
    import torchcommshim

    tested = Path(torchcommshim.__file__).resolve()
    # A test of the source tree says nothing of what users install.
    if config.getoption("--wheel") and tested.is_relative_to(ROOT / "torchcommshim"):
        raise pytest.UsageError(f"--wheel is given, but {tested} would be tested")
    return f"torchcommshim under test: {tested.parent}"


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without what steers Python or the shim, then `changes`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "TORCHCOMMSHIM", "VIRTUAL_ENV", "COVERAGE"))
    }
    return {**kept, **changes}


def run(*command: object, check: bool = True, cwd: Path | None = None, **environment: str):
    """Run a command in a clean environment; with `check`, fail with its output unless it exits 0."""
    done = subprocess.run(
        [str(word) for word in command],
        env=clean_environment(**environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if check and done.returncode:
        pytest.fail(f"{done.args} exited {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def pip(python: object, *arguments: object, **environment: str):
    """Run this environment's pip on the environment of `python`."""
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, **environment)


@dataclass(frozen=True)
class Venv:
    """A virtual environment and what can be run in it."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = self.path.glob("lib/python3.*/site-packages")
        return found

    def run(self, *arguments: object, check: bool = True, **environment: str):
        """Start this environment's Python."""
        return run(self.python, *arguments, check=check, cwd=self.path, **environment)

    def evaluate(self, expression: str, *flags: str, **environment: str):
        """The value of an expression in a new interpreter that has imported `sys` and nothing else."""
        done = self.run(*flags, "-c", f"import sys; print(repr({expression}))", **environment)
        return eval(done.stdout)  # noqa: S307 - our own repr

    def pip(self, *arguments: object):
        return pip(self.python, *arguments)


def make_venv(path: Path, python: object = sys.executable, *options: str) -> Venv:
    """A new virtual environment without pip, as `python -m venv` makes it."""
    run(python, "-m", "venv", "--without-pip", *options, path)
    return Venv(path)


@pytest.fixture(scope="session")
def wheel(request, tmp_path_factory) -> Path:
    """The wheel under test."""
    given = request.config.getoption("--wheel")
    if given:
        return given.resolve()
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Venv:
    """A virtual environment with the wheel and no torch; shared, so tests leave it as it is."""
    venv = make_venv(tmp_path_factory.mktemp("installed") / "venv")
    venv.pip("install", "--quiet", wheel)
    return venv


def interpreters() -> dict[tuple[int, int], str]:
    """One interpreter of each Python 3 release that can be found here, by release."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    names = [shutil.which(f"python3.{minor}") for minor in range(6, 20)]
    found = {}
    for path in [*filter(None, names), *map(str, sorted(pyenv.glob("versions/3.*/bin/python3")))]:
        probe = [path, "-c", "import ensurepip, sys, venv; print(*sys.version_info[:2])"]
        release = tuple(map(int, subprocess.run(probe, capture_output=True, check=False).stdout.split()))
        if release:
            found.setdefault(release, path)
    return dict(sorted(found.items()))
