# SPDX-License-Identifier: Apache-2.0
"""What knowing where every rank is costs: the sampler's looks, and the time from question to picture.

A look is measured in a process that poses as one rank with so many groups, while its main thread waits in
`all_reduce` beneath 20 frames, and while it moves; as a share of a core it is divided by the period.  The
question is asked as `torchcommshim where` asks it, of one real watcher that is the hub; this process stands
in for the watchers of the other ranks, connected to it once for each.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from selectors import DefaultSelector
from types import SimpleNamespace
from typing import Any

from hang_report import SITE, Store, _serve, stderr_to_file, watch, watcher_of
from sampling import progress

from torchcommshim.commands import where
from torchcommshim.ranges import shortened
from torchcommshim.tell.watch import picture
from torchcommshim.tell.watch.places import Group, Place
from torchcommshim.tell.watch.record import Record
from torchcommshim.tell.watch.sampler import PERIOD_S, Sampler
from torchcommshim.tell.watch.views import View
from torchcommshim.tell.watch.wire import Line

GROUPS = (8, 64, 512, 4096)
RANKS = (8, 4096)
LOOKS = 500
DEPTH = 20
CODE = """
def all_reduce(tensor, group=None):
    lock.acquire()

def step(depth):
    return step(depth - 1) if depth else all_reduce(None)
"""


def measure(quick: bool) -> dict[str, Any]:
    """The result of the part `waits`."""
    looks = {}
    for groups in GROUPS[:2] if quick else GROUPS:
        progress(f"waits: a look at a rank with {groups} groups")
        looks[str(groups)] = look_us(groups, 50 if quick else LOOKS)
    answers = {}
    for size in (RANKS[0], 64) if quick else RANKS:
        progress(f"waits: where are {size} ranks?")
        answers[str(size)] = where_s(size)
    return {"period_s": PERIOD_S, "looks_us": looks, "where_s": answers}


def look_us(groups: int, looks: int) -> dict[str, float]:
    """Processor time of one look, medians: at a thread that moves, that waits, and when somebody asks."""
    c10d = _posing(groups)
    bell, theirs = socket.socketpair()
    sampler = Sampler(Record(8), c10d, bell, PERIOD_S, print)
    lock, found = threading.Lock(), {}
    lock.acquire()
    inside: dict[str, Any] = {"__name__": "torch.distributed.distributed_c10d", "lock": lock}
    exec(compile(CODE, "/torch/distributed/distributed_c10d.py", "exec"), inside)  # noqa: S102

    def look() -> None:
        time.sleep(0.1)
        for name, moves, asked in (("moves", True, False), ("waits", False, False), ("asked", False, True)):
            times = []
            for _ in range(looks):
                if moves:
                    sampler._seen.clear()
                began = time.thread_time_ns()
                sampler.look(asked=asked)
                times.append((time.thread_time_ns() - began) / 1e3)
            found[name] = statistics.median(times)
        lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    inside["step"](DEPTH)
    thread.join()
    bell.close()
    theirs.close()
    return found


def _posing(groups: int) -> Any:
    """torch.distributed with so many groups, as far as a sampler looks."""

    class Posing:
        group_desc = "undefined"

        def __init__(self, number: int) -> None:
            self.group_name = str(number)

        def _get_sequence_number_for_group(self) -> int:
            return 7

    made = [Posing(number) for number in range(groups)]
    ranks = {group: {rank: rank for rank in range(8)} for group in made}
    return SimpleNamespace(
        _world=SimpleNamespace(default_pg=made[0], pg_map=dict.fromkeys(made, ()), pg_group_ranks=ranks)
    )


def where_s(size: int) -> dict[str, float]:
    """Seconds from the question to the picture of a job of `size` ranks, and to all answers alone.

    The ranks wait in groups of 8, all but one.
    """
    hub: dict[str, Any] = {}

    class Kept(Store):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            stored = super().compare_set(key, expected, desired)
            hub.update(json.loads(stored))
            return stored

    with stderr_to_file(), DefaultSelector() as selector:
        watched = watch(size, Kept())
        watcher_of(watched)
        lines = [_stand_in(rank, size, hub, selector) for rank in range(1, size)]
        end = time.monotonic() + 3
        while time.monotonic() < end:
            _serve(selector, 0.02)
        took: dict[str, float] = {}
        over = threading.Event()

        def ask() -> None:
            try:
                cards = next(each for each in where.find_jobs().values() if each[0]["pid"] == os.getpid())
                began = time.monotonic()
                job = where.ask(cards)
                took["answers"] = time.monotonic() - began
                assert job is not None
                assert len(job.views) == size, f"{len(job.views)} of {size} answers"
                text = picture.picture(job)
                took["picture"] = time.monotonic() - began
                assert f"rank {size - 1} (" in text
            finally:
                over.set()

        asking = threading.Thread(target=ask)
        asking.start()
        while not over.is_set():
            _serve(selector, 0.005)
        asking.join()
        for line in lines:
            line.close()
    return took


def _stand_in(rank: int, size: int, hub: dict[str, Any], selector: Any) -> Line:
    """The watcher of another rank."""
    first = rank // 8 * 8
    group = Group(str(first), "undefined", shortened(range(first, first + 8)), 7, 1800.0)
    stack = [f"/site-packages/torch/distributed/file{n}.py:{100 + n} function{n}" for n in range(12)]
    waits = Place(30.0, "", "all_reduce", ["all_reduce"], group, None, SITE, (), [*stack, SITE])
    elsewhere = Place(30.0, site=SITE, stack=["train.py:2 load"])
    place = waits if rank != size - 1 else elsewhere
    host = f"host{rank // 8}"
    view = View(rank, host, 1000 + rank, [], places=[place])

    def heard(line: Line, message: dict[str, Any]) -> None:
        if "show" in message:
            line.send({"shown": message["show"], "view": view})

    line = Line.to(selector, "127.0.0.1", hub["port"], heard, lambda line: None)
    hello = {"token": hub["token"], "rank": rank, "size": size, "host": host, "pid": 1000 + rank}
    line.send({**hello, "program": "train.py", "job": {}, "addresses": [], "port": 1})
    while rank % 256 == 0 and _serve(selector, 0.01):
        pass
    return line


if __name__ == "__main__":
    print(json.dumps(measure(quick=False), indent=1))
