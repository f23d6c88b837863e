# SPDX-License-Identifier: Apache-2.0
"""On real NCCL, as far as simulated NCCL cannot tell: needs a GPU, which four ranks can share.

The tables of docs/evidence.md come from `torchcommshim verify` and `examples/evidence.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import clean_environment

torch = pytest.importorskip("torch", reason="needs torch")

from torchcommshim.commands.environment import with_shim  # noqa: E402
from torchcommshim.commands.verify import catalogue  # noqa: E402

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, with real NCCL")
splits_for_gloo = pytest.mark.skipif(
    not (2, 3) <= RELEASE <= (2, 14), reason="this torch does not split for a gloo group"
)

RANKS = 4
REPORT_S = 5
DEADLINE_S = 20  # of those that hang: the report is to come well before

# Ranks 2 and 3 wait in perform_nocolor_split until the deadline, 0 and 1 in the world's all-reduce.
HANG = catalogue.load("gloo_subgroup").path

# Each rank has a thread that writes a line every 0.1 s.
BEATS = """
import os, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=gpu)
where = "before"

def beat(file):
    while True:
        file.write(where + "\\n")
        time.sleep(0.1)

file = open(Path(os.environ["BEATS"]) / str(dist.get_rank()), "w", buffering=1)
threading.Thread(target=beat, args=[file], daemon=True).start()
time.sleep(1)
where = "inside"
dist.new_group([0, 1], backend="gloo")
where = "after"
dist.barrier()
"""

# Rank 0 comes late, after a report for which the others got a signal while they were in NCCL.
LATE = f"""
import os, time
import torch, torch.distributed as dist

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(gpu)
dist.init_process_group("nccl", device_id=gpu)
if dist.get_rank() == 0:
    time.sleep({2 * REPORT_S})
group = dist.new_group([0, 1])
if dist.get_rank() < 2:
    tensor = torch.ones(1, device=gpu)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 2
dist.barrier()
dist.destroy_process_group()
"""


def job(
    script: Path, folder: Path, strategy: str, deadline: int = DEADLINE_S, **environment: str
) -> tuple[int, str]:
    """Run a script on `RANKS` ranks: torchrun's exit code, and all that was written."""
    left = folder / "left"
    left.mkdir()
    launch = ["-m", "torchcommshim.commands.verify.launch", str(left), str(deadline), str(script)]
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *launch],
        env=with_shim(
            clean_environment(
                GLOO_SOCKET_IFNAME="lo",
                TORCHCOMMSHIM=strategy,
                TORCHCOMMSHIM_HANG_REPORT_S=str(REPORT_S),
                **environment,
            )
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout


@splits_for_gloo
def test_hang_report(tmp_path):
    """Ranks that wait in NCCL, with the global lock held, are reported, with what repairs it."""
    code, said = job(HANG, tmp_path, "observe")

    assert (code, said.count("hang report")) == (1, 1), said
    assert re.search(
        r"ranks 2,3 +waiting for \d+ s in perform_nocolor_split: #1 new_group \[0,1\] gloo at \S+ <module>\n"
        r"  ranks 0,1 +elsewhere, returned \d+ s ago: #1 new_group",
        said,
    ), said
    assert "likely cause: other-backend: " in said
    assert re.search(r"distributed_c10d.py:\d+ _new_process_group_helper\n", said)


@splits_for_gloo
def test_split_holds_the_global_lock(tmp_path):
    """No thread runs of a rank that waits in perform_nocolor_split: why the watcher is a process."""
    script = tmp_path / "beats.py"
    script.write_text(BEATS)
    code, _ = job(script, tmp_path, "off", BEATS=str(tmp_path))
    beats = [(tmp_path / str(rank)).read_text().split() for rank in range(RANKS)]

    assert (code, [each[-1] for each in beats[:2]]) == (1, ["after"] * 2)
    assert [(each.count("before") > 3, each.count("inside") <= 1) for each in beats[2:]] == [(True, True)] * 2


def test_signal_in_nccl(tmp_path):
    """NCCL takes no harm from the signal that asks a rank for its stack: all get through."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    # With `split` all ranks wait for each other, on every torch.
    code, said = job(script, tmp_path, "split", deadline=120)

    assert (code, "rank 0 has not come to #1" in " ".join(said.split())) == (0, True), said
