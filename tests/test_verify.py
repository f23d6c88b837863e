# SPDX-License-Identifier: Apache-2.0
"""`torchcommshim verify`: scenarios, verdicts, what is shown, bad input."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import clean_environment

from torchcommshim.commands import verify
from torchcommshim.commands.verify import catalogue, table
from torchcommshim.commands.verify.launch import share_gpus
from torchcommshim.commands.verify.runner import Machine, Runner
from torchcommshim.commands.verify.verdicts import Failure, Sum, Verdict, Wait, judge

pytestmark = pytest.mark.timeout(900)  # the first test that asks waits for all scenarios

SCENARIO = catalogue.load("overlapping_groups")
ONE_GROUP = catalogue.load("one_group")


def run_verify(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchcommshim.commands.verify", *arguments]
    return subprocess.run(
        command, env=clean_environment(**changes), capture_output=True, text=True, check=False
    )


class TestScenarios:
    def test_every_script_is_listed(self):
        """Each script of the folder is in the catalogue, and the other way round."""
        scripts = {path.stem for path in catalogue.FOLDER.glob("*.py")} - {"common"}

        assert sorted(catalogue.NAMES) == sorted(scripts)

    @pytest.mark.parametrize("name", catalogue.NAMES)
    def test_knows_nothing_of_the_shim(self, name):
        """A scenario imports the standard library, torch and what the scenarios share; nothing of ours."""
        source = catalogue.load(name).path.read_text()

        assert "torchcommshim" not in source

    @pytest.mark.parametrize("name", catalogue.NAMES)
    def test_says_what_it_is(self, name):
        """A scenario has a title, says which releases have the defect, and links to it."""
        scenario = catalogue.load(name)

        assert [bool(scenario.title), bool(scenario.about)] == [True, True]
        assert scenario.upstream.startswith("https://github.com/")

    @pytest.mark.parametrize(
        ("ranks", "expected"), [(8, {"nccl": 70, "gloo": 12}), (4, {"nccl": 45, "gloo": 12})]
    )
    def test_megatron_counts(self, ranks, expected, monkeypatch):
        """The creations are as many as Megatron-LM was seen to make."""
        assert Counter(backend for _, backend in megatron(ranks, monkeypatch)) == expected

    def test_megatron_memberships(self, monkeypatch):
        """On 8 ranks each is a member of as many NCCL groups as was seen."""
        created = [ranks for ranks, backend in megatron(8, monkeypatch) if backend == "nccl"]

        assert [sum(rank in ranks for ranks in created) for rank in range(8)] == [
            15,
            15,
            13,
            13,
            13,
            13,
            14,
            14,
        ]

    def test_megatron_order(self, monkeypatch):
        """Runs of equal kind come in Megatron's order, data-parallel groups with gloo in between."""
        created = megatron(8, monkeypatch)
        runs = [
            list(map(tuple, ranks))
            for ranks in ([ranks for ranks, _ in created[:4]], [r for r, _ in created[24:28]])
        ]

        assert [backend for _, backend in created[:4]] == ["nccl", "gloo", "nccl", "gloo"]
        assert runs == [
            [(0, 1), (0, 1), (2, 3), (2, 3)],
            [(0, 2, 4, 6), (1, 3, 5, 7), (0, 2, 4, 6), (1, 3, 5, 7)],
        ]
        assert [ranks for ranks, _ in created[36:42]] == [
            [0, 2, 4, 6],
            [0, 6],
            [0],
            [1, 3, 5, 7],
            [1, 7],
            [1],
        ]


def megatron(ranks: int, monkeypatch) -> list[tuple[list[int], str]]:
    pytest.importorskip("torch")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.syspath_prepend(str(catalogue.FOLDER))
    script = runpy.run_path(str(catalogue.load("megatron").path))
    return list(script["creations"](ranks))


class TestVerdicts:
    """`judge` on what ranks leave behind."""

    @pytest.fixture
    def script(self, tmp_path) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import torch\n\ngroup = dist.new_group([0])\n")
        return path

    @pytest.fixture
    def dump(self, script, tmp_path):
        """A dump as faulthandler writes it, of a rank that waits in torch, called by the script's line 3."""
        torch = tmp_path / "torch" / "distributed" / "distributed_c10d.py"
        torch.parent.mkdir(parents=True)
        torch.write_text("source.perform_nocolor_split(device)\n")
        return (
            f'Thread 0x2 (most recent call first):\n  File "/lib/threading.py", line 9 in wait\n\n'
            f'Thread 0x1 (most recent call first):\n  File "/simulated.py", line 1 in wait\n'
            f'  File "{torch}", line 1 in _new_process_group_helper\n'
            f'  File "/torch/distributed/c10d_logger.py", line 4 in wrapper\n'
            f'  File "{script}", line 3 in <module>\n  File "<frozen runpy>", line 88 in _run_code\n'
        )

    def judge(self, script, folder, output="", code=1):
        return judge(script, folder, output, code, 1.24)

    def test_ok(self, script, tmp_path):
        """Every rank ended by itself."""
        (tmp_path / "0.stacks").write_text("")

        assert self.judge(script, tmp_path, code=0) == Verdict("ok", 1.2)

    def test_hang(self, script, tmp_path, dump):
        """The deadline came; the line of the script and the call in torch are named."""
        (tmp_path / "0.stacks").write_text("")
        (tmp_path / "1.stacks").write_text("Timeout (0:00:05)!\n" + dump)
        found = self.judge(script, tmp_path)

        assert found.verdict == "hang"
        assert found.waits == [
            Wait(1, 3, "group = dist.new_group([0])", "_new_process_group_helper: perform_nocolor_split")
        ]

    def test_hang_and_what_follows(self, script, tmp_path, dump):
        """An error after the deadline comes from the end of the other ranks, and is not the cause."""
        (tmp_path / "1.stacks").write_text("Timeout (0:00:05)!\n" + dump)
        (tmp_path / "0.error").write_text("RuntimeError: connection reset")
        os.utime(tmp_path / "1.stacks", (100, 100))
        os.utime(tmp_path / "0.error", (101, 101))

        assert (self.judge(script, tmp_path).verdict, self.judge(script, tmp_path).failures) == ("hang", [])

    def test_error(self, script, tmp_path, dump):
        """A rank raised; where the others were, when torchrun ended them, is told as well."""
        (tmp_path / "0.error").write_text("ValueError: no")
        (tmp_path / "0.stacks").write_text("")
        (tmp_path / "1.stacks").write_text(dump)
        found = self.judge(script, tmp_path)

        assert (found.verdict, found.failures) == ("error", [Failure(0, "ValueError: no")])
        assert [wait.rank for wait in found.waits] == [1]

    def test_wrong_comes_first(self, script, tmp_path, dump):
        """A wrong sum is reported even where a rank then hangs."""
        (tmp_path / "1.stacks").write_text("Timeout (0:00:05)!\n" + dump)
        found = self.judge(script, tmp_path, "hello\nWRONG group [0, 12]: rank 12 got 13, expected 14\n")

        assert (found.verdict, found.sums) == ("wrong", [Sum([0, 12], 12, 13, 14)])

    def test_crash(self, script, tmp_path):
        """A rank that crashed is told from one that was ended."""
        (tmp_path / "2.stacks").write_text(
            "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
        )
        found = self.judge(script, tmp_path)

        assert (found.verdict, found.waits) == ("error", [])
        assert found.failures == [Failure(2, "Fatal Python error: Aborted")]

    def test_death_without_a_word(self, script, tmp_path):
        """torchrun failed and no rank says why."""
        assert self.judge(script, tmp_path).verdict == "error"

    def test_notes(self, script, tmp_path):
        """What a script has to say is kept, also where all is well."""
        (tmp_path / "0.stacks").write_text("")

        assert self.judge(script, tmp_path, "x\nNOTE by split_group\n", code=0) == Verdict(
            "ok", 1.2, notes=["by split_group"]
        )

    def test_lines(self):
        """Ranks that wait in one place share a line."""
        found = Verdict(
            "hang", 1.0, [Wait(3, 3, "a()", "f: g"), Wait(0, 4, "b()", "h"), Wait(2, 3, "a()", "f: g")]
        )

        assert found.lines() == ["ranks 2, 3: line 3, a() -> f: g", "rank 0: line 4, b() -> h"]


RESULTS = {
    ("overlapping_groups", "off"): Verdict("wrong", 12.4, sums=[Sum([0, 1], 0, 1, 3)]),
    ("overlapping_groups", "auto"): Verdict("ok", 9.0),
}


class TestShown:
    def test_table(self):
        """A row for each scenario, a column without the shim and one with each strategy."""
        assert table.table([SCENARIO], ["auto"], RESULTS, color=False) == [
            "scenario            without         with auto",
            "overlapping_groups  wrong 12 s      ok 9 s",
        ]

    def test_color_does_not_move_columns(self):
        """Colour adds escape sequences and nothing else."""
        plain = table.table([SCENARIO], ["auto"], RESULTS, color=False)
        colored = table.table([SCENARIO], ["auto"], RESULTS, color=True)

        assert [re.sub(r"\033\[\d+m", "", line).rstrip() for line in colored] == plain
        assert colored != plain

    @pytest.mark.parametrize(
        ("environment", "expected"),
        [
            ({}, False),
            ({"FORCE_COLOR": "1"}, True),
            ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
            ({"FORCE_COLOR": ""}, False),
        ],
    )
    def test_color_variables(self, environment, expected):
        """NO_COLOR wins over FORCE_COLOR; without either a file gets no colour."""
        assert table.wants_color(io.StringIO(), environment) == expected

    def test_details(self):
        """Below the table: what was wrong and where it is known upstream."""
        assert table.details([SCENARIO], ["auto"], RESULTS) == [
            "",
            f"overlapping_groups without: wrong  ({SCENARIO.title}; {SCENARIO.upstream})",
            "  group [0, 1]: rank 0 got 1, expected 3",
        ]

    def test_notes(self):
        """What a scenario had to say is shown, also where all is well."""
        results = {("overlapping_groups", "auto"): Verdict("ok", 9.0, notes=["by split_group"])}
        results["overlapping_groups", "off"] = Verdict("ok", 9.0)

        assert table.details([SCENARIO], ["auto"], results) == [
            "overlapping_groups with auto: by split_group"
        ]

    @pytest.mark.parametrize(
        ("machine", "expected"),
        [
            (
                Machine("2.4.1", "3.11.7", "simulated", ()),
                "SIMULATED NCCL (no GPU is used): 4 ranks, torch 2.4.1",
            ),
            (
                Machine("2.4.1", "3.11.7", "2.20.5", ("H200",)),
                "Real NCCL 2.20.5: 4 ranks on 1 of 1 GPU (H200), ",
            ),
            (
                Machine("2.4.1", "3.11.7", "2.20.5", ("A100",) * 8),
                "Real NCCL 2.20.5: 4 ranks on 4 of 8 GPUs (A100), ",
            ),
        ],
    )
    def test_first_line(self, machine, expected):
        """The first line says whether NCCL is simulated."""
        assert table.first_line(machine, 4).startswith(expected)


class TestSharedGPUs:
    def test_fewer_gpus_than_ranks(self):
        """Ranks on one GPU name different hosts and use the loopback interface."""
        environment = {"RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
        share_gpus(environment, 2)

        assert environment == {
            "RANK": "3",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "NCCL_HOSTID": "verify-3",
            "NCCL_SOCKET_IFNAME": "lo",
        }

    @pytest.mark.parametrize("gpus", [0, 4, 8])
    def test_enough_gpus(self, gpus):
        """With a GPU for each rank, or none at all, nothing is changed."""
        environment = {"RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
        share_gpus(environment, gpus)

        assert environment == {"RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}


TAKEN = Verdict(
    "error", 3.0, failures=[Failure(0, "RuntimeError: code: -98, name: EADDRINUSE, message: ...")]
)


@pytest.mark.once
@pytest.mark.parametrize(
    ("verdicts", "port", "expected"),
    [
        ([TAKEN, Verdict("ok", 9.0)], None, "ok"),
        ([TAKEN, TAKEN, Verdict("ok", 9.0)], None, "error"),
        ([TAKEN, Verdict("ok", 9.0)], 29500, "error"),
        ([Verdict("hang", 20.0), Verdict("ok", 9.0)], None, "hang"),
    ],
)
def test_a_taken_port_is_no_verdict(monkeypatch, verdicts, port, expected):
    """A run whose port was taken before rank 0 could listen is made once more, if the port was ours."""
    left = iter(verdicts)
    monkeypatch.setattr(Runner, "run", lambda *_: next(left))
    runner = Runner(4, 10.0, True, threading.Event())

    assert runner.run_scenario(catalogue.load("one_group"), "auto", port).verdict == expected


@pytest.fixture
def verified():
    pytest.importorskip("torch")
    import verified

    return verified


class TestOnThisTorch:
    @pytest.mark.parametrize("name", catalogue.NAMES)
    def test_ok_with_the_shim(self, verified, name):
        """With `auto` every scenario ends, with right sums."""
        found = verified.verdict(name, "auto")

        assert (found["verdict"], found["waits"], found["sums"], found["failures"]) == ("ok", [], [], [])

    @pytest.mark.parametrize("name", catalogue.NAMES)
    def test_defects_without_the_shim(self, verified, name):
        """Without the shim the defects of this release show."""
        hangs_in_order = dict.fromkeys(
            ("partial_split", "split_after_uneven", "mixed_split_after_uneven", "mesh_after_pipeline"), "hang"
        )
        late = {
            "reported_program": "hang",
            "one_group": "hang",
            "overlapping_groups": "wrong",
            "gloo_among_nccl": "hang",
            "local_after_uneven": "ok",
            "megatron": "hang",
        }
        eager = {"gloo_among_nccl": "wrong", "local_after_uneven": "hang", **hangs_in_order}
        both = {"gloo_subgroup": "hang", "local_synchronization": "hang", "direct_helper": "hang"}
        expected = {**both, **(late if verified.LATE else eager)}

        # Which of two groups that share their keys finds which is a matter of time.
        either = {"own_group_unbound": ("hang", "wrong")}.get(name, (expected.get(name, "ok"),))
        assert verified.verdict(name)["verdict"] in either

    def test_document(self, verified):
        """The document names the versions and says that NCCL is simulated and that all is well."""
        document = verified.document()
        import torch

        assert {name: document[name] for name in ("torch", "nccl", "gpus", "ranks", "strategies", "ok")} == {
            "torch": torch.__version__,
            "nccl": "simulated",
            "gpus": [],
            "ranks": 4,
            "strategies": ["auto"],
            "ok": True,
        }


class TestCommand:
    """The command's own part, on verdicts that are given; None for a run that the user interrupts."""

    @pytest.fixture
    def main(self, monkeypatch, capsys):
        def main(with_auto: Verdict | None, *arguments: str) -> tuple[int, str]:
            verdicts = {"off": Verdict("hang", 20.0), "auto": with_auto}

            def run_scenario(runner: Runner, scenario: object, strategy: str, port: int | None) -> Verdict:
                if verdicts[strategy] is None:
                    raise KeyboardInterrupt
                return verdicts[strategy]

            machine = Machine("2.4.1", "3.11.7", "simulated", ())
            monkeypatch.setattr(verify, "look", lambda simulate: machine)
            monkeypatch.setattr(Runner, "run_scenario", run_scenario)
            parser = argparse.ArgumentParser()
            verify.add_arguments(parser)
            code = verify.main(parser.parse_args(["--scenario=one_group", *arguments]))
            return code, capsys.readouterr().out

        return main

    def test_all_ok(self, main):
        """The first line, the table, and 0."""
        code, out = main(Verdict("ok", 9.0))

        assert code == 0
        assert out.splitlines()[:4] == [
            "SIMULATED NCCL (no GPU is used): 4 ranks, torch 2.4.1, Python 3.11.7",
            "",
            "scenario   without         with auto",
            "one_group  hang 20 s       ok 9 s",
        ]

    @pytest.mark.parametrize("verdict", ["hang", "wrong", "error"])
    def test_not_ok(self, main, verdict):
        """1, if a scenario is not ok with the shim."""
        assert main(Verdict(verdict, 9.0))[0] == 1

    def test_json(self, main):
        """One document on stdout, and nothing else."""
        _, out = main(Verdict("wrong", 9.0, sums=[Sum([0, 1], 0, 1, 3)]), "--json")
        document = json.loads(out)

        assert document["ok"] is False
        assert document["scenarios"][0]["with"]["auto"] == {
            "verdict": "wrong",
            "seconds": 9.0,
            "waits": [],
            "sums": [{"ranks": [0, 1], "rank": 0, "got": 1, "expected": 3}],
            "failures": [],
            "notes": [],
        }

    def test_output(self, main, tmp_path):
        """The document goes to the file, the table to stdout."""
        path = tmp_path / "out.json"
        _, out = main(Verdict("ok", 9.0), f"--output={path}")

        assert json.loads(path.read_text())["ok"] is True
        assert "with auto" in out

    def test_what_an_interruption_leaves(self, main, tmp_path):
        """The runs that were judged before Ctrl-C are shown and written; the others are `not judged`."""
        path = tmp_path / "out.json"
        code, out = main(None, f"--output={path}")
        document = json.loads(path.read_text())

        assert code == 130
        assert out.splitlines()[2:4] == [
            "scenario   without         with auto",
            "one_group  hang 20 s       not judged",
        ]
        assert [line for line in out.splitlines()[4:] if line.startswith("one_group")] == [
            f"one_group without: hang  ({ONE_GROUP.title}; {ONE_GROUP.upstream})"
        ]
        found = document["scenarios"][0]
        assert (found["without"]["verdict"], found["with"]["auto"]["verdict"]) == ("hang", "not judged")
        assert (document["interrupted"], document["ok"]) == (True, False)


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--scenario", "nonsense"], ["'nonsense'", *catalogue.NAMES]),
            (["--strategy", "observe"], ["'observe'", "auto, strip, split"]),
            (["--nproc", "2"], ["--nproc 2", "device_mesh needs 4"]),
            (["--nproc", "0"], ["must be more than 0"]),
            (["--port", "70000"], ["port 70000"]),
            (["--output", "/nowhere/out.json"], ["/nowhere/out.json", "No such file or directory"]),
        ],
    )
    def test_usage(self, arguments, named):
        """What cannot be followed is named, with what is accepted, and the exit code is 2."""
        done = run_verify(*arguments)

        assert done.returncode == 2
        assert [word for word in named if word not in done.stderr] == []

    def test_taken_port(self):
        """A port that somebody listens on is named."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            done = run_verify("--port", str(port), "--simulate")

        assert (done.returncode, f"port {port} is taken" in done.stderr) == (2, True)

    def test_without_torch(self, installed, tmp_path):
        """An environment without torch gets one sentence, and --output leaves no empty file."""
        output = tmp_path / "out.json"
        done = installed.run("-m", "torchcommshim.commands.verify", f"--output={output}", check=False)

        assert (done.returncode, output.exists()) == (2, False)
        assert "No module named 'torch'" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted(self, number, tmp_path):
        """Ctrl-C and SIGTERM end all ranks, even those that hold Python's lock in a split.

        More of them, while that takes its time, change nothing.
        """
        output = tmp_path / "out.json"
        pytest.importorskip("torch")
        command = [
            sys.executable,
            "-m",
            "torchcommshim.commands.verify",
            "--simulate",
            "--scenario=gloo_subgroup",
            "--deadline=600",
            f"--output={output}",
        ]
        verifying = subprocess.Popen(
            command,
            env=clean_environment(TMPDIR=str(tmp_path)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # As at a terminal; a job in the background ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads
        )
        # Of a run whose port was taken only a second one, in another folder, comes as far as the split.
        folder = folder_of_a_hung_run(tmp_path, verifying)
        began = processes_that_name(folder)
        for _ in range(4):
            verifying.send_signal(number)
            time.sleep(0.05)
        _, errors = verifying.communicate()

        assert verifying.returncode == 130
        assert "interrupted" in errors
        assert "Traceback" not in errors
        assert len(began) == 5  # torchrun and the ranks
        assert processes_that_name(folder) == []
        assert json.loads(output.read_text())["interrupted"] is True


def folder_of_a_hung_run(parent: Path, verifying: subprocess.Popen[str]) -> Path:
    """The folder of a run that goes on a second after all ranks have started: by then in the split.

    The test's own timeout is the limit.
    """
    while True:
        assert verifying.poll() is None, verifying.communicate()
        for folder in parent.glob("torchcommshim-verify-*"):
            if len(list(folder.glob("*.started"))) == 4:
                time.sleep(1)
                if folder.exists():
                    return folder
        time.sleep(0.1)


def processes_that_name(folder: Path) -> list[int]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = command.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text:
            found.append(int(command.parent.name))
    return found
