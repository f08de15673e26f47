"""Evaluates a model on an evaluation set: likelihoods, samples, judges, conventions.

BLEU-4 and self-BLEU follow He et al. 2022, §4.3: samples of 64 tokens, top-k 30, 128 steps; a thousand of them against
all test sentences, and another thousand each against the rest of these. Figures of samples are reported next to those
of as many real sentences, because they mean little on their own. All randomness follows from one seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from diffusionbert.evaluation.conventions import PACKED_LENGTH, Convention, PackedSequences, conventions
from diffusionbert.evaluation.dataset import EvaluationSet
from diffusionbert.evaluation.judges import Judge, Judgment, Mauve, compute_mauve
from diffusionbert.evaluation.metrics import Bleu, PerSample, most_agreed, self_bleu4
from diffusionbert.evaluation.result import (
    AnswerMetrics,
    EvaluationResult,
    Generation,
    SamplingRecord,
    Speed,
    TextMetrics,
    Weights,
)
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.generate import generate, generate_together, require_supported
from diffusionbert.inference.score import estimate_nats, estimate_sequences
from diffusionbert.inference.tasks import MAX_TEXTS, GeneratedText, Task
from diffusionbert.likelihood.estimate import EstimationBudget, length_nats
from diffusionbert.likelihood.orders import Order, random_orders_named
from diffusionbert.likelihood.scores import Estimate, Length, Protocol
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import CONTINUOUS, GRID, ScoringQuantities
from diffusionbert.parallel import current
from diffusionbert.reporting import Progress, no_progress
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.storage.files import code_version
from diffusionbert.storage.schema import Component
from diffusionbert.training.log import ModelDescription, describe

PAPER_LENGTH = 64
"""The number of tokens per sample in the paper."""
ANSWERED_AT_ONCE = 64
"""The number of sources whose answers are generated together."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    sampling: SamplingRequest = SamplingRequest(config=SamplerConfig(top_k=30))
    samples: int = 1000
    """The number of samples in each of the two sets; 0 generates none."""
    length: int | tuple[int, int] | None = PAPER_LENGTH
    """The number of tokens per sample, or a range; None draws lengths from the training corpus."""
    budget: EstimationBudget = EstimationBudget()
    modeled_length: bool = False
    """Whether to add -log p(length) to the nats."""
    conventions: bool = False
    seed: int = 0
    scored: bool = True
    """Whether to compute likelihoods in addition to samples."""
    quantity: str | None = None
    """The name of the only likelihood to compute (grid, continuous, exact, …), or an order of unmasking; None computes
    all that the model has."""
    shared_noise: bool = False
    """Whether to use an estimator that every model has (time-conditioned and token-dependent ones, too), with as many
    draws as the budget allows, so that all models share their noise."""
    num_candidates: int = 1
    """For pairs: the number of answers to generate per source; the one that agrees most with the others is used
    (minimum Bayes risk)."""
    target_length: bool = False
    """For pairs: whether an answer is given the number of tokens of its target."""

    def __post_init__(self) -> None:
        if self.samples != 0 and not 2 <= self.samples <= MAX_TEXTS // 2:
            raise ValueError(
                f"`samples` must be 2 to {MAX_TEXTS // 2}, or 0 for the likelihood alone, got {self.samples}: "
                "self-BLEU compares them with each other"
            )
        if self.samples == 0 and not self.scored:
            raise ValueError("neither samples nor likelihoods were requested; give `samples` or `scored`")
        if self.seed < 0:
            raise ValueError(f"`seed` must be >= 0, got {self.seed}")
        if not 1 <= self.num_candidates <= MAX_TEXTS:
            raise ValueError(f"`num_candidates` must be >= 1, got {self.num_candidates}")

    def require(self, engine: Engine) -> None:
        """Raises ValueError, before any work, if the plan is impossible for this model."""
        if engine.paired and self.conventions:
            raise ValueError("the literature's conventions are for single sentences; leave out `conventions`")
        if not engine.paired and (self.num_candidates > 1 or self.target_length):
            what = "`length` target" if self.target_length else "`num_candidates`"
            raise ValueError(f"{what} is for models trained on pairs, and this model was not; leave it out")
        self.quantities(engine)
        longest = self.length[1] if isinstance(self.length, tuple) else self.length
        if (
            self.samples
            and longest is not None
            and self.sampling.block is None
            and not 1 <= longest <= engine.max_length
        ):
            raise ValueError(
                f"`length` must be 1 to {engine.max_length} for this model, got {longest}; give less, or 'corpus'"
            )
        if self.modeled_length and engine.length_histogram is None:
            raise ValueError("this model has no length histogram; leave out `modeled_length`")
        if self.samples:
            require_supported(engine, replace(self.task, source="a" if engine.paired else None), self.sampling)

    def quantities(self, engine: Engine) -> ScoringQuantities:
        """The likelihoods to compute; raises ValueError if the model has none with the requested name."""
        objective, time = engine.config.objective, engine.config.time
        # A time-agnostic network has an estimator with less variance, but other networks cannot share its draws.
        time = TimeEmbedding.LAYERS if self.shared_noise and objective.takes_time else time
        found = objective.scoring_quantities(time)
        if self.quantity is None:
            return found
        can_order = engine.masked_network is not None and objective.generates_on_masks
        if can_order and (random := random_orders_named(self.quantity)) is not None:
            return ScoringQuantities((random.quantity,), found.notes)
        orders = [order.quantity for order in Order] if can_order else []
        known = [*found.available, *orders]
        chosen = tuple(one for one in known if one.name == self.quantity)
        if not chosen:
            names = ", ".join([*(one.name for one in known), *(["random-K"] if can_order else [])]) or "none"
            raise ValueError(f"`quantity` must be one that this model has, got {self.quantity!r:.40}; it has: {names}")
        return ScoringQuantities(chosen, found.notes)

    @property
    def task(self) -> Task:
        """The task of generating both sets of samples."""
        return Task(2 * self.samples, self.length, seed=self.seed)


def evaluate(
    engine: Engine,
    evaluation_set: EvaluationSet,
    plan: Plan,
    judge: Judge | None = None,
    featurizer: Judge | None = None,
    progress: Progress = no_progress,
) -> EvaluationResult:
    """Evaluates a model.

    Args:
        engine: The model.
        evaluation_set: The text.
        plan: What to measure.
        judge: A causal language model for generative perplexity.
        featurizer: The model whose features MAUVE compares; None for no MAUVE.
        progress: Progress callback.

    Returns:
        The result, with the scores of all sentences and samples.
    """
    plan.require(engine)
    weights = Weights.of(engine.folder)
    paired = evaluation_set.sources is not None
    protocol = Protocol(data=evaluation_set.record.sha256, weights=weights.sha256, source_given=paired)
    quantities = plan.quantities(engine)
    likelihoods = _likelihoods(engine, evaluation_set, plan, quantities, protocol, progress) if plan.scored else {}
    shown = None
    if plan.conventions:
        shown = _conventions(engine, evaluation_set, plan, quantities, likelihoods, protocol, progress)
    result = EvaluationResult(
        engine.name,
        _description(engine),
        weights,
        code_version(),
        evaluation_set.record,
        plan.seed,
        {name: estimate.summary() for name, estimate in likelihoods.items()},
        None,
        shown,
        (*evaluation_set.notes, *quantities.notes, *_overlong(evaluation_set)),
        {name: estimate.scores for name, estimate in likelihoods.items()},
    )
    if not plan.samples:
        return result
    real = evaluation_set.some(plan.samples)
    if paired:
        real = [number for number in real if len(evaluation_set.sequences[number]) <= engine.max_positions]
        first, speed = generate_answers(engine, evaluation_set, real, plan, progress)
        second = []
    else:
        texts, speed = generate_samples(engine, plan, progress)
        first, second = texts[: plan.samples], texts[plan.samples :]
    real_texts = [evaluation_set.decoded[number] for number in real]
    judgment, mauve = _judged(first, real_texts, judge, featurizer, plan.seed, progress)
    compared = current().on_main(lambda: compare_texts(first, second or first, evaluation_set, real))
    bleu, self_bleu, own, others = compared
    config = plan.sampling.config
    sampling = SamplingRecord(
        Component.of(engine.config.objective.choose_sampler(plan.sampling.sampler)),
        config.steps,
        config.temperature,
        config.top_k,
        config.top_p,
        plan.sampling.block,
        plan.length,
        len(first),
        plan.seed,
    )
    answers = _answer_metrics(first, evaluation_set, real, plan) if paired else None
    return replace(
        result,
        generation=Generation(sampling, own, others, speed, judgment, mauve, answers),
        notes=(*result.notes, *_cautions(plan, own, others, mauve)),
        bleu4=bleu,
        self_bleu4=self_bleu,
        samples=_one_line_each(first),
        more_samples=_one_line_each(second),
    )


# ---- likelihoods ----------------------------------------------------------------------------------------------------


def _likelihoods(
    engine: Engine,
    evaluation_set: EvaluationSet,
    plan: Plan,
    quantities: ScoringQuantities,
    protocol: Protocol,
    progress: Progress,
) -> dict[str, Estimate]:
    """The likelihoods by name, the model's own first."""
    found: dict[str, Estimate] = {}
    for quantity in quantities.available:
        budget = _at_most(replace(plan.budget, precision=None) if plan.shared_noise else plan.budget, found)
        total = len(evaluation_set.numbers) * budget.max_rounds
        estimate = estimate_nats(
            engine,
            evaluation_set.scored,
            budget,
            sources=evaluation_set.scored_sources,
            quantity=quantity,
            length_histogram=engine.length_histogram if plan.modeled_length else None,
            protocol=protocol,
            advance=_counter(progress, f"likelihood, {quantity.name}", total),
        )
        scores = replace(estimate.scores, example=torch.tensor(evaluation_set.numbers))
        found[quantity.name] = replace(estimate, scores=scores)
    return found


def _at_most(budget: EstimationBudget, found: dict[str, Estimate]) -> EstimationBudget:
    """The budget of the next likelihood: the precision decides for the first, and the others get no more draws."""
    own = next(iter(found.values()), None)
    return budget if own is None else replace(budget, max_draws=max(own.protocol.num_draws, 2 * budget.strata))


def _conventions(
    engine: Engine,
    evaluation_set: EvaluationSet,
    plan: Plan,
    quantities: ScoringQuantities,
    likelihoods: dict[str, Estimate],
    protocol: Protocol,
    progress: Progress,
) -> tuple[Convention, ...]:
    if not likelihoods:
        return ()
    given = {name: _length_given(engine, estimate) for name, estimate in likelihoods.items()}
    own, limit = given[quantities.primary.name], quantities.named(CONTINUOUS) or quantities.primary
    sequences = PackedSequences(engine.vocabulary, evaluation_set.scored, min(PACKED_LENGTH, engine.max_positions))
    packed, budget = None, _at_most(plan.budget, likelihoods)
    if len(sequences.lengths) > 1:
        advance = _counter(progress, "likelihood, packed", len(sequences.lengths) * budget.max_rounds)
        card = replace(protocol, packed=True)
        packed = estimate_sequences(engine, sequences, budget, quantity=limit, protocol=card, advance=advance)
    histogram, vocabulary = engine.length_histogram, engine.vocabulary
    return conventions(
        own,
        given.get(GRID, own),
        given[limit.name],
        packed,
        None if histogram is None else length_nats(histogram, own.scores.tokens),
        vocabulary.num_special(paired=False),
        vocabulary.size,
        plan.seed,
    )


def _length_given(engine: Engine, estimate: Estimate) -> Estimate:
    """The same likelihood without -log p(length)."""
    if estimate.protocol.length is Length.GIVEN:
        return estimate
    assert engine.length_histogram is not None
    scores = estimate.scores
    given = replace(scores, nats=scores.nats - length_nats(engine.length_histogram, scores.tokens))
    return replace(estimate, scores=given, protocol=replace(estimate.protocol, length=Length.GIVEN))


# ---- texts ----------------------------------------------------------------------------------------------------------


def generate_samples(engine: Engine, plan: Plan, progress: Progress = no_progress) -> tuple[list[str], Speed]:
    """Generates both sets of samples with one seed; all are different draws."""
    advance, start = _counter(progress, "samples", plan.task.number), time.perf_counter()
    found = []
    for one in generate(engine, plan.task, plan.sampling):
        found.append(one)
        advance(1)
    seconds, longest = time.perf_counter() - start, max(one.length for one in found)
    speed = Speed(
        seconds / len(found),
        sum(one.length for one in found) / seconds,
        sum(one.calls for one in found) / len(found),
        _device_name(engine.network_device),
        min(engine.sequences_at_once(longest + engine.vocabulary.num_special(paired=False)), len(found)),
    )
    return [one.text for one in found], speed


def generate_answers(
    engine: Engine, evaluation_set: EvaluationSet, numbers: Sequence[int], plan: Plan, progress: Progress = no_progress
) -> tuple[list[str], Speed]:
    """Generates an answer to the source of each of these pairs; the seed for pair i is the plan's seed plus i."""
    assert evaluation_set.sources is not None
    advance, start = _counter(progress, "answers", len(numbers)), time.perf_counter()
    candidates: list[list[GeneratedText]] = []
    for first in range(0, len(numbers), ANSWERED_AT_ONCE):
        tasks = [
            Task(
                plan.num_candidates,
                len(engine.vocabulary.own([evaluation_set.texts[number]])[0]) if plan.target_length else plan.length,
                source=evaluation_set.sources[number],
                seed=plan.seed + number,
            )
            for number in numbers[first : first + ANSWERED_AT_ONCE]
        ]
        candidates += generate_together(engine, tasks, plan.sampling)
        advance(len(tasks))
    seconds, every = time.perf_counter() - start, [one for several in candidates for one in several]
    longest = max(len(evaluation_set.sequences[number]) for number in numbers)
    speed = Speed(
        seconds / len(candidates),
        sum(one.length for one in every) / seconds,
        sum(one.calls for one in every) / len(candidates),
        _device_name(engine.device),
        min(engine.sequences_at_once(longest), len(every)),
    )
    return [several[most_agreed([one.text for one in several])].text for several in candidates], speed


def _answer_metrics(
    answers: Sequence[str], evaluation_set: EvaluationSet, numbers: Sequence[int], plan: Plan
) -> AnswerMetrics:
    assert evaluation_set.sources is not None
    vocabulary = evaluation_set.vocabulary
    sources = vocabulary.encode([evaluation_set.sources[number] for number in numbers])
    return AnswerMetrics.of(
        _lower(answers),
        _lower([evaluation_set.decoded[number] for number in numbers]),
        _lower([vocabulary.decode(source) for source in sources]),
        num_candidates=plan.num_candidates,
        length_given=plan.target_length,
        seed=plan.seed,
    )


def _device_name(device: torch.device) -> str:
    """The devices of all processes, since the speed depends on their number."""
    is_gpu, number = device.type == "cuda", current().number
    name = torch.cuda.get_device_name(device) if is_gpu else f"{device}, {torch.get_num_threads()} threads"
    return name if number == 1 else f"{number} × {name}"


def compare_texts(
    first: Sequence[str], second: Sequence[str], evaluation_set: EvaluationSet, real: Sequence[int]
) -> tuple[PerSample, PerSample, TextMetrics, TextMetrics]:
    """BLEU-4 of each first sample, self-BLEU-4 of each second one, and the metrics of samples and of real sentences."""
    references, against_all, among_themselves = _references(evaluation_set)
    samples, sentences = _lower(first), [references[number] for number in real]
    bleu, self_bleu = against_all.scores(samples), self_bleu4(_lower(second))
    real_bleu = PerSample(among_themselves.values[np.asarray(real)])
    return (
        bleu,
        self_bleu,
        TextMetrics.of(samples, bleu, self_bleu),
        TextMetrics.of(sentences, real_bleu, self_bleu4(sentences)),
    )


@lru_cache(maxsize=4)
def _references(evaluation_set: EvaluationSet) -> tuple[list[str], Bleu, PerSample]:
    """The sentences of a corpus, their n-grams, and the BLEU of each against the others; cached for many models."""
    references = _lower(evaluation_set.decoded)
    return references, Bleu(references), self_bleu4(references)


def _one_line_each(texts: Sequence[str]) -> tuple[str, ...]:
    """Texts without line feeds, which a tokenizer may decode; the words stay the same."""
    return tuple(" ".join(text.split()) for text in texts)


def _lower(texts: Sequence[str]) -> list[str]:
    return [text.lower() for text in texts]


def _judged(
    samples: Sequence[str],
    real: Sequence[str],
    judge: Judge | None,
    featurizer: Judge | None,
    seed: int,
    progress: Progress,
) -> tuple[Judgment | None, Mauve | None]:
    readings = {}
    for reader in (judge, featurizer):
        if reader is not None and reader.name not in readings:
            advance = _counter(progress, f"judge {reader.name}", len(samples) + len(real))
            readings[reader.name] = reader.read(samples, advance), reader.read(real, advance)
    judgment = mauve = None
    if judge is not None:
        own, other = readings[judge.name]
        judgment = Judgment(judge.name, judge.convention, own.judged(seed), other.judged(seed))
    if featurizer is not None:
        own, other = readings[featurizer.name]
        name = featurizer.name
        mauve = current().on_main(lambda: compute_mauve(own.features, other.features, name, seed))
    return judgment, mauve


def _overlong(evaluation_set: EvaluationSet) -> list[str]:
    number = evaluation_set.record.num_overlong
    what = "1 sentence is" if number == 1 else f"{number:,} sentences are"
    return [f"{what} too long for the model and not scored"] if number else []


def _cautions(plan: Plan, own: TextMetrics, real: TextMetrics, mauve: Mauve | None) -> list[str]:
    """Caveats for readers of the samples' figures."""
    found = []
    if real.number < own.number:
        found.append(f"only {real.number:,} real sentences are compared with {own.number:,} samples")
    if mauve is not None and min(mauve.num_samples, mauve.num_real) < 1000:
        found.append("MAUVE is inaccurate for fewer than a thousand texts, and not comparable with that of more")
    if plan.length is not None and not 0.8 < own.words_per_text / max(real.words_per_text, 1e-9) < 1.25:
        found.append(
            f"samples have {own.words_per_text:.1f} words, real sentences {real.words_per_text:.1f}: BLEU, distinct-n "
            "and entropies depend on length; --length corpus makes lengths similar"
        )
    return found


def _description(engine: Engine) -> ModelDescription:
    """The description of a model in a result; training settings are unknown for a plain masked LM."""
    assert isinstance(engine.network, torch.nn.Module)
    found = describe(engine.metadata.trained or engine.config, engine.network)
    if engine.metadata.trained is None:
        unknown = dict.fromkeys(("start", "seed", "training_steps", "optimizer", "learning_rate", "ema"))
        return replace(found, **unknown)
    seen, histogram = engine.metadata.tokens_seen, engine.length_histogram
    size = 0 if histogram is None else int((histogram * torch.arange(len(histogram))).sum())
    return replace(
        found,
        tokens_seen=seen,
        pretraining_tokens=engine.metadata.pretraining_tokens,
        epochs=None if seen is None or not size else seen / size,
    )


def _counter(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """A callback that adds up the work done and reports it."""
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        progress(what, done, total)

    return advance
