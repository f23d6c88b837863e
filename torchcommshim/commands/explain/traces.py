# SPDX-License-Identifier: Apache-2.0
"""Reads the files that `TORCHCOMMSHIM_TRACE` leaves, and sorts them into jobs."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchcommshim.ranges import named
from torchcommshim.repair.creations import COLLECTIVE, SPLIT
from torchcommshim.tell.trace import FORMAT


class BadTraces(Exception):
    """The traces cannot be explained; the message says which file, and why."""


@dataclass
class Made:
    """One creation on one rank.

    Attributes:
        number, kind, ranks, backend, name, site: as in `calls.Call`.
        returned: the traced program came back from it.
        error: what it raised; empty if nothing.
        assumed: it is in no trace: it stands for what the rank is taken to have gone on with.
        parent, parent_ranks, parts, by_mesh: of a split, as in `calls.Split`.
        by_all: all ranks of the world make it.
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    backend: str
    name: str
    site: str
    returned: bool = False
    error: str = ""
    assumed: bool = False
    parent: str = ""
    parent_ranks: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    by_mesh: bool = False
    by_all: bool = False

    def on(self, rank: int) -> tuple[int, ...]:
        """The ranks of the group as `rank` makes it: of a split those of its own part."""
        if self.kind != SPLIT:
            return self.ranks
        return next((part for part in self.parts if rank in part), ())


@dataclass
class RankTrace:
    """One world, as one rank saw it.

    Attributes:
        file: where it is from.
        world: the `world` record.
        bound: the `bound` record; empty if the world has made no group.
        creations: in order, without the world's own.
        has_world: the world's own creation returned, or is not in the trace.
        cut: the file ends in the middle of a line.
    """

    file: Path
    world: dict[str, Any]
    bound: dict[str, Any] = field(default_factory=dict)
    creations: list[Made] = field(default_factory=list)
    has_world: bool = True
    cut: bool = False

    @property
    def rank(self) -> int:
        return int(self.world["rank"])

    @property
    def stuck(self) -> Made | None:
        """The last creation, if the program did not come back from it."""
        last = self.creations[-1] if self.creations else None
        return last if last and not last.returned and not last.error else None


@dataclass
class Job:
    """One world of one job.

    Attributes:
        name: the job's, with the world's place among the job's worlds after a dot, from the second on.
        ranks: by rank; not all need be there.
    """

    name: str
    ranks: dict[int, RankTrace] = field(default_factory=dict)

    @property
    def first(self) -> RankTrace:
        """The lowest rank that is there."""
        return self.ranks[min(self.ranks)]

    @property
    def size(self) -> int:
        return int(self.first.world["world_size"])

    @property
    def started(self) -> float:
        """When its first rank began; seconds since the epoch."""
        return min(float(trace.world["started"]) for trace in self.ranks.values())

    @property
    def creations(self) -> int:
        """The most that a rank has made."""
        return max(len(trace.creations) for trace in self.ranks.values())

    def behind(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that made fewer of the groups that all ranks make than others did."""
        made = {rank: sum(each.by_all for each in trace.creations) for rank, trace in self.ranks.items()}
        return sorted(rank for rank in ranks if rank in made and made[rank] < max(made.values()))

    def drop(self, ranks: Iterable[int]) -> None:
        """Take the traces of `ranks` for missing."""
        for rank in ranks:
            del self.ranks[rank]

    @property
    def missing(self) -> list[int]:
        """The ranks without a trace."""
        return sorted(set(range(self.size)) - set(self.ranks))


def read(folder: Path) -> list[Job]:
    """The jobs whose traces lie in `folder`, oldest first; only those that made a group, if any did.

    Raises:
        BadTraces: there is none, or a file is not what a trace is.
    """
    if not folder.is_dir():
        raise BadTraces(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    files = sorted(folder.glob("rank*.jsonl"))
    if not files:
        raise BadTraces(
            f"{folder}: no traces (rank*.jsonl); a run with TORCHCOMMSHIM_TRACE={folder} makes some"
        )
    jobs: dict[str, Job] = {}
    for file in files:
        worlds: dict[str, int] = defaultdict(int)
        for trace in _worlds(file):
            job = trace.world["job"]
            worlds[job] += 1
            name = job if worlds[job] == 1 else f"{job}.{worlds[job]}"
            _add(jobs.setdefault(name, Job(name)), trace)
    if not jobs:
        raise BadTraces(f"{folder}: its traces are empty")
    ordered = sorted(jobs.values(), key=lambda job: job.started)
    return [job for job in ordered if job.creations] or ordered


def _add(job: Job, trace: RankTrace) -> None:
    other = job.ranks.setdefault(trace.rank, trace)
    if other is not trace:
        raise BadTraces(
            f"rank {trace.rank} of job {job.name!r} was traced twice, in {other.file.name} and in "
            f"{trace.file.name}; remove the files of one run, and give each run a folder of its own"
        )
    for name in ("world_size", "torch", "backend", "strategy"):
        if trace.world[name] != job.first.world[name]:
            raise BadTraces(
                f"{trace.file.name} and {job.first.file.name} are of one job {job.name!r}, but differ in "
                f"{name}: {trace.world[name]!r} and {job.first.world[name]!r}; are they of different runs?"
            )
    if not 0 <= trace.rank < job.size:
        raise BadTraces(f"{trace.file.name}: rank {trace.rank} in a world of {job.size}")


def _worlds(file: Path) -> Iterator[RankTrace]:
    """The worlds that one process was in, one after the other."""
    trace: RankTrace | None = None
    for where, record in _records(file):
        try:
            kind = record["record"]
            if kind == "world":
                if trace:
                    yield trace
                _check_world(where, record)
                trace = RankTrace(file, record)
            elif trace is None:
                raise BadTraces(f"{where}: no world comes before it")
            elif kind == "cut":
                trace.cut = True
            elif kind == "bound":
                trace.bound = {"bound": bool(record["bound"]), "splits": str(record["splits"])}
            elif kind == "creation":
                _begin(trace, record)
            elif kind == "end":
                _end(trace, record)
            else:
                raise BadTraces(f"{where}: a record of unknown kind {kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise BadTraces(f"{where}: not a record of a trace: {error!r}") from None
    if trace:
        yield trace


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each record, and where it is; a last line that is cut short becomes a record of kind `cut`."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise BadTraces(f"{file}: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        where = f"{file.name}, line {number}"
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError
        except ValueError:
            if line.endswith(b"\n") or number == 1:
                raise BadTraces(f"{where}: not JSON, so not a trace, or a damaged one") from None
            record = {"record": "cut"}
        yield where, record


_WORLD = {
    **dict.fromkeys(("torch", "strategy", "job", "backend"), str),
    **dict.fromkeys(("rank", "world_size"), int),
    **dict.fromkeys(("late", "dry_run"), bool),
    "started": float,
    "traits": dict,
}


def _check_world(where: str, record: dict[str, Any]) -> None:
    if record["format"] != FORMAT:
        raise BadTraces(
            f"{where}: in format {record['format']!r}, of torchcommshim {record.get('torchcommshim')}; "
            f"this one reads format {FORMAT}"
        )
    for name, kind in _WORLD.items():
        if not isinstance(record[name], kind):
            raise BadTraces(f"{where}: {name} is {record[name]!r}")


def _begin(trace: RankTrace, record: dict[str, Any]) -> None:
    made = Made(
        number=int(record["number"]),
        kind=str(record["kind"]),
        ranks=tuple(map(int, record["ranks"])),
        backend=str(record["backend"]),
        name=str(record["name"]),
        site=str(record["site"]),
    )
    made.by_all = made.kind == COLLECTIVE
    if made.kind == SPLIT:
        split = record["split"]
        made.parent, made.by_mesh = str(split["parent"]), bool(split["by_mesh"])
        made.parent_ranks = tuple(map(int, split["ranks"]))
        made.parts = tuple(tuple(map(int, part)) for part in split["parts"])
        made.by_all = len(made.parent_ranks) == trace.world["world_size"]
    if made.number == 0:
        trace.has_world = False
    else:
        trace.creations.append(made)


def _end(trace: RankTrace, record: dict[str, Any]) -> None:
    error = str(record.get("error", ""))
    if record["number"] == 0:
        trace.has_world = not error
        return
    # Creations nest, so what ends need not be what began last.
    made = next((made for made in reversed(trace.creations) if made.number == record["number"]), None)
    if made is None:
        raise ValueError(f"creation {record['number']} has not begun")
    made.returned, made.error = not error, error


def choose(jobs: list[Job], name: str | None) -> Job:
    """The job to explain.

    Raises:
        BadTraces: there is none of that name; or none is named, and there are several.
    """
    if name is not None:
        for job in jobs:
            if job.name == name:
                return job
        raise BadTraces(f"no job {name!r} in these traces; there are: {', '.join(job.name for job in jobs)}")
    if len(jobs) > 1:
        lines = [f"  --job {job.name}: {_described(job)}" for job in jobs]
        raise BadTraces("\n".join(["the traces are of different jobs or worlds; choose one:", *lines]))
    return jobs[0]


def _described(job: Job) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started))
    return f"{moment}, {len(job.ranks)} of {job.size} ranks, {job.creations} groups made"


def check_complete(job: Job, ended: Iterable[int] = ()) -> None:
    """Raise BadTraces if a rank's trace is missing, or cut short, or ends early with a rank of `ended`."""
    advice = "; --partial explains what there is, and says what it assumes"
    if job.missing:
        raise BadTraces(
            f"job {job.name!r} has {job.size} ranks, and no trace of {named(job.missing)}{advice}"
        )
    behind = job.behind(ended)
    if behind:
        raise BadTraces(
            f"{named(behind)} failed, or came to --quiet or --limit, before making all the groups that "
            f"others made{advice}"
        )
    cut = [trace.file.name for trace in job.ranks.values() if trace.cut]
    if cut:
        raise BadTraces(f"cut short in the middle of the last line: {', '.join(sorted(cut))}{advice}")
