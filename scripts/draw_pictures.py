# SPDX-License-Identifier: Apache-2.0
"""Draws the terminal pictures of the documentation, from what is measured and written in docs/.

    python scripts/draw_pictures.py

`docs/pictures/verify.svg` is the table of docs/evidence/verify-torch-2.4.1-4-ranks.json, and
`docs/pictures/hang-report.svg` the report on real NCCL that docs/hangs.md quotes, with notes beside it.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Iterator

DOCS = Path(__file__).resolve().parent.parent / "docs"
MEASURED = DOCS / "evidence" / "verify-torch-2.4.1-4-ranks.json"
STRATEGIES = ("off", "auto", "strip", "split")
CHARACTER, LINE, MARGIN = 7.9, 19, 16
STYLE = (
    "text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#d7dae0;white-space:pre}"
    ".paper{fill:#1e2127}.bad{fill:#ff7b72;font-weight:bold}.good{fill:#7ee787}.dim{fill:#9aa0aa}"
    ".note{fill:#ffd866}.rule{stroke:#ffd866;stroke-width:2}"
)
# What begins a part of a hang report, and what is to be said of it.
NOTES = (
    (r"torchcommshim ", "how many ranks wait, and since when"),
    (r"  ranks? +\S+ +waiting", "who waits, inside which call, at which line"),
    (r"  rank +0 +elsewhere", "for whom: this rank has gone on"),
    (r"  likely cause", "why, and what to do"),
    (r"  rank 1 \(process", "the stack of a rank that waits"),
)

# A piece of a line: its column, its text, its class.
Piece = tuple[int, str, str]


def draw(title: str, lines: list[list[Piece]], marks: dict[int, str] | None = None) -> str:
    """A terminal with these lines as SVG; `marks` are notes beside lines, by the line's number."""
    widest = max(column + len(text) for line in lines for column, text, _ in line)
    aside = int(2 * MARGIN + widest * CHARACTER)
    width = aside + (int(max(map(len, marks.values())) * CHARACTER) + 2 * MARGIN if marks else 0)
    height = 2 * MARGIN + len(lines) * LINE
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
    drawn.append(f"<title>{escape(title)}</title><style>{STYLE}</style>")
    drawn.append(f'<rect class="paper" width="{width}" height="{height}" rx="8"/>')
    for number, line in enumerate(lines):
        y = MARGIN + number * LINE + 13
        drawn += [_text(MARGIN + column * CHARACTER, y, text, css) for column, text, css in line]
        if marks and number in marks:
            drawn.append(f'<path class="rule" d="M{aside} {y - 12}v16"/>')
            drawn.append(_text(aside + 8, y, marks[number], "note"))
    return "\n".join([*drawn, "</svg>", ""])


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text x="{x:g}" y="{y}" class="{css}">{escape(text)}</text>'


def table() -> str:
    """The measured table, a row a scenario."""
    measured = json.loads(MEASURED.read_text())
    scenarios = measured["scenarios"]
    width = max(len(scenario["name"]) for scenario in scenarios) + 3
    columns = {strategy: width + 11 * place for place, strategy in enumerate(STRATEGIES)}
    lines: list[list[Piece]] = [
        [(0, "$ torchcommshim verify", "")],
        [(0, "torch 2.4.1, 4 ranks, real NCCL 2.20.5", "dim")],
        [],
        [(columns[each], "without" if each == "off" else f"with {each}", "dim") for each in STRATEGIES],
    ]
    for scenario in scenarios:
        row: list[Piece] = [(0, scenario["name"], "")]
        for strategy in STRATEGIES:
            verdict = (scenario["without"] if strategy == "off" else scenario["with"][strategy])["verdict"]
            row.append((columns[strategy], verdict, "good" if verdict == "ok" else "bad"))
        lines.append(row)
    return draw("Each fault without the shim and with it", lines)


def hang_report() -> str:
    """The report, with a note at each of its parts."""
    text = (DOCS / "hangs.md").read_text()
    blocks = re.findall(r"^```\n(torchcommshim [^`]*hang report[^`]*?)^```", text, re.MULTILINE)
    of_a_defect = [block for block in blocks if "late-members" in block]
    report = of_a_defect[1].splitlines()  # the first one is of simulated NCCL
    marks = dict(_notes(report))
    lines: list[list[Piece]] = [[(len(line) - len(line.lstrip()), line.strip(), "")] for line in report]
    return draw("A hang report, part by part", lines, marks)


def _notes(report: list[str]) -> Iterator[tuple[int, str]]:
    for beginning, note in NOTES:
        yield next(number for number, line in enumerate(report) if re.match(beginning, line)), note


PICTURES = {"verify.svg": table, "hang-report.svg": hang_report}

if __name__ == "__main__":
    for name, drawing in PICTURES.items():
        (DOCS / "pictures" / name).write_text(drawing())
