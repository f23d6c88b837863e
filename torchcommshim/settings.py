# SPDX-License-Identifier: Apache-2.0
"""What the user asked for, read from the environment.

| variable                      | values                              | default |
| ----------------------------- | ----------------------------------- | ------- |
| `TORCHCOMMSHIM`               | auto, strip, split, observe, off    | auto    |
| `TORCHCOMMSHIM_AGREEMENT`     | error, warn, off                    | error   |
| `TORCHCOMMSHIM_CHECK_ORDER`   | on, off                             | off     |
| `TORCHCOMMSHIM_HANG_REPORT_S` | seconds, 0 or off for none          | 120     |
| `TORCHCOMMSHIM_TRACE`         | a folder                            | none    |

The usual words for true (1, true, on, yes) stand for the default of the first two: `TORCHCOMMSHIM=1` is auto;
those for false (0, false, no) stand for `off`.  A value that is not
known costs one warning that lists what is accepted; the default is kept.
"""

from __future__ import annotations

import math
from typing import Mapping, NamedTuple

STRATEGY = "TORCHCOMMSHIM"
AGREEMENT = "TORCHCOMMSHIM_AGREEMENT"
CHECK_ORDER = "TORCHCOMMSHIM_CHECK_ORDER"
HANG_REPORT_S = "TORCHCOMMSHIM_HANG_REPORT_S"
TRACE = "TORCHCOMMSHIM_TRACE"
VARIABLES = (STRATEGY, AGREEMENT, CHECK_ORDER, HANG_REPORT_S, TRACE)

STRATEGIES = ("auto", "strip", "split", "observe", "off")
AGREEMENTS = ("error", "warn", "off")

# The package's __init__.py, which may import nothing, holds a copy of OFF; a test keeps the two equal.
OFF = ("off", "0", "false", "f", "no", "n")
ON = ("on", "1", "true", "t", "yes", "y")


class Settings(NamedTuple):
    """The user's choices.

    Attributes:
        strategy: one of `STRATEGIES`.
        agreement: one of `AGREEMENTS`; what happens when ranks differ.
        check_order: ranks compare each creation before they make it.
        hang_report_s: seconds after which a creation that has not returned is reported; 0 for never.
        trace: the folder for a file a rank with a line a creation; empty for none.
        warnings: one sentence for each value or variable that was not understood.
    """

    strategy: str = "auto"
    agreement: str = "error"
    check_order: bool = False
    hang_report_s: float = 120.0
    trace: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def acts(self) -> bool:
        """Decisions are acted on, not only reported."""
        return self.strategy not in ("observe", "off")


def read(environment: Mapping[str, str]) -> Settings:
    """Read the settings from `environment` (a mapping such as `os.environ`); never raises."""
    warnings: list[str] = []

    def choice(variable: str, accepted: tuple[str, ...], default: str, on: str = "") -> str:
        value = environment.get(variable, "").strip().lower()
        value = default if not value else (on or default) if value in ON else "off" if value in OFF else value
        if value in accepted:
            return value
        warnings.append(
            f"{variable}={environment[variable]!r} is not known; accepted: {', '.join(accepted)}. "
            f"Using {default!r}."
        )
        return default

    def seconds(variable: str, default: float) -> float:
        text = environment.get(variable, "").strip().lower()
        try:
            value = default if not text else 0.0 if text in OFF else float(text)
        except ValueError:
            value = math.nan
        if 0 <= value < math.inf:
            return value
        warnings.append(
            f"{variable}={environment[variable]!r} is not known; accepted: seconds, 0 for never. "
            f"Using {default:g}."
        )
        return default

    strategy = choice(STRATEGY, STRATEGIES, "auto")
    agreement = choice(AGREEMENT, AGREEMENTS, "error")
    check_order = choice(CHECK_ORDER, ("on", "off"), "off", on="on") == "on"
    hang_report_s = seconds(HANG_REPORT_S, 120.0)
    warnings += [
        f"{name} is not a variable of torchcommshim; accepted: {', '.join(VARIABLES)}. It is ignored."
        for name in unknown(environment)
    ]
    return Settings(
        strategy,
        agreement,
        check_order=check_order,
        hang_report_s=hang_report_s,
        trace=environment.get(TRACE, "").strip(),
        warnings=tuple(warnings),
    )


def unknown(environment: Mapping[str, str]) -> list[str]:
    """The names in `environment` that look like ours and are not, sorted."""
    return sorted(name for name in environment if name.startswith(STRATEGY) and name not in VARIABLES)
