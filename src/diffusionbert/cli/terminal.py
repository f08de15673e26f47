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

RED_NATS = 10.0
"""The nats from which a token is fully red."""


def show_generation(states: Iterable[StreamState], console: Console, num_lines: int | None = None) -> None:
    """Shows a text being generated: in place on a terminal, else one line per state, at most `num_lines`."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for state in states:
                live.update(line_of(state), refresh=True)
                time.sleep(0.04)  # slow enough to follow
        return
    changed: list[StreamState] = []
    for state in states:
        if not changed or state.pieces != changed[-1].pieces:
            changed.append(state)
    last = len(changed) - 1
    count = min(num_lines or len(changed), len(changed))
    for index in sorted({round(last * step / max(1, count - 1)) for step in range(count)}):
        console.print(line_of(changed[index]), soft_wrap=True)


def line_of(state: StreamState) -> Text:
    """One state as one line: masked positions as dim bars, tokens as they are."""
    line = Text()
    line.append(f"t = {state.time:4.2f} ", "dim")
    for piece in state.pieces:
        if piece is None:
            line.append(" ▁▁▁", "dim")
        else:
            line.append(piece[2:] if piece.startswith("##") else f" {piece}", "default")
    return line


def coloured(tokens: Sequence[tuple[str, float]]) -> Text:
    """Tokens on a scale from green (few nats) to red (many), each with its nats."""
    line = Text()
    for piece, nats in tokens:
        share = min(max(nats, 0.0) / RED_NATS, 1.0)
        red, green = int(80 + 175 * share), int(80 + 175 * (1 - share))
        space = "" if piece.startswith("##") or not line else " "
        line.append(f"{space}{piece.removeprefix('##')}", style=f"rgb({red},{green},80)")
        line.append(f"({nats:.1f})", style="dim")
    return line
