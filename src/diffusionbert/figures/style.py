"""How lines look, and a figure in our style that is written when all is drawn. Knows nothing of what is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D5D5D"
"""Okabe and Ito's palette, which colour-blind readers can tell apart, without yellow, which white paper swallows."""
DASHES: tuple[Any, ...] = "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5))
MARKERS = {"o": 4.8, "s": 4.5, "D": 4.3, "^": 5.8, "v": 5.8, "P": 6.3}
"""With sizes in points at which they look equally large."""
INK, FAINT = "#2B2B2B", "#6E6E6E"
WIDTH, DPI = 6.0, 200
"""Inches, and dots to one: 1,200 pixels, to be read at half that."""
SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "diffusionbert",
    "pdf.fonttype": 42,
}
SUFFIXES: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""What can be written, and what must be left out of each for the bytes to be the same tomorrow."""


def require_matplotlib() -> None:
    """Refuses to draw where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError('pictures need the package matplotlib: pip install "diffusionbert[plot]"') from None


@contextmanager
def picture(path: Path) -> Iterator[Figure]:
    """An empty figure in our style, which is written when all is drawn."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}; a picture's name ends in {', '.join(SUFFIXES)}")
    require_matplotlib()
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # From matplotlib's own defaults, so that nobody's matplotlibrc changes our pictures.
    with style.context(SETTINGS, after_reset=True):
        figure = Figure(figsize=(WIDTH, WIDTH), dpi=DPI)
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            figure.savefig(unfinished, format=suffix[1:], metadata=SUFFIXES[suffix])
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@dataclass(frozen=True)
class Look:
    """How a line and its points look."""

    colour: str
    dashes: Any
    marker: str
    size: float

    @property
    def dark(self) -> str:
        """Its colour for letters."""
        return darker(self.colour)

    @property
    def mark(self) -> dict[str, Any]:
        """How a point is drawn."""
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.5}
        return {"color": self.colour, "marker": self.marker, "markersize": self.size, **edge}


STAR = Look(INK, "", "*", 10.0)
"""Of what is no system: real sentences."""


def looks(names: Sequence[str]) -> list[Look]:
    """As many looks as names, no two the same for the first 84."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"two lines are called {twice[0]!r}; give each its own name")
    markers = list(MARKERS.items())
    return [Look(COLOURS[at % 7], DASHES[at // 7 % 4], *markers[at % 6]) for at in range(len(names))]


def darker(colour: str) -> str:
    """A shade in which small letters can be read."""
    return "#" + "".join(f"{int(int(colour[at : at + 2], 16) * 0.72):02X}" for at in (1, 3, 5))
