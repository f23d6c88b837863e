# SPDX-License-Identifier: Apache-2.0
"""Waits in torch.distributed that are no creations: when one is late, how it is named, and why; pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torchcommshim.ranges import named
from torchcommshim.tell.watch.places import Group, Place
from torchcommshim.tell.watch.views import LOCKED, SILENT, STOPPED, End, View

_SHARE = 0.8  # of a group's time-out, so that the report is there before torch ends the job
_CREATIONS = frozenset(
    ("init_process_group", "new_group", "split_group", "_new_group_with_tag", "_new_process_group_helper")
)
_BARRIER = "_store_based_barrier"  # at the end of a creation
_AS_CREATIONS = frozenset(("destroy_process_group", "_shutdown_backend"))
_RECEIVES = frozenset(("recv", "irecv", "recv_object_list"))
_SENDS = frozenset(("send", "isend", "send_object_list"))
_WAITING = re.compile(r"[\w.\[\]]*\.(?:wait|synchronize)\(|\w*store\w*\.(?:get|wait)\(")
_BACKWARD = " _engine_run_backward"  # of which C++ calls the collectives
_LOADER = "/torch/utils/data/"


def limit_s(place: Place, given_s: float) -> float | None:
    """After how many seconds a wait there is late; None for never.

    Args:
        place: where a thread is.
        given_s: what the user gave for creations, which holds for the first use of a group as well.
    """
    if _BARRIER in place.inside or place.call in _AS_CREATIONS:
        return given_s
    if not place.call or not _CREATIONS.isdisjoint(place.inside):
        return None
    if not place.group:
        return None
    if place.inside and place.group.begun is not None and place.group.begun <= 1:
        return given_s
    return None if place.group.timeout_s is None else _SHARE * place.group.timeout_s


def waiting_call(text: str) -> str:
    """What a line, or the call in progress in it, waits with: `work.wait()`; empty if with nothing."""
    found = _WAITING.search(text)
    return f"{found[0]})" if found else ""


def completed(place: Place, text: str, counts: Sequence[Group]) -> Place:
    """With the call and the group of a wait that shows as the user's own line, `text`."""
    if not place.call and place.stack and place.stack[0].endswith(_BACKWARD):
        place = place._replace(call="the backward pass")
    elif not place.call:
        place = place._replace(call=waiting_call(text))
    if place.call and not place.group and not place.inside and len(counts) == 1:
        place = place._replace(group=counts[0])  # no other has been used
    return place


# -- in words ----------------------------------------------------------------------------------------------


def doing(view: View) -> str:
    """What a rank does: `in barrier on the world [0-3], collective 1 of that group, at train.py:8 main`."""
    place = view.place
    if view.state == STOPPED:
        return "stopped by a signal or a debugger" + (f", {_at(place)}" if place else "")
    if view.state == LOCKED:
        return f"holds Python's global lock, {_at(place)}" if place else "holds Python's global lock"
    if view.state == SILENT:
        return "does not answer, though its process is there" + (f"; last seen {_at(place)}" if place else "")
    return _at(place) if place else "not seen yet"


def _at(place: Place) -> str:
    where = f" at {place.site}" if place.site else ""
    if place.call:
        return f"in {_called(place)}{where}"
    if any(_LOADER in frame for frame in place.stack):
        return f"in the data loader,{where}"
    return f"in user code,{where}" if where else "in torch"


def _called(place: Place) -> str:
    group, peer = place.group, ""
    if place.peer is not None:
        preposition = "to" if place.inside and place.inside[-1] in _SENDS else "from"
        peer = f" {preposition} rank {place.peer}"
    if not group:
        return f"{place.call}{peer}"
    count = "" if group.begun is None else f", collective {group.begun} of that group"
    return f"{place.call}{peer} on {group}{count},"


# -- why ---------------------------------------------------------------------------------------------------


def causes(
    views: Mapping[int, View], ended: Mapping[int, End], silent: Iterable[int], late: Iterable[int]
) -> list[str]:
    """Why `late` ranks wait, the likeliest first; empty where nothing is known that explains it.

    Args:
        views: as in `diagnosis.Job`.
        ended: as there.
        silent: as there.
        late: ranks that wait in a call of torch.distributed.
    """
    waits = {rank: place for rank, view in views.items() if (place := view.place) and place.call}
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in sorted(late):
        group = waits[rank].group
        if group and group.members:
            groups[group.key].append(rank)
    cycle = _cycle(waits, groups)
    if cycle:
        return [cycle]
    found: list[str] = []
    for ranks in groups.values():
        found += _of_group(views, ended, set(silent), waits, ranks[0])
    return found


def _of_group(
    views: Mapping[int, View],
    ended: Mapping[int, End],
    silent: set[int],
    waits: Mapping[int, Place],
    first: int,
) -> Iterator[str]:
    """Why rank `first` waits."""
    place = waits[first]
    group = place.group
    assert group
    what = f"{place.call} on {group}"
    members = set(group.members)
    inside = {rank for rank in members if rank in waits and _key(waits[rank]) == group.key}
    if place.peer is not None:
        yield from _of_pair(views, ended, waits, first)
        return
    differing = _differing(waits, inside)
    if differing:
        yield differing
    absent = members - inside
    gone = sorted(absent & ended.keys())
    if gone:
        yield f"{named(gone)} cannot come to {what}: {ended[gone[0]].how}, at {ended[gone[0]].at}."
    present = sorted(rank for rank in absent - ended.keys() if rank in views)
    by_place: dict[str, list[int]] = defaultdict(list)
    for rank in present:
        by_place[doing(views[rank])].append(rank)
    for where, ranks in sorted(by_place.items(), key=lambda each: each[1]):
        yield f"{named(ranks, 'has', 'have')} not come to {what}: {where}.{_advice(views[ranks[0]])}"
    unheard = sorted(absent - ended.keys() - views.keys())
    if unheard:
        yield f"nothing is heard of {named(unheard)}, needed for {what}."
    if not absent and not differing:
        yield (
            f"all ranks of it are in {what}, so the network or a device does not bring it to an end. "
            "NCCL_DEBUG=INFO says more, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose the way."
        )


def _differing(waits: Mapping[int, Place], inside: set[int]) -> str | None:
    """Ranks of one group that are in different collectives, or at different counts."""
    by_call: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for rank in sorted(inside):
        group = waits[rank].group
        by_call[(_innermost(waits[rank]), group.begun if group else None)].append(rank)
    if len(by_call) < 2:
        return None
    counts = {count for _, count in by_call}
    told = "; ".join(
        f"{named(ranks, 'is', 'are')} in {waits[ranks[0]].call}"
        + ("" if count is None else f", collective {count},")
        + f" at {waits[ranks[0]].site}"
        for (_, count), ranks in sorted(by_call.items(), key=lambda each: each[1])
    )
    group = waits[min(inside)].group
    how = "different collectives" if len(counts) == 1 else "at different collectives"
    return (
        f"ranks of {group} are in {how}: {told}. "
        "All ranks of a group must make the same calls in the same order."
    )


def _of_pair(
    views: Mapping[int, View], ended: Mapping[int, End], waits: Mapping[int, Place], first: int
) -> Iterator[str]:
    """Why a send or a receive waits for its peer."""
    place = waits[first]
    peer = place.peer
    assert peer is not None
    what = f"rank {first} is in {place.call} {'to' if _innermost(place) in _SENDS else 'from'} rank {peer}"
    theirs = waits.get(peer)
    if peer in ended:
        yield f"{what}, which cannot come: {ended[peer].how}, at {ended[peer].at}."
    elif peer not in views:
        yield f"{what}, of which nothing is heard."
    elif theirs and theirs.peer == first and _innermost(theirs) == _innermost(place):
        verb = "receive from" if _innermost(place) in _RECEIVES else "send to"
        yield f"rank {first} and rank {peer} both {verb} each other, and neither does the opposite."
    elif theirs and theirs.peer is not None and theirs.peer != first:
        yield f"{what}, and that is {doing(views[peer])}: one of the two ranks is wrong, or the order."
    else:
        yield f"{what}, and that is {doing(views[peer])}.{_advice(views[peer])}"


def _cycle(waits: Mapping[int, Place], groups: Mapping[tuple[str, str], list[int]]) -> str | None:
    """Groups each of which waits for a rank that waits in the next."""
    follows: dict[tuple[str, str], dict[tuple[str, str], int]] = defaultdict(dict)
    for key, ranks in groups.items():
        group = waits[ranks[0]].group
        for rank in group.members if group else ():
            other = waits.get(rank)
            if other and other.group and other.peer is None and other.group.key != key:
                follows[key].setdefault(other.group.key, rank)
    for start in follows:
        path = _way_back(follows, start)
        if path:
            return _told_cycle(waits, path, follows)
    return None


def _way_back(
    follows: Mapping[tuple[str, str], Mapping[tuple[str, str], int]], start: tuple[str, str]
) -> list[tuple[str, str]]:
    """The shortest way from `start` to itself; empty if there is none."""
    ways, seen = [[start]], {start}
    while ways:
        way = ways.pop(0)
        for following in follows.get(way[-1], ()):
            if following == start:
                return way
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return []


def _told_cycle(
    waits: Mapping[int, Place],
    path: list[tuple[str, str]],
    follows: Mapping[tuple[str, str], Mapping[tuple[str, str], int]],
) -> str:
    steps = []
    for key, following in zip(path, [*path[1:], path[0]]):
        rank = follows[key][following]
        place = waits[rank]
        waiting = next(other for other in waits.values() if other.group and other.group.key == key)
        steps.append(f"{waiting.group} waits for rank {rank}, which is in {_called(place)} at {place.site}")
    return (
        f"ranks wait for each other in different groups: {'; '.join(steps)}. They use these groups in "
        "different orders, or one of them has left out a call."
    )


def _key(place: Place) -> tuple[str, str] | None:
    return place.group.key if place.group else None


def _innermost(place: Place) -> str:
    return place.inside[-1] if place.inside else place.call


def _advice(view: View) -> str:
    if view.state == STOPPED:
        return f" `kill -CONT {view.pid}` on {view.host} lets it go on."
    return ""
