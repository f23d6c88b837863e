# SPDX-License-Identifier: Apache-2.0
"""`torchcommshim where`: where every rank of a job is, asked on any of its hosts.

It finds the watchers of this user's ranks on this host, asks one of each job, and prints what that one's hub
has heard from all.  See docs/hangs.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from torchcommshim.commands.options import positive
from torchcommshim.ranges import cut
from torchcommshim.tell.watch import picture
from torchcommshim.tell.watch.diagnosis import Job
from torchcommshim.tell.watch.door import doors, knock
from torchcommshim.tell.watch.hub import end_of
from torchcommshim.tell.watch.views import View
from torchcommshim.tell.watch.wire import Message

_ANSWER_S = 15.0  # until the next watcher is asked; a hub waits for a few seconds itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `torchcommshim where`."""
    parser.add_argument("job", nargs="?", help="a job of the list, if this user has several on this host")
    parser.add_argument(
        "--rank", type=int, action="append", metavar="N", help="this rank only; may be repeated"
    )
    parser.add_argument(
        "--every", type=positive(float), metavar="S", help="again every S seconds, until Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object for each job, one a line")


def main(chosen: argparse.Namespace) -> int:
    """Run the command; 1 if there is no such job, or nobody answers."""
    if sys.platform != "linux":
        sys.stderr.write("torchcommshim where works on Linux only.\n")
        return 1
    with contextlib.suppress(KeyboardInterrupt):
        while chosen.every:
            _once(chosen)
            sys.stdout.flush()
            time.sleep(chosen.every)
        return _once(chosen)
    return 0


def _once(chosen: argparse.Namespace) -> int:
    found = find_jobs()
    jobs = {name: cards for name, cards in found.items() if name.startswith(chosen.job or "")}
    if found and not jobs:
        names = ", ".join(sorted(found))
        sys.stderr.write(f"No job of this user on this host begins with {chosen.job}: here are {names}.\n")
        return 1
    if not jobs:
        sys.stderr.write(
            "No job of this user is heard of on this host. A rank is heard from when it makes its world, if "
            "torchcommshim is armed in it and TORCHCOMMSHIM_HANG_REPORT_S is not 0.\n"
        )
        return 1
    if len(jobs) > 1 and not chosen.json:
        print("Several jobs; `torchcommshim where JOB` shows one:")
        for name, cards in sorted(jobs.items()):
            ranks = sorted(card["rank"] for card in cards)
            print(f"  {name}  {cards[0]['command']}  ranks {cut(ranks)} of {cards[0]['size']} on this host")
        return 0
    return max([_show(name, cards, chosen) for name, cards in sorted(jobs.items())])


def _show(name: str, cards: list[Message], chosen: argparse.Namespace) -> int:
    began = time.monotonic()
    job = ask(cards)
    if job is None:
        sys.stderr.write(f"Job {name}: no watcher on this host answers.\n")
        return 1
    unknown = [rank for rank in chosen.rank or () if not 0 <= rank < job.size]
    if unknown:
        sys.stderr.write(f"Job {name} has ranks 0 to {job.size - 1}, and no rank {unknown[0]}.\n")
        return 1
    if chosen.rank:
        job = Job(
            job.size,
            {rank: view for rank, view in job.views.items() if rank in chosen.rank},
            {rank: end for rank, end in job.ended.items() if rank in chosen.rank},
            [rank for rank in job.silent if rank in chosen.rank],
            job.apart,
            asked=chosen.rank,
        )
    if chosen.json:
        print(json.dumps({"job": name, "command": cards[0]["command"], **picture.plain(job)}))
        return 0
    print(
        f"job {name}: {cards[0]['command']}, {job.size} ranks, at {time.strftime('%H:%M:%S')} "
        f"({len(job.views)} answers in {time.monotonic() - began:.1f} s)"
    )
    print(picture.picture(job))
    return 0


def find_jobs() -> dict[str, list[Message]]:
    """The cards of this user's ranks on this host, each with the name of its `door`, by job."""
    jobs: dict[str, list[Message]] = {}
    for door in doors():
        with contextlib.suppress(OSError, ValueError, KeyError), knock(door, _ANSWER_S) as connection:
            card = next(_asked(connection, {"who": True}))
            jobs.setdefault(card["job"], []).append({**card, "door": door})
    return jobs


def ask(cards: list[Message]) -> Job | None:
    """What the ranks of a job answer; None if no watcher of `cards` does."""
    for card in cards:
        views: dict[int, View] = {}
        with contextlib.suppress(OSError, ValueError), knock(card["door"], _ANSWER_S) as connection:
            for message in _asked(connection, {"where": True}):
                if "view" in message:
                    view = View.of(message["view"])
                    views[view.rank] = view
                elif "done" in message:
                    done = message["done"]
                    ended = {int(rank): end_of(end) for rank, end in done["ended"].items()}
                    ended = {rank: end for rank, end in ended.items() if rank not in views}
                    return Job(card["size"], views, ended, done["silent"], done["apart"])
    return None


def _asked(connection: socket.socket, question: Message) -> Iterator[Message]:
    """The messages that come upon a question."""
    connection.sendall(json.dumps(question).encode() + b"\n")
    with connection.makefile("rb") as lines:
        for line in lines:
            message: Any = json.loads(line)
            yield message
