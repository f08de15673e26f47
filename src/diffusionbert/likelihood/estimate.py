"""Likelihoods that people can trust: how many nats a method needs for a corpus, and how sure that is.

A method draws its nats: E[nats(x0, u, noise)] over a position u in (0, 1), often its time, is what is to be known. In
one *round* a sentence gets m draws, draw j with its u from the slice [j/m, (j+1)/m]. The mean over a round,

    y = 1/m · Σ_j nats(x0, (j + uniform) / m, noise_j),        E[y] = 1/m · Σ_j m · ∫_{slice j} E[nats | u] du = E[nats]

is unbiased, slices turned or not, and scatters less than m free draws do. How far it scatters cannot be seen from
*within* a round, whose draws have different means; but rounds are independent and alike, so s²/R over R ≥ 2 rounds is
an unbiased estimate of the variance of their mean. `estimate` makes rounds until its interval is narrow enough, or
until draws matter no more beside the choice of sentences (`intervals`).

Noise is keyed by seed, draw and `Batch.example`: the same call gives the same number, whatever the batches are.
Knows the contract of `method.py` and no concrete method; strings are counted here and never kept.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, pairwise
from numbers import Integral

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, Counts, PerPosition, PerSequence, batch_sizes
from diffusionbert.likelihood.protocol import Interval, Length, Limit, Protocol
from diffusionbert.likelihood.scores import Estimate, Rate, Scores, Unit
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.reporting import require_type

_SEED = 2**40  # added to the seed: far from the seeds of training
_ENOUGH_DEGREES = 8  # of freedom: before, a variance that happens to look small could end the drawing
_POSITIONS_PER_CALL = 4096  # of a batch whose draws are made together
_LITTLE = 0.1  # of the variance: where draws have no more, only sentences help


@typing.runtime_checkable
class Rows(typing.Protocol):
    """Encoded sentences."""

    @property
    def lengths(self) -> npt.NDArray[np.integer]:
        """The number of places of each row."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows of these numbers, padded."""


@dataclass(frozen=True)
class EstimationBudget:
    """How precise an estimate is to be, and how much it may cost."""

    precision: float | None = 0.005
    """Half the width of the 95 % interval of *perplexity per token*, relative to it: 0.005 is 0.5 %, which is
    log 1.005 nats a token, however many nats there are. None makes all draws."""
    max_draws: int = 256
    """For each sentence."""
    strata: int = 16
    """Draws of one round, each from its own slice of time."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_type("seed", self.seed, Integral, "a whole number")
        if self.strata < 1 or self.max_draws < 2 * self.strata:
            raise ValueError(
                f"max_draws={self.max_draws}, strata={self.strata}: only two rounds of draws tell how far they "
                "scatter, so give at least one stratum and twice as many draws"
            )
        if self.precision is not None and not self.precision > 0:
            raise ValueError(f"the precision must be above 0, given {self.precision}; 0.005 is half a per cent")

    @property
    def max_rounds(self) -> int:
        """Whole rounds alone are unbiased."""
        return self.max_draws // self.strata

    @property
    def half_width(self) -> float:
        """The asked precision in nats a token."""
        return math.inf if self.precision is None else math.log1p(self.precision)


DEFAULT_BUDGET = EstimationBudget()
UNSPECIFIED_PROTOCOL = Protocol()


def estimate(
    method: TrainingModule,
    rows: Rows | Iterable[Batch],
    budget: EstimationBudget = DEFAULT_BUDGET,
    *,
    words: Counts | None = None,
    bytes: Counts | None = None,
    length_histogram: Tensor | None = None,
    given: bool = False,
    protocol: Protocol = UNSPECIFIED_PROTOCOL,
    batch_tokens: int = 16_384,
    autocast: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda num_sentences: None,
) -> Estimate:
    """A method's likelihood on sentences, with an interval, by as many draws as that takes.

    By default sentences are a sample and the interval is about the language; with `given` it is about these very
    sentences, of which one is enough. `words` and `bytes` count each sentence's units; with a `length_histogram`
    lengths are paid for, too. `advance` is told of sentences as they are done, once in each round.
    """
    kind = _require_likelihood(method)
    strata, max_rounds = (1, 1) if kind is Likelihood.EXACT else (budget.strata, budget.max_rounds)
    chunks = _chunks(rows, batch_tokens)
    _require_sentences(sum(len(index) for index, _ in chunks), words, bytes, smallest=1 if given else 2)
    rounds: list[Tensor] = []
    with _evaluating(method):
        for number in range(max_rounds):
            draws = partial(round_nats, method, number=number, strata=strata, seed=budget.seed, autocast=autocast)
            example, tokens, nats = _round(chunks, draws, advance)
            rounds.append(nats if length_histogram is None else nats + length_nats(length_histogram, tokens))
            if len(rounds) < min(2, max_rounds):
                continue
            scores = Scores.from_rounds(kind, example, rounds, tokens, words, bytes)
            # An infinite sentence makes the corpus's nats infinite; the others' are still worth knowing.
            is_over, limit = _verdict(scores.finite, budget, given=given)
            if is_over:
                break
    card = replace(
        protocol,
        length=Length.GIVEN if length_histogram is None else Length.MODELLED,
        interval=Interval.DRAWS if given else Interval.SENTENCES_AND_DRAWS,
        num_draws=strata * len(rounds),
        strata=strata,
        seed=budget.seed,
        precision=budget.precision,
        arithmetic=_arithmetic(method, autocast),
    )
    limit = Limit.INFINITE if scores.num_infinite else limit
    return Estimate(scores, _rates(scores, budget, given=given), limit, card)


@torch.no_grad()
def round_nats(
    method: TrainingModule,
    batch: Batch,
    *,
    number: int,
    strata: int,
    seed: int,
    autocast: torch.dtype | None = None,
    at_once: int | None = None,
) -> PerSequence:
    """One round of draws: an unbiased estimate of each row's nats, independent of every other number's.

    Of a method that has no likelihood, of its loss. For those who deal batches out themselves; `Scores.from_rounds`
    takes what they gather. Where the network must be called equally often for several batches, they say how many draws
    are made at once.
    """
    draws = range(number * strata, (number + 1) * strata)
    has_nats = method.objective.likelihood is not Likelihood.NONE
    drawn = (lambda x0, noise: method.nats(x0, noise).sum(dim=1)) if has_nats else method.loss
    return _mean_draw(method, drawn, batch, draws, seed, autocast, at_once)


def draws_at_once(positions: int) -> int:
    """As many as a batch of so many places needs: few leave a machine idle."""
    return max(1, _POSITIONS_PER_CALL // max(1, positions))


@torch.no_grad()
def surprise(
    method: TrainingModule, batch: Batch, draws: int = 16, seed: int = 0, *, autocast: torch.dtype | None = None
) -> PerPosition:
    """The nats of each place: their mean over draws that share out (0, 1) among them."""
    if draws < 1:
        raise ValueError(f"surprise needs at least one draw, given {draws}; 16 and more show little noise")
    draws = 1 if _require_likelihood(method) is Likelihood.EXACT else draws
    with _evaluating(method):
        return _mean_draw(method, method.nats, batch, range(draws), seed, autocast).to(batch.tokens.device)


def length_nats(histogram: Tensor, lengths: Counts) -> PerSequence:
    """-log p(length), with p(n) = (histogram[n] + 1) / (Σ_k histogram[k] + N) for 1 ≤ n ≤ N, the histogram's last.

    One is added to each count (Laplace), so that a length that training never saw is possible and p sums to 1.
    """
    longest = len(histogram) - 1
    if bool((lengths < 1).any()) or bool((lengths > longest).any()):
        raise ValueError(
            f"lengths from {int(lengths.min())} to {int(lengths.max())}: the length model knows 1 to {longest} tokens; "
            "leave out other sentences, or let the length be given"
        )
    counts = histogram[1:].double() + 1
    nats: PerSequence = (counts.sum() / counts).log()[lengths - 1]
    return nats


def count_words(text: str) -> int:
    """Words stand between white space: punctuation glued to a word belongs to it.

    In a tokenised corpus such as LM1B, where a space stands before each full stop, that is a word of its own.
    """
    return len(text.split())


def count_bytes(text: str) -> int:
    """Bytes in UTF-8 of the text as it is given: cleaned and lower-cased before, if the model reads it so."""
    return len(text.encode("utf-8"))


_Chunk = tuple[Tensor, Callable[[], Batch]]
"""The numbers of some sentences, and how to get them."""


def _chunks(rows: Rows | Iterable[Batch], batch_tokens: int) -> list[_Chunk]:
    """Batches as they are given, or rows of like length together; long ones first, so that memory fails at once."""
    chunks: list[_Chunk]
    if isinstance(rows, Rows):
        lengths = np.asarray(rows.lengths)
        order = np.argsort(-lengths, kind="stable")
        edges = np.cumsum(batch_sizes(lengths[order].tolist(), batch_tokens))[:-1]
        chunks = [(torch.from_numpy(index), partial(rows.batch, index.tolist())) for index in np.split(order, edges)]
    else:
        batches = list(rows)
        ends = np.cumsum([0, *(len(batch.tokens) for batch in batches)]).tolist()
        numbers = [torch.arange(start, end) for start, end in pairwise(ends)]
        chunks = [(index, partial(replace, batch)) for index, batch in zip(numbers, batches, strict=True)]
    return chunks


def _require_sentences(num: int, words: Tensor | None, bytes: Tensor | None, *, smallest: int) -> None:
    """Raises ValueError before anything is drawn, and not after."""
    if num < smallest:
        raise ValueError(
            f"{num} sentences, but an interval needs at least {smallest}: give more of them or, if one is meant for "
            "itself and not as a sample, given=True"
        )
    for name, counts in (("words", words), ("bytes", bytes)):
        if counts is not None and len(counts) != num:
            raise ValueError(f"{num} sentences, but {len(counts)} numbers of {name}: give one for each sentence")


def _round(
    chunks: list[_Chunk], draws: Callable[[Batch], Tensor], advance: Callable[[int], None]
) -> tuple[Tensor, Tensor, Tensor]:
    """The names, tokens and drawn nats of all sentences, in their own order."""
    numbers, found = [], []
    for index, get in chunks:
        batch = get()
        numbers.append(index)
        found.append((batch.example.cpu(), batch.editable.sum(dim=1).cpu(), draws(batch).cpu()))
        advance(len(index))
    order = torch.cat(numbers).argsort()
    example, tokens, nats = (torch.cat(parts)[order] for parts in zip(*found, strict=True))
    return example, tokens, nats


def _mean_draw(
    method: TrainingModule,
    draw: Callable[[Batch, Noise], Tensor],
    batch: Batch,
    draws: range,
    seed: int,
    autocast: torch.dtype | None,
    at_once: int | None = None,
) -> Tensor:
    """The mean over draws, each from its own slice of (0, 1); a draw is named by its number."""
    device = _device(method)
    batch = batch.to(device)
    rows = len(batch.tokens)
    total = torch.zeros((), dtype=torch.float64, device=device)
    at_once = at_once or draws_at_once(batch.tokens.numel())
    for first in range(0, len(draws), at_once):
        stratum = torch.arange(first, min(first + at_once, len(draws)), device=device).repeat_interleave(rows)
        many = _repeated(batch, len(stratum) // rows)
        edges = torch.stack([stratum, stratum + 1], dim=1).double() / len(draws)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            drawn = draw(replace(many, strata=edges), Noise(_SEED + seed, draws.start + stratum))
        total = total + drawn.double().view(-1, rows, *drawn.shape[1:]).sum(dim=0)
    return total / len(draws)


def _repeated(batch: Batch, times: int) -> Batch:
    """The rows of a batch several times, one after another."""
    return Batch(
        *(
            getattr(batch, field.name).repeat(times, 1).view(-1, *getattr(batch, field.name).shape[1:])
            for field in fields(batch)
        )
    )


def _verdict(scores: Scores, budget: EstimationBudget, *, given: bool) -> tuple[bool, Limit | None]:
    """Whether to stop drawing for sentences of finite nats, and what then keeps the interval wide."""
    is_last = scores.num_rounds == budget.max_rounds
    if len(scores) < (1 if given else 2):
        return True, None  # nothing is left to be known
    if budget.precision is None:
        return is_last, None
    is_known = is_last or scores.degrees_of_freedom >= _ENOUGH_DEGREES
    rate = _rates(scores, budget, given=given)[Unit.TOKEN]
    if (rate.high - rate.low) / 2 <= budget.half_width:
        return is_known, None
    variance = scores.spread
    needs_sentences = not given and 1.96 * math.sqrt(variance.sentences) > budget.half_width
    if needs_sentences and variance.draws <= _LITTLE * variance.total:
        return is_known, Limit.SENTENCES
    return is_last, Limit.DRAWS


def _rates(scores: Scores, budget: EstimationBudget, *, given: bool) -> dict[Unit, Rate]:
    return scores.given_rates() if given else scores.rates(budget.seed)


def _require_likelihood(method: TrainingModule) -> Likelihood:
    kind = method.objective.likelihood
    if kind is Likelihood.NONE:
        raise ValueError("this method has no likelihood, nor a bound on one: judge it by its samples")
    return kind


@contextmanager
def _evaluating(method: TrainingModule) -> Iterator[None]:
    """Without dropout; afterwards every part is as it was, also those that were kept from training."""
    were_training = [module for module in method.modules() if module.training]
    method.eval()
    try:
        yield
    finally:
        for module in were_training:
            module.training = True


def _device(method: TrainingModule) -> torch.device:
    tensor = next(chain(method.parameters(), method.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _arithmetic(method: TrainingModule, autocast: torch.dtype | None) -> str:
    weight = next(method.parameters(), None)
    dtype = autocast or (torch.float32 if weight is None else weight.dtype)
    rounded = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return str(dtype).removeprefix("torch.") + (
        ", products in tf32" if rounded and _device(method).type == "cuda" else ""
    )


@contextmanager
def fast_products() -> Iterator[None]:
    """Lets GPUs multiply float32 matrices in TF32, several times faster; probabilities sum to one all the same."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
