# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel and the source distribution of the commit that is checked out, the same bytes each time.

    python scripts/build_release.py dist
    python scripts/build_release.py dist --tag v0.1.0     # also: do tag, version and changelog agree?

Builds twice, from two copies of the commit, in folders, a time zone and a umask that differ, and stops if one
byte does.  The build backend is pinned: its version is in the wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKEND = "hatchling==1.33.0"
SBOM = "torchcommshim.cdx.json"


def version() -> str:
    """The version in the package."""
    text = (ROOT / "torchcommshim" / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def changes(release: str) -> str:
    """What CHANGELOG.md says of a release.

    Raises:
        ValueError: nothing, or not on which day it was released.
    """
    text = (ROOT / "CHANGELOG.md").read_text()
    section = rf"^## \[{re.escape(release)}\] - (\S+)\n(.*?)(?=^## |\Z)"
    found = re.search(section, text, re.MULTILINE | re.DOTALL)
    if found is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise ValueError(f"CHANGELOG.md has no section `## [{release}] - YYYY-MM-DD`")
    return found[2].strip() + "\n"


def requirements() -> list[str]:
    """What the wheel requires, as in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()  # tomllib is there from Python 3.11 on
    return sorted(json.loads(re.findall(r"^dependencies = (\[.*\])$", text, re.MULTILINE)[0]))


def sbom() -> str:
    """The bill of materials, as CycloneDX: this package, which bundles nothing, and its requirements."""
    needed = [re.split(r"[<>=~! ]", each)[0] for each in requirements()]
    own = f"pkg:pypi/torchcommshim@{version()}"
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": "torchcommshim",
                "version": version(),
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}",
                "name": name,
                "purl": f"pkg:pypi/{name}",
                "scope": "required",
                "description": f"not in the wheel; pip installs {requirement}",
            }
            for name, requirement in zip(needed, requirements())
        ],
        "dependencies": [{"ref": own, "dependsOn": [f"pkg:pypi/{name}" for name in needed]}],
    }
    return json.dumps(document, indent=2) + "\n"


def build(python: Path, copy: Path, *, zone: str, umask: int) -> dict[str, bytes]:
    """Build the commit in a new folder `copy`; returns the files by name."""
    copy.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=copy, input=archive, check=True)
    asked = ["git", "log", "-1", "--format=%ct"]
    seconds = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds, "TZ": zone}
    before = os.umask(umask)
    try:
        command = [python, "-m", "hatchling", "build", "-d", "built"]
        subprocess.run(command, cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)
    finally:
        os.umask(before)
    return {path.name: path.read_bytes() for path in sorted((copy / "built").iterdir())}


def main() -> None:
    """Build into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", help="the tag that is released")
    parser.add_argument("--write-sbom", action="store_true", help=f"only write {SBOM} anew")
    chosen = parser.parse_args()
    if chosen.write_sbom:
        (chosen.folder / SBOM).write_text(sbom())
        return
    if chosen.tag:
        if chosen.tag != f"v{version()}":
            parser.error(f"the tag is {chosen.tag}, the version {version()}")
        try:
            changes(version())
        except ValueError as error:
            parser.error(str(error))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        venv.create(work / "venv", with_pip=True)
        python = work / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", BACKEND], check=True)
        first = build(python, work / "one", zone="UTC", umask=0o022)
        second = build(python, work / "another", zone="Asia/Kolkata", umask=0o077)
    differing = [name for name in first if first[name] != second.get(name)]
    if differing or first.keys() != second.keys():
        sys.exit(f"two builds of one commit differ: {', '.join(differing) or 'in their files'}")
    shutil.rmtree(chosen.folder, ignore_errors=True)
    chosen.folder.mkdir(parents=True)
    for name, content in first.items():
        (chosen.folder / name).write_bytes(content)
        print(chosen.folder / name)


if __name__ == "__main__":
    main()
