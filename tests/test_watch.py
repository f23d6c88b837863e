# SPDX-License-Identifier: Apache-2.0
"""The hang report without torch: the record, the watchers of a job in one process, the text."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import torchcommshim
from torchcommshim.ranges import expanded, shortened
from torchcommshim.repair.calls import Call
from torchcommshim.repair.rendezvous import Rendezvous, of_store, rendezvous
from torchcommshim.repair.traits import Traits
from torchcommshim.settings import Settings
from torchcommshim.tell import members
from torchcommshim.tell.report import Report
from torchcommshim.tell.watch import hubs, session, stacks
from torchcommshim.tell.watch.diagnosis import Job, alone, report
from torchcommshim.tell.watch.observer import Watch
from torchcommshim.tell.watch.record import _SAMPLE, Reader, Record, Struck
from torchcommshim.tell.watch.session import Session
from torchcommshim.tell.watch.views import (
    EXITED,
    GONE,
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

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(sys.platform != "linux", reason="the hang report works on Linux only"),
]

DEADLINE_S = 30.0


def call(number=1, ranks=(0, 1), *, kind="collective", backend="gloo", rank=0, size=4, shared=True):
    return Call(number, kind, ranks, backend, str(number), rank, size, shared, f"train.py:{number} main")


def world(rank=0, size=4, **keywords):
    return call(0, tuple(range(size)), kind="world", rank=rank, size=size, **keywords)


class Store:
    """A world's store in this process, which counts what it is asked."""

    host, port = "127.0.0.1", 1

    def __init__(self):
        self.values, self.operations = {}, 0

    def add(self, key, amount):
        self.operations += 1
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def compare_set(self, key, expected, desired):
        self.operations += 1
        return self.values.setdefault(key, desired).encode()

    def check(self, keys):
        self.operations += 1
        return all(key in self.values for key in keys)

    def get(self, key):
        self.operations += 1
        return self.values[key].encode()


def session_of(rank, size, store, current):
    """The session of a rank that has reached the store."""
    session = Session(of_store(store, rank, size), current)
    session.join(store)
    session.pass_on()
    return session


STATE = SimpleNamespace(world=SimpleNamespace(bound_device_id=None))


def reporting(limit_s=1.0, strategy="auto"):
    return Report(Settings(strategy=strategy, hang_report_s=limit_s), Traits(), "2.4.1")


def until(condition):
    """Wait until `condition()` holds, and return it."""
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return found


@pytest.fixture
def said(tmp_path, monkeypatch):
    """A function that gives what watchers that are started in the test have said so far."""
    file = tmp_path / "stderr"
    with file.open("a") as stream:
        monkeypatch.setattr(session, "_stderr", stream.fileno)
        yield file.read_text


def watchers():
    """The process ids of this process's watchers, in the order of their start, once all are on their own."""
    while any(_is_starting(int(pid)) for pid in _read("self", f"task/{os.getpid()}/children").split()):
        time.sleep(0.01)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        words = _read(folder.name, "cmdline").split("\0")
        if (
            str(os.getpid()) in words
            and any("watch.watcher" in word for word in words)
            and is_there(folder.name)
        ):
            session = int(_read(folder.name, "stat").rpartition(")")[2].split()[3])  # of who has started it
            found.append((session, int(folder.name)))
    return [pid for _, pid in sorted(found)]


def _is_starting(child):
    """It is to start a watcher: it has no command line yet, or that one."""
    words = _read(child, "cmdline")
    return is_there(child) and (not words or "watch.watcher" in words)


def _read(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def is_there(pid):
    return _read(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


class TestRecord:
    def record(self, size=4):
        record = Record(size)
        return record, Reader(os.dup(record.descriptor), size)

    def test_a_creation_begins_and_ends(self):
        """A reader sees a creation from its begin on, and that it has ended."""
        record, reader = self.record()
        made = call()
        record.begin(made)
        (begun,) = reader.entries()
        record.end(made)
        (ended,) = reader.entries()

        assert begun[:6] == (1, "collective", (0, 1), "gloo", "1", "train.py:1 main")
        assert begun.ended == 0
        assert ended == begun._replace(ended=ended.ended)
        assert ended.started <= ended.ended <= time.monotonic()

    def test_the_last_few_are_kept(self):
        """Of many creations the last eight are kept, in order."""
        record, reader = self.record()
        for number in range(100):
            made = call(number)
            record.begin(made)
            record.end(made)

        assert [entry.number for entry in reader.entries()] == list(range(92, 100))

    def test_one_that_has_not_ended_is_kept(self):
        """However many creations other threads make, or are nested in it."""
        record, reader = self.record()
        outer = call(7)
        record.begin(outer)
        for number in range(100):
            inner = call(number)
            record.begin(inner)
            record.end(inner)

        assert [entry.number for entry in reader.entries() if not entry.ended] == [7]

    def test_a_slot_that_is_used_again(self):
        """What is under way is not taken for ended because the call before it in its slot has."""
        record, reader = self.record()
        others = [call(number) for number in range(7)]
        for each in others:
            record.begin(each)
        before, after = call(8), call(9)
        record.begin(before)
        record.end(before)
        record.begin(after)

        assert [entry.number for entry in reader.entries() if not entry.ended] == [*range(7), 9]

    def test_more_that_have_not_ended_than_places(self):
        """The first eight are kept; later ones go unrecorded, and their end does no harm."""
        record, reader = self.record()
        made = [call(number) for number in range(12)]
        for each in made:
            record.begin(each)
        for each in made[4:]:
            record.end(each)

        assert [entry.number for entry in reader.entries() if not entry.ended] == [0, 1, 2, 3]

    def test_thousands_of_ranks(self):
        """A group of every rank of a large world is recorded whole."""
        record, reader = self.record(size=4096)
        record.begin(call(ranks=tuple(range(4096)), size=4096))

        assert reader.entries()[0].ranks == tuple(range(4096))

    def test_half_written(self):
        """What does not fit its checksum is not taken for a creation."""
        record, reader = self.record()
        record.begin(call())
        record._memory[40] ^= 1

        assert reader.entries() == []

    def test_read_while_written(self):
        """A reader meets no mixture of two creations, and no creation that is over as one that is not."""
        record, reader = self.record()
        made = [call(number, tuple(range(number % 50))) for number in range(2000)]

        def write():
            for each in made:
                record.begin(each)
                record.end(each)

        writer = threading.Thread(target=write)
        writer.start()
        seen = []
        while writer.is_alive():
            seen += reader.entries()
        writer.join()

        over, reopened = set(), set()
        for entry in seen:  # in the order in which they were read
            if entry.ended:
                over.add(entry.number)
            elif entry.number in over:
                reopened.add(entry.number)
        assert {(entry.number, entry.ranks) for entry in seen} <= {(each.number, each.ranks) for each in made}
        assert reopened == set()
        assert [entry.number for entry in reader.entries() if entry.ended] == list(range(1992, 2000))

    def test_facts(self):
        """What strikes creations is read as it was written."""
        record, reader = self.record()
        struck = [Struck(3, "train.py:3 main", "late-members", "a title", "a link")]
        unknown = reader.facts()
        record.facts(True, struck)

        assert unknown == (False, [])
        assert reader.facts() == (True, struck)


class TestRendezvous:
    ENVIRONMENT = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}  # noqa: RUF012

    def read(self, environment=ENVIRONMENT, **arguments):
        given = {"init_method": None, "rank": -1, "world_size": -1, "store": None, **arguments}
        return rendezvous(given, environment)

    def test_environment(self):
        """Without arguments, and with env://, the variables say who is where; rank 0 serves the store."""
        expected = Rendezvous("env://", 1, 4, "node-a", 29500)

        assert [self.read(), self.read(init_method="env://")] == [expected] * 2
        assert not expected.serves
        assert self.read({**self.ENVIRONMENT, "RANK": "0"}).serves

    def test_agent(self):
        """Under torchrun an agent serves the store, and no rank does."""
        found = self.read({**self.ENVIRONMENT, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})

        assert (found.by_agent, found.serves) == (True, False)

    def test_arguments(self):
        """Arguments come before the URL, and that before the environment."""
        url = "env://?rank=2"

        assert self.read(init_method=url) == Rendezvous("env://", 2, 4, "node-a", 29500)
        assert self.read(rank=3, world_size=8) == Rendezvous("env://", 3, 8, "node-a", 29500)

    def test_urls(self):
        """tcp:// names the store's host; other schemes have no store that ranks connect to."""
        who = {"rank": 0, "world_size": 2}

        assert self.read({}, init_method="tcp://[::1]:7", **who) == Rendezvous("tcp://", 0, 2, "::1", 7)
        assert self.read({}, init_method="tcp://a:7?rank=0&world_size=2").serves
        assert self.read({}, init_method="file:///tmp/x", **who) == Rendezvous("file://", 0, 2)

    def test_store(self):
        """A store that the caller has made is there already: nobody waits in its constructor."""
        store = SimpleNamespace(underlying_store=SimpleNamespace(host="node-b", port=7))
        found = self.read({}, store=store, rank=0, world_size=2)

        assert found == Rendezvous("store", 0, 2, "node-b", 7)
        assert not found.serves

    @pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
    def test_what_torch_refuses(self, name):
        """What is missing or makes no sense is for torch to complain about."""
        missing = {key: value for key, value in self.ENVIRONMENT.items() if key != name}

        assert self.read(missing) is None
        assert name == "MASTER_ADDR" or self.read({**self.ENVIRONMENT, name: "x"}) is None
        assert name != "RANK" or self.read({**self.ENVIRONMENT, name: "4"}) is None


class TestHubs:
    def come(self, store, *ranks):
        """Ranks `(size, name)` come to a store; the names of the hubs that each finds: its own, another."""
        found = [hubs.find(store, size, {"name": name}) for size, name in ranks]
        return [(each.hub["name"], each.other and each.other["name"]) for each in found]

    def test_worlds_one_after_the_other(self):
        """The first of each finds its own world's hub, and that of the world before it."""
        assert self.come(Store(), *((2, name) for name in "abcd")) == [
            ("a", None),
            ("a", None),
            ("c", "a"),
            ("c", None),
        ]

    def test_worlds_of_two_sizes(self):
        """Their ranks come in any order: each finds its own world's hub, and one first the other world's."""
        assert self.come(Store(), (4, "a"), (2, "x"), (4, "b"), (2, "y"), (4, "c"), (4, "d")) == [
            ("a", None),
            ("x", "a"),
            ("a", None),
            ("x", None),
            ("a", None),
            ("a", None),
        ]

    def test_look(self):
        """Who only looks finds those that have come last, and is not counted."""
        store = Store()
        before = hubs.look(store)
        self.come(store, (2, "a"), (2, "b"), (2, "c"))

        assert (before, hubs.look(store)["name"]) == (None, "c")
        assert self.come(store, (2, "d")) == [("c", None)]


class TestWatch:
    def test_store_operations(self):
        """A healthy job costs two store operations a rank, one key and one counter, however much it makes."""
        store, size = Store(), 3
        ranks = [Watch(reporting(), STATE) for _ in range(size)]
        for rank, watch in enumerate(ranks):
            watch.begin(world(rank, size), store)
        for watch in ranks:
            for number in range(1, 1001):
                made = call(number)
                watch.begin(made, store)
                watch.end(made, None)

        assert store.operations == 2 * size
        assert len(store.values) == 2

    def test_each_world_has_a_hub(self):
        """Worlds made one after the other over one store do not take each other's hub."""
        store = Store()
        for _ in range(2):
            ranks = [Watch(reporting(), STATE) for _ in range(2)]
            for rank, watch in enumerate(ranks):
                watch.begin(world(rank, 2), store)

        assert sum("/hub/" in key for key in store.values) == 2

    @pytest.mark.parametrize(
        "made", [world(size=1), world(shared=False)], ids=["one-rank", "dry-run-or-threads"]
    )
    def test_worlds_that_are_not_watched(self, made):
        """Where no other process is on the other side, nothing is started and the store is not asked."""
        store, watch = Store(), Watch(reporting(), STATE)
        watch.begin(made, store)
        watch.end(made, None)

        assert (store.operations, watchers()) == (0, [])

    def test_program_that_embeds_python(self, monkeypatch):
        """Where sys.executable is no interpreter it is not started."""
        for name in (None, "", "/usr/bin/uwsgi"):
            monkeypatch.setattr(sys, "executable", name)
            store = Store()
            Watch(reporting(), STATE).begin(world(), store)

            assert (store.operations, watchers()) == (0, [])

    @pytest.mark.parametrize("breaks", ["store", "subprocess", "memory", "port"])
    def test_failure(self, monkeypatch, capsys, breaks):
        """What fails costs one line and the report; the creations go on."""

        def fail(*_, **__):
            raise OSError("forbidden")

        store = Store()
        if breaks == "store":
            store.compare_set = fail
        elif breaks == "subprocess":
            monkeypatch.setattr(session.subprocess, "Popen", fail)
        elif breaks == "memory":
            monkeypatch.setattr(os, "memfd_create", fail)
        else:
            monkeypatch.setattr(session.socket, "create_server", fail)
        watch = Watch(reporting(), STATE)
        for made in (world(), call(1), call(2)):
            watch.begin(made, store)
            watch.end(made, None)

        assert watchers() == []
        assert re.findall("torchcommshim .*", capsys.readouterr().err) == [
            f"torchcommshim {torchcommshim.__version__}: failed in the hang report: OSError('forbidden'); "
            "torch goes on without it [TCS-failed]"
        ]

    def test_ends_with_its_world(self):
        """A watcher ends when the process makes another world, and its process is left with one."""
        watch, store = Watch(reporting(), STATE), Store()
        watch.begin(world(size=2), store)
        (first,) = watchers()
        watch.begin(world(size=2), store)

        until(lambda: not is_there(first))
        assert len(watchers()) == 1

    def entered(self, rank=1, size=2):
        """A watch whose rank has entered a world, the call, and a reader of its record."""
        watch, entry = Watch(reporting(), STATE), world(rank, size, backend="undefined")
        watch.enter(entry, Rendezvous("env://", rank, size, "127.0.0.1", 29500))
        reader = Reader.__new__(Reader)
        reader._memory, reader._slot_size = watch._session.record._memory, watch._session.record._slot_size
        return watch, entry, reader

    def test_wait_begins_at_the_entry(self):
        """A world is one wait, from its entry to its end, with one watcher; its backend is known later."""
        watch, entry, reader = self.entered()
        (in_rendezvous,) = reader.entries()
        made = world(1, 2)
        watch.begin(made, Store())
        (begun,) = reader.entries()
        watch.end(made, None)
        watch.leave(entry, None)
        (ended,) = reader.entries()

        assert begun == in_rendezvous._replace(backend="gloo")
        assert ended == begun._replace(ended=ended.ended)
        assert ended.ended > ended.started
        assert len(watchers()) == 1

    def test_error_in_the_rendezvous(self):
        """A rank that gets no store waits no more; the next attempt has a watcher of its own."""
        watch, entry, reader = self.entered()
        watch.leave(entry, RuntimeError("no store"))
        (left,) = reader.entries()
        watch.enter(world(1, 2), Rendezvous("env://", 1, 2, "127.0.0.1", 29500))

        assert left.ended > left.started
        until(lambda: len(watchers()) == 1)

    def test_fork(self):
        """What a fork makes is not taken for a creation of its parent."""
        watch, made = Watch(reporting(), STATE), world(size=2)
        watch.begin(made, Store())
        record = watch._session.record
        end = _SAMPLE * record._slot_size  # beyond is where the sampler of this process writes
        before = record._memory[:end]
        pid = os.fork()
        if not pid:
            watch.begin(call(), None)
            watch.end(made, None)
            os._exit(0)
        os.waitpid(pid, 0)

        assert record._memory[:end] == before


# A rank in a process of its own.
RANK = """
import ctypes, os, signal, sys, threading, time
from test_watch import STATE, Store, Watch, call, reporting, watchers, world

watch, made = Watch(reporting({limit}), STATE), world(size=2)
watch.begin(made, Store())
watch.end(made, None)
"""


def rank_process(text, limit=1.0, **options):
    """Start a rank that does `text` once it has a world."""
    paths = [Path(torchcommshim.__file__).parent.parent, Path(__file__).parent]
    return subprocess.Popen(
        [*options.pop("before", []), sys.executable, "-c", RANK.format(limit=limit) + text],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


class TestProcess:
    @pytest.mark.parametrize(
        "ending",
        ["sys.exit(3)", "raise ValueError('lost')", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"],
    )
    def test_ends_with_its_rank(self, ending):
        """Whoever waits for a rank's captured output does not wait for its watcher, however the rank ends."""
        rank = rank_process(f"print(*watchers(), flush=True)\n{ending}", limit=600.0)
        out, errors = rank.communicate(timeout=DEADLINE_S)

        assert rank.returncode in (3, 1, -signal.SIGKILL)
        assert "torchcommshim 0" not in errors
        until(lambda: not is_there(int(out)))

    def test_ends_although_a_fork_lives(self):
        """A fork of the rank, such as a data loader's worker, does not keep the watcher."""
        text = """
(watcher,) = watchers()
if not os.fork():
    time.sleep(600)
print(watcher, os.getpid(), flush=True)
"""
        rank = rank_process(text, stderr=None, start_new_session=True)
        with contextlib.closing(rank.stdout):
            watcher, group = map(int, rank.stdout.readline().split())
        try:
            assert rank.wait(DEADLINE_S) == 0
            until(lambda: not is_there(watcher))
        finally:
            os.killpg(group, signal.SIGKILL)

    def test_fork_with_warnings(self):
        """A fork lets go of the session without a warning."""
        text = """
import gc, warnings
warnings.simplefilter("always")
warnings.filterwarnings("ignore", ".*multi-threaded.*")  # as every process is in which torch has a world
if not os.fork():
    gc.collect()
    os._exit(0)
os.wait()
"""
        _, errors = rank_process(text, limit=600.0).communicate(timeout=DEADLINE_S)

        assert errors == ""

    def test_is_no_child(self):
        """A program that waits until it has no children left does not wait for the watcher."""
        text = """
if not os.fork():
    os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    print(len(watchers()))
"""
        out, _ = rank_process(text, limit=600.0).communicate(timeout=DEADLINE_S)

        assert out == "1\n"

    def test_keeps_nothing_open(self):
        """A watcher holds no file of its rank but the stderr to which it reports."""
        text = """
import tempfile
held = tempfile.NamedTemporaryFile()
os.set_inheritable(held.fileno(), True)
watch.begin(world(size=2), Store())
(watcher,) = watchers()
time.sleep(0.5)
files = {os.readlink(f"/proc/{watcher}/fd/{name}") for name in os.listdir(f"/proc/{watcher}/fd")}
print(held.name in files)
"""
        out, _ = rank_process(text).communicate(timeout=DEADLINE_S)

        assert out == "False\n"

    def test_streams_that_are_closed(self, tmp_path):
        """With stdin and stdout closed the report comes all the same, and nobody's file takes their place."""
        text = "pending = call()\nwatch.begin(pending, None)\ntime.sleep(3)\nos._exit(4)"
        with (tmp_path / "stderr").open("w") as stderr:
            rank = rank_process(text, before=["sh", "-c", 'exec "$@" <&- >&-', "sh"], stderr=stderr)
            code = rank.wait(DEADLINE_S)
            rank.stdout.close()

        assert code == 4
        assert "1 of 2 ranks wait" in (tmp_path / "stderr").read_text()

    def test_rank_that_holds_the_global_lock(self, tmp_path):
        """It is reported, with its stack, while no Python thread of it can run."""
        text = """
def blocked():
    pending = call(ranks=(0,))
    watch.begin(pending, None)
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
threading.Timer(0.1, print, ["a thread has run"], {"flush": True}).start()
blocked()
"""
        file = tmp_path / "stderr"
        with file.open("w") as stderr:
            rank = rank_process(text, stderr=stderr)
        with rank:
            until(lambda: re.search(r"    <string>:\d+ blocked\n", file.read_text()))
            rank.kill()
            out = rank.stdout.read()

        assert "1 of 2 ranks wait in a creation" in file.read_text()
        assert out == ""


class TestStacks:
    def test_handler_that_is_gone(self):
        """No signal is sent to a process that does not handle it, since it would die of it."""
        stack = stacks.offer()
        reader, writer = os.pipe()
        before = signal.signal(stack.signal, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            os.write(writer, repr(stacks.take(stack)).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        signal.signal(stack.signal, before or signal.SIG_DFL)

        assert os.read(reader, 100) == b"[]"

    def test_handler_that_was_taken_away(self):
        """The next world has one again."""
        signal.signal(stacks.offer().signal, signal.SIG_DFL)
        pid, number = os.getpid(), stacks.offer().signal

        assert stacks._masks(pid, "SigCgt") >> (number - 1) & 1

    def test_signal_that_is_ignored_by_now(self):
        """It stays ignored; another is taken."""
        number = stacks.offer().signal
        signal.signal(number, signal.SIG_IGN)
        other, handler = stacks.offer().signal, signal.getsignal(number)
        signal.signal(number, signal.SIG_DFL)

        assert (other != number, handler) == (True, signal.SIG_IGN)

    def test_signal_in_use(self):
        """A signal that Python or C code handles, ignores or blocks is not taken."""
        taken = set()
        for prepare in (
            lambda number: signal.signal(number, signal.SIG_IGN),
            lambda number: signal.signal(number, lambda *_: None),
            lambda number: signal.pthread_sigmask(signal.SIG_BLOCK, [number]),
            lambda number: ctypes.CDLL(None).signal(
                number, ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
            ),
        ):
            number = stacks._free_signal(os.getpid())
            assert number not in taken
            taken.add(number)
            prepare(number)
        free = stacks._free_signal(os.getpid())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, taken)
        for number in taken:
            signal.signal(number, signal.SIG_DFL)

        assert free not in taken


class TestJob:
    """Many ranks in this process, each with its record and its watcher."""

    def ranks(self, size, limit_s):
        """Their sessions, once all watchers are connected to the hub's."""
        self.started, store, current = watchers(), Store(), reporting(limit_s)
        sessions = [session_of(rank, size, store, current) for rank in range(size)]
        (self.port,) = (json.loads(value)["port"] for key, value in store.values.items() if "/hub/" in key)
        until(lambda: _connections(self.port) == size)
        time.sleep(0.5)  # to be greeted, and told who is the hub's successor
        return sessions

    def watcher(self, rank):
        """The process id of a rank's watcher."""
        return [pid for pid in watchers() if pid not in self.started][rank]

    def begin(self, sessions, ranks, number=1):
        calls = {rank: call(number, tuple(range(len(sessions))), rank=rank) for rank in ranks}
        for rank, each in calls.items():
            sessions[rank].record.begin(each)
        return calls

    def end(self, sessions, calls):
        for rank, each in calls.items():
            sessions[rank].record.end(each)

    def test_64_ranks(self, said):
        """Of 64 ranks one is elsewhere and one has ended: one report says so, and groups the others."""
        sessions = self.ranks(64, limit_s=2.0)
        sessions[9] = None
        self.begin(sessions, [rank for rank in range(64) if rank not in (5, 9)])
        until(lambda: "hang report" in said())
        time.sleep(1.0)

        assert said().count("hang report") == 1
        assert "62 of 64 ranks wait" in said()
        assert re.search(
            r"ranks 0-4,6-8,10-63 +waiting for \d s: #1 new_group \[0-63\] gloo at train.py:1", said()
        )
        assert re.search(r"rank  9 +exited, at", said())
        assert "rank 9 cannot come to #1" in said()
        assert "rank 5 has not come to #1" in said()

    def test_rank_that_an_exception_has_ended(self, said):
        """The others are told which."""
        store = Store()
        waiting = session_of(0, 2, store, reporting(1.5))
        text = f"""
store = Store()
store.values.update({store.values!r})
watch.begin(world(1, 2), store)
time.sleep(0.5)
raise ValueError("no such file")
"""
        with rank_process(text) as rank:
            rank.communicate(timeout=DEADLINE_S)
        pending = call()
        waiting.record.begin(pending)
        until(lambda: "hang report" in said())

        assert re.search(
            r"rank  1  exited after ValueError: no such file, at \d+:\d+:\d+, in #0 init", said()
        )

    def test_slow_creation(self, said):
        """One that returns after all is said to have; the next is given twice the time."""
        sessions = self.ranks(2, limit_s=1.0)
        calls = self.begin(sessions, [0, 1])
        until(lambda: "ranks wait" in said())
        self.end(sessions, calls)
        until(lambda: "has ended on all ranks" in said())
        between = said()
        self.begin(sessions, [0, 1], number=2)
        until(lambda: "#2" in said())

        assert "From now on one is reported after 2 s." in between
        assert between.count("hang report") == 2
        assert said().count("hang report") == 3

    def test_creations_in_time(self, said):
        """Nothing is said while creations return, however long a rank does other things."""
        sessions = self.ranks(2, limit_s=1.0)
        for number in (1, 2):
            self.end(sessions, self.begin(sessions, [0, 1], number))
            time.sleep(1.5)

        assert said() == ""

    @pytest.mark.parametrize("lost", [0, 1])
    def test_watcher_that_is_gone(self, said, lost):
        """Whichever watcher is lost, the hub's too, the other ranks have one report, which names its rank."""
        sessions = self.ranks(4, limit_s=1.0)
        os.kill(self.watcher(lost), signal.SIGKILL)
        self.begin(sessions, range(4))
        until(lambda: "hang report" in said())
        time.sleep(1.0)

        assert said().count("hang report") == 1
        assert "3 of 4 ranks wait" in said()
        assert f"rank {lost} cannot come to #1" in said()

    def test_nobody_to_ask(self, said):
        """A rank that does not reach the hub reports for itself, and says that it does."""
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        hub = {"rank": 2, "addresses": ["127.0.0.1", "localhost"], "port": port, "token": "t"}
        store = Store()
        store.compare_set = lambda *_: json.dumps(hub).encode()
        alone = session_of(0, 3, store, reporting(1.0))
        pending = call()
        alone.record.begin(pending)
        until(lambda: "hang report" in said())

        assert "ranks 1,2  could not be asked: the watcher of rank 2 was not reached" in said()

    def test_strangers(self, said):
        """Who connects without knowing the token learns nothing, and does no harm."""
        sessions = self.ranks(2, limit_s=1.0)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"token": "guess", "rank": 0}\n', b"[1]\n", b"\xff\n"):
            with socket.create_connection(("127.0.0.1", self.port)) as stranger:
                stranger.sendall(words)
                stranger.settimeout(DEADLINE_S)
                assert stranger.recv(100) == b""
        self.begin(sessions, [0, 1])
        until(lambda: "hang report" in said())

        assert "2 of 2 ranks wait" in said()


def _connections(port):
    """How many connections there are to a port of this host."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[2].endswith(f":{port:04X}") and fields[3] == "01" for fields in lines)


# The text.


def seen(number=1, ranks="0,1", *, kind="collective", backend="gloo", name=None, began=120.0, ended=None):
    site = f"train.py:{number} main"
    return Seen(number, kind, ranks, backend, name or str(number), site, began, ended)


def split(number, rank, parts=("0,1", "2"), *, parent="0", ranks="0-3", name="part"):
    """The split of a group as `rank` makes it."""
    own = next((part for part in parts if rank in expanded(part)), "")
    made = seen(number, own, kind="split", backend="nccl", name=name)
    return made._replace(split=[parent, 1, ranks, list(parts)])


def view(rank, *creations, **keywords):
    return View(rank, "node-a", 1000 + rank, creations, **keywords)


def view_of(rank, *groups):
    """A rank that waits in the last of these groups, and has made the others."""
    ended = [9.0] * (len(groups) - 1) + [None]
    made = (seen(number, ranks, ended=end) for number, (ranks, end) in enumerate(zip(groups, ended), 1))
    return view(rank, *made)


def claim(rank, pid, host="node-a", *, size=4, job=None):
    return Claim(rank, size, host, pid, "train.py", job or {})


def told(*views, size=4, **keywords):
    return report(Job(size, {each.rank: each for each in views}, **keywords))


def cause(*views, **keywords):
    """The likely cause, without the line breaks."""
    text = " ".join(told(*views, **keywords).split())
    return text.partition("likely cause: ")[2]


class TestDiagnosis:
    def test_rank_that_has_not_come(self):
        """The rank that is missing, what it made last, and how to see where it is."""
        text = told(*(view(rank, seen(2, "0-3")) for rank in (0, 1, 2)), view(3, seen(1, ended=119.0)))

        assert text.splitlines()[:3] == [
            "hang report: 3 of 4 ranks wait in a creation, for 120 s by now [TCS-hang-report]",
            "  ranks 0-2  waiting for 120 s: #2 new_group [0-3] gloo at train.py:2 main",
            "  rank  3    elsewhere, returned 119 s ago: #1 new_group [0,1] gloo at train.py:1 main",
        ]
        assert "rank 3 has not come to #2 new_group [0-3]" in text
        assert "`py-spy dump --pid 1003` on node-a" in " ".join(text.split())

    def test_rank_that_has_not_come_to_a_split(self):
        """All ranks of the group that is split come, those that it leaves out too."""
        waiting = (view(rank, split(2, rank)) for rank in (0, 1, 2))

        assert cause(*waiting, view(3, seen(1, ended=119.0))).startswith(
            "rank 3 has not come to #2 split_group of [0-3] into [0,1] [2] nccl at train.py:2 main."
        )

    def test_split_into_other_parts(self):
        """Ranks that pass other lists than the others are named, with both versions."""
        views = [view(rank, split(2, rank, ["0,1", "2,3"] if rank else ["0,1"])) for rank in range(4)]

        assert cause(*views).startswith(
            "ranks do not split one group alike: rank 0 makes #2 split_group of [0-3] into [0,1] nccl at "
            "train.py:2 main; in its place rank 1 makes #2 split_group of [0-3] into [0,1] [2,3] nccl at"
        )

    def test_split_whose_names_differ(self):
        """Two names for one part are a cause; the names of different parts differ anyway."""
        views = [view(rank, split(2, rank, name="ab" if rank == 1 else "cd")) for rank in range(4)]
        alike = [view(rank, split(2, rank, name="ab" if rank < 2 else "cd")) for rank in range(4)]

        assert "rank 0 calls [0,1] 'cd', rank 1 calls it 'ab'." in cause(*views)
        assert "names" not in cause(*alike)

    def test_split_of_another_group(self):
        """A rank that splits another group has not come, and is shown where it is."""
        other = split(2, 3, ["2", "3"], parent="1", ranks="2,3")
        text = told(*(view(rank, split(2, rank)) for rank in (0, 1, 2)), view(3, other))

        assert "rank 3 has not come to #2 split_group of [0-3] into [0,1] [2] nccl" in " ".join(text.split())
        assert "waiting for 120 s: #2 split_group of [2,3] into [2] [3] nccl at train.py:2 main" in text

    def test_outsider_that_a_split_waits_for(self):
        """To a split of a bound world every rank comes, to other groups only the members."""
        waiting = [view(rank, seen(2), bound=True) for rank in (0, 1)]
        elsewhere = [view(rank, seen(1, ended=9.0), bound=True) for rank in (2, 3)]
        unbound = [each._replace(bound=False) for each in waiting]

        assert cause(*waiting, *elsewhere).startswith("ranks 2,3 have not come to #2 new_group [0,1]")
        assert cause(*unbound, *elsewhere).startswith("all ranks that it takes are in #2 new_group [0,1]")

    def test_own_group_each(self):
        """In a call in which each rank names its own group, the rank that has not come to it is missing."""
        waiting = [view(rank, seen(2, ("0,1", "2,3")[rank // 2]), bound=True) for rank in (0, 1, 2)]
        elsewhere = view(3, seen(1, ended=9.0), bound=True)

        assert cause(*waiting, elsewhere).startswith("rank 3 has not come to #2 new_group [0,1]")

    def test_rank_that_was_never_there(self):
        """A rank of which nothing was heard is named, for the world itself too."""
        text = cause(view(0, seen(0, "0,1", kind="world")), size=2)

        assert text.startswith(
            "nothing is heard of rank 1, needed for #0 init_process_group gloo at train.py:0"
        )

    def test_rank_that_has_ended(self):
        """With the time, and where it was; but not if it had made the creation before."""
        waiting = [view(rank, seen(2, "0-3")) for rank in (0, 1)]
        gone = End(GONE, "10:11:12", seen(2, "0-3"))
        done = End(EXITED, "10:11:13", seen(2, "0-3", ended=1.0))
        text = told(*waiting, ended={2: gone, 3: done})

        assert "  rank  2    gone (killed, or left by os._exit), at 10:11:12, in #2 new_group [0-3]" in text
        assert "  rank  3    exited, at 10:11:13, after #2 new_group [0-3]" in text
        assert "rank 2 cannot come to #2" in text
        assert "rank 3 cannot come" not in text

    def test_network(self):
        """With all ranks inside nobody is blamed."""
        text = cause(*(view(rank, seen(1, "0,1")) for rank in (0, 1)))

        assert text.startswith("all ranks that it takes are in #1 new_group [0,1]")
        assert "NCCL_DEBUG=INFO" in text

    def test_network_where_another_cause_is_known(self):
        """That one group is complete says nothing while another waits for a rank that is elsewhere."""
        complete = [view(rank, seen(1, "0,1")) for rank in (0, 1)]
        text = cause(*complete, view(2, seen(2, "2,3")), view(3, seen(0, "0-3", kind="world", ended=9.0)))

        assert text.startswith("rank 3 has not come to #2 new_group [2,3]")
        assert "network" not in text

    def test_rank_that_does_not_answer(self):
        """One that is needed, and whose watcher does not answer, is named; no other is, nor the network."""
        text = cause(*(view(rank, seen(2, "0-2")) for rank in (0, 1)), silent=[2, 3])

        assert text == (
            "rank 2, needed for #2 new_group [0-2] gloo at train.py:2 main, cannot be asked: the process "
            "or the "
            "host is stopped. [TCS-rank-silent]"
        )

    def test_rank_that_has_passed(self):
        """One that has returned is named only where no other is missing."""
        waits, passed = view(0, seen(2, "0-2")), view(1, seen(2, "0-2", ended=3.0))
        late = view(2, seen(1, ended=9.0))

        assert cause(waits, passed, passed._replace(rank=2)).startswith("ranks 1,2 have returned from #2")
        assert "returned from #2" not in cause(waits, passed, late)

    def in_the_rendezvous(self, *ranks, size=4):
        return [view(rank, seen(0, f"0-{size - 1}", kind="world"), inside=RENDEZVOUS) for rank in ranks]

    def test_rank_that_serves_the_store(self):
        """It waits in the rendezvous: it is there, and so are those who are connected to it."""
        serving, *others = self.in_the_rendezvous(0, 1, 2)
        passed = [others[0].seen[0]._replace(name="0")]
        others = [each._replace(inside="ProcessGroupGloo", seen=passed) for each in others]
        text = told(serving, *others)

        assert text.splitlines()[1:4] == [
            "  rank  0    waiting for 120 s in the rendezvous: #0 init_process_group gloo at train.py:0 main",
            "  ranks 1,2  waiting for 120 s in ProcessGroupGloo: #0 init_process_group gloo at train.py:0 "
            "main",
            "  rank  3    not heard of: not started, without torchcommshim, or cut off",
        ]
        assert cause(serving, *others) == (
            "nothing is heard of rank 3, needed for #0 init_process_group gloo at train.py:0 main. "
            "[TCS-rank-unheard]"
        )

    def test_processes_that_claim_one_rank(self):
        """Each is named with host and number, and so is who is left out; no rank is said to be missing."""
        claims = [claim(0, 10), claim(0, 20, "node-b"), claim(1, 11), claim(1, 21, "node-b")]
        text = cause(*self.in_the_rendezvous(0, 1), claims=claims)

        assert text == (
            "several processes claim one rank: rank 0 by process 10 on node-a (train.py) and process 20 on "
            "node-b (train.py); rank 1 by process 11 on node-a (train.py) and process 21 on node-b "
            "(train.py). "
            "Nobody claims ranks 2,3. RANK is wrong in one of them, or two jobs use one MASTER_PORT. "
            "[TCS-rank-claimed-twice]"
        )

    def test_jobs_that_claim_one_rank(self):
        """What schedulers call their jobs tells two jobs from a wrong RANK, unless they call them alike."""
        one, other = claim(1, 10, job={"SLURM_JOB_ID": "7"}), claim(1, 20, job={"SLURM_JOB_ID": "8"})
        two_jobs = (
            "They are two jobs, of SLURM_JOB_ID 7 and 8, that use one MASTER_PORT: give each its own. "
            "[TCS-rank-claimed-twice]"
        )
        waiting = self.in_the_rendezvous(0, 1)

        assert cause(*waiting, claims=[one, other]).endswith(two_jobs)
        assert "They are two jobs" not in cause(*waiting, claims=[one, other._replace(job=one.job)])
        assert "They are two jobs" not in cause(*waiting, claims=[one, other._replace(job={})])

    def test_claims_once_the_world_is_made(self):
        """A process that came too late for the world is not why a later creation waits."""
        waiting = [view(rank, seen(1, "0-3")) for rank in (0, 1, 2)]
        late = {"claims": [claim(0, 10), claim(0, 20)], "others": [claim(1, 30, size=2)]}

        assert cause(*waiting, **late).startswith("nothing is heard of rank 3, needed for #1")

    @pytest.mark.parametrize(
        ("size", "why"),
        [
            (
                2,
                "Two jobs use one MASTER_PORT, or WORLD_SIZE is not the same for all ranks of one job. "
                "[TCS-two-worlds]",
            ),
            (
                4,
                "Two jobs use one MASTER_PORT, or more processes were started than WORLD_SIZE says, or "
                "only a part "
                "of a job was started again. [TCS-two-worlds]",
            ),
        ],
    )
    def test_two_worlds_in_one_store(self, size, why):
        """One process of each is named, and what may have brought them there."""
        other = claim(1, 30, "node-b", size=size)

        assert cause(*self.in_the_rendezvous(1, 2), others=[other]) == (
            "two worlds meet in one store: here, rank 1 of 4 is process 1001 on node-a; in the other, "
            "rank 1 of "
            f"{size} is process 30 on node-b (train.py). {why}"
        )

    def test_earlier_world(self):
        """The keys of an earlier world are the cause only if no rank is missing, and in no later creation."""
        earlier, everybody = claim(1, 30), self.in_the_rendezvous(0, 1, 2, 3)
        later = [view(rank, seen(1, "0-3")) for rank in range(4)]

        assert cause(*everybody, earlier=earlier).startswith(
            "the store holds the keys of an earlier world, in which rank 1 of 4 was process 30 on node-a"
        )
        assert "network" not in cause(*everybody, earlier=earlier)
        assert "earlier world" not in cause(*everybody[:3], earlier=earlier)
        assert "earlier world" not in cause(*later, earlier=earlier)
        assert "earlier world" not in cause(*everybody)
        kept_apart = [each._replace(strategy="auto") for each in everybody]
        assert "earlier world" not in cause(*kept_apart, earlier=earlier)

    @pytest.mark.parametrize(
        ("place", "found", "expected"),
        [
            ({}, REFUSED, "nobody listens there. The store is to be served by rank 0,"),
            ({"by_agent": True}, REFUSED, "The store is to be served by the agent of torchrun,"),
            ({}, UNKNOWN, "this host does not know that name. Look at MASTER_ADDR."),
            ({}, UNREACHED, "that host does not answer. Is it up,"),
            ({}, MUTE, "something listens there, and does not answer as rank 0 would"),
            ({"rank": 0}, MUTE, "It serves the store at node-a:29500, until all ranks have connected."),
            ({"method": "file://", "host": "", "port": 0}, None, "It has no store yet, by file://."),
        ],
    )
    def test_no_store(self, place, found, expected):
        """A rank that has reached no store says in one line where it waits, and what it finds there."""
        (waiting,) = self.in_the_rendezvous(place.get("rank", 2))
        store = {"host": "node-a", "port": 29500}
        place = Rendezvous(**{"method": "env://", "rank": 2, "size": 4, **store, **place})
        text = alone(waiting, place, found)

        assert text.startswith(
            f"hang report: rank {place.rank} of 4 (process {1000 + place.rank} on node-a) waits in the "
            "rendezvous "
            "for 120 s by now, at train.py:0 main. It "
        )
        assert expected in text
        assert "\n" not in text

    def test_only_members(self):
        """Where only the members of a group have made a call, the rule is added."""
        waiting = [view(rank, seen(1, "0,1", ended=9.0), seen(2, "0-3")) for rank in (0, 1)]
        others = [view(rank, seen(1, "0-3")) for rank in (2, 3)]

        assert cause(*waiting, *others).endswith(members.RULE)

    def test_only_members_of_a_split(self):
        """In a bound world they wait for the others: the rule is added, unless a member is missing too."""
        waiting = [view(rank, seen(1, "0,1"), bound=True) for rank in (0, 1)]
        others = [view(rank, seen(0, "0-3", kind="world", ended=9.0), bound=True) for rank in (2, 3)]
        missing = others[0]._replace(rank=1)

        assert cause(*waiting, *others).startswith(
            f"ranks 2,3 have not come to #1 new_group [0,1] gloo at train.py:1 main. {members.RULE} `py-spy"
        )
        assert members.RULE not in cause(waiting[0], missing, *others)

    @pytest.mark.parametrize(
        "views",
        [
            [view_of(0, "0,1"), view_of(1, "0,1"), view_of(2, "1-3", "0,1"), view_of(3, "1-3", "0,1")],
            [view_of(0, "0,1"), view_of(1, "1,2"), view_of(2, "1,2"), view_of(3, "1,2")],
            [view_of(0, "0-2"), view_of(1, "0-1"), view_of(2, "0-2"), view_of(3, "0-2")],
        ],
        ids=["outsiders-made-it-later", "a-member-made-another", "other-list"],
    )
    def test_not_only_members(self, views):
        """Ranks that make the same groups in another order, or another group, are not told that rule."""
        text = cause(*views)

        assert text.startswith("ranks do not make the same groups in the same order")
        assert members.RULE not in text

    def test_defect(self):
        """The first creation that a defect strikes is named before all else, though a later one waits."""
        struck = [Struck(1, "train.py:1 main", "other-backend", "what goes wrong", "https://link")]
        text = cause(
            view(0, seen(1, ended=9.0), seen(2), strategy="observe", torch="2.11.0"),
            view(1, seen(1, ended=9.0), seen(2), strategy="observe", torch="2.11.0", struck=struck),
        )

        assert text == (
            "other-backend: on torch 2.11.0 what goes wrong (https://link). "
            "The first creation that it breaks is #1 at train.py:1 main. "
            "TORCHCOMMSHIM=observe leaves it so; TORCHCOMMSHIM=auto, the default, repairs it. "
            "[TCS-other-backend]"
        )

    def test_defect_of_a_creation_to_come(self):
        """One that strikes only creations after those that are waited in is not the cause."""
        struck = [Struck(3, "train.py:3 main", "other-backend", "what goes wrong", "https://link")]

        assert "other-backend" not in told(view(0, seen(2)), view(1, seen(3, ended=1.0), struck=struck))

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (seen(1, "0,1"), seen(1, "1,2")),
            (seen(1, "0,1"), seen(1, "2,3")),
            (seen(1, "0-2"), seen(1, "0,1")),
            (seen(1, "0,1"), seen(1, "0,1", backend="nccl", ended=1.0)),
        ],
        ids=["overlapping", "not-one-of-its-own", "other-list", "other-backend"],
    )
    def test_order_mismatch(self, first, second):
        """The first call in which ranks do not make the same group, in both versions."""
        text = cause(view(0, first), view(1, second))

        assert "rank 0 makes #1 new_group" in text
        assert "in its place rank 1 makes #1 new_group" in text
        assert "TORCHCOMMSHIM_CHECK_ORDER=1" in text

    def test_order_mismatch_that_is_forgotten(self):
        """Two ranks that wait for each other in one group under two numbers."""
        text = cause(view(0, seen(3, "0,1")), view(1, seen(17, "0,1")))

        assert "rank 0 makes #3 new_group [0,1]" in text
        assert "rank 1 makes #17 new_group [0,1]" in text

    def test_legal_differences(self):
        """Each rank's own group in one call, and numbers that local groups have moved, are no mismatch."""
        own = told(
            view(0, seen(1, "0,1", ended=2.0), seen(2, "0-3")),
            view(2, seen(1, "2,3", ended=2.0), seen(2, "0-3")),
        )
        moved = told(
            view(0, seen(1, "0,5", kind="local", name="a", ended=2.0), seen(2, "0,1", name="1")),
            view(1, seen(1, "0,1", name="1")),
        )

        assert "same order" not in own + moved

    @pytest.mark.parametrize(
        ("bound", "backend", "strategy", "told_so"),
        [
            (False, "gloo", "observe", True),
            (False, "nccl", "observe", True),
            (True, "cpu:gloo,cuda:nccl", "observe", True),
            (True, "nccl", "observe", False),
            (False, "gloo", "auto", False),
        ],
    )
    def test_own_groups_that_share_keys(self, bound, backend, strategy, told_so):
        """Own groups that neither a repair nor a colour keeps apart are the cause."""
        text = cause(
            *(
                view(
                    rank,
                    seen(1, ranks, backend=backend, ended=None if rank else 2.0),
                    bound=bound,
                    strategy=strategy,
                    torch="2.13.0",
                )
                for rank, ranks in enumerate(("0,1", "0,1", "2,3", "2,3"))
            )
        )

        assert text.startswith("own-parts: groups that one call of new_group makes") is told_so
        assert ("rank 0 makes #1 new_group [0,1]" in text) is told_so
        assert ("in the same call rank 2 makes #1 new_group [2,3]" in text) is told_so
        assert ("TORCHCOMMSHIM=auto, the default, repairs it" in text) is told_so

    def test_own_groups_of_one_rank(self):
        """Groups of one rank need no keys, so nothing is mixed up."""
        alone = [
            view(rank, seen(1, str(rank), ended=1.0), seen(2, "0,1"), strategy="observe") for rank in (0, 1)
        ]

        assert "own-parts" not in told(*alone)

    def test_direct_call(self):
        """Of a direct call, which may span other processes, nobody is said to be missing."""
        text = cause(view(0, seen(1, "", kind="direct")), view(1, seen(0, "0-3", kind="world", ended=9.0)))

        assert text.startswith("not found.")

    def test_alone(self):
        """A rank that could not ask the others says so, and what may be the reason."""
        text = told(view(0, seen()), apart="the watcher of rank 1 was not reached")

        assert "ranks 1-3  could not be asked: the watcher of rank 1 was not reached" in text
        assert "likely cause: the watcher of rank 1 was not reached: that rank has ended" in text

    def test_thousands_of_ranks(self):
        """4096 ranks in groups of 8, of which one rank is elsewhere, make a report of one page."""
        size, creations = 4096, [shortened(range(first, first + 8)) for first in range(0, 4096, 8)]
        views = [view(rank, seen(1 + rank // 8, creations[rank // 8]), bound=True) for rank in range(1, size)]
        text = told(view(0, seen(0, f"0-{size - 1}", kind="world", ended=1.0)), *views, size=size)

        assert len(text.splitlines()) < 60
        assert "4095 of 4096 ranks wait" in text
        assert "more ranks, in" in text

    def test_each_rank_names_its_own_group(self, monkeypatch):
        """Of 1024 ranks in one call each is looked at a few times, not once for each other rank."""
        looks, waits = [], View.waits.fget
        monkeypatch.setattr(View, "waits", property(lambda view: looks.append(view.rank) or waits(view)))
        size = 1024
        groups = [shortened(range(rank // 8 * 8, rank // 8 * 8 + 8)) for rank in range(size)]
        ended = [None] * (size - 1) + [1.0]
        text = told(
            *(view(rank, seen(1, groups[rank], ended=ended[rank])) for rank in range(size)), size=size
        )

        assert max(map(looks.count, (0, 500, size - 1))) < 10
        assert [line.split()[1] for line in text.splitlines()[1:4]] == ["0-7", "8-15", "16-23"]

    def test_one_stack_a_place(self):
        """Of ranks that wait in the same line one stack is shown."""
        stack = ["distributed_c10d.py:9 _new_process_group_helper", "train.py:1 main"]
        text = told(*(view(rank, seen(), stack=stack, inside="ProcessGroupGloo") for rank in (0, 1)))

        assert "ranks 0,1  waiting for 120 s in ProcessGroupGloo: #1" in text
        assert text.count("innermost call first") == 1
        assert text.endswith("\n    " + "\n    ".join(stack))
