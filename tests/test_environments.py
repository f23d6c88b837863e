# SPDX-License-Identifier: Apache-2.0
"""The ways in which people get a Python with packages in it, beside pip in a virtual environment."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from conftest import ARMED_BY, PTH, make_venv, pip, run

pytestmark = pytest.mark.once

SHOW = f"import sys; print({ARMED_BY})"
BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def tool(name):
    """The command line of a tool that may not be here."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return [sys.executable, "-m", name]


@pytest.fixture
def program(tmp_path):
    """A program that prints what has armed it."""
    path = tmp_path / "program.py"
    path.write_text(SHOW + "\n")
    return path


def test_uv_pip(wheel, tmp_path):
    """What `uv pip install` has put into an environment is armed by the `.pth`."""
    venv = make_venv(tmp_path / "venv")
    run(*tool("uv"), "pip", "install", "--quiet", "--no-deps", "--python", venv.python, wheel)

    assert venv.evaluate(ARMED_BY) == PTH


def test_uv_run_with(wheel, tmp_path, program):
    """`uv run --with` arms the one run, and its children, and nothing is left in the environment."""
    venv = make_venv(tmp_path / "venv")
    child = tmp_path / "child.py"
    started = f"[sys.executable, {str(program)!r}]"
    child.write_text(f"import subprocess, sys; subprocess.run({started}, check=True)\n")
    command = [*tool("uv"), "run", "--no-project", "--quiet", "--python", venv.python, "--with", wheel]

    assert run(*command, "python", program).stdout == f"{PTH}\n"
    assert run(*command, "python", child).stdout == f"{PTH}\n"
    assert venv.evaluate(ARMED_BY) == []


def test_conda_style_prefix(wheel, tmp_path, program):
    """A prefix with its own interpreter, standard library and site-packages, as conda makes it, is armed."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    standard = Path(sys.base_prefix) / "lib" / version
    prefix = tmp_path / "prefix"
    packages = prefix / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (prefix / "bin").mkdir()
    for entry in standard.iterdir():
        if entry.name not in ("site-packages", "dist-packages", "EXTERNALLY-MANAGED"):
            (packages.parent / entry.name).symlink_to(entry)
    python = prefix / "bin" / "python"
    shutil.copy(BASE, python)
    seen = run(python, "-c", "import sys, site; print(sys.prefix, *site.getsitepackages())", check=False)
    if not seen.stdout.startswith(str(prefix)):
        pytest.skip("this interpreter does not look for its prefix beside itself")

    pip(python, "install", "--quiet", "--no-deps", wheel)

    assert (packages / "torchcommshim.pth").is_file()
    assert run(python, program).stdout == f"{PTH}\n"


def test_user_installation(wheel, tmp_path, program):
    """`pip install --user` arms that user's Pythons; -s, which leaves the user's packages out, does not."""
    where = {"PYTHONUSERBASE": str(tmp_path / "user"), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    if run(BASE, "-m", "pip", "--version", check=False).returncode:
        pytest.skip(f"{BASE} has no pip")
    run(BASE, "-m", "pip", "install", "--quiet", "--user", "--no-deps", "--ignore-installed", wheel, **where)

    assert run(BASE, program, **where).stdout == f"{PTH}\n"
    assert run(BASE, "-s", program, **where).stdout == "[]\n"


@pytest.mark.parametrize("mode", [(), ("--venv",)], ids=["unpacked", "venv"])
def test_pex(wheel, tmp_path, program, mode):
    """A pex file with the wheel in it arms the program that it runs."""
    run(*tool("pex"), wheel, *mode, "--output-file", tmp_path / "a.pex", PEX_ROOT=str(tmp_path / "root"))

    done = run(sys.executable, tmp_path / "a.pex", program, PEX_ROOT=str(tmp_path / "root"))
    assert done.stdout == f"{PTH}\n"


@pytest.fixture(scope="module")
def packed(wheel, tmp_path_factory):
    """A folder with the wheel's packages, to be made a zipapp of."""
    folder = tmp_path_factory.mktemp("packed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True)
    return folder


def make_zipapp(packed, tmp_path, main):
    (packed / "__main__.py").write_text(main)
    zipapp.create_archive(packed, tmp_path / "app.pyz")
    return tmp_path / "app.pyz"


def test_zipapp(packed, tmp_path):
    """In a zipapp nothing arms by itself, and the line that the doctor gives does."""
    venv = make_venv(tmp_path / "venv")
    line = "import torchcommshim; torchcommshim.install()"

    assert venv.run(make_zipapp(packed, tmp_path, SHOW)).stdout == "[]\n"
    assert venv.run(make_zipapp(packed, tmp_path, f"{line}\n{SHOW}")).stdout == "['install()']\n"


def test_doctor_in_a_zipapp(packed, tmp_path):
    """The doctor of a zipapp says that it lies in an archive, and names the line that helps."""
    venv = make_venv(tmp_path / "venv")
    main = "import sys; from torchcommshim.commands.cli import main; sys.exit(main(['doctor']))"
    done = venv.run(make_zipapp(packed, tmp_path, main), check=False)

    assert done.returncode == 1
    assert f"it lies in {tmp_path / 'app.pyz'}, and Python reads no .pth in an archive" in done.stdout
    assert "`import torchcommshim; torchcommshim.install()` first in the program's __main__.py" in done.stdout


def test_doctor_without_site(installed):
    """Under -S the doctor says that nothing is loaded, and what to call."""
    script = f"""
import sys
sys.path.append({str(installed.site_packages)!r})
from torchcommshim.commands.cli import main
sys.exit(main(['doctor']))
"""
    done = installed.run("-S", "-c", script, check=False)

    assert (done.returncode, "started with -S, which loads nothing" in done.stdout) == (1, True)
