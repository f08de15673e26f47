"""Figure 2 of He et al. 2022: how long each word of a sentence survives the spindle schedule, against 1 − t/T."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diffusionbert.figures.data import Survival, require_some
from diffusionbert.figures.layout import WRAP, arrange, spread
from diffusionbert.figures.style import DASHES, DPI, FAINT, darker, picture
from diffusionbert.figures.ticks import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE = 0.153
"""Inches of a line of text."""


def survival_curves(curves: Sequence[Survival], path: Path) -> None:
    """Draws figure 2: how long each word of a sentence survives, from the rarest, dark, to the commonest, bright.

    The linear schedule, 1 − t/T, is dashed. Words are named from the middle, where they are furthest apart: those above
    the linear schedule at the right, the others at the left. A word that occurs twice is drawn once.
    """
    require_some(curves)
    words = sorted(dict.fromkeys(curves), key=lambda curve: (_at(curve, 0.5), sum(curve.survival), curve.word))
    with picture(path) as figure:
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        axes = figure.add_subplot()
        shades = [to_hex(colormaps["viridis"](0.85 * at / max(1, len(words) - 1))) for at in range(len(words))]
        for curve, shade in zip(words, shades, strict=True):
            axes.plot(curve.times, curve.survival, color=shade)
        axes.plot([0, 1], [1, 0], color=FAINT, linestyle=DASHES[1], linewidth=1.2)
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        say(axes, "time t / T", "survival ᾱ: probability of being visible")
        named = [_Word(_at(curve, 0.5), curve.word, darker(shade)) for curve, shade in zip(words, shades, strict=True)]
        below = [word for word in named if word.middle <= 0.5]
        above = [_Word(0.5, "linear", FAINT), *(word for word in named if word.middle > 0.5)]
        # Names stand outside of all curves, unless a word vanishes, or stays, so long that there is no such place.
        bottom = max(0.3, min(_at(curve, 0.2) for curve in words) - 0.05)
        top = min(0.7, max(_at(curve, 0.8) for curve in words) + 0.05)
        arrange(figure, [axes], [[]], [max(3.8, _LINE * len(below) / bottom, _LINE * len(above) / (1 - top))])
        _fan(axes, below, 0.2, 0.0, bottom)
        _fan(axes, above, 0.8, top, 1.0)


@dataclass(frozen=True)
class _Word:
    middle: float
    """The survival of its curve at half time."""
    text: str
    colour: str


def _at(curve: Survival, time: float) -> float:
    return float(np.interp(time, curve.times, curve.survival))


def _fan(axes: Axes, words: Sequence[_Word], at: float, low: float, high: float) -> None:
    """Writes words one above the other at a time, within [low, high], and leads to each from its curve's middle."""
    line = _LINE / (axes.get_window_extent().height / DPI)
    side = 1 if at > 0.5 else -1
    wanted = [word.middle + (word.middle - 0.5) * 0.8 + side * 0.2 - low for word in words]
    for word, place in zip(words, spread(wanted, [line] * len(words), high - low), strict=True):
        axes.plot([0.5, at - side * 0.01], [word.middle, low + place], color=word.colour, linewidth=0.5)
        axes.plot([0.5], [word.middle], color=word.colour, marker="o", markersize=2.5)
        text = word.text if len(word.text) <= WRAP else f"{word.text[: WRAP - 1]}…"
        anchor = "left" if side > 0 else "right"
        axes.text(
            at, low + place, text, color=word.colour, ha=anchor, va="center_baseline", fontsize=8, parse_math=False
        )
