"""Infilling: `[MASK]` is one token, `[BLANK]` any number of them; all blanks of a text are filled jointly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from diffusionbert.data.canvas import BLANK, MASK, Blanks
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.inference import filling
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.filling import Gap, fill_gaps
from diffusionbert.inference.generate import constrained_network
from diffusionbert.inference.tasks import Filling, Task, TokenProbability, words_of
from diffusionbert.likelihood.estimate import length_nats
from diffusionbert.reporting import require_type


def fill(
    engine: Engine,
    text: str,
    num_alternatives: int = 1,
    *,
    max_blank_tokens: int = 4,
    forbid: Sequence[str] = (),
    seed: int = 0,
) -> list[Filling]:
    """The best joint fillings of a text that were found, best first.

    Args:
        engine: A model that generates from `[MASK]`.
        text: The text, with `[MASK]` for one token and `[BLANK]` for 1 to `max_blank_tokens` tokens.
        num_alternatives: The number of fillings; fewer are returned if fewer exist.
        max_blank_tokens: The most tokens of a `[BLANK]`.
        forbid: Words that must not be generated.
        seed: Of the random part of the search.
    """
    if max_blank_tokens < 1 or num_alternatives < 1:
        raise ValueError(
            f"`max_blank_tokens` and `num_alternatives` must be >= 1, got {max_blank_tokens} and {num_alternatives}"
        )
    given = _blanks(engine, text)
    num_blanks = given.marks.count(BLANK)
    _require_positions(engine, given, num_blanks, max_blank_tokens)
    gaps = [_gap(engine, given.canvas(width)) for width in range(1, max_blank_tokens + 1 if num_blanks else 2)]
    network, mask_id = constrained_network(engine, Task(forbid=words_of(forbid))), engine.vocabulary.mask_id
    warper = LogitsWarper(forbidden=engine.statistics.never_sampled)
    special = pad(engine.vocabulary.special, (0, len(engine.statistics.allowed) - engine.vocabulary.size))
    if num_blanks:
        [found] = fill_gaps(network, gaps, mask_id, num_alternatives, seed, warper, special=special)
    else:
        [found] = filling.fill(network, gaps[0].canvas, mask_id, num_alternatives, seed, warper, special=special)
    return [_text_filling(given, gaps, one) for one in found[:num_alternatives]]


def token_probabilities(engine: Engine, text: str, top_k: int = 5) -> list[list[TokenProbability]]:
    """The most probable tokens of each `[MASK]`, each given the text with all blanks masked.

    Args:
        engine: A model that generates from `[MASK]`.
        text: The text; `[BLANK]` counts as one `[MASK]`.
        top_k: The number of tokens per blank.
    """
    given = _blanks(engine, text)
    canvas = given.canvas(1).to(engine.device)
    engine.require_positions(canvas.tokens.shape[1], f"{text[:40]!r} has", "shorten it")
    network = constrained_network(engine, Task())
    with torch.no_grad():
        log_f = network(canvas.tokens, canvas.attend, canvas.fraction_of(canvas.editable), canvas.editable)
    best = LogitsWarper(forbidden=engine.statistics.never_sampled)(log_f).topk(min(top_k, log_f.shape[-1]), dim=-1)
    return [
        [
            TokenProbability(engine.vocabulary.spelled([token])[0], token, float(torch.tensor(log_p).exp()))
            for token, log_p in zip(tokens, log_ps, strict=True)
        ]
        for tokens, log_ps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _blanks(engine: Engine, text: str) -> Blanks:
    require_type("text", text, str, "a string")
    engine.require_single_texts("fill")
    if not engine.config.objective.generates_on_masks:
        raise ValueError(f"this model does not generate from {MASK}, so it cannot fill blanks; use another model")
    return Blanks(engine.vocabulary, text)


def _require_positions(engine: Engine, given: Blanks, num_blanks: int, max_blank_tokens: int) -> None:
    """Raises ValueError if a text with its longest blanks has more positions than the model reads."""
    positions = given.canvas(1).tokens.shape[1]
    engine.require_positions(positions, f"{given.text[:40]!r} has", "shorten it")
    most = 1 + (engine.max_positions - positions) // num_blanks if num_blanks else max_blank_tokens
    if max_blank_tokens > most:
        raise ValueError(
            f"`max_blank_tokens` must be <= {most} for {given.text[:40]!r}, got {max_blank_tokens}: this model reads "
            f"at most {engine.max_length} tokens"
        )


def _gap(engine: Engine, canvas: Batch) -> Gap:
    canvas = canvas.to(engine.device)
    context = ~canvas.editable & ~engine.vocabulary.special.to(engine.device)[canvas.tokens]
    length, histogram = (canvas.editable | context).sum(dim=1).cpu(), engine.length_histogram
    is_known = histogram is not None and int(length) < len(histogram)
    nats = length_nats(histogram, length) if histogram is not None and is_known else torch.zeros(1).double()
    return Gap(canvas, context, nats.to(engine.device))


def _text_filling(given: Blanks, gaps: Sequence[Gap], found: filling.TokenFilling) -> Filling:
    sizes = [gap.canvas.tokens.shape[1] for gap in gaps]
    width = sizes.index(len(found.tokens)) + 1
    generated = found.tokens[gaps[width - 1].canvas.editable[0]].tolist()
    text, fillings = given.filled(generated, width)
    return Filling(text, fillings, found.nats)
