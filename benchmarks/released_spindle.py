"""The spindle's published number as the authors' released code computes it, which is not the paper's formula.

    python benchmarks/released_spindle.py docs/results/second/released_spindle.json TEXT... --sentences 300

The release (github.com/Hzfinfdu/Diffusion-BERT, `diffusion_word_freq.py` and `compute_elbo.py`) masks with

    ᾱ_t(i) = clip(1 - t + λ sin(πt)·(f(i) - mean of f), 0, 0.999),    f(v) = log(count(v) + 1) / its maximum

and scores a masked token with r·cross-entropy, summed over steps (s, t). But r keeps the β of the linear schedule:

    r = B·ᾱ_s / (B·ᾱ_s + 1 - ᾱ_s),  B = (t - s) / (1 - s)        instead of        (ᾱ_s - ᾱ_t) / (1 - ᾱ_t)

A token is unmasked once, so the expected sum of its r over all steps must be 1. With the r of the release it is, for
many steps and without the clip, ∫ ᾱ_t / (1 - t) dt = 1 + λ·Si(π)·(f(i) - mean of f), where Si(π) = 1.85. So rare
tokens, the difficult ones, count less and frequent ones more, whatever the network predicts. This script scores one
model, trained with the linear schedule, by its bound, by the paper's formula, and as the released code does; and token
frequencies alone, whose nats need no network and no draws. Perplexities are per word, the paper's unit.

`released-spindle` is also an objective, to train with and to score rows of the experiment by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Mean, Spindle, uniform_grid
from diffusionbert.diffusion.shapes import (
    Batch,
    PerPosition,
    PerTarget,
    Targets,
    Times,
    Tokens,
    exact_bits,
    from_bits,
)
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.evaluation.dataset import open_evaluation_set
from diffusionbert.evaluation.result import Weights
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.score import encode_texts
from diffusionbert.likelihood.estimate import EstimationBudget, count_words, estimate, fast_products
from diffusionbert.likelihood.intervals import Numbers, paired_difference
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import (
    GRID,
    Estimator,
    LikelihoodDefinition,
    ObjectiveConfig,
    ScoringQuantities,
    ScoringQuantity,
    TimeGrid,
)
from diffusionbert.objectives.discrete_time import DiscreteTime, DiscreteTimeConfig, Quantity
from diffusionbert.registry import register
from diffusionbert.storage.files import write_json
from diffusionbert.training.model_folder import BUNDLED


class ReleasedProcess(Absorbing):
    """Masking by the released code's survival, and its probability of unmasking."""

    _frequency: Tensor

    def __init__(self, strength: float, statistics: TokenStatistics, *, own_posterior: bool = False):
        """With `own_posterior`, a token is unmasked with the probability that follows from its survival."""
        schedule = Spindle(strength, Mean.SENTENCE)
        super().__init__(schedule, statistics.mask_id, statistics.information, reweighted=False)
        logs = (statistics.counts.double() + 1).log()
        self.register_buffer("_frequency", exact_bits(logs / logs.max()), persistent=False)
        self.strength, self.own_posterior = strength, own_posterior

    def survival(self, x0: Batch, t: Times) -> PerPosition:
        frequency, number = from_bits(self._frequency)[x0.tokens], x0.editable.sum(dim=1, keepdim=True)
        mean = torch.where(x0.editable, frequency, 0.0).sum(dim=1, keepdim=True) / number
        t = t[:, None]
        alpha = (1 - t + self.strength * (math.pi * t).sin() * (frequency - mean)).clamp(0, 0.999)
        alpha = torch.where(t == 0, 1.0, torch.where(t == 1, 0.0, alpha))
        return torch.where(x0.editable, alpha, 1.0)

    def unmask_probability(
        self, x0: Tokens, x_t: Batch, s: Times, t: Times, targets: Targets | None = None
    ) -> PerTarget:
        if self.own_posterior:
            return super().unmask_probability(x0, x_t, s, t, targets)
        targets = targets or Targets.of(self.targets(x_t))
        alpha = targets.take(self.survival(replace(x_t, tokens=x0), s))
        unmasking = ((t - s) / (1 - s))[targets.sequences] * alpha
        return targets.counted(unmasking / (unmasking + 1 - alpha))

    def total_weights(self, x0: Batch, num_steps: int) -> PerPosition:
        """The expected sum of r over all steps, for each token: 1 in a process that unmasks each token once."""
        grid, total = uniform_grid(num_steps), torch.zeros(x0.tokens.shape, dtype=torch.float64)
        x_t = replace(x0, tokens=x0.tokens.masked_fill(x0.editable, self.mask_id))
        targets = Targets.of(self.targets(x_t))
        for step in pairwise(grid):
            s, t = (time.repeat(len(x0.tokens)) for time in step)
            r = targets.scatter(self.unmask_probability(x0.tokens, x_t, s, t, targets))
            total += (1 - self.survival(x0, t)) * r
        return total


@register("released-spindle")
@dataclass(frozen=True)
class ReleasedSpindle(ObjectiveConfig):
    """DiffusionBERT with the spindle, as released."""

    strength: float = 0.3
    num_steps: int = 128
    own_posterior: bool = False

    takes_time = True

    def build(self, statistics: TokenStatistics) -> DiscreteTime:
        process = ReleasedProcess(self.strength, statistics, own_posterior=self.own_posterior)
        return DiscreteTime(process, uniform_grid(self.num_steps), Quantity.PAPER)

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        name = "released, own posterior" if self.own_posterior else "released"
        definition = LikelihoodDefinition(name, TimeGrid(self.num_steps), Estimator.STRATIFIED_TIMES)
        return ScoringQuantities((ScoringQuantity(GRID, definition, self.build),))


@dataclass(frozen=True)
class Settings:
    """What is measured; the defaults are those of the release: T = 2048 in steps of 16."""

    sentences: int = 500
    draws: int = 32
    num_steps: int = 128
    strength: float = 0.3
    seed: int = 100


def measure(
    output: tyro.conf.Positional[Path],
    texts: tyro.conf.Positional[tuple[Path, ...]],
    model: str = str(BUNDLED),
    settings: tyro.conf.OmitArgPrefixes[Settings] = Settings(),  # noqa: B008
) -> None:
    """Score texts by each quantity, and write the figures.

    Args:
        output: The JSON file to write.
        texts: Text files, one sentence per line.
        model: A run directory or model folder: time-agnostic, trained with the linear schedule.
        settings: Sentences, draws and steps.
    """
    engine, rows = load_engine(model, dtype=torch.int8), list[dict[str, Any]]()  # 0.4 of the time on a CPU
    for text in texts:
        chosen = open_evaluation_set(engine, str(text), sentences=settings.sentences).scored
        for name, score in (("token frequencies", by_frequencies), ("model", by_model)):
            found = compared(*score(engine, chosen, settings))
            row = {"text": text.name.partition(".txt")[0], "by": name, "quantities": found}
            rows.append(row)
            write_json(output, {**vars(settings), "weights": Weights.of(engine.folder).sha256, "rows": rows})
            shown = (f"{key} {own['perplexity']:.1f} ({own['change']:+.1%})" for key, own in found.items())
            print(f"{row['text']}, {name}: {', '.join(shown)}", flush=True)


def by_model(engine: Engine, texts: Sequence[str], settings: Settings) -> tuple[dict[str, Numbers], Numbers]:
    """The nats of each text by each quantity, with shared noise, and its number of words."""
    sequences, words = encode_texts(engine, texts), torch.tensor([count_words(text) for text in texts])
    budget = EstimationBudget(None, settings.draws, strata=16, seed=settings.seed)
    spindle, steps = Spindle(settings.strength, Mean.SENTENCE), settings.num_steps
    objectives: dict[str, ObjectiveConfig] = {
        "linear": DiscreteTimeConfig(num_steps=steps),
        "paper": DiscreteTimeConfig(spindle, steps, Quantity.PAPER),
        "own_posterior": ReleasedSpindle(settings.strength, steps, own_posterior=True),
        "released": ReleasedSpindle(settings.strength, steps),
    }
    nats = {}
    for name, config in objectives.items():
        with fast_products(config):
            found = estimate(engine.module(config.build(engine.statistics)), sequences, budget, words=words)
        nats[name] = found.scores.nats.numpy()
    return nats, words.double().numpy()


def by_frequencies(engine: Engine, texts: Sequence[str], settings: Settings) -> tuple[dict[str, Numbers], Numbers]:
    """The same if each token is predicted by its frequency in the model's training text; exactly, without draws."""
    sequences, statistics = encode_texts(engine, texts), engine.statistics
    process = ReleasedProcess(settings.strength, statistics)
    nats: dict[str, list[float]] = {"linear": [], "released": []}
    for index in range(len(texts)):
        x0 = sequences.batch([index])
        own = torch.where(x0.editable, statistics.information.values[x0.tokens], 0.0)
        nats["linear"].append(float(own.sum()))
        nats["released"].append(float((own * process.total_weights(x0, settings.num_steps)).sum()))
    words = np.array([count_words(text) for text in texts], dtype=np.float64)
    return {name: np.array(values) for name, values in nats.items()}, words


def compared(nats: dict[str, Numbers], words: Numbers, reference: str = "linear") -> dict[str, Any]:
    """Perplexities per word, and their changes from that of a reference, with 95 % intervals over texts."""
    found = {}
    for name, own in nats.items():
        change = paired_difference((own, nats[reference]), (words, words))
        found[name] = {
            "perplexity": math.exp(own.sum() / words.sum()),
            "change": math.expm1(change.value),
            "ci95": [math.expm1(change.low), math.expm1(change.high)],
        }
    return found


if __name__ == "__main__":
    tyro.cli(measure, description=__doc__)
