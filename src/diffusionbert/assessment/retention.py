"""Kornblith et al. 2019, §3 (linear CKA) and Conneau et al. 2018, §2 (bigram shift): does a tuned encoder understand?

A sentence's embedding x_i is the mean of the encoder's last layer over the sentence's own tokens. Before and after
tuning, with K = XXᵀ, L = YYᵀ and their diagonals set to 0,

    HSIC(K, L) = [ tr KL + 1ᵀK1·1ᵀL1 / ((n-1)(n-2)) - 2/(n-2)·1ᵀKL1 ] / (n(n-3))        (Song et al. 2012, eq. 5)
    CKA = HSIC(K, L) / √( HSIC(K, K)·HSIC(L, L) )          1: the same geometry, 0: none in common

This HSIC is unbiased. The usual one is not: with hundreds of sentences and as many dimensions it finds likeness
between random vectors. CKA does not see rotations, so beside it stands the mean cosine of x_i - x̄ and y_i - ȳ, not
aligned: it says whether vectors that were stored before tuning can still be searched with new ones. Without centring,
the direction that all embeddings share would make any two encoders look alike.

The probe is a logistic regression on frozen embeddings. Where no labels are given it tells sentences from the same
sentences with two neighbouring words swapped, which no bag of words can. Knows nothing of noise or of generating.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from diffusionbert.likelihood.intervals import Difference, Numbers, paired_difference, ratio_intervals
from diffusionbert.networks import Denoiser
from diffusionbert.noise import Noise, Purpose
from diffusionbert.shapes import RowCounts, RowKeys
from diffusionbert.text.canvas import Sentences
from diffusionbert.text.vocabulary import Vocabulary

Embeddings = Float[Tensor, "S _"]
"""One vector for each of S sentences; two encoders may have different widths."""
Flags = Bool[Tensor, " _"]
HELD_OUT = 0.3
"""The share of the sentences on which the probe is judged."""
PENALTIES = (0.01, 0.1, 1.0)
"""From these the probe's is chosen, by cross-validation on the rest; features are standardised."""
_FOLDS = 4
_ROWS = 32  # embedded at once


@final
@dataclass(frozen=True, eq=False)
class Encoder:
    """A masked language model as something that reads."""

    network: Denoiser
    vocabulary: Vocabulary

    def fits(self, text: str) -> bool:
        """Whether a text has words, and no more than the network reads at once."""
        [row] = self.vocabulary.encode([text])
        return self.vocabulary.num_special(paired=False) < len(row) <= self.network.max_length

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Embeddings:
        """The mean of the last layer over each text's own tokens; a network that is told the time is told 0."""
        rows = Sentences(self.vocabulary, tuple(texts))
        order = np.argsort(rows.lengths, kind="stable")
        parts = [self._embed(rows, order[start : start + _ROWS].tolist()) for start in range(0, len(order), _ROWS)]
        return torch.cat(parts)[torch.from_numpy(order).argsort()]

    def _embed(self, rows: Sentences, indices: list[int]) -> Embeddings:
        network, device = self.network, self.network.writable.device
        batch = rows.batch(indices).to(device)
        if batch.tokens.shape[1] > network.max_length or not bool(batch.editable.any(dim=1).all()):
            raise ValueError(
                f"a text to be embedded has 1 to {network.max_length} tokens, special ones counted: leave out others"
            )
        hidden = network.hidden_states(batch.tokens, batch.attend)
        own = batch.editable[..., None].double()
        return ((hidden.double() * own).sum(dim=1) / own.sum(dim=1)).cpu()


@final
@dataclass(frozen=True, eq=False)
class Probe:
    """Labelled texts. Those of one group are never on both sides of a split."""

    name: str
    texts: tuple[str, ...]
    labels: RowCounts
    group: RowKeys

    def __post_init__(self) -> None:
        held_out = self.held_out
        for part in (held_out, ~held_out):
            if len(set(self.labels[part].tolist())) < 2:
                raise ValueError(
                    f"the probe {self.name!r} has {len(self.texts)} texts, which are too few or all of one label: give "
                    "dozens of texts with at least two labels"
                )

    @classmethod
    def of_labels(cls, name: str, labelled: Sequence[tuple[str, str]]) -> Probe:
        """A probe of texts with labels in words; equal texts form a group."""
        names = sorted({label for _, label in labelled})
        places = {text: place for place, (text, _) in reversed(list(enumerate(labelled)))}
        return cls(
            name,
            tuple(text for text, _ in labelled),
            torch.tensor([names.index(label) for _, label in labelled], dtype=torch.long),
            torch.tensor([places[text] for text, _ in labelled], dtype=torch.long),
        )

    @classmethod
    def bigram_shift(cls, texts: Sequence[str], seed: int = 0) -> Probe:
        """Sentences as they are, and with two neighbouring words swapped; what has no such words is left out."""
        chance = Noise(seed).uniform(torch.arange(len(texts)), Purpose.PLACE).tolist()
        pairs = [(text, _swapped(text, number)) for text, number in zip(texts, chance, strict=True)]
        kept = [(text, shifted) for text, shifted in pairs if shifted is not None]
        return cls(
            "bigram shift",
            tuple(version for pair in kept for version in pair),
            torch.arange(2 * len(kept)) % 2,
            torch.arange(2 * len(kept)) // 2,
        )

    @cached_property
    def held_out(self) -> Flags:
        """Marks the texts on which the probe is judged."""
        return Noise(0).uniform(self.group, Purpose.ORDER) < HELD_OUT

    def answers(self, embeddings: Embeddings) -> Flags:
        """For each held-out text, whether a probe that was fitted to the others is right."""
        held_out = self.held_out
        number = int(self.labels.max()) + 1
        features, labels = embeddings[~held_out], self.labels[~held_out]
        fold = (Noise(1).uniform(self.group[~held_out], Purpose.ORDER) * _FOLDS).long()

        def right(penalty: float) -> int:
            folds = [(fold != index, fold == index) for index in range(_FOLDS)]
            return sum(
                int((_fitted(features[a], labels[a], number, penalty)(features[b]) == labels[b]).sum())
                for a, b in folds
                if bool(a.any()) and bool(b.any())
            )

        # Of equally good ones the strongest, which is the simplest probe.
        penalty = max(reversed(PENALTIES), key=right)
        return _fitted(features, labels, number, penalty)(embeddings[held_out]) == self.labels[held_out]


@final
@dataclass(frozen=True)
class Accuracy:
    """A share of right answers, with its 95 % interval over groups of texts."""

    value: float
    low: float
    high: float


@final
@dataclass(frozen=True)
class Retention:
    """What is left of an encoder."""

    sentences: int
    cka: float
    cosine: float | None
    """Of centred embeddings, not aligned; None where the two encoders have different widths."""
    probe: str
    held_out: int
    """Texts on which the probe was judged."""
    chance: float
    """The accuracy of always answering the commonest label."""
    before: Accuracy
    after: Accuracy
    change: Difference
    """After less before, on the same texts."""

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        return asdict(self)


def retention(before: Encoder, after: Encoder, texts: Sequence[str], probe: Probe | None = None) -> Retention:
    """Compares two encoders on sentences, and on a probe: bigram shift on those sentences, unless one is given."""
    if len(texts) < 4:
        raise ValueError(f"two encoders are compared on at least 4 sentences, better on hundreds, given {len(texts)}")
    probe = probe or Probe.bigram_shift(texts)
    place = {text: index for index, text in enumerate(dict.fromkeys((*texts, *probe.texts)))}
    embedded = [encoder.embed(list(place)) for encoder in (before, after)]
    first, second = (vectors[[place[text] for text in texts]] for vectors in embedded)
    right = [probe.answers(vectors[[place[text] for text in probe.texts]]) for vectors in embedded]
    held_out = probe.held_out
    labels = probe.labels[held_out]
    _, group, counts = np.unique(probe.group[held_out].numpy(), return_inverse=True, return_counts=True)
    sizes = counts.astype(np.float64)
    was, became = (np.bincount(group, weights=flags.double().numpy()).astype(np.float64) for flags in right)
    return Retention(
        sentences=len(texts),
        cka=linear_cka(first, second),
        cosine=centred_cosine(first, second) if first.shape == second.shape else None,
        probe=probe.name,
        held_out=len(labels),
        chance=float(labels.bincount().max()) / len(labels),
        before=_accuracy(was, sizes),
        after=_accuracy(became, sizes),
        change=paired_difference((became, was), (sizes, sizes)),
    )


def linear_cka(first: Embeddings, second: Embeddings) -> float:
    """The likeness of two sets of vectors of the same sentences, whatever their widths, rotations and scales."""
    # Centring changes nothing but rounding: a direction that all vectors share would drown the rest.
    centred = [vectors.double() - vectors.double().mean(dim=0) for vectors in (first, second)]
    grams = [vectors @ vectors.T for vectors in centred]
    for gram in grams:
        gram.fill_diagonal_(0)
    between, *within = (_hsic(*pair) for pair in (grams, (grams[0], grams[0]), (grams[1], grams[1])))
    # Unbiased estimates of 0 may fall below it; vectors that are all alike have no geometry to compare.
    return between / math.sqrt(within[0] * within[1]) if min(within) > 0 else 0.0


def centred_cosine(first: Embeddings, second: Embeddings) -> float:
    """The mean cosine of two sets of vectors, each less its mean."""
    directions = [normalize(vectors - vectors.mean(dim=0), dim=1) for vectors in (first, second)]
    return float((directions[0] * directions[1]).sum(dim=1).mean())


def _hsic(first: Tensor, second: Tensor) -> float:
    n = len(first)
    sums = first.sum(dim=1), second.sum(dim=1)
    product = (first * second).sum() + sums[0].sum() * sums[1].sum() / ((n - 1) * (n - 2))
    return float((product - 2 / (n - 2) * (sums[0] @ sums[1])) / (n * (n - 3)))


def _swapped(text: str, chance: float) -> str | None:
    """The text with two neighbouring words swapped, neither the first nor one with punctuation.

    A capital or a comma in the wrong place would give the swap away without any understanding.
    """
    words = text.split()
    places = [
        place
        for place in range(1, len(words) - 1)
        if words[place].isalpha() and words[place + 1].isalpha() and words[place] != words[place + 1]
    ]
    if not places:
        return None
    place = places[int(chance * len(places))]
    words[place : place + 2] = reversed(words[place : place + 2])
    return " ".join(words)


@final
@dataclass(frozen=True, eq=False)
class _Fitted:
    """A linear classifier on standardised features."""

    mean: Tensor
    scale: Tensor
    weights: Tensor
    offsets: Tensor

    def __call__(self, features: Embeddings) -> Tensor:
        return self.logits(features).argmax(dim=1)

    def logits(self, features: Embeddings) -> Tensor:
        return (features - self.mean) / self.scale @ self.weights + self.offsets


def _fitted(features: Embeddings, labels: Tensor, num_labels: int, penalty: float) -> _Fitted:
    """Multinomial logistic regression: the mean cross-entropy plus penalty/2·‖weights‖², by L-BFGS."""
    weights = torch.zeros(features.shape[1], num_labels, dtype=torch.float64, requires_grad=True)
    offsets = torch.zeros(num_labels, dtype=torch.float64, requires_grad=True)
    scale = features.std(dim=0)
    probe = _Fitted(features.mean(dim=0), torch.where(scale > 0, scale, 1.0), weights, offsets)
    optimiser = torch.optim.LBFGS([weights, offsets], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = cross_entropy(probe.logits(features), labels) + penalty / 2 * weights.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return replace(probe, weights=weights.detach(), offsets=offsets.detach())


def _accuracy(right: Numbers, sizes: Numbers) -> Accuracy:
    [(low, high)] = ratio_intervals(right, [sizes], seed=0)
    return Accuracy(float(right.sum() / sizes.sum()), low, high)
