"""The pictures of He et al. 2022, "DiffusionBERT" (figures 2, 3 and 4), and of speed and scaling, with matplotlib.

Plain numbers and strings in, one PNG, SVG or PDF out: the path's suffix decides. The same data give the same bytes, a
file appears whole or not at all, and neither pyplot nor matplotlib's settings are touched. A likelihood's kind (exact,
bound, pseudo) is part of its axis: kinds never share one. Errors are standard errors, drawn as ± 1.96 of them.

Knows no tensors, models or run folders; matplotlib is imported when something is drawn.
"""

from diffusionbert.figures.curves import convergence, scaling, speed
from diffusionbert.figures.data import KINDS, Curve, Survival, Tradeoff
from diffusionbert.figures.layout import spread
from diffusionbert.figures.style import require_matplotlib
from diffusionbert.figures.survival import survival_curves
from diffusionbert.figures.tradeoffs import quality_diversity

__all__ = [
    "KINDS",
    "Curve",
    "Survival",
    "Tradeoff",
    "convergence",
    "quality_diversity",
    "require_matplotlib",
    "scaling",
    "speed",
    "spread",
    "survival_curves",
]
