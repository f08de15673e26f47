"""Labels of points, placed where they cover least: each in turn takes its cheapest spot, then anew, knowing all others.

All measures are points of 1/72 inch; a box is (left, bottom, right, top).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from diffusionbert.figures.style import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[Sequence[float], Sequence[float]]
"""The xs and the ys of a path."""
_Array = np.ndarray[Any, np.dtype[np.float64]]
_RINGS = 5.0, 8.0, 12.0, 17.0, 23.0, 30.0, 38.0, 48.0, 60.0, 75.0, 95.0
"""Distances of a label from its point."""
_TIED = 10.0
"""From this distance on a hairline, a tie, shows what a label belongs to."""
_LETTERS = 7.5
_ROUNDS = 4


@dataclass(frozen=True)
class Label:
    """A text that belongs to a point."""

    text: str
    x: float
    y: float
    colour: str


@dataclass(frozen=True)
class _Spots:
    """Where a label could stand: boxes [C, 4], dots along the ties to them [C, 6, 2], distances [C]."""

    boxes: _Array
    ties: _Array
    far: _Array


def place(axes: Axes, labels: Sequence[Label], lines: Sequence[Line], bars: Sequence[Line]) -> None:
    """Writes labels beside points of lines where they cover nothing, or least."""
    to_points = axes.transData.transform
    paths = [to_points(np.column_stack(line)) * 72 / DPI for line in (*lines, *bars)]
    marks, ink = np.concatenate(paths[: len(lines)]), np.concatenate([_dotted(path) for path in paths])
    room = np.array(axes.get_window_extent().extents, dtype=np.float64) * 72 / DPI
    spots = [_spots(to_points((label.x, label.y)) * 72 / DPI, _size(axes, label)) for label in labels]
    prices = [_price(each, room, marks, ink) for each in spots]
    chosen: dict[int, int] = {}
    for _ in range(_ROUNDS):
        for at, own in enumerate(spots):
            others = [(spots[other], spot) for other, spot in chosen.items() if other != at]
            clashes = (_clash(own, other.boxes[spot], other.ties[spot]) for other, spot in others)
            chosen[at] = int(np.argmin(sum(clashes, prices[at])))
    for at, label in enumerate(labels):
        _write(axes, label, spots[at], chosen[at])


def _write(axes: Axes, label: Label, spots: _Spots, at: int) -> None:
    box, anchor = spots.boxes[at], spots.ties[at, 0]
    across, up = (box[:2] + box[2:]) / 2 - anchor
    tie = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
    axes.annotate(
        label.text,
        (label.x, label.y),
        xytext=(float(across), float(up)),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=_LETTERS,
        color=label.colour,
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.3},
        arrowprops=tie if spots.far[at] >= _TIED else None,
        parse_math=False,
    )


def _size(axes: Axes, label: Label) -> _Array:
    text = axes.text(0, 0, label.text, fontsize=_LETTERS, parse_math=False)
    extent = text.get_window_extent()
    text.remove()
    return np.array([extent.width, extent.height]) * 72 / DPI


def _spots(anchor: _Array, size: _Array) -> _Spots:
    """Rings of boxes around a point."""
    angles = np.linspace(0, 2 * np.pi, 16, endpoint=False) + np.pi / 16
    far, angle = (grid.ravel() for grid in np.meshgrid(np.array(_RINGS), angles, indexing="ij"))
    towards = np.column_stack([np.cos(angle), np.sin(angle)])
    # A box touches its ring: straight above the point with its lower edge, obliquely with a corner.
    centre = anchor + towards * far[:, None] + np.clip(1.6 * towards, -1, 1) * size / 2
    boxes = np.concatenate([centre - size / 2, centre + size / 2], axis=1)
    ends = np.clip(anchor, boxes[:, :2], boxes[:, 2:])
    share = np.linspace(0, 1, 6)[:, None]
    return _Spots(boxes, anchor * (1 - share) + ends[:, None] * share, far)


def _price(spots: _Spots, room: _Array, marks: _Array, ink: _Array) -> _Array:
    """What each spot costs by itself: leaving the panel, covering points or lines, a tie through points, distance."""
    is_outside = ((spots.boxes[:, :2] < room[:2] + 1) | (spots.boxes[:, 2:] > room[2:] - 1)).any(axis=1)
    apart = np.linalg.norm(spots.ties[:, 2:, None] - marks, axis=-1).min(axis=1)
    crossed = np.where(spots.far >= _TIED, np.count_nonzero(apart < 3, axis=1), 0)
    covered = 400 * _covered(spots.boxes, marks, 2.5) + 14 * _covered(spots.boxes, ink, 1.2)
    return np.where(is_outside, 1e6, 0.0) + covered + 60.0 * crossed + 2 * spots.far


def _clash(spots: _Spots, box: _Array, tie: _Array) -> _Array:
    """What each spot costs for covering another label or its tie, and for being tied across it."""
    is_over = ((spots.boxes[:, :2] < box[2:] + 1) & (spots.boxes[:, 2:] > box[:2] - 1)).all(axis=1)
    is_tied_across = np.any(np.all((spots.ties > box[:2]) & (spots.ties < box[2:]), axis=-1), axis=1)
    covered = 100 * _covered(spots.boxes, tie, 0.5)
    return np.where(is_over, 5000.0, 0.0) + covered + np.where(is_tied_across, 300.0, 0.0)


def _covered(boxes: _Array, points: _Array, margin: float) -> _Array:
    """How many points each box covers, or nearly."""
    low, high = boxes[:, None, :2] - margin, boxes[:, None, 2:] + margin
    covered: _Array = ((points > low) & (points < high)).all(axis=-1).sum(axis=1, dtype=np.float64)
    return covered


def _dotted(path: _Array) -> _Array:
    """A path as dots, about three points apart."""
    parts = [path[:1]]
    for start, end in pairwise(path):
        number = max(1, math.ceil(float(np.hypot(*(end - start))) / 3))
        parts.append(start + (end - start) * (np.arange(1, number + 1) / number)[:, None])
    return np.concatenate(parts)
