"""Terminal output: a text while it is being generated, and tokens coloured by their nats."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from diffusionbert.inference.tasks import StreamState

DEAR = 10.0
"""Nats from which a token is fully red."""


def show_generation(moments: Iterable[StreamState], console: Console, num_lines: int | None = None) -> None:
    """Shows a text being generated: in place on a terminal, else one line per state, at most `num_lines`."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for moment in moments:
                live.update(line_of(moment), refresh=True)
                time.sleep(0.04)  # slow enough to follow
        return
    changed: list[StreamState] = []
    for moment in moments:
        if not changed or moment.pieces != changed[-1].pieces:
            changed.append(moment)
    last = len(changed) - 1
    count = min(num_lines or len(changed), len(changed))
    for index in sorted({round(last * step / max(1, count - 1)) for step in range(count)}):
        console.print(line_of(changed[index]), soft_wrap=True)


def line_of(moment: StreamState) -> Text:
    """One state as one line: masked positions as dim bars, tokens as they are."""
    line = Text()
    line.append(f"t = {moment.time:4.2f} ", "dim")
    for piece in moment.pieces:
        if piece is None:
            line.append(" ▁▁▁", "dim")
        else:
            line.append(piece[2:] if piece.startswith("##") else f" {piece}", "default")
    return line


def coloured(surprise: Sequence[tuple[str, float]]) -> Text:
    """Tokens on a scale from green (few nats) to red (many), each with its nats."""
    line = Text()
    for piece, nats in surprise:
        warmth = min(max(nats, 0.0) / DEAR, 1.0)
        red, green = int(80 + 175 * warmth), int(80 + 175 * (1 - warmth))
        space = "" if piece.startswith("##") or not line else " "
        line.append(f"{space}{piece.removeprefix('##')}", style=f"rgb({red},{green},80)")
        line.append(f"({nats:.1f})", style="dim")
    return line
