# SPDX-License-Identifier: Apache-2.0
"""What the hang report costs a healthy job, and how long one takes in a large one; needs no torch.

    python benchmarks/hang_report.py                  # the table of docs/hangs.md, a minute
    python benchmarks/hang_report.py --ranks 512      # the hub of so many ranks, in place of 4,096

Measures the torchcommshim that this Python imports: the installed one, or that on PYTHONPATH.
Everything that runs is what runs in a job, but for the watchers of the other ranks, for which this process
stands in: it connects to the one real watcher once for each, and answers its question.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchcommshim.ranges import shortened
from torchcommshim.repair.calls import Call
from torchcommshim.repair.traits import Traits
from torchcommshim.settings import Settings
from torchcommshim.tell.report import Report
from torchcommshim.tell.watch import session
from torchcommshim.tell.watch.observer import Watch
from torchcommshim.tell.watch.views import Seen, View
from torchcommshim.tell.watch.wire import Line

SIZES = (8, 64, 512, 4096)
CREATIONS = 2000
WORLDS = 10
LIMIT_S = 2.0
STATE: Any = SimpleNamespace(world=SimpleNamespace(bound_device_id=None))
SITE = "train.py:1 main"


class Store:
    """A world's store, in this process."""

    host, port = "127.0.0.1", 1

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def add(self, key: str, amount: int) -> int:
        self._values[key] = self._values.get(key, 0) + amount
        return int(self._values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return str(self._values.setdefault(key, desired)).encode()


def call(number: int, ranks: range, size: int) -> Call:
    """A creation of rank 0."""
    kind = "collective" if number else "world"
    return Call(number, kind, tuple(ranks), "gloo", str(number), 0, size, True, SITE)


def watch(size: int, store: Store, limit_s: float = 120.0) -> Watch:
    """The observer of rank 0 of a new world, which has begun."""
    watch = Watch(Report(Settings(hang_report_s=limit_s), Traits(), "2.4.1"), STATE)
    world = call(0, range(size), size)
    watch.begin(world, store)
    watch.end(world, None)
    return watch


def creation_us(size: int) -> float:
    """Processor time of what the rank does around a creation whose group is the whole world."""
    watched, made = watch(size, Store()), call(1, range(size), size)
    times = []
    for _ in range(CREATIONS):
        began = time.thread_time_ns()
        watched.begin(made, None)
        watched.end(made, None)
        times.append((time.thread_time_ns() - began) / 1e3)
    return statistics.median(times)


def world_ms() -> tuple[float, float]:
    """How long a rank takes for its watcher's start, and for its end: medians."""
    starts, ends = [], []
    for _ in range(WORLDS):
        store, began = Store(), time.perf_counter()
        watched = watch(8, store)
        starts.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.5)  # the watcher is up
        began = time.perf_counter()
        del watched
        ends.append((time.perf_counter() - began) * 1e3)
    return statistics.median(starts), statistics.median(ends)


def watcher_of(watched: Watch) -> str:
    """The process id of the watcher, once it watches."""
    assert watched._session
    starter = watched._session._starter
    starter.wait()  # the watcher's own process is forked from it
    time.sleep(1)
    (pid,) = (
        folder.name
        for folder in Path("/proc").glob("[0-9]*")
        if b"watch.watcher" in _read(folder / "cmdline") and _session_of(folder) == starter.pid
    )
    return pid


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def _session_of(folder: Path) -> int:
    return int(_read(folder / "stat").rpartition(b")")[2].split()[3])


def processor_ms(pid: str) -> float:
    """Processor time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") * 1e3


def memory_mb(pid: str) -> tuple[float, float]:
    """A process's memory: its own, and with what it shares."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    kilobytes = {name.rstrip(":"): int(value) for name, value, *_ in lines}
    own = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return own / 1e3, kilobytes["Rss"] / 1e3


@contextmanager
def stderr_to_file() -> Iterator[Path]:
    """What watchers say goes there."""
    with tempfile.NamedTemporaryFile("r") as file, open(file.name, "a") as stream:
        before, session._stderr = session._stderr, stream.fileno
        try:
            yield Path(file.name)
        finally:
            session._stderr = before


def report_s(size: int) -> tuple[float, float]:
    """A job of `size` ranks in which one is late: seconds from the hub's question to its report, and its MB.

    Ranks make groups of 8; in all but one they wait.
    """
    orders: dict[str, Any] = {}

    class Kept(Store):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            orders["hub"] = desired
            return super().compare_set(key, expected, desired)

    with stderr_to_file() as said, selectors.DefaultSelector() as selector:
        watched = watch(size, Kept(), LIMIT_S)
        pid = watcher_of(watched)
        asked: list[float] = []
        lines = _stand_for_the_others(size, orders["hub"], selector, asked)
        watched.begin(call(1, range(8), size), None)
        limit = time.monotonic() + 60
        while "hang report" not in said.read_text():
            if time.monotonic() > limit:
                raise SystemExit(f"no report in time; {len(asked)} of {size} were asked")
            _serve(selector, 0.01)
        took = time.monotonic() - asked[0]
        text = said.read_text()
        assert f"of {size} ranks wait" in text, text
        peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line)
        for line in lines:
            line.close()
        return took, int(peak.split()[1]) / 1e3


def _stand_for_the_others(size: int, hub: str, selector: Any, asked: list[float]) -> list[Line]:
    token, port = json.loads(hub)["token"], json.loads(hub)["port"]
    lines = []

    def connect(rank: int) -> Line:
        group = shortened(range(rank // 8 * 8, rank // 8 * 8 + 8))
        seen = Seen(1, "collective", group, "gloo", "1", SITE, LIMIT_S, None if rank != size - 1 else 1.0)
        view = View(rank, f"host{rank // 8}", 1, [seen], False, [], [], "", "2.4.1", "auto")

        def heard(line: Line, message: dict[str, Any]) -> None:
            if "ask" in message:
                asked.append(time.monotonic())
                line.send({"view": view})

        line = Line.to(selector, "127.0.0.1", port, heard, lambda line: None)
        process = {"host": f"host{rank // 8}", "pid": rank, "program": "train.py", "job": {}}
        line.send({"token": token, "rank": rank, "size": size, **process, "addresses": [], "port": 1})
        return line

    for rank in range(1, size):
        lines.append(connect(rank))
        while rank % 256 == 0 and _serve(selector, 0.01):
            pass
    end = time.monotonic() + 3
    while time.monotonic() < end:  # all are welcome
        _serve(selector, 0.05)
    return lines


def _serve(selector: Any, seconds: float) -> bool:
    """Hand on what comes within so long: was there anything?"""
    ready = selector.select(seconds)
    for key, events in ready:
        key.data(events)
    return bool(ready)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4096, help="connected to the hub")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    creations = ", ".join(f"{creation_us(size):.0f} for {size:,}" for size in SIZES)
    start, end = world_ms()
    watched = watch(8, Store())
    pid = watcher_of(watched)
    own, whole = memory_mb(pid)
    took, peak = report_s(args.ranks)
    print("| what | cost |\n| --- | --- |")
    print(f"| each creation, in the rank, by the number of ranks in the group | µs: {creations} |")
    print(f"| the world, in the rank | {start:.1f} ms, to start the watcher; two store operations |")
    print(f"| the end of the process, in the rank, until the watcher has ended | {end:.1f} ms |")
    print(f"| a watcher's start | {processor_ms(pid):.0f} ms of processor time |")
    print(f"| a watcher | {own:.1f} MB of memory of its own; {whole:.1f} MB with what it shares |")
    print(
        f"| the hub, with {args.ranks:,} ranks connected | {peak:.0f} MB at its highest; {took:.1f} s from "
        "its question to the printed report, all answers included |"
    )


if __name__ == "__main__":
    main()
