# SPDX-License-Identifier: Apache-2.0
"""Run one scenario as one rank; torchrun or forkrun starts this, the runner starts them.

    python -m torchcommshim.commands.verify.launch FOLDER DEADLINE SCRIPT [--simulate ADDRESS]

Prepares the rank (several on one GPU, simulated NCCL), waits for the others so that the deadline counts
from the same moment, arms it, and runs the script as `__main__`.  What is to be known of the rank
afterwards it leaves in FOLDER:

    RANK.pid       the process id
    RANK.started   nothing, once torch is imported
    RANK.stacks    where it was when the deadline, SIGTERM or a crash came
    RANK.error     the exception that ended it, in one line
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import MutableMapping, Sequence

import torchcommshim


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line above, or the one of these words."""
    parser = argparse.ArgumentParser(prog="torchcommshim.commands.verify.launch")
    parser.add_argument("folder", type=Path)
    parser.add_argument("deadline", type=float)
    parser.add_argument("script")
    parser.add_argument("--simulate", metavar="ADDRESS")
    arguments = parser.parse_args(words)
    rank, size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])

    (arguments.folder / f"{rank}.pid").write_text(str(os.getpid()))

    import torch
    import torch.distributed

    if os.environ["TORCHCOMMSHIM"] != "off" and not torchcommshim.status()["patched"]:
        (arguments.folder / f"{rank}.error").write_text("the shim is not armed in this process")
        sys.exit(1)
    if arguments.simulate:
        from torchcommshim.commands.verify import simulated

        simulated.install(arguments.simulate, devices=size)
    else:
        share_gpus(os.environ, torch.cuda.device_count())

    (arguments.folder / f"{rank}.started").touch()
    while len(list(arguments.folder.glob("*.started"))) < size:
        time.sleep(0.02)

    # All three dump from C, so they work while the main thread waits in a split with the global lock held.
    stacks = open(arguments.folder / f"{rank}.stacks", "w")  # noqa: SIM115 - for as long as the process
    faulthandler.dump_traceback_later(arguments.deadline, exit=True, file=stacks)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGTERM, file=stacks, chain=True)

    sys.argv[:] = [arguments.script]
    sys.path[0] = os.path.dirname(arguments.script)  # as `python SCRIPT` has it
    try:
        runpy.run_path(arguments.script, run_name="__main__")
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        (arguments.folder / f"{rank}.error").write_text(f"{type(error).__name__}: {first_line}")
        raise


def share_gpus(environment: MutableMapping[str, str], gpus: int) -> None:
    """Let the ranks of this machine share its GPUs where there are fewer GPUs than ranks.

    NCCL refuses two ranks on one GPU of one host; ranks that name different hosts pass, and talk over
    sockets.  With a GPU for each rank nothing is changed.
    """
    if 0 < gpus < int(environment["LOCAL_WORLD_SIZE"]):
        environment["NCCL_HOSTID"] = f"{environment.get('NCCL_HOSTID', 'verify')}-{environment['RANK']}"
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environment["LOCAL_RANK"] = str(int(environment["LOCAL_RANK"]) % gpus)


if __name__ == "__main__":
    main()
