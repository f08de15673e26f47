"""Infilling: `[MASK]` is one token, `[BLANK]` any number of them; all blanks of a text are filled jointly.

A text longer than the model can read is filled in windows, from left to right (`data.blanks`). The nats of its filling
are the sum over windows, each given its own context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from typing import Any, final

import torch
from torch.nn.functional import pad

from diffusionbert.data.blanks import BlankCanvas, Blanks
from diffusionbert.data.text import BLANK, MASK
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.inference.constraints import Constrained
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.filling import Gap, fill_gaps
from diffusionbert.inference.filling_nats import masked_fraction
from diffusionbert.inference.generate import constrained_network
from diffusionbert.inference.tasks import Filling, Task, TokenProbability, words_of
from diffusionbert.reporting import logger, require_type
from diffusionbert.storage.limits import Limit

LONG_SEARCH = 60
"""The number of tokens from which a search is announced, because it takes long."""


@final
@dataclass(frozen=True)
class _Candidate:
    """The tokens of a text's first blanks, and their nats."""

    tokens: tuple[tuple[int, ...], ...] = ()
    nats: float = 0.0


def fill(engine: Engine, text: str, num_alternatives: int = 1, **options: object) -> list[Filling]:
    """The best joint fillings of one text; options as in `fill_together`."""
    return fill_together(engine, [text], num_alternatives, **options)[0]  # type: ignore[arg-type]


def fill_together(
    engine: Engine,
    texts: Sequence[str],
    num_alternatives: int = 1,
    *,
    max_blank_tokens: int = 4,
    forbid: Sequence[str] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    capitalize: bool = False,
) -> list[list[Filling]]:
    """Finds the best joint fillings of each text, best first.

    Args:
        engine: A model that generates from `[MASK]`.
        texts: Texts with `[MASK]` for one token and `[BLANK]` for 1 to `max_blank_tokens` tokens.
        num_alternatives: The number of fillings per text; fewer are returned if fewer exist.
        max_blank_tokens: The most tokens per `[BLANK]`.
        forbid: Words that must not be generated.
        temperature: The temperature of the random part of the search.
        top_k: Search only the k most probable tokens of each position; 0 or None keeps all.
        top_p: Search only the most probable tokens that together reach this probability.
        seed: The seed of the random part of the search.
        capitalize: Whether to restore capitals in the fillings of an uncased model, in `Filling.text`.
    """
    for name, value in (("num_alternatives", num_alternatives), ("max_blank_tokens", max_blank_tokens)):
        if value < 1:
            raise ValueError(f"`{name}` must be >= 1, got {value}")
    Limit.ALTERNATIVES.require(num_alternatives, "`num_alternatives` is too large", "ask for fewer")
    warper = LogitsWarper(temperature, top_k or None, top_p, forbidden=engine.statistics.never_sampled)
    given = [_blanks(engine, text) for text in texts]
    groups = [_groups(engine, blanks, max_blank_tokens) for blanks in given]
    found = [[_Candidate()] for _ in given]
    for window in range(max(map(len, groups), default=0)):
        open_texts = [number for number in range(len(given)) if window < len(groups[number])]
        started = [(number, candidate) for number in open_texts for candidate in found[number]]
        canvases = [
            _canvases(engine, given[number], groups[number][window], candidate, max_blank_tokens)
            for number, candidate in started
        ]
        fillings = _search(engine, canvases, num_alternatives, words_of(forbid), warper, seed)
        for number in open_texts:
            found[number] = []
        for (number, candidate), ranked in zip(started, fillings, strict=True):
            widths = given[number].widths
            found[number] += [
                _extended(candidate, [widths(one.gap)[mark] for mark in groups[number][window]], one) for one in ranked
            ]
        for number in open_texts:
            found[number] = sorted(found[number], key=lambda candidate: candidate.nats)[:num_alternatives]
            if not found[number]:
                raise ValueError(f"no filling of {texts[number][:40]!r} is possible; forbid fewer words")
    conditions = ["context" if BLANK in blanks.marks else "context, lengths" for blanks in given]
    return [
        [Filling(*blanks.filled(one.tokens, capitalize=capitalize), one.nats, condition) for one in ranked]
        for blanks, ranked, condition in zip(given, found, conditions, strict=True)
    ]


def token_probabilities(engine: Engine, text: str, top_k: int = 5) -> list[list[TokenProbability]]:
    """The most probable tokens for each `[MASK]`, given the text with all blanks masked.

    Args:
        engine: A model that generates from `[MASK]`.
        text: The text; `[BLANK]` counts as one `[MASK]`.
        top_k: The number of tokens per blank.

    Returns:
        The tokens for each blank, restricted to those that fit there: no continuation token where a word begins.
    """
    require_type("top_k", top_k, Integral, "a whole number")
    if top_k < 1:
        raise ValueError(f"`top_k` must be >= 1, got {top_k}")
    given = _blanks(engine, text)
    masked = [[engine.vocabulary.mask_id]] * len(given.marks)
    found = []
    for group in given.groups(engine.max_positions, 1):
        shown = given.canvas(1, group, masked, max_positions=engine.max_positions)
        canvas = shown.batch.to(engine.device)
        with torch.no_grad():
            vocabulary = engine.vocabulary
            t = masked_fraction(canvas.tokens, canvas.attention_mask, vocabulary.mask_id, vocabulary.special)
            network: Any = engine.network
            log_f = network(canvas.tokens, canvas.attention_mask, t, canvas.editable)
        log_p = LogitsWarper(forbidden=engine.statistics.never_sampled)(log_f)
        rules: Constrained = constrained_network(
            engine, Task(), word_starts=shown.word_starts, word_continuations=shown.word_continuations
        )
        log_p = rules.forbid(canvas.tokens, canvas.editable, log_p)
        best = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1)
        found += [
            [
                TokenProbability(engine.vocabulary.spelled([token])[0], token, float(probability))
                for token, probability in zip(tokens, probabilities, strict=True)
                if probability > 0
            ]
            for tokens, probabilities in zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
        ]
    return found


def _blanks(engine: Engine, text: str) -> Blanks:
    require_type("text", text, str, "a string")
    engine.require_single_texts("fill")
    if not engine.config.objective.generates_on_masks:
        raise ValueError(f"this model does not generate from {MASK}, so it cannot fill blanks; use another model")
    return Blanks(engine.vocabulary, text)


def _groups(engine: Engine, given: Blanks, max_blank_tokens: int) -> list[range]:
    """Groups of blanks to fill jointly; raises ValueError if a single blank is longer than the model can read."""
    if BLANK in given.marks and max_blank_tokens > engine.max_length:
        raise ValueError(
            f"`max_blank_tokens` must be <= {engine.max_length}, the most tokens that this model reads, got "
            f"{max_blank_tokens}"
        )
    lengths = range(1, max_blank_tokens + 1) if BLANK in given.marks else range(1, 2)
    number = sum(length if mark == BLANK else 1 for length in lengths for mark in given.marks)
    what, remedy = (
        f"{given.text[:40]!r} has too many tokens to fill",
        "give fewer blanks, or a smaller `max_blank_tokens`",
    )
    Limit.BLANK_TOKENS.require(number, what, remedy)
    groups = given.groups(engine.max_positions, max_blank_tokens)
    if number > LONG_SEARCH:
        logger.info(f"searching for {number} tokens, over {len(lengths)} length(s) and {len(groups)} window(s)")
    return groups


def _canvases(
    engine: Engine, given: Blanks, group: range, candidate: _Candidate, max_blank_tokens: int
) -> list[BlankCanvas]:
    """The sequence with these blanks editable, once per candidate length of its `[BLANK]`s."""
    widest = max_blank_tokens if BLANK in given.marks[group.start : group.stop] else 1
    return [
        given.canvas(gap, group, candidate.tokens, widest=widest, max_positions=engine.max_positions)
        for gap in range(1, widest + 1)
    ]


def _extended(candidate: _Candidate, widths: Sequence[int], found: _Found) -> _Candidate:
    chosen = iter(found.tokens)
    tokens = tuple(tuple(islice(chosen, width)) for width in widths)
    return _Candidate((*candidate.tokens, *tokens), candidate.nats + found.nats)


# ---- the search -----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Found:
    """Tokens for the editable positions of the canvas whose `[BLANK]`s have `gap` tokens."""

    gap: int
    tokens: list[int]
    nats: float


def _search(
    engine: Engine,
    sequences: Sequence[Sequence[BlankCanvas]],
    num_alternatives: int,
    forbid: tuple[str, ...],
    warper: LogitsWarper,
    seed: int,
) -> list[list[_Found]]:
    """The best fillings of each sequence, given once per candidate length of its `[BLANK]`s."""
    vocabulary, size = engine.vocabulary, len(engine.statistics.allowed)
    found = fill_gaps(
        constrained_network(engine, Task(forbid=forbid)),
        [[_gap(engine, canvas) for canvas in canvases] for canvases in sequences],
        vocabulary.mask_id,
        num_alternatives,
        seed,
        warper,
        special=pad(vocabulary.special, (0, size - vocabulary.size)),
        continuation=pad(vocabulary.continuation, (0, size - vocabulary.size)).to(engine.device),
    )
    return [
        [
            _Found(one.gap + 1, one.tokens.cpu()[canvases[one.gap].batch.editable[0]].tolist(), one.nats)
            for one in fillings
        ]
        for canvases, fillings in zip(sequences, found, strict=True)
    ]


def _gap(engine: Engine, shown: BlankCanvas) -> Gap:
    canvas = shown.batch.to(engine.device)
    context = ~canvas.editable & ~engine.vocabulary.special.to(engine.device)[canvas.tokens]
    nats = engine.length_nats((canvas.editable | context).sum(dim=1).cpu())
    rules = (rule.to(engine.device) for rule in (shown.word_starts, shown.word_continuations))
    return Gap(canvas, context, nats.to(engine.device), *rules)
