# SPDX-License-Identifier: Apache-2.0
"""To be written."""

from __future__ import annotations

from typing import Any

from torchcommshim.calls import Call
from torchcommshim.report import Report
from torchcommshim.torch_state import TorchState


class Watch:
    def __init__(self, current: Report, state: TorchState) -> None: ...

    def begin(self, call: Call, store: Any) -> None: ...

    def end(self, call: Call, error: BaseException | None) -> None: ...
