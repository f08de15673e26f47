"""Scores of texts: nats with an interval over draws, perplexities, bits per byte, and the nats of each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusionbert.data.canvas import Sentences
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.tasks import TextScore
from diffusionbert.likelihood.estimate import (
    UNSPECIFIED_PROTOCOL,
    EstimationBudget,
    SequenceDataset,
    count_bytes,
    count_words,
    estimate,
)
from diffusionbert.likelihood.estimate import surprise as position_nats
from diffusionbert.likelihood.scores import Estimate, Protocol, Unit
from diffusionbert.objectives.base import ScoringQuantity
from diffusionbert.reporting import require_type


def score(engine: Engine, texts: Sequence[str], *, precision: float = 0.05, seed: int = 0) -> list[TextScore]:
    """Scores texts, each with an interval over draws.

    Args:
        engine: A model with a likelihood or a bound on one.
        texts: One or more texts.
        precision: Draw until the 95 % interval of the perplexity of all texts together is this narrow, relative to it.
        seed: Of the draws.
    """
    encode_texts(engine, texts)  # rejects what cannot be scored, by its number in the list
    encoded = [tuple(tokens) for tokens in engine.vocabulary.encode(texts)]
    unique: dict[tuple[int, ...], str] = {}  # texts with the same tokens have the same nats
    for tokens, text in zip(encoded, texts, strict=True):
        unique.setdefault(tokens, text)
    budget = EstimationBudget(precision=precision, seed=seed)
    found = estimate_nats(engine, list(unique.values()), budget, keyed_by_content=True, given=True)
    index_of = {tokens: index for index, tokens in enumerate(unique)}
    return [
        _text_score(engine, found, index_of[tokens], text, tokens) for tokens, text in zip(encoded, texts, strict=True)
    ]


def _text_score(engine: Engine, found: Estimate, index: int, text: str, tokens: Sequence[int]) -> TextScore:
    """The score of a text whose tokens have this index in an estimate."""
    own = replace(
        found.scores.select(torch.tensor([index])),
        words=torch.tensor([count_words(text)]),
        bytes=torch.tensor([count_bytes(text)]),
    )
    rates = own.given_rates()
    return TextScore(
        text,
        rates[Unit.SENTENCE].nats,
        rates[Unit.TOKEN].perplexity,
        rates[Unit.WORD].perplexity,
        rates[Unit.BYTE].nats / math.log(2),
        (rates[Unit.SENTENCE].low, rates[Unit.SENTENCE].high),
        found.kind,
        found.protocol,
        0 if engine.vocabulary.unk_id is None else tokens.count(engine.vocabulary.unk_id),
    )


def estimate_nats(
    engine: Engine,
    texts: Sequence[str],
    budget: EstimationBudget,
    *,
    quantity: ScoringQuantity | None = None,
    keyed_by_content: bool = False,
    given: bool = False,
    length_histogram: Tensor | None = None,
    protocol: Protocol = UNSPECIFIED_PROTOCOL,
    advance: Callable[[int], None] = lambda num_sentences: None,
) -> Estimate:
    """Estimates the likelihood of texts.

    Args:
        engine: The model.
        texts: One or more texts.
        budget: The precision and the most draws.
        quantity: What to estimate; None is the model's own quantity.
        keyed_by_content: Whether the noise of a text depends on its tokens; else on its number, so that two models draw
            the same noise for the same list of texts.
        given: Whether the interval is about these very texts, or about the language that they are a sample of.
        length_histogram: Adds -log p(length) by this histogram.
        protocol: What is known of how the number came about.
        advance: Called with the number of texts done, once in each round.
    """
    sentences = encode_texts(engine, texts)
    return estimate_sequences(
        engine,
        sentences.keyed_by_content() if keyed_by_content else sentences,
        budget,
        quantity=quantity,
        words=torch.tensor([count_words(text) for text in texts]),
        bytes=torch.tensor([count_bytes(text) for text in texts]),
        length_histogram=length_histogram,
        given=given,
        protocol=protocol,
        advance=advance,
    )


def estimate_sequences(
    engine: Engine,
    sequences: SequenceDataset,
    budget: EstimationBudget,
    *,
    quantity: ScoringQuantity | None = None,
    protocol: Protocol = UNSPECIFIED_PROTOCOL,
    **options: Any,
) -> Estimate:
    """Estimates the likelihood of encoded sequences; options as in `likelihood.estimate.estimate`."""
    chosen = quantity or engine.scoring_quantity
    module = engine.module(None if quantity is None else quantity.build(engine.statistics))
    return estimate(module, sequences, budget, protocol=replace(protocol, definition=chosen.definition), **options)


def token_nats(engine: Engine, text: str, *, draws: int = 64, seed: int = 0) -> list[tuple[str, float]]:
    """Each token of a text and its nats."""
    batch = encode_texts(engine, [text]).batch([0]).to(engine.device)
    nats = position_nats(engine.module(), batch, draws, seed)[0]
    editable = batch.editable[0]
    spelled = engine.vocabulary.spelled(batch.tokens[0][editable].tolist())
    return list(zip(spelled, nats[editable].tolist(), strict=True))


def encode_texts(engine: Engine, texts: Sequence[str]) -> Sentences:
    """Encodes texts that are to be scored; raises ValueError for what cannot be."""
    if not texts or isinstance(texts, str):
        raise ValueError(f"texts must be a list of one or more texts, got {texts!r:.40}")
    for text in texts:
        require_type("each text", text, str, "a string")
    engine.require_single_texts("score")
    sentences = Sentences(engine.vocabulary, tuple(texts))
    empty = (sentences.lengths <= engine.vocabulary.num_special(paired=False)).nonzero()[0].tolist()
    if empty:
        raise ValueError(f"text {empty[0] + 1} has no tokens ({texts[empty[0]]!r:.40}); leave it out")
    longest = int(sentences.lengths.argmax())
    engine.require_positions(
        int(sentences.lengths[longest]),
        f"text {longest + 1} ({texts[longest][:40]!r} …) has",
        "split it, or leave it out",
    )
    return sentences


@torch.no_grad()
def embed(engine: Engine, texts: Sequence[str]) -> Tensor:
    """The mean of the last layer over each text's own tokens, [N, D]; a time-conditioned network is at time 0."""
    network = engine.masked_network
    if network is None:
        raise ValueError("embeddings need a masked language model, which this is not; use another model")
    sentences = encode_texts(engine, texts)
    order = np.argsort(sentences.lengths, kind="stable")
    at_once = engine.sequences_at_once(int(sentences.lengths.max()))
    parts = []
    for start in range(0, len(order), at_once):
        batch = sentences.batch(order[start : start + at_once].tolist()).to(engine.device)
        own = batch.editable[..., None]
        states = network.hidden_states(batch.tokens, batch.attend).double()
        parts.append((states * own).sum(dim=1) / own.sum(dim=1))
    return torch.cat(parts)[torch.from_numpy(order).argsort()].float()
