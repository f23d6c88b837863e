# SPDX-License-Identifier: Apache-2.0
"""A picture of the pairing, as SVG: ranks down, the world's split rounds across, like a score.

The k-th splits of all ranks are one round, whatever group each of them means.  A cell is one rank's call: in
the group's colour, or hollow where the rank splits without one (NCCL_SPLIT_NOCOLOR).  Its number is that of
the creation which the call was made for, so a round whose numbers differ is one that should not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from torchcommshim.creations import COLLECTIVE
from torchcommshim.explain.explanation import ENDS, call_of
from torchcommshim.explain.program import USES
from torchcommshim.explain.traces import Made
from torchcommshim.explain.verdicts import WITHOUT, Played
from torchcommshim.splits import CONNECT, NOCOLOR, OK, SPLIT, Create, SplitCall, Wait

# Sizes in user units (CSS pixels at 100%).
_CELL, _HIGH, _GAP = 30, 22, 3
_LEFT, _MARGIN, _TOP = 62, 24, 92
_BAND_GAP, _WAITS = 34, 64

_RANKS_AT_MOST = 64
_CELLS_AT_MOST = 4000
_ROUNDS_A_BAND = 24
_GROUPS_LISTED = 24

_STYLE = """
  .paper { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e }
  .stripe { fill: #f3f5f8 } .bad { fill: #d1242f } .bad-back { fill: #ffe3e3 }
  .odd { fill: #9a6700 } .odd-back { fill: #fff4cf } .waits { fill: none; stroke: #d1242f; stroke-width: 2 }
  .rule { stroke: #d0d7de; stroke-width: 1 } .on { fill: #ffffff }
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px }
  .title { font-size: 18px; font-weight: 600 } .number { font-size: 11px; text-anchor: middle }
  .right { text-anchor: end } .middle { text-anchor: middle } .small { font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } .ink { fill: #e6edf3 } .soft { fill: #9198a1 }
    .stripe { fill: #151b23 } .bad { fill: #ff7b72 } .bad-back { fill: #4a1216 }
    .odd { fill: #e3b341 } .odd-back { fill: #3b2e04 } .waits { stroke: #ff7b72 } .rule { stroke: #30363d }
  }
"""

# How a round came out.
_MATCHED, _ODD, _BAD = "matched", "odd", "bad"


@dataclass(frozen=True)
class _Round:
    """One round: its number from 1 on, the call of each rank, and how it came out."""

    number: int
    calls: Sequence[SplitCall]
    state: str


def draw(played: Played, torch: str, strategy: str) -> str:
    """The picture of one program as it came out, as the text of an SVG file."""
    return _Picture(played, torch, strategy).text()


class _Picture:
    def __init__(self, played: Played, torch: str, strategy: str) -> None:
        self._played = played
        self._torch, self._strategy = torch, strategy
        self._ranks = list(played.program.world.ranks)[:_RANKS_AT_MOST]
        self._places = [_places(row) for row in played.origins]
        self._groups = [
            {step.group: step.ranks for step in steps if isinstance(step, Create)}
            for steps in played.program.steps
        ]
        self._hues: dict[tuple[int, ...], int] = {}
        self._shown: dict[int, Made] = {}  # groups that a cell names, by number
        rounds = [
            _Round(number, calls, self._state(calls)) for number, calls in enumerate(played.outcome.rounds, 1)
        ]
        self._rounds = self._cut(rounds)
        self._left_out = len(rounds) - len(self._rounds)
        self._waiting = {wait.rank: wait for wait in played.outcome.waiting}
        columns = max(1, min(_ROUNDS_A_BAND, len(self._rounds)))
        self._width = max(
            2 * _MARGIN + _LEFT + columns * (_CELL + _GAP) + (_WAITS + 12 if self._waiting else 0), 660
        )

    def _cut(self, rounds: list[_Round]) -> list[_Round]:
        """As many as stay legible, from a little before the first that should not be."""
        most = max(8, _CELLS_AT_MOST // max(1, len(self._ranks)))
        if len(rounds) <= most:
            return rounds
        odd = next((place for place, each in enumerate(rounds) if each.state != _MATCHED), 0)
        first = min(max(0, odd - 4), len(rounds) - most)
        return rounds[first : first + most]

    # -- what a call is ---------------------------------------------------------------------------------

    def _origin(self, rank: int, call: SplitCall) -> tuple[Made, tuple[int, ...]]:
        """The creation that a call was made for, and the ranks of its group."""
        made = self._played.origins[rank][call.index]
        assert made is not None  # the world itself is not split from anything
        return made, self._groups[rank][self._played.program.steps[rank][call.index].group]

    def _state(self, calls: Sequence[SplitCall]) -> str:
        origins = [self._origin(rank, call) for rank, call in enumerate(calls)]
        together: dict[tuple[int, ...], set[int]] = {}
        for rank, call in enumerate(calls):
            if call.colour is not None:
                together.setdefault(call.colour, set()).add(rank)
        if any(
            together[call.colour] != set(origins[rank][1])
            for rank, call in enumerate(calls)
            if call.colour is not None
        ):
            return _BAD
        places = {self._places[rank][id(made)] for rank, (made, _) in enumerate(origins)}
        return _MATCHED if len(places) == 1 else _ODD

    def _colour(self, ranks: tuple[int, ...]) -> str:
        """A group's own colour, legible on light and dark, and under white figures."""
        place = self._hues.setdefault(ranks, len(self._hues))
        return _hue(place)

    # -- the parts ----------------------------------------------------------------------------------------

    def text(self) -> str:
        body, bottom = [*self._head()], _TOP
        bands = [
            self._rounds[first : first + _ROUNDS_A_BAND]
            for first in range(0, len(self._rounds), _ROUNDS_A_BAND)
        ] or [[]]
        for place, band in enumerate(bands):
            body += self._band(band, bottom, last=place == len(bands) - 1)
            bottom += len(self._ranks) * (_HIGH + _GAP) + _BAND_GAP
        notes, bottom = self._notes(bottom)
        legend, bottom = self._legend(bottom)
        body += [*notes, *legend]
        size = f'width="{self._width}" height="{bottom}" viewBox="0 0 {self._width} {bottom}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self._title())}</title>",
                f"<style>{_STYLE}</style>",
                f'<rect class="paper" width="{self._width}" height="{bottom}"/>',
                *body,
                "</svg>",
                "",
            ]
        )

    def _title(self) -> str:
        who = "without the shim" if self._strategy == WITHOUT else f"with TORCHCOMMSHIM={self._strategy}"
        size = self._played.program.world.size
        return f"{size} ranks on torch {self._torch}, {who}: {ENDS[self._played.verdict]}"

    def _head(self) -> Iterator[str]:
        css = "ink" if self._played.verdict == OK else "bad"
        yield _text(_MARGIN, 36, self._title(), f"title {css}")
        yield _text(_MARGIN, 56, f"If {USES[self._played.uses]}.", "soft")

    def _band(self, rounds: list[_Round], top: int, *, last: bool) -> Iterator[str]:
        right = _MARGIN + _LEFT + max(1, len(rounds)) * (_CELL + _GAP)
        for row, rank in enumerate(self._ranks):
            y = top + row * (_HIGH + _GAP)
            if row % 2 == 0:
                yield _rect(_MARGIN, y - _GAP / 2, right - _MARGIN, _HIGH + _GAP, "stripe")
            yield _text(_MARGIN + _LEFT - 10, y + 15, f"rank {rank}", "soft right")
        for column, each in enumerate(rounds):
            yield from self._round(each, _MARGIN + _LEFT + column * (_CELL + _GAP), top)
        if last and self._waiting:
            yield from self._waits(right + 12, top)

    def _round(self, each: _Round, x: int, top: int) -> Iterator[str]:
        css = {_MATCHED: "soft", _ODD: "odd", _BAD: "bad"}[each.state]
        if each.state != _MATCHED:
            high = 19 if each.state == _ODD else len(self._ranks) * (_HIGH + _GAP) + 22
            yield _rect(x - _GAP / 2, top - 23, _CELL + _GAP, high, f"{each.state}-back")
        mark = {_MATCHED: "", _ODD: "\u2260", _BAD: "\u2715"}[each.state]
        yield _text(x + _CELL / 2, top - 8, f"{each.number}{mark}", f"number {css}")
        for row, rank in enumerate(self._ranks):
            call = each.calls[rank]
            made, ranks = self._origin(rank, call)
            self._shown.setdefault(made.number, made)
            y = top + row * (_HIGH + _GAP)
            has = "without a colour" if call.colour is None else "with the group's colour"
            yield (
                f"<g><title>{escape(f'rank {rank}, round {each.number}: splits {has}, for creation')} "
                f"{made.number}, {escape(f'{call_of(made)}, {made.site}')}</title>"
            )
            yield _cell(x, y, made.number, self._colour(ranks), hollow=call.colour is None)
            yield "</g>"

    def _waits(self, x: int, top: int) -> Iterator[str]:
        when = "at the end" if self._left_out else "then"
        yield _text(x + _WAITS / 2, top - 8, when, "middle small soft")
        for row, rank in enumerate(self._ranks):
            y = top + row * (_HIGH + _GAP)
            wait = self._waiting.get(rank)
            if wait is None:
                raised = rank in self._played.outcome.raised
                css = "bad" if raised else "soft"
                yield _text(x + _WAITS / 2, y + 15, "raises" if raised else "ends", f"middle small {css}")
                continue
            yield f"<g><title>{escape(_where(wait, self._made(wait)))}</title>"
            yield _rect(x + 1, y + 1, _WAITS - 2, _HIGH - 2, "waits")
            yield _text(x + _WAITS / 2, y + 15, self._waits_at(wait), "middle small bad") + "</g>"

    def _made(self, wait: Wait) -> Made | None:
        return self._played.origins[wait.rank][wait.index]

    def _waits_at(self, wait: Wait) -> str:
        made = self._made(wait)
        if made is None:
            return "world"
        self._shown.setdefault(made.number, made)
        if wait.at in (NOCOLOR, SPLIT):
            return f"split {made.number}"
        return f"{'store' if wait.at == CONNECT else 'use'} {made.number}"

    def _notes(self, bottom: int) -> tuple[list[str], int]:
        notes = []
        size = self._played.program.world.size
        if size > len(self._ranks):
            notes.append(f"Cut: ranks {len(self._ranks)} to {size - 1} are not drawn.")
        if self._left_out:
            first, last = self._rounds[0].number, self._rounds[-1].number
            total = len(self._rounds) + self._left_out
            notes.append(f"Cut: of {total} rounds, {first} to {last} are drawn.")
        if not self._played.outcome.rounds:
            notes.append(
                "No split of the world is complete." if self._waiting else "Nothing splits the world."
            )
        return [
            _text(_MARGIN, bottom - 8 + 18 * row, note, "ink") for row, note in enumerate(notes)
        ], bottom + 18 * len(notes)

    def _legend(self, top: int) -> tuple[list[str], int]:
        y = top
        lines = [
            f'<line class="rule" x1="{_MARGIN}" x2="{self._width - _MARGIN}" y1="{y - 14}" y2="{y - 14}"/>'
        ]
        lines += [
            _cell(_MARGIN, y, 5, _hue(0), hollow=False),
            _text(_MARGIN + 38, y + 15, "splits as a member of creation 5", "ink small"),
            _cell(_MARGIN + 300, y, 5, _hue(0), hollow=True),
            _text(_MARGIN + 338, y + 15, "splits without a colour: is not in creation 5", "ink small"),
        ]
        y += _HIGH + 8
        lines += [
            _rect(_MARGIN, y, _CELL, _HIGH, "odd-back"),
            _text(_MARGIN + _CELL / 2, y + 15, "\u2260", "number odd"),
            _text(_MARGIN + 38, y + 15, "the ranks mean different creations", "ink small"),
            _rect(_MARGIN + 300, y, _CELL, _HIGH, "bad-back"),
            _text(_MARGIN + 300 + _CELL / 2, y + 15, "\u2715", "number bad"),
            _text(_MARGIN + 338, y + 15, "and a communicator is short of ranks", "ink small"),
        ]
        y += _HIGH + 8
        if self._waiting:
            lines += [
                _rect(_MARGIN + 1, y + 1, _CELL - 2, _HIGH - 2, "waits"),
                _text(
                    _MARGIN + 38,
                    y + 15,
                    "waits for ever: in a split, in the first use of a group or the world, or at the store",
                    "ink small",
                ),
            ]
            y += _HIGH + 8
        groups = [self._shown[number] for number in sorted(self._shown)]
        if groups and len(groups) <= _GROUPS_LISTED:
            y += 12
            for made in groups:
                line = f"{made.number}  {call_of(made)} {made.backend}, {made.site}"
                lines.append(_text(_MARGIN, y, _shortened(line, self._width), "soft small"))
                y += 17
        return lines, y + 16


def _hue(place: int) -> str:
    """Steps of the golden angle keep neighbours apart."""
    return f"hsl({(212 + 137.5 * place) % 360:.0f}, 52%, 44%)"


def _places(row: list[Made | None]) -> dict[int, object]:
    """For each creation of a rank, what it has in common with its counterparts on the other ranks.

    Of the creations that all ranks make, the k-th of each rank belong together.
    """
    places: dict[int, object] = {}
    by_all = 0
    for made in row:
        if made is None or id(made) in places:
            continue
        if made.kind == COLLECTIVE:
            by_all += 1
        places[id(made)] = by_all if made.kind == COLLECTIVE else (made.kind, made.ranks or made.name)
    return places


def _where(wait: Wait, made: Made | None) -> str:
    what = f"creation {made.number}, {call_of(made)}, {made.site}" if made else "the world"
    return f"rank {wait.rank} waits for ranks {', '.join(map(str, wait.missing[:16]))}: {wait.at}, {what}"


def _shortened(line: str, width: int) -> str:
    most = (width - 2 * _MARGIN) // 6
    return line if len(line) <= most else line[: most // 2] + " ... " + line[-(most // 2 - 5) :]


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{css}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, css: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{css}"/>'


def _cell(x: float, y: float, number: int, colour: str, *, hollow: bool) -> str:
    """A call: the creation's number in a full box, or in a hollow one for a split without a colour."""
    inset = 1 if hollow else 0
    look = f'fill-opacity="0.15" stroke="{colour}" stroke-width="1.5"' if hollow else ""
    return (
        f'<rect x="{x + inset:g}" y="{y + inset:g}" width="{_CELL - 2 * inset}" height="{_HIGH - 2 * inset}" '
        f'rx="4" fill="{colour}" {look}/>'
    ) + _text(x + _CELL / 2, y + 15, str(number), "number ink" if hollow else "number on")
