# SPDX-License-Identifier: Apache-2.0
"""What the wheel holds, what an installation puts on disk, and what an uninstallation leaves."""

from __future__ import annotations

import configparser
import csv
import re
import sys
import zipfile
from email.parser import HeaderParser

import pytest
from conftest import ARMED_BY, PTH, ROOT, make_venv, run

pytestmark = pytest.mark.once

START_LINE = "import torchcommshim; torchcommshim.arm()"


@pytest.fixture(scope="module")
def archive(wheel):
    with zipfile.ZipFile(wheel) as opened:
        yield opened


def dist_info(archive, name):
    (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
    return archive.read(path).decode()


def snapshot(folder):
    """The files below a folder, byte-code caches aside."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and not path.is_dir()
    }


def test_start_files_lie_in_the_root(archive):
    """`.pth` and `.start` are in the wheel's root, where site-packages begins, under one stem."""
    top = {name for name in archive.namelist() if "/" not in name}

    assert top == {"torchcommshim.pth", "torchcommshim.start"}


def test_no_top_level_sitecustomize(archive):
    """The only folders in the wheel are the package and its metadata: no `sitecustomize` of its own."""
    folders = {name.split("/")[0] for name in archive.namelist() if "/" in name}

    assert {re.sub(r"-[^-]*\.dist-info$", ".dist-info", name) for name in folders} == {
        "torchcommshim",
        "torchcommshim.dist-info",
    }


def test_pth_is_the_one_line_that_security_md_quotes(archive):
    """The start-up line is one plain line, and the one that SECURITY.md tells people to expect."""
    assert archive.read("torchcommshim.pth").decode() == f"{START_LINE}\n"
    assert f"\n{START_LINE}\n" in (ROOT / "SECURITY.md").read_text()


def test_start_names_the_callable_of_the_pth(archive):
    """Python 3.15's `.start` names the callable that the `.pth` calls."""
    module, function = archive.read("torchcommshim.start").decode().strip().split(":")

    assert START_LINE == f"import {module}; {module}.{function}()"


def test_record_lists_start_files(archive):
    """RECORD lists both files and the PYTHONPATH folder, so that uninstalling removes them."""
    recorded = {row[0] for row in csv.reader(dist_info(archive, "RECORD").splitlines())}

    assert recorded >= {
        "torchcommshim.pth",
        "torchcommshim.start",
        "torchcommshim/sitecustomize/sitecustomize.py",
        "torchcommshim/py.typed",
    }


def test_requirements(archive):
    """wrapt and packaging are all that is required; torch is an extra."""
    metadata = HeaderParser().parsestr(dist_info(archive, "METADATA"))
    required = {name for name in metadata.get_all("Requires-Dist") if "extra ==" not in name}

    assert required == {"packaging", "wrapt<3,>=1.16"}
    assert metadata["Requires-Python"] == ">=3.9"
    assert "torch" in metadata.get_all("Provides-Extra")


def test_version(archive, installed):
    """The wheel's version is `torchcommshim.__version__`."""
    metadata = HeaderParser().parsestr(dist_info(archive, "METADATA"))

    assert metadata["Version"] == installed.evaluate("__import__('torchcommshim').__version__")


def test_console_script(archive):
    """`torchcommshim` on the command line is `torchcommshim.commands.cli:main`."""
    scripts = configparser.ConfigParser()
    scripts.read_string(dist_info(archive, "entry_points.txt"))

    assert dict(scripts["console_scripts"]) == {"torchcommshim": "torchcommshim.commands.cli:main"}


def test_all_is_complete_sorted_and_importable():
    """`__all__` is sorted, each name in it exists, and no public name is missing from it."""
    import torchcommshim

    public = {
        name
        for name, value in vars(torchcommshim).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }

    assert torchcommshim.__all__ == sorted(torchcommshim.__all__)
    assert set(torchcommshim.__all__) == public | {"__version__"}


def test_pip_show_lists_the_start_files(installed):
    """`pip show -f`, SECURITY.md's way to audit, names the files that run at start."""
    shown = installed.pip("show", "-f", "torchcommshim").stdout.split()

    assert {"torchcommshim.pth", "torchcommshim.start"} <= set(shown)


def test_uninstall_leaves_nothing(wheel, tmp_path):
    """After `pip uninstall`, site-packages and bin hold what they held before, and Python starts silently."""
    venv = make_venv(tmp_path / "venv")
    before = snapshot(venv.path)
    venv.pip("install", "--quiet", "--no-deps", wheel)
    assert venv.evaluate(ARMED_BY) == PTH

    venv.pip("uninstall", "--quiet", "--yes", "torchcommshim")

    assert snapshot(venv.path) == before
    started = venv.run("-c", "pass")
    assert (started.stdout, started.stderr) == ("", "")


def test_editable_installation_is_armed(tmp_path):
    """`pip install -e` arms as a wheel does, and runs the checkout's code."""
    venv = make_venv(tmp_path / "venv")
    venv.pip("install", "--quiet", "--no-deps", "--editable", ROOT)

    assert venv.evaluate(ARMED_BY) == PTH
    assert venv.evaluate("sys.modules['torchcommshim'].__file__") == str(
        ROOT / "torchcommshim" / "__init__.py"
    )


def test_wheel_from_sdist_is_the_same(wheel, tmp_path):
    """A wheel that is built from the source distribution holds the files of one built from a checkout."""
    command = "from hatchling.build import build_sdist; print(build_sdist(%r))"
    made = run(sys.executable, "-c", command % str(tmp_path), cwd=ROOT).stdout.split()[-1]
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, tmp_path / made)
    (rebuilt,) = tmp_path.glob("*.whl")

    with zipfile.ZipFile(rebuilt) as one, zipfile.ZipFile(wheel) as other:
        assert one.namelist() == other.namelist()
