"""Likelihood estimates of a corpus, with confidence intervals.

A method draws its nats; the quantity of interest is E[nats(x0, u, noise)], where u is uniform on (0, 1) and usually
sets the time. In one *round*, a sentence gets m stratified draws, draw j with u from the stratum [j/m, (j+1)/m]. The
mean over a round,

    y = 1/m · Σ_j nats(x0, (j + uniform) / m, noise_j),     E[y] = 1/m · Σ_j m · ∫_{stratum j} E[nats | u] du = E[nats]

is unbiased, whether or not the strata are shifted, and has a lower variance than m independent draws. Its variance
cannot be estimated from *within* a round, whose draws have different means. But rounds are i.i.d., so s²/R over R ≥ 2
rounds is an unbiased estimate of the variance of their mean. `estimate` adds rounds until its interval is narrow
enough, or until the variance over draws is negligible compared with that over sentences (`intervals`).

Noise is keyed by seed, draw and `Batch.example`, so a result depends neither on how sentences are batched nor on how
many processes share the batches.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from numbers import Integral

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, Counts, PerSequence, batch_sizes
from diffusionbert.likelihood.scores import Estimate, Interval, Length, Limit, Protocol, Rate, Scores, Unit
from diffusionbert.networks.remote import working_device
from diffusionbert.objectives.base import Likelihood, ObjectiveConfig, TrainingModule
from diffusionbert.parallel import current
from diffusionbert.reporting import require_type

_SEED = 2**40  # added to the seed, to keep it apart from the seeds of training
_MIN_DEGREES = 8  # degrees of freedom; with fewer, a variance that is small by chance could stop the estimation
_POSITIONS_AT_ONCE = {"cpu": 4096, "cuda": 32_768}  # per network call
_NEGLIGIBLE = 0.1  # fraction of the variance; if draws contribute no more than this, only more sentences help


@typing.runtime_checkable
class SequenceDataset(typing.Protocol):
    """A dataset of encoded sentences."""

    @property
    def lengths(self) -> npt.NDArray[np.integer]:
        """The number of positions of each sequence."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """The sequences with these indices, padded."""


@dataclass(frozen=True)
class EstimationBudget:
    """The precision of an estimate and its maximum cost."""

    precision: float | None = 0.005
    """Half the width of the 95 % interval of the *perplexity per token*, relative to it: 0.005 is 0.5 %, or log 1.005
    nats per token. None always uses `max_draws`."""
    max_draws: int = 256
    """The most draws per sentence."""
    strata: int = 16
    """Draws per round, each from its own stratum of time."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_type("seed", self.seed, Integral, "a whole number")
        if self.strata < 1 or self.max_draws < 2 * self.strata:
            raise ValueError(
                f"`strata` must be >= 1 and `max_draws` >= 2 * `strata`, because a variance needs two rounds, got "
                f"strata={self.strata} and max_draws={self.max_draws}"
            )
        if self.precision is not None and not self.precision > 0:
            raise ValueError(f"`precision` must be > 0, got {self.precision}; 0.005 is 0.5 %")

    @property
    def max_rounds(self) -> int:
        """The number of whole rounds; a partial round would be biased."""
        return self.max_draws // self.strata

    @property
    def half_width(self) -> float:
        """The precision in nats per token."""
        return math.inf if self.precision is None else math.log1p(self.precision)


DEFAULT_BUDGET = EstimationBudget()
UNSPECIFIED_PROTOCOL = Protocol()


def estimate(
    method: TrainingModule,
    sequences: SequenceDataset | Iterable[Batch],
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
    """Estimates the likelihood of sentences, with a 95 % interval, using as many draws as the precision requires.

    Args:
        method: The network and objective whose nats are estimated.
        sequences: A dataset or batches of sentences.
        budget: The estimation budget.
        words: Words per sentence, for rates per word.
        bytes: Bytes per sentence, for rates per byte.
        length_histogram: If given, -log p(length) is added to the nats.
        given: Whether the interval is for these sentences alone (one is enough), rather than for the distribution that
            they are a sample of.
        protocol: Further entries of the protocol.
        batch_tokens: Tokens per batch of a dataset.
        autocast: The dtype of mixed precision.
        advance: Progress callback, called with the number of sentences done, once per batch and round.

    Returns:
        The scores of all sentences, the rates with their intervals, and the protocol.
    """
    kind = _require_likelihood(method)
    strata, max_rounds = (1, 1) if kind is Likelihood.EXACT else (budget.strata, budget.max_rounds)
    chunks = _chunks(sequences, batch_tokens)
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
            # One sentence with infinite nats makes the corpus infinite, but the others are still estimated.
            is_done, limit = _stopping(scores.finite, budget, given=given)
            if is_done:
                break
    complete = replace(
        protocol,
        length=Length.GIVEN if length_histogram is None else Length.MODELED,
        interval=Interval.DRAWS if given else Interval.SENTENCES_AND_DRAWS,
        num_draws=strata * len(rounds),
        strata=strata,
        seed=budget.seed,
        precision=budget.precision,
        arithmetic=_arithmetic(method, autocast),
    )
    limit = Limit.INFINITE if scores.num_infinite else limit
    return Estimate(scores, _rates(scores, budget, given=given), limit, complete)


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
    """One round of draws: an unbiased estimate of the nats per sequence, independent of other rounds.

    If the method has no likelihood, its loss is used instead. `at_once` is the number of draws per network call, for
    callers that need the same number of calls for several batches.
    """
    draws = range(number * strata, (number + 1) * strata)
    has_nats = method.objective.likelihood is not Likelihood.NONE
    drawn = (lambda x0, noise: method.nats(x0, noise).sum(dim=1)) if has_nats else method.loss
    return _mean_draw(method, drawn, batch, draws, seed, autocast, at_once)


def draws_at_once(positions: int, device: str = "cpu") -> int:
    """Draws per network call for a batch with this many positions: enough to keep the device busy."""
    return max(1, _POSITIONS_AT_ONCE.get(device, 4096) // max(1, positions))


def length_nats(histogram: Tensor, lengths: Counts) -> PerSequence:
    """-log p(length), with p(n) = (histogram[n] + 1) / (Σ_k histogram[k] + N) for 1 ≤ n ≤ N, the largest length.

    Laplace smoothing gives lengths that never occur in training a positive probability.
    """
    longest = len(histogram) - 1
    if bool((lengths < 1).any()) or bool((lengths > longest).any()):
        raise ValueError(
            f"lengths must be between 1 and {longest} tokens for this length model, got {int(lengths.min())} to "
            f"{int(lengths.max())}; leave out other sentences, or score without the length"
        )
    counts = histogram[1:].double() + 1
    nats: PerSequence = (counts.sum() / counts).log()[lengths - 1]
    return nats


def count_words(text: str) -> int:
    """Counts whitespace-separated words; in a tokenized corpus such as LM1B, punctuation marks are words."""
    return len(text.split())


def count_bytes(text: str) -> int:
    """Counts UTF-8 bytes of the text as given; clean and lower-case it first if the model does."""
    return len(text.encode("utf-8"))


_Chunk = tuple[Tensor, Callable[[], Batch]]  # the indices of some sentences, and a function that makes their batch


def _chunks(sequences: SequenceDataset | Iterable[Batch], batch_tokens: int) -> list[_Chunk]:
    """The given batches, or batches of similar lengths, the longest first so that memory runs out early if at all."""
    if isinstance(sequences, SequenceDataset):
        lengths, get = np.asarray(sequences.lengths), sequences.batch
        order = np.argsort(-lengths, kind="stable")
        edges = np.cumsum(batch_sizes(lengths[order].tolist(), batch_tokens))[:-1]
        return [(torch.from_numpy(index), partial(get, index.tolist())) for index in np.split(order, edges)]
    batches = list(sequences)
    ends = np.cumsum([0, *(len(batch.tokens) for batch in batches)]).tolist()
    edges_of = zip(pairwise(ends), batches, strict=True)
    return [(torch.arange(start, end), partial(replace, batch)) for (start, end), batch in edges_of]


def _require_sentences(num: int, words: Tensor | None, bytes: Tensor | None, *, smallest: int) -> None:
    if num < smallest:
        raise ValueError(
            f"an interval needs at least {smallest} sentences, got {num}; give more or, for an interval for the "
            "given sentences alone, given=True"
        )
    for name, counts in (("words", words), ("bytes", bytes)):
        if counts is not None and len(counts) != num:
            raise ValueError(f"`{name}` must have one count for each of the {num} sentences, got {len(counts)}")


def _round(
    chunks: list[_Chunk], draws: Callable[[Batch], Tensor], advance: Callable[[int], None]
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys, token counts and drawn nats of all sentences, in the original order."""

    def drawn(chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
        batch = chunk[1]()
        return batch.example.cpu(), batch.editable.sum(dim=1).cpu(), draws(batch).cpu()

    found = []
    for (index, _), one in zip(chunks, current().share(chunks, drawn), strict=True):
        found.append(one)
        advance(len(index))
    order = torch.cat([index for index, _ in chunks]).argsort()
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
    """The mean over draws, each from its own stratum of (0, 1); noise is keyed by the number of the draw."""
    device = device_of(method)
    batch = batch.to(device)
    size = len(batch.tokens)
    total = torch.zeros((), dtype=torch.float64, device=device)
    at_once = at_once or draws_at_once(batch.tokens.numel(), device.type)
    for first in range(0, len(draws), at_once):
        stratum = torch.arange(first, min(first + at_once, len(draws)), device=device).repeat_interleave(size)
        many = _repeated(batch, len(stratum) // size)
        edges = torch.stack([stratum, stratum + 1], dim=1).double() / len(draws)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            drawn = draw(replace(many, strata=edges), Noise(_SEED + seed, draws.start + stratum))
        total = total + drawn.double().view(-1, size, *drawn.shape[1:]).sum(dim=0)
    return total / len(draws)


def _repeated(batch: Batch, times: int) -> Batch:
    repeated: dict[str, typing.Any] = {name: torch.cat([tensor] * times) for name, tensor in batch.tensors.items()}
    return replace(batch, **repeated)


def _stopping(scores: Scores, budget: EstimationBudget, *, given: bool) -> tuple[bool, Limit | None]:
    """Whether to stop drawing for sentences with finite nats, and what then limits the precision."""
    is_last = scores.num_rounds == budget.max_rounds
    if len(scores) < (1 if given else 2):
        return True, None  # there is no interval to narrow
    if budget.precision is None:
        return is_last, None
    is_known = is_last or scores.degrees_of_freedom >= _MIN_DEGREES
    rate = _rates(scores, budget, given=given)[Unit.TOKEN]
    if (rate.high - rate.low) / 2 <= budget.half_width:
        return is_known, None
    variance = scores.spread
    needs_sentences = not given and 1.96 * math.sqrt(variance.sentences) > budget.half_width
    if needs_sentences and variance.draws <= _NEGLIGIBLE * variance.total:
        return is_known, Limit.SENTENCES
    return is_last, Limit.DRAWS


def _rates(scores: Scores, budget: EstimationBudget, *, given: bool) -> dict[Unit, Rate]:
    return scores.given_rates() if given else scores.rates(budget.seed)


def _require_likelihood(method: TrainingModule) -> Likelihood:
    kind = method.objective.likelihood
    if kind is Likelihood.NONE:
        raise ValueError("this method has no likelihood, nor a bound on one; judge it by its samples")
    return kind


@contextmanager
def _evaluating(method: TrainingModule) -> Iterator[None]:
    """Switches to evaluation mode and restores the mode of each submodule afterwards."""
    were_training = [module for module in method.modules() if module.training]
    method.eval()
    try:
        yield
    finally:
        for module in were_training:
            module.training = True


def device_of(method: TrainingModule) -> torch.device:
    """The device that the sequences of an estimate are on."""
    tensor = next(chain(method.parameters(), method.buffers()), None)
    return torch.device("cpu") if tensor is None else working_device(tensor.device)


def _arithmetic(method: TrainingModule, autocast: torch.dtype | None) -> str:
    weight = next(method.parameters(), None)
    dtype = autocast or (torch.float32 if weight is None else weight.dtype)
    rounded = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return str(dtype).removeprefix("torch.") + (
        ", products in tf32" if rounded and device_of(method).type == "cuda" else ""
    )


@contextmanager
def fast_products(objective: ObjectiveConfig) -> Iterator[None]:
    """Lets GPUs multiply float32 matrices in TF32, which is several times faster; probabilities still sum to 1.

    Not for word vectors: a bound multiplies their errors by the SNR, up to 10⁴, and so those of rounding.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if objective.has_word_vectors else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
