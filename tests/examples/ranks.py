# SPDX-License-Identifier: Apache-2.0
"""Run examples/pretrain_gpt.py in several ranks, again and again; `tiny.Trainer` talks to it.

It imports torch once, which takes longer than these trainings, and forks the ranks. Each line of its input
is a job in JSON: `folder`, `ranks`, `port`, `flags`, `environment`, and `prelude`, Python text that each rank
runs first and that knows `rank`. What rank R prints goes to FOLDER/R.out and FOLDER/R.err, its process id to
FOLDER/R.pid. The answer is a line with the exit codes.
"""

import json
import os
import sys
import traceback
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import pretrain_gpt  # noqa: E402


def run_rank(rank: int, job: dict) -> None:
    """Become rank `rank`; does not return."""
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{job['folder']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), **job["environment"])
    sys.argv = ["pretrain_gpt.py", *job["flags"]]
    code = 1
    try:
        exec(job["prelude"], {"rank": rank})  # noqa: S102 - the tests' own
        pretrain_gpt.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    job = json.loads(line)
    pids = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if not pid:
            run_rank(rank, job)
        Path(job["folder"], f"{rank}.pid").write_text(str(pid))
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
