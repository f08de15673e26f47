"""Figure 3 of He et al. 2022: quality against diversity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diffusionbert.figures.data import Tradeoff, require_some
from diffusionbert.figures.layout import Name, arrange
from diffusionbert.figures.points import Points, write_notes
from diffusionbert.figures.style import STAR, looks, picture
from diffusionbert.figures.ticks import say


def quality_diversity(series: Sequence[Tradeoff], path: Path, *, real: Tradeoff | None = None) -> None:
    """Draws figure 3: BLEU-4 against self-BLEU-4 over temperatures or top-k; `real` are as many real sentences."""
    require_some(series)
    names = [Name(one.name, look) for one, look in zip(series, looks([one.name for one in series]), strict=True)]
    systems = [Points.of_tradeoff(one, name.look) for one, name in zip(series, names, strict=True)]
    stars = [replace(Points.of_tradeoff(real, STAR), notes=(real.name,))] if real else []
    with picture(path) as figure:
        axes = figure.add_subplot()
        for one in (*systems, *stars):
            one.draw(axes)
        axes.margins(0.1)
        say(axes, "self-BLEU-4   (← more diverse)", "BLEU-4   (more of it in real text →)")
        arrange(figure, [axes], [names], [3.9])
        write_notes(axes, [*stars, *systems])
