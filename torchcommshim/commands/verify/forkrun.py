# SPDX-License-Identifier: Apache-2.0
"""torchrun for simulated runs: its ranks are forked, so torch is imported once a run, not once a rank.

    python -m torchcommshim.commands.verify.forkrun TORCHRUN-OPTIONS -m MODULE ARGUMENTS

torchrun's own agent does the work; it can start a function where the command line starts a program.  Real
runs use the command line: there a rank is to be what a user's is, a new interpreter.
"""

from __future__ import annotations

import faulthandler
import signal

from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

from torchcommshim.commands.verify import launch
from torchcommshim.patches import prepare


def main() -> None:
    """Run the command line above."""
    options = run.parse_args(None)
    config, _, _ = run.config_from_args(options)
    config.start_method = "fork"
    prepare()
    elastic_launch(config, _rank)(*options.training_script_args)


def _rank(*arguments: str) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's handlers are not a rank's
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch.main(arguments)
    except SystemExit as left:
        if left.code:
            raise
    # The agent waits for each rank's return, and each rank then for the others': no part of the run.
    faulthandler.cancel_dump_traceback_later()
    faulthandler.unregister(signal.SIGTERM)


if __name__ == "__main__":
    main()
