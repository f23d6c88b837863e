# SPDX-License-Identifier: Apache-2.0
"""`python -m torchcommshim.commands.verify`: the same as `torchcommshim verify`."""

from __future__ import annotations

import argparse
import sys

from torchcommshim.commands import verify

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="torchcommshim verify", description=verify.__doc__.splitlines()[0])
    verify.add_arguments(parser)
    sys.exit(verify.main(parser.parse_args()))
