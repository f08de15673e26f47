"""Synthetic evaluation results, for tests of what reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

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
from diffusionbert.likelihood.scores import Estimate, PointEstimate
from diffusionbert.storage.files import CodeVersion
from diffusionbert.storage.schema import Component
from diffusionbert.training.log import ModelDescription

NUM_SENTENCES = 60


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
