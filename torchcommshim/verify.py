# SPDX-License-Identifier: Apache-2.0
"""Where `torchcommshim.commands.verify` was in 0.1; the old name gives the same package."""

import sys
from importlib import import_module

_NOW = "torchcommshim.commands.verify"

sys.modules[__name__] = import_module(_NOW)
# Else `import torchcommshim.verify.switchboard` would make a second module, with classes of its own.
for _name in ("catalogue", "runner", "switchboard", "table", "verdicts"):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"{_NOW}.{_name}")
