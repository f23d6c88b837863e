# SPDX-License-Identifier: Apache-2.0
"""What comes of a traced program without the shim and with each strategy, as the model has it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

from torchcommshim.commands.explain.program import Origins, Sequences
from torchcommshim.repair.creations import COLLECTIVE
from torchcommshim.repair.defects import OWN_PARTS, Defect
from torchcommshim.repair.policy import Decision, decide
from torchcommshim.repair.splits import (
    ERROR,
    HANG,
    OK,
    WRONG,
    Create,
    Outcome,
    Program,
    as_made,
    backends,
    creation_of,
    has_split_source,
    run,
)
from torchcommshim.repair.traits import Traits

WITHOUT = "off"
STRATEGIES = (WITHOUT, "auto", "strip", "split")
_WORST_FIRST = (ERROR, HANG, WRONG, OK)


@dataclass(frozen=True)
class Played:
    """One program as it came out.

    Attributes:
        uses: one of `program.USES`.
        program, origins: see `Sequences.programs`.
        outcome: of the model.
    """

    uses: str
    program: Program
    origins: Origins
    outcome: Outcome

    @property
    def verdict(self) -> str:
        return self.outcome.verdict


@dataclass(frozen=True)
class Verdict:
    """What one strategy makes of the program.

    Attributes:
        strategy: one of `STRATEGIES`; `off` is without the shim.
        played: the program with each order of first use.
        remedies: how many creations get each remedy (`policy.INDEPENDENT`, ...); one that several ranks
            make counts once.
    """

    strategy: str
    played: list[Played]
    remedies: Counter[str]

    @cached_property
    def worst(self) -> Played:
        """The first of those that end worst."""
        return min(self.played, key=lambda each: _WORST_FIRST.index(each.verdict))

    @property
    def verdict(self) -> str:
        return self.worst.verdict


def play(sequences: Sequences, traits: Traits, salt: str, strategy: str) -> Verdict:
    """Play the program with `strategy` and each order of first use.

    Raises:
        ValueError: the program makes no sense to the model.
    """
    played = [
        Played(uses, program, origins, run(program, traits, strategy, salt))
        for uses, (program, origins) in sequences.programs.items()
    ]
    remedies: Counter[str] = Counter()
    if strategy != WITHOUT:
        remedies.update(decision.remedy for decision in _decisions(sequences, traits, strategy))
    return Verdict(strategy, played, remedies)


def causes(sequences: Sequences, traits: Traits) -> dict[Defect, int]:
    """The known defects that strike, and how many creations each."""
    found: dict[Defect, int] = {}
    for decision in _decisions(sequences, traits, "auto"):
        for defect in decision.defects:
            found[defect] = found.get(defect, 0) + 1
    mixed = _mixed(sequences)
    return {**found, OWN_PARTS: mixed} if mixed else found


def _mixed(sequences: Sequences) -> int:
    """How many groups share store keys: each rank names only its own in one call, and no colour helps."""
    calls: dict[int, dict[Create, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, steps in enumerate(sequences.steps):
        collective = (replace(step, group="") for step in steps if step.kind == COLLECTIVE)
        for number, step in enumerate(collective):
            calls[number][step].append(rank)
    found = 0
    for variants in calls.values():
        shared = [
            step
            for step, makers in variants.items()
            if len(step.ranks) > 1
            and sorted(step.ranks) == makers
            and not (
                creation_of(step, sequences.world).splits_by_color
                and "gloo" not in backends(step.backend).values()
            )
        ]
        found += len(shared) if len(shared) > 1 else 0
    return found


def calls_without_colour(sequences: Sequences, traits: Traits) -> list[int]:
    """How many splits each rank takes part in for groups that it is not in, without the shim.

    On torch 2.3 and 2.4 ranks that differ here hang, if only at the world's next collective.
    """
    return [
        sum(
            rank not in step.ranks
            and len(step.parent_ranks) in (0, sequences.world.size)  # not of another group
            and has_split_source(creation_of(step, sequences.world), traits)
            for made in steps
            for step in as_made(made, sequences.world, traits)
        )
        for rank, steps in enumerate(sequences.steps)
    ]


def _decisions(sequences: Sequences, traits: Traits, strategy: str) -> list[Decision]:
    """The decision on each creation; ranks that make one together count once."""
    world, stripped = sequences.world, strategy == "strip" and sequences.world.bound
    return [
        decide(creation_of(step, world, stripped=stripped), traits, strategy)
        for made in sequences.together
        for step in as_made(made, world, traits, stripped=stripped)
    ]
