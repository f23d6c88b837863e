# SPDX-License-Identifier: Apache-2.0
"""Where every rank is, without torch: the sampler, the watchers' door, the picture, and the likely causes."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from test_watch import STATE, Store, is_there, reporting, said, until, watchers, world  # noqa: F401

from torchcommshim.commands import where
from torchcommshim.ranges import shortened
from torchcommshim.tell.watch import door, picture, waits
from torchcommshim.tell.watch.diagnosis import Job
from torchcommshim.tell.watch.observer import Watch
from torchcommshim.tell.watch.places import Group, Place, Sample
from torchcommshim.tell.watch.record import Reader, Record
from torchcommshim.tell.watch.sampler import Sampler, _in_distributed, _outwards
from torchcommshim.tell.watch.views import EXITED, LOCKED, STOPPED, End, View

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(sys.platform != "linux", reason="the hang report works on Linux only"),
]

WORLD = Group("0", "default_pg", "0-3", 1, 1800.0)
MAIN = "train.py:8 main"


def place(call="", group=None, *, since=150.0, site=MAIN, peer=None, inside=None, stack=None):
    """A rank's main thread."""
    inside = ([call] if call else []) if inside is None else inside
    return Place(since, "", call, inside, group, peer, site, (), stack or [f"c10d.py:1 {call}", site])


def view(rank, *places, state="", counts=()):
    return View(rank, "host", 100 + rank, [], places=list(places), state=state, counts=list(counts))


def views(*each):
    return {one.rank: one for one in each}


def causes(known, late, ended=None):
    return waits.causes(known, ended or {}, (), late)


class Group0:
    """A process group of torch, as far as the sampler looks."""

    group_name, group_desc = "0", "default_pg"

    def __init__(self):
        self.begun = 1

    def _get_sequence_number_for_group(self):
        return self.begun


def c10d(group):
    """`torch.distributed.distributed_c10d`, as far as the sampler looks."""
    return SimpleNamespace(
        _world=SimpleNamespace(
            default_pg=group, pg_map={group: ()}, pg_group_ranks={group: {rank: rank for rank in range(4)}}
        )
    )


@pytest.fixture
def sampled():
    """A sampler of this process that looks when told, with its reader; the main thread is the test's."""
    record = Record(4)
    reader = Reader(os.dup(record.descriptor), 4)
    bell, theirs = socket.socketpair()
    failures = []

    def make(module=None):
        return Sampler(record, module, bell, 60.0, failures.append), reader

    yield make
    theirs.close()
    bell.close()
    assert failures == []


def _in_module(name, source):
    """The functions of a module of that name."""
    namespace = {"__name__": name, "time": time}
    exec(compile(source, f"/site-packages/{name.replace('.', '/')}.py", "exec"), namespace)  # noqa: S102
    return namespace


WAITING = """
def barrier(group=None):
    tensor = Tensor()
    kept.append(weakref.ref(tensor))
    lock.acquire()
"""


class TestSampler:
    def meanwhile(self, look):
        """`look` in another thread, while this one waits for it."""
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    def look_meanwhile(self, sampler, times=3, between=lambda: None):
        """Another thread looks while the main one waits in `barrier`; weak references to what that held."""
        lock, kept = threading.Lock(), []
        lock.acquire()
        inside = _in_module("torch.distributed.distributed_c10d", WAITING)
        inside |= {"Tensor": type("Tensor", (), {}), "kept": kept, "weakref": weakref, "lock": lock}

        def look():
            until(lambda: kept)
            for _ in range(times):
                sampler.look()
                between()
            lock.release()

        thread = threading.Thread(target=look)
        thread.start()
        inside["barrier"]()
        thread.join()
        return kept

    def test_thread_that_waits_in_a_collective(self, sampled):
        """The call, its group with its ranks and its count, and the user's line."""
        sampler, reader = sampled(c10d(Group0()))
        self.look_meanwhile(sampler)
        (found,) = reader.sample().places

        assert (found.thread, found.call, list(found.inside)) == ("", "barrier", ["barrier"])
        assert found.group == Group("0", "default_pg", "0-3", 1, None)
        assert re.fullmatch(rf"{re.escape(__file__)}:\d+ look_meanwhile", found.site)
        assert found.stack[0].endswith(" barrier")
        assert found.stack[1] == found.site

    def test_thread_that_moves(self, sampled):
        """One that was elsewhere at the last look is not written down, unless somebody asks."""
        sampler, reader = sampled(c10d(Group0()))
        seen = []

        def look():
            for asked in (False, True):
                sampler.look(asked=asked)
                seen.append([(each.call, each.site.rpartition(" ")[2]) for each in reader.sample().places])

        self.meanwhile(look)

        assert seen == [[], [("", "meanwhile")]]

    def test_stack_of_a_collective(self):
        """From c10d's innermost frame outwards to the caller that is not torch's."""
        code = "import sys\ndef barrier(group=None):\n    return sys._getframe()\ndef new(): return barrier()"
        inside = _in_module("torch.distributed.distributed_c10d", code)
        frame = inside["barrier"]()

        assert [each.f_code.co_name for each in _in_distributed(_outwards(frame))] == ["barrier"]
        assert _in_distributed(_outwards(sys._getframe())) == []

    def test_groups_count_tells_that_a_rank_moves(self, sampled):
        """The same instruction with another count is another wait."""
        group = Group0()
        sampler, reader = sampled(c10d(group))
        begins = []

        def between():
            begins.append([each.since for each in reader.sample().places])
            group.begun += len(begins) == 3  # a collective after the third look

        self.look_meanwhile(sampler, 5, between)

        assert begins[1] == begins[2] != []
        assert begins[4] != begins[2]

    def test_keeps_nothing_alive(self, sampled):
        """No frame, and no tensor of one, outlives a look."""
        sampler, _ = sampled(c10d(Group0()))
        gc.disable()
        try:
            alive = [each() for each in self.look_meanwhile(sampler)]
        finally:
            gc.enable()

        assert alive == [None]

    def test_memory(self, sampled):
        """Many looks leave nothing behind."""
        sampler, _ = sampled(c10d(Group0()))
        blocks = []

        def look():
            for times in (100, 3000):
                for _ in range(times):
                    sampler.look(asked=True)
                gc.collect()
                blocks.append(sys.getallocatedblocks())

        self.meanwhile(look)

        assert blocks[1] - blocks[0] < 500

    def test_record(self, sampled):
        """A sample is read as it was written, and if it is too large without outer frames."""
        sampler, reader = sampled()
        sampler._write(Sample([place("barrier", WORLD)], [WORLD]))
        read = reader.sample()
        sampler._write(Sample([place("barrier", WORLD, stack=["x" * 1000] * 24)]))

        assert json.dumps(read) == json.dumps([[place("barrier", WORLD)], [WORLD]])
        assert [len(each.stack) for each in reader.sample().places] == [6]


class TestProcess:
    """In programs that leave the usual way, and that do not."""

    PROGRAM = """
import os, sys, threading, warnings
sys.path[:0] = {paths!r}
from test_watch import STATE, Store, reporting, world
from torchcommshim.tell.watch.observer import Watch
watch = Watch(reporting(60.0), STATE)
watch.begin(world(size=2), Store())
watch.end(world(size=2), None)
{rest}
"""

    @pytest.mark.parametrize(
        ("rest", "code", "out"),
        [
            ("print(threading.active_count())", 0, "1\n"),
            ("raise SystemExit(3)", 3, ""),
            ("threading.Thread(target=threading.Event().wait, daemon=True).start()", 0, ""),
            ("pid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1])", 0, "0\n"),
            ("import atexit; atexit.register(print, 'last')", 0, "last\n"),
        ],
        ids=["threads", "exit-code", "daemon-thread", "fork", "atexit"],
    )
    def test_program_is_as_before(self, rest, code, out):
        """It counts its own threads, ends with its own code, forks, and says nothing."""
        paths = [str(os.path.dirname(__file__)), *sys.path]
        done = subprocess.run(
            [sys.executable, "-c", self.PROGRAM.format(paths=paths, rest=rest)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        assert (done.returncode, done.stdout, done.stderr) == (code, out, "")


class TestWhere:
    def test_asked_on_the_host(self, said):  # noqa: F811
        """Every rank of the job answers, though nothing is late; ranks of this process are one job."""
        store = Store()
        ranks = [Watch(reporting(60.0), STATE) for _ in range(3)]
        for rank, watch in enumerate(ranks):
            watch.begin(world(rank, 3), store)
            watch.end(world(rank, 3), None)
        own = until(
            lambda: [
                cards
                for cards in where.find_jobs().values()
                if _pids(cards) == {os.getpid()} and len(cards) == 3
            ]
        )
        job = until(lambda: (found := where.ask(own[0])) and len(found.views) == 3 and found)

        assert job.size == 3
        assert sorted(job.views) == [0, 1, 2]
        assert job.unheard == []
        assert {each.pid for each in job.views.values()} == {os.getpid()}
        assert all(each.place and each.place.stack for each in job.views.values())
        assert said() == ""

    def test_another_user(self, monkeypatch):
        """Whoever is another user gets no answer, and is not listened to."""
        here, there = socket.socketpair()
        with here, there:
            own = door.is_own(here)
            monkeypatch.setattr(os, "getuid", lambda: 12345)
            other = door.is_own(here)

        assert (own, other) == (True, False)

    def test_watcher_closes_on_another_user(self, said):  # noqa: F811
        """The door of a watcher says nothing to a connection that is not its user's."""
        if os.getuid() != 0:
            pytest.skip("only root can pose as another user")
        watch = Watch(reporting(60.0), STATE)
        watch.begin(world(0, 2), Store())
        (name,) = until(lambda: [each for each in door.doors() if f"-{os.getpid()}-" in each])
        ask = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(20); "
            "s.connect('\\0' + sys.argv[1])"
            "\ntry: s.sendall(b'{\"who\": true}\\n'); print(s.recv(99))\nexcept ConnectionError: print(b'')"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ask, name[1:]],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        assert done.stdout == "b''\n", done.stderr

    def test_nobody(self, monkeypatch, capsys):
        """Where there is no job, a sentence says so, and what could be the reason."""
        monkeypatch.setattr(where, "doors", list)

        assert where.main(SimpleNamespace(job=None, every=None, json=False, rank=None)) == 1
        assert "No job of this user" in capsys.readouterr().err


def _pids(cards):
    return {card["pid"] for card in cards}


class TestLimit:
    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            (place("barrier", WORLD), 120.0),
            (place("barrier", WORLD._replace(begun=2)), 1440.0),
            (place("barrier", WORLD._replace(begun=2, timeout_s=None)), None),
            (place("barrier", WORLD._replace(begun=None)), 1440.0),
            (place("destroy_process_group"), 120.0),
            (place("split_group"), None),
            (place("new_group", inside=["new_group", "_new_process_group_helper"]), None),
            (place("new_group", inside=["new_group", "_store_based_barrier"]), 120.0),
            (place("work.wait()", WORLD, inside=[]), 1440.0),
            (place(), None),
        ],
    )
    def test_limit(self, where, expected):
        """First use and teardown as creations, any other wait at four fifths of its group's time-out."""
        assert waits.limit_s(where, 120.0) == expected

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("work.wait()", "work.wait()"),
            ("torch.cuda.synchronize()", "torch.cuda.synchronize()"),
            ("value = store.get('key')", "store.get()"),
            ("config.get('key')", ""),
            ("x = model(batch)", ""),
        ],
    )
    def test_lines_that_wait(self, line, expected):
        """A wait that shows as the user's own line is told by the call in progress."""
        assert waits.waiting_call(line) == expected


class TestCauses:
    def test_rank_has_not_come(self):
        """The others wait in a barrier: who has not come, and the line where that rank is."""
        known = views(
            *(view(rank, place("barrier", WORLD)) for rank in (1, 2, 3)),
            view(0, place(site="train.py:5 load")),
        )

        assert causes(known, [1, 2, 3]) == [
            "rank 0 has not come to barrier on the world [0-3]: in user code, at train.py:5 load."
        ]

    def test_data_loader(self):
        """A rank that waits for data is told from one that computes."""
        loading = place(
            stack=["/x/selectors.py:4 select", "/x/torch/utils/data/dataloader.py:1 __next__", MAIN]
        )
        known = views(*(view(rank, place("barrier", WORLD)) for rank in (1, 2, 3)), view(0, loading))

        assert "in the data loader, at train.py:8 main" in causes(known, [1, 2, 3])[0]

    def test_other_collective(self):
        """Two calls at one count."""
        known = views(*(view(rank, place("barrier" if rank else "all_reduce", WORLD)) for rank in range(4)))
        (found,) = causes(known, [0, 1, 2, 3])

        assert found.startswith(
            "ranks of the world [0-3] are in different collectives: rank 0 is in all_reduce, collective 1, "
            "at train.py:8 main; ranks 1-3 are in barrier, collective 1, at train.py:8 main."
        )

    def test_other_count(self):
        """One call at two counts."""
        known = views(*(view(r, place("barrier", WORLD._replace(begun=5 + (r == 2)))) for r in range(4)))
        (found,) = causes(known, [0, 1, 2, 3])

        assert "at different collectives: ranks 0,1,3 are in barrier, collective 5," in found
        assert "rank 2 is in barrier, collective 6," in found

    def test_everyone_has_come(self):
        """Nobody is missing and all are in the same collective: then it is the network or a device."""
        known = views(*(view(rank, place("barrier", WORLD)) for rank in range(4)))

        assert causes(known, [0, 1, 2, 3])[0].startswith("all ranks of it are in barrier on the world [0-3]")

    def test_one_is_missing_and_the_network_is_not_blamed(self):
        """Near miss of the last: as long as a rank has not come, the network is not named."""
        known = views(*(view(rank, place("barrier", WORLD)) for rank in range(3)), view(3, place()))

        assert "network" not in " ".join(causes(known, [0, 1, 2]))

    def test_cycle(self):
        """Two groups in two orders: both waits are named."""
        one, other = Group("1", "", "0,1", 1), Group("2", "", "0,1", 1)
        known = views(
            view(0, place("barrier", one)), view(1, place("barrier", other, site="train.py:9 main"))
        )
        (found,) = causes(known, [0, 1])

        assert found.startswith(
            "ranks wait for each other in different groups: group '1' [0,1] waits for rank 1, which is in "
            "barrier on group '2' [0,1], collective 1 of that group, at train.py:9 main; group '2' [0,1] "
            "waits for rank 0"
        )

    def test_two_groups_without_a_cycle(self):
        """A rank waits in another group for one that is in user code: that one is named, and no cycle."""
        one, other = Group("1", "", "0,1", 1), Group("2", "", "1,2", 1)
        known = views(
            view(0, place("barrier", one)),
            view(1, place("barrier", other)),
            view(2, place(site="train.py:5 load")),
        )
        found = " ".join(causes(known, [0, 1]))

        assert "wait for each other" not in found
        assert "rank 2 has not come to barrier on group '2' [1,2]: in user code, at train.py:5 load." in found

    def test_cycle_of_three(self):
        """Longer cycles are found."""
        groups = [Group(str(n), "", shortened(sorted((n, (n + 1) % 3))), 1) for n in range(3)]
        known = views(*(view(rank, place("barrier", groups[rank])) for rank in range(3)))

        assert causes(known, [0, 1, 2])[0].count("waits for rank") == 3

    def test_both_receive(self):
        """Two ranks that receive from each other."""
        known = views(*(view(rank, place("recv", WORLD, peer=1 - rank)) for rank in range(2)))

        assert causes(known, [0, 1]) == [
            "rank 0 and rank 1 both receive from each other, and neither does the opposite."
        ]

    def test_receives_from_the_wrong_rank(self):
        """The peer is in a call with a third rank."""
        known = views(
            view(0, place("recv", WORLD, peer=1)), view(1, place("recv", WORLD, peer=2)), view(2, place())
        )

        assert causes(known, [0])[0].startswith(
            "rank 0 is in recv from rank 1, and that is in recv from rank 2 on"
        )

    def test_sender_that_is_on_its_way(self):
        """Near miss: the peer is in user code, and no number is said to be wrong."""
        known = views(view(0, place("recv", WORLD, peer=1)), view(1, place(site="train.py:5 load")))

        assert causes(known, [0]) == [
            "rank 0 is in recv from rank 1, and that is in user code, at train.py:5 load."
        ]

    def test_rank_has_ended(self):
        """How it ended, and when."""
        known = views(*(view(rank, place("barrier", WORLD)) for rank in range(3)))
        end = {3: End(f"{EXITED} after ValueError: bad batch", "15:13:22")}

        assert causes(known, [0, 1, 2], end) == [
            "rank 3 cannot come to barrier on the world [0-3]: exited after ValueError: bad batch, at "
            "15:13:22."
        ]

    @pytest.mark.parametrize(
        ("state", "expected"),
        [
            (LOCKED, "holds Python's global lock, in user code, at train.py:8 main."),
            (
                STOPPED,
                "stopped by a signal or a debugger, in user code, at train.py:8 main. "
                "`kill -CONT 103` on host",
            ),
        ],
    )
    def test_rank_that_cannot_say(self, state, expected):
        """A rank that holds the lock, and one that is stopped."""
        known = views(
            *(view(rank, place("barrier", WORLD)) for rank in range(3)), view(3, place(), state=state)
        )

        assert expected in causes(known, [0, 1, 2])[0]


class TestPicture:
    def test_same_stack_is_one_entry(self):
        """Whoever others wait for comes first, then the largest; frames from the user's to the innermost."""
        known = views(
            *(view(rank, place("barrier", WORLD)) for rank in (1, 2, 3)),
            view(0, place(site="train.py:5 load")),
        )
        text = picture.picture(Job(4, known))

        assert re.findall(r"^  ranks? [\d,-]+ \(", text, re.MULTILINE) == ["  rank 0 (", "  ranks 1-3 ("]
        assert text.index("train.py:8 main\n      c10d.py:1 barrier") > 0

    def test_who_is_missing(self):
        """Ended, silent and unheard ranks are each named with what is known."""
        known = views(view(0, place("barrier", WORLD)))
        text = picture.picture(Job(4, known, {1: End(EXITED, "15:13:22")}, silent=[2]))

        assert "rank 1: exited, at 15:13:22" in text
        assert "rank 2 does not answer" in text
        assert "rank 3 not heard of" in text

    def test_ahead(self):
        """A rank that has begun more collectives of a group than others stands out."""
        ahead = [
            view(rank, place(), counts=[WORLD._replace(begun=6 if rank == 2 else 5)]) for rank in range(4)
        ]
        equal = [view(rank, place(), counts=[WORLD]) for rank in range(4)]

        assert (
            "collectives on the world [0-3]: ranks 0,1,3 have begun 5; rank 2 has begun 6"
            in picture.picture(Job(4, views(*ahead)))
        )
        assert "collectives on" not in picture.picture(Job(4, views(*equal)))

    def test_thousands(self):
        """A large job is a page."""
        known = views(*(view(rank, place("barrier", WORLD._replace(ranks="0-4095"))) for rank in range(4096)))

        assert len(picture.picture(Job(4096, known)).splitlines()) < 12

    def test_plain(self):
        """What --json prints can be written as JSON, and names what the text does."""
        known = views(view(0, place("barrier", WORLD)))
        told = json.loads(json.dumps(picture.plain(Job(2, known))))

        assert told["ranks"]["0"]["threads"][0]["group"]["ranks"] == "0-3"
        assert told["unheard"] == [1]

    def test_report(self):
        """The hang report counts those that wait together, and begins with the cause."""
        known = views(
            *(view(rank, place("barrier", WORLD)) for rank in (1, 2, 3)),
            view(0, place(site="train.py:5 load")),
        )
        lines = picture.report(Job(4, known, late=[1])).splitlines()

        assert lines[0] == "hang report: 3 of 4 ranks wait in barrier, for 150 s by now [TCS-hang-report]"
        assert lines[1].startswith("  likely cause: rank 0 has not come to barrier on the world [0-3]")
