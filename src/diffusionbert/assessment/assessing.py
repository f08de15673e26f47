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
from pathlib import Path

import numpy as np
import torch

from diffusionbert.assessment.conventions import PLACES, Basis, Convention, conventions
from diffusionbert.assessment.judges import Judge, Judgement, Mauve, Reading, compute_mauve
from diffusionbert.assessment.likelihoods import PackedRows, Ways, score_rows, ways_to_score
from diffusionbert.assessment.material import Material
from diffusionbert.assessment.report import (
    EvaluationResult,
    Generation,
    SamplingRecord,
    Speed,
    TextMetrics,
    Weights,
    hashes_in,
)
from diffusionbert.likelihood.evaluation import Effort, length_nats
from diffusionbert.likelihood.protocol import Length, Protocol
from diffusionbert.likelihood.scores import Estimate
from diffusionbert.metrics import Bleu, PerSample, self_bleu4
from diffusionbert.model import Model
from diffusionbert.objectives.base import CONTINUOUS, GRID
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.storage.code_version import code_version
from diffusionbert.storage.component import Component
from diffusionbert.tasks import MOST_TEXTS, Task
from diffusionbert.training.description import ModelDescription, describe

PAPER_LENGTH = 64
"""Tokens of a sample in the paper."""

ProgressCallback = Callable[[str, int, int], None]
"""The kind of work, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    sampling: SamplingRequest = SamplingRequest(config=SamplerConfig(top_k=30))
    samples: int = 1000
    """In each of the two sets."""
    length: int | tuple[int, int] | None = PAPER_LENGTH
    """Tokens of a sample, or a range; None draws lengths from the training corpus."""
    effort: Effort = Effort()
    modelled_length: bool = False
    """Whether -log p(length) is added to the nats."""
    conventions: bool = False
    seed: int = 0
    scored: bool = True
    """Whether to compute likelihoods, or samples only."""

    def __post_init__(self) -> None:
        if not 2 <= self.samples <= MOST_TEXTS // 2:
            raise ValueError(
                f"`samples` must be 2 to {MOST_TEXTS // 2}, not {self.samples}: self-BLEU compares them with each other"
            )
        if self.seed < 0:
            raise ValueError(f"the seed must be 0 or more, got {self.seed}")

    def require(self, model: Model) -> None:
        """Raises ValueError, before any work, if this model cannot do it."""
        if model.paired:
            raise ValueError(
                f"{model.name!r} was trained on pairs, but evaluation needs single sentences; give another model"
            )
        longest = self.length[1] if isinstance(self.length, tuple) else self.length
        if longest is not None and self.sampling.block is None and not 1 <= longest <= model.max_length:
            raise ValueError(
                f"`length` must be 1 to {model.max_length} for this model, got {longest}; give less, or corpus"
            )
        if self.modelled_length and model.length_histogram is None:
            raise ValueError("this model has no length histogram; leave out modelled_length (--modelled-length)")
        model.require(self.task, self.sampling)

    @property
    def task(self) -> Task:
        """Both sets of samples."""
        return Task(2 * self.samples, self.length, seed=self.seed)


def assess(
    model: Model,
    material: Material,
    plan: Plan,
    judge: Judge | None = None,
    featuriser: Judge | None = None,
    progress: ProgressCallback = lambda what, done, total: None,
) -> EvaluationResult:
    """Evaluates a model.

    Args:
        model: The model.
        material: The evaluation set.
        plan: What to measure.
        judge: A causal language model for generative perplexity.
        featuriser: The model whose features MAUVE compares; None for no MAUVE.
        progress: ProgressCallback callback.

    Returns:
        The result, with the scores of all sentences and samples.
    """
    plan.require(model)
    weights = weight_hashes(model)
    protocol = Protocol(data=material.record.sha256, weights=weights.sha256)
    ways = ways_to_score(model.experiment, model.lexicon)
    likelihoods: dict[str, Estimate] = {}
    for name in ways.by_name if plan.scored else ():
        effort = _at_most(plan.effort, likelihoods)
        likelihoods[name] = _likelihood(model, material, replace(plan, effort=effort), ways, name, protocol, progress)
    samples = write_samples(model, plan, progress)
    real = material.some(plan.samples)
    judgement, mauve = _judged(
        samples, [material.decoded[number] for number in real], judge, featuriser, plan, progress
    )
    rows = _conventions(model, material, plan, ways, likelihoods, protocol, progress) if plan.conventions else None
    bleu, self_bleu = sample_bleu(samples, material)
    own, others = compare_texts(samples, bleu, self_bleu, material, real)
    return EvaluationResult(
        model.name,
        described(model),
        weights,
        code_version(),
        material.record,
        plan.seed,
        {name: estimate.summary() for name, estimate in likelihoods.items()},
        Generation(samples.sampling, own, others, samples.speed, judgement, mauve),
        rows,
        (*material.provenance.notes, *ways.notes, *_cautions(material, plan, own, others, mauve)),
        {name: estimate.scores for name, estimate in likelihoods.items()},
        bleu,
        self_bleu,
        _one_line_each(samples.first),
        _one_line_each(samples.second),
    )


# ---- likelihoods --------------------------------------------------------------------------------------------------


def _at_most(effort: Effort, found: Mapping[str, Estimate]) -> Effort:
    """The precision applies to the model's own likelihood; the others get no more draws."""
    own = next(iter(found.values()), None)
    return effort if own is None else replace(effort, max_draws=max(own.protocol.num_draws, 2 * effort.strata))


def _likelihood(
    model: Model, material: Material, plan: Plan, ways: Ways, name: str, protocol: Protocol, progress: ProgressCallback
) -> Estimate:
    found = model.likelihood(
        material.scored,
        plan.effort,
        way=ways.by_name[name],
        length_histogram=model.length_histogram if plan.modelled_length else None,
        protocol=protocol,
        advance=_counter(progress, f"likelihood, {name}", len(material.numbers) * plan.effort.max_rounds),
    )
    return replace(found, scores=replace(found.scores, example=torch.tensor(material.numbers)))


def _conventions(
    model: Model,
    material: Material,
    plan: Plan,
    ways: Ways,
    likelihoods: Mapping[str, Estimate],
    protocol: Protocol,
    progress: ProgressCallback,
) -> tuple[Convention, ...]:
    if not likelihoods or ways.primary is None:
        return ()
    given = {name: _length_given(model, estimate) for name, estimate in likelihoods.items()}
    own, limit = given[ways.primary], CONTINUOUS if CONTINUOUS in given else ways.primary
    packed = PackedRows(model.vocabulary, material.scored, min(PLACES, model.max_places))
    num_rows, effort, card = len(packed.rows), _at_most(plan.effort, likelihoods), replace(protocol, packed=True)
    advance = _counter(progress, "likelihood, packed", num_rows * effort.max_rounds)
    return conventions(
        Basis(
            own,
            given.get(GRID, own),
            given[limit],
            score_rows(model, ways.by_name[limit], packed, effort, protocol=card, advance=advance)
            if num_rows > 1
            else None,
            None if model.length_histogram is None else length_nats(model.length_histogram, own.scores.tokens),
            model.vocabulary.num_special(paired=False),
            model.vocabulary.size,
        ),
        plan.seed,
    )


def _length_given(model: Model, estimate: Estimate) -> Estimate:
    """The same likelihood without -log p(length)."""
    if estimate.protocol.length is Length.GIVEN:
        return estimate
    assert model.length_histogram is not None
    scores = estimate.scores
    given = replace(scores, nats=scores.nats - length_nats(model.length_histogram, scores.tokens))
    return replace(estimate, scores=given, protocol=replace(estimate.protocol, length=Length.GIVEN))


# ---- texts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Two sets of generated texts, and what they cost."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    sampling: SamplingRecord
    speed: Speed


def write_samples(model: Model, plan: Plan, progress: ProgressCallback = lambda what, done, total: None) -> Samples:
    """Generates two sets of samples, all different draws of one seed."""
    advance = _counter(progress, "samples", plan.task.number)
    texts, num_tokens, longest, num_calls, start = [], 0, 0, 0, time.perf_counter()
    for written in model.write(plan.task, plan.sampling):
        texts.append(written.text)
        num_tokens, num_calls = num_tokens + written.length, num_calls + written.calls
        longest = max(longest, written.length)
        advance(1)
    seconds = time.perf_counter() - start
    speed = Speed(
        seconds / len(texts),
        num_tokens / seconds,
        num_calls / len(texts),
        _device_name(model.device),
        min(model.rows_at_once(longest + model.vocabulary.num_special(paired=False)), len(texts)),
    )
    return Samples(tuple(texts[: plan.samples]), tuple(texts[plan.samples :]), _sampling_record(model, plan), speed)


def _sampling_record(model: Model, plan: Plan) -> SamplingRecord:
    request, config = plan.sampling, plan.sampling.config
    return SamplingRecord(
        Component.of(model.experiment.objective.choose_sampler(request.sampler)),
        config.steps,
        config.temperature,
        config.top_k,
        config.top_p,
        request.block,
        plan.length,
        plan.samples,
        plan.seed,
    )


def sample_bleu(samples: Samples, material: Material) -> tuple[PerSample, PerSample]:
    """BLEU-4 of each sample against the corpus, and self-BLEU-4 of each sample of the second set."""
    _, bleu, _ = _references(material)
    return bleu.scores(_lower(samples.first)), self_bleu4(_lower(samples.second))


def compare_texts(
    samples: Samples, bleu: PerSample, self_bleu: PerSample, material: Material, real: Sequence[int]
) -> tuple[TextMetrics, TextMetrics]:
    """The metrics of samples, and those of real sentences, given by their numbers."""
    references, _, among_themselves = _references(material)
    sentences = [references[number] for number in real]
    against_others = PerSample(among_themselves.values[np.asarray(real)])
    return (
        TextMetrics.of(_lower(samples.first), bleu, self_bleu),
        TextMetrics.of(sentences, against_others, self_bleu4(sentences)),
    )


@lru_cache(maxsize=4)
def _references(material: Material) -> tuple[list[str], Bleu, PerSample]:
    """The sentences of a corpus, their n-grams, and the BLEU of each against the others; cached for many models."""
    references = _lower(material.decoded)
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
    progress: ProgressCallback,
) -> tuple[Judgement | None, Mauve | None]:
    readings: dict[str, tuple[Reading, Reading]] = {}
    for reader in (judge, featuriser):
        if reader is not None and reader.name not in readings:
            advance = _counter(progress, f"judge {reader.name}", len(samples.first) + len(real))
            readings[reader.name] = reader.read(samples.first, advance), reader.read(real, advance)
    judgement = mauve = None
    if judge is not None:
        written, read = (reading.judged(plan.seed) for reading in readings[judge.name])
        judgement = Judgement(judge.name, judge.convention, written, read)
    if featuriser is not None:
        vectors = [reading.features for reading in readings[featuriser.name]]
        mauve = compute_mauve(vectors[0], vectors[1], featuriser.name, plan.seed)
    return judgement, mauve


def _cautions(material: Material, plan: Plan, own: TextMetrics, real: TextMetrics, mauve: Mauve | None) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if material.num_overlong:
        found.append(f"{material.num_overlong:,} sentences are too long for the model and were not scored")
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


# ---- weights, devices, progress -----------------------------------------------------------------------------------


def weight_hashes(model: Model) -> Weights:
    """The SHA-256 of each file of weights of a model, as `sha256sum` gives it, and of all together."""
    folder = model.experiment.backbone.pretrained
    files = {} if folder is None else hashes_in(Path(folder))
    if not files:
        return Weights()
    together = "".join(f"{digest}  {name}\n" for name, digest in files.items())
    return Weights(hashlib.sha256(together.encode()).hexdigest(), files)


def described(model: Model) -> ModelDescription:
    """What a result says of a model; the settings of training are unknown for a plain masked LM."""
    assert isinstance(model.network, torch.nn.Module)
    found = describe(model.trained or model.experiment, model.network)
    if model.trained is None:
        return replace(found, start=None, seed=None, training_steps=None)
    return replace(found, tokens_seen=model.tokens_seen)


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)


def _counter(progress: ProgressCallback, what: str, total: int) -> Callable[[int], None]:
    """A callback that adds up what is done."""
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        progress(what, done, total)

    return advance
