# SPDX-License-Identifier: Apache-2.0
"""Makes a program for the model of `splits.py` out of traces.

Two things are not in a trace and are decided here.  What the world is taken for: a laptop's gloo world, or a
dry run's fake one, stands for the cluster's NCCL world.  And when groups are used, since collectives are not
traced: three orders of first use are tried.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Optional

from torchcommshim.commands.explain.traces import BadTraces, Job, Made
from torchcommshim.ranges import bracketed, named
from torchcommshim.repair.creations import ALL, COLLECTIVE, DIRECT, LOCAL, MEMBERS, NOBODY, SPLIT, WORLD
from torchcommshim.repair.names import KnownGroups
from torchcommshim.repair.splits import AllReduce, Create, Program, Step, World, backends
from torchcommshim.repair.traits import Traits

# When groups are used for the first time.
AT_ONCE = "at-once"
LATER = "later"
WORLD_FIRST = "world-first"
USES = {
    AT_ONCE: "each group is used as soon as it is made, and the world at the end",
    LATER: "all groups are made, then used in that order, then the world",
    WORLD_FIRST: "all groups are made, then the world is used, then the groups in that order",
}

# What the world is taken for.
AUTO = "auto"
TRACED = "traced"
BOUND = "bound"
UNBOUND = "unbound"
WORLDS = {
    AUTO: "NCCL as traced; a gloo or fake world without device_id as NCCL with one",
    TRACED: "as traced",
    BOUND: "NCCL with device_id",
    UNBOUND: "NCCL without device_id",
}

# torch's name for "one for each type of device".
_EACH = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class Taken:
    """What the traced world is taken for.

    Attributes:
        world: that.
        traced: the backend it was traced with.
        note: why it is taken for something else; empty if it is not.
    """

    world: World
    traced: str
    note: str = ""

    def backend(self, asked: str, *, dry_run: bool) -> str:
        """The backend of a group that asked for `asked`.

        What is fake stands for the world's.  In a gloo world that stands for NCCL, so does gloo: a group
        that asks for nothing asks for the world's.  A dry run tells the two apart.
        """
        asked = _EACH if asked == "undefined" else asked
        if asked == "fake" or (asked == "gloo" == self.traced and not dry_run and self.note):
            return self.world.backend
        carrier = "nccl" if "nccl" in self.world.backend else "gloo"
        return ",".join(
            ":".join(carrier if word == "fake" else word for word in part.split(":"))
            for part in asked.split(",")
        )


def take(job: Job, choice: str, traits: Traits) -> Taken:
    """What the world of `job` is taken for; `choice` is one of `WORLDS`.

    Raises:
        BadTraces: its backend is not modelled.
    """
    first = next((trace for _, trace in sorted(job.ranks.items()) if trace.bound), job.first)
    traced, bound = str(first.world["backend"]), bool(first.bound.get("bound"))
    dry_run = bool(first.world["dry_run"])
    stripped = first.world["strategy"] == "strip" and not bound
    backend = _EACH if traced == "undefined" else "nccl" if traced == "fake" else traced
    backend = ",".join(part.replace(":fake", ":nccl") for part in backend.split(","))
    note = ""
    if choice in (BOUND, UNBOUND):
        is_nccl = "nccl" in backend
        note = "" if is_nccl and bound == (choice == BOUND) else f"--world {choice}"
        backend, bound = backend if is_nccl else "nccl", choice == BOUND
    elif choice == AUTO and stripped and "nccl" in backend:
        bound, note = True, "it was traced with TORCHCOMMSHIM=strip, which drops the device_id"
    elif choice == AUTO and not bound and (traced == "gloo" or "fake" in traced):
        backend, bound = "nccl" if traced == "gloo" else backend, True
        note = f"a world of {traced} without device_id is taken to stand for it"
    try:
        backends(backend)
    except ValueError as error:
        raise BadTraces(f"the world: {error}") from None
    if "nccl" in backend:
        real = "nccl" in traced and not dry_run
        splits = str(first.bound.get("splits", ALL)) if real else ALL
    elif dry_run and bound:
        splits = NOBODY if traits.members_split_late else MEMBERS
    else:
        splits = str(first.bound.get("splits", NOBODY))
    return Taken(World(job.size, backend, bound, splits), traced, note)


# For each rank and step of a program the creation that it makes or uses; None for the world.
Origins = list[list[Optional[Made]]]


@dataclass(frozen=True)
class Sequences:
    """What each rank creates, in order, ready for the model.

    Attributes:
        world: what the traced one is taken for.
        made: for each rank, its creations as traced or assumed.
        steps: for each rank, the same as steps of the model.
        notes: what was assumed, a sentence each.
    """

    world: World
    made: list[list[Made]]
    steps: list[list[Create]]
    notes: list[str]

    @cached_property
    def programs(self) -> dict[str, tuple[Program, Origins]]:
        """For each of `USES` the program in which groups are used so, and where its steps come from."""
        return {uses: self._program(uses) for uses in USES}

    @cached_property
    def together(self) -> list[Create]:
        """The creations, those that several ranks make together once."""
        found: dict[tuple[Create, int], Create] = {}
        for steps in self.steps:
            times: Counter[Create] = Counter()
            for step in steps:
                alike = replace(step, group="")
                if step.kind == SPLIT:
                    alike = replace(alike, ranks=(), parent="")
                times[alike] += 1
                found.setdefault((alike, times[alike]), alike)
        return list(found.values())

    def _program(self, uses: str) -> tuple[Program, Origins]:
        program = Program(self.world)
        origins: Origins = []
        for rank, (steps, made) in enumerate(zip(self.steps, self.made)):
            pairs = list(_with_uses(rank, list(zip(steps, made)), uses))
            program.steps[rank] = [step for step, _ in pairs]
            origins.append([origin for _, origin in pairs])
        return program, origins


def _with_uses(
    rank: int, created: list[tuple[Create, Made]], uses: str
) -> Iterator[tuple[Step, Made | None]]:
    for step, made in created:
        yield step, made
        if uses == AT_ONCE and rank in step.ranks:
            yield AllReduce(step.group), made
    if uses == WORLD_FIRST:
        yield AllReduce(WORLD), None
    if uses != AT_ONCE:
        for step, made in created:
            if rank in step.ranks:
                yield AllReduce(step.group), made
    if uses != WORLD_FIRST:
        yield AllReduce(WORLD), None


def sequences(job: Job, taken: Taken) -> Sequences:
    """What each rank of the job creates.

    Raises:
        BadTraces: a creation cannot be modelled, or what is missing cannot be assumed.
    """
    notes: list[str] = []
    made = _complete(job, notes)
    labels = [_labels(row) for row in made]
    makers: dict[str, list[int]] = defaultdict(list)  # of direct calls, which name no ranks to torch
    for rank, row in enumerate(labels):
        for label in row:
            makers[label].append(rank)
    dry_run = bool(job.first.world["dry_run"])
    steps = [
        [
            _split(
                f"rank {rank}", each, label, _parent(each, row[:place], labels[rank]), taken, dry_run=dry_run
            )
            if each.kind == SPLIT
            else _step(
                f"rank {rank}", each, label, each.ranks or tuple(makers[label]), taken, dry_run=dry_run
            )
            for place, (each, label) in enumerate(zip(row, labels[rank]))
        ]
        for rank, row in enumerate(made)
    ]
    steps = [_with_evenness(row) for row in steps]
    return Sequences(taken.world, made, steps, notes)


def _labels(row: list[Made]) -> list[str]:
    """A name for each creation of a rank; for direct calls the same on all ranks that make one together."""
    times: Counter[str] = Counter()
    labels = []
    for place, made in enumerate(row):
        times[made.name] += 1
        is_direct = made.kind == DIRECT
        labels.append(f"direct {made.name} {times[made.name]}" if is_direct else f"group {place}")
    return labels


def _step(
    where: str, made: Made, label: str, ranks: tuple[int, ...], taken: Taken, *, dry_run: bool
) -> Create:
    where = f"{where}, creation {made.number} ({made.site})"
    backend = taken.backend(made.backend, dry_run=dry_run)
    try:
        backends(backend)
    except ValueError as error:
        raise BadTraces(f"{where}: {error}") from None
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < taken.world.size:
        raise BadTraces(
            f"{where}: its ranks {bracketed(ranks)} are not ranks of a world of {taken.world.size}"
        )
    return Create(label, ranks, backend, made.kind)


def _parent(made: Made, earlier: list[Made], labels: list[str]) -> str:
    """The label of the group that is split; its name was given to no other before it."""
    named_so = [label for each, label in zip(earlier, labels) if each.name == made.parent]
    return named_so[-1] if named_so else WORLD


def _split(where: str, made: Made, label: str, parent: str, taken: Taken, *, dry_run: bool) -> Create:
    if parent == WORLD and len(made.parent_ranks) < taken.world.size:
        raise BadTraces(
            f"{where}, creation {made.number} ({made.site}): the group that it splits is not in the trace"
        )
    step = _step(where, made, label, made.parent_ranks, taken, dry_run=dry_run)
    return replace(
        step,
        ranks=made.ranks,
        parent=parent,
        parent_ranks=made.parent_ranks,
        parts=made.parts,
        by_mesh=made.by_mesh,
    )


def _with_evenness(steps: list[Create]) -> list[Create]:
    """Of splits, whether ranks are in equally many groups, as far as all of them know."""
    known, found = KnownGroups(), []
    for step in steps:
        if step.kind == SPLIT:
            found.append(replace(step, even=all(map(known.are_even, step.parts))))
            for part in step.parts if step.parent == WORLD else ():
                known.add(part)
        else:
            found.append(step)
            if step.kind == COLLECTIVE:
                known.add(step.ranks)
    return found


# -- what is not in the traces ------------------------------------------------------------------------------


def _complete(job: Job, notes: list[str]) -> list[list[Made]]:
    """Each rank's creations, with those added that a rank was kept from making, or that are not traced.

    A group that all ranks of the world make is in every rank's list, so another rank's tells it.
    """
    made = [list(job.ranks[rank].creations) if rank in job.ranks else [] for rank in range(job.size)]
    by_all = [[each for each in row if each.by_all] for row in made]
    length = max(map(len, by_all))
    stuck = [rank for rank, trace in job.ranks.items() if trace.stuck and len(by_all[rank]) < length]
    for rank in sorted([*stuck, *job.missing]):
        for place in range(len(by_all[rank]), length):
            there = [row[place] for row in by_all if place < len(row) and not row[place].assumed]
            like = next((each for each in there if rank in each.ranks), there[0])
            number = len(made[rank]) + 1
            added = replace(like, number=number, ranks=like.on(rank), returned=False, assumed=True)
            made[rank].append(added)
    notes += [*_notes(job, stuck, length), *_order(by_all)]
    alone = {
        rank
        for row in made
        for each in row
        if each.kind == LOCAL or (each.kind == SPLIT and not each.by_all)
        for rank in set(each.parent_ranks or each.ranks) & set(job.missing)
    }
    if alone:
        raise BadTraces(
            f"no trace of {named(alone)}, which make groups that not all ranks make "
            "(use_local_synchronization, or splits of their own groups): when they do cannot be assumed"
        )
    short = [rank for rank in sorted(set(job.ranks) - set(stuck)) if len(by_all[rank]) < length]
    if short:
        notes.append(
            f"{named(short)} made fewer of the groups that all ranks make than others, which made up to "
            f"{length}: explained as traced, as if no more came"
        )
    return made


def _notes(job: Job, stuck: list[int], length: int) -> Iterator[str]:
    late = [rank for rank, trace in job.ranks.items() if trace.world["late"]]
    if late:
        yield (
            f"on {named(late)} the shim was installed after the world was made: groups made before that "
            "are not in the trace"
        )
    if job.missing:
        yield (
            f"no trace of {named(job.missing)}: assumed to make the {length} groups that all ranks make, "
            "as the other ranks do"
        )
    cut = [rank for rank, trace in job.ranks.items() if trace.cut]
    if cut:
        yield f"the trace of {named(cut)} is cut short in its last line, which is left out"
    if stuck:
        yield (
            f"{named(stuck)} did not come back from a creation in the traced run: assumed to go on as the "
            "ranks that did"
        )
    if not job.creations:
        yield "no group was made in the traced run"
    nowhere = [rank for rank, trace in job.ranks.items() if not trace.has_world]
    if nowhere:
        yield f"on {named(nowhere)} the world itself was not made in the traced run"


def _order(by_all: list[list[Made]]) -> Iterator[str]:
    """The first of the groups that all ranks make in which ranks do not make the same; most often none."""
    for place in range(max(map(len, by_all))):
        makers: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, row in enumerate(by_all):
            if place < len(row):
                each = row[place]
                makers[each.kind, each.parts or each.ranks, each.backend].append(rank)
        # In one call of new_group each rank may name only the group that it is in.
        is_own = all(
            by_all[ranks[0]][place].kind == COLLECTIVE and set(ranks) <= set(by_all[ranks[0]][place].ranks)
            for ranks in makers.values()
        )
        if len(makers) > 1 and not is_own:
            said = [
                f"{named(ranks)} {_listed(by_all[ranks[0]][place])} ({by_all[ranks[0]][place].site})"
                for ranks in makers.values()
            ]
            more = f"; and {len(said) - 4} more" if said[4:] else ""
            yield (
                f"ranks make different groups as number {place + 1} of those that all ranks make: "
                f"{'; '.join(said[:4])}{more}"
            )
            return


def _listed(made: Made) -> str:
    """What a creation makes, in a note."""
    if made.kind == SPLIT:
        return f"a split into {' '.join(map(bracketed, made.parts))} {made.backend}"
    return f"{bracketed(made.ranks)} {made.backend}"
