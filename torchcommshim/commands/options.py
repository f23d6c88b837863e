# SPDX-License-Identifier: Apache-2.0
"""What the commands' options have in common."""

from __future__ import annotations

import argparse
from typing import Any


def positive(kind: type[int | float]) -> Any:
    """For `add_argument(type=...)`: a number of that kind, above 0."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it in its message
    return parse
