# SPDX-License-Identifier: Apache-2.0
"""Messages between watchers: JSON objects, one a line, over connections that never block."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from typing import Any, Callable

Message = dict[str, Any]
_LONGEST = 1 << 20  # bytes that are kept of a line that does not end
_FLUSH_S = 0.1


class Line:
    """One connection.

    Args:
        selector: calls `key.data(events)` when the connection is ready.
        connection: non-blocking; it may still be connecting.
        heard: is called with each message; may be replaced.
        lost: is called once, when the connection has ended, unless `close` has ended it; may be replaced.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        heard: Callable[[Line, Message], None],
        lost: Callable[[Line], None],
    ) -> None:
        self._selector, self._socket = selector, connection
        self.heard, self.lost = heard, lost
        self._incoming, self._outgoing = b"", bytearray()
        self._open = True
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:  # the other host may vanish without a word
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        selector.register(connection, selectors.EVENT_READ, self._ready)

    @classmethod
    def to(
        cls,
        selector: selectors.BaseSelector,
        host: str,
        port: int,
        heard: Callable[[Line, Message], None],
        lost: Callable[[Line], None],
    ) -> Line:
        """Begin to connect.

        Raises:
            OSError: the name is not known, or nobody can be there.
        """
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            with contextlib.suppress(BlockingIOError):
                connection.connect(address)
            return cls(selector, connection, heard, lost)
        except BaseException:
            connection.close()
            raise

    def send(self, message: Message) -> None:
        """Send, as soon as the other side takes it."""
        if self._open:
            self._outgoing += json.dumps(message).encode() + b"\n"
            self._selector.modify(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self._ready)

    def flush(self) -> None:
        """Send what is left, for a moment at most."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(_FLUSH_S)
            self._socket.sendall(self._outgoing)

    def close(self) -> None:
        """End the connection."""
        if self._open:
            self._open = False
            self._selector.unregister(self._socket)
            self._socket.close()

    def _ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._write()
            if events & selectors.EVENT_READ:
                self._read()
        except (OSError, ValueError, TypeError, LookupError):  # ended, or not what it should be
            if self._open:
                self.close()
                self.lost(self)

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self._outgoing[: self._socket.send(self._outgoing)]
        if not self._outgoing:
            self._selector.modify(self._socket, selectors.EVENT_READ, self._ready)

    def _read(self) -> None:
        """Raises ValueError for what is no message, OSError where the connection has ended."""
        try:
            received = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionResetError
        *lines, self._incoming = (self._incoming + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a message")
            if self._open:
                self.heard(self, message)
        if len(self._incoming) > _LONGEST:
            raise ValueError("a line that does not end")
