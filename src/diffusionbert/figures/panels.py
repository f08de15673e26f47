"""Curves in panels, one for each kind of likelihood, over the same xs.

Line styles on one axis would invite the eye to compare heights, and a pseudo-likelihood that lies below a bound is not
better than it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from diffusionbert.figures.data import KINDS, Curve
from diffusionbert.figures.layout import Name, arrange
from diffusionbert.figures.style import FAINT, Look, looks
from diffusionbert.figures.ticks import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOW = 1.6
"""Inches of a panel that has single points alone, beside others."""
Part = list[tuple[Curve, Look]]
"""The curves of one kind."""


def draw_panels(
    figure: Figure,
    curves: Sequence[Curve],
    x: str,
    y: str,
    draw: Callable[[Axes, Curve, Look], None],
    *,
    log: str = "",
    ends: bool = True,
) -> list[tuple[Axes, Part]]:
    """Draws a panel for each kind; names stand at the ends of lines, or as a legend."""
    parts = _by_kind(curves)
    panels: Any = figure.subplots(len(parts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, part in zip(panels, parts.values(), strict=True):
        for name in log:
            getattr(axes, f"set_{name}scale")("log")
        for curve, look in part:
            draw(axes, curve, look)
    for axes, kind in zip(panels, parts, strict=True):
        say(axes, x if axes is panels[-1] else "", y if kind == "none" else f"{kind}, {y}")
        if len(parts) > 1:
            axes.set_title(KINDS[kind], loc="left", fontsize=8, color=FAINT, pad=4)
    beside = [
        [Name(curve.name, look, (curve.xs[-1], curve.ys[-1]) if ends else None) for curve, look in part]
        for part in parts.values()
    ]
    lower = 2.2 if ends else 2.9  # what has a legend has labels inside, which need room
    heights = [_LOW if all(len(curve.xs) == 1 for curve, _ in part) else lower for part in parts.values()]
    arrange(figure, panels, beside, [3.6] if len(parts) == 1 else heights)
    return list(zip(panels, parts.values(), strict=True))


def _by_kind(curves: Sequence[Curve]) -> dict[str, Part]:
    """Curves with their looks; a system looks the same in all panels, and has one line in each."""
    names = list(dict.fromkeys(curve.name for curve in curves))
    look_of = dict(zip(names, looks(names), strict=True))
    parts = {kind: [(curve, look_of[curve.name]) for curve in curves if curve.kind == kind] for kind in KINDS}
    for part in parts.values():
        looks([curve.name for curve, _ in part])  # refuses what could not be told apart
    return {kind: part for kind, part in parts.items() if part}
