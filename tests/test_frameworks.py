# SPDX-License-Identifier: Apache-2.0
"""What is concluded from the runs of other projects' programs; the runs are `scripts/test frameworks`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from frameworks import catalogue, jobs
from frameworks.catalogue import HANGS, TRAINS, Program, Way
from frameworks.jobs import Run, normal
from frameworks.judge import Environment, Row, green_ways, judge, judge_without, new_lines
from frameworks.page import page

pytestmark = pytest.mark.once

GLOO = Program("one", "One", ("one",), "adds up")
BOUND = Program("two", "Two", (), "adds up", simulated=True, without=HANGS, why="other-backend")

REPAIRED = "torchcommshim #: collective group [#] (gloo): made without a split"


def made(losses="1.0 2.0", lines=(), repairs=None, armed=True, codes=(0, 0)):
    """A run of two ranks with these losses."""
    status = {"patched": ["new_group"] if armed else [], "repairs": repairs or {}}
    ended = dict.fromkeys("01", status) if set(codes) == {0} else {}
    return Run({rank: losses.split() for rank in "01"}, list(lines), ended, list(codes), 1.0)


STUCK = made(codes=(None, None))
FAILED = made(codes=(1, None), lines=["Traceback", "RuntimeError: boom", ""])


class TestWithoutTheShim:
    def test_trains(self):
        """A program that trains, as it should: nothing to say."""
        assert judge_without(GLOO, made(), made()) == (TRAINS, [])

    def test_hangs_as_known(self):
        """A known hang is no problem; that it does not hang any more is one."""
        assert judge_without(BOUND, made(), STUCK) == (HANGS, [])
        end, problems = judge_without(BOUND, made(), made())
        assert (end, problems) == (TRAINS, ["without the shim it trains, where it hangs as far as is known"])

    def test_fails_by_itself(self):
        """A program that fails without us is not green, and its last words say why."""
        assert judge_without(GLOO, FAILED, FAILED) == (
            "fails",
            ["without the shim it fails: exit codes [1, None]: RuntimeError: boom"],
        )

    def test_wrong_losses(self):
        """Losses that are not those over gloo are found without the shim too."""
        bound = BOUND._replace(without=TRAINS)
        end, _ = judge_without(bound, made(), made("1.0 2.5"))
        assert end == "other losses"


class TestWithTheShim:
    def test_same(self):
        """The same bits and no new line: nothing to say."""
        assert judge(made(), made(lines=["epoch #"]), ["epoch #"]) == ("same losses", [])

    def test_one_bit(self):
        """One loss that differs in its last digit is a problem."""
        words, problems = judge(made(), made("1.0 2.0000000000000004"), [])
        assert (words, problems) == ("other losses", ["its losses are not the same"])

    def test_rank_that_says_nothing(self):
        """A rank without losses is a difference, not something to pass over."""
        short = made()
        del short.losses["1"], short.status["1"]
        assert judge(made(), short, [])[1] == ["its losses are not the same"]

    @pytest.mark.parametrize(("run", "words"), [(STUCK, "hangs"), (FAILED, "fails")])
    def test_does_not_train(self, run, words):
        """A run that hangs or fails is a problem, whatever its losses were until then."""
        found, problems = judge(made(), run, [])
        assert (found, len(problems)) == (words, 1)

    def test_not_armed(self):
        """A run in which the shim was not there proves nothing."""
        assert judge(made(), made(armed=False), [])[1] == ["the shim is not armed in each of its processes"]

    def test_hang_report(self):
        """A hang report is a problem even where it is the line of a repair's."""
        lines = ["torchcommshim #: hang report: # of # ranks wait"]
        _, problems = judge(made(), made(lines=lines, repairs={"other-backend": 1}), [])
        assert problems == ["there is a hang report"]

    def test_repairs_may_be_said_once_a_process(self):
        """One line a process where something was repaired; more, or without a repair, is new."""
        repairs = {"other-backend": 3}
        assert judge(made(), made(lines=[REPAIRED] * 2, repairs=repairs), []) == (
            "same losses, 3 repaired",
            [],
        )
        assert new_lines(made(lines=[REPAIRED] * 3, repairs=repairs), []) == [REPAIRED]
        assert new_lines(made(lines=[REPAIRED]), []) == [REPAIRED]

    def test_lines_by_chance(self):
        """A line is new only if a second run has it too."""
        first, second = made(lines=["slow", "odd"]), made(lines=["odd"])
        assert judge(made(), first, [], made())[1] == []
        assert judge(made(), first, [], second)[1] == [
            "it prints what it does not print without the shim: odd"
        ]


def test_normal_lines():
    """Numbers, addresses, identifiers, colours, progress bars and the run's folder do not make a line new."""
    folder = Path("/tmp/frameworks-x1")
    seen = [
        "\x1b[36m(pid=81)\x1b[0m at 12:01:05,3 took 1.5e-03 s in /tmp/frameworks-x1/checkpoint-5",
        "id 5f0c2e6a-1b9d-4c3e-8a7f-0123456789ab, object 0x7f00beef",
        "loading: 10%\rloading: 100%",
    ]
    assert [normal(line, folder) for line in seen] == [
        "(pid=#) at # took # s in FOLDER/checkpoint-#",
        "id #, object #",
        "loading: #%",
    ]


def row(program, choice, **problems):
    found = Row(program, Environment(choice, {"one": "1.5"} if program.packages else {}, "2.13.0", "3.11"))
    found.without = program.without
    found.ways = {way.name: "same losses" for way in catalogue.WAYS}
    found.problems = {"without": [], **{way.name: [] for way in catalogue.WAYS}, **problems}
    return found


class TestPage:
    def test_green(self):
        """A line with framework, version, torch, world and what each way gave; and that all is green."""
        text = page([row(GLOO, "newest"), row(BOUND, "pinned")], "2030-01-02", "Python 3.11", 30)

        same = " | ".join(["same losses"] * len(catalogue.WAYS))
        assert f"| One | 1.5 | 2.13.0 | gloo | trains | {same} | green |\n" in text
        assert "| Two | part of torch | 2.13.0 | simulated NCCL | hangs | same losses | same" in text
        assert "Nothing: every line above is green." in text
        assert "Without the shim it hangs: `other-backend`." in text

    def test_not_green(self):
        """The reason, and the ways that are green as the work-around."""
        text = page([row(GLOO, "newest", strip=["its losses are not the same"])], "2030-01-02", "x", 30)

        assert "| **not green** |" in text
        assert (
            "- One (newest), strip: its losses are not the same. "
            "Work-around: auto or split or order check is green.\n" in text
        )

    def test_pinned_is_not_passed_over(self):
        """A pinned release that does not train any more is a failure: it did when it was chosen."""
        broken = row(GLOO, "pinned", without=["without the shim it fails: boom"])
        broken.ways = {}

        assert (broken.green, broken.passed_over) == (False, False)

    def test_fails_without_us(self):
        """What fails without the shim is not laid at its door."""
        broken = row(GLOO, "newest", without=["without the shim it fails: boom"])
        broken.ways = {}

        assert green_ways(broken) == []
        assert (broken.green, broken.passed_over) == (False, True)
        assert "without: without the shim it fails: boom. The shim has no part in it.\n" in page(
            [broken], "2030-01-02", "x", 30
        )


class TestJobs:
    """The runner itself, on programs of the standard library."""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        monkeypatch.setattr(jobs, "PROGRAMS", tmp_path)

        def run_program(text, processes=2, limit_s=30):
            (tmp_path / "one.py").write_text(
                "import json, os\n"
                "def end(): open(f\"{os.environ['FRAMEWORKS_FOLDER']}/{os.environ['RANK']}.done\", 'w')"
                '.write(json.dumps({"patched": [], "repairs": {}}))\n'
                "def loss(x): open(f\"{os.environ['FRAMEWORKS_FOLDER']}/{os.environ['RANK']}.losses\", 'w')"
                ".write(x)\n" + text
            )
            program = GLOO._replace(processes=processes)
            return jobs.run(program, Path(sys.executable), Way("x", {}).variables, limit_s, simulated=False)

        return run_program

    def test_trained(self, run):
        """Both ranks end with their losses, their lines and the exit code 0."""
        ended = run("loss(os.environ['RANK']); print('step 12'); end()")

        assert (ended.trained, ended.hung, ended.codes) == (True, False, [0, 0])
        assert ended.losses == {"0": ["0"], "1": ["1"]}
        assert ended.lines == ["step #"] * 2

    def test_hung(self, run):
        """Ranks that do not end are ended, with what they have started."""
        text = "import subprocess, time; loss('1'); subprocess.Popen(['sleep', '77']); time.sleep(77)"
        ended = run(text, limit_s=2)

        assert (ended.trained, ended.hung, ended.codes) == (False, True, [None, None])

    def test_left_early(self, run):
        """A rank that leaves with 0 before its end has not trained."""
        ended = run("loss('1'); os.environ['RANK'] == '1' and end()")

        assert (ended.trained, ended.codes) == (False, [0, 0])

    def test_one_fails(self, run):
        """When one rank fails, the others are not waited for."""
        ended = run("import time; loss('1'); int(os.environ['RANK']) or 1 / 0; time.sleep(77)", limit_s=60)

        assert (ended.codes, ended.seconds < 60) == ([1, None], True)
        assert ended.lines[-1] == "ZeroDivisionError: division by zero"


def test_programs_have_files():
    """Each program of the table is a file, and each file but the helper is in the table."""
    files = {path.stem for path in jobs.PROGRAMS.glob("*.py")} - {"said"}
    assert {program.name for program in catalogue.PROGRAMS} == files
