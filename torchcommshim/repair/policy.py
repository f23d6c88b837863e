# SPDX-License-Identifier: Apache-2.0
"""What is done about one creation: a pure function of what is equal on every rank that takes part."""

from __future__ import annotations

from dataclasses import dataclass

from torchcommshim.repair.creations import Creation
from torchcommshim.repair.defects import LOCAL_NAMES, SPLIT_NAMES, Defect, striking
from torchcommshim.repair.traits import Traits

# Remedies.
NONE = "none"
INDEPENDENT = "independent"  # made without splitting from the world
SPLIT_NOW = "split_now"  # members split inside the helper, together with the non-members


@dataclass(frozen=True)
class Decision:
    """What is done about one creation.

    Attributes:
        remedy: NONE, INDEPENDENT or SPLIT_NOW.
        unbind: the helper is not handed the world's device (`device_id`).
        rename: the group gets a name made from what its ranks know, the same on all of them.
        apart: the group's store gets a prefix made from its ranks.  No repair that is counted: whether
            OWN_PARTS would have broken the call no rank can see, and what is right already stays so.
        defects: why; empty if nothing is done.
    """

    remedy: str = NONE
    unbind: bool = False
    rename: bool = False
    apart: bool = False
    defects: tuple[Defect, ...] = ()


NOTHING = Decision()


def decide(creation: Creation, traits: Traits, strategy: str) -> Decision:
    """Decide what is done about `creation`.

    Args:
        creation: the creation.
        traits: of the torch build.
        strategy: one of `settings.STRATEGIES` but `off`.  `observe` decides as `auto` does; not
            acting on it is the caller's part.
    """
    defects = striking(creation, traits)
    if not any(defect.splits for defect in defects):
        remedy = NONE
    elif strategy == "split" and creation.splits_by_color:
        remedy = SPLIT_NOW
    else:
        remedy = INDEPENDENT
    return Decision(
        remedy=remedy,
        unbind=remedy == INDEPENDENT and creation.bound and creation.device_backend is None,
        rename=LOCAL_NAMES in defects or SPLIT_NAMES in defects,
        apart=creation.may_be_own_part,
        defects=defects,
    )
