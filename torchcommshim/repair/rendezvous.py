# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a world meet, as the arguments of `init_process_group` and the environment say; pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit


class Rendezvous(NamedTuple):
    """How one rank finds the others.

    Attributes:
        method: `env://`, `tcp://`, `file://`, another URL's scheme, or `store` for one that the caller made.
        rank, size: of this rank, and how many there are.
        host, port: of the TCPStore; empty and 0 where there is none.
        by_agent: torchrun's agent serves the store; else rank 0 does.
    """

    method: str
    rank: int
    size: int
    host: str = ""
    port: int = 0
    by_agent: bool = False

    @property
    def serves(self) -> bool:
        """This rank is to serve the store, and waits in its constructor for all the others."""
        return self.method in ("env://", "tcp://") and self.rank == 0 and not self.by_agent

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.host}:{self.port}" if self.host else self.method


def rendezvous(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Rendezvous | None:
    """Read them as torch's `rendezvous.py` does.

    Args:
        arguments: init_method, rank, world_size and store, as `init_process_group` was given them.
        environ: the environment.

    Returns:
        None if torch is going to refuse them, or if another scheme's handler finds them by itself.
    """
    with suppress(KeyError, ValueError, TypeError, AttributeError):
        found = _read(arguments, environ)
        return found if 0 <= found.rank < found.size else None
    return None


def of_store(store: Any, rank: int, size: int) -> Rendezvous:
    """The ranks of a world meet in `store`, a torch.distributed Store under any number of prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return Rendezvous("store", rank, size, *((str(host), int(port)) if host and port else ()))


def _read(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Rendezvous:
    names = ("rank", "world_size")
    given = {name: str(arguments[name]) for name in names if arguments[name] not in (-1, None)}
    if arguments["store"] is not None:
        return of_store(arguments["store"], int(given["rank"]), int(given["world_size"]))
    url = urlsplit(arguments["init_method"] or "env://")
    known: dict[str, str | None] = {**dict(parse_qsl(url.query)), **given}
    host, port = url.hostname or "", url.port or 0
    if url.scheme == "env":
        known = {"rank": environ.get("RANK"), "world_size": environ.get("WORLD_SIZE"), **known}
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    elif url.scheme != "tcp":
        host, port = "", 0
    rank = int(known["rank"] or "")
    by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Rendezvous(f"{url.scheme}://", rank, int(known["world_size"] or ""), host, port, by_agent)
