"""A model and sentences → everything that can be said of it: likelihoods, samples, judges, conventions.

BLEU-4 and self-BLEU are those of He et al. 2022, §4.3: samples of 64 tokens, top-k 30, 128 steps, a thousand of them
against all test sentences, and another thousand each against the rest. All other figures of samples have those of as
many real sentences beside them, because none means anything by itself. Every draw follows from one seed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from diffusionbert.assessment.conventions import PLACES, Basis, Convention, conventions
from diffusionbert.assessment.judges import Judge, Judgement, Mauve, Reading, compute_mauve
from diffusionbert.assessment.likelihoods import PackedRows, Ways, score_rows, ways_to_score
from diffusionbert.assessment.material import Material
from diffusionbert.assessment.report import Assessment, Figures, Samples, Speed, hashes_in
from diffusionbert.building import resolved
from diffusionbert.likelihood.evaluation import Effort, length_nats
from diffusionbert.likelihood.protocol import Length, Protocol
from diffusionbert.likelihood.scores import Estimate
from diffusionbert.metrics import ORDER, Bleu, PerSample, distinct_n, repetition, self_bleu4, token_entropy
from diffusionbert.model import Model
from diffusionbert.objectives.base import CONTINUOUS, GRID
from diffusionbert.sampling import Sampling
from diffusionbert.tasks import MOST_TEXTS, Task

PAPER_LENGTH = 64
"""Tokens of a sample in the paper."""

Watch = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Plan:
    """What is asked about a model."""

    sampling: Sampling = Sampling(top_k=30)
    samples: int = 1000
    """Of each of the two sets."""
    length: int | tuple[int, int] | None = PAPER_LENGTH
    """Tokens of a sample; None draws as the training corpus does."""
    effort: Effort = Effort()
    modelled_length: bool = False
    """Whether lengths are paid for in the likelihood."""
    conventions: bool = False
    seed: int = 0
    scored: bool = True
    """Whether likelihoods are asked for; else samples alone are looked at."""

    def __post_init__(self) -> None:
        if not 2 <= self.samples <= MOST_TEXTS // 2:
            raise ValueError(
                f"self-BLEU compares samples with each other: ask for 2 to {MOST_TEXTS // 2}, not {self.samples}"
            )
        if self.seed < 0:
            raise ValueError(f"an evaluation's seed is 0 or more, given {self.seed}; 0 is usual")

    def require(self, model: Model) -> None:
        """Refuses, before anything is done, what this model cannot do."""
        if model.paired:
            raise ValueError(
                f"{model.name!r} was trained on pairs, but single sentences are assessed; give another model"
            )
        longest = self.length[1] if isinstance(self.length, tuple) else self.length
        if longest is not None and self.sampling.block is None and not 1 <= longest <= model.max_length:
            raise ValueError(
                f"samples of {longest} tokens are asked for, but this model writes 1 to {model.max_length}; give "
                "another length, or corpus"
            )
        if self.modelled_length and model.length_histogram is None:
            raise ValueError("this model does not know the lengths of its corpus; let lengths be given")
        model.require(self.task, self.sampling)

    @property
    def task(self) -> Task:
        """The samples of both sets."""
        return Task(2 * self.samples, self.length, seed=self.seed)


def assess(
    model: Model,
    material: Material,
    plan: Plan,
    judge: Judge | None = None,
    featuriser: Judge | None = None,
    watch: Watch = lambda what, done, total: None,
) -> Assessment:
    """Says of a model what the plan asks; with a featuriser, also MAUVE."""
    plan.require(model)
    files = weight_hashes(model)
    digest = _together(files)
    protocol = Protocol(data=material.to_json()["sha256"], weights=digest)
    ways = ways_to_score(model.experiment, model.lexicon)
    likelihoods: dict[str, Estimate] = {}
    for name in ways.by_name if plan.scored else ():
        effort = _at_most(plan.effort, likelihoods)
        likelihoods[name] = _likelihood(model, material, replace(plan, effort=effort), ways, name, protocol, watch)
    samples = write_samples(model, plan, watch)
    real = material.some(plan.samples)
    judgement, mauve = _judged(samples, [material.decoded[number] for number in real], judge, featuriser, plan, watch)
    rows = _conventions(model, material, plan, ways, likelihoods, protocol, watch) if plan.conventions else None
    figures, real_figures = compare_texts(samples, material, real)
    return Assessment(
        model.name,
        files,
        digest,
        material,
        likelihoods,
        samples,
        figures,
        real_figures,
        judgement,
        mauve,
        rows,
        (
            *material.provenance.notes,
            *ways.notes,
            *_cautions(material, plan, figures, real_figures, mauve),
        ),
    )


# ---- likelihoods --------------------------------------------------------------------------------------------------


def _at_most(effort: Effort, found: dict[str, Estimate]) -> Effort:
    """The precision is asked of the model's own likelihood; the others get no more draws."""
    own = next(iter(found.values()), None)
    return effort if own is None else replace(effort, max_draws=max(own.protocol.num_draws, 2 * effort.strata))


def _likelihood(
    model: Model, material: Material, plan: Plan, ways: Ways, name: str, protocol: Protocol, watch: Watch
) -> Estimate:
    found = model.likelihood(
        material.scored,
        plan.effort,
        way=ways.by_name[name],
        length_histogram=model.length_histogram if plan.modelled_length else None,
        protocol=protocol,
        advance=_counting(watch, f"likelihood, {name}", len(material.numbers) * plan.effort.max_rounds),
    )
    return replace(found, scores=replace(found.scores, example=torch.tensor(material.numbers)))


def _conventions(
    model: Model,
    material: Material,
    plan: Plan,
    ways: Ways,
    likelihoods: dict[str, Estimate],
    protocol: Protocol,
    watch: Watch,
) -> tuple[Convention, ...]:
    if not likelihoods or ways.primary is None:
        return ()
    given = {name: _length_given(model, estimate) for name, estimate in likelihoods.items()}
    own, limit = given[ways.primary], CONTINUOUS if CONTINUOUS in given else ways.primary
    packed = PackedRows(model.vocabulary, material.scored, min(PLACES, model.max_places))
    num_rows, effort, card = len(packed.rows), _at_most(plan.effort, likelihoods), replace(protocol, packed=True)
    advance = _counting(watch, "likelihood, packed", num_rows * effort.max_rounds)
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
    """The same likelihood without what lengths cost."""
    if estimate.protocol.length is Length.GIVEN:
        return estimate
    assert model.length_histogram is not None
    scores = estimate.scores
    given = replace(scores, nats=scores.nats - length_nats(model.length_histogram, scores.tokens))
    return replace(estimate, scores=given, protocol=replace(estimate.protocol, length=Length.GIVEN))


# ---- texts --------------------------------------------------------------------------------------------------------


def write_samples(model: Model, plan: Plan, watch: Watch = lambda what, done, total: None) -> Samples:
    """Two sets of samples, all different draws of one seed, and what they cost."""
    advance = _counting(watch, "samples", plan.task.number)
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
    first, second = tuple(texts[: plan.samples]), tuple(texts[plan.samples :])
    sampling = resolved(plan.sampling, model.experiment.objective)
    return Samples(first, second, sampling, plan.length, plan.seed, speed)


def compare_texts(samples: Samples, material: Material, real: Sequence[int]) -> tuple[Figures, Figures]:
    """The figures of samples, and those of real sentences, by their numbers."""
    references, bleu, among_themselves = _references(material)
    first, second = _lower(samples.first), _lower(samples.second)
    sentences = [references[number] for number in real]
    against_others = PerSample(among_themselves.values[np.asarray(real)])
    return (
        _figures(first, bleu.scores(first), self_bleu4(second)),
        _figures(sentences, against_others, self_bleu4(sentences)),
    )


@lru_cache(maxsize=4)
def _references(material: Material) -> tuple[list[str], Bleu, PerSample]:
    """The sentences of a corpus, their n-grams, and the BLEU of each against the others; for many models at once."""
    references = _lower(material.decoded)
    return references, Bleu(references), self_bleu4(references)


def _figures(texts: Sequence[str], bleu: PerSample, self_bleu: PerSample) -> Figures:
    lengths = [len(text.split()) for text in texts]
    return Figures(
        bleu,
        self_bleu,
        tuple(distinct_n(texts, n) if max(lengths) >= n else None for n in range(1, ORDER + 1)),
        repetition(texts),
        token_entropy(texts),
        sum(lengths) / len(lengths),
    )


def _lower(texts: Sequence[str]) -> list[str]:
    return [text.lower() for text in texts]


def _judged(
    samples: Samples, real: Sequence[str], judge: Judge | None, featuriser: Judge | None, plan: Plan, watch: Watch
) -> tuple[Judgement | None, Mauve | None]:
    readings: dict[str, tuple[Reading, Reading]] = {}
    for reader in (judge, featuriser):
        if reader is not None and reader.name not in readings:
            advance = _counting(watch, f"judge {reader.name}", len(samples.first) + len(real))
            readings[reader.name] = reader.read(samples.first, advance), reader.read(real, advance)
    judgement = mauve = None
    if judge is not None:
        written, read = (reading.judged(plan.seed) for reading in readings[judge.name])
        judgement = Judgement(judge.name, judge.convention, written, read)
    if featuriser is not None:
        vectors = [reading.features for reading in readings[featuriser.name]]
        mauve = compute_mauve(vectors[0], vectors[1], featuriser.name, plan.seed)
    return judgement, mauve


def _cautions(material: Material, plan: Plan, figures: Figures, real: Figures, mauve: Mauve | None) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    num_real = len(real.bleu4.values)
    if material.num_overlong:
        found.append(f"{material.num_overlong:,} sentences are longer than the model reads and were not scored")
    if num_real < plan.samples:
        found.append(f"only {num_real:,} real sentences stand beside {plan.samples:,} samples")
    if mauve is not None and min(mauve.num_samples, mauve.num_real) < 1000:
        found.append("MAUVE is rough under a thousand texts, and differs from that of more")
    if plan.length is not None and not 0.8 < figures.words_per_text / max(real.words_per_text, 1e-9) < 1.25:
        found.append(
            f"samples have {figures.words_per_text:.1f} words, real sentences {real.words_per_text:.1f}: BLEU, "
            "distinct-n and entropies depend on length; --length corpus makes them alike"
        )
    return found


# ---- weights, devices, progress -----------------------------------------------------------------------------------


def weight_hashes(model: Model) -> dict[str, str]:
    """The SHA-256 of each file of weights of a model, as `sha256sum` gives it."""
    folder = model.experiment.backbone.pretrained
    return {} if folder is None else hashes_in(Path(folder))


def _together(hashes: dict[str, str]) -> str | None:
    """One name for all files; None where there are none."""
    if not hashes:
        return None
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in hashes.items()).encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)


def _counting(watch: Watch, what: str, total: int) -> Callable[[int], None]:
    """Adds up what is done."""
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        watch(what, done, total)

    return advance
