# SPDX-License-Identifier: Apache-2.0
"""`torchcommshim doctor`, `run` and `path`, as a user starts them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment, run

from torchcommshim import patches
from torchcommshim.commands import doctor, environment
from torchcommshim.commands.cli import main
from torchcommshim.repair.defects import CATALOGUE


def ask(*arguments, **variables):
    """Run the doctor in a new interpreter that is armed by the sitecustomize folder."""
    path = str(environment.sitecustomize_folder())
    command = (sys.executable, "-m", "torchcommshim", "doctor", *arguments)
    return run(*command, check=False, **{"PYTHONPATH": path, **variables})


@pytest.fixture(scope="module")
def findings():
    """What the doctor finds in this environment, and its exit code."""
    pytest.importorskip("torch", reason="needs torch")
    done = ask("--json")
    return json.loads(done.stdout), done.returncode


def test_healthy(findings):
    """An armed interpreter with a torch that is known has no problems, and the exit code says so."""
    found, code = findings

    assert (found["problems"], code) == ([], 0)


def test_who_armed(findings):
    """The file that armed this interpreter is named."""
    found, _ = findings
    ours = str(environment.sitecustomize_folder() / "sitecustomize.py")

    assert ours in [entry["file"] for entry in found["armed_by"]]
    assert (found["sitecustomize"]["wins"], found["sitecustomize"]["ours_wins"]) == (ours, True)


def test_versions(findings):
    """The versions that a bug report needs are those of this environment."""
    torch = pytest.importorskip("torch")
    found, _ = findings

    assert found["torch"]["version"] == torch.__version__
    assert found["python"]["executable"] == sys.executable


def test_wrapped(findings):
    """Each function is wrapped by the shim, and by nobody else."""
    found, _ = findings
    c10d = sys.modules["torch.distributed.distributed_c10d"]

    assert {name: (entry["in_place"], entry["others"]) for name, entry in found["wrapped"].items()} == {
        name: (True, []) for name in patches._present(c10d)
    }


def test_traits_and_defects(findings):
    """Each trait says how it was found; each defect of this torch says what is done about it."""
    torch = pytest.importorskip("torch")
    found, _ = findings
    late = torch.__version__.startswith("2.4.")

    assert found["traits"]["members_split_late"]["value"] is late
    assert all(entry["found"] for entry in found["traits"].values())
    assert [entry["name"] for entry in found["defects"]] == [defect.name for defect in CATALOGUE]
    assert all(bool(entry["remedy"]) is entry["present"] for entry in found["defects"])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("auto", "independent:"),
        ("split", "independent:"),
        ("strip", "device_id is dropped"),
        ("observe", "reported only"),
        ("off", "nothing"),
    ],
)
def test_remedy_follows_the_strategy(monkeypatch, strategy, expected):
    """What would be done about a defect depends on the strategy: here, a gloo group in an NCCL world."""
    pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setenv("TORCHCOMMSHIM", strategy)
    found = doctor.examine()
    (entry,) = (each for each in found["defects"] if each["name"] == "other-backend")

    assert (entry["remedy"].startswith(expected), found["strategy"]["from"]) == (
        True,
        f"TORCHCOMMSHIM={strategy}",
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", "strategy       auto  (TORCHCOMMSHIM=1, taken for auto)"),
        ("true", "strategy       auto  (TORCHCOMMSHIM=true, taken for auto)"),
        ("Strip", "strategy       strip  (TORCHCOMMSHIM=Strip)"),
        ("auto", "strategy       auto  (TORCHCOMMSHIM=auto)"),
    ],
)
def test_what_a_value_is_taken_for(monkeypatch, value, expected):
    """A word that stands for a strategy is named with it; one that is a strategy stands for itself."""
    monkeypatch.setenv("TORCHCOMMSHIM", value)

    assert expected in doctor.as_text(doctor.examine()).splitlines()


@pytest.mark.parametrize(
    ("torch", "nccl", "strategy", "expected"),
    [
        ("2.11.0+cu130", "2.28.9", "auto", 1),
        ("2.9.0", "2.27.5", "off", 1),
        ("2.11.0+cu130", "2.28.9", "strip", 0),
        ("2.8.0", "2.27.3", "auto", 0),
        ("2.15.0", "2.29.2", "auto", 0),
        ("2.13.0+cpu", None, "auto", 0),
        (None, None, "auto", 0),
    ],
)
def test_advice(torch, nccl, strategy, expected):
    """Sends that do not overlap with collectives: 2.9 to 2.14, NCCL, a device_id that is not dropped."""
    assert len(doctor.advice(torch, nccl, strategy)) == expected


@pytest.mark.once
def test_advice_is_measured():
    """The times that the doctor names are those in docs/performance.json, and are no noise there."""
    results = json.loads((ROOT / "docs" / "performance.json").read_text())
    ways = results["gpu-p2p, torch 2.11.0"]["ways"]
    lazy, bound = ways["without device_id"], ways["bound, auto"]
    sends, all_reduce, unbound = (round(lazy[name]["median"]) for name in ("sends", "all_reduce", "step"))
    step = round(bound["step"]["median"])

    assert doctor.SENDS_BESIDE_AN_ALL_REDUCE == (
        f"{sends} ms of sends beside an all-reduce of {all_reduce} ms took {step} ms; "
        f"without device_id, {unbound} ms"
    )
    assert bound["to_base"]["low"] > 1


def test_advice_in_the_text(findings):
    """Advice has a section of its own, and none where there is nothing to say."""
    found, _ = findings

    assert found["advice"] == doctor.advice(found["torch"]["version"], found["nccl"], "auto")
    assert "Slow on this torch\n  use less" in doctor.as_text({**found, "advice": ["use less"]})
    assert "Slow on this torch" not in doctor.as_text({**found, "advice": []})


def test_wrapped_by_somebody_else(monkeypatch):
    """A function that another package has wrapped names that package."""
    c10d = pytest.importorskip("torch.distributed.distributed_c10d", reason="needs torch")
    original = c10d.new_group

    @functools.wraps(original)
    def new_group(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(c10d, "new_group", new_group)

    assert doctor.examine()["wrapped"]["new_group"]["others"] == [__name__]


def test_text(findings):
    """The text names what the JSON does: strategy, traits, defects of this build."""
    found, _ = findings
    text = doctor.as_text(found)

    assert "No problems found." in text
    assert all((entry["title"] in text) is entry["present"] for entry in found["defects"])


def test_settings_of_those_who_watch(monkeypatch):
    """The order check, the hang report and the trace are shown, and what set them."""
    for name in ("CHECK_ORDER", "HANG_REPORT_S", "TRACE"):
        monkeypatch.delenv(f"TORCHCOMMSHIM_{name}", raising=False)
    before = doctor.as_text(doctor.examine()).splitlines()
    monkeypatch.setenv("TORCHCOMMSHIM_CHECK_ORDER", "1")
    monkeypatch.setenv("TORCHCOMMSHIM_HANG_REPORT_S", "off")
    monkeypatch.setenv("TORCHCOMMSHIM_TRACE", "traces")
    after = doctor.as_text(doctor.examine()).splitlines()

    assert before[8:11] == [
        "order check    off  (default)",
        "hang report    after 120 s  (default)",
        "trace          off  (default)",
    ]
    assert after[8:11] == [
        "order check    on  (TORCHCOMMSHIM_CHECK_ORDER=1)",
        "hang report    off  (TORCHCOMMSHIM_HANG_REPORT_S=off)",
        "trace          traces  (TORCHCOMMSHIM_TRACE=traces)",
    ]


def test_unknown_variable():
    """A misspelt variable is a problem that the doctor names, with what is accepted."""
    pytest.importorskip("torch", reason="needs torch")
    done = ask(TORCHCOMMSHIM_AGREMENT="warn")

    assert (done.returncode, "TORCHCOMMSHIM_AGREMENT is not a variable" in done.stdout) == (1, True)


def test_not_armed():
    """An interpreter that nothing has armed is a problem, and the doctor says what to do."""
    done = run(sys.executable, "-S", "-c", _WITHOUT_SITE, check=False, SEARCH=json.dumps(sys.path))

    assert (done.returncode, "nothing has armed the shim" in done.stdout) == (1, True)


_WITHOUT_SITE = """
import json, os, sys
sys.path[:] = json.loads(os.environ["SEARCH"])
from torchcommshim.commands.cli import main
sys.exit(main(["doctor"]))
"""


@pytest.mark.once
def test_without_torch(installed):
    """Without torch the doctor still examines the rest, and names what is missing."""
    done = installed.run("-m", "torchcommshim", "doctor", check=False)

    assert (done.returncode, "torch is not installed" in done.stdout) == (1, True)


@pytest.mark.once
def test_off_is_no_problem(installed):
    """A shim that is switched off on purpose is no problem."""
    assert installed.run("-m", "torchcommshim", "doctor", TORCHCOMMSHIM="off").returncode == 0


@pytest.mark.once
def test_path(capsys):
    """`path` prints a folder that holds a sitecustomize.py."""
    assert main(["path"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "sitecustomize.py").is_file()


@pytest.mark.once
@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["run"], 2, "no command given"),
        (["run", "--"], 2, "no command given"),
        (["run", "--", "no-such-command"], 127, "no-such-command: No such file"),
        (["run", "--", "/"], 126, "/: Permission denied"),
    ],
)
def test_run_without_a_command(capsys, words, code, expected):
    """`run` names a command that it cannot start, and exits as a shell would."""
    assert (main(words), expected in capsys.readouterr().err) == (code, True)


@pytest.mark.once
@pytest.mark.parametrize(
    ("before", "expected"),
    [("", ["{ours}"]), ("/a:/b", ["{ours}", "/a", "/b"]), ("/a:{ours}", ["{ours}", "/a"])],
)
def test_with_shim(before, expected):
    """The folder comes first on PYTHONPATH, once, and no empty element is added."""
    ours = str(environment.sitecustomize_folder())
    values = environment.with_shim({**clean_environment(), "PYTHONPATH": before.format(ours=ours)})

    assert values["PYTHONPATH"].split(":") == [element.format(ours=ours) for element in expected]


@pytest.mark.once
def test_reader_that_goes_away(installed):
    """A reader that closes the pipe (`| head`) ends a command quietly."""
    script = f"{installed.python} -m torchcommshim path | true; exit ${{PIPESTATUS[0]}}"
    done = run("bash", "-c", script, check=False)

    assert "Traceback" not in done.stderr


@pytest.mark.once
def test_full_disk(installed):
    """Output that cannot be written is one line, and an exit code."""
    done = run("bash", "-c", f"{installed.python} -m torchcommshim path > /dev/full", check=False)

    assert (done.returncode, done.stderr) == (1, "torchcommshim path: [Errno 28] No space left on device\n")
