"""Evaluates a model on an evaluation set: likelihoods, samples, judges, conventions.

BLEU-4 and self-BLEU are those of He et al. 2022, §4.3: samples of 64 tokens, top-k 30, 128 steps, a thousand of them
against all test sentences, and another thousand each against the rest. Figures of samples are reported with those of as
many real sentences, because none means anything by itself. All randomness follows from one seed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from diffusionbert.data.corpus import Cleaning, parse_corpus
from diffusionbert.data.sources import Split
from diffusionbert.evaluation.conventions import PACKED_LENGTH, Basis, Convention, PackedSequences, conventions
from diffusionbert.evaluation.dataset import EvaluationSet, Trained, evaluation_corpus, read_evaluation_set
from diffusionbert.evaluation.judges import Judge, Judgement, Mauve, Reading, compute_mauve
from diffusionbert.evaluation.metrics import Bleu, PerSample, self_bleu4
from diffusionbert.evaluation.result import (
    EvaluationResult,
    Generation,
    SamplingRecord,
    Speed,
    TextMetrics,
    Weights,
    hashes_in,
)
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.generate import generate, require_supported
from diffusionbert.inference.score import estimate_nats, estimate_sequences
from diffusionbert.inference.tasks import MAX_TEXTS, Task
from diffusionbert.likelihood.estimate import EstimationBudget, length_nats
from diffusionbert.likelihood.scores import Estimate, Length, Protocol
from diffusionbert.objectives.base import CONTINUOUS, GRID, ScoringQuantities, ScoringQuantity
from diffusionbert.reporting import Progress, logger, no_progress
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.storage.files import code_version
from diffusionbert.storage.schema import Component
from diffusionbert.training.log import ModelDescription, describe

PAPER_LENGTH = 64
"""Tokens of a sample in the paper."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    sampling: SamplingRequest = SamplingRequest(config=SamplerConfig(top_k=30))
    samples: int = 1000
    """In each of the two sets."""
    length: int | tuple[int, int] | None = PAPER_LENGTH
    """Tokens of a sample, or a range; None draws lengths from the training corpus."""
    budget: EstimationBudget = EstimationBudget()
    modelled_length: bool = False
    """Whether -log p(length) is added to the nats."""
    conventions: bool = False
    seed: int = 0
    scored: bool = True
    """Whether to compute likelihoods, or samples only."""

    def __post_init__(self) -> None:
        if not 2 <= self.samples <= MAX_TEXTS // 2:
            raise ValueError(
                f"`samples` must be 2 to {MAX_TEXTS // 2}, got {self.samples}: self-BLEU compares them with each other"
            )
        if self.seed < 0:
            raise ValueError(f"`seed` must be >= 0, got {self.seed}")

    def require(self, engine: Engine) -> None:
        """Raises ValueError, before any work, if this model cannot do it."""
        if engine.paired:
            raise ValueError(
                f"{engine.name!r} was trained on pairs, but evaluation needs single sentences; give another model"
            )
        longest = self.length[1] if isinstance(self.length, tuple) else self.length
        if longest is not None and self.sampling.block is None and not 1 <= longest <= engine.max_length:
            raise ValueError(
                f"`length` must be 1 to {engine.max_length} for this model, got {longest}; give less, or corpus"
            )
        if self.modelled_length and engine.length_histogram is None:
            raise ValueError("this model has no length histogram; leave out modelled_length (--modelled-length)")
        require_supported(engine, self.task, self.sampling)

    @property
    def task(self) -> Task:
        """Both sets of samples."""
        return Task(2 * self.samples, self.length, seed=self.seed)


def evaluate(
    engine: Engine,
    evaluation_set: EvaluationSet,
    plan: Plan,
    judge: Judge | None = None,
    featuriser: Judge | None = None,
    progress: Progress = no_progress,
) -> EvaluationResult:
    """Evaluates a model.

    Args:
        engine: The model.
        evaluation_set: The text.
        plan: What to measure.
        judge: A causal language model for generative perplexity.
        featuriser: The model whose features MAUVE compares; None for no MAUVE.
        progress: Progress callback.

    Returns:
        The result, with the scores of all sentences and samples.
    """
    plan.require(engine)
    weights = weight_hashes(engine)
    protocol = Protocol(data=evaluation_set.record.sha256, weights=weights.sha256)
    quantities = engine.config.objective.scoring_quantities(engine.config.time)
    likelihoods: dict[str, Estimate] = {}
    for quantity in quantities.available if plan.scored else ():
        budget = _at_most(plan.budget, likelihoods)
        likelihoods[quantity.name] = _likelihood(
            engine, evaluation_set, replace(plan, budget=budget), quantity, protocol, progress
        )
    samples = generate_samples(engine, plan, progress)
    real = evaluation_set.some(plan.samples)
    judgement, mauve = _judged(
        samples, [evaluation_set.decoded[number] for number in real], judge, featuriser, plan, progress
    )
    rows = (
        _conventions(engine, evaluation_set, plan, quantities, likelihoods, protocol, progress)
        if plan.conventions
        else None
    )
    bleu, self_bleu = sample_bleu(samples, evaluation_set)
    own, others = compare_texts(samples, bleu, self_bleu, evaluation_set, real)
    return EvaluationResult(
        engine.name,
        describe_model(engine),
        weights,
        code_version(),
        evaluation_set.record,
        plan.seed,
        {name: estimate.summary() for name, estimate in likelihoods.items()},
        Generation(samples.sampling, own, others, samples.speed, judgement, mauve),
        rows,
        (*evaluation_set.provenance.notes, *quantities.notes, *_cautions(evaluation_set, plan, own, others, mauve)),
        {name: estimate.scores for name, estimate in likelihoods.items()},
        bleu,
        self_bleu,
        _one_line_each(samples.first),
        _one_line_each(samples.second),
    )


def open_evaluation_set(
    engine: Engine,
    data: str,
    *,
    split: Split | None = None,
    field: str | None = None,
    cased: bool = False,
    detokenise: bool = False,
    sentences: int | None = None,
) -> EvaluationSet:
    """Reads an evaluation set as a model reads text.

    Args:
        engine: The model.
        data: A corpus, as for training.
        split: A split of it; None is the test split, what training held out, or all of it.
        field: The field of JSON lines that holds the text.
        cased: Keeps upper case, also if the model was trained on lower case.
        detokenise: Undoes tokenised text, also if training did not.
        sentences: Scores so many sentences, always the same ones; None scores all.
    """
    trained = Trained(engine.config.data, engine.training_text)
    cleaning = Cleaning(trained.data.lower and not cased, trained.data.detokenise or detokenise)
    fields = [field] if field else []
    if split is None:
        corpus = evaluation_corpus(data, trained, cleaning, fields)
    else:
        corpus = parse_corpus(data, split, fields=fields, cleaning=cleaning)
    found = read_evaluation_set(corpus, data, engine.vocabulary, engine.max_length, sentences, trained)
    for note in found.provenance.notes:  # before hours of work
        logger.info("note: %s", note)
    return found


# ---- likelihoods ----------------------------------------------------------------------------------------------------


def _at_most(budget: EstimationBudget, found: Mapping[str, Estimate]) -> EstimationBudget:
    """The precision applies to the model's own likelihood; the others get no more draws."""
    own = next(iter(found.values()), None)
    return budget if own is None else replace(budget, max_draws=max(own.protocol.num_draws, 2 * budget.strata))


def _likelihood(
    engine: Engine,
    evaluation_set: EvaluationSet,
    plan: Plan,
    quantity: ScoringQuantity,
    protocol: Protocol,
    progress: Progress,
) -> Estimate:
    found = estimate_nats(
        engine,
        evaluation_set.scored,
        plan.budget,
        quantity=quantity,
        length_histogram=engine.length_histogram if plan.modelled_length else None,
        protocol=protocol,
        advance=_counter(
            progress, f"likelihood, {quantity.name}", len(evaluation_set.numbers) * plan.budget.max_rounds
        ),
    )
    return replace(found, scores=replace(found.scores, example=torch.tensor(evaluation_set.numbers)))


def _conventions(
    engine: Engine,
    evaluation_set: EvaluationSet,
    plan: Plan,
    quantities: ScoringQuantities,
    likelihoods: Mapping[str, Estimate],
    protocol: Protocol,
    progress: Progress,
) -> tuple[Convention, ...]:
    if not likelihoods:
        return ()
    given = {name: _length_given(engine, estimate) for name, estimate in likelihoods.items()}
    own, limit = given[quantities.primary.name], quantities.named(CONTINUOUS) or quantities.primary
    packed = PackedSequences(engine.vocabulary, evaluation_set.scored, min(PACKED_LENGTH, engine.max_positions))
    num_sequences, budget, card = len(packed.rows), _at_most(plan.budget, likelihoods), replace(protocol, packed=True)
    advance = _counter(progress, "likelihood, packed", num_sequences * budget.max_rounds)
    return conventions(
        Basis(
            own,
            given.get(GRID, own),
            given[limit.name],
            estimate_sequences(engine, packed, budget, quantity=limit, protocol=card, advance=advance)
            if num_sequences > 1
            else None,
            None if engine.length_histogram is None else length_nats(engine.length_histogram, own.scores.tokens),
            engine.vocabulary.num_special(paired=False),
            engine.vocabulary.size,
        ),
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


@dataclass(frozen=True)
class Samples:
    """Two sets of generated texts, and what they cost."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    sampling: SamplingRecord
    speed: Speed


def generate_samples(engine: Engine, plan: Plan, progress: Progress = no_progress) -> Samples:
    """Generates two sets of samples, all different draws of one seed."""
    advance = _counter(progress, "samples", plan.task.number)
    texts, num_tokens, longest, num_calls, start = [], 0, 0, 0, time.perf_counter()
    for one in generate(engine, plan.task, plan.sampling):
        texts.append(one.text)
        num_tokens, num_calls = num_tokens + one.length, num_calls + one.calls
        longest = max(longest, one.length)
        advance(1)
    seconds = time.perf_counter() - start
    speed = Speed(
        seconds / len(texts),
        num_tokens / seconds,
        num_calls / len(texts),
        _device_name(engine.device),
        min(engine.sequences_at_once(longest + engine.vocabulary.num_special(paired=False)), len(texts)),
    )
    return Samples(tuple(texts[: plan.samples]), tuple(texts[plan.samples :]), _sampling_record(engine, plan), speed)


def _sampling_record(engine: Engine, plan: Plan) -> SamplingRecord:
    request, config = plan.sampling, plan.sampling.config
    return SamplingRecord(
        Component.of(engine.config.objective.choose_sampler(request.sampler)),
        config.steps,
        config.temperature,
        config.top_k,
        config.top_p,
        request.block,
        plan.length,
        plan.samples,
        plan.seed,
    )


def sample_bleu(samples: Samples, evaluation_set: EvaluationSet) -> tuple[PerSample, PerSample]:
    """BLEU-4 of each sample against the corpus, and self-BLEU-4 of each sample of the second set."""
    _, bleu, _ = _references(evaluation_set)
    return bleu.scores(_lower(samples.first)), self_bleu4(_lower(samples.second))


def compare_texts(
    samples: Samples, bleu: PerSample, self_bleu: PerSample, evaluation_set: EvaluationSet, real: Sequence[int]
) -> tuple[TextMetrics, TextMetrics]:
    """The metrics of samples, and those of real sentences, given by their numbers."""
    references, _, among_themselves = _references(evaluation_set)
    sentences = [references[number] for number in real]
    against_others = PerSample(among_themselves.values[np.asarray(real)])
    return (
        TextMetrics.of(_lower(samples.first), bleu, self_bleu),
        TextMetrics.of(sentences, against_others, self_bleu4(sentences)),
    )


@lru_cache(maxsize=4)
def _references(evaluation_set: EvaluationSet) -> tuple[list[str], Bleu, PerSample]:
    """The sentences of a corpus, their n-grams, and the BLEU of each against the others; cached for many models."""
    references = _lower(evaluation_set.decoded)
    return references, Bleu(references), self_bleu4(references)


def _one_line_each(texts: Sequence[str]) -> tuple[str, ...]:
    """A tokenizer may decode line feeds; the words do not change by this."""
    return tuple(" ".join(text.split()) for text in texts)


def _lower(texts: Sequence[str]) -> list[str]:
    return [text.lower() for text in texts]


def _judged(
    samples: Samples,
    real: Sequence[str],
    judge: Judge | None,
    featuriser: Judge | None,
    plan: Plan,
    progress: Progress,
) -> tuple[Judgement | None, Mauve | None]:
    readings: dict[str, tuple[Reading, Reading]] = {}
    for reader in (judge, featuriser):
        if reader is not None and reader.name not in readings:
            advance = _counter(progress, f"judge {reader.name}", len(samples.first) + len(real))
            readings[reader.name] = reader.read(samples.first, advance), reader.read(real, advance)
    judgement = mauve = None
    if judge is not None:
        generated, read = (reading.judged(plan.seed) for reading in readings[judge.name])
        judgement = Judgement(judge.name, judge.convention, generated, read)
    if featuriser is not None:
        vectors = [reading.features for reading in readings[featuriser.name]]
        mauve = compute_mauve(vectors[0], vectors[1], featuriser.name, plan.seed)
    return judgement, mauve


def _cautions(
    evaluation_set: EvaluationSet, plan: Plan, own: TextMetrics, real: TextMetrics, mauve: Mauve | None
) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if evaluation_set.num_overlong:
        found.append(f"{evaluation_set.num_overlong:,} sentences are too long for the model and were not scored")
    if real.number < plan.samples:
        found.append(f"only {real.number:,} real sentences are compared with {plan.samples:,} samples")
    if mauve is not None and min(mauve.num_samples, mauve.num_real) < 1000:
        found.append("MAUVE is inaccurate for fewer than a thousand texts, and differs from that of more")
    if plan.length is not None and not 0.8 < own.words_per_text / max(real.words_per_text, 1e-9) < 1.25:
        found.append(
            f"samples have {own.words_per_text:.1f} words, real sentences {real.words_per_text:.1f}: BLEU, distinct-n "
            "and entropies depend on length; --length corpus makes lengths alike"
        )
    return found


# ---- weights, devices, progress -------------------------------------------------------------------------------------


def weight_hashes(engine: Engine) -> Weights:
    """The SHA-256 of each file of weights of a model, as `sha256sum` gives it, and of all together."""
    files = hashes_in(engine.folder)
    if not files:
        return Weights()
    together = "".join(f"{digest}  {name}\n" for name, digest in files.items())
    return Weights(hashlib.sha256(together.encode()).hexdigest(), files)


def describe_model(engine: Engine) -> ModelDescription:
    """What a result says of a model; the settings of training are unknown for a plain masked LM."""
    assert isinstance(engine.network, torch.nn.Module)
    found = describe(engine.metadata.trained or engine.config, engine.network)
    if engine.metadata.trained is None:
        return replace(found, start=None, seed=None, training_steps=None)
    return replace(found, tokens_seen=engine.metadata.tokens_seen)


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)


def _counter(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """A callback that adds up what is done."""
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        progress(what, done, total)

    return advance
