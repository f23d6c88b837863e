# SPDX-License-Identifier: Apache-2.0
"""What is released: the same bytes from one commit, a bill of materials, a workflow, issue forms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, run

pytestmark = pytest.mark.once

GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))

sys.path.insert(0, str(ROOT / "scripts"))
import build_release  # noqa: E402
from build_release import SBOM, changes, sbom, version  # noqa: E402

sys.path.pop(0)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The files of a release of the commit that is checked out."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    folder = tmp_path_factory.mktemp("release") / "dist"
    run(sys.executable, ROOT / "scripts" / "build_release.py", folder)
    return folder


def test_same_bytes_from_one_commit(released):
    """Two builds in other folders, time zones and umasks came out equal, dated by the commit."""
    asked = ["git", "log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%d"]
    date = run(*asked, cwd=ROOT, TZ="UTC").stdout.strip()
    (built,) = released.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        dates = {"{:04}-{:02}-{:02}".format(*entry.date_time) for entry in archive.infolist()}

    assert len(list(released.iterdir())) == 2
    assert dates == {date}


def test_difference_between_builds_stops(monkeypatch, tmp_path, capsys):
    """Where two builds differ, the script names the file and writes nothing."""
    builds = iter([{"a.whl": b"1", "a.tar.gz": b"3"}, {"a.whl": b"2", "a.tar.gz": b"3"}])
    monkeypatch.setattr(build_release, "build", lambda *_, **__: next(builds))
    monkeypatch.setattr(build_release.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(build_release.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["build_release.py", str(tmp_path / "dist")])

    with pytest.raises(SystemExit, match=r"^two builds of one commit differ: a\.whl$"):
        build_release.main()
    assert not (tmp_path / "dist").exists()


def test_tag_of_another_version(tmp_path):
    """A tag that is not the version's stops the release before anything is built."""
    script = ROOT / "scripts" / "build_release.py"
    done = run(sys.executable, script, tmp_path / "dist", "--tag", "v999.0.0", check=False)

    assert (done.returncode, f"the tag is v999.0.0, the version {version()}" in done.stderr) == (2, True)


def test_changes_of_a_release(monkeypatch, tmp_path):
    """The notes of a release are its section of the changelog, which must have a date."""
    monkeypatch.setattr(build_release, "ROOT", tmp_path)
    text = "# Changelog\n\n## [0.2.0] - unreleased\n\n- c\n\n## [0.1.0] - 2026-12-01\n\n- a\n- b\n"
    (tmp_path / "CHANGELOG.md").write_text(text)

    assert changes("0.1.0") == "- a\n- b\n"
    for release in ("0.2.0", "0.3.0"):
        with pytest.raises(ValueError, match=re.escape(f"no section `## [{release}]")):
            changes(release)


def test_changelog_has_this_version():
    """CHANGELOG.md has a section for the version in the package."""
    assert f"\n## [{version()}]" in (ROOT / "CHANGELOG.md").read_text()


def test_bill_of_materials_in_the_wheel(wheel):
    """The wheel holds the bill of materials (PEP 770), and it is what the sources say today."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if ".dist-info/sboms/" in name)
        held = archive.read(name).decode()

    assert name.endswith(f"/{SBOM}")
    assert held == (ROOT / SBOM).read_text() == sbom(), "run scripts/build_release.py . --write-sbom"
    assert {each["name"] for each in json.loads(held)["components"]} == {"packaging", "wrapt"}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("github-workflows", GITHUB / "workflows" / "release.yml"),
        *(("github-issue-forms", form) for form in FORMS),
        ("github-issue-config", GITHUB / "ISSUE_TEMPLATE" / "config.yml"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_github_files_by_their_schema(schema, path):
    """GitHub's files are valid by the schema of their kind."""
    pytest.importorskip("check_jsonschema")
    if not GITHUB.exists():
        pytest.skip("not a checkout")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", path]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_release_workflow():
    """No job has a key: PyPI trusts the workflow, and the job that publishes waits for tests and build."""
    jobs = pytest.importorskip("yaml").safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    text = (GITHUB / "workflows" / "release.yml").read_text()

    assert "secrets." not in text
    assert "password" not in text
    assert (set(jobs["pypi"]["needs"]), jobs["pypi"]["environment"]) == ({"test", "build"}, "pypi")
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    assert jobs["test"]["permissions"] == {"contents": "read"}
    used = {step["uses"].split("@")[0] for step in jobs["build"]["steps"] if "uses" in step}
    assert {"actions/attest-build-provenance", "actions/attest-sbom"} <= used


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_forms_ask_for_the_doctor(form):
    """Each form requires the doctor's output, as JSON."""
    body = pytest.importorskip("yaml").safe_load(form.read_text())["body"]
    (doctor,) = (field for field in body if field.get("id") == "doctor")

    assert doctor["validations"] == {"required": True}
    assert "`torchcommshim doctor --json`" in doctor["attributes"]["description"]


def test_contributing_names_files_that_exist():
    """The files that CONTRIBUTING.md sends people to are there, and so are the names in them."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|.*?(?:`(\w+)`)? \|$", text, re.MULTILINE)
    assert rows
    for path, name in rows:
        assert (ROOT / path).exists(), path
        assert name in Path(ROOT / path).read_text() if name else True, (path, name)
