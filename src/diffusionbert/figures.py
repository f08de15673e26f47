"""The pictures of He et al. 2022, "DiffusionBERT" (figures 2, 3 and 4), and of speed and scaling, with matplotlib.

Plain numbers and strings in, one PNG, SVG or PDF out: the path's suffix decides. The same data give the same bytes, a
file appears whole or not at all, and neither pyplot nor matplotlib's settings are touched. A likelihood's kind (exact,
bound, pseudo) is part of its axis: kinds never share one. Errors are standard errors, drawn as ± 1.96 of them.

Names stand in a column at the right, beside the ends of their lines; labels of points are placed where they cover
least. Knows no tensors, models or run folders; matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {
    "exact": "exact: −log p itself",
    "bound": "bound: at least −log p",
    "pseudo": "pseudo: of no distribution over sentences",
    "none": "",
}
"""Of a likelihood, by the names of `method.Likelihood`; `none` is for what is no likelihood, such as BLEU."""
SUFFIXES: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""What can be written, and what must be left out of each for the bytes to be the same tomorrow."""

_COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D5D5D"
"""Okabe and Ito's palette, which colour-blind readers can tell apart, without yellow, which white paper swallows."""
_DASHES: tuple[Any, ...] = "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5))
_MARKERS = "osD^vP"
_INK, _FAINT = "#2B2B2B", "#8A8A8A"
_SMALL, _LINE = 7.5, 0.15
"""Letters of labels of points, in points; a line of text, in inches."""
_WIDTH, _DPI = 6.0, 200
"""Inches, and dots to one: 1,200 pixels, to be read at half that."""
_STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.labelsize": 9,
    "axes.edgecolor": _FAINT,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.6,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "diffusionbert",
    "pdf.fonttype": 42,
}


# ---- data -----------------------------------------------------------------------------------------------------------

Numbers = Sequence[float | int]
"""Any sequence of numbers; kept as a tuple of floats."""


@final
@dataclass(frozen=True)
class Curve:
    """A figure of one system against what it cost."""

    name: str
    xs: Numbers
    ys: Numbers
    kind: str
    """One of `KINDS`."""
    errors: Numbers | None = None
    """Standard errors of the ys."""
    notes: Sequence[str] | None = None
    """A label for each point, such as its number of steps."""

    def __post_init__(self) -> None:
        _keep(self, "xs", "ys", "errors")
        _require_points(self.name, xs=self.xs, ys=self.ys)
        _require_same_length(self.name, len(self.xs), errors=self.errors, notes=self.notes)
        _require_errors(self.name, self.errors)
        if self.kind not in KINDS:
            raise ValueError(f"{self.name!r} is of the kind {self.kind!r}; kinds are {', '.join(KINDS)}")


@final
@dataclass(frozen=True)
class Tradeoff:
    """Quality and diversity of one system's samples as a knob is turned."""

    name: str
    self_bleu: Numbers
    bleu: Numbers
    knobs: Sequence[str] | None = None
    """What the knob said at each point, such as T=0.7 or k=30."""
    self_bleu_errors: Numbers | None = None
    bleu_errors: Numbers | None = None
    """Standard errors."""

    def __post_init__(self) -> None:
        _keep(self, "self_bleu", "bleu", "self_bleu_errors", "bleu_errors")
        _require_points(self.name, self_bleu=self.self_bleu, bleu=self.bleu)
        errors = {"self_bleu_errors": self.self_bleu_errors, "bleu_errors": self.bleu_errors}
        _require_same_length(self.name, len(self.bleu), knobs=self.knobs, **errors)
        for values in errors.values():
            _require_errors(self.name, values)


@final
@dataclass(frozen=True)
class Survival:
    """The probability that a word is still visible, over the fraction of time t/T."""

    word: str
    times: Numbers
    survival: Numbers

    def __post_init__(self) -> None:
        _keep(self, "times", "survival")
        _require_points(self.word, times=self.times, survival=self.survival)
        for name, values in (("times", self.times), ("survival", self.survival)):
            if min(values) < 0 or max(values) > 1:
                raise ValueError(f"{name} of {self.word!r} reach from {min(values)} to {max(values)}; give 0 to 1")


# ---- the pictures ---------------------------------------------------------------------------------------------------


def convergence(curves: Sequence[Curve], path: Path, *, x: str = "training steps", y: str = "nats a token") -> None:
    """Draws figure 4: a figure of held-out text as training goes on.

    Each kind of likelihood has a panel with an axis of its own. Line styles on one axis would invite the eye to compare
    heights, and a pseudo-likelihood that lies below a bound is not better than it.
    """
    _require_some(curves)
    for curve in curves:
        if any(after <= before for before, after in pairwise(curve.xs)):
            raise ValueError(f"the xs of {curve.name!r} do not rise; give its points in the order of training")

    def draw(axes: Axes, curve: Curve, look: _Look) -> None:
        if curve.errors is not None:
            ys, spread = np.array(curve.ys), 1.96 * np.array(curve.errors)
            axes.fill_between(curve.xs, ys - spread, ys + spread, color=look.colour, alpha=0.15, linewidth=0)
        alone = look.marker if len(curve.xs) == 1 else ""
        axes.plot(curve.xs, curve.ys, color=look.colour, linestyle=look.dashes, marker=alone, markersize=look.size)

    with _picture(path) as figure:
        _panels(figure, curves, x, y, draw)


def scaling(curves: Sequence[Curve], path: Path, *, x: str = "training tokens", y: str = "nats a token") -> None:
    """Draws what budgets buy, both axes logarithmic; kinds of likelihood have panels of their own."""
    _require_some(curves)
    for curve in curves:
        _require_positive(curve.name, xs=curve.xs, ys=curve.ys)
    with _picture(path) as figure:
        _panels(figure, curves, x, y, _draw_points, log="xy")


def speed(curves: Sequence[Curve], path: Path, *, x: str = "seconds a sample", y: str = "perplexity a token") -> None:
    """Draws quality against the time that a sample takes, on a logarithmic axis; `notes` say the numbers of steps."""
    _require_some(curves)
    for curve in curves:
        _require_positive(curve.name, xs=curve.xs)
    with _picture(path) as figure:
        for axes, part in _panels(figure, curves, x, y, _draw_points, log="x", ends=False):
            labels = [
                _Label(note, at, height, look.dark)
                for curve, look in part
                for at, height, note in zip(curve.xs, curve.ys, curve.notes or (), strict=False)
            ]
            bars = [bar for curve, _ in part for bar in _bars(curve.xs, curve.ys, None, curve.errors)]
            _place(axes, labels, [(curve.xs, curve.ys) for curve, _ in part], bars)


def quality_diversity(series: Sequence[Tradeoff], path: Path, *, real: Tradeoff | None = None) -> None:
    """Draws figure 3: BLEU-4 against self-BLEU-4 over temperatures or top-k; `real` are as many real sentences."""
    _require_some(series)
    looks = _looks([one.name for one in series])
    with _picture(path) as figure:
        axes = figure.add_subplot()
        for one, look in zip(series, looks, strict=True):
            _points(axes, look, one.self_bleu, one.bleu, one.self_bleu_errors, one.bleu_errors)
        labels = [
            _Label(knob, at, height, look.dark)
            for one, look in zip(series, looks, strict=True)
            for at, height, knob in zip(one.self_bleu, one.bleu, one.knobs or (), strict=False)
        ]
        if real is not None:
            star = _Look(_INK, "", "*", 10.0)
            _points(axes, star, real.self_bleu, real.bleu, real.self_bleu_errors, real.bleu_errors)
            labels = [_Label(real.name, real.self_bleu[0], real.bleu[0], _INK), *labels]
        axes.margins(0.1)
        _say(axes, "self-BLEU-4   (← more diverse)", "BLEU-4   (more like real text →)")
        _arrange(figure, [axes], [[(look, one.name, None) for one, look in zip(series, looks, strict=True)]], 3.9)
        everything = [*series, real] if real else series
        bars = [
            bar for one in everything for bar in _bars(one.self_bleu, one.bleu, one.self_bleu_errors, one.bleu_errors)
        ]
        _place(axes, labels, [(one.self_bleu, one.bleu) for one in everything], bars)


def survival_curves(curves: Sequence[Survival], path: Path) -> None:
    """Draws figure 2: how long each word of a sentence survives, from the rarest, dark, to the commonest, bright.

    The linear schedule, 1 − t/T, is dashed. Words are named from the middle, where they are furthest apart: those above
    the linear schedule at the right, the others at the left. A word that occurs twice is drawn once.
    """
    _require_some(curves)
    given = {(curve.word, tuple(curve.times), tuple(curve.survival)) for curve in curves}
    order = sorted(given, key=lambda one: (float(np.interp(0.5, *one[1:])), one))
    with _picture(path) as figure:
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        axes = figure.add_subplot()
        shades = [to_hex(colormaps["viridis"](0.85 * at / max(1, len(order) - 1))) for at in range(len(order))]
        for (_, times, survival), shade in zip(order, shades, strict=True):
            axes.plot(times, survival, color=shade)
        axes.plot([0, 1], [1, 0], color=_FAINT, linestyle=_DASHES[1], linewidth=1.2)
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        _say(axes, "time t / T", "survival ᾱ: probability of being visible")
        named = [
            (float(np.interp(0.5, times, survival)), word, _darker(shade))
            for (word, times, survival), shade in zip(order, shades, strict=True)
        ]
        sides = (
            [one for one in named if one[0] <= 0.5],
            [(0.5, "linear", _FAINT)] + [one for one in named if one[0] > 0.5],
        )
        room = [float(np.interp(at, times, survival)) for at in (0.2, 0.8) for _, times, survival in order]
        bottom, top = min(room[: len(order)]) - 0.05, max(room[len(order) :]) + 0.05
        need = max(len(sides[0]) / bottom, len(sides[1]) / (1 - top)) * _LINE
        _arrange(figure, [axes], [[]], max(3.8, need))
        _fan(axes, sides[0], 0.2, 0.0, bottom)
        _fan(axes, sides[1], 0.8, top, 1.0)


def _fan(axes: Axes, named: Sequence[tuple[float, str, str]], at: float, low: float, high: float) -> None:
    """Writes words one above the other at a time, within [low, high], and leads to each from its curve's middle."""
    line = _LINE / (axes.get_window_extent().height / _DPI) * 1.02
    wanted = [start + (start - 0.5) * 0.8 + (0.2 if at > 0.5 else -0.2) - low for start, *_ in named]
    places = spread(wanted, [line] * len(named), high - low)
    for (start, word, colour), place in zip(named, places, strict=True):
        end = at - 0.01 if at > 0.5 else at + 0.01
        axes.plot([0.5, end], [start, low + place], color=colour, linewidth=0.5)
        axes.plot([0.5], [start], color=colour, marker="o", markersize=2.5)
        side = "left" if at > 0.5 else "right"
        axes.text(
            at, low + place, _shortened(word), color=colour, ha=side, va="center_baseline", fontsize=8, parse_math=False
        )


# ---- files ----------------------------------------------------------------------------------------------------------


@contextmanager
def _picture(path: Path) -> Iterator[Figure]:
    """An empty figure in our style, which is written when all is drawn."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}; a picture's name ends in {', '.join(SUFFIXES)}")
    try:
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('pictures need the package matplotlib: pip install "diffusionbert[plot]"') from None
    # From matplotlib's own defaults, so that nobody's matplotlibrc changes our pictures.
    with style.context(_STYLE, after_reset=True):
        figure = Figure(figsize=(_WIDTH, _WIDTH), dpi=_DPI)
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            figure.savefig(unfinished, format=suffix[1:], metadata=SUFFIXES[suffix])
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


# ---- looks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Look:
    colour: str
    dashes: Any
    marker: str
    size: float = 4.5

    @property
    def dark(self) -> str:
        return _darker(self.colour)


def _looks(names: Sequence[str]) -> list[_Look]:
    """As many looks as names, no two the same for the first 84."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"two lines are called {twice[0]!r}; give each its own name")
    return [_Look(_COLOURS[at % 7], _DASHES[at // 7 % 4], _MARKERS[at % 6]) for at in range(len(names))]


def _darker(colour: str) -> str:
    """A shade in which small letters can be read."""
    return "#" + "".join(f"{int(int(colour[at : at + 2], 16) * 0.72):02X}" for at in (1, 3, 5))


def _points(
    axes: Axes,
    look: _Look,
    xs: Sequence[float],
    ys: Sequence[float],
    x_errors: Sequence[float] | None,
    y_errors: Sequence[float] | None,
) -> None:
    """A line through marked points, with bars of ± 1.96 standard errors."""
    bars = [None if errors is None else [1.96 * error for error in errors] for errors in (x_errors, y_errors)]
    if any(bar is not None for bar in bars):
        axes.errorbar(xs, ys, xerr=bars[0], yerr=bars[1], fmt="none", ecolor=look.colour, elinewidth=0.8, alpha=0.6)
    axes.plot(
        xs,
        ys,
        color=look.colour,
        linestyle=look.dashes,
        linewidth=1.2,
        marker=look.marker,
        markersize=look.size,
        markeredgecolor="white",
        markeredgewidth=0.5,
    )


def _say(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y, parse_math=False)
    for axis in (axes.xaxis, axes.yaxis):
        _ticks(axis)


def _ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    is_large = max(map(abs, axis.get_view_interval())) >= 1000
    # Below a thousand all ticks of an axis have as many decimals.
    axis.set_major_formatter(FuncFormatter(_short) if is_large else ScalarFormatter(useOffset=False))


def _log_ticks(axis: Any) -> None:
    """Round numbers: powers of ten over decades, closer ones where a scale spans less."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [
        *([digit * 10.0**decade for decade in decades for digit in digits] for digits in ((1,), (1, 3), (1, 2, 5))),
        list(MaxNLocator(6).tick_values(low, high)),
    ]
    inside = [[tick for tick in ticks if low <= tick <= high] for ticks in candidates]
    axis.set_major_locator(FixedLocator(next((ticks for ticks in inside if len(ticks) >= 3), inside[-1])))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_short))


def _short(value: float, _: object = None) -> str:
    """A number as a tick says it: 0.05, 2.5, 500, 20k, 1.5M, 3B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


# ---- panels, and names beside them ----------------------------------------------------------------------------------

_GAP, _KEY = 0.06, 0.24
"""Inches beside a panel, and of the line that leads to a name or shows how its line looks."""
_FAR = 0.5
"""Inches between a line's end and its name, beyond which nothing leads from one to the other."""
_WRAP = 24
"""Letters of a name in one line."""
_Names = list[tuple[_Look, str, "tuple[float, float] | None"]]
"""What stands beside a panel: how a line looks, its name, and where it ends, if that is where its name belongs."""


def _panels(
    figure: Figure,
    curves: Sequence[Curve],
    x: str,
    y: str,
    draw: Callable[[Axes, Curve, _Look], None],
    *,
    log: str = "",
    ends: bool = True,
) -> list[tuple[Axes, list[tuple[Curve, _Look]]]]:
    """A panel for each kind, one below the other over the same xs; names stand at the ends of lines, or as a legend."""
    kinds = [kind for kind in KINDS if any(curve.kind == kind for curve in curves)]
    names = list(dict.fromkeys(curve.name for curve in curves))
    look_of = dict(zip(names, _looks(names), strict=True))
    panels = []
    for at, kind in enumerate(kinds):
        part = [(curve, look_of[curve.name]) for curve in curves if curve.kind == kind]
        _looks([curve.name for curve, _ in part])  # refuses what could not be told apart
        axes = figure.add_subplot(len(kinds), 1, at + 1)
        for name in log:
            getattr(axes, f"set_{name}scale")("log")
        for curve, look in part:
            draw(axes, curve, look)
        is_last = at == len(kinds) - 1
        _say(axes, x if is_last else "", y if kind == "none" else f"{kind}, {y}")
        axes.tick_params(labelbottom=is_last)
        if len(kinds) > 1:
            axes.set_title(KINDS[kind], loc="left", fontsize=8, color=_FAINT, pad=4)
        panels.append((axes, part))
    spans = [axes.get_xlim() for axes, _ in panels]
    for axes, _ in panels:
        axes.set_xlim(min(low for low, _ in spans), max(high for _, high in spans))
        _ticks(axes.xaxis)
        for axis in (getattr(axes, f"{name}axis") for name in log):
            _log_ticks(axis)
    beside: list[_Names] = [
        [(look, curve.name, (curve.xs[-1], curve.ys[-1]) if ends else None) for curve, look in part]
        for _, part in panels
    ]
    _arrange(figure, [axes for axes, _ in panels], beside, 3.6 if len(kinds) == 1 else 2.2)
    return panels


def _draw_points(axes: Axes, curve: Curve, look: _Look) -> None:
    _points(axes, look, curve.xs, curve.ys, None, curve.errors)


def _arrange(figure: Figure, panels: Sequence[Axes], beside: Sequence[_Names], height: float) -> None:
    """Gives panels their places, so high that all names fit, and writes the names."""
    texts = [
        [
            axes.text(1, 0, _wrapped(name), transform=axes.transAxes, va="center", parse_math=False, linespacing=1.05)
            for _, name, _ in names
        ]
        for axes, names in zip(panels, beside, strict=True)
    ]
    sizes = [[_inches(text) for text in column] for column in texts]
    width = max((wide + _GAP + _KEY + 0.06 for column in sizes for wide, _ in column), default=0.0)
    heights = [max(height, sum(high for _, high in column)) for column in sizes]
    above = 0.1 if len(panels) == 1 else 0.24
    for _ in range(2):  # what ticks need follows from the size, which follows from what they need
        left = max(_overhang(axes)[0] for axes in panels) + 0.06
        low = _overhang(panels[-1])[1] + 0.06
        total = sum(heights) + low + len(panels) * above
        figure.set_size_inches(_WIDTH, total)
        top = total
        for axes, high in zip(panels, heights, strict=True):
            top -= above + high
            wide = _WIDTH - left - max(width, 0.12) - 0.06
            axes.set_position((left / _WIDTH, top / total, wide / _WIDTH, high / total))
    for axes, names, column, size in zip(panels, beside, texts, sizes, strict=True):
        _write_names(axes, names, column, [high for _, high in size])


def _write_names(axes: Axes, names: _Names, texts: Sequence[Any], heights: Sequence[float]) -> None:
    """Puts names right of a panel: each as near to its line's end as the others let it, or from the top downwards."""
    extent = axes.get_window_extent()
    wide, high = extent.width / _DPI, extent.height / _DPI
    to_panel = axes.transData + axes.transAxes.inverted()
    ends = [(1.0, 1.0) if end is None else to_panel.transform(end) for *_, end in names]
    order = sorted(range(len(names)), key=lambda at: (ends[at][1], -at))
    places = spread([ends[at][1] * high for at in order], [heights[at] for at in order], high)
    far = max(abs(place - ends[at][1] * high) for at, place in zip(order, places, strict=True)) if names else 0
    line: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "linewidth": 1.2}
    for at, place in zip(order, places, strict=True):
        (look, _, end), (edge, start) = names[at], ends[at]
        is_led = end is not None and far < _FAR  # else the order alone says which is which
        height = [start if is_led else place / high, place / high]
        axes.plot([1 + _GAP / wide, 1 + (_GAP + _KEY) / wide], height, color=look.colour, linestyle=look.dashes, **line)
        if is_led:
            fine: dict[str, Any] = {"linestyle": (0, (1, 2)), "alpha": 0.6}
            axes.plot([edge, 1 + _GAP / wide], [start, start], color=look.colour, **fine, **line)
        if end is None:
            middle = [1 + (_GAP + _KEY / 2) / wide], height[1:]
            axes.plot(*middle, color=look.colour, marker=look.marker, markersize=look.size, **line)
        texts[at].set_position((1 + (_GAP + _KEY + 0.06) / wide, place / high))


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
    """A name in at most four lines; of one that is longer the middle is left out, because names of runs differ last."""
    words = " ".join(name.split())
    short = words if len(words) <= 3 * _WRAP else f"{words[:_WRAP]}…{words[1 - 2 * _WRAP :]}"
    return textwrap.fill(short, _WRAP, break_on_hyphens=False)


def _shortened(word: str) -> str:
    return word if len(word) <= _WRAP else f"{word[: _WRAP - 1]}…"


def _inches(text: Any) -> tuple[float, float]:
    extent = text.get_window_extent()
    return extent.width / _DPI, extent.height / _DPI + 0.035


def _overhang(axes: Axes) -> tuple[float, float]:
    """Inches that ticks and labels take left of a panel and below it."""
    canvas: Any = axes.figure.canvas
    inner = axes.get_window_extent()
    boxes = [axis.get_tightbbox(canvas.get_renderer()) or inner for axis in (axes.xaxis, axes.yaxis)]
    return (inner.x0 - min(box.x0 for box in boxes)) / _DPI, (inner.y0 - min(box.y0 for box in boxes)) / _DPI


# ---- labels of points -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Label:
    """A text that belongs to a point."""

    text: str
    x: float
    y: float
    colour: str


_Line = tuple[Sequence[float], Sequence[float]]
_RINGS = 5.0, 8.0, 12.0, 17.0, 23.0, 30.0, 38.0, 48.0, 60.0, 75.0, 95.0
"""Distances of a label from its point, in points of 1/72 inch."""
_TIED = 10.0
"""From this distance on a hairline shows what a label belongs to."""
_Array = np.ndarray[Any, np.dtype[np.float64]]


def _place(axes: Axes, labels: Sequence[_Label], lines: Sequence[_Line], bars: Sequence[_Line]) -> None:
    """Writes labels where they cover nothing, or least: one after another, then each anew, knowing all others."""
    scale = 72 / _DPI
    panel = axes.get_window_extent()
    room = np.array([panel.x0, panel.y0, panel.x1, panel.y1]) * scale
    paths = [axes.transData.transform(np.column_stack(line)) * scale for line in (*lines, *bars)]
    marks, ink = np.concatenate(paths[: len(lines)]), np.concatenate([_dotted(path) for path in paths])
    spots = [
        _spots(axes.transData.transform((label.x, label.y)) * scale, _size(axes, label) * scale) for label in labels
    ]
    prices = [
        _outside(boxes, room)
        + 400 * _inside(boxes, marks, 2.5)
        + 9 * _inside(boxes, ink, 0.5)
        + _crossed(ties, far, marks)
        + 2 * far
        for boxes, ties, far in spots
    ]
    chosen: dict[int, int] = {}
    for _ in range(4):
        for at, (boxes, ties, _) in enumerate(spots):
            others = [(spots[other][0][spot], spots[other][1][spot]) for other, spot in chosen.items() if other != at]
            clashes = sum((_clash(boxes, ties, box, tie) for box, tie in others), np.zeros(len(boxes)))
            chosen[at] = int(np.argmin(prices[at] + clashes))
    for at, label in enumerate(labels):
        boxes, ties, far = (values[chosen[at]] for values in spots[at])
        across, up = (boxes[:2] + boxes[2:]) / 2 - ties[0]
        tie = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(float(across), float(up)),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=_SMALL,
            color=label.colour,
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.3},
            arrowprops=tie if far >= _TIED else None,
            parse_math=False,
        )


def _size(axes: Axes, label: _Label) -> _Array:
    text = axes.text(0, 0, label.text, fontsize=_SMALL, parse_math=False)
    extent = text.get_window_extent()
    text.remove()
    return np.array([extent.width, extent.height])


def _spots(anchor: _Array, size: _Array) -> tuple[_Array, _Array, _Array]:
    """Where a label of a size could stand around a point: boxes [C, 4], dots of the ties to them [C, 6, 2], far [C]."""
    angles = np.linspace(0, 2 * np.pi, 16, endpoint=False) + np.pi / 16
    far, angle = (grid.ravel() for grid in np.meshgrid(np.array(_RINGS), angles, indexing="ij"))
    towards = np.column_stack([np.cos(angle), np.sin(angle)])
    # A box touches its ring: straight above the point with its lower edge, obliquely with a corner.
    centre = anchor + towards * far[:, None] + np.clip(1.6 * towards, -1, 1) * size / 2
    boxes = np.concatenate([centre - size / 2, centre + size / 2], axis=1)
    ends = np.clip(anchor, boxes[:, :2], boxes[:, 2:])
    share = np.linspace(0, 1, 6)[:, None]
    return boxes, anchor * (1 - share) + ends[:, None] * share, far


def _outside(boxes: _Array, room: _Array) -> _Array:
    """A price for leaving the panel that nothing outweighs."""
    beyond = (boxes[:, :2] < room[:2] + 1) | (boxes[:, 2:] > room[2:] - 1)
    return np.where(beyond.any(axis=1), 1e6, 0.0)


def _inside(boxes: _Array, points: _Array, margin: float) -> _Array:
    """How many points each box covers, or nearly."""
    low, high = boxes[:, None, :2] - margin, boxes[:, None, 2:] + margin
    covered: _Array = ((points > low) & (points < high)).all(axis=-1).sum(axis=1, dtype=np.float64)
    return covered


def _crossed(ties: _Array, far: _Array, marks: _Array) -> _Array:
    """A price for each point, other than its own, that a tie runs through, where one is drawn."""
    apart = np.linalg.norm(ties[:, 2:, None] - marks, axis=-1).min(axis=1)
    return np.where(far >= _TIED, 60.0 * np.count_nonzero(apart < 3, axis=1), 0.0)


def _clash(boxes: _Array, ties: _Array, box: _Array, tie: _Array) -> _Array:
    """A price for covering another label or its tie, and for being tied across it."""
    overlap = ((boxes[:, :2] < box[2:] + 1) & (boxes[:, 2:] > box[:2] - 1)).all(axis=1)
    tied_across = np.any(np.all((ties > box[:2]) & (ties < box[2:]), axis=-1), axis=1)
    return np.where(overlap, 5000.0, 0.0) + 100 * _inside(boxes, tie, 0.5) + np.where(tied_across, 300.0, 0.0)


def _dotted(path: _Array) -> _Array:
    """A path as dots, about three points apart."""
    parts = [path[:1]]
    for start, end in pairwise(path):
        number = max(1, math.ceil(float(np.hypot(*(end - start))) / 3))
        parts.append(start + (end - start) * (np.arange(1, number + 1) / number)[:, None])
    return np.concatenate(parts)


def _bars(
    xs: Sequence[float], ys: Sequence[float], x_errors: Sequence[float] | None, y_errors: Sequence[float] | None
) -> list[_Line]:
    """Error bars as lines."""
    across = [
        ((x - 1.96 * error, x + 1.96 * error), (y, y)) for x, y, error in zip(xs, ys, x_errors or (), strict=False)
    ]
    upright = [
        ((x, x), (y - 1.96 * error, y + 1.96 * error)) for x, y, error in zip(xs, ys, y_errors or (), strict=False)
    ]
    return [*across, *upright]


# ---- rules ----------------------------------------------------------------------------------------------------------


def _require_some(series: Sequence[object]) -> None:
    if not series:
        raise ValueError("nothing to draw: give at least one line")


def _keep(data: object, *names: str) -> None:
    """Makes tuples of floats of fields, whatever kind of sequence was given."""
    for name in names:
        values = getattr(data, name)
        object.__setattr__(data, name, values if values is None else tuple(map(float, values)))


def _require_points(name: str, **columns: Sequence[float]) -> None:
    if not name.strip():
        raise ValueError(f"a line is called {name!r}; give it a name")
    (first, xs), (second, ys) = columns.items()
    if len(xs) != len(ys) or not len(xs):
        raise ValueError(
            f"{name!r} has {len(xs)} {first} and {len(ys)} {second}; give as many of each, and at least one"
        )
    for column, values in columns.items():
        bad = [value for value in values if not math.isfinite(value)]
        if bad:
            raise ValueError(f"{column} of {name!r} hold {bad[0]}, which cannot be drawn; leave such points out")


def _require_same_length(name: str, number: int, **columns: Sequence[object] | None) -> None:
    for column, values in columns.items():
        if values is not None and len(values) != number:
            raise ValueError(f"{name!r} has {number} points and {len(values)} {column}; give one for each, or None")


def _require_errors(name: str, errors: Sequence[float] | None) -> None:
    bad = [error for error in errors or () if not (math.isfinite(error) and error >= 0)]
    if bad:
        raise ValueError(f"a standard error of {name!r} is {bad[0]}; it must be finite and not negative")


def _require_positive(name: str, **columns: Sequence[float]) -> None:
    for column, values in columns.items():
        if min(values) <= 0:
            raise ValueError(
                f"{column} of {name!r} hold {min(values)}, but the axis is logarithmic; leave out what is not above 0"
            )
