# SPDX-License-Identifier: Apache-2.0
"""examples/docker/Dockerfile, its RUN and ENV lines carried out with a Debian or Ubuntu system Python.

A private mount namespace stands for the image: the system Python is the machine's own, its local
site-packages and /usr/local/bin are folders of this test's, so the machine keeps nothing of it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ARMED_BY, PTH, ROOT, run

pytestmark = pytest.mark.once

DOCKERFILE = (ROOT / "examples" / "docker" / "Dockerfile").read_text()
PYTHON = "/usr/bin/python3"
VENDORS_TORCH = "2.4.0a0+f70bd71a48.nv24.6"


def instructions(kind, text=DOCKERFILE):
    """The arguments of each instruction of one kind, continued lines joined."""
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{kind} (.*)$", lines, re.MULTILINE)


@dataclass
class Image:
    """A system Python whose local packages and programs lie in `root`."""

    root: Path
    local: str
    environment: dict

    def run(self, command, *, check=True, **environment):
        """Run a shell command in the image."""
        binds = {self.root / "packages": self.local, self.root / "bin": "/usr/local/bin"}
        mounts = [f"mount --bind {source} {target}" for source, target in binds.items()]
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
        script = " && ".join([*mounts, f"exec sh -c {shlex.quote(command)}"])
        return run(
            *unshare, "sh", "-c", script, check=check, cwd=self.root, **{**self.environment, **environment}
        )

    def evaluate(self, python, expression, *flags, **environment):
        program = shlex.quote(f"import sys; print(repr({expression}))")
        words = " ".join([str(python), *flags, "-c", program])
        return eval(self.run(words, **environment).stdout)  # noqa: S307 - our own repr


def put_vendors_torch(packages):
    """A torch as a vendor builds it: a version that no package index has."""
    info = packages / f"torch-{VENDORS_TORCH}.dist-info"
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(f"__version__ = {VENDORS_TORCH!r}\n")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {VENDORS_TORCH}\n")
    (info / "RECORD").write_text(f"torch/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


@pytest.fixture(scope="module")
def image(wheel, tmp_path_factory):
    """The image that the Dockerfile makes."""
    reason = unfit()
    if reason:
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("image")
    scheme = "import sysconfig; print(sysconfig.get_path('purelib', 'posix_local'))"
    local = run(PYTHON, "-c", scheme).stdout.strip()
    for folder in ("packages", "bin", "opt"):
        (root / folder).mkdir()
    put_vendors_torch(root / "packages")
    shutil.copy(wheel, root / "opt")

    def here(text):
        return text.replace("/opt/torchcommshim", str(root / "opt"))

    made = Image(root, local, {"PATH": "/usr/local/bin:/usr/bin:/bin"})
    for command in instructions("RUN"):
        made.run(here(command))
    for line in instructions("ENV"):
        name, _, value = line.partition("=")
        made.environment[name] = run("sh", "-c", f'printf %s "{here(value)}"').stdout
    return made


def unfit():
    """Why this machine cannot stand for a base image, or None."""
    if not Path(PYTHON).exists() or "posix_local" not in subprocess.getoutput(
        f"{PYTHON} -c 'import sysconfig; print(sysconfig.get_scheme_names())'"
    ):
        return f"{PYTHON} is not Debian's or Ubuntu's Python"
    if subprocess.run(
        [PYTHON, "-c", "import pip, venv, ensurepip"], capture_output=True, check=False
    ).returncode:
        return f"{PYTHON} has no pip and venv (packages python3-pip and python3-venv)"
    alone = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "true"]
    if not shutil.which("unshare") or subprocess.run(alone, capture_output=True, check=False).returncode:
        return "no private mount namespace (unshare --mount) to keep the machine's Python as it is"
    return None


@pytest.fixture(scope="module")
def folder(image):
    """The file that arms when the folder does, links followed."""
    return f"{image.local}/torchcommshim/sitecustomize/sitecustomize.py"


def make_venv(image, name, *options):
    image.run(f"{PYTHON} -m venv {' '.join(options)} {image.root / name}")
    return image.root / name / "bin" / "python"


def test_one_run_and_one_env():
    """The Dockerfile needs one RUN and one ENV line."""
    assert (len(instructions("RUN")), len(instructions("ENV"))) == (1, 1)


def test_pip_leaves_the_images_torch(image):
    """pip adds the shim and its two requirements, and the vendor's torch is the one that was there."""
    listed = image.run(f"{PYTHON} -m pip list --format freeze --path {image.local}").stdout.split()

    names = {entry.partition("==")[0] for entry in listed}
    assert names == {"packaging", "torch", "torchcommshim", "wrapt"}
    assert f"torch=={VENDORS_TORCH}" in listed
    assert image.evaluate(PYTHON, "__import__('torch').__version__") == VENDORS_TORCH


def test_system_python(image, folder):
    """The image's own Python is armed by the `.pth`, -E and -I included, and by the folder."""
    assert image.evaluate(PYTHON, ARMED_BY) == sorted([*PTH, folder])
    assert image.evaluate(PYTHON, ARMED_BY, "-E") == PTH
    assert image.evaluate(PYTHON, ARMED_BY, "-I") == PTH


def test_distributions_own_sitecustomize(image):
    """The sitecustomize that Debian ships is run, as without the folder."""
    plain = image.evaluate(PYTHON, "getattr(sys.modules.get('sitecustomize'), '__file__', None)", "-E")
    if plain is None:
        pytest.skip("this distribution ships no sitecustomize")

    assert image.evaluate(PYTHON, "sys.modules['sitecustomize'].__file__") == plain


def test_venv_with_system_packages(image, folder):
    """A virtual environment that sees the image's packages is armed both ways, and sees its torch."""
    python = make_venv(image, "with", "--system-site-packages")

    assert image.evaluate(python, ARMED_BY) == sorted([*PTH, folder])
    assert image.evaluate(python, "__import__('torch').__version__") == VENDORS_TORCH


def test_venv_without_system_packages(image, folder):
    """A virtual environment of its own is armed and lent wrapt by the folder; it does not see the torch."""
    python = make_venv(image, "without")
    visible = "[__import__('importlib.util').util.find_spec(n) is not None for n in ('wrapt', 'torch')]"

    assert image.evaluate(python, f"({ARMED_BY}, {visible})") == ([folder], [True, False])


def test_pip_in_a_venv(image, folder):
    """pip in such an environment lists what is installed there, not what is lent."""
    python = make_venv(image, "listed")

    listed = image.run(f"{python} -m pip list --format freeze").stdout
    assert not re.search("wrapt|packaging|torch", listed)


def test_target_installation(image, folder):
    """What a user installs with --target, the shim again included, runs armed by the image's folder."""
    target = image.root / "target"
    image.run(
        f"{PYTHON} -m pip install --quiet --no-deps --target {target} {image.root}/opt/torchcommshim-*.whl"
    )
    path = f"{image.environment['PYTHONPATH']}:{target}"
    seen = f"({ARMED_BY}, sys.modules['torchcommshim'].__file__)"

    expected = (sorted([*PTH, folder]), str(target / "torchcommshim" / "__init__.py"))
    assert image.evaluate(PYTHON, seen, PYTHONPATH=path) == expected


def test_off_for_one_job(image):
    """The switch in the Dockerfile's last example, `docker run -e …`, leaves every Python unarmed."""
    (switch,) = re.findall(r"docker run -e (\S+)", DOCKERFILE)
    name, _, value = switch.partition("=")

    assert image.evaluate(PYTHON, ARMED_BY, **{name: value}) == []
    assert image.evaluate(make_venv(image, "off"), ARMED_BY, **{name: value}) == []
