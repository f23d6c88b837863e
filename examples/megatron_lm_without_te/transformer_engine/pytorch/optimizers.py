# SPDX-License-Identifier: Apache-2.0
"""For megatron_lm.sh where neither Transformer Engine nor apex is installed: torch's optimizers by their names there.

Megatron-LM's own fallback takes torch's AdamW for FusedAdam as well (megatron/core/optimizer/__init__.py), but
its distributed optimizer refuses to start without one of the two packages.  The rest of Transformer Engine
stays missing: a module that needs it finds no installed distribution, as Megatron-LM expects.
"""

from torch.optim import SGD as FusedSGD
from torch.optim import AdamW as FusedAdam

__all__ = ["FusedAdam", "FusedSGD"]
