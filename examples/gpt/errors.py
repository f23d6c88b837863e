# SPDX-License-Identifier: Apache-2.0
"""How a job of many processes ends with one message."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from typing import Iterator, NoReturn, Optional

import torch.distributed as dist


class InputError(Exception):
    """Something the user gave cannot be used; the message names the flag or the file."""


def leave(message: Optional[str]) -> NoReturn:
    """End this rank of a job that cannot go on.

    Args:
        message: what to tell the user, or None if another rank tells it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if message is None:
        # A launcher ends the whole job at the first rank that fails. Let that be the one that speaks.
        time.sleep(5)
    else:
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)  # not sys.exit: tearing down a process group can wait for ranks that are gone


def describe(error: BaseException) -> str:
    """The words for `error`: its message if it is the user's to mend, else the traceback."""
    if isinstance(error, InputError):
        return f"pretrain_gpt.py: error: {error}"
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


@contextmanager
def agreed(group: dist.ProcessGroup) -> Iterator[None]:
    """Run a block on every rank of `group`; if it fails on any, all leave and the first that failed says why.

    Without it, the ranks that did not fail would wait in their next collective for one that is gone.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = describe(error)
    failures: list[Optional[str]] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    failed = [rank for rank, text in enumerate(failures) if text is not None]
    if failed:
        leave(f"[rank {failed[0]}] {failure}" if failed[0] == dist.get_rank(group) else None)
