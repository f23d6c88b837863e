# SPDX-License-Identifier: Apache-2.0
"""The rank's side: it starts its watcher, and finds the job's hub through the world's store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import torchcommshim
from torchcommshim.repair.rendezvous import Rendezvous
from torchcommshim.tell.report import Report
from torchcommshim.tell.watch import hubs, sampler, stacks
from torchcommshim.tell.watch.process import started
from torchcommshim.tell.watch.record import Record, above_streams
from torchcommshim.tell.watch.views import EXITED

# The watcher is no child of its rank: a program may wait until it has no children left.
_COMMAND = (
    "import os, sys; os.fork() and os._exit(0); sys.path.append(sys.argv[1]); "
    "from torchcommshim.tell.watch.watcher import main; main()"
)
# Where schedulers and launchers write which job this is.
_JOB_NAMES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID")
_PARTING_S = 1.0
_BACKLOG = 4096  # ranks connect at the same time


class Session:
    """One world of this process, its record and its watcher; ends with the process, or when let go.

    Attributes:
        record: what the watcher reads.
    """

    def __init__(self, rendezvous: Rendezvous, current: Report, c10d: Any = None) -> None:
        self.record = Record(rendezvous.size)
        self._size = rendezvous.size
        bell, theirs = map(_above_streams, socket.socketpair())
        try:
            self._starter, wire, orders = _begin(self.record, rendezvous, current, theirs)
        except BaseException:
            bell.close()
            raise
        finally:
            theirs.close()
            os.close(self.record.descriptor)  # it stays mapped
        self._wire, self._mine = wire, orders["mine"]
        self._lock, self._has_joined = threading.Lock(), False
        period_s = min(sampler.PERIOD_S, current.settings.hang_report_s / 4)
        self._sampler = sampler.Sampler(
            self.record,
            c10d,
            bell,
            period_s,
            lambda error: current.failed("the hang report's sampler", error),
        )
        weakref.finalize(self, _part, self._starter, wire, self._sampler, os.getpid())
        _tell(wire, orders)
        if sampler.is_possible():
            self._sampler.start()

    def join(self, store: Any) -> None:
        """Tell the watcher where the job's hub is, which is found through `store`, the world's; once."""
        with self._lock:
            if not self._has_joined:
                found = hubs.find(store, self._size, self._mine)
                self._has_joined = True
                _tell(self._wire, {"join": found._asdict()})

    def pass_on(self) -> None:
        """The rank has left the rendezvous."""
        _tell(self._wire, {"passed": True})

    def visit(self, hub: dict[str, Any]) -> None:
        """Have the watcher tell that hub of this rank, which cannot come to its world."""
        _tell(self._wire, {"visit": hub})

    def settle(self) -> None:
        """Let go of the process that has started the watcher, if it has ended: it would stay a zombie."""
        if self._starter.returncode is None:
            self._starter.poll()


def _begin(
    record: Record, rendezvous: Rendezvous, current: Report, bell: socket.socket
) -> tuple[subprocess.Popen[bytes], socket.socket, dict[str, Any]]:
    """What starts the watcher, the connection to its stdin, and what it is to be told first."""
    stack = stacks.offer()
    listener, addresses = _listen(rendezvous.host, rendezvous.port)
    with listener:
        mine = {
            "rank": rendezvous.rank,
            "size": rendezvous.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "program": os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else "",
            "job": {name: os.environ[name] for name in _JOB_NAMES if os.environ.get(name, "none") != "none"},
            "addresses": addresses,
            "port": listener.getsockname()[1],
            "token": os.urandom(16).hex(),
            "label": os.urandom(4).hex(),  # what people call it, which is no secret
        }
        orders = {
            "mine": mine,
            "rendezvous": rendezvous,
            "listener": listener.fileno(),
            "world_size": rendezvous.size,
            "limit_s": current.settings.hang_report_s,
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "record": record.descriptor,
            "bell": bell.fileno(),
            "command": _command(),
            "stack": stack,
            "torch": current.torch_version,
            "strategy": current.settings.strategy,
        }
        inherited = [
            listener.fileno(),
            record.descriptor,
            bell.fileno(),
            *([stack.descriptor] if stack else []),
        ]
        return (*_start(inherited), orders)


def _command() -> str:
    """What the user has started, for a list of jobs."""
    words = [os.path.basename(word) for word in sys.argv[:1]] + sys.argv[1:4]
    return " ".join(words)[:100]


def _listen(host: str, port: int) -> tuple[socket.socket, list[str]]:
    """A listening socket, and the names under which other ranks may reach it, the likeliest first.

    `host` and `port`: of the store; empty where it has none.
    """
    if host in ("localhost", "::1") or host.startswith("127."):
        listener, addresses = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG), ["127.0.0.1"]
    else:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        towards = _address_towards(host, port) if host else []
        addresses = [*towards, socket.gethostname(), "127.0.0.1"]
    return _above_streams(listener), addresses


def _address_towards(host: str, port: int) -> list[str]:
    """This host's address on the way to another; none if the way is not known."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return [probe.getsockname()[0]]
    return []


def _above_streams(connection: socket.socket) -> socket.socket:
    return socket.socket(fileno=above_streams(connection.detach()))


def _start(inherited: list[int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """What starts the watcher and ends, and a connection to the watcher's stdin.

    A socket, since writing to a pipe whose reader is gone may end this process by SIGPIPE, and since it can
    be shut down where a fork has a copy of it.
    """
    package = str(Path(torchcommshim.__file__).absolute().parent.parent)
    # It needs nothing of the program: no site-packages, no variables, but where Python cannot start without.
    isolated = [] if "PYTHONHOME" in os.environ else ["-I"]
    wire, theirs = map(_above_streams, socket.socketpair())
    try:
        starter = subprocess.Popen(
            [
                sys.executable,
                *isolated,
                "-S",
                "-c",
                _COMMAND,
                package,
                str(os.getpid()),
            ],  # for those who use ps
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=_stderr(),
            pass_fds=inherited,
            cwd="/",
            start_new_session=True,  # a signal to this process's group (Ctrl-C) is not meant for it
        )
    except BaseException:
        wire.close()
        raise
    finally:
        theirs.close()
    return starter, wire


def _tell(wire: socket.socket, message: dict[str, Any]) -> None:
    wire.sendall(json.dumps(message).encode() + b"\n", socket.MSG_NOSIGNAL)


def _stderr() -> int:
    """Where the report goes: this process's stderr as it is now, if it has one."""
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(Exception):
            return stream.fileno()  # type: ignore[union-attr]
    return subprocess.DEVNULL


def _part(starter: subprocess.Popen[bytes], wire: socket.socket, looking: sampler.Sampler, pid: int) -> None:
    """Tell the watcher how this process ends, upon which it ends too."""
    if os.getpid() != pid:
        looking.leave()
        starter.returncode = 0  # it is no child of this fork, which has nothing to wait for
        wire.close()
        return
    looking.stop()
    error = getattr(sys, "last_value", None)  # what has ended the program, if something has
    how = f"{EXITED} after {type(error).__name__}: {error}".partition("\n")[0][:200] if error else EXITED
    try:
        with wire:
            _tell(wire, {"bye": how})
            wire.shutdown(socket.SHUT_WR)
            wire.settimeout(_PARTING_S)
            wire.recv(1)  # nothing, once the watcher has ended
    except socket.timeout:  # Python 3.9 has a class of its own for it
        with contextlib.suppress(OSError):
            os.killpg(starter.pid, signal.SIGKILL)
    except OSError:
        pass
    starter.wait()
