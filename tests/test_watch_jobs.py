# SPDX-License-Identifier: Apache-2.0
"""The hang report in real jobs: each fault gives one report that names it, and legal programs give none."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
import torch.distributed as dist  # noqa: E402

import torchcommshim  # noqa: E402
from torchcommshim import patches  # noqa: E402
from torchcommshim.commands.verify import simulated  # noqa: E402
from torchcommshim.commands.verify.switchboard import switchboard  # noqa: E402
from torchcommshim.tell import report  # noqa: E402
from torchcommshim.tell.watch import hubs  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the hang report works on Linux only")

LIMIT_S = 4.0  # on a busy machine a world may take a second or two, and is not to be reported
DEADLINE_S = 60.0  # seconds until a test gives up on a report
PATIENCE_S = 1.0  # seconds in which a second report would come


@pytest.mark.parametrize("kind", ["file", "hash", "tcp", "prefix"])
def test_first_come_is_the_hub(tmp_path, kind):
    """On each kind of store that torch has: for each world anew, and two operations each."""
    store = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 8),
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "prefix": lambda: dist.PrefixStore("job", dist.PrefixStore("attempt", dist.HashStore())),
    }[kind]()
    found = [
        [hubs.find(store, 3, {"rank": rank}).hub["rank"] for rank in ranks]
        for ranks in ([2, 0, 1], [1, 2, 0])
    ]

    assert found == [[2, 2, 2], [1, 1, 1]]


@pytest.mark.parametrize(("value", "watched"), [("0", False), ("off", False), ("60", True)])
def test_switch(monkeypatch, value, watched):
    """TORCHCOMMSHIM_HANG_REPORT_S=0 takes it away altogether."""
    with monkeypatch.context() as environment:
        environment.setenv("TORCHCOMMSHIM_HANG_REPORT_S", value)
        torchcommshim.uninstall()
        torchcommshim.install()
        observers = patches._observers(report.current(), None)
    torchcommshim.uninstall()
    torchcommshim.install()

    assert ("Watch" in [type(each).__name__ for each in observers]) is watched


# Jobs.  Ranks are forked from this process, which has imported torch; each installs the shim anew.


def _rank(program, rank, size, folder, address, environment, ready):
    os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torchcommshim.uninstall()
    os.environ.update(
        {"TORCHCOMMSHIM_HANG_REPORT_S": str(LIMIT_S), "GLOO_SOCKET_IFNAME": "lo"}, **environment
    )
    torchcommshim.install()
    simulated.install(address, devices=size)
    ready.wait(DEADLINE_S)
    program(rank, size, dist.FileStore(str(folder / "store"), size))


class Job:
    """A job of `size` ranks, each of which runs `program(rank, size, store)`.

    Ranks are forked from this process; with `start` as "spawn" they import torch themselves.
    """

    start = "fork"

    def __init__(self, program, size, folder, **environment):
        self.folder, self.size, self.environment, self.program = folder, size, environment, program
        self.codes = []

    def run(self, until=None):
        """Run it to its end; with `until`, to the moment when somebody has said that."""
        context = multiprocessing.get_context(self.start)
        ready = context.Barrier(self.size)
        with switchboard() as address:
            ranks = [
                context.Process(
                    target=_rank,
                    args=(self.program, rank, self.size, self.folder, address, self.environment, ready),
                )
                for rank in range(self.size)
            ]
            for process in ranks:
                process.start()
            try:
                self._wait(ranks, until)
            finally:
                for process in ranks:
                    process.kill()
                    process.join()
        self.codes = [process.exitcode for process in ranks]
        return self

    def _wait(self, ranks, until):
        end = time.monotonic() + DEADLINE_S
        while any(process.is_alive() for process in ranks):
            if until and re.search(until, self.said):
                time.sleep(PATIENCE_S)
                return
            assert time.monotonic() < end, f"no {until!r} in time; there is: {self.said}"
            time.sleep(0.05)

    @property
    def said(self):
        files = sorted(self.folder.glob("*.err"))
        return "".join(file.read_text(errors="replace") for file in files)

    @property
    def text(self):
        """What was said, without line breaks."""
        return " ".join(self.said.split())


def _start(rank, size, store, backend="gloo", **options):
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)


def _other_order(rank, size, store):
    _start(rank, size, store)
    for ranks in ([[0, 1], [0]], [[1], [0, 1]])[rank]:
        dist.new_group(ranks)


def _other_list(rank, size, store):
    _start(rank, size, store)
    dist.new_group([0, 1, 2] if rank == 0 else [0, 1])
    time.sleep(DEADLINE_S)


def _other_backend(rank, size, store):
    _start(rank, size, store)
    dist.new_group([0, 1], backend="gloo" if rank == 0 else "nccl")
    time.sleep(DEADLINE_S)


def _never_arrives(rank, size, store):
    _start(rank, size, store)
    if rank == 1:
        time.sleep(DEADLINE_S)
    dist.new_group([0, 1, 2])


def _never_starts(rank, size, store):
    if rank == 1:
        time.sleep(DEADLINE_S)
    _start(rank, size, store)


MISMATCH = (
    r"ranks do not make the same groups in the same order: rank 0 makes #1 new_group \[{}\] gloo at \S+ {}; "
    r"in its place rank 1 makes #1 new_group \[{}\] {} at"
)
FAULTS = [
    (_other_order, 2, MISMATCH.format("0,1", "_other_order", "1", "gloo")),
    (_other_list, 3, MISMATCH.format("0-2", "_other_list", "0,1", "gloo")),
    (_other_backend, 2, MISMATCH.format("0,1", "_other_backend", "0,1", "nccl")),
    (_never_arrives, 3, r"rank 1 has not come to #1 new_group \[0-2\] gloo at \S*:\d+ _never_arrives"),
    (
        _never_starts,
        3,
        r"nothing is heard of rank 1, needed for #0 init_process_group gloo at \S*:\d+ _start",
    ),
]


@pytest.mark.parametrize(
    ("program", "size", "expected"), FAULTS, ids=[program.__name__.strip("_") for program, _, _ in FAULTS]
)
def test_fault(tmp_path, program, size, expected):
    """Each fault has one report, of one rank for the job, that names the likely cause."""
    job = Job(program, size, tmp_path).run(until="innermost call first")

    assert job.said.count("hang report") == 1
    assert re.search(f"likely cause: {expected}", job.text), job.said
    assert any(job.codes)


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _meet(rank, size, port, **environment):
    """Make a world over a store that rank 0 serves."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(size), **environment)
    dist.init_process_group("gloo")


def test_rank_that_never_starts(tmp_path):
    """It alone is named: rank 0, which waits for it in the constructor of the store, is there."""
    port = _free_port()

    def program(rank, size, store):
        if rank == 3:
            time.sleep(DEADLINE_S)
        _meet(rank, size, port)

    job = Job(program, 4, tmp_path).run(until="innermost call first")

    assert job.said.count("hang report") == 1
    assert "3 of 4 ranks wait" in job.said
    assert re.search(
        r"rank  0 +waiting for \d+ s in the rendezvous: #0 init_process_group gloo at \S+ _meet\n"
        r"  ranks 1,2 +waiting for \d+ s in ProcessGroupGloo: #0 .*\n"
        r"  rank  3 +not heard of",
        job.said,
    ), job.said
    assert re.search("likely cause: nothing is heard of rank 3, needed for #0", job.text), job.said


def test_store_that_nobody_serves(tmp_path):
    """Each rank says for itself where it waits, and for whom; and that it has come, once it has."""
    port, limit_s = _free_port(), 1.5

    def program(rank, size, store):
        if rank == 0:
            time.sleep(3 * limit_s)
        _meet(rank, size, port)
        dist.barrier()

    job = Job(program, 3, tmp_path, TORCHCOMMSHIM_HANG_REPORT_S=str(limit_s)).run()

    lines = re.findall(r"hang report: (rank \d .*)", job.said)
    assert [re.sub(r"\d+ s|process \d+ on [^)]+|/\S+:\d+ ", "", line) for line in lines] == [
        text
        for rank in (1, 2)
        for text in (
            f"rank {rank} of 3 () waits in the rendezvous for  by now, at _meet. It has not reached the "
            "store at "
            f"127.0.0.1:{port}: nobody listens there. The store is to be served by rank 0, which has not "
            "started, "
            "or has ended, or was given another MASTER_ADDR or MASTER_PORT. [TCS-rendezvous]",
            f"rank {rank} has reached the store after . [TCS-rendezvous]",
        )
    ]
    assert "Interrupted" not in job.said
    assert job.codes == [0] * 3


def test_two_processes_that_claim_one_rank(tmp_path):
    """Each is named, also the one that has ended since its port was taken; and who nobody claims to be."""
    port = _free_port()

    def program(rank, size, store):
        time.sleep(0.5 * (rank > 1))
        _meet(rank % 2, size, port)

    job = Job(program, 4, tmp_path).run(until="innermost call first")

    process = r"process (\d+) on \S+ \(.*?\)"
    first = re.search(rf"rank 0 by {process} and {process}; rank 1 by {process} and {process}\.", job.text)
    assert first, job.said
    assert len(set(first.groups())) == 4
    assert "Nobody claims ranks 2,3." in job.text
    assert re.search(
        rf"rank 0 of 4 cannot serve the store at 127.0.0.1:{port}, since another process does: there, "
        r"rank [01] of 4 is process \d+ on",
        job.text,
    )
    assert re.search("likely cause: several processes claim one rank: ", job.text)


def _two_jobs(port, size):
    """A job of 3 ranks, and one rank of a job of `size`, which comes to the same port later."""

    def program(rank, _, store):
        if rank < 3:  # the job that was there first is well
            _meet(rank, 3, port, SLURM_JOB_ID="17")
            time.sleep(DEADLINE_S)
        time.sleep(2.0)
        _meet(size - 2, size, port, SLURM_JOB_ID="18")

    return program


@pytest.mark.parametrize("size", [3, 5], ids=["same-size", "other-size"])
def test_two_jobs_on_one_port(tmp_path, size):
    """Ranks that have come to the store of another job are told so, with a process of it."""
    job = Job(_two_jobs(_free_port(), size), 4, tmp_path).run(until="innermost call first")

    assert len(re.findall(r"hang report: \d+ of", job.said)) == 1
    assert re.search(
        rf"likely cause: two worlds meet in one store: here, rank {size - 2} of {size} is process \d+ on "
        r"\S+; in the other, rank \d of 3 is process \d+ on \S+ \(.*?\). They are two jobs, of SLURM_JOB_ID "
        r"18 and 17, that use one MASTER_PORT: give each its own.",
        job.text,
    ), job.said


@pytest.mark.parametrize("killed", [0, 1], ids=["the-hub's", "another"])
def test_rank_killed_in_the_middle(tmp_path, killed):
    """The rank is named, with where it was, by a rank that is left; the hub may have been its own."""

    def program(rank, size, store):
        time.sleep(0.3 * rank)  # rank 0 comes first
        _start(rank, size, store)
        if rank == 2:
            time.sleep(DEADLINE_S)
        if rank == killed:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 1)
        dist.new_group([0, 1, 2])

    job = Job(program, 3, tmp_path).run(until="innermost call first")

    assert job.said.count("hang report") == 1
    assert re.search(
        rf"rank {killed} cannot come to #1 new_group \[0-2\] gloo at \S*:\d+ program: gone \(killed.*\), at "
        rf"[\d:]+, in #1 new_group \[0-2\]",
        job.text,
    ), job.said
    assert job.codes[killed] == -signal.SIGALRM


def test_ranks_that_hold_the_global_lock(tmp_path):
    """Ranks 2 and 3 wait in perform_nocolor_split: the report names the defect, and what repairs it."""

    def program(rank, size, store):
        _start(rank, size, store, backend="nccl", device_id=torch.device("cuda", rank))
        dist.new_group([0, 1], backend="gloo")
        dist.all_reduce(torch.ones(1))

    job = Job(program, 4, tmp_path, TORCHCOMMSHIM="observe").run(until="innermost call first")

    assert job.said.count("hang report") == 1
    assert re.search(
        r"ranks 2,3 +waiting for \d+ s in perform_nocolor_split: #1 new_group \[0,1\] gloo at \S+ program\n"
        r"  ranks 0,1 +elsewhere, returned \d+ s ago: #1 new_group",
        job.said,
    ), job.said
    assert re.search(
        r"likely cause: other-backend: on torch \S+ non-members split the world .*issues/145376\). The first "
        r"creation that it breaks is #1 at \S*:\d+ program. TORCHCOMMSHIM=observe leaves it so",
        job.text,
    ), job.said
    assert re.search(r"simulated.py:\d+ perform_nocolor_split\n", job.said)


def test_legal_programs(tmp_path):
    """Groups that only some ranks make, each rank's own group, long work between them: not a word."""

    def program(rank, size, store):
        _start(rank, size, store)
        if rank < 2:
            dist.new_group([0, 1], use_local_synchronization=True)
        if rank == 3:
            dist.new_group([3], use_local_synchronization=True)
        for ranks in ([0, 2], [1, 3], [0, 1, 2, 3]):
            dist.new_group(ranks)
        time.sleep(1.5 * LIMIT_S)
        dist.barrier()
        dist.destroy_process_group()

    job = Job(program, 4, tmp_path).run()

    assert job.codes == [0] * 4
    assert "hang report" not in job.said


def test_late_rank(tmp_path):
    """A rank that comes late has its report, a word that it came, and the job ends well."""

    def program(rank, size, store):
        _start(rank, size, store)
        if rank == 1:
            time.sleep(3 * LIMIT_S)
        dist.new_group([0, 1])
        time.sleep(LIMIT_S)
        dist.barrier()
        dist.destroy_process_group()

    job = Job(program, 2, tmp_path).run()

    assert job.codes == [0, 0]
    assert "rank 1 has not come to #1" in job.text
    assert "the creation has ended on all ranks that waited" in job.said
    assert job.said.count("hang report") == 2
