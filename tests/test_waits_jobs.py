# SPDX-License-Identifier: Apache-2.0
"""Waits that are no creations, in real jobs: who waits where, and legal programs without a word."""

from __future__ import annotations

import re
import sys
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
import torch.distributed as dist  # noqa: E402
from test_watch_jobs import DEADLINE_S, LIMIT_S, Job, _start  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the hang report works on Linux only")


def test_first_use(tmp_path):
    """One report says who waits, in which call on which group, and where rank 0 is."""

    def program(rank, size, store):
        _start(rank, size, store)
        if rank == 0:
            time.sleep(DEADLINE_S)
        dist.barrier()

    job = Job(program, 3, tmp_path).run(until="hang report")

    assert job.said.count("hang report") == 1
    assert re.search(
        r"hang report: 2 of 3 ranks wait in barrier, for \d+ s by now \[TCS-hang-report\] "
        r"likely cause: rank 0 has not come to barrier on the world \[0-2\]: in user code, at "
        r"\S+test_waits_jobs.py:\d+ program\.",
        job.text,
    ), job.said
    assert re.search(r"ranks 1,2 \(2 ranks on \S+\): in barrier on the world \[0-2\], collective 1", job.text)


def test_late_and_busy_ranks(tmp_path):
    """A first use that ends after all has one more line; from then on a busy rank 0 disturbs nobody."""

    def program(rank, size, store):
        _start(rank, size, store)
        for _ in range(2):
            if rank == 0:
                time.sleep(1.8 * LIMIT_S)
            dist.barrier()
        dist.destroy_process_group()

    job = Job(program, 2, tmp_path).run()

    assert job.codes == [0, 0]
    assert job.said.count("hang report") == 2
    assert "the wait has ended on all ranks that waited" in job.said


def test_before_torch_ends_the_job(tmp_path):
    """A wait in a group that was used before is reported at four fifths of the group's own time-out."""

    def program(rank, size, store):
        _start(rank, size, store, timeout=timedelta(seconds=8))
        dist.barrier()
        if rank == 0:
            time.sleep(DEADLINE_S)
        dist.barrier()

    job = Job(program, 2, tmp_path, TORCHCOMMSHIM_HANG_REPORT_S="300").run(until="hang report")

    assert re.search(r"1 of 2 ranks wait in barrier, for [67] s by now", job.said), job.said
    assert "rank 0 has not come to barrier on the world [0,1]" in job.text
