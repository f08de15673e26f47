"""Draw a sentence forming: one line per state, from all positions masked to the finished text.

A column is a position. A gray bar is a masked position; a token is colored in the first line that shows it.

    python examples/sentence_forming.py docs/forming.svg
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import torch

import diffusionbert as db

FONT_SIZE, CHARACTER, LINE, MARGIN = 14, 8.6, 30, 16
STYLE = """
text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328 }
.card { fill: #ffffff } .mask { fill: #d8dee4 } .time { fill: #59636e } .new { fill: #0969da }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .card { fill: #0d1117 } .mask { fill: #30363d } .time { fill: #9198a1 } .new { fill: #58a6ff } }
"""


def main(output: str | Path = "forming.svg", *, length: int = 12, seed: int = 3, num_lines: int = 7) -> None:
    model = db.load(device="cpu", dtype=torch.float32)  # the same picture on every machine
    states = list(model.stream(length=length, seed=seed))
    lines = [states[round(i * (len(states) - 1) / (num_lines - 1))] for i in range(num_lines)]
    Path(output).write_text(drawing([(state.time, state.pieces) for state in lines]), encoding="utf-8")


def drawing(lines: list[tuple[float, tuple[str | None, ...]]]) -> str:
    """An SVG of the tokens at each time; None is a masked position."""
    positions = zip(*(pieces for _, pieces in lines), strict=True)
    columns = [max(len(piece.removeprefix("##")) for piece in position if piece) for position in positions]
    starts = [9 + sum(columns[:i]) + i for i in range(len(columns))]  # "t = 1.00" and a space come first
    shapes, before = [], lines[0][1]
    for number, (time, pieces) in enumerate(lines):
        y = MARGIN + number * LINE + FONT_SIZE
        shapes.append(_text(0, y, "time", f"t = {time:.2f}"))
        for start, width, piece, old in zip(starts, columns, pieces, before, strict=True):
            if piece is None:
                size = f'width="{width * CHARACTER:.1f}" height="{FONT_SIZE}"'
                shapes.append(f'<rect class="mask" x="{_x(start):.1f}" y="{y - FONT_SIZE + 3}" {size} rx="3"/>')
            else:
                shapes.append(_text(start, y, "new" if old is None else "old", piece.removeprefix("##")))
        before = pieces
    total, height = _x(starts[-1] + columns[-1]) + MARGIN, 2 * MARGIN + len(lines) * LINE - 10
    box = f'viewBox="0 0 {total:.0f} {height}" width="{total:.0f}" height="{height}"'
    card = f'<rect class="card" width="{total:.0f}" height="{height}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-size="{FONT_SIZE}"><style>{STYLE}</style>'
    return "\n".join([head, card, *shapes, "</svg>", ""])


def _x(column: int) -> float:
    return MARGIN + column * CHARACTER


def _text(column: int, y: int, kind: str, text: str) -> str:
    span = f'textLength="{len(text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text class="{kind}" x="{_x(column):.1f}" y="{y}" {span}>{escape(text)}</text>'


if __name__ == "__main__":
    main(*sys.argv[1:2])
