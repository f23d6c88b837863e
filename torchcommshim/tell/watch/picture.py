# SPDX-License-Identifier: Apache-2.0
"""The picture of a job: ranks with the same stack are one entry; pure.

`torchcommshim where` prints it at any time, and the hang report with it where no rank waits in a creation.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torchcommshim.ranges import named
from torchcommshim.tell.watch import waits
from torchcommshim.tell.watch.diagnosis import Job
from torchcommshim.tell.watch.places import Group, Place
from torchcommshim.tell.watch.views import LOCKED, SILENT, STOPPED, End, View

_WIDTH = 110
_ENTRIES = 20
_CAUSES = 3
_DIFFERING = 3  # groups whose ranks have had different numbers of collectives
_STANDING_S = 10.0  # from when on a wait is looked into
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")


def report(job: Job) -> str:
    """The hang report's text where ranks wait in other calls than creations."""
    inside = {
        rank: place
        for rank, view in sorted(job.views.items())
        if (place := view.place) and place.call and not view.state
    }
    longest = max((inside[rank].since for rank in job.late if rank in inside), default=0.0)
    late = [rank for rank, place in inside.items() if place.since >= longest / 2]
    calls = {inside[rank].call for rank in late}
    what = f"in {calls.pop()}" if len(calls) == 1 else "in torch.distributed"
    head = f"hang report: {len(late)} of {job.size} ranks wait {what}, for {longest:.0f} s by now"
    return "\n".join([f"{head} [TCS-hang-report]", *_causes(job, late), *_body(job)])


def picture(job: Job) -> str:
    """What `torchcommshim where` prints of a job."""
    standing = [
        rank
        for rank, view in sorted(job.views.items())
        if (place := view.place) and place.call and place.since > _STANDING_S
    ]
    return "\n".join([*_body(job), *(_causes(job, standing) if standing else ())])


def plain(job: Job) -> dict[str, Any]:
    """The same for programs."""
    return {
        "size": job.size,
        "ranks": {rank: _plain_view(view) for rank, view in sorted(job.views.items())},
        "ended": {rank: {"how": end.how, "at": end.at} for rank, end in sorted(job.ended.items())},
        "silent": sorted(job.silent),
        "unheard": job.unheard,
        "apart": job.apart,
    }


def _plain_view(view: View) -> dict[str, Any]:
    return {
        "host": view.host,
        "pid": view.pid,
        "state": view.state or "runs",
        "creation": view.waits._asdict() if view.waits else None,
        "threads": [
            {**place._asdict(), "group": place.group._asdict() if place.group else None}
            for place in view.places
        ],
        "groups": [group._asdict() for group in view.counts],
    }


# -- entries -----------------------------------------------------------------------------------------------


def _body(job: Job) -> Iterator[str]:
    entries = list(_entries(job))
    for views in entries[:_ENTRIES]:
        yield from _entry(views)
    if len(entries) > _ENTRIES:
        left = sum(map(len, entries[_ENTRIES:]))
        yield f"  and {left} more ranks, in {len(entries) - _ENTRIES} more places"
    yield from _filled_all(_missing(job))
    yield from _filled_all(_ahead(job))


def _entries(job: Job) -> list[list[View]]:
    """Views by place: those for whom others wait first, then the largest."""
    entries: dict[tuple[Any, ...], list[View]] = defaultdict(list)
    for _, view in sorted(job.views.items()):
        entries[_same(view)].append(view)
    waits_somewhere = any(_is_in(views[0]) for views in entries.values())

    def order(views: Sequence[View]) -> tuple[bool, int, int]:
        return waits_somewhere and _is_in(views[0]), -len(views), views[0].rank

    return sorted(entries.values(), key=order)


def _is_in(view: View) -> bool:
    """It waits in torch.distributed."""
    return bool(view.waits or (view.place and view.place.call))


def _same(view: View) -> tuple[Any, ...]:
    place, creation = view.place, view.waits
    group = place.group if place else None
    return (
        view.state,
        creation.number if creation else None,
        place.call if place else "",
        group.begun if group else None,
        tuple(place.stack if place else view.stack),
    )


def _entry(views: Sequence[View]) -> Iterator[str]:
    ranks = [view.rank for view in views]
    view, place = views[0], views[0].place
    hosts = sorted({each.host for each in views})
    where = (
        f"process {view.pid} on {view.host}"
        if len(views) == 1
        else f"{len(views)} ranks on " + (hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts")
    )
    yield f"  {named(ranks)} ({where}): {_said(views)}"
    frames = list(place.stack if place else view.stack)[::-1]
    yield from (f"      {_PACKAGES.sub('', frame)}" for frame in frames)


def _said(views: Sequence[View]) -> str:
    places = [place for view in views if (place := view.place)]
    first = views[0]
    groups = {place.group.key for place in places if place.group}
    if len({place.peer for place in places}) > 1 and first.place:
        first = first._replace(places=[first.place._replace(peer=None)])
    text = waits.doing(first)
    if len(groups) > 1 and first.place:
        text = f"in {first.place.call} on {len(groups)} groups, at {first.place.site}"
    if first.state in (STOPPED, LOCKED, SILENT):
        return f"{text}, {_seconds([view.aged for view in views])}"
    if first.waits:
        creation = first.waits
        text = f"makes a group, #{creation.number} at {creation.site}; {text}"
    return f"{text}, {_seconds([place.since for place in places])}" if places else text


def _seconds(values: Sequence[float]) -> str:
    least, most = min(values), max(values)
    return f"for {most:.0f} s" if most - least < 2 else f"for {least:.0f} to {most:.0f} s"


# -- who is missing, and who is ahead ----------------------------------------------------------------------


def _missing(job: Job) -> Iterator[str]:
    how: dict[str, list[int]] = defaultdict(list)
    for rank, end in sorted(job.ended.items()):
        how[_ending(end)].append(rank)
    yield from (f"{named(ranks)}: {text}" for text, ranks in how.items())
    silent = sorted(job.silent)
    if silent:
        yield f"{named(silent, 'does', 'do')} not answer: the watcher or the host is stopped"
    if job.apart and job.unheard:
        yield f"{named(job.unheard)} could not be asked: {job.apart}"
    elif job.unheard:
        yield f"{named(job.unheard)} not heard of: not started, without torchcommshim, or cut off"


def _ending(end: End) -> str:
    return f"{end.how}, at {end.at}"


def _ahead(job: Job) -> Iterator[str]:
    """Groups of which some ranks have begun more collectives than others."""
    counts: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[tuple[str, str], Group] = {}
    for rank, view in sorted(job.views.items()):
        own = {group.key: group for group in (*view.counts, *_groups(view.places))}
        groups.update(own)
        for key, group in own.items():
            if group.begun is not None:
                counts[key][group.begun].append(rank)
    differing = [key for key, ranks in counts.items() if len(ranks) > 1]
    for key in differing[:_DIFFERING]:
        told = "; ".join(
            f"{named(ranks, 'has', 'have')} begun {count}" for count, ranks in sorted(counts[key].items())[:4]
        )
        yield f"collectives on {groups[key]}: {told}"


def _groups(places: Sequence[Place]) -> list[Group]:
    return [place.group for place in places if place.group]


def _causes(job: Job, late: Sequence[int]) -> Iterator[str]:
    found = waits.causes(job.views, job.ended, job.silent, late)[:_CAUSES] or ["not found."]
    yield from _filled_all(
        f"{'also' if number else 'likely cause'}: {each}" for number, each in enumerate(found)
    )


def _filled_all(texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        yield textwrap.fill(
            text,
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
