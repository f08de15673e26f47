"""Tokens as diffusion sees them: ids, counts and distributions over ids, with draws and logits warpers. No strings."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from diffusionbert.diffusion.schedules import TokenInformation
from diffusionbert.diffusion.shapes import (
    PerPosition,
    PerTarget,
    PositionMask,
    TargetFlags,
    TargetIndices,
    TargetLogProbs,
    TargetTokens,
    Tokens,
    TokenSet,
    per_position,
)

_NEVER = -1e30  # a finite substitute for log 0


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """The special ids, the allowed tokens, and how often each token occurs in the training corpus."""

    mask_id: int
    pad_id: int
    allowed: TokenSet  # ids that a sequence may contain at editable positions
    never_sampled: tuple[int, ...]  # allowed ids that samplers never generate: `[UNK]`
    counts: Tensor  # how often each id occurs at editable positions of the training corpus
    exponents: Tensor | None = None  # the exponent of each id, if the model learned its schedule

    @property
    def information(self) -> TokenInformation:
        return TokenInformation.from_counts(self.counts, allowed=self.allowed)

    def padded(self, vocab_size: int) -> TokenStatistics:
        """The same statistics for a network with more ids than the tokenizer; the extra ids are not allowed."""
        more = vocab_size - len(self.allowed)
        if more < 0:
            raise ValueError(
                f"the tokenizer has {len(self.allowed)} ids, the network only {vocab_size}; use the tokenizer that the "
                "network was trained with"
            )
        return replace(
            self, allowed=functional.pad(self.allowed, (0, more)), counts=functional.pad(self.counts, (0, more))
        )


# ---- categorical distributions, given as log-probabilities ----------------------------------------------------------


def log_prob_of(log_p: TargetLogProbs, tokens: TargetTokens) -> PerTarget:
    """The log-probability of one token at each target position, in float64."""
    return log_p.gather(-1, tokens[:, None])[:, 0].double()


def log_sum_of(log_p: TargetLogProbs, log_weights: Tensor, sequences: TargetIndices) -> PerTarget:
    """log Σ_v p(v)·weight(v), with the weights of each target's sequence, in float64; see `finite_log`."""
    # The N×V values stay in the network's precision.
    total = (log_p + log_weights.to(log_p.dtype)[sequences]).logsumexp(dim=-1)
    return total.masked_fill(total < _NEVER / 2, -torch.inf).double()


def finite_log(values: Tensor) -> Tensor:
    """log, with a finite substitute for log 0 whose gradient is 0.

    The gradient of a logsumexp over nothing but -inf is NaN. So the log of 0 becomes a value too small to change a sum;
    `log_sum_of` turns a sum of nothing but such values into -inf.
    """
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).log(), _NEVER)


class Prediction(ABC):
    """The network's f(v | x_t) at N target positions, accessed through reductions over the vocabulary.

    Losses need nothing else, so the N×V log-probabilities never have to exist all at once.
    """

    vocab_size: int

    @abstractmethod
    def log_probs(self, tokens: TargetTokens, log_weights: Sequence[Tensor], sequences: TargetIndices) -> list[Tensor]:
        """log f(token) and, for each table [B, V] of log-weights, log Σ_v f(v)·weight(v); each [N], in float64."""

    @abstractmethod
    def mean(self, values: Tensor) -> PerTarget:
        """E_f[value(v)] at each target position, in float64 and without gradient."""

    @abstractmethod
    def dense(self) -> TargetLogProbs:
        """All N×V log-probabilities, for callers that need every one."""

    def log_prob(self, tokens: TargetTokens) -> PerTarget:
        """log f(token) at each target position, in float64."""
        return self.log_probs(tokens, (), tokens)[0]


class DensePrediction(Prediction):
    """All log-probabilities, [N, V]."""

    def __init__(self, log_f: TargetLogProbs):
        self.log_f = log_f
        self.vocab_size = log_f.shape[-1]

    def log_probs(self, tokens: TargetTokens, log_weights: Sequence[Tensor], sequences: TargetIndices) -> list[Tensor]:
        sums = [log_sum_of(self.log_f, table, sequences) for table in log_weights]
        return [log_prob_of(self.log_f, tokens), *sums]

    def dense(self) -> TargetLogProbs:
        return self.log_f

    def mean(self, values: Tensor) -> PerTarget:
        return (self.log_f.detach().exp() @ values.to(self.log_f.dtype)).double()


AnyPrediction = TargetLogProbs | Prediction
"""log f(v | x_t) at target positions: all its values, or an object that reduces them."""


def as_prediction(log_f: AnyPrediction) -> Prediction:
    return log_f if isinstance(log_f, Prediction) else DensePrediction(log_f)


VALUES_IN_CACHE = 2**20
"""How many log-probabilities a CPU works on at once. New memory for more than this takes longer to get than to fill."""


def in_parts(function: Callable[..., tuple[Tensor, ...]], log_p: TargetLogProbs, *others: Tensor) -> list[Tensor]:
    """Applies a function of N target positions, on a CPU to as many at once as its cache holds."""
    at_once = len(log_p) if log_p.is_cuda else VALUES_IN_CACHE // log_p.shape[-1]
    parts = (torch.split(values, max(1, at_once)) for values in (log_p, *others))
    return [torch.cat(found) for found in zip(*(function(*part) for part in zip(*parts, strict=True)), strict=True)]


def entropy_of(log_p: Tensor) -> PerTarget:
    """The entropy at each target position in nats, in float64; `log_p` need not be normalized.

    With z = log p - max log p and Z = Σ exp z, it is log Z - Σ z·exp z / Z: one exponential per token, no logarithm.
    """
    relative = (log_p - log_p.amax(dim=-1, keepdim=True)).clamp_(min=_NEVER)  # 0·log 0 = 0, where 0·(-inf) is NaN
    weights = relative.exp()
    total = weights.sum(dim=-1).double()
    return total.log() - weights.mul_(relative).sum(dim=-1).double() / total


def nats_of(log_p: TargetLogProbs, tokens: Tokens, targets: PositionMask) -> PerPosition:
    """-log p(token) at each target position, in nats; 0 elsewhere."""
    return per_position(-log_prob_of(log_p, tokens[targets]), targets)


def draw(log_p: TargetLogProbs, uniform: PerTarget) -> TargetTokens:
    """Draws one token per target position by inverting the CDF at a uniform number.

    The CDF is computed in float64, because float32 would round rare tokens away. A token of probability 0 is never
    drawn.
    """
    tokens, is_possible = draw_unchecked(log_p, uniform)
    require_possible(is_possible)
    return tokens


def draw_unchecked(log_p: TargetLogProbs, uniform: PerTarget) -> tuple[TargetTokens, TargetFlags]:
    """`draw` without waiting for a GPU; the flags say where there was a token to draw (elsewhere it is arbitrary)."""
    tokens, _, is_possible = _inverted(log_p.double().exp(), uniform)
    return tokens, is_possible


def draw_reverse(log_p: TargetLogProbs, mask_id: int, uniform: PerTarget) -> tuple[TargetTokens, TargetFlags]:
    """As `draw_unchecked`, from a CDF that begins with "stay masked", the entry `mask_id`.

    So a small uniform number leaves a position masked whatever token the network predicts.
    """
    probabilities = log_p.double().exp()
    stay = probabilities[:, mask_id].clone()
    probabilities[:, mask_id] = 0
    probabilities[:, 0] += stay
    tokens, reached, is_possible = _inverted(probabilities, uniform)
    return torch.where(reached < stay, mask_id, tokens), is_possible


def _inverted(probabilities: Tensor, uniform: PerTarget) -> tuple[TargetTokens, PerTarget, TargetFlags]:
    """The tokens at which the CDF reaches a fraction of its total, what it reaches, and if there is a token at all."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1]
    reached = uniform.double() * total
    found = torch.searchsorted(cumulative, reached[:, None], right=True)[:, 0]
    return found.clamp(max=probabilities.shape[-1] - 1), reached, total > 0  # also false for NaN


def require_possible(is_possible: Tensor) -> None:
    """Raises ValueError unless there was a token to draw at all positions."""
    if not bool(is_possible.all()):
        raise ValueError(
            "no token has a positive probability at some position; forbid fewer tokens, or check whether the "
            "network's output is NaN"
        )


_NUCLEUS = 128
"""How many top tokens to search for a nucleus at first: sorting a whole vocabulary takes fifty times as long."""
_GROWTH = 8
"""How many times more tokens to search next."""


@dataclass(frozen=True)
class LogitsWarper:
    """Forbidden tokens, temperature, top-k and top-p, applied in this order to p(x0 | x_t).

    It must never be applied to a distribution that also contains "stay masked": at temperature 0.1 that would unmask
    every token in the last step.

    Example: `LogitsWarper(temperature=0.9, top_p=0.95)(log_p)`
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"`temperature` must be finite and > 0, got {self.temperature}; use `top_k=1` for greedy sampling"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"`top_k` must be >= 1, or None for all tokens, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be in (0, 1], got {self.top_p}; 1 keeps all tokens")

    def __call__(self, log_p: TargetLogProbs) -> TargetLogProbs:
        """The warped distributions; `log_p` need not be normalized."""
        if (top := self._top(log_p)) is not None:
            return torch.full_like(log_p, -torch.inf).scatter(-1, top.tokens, top.log_p)
        log_p = self._tempered(log_p).log_softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            log_p = _keep_nucleus(log_p, self.top_p).log_softmax(dim=-1)
        return log_p

    def draw(self, log_p: TargetLogProbs, uniform: PerTarget) -> tuple[TargetTokens, TargetFlags]:
        """`draw_unchecked` from the warped distributions; top-k leaves no other values to compute than k per target."""
        top = self._top(log_p)
        return draw_unchecked(self(log_p), uniform) if top is None else top.draw_unchecked(uniform)

    def exclude(self, log_p: Tensor) -> Tensor:
        """Gives the forbidden tokens probability 0, and changes nothing else."""
        if not self.forbidden:
            return log_p
        return log_p.index_fill(-1, _on_device(self.forbidden, log_p.device), -torch.inf)

    def _tempered(self, log_p: TargetLogProbs) -> TargetLogProbs:
        """Forbidden tokens and temperature, not normalized."""
        log_p = self.exclude(log_p)
        if self.temperature == 1:
            return log_p
        # Relative to the most likely token, so that a tiny temperature does not overflow.
        relative = (log_p - log_p.amax(dim=-1, keepdim=True)).double()
        return (relative / self.temperature).to(log_p.dtype)

    def _top(self, log_p: TargetLogProbs) -> KeptTokens | None:
        """The warped distributions over the k tokens of top-k; None without it."""
        if self.top_k is None or self.top_k >= log_p.shape[-1]:
            return None
        values, tokens = self._tempered(log_p).topk(self.top_k, dim=-1)
        values = values.log_softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            values = _nucleus(values, self.top_p)[0].log_softmax(dim=-1)
        return KeptTokens(values, tokens)

    def kept(self, log_p: TargetLogProbs, size: int = _NUCLEUS) -> KeptTokens:
        """The warped distributions, up to rounding, as lists of the tokens that top-k or top-p keep.

        Args:
            log_p: The distributions to warp.
            size: How many of the most likely tokens to search at first.
        """
        size += len(self.forbidden)
        excluded = log_p[:, list(self.forbidden)].double().exp().sum(dim=-1, keepdim=True)
        is_short = size < log_p.shape[-1] and (self.top_p or 1.0) < 1 and self.top_k is None and self.temperature == 1
        if not is_short or bool((excluded > 0.5).any()):
            log_p = self(log_p)
            return KeptTokens(log_p, torch.arange(log_p.shape[-1], device=log_p.device).expand_as(log_p))
        values, tokens = log_p.topk(size, dim=-1)
        values = values - torch.log1p(-excluded).to(values.dtype)
        if self.forbidden:
            values = values.masked_fill(torch.isin(tokens, _on_device(self.forbidden, tokens.device)), -torch.inf)
        found, is_larger = _nucleus(values, self.top_p or 1.0)
        found = found.log_softmax(dim=-1)
        if bool(is_larger.any()):
            rest = self.kept(log_p[is_larger], _GROWTH * size)
            more = rest.log_p.shape[-1] - size
            found, tokens = functional.pad(found, (0, more), value=-torch.inf), functional.pad(tokens, (0, more))
            found[is_larger], tokens[is_larger] = rest.log_p, rest.tokens
        return KeptTokens(found, tokens)


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Distributions over a few tokens of the vocabulary: log-probabilities [N, K] of tokens [N, K]."""

    log_p: Tensor
    tokens: Tensor

    @property
    def entropy(self) -> PerTarget:
        """In nats."""
        return entropy_of(self.log_p)

    def draw(self, chosen: Tensor, uniform: PerTarget) -> TargetTokens:
        """Draws a token where `chosen` is true, as `draw` does over the whole vocabulary; takes a number for each."""
        tokens, is_possible = KeptTokens(self.log_p[chosen], self.tokens[chosen]).draw_unchecked(uniform)
        require_possible(is_possible)
        return tokens

    def draw_unchecked(self, uniform: PerTarget) -> tuple[TargetTokens, TargetFlags]:
        """`draw` at all targets without waiting for a GPU; the flags say where there was a token to draw."""
        tokens, order = self.tokens.sort(dim=-1)  # the CDF is over tokens by id
        index, is_possible = draw_unchecked(self.log_p.gather(-1, order), uniform)
        return tokens.gather(-1, index[:, None])[:, 0], is_possible


@functools.lru_cache(maxsize=64)
def _on_device(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Token ids as a tensor; cached, because a copy to a GPU would wait for all work queued on it."""
    return torch.tensor(ids, device=device)


def _keep_nucleus(log_p: TargetLogProbs, top_p: float, size: int = _NUCLEUS) -> TargetLogProbs:
    """Keeps the smallest set of most likely tokens whose mass reaches `top_p` (Holtzman et al. 2020)."""
    is_sorted = log_p.is_cuda or size >= log_p.shape[-1]  # sorting is fast on a GPU, and does not synchronize
    values, order = log_p.sort(dim=-1, descending=True) if is_sorted else log_p.topk(size, dim=-1)
    kept, is_larger = _nucleus(values, top_p)
    found = torch.full_like(log_p, -torch.inf).scatter(-1, order, kept)
    if not is_sorted and bool(is_larger.any()):
        found[is_larger] = _keep_nucleus(log_p[is_larger], top_p, _GROWTH * size)
    return found


def _nucleus(values: Tensor, top_p: float) -> tuple[Tensor, TargetFlags]:
    """Sorted log-probabilities of the top tokens, -inf outside the nucleus; and whether it extends beyond them."""
    p = values.double().exp()
    # A token is kept if the more likely ones do not reach top_p, so the most likely token is always kept.
    kept = values.masked_fill(p.cumsum(dim=-1) - p >= top_p, -torch.inf)
    return kept, p.sum(dim=-1) < top_p
