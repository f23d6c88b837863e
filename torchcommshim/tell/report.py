# SPDX-License-Identifier: Apache-2.0
"""What the shim has done, and the few lines it says.

Everything goes to stderr: tools parse the stdout of the processes that we live in.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Callable, Iterable

import torchcommshim
from torchcommshim.repair.traits import Traits
from torchcommshim.settings import Settings


class Report:
    """Counts repairs and says the one line a process."""

    def __init__(self, settings: Settings, traits: Traits, torch_version: str) -> None:
        self.settings = settings
        self.traits = traits
        self.torch_version = torch_version
        self.patched: tuple[str, ...] = ()
        self.repairs: Counter[str] = Counter()
        self.failures: list[str] = []
        self._has_spoken = False
        self._has_warned = False

    def repaired(self, names: Iterable[str], what: Callable[[], str], *, speak: bool) -> None:
        """Count repairs, by the names of their defects; say `what` if it is the first one and `speak`."""
        names = list(names)
        self.repairs.update(names)
        if speak and not self._has_spoken:
            self._has_spoken = True
            say(f"{what()} [TCS-{names[0]}]")

    def warn(self) -> None:
        """Say, once, which settings were not understood."""
        for warning in () if self._has_warned else self.settings.warnings:
            say(f"{warning} [TCS-setting]")
        self._has_warned = True

    def failed(self, where: str, error: Exception) -> None:
        """Note an error inside the shim; torch goes on without it.  One line a place."""
        if not any(failure.startswith(f"{where}: ") for failure in self.failures):
            # Of an error with a file, repr leaves the file out.
            told = f"{type(error).__name__}: {error}" if getattr(error, "filename", None) else repr(error)
            self.failures.append(f"{where}: {told}")
            say(f"failed in {where}: {told}; torch goes on without it [TCS-failed]")


_current: Report | None = None


def use(report: Report | None) -> None:
    """Make `report` the one that `status` reads."""
    global _current
    _current = report


def current() -> Report | None:
    """The report in use; None before torch.distributed is imported, or when nothing is patched."""
    return _current


def status() -> dict[str, object]:
    """See `torchcommshim.status`."""
    report = _current
    return {
        "version": torchcommshim.__version__,
        "armed_by": list(torchcommshim._armed_by),
        "strategy": report.settings.strategy if report else "off" if torchcommshim._is_off() else None,
        "agreement": report.settings.agreement if report else None,
        "torch": report.torch_version if report else None,
        "patched": list(report.patched) if report else [],
        "traits": report.traits.digest() if report else None,
        "standing_aside": list(report.traits.missing) if report else [],
        "repairs": dict(report.repairs) if report else {},
        "failures": torchcommshim._failures + (report.failures if report else []),
    }


def say(text: str) -> None:
    """One line on stderr; never raises, since a host may have closed or replaced the stream."""
    try:
        sys.stderr.write(f"torchcommshim {torchcommshim.__version__}: {text}\n")
        sys.stderr.flush()
    except Exception:
        pass
