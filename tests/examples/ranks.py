# SPDX-License-Identifier: Apache-2.0
"""Run examples/pretrain_gpt.py in several ranks: `python ranks.py COUNT PORT FOLDER PRELUDE FLAGS...`.

The ranks are forks of one process that has imported torch, since importing it takes longer than these
trainings. PRELUDE is Python text that each rank runs first; it knows `rank`. What rank R prints goes to
FOLDER/R.out and FOLDER/R.err, its process id to FOLDER/R.pid. The last line printed lists the exit codes.
"""

import json
import os
import sys
import traceback
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import pretrain_gpt  # noqa: E402


def run_rank(rank: int, count: int, port: str, folder: Path, prelude: str, flags: list[str]) -> None:
    """Become rank `rank`; does not return."""
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    sys.argv = ["pretrain_gpt.py", *flags]
    code = 1
    try:
        exec(prelude, {"rank": rank})  # noqa: S102 - the tests' own
        pretrain_gpt.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    count, port, folder, prelude, *flags = sys.argv[1:]
    pids = []
    for rank in range(int(count)):
        pid = os.fork()
        if not pid:
            run_rank(rank, int(count), port, Path(folder), prelude, flags)
        Path(folder, f"{rank}.pid").write_text(str(pid))
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


main()
