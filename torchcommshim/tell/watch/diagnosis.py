# SPDX-License-Identifier: Apache-2.0
"""The report: from what is known of each rank to the text that names the likely cause; pure."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchcommshim.ranges import bracketed, cut, expanded, named
from torchcommshim.repair.creations import COLLECTIVE, DIRECT, LOCAL, SPLIT, WORLD
from torchcommshim.repair.defects import OWN_PARTS
from torchcommshim.repair.rendezvous import Rendezvous
from torchcommshim.tell import members
from torchcommshim.tell.watch.views import (
    MUTE,
    REFUSED,
    RENDEZVOUS,
    UNKNOWN,
    UNREACHED,
    Claim,
    End,
    Seen,
    View,
)
from torchcommshim.tell.watch.waits import doing

_WIDTH = 110
_LINES = 20  # of ranks, and not more
_STACKS = 2
_CAUSES = 3
_KEEPS_WORLDS_APART = ("auto", "strip", "split")
_CALLS = {
    WORLD: "init_process_group",
    COLLECTIVE: "new_group",
    LOCAL: "new_group, by local synchronization,",
    DIRECT: "_new_process_group_helper",
    SPLIT: "split_group",
}
_PARTS = 4  # of a split


@dataclass(frozen=True)
class Job:
    """All that is known when a creation is late.

    Attributes:
        size: of the world.
        views: by rank.
        ended: ranks whose process has ended.
        silent: ranks whose watcher is connected and does not answer.
        apart: why only this rank is known; empty if the others were asked.
        claims: processes that say to be a rank which another one says to be as well, and those others.
        others: of other worlds that meet in the same store, one process each.
        earlier: one of a world that was made over the same store before.
        late: ranks that have waited for too long.
        asked: the ranks that are of interest; all of them if empty.
    """

    size: int
    views: Mapping[int, View]
    ended: Mapping[int, End] = field(default_factory=dict)
    silent: Iterable[int] = ()
    apart: str = ""
    claims: Sequence[Claim] = ()
    others: Sequence[Claim] = ()
    earlier: Claim | None = None
    late: Iterable[int] = ()
    asked: Collection[int] = ()

    @cached_property
    def unheard(self) -> list[int]:
        """Ranks of which nothing is known."""
        known = {*self.views, *self.ended, *self.silent}
        return [rank for rank in self.asked or range(self.size) if rank not in known]

    @cached_property
    def waiting(self) -> dict[int, Seen]:
        """The ranks that wait, and in what."""
        return {rank: view.waits for rank, view in sorted(self.views.items()) if view.waits}


def report(job: Job) -> str:
    """The text, of several lines, without an end of line."""
    waiting = job.waiting
    longest = max(each.began for each in waiting.values())
    head = f"hang report: {len(waiting)} of {job.size} ranks wait in a creation, for {longest:.0f} s by now"
    causes = _causes(job) or ["not found."]
    paragraphs = [_filled(f"{'also' if n else 'likely cause'}: {each}") for n, each in enumerate(causes)]
    return "\n".join([f"{head} [TCS-hang-report]", *_table(job), *paragraphs, *_stacks(job)])


def alone(view: View, place: Rendezvous, found: str | None) -> str:
    """One line, of a rank that has reached no store and so none of the others.

    Args:
        view: what is known of it.
        place: where it waits.
        found: what comes of connecting to that place; None where there is nothing to connect to.
    """
    creation = view.waits or view.seen[-1]
    server = "the agent of torchrun" if place.by_agent else "rank 0"
    if place.serves:
        why = f"It serves the store at {place.place}, until all ranks have connected"
    elif found:
        why = f"It has not reached the store at {place.place}: " + _UNREACHED[found].format(server)
    else:
        why = f"It has no store yet, by {place.method}"
    return (
        f"hang report: rank {view.rank} of {place.size} (process {view.pid} on {view.host}) waits in "
        f"{RENDEZVOUS} for {creation.began:.0f} s by now, at {creation.site}. {why}. [TCS-rendezvous]"
    )


_UNREACHED = {
    UNKNOWN: "this host does not know that name. Look at MASTER_ADDR",
    REFUSED: "nobody listens there. The store is to be served by {0}, which has not started, or has "
    "ended, or was given another MASTER_ADDR or MASTER_PORT",
    UNREACHED: "that host does not answer. Is it up, do the other hosts know it as MASTER_ADDR, and does a "
    "firewall let them reach MASTER_PORT",
    MUTE: "something listens there, and does not answer as {} would: another program, or one that is stopped",
}


def _text(creation: Seen) -> str:
    if creation.split:
        _, _, ranks, parts = creation.split
        shown = " ".join(bracketed(expanded(part)) for part in parts[:_PARTS])
        more = f" and {len(parts) - _PARTS} more" if parts[_PARTS:] else ""
        what = f"{_CALLS[SPLIT]} of {bracketed(expanded(ranks))} into {shown}{more}"
        return f"#{creation.number} {what} {creation.backend} at {creation.site}"
    ranks = "" if creation.kind == WORLD or not creation.ranks else f" {bracketed(expanded(creation.ranks))}"
    return f"#{creation.number} {_CALLS[creation.kind]}{ranks} {creation.backend} at {creation.site}"


def _ending(end: End) -> str:
    text = f"{end.how}, at {end.at}"
    return f"{text}, {'in' if end.last.ended is None else 'after'} {_text(end.last)}" if end.last else text


# -- who is where ------------------------------------------------------------------------------------------


def _table(job: Job) -> Iterator[str]:
    """A line for ranks that are in the same state."""
    states = list(_states(job))
    rows = [(cut(ranks, 24), text, len(ranks)) for text, ranks in states[:_LINES]]
    width = max(len(ranks) for ranks, _, _ in rows)
    for ranks, text, number in rows:
        yield f"  {'rank' if number == 1 else 'ranks':5} {ranks:{width}}  {text}"
    if len(states) > _LINES:
        left = sum(len(ranks) for _, ranks in states[_LINES:])
        yield f"  and {left} more ranks, in {len(states) - _LINES} more states"


def _states(job: Job) -> Iterator[tuple[str, list[int]]]:
    """Waiting ranks first, in the order of their creations and then of the ranks."""
    waiting: dict[tuple[Any, ...], list[View]] = defaultdict(list)
    elsewhere: dict[tuple[Any, ...], list[View]] = defaultdict(list)
    for _, view in sorted(job.views.items()):
        last = view.waits or (view.seen[-1] if view.seen else None)
        group = waiting if view.waits else elsewhere
        now = "" if view.waits or not view.places else f"; now {doing(view)}"
        group[(last.number, last.site, last.same, view.inside, now) if last else (-1, now)].append(view)
    for _, views in sorted(waiting.items(), key=_by_number_and_rank):
        seen = [view.waits for view in views if view.waits]
        where = f" in {views[0].inside}" if views[0].inside else ""
        yield f"waiting for {max(each.began for each in seen):.0f} s{where}: {_text(seen[0])}", _ranks(views)
    for key, views in sorted(elsewhere.items(), key=_by_number_and_rank):
        now = key[-1]
        if key[0] == -1:
            yield f"elsewhere, no creation yet{now}", _ranks(views)
        else:
            ago = min(view.seen[-1].ended or 0.0 for view in views)
            yield f"elsewhere, returned {ago:.0f} s ago: {_text(views[0].seen[-1])}{now}", _ranks(views)
    how: dict[str, list[int]] = defaultdict(list)
    for rank, end in sorted(job.ended.items()):
        how[_ending(end)].append(rank)
    yield from how.items()
    if job.silent:
        yield "do not answer: the process or the host is stopped", sorted(job.silent)
    if job.apart:
        yield f"could not be asked: {job.apart}", job.unheard
    elif job.unheard:
        yield "not heard of: not started, without torchcommshim, or cut off", job.unheard


def _by_number_and_rank(state: tuple[tuple[Any, ...], list[View]]) -> tuple[int, int]:
    (number, *_), views = state
    return number, views[0].rank


def _ranks(views: list[View]) -> list[int]:
    return [view.rank for view in views]


# -- why ---------------------------------------------------------------------------------------------------


def _causes(job: Job) -> list[str]:
    """The likeliest first."""
    found = list(filter(None, (_strangers(job), _defect(job), _disagreement(job), _split_apart(job))))
    found += [] if found else filter(None, [_names_apart(job)])
    if not found and job.apart:
        why = "that rank has ended, or the hosts cannot reach each other"
        found.append(f"{job.apart}: {why}. [TCS-watchers-apart]")
    elif not found:
        inside: dict[tuple[str, ...], set[int]] = defaultdict(set)
        for rank, seen in job.waiting.items():
            inside[seen.call].add(rank)
        for ranks in list(inside.values())[:_CAUSES]:
            found += _missing(job, ranks)
        complete = [ranks for ranks in inside.values() if _absent(job, ranks) == set()]
        found = found or [_connecting(job, ranks) for ranks in complete]
    return found[:_CAUSES]


def _strangers(job: Job) -> str | None:
    """Processes that have no place in a world which is being made."""
    if not any(each.kind == WORLD for each in job.waiting.values()):
        return None
    if job.others:
        return _other_world(job, job.others[0])
    return _contested(job) if job.claims else None


def _contested(job: Job) -> str:
    """Ranks that several processes claim."""
    by_rank: dict[int, list[Claim]] = defaultdict(list)
    for claim in job.claims:
        by_rank[claim.rank].append(claim)
    claimed = sorted(by_rank.items())
    each = [f"rank {rank} by {' and '.join(map(_process, claims))}" for rank, claims in claimed]
    more = f"; and {len(each) - _CAUSES} more" if len(each) > _CAUSES else ""
    nobody = f" Nobody claims {named(job.unheard)}." if job.unheard else ""
    jobs = next(filter(None, (_jobs(claims[0], claims[-1]) for claims in by_rank.values())), "")
    why = jobs or "RANK is wrong in one of them, or two jobs use one MASTER_PORT"
    told = f"{'; '.join(each[:_CAUSES])}{more}.{nobody} {why}."
    return f"several processes claim one rank: {told} [TCS-rank-claimed-twice]"


def _other_world(job: Job, other: Claim) -> str:
    """Ranks of another world that have come to the store of this one."""
    view = next(job.views[rank] for rank in job.waiting)
    here = f"rank {view.rank} of {job.size} is process {view.pid} on {view.host}"
    there = f"rank {other.rank} of {other.size} is {_process(other)}"
    jobs = _jobs(Claim(view.rank, job.size, view.host, view.pid, job=view.job), other)
    if jobs:
        why = jobs
    elif other.size != job.size:
        why = "Two jobs use one MASTER_PORT, or WORLD_SIZE is not the same for all ranks of one job"
    else:
        why = (
            "Two jobs use one MASTER_PORT, or more processes were started than WORLD_SIZE says, or only a "
            "part of a job was started again"
        )
    return f"two worlds meet in one store: here, {here}; in the other, {there}. {why}. [TCS-two-worlds]"


def _process(claim: Claim) -> str:
    ended = f", {claim.end.how}" if claim.end else ""
    return f"process {claim.pid} on {claim.host} ({claim.program}{ended})"


def _jobs(one: Claim, other: Claim) -> str:
    """How launchers and schedulers tell the jobs of two processes apart; empty if they do not."""
    for name, value in sorted(one.job.items()):
        if other.job.get(name, value) != value:
            return (
                f"They are two jobs, of {name} {value} and {other.job[name]}, that use one MASTER_PORT: give "
                "each its own"
            )
    return ""


def _defect(job: Job) -> str | None:
    """The first creation that a defect strikes, up to those that are waited in."""
    last = max(each.number for each in job.waiting.values())
    struck = [(each, view) for _, view in sorted(job.views.items()) for each in view.struck]
    struck = [(each, view) for each, view in struck if each.number <= last]
    if not struck:
        return None
    first, view = min(struck, key=lambda each: each[0].number)
    return (
        f"{first.defect}: on torch {view.torch} {first.title} ({first.upstream}). The first creation that it "
        f"breaks is #{first.number} at {first.site}. TORCHCOMMSHIM={view.strategy} leaves it so; "
        f"TORCHCOMMSHIM=auto, the default, repairs it. [TCS-{first.defect}]"
    )


def _disagreement(job: Job) -> str | None:
    """The first call of new_group in which ranks do not make the same group."""
    calls: dict[str, dict[tuple[str, ...], list[tuple[int, Seen]]]] = defaultdict(lambda: defaultdict(list))
    for rank, view in sorted(job.views.items()):
        for seen in view.seen:
            if seen.kind == COLLECTIVE:
                calls[seen.name][seen.same].append((rank, seen))
    for variants in sorted(
        calls.values(), key=lambda each: min(s.number for v in each.values() for _, s in v)
    ):
        if len(variants) < 2:
            continue
        pair = _conflict(variants)
        if pair:
            rule = f" {members.RULE}" if _only_members(job, variants) else ""
            return _order_mismatch(*(variants[each][0] for each in pair)) + rule
        if _mixes(job, variants):
            return _own_parts(job, variants)
    waits: dict[tuple[str, ...], tuple[int, Seen]] = {}  # the calls that told them apart are forgotten
    for rank, seen in job.waiting.items():
        if seen.kind == COLLECTIVE and rank in expanded(seen.ranks):
            first = waits.setdefault(seen.same[1:], (rank, seen))
            if first[1].name != seen.name:
                return _order_mismatch(first, (rank, seen))
    return None


def _only_members(job: Job, variants: Mapping[tuple[str, ...], list[tuple[int, Seen]]]) -> bool:
    """Variants of one call look as if only the members of a group made it: nobody else has, in no call."""
    makes = {rank: expanded(seen.ranks) for makers in variants.values() for rank, seen in makers}
    return any(
        all(rank in ranks or not _makes(view, ranks) for rank, view in job.views.items())
        for ranks in members.alone(makes)
    )


def _makes(view: View, ranks: tuple[int, ...]) -> bool:
    return any(seen.kind == COLLECTIVE and expanded(seen.ranks) == ranks for seen in view.seen)


def _splits(job: Job) -> Iterator[list[tuple[int, Seen]]]:
    """The splits that ranks know of, the first ones first, each with the ranks that make it."""
    calls: dict[tuple[str, ...], list[tuple[int, Seen]]] = defaultdict(list)
    for rank, view in sorted(job.views.items()):
        for seen in view.seen:
            if seen.split:
                calls[seen.call].append((rank, seen))
    yield from sorted(calls.values(), key=lambda makers: min(seen.number for _, seen in makers))


def _split_apart(job: Job) -> str | None:
    """The first split of a group in which ranks do not name the same parts."""
    for makers in _splits(job):
        first = makers[0]
        other = next((each for each in makers if each[1].same != first[1].same), None)
        if other:
            return (
                f"ranks do not split one group alike: rank {first[0]} makes {_text(first[1])}; in its place "
                f"rank {other[0]} makes {_text(other[1])}. All ranks of a group pass the same lists to "
                "split_group; TORCHCOMMSHIM_CHECK_ORDER=1 stops a job at the first such creation. "
                "[TCS-split-differs]"
            )
    return None


def _names_apart(job: Job) -> str | None:
    """A split that ranks wait in, and in which they have given one of the new groups different names."""
    for makers in _splits(job):
        if not any(job.waiting.get(rank) == seen for rank, seen in makers):
            continue
        named_by: dict[str, tuple[int, Seen]] = {}
        for rank, seen in makers:
            first = named_by.setdefault(seen.ranks, (rank, seen))
            if seen.ranks and seen.name != first[1].name:
                return (
                    f"ranks have given one group different names, under which they look for each other: in "
                    f"{_text(seen)}, rank {first[0]} calls {bracketed(expanded(seen.ranks))} "
                    f"{first[1].name!r}, rank {rank} calls it {seen.name!r}. torch makes the name of a split "
                    "group from how many groups the rank is in "
                    "(https://github.com/pytorch/pytorch/issues/189073). [TCS-split-names]"
                )
    return None


def _conflict(variants: Mapping[tuple[str, ...], list[tuple[int, Seen]]]) -> list[tuple[str, ...]] | None:
    """Two variants of one call that cannot both be right.

    That ranks each name only the group that they are in is right, where those groups have no rank in common.
    """
    made = {rank: variant for variant, makers in variants.items() for rank, _ in makers}
    claimed: dict[int, tuple[str, ...]] = {}
    for variant, makers in variants.items():
        for rank in expanded(makers[0][1].ranks):
            other = made.get(rank, variant)
            other = other if other != variant else claimed.setdefault(rank, variant)
            if other != variant:
                return sorted((variant, other), key=lambda each: variants[each][0][0])
    return None


def _mixes(job: Job, variants: Mapping[tuple[str, ...], list[tuple[int, Seen]]]) -> bool:
    """Several of these groups connect through the store, and nothing keeps them apart."""
    return 1 < sum(
        len(expanded(seen.ranks)) > 1
        and job.views[rank].strategy == "observe"
        and not (job.views[rank].bound and "gloo" not in seen.backend)
        for (rank, seen), *_ in variants.values()
    )


def _own_parts(job: Job, variants: Mapping[tuple[str, ...], list[tuple[int, Seen]]]) -> str:
    """`variants`: those of `_mixes`."""
    (one, first), (other, second) = (makers[0] for makers in list(variants.values())[:2])
    return (
        f"{OWN_PARTS.name}: {OWN_PARTS.title} ({OWN_PARTS.upstream}), so their ranks are mixed up: "
        f"rank {one} makes {_text(first)}; in the same call rank {other} makes {_text(second)}. "
        f"TORCHCOMMSHIM={job.views[one].strategy} leaves it so; TORCHCOMMSHIM=auto, the default, repairs it. "
        f"[TCS-{OWN_PARTS.name}]"
    )


def _order_mismatch(one: tuple[int, Seen], other: tuple[int, Seen]) -> str:
    return (
        f"ranks do not make the same groups in the same order: rank {one[0]} makes {_text(one[1])}; in its "
        f"place rank {other[0]} makes {_text(other[1])}. "
        "TORCHCOMMSHIM_CHECK_ORDER=1 stops a job at the first such creation. [TCS-group-order]"
    )


def _missing(job: Job, inside: set[int]) -> Iterator[str]:
    """Who should be in the call that these ranks wait in, and is not."""
    creation = job.waiting[min(inside)]
    what, absent = _text(creation), _absent(job, inside) or set()
    ended = [rank for rank in absent & job.ended.keys() if not _has_made(creation, [job.ended[rank].last])]
    made = {rank: _has_made(creation, view.seen) for rank, view in job.views.items() if rank in absent}
    passed = [rank for rank, has_made in made.items() if has_made]
    to_come = [rank for rank, has_made in made.items() if not has_made]
    unheard = [rank for rank in job.unheard if rank in absent]
    silent = sorted(absent & set(job.silent))
    if ended:
        yield f"{named(ended)} cannot come to {what}: {_ending(job.ended[min(ended)])}. [TCS-rank-ended]"
    if to_come:
        makes = {rank: expanded(job.waiting[rank].ranks) for rank in inside}
        is_split = creation.kind == COLLECTIVE and len(to_come) == len(absent)
        rule = f" {members.RULE}" if is_split and members.alone(makes, absent) else ""
        look = _look(job.views[min(to_come)])
        yield f"{named(to_come, 'has', 'have')} not come to {what}.{rule}{look} [TCS-rank-missing]"
    if silent:
        why = "the process or the host is stopped"
        yield f"{named(silent)}, needed for {what}, cannot be asked: {why}. [TCS-rank-silent]"
    if unheard:
        yield f"nothing is heard of {named(unheard)}, needed for {what}. [TCS-rank-unheard]"
    if passed and not (ended or to_come or unheard or silent):
        look = _look(job.views[min(passed)])
        yield f"{named(passed, 'has', 'have')} returned from {what} already.{look} [TCS-rank-returned]"


def _absent(job: Job, inside: set[int]) -> set[int] | None:
    """Ranks that the call of these ranks takes, and that are not in it; None if that is not known."""
    creation = job.waiting[min(inside)]
    lists = {job.waiting[rank].ranks for rank in inside}  # each rank may have named its own group only
    takes = {rank for ranks in lists for rank in expanded(ranks)}
    if creation.split:
        takes = set(expanded(creation.split[2]))
    if not takes:  # a direct call, which may span other processes
        return None
    if creation.kind == COLLECTIVE and any(job.views[rank].bound for rank in inside):
        takes = set(range(job.size))  # to a split of the world every rank comes
    return takes - inside


def _connecting(job: Job, inside: set[int]) -> str:
    """All are there."""
    creation = job.waiting[min(inside)]
    what = _text(creation)
    if creation.kind == WORLD and job.earlier and job.views[min(inside)].strategy not in _KEEPS_WORLDS_APART:
        return (
            f"the store holds the keys of an earlier world, in which rank {job.earlier.rank} of "
            f"{job.earlier.size} was {_process(job.earlier)}. All ranks are in {what}, and may have read "
            "what is left of it there. Make each world over a store of its own: a new port, file or prefix. "
            "[TCS-earlier-world]"
        )
    return (
        f"all ranks that it takes are in {what}, so connecting them does not succeed. Look at the "
        "network: NCCL_DEBUG=INFO says more, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose the way. "
            "[TCS-network]"
    )


def _has_made(creation: Seen, made: Sequence[Seen | None]) -> bool:
    """`creation` is among those that a rank has made, or all that is kept of them came later."""
    known = [each for each in made if each]
    return any(each.call == creation.call and each.ended is not None for each in known) or (
        bool(known) and known[0].number > creation.number
    )


def _look(view: View) -> str:
    """Where a rank is, or how to see that, unless it waits in a creation too."""
    if view.places and not view.waits:
        return f" Rank {view.rank}: {doing(view)}."
    return (
        ""
        if view.waits
        else f" `py-spy dump --pid {view.pid}` on {view.host} shows where rank {view.rank} is."
    )


# -- the rest ----------------------------------------------------------------------------------------------


def _stacks(job: Job) -> Iterator[str]:
    """The stacks of a few ranks that wait in different places."""
    shown: set[str] = set()
    for rank in job.waiting:
        view = job.views[rank]
        if view.stack and view.stack[0] not in shown and len(shown) < _STACKS:
            shown.add(view.stack[0])
            yield f"  rank {rank} (process {view.pid} on {view.host}), innermost call first:"
            yield from (f"    {frame}" for frame in view.stack)


def _filled(text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
