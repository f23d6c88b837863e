# SPDX-License-Identifier: Apache-2.0
"""What the user asked for, read from the environment.

| variable                  | values                                    | default |
| ------------------------- | ----------------------------------------- | ------- |
| `TORCHCOMMSHIM`           | auto, strip, split, observe, off          | auto    |
| `TORCHCOMMSHIM_AGREEMENT` | error, warn, off                          | error   |

The usual words for true and false stand for `auto` and `off`.  A value that is not known costs one
warning that lists what is accepted; the default is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

STRATEGY = "TORCHCOMMSHIM"
AGREEMENT = "TORCHCOMMSHIM_AGREEMENT"
VARIABLES = (STRATEGY, AGREEMENT)

STRATEGIES = ("auto", "strip", "split", "observe", "off")
AGREEMENTS = ("error", "warn", "off")

# The package's __init__.py, which may import nothing, holds a copy of OFF; a test keeps the two equal.
OFF = ("off", "0", "false", "f", "no", "n")
ON = ("on", "1", "true", "t", "yes", "y")


@dataclass(frozen=True)
class Settings:
    """The user's choices.

    Attributes:
        strategy: one of `STRATEGIES`.
        agreement: one of `AGREEMENTS`; what happens when ranks differ.
        warnings: one sentence for each value or variable that was not understood.
    """

    strategy: str = "auto"
    agreement: str = "error"
    warnings: tuple[str, ...] = ()

    @property
    def acts(self) -> bool:
        """Decisions are acted on, not only reported."""
        return self.strategy not in ("observe", "off")


def read(environment: Mapping[str, str]) -> Settings:
    """Read the settings from `environment` (a mapping such as `os.environ`); never raises."""
    warnings: list[str] = []

    def choice(variable: str, accepted: tuple[str, ...], default: str) -> str:
        value = environment.get(variable, "").strip().lower()
        value = default if value in ("", *ON) else "off" if value in OFF else value
        if value in accepted:
            return value
        warnings.append(
            f"{variable}={environment[variable]!r} is not known; accepted: {', '.join(accepted)}. "
            f"Using {default!r}."
        )
        return default

    strategy = choice(STRATEGY, STRATEGIES, "auto")
    agreement = choice(AGREEMENT, AGREEMENTS, "error")
    warnings += [
        f"{name} is not a variable of torchcommshim; accepted: {', '.join(VARIABLES)}. It is ignored."
        for name in unknown(environment)
    ]
    return Settings(strategy, agreement, tuple(warnings))


def unknown(environment: Mapping[str, str]) -> list[str]:
    """The names in `environment` that look like ours and are not, sorted."""
    return sorted(name for name in environment if name.startswith(STRATEGY) and name not in VARIABLES)
