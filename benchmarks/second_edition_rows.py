"""The rows of the second edition of the experiment: what is trained, from what, for how long, and how it is evaluated.

All rows have ModernBERT's layers (group `bert`: those of BERT and GPT-2), one size, one vocabulary, one batch size and
one optimizer (AdamW; Muon at small size). Each kind of network has the learning rate that was best for it in a search
of equal size (`Size.rates`): that kind's plainest system, half of the usual tokens, seed 0, by the last validation.
Noise is shared: bounds of diffusion are estimated by stratified times with one evaluation seed, which no training run
uses, and with as many draws for all rows that are compared. (BERT-Mouth's bound has draws of its own.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from released_spindle import ReleasedSpindle

from diffusionbert.diffusion.schedules import Mean, Spindle, Sqrt
from diffusionbert.diffusion.time_sampling import Bell
from diffusionbert.likelihood.orders import random_orders_named
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import ObjectiveConfig
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig, Quantity
from diffusionbert.recipes import SYSTEMS, Start
from diffusionbert.samplers import Sampler, SamplerConfig, SamplingRequest
from diffusionbert.samplers.gibbs import Gibbs
from diffusionbert.training.model_folder import BUNDLED

Settings = tuple[tuple[str, Any], ...]
"""Fields of a dataclass and their values."""

# ---- sizes ----------------------------------------------------------------------------------------------------------

RATES = (4e-4, 1e-3, 2.5e-3)
"""The learning rates of the search."""


@dataclass(frozen=True)
class Size:
    """The size of everything, and the settings that suit it."""

    layers: int = 7
    width: int = 384
    heads: int = 6
    batch_tokens: int = 16_384
    tokens: int = 32_768_000
    """The tokens of a usual row, 2,000 steps."""
    vocabulary: str | int = str(BUNDLED)
    max_length: int = 128
    diffusion_steps: int = 512
    sentences: int = 2000
    samples: int = 1000
    length: int = 64
    max_draws: int = 512
    max_sequences: float = math.inf
    """Evaluations that compute more sequences per sentence are left out."""
    precision: str = "bf16"
    optimizer: str = "adamw"
    rates: tuple[float, ...] = RATES
    pretraining_rate: float = 1e-3
    speed: float = 2.0e6
    """Tokens per second of training (compiled) on one H200, over five processes together, as measured."""
    scoring: float = 2.5e6
    """Likewise of scoring."""

    def has(self, one: Evaluation) -> bool:
        """Whether an evaluation is done at this size."""
        return (one.scored or self.samples > 0) and one.sequences(self) <= self.max_sequences


SIZES = {
    "full": Size(),
    "small": Size(
        layers=3, width=96, heads=3, batch_tokens=1024, tokens=2_048_000, vocabulary=1000, max_length=64, sentences=500,
        samples=0, max_draws=16, max_sequences=64, precision="no", optimizer="muon", rates=(1e-3, 2.5e-3, 6.25e-3),
        pretraining_rate=2.5e-3, speed=32e3, scoring=100e3,
    ),
    "tiny": Size(1, 32, 2, 256, 1024, str(BUNDLED), 24, 8, 16, 4, 6, 4, precision="no"),
}  # fmt: skip
"""`small` is for several training runs on two cores, without samples; `tiny` is for tests."""
MASKED, CAUSAL = "masked", "causal"
COST = {
    "genmd4": 2.5, "diffusion-lm": 2.0, "diffusion-lm-bert": 2.0, "sundae": 2.0, "bert-mouth": 1.2,
    "d3pm-uniform": 1.4, "multinomial": 1.4,
}  # fmt: skip
"""How many times as long as the usual row a system takes; a causal network takes 0.8."""
STARTING, SAMPLING = 50.0, 0.002
"""Seconds until a process trains a first network, most of them compilation, and seconds per sample."""
EVALUATION_SEED = 100
"""The evaluation seed, which no training run uses."""

# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a row."""

    folder: str = "{group}/{name}"
    """Where it is written, as group/name."""
    text: str = "news.test"
    draws: int = 64
    seed: int = EVALUATION_SEED
    quantity: str | None = None
    share: float = 0.0
    """The fraction of the usual number of samples; 0 generates none."""
    scored: bool = True
    sampling: SamplingRequest | None = None
    judged: bool = False
    conventions: bool = False
    objective: Settings | ObjectiveConfig = ()
    """The objective to score with, or what differs in it, if it is not the one used for training."""

    def seconds(self, size: Size) -> float:
        """The estimated seconds on one H200; at small size, on two cores."""
        tokens = 35 * size.sentences * self.sequences(size)
        return (tokens / size.scoring if self.scored else 0.0) + SAMPLING * 2 * self.share * size.samples

    def sequences(self, size: Size) -> int:
        """About how many sequences are computed to score one sentence; in an order, one per token."""
        if self.quantity in ORDERS:
            random = random_orders_named(self.quantity)
            return 35 * (1 if random is None else random.number)
        return min(self.draws, size.max_draws) * (2 if self.quantity is None else 1)


@dataclass(frozen=True)
class Row:
    """One model: what is trained, from what, for how long, and how it is evaluated."""

    group: str
    name: str
    system: str
    """A name in `SYSTEMS`, or `masked` or `causal` for pretraining."""
    start: str | None = None
    """The row it starts from, as group/name."""
    text: str = "news"
    share: float = 1.0
    """The fraction of the usual number of tokens."""
    seed: int = 0
    backbone: str = "modern"
    rate: float | None = None
    """The learning rate; None is the one chosen by the search."""
    rates: tuple[float, ...] = RATES
    """The learning rates of the search."""
    objective: Settings | ObjectiveConfig = ()
    """The objective, or what differs from that of the system."""
    candidates: tuple[str, ...] = ()
    """Rows to choose from: the objective of the best one is used."""
    time: TimeEmbedding | None = None
    training: Settings = ()
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"

    @property
    def is_causal(self) -> bool:
        return self.system == CAUSAL or (self.system in SYSTEMS and SYSTEMS[self.system].objective.is_causal)

    @property
    def kind(self) -> str:
        """The kind of network, which determines its learning rate."""
        start = "new" if self.start is None else "pretrained"
        return f"{self.backbone}-{CAUSAL if self.is_causal else MASKED}-{start}"

    @property
    def network(self) -> str:
        """Its class of network and loss; those of one class are compiled once."""
        kind = CAUSAL if self.is_causal else MASKED
        if self.system not in SYSTEMS:
            return f"{self.backbone}-{kind}-{TimeEmbedding.NONE}"
        own = SYSTEMS[self.system]
        schedule = getattr(own.objective, "schedule", None)
        kind += "-vectors" if own.objective.has_word_vectors else ""
        kind += "-by-token" if schedule is not None and schedule.by_token else ""
        return f"{self.backbone}-{kind}-{self.time or own.time}"

    @property
    def search(self) -> tuple[str, ...]:
        """The rows that chose its learning rate."""
        if self.rate is not None:
            return ()
        return tuple(row.key for row in searches(self.backbone, self.rates) if row.kind == self.kind)

    @property
    def models(self) -> tuple[str, ...]:
        """The rows whose models it uses: its start, and the judge of its samples."""
        judges = (JUDGE,) if any(one.judged for one in self.evaluations) else ()
        return (*(() if self.start is None else (self.start,)), *judges)

    @property
    def needs(self) -> tuple[str, ...]:
        """The rows that must be done first."""
        return (*self.models, *self.search, *self.candidates)

    def tokens(self, size: Size) -> int:
        return round(self.share * size.tokens)

    def seconds(self, size: Size) -> float:
        """The estimated seconds on its machine, without the start of its process, during which others compute."""
        factor = COST.get(self.system, 0.8 if self.is_causal else 1.0)
        return factor * self.tokens(size) / size.speed + sum(one.seconds(size) for one in self.evaluations)


JUDGE = "starts/causal-wiki-modern"
"""The row whose model judges samples: it has seen no news, but the text that other rows were pretrained on."""
PLAIN = Evaluation()
SAMPLED = Evaluation(share=1.0)
LM1B = Evaluation("{group}/{name}-lm1b", "lm1b.heldout", draws=32, conventions=True)
ON_CURVE = PLAIN, replace(LM1B, draws=16, conventions=False)


def _precise(folder: str, **changes: Any) -> Evaluation:
    """A more precise evaluation, for claims that depend on a small difference."""
    return Evaluation(folder, draws=512, **{"quantity": "continuous", **changes})


STRICT = DiscreteTimeConfig(Spindle(0.3, Mean.CORPUS))
"""A bound for models that were trained on another quantity. It may be loose: it is not the one they were trained on."""
FILES: Settings = (("export_precision", "bf16"), ("shard_size", "15MB"))
"""How networks to start from are stored: small enough to be copied elsewhere."""


def starts(backbone: str = "modern", rate: float = 1e-3) -> list[Row]:
    """Pretraining with equal budgets, masked and causal, on another text."""
    group = "starts" if backbone == "modern" else f"{backbone}-starts"
    return [
        Row(group, f"{kind}-wiki-{backbone}", kind, text="wiki", share=4, backbone=backbone, rate=rate, training=FILES)
        for kind in (MASKED, CAUSAL)
    ]


def _start(system: str, backbone: str = "modern") -> str | None:
    start = SYSTEMS[system].start
    if start is Start.SCRATCH:
        return None
    return next(row.key for row in starts(backbone) if row.is_causal is (start is Start.DECODER))


def _row(group: str, system: str, name: str | None = None, *evaluations: Evaluation, **changes: Any) -> Row:
    start = _start(system, changes.get("backbone", "modern"))
    return Row(group, name or system, system, **{"start": start, "evaluations": evaluations, **changes})


def searches(backbone: str = "modern", rates: tuple[float, ...] = RATES) -> list[Row]:
    """The learning rates of each kind of network, on its plainest system."""
    group = "rates" if backbone == "modern" else f"{backbone}-rates"
    return [
        _row(group, system, f"{system}-{rate:g}", share=0.5, backbone=backbone, rate=rate)
        for system in ("d3pm-tad", "diffusionbert", "decoder", "decoder-pretrained")
        for rate in rates
    ]


def main_rows(seed: int) -> list[Row]:
    """The paper's main rows: LTE and the hybrid term both ways; with seed 0, also everything that needs one seed.

    All seeds start from the same pretrained networks.
    """
    group, hybrid, plain = f"seed{seed}", (("hybrid", 0.01),), (("hybrid", 0.0),)

    def row(system: str, name: str | None = None, *more: Evaluation, **changes: Any) -> Row:
        usual = (SAMPLED, LM1B) if seed == 0 else (SAMPLED,)
        return _row(group, system, name, *usual, *more, seed=seed, **changes)

    def once(*evaluations: Evaluation) -> tuple[Evaluation, ...]:
        return evaluations if seed == 0 else ()

    def quality(*options: Any, **more: Any) -> tuple[Evaluation, ...]:
        return frontier(seed, *options, **more) if seed < 2 else ()

    def precise(name: str) -> Evaluation:
        return _precise(f"spindle{seed or ''}/lambda-{name}")

    # The curve at the usual number of tokens.
    curve_point = {
        0: (Evaluation("curve/d3pm-1"),),
        1: (Evaluation("curve1/d3pm-1"), replace(ON_CURVE[1], folder="curve1/d3pm-1-lm1b")),
    }.get(seed, ())
    by_paper = (("schedule", Spindle(0.3, Mean.SENTENCE)), ("quantity", Quantity.PAPER))
    paper_quantity = Evaluation("spindle/lambda-0-paper-quantity", quantity="grid", objective=by_paper)
    rows = [
        row("diffusionbert", None, precise("0"), *orders(seed), *once(*noise(), paper_quantity), *quality()),
        row("diffusionbert", "diffusionbert-hybrid", objective=hybrid),
        row("diffusionbert-lte"),
        row("diffusionbert-pte"),
        row("diffusionbert-spindle", None, precise("0.3"), *quality()),
        row("diffusionbert-bell", None, *orders(seed), *once(precise("0-bell"))),
        row("d3pm", None, *quality()),
        row("d3pm-tad", None, *orders(seed), *curve_point),
        row("d3pm-tad", "d3pm-tad-plain", *once(Evaluation("curve-plain/d3pm-1")), objective=plain),
        row("d3pm-spindle"),
        row("decoder", None, *once(Evaluation("curve/causal-1")), *quality(steps=())),
        row("decoder-pretrained", None, *quality(steps=())),
        row("bert-mouth", None, *quality((64, 128, 512), sampler=Gibbs())),
        # The verdicts on these do not depend on further seeds.
        _row(group, "diffusionbert", "diffusionbert-30-percent", PLAIN, seed=seed, share=0.3),
        row("diffusionbert-lte", "diffusionbert-lte-random", time=TimeEmbedding.LAYERS_RANDOM),
        row("d3pm", "d3pm-lte-random", time=TimeEmbedding.LAYERS_RANDOM),
    ]
    if seed == 0:
        strictly = Evaluation("spindle/lambda-0.3-paper-training", objective=STRICT, quantity="grid")
        by_itself = Evaluation("spindle/lambda-0.3-paper-both", quantity="grid")
        rows.append(row("diffusionbert-spindle-paper", None, strictly, by_itself))
    return rows


def noise() -> tuple[Evaluation, ...]:
    """The effect of another evaluation seed on one training run."""
    return tuple(Evaluation(f"noise/{{name}}-{seed}", seed=EVALUATION_SEED + seed) for seed in (1, 2, 3))


def orders(seed: int) -> tuple[Evaluation, ...]:
    """Exact likelihoods in orders of unmasking, to compare with the bound."""
    if seed > 1:
        return ()
    group, own = ("orders", ORDERS[:3]) if seed == 0 else ("orders1", (ORDERS[0], *ORDERS[3:]))
    exact = tuple(Evaluation(f"{group}/{{name}}-{order}", quantity=order) for order in own)
    return exact if seed else (_precise(f"{group}/{{name}}"), *exact)


ORDERS = "left-to-right", "confidence", "entropy", "random-4", "random-16"
STEP_COUNTS = (2, 4, 8, 16, 32, 64, 128, 512)
TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.0)
"""The temperatures of the frontier; BERT-Mouth and decoders generate one token per call."""


def frontier(seed: int, steps: tuple[int, ...] = STEP_COUNTS, sampler: Sampler | None = None) -> tuple[Evaluation, ...]:
    """Samples over steps, with the paper's top-k, and over temperatures, with a judge."""
    group = f"frontier{seed or ''}"
    settings = {f"{number}-steps": SamplerConfig(number, top_k=30) for number in steps}
    settings |= {f"T={value}": SamplerConfig(temperature=value) for value in TEMPERATURES}
    return tuple(
        Evaluation(
            f"{group}/{{name}}-{name}", share=0.5, scored=False, sampling=SamplingRequest(sampler, config), judged=True
        )
        for name, config in settings.items()
    )


def bert_rows() -> list[Row]:
    """Four of the main rows on BERT and GPT-2."""
    systems = "diffusionbert", "d3pm-tad", "decoder", "decoder-pretrained"
    return [_row("bert", system, None, SAMPLED, LM1B, backbone="bert") for system in systems]


def peers() -> list[Row]:
    """The other systems, once; those without a likelihood are judged by their samples."""
    systems = "mdlm", "mdlm-pretrained", "oa-ardm", "cmlm", "sundae", "multinomial", "d3pm-uniform"
    return [_row("peers", system, None, SAMPLED, LM1B) for system in systems]


CURVE = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
"""Total tokens, including pretraining, as fractions of the usual number: a factor of 32, the longest first."""


def curve(rate: float = 1e-3) -> Iterator[Row]:
    """The bound against total tokens, half of them pretraining if there is any; each total has its own schedules.

    All have the hybrid term, as in the papers, and the shorter ones also go without it (`curve-plain`): it changes what
    is gained by pretraining.
    """
    for share in CURVE:
        group = "curve-long" if share > 2 else "curve"
        if share != 1:  # it is among the main rows
            yield _row(group, "decoder", f"causal-{share:g}", *_under("curve", ON_CURVE), share=share)
        starts_of = list[tuple[str, str]]()
        for text, name in (("wiki", "other-text"), ("news", "same-text")):
            start = Row(
                group, f"masked-{text}-{share / 2:g}", MASKED, text=text, share=share / 2, rate=rate, training=FILES
            )
            same = next(
                (row for row in starts(rate=rate) if replace(row, group=group, name=start.name) == start), start
            )
            if same is start:
                yield start
            starts_of.append((name, same.key))
        for kind, term in (("curve", 0.01), ("curve-plain", 0.0))[: 1 if share > 2 else 2]:
            at, changes = group if kind == "curve" else kind, {"objective": (("hybrid", term),)}
            if share != 1:
                yield _row(at, "d3pm-tad", f"d3pm-{share:g}", *_under(kind, ON_CURVE), share=share, **changes)
            for name, start_of in starts_of:
                changed = {"start": start_of, "share": share / 2, **changes}
                yield _row(at, "diffusionbert", f"{name}-{share:g}", *_under(kind, ON_CURVE), **changed)


def curve_again() -> Iterator[Row]:
    """Another training run at two lengths of the curve, from the same starts: does the sign of the difference stay?"""
    for one in curve():
        name = one.name.rpartition("-")[0]
        if one.group != "curve-plain" and one.share * (2 if one.start else 1) in (1, 8) and name in CURVE_AGAIN:
            evaluations = tuple(replace(own, folder=own.folder.replace("curve/", "curve1/")) for own in one.evaluations)
            yield replace(one, group="curve1", seed=1, evaluations=evaluations)


CURVE_AGAIN = "d3pm", "other-text", "same-text"


def _under(group: str, evaluations: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    return tuple(replace(one, folder=one.folder.replace("{group}", group)) for one in evaluations)


def spindle() -> Iterator[Row]:
    """λ under the strict bound, with uniform and with bell-shaped times, and GenMD4; 0 and 0.3 are main rows.

    The sentence mean has its own valid bound here, and bell-shaped times also come with weights that undo them: then
    the expected loss is that of uniform times, and only its variance differs.
    """
    for bell, strengths in ((False, (0.1, 0.5)), (True, (0.1, 0.3, 0.5))):
        times = (("time_sampling", Bell(0.8, weighted=False)),) if bell else ()
        for strength in strengths:
            name, objective = f"lambda-{strength:g}{'-bell' if bell else ''}", (("schedule", Spindle(strength)), *times)
            yield _row("spindle", "diffusionbert-spindle", name, _precise(PLAIN.folder), LM1B, objective=objective)
    yield _row("spindle", "genmd4", None, _precise(PLAIN.folder), LM1B)
    yield _row("spindle", "diffusionbert-spindle-sentence", "lambda-0.3-sentence", _precise(PLAIN.folder), LM1B)
    weighted = (("time_sampling", Bell(0.8)),)
    yield _row("spindle", "diffusionbert-bell", "lambda-0-bell-weighted", _precise(PLAIN.folder), objective=weighted)
    # What the released code computes, for the linear model and for one that was trained on it.
    released = Evaluation("spindle/lambda-0-released-quantity", objective=ReleasedSpindle(0.3), quantity="grid")
    yield _row("spindle", "diffusionbert", "lambda-0-repeated", _precise(PLAIN.folder), released)
    own = Evaluation("spindle/lambda-0.3-released-both", quantity="grid")
    strictly = Evaluation("spindle/lambda-0.3-released-training", objective=STRICT, quantity="grid")
    yield _row("spindle", "diffusionbert-spindle", "lambda-0.3-released", own, strictly, objective=ReleasedSpindle(0.3))


def diffusion_lm() -> Iterator[Row]:
    """Diffusion-LM, also predicting tokens, at several widths; then the best for longer, and from a masked LM."""
    found = []
    tokens, sqrt = (("predicts_tokens", True),), (("schedule", Sqrt()), ("floor", 0.01))
    searched = ("vectors", (16, 128), ()), ("vectors-sqrt", (128,), sqrt), ("tokens", (4, 8, 16, 32, 64), tokens)
    for name, widths, objective in searched:
        for width in widths:
            own = (*objective, ("width", width))
            found.append(_row("diffusion-lm", "diffusion-lm", f"{name}-{width}", PLAIN, objective=own, share=0.5))
    yield from found
    candidates = tuple(row.key for row in found)
    own = replace(SAMPLED, share=0.25, sampling=SamplingRequest(config=SamplerConfig(200))), LM1B
    yield _row("diffusion-lm", "diffusion-lm", "scratch", *own, candidates=candidates)
    wide = (*tokens, ("width", None))
    yield _row("diffusion-lm", "diffusion-lm", "scratch-wide", *own, objective=wide)
    yield _row("diffusion-lm", "diffusion-lm-bert", "pretrained", *own, objective=wide)


def rows(size: Size = SIZES["full"]) -> list[Row]:
    """All rows, each after those it needs; what others wait for comes early, further training runs come last."""
    rates, rate = size.rates, size.pretraining_rate
    every = [
        *starts(rate=rate),
        *searches(rates=rates),
        *starts("bert", rate),
        *searches("bert", rates),
        *main_rows(0),
        *curve(rate),
        *main_rows(1),
        *bert_rows(),
        *spindle(),
        *diffusion_lm(),
        *peers(),
        *curve_again(),
        *main_rows(2),
    ]
    return [replace(row, rates=rates, evaluations=tuple(filter(size.has, row.evaluations))) for row in every]
