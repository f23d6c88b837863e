# SPDX-License-Identifier: Apache-2.0
"""`python -m torchcommshim`."""

import sys

from torchcommshim.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
