"""The paper's claims, and the verdicts of the kept rows on them.

One rule holds for all verdicts. The effect is the change of perplexity per word, the paper's unit (or of BLEU-4), the
first system against the second, on the same sentences, with its 95 % interval, which includes the spread over seeds if
both systems have several:

    a difference  holds if the interval lies on the claimed side of 0, does not hold if it lies on the other side, or,
                  where the claim names the paper's size, if it falls short of half of it
    an equality   holds if the interval lies within ± 5 %, does not hold if it lies outside
    more BLEU-4   decides nothing if self-BLEU is higher, too, nor does less if it is lower: one buys the other
    a bound against an exact value  can only hold in favor of the bound: above it, it may be loose
    otherwise undecided; and undecided, too little training, if a system's perplexity is more than half of that of token
    frequencies alone: it is still on the plateau from which training from random weights starts; and undecided, one
    training run, if no second run shows the spread of seeds and the interval, shifted by 5 points, would change the
    verdict on a difference
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment import restore

from diffusionbert.evaluation.compare import shared_noise
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.likelihood.intervals import (
    Difference,
    paired_difference,
    percentile_interval,
    resampled_sums,
    with_seeds,
)
from diffusionbert.likelihood.scores import Unit
from diffusionbert.objectives.base import CONTINUOUS
from diffusionbert.storage.files import read_json

MARGIN = 0.05
"""Two systems are comparable if their figures differ by no more than this fraction."""
SEEDS = "seed0", "seed1", "seed2"
CURVE = "curve", "curve1"
SPINDLE = "spindle", "spindle1", "spindle2"
FRONTIER = "frontier", "frontier1"
OURS = "–"
"""Where a claim is that the paper does not make."""


# ---- claims ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A claim of the paper (or ours) about the perplexities of two rows."""

    text: str
    where: str
    first: str
    second: str
    sign: int = -1
    """-1: the first has the lower perplexity; 1: the higher; 0: they are equal."""
    paper: float | None = None
    """The paper's change of perplexity."""
    sized: bool = False
    """Whether the claim names this size."""
    groups: tuple[str, ...] = SEEDS
    """The folders of both rows, one per training run."""


CLAIMS = (
    Claim("Pretraining lowers perplexity (TAD)", "table 2", "diffusionbert-hybrid", "d3pm-tad", paper=-0.371),
    Claim("– both without the hybrid term", "table 2", "diffusionbert", "d3pm-tad-plain", paper=-0.371),
    Claim("– against D3PM with LTE", "table 2", "diffusionbert-hybrid", "d3pm", paper=-0.043),
    Claim("– on LM1B", "table 2", "diffusionbert-hybrid-lm1b", "d3pm-tad-lm1b", paper=-0.371),
    Claim("– at equal total tokens, 30M", OURS, "other-text-1", "d3pm-1", groups=CURVE),
    Claim("– at equal total tokens, 242M", OURS, "other-text-8", "d3pm-8", groups=CURVE),
    Claim("– at 242M, pretrained on news, too", OURS, "same-text-8", "d3pm-8", groups=CURVE),
    Claim("30 % of the budget matches all of it", "§4.5", "diffusionbert-30-percent", "diffusionbert", 0),
    Claim("– and beats D3PM's full one †", "from §4.5", "diffusionbert-30-percent", "d3pm"),
    Claim("Pretrained, TAD beats PTE", "§4.3, table 2", "diffusionbert", "diffusionbert-pte", paper=-0.015),
    Claim(
        "Pretrained, PTE beats LTE by 14 %", "§4.3, table 2", "diffusionbert-pte", "diffusionbert-lte-random",
        paper=-0.136, sized=True,
    ),
    Claim(
        "– LTE that starts at zero", "§4.3, table 2", "diffusionbert-pte", "diffusionbert-lte",
        paper=-0.136, sized=True,
    ),
    Claim(
        "From scratch, LTE beats TAD by 34 %", "§4.3, table 2", "d3pm-lte-random", "d3pm-tad", paper=-0.342, sized=True
    ),
    Claim("– LTE that starts at zero, too", "§4.3, table 2", "d3pm", "d3pm-tad", paper=-0.342, sized=True),
    Claim(
        "The spindle (corpus mean) gains 19 % for DiffusionBERT", "§4.3, table 2", "lambda-0.3", "lambda-0",
        paper=-0.19, sized=True, groups=SPINDLE,
    ),
    Claim(
        "– the spindle on LM1B", "§4.3, table 2", "diffusionbert-spindle-lm1b", "diffusionbert-lm1b",
        paper=-0.19, sized=True,
    ),
    Claim(
        "The spindle (corpus mean) gains 6 % for D3PM", "table 2", "d3pm-spindle", "d3pm", paper=-0.059, sized=True
    ),
    Claim("DiffusionBERT beats BERT-Mouth ‡", "§4.3, table 2", "diffusionbert", "bert-mouth", paper=-0.449),
    Claim("– with the hybrid term ‡", "§4.3, table 2", "diffusionbert-hybrid", "bert-mouth", paper=-0.449),
    Claim("– without it, on LM1B ‡", "§4.3, table 2", "diffusionbert-lm1b", "bert-mouth-lm1b", paper=-0.449),
    Claim("– with it, on LM1B ‡", "§4.3, table 2", "diffusionbert-hybrid-lm1b", "bert-mouth-lm1b", paper=-0.449),
    Claim("DiffusionBERT beats Diffusion-LM", "§4.3, table 2", "diffusionbert", "diffusion-lm", paper=-0.336),
    Claim("– D3PM does, both from scratch", "table 2", "d3pm", "diffusion-lm", paper=-0.306),
    Claim(
        "Diffusion-LM does not profit from BERT's weights", "§4.3, table 2", "diffusion-lm-wide", "diffusion-lm-bert",
        paper=-0.102,
    ),
    Claim(
        "Behind a pretrained decoder (exact, left to right) ‡", "table 3", "diffusionbert-left-to-right",
        "decoder-pretrained", 1, paper=0.412,
    ),
    Claim("– behind a decoder from scratch", OURS, "diffusionbert-left-to-right", "decoder", 1),
    Claim(
        "– behind it in one of 16 random orders, too", OURS, "diffusionbert-random-16", "decoder", 1, groups=("seed1",)
    ),
    Claim("The hybrid term helps DiffusionBERT", OURS, "diffusionbert-hybrid", "diffusionbert"),
    Claim("– the hybrid term on LM1B", OURS, "diffusionbert-hybrid-lm1b", "diffusionbert-lm1b"),
    Claim("The hybrid term helps D3PM", OURS, "d3pm-tad", "d3pm-tad-plain"),
    Claim("Bell-shaped times help DiffusionBERT", OURS, "diffusionbert-bell", "diffusionbert"),
    Claim("– bell-shaped times on LM1B", OURS, "diffusionbert-bell-lm1b", "diffusionbert-lm1b"),
)  # fmt: skip
"""The claims; those whose rows are missing are left out. The page explains the marks."""


@dataclass(frozen=True)
class QualityClaim:
    """A claim about the BLEU-4 of two rows: in the main table, or at equal self-BLEU over sampler settings."""

    text: str
    where: str
    first: str
    second: str
    sign: int = 1
    paper: float | None = None
    at_equal_diversity: bool = False


QUALITY_CLAIMS = (
    QualityClaim("DiffusionBERT beats D3PM in BLEU-4 †", "table 2", "diffusionbert", "d3pm", paper=0.081),
    QualityClaim("– at equal self-BLEU †", "§4.4, figure 3", "diffusionbert", "d3pm", at_equal_diversity=True),
    QualityClaim(
        "TAD beats PTE in BLEU-4", "§4.3, table 2", "diffusionbert", "diffusionbert-pte", paper=0.084
    ),
    QualityClaim(
        "The spindle (corpus mean) improves DiffusionBERT's BLEU-4", "§4.3, table 2", "diffusionbert-spindle",
        "diffusionbert", paper=0.034,
    ),
    QualityClaim(
        "– at equal self-BLEU", OURS, "diffusionbert-spindle", "diffusionbert", at_equal_diversity=True
    ),
    QualityClaim(
        "The spindle (corpus mean) improves D3PM's BLEU-4", "§4.3, table 2", "d3pm-spindle", "d3pm", paper=0.088
    ),
    QualityClaim(
        "DiffusionBERT beats BERT-Mouth in BLEU-4", "§4.3, table 2", "diffusionbert", "bert-mouth", paper=0.469
    ),
    QualityClaim(
        "Comparable with a decoder from scratch", "§4.4, figure 3", "diffusionbert", "decoder", 0,
        at_equal_diversity=True,
    ),
    QualityClaim(
        "Behind a pretrained decoder in BLEU-4", "§4.4, figure 3", "diffusionbert", "decoder-pretrained", -1,
        at_equal_diversity=True,
    ),
)  # fmt: skip
MIN_SAMPLES = 100
"""With fewer samples, BLEU was not meant to be compared."""


def verdict(low: float, high: float, sign: int, size: float | None = None) -> str:
    """The verdict on a claim from the interval of a relative change; `size` is the change that the claim names."""
    if sign == 0:
        if low >= -MARGIN and high <= MARGIN:
            return "holds"
        return "does not hold" if low > MARGIN or high < -MARGIN else "undecided"
    # The interval on the claimed side, as positive numbers.
    least, most = (low, high) if sign > 0 else (-high, -low)
    if most < 0 or (size is not None and most < abs(size) / 2):
        return "does not hold"
    return "holds" if least > 0 else "undecided"


def of_runs(said: str, low: float, high: float, sign: int, seeds: int, size: float | None = None) -> str:
    """A verdict on a difference, unless it rests on one training run and a small shift of the interval changes it."""
    if seeds > 1 or sign == 0 or said not in ("holds", "does not hold"):
        return said
    shifted = {verdict(low + shift, high + shift, sign, size) for shift in (-MARGIN, MARGIN)}
    return said if shifted == {said} else "undecided: one training run"


def is_loose(kinds: tuple[str, str], interval: tuple[float, float]) -> bool:
    """Whether a bound lies above an exact value, which its looseness may explain."""
    low, high = interval
    return (kinds == ("bound", "exact") and low > 0) or (kinds == ("exact", "bound") and high < 0)


# ---- rows -----------------------------------------------------------------------------------------------------------


ELSEWHERE = {
    ("seed0", "diffusion-lm"): ("diffusion-lm", "scratch"),
    ("seed0", "diffusion-lm-wide"): ("diffusion-lm", "scratch-wide"),
    ("seed0", "diffusion-lm-bert"): ("diffusion-lm", "pretrained"),
    ("seed0", "diffusionbert-left-to-right"): ("orders", "diffusionbert-left-to-right"),
    ("seed1", "diffusionbert-left-to-right"): ("orders1", "diffusionbert-left-to-right"),
    ("seed1", "diffusionbert-random-16"): ("orders1", "diffusionbert-random-16"),
    **{("orders1", name): ("seed1", name) for name in ("diffusionbert", "diffusionbert-bell", "d3pm-tad")},
    ("curve", "d3pm-1-lm1b"): ("seed0", "d3pm-tad-lm1b"),
    ("curve", "causal-1-lm1b"): ("seed0", "decoder-lm1b"),
    ("curve-plain", "d3pm-1-lm1b"): ("seed0", "d3pm-tad-plain-lm1b"),
}
"""The location of rows that are not with the others of their group."""


class Kept:
    """The kept evaluations, restored when needed."""

    def __init__(self, source: Path, scratch: Path):
        self.source, self.scratch = source, scratch
        self._loaded: dict[str, EvaluationResult] = {}

    def has(self, group: str, name: str) -> bool:
        return (self._path(group, name) / "evaluation.json").exists()

    def result(self, group: str, name: str) -> EvaluationResult:
        path = self._path(group, name)
        key = f"{path.parts[-3]}/{path.name}"
        if key not in self._loaded:
            self._loaded[key] = EvaluationResult.load(restore(path, self.source / "sentences", self.scratch / key))
        return self._loaded[key]

    def _path(self, group: str, name: str) -> Path:
        own = self.source / group / "evaluations" / name
        if own.exists() or (group, name) not in ELSEWHERE:
            return own
        at, of = ELSEWHERE[group, name]
        return self.source / at / "evaluations" / of

    def names(self, group: str) -> list[str]:
        return sorted(path.parent.name for path in (self.source / group).glob("evaluations/*/evaluation.json"))


@dataclass(frozen=True)
class Found:
    """A difference between two rows, over the training runs that both have."""

    change: float
    """The relative change of the perplexity per word."""
    interval: tuple[float, float]
    p_value: float
    perplexities: tuple[float, float]
    seeds: int
    kinds: tuple[str, str]
    noise: str
    quantity: str
    tokens_per_word: float


def difference(kept: Kept, claim: Claim) -> Found | None:
    """The effect of a claim; None if a row is missing, or if the rows have nothing comparable."""
    groups = [group for group in claim.groups if kept.has(group, claim.first) and kept.has(group, claim.second)]
    if not groups:
        return None
    pairs = [(kept.result(group, claim.first), kept.result(group, claim.second)) for group in groups]
    names = _quantities(*pairs[0])
    if names is None:
        return None
    every = [tuple(own.scores[name] for own, name in zip(pair, names, strict=True)) for pair in pairs]
    if not all(torch.equal(one.example, every[0][0].example) for pair in every for one in pair):
        raise ValueError(f"{claim.first} and {claim.second} were scored on different sentences; evaluate them alike")
    counts = [one.counts()[Unit.WORD] for one in every[0]]
    means = [np.mean([pair[side].nats.numpy() for pair in every], axis=0) for side in (0, 1)]
    found = paired_difference((means[0], means[1]), (counts[0], counts[1]))
    rates = [np.array([float(pair[side].nats.sum()) for pair in every]) / float(counts[side].sum()) for side in (0, 1)]
    found = with_seeds(found, *rates) if len(every) > 1 else found
    summaries = [own.likelihoods[name] for pair in pairs for own, name in zip(pair, names, strict=True)]
    return Found(
        math.expm1(found.value),
        (math.expm1(found.low), math.expm1(found.high)),
        found.p_value,
        (math.exp(rates[0].mean()), math.exp(rates[1].mean())),
        len(every),
        (summaries[0].kind.value, summaries[1].kind.value),
        shared_noise(*summaries),
        " against ".join(dict.fromkeys(names)),
        float(every[0][0].tokens.sum()) / float(counts[0].sum()),
    )


def _quantities(first: EvaluationResult, second: EvaluationResult) -> tuple[str, str] | None:
    """The likelihoods to compare: the T-step bound or another one that both have, otherwise their own, of any kind."""
    common = [name for name in ("grid", "continuous", *first.scores) if name in first.scores and name in second.scores]
    if common:
        return common[0], common[0]
    if not first.scores or not second.scores:
        return None
    return next(iter(first.scores)), next(iter(second.scores))


def quality(kept: Kept, claim: QualityClaim) -> dict[str, Any] | None:
    """The change of BLEU-4 in the main table, and of self-BLEU, over the seeds that both rows have."""
    seeds = [seed for seed in SEEDS if kept.has(seed, claim.first) and kept.has(seed, claim.second)]
    pairs = [(kept.result(seed, claim.first), kept.result(seed, claim.second)) for seed in seeds]
    pairs = [pair for pair in pairs if min(len(one.bleu4.values) for one in pair) >= MIN_SAMPLES]
    if not pairs:
        return None
    found = {}
    for name in ("bleu4", "self_bleu4"):
        values = [[getattr(pair[side], name).values for pair in pairs] for side in (0, 1)]
        logs = [np.log([own.mean() for own in side]) for side in values]
        sums = [resampled_sums([np.concatenate(own)], seed)[0] / sum(map(len, own)) for seed, own in enumerate(values)]
        low, high = percentile_interval(np.log(sums[0] / sums[1]))
        change = Difference(float(logs[0].mean() - logs[1].mean()), low, high, math.nan)
        found[name] = with_seeds(change, *logs) if len(pairs) > 1 else change
    bleu, diversity = found["bleu4"], found["self_bleu4"]
    said = verdict(math.expm1(bleu.low), math.expm1(bleu.high), claim.sign)
    if bleu.low > 0 and diversity.low > 0:
        said = "undecided: less diverse"
    if bleu.high < 0 and diversity.high < 0:
        said = "undecided: more diverse"
    said = of_runs(said, math.expm1(bleu.low), math.expm1(bleu.high), claim.sign, len(pairs))
    means = [float(np.mean([pair[side].bleu4.mean for pair in pairs])) for side in (0, 1)]
    return _quality_row(claim, bleu, f"BLEU-4 {means[0]:.3f} against {means[1]:.3f}", said, len(pairs))


def quality_at_equal_diversity(kept: Kept, claim: QualityClaim) -> dict[str, Any] | None:
    """The change of BLEU-4 at equal self-BLEU, over the seeds whose samples cover several settings of both systems."""
    every = [one for group in FRONTIER if (one := _at_equal_diversity(kept, group, (claim.first, claim.second)))]
    if not every:
        return None
    changes, drawn = (np.array(values) for values in zip(*(one[:2] for one in every), strict=True))
    found = Difference(float(changes.mean()), *percentile_interval(drawn.mean(axis=0)), math.nan)
    found = with_seeds(found, changes) if len(every) > 1 else found
    said = verdict(math.expm1(found.low), math.expm1(found.high), claim.sign)
    said = of_runs(said, math.expm1(found.low), math.expm1(found.high), claim.sign, len(every))
    low, high = min(one[2] for one in every), max(one[3] for one in every)
    return _quality_row(claim, found, f"BLEU-4 at self-BLEU {low:.2f} to {high:.2f}", said, len(every))


def _at_equal_diversity(
    kept: Kept, group: str, systems: tuple[str, str]
) -> tuple[float, list[float], float, float] | None:
    """The log of the ratio of BLEU-4, its values over resampled texts, and the range of self-BLEU that both cover."""
    if not all(_settings(kept, group, system) for system in systems):
        return None
    measured, resampled = [], []
    for number, system in enumerate(systems):
        results = sorted(
            (kept.result(group, name) for name in _settings(kept, group, system)), key=lambda one: one.self_bleu4.mean
        )
        measured.append(np.array([[one.self_bleu4.mean for one in results], [one.bleu4.mean for one in results]]))
        columns = [[getattr(one, name).values for one in results] for name in ("self_bleu4", "bleu4")]
        seeds = [[2 * (10 * number + at) + which for at in range(len(results))] for which in (0, 1)]
        resampled.append(
            np.array(
                [
                    [resampled_sums([own], seed)[0] / len(own) for own, seed in zip(*both, strict=True)]
                    for both in zip(columns, seeds, strict=True)
                ]
            )
        )
    low, high = max(one[0, 0] for one in measured), min(one[0, -1] for one in measured)
    if low >= high:
        return None
    at = np.linspace(low, high, 50)

    def change(*points: Any) -> float:
        first, second = (np.interp(at, *one[:, np.argsort(one[0])]).mean() for one in points)
        return float(np.log(first / second))

    drawn = [change(*(one[:, :, index] for one in resampled)) for index in range(resampled[0].shape[2])]
    return change(*measured), drawn, low, high


def _settings(kept: Kept, group: str, system: str) -> list[str]:
    """A system's evaluations over sampler settings."""
    return [name for name in kept.names(group) if re.fullmatch(rf"{re.escape(system)}-T=[\d.]+", name)]


def _quality_row(claim: QualityClaim, found: Difference, shown: str, said: str, seeds: int) -> dict[str, Any]:
    change, p_value = math.expm1(found.value), None if math.isnan(found.p_value) else found.p_value
    return {
        "claim": claim.text,
        "where": claim.where,
        "first": claim.first,
        "second": claim.second,
        "ours": f"{shown}, {percent(change)}",
        "change": change,
        "interval": (math.expm1(found.low), math.expm1(found.high)),
        "paper": claim.paper,
        "p_value": p_value,
        "seeds": seeds,
        "noise": "independent",
        "verdict": said,
    }


def unigram_nats(kept: Kept) -> float | None:
    """The nats per token of token frequencies alone, if the experiment stored them; otherwise None."""
    file = kept.source / "unigram" / "settings.json"
    return float(read_json(file)["nats_per_token"]) if file.exists() else None


def claim_rows(kept: Kept) -> Iterator[dict[str, Any]]:
    """One line for each claim whose rows exist."""
    unigram = unigram_nats(kept)
    for claim in CLAIMS:
        found = difference(kept, claim)
        if found is None:
            continue
        size = claim.paper if claim.sized else None
        said = of_runs(verdict(*found.interval, claim.sign, size), *found.interval, claim.sign, found.seeds, size)
        if is_loose(found.kinds, found.interval):
            said = "undecided: the bound may be loose"
        if unigram is not None and max(found.perplexities) > math.exp(unigram * found.tokens_per_word) / 2:
            said = "undecided: too little training"
        yield {
            "claim": claim.text,
            "where": claim.where,
            "first": claim.first,
            "second": claim.second,
            "ours": f"{found.perplexities[0]:.1f} against {found.perplexities[1]:.1f}, {percent(found.change)}"
            + (" ∞" if found.quantity == CONTINUOUS else ""),
            "perplexities": list(found.perplexities),
            "paper": claim.paper,
            **{key: value for key, value in asdict(found).items() if key != "perplexities"},
            "verdict": said,
        }
    for one in QUALITY_CLAIMS:
        row = quality_at_equal_diversity(kept, one) if one.at_equal_diversity else quality(kept, one)
        if row is not None:
            yield row


def percent(value: float | None) -> str:
    """A change, formatted for the page."""
    if value is None:
        return "–"
    shown = "±0.0" if abs(value) < 5e-4 else f"{100 * value:+.1f}".replace("-", "−")
    return f"{shown}\N{NO-BREAK SPACE}%"


def claims_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of claims."""
    lines = ["|  | claim | where in the paper | ours | 95 % | paper | seeds | verdict |", "|" + "---|" * 8]
    for number, row in enumerate(rows, start=1):
        interval = f"[{', '.join(map(percent, row['interval']))}]"
        cells = row["claim"], row["where"], row["ours"], interval, percent(row["paper"]), row["seeds"]
        lines.append(f"| {' | '.join(map(str, (number, *cells)))} | **{row['verdict']}** |")
    return "\n".join(lines) + "\n"
