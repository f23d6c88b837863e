# SPDX-License-Identifier: Apache-2.0
"""For megatron_lm.sh, without Transformer Engine and apex: torch's optimizers under the names that they have.

Megatron-LM itself takes torch's AdamW for FusedAdam too (megatron/core/optimizer/__init__.py), but its
distributed optimizer refuses to start without one of the two packages.  The rest of Transformer Engine stays
missing: a module that needs it finds no installed distribution, as Megatron-LM expects.
"""

from torch import optim

FusedAdam, FusedSGD = optim.AdamW, optim.SGD

__all__ = ["FusedAdam", "FusedSGD"]
