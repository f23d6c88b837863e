# SPDX-License-Identifier: Apache-2.0
"""The explanation: one document of plain values, and the same for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torchcommshim.commands.explain.program import USES, Sequences, Taken
from torchcommshim.commands.explain.traces import Job, Made
from torchcommshim.commands.explain.verdicts import WITHOUT, Played, Verdict, calls_without_colour, causes
from torchcommshim.ranges import bracketed, named
from torchcommshim.repair.creations import COLLECTIVE, DIRECT, LOCAL
from torchcommshim.repair.creations import SPLIT as SPLIT_GROUP
from torchcommshim.repair.policy import INDEPENDENT, NONE, SPLIT_NOW
from torchcommshim.repair.splits import (
    CLOSE,
    CONNECT,
    ERROR,
    HANG,
    NOCOLOR,
    OK,
    SPLIT,
    USE,
    WRONG,
    Create,
    awaited,
)
from torchcommshim.repair.traits import Traits

_CALLS = {COLLECTIVE: "new_group", LOCAL: "local new_group", DIRECT: "direct helper call"}
ENDS = {ERROR: "raises an error", HANG: "hangs", WRONG: "gives wrong sums", OK: "ends well"}
_AT = {
    NOCOLOR: "which has others as members, splitting the world without a colour (perform_nocolor_split)",
    SPLIT: "splitting it from the world",
    CONNECT: "connecting through the store",
    USE: "",
    CLOSE: "closing it",
}
_AT_OF_SPLITS = {NOCOLOR: "which leaves them out (perform_nocolor_split)", SPLIT: ""}
_PARTS = 4  # of a split
_REMEDIES = {
    INDEPENDENT: "made without splitting from the world",
    SPLIT_NOW: "split on their members at once",
    NONE: "made as torch does it",
}
_LINES_AT_MOST, _LINES_OF_OTHERS = 12, 4
_WORST_FIRST = (ERROR, HANG, WRONG, OK)


def document(
    job: Job, taken: Taken, sequences: Sequences, traits: Traits, torch: str, verdicts: Iterable[Verdict]
) -> dict[str, Any]:
    """All that is to be said, as plain values."""
    traced = job.first.world
    return {
        "job": job.name,
        "ranks": job.size,
        "groups": max(map(len, sequences.made)),
        "traced": {name: traced[name] for name in ("torch", "backend", "strategy", "dry_run")},
        "explained": {
            "torch": torch,
            "backend": taken.world.backend,
            "device_id": taken.world.bound,
            "because": taken.note,
        },
        "notes": sequences.notes,
        "defects": [
            {"name": defect.name, "title": defect.title, "upstream": defect.upstream, "groups": count}
            for defect, count in causes(sequences, traits).items()
        ],
        "calls_without_colour": calls_without_colour(sequences, traits),
        "strategies": {
            verdict.strategy: {
                "verdict": verdict.verdict,
                "remedies": dict(verdict.remedies),
                "uses": {played.uses: _played(played) for played in verdict.played},
            }
            for verdict in verdicts
        },
    }


def _played(played: Played) -> dict[str, Any]:
    outcome = played.outcome
    waiting: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for wait in outcome.waiting:
        made = played.origins[wait.rank][wait.index]
        in_creation = isinstance(wait.step, Create)
        group = tuple(made.ranks) if made else ()
        waiting[call_of(made), group, _site(made), in_creation, wait.at, wait.missing].append(wait.rank)
    raised: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, error in outcome.raised.items():
        raised[(error,)].append(rank)
    return {
        "verdict": outcome.verdict,
        "waiting": [
            {
                "ranks": ranks,
                "creation": _number(played, ranks[0]),
                "call": call,
                "group": list(group),
                "site": site,
                "in": "creation" if in_creation else "first use",
                "at": at,
                "missing": list(missing),
            }
            for (call, group, site, in_creation, at, missing), ranks in waiting.items()
        ],
        "raised": [{"ranks": ranks, "error": error} for (error,), ranks in raised.items()],
        "wrong": list(_wrong(played)),
    }


def _number(played: Played, rank: int) -> int | None:
    """The number of the creation that a waiting rank waits in or uses; None for the world."""
    (wait,) = (wait for wait in played.outcome.waiting if wait.rank == rank)
    made = played.origins[rank][wait.index]
    return made.number if made else None


def _wrong(played: Played) -> Iterator[dict[str, Any]]:
    """The groups whose communicators have the wrong ranks."""
    came_out: dict[tuple[tuple[int, ...], ...], list[list[int]]] = defaultdict(list)
    for communicator in played.outcome.wrong_communicators:
        came_out[communicator.meant].append(list(communicator.ranks))
    for meant, ranks in came_out.items():
        one_of_them = ranks[0][0]
        made = next(
            (
                made
                for made in played.origins[one_of_them]
                if made and one_of_them in made.ranks and tuple(sorted(made.ranks)) in meant
            ),
            None,
        )
        yield {
            "creation": made.number if made else None,
            "call": call_of(made),
            "site": _site(made),
            "meant": [list(group) for group in meant],
            "came_out": ranks,
        }


def call_of(made: Made | None) -> str:
    """A creation as people write it; the world where there is none."""
    if made is None:
        return "the world"
    if made.kind == SPLIT_GROUP:
        shown = " ".join(map(bracketed, made.parts[:_PARTS]))
        more = f" and {len(made.parts) - _PARTS} more" if made.parts[_PARTS:] else ""
        return f"split_group of {bracketed(made.parent_ranks)} into {shown}{more}"
    return f"{_CALLS.get(made.kind, made.kind)} {bracketed(made.ranks) if made.ranks else made.name}"


def _site(made: Made | None) -> str:
    return made.site if made else ""


# -- for people ---------------------------------------------------------------------------------------------


def as_text(found: dict[str, Any], chosen: str) -> str:
    """The document for people, with the details of the strategy `chosen`."""
    return "\n".join(
        [*_head(found), "", *_verdict(found, chosen), *_why(found), *_strategies(found), *_tail()]
    )


def _head(found: dict[str, Any]) -> Iterator[str]:
    traced, explained = found["traced"], found["explained"]
    how = ", a dry run" if traced["dry_run"] else ""
    yield (
        f"Traced:    {found['ranks']} ranks, up to {found['groups']} groups a rank, torch {traced['torch']}, "
        f"world of {traced['backend']}{how} (job {found['job']})"
    )
    device = "with" if explained["device_id"] else "without"
    yield f"Explained: torch {explained['torch']}, world of {explained['backend']} {device} device_id"
    if explained["because"]:
        yield f"           ({explained['because']}; see --world)"
    for note in found["notes"]:
        yield f"Note:      {note}"


def _verdict(found: dict[str, Any], chosen: str) -> Iterator[str]:
    strategy = found["strategies"][chosen]
    who = "Without the shim" if chosen == WITHOUT else f"With TORCHCOMMSHIM={chosen}"
    uses = strategy["uses"]
    if strategy["verdict"] == OK:
        yield f"{who} the program {ENDS[OK]}, in each order of first use that was tried."
        return
    yield f"{who} the program {ENDS[strategy['verdict']]}."
    most = _LINES_AT_MOST
    names = sorted(uses, key=lambda name: _WORST_FIRST.index(uses[name]["verdict"]))
    while names:
        alike = [name for name in names if uses[name] == uses[names[0]]]
        when = "; or if ".join(USES[name] for name in alike)
        when = "With each order of first use" if len(alike) == len(uses) else f"If {when}"
        yield f"  {when}: {ENDS[uses[alike[0]]['verdict']]}"
        lines = list(_details(uses[alike[0]]))
        yield from (f"    {line}" for line in lines[:most])
        if lines[most:]:
            yield f"    and {len(lines) - most} more, see --json"
        most = _LINES_OF_OTHERS
        names = [name for name in names if name not in alike]


def _details(played: dict[str, Any]) -> Iterator[str]:
    for entry in played["raised"]:
        yield f"{named(entry['ranks'])}: {entry['error']}"
    for entry in sorted(played["waiting"], key=_by_creation):
        where = f"creation {entry['creation']}, {entry['call']}" if entry["creation"] else entry["call"]
        use = "" if entry["in"] == "creation" else "the first use of "
        site = f" at {entry['site']}" if entry["site"] else ""
        at = _AT_OF_SPLITS.get(entry["at"]) if _is_split(entry) else None
        at = _AT[entry["at"]] if at is None else at
        doing = f", {at}" if at else ""
        who = named(entry["ranks"], "waits", "wait")
        yield f"{who} in {use}{where}{site}{doing}: for {awaited(entry['missing'])}"
    for entry in played["wrong"]:
        site = f" at {entry['site']}" if entry["site"] else ""
        meant = " and ".join(map(bracketed, entry["meant"]))
        came_out = ", ".join(map(bracketed, entry["came_out"]))
        yield (
            f"creation {entry['creation']}, {entry['call']}{site}: {meant} is to be one communicator, and is "
            f"{came_out}"
        )


def _is_split(entry: dict[str, Any]) -> bool:
    return bool(entry["call"].startswith("split_group"))


def _by_creation(entry: dict[str, Any]) -> tuple[bool, int]:
    """Creations first, the earliest before the others."""
    return entry["in"] != "creation", entry["creation"] or 0


def _why(found: dict[str, Any]) -> Iterator[str]:
    counts = found["calls_without_colour"]
    if found["defects"] or any(counts):
        yield ""
    if found["defects"]:
        yield f"Known defects of torch {found['explained']['torch']} that these groups meet"
    for defect in found["defects"]:
        yield f"  {defect['name']}, {_groups(defect['groups'])}: {defect['title']}"
        yield f"      {defect['upstream']}"
    if any(counts):
        alike = "the same on all ranks" if len(set(counts)) == 1 else "not the same"
        yield f"Splits that each rank makes for groups it is not in: {_counted(counts)} ({alike})"


def _counted(counts: list[int]) -> str:
    """A number for each rank; of many ranks, the ranks for each number."""
    if len(counts) <= 16:
        return " ".join(map(str, counts))
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, count in enumerate(counts):
        ranks[count].append(rank)
    shown = [f"{count} on {named(ranks[count])}" for count in list(ranks)[:8]]
    return "; ".join(shown) + (f"; and {len(ranks) - 8} more numbers" if len(ranks) > 8 else "")


def _strategies(found: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "What each strategy makes of it"
    for name, strategy in found["strategies"].items():
        if name == WITHOUT:
            shown, done = "(none)", "as torch does it"
        else:
            parts = [
                f"{_groups(count)} {_REMEDIES[remedy]}"
                for remedy, count in sorted(strategy["remedies"].items())
            ]
            if name == "strip" and found["explained"]["device_id"]:
                parts.insert(0, "device_id dropped")
            shown, done = name, ", ".join(parts)
        yield f"  {shown:7} {ENDS[strategy['verdict']]:17} {done}"


def _tail() -> Iterator[str]:
    yield ""
    yield "A trace holds creations, not collectives. When groups are first used is assumed, in three ways:"
    for name, uses in USES.items():
        yield f"  {name:12} {uses}"


def _groups(count: int) -> str:
    return f"{count} group{'s' if count != 1 else ''}"
