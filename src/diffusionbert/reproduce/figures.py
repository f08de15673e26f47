"""Figures 2, 3 and 4 of He et al. 2022, "DiffusionBERT", and those of docs/results.md, drawn with matplotlib.

Each function takes plain numbers and strings and writes a PNG, SVG or PDF, depending on the path's suffix. The same
data give the same bytes, a file is replaced only when the new one is complete, and neither pyplot nor the user's
matplotlib settings are touched. Kinds of likelihood (exact, bound, pseudo) never share a panel: a pseudo-likelihood
below a bound is not better than it. Errors are standard errors, drawn as ± 1.96 of them. matplotlib is imported only
when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"exact": "NLL", "bound": "NELBO", "pseudo": "pseudo-NLL"}
"""The name of each kind of likelihood on an axis."""
PALETTE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D5D5D"
"""Okabe and Ito's colors, which color-blind readers can tell apart, without yellow, which is too pale on white."""
FAMILIAR = "DiffusionBERT", "D3PM", "Transformer decoder", "GPT", "BERT-Mouth", "Diffusion-LM"
"""Systems that have the same color in every figure."""
DASHES: tuple[Any, ...] = "-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.5, 1.5))
MARKERS = "osD^"
METADATA: dict[str, Any] = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""The formats, with the metadata to leave out so that the same data give the same bytes."""
SETTINGS: dict[str, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E6E6E6",
    "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.6,
    "svg.fonttype": "none", "svg.hashsalt": "diffusionbert", "text.parse_math": False,
}  # fmt: skip
Numbers = Sequence[float | int]


@final
@dataclass(frozen=True)
class Curve:
    """Held-out nats per token of one system over training steps."""

    name: str
    xs: Numbers
    ys: Numbers
    kind: str
    """One of `KINDS`."""
    errors: Numbers = ()
    """Standard errors of the ys."""
    num_steps: int | None = None
    """T, if the quantity is defined over T steps. None, as in the next two fields, if the log does not say."""
    schedule: str | None = None
    quantity: str | None = None
    """The quantity computed, such as strict or paper."""

    @property
    def label(self) -> str:
        steps = None if self.num_steps is None else f"T = {self.num_steps}"
        return ", ".join(part for part in (self.name, self.schedule, self.quantity, steps) if part)


@final
@dataclass(frozen=True)
class Tradeoff:
    """Quality and diversity of one system's samples at several sampler settings."""

    name: str
    self_bleu: Numbers
    bleu: Numbers
    settings: Sequence[str] = ()
    """The setting of each point, such as T=0.7 or k=30."""
    self_bleu_errors: Numbers = ()
    bleu_errors: Numbers = ()
    """Standard errors."""


@final
@dataclass(frozen=True)
class TokenCurve:
    """Held-out nats per word of one system over total tokens, one training run per point."""

    name: str
    tokens: Numbers
    """The numbers of tokens, including pretraining."""
    nats: Numbers
    kind: str
    """One of `KINDS`."""
    intervals: Sequence[tuple[float, float]] = ()


@final
@dataclass(frozen=True)
class TokenRatio:
    """The perplexity per word of one system relative to another's at the same total number of tokens."""

    name: str
    tokens: Numbers
    ratios: Numbers
    intervals: Sequence[tuple[float, float]] = ()


@final
@dataclass(frozen=True)
class Effect:
    """A change in percent, in the paper and in our results, ours with its interval."""

    name: str
    ours: float
    interval: tuple[float, float]
    paper: float | None = None


@final
@dataclass(frozen=True)
class Frontier:
    """The judge's perplexity and the entropy of one system's samples over sampler settings."""

    name: str
    entropy: Numbers
    perplexity: Numbers
    intervals: Sequence[tuple[float, float]] = ()
    """The intervals of the perplexities."""
    settings: Sequence[str] = ()
    """The setting of each point; the first and the last are labeled."""
    varied: str = ""
    """The setting that differs between the points, such as steps."""


@final
@dataclass(frozen=True)
class Survival:
    """The probability ᾱ that a token is still unmasked, over the fraction of time t/T."""

    word: str
    times: Numbers
    survival: Numbers


def convergence(curves: Sequence[Curve], path: Path) -> None:
    """Draws figure 4: held-out nats per token during training, one panel per kind of likelihood."""
    labels = [(curve.label, curve.kind) for curve in curves]
    for curve, label in zip(curves, labels, strict=True):
        if labels.count(label) > 1:
            raise ValueError(f"two lines have the label {curve.label!r}; give each its own name")
        if not all(map(math.isfinite, (*curve.ys, *curve.errors))):
            raise ValueError(f"{curve.name!r} has a validation that is not finite, which cannot be drawn; leave it out")
    kinds = [kind for kind in KINDS if any(curve.kind == kind for curve in curves)]
    with _figure(path, height=0.6 + (3.4 if len(kinds) == 1 else 2.5 * len(kinds)) + 0.2 * len(curves)) as figure:
        panels = dict(zip(kinds, figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0], strict=True))
        for curve, (color, dashes, marker) in zip(curves, _looks([curve.label for curve in curves]), strict=True):
            axes, alone = panels[curve.kind], marker if len(curve.xs) == 1 else ""
            axes.plot(curve.xs, curve.ys, color=color, linestyle=dashes, marker=alone, label=_shown(curve.label))
            if curve.errors:
                ends = [(y - 1.96 * error, y + 1.96 * error) for y, error in zip(curve.ys, curve.errors, strict=True)]
                axes.fill_between(curve.xs, *zip(*ends, strict=True), color=color, alpha=0.15, linewidth=0)
        for kind, axes in panels.items():
            axes.set_ylabel(f"{KINDS[kind]}, nats per token")
        axes.set_xlabel("training steps")
        figure.legend(loc="outside lower left")


def quality_diversity(series: Sequence[Tradeoff], real: Tradeoff, path: Path) -> None:
    """Draws figure 3: BLEU-4 against self-BLEU-4 over sampler settings; the first and the last are labeled.

    `real` holds the same figures for real sentences.
    """
    with _figure(path, height=4.6) as figure:
        axes = figure.subplots()
        for one, (color, dashes, marker) in zip(series, _looks([one.name for one in series]), strict=True):
            _draw_tradeoff(axes, one, color=color, linestyle=dashes, marker=marker)
        _draw_tradeoff(axes, real, color="black", linestyle="", marker="*", markersize=11)
        axes.margins(0.08)
        axes.set(xlabel="self-BLEU-4 (lower: more diverse)", ylabel="BLEU-4 (higher: more n-grams of real text)")
        figure.legend(loc="outside right upper")


def token_curves(curves: Sequence[TokenCurve], path: Path, ratios: Sequence[TokenRatio] = (), to: str = "") -> None:
    """Draws held-out nats per word against total tokens: one panel per kind of likelihood, bounds first and larger.

    Args:
        curves: The systems.
        path: The picture to write.
        ratios: Perplexities relative to one of the systems, for a panel between bounds and exact values: differences
            that are too small to see in nats.
        to: The system that the ratios are relative to.
    """
    kinds = [kind for kind in ("bound", "exact", "pseudo") if any(curve.kind == kind for curve in curves)]
    heights = dict.fromkeys(kinds, 2.0) | {kinds[0]: 3.6} | ({"ratio": 2.4} if ratios else {})
    order = [*kinds[:1], *(["ratio"] if ratios else []), *kinds[1:]]
    with _figure(path, height=0.9 + sum(heights.values())) as figure:
        sizes = [heights[name] for name in order]
        own = figure.subplots(len(order), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
        panels = dict(zip(order, own, strict=True))
        looks = dict(zip((curve.name for curve in curves), _looks([curve.name for curve in curves]), strict=True))

        def draw(axes: Axes, name: str, tokens: Numbers, values: Numbers, intervals: Any, **more: Any) -> None:
            color, dashes, marker = looks[name]
            look = {"color": color, "linestyle": dashes, "marker": marker, "markersize": 5}
            axes.errorbar(tokens, values, _errors(values, intervals), **look, **more)

        for curve in curves:
            draw(panels[curve.kind], curve.name, curve.tokens, curve.nats, curve.intervals, label=_shown(curve.name))
        for ratio in ratios:
            draw(panels["ratio"], ratio.name, ratio.tokens, ratio.ratios, ratio.intervals)
        for name, axes in panels.items():
            relative = f"perplexity per word,\nrelative to {_shown(to)}"
            axes.set_ylabel(f"{KINDS[name]}, nats per word" if name in KINDS else relative)
            _logarithmic(axes.xaxis)
        if ratios:
            panels["ratio"].axhline(1, color=looks[to][0], linewidth=1.2)
        own[-1].set_xlabel("tokens of training, pretraining included")
        figure.legend(loc="outside lower left", ncols=2)


def _logarithmic(axis: Any) -> None:
    """Makes an axis logarithmic, with plain numbers at 1, 2 and 5 times each power of ten: 20, 500, 10M."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def forest(effects: Sequence[Effect], path: Path) -> None:
    """Draws each effect with its interval, and the paper's as a cross, from top to bottom; colors denote systems."""
    with _figure(path, height=0.9 + 0.36 * len(effects)) as figure:
        axes = figure.subplots()
        rows = range(len(effects), 0, -1)
        for row, one in zip(rows, effects, strict=True):
            error = [[one.ours - one.interval[0]], [one.interval[1] - one.ours]]
            label = "ours, 95 %" if row == len(effects) else None
            axes.errorbar([one.ours], [row], None, error, color="black", marker="o", capsize=3, label=label)
        known = [(one.paper, row) for row, one in zip(rows, effects, strict=True) if one.paper is not None]
        if known:
            xs, ys = zip(*known, strict=True)
            axes.plot(xs, ys, color="#888888", linestyle="", marker="x", markersize=8, label="paper")
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks([*rows], [_shown(one.name) for one in effects])
        axes.set(xlabel="change of perplexity per word, %", ylim=(0.4, len(effects) + 0.6))
        figure.legend(loc="outside lower left", ncols=2)


def frontiers(series: Sequence[Frontier], real: Frontier, path: Path) -> None:
    """Draws the judge's perplexity against the entropy of samples, one panel per varied setting.

    `real` holds the same figures for real sentences.
    """
    varied = [*dict.fromkeys(one.varied for one in series)]
    names = [*dict.fromkeys(one.name for one in series)]
    looks = dict(zip(names, _looks(names), strict=True))
    with _figure(path, height=4.6) as figure:
        panels = figure.subplots(1, len(varied), sharey=True, squeeze=False)[0]
        for what, axes in zip(varied, panels, strict=True):
            for one in (one for one in series if one.varied == what):
                color, dashes, marker = looks[one.name]
                errors = _errors(one.perplexity, one.intervals)
                look = {"color": color, "linestyle": dashes, "marker": marker, "markersize": 5, "elinewidth": 0.7}
                axes.errorbar(one.entropy, one.perplexity, errors, label=_shown(one.name), **look)
            axes.plot(
                real.entropy, real.perplexity, color="black", linestyle="", marker="*", markersize=11, label=real.name
            )
            axes.margins(0.12, 0.06)
            axes.set_title(f"over {what}" if what else "", fontsize=9)
            axes.set_xlabel("entropy of the words of all samples, nats\n(lower: less varied)")
            _logarithmic(axes.yaxis)
        panels[0].set_ylabel("judge's perplexity")
        for what, axes in zip(varied, panels, strict=True):
            for one in (one for one in series if one.varied == what):
                color, dashes, _ = looks[one.name]
                if len(one.settings) > 1 and dashes == DASHES[0]:  # labels of variants would overlap
                    _label_ends(axes, one, color)
        handles = {
            label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=3)


def _label_ends(axes: Axes, one: Frontier, color: str) -> None:
    """Writes the first and last setting beyond the ends of a line."""
    places = axes.transData.transform([*zip(one.entropy, one.perplexity, strict=True)])
    for end, inner in ((0, 1), (-1, -2)):
        x, y = places[end] - places[inner]
        scale = 10 / (math.hypot(x, y) or 1.0)
        shift = scale * x, scale * y
        look: dict[str, Any] = {"fontsize": 7.5, "color": color, "ha": "center", "va": "center"}
        point = one.entropy[end], one.perplexity[end]
        axes.annotate(one.settings[end], point, shift, textcoords="offset points", **look)


def _errors(values: Numbers, intervals: Sequence[tuple[float, float]]) -> Any:
    """The distances of interval ends from the values, in matplotlib's format."""
    if not intervals:
        return None
    pairs = list(zip(values, intervals, strict=True))
    return [[value - low for value, (low, _) in pairs], [high - value for value, (_, high) in pairs]]


def _draw_tradeoff(axes: Axes, one: Tradeoff, **look: Any) -> None:
    x, y = ([1.96 * error for error in errors] or None for errors in (one.self_bleu_errors, one.bleu_errors))
    axes.errorbar(one.self_bleu, one.bleu, y, x, elinewidth=0.7, label=_shown(one.name), **look)
    for at in sorted({0, len(one.settings) - 1}) if one.settings else ():
        point = one.self_bleu[at], one.bleu[at]
        axes.annotate(one.settings[at], point, (6, -9), textcoords="offset points", fontsize=7.5, color=look["color"])


def survival_curves(curves: Sequence[Survival], path: Path) -> None:
    """Draws figure 2: how long each word of a sentence stays unmasked, from the most common to the rarest.

    The dashed line is the linear schedule, 1 - t/T. The legend lists the curves from top to bottom; a word that occurs
    twice is drawn once.
    """
    linear = Survival("linear schedule", (0, 1), (1, 0))
    distinct = [*{curve.word: curve for curve in curves}.values(), linear]
    ordered = sorted(distinct, key=lambda one: (-sum(one.survival) / len(one.survival), one.word))
    with _figure(path, height=max(3.8, 1.0 + 0.2 * len(ordered))) as figure:
        from matplotlib import colormaps

        axes = figure.subplots()
        for at, curve in enumerate(ordered):
            shade = colormaps["viridis"](0.9 - 0.9 * at / (len(ordered) - 1))
            look = {"color": "black", "linestyle": DASHES[1], "linewidth": 1} if curve is linear else {"color": shade}
            axes.plot(curve.times, curve.survival, label=_shown(curve.word), **look)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="time t / T", ylabel="survival ᾱ: probability of being unmasked")
        figure.legend(loc="outside right upper")


def _shown(label: str) -> str:
    """A label on one line; matplotlib would omit one that begins with an underscore."""
    return f"{' ' if label.startswith('_') else ''}{' '.join(label.split())}"


def require_matplotlib() -> None:
    """Raises ValueError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError('figures need the package matplotlib: pip install "diffusionbert[plot]"') from None


@contextmanager
def _figure(path: Path, height: float) -> Iterator[Figure]:
    """An empty figure, written to `path` once it is drawn."""
    suffix = path.suffix.lower()
    if suffix not in METADATA:
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}; a figure's name must end in {', '.join(METADATA)}")
    require_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    # Start from matplotlib's defaults, so that a user's matplotlibrc does not change our figures.
    with style.context(SETTINGS, after_reset=True):
        figure = Figure(figsize=(7.2, height), dpi=170, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            figure.savefig(unfinished, format=suffix[1:], metadata=METADATA[suffix])
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _looks(labels: Sequence[str]) -> list[tuple[str, Any, str]]:
    """Color, dashes and marker of each line: one color per system, dashes and markers for its variants.

    A label begins with its system, up to the first comma. Equal labels look alike.
    """
    systems = {label: label.partition(",")[0] for label in labels}
    fixed = dict(zip(FAMILIAR, PALETTE, strict=False))
    spare = cycle(color for name, color in zip_longest(FAMILIAR, PALETTE) if name not in systems.values())
    colors = {name: fixed.get(name) or next(spare) for name in dict.fromkeys(systems.values())}
    looks: dict[str, tuple[str, Any, str]] = {}
    for label, name in systems.items():
        variant = sum(look[0] == colors[name] for look in looks.values())
        looks[label] = colors[name], DASHES[variant % len(DASHES)], MARKERS[variant % len(MARKERS)]
    return [looks[label] for label in labels]
