"""Figure 4 of He et al. 2022, and its like for budgets and speed: a figure of systems against what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diffusionbert.figures.data import Curve, require_positive, require_some
from diffusionbert.figures.panels import draw_panels
from diffusionbert.figures.points import Points, write_notes
from diffusionbert.figures.style import Look, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def convergence(curves: Sequence[Curve], path: Path, *, x: str = "training steps", y: str = "nats a token") -> None:
    """Draws figure 4: a figure of held-out text as training goes on; kinds of likelihood have panels of their own."""
    require_some(curves)
    for curve in curves:
        if any(after <= before for before, after in pairwise(curve.xs)):
            raise ValueError(f"the xs of {curve.name!r} do not rise; give its points in the order of training")
    with picture(path) as figure:
        draw_panels(figure, curves, x, y, _draw_line)


def scaling(curves: Sequence[Curve], path: Path, *, x: str = "training tokens", y: str = "nats a token") -> None:
    """Draws what budgets buy, both axes logarithmic; kinds of likelihood have panels of their own."""
    require_some(curves)
    for curve in curves:
        require_positive(curve.name, xs=curve.xs, ys=curve.ys)
    with picture(path) as figure:
        draw_panels(figure, curves, x, y, _draw_points, log="xy")


def speed(curves: Sequence[Curve], path: Path, *, x: str = "seconds a sample", y: str = "perplexity a token") -> None:
    """Draws quality against the time that a sample takes, on logarithmic axes; `notes` say the numbers of steps."""
    require_some(curves)
    for curve in curves:
        require_positive(curve.name, xs=curve.xs)
    with picture(path) as figure:
        for axes, part in draw_panels(figure, curves, x, y, _draw_points, log="xy", ends=False):
            write_notes(axes, [Points.of_curve(curve, look) for curve, look in part])


def _draw_line(axes: Axes, curve: Curve, look: Look) -> None:
    """A line with a band of ± 1.96 standard errors; a single point is marked."""
    if curve.errors is not None:
        ys, error = np.array(curve.ys), 1.96 * np.array(curve.errors)
        axes.fill_between(curve.xs, ys - error, ys + error, color=look.colour, alpha=0.15, linewidth=0)
    alone = look.marker if len(curve.xs) == 1 else ""
    axes.plot(curve.xs, curve.ys, color=look.colour, linestyle=look.dashes, marker=alone, markersize=look.size)


def _draw_points(axes: Axes, curve: Curve, look: Look) -> None:
    Points.of_curve(curve, look).draw(axes)
