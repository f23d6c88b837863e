# SPDX-License-Identifier: Apache-2.0
"""`split_group` and DeviceMesh in real jobs over gloo, which splits as well and needs no GPU."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from split_programs import names_differ, uneven_groups  # noqa: E402
from test_watch_jobs import Job as ForkedJob  # noqa: E402

pytestmark = pytest.mark.skipif(
    # Older ones ask for CUDA's backend, and later ones for a device that a gloo world cannot be bound to.
    not torch.__version__.startswith("2.13."),
    reason="splits gloo on a CPU that is taken for an accelerator, as 2.13 can",
)


class Job(ForkedJob):
    """Not forked: in a fork of a process that has a gloo device, splitting gloo is a segmentation fault."""

    start = "spawn"


@pytest.mark.parametrize("strategy", ["auto", "strip", "split"])
def test_uneven_groups(tmp_path, strategy):
    """Split groups and meshes after uneven groups work, and the world closes, with each strategy."""
    job = Job(uneven_groups, 4, tmp_path, TORCHCOMMSHIM=strategy, TORCHCOMMSHIM_CHECK_ORDER="1").run()

    assert (job.codes, job.said.count("split_group of [0-3]")) == ([0] * 4, 1), job.said


def test_names_that_differ(tmp_path):
    """Where nothing is repaired, the one report names the defect and the first creation that it breaks."""
    job = Job(names_differ, 4, tmp_path, TORCHCOMMSHIM="observe").run(until="innermost call first")

    assert re.search(
        r"likely cause: split-names: on torch \S+ ranks that are in different numbers of groups "
        r".*issues/189073\)\. The first creation that it breaks is #2 at \S*:\d+ _split",
        job.text,
    ), job.said
