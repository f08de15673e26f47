"""Generation: prompts, sources and texts to rewrite become canvases; a sampler fills them; tokens become text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffusionbert.data.canvas import blank, drawn_lengths, num_tokens, rewriting
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.inference.constraints import Constrained, place_words
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.tasks import GeneratedText, StreamState, Task, has_word
from diffusionbert.networks.base import Network
from diffusionbert.samplers.base import State, last_state, sample
from diffusionbert.samplers.config import SamplingRequest

FALLBACK_LENGTH = 24
"""The length of a text if the model has no length histogram."""
ATTEMPTS = 20
"""To generate a text without forbidden words; the first nearly always succeeds."""


def generate(engine: Engine, task: Task, request: SamplingRequest) -> Iterator[GeneratedText]:
    """Yields the texts of a task, batch after batch; each depends on the seed and its number, not on the batch."""
    canvas = make_canvas(engine, task, request)
    number, at_once = len(canvas.tokens), engine.sequences_at_once(canvas.tokens.shape[1])
    for start in range(0, number, at_once):
        sequences = torch.arange(start, min(start + at_once, number))
        yield from _generate_batch(engine, task, request, canvas.select(sequences))


def stream(engine: Engine, task: Task, request: SamplingRequest) -> Iterator[StreamState]:
    """Yields every state of a task's first text, from noise to text."""
    canvas = make_canvas(engine, replace(task, number=1), request)
    for state in _states(engine, task, request, canvas):
        yield _stream_state(engine, state)


def require_supported(engine: Engine, task: Task, request: SamplingRequest) -> None:
    """Raises ValueError, before anything is generated, if the model cannot do a task."""
    make_canvas(engine, replace(task, number=1), request)
    engine.sampler(request)


def make_canvas(engine: Engine, task: Task, request: SamplingRequest) -> Batch:
    """The sequences of a task, with their editable positions."""
    if (task.source is not None) != engine.paired:
        raise ValueError(
            "this model was trained on pairs of source and target and generates from a source only; give `source`"
            if engine.paired
            else "this model was not trained on pairs, so it takes no `source`; leave it out, or train on .tsv pairs"
        )
    if task.rewrite is not None:
        _require_space(engine, len(engine.vocabulary.encode([task.rewrite])[0]), task, request)
        return rewriting(engine.vocabulary, task.rewrite, task.strength, task.number, task.seed, task.forbid)
    given = num_tokens(engine.vocabulary, task.prompt)
    around = blank(engine.vocabulary, [given + 1], task.prompt, task.source).tokens.shape[1] - given - 1
    if isinstance(task.length, tuple):  # every length that may be drawn must be possible
        _require_space(engine, around + task.length[1], task, request)
    lengths = _lengths(engine, task, given)
    _require_space(engine, around + max(lengths), task, request)
    return blank(engine.vocabulary, lengths, task.prompt, task.source)


def constrained_network(engine: Engine, task: Task) -> Any:
    """The network, with the constraints of a task around it."""
    network: Any = engine.network
    if engine.masked_network is None:
        if task.include or task.forbid:
            raise ValueError("`include` and `forbid` need a masked language model, which this is not; leave them out")
        return network
    [prompt] = engine.vocabulary.own([task.prompt])
    if prompt:  # no word piece continues the last word of the prompt
        network = _constrained(engine, network, included=[prompt])
    if task.include or task.forbid:
        network = _constrained(
            engine,
            network,
            forbidden=[pieces for word in task.forbid for pieces in engine.vocabulary.spellings(word)],
            included=[engine.vocabulary.pieces(word) for word in task.include],
            spelled=lambda word: repr(engine.vocabulary.decode(word)),
        )
    return network


def _constrained(engine: Engine, network: Network, **rules: Any) -> Constrained:
    return Constrained(network, continuation=engine.vocabulary.continuation, **rules).to(engine.device)


def _generate_batch(engine: Engine, task: Task, request: SamplingRequest, canvas: Batch) -> list[GeneratedText]:
    """Generates all sequences of a canvas, and those again whose text contains a forbidden word after all.

    Token sequences are forbidden, but a hot network may spell a word across punctuation: `& ##a` reads as `&a`.
    """
    found: dict[int, GeneratedText] = {}
    for attempt in range(ATTEMPTS):
        missing = torch.tensor([number for number in range(len(canvas.tokens)) if number not in found])
        retry = replace(task, seed=task.seed + (attempt << 36))
        end = last_state(_states(engine, retry, request, canvas.select(missing)))
        for number, tokens, calls in zip(missing.tolist(), end.tokens, end.calls.tolist(), strict=True):
            own = _own_tokens(engine, tokens)
            text = _text(engine, own, task.prompt)
            if not any(has_word(text, word, given=len(task.prompt)) for word in task.forbid):
                found[number] = GeneratedText(text, len(own), request.config.steps, int(calls), task.seed)
        if len(found) == len(canvas.tokens):
            return [found[number] for number in range(len(canvas.tokens))]
    raise RuntimeError(f"no text without {', '.join(task.forbid)} in {ATTEMPTS} attempts; forbid fewer words")


def _states(engine: Engine, task: Task, request: SamplingRequest, canvas: Batch) -> Iterator[State]:
    canvas = canvas.to(engine.device)
    network = constrained_network(engine, task)
    if isinstance(network, Constrained) and (task.include or task.forbid):
        canvas = place_words(network, canvas, engine.vocabulary.mask_id, task.seed)
    start_time = 1.0
    if task.rewrite is not None:  # time-conditioned networks and token-dependent schedules start at the masked fraction
        tokens = canvas.editable | (canvas.attend & ~engine.vocabulary.special.to(engine.device)[canvas.tokens])
        start_time = int(canvas.editable.sum()) / int(tokens.sum())
    sampler, context = engine.sampler(request, start_time)
    return sample(sampler, context, network, canvas, task.seed)


def _require_space(engine: Engine, positions: int, task: Task, request: SamplingRequest) -> None:
    """Raises ValueError if sequences of so many positions cannot be generated, before they take memory."""
    if task.rewrite is not None:
        engine.require_positions(positions, f"{task.rewrite[:40]!r} has", "shorten it")
    elif request.block is None:
        longer = ", or use `block=32` (--block 32)" if engine.config.objective.generates_on_masks else ""
        what = "the text" if task.source is None else "source and text together"
        engine.require_positions(positions, f"{what} would have", f"ask for fewer{longer}")
    elif task.include:
        engine.require_positions(positions, "with words to include, the text would have", "ask for fewer")


def _lengths(engine: Engine, task: Task, given: int) -> list[int]:
    if task.max_new_tokens is not None:
        return [given + int(task.max_new_tokens)] * task.number
    histogram = engine.length_histogram
    if task.length is not None:
        if not isinstance(task.length, tuple):
            return [int(task.length)] * task.number
        low, high = task.length
        if not 1 <= low <= high or high <= given:
            raise ValueError(
                f"lengths must rise to more than the prompt's {given} tokens, from 1 or more, got {low}-{high}"
            )
        histogram = torch.zeros(high + 1)
        histogram[low:] = 1
    if histogram is None or not bool(histogram[given + 1 :].any()):
        return [min(max(FALLBACK_LENGTH, given + FALLBACK_LENGTH // 2), engine.max_length)] * task.number
    return drawn_lengths(histogram, task.number, task.seed, shortest=given + 1)


def _text(engine: Engine, own: Tensor, prompt: str) -> str:
    """The text of a sequence's own tokens, its prompt as it was given."""
    given = num_tokens(engine.vocabulary, prompt)
    text, begin = engine.vocabulary.decode(own), engine.vocabulary.decode(own[:given])
    # A detached hyphen or apostrophe at the prompt's end may be joined to what follows.
    rest = text[len(begin) :] if text.startswith(begin) else f" {engine.vocabulary.decode(own[given:])}"
    return prompt + (rest.lstrip() if prompt[-1:].isspace() else rest)


def _own_tokens(engine: Engine, tokens: Tensor) -> Tensor:
    """The tokens between the last two special tokens of a sequence, masked ones included."""
    tokens, vocabulary = tokens.cpu(), engine.vocabulary
    is_frame = vocabulary.special[tokens] & (tokens != vocabulary.mask_id) & (tokens != vocabulary.pad_id)
    frame = is_frame.nonzero()
    return tokens[int(frame[-2]) + 1 : int(frame[-1])]


def _stream_state(engine: Engine, state: State) -> StreamState:
    own = _own_tokens(engine, state.tokens[0]).tolist()
    mask_id, spelled = engine.vocabulary.mask_id, engine.vocabulary.spelled(own)
    shown = tuple(None if token == mask_id else piece for token, piece in zip(own, spelled, strict=True))
    return StreamState(float(state.time[0]), int(state.calls[0]), shown, engine.vocabulary.decode(own), tuple(own))
