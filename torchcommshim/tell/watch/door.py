# SPDX-License-Identifier: Apache-2.0
"""Where a watcher is asked by its user: a socket with a name and no file, on this host alone.

The kernel says who is at the other end (SO_PEERCRED).  Whoever is not the user that the rank runs as is not
answered, and whoever asks does not listen to another user's process.

| message                                | when                                    |
| -------------------------------------- | --------------------------------------- |
| -> who                                 | first                                   |
| <- job, rank, size, pid, command       | at once                                 |
| -> where                               | then                                    |
| <- view: a `View`                      | one a rank                              |
| <- done: ended, silent, apart          | last                                    |
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
from typing import Callable

from torchcommshim.tell.watch.wire import Line, Message

_NAME = "torchcommshim-where"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Door:
    """A watcher's side.

    Args:
        selector: of the watcher.
        pid: of the rank.
        card: the answer to who this is.
        asked: is called with the line of one who asks where the ranks are.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        pid: int,
        card: Callable[[], Message],
        asked: Callable[[Line], None],
    ) -> None:
        self._selector, self._card, self._asked = selector, card, asked
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{_NAME}-{os.getuid()}-{pid}-{os.getpid()}")
        self._listener.listen()
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, events: int) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if is_own(connection):
                Line(self._selector, connection, self._hear, lambda line: None)
            else:
                connection.close()

    def _hear(self, line: Line, message: Message) -> None:
        if "who" in message:
            line.send(self._card())
        elif "where" in message:
            self._asked(line)


def is_own(connection: socket.socket) -> bool:
    """At the other end is a process of this process's user."""
    held = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(held)[1] == os.getuid())


def doors() -> list[str]:
    """The names of this user's doors on this host."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        words = [line.split()[-1] for line in table]
    return sorted({f"\0{word[1:]}" for word in words if word.startswith(f"@{_NAME}-{os.getuid()}-")})


def knock(name: str, timeout_s: float) -> socket.socket:
    """A connection to a door.

    Raises:
        OSError: it is gone, or another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(name)
        if not is_own(connection):
            raise PermissionError("another user's process")
        return connection
    except BaseException:
        connection.close()
        raise
