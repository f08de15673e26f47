"""Synthetic evaluation results and runs, for tests of what reads them."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusionbert.data.sources import Split
from diffusionbert.evaluation.dataset import EvaluationSetRecord
from diffusionbert.evaluation.metrics import PerSample
from diffusionbert.evaluation.result import (
    EvaluationResult,
    Generation,
    SamplingRecord,
    Speed,
    TextMetrics,
    Weights,
)
from diffusionbert.likelihood.scores import Estimate, PointEstimate, Protocol, Scores
from diffusionbert.objectives.base import Likelihood
from diffusionbert.storage.files import CodeVersion, write_json
from diffusionbert.storage.schema import Component
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.log import Event, ModelDescription, TrainEvent, ValidationEvent, append

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "results"), str(BENCHMARKS)]  # their scripts are no package

NUM_SENTENCES, NUM_TOKENS = 60, 20
KINDS = {"grid": "bound", "continuous": "bound", "vectors": "bound", "exact": "exact"}


def metrics(bleu: float, self_bleu: float = 0.2, number: int = 40) -> TextMetrics:
    """Synthetic figures of texts."""
    measured = [PointEstimate(value, (value - 0.01, value + 0.01)) for value in (bleu, self_bleu)]
    return TextMetrics(number, *measured, (0.5, 0.9, None, None), 0.0, 1.0, 4.0, 0.7, 2.0)


def result(name: str = "made up", estimates: dict[str, Estimate] | None = None, **changes: Any) -> EvaluationResult:
    """A synthetic evaluation; `changes` are fields of the result or of its `generation`."""
    values = np.full(40, 0.3)
    estimates = estimates or {}
    sampling = SamplingRecord(Component("exact"), 128, 1.0, 30, None, None, 64, 40, 0)
    generation = Generation(sampling, metrics(0.3), metrics(0.4, 0.1), Speed(0.5, 100.0, 20.0, "cpu", 32))
    inner = {"sampling", "real", "speed", "judge", "mauve"}
    generation = replace(generation, **{key: changes.pop(key) for key in inner & changes.keys()})
    found = EvaluationResult(
        name,
        ModelDescription(),
        Weights("0" * 64),
        CodeVersion(),
        EvaluationSetRecord("test.txt", Split.ALL, "1" * 64, NUM_SENTENCES, "2" * 64, NUM_SENTENCES, 0),
        0,
        {key: estimate.summary() for key, estimate in estimates.items()},
        generation,
        scores={key: estimate.scores for key, estimate in estimates.items()},
        bleu4=PerSample(values),
        self_bleu4=PerSample(values),
        samples=("a sample .",) * 40,
        more_samples=("another one .",) * 40,
    )
    return replace(found, **changes)


def evaluate(
    root: Path,
    position: str,
    nats: float,
    way: str = "grid",
    kind: str | None = None,
    bleu: float = 0.3,
    seconds: float = 0.5,
) -> None:
    """Writes an evaluation whose sentences cost about so many nats per token; `position` is its folder and its key."""
    chance = np.random.default_rng(len(position))
    folder, key = position.split("/")
    costs = NUM_TOKENS * (nats + 0.02 * chance.standard_normal(NUM_SENTENCES) + np.linspace(-1, 1, NUM_SENTENCES))
    count = torch.full((NUM_SENTENCES,), NUM_TOKENS)
    samples = bleu + 0.02 * chance.standard_normal(200)
    likelihood = Likelihood(kind or KINDS[way])
    scores = Scores(
        likelihood, torch.arange(NUM_SENTENCES), torch.tensor(costs), torch.ones(NUM_SENTENCES).double(), 2,
        count, count.clone(), count.clone(),
    )  # fmt: skip
    estimate = Estimate(scores, scores.rates(), None, Protocol(num_draws=4, strata=2))
    made = result(
        key,
        {way: estimate},
        bleu4=PerSample(samples),
        self_bleu4=PerSample(samples[::-1] / 2),
        speed=Speed(seconds, 100.0, 20.0, "cpu", 32),
    )
    made.save(root / folder / "evaluations" / key)


def train(root: Path, position: str, validations: list[float]) -> None:
    """Writes a finished run with validations at evenly spaced steps."""
    folder, name = position.split("/")
    path = root / folder / "runs" / name
    path.mkdir(parents=True)
    last = 10 * (len(validations) - 1)
    write_json(path / "run.json", RunConfig(DataConfig("text/news.txt"), training=TrainingConfig(steps=last)).to_json())
    events: list[Event] = [
        TrainEvent(step, 0.0, 1.0, tokens_per_second=50.0 if step > 1 else 5.0, tokens_seen=100 * step)
        for step in range(1, last + 1, 3)
    ]
    events += [
        ValidationEvent(10 * at, 0.0, Likelihood.BOUND, 0.01, nats, math.exp(nats))
        for at, nats in enumerate(validations)
    ]
    for event in events:
        append(path / "log.jsonl", event)
