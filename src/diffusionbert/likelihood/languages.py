"""Enumerable languages, and sums over all their sentences, times and noisy states.

Tokens are 0 … V-1 and `[MASK]` is V. A language assigns a probability to each of the V^L sentences. Everything here
follows the definitions, in float64, without the package's closed forms, so that tests and `audit` can rely on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.schedules import Mean, Spindle, TokenInformation
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.objectives.base import Objective
from diffusionbert.objectives.continuous_time import ContinuousTime, rate_nats
from diffusionbert.objectives.discrete_time import DiscreteTime
from diffusionbert.objectives.order_agnostic import OrderAgnostic


class Language:
    """All sentences of `length` tokens over `num_words` tokens, with their probabilities."""

    def __init__(self, num_words: int, length: int, probabilities: list[float] | Tensor):
        self.num_words, self.length = num_words, length
        self.mask_id = num_words
        self.vocabulary = num_words + 1
        self.sentences = torch.tensor(list(itertools.product(range(num_words), repeat=length)))
        self.probabilities = torch.as_tensor(probabilities, dtype=torch.float64)
        assert len(self.probabilities) == len(self.sentences)
        assert math.isclose(float(self.probabilities.sum()), 1, abs_tol=1e-12)
        self.allowed = torch.arange(self.vocabulary) < num_words
        self.states = torch.tensor(list(itertools.product(range(num_words + 1), repeat=length)))

    @classmethod
    def random(cls, num_words: int, length: int, seed: int = 0) -> Language:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(num_words**length, generator=generator, dtype=torch.float64) ** 3
        return cls(num_words, length, weights / weights.sum())

    @property
    def entropy(self) -> float:
        return float(-torch.xlogy(self.probabilities, self.probabilities).sum())

    def information(self) -> TokenInformation:
        """Token information from a large corpus of this language."""
        return TokenInformation.from_counts(self.counts(1e9), allowed=self.allowed)

    def counts(self, sentences: float) -> Tensor:
        """How often each token occurs in a corpus of so many sentences, as expected."""
        counts = torch.zeros(self.vocabulary, dtype=torch.float64)
        for position in range(self.length):
            counts.index_add_(0, self.sentences[:, position], self.probabilities * sentences)
        return counts

    def batch(self, tokens: Tensor | None = None) -> Batch:
        tokens = self.sentences if tokens is None else tokens
        return Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))

    @property
    def texts(self) -> tuple[str, ...]:
        """All sentences as texts over the words a, b, c, …"""
        return tuple(" ".join(_WORDS[token] for token in sentence) for sentence in self.sentences.tolist())

    def encode(self, texts: Sequence[str]) -> Batch:
        """Encodes such texts."""
        tokens = [[_WORDS.index(word) for word in text.split()] for text in texts]
        if unknown := [text for text, one in zip(texts, tokens, strict=True) if len(one) != self.length]:
            raise ValueError(f"{unknown[0]!r:.40} is not a sentence of {self.length} words of this language")
        return self.batch(torch.tensor(tokens))


_WORDS = "abcdefghijklmnopqrstuvwxyz"

SKEWED = Language(2, 2, [0.72, 0.13, 0.10, 0.05])
"""A language of entropy 0.882, on which the effect of the reweighting is large."""
PAPER = Language(2, 2, [0.70, 0.12, 0.10, 0.08])
"""A language of entropy 0.936, on which Σ exp(-nats) of the paper's quantity exceeds 1."""
TWINS = Language(2, 2, [0.48, 0.02, 0.02, 0.48])
"""A language of entropy 0.861, whose two words are nearly always equal: either predicts the other, nothing both."""


class Bayes(nn.Module):
    """The optimal network: the posterior of each masked token under the language and the forward process.

    For a reweighted process, the posterior is divided by the factor 1 - ᾱ_t(v) that the process multiplies by.
    """

    def __init__(self, language: Language, process: Absorbing):
        super().__init__()
        self.language, self.process = language, process

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        language = self.language
        size, sentences = len(tokens), len(language.sentences)
        x0 = language.batch(language.sentences.repeat(size, 1))
        alpha = self.process.survival(x0, t.repeat_interleave(sentences)).view(size, sentences, -1)
        masked = (tokens == language.mask_id)[:, None]
        agrees = tokens[:, None] == language.sentences[None]
        factor = torch.where(masked, 1 - alpha, torch.where(agrees, alpha, 0.0))
        joint = language.probabilities * factor.prod(dim=-1)  # batch × sentences
        word = nn.functional.one_hot(language.sentences, language.vocabulary).double()
        posterior = torch.einsum("bs,slv->blv", joint, word)
        if self.process.reweighted and self.process.schedule.by_token:
            relative = self.process.information / self.process.corpus_mean
            weight = 1 - self.process.schedule.survival(t[:, None], relative[None])
            posterior = torch.where(weight[:, None] > 0, posterior / weight[:, None], 0.0)
        # In states that q never reaches, any finite output will do.
        total = posterior.sum(dim=-1, keepdim=True)
        posterior = torch.where(total > 0, posterior / total, word.mean(dim=(0, 1)))
        return posterior.log()[targets]


def all_states(process: Process, x0: Tensor) -> list[Tensor]:
    """All noisy versions of each sequence: one tensor per mask or, under uniform noise, per noisy sequence."""
    length = x0.shape[1]
    if isinstance(process, Absorbing):
        patterns = itertools.product([False, True], repeat=length)
        return [x0.masked_fill(torch.tensor(pattern), process.mask_id) for pattern in patterns]
    assert isinstance(process, Uniform)
    return [torch.tensor(state).expand_as(x0) for state in itertools.product(range(process.num_allowed), repeat=length)]


def log_forward(process: Process, x0: Batch, x_t: Tensor, t: Tensor) -> Tensor:
    """log q(x_t | x0) of each sequence."""
    if isinstance(process, Absorbing):
        alpha = process.survival(x0, t)
        return torch.where(x_t == process.mask_id, 1 - alpha, alpha * (x_t == x0.tokens)).log().sum(dim=1)
    assert isinstance(process, Uniform)
    alpha = process.schedule.survival(t, torch.ones_like(t))[:, None]
    moved = alpha * (x_t == x0.tokens) + (1 - alpha) / process.num_allowed
    return torch.where(x0.editable, moved, 1.0).log().sum(dim=1)


def exact_nats(objective: Objective[Any], network: nn.Module, x0: Batch, per_panel: int = 40) -> Tensor:
    """The expectation of `objective.nats` over all times and corrupted states, per sequence.

    Integrals over time use `per_panel` nodes between kinks; time-conditioned networks need more.
    """
    if isinstance(objective, OrderAgnostic):
        return _any_order_nats(objective, network, x0)
    if isinstance(objective, DiscreteTime):
        low, high = objective.grid[:-1], objective.grid[1:]
        x_t, clean, row, s, t, weight = _all_noise(objective.process, x0, low, high)
        nats = objective.step_nats(network, clean, x_t, s, t).sum(dim=1)
    else:
        assert isinstance(objective, ContinuousTime)
        nodes, lengths = quadrature(objective.process, x0, per_panel)
        x_t, clean, row, _, t, weight = _all_noise(objective.process, x0, nodes, nodes)
        weight = weight * lengths[torch.searchsorted(nodes, t)]
        nats = rate_nats(objective.process, network, clean, x_t, t).sum(dim=1)
    return torch.zeros(len(x0.tokens), dtype=torch.float64).index_add(0, row, weight * nats)


def _all_noise(
    process: Process, x0: Batch, s: Tensor, t: Tensor
) -> tuple[Batch, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every reachable (x_t, x0, batch index, s, t) with its probability q(x_t | x0), as one large batch."""
    patterns = _editable_states(process, x0)
    rows, times = len(x0.tokens), len(t)
    row = torch.arange(rows).repeat(len(patterns) * times)
    tokens = torch.cat(patterns).repeat(times, 1)
    s, t = (time.repeat_interleave(rows * len(patterns)) for time in (s, t))
    q = log_forward(process, x0.select(row), tokens, t).exp()
    reached = q > 0
    row = row[reached]
    x_t = replace(x0.select(row), tokens=tokens[reached])
    return x_t, x0.tokens[row], row, s[reached], t[reached], q[reached]


def quadrature(process: Absorbing, x0: Batch, per_panel: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the tanh-sinh rule on (0, 1), between the kinks of the survival.

    Where the clamp starts to act, the integrand has a logarithmic singularity, which this rule handles well.
    """
    if isinstance(process.schedule, Spindle) and process.schedule.mean is Mean.SENTENCE:
        # The reverse process has further kinks, for each value of ĉ, but with a floor no singularities.
        nodes = (torch.arange(1500, dtype=torch.float64) + 0.5) / 1500
        return nodes, torch.full_like(nodes, 1 / 1500)
    edges = [0.0, *sorted(_kinks(process, x0)), 1.0]
    at = torch.linspace(-2.8, 2.8, per_panel, dtype=torch.float64)
    inner = torch.tanh(math.pi / 2 * at.sinh())
    weight = math.pi / 2 * at.cosh() / (math.pi / 2 * at.sinh()).cosh() ** 2 * (at[1] - at[0])
    panels = list(itertools.pairwise(edges))
    nodes = torch.cat([low + (high - low) * (1 + inner) / 2 for low, high in panels])
    return nodes, torch.cat([(high - low) / 2 * weight for low, high in panels])


def _kinks(process: Absorbing, x0: Batch) -> set[float]:
    """The times at which the clamp starts or stops acting on some token, by bisection on the unclamped curve."""
    if not isinstance(process.schedule, Spindle):
        return set()
    relative = (process.information / process.corpus_mean)[torch.tensor(sorted(set(x0.tokens.flatten().tolist())))]
    kinks = set()
    for end in (1.0, 0.0):
        low, high = torch.full_like(relative, 1e-9), torch.full_like(relative, 1 - 1e-9)
        for _ in range(60):
            middle = (low + high) / 2
            above = process.schedule.unclamped(middle, relative) >= end
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        kinks |= {round(float(time), 9) for time in low if 1e-6 < float(time) < 1 - 1e-6}
    return kinks


def _any_order_nats(objective: OrderAgnostic, network: nn.Module, x0: Batch) -> Tensor:
    positions = _shared_positions(x0).nonzero()[:, 0].tolist()
    total = torch.zeros(len(x0.tokens), dtype=torch.float64)
    for num_masked in range(1, len(positions) + 1):
        for chosen in itertools.combinations(positions, num_masked):
            tokens = x0.tokens.index_fill(1, torch.tensor(chosen), objective.mask_id)
            nats = objective.next_nats(network, x0.tokens, replace(x0, tokens=tokens)).sum(dim=1)
            total = total + nats / math.comb(len(positions), num_masked)
    return total


def _shared_positions(x0: Batch) -> Tensor:
    """The editable positions, which must be the same in all sequences."""
    editable = x0.editable[0]
    assert bool((x0.editable == editable).all())
    return editable


def _editable_states(process: Process, x0: Batch) -> list[Tensor]:
    """All noisy versions of each sequence; positions that are not editable keep their tokens."""
    editable = _shared_positions(x0)
    states = []
    for inner in all_states(process, x0.tokens[:, editable]):
        tokens = x0.tokens.clone()
        tokens[:, editable] = inner
        states.append(tokens)
    return states
