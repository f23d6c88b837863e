# SPDX-License-Identifier: Apache-2.0
"""Run Megatron-LM without Transformer Engine and apex: megatron_lm_without_apex.py SCRIPT FLAGS...

Its distributed optimizer of 2024 refuses to start without one of the two. Where it does not insist, it takes
torch's AdamW for apex's FusedAdam (megatron/core/optimizer/__init__.py), and so does this. `import apex`
still fails, since nothing else of it is here.
"""

import os
import runpy
import sys
from types import ModuleType

from torch import optim

optimizers = ModuleType("apex.optimizers")
vars(optimizers).update(FusedAdam=optim.AdamW, FusedSGD=optim.SGD)
sys.modules[optimizers.__name__] = optimizers  # an import looks here before it looks for the parent

del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
