"""Marked points with bars of ± 1.96 standard errors, and what is written beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffusionbert.figures.data import Curve, Numbers, Tradeoff
from diffusionbert.figures.placement import Label, Line, place
from diffusionbert.figures.style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Points:
    """The points of one system."""

    look: Look
    xs: Numbers
    ys: Numbers
    x_errors: Numbers | None
    y_errors: Numbers | None
    notes: Sequence[str]
    """For the first points, or for none."""

    @classmethod
    def of_curve(cls, curve: Curve, look: Look) -> Points:
        """The points of a curve."""
        return cls(look, curve.xs, curve.ys, None, curve.errors, curve.notes or ())

    @classmethod
    def of_tradeoff(cls, one: Tradeoff, look: Look) -> Points:
        """The points of a tradeoff, self-BLEU on x."""
        return cls(look, one.self_bleu, one.bleu, one.self_bleu_errors, one.bleu_errors, one.knobs or ())

    def draw(self, axes: Axes) -> None:
        """Draws a line through the points."""
        for xs, ys in self.bars():
            axes.plot(xs, ys, color=self.look.colour, linewidth=0.8, alpha=0.6, solid_capstyle="butt")
        axes.plot(self.xs, self.ys, linestyle=self.look.dashes, linewidth=1.2, **self.look.mark)

    def bars(self) -> list[Line]:
        """Error bars as lines."""
        across = zip(self.xs, self.ys, self.x_errors or (), strict=False)
        upright = zip(self.xs, self.ys, self.y_errors or (), strict=False)
        return [
            *(((x - 1.96 * error, x + 1.96 * error), (y, y)) for x, y, error in across),
            *(((x, x), (y - 1.96 * error, y + 1.96 * error)) for x, y, error in upright),
        ]


def write_notes(axes: Axes, points: Sequence[Points]) -> None:
    """Writes the notes of points, once the panel has its place; the first are placed first."""
    labels = [
        Label(note, x, y, one.look.dark)
        for one in points
        for x, y, note in zip(one.xs, one.ys, one.notes, strict=False)
    ]
    place(axes, labels, [(one.xs, one.ys) for one in points], [bar for one in points for bar in one.bars()])
