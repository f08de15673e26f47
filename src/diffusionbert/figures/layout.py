"""Panels and the names beside them: a column at the right, each name as near to its line's end as the others let it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusionbert.figures.style import DPI, WIDTH, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WRAP = 24
"""Letters of a name in one line."""
_GAP, _KEY, _EDGE = 0.06, 0.24, 0.06
"""Inches beside a panel, of the line that leads to a name or shows how its line looks, and around everything."""
_FAR = 0.5
"""Inches between a line's end and its name, beyond which nothing leads from one to the other."""


@dataclass(frozen=True)
class Name:
    """A name beside a panel."""

    text: str
    look: Look
    end: tuple[float, float] | None = None
    """Where its line ends, if that is where the name belongs; names without stand from the top downwards."""


def arrange(figure: Figure, panels: Sequence[Axes], beside: Sequence[Sequence[Name]], least: Sequence[float]) -> None:
    """Gives panels their places, one below the other, so high that all names fit, and writes the names."""
    texts = [[_written(axes, name) for name in names] for axes, names in zip(panels, beside, strict=True)]
    sizes = [[_inches(text) for text in column] for column in texts]
    right = max((wide + _GAP + _KEY + _EDGE for column in sizes for wide, _ in column), default=2 * _EDGE) + _EDGE
    heights = [max(height, sum(high for _, high in column)) for height, column in zip(least, sizes, strict=True)]
    above = 0.1 if len(panels) == 1 else 0.24
    for _ in range(2):  # what ticks need follows from the size, which follows from what they need
        left = max(_overhang(axes)[0] for axes in panels) + _EDGE
        total = sum(heights) + len(panels) * above + _overhang(panels[-1])[1] + _EDGE
        figure.set_size_inches(WIDTH, total)
        bottom = total
        for axes, high in zip(panels, heights, strict=True):
            bottom -= above + high
            axes.set_position((left / WIDTH, bottom / total, (WIDTH - left - right) / WIDTH, high / total))
    for axes, names, column, size in zip(panels, beside, texts, sizes, strict=True):
        _move(axes, names, column, [high for _, high in size])


def _written(axes: Axes, name: Name) -> Any:
    text = _wrapped(name.text)
    return axes.text(1, 0, text, transform=axes.transAxes, va="center", parse_math=False, linespacing=1.05)


def _move(axes: Axes, names: Sequence[Name], texts: Sequence[Any], heights: Sequence[float]) -> None:
    """Moves names to their places and draws what leads to them."""
    extent = axes.get_window_extent()
    wide, high = extent.width / DPI, extent.height / DPI
    to_panel = axes.transData + axes.transAxes.inverted()
    ends = [(1.0, 1.0) if name.end is None else to_panel.transform(name.end) for name in names]
    order = sorted(range(len(names)), key=lambda at: (ends[at][1], -at))
    places = spread([ends[at][1] * high for at in order], [heights[at] for at in order], high)
    is_near = all(abs(place - ends[at][1] * high) < _FAR for at, place in zip(order, places, strict=True))
    line: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "linewidth": 1.2}
    key = 1 + _GAP / wide, 1 + (_GAP + _KEY) / wide
    for at, place in zip(order, places, strict=True):
        look, (edge, start), to = names[at].look, ends[at], place / high
        is_led = names[at].end is not None and is_near  # else the order alone says which is which
        axes.plot(key, [start if is_led else to, to], color=look.colour, linestyle=look.dashes, **line)
        if is_led:
            axes.plot([edge, key[0]], [start] * 2, color=look.colour, linestyle=(0, (1, 2)), alpha=0.6, **line)
        if names[at].end is None:
            axes.plot([sum(key) / 2], [to], **look.mark, **line)
        texts[at].set_position((key[1] + _EDGE / wide, to))


def spread(wanted: Sequence[float], heights: Sequence[float], room: float) -> list[float]:
    """Centres of boxes stacked upwards without overlap, in the least squares nearest to those wanted, within [0, room].

    `wanted` rises. Less the heights below it, a box's place may only rise: an isotonic regression, by pooling.
    """
    offsets = [sum(heights[:at]) + heights[at] / 2 for at in range(len(heights))]
    pools: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        mean, number = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, number = (mean * number + other * others) / (number + others), number + others
        pools.append((mean, number))
    flat = [mean for mean, number in pools for _ in range(number)]
    return [max(0.0, min(mean, room - sum(heights))) + offset for mean, offset in zip(flat, offsets, strict=True)]


def _wrapped(name: str) -> str:
    """A name in short lines; of a very long one the middle is left out, because names of runs differ last."""
    words = " ".join(name.split())
    short = words if len(words) <= 3 * WRAP else f"{words[:WRAP]}…{words[1 - 2 * WRAP :]}"
    return textwrap.fill(short, WRAP)


def _inches(text: Any) -> tuple[float, float]:
    extent = text.get_window_extent()
    return extent.width / DPI, extent.height / DPI + 0.035


def _overhang(axes: Axes) -> tuple[float, float]:
    """Inches that ticks and labels take left of a panel and below it."""
    canvas: Any = axes.figure.canvas
    inner = axes.get_window_extent()
    boxes = [axis.get_tightbbox(canvas.get_renderer()) or inner for axis in (axes.xaxis, axes.yaxis)]
    return (inner.x0 - min(box.x0 for box in boxes)) / DPI, (inner.y0 - min(box.y0 for box in boxes)) / DPI
