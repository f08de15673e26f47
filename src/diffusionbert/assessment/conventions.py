"""One checkpoint under every convention of the LM1B literature, so that a number can be placed in any paper's table.

Papers divide different nats by different counts, and call all of it perplexity. With S sentences, sentence i having
n_i tokens, w_i words, b_i bytes, and X_i nats with its length given:

    a word             exp(Σ X_i / Σ w_i)             DiffusionBERT (He et al. 2022), over its grid of steps
    a token            exp(Σ X_i / Σ n_i)             single sentences
    padded             exp(Σ X_i / Σ (n_i + 2))       MDLM (Sahoo et al. 2024) on LM1B that is not wrapped
    packed             exp(Σ Y_j / Σ m_j)             MDLM on wrapped LM1B: Y_j, m_j of full rows of running text
    length paid        exp(Σ (X_i - log p(n_i)) / Σ n_i)
    bits a byte        Σ X_i / Σ b_i / log 2          comparable across vocabularies

MDLM's published code pads rows to 128 places, hides pads like words and shows them to the network, but masks its loss
by the tokenizer's attention mask and divides by the sum of it: [CLS] and [SEP] are counted, pads are not, and a pad
that is seen tells the length. Here the length is given, so [CLS] and [SEP] cost nothing, and are counted all the same.

Knows numbers alone: what is divided by what. How nats are estimated is in `evaluation`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, final

from torch import Tensor

from diffusionbert.likelihood.intervals import Numbers, ratio_intervals
from diffusionbert.likelihood.scores import Estimate, Rate, Unit, rates_to_json
from diffusionbert.shapes import RowValues

PLACES = 128
"""Of a row in the LM1B literature."""
PERPLEXITY, BITS = "perplexity", "bits"
_SINGLE = "Σ nats of single sentences, length given"


@dataclass(frozen=True)
class Meaning:
    """What a convention is, in words."""

    name: str
    papers: str
    quotient: str
    """What is divided by what."""
    note: str
    """What it compares with."""
    unit: str = PERPLEXITY
    trained_for: bool = True
    """Whether the checkpoint was trained for texts of this form."""


@final
@dataclass(frozen=True)
class Convention:
    """A likelihood as one part of the literature reports it."""

    meaning: Meaning
    likelihood: str
    steps: str
    value: float | None
    """None where it is infinite or cannot be had; the note says which."""
    ci95: tuple[float, float] | None

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        plain = asdict(self)
        return {**plain.pop("meaning"), **plain}


@dataclass(frozen=True, eq=False)
class Basis:
    """What the conventions of one checkpoint are reckoned from; every length is given."""

    own: Estimate
    """The model's own likelihood."""
    grid: Estimate
    """Over its grid of steps, or its own where it has none."""
    continuous: Estimate
    """In continuous time, or its own where that has no limit."""
    packed: Estimate | None
    """Of full rows; None if the sentences do not fill two."""
    length_nats: RowValues | None
    """-log p(length) of each sentence; None if the model does not know its lengths."""
    num_special: int
    """Special tokens around a sentence."""
    vocabulary_size: int


def conventions(basis: Basis, seed: int = 0) -> tuple[Convention, ...]:
    """All conventions, each with its interval."""
    words, tokens, padded, packed, paid, byte = _meanings(basis)
    own, scores = basis.own, basis.own.scores
    with_special = _numbers(basis.continuous.scores.tokens) + basis.num_special
    return (
        _reckoned(words, basis.grid, _numbers(basis.grid.scores.words), seed),
        _reckoned(tokens, own, _numbers(scores.tokens), seed),
        _reckoned(padded, basis.continuous, with_special, seed),
        _missing(packed, basis.continuous, "the sentences do not fill two rows")
        if basis.packed is None
        else _reckoned(packed, basis.packed, _numbers(basis.packed.scores.tokens), seed),
        _missing(paid, own, "this model does not know the lengths of its corpus")
        if basis.length_nats is None
        else _reckoned(
            paid,
            replace(own, scores=replace(scores, nats=scores.nats + basis.length_nats)),
            _numbers(scores.tokens),
            seed,
        ),
        _reckoned(byte, own, _numbers(scores.bytes), seed),
    )


def _meanings(basis: Basis) -> tuple[Meaning, ...]:
    vocabulary = (
        f"compares under one vocabulary only: here {basis.vocabulary_size:,} tokens, in the papers bert-base-uncased's "
        "30,522"
    )
    return (
        Meaning(
            "a word",
            "DiffusionBERT (He et al. 2022) and its baselines",
            f"{_SINGLE} / Σ words between white space",
            "compares across vocabularies if words are cut alike: LM1B's tokenised text has more of them than plain "
            "text; the published spindle figures are no bound",
        ),
        Meaning("a token", "single sentences", f"{_SINGLE} / Σ tokens, special ones not counted", vocabulary),
        Meaning(
            "a token, padded",
            "MDLM (Sahoo et al. 2024), with SEDD and AR beside it, on LM1B not wrapped",
            f"{_SINGLE} / Σ (tokens + {basis.num_special}): special tokens are counted at no cost, pads are not",
            f"there [SEP] must be written, at some cost unless a pad is seen; {vocabulary}",
        ),
        Meaning(
            "a token, packed",
            "MDLM and BD3-LM on LM1B wrapped; D3PM, with 8k SentencePiece",
            "Σ nats of full rows of sentences one after another / Σ tokens, special ones not counted",
            f"rows of several sentences are new to this checkpoint; there [SEP] stands between them and is counted; "
            f"{vocabulary}",
            trained_for=False,
        ),
        Meaning(
            "a token, length paid",
            "models that write an end, such as autoregressive ones",
            "Σ (nats of single sentences - log p(length)) / Σ tokens, special ones not counted",
            f"p(length) is the histogram of the training corpus; {vocabulary}",
        ),
        Meaning(
            "a byte",
            "any vocabulary",
            f"{_SINGLE} / Σ UTF-8 bytes of the text as read / log 2",
            "compares across vocabularies on the same text, cased and cleaned alike",
            unit=BITS,
        ),
    )


def _reckoned(meaning: Meaning, estimate: Estimate, counts: Numbers, seed: int) -> Convention:
    nats = estimate.scores.nats.numpy()
    [interval] = ratio_intervals(nats, [counts], seed)
    unit, name = (Unit.BYTE, "bits_per_byte") if meaning.unit == BITS else (Unit.TOKEN, "perplexity_per_token")
    plain = rates_to_json({unit: Rate(float(nats.sum() / counts.sum()), *interval)})
    value, (low, high) = plain[name], plain["ci95"][name]
    if value is None or high is None:
        return _missing(meaning, estimate, "infinite, because some sentence is all but impossible to this model")
    return Convention(meaning, estimate.kind.value, estimate.protocol.steps, value, (low, high))


def _missing(meaning: Meaning, estimate: Estimate, reason: str) -> Convention:
    told = replace(meaning, note=f"not to be had: {reason}")
    return Convention(told, estimate.kind.value, estimate.protocol.steps, None, None)


def _numbers(counts: Tensor | None) -> Numbers:
    assert counts is not None, "conventions need the words and bytes of each sentence"
    numbers: Numbers = counts.double().numpy()
    return numbers
