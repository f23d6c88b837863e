# SPDX-License-Identifier: Apache-2.0
"""Where `torchcommshim.commands.verify` was in 0.1; the old name gives the same package."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("torchcommshim.commands.verify")
