# SPDX-License-Identifier: Apache-2.0
"""A picture of the pairing, as SVG: ranks down, the world's split rounds across, like a score.

The k-th splits of all ranks are one round, whatever group each of them means.  A cell is one rank's call:
full in the group's colour, or pale where the rank splits without one (NCCL_SPLIT_NOCOLOR).  Its number is
that of the creation which the call was made for, so a round whose numbers differ should not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from torchcommshim.commands.explain.explanation import ENDS, call_of
from torchcommshim.commands.explain.program import USES
from torchcommshim.commands.explain.traces import Made
from torchcommshim.commands.explain.verdicts import WITHOUT, Played, Verdict
from torchcommshim.repair.splits import CONNECT, NOCOLOR, OK, SPLIT, Create, SplitCall, Wait, awaited

# Sizes in user units (CSS pixels at 100%).
_CELL, _HIGH, _GAP = 30, 22, 3
_LEFT, _MARGIN, _TOP = 62, 24, 62
_BAND_GAP, _END, _NARROWEST = 34, 68, 720

_RANKS_AT_MOST = 64
_CELLS_AT_MOST = 4000
_ROUNDS_A_BAND = 24
_GROUPS_LISTED = 24

_STYLE = """
  .paper { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e } .on { fill: #ffffff }
  .stripe { fill: #f3f5f8 } .bad { fill: #d1242f } .bad-back { fill: #ffe3e3 }
  .odd { fill: #9a6700 } .odd-back { fill: #fff4cf } .waits { fill: none; stroke: #d1242f; stroke-width: 2 }
  .pale { fill-opacity: 0.15; stroke-width: 1.5 } .rule { stroke: #d0d7de; stroke-width: 1 }
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px }
  .title { font-size: 17px; font-weight: 600 } .part { font-size: 13px }
  .number { font-size: 11px; text-anchor: middle } .right { text-anchor: end }
  .middle { text-anchor: middle } .small { font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } .ink { fill: #e6edf3 } .soft { fill: #9198a1 }
    .stripe { fill: #151b23 } .bad { fill: #ff7b72 } .bad-back { fill: #4a1216 }
    .odd { fill: #e3b341 } .odd-back { fill: #3b2e04 } .waits { stroke: #ff7b72 } .rule { stroke: #30363d }
  }
"""

# How a round came out, and its mark.
_MATCHED, _ODD, _BAD = "matched", "odd", "bad"
_MARKS = {_MATCHED: "", _ODD: "\u2260", _BAD: "\u2715"}


def draw(verdict: Verdict, torch: str) -> str:
    """The picture of what a strategy makes of a program, as the text of an SVG file.

    Each order of first use that does not end well is drawn; if all do, the first.
    """
    groups = _Groups()
    parts = [_Part(each, groups) for each in verdict.played if each.verdict != OK]
    parts = parts or [_Part(verdict.played[0], groups)]
    width, bottom = max(_NARROWEST, *(part.width for part in parts)), _TOP
    who = "without the shim" if verdict.strategy == WITHOUT else f"with TORCHCOMMSHIM={verdict.strategy}"
    size = verdict.worst.program.world.size
    title = f"{size} ranks on torch {torch}, {who}: {ENDS[verdict.verdict]}"
    body = [_text(_MARGIN, 36, title, f"title {'ink' if verdict.verdict == OK else 'bad'}")]
    for part in parts:
        lines, bottom = part.draw(bottom)
        body += lines
    legend, bottom = _legend(groups, width, bottom)
    box = f'width="{width}" height="{bottom}" viewBox="0 0 {width} {bottom}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{width}" height="{bottom}"/>',
            *body,
            *legend,
            "</svg>",
            "",
        ]
    )


@dataclass
class _Groups:
    """The groups that are drawn: their colours, and their lines in the legend."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    lines: dict[tuple[int, str], None] = field(default_factory=dict)

    def colour(self, ranks: tuple[int, ...]) -> str:
        return _colour(self.places.setdefault(ranks, len(self.places)))

    def show(self, made: Made, backend: str) -> None:
        self.lines[made.number, f"{made.number}  {call_of(made)} {backend}, {made.site}"] = None


@dataclass(frozen=True)
class _Round:
    """One round: its number from 1 on, the call of each rank, and how it came out."""

    number: int
    calls: Sequence[SplitCall]
    state: str


class _Part:
    """The program with one order of first use."""

    def __init__(self, played: Played, groups: _Groups) -> None:
        self._played, self._groups = played, groups
        self._ranks = list(played.program.world.ranks)[:_RANKS_AT_MOST]
        self._places = [_places(row) for row in played.origins]
        self._created = [
            {step.group: step for step in steps if isinstance(step, Create)} for steps in played.program.steps
        ]
        rounds = [
            _Round(number, calls, self._state(calls)) for number, calls in enumerate(played.outcome.rounds, 1)
        ]
        self._rounds = self._cut(rounds)
        self._left_out = len(rounds) - len(self._rounds)
        self._waiting = {wait.rank: wait for wait in played.outcome.waiting}
        self._has_end = bool(self._waiting or played.outcome.raised)
        columns = max(1, min(_ROUNDS_A_BAND, len(self._rounds)))
        self.width = 2 * _MARGIN + _LEFT + columns * (_CELL + _GAP) + (_END + 12 if self._has_end else 0)

    def _cut(self, rounds: list[_Round]) -> list[_Round]:
        """As many as stay legible, from a little before the first that should not be."""
        most = max(8, _CELLS_AT_MOST // len(self._ranks))
        if len(rounds) <= most:
            return rounds
        odd = next((place for place, each in enumerate(rounds) if each.state != _MATCHED), 0)
        first = min(max(0, odd - 4), len(rounds) - most)
        return rounds[first : first + most]

    def draw(self, top: int) -> tuple[list[str], int]:
        """Its lines from `top` on, and where they end."""
        ends = ENDS[self._played.verdict]
        lines = [_text(_MARGIN, top, f"If {USES[self._played.uses]}: {ends}.", "part ink")]
        top += 36
        bands = [
            self._rounds[first : first + _ROUNDS_A_BAND]
            for first in range(0, len(self._rounds), _ROUNDS_A_BAND)
        ]
        for place, band in enumerate(bands or [[]], 1):
            lines += self._band(band, top, last=place >= len(bands))
            top += len(self._ranks) * (_HIGH + _GAP) + _BAND_GAP
        top -= 12
        for note in self._notes():
            lines.append(_text(_MARGIN, top, note, "soft"))
            top += 18
        return lines, top + 14

    # -- what a call is -----------------------------------------------------------------------------------

    def _origin(self, rank: int, index: int) -> tuple[Made | None, Create | None]:
        """The creation that a step makes or uses, as traced and as a step; None for the world."""
        step = self._played.program.steps[rank][index]
        return self._played.origins[rank][index], self._created[rank].get(step.group)

    def _state(self, calls: Sequence[SplitCall]) -> str:
        together: dict[tuple[int, ...], set[int]] = {}
        places = set()
        for rank, call in enumerate(calls):
            if call.colour is not None:
                together.setdefault(call.colour, set()).add(rank)
            places.add(self._places[rank][id(self._played.origins[rank][call.index])])
        for rank, call in enumerate(calls):
            _, created = self._origin(rank, call.index)
            if call.colour is not None and created and together[call.colour] != set(created.ranks):
                return _BAD
        return _MATCHED if len(places) == 1 else _ODD

    # -- the parts of a part --------------------------------------------------------------------------------

    def _band(self, rounds: list[_Round], top: int, *, last: bool) -> Iterator[str]:
        right = _MARGIN + _LEFT + max(1, len(rounds)) * (_CELL + _GAP)
        for row, rank in enumerate(self._ranks):
            y = top + row * (_HIGH + _GAP)
            if row % 2 == 0:
                yield _rect(_MARGIN, y - _GAP / 2, right - _MARGIN, _HIGH + _GAP, "stripe")
            yield _text(_MARGIN + _LEFT - 10, y + 15, f"rank {rank}", "soft right")
        for column, each in enumerate(rounds):
            yield from self._round(each, _MARGIN + _LEFT + column * (_CELL + _GAP), top)
        if last and self._has_end:
            yield from self._ends(right + 12, top)

    def _round(self, each: _Round, x: int, top: int) -> Iterator[str]:
        if each.state != _MATCHED:
            high = 19 if each.state == _ODD else len(self._ranks) * (_HIGH + _GAP) + 22
            yield _rect(x - _GAP / 2, top - 23, _CELL + _GAP, high, f"{each.state}-back")
        css = "soft" if each.state == _MATCHED else each.state
        yield _text(x + _CELL / 2, top - 8, f"{each.number}{_MARKS[each.state]}", f"number {css}")
        for row, rank in enumerate(self._ranks):
            call = each.calls[rank]
            made, created = self._origin(rank, call.index)
            assert made and created  # noqa: PT018 - the world itself is not split from anything
            self._groups.show(made, created.backend)
            is_pale = call.colour is None
            how = "without a colour" if is_pale else "with the group's colour"
            what = f"creation {made.number}, {call_of(made)}"
            yield f"<g><title>{escape(f'rank {rank}, round {each.number}: {how}, for {what}')}</title>"
            y = top + row * (_HIGH + _GAP)
            yield _cell(x, y, made.number, self._groups.colour(created.ranks), pale=is_pale) + "</g>"

    def _ends(self, x: int, top: int) -> Iterator[str]:
        yield _text(x + _END / 2, top - 8, "at the end" if self._left_out else "then", "middle small soft")
        for row, rank in enumerate(self._ranks):
            y = top + row * (_HIGH + _GAP)
            wait = self._waiting.get(rank)
            if wait is None:
                raised = rank in self._played.outcome.raised
                css = f"middle small {'bad' if raised else 'soft'}"
                yield _text(x + _END / 2, y + 15, "raises" if raised else "ends", css)
                continue
            made, created = self._origin(rank, wait.index)
            if made and created:
                self._groups.show(made, created.backend)
            yield f"<g><title>{escape(_where(wait, made))}</title>"
            yield _rect(x + 1, y + 1, _END - 2, _HIGH - 2, "waits")
            yield _text(x + _END / 2, y + 15, _at(wait, made), "middle small bad") + "</g>"

    def _notes(self) -> Iterator[str]:
        size = self._played.program.world.size
        if size > len(self._ranks):
            yield f"Cut: ranks {len(self._ranks)} to {size - 1} are not drawn."
        if self._left_out:
            first, last = self._rounds[0].number, self._rounds[-1].number
            yield f"Cut: of {len(self._rounds) + self._left_out} rounds, {first} to {last} are drawn."
        if not self._rounds:
            yield "No split of the world is complete." if self._waiting else "Nothing splits the world."


def _legend(groups: _Groups, width: int, top: int) -> tuple[list[str], int]:
    """What the marks mean, and the groups if they are few; and where that ends."""
    second, y = _MARGIN + 320, top + 18
    lines = [
        f'<line class="rule" x1="{_MARGIN}" x2="{width - _MARGIN}" y1="{top}" y2="{top}"/>',
        _cell(_MARGIN, y, 5, _colour(0), pale=False),
        _text(_MARGIN + 38, y + 15, "splits as a member of creation 5", "ink small"),
        _cell(second, y, 5, _colour(0), pale=True),
        _text(second + 38, y + 15, "splits without a colour: is not in creation 5", "ink small"),
    ]
    y += _HIGH + 8
    for x, state, meaning in (
        (_MARGIN, _ODD, "the ranks of this round mean different creations"),
        (second, _BAD, "and a communicator comes out short of ranks"),
    ):
        lines += [
            _rect(x, y, _CELL, _HIGH, f"{state}-back"),
            _text(x + _CELL / 2, y + 15, _MARKS[state], f"number {state}"),
            _text(x + 38, y + 15, meaning, "ink small"),
        ]
    y += _HIGH + 8
    meaning = "waits for ever: in a split, in the first use of a group or of the world, or at the store"
    lines += [
        _rect(_MARGIN + 1, y + 1, _CELL - 2, _HIGH - 2, "waits"),
        _text(_MARGIN + 38, y + 15, meaning, "ink small"),
    ]
    y += _HIGH + 22
    if len(groups.lines) <= _GROUPS_LISTED:
        for _, line in sorted(groups.lines):
            lines.append(_text(_MARGIN, y, _shortened(line, (width - 2 * _MARGIN) // 6), "soft small"))
            y += 17
    return lines, y


def _places(row: list[Made | None]) -> dict[int, object]:
    """For each creation of a rank, what it has in common with its counterparts on the other ranks.

    Of the creations that all ranks make, the k-th of each rank belong together.
    """
    places: dict[int, object] = {}
    by_all = 0
    for made in row:
        if made is None or id(made) in places:
            continue
        if made.by_all:
            by_all += 1
        apart = made.parts or made.ranks or made.name
        places[id(made)] = by_all if made.by_all else (made.kind, apart)
    return places


def _where(wait: Wait, made: Made | None) -> str:
    what = f"creation {made.number}, {call_of(made)}, {made.site}" if made else "the world"
    return f"rank {wait.rank} waits for {awaited(wait.missing)}: {wait.at}, {what}"


def _at(wait: Wait, made: Made | None) -> str:
    """Where a rank waits, in two words."""
    if made is None:
        return "world"
    kind = "split" if wait.at in (NOCOLOR, SPLIT) else "store" if wait.at == CONNECT else "use"
    return f"{kind} {made.number}"


def _colour(place: int) -> str:
    """Legible on light and dark, and under white figures; steps of the golden angle keep neighbours apart."""
    return f"hsl({(212 + 137.5 * place) % 360:.0f}, 52%, 44%)"


def _shortened(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-(most // 2 - 5) :]}"


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{css}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, css: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{css}"/>'


def _cell(x: float, y: float, number: int, colour: str, *, pale: bool) -> str:
    """A call: the creation's number, in a full box or in a pale one with an edge."""
    inset = 1 if pale else 0
    edge = f' class="pale" stroke="{colour}"' if pale else ""
    return (
        f'<rect x="{x + inset:g}" y="{y + inset:g}" width="{_CELL - 2 * inset}" height="{_HIGH - 2 * inset}" '
        f'rx="4" fill="{colour}"{edge}/>'
    ) + _text(x + _CELL / 2, y + 15, str(number), "number ink" if pale else "number on")
