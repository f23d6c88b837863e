# SPDX-License-Identifier: Apache-2.0
"""The scenarios: plain scripts, known here by their names, docstrings and constants, and never imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "scenarios"

# In the order in which they are shown.
NAMES = (
    "reported_program",
    "one_group",
    "overlapping_groups",
    "gloo_subgroup",
    "gloo_among_nccl",
    "local_synchronization",
    "local_after_uneven",
    "direct_helper",
    "point_to_point",
    "own_group_each",
    "own_group_unbound",
    "device_mesh",
    "nested_splits",
    "partial_split",
    "split_after_uneven",
    "mixed_split_after_uneven",
    "mesh_after_pipeline",
    "megatron",
)

# The strategies that repair.  Each claims every scenario.
STRATEGIES = ("auto", "strip", "split")


@dataclass(frozen=True)
class Scenario:
    """One script.

    Attributes:
        name: its file's stem.
        title: first line of its docstring.
        about: the rest, without the link.
        upstream: the link to the defect.
        minimum_ranks: `MINIMUM_RANKS` in the script.
        patience: `PATIENCE` in the script: it gets so many times the deadline; 1 if absent.
    """

    name: str
    title: str
    about: str
    upstream: str
    minimum_ranks: int
    patience: int = 1

    @property
    def path(self) -> Path:
        """The script."""
        return FOLDER / f"{self.name}.py"


def load(name: str) -> Scenario:
    """Read a scenario's constants from its source, so that neither it nor torch is imported."""
    module = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    constants: dict[str, Any] = {
        statement.targets[0].id: statement.value.value
        for statement in module.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
    }
    title, _, rest = (ast.get_docstring(module) or "").partition("\n")
    lines = rest.strip().splitlines()
    (upstream,) = (line for line in lines if line.startswith("https://"))
    return Scenario(
        name=name,
        title=title.rstrip("."),
        about=" ".join(line for line in lines[: lines.index(upstream)] if line),
        upstream=upstream,
        minimum_ranks=constants["MINIMUM_RANKS"],
        patience=constants.get("PATIENCE", 1),
    )
