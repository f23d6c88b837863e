# SPDX-License-Identifier: Apache-2.0
"""evidence.py reads the outcome of a run from what its ranks printed."""

import pytest
from evidence import Run, judge, several_gpus_runs, table

LINE = " [2026-01-01 00:00:00] iteration        1/       2 | lm loss: 5.500000E+00 | loss scale: 1.0 |\n"
DUMP = """torchcommshim: 1 creation repaired
Timeout (0:00:40)!
Thread 0x01 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait

Thread 0x02 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 1606 in _new_process_group_helper
  File "/venv/torch/distributed/distributed_c10d.py", line 4125 in new_group
  File "/examples/gpt/groups.py", line 100 in make
  File "/examples/gpt/groups.py", line 110 in make_groups
"""


def judged(code, out, err, iterations=1):
    run = Run("name", ranks=2, stages=2)
    judge(run, code, out, err, iterations)
    return run


def test_trained():
    """All iterations, and exit code 0."""
    run = judged(0, ["", LINE], ["", ""])

    assert (run.outcome, run.iterations, run.losses, run.where) == ("trained", 1, [5.5], [])


def test_too_few_iterations():
    """Exit code 0 alone is not enough."""
    assert judged(0, ["", LINE], ["", ""], iterations=2).outcome == "error"


def test_hang():
    """A dumped stack is a hang; the main thread's calls in torch and the first outside are kept."""
    run = judged(1, ["", ""], ["", DUMP])

    assert run.outcome == "hang"
    assert run.said == ["torchcommshim: 1 creation repaired"]
    assert run.where == [
        "rank 1: distributed_c10d.py:1606 _new_process_group_helper < distributed_c10d.py:4125 new_group < "
        "groups.py:100 make"
    ]


def test_slow():
    """A run that said where it was when time was up, and then ended well, has trained."""
    run = judged(0, ["", LINE], ["", DUMP])

    assert (run.outcome, run.where) == ("trained", [])


def test_error():
    """Any other end is an error."""
    assert judged(1, ["", ""], ["Traceback", ""]).outcome == "error"


def test_table():
    """A row for each run, then where hung ranks were."""
    lines = table([judged(0, ["", LINE], ["", ""]), judged(1, ["", ""], ["", DUMP])]).splitlines()

    assert lines[2:4] == [
        "| name | 2 | 2 | off | trained | 1 | 5.5000 | 5.5000 | 0.0 |",
        "| name | 2 | 2 | off | hang | 0 |  |  | 0.0 |",
    ]
    assert lines[5].startswith("name, rank 1: distributed_c10d.py:1606")


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (2, [("reference-1", 1, 1, 4), ("auto-PP2", 2, 2, 4)]),
        (4, [("reference-1", 1, 1, 4), ("auto-PP4", 4, 4, 4), ("auto-DP2xPP2", 4, 2, 4)]),
        (8, [("reference-1", 1, 1, 8), ("auto-PP8", 8, 8, 8), ("auto-DP2xPP2", 4, 2, 8)]),
    ],
)
def test_layouts_on_several_gpus(gpus, expected):
    """As many stages as GPUs, and 2 by 2 where there are 4; each stage has as many layers as the others."""
    runs = several_gpus_runs(gpus, engine=False)
    shown = [run for run in runs if run.shim in ("off", "auto") and run.must_train]

    assert [(run.name, run.ranks, run.stages, run.layers) for run in shown] == expected
