"""Traces every state of one text during sampling, with its step map: which step unmasked each token, the token's
probability, and the most probable alternatives.

A canvas can also be given by its tokens: masked positions are generated, all others are kept. The states are those that
`generate.generate` goes through, one sequence at a time.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from diffusionbert.data.canvas import batch_of
from diffusionbert.data.text import MASK, EditedText, require_no_blanks
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.generate import ATTEMPTS, SequenceRun, TaskPlan, attempt_seed, constrained_network
from diffusionbert.inference.tasks import Task, TokenProbability
from diffusionbert.samplers.base import sample
from diffusionbert.samplers.config import SamplingRequest


@final
@dataclass(frozen=True)
class TracedToken:
    """A position of a state: its token, and how the token was generated."""

    id: int | None
    """The token id; None while it is masked."""
    text: str | None
    """The token as the tokenizer spells it, with `##` if it continues a word."""
    is_given: bool
    span: tuple[int, int] = (0, 0)
    """Its characters in the text of the state."""
    step: int | None = None
    """The number of the state in which it appeared."""
    probability: float | None = None
    """f(token | previous state), under the constraints of the task."""
    alternatives: tuple[TokenProbability, ...] = ()
    """The most probable tokens at that step, possibly including this one."""


@final
@dataclass(frozen=True, eq=False)
class Traceable:
    """A sequence whose states can be traced.

    Args:
        engine: The model.
        text: Its text, with a position for each token.
        run: The sampler, network and canvas.
        seed: The seed of its noise.
        generated: Which positions are rendered as generated; others keep the characters of the text.
        task: The task, for its forbidden words, capitals and prompt.
    """

    engine: Engine
    text: EditedText
    run: SequenceRun
    seed: int
    generated: Tensor
    task: Task

    @property
    def keeps_tokens(self) -> bool:
        """Whether a token is final once it is unmasked."""
        return self.run.sampler.keeps_tokens(self.run.context)


@final
@dataclass(frozen=True, eq=False)
class TracedState:
    """A state of one text; its text and tokens are computed on access."""

    sequence: Traceable
    step: int
    time: float
    calls: int
    ids: Tensor
    """The whole sequence, including special tokens."""
    traced: tuple[TracedToken, ...]
    """The text's own tokens, without spans."""
    done: bool
    attempt: int = 0
    """The number of earlier attempts, discarded because of a forbidden word."""

    @cached_property
    def text(self) -> str:
        """The text, with `[MASK]` for each masked token."""
        sequence = self.sequence
        return sequence.text.render(self.ids, sequence.generated, capitalize=sequence.task.capitalize)

    @property
    def tokens(self) -> tuple[TracedToken, ...]:
        """The step map: the text's own tokens, with their characters in `text`."""
        spans = aligned([one.text for one in self.traced], self.text)
        return tuple(replace(one, span=span) for one, span in zip(self.traced, spans, strict=True))

    @property
    def is_final(self) -> bool:
        """Whether this is the last state and its text has no forbidden word; otherwise the text is generated again."""
        return self.done and not self.sequence.task.has_forbidden(self.text)


def traceable(engine: Engine, task: Task, request: SamplingRequest, number: int = 0, attempt: int = 0) -> Traceable:
    """The number-th text of a task."""
    plan = TaskPlan(engine, task, request)
    if plan.windows != [None]:
        engine.require_positions(len(plan.text.tokens), f"{plan.text.text[:40]!r} has", "shorten it")
    canvas = plan.canvas.select(torch.tensor([number])).to(engine.device)
    seed = attempt_seed(task.seed, attempt)
    generated, text = plan.canvas.editable[number], plan.canvas_text(number)
    return Traceable(engine, text, plan.run(canvas, seed), seed, generated[: len(text.tokens)], task)


def traceable_canvas(
    engine: Engine,
    tokens: Sequence[int | None],
    request: SamplingRequest,
    *,
    text: str | None = None,
    free: Sequence[bool] = (),
    strength: float = 0.0,
    seed: int = 0,
    number: int = 0,
    forbid: tuple[str, ...] = (),
    capitalize: bool = False,
) -> Traceable:
    """A canvas with these tokens.

    Args:
        engine: A model that generates from `[MASK]`.
        tokens: The tokens of the text, without special tokens; None is masked and generated.
        request: The sampler and its settings.
        text: The text these tokens encode, so that kept tokens keep their characters, too.
        free: Which of the given tokens `strength` may mask.
        strength: The fraction of free tokens to mask as well, chosen by the seed.
        seed: The same seed gives the same text.
        number: Different numbers give different texts for the same seed.
        forbid: Words that must not be generated.
        capitalize: Whether generated text is capitalized.
    """
    vocabulary = engine.vocabulary
    engine.require_single_texts("edit")
    if not engine.config.objective.generates_on_masks:
        raise ValueError(f"this model does not generate from {MASK}, so it cannot fill a canvas; use another model")
    edited = _edited(engine, tokens, text)
    is_masked = [token is None for token in tokens]
    if strength:
        is_masked = _masked_too(is_masked, free, strength, seed)
    if not any(is_masked):
        raise ValueError("nothing to generate on this canvas; mask a token")
    engine.require_positions(len(edited.tokens), "the canvas has", "shorten it")
    canvas = batch_of(vocabulary, [edited.tokens])
    canvas.editable[0, list(edited.own)] = torch.tensor(is_masked)
    masked = canvas.tokens.masked_fill(canvas.editable, vocabulary.mask_id)
    canvas = replace(canvas, tokens=masked, example=canvas.example + number).to(engine.device)
    task = Task(seed=seed, forbid=forbid, capitalize=capitalize)
    first = torch.zeros(len(edited.tokens), dtype=torch.bool)
    first[edited.own[0]] = True
    rules = first if text is None else edited.word_starts  # without a text, a mask may continue the word before
    network = constrained_network(engine, task, word_starts=rules)
    sampler, context = engine.sampler(request, sum(is_masked) / len(is_masked))
    generated = torch.ones(len(edited.tokens), dtype=torch.bool) if text is None else canvas.editable[0].cpu()
    return Traceable(engine, edited, SequenceRun(sampler, context, network, canvas), seed, generated, task)


def _edited(engine: Engine, tokens: Sequence[int | None], text: str | None) -> EditedText:
    """The text of a canvas; raises ValueError if the tokens do not match the text."""
    vocabulary = engine.vocabulary
    if wrong := [token for token in tokens if token is not None and not _is_allowed(vocabulary, token)]:
        raise ValueError(f"token ids must be those of the tokenizer, without special ones, got {wrong[0]}")
    if text is None:
        bare = EditedText.of(vocabulary, "")
        filled = bare.continued(len(tokens))
        own = iter(tokens)
        ids = [
            token if span is None else vocabulary.mask_id if (new := next(own)) is None else new
            for token, span in zip(filled.tokens, filled.spans, strict=True)
        ]
        return replace(filled, tokens=tuple(ids))
    require_no_blanks(vocabulary, text, "the text of a canvas")
    edited = EditedText.of(vocabulary, text)
    given = [edited.tokens[position] for position in edited.own]
    if len(given) != len(tokens) or any(one not in (None, own) for one, own in zip(tokens, given, strict=True)):
        raise ValueError("the tokens of a canvas must be those of its `text`; tokenize it, or leave `text` out")
    return edited


def _is_allowed(vocabulary: Vocabulary, token: int) -> bool:
    return 0 <= token < vocabulary.size and bool(vocabulary.allowed[token])


def _masked_too(is_masked: Sequence[bool], free: Sequence[bool], strength: float, seed: int) -> list[bool]:
    """The masked positions and a fraction of the free ones."""
    candidates = [index for index, (one, other) in enumerate(zip(is_masked, free, strict=True)) if other and not one]
    order = Noise(seed).uniform(torch.zeros(1, dtype=torch.long), Purpose.ORDER, len(is_masked))[0]
    ranked = sorted(candidates, key=lambda index: float(order[index]))
    chosen = {*ranked[: max(1, round(strength * len(candidates)))]} if candidates else set()
    return [one or index in chosen for index, one in enumerate(is_masked)]


def positions_in(text: EditedText, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which of a text's own tokens have characters in these spans; whole words, if the vocabulary knows them."""
    wanted = {
        position
        for word in text.words
        if any(start < text.spans[position][1] and text.spans[position][0] < end  # type: ignore[index]
               for position in word for start, end in spans)
        for position in word
    }  # fmt: skip
    return [position in wanted for position in text.own]


# ---- states ---------------------------------------------------------------------------------------------------------


def trace(sequence: Traceable, num_alternatives: int = 0) -> Iterator[TracedState]:
    """Yields every state of a sequence, from noise to text."""
    recorder, vocabulary = _Recorder(sequence.run.network), sequence.engine.vocabulary
    own = torch.tensor(sequence.text.own, dtype=torch.long)
    editable = sequence.run.canvas.editable[0].cpu()[own]
    mask_id, before = vocabulary.mask_id, [-1] * len(own)
    traced = [TracedToken(None, None, not bool(flag)) for flag in editable]
    run = sequence.run
    network = recorder if run.context.word_vectors is None else run.network  # word vectors have no probabilities
    for step, state in enumerate(sample(run.sampler, run.context, network, run.canvas, sequence.seed)):
        ids = state.tokens[0].cpu()[: len(sequence.text.tokens)]
        now: list[int] = ids[own].tolist()
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            is_given = traced[index].is_given
            if old == new:
                continue
            if new == mask_id:
                traced[index] = TracedToken(None, None, is_given)
            elif is_given or step == 0:
                traced[index] = TracedToken(new, vocabulary.spelled([new])[0], is_given)
            else:
                probability, best = recorder.at(int(own[index]), new, num_alternatives)
                spelled = vocabulary.spelled([new, *(token for token, _ in best)])
                alternatives = tuple(TokenProbability(*one) for one in zip(spelled[1:], *_columns(best), strict=True))
                traced[index] = TracedToken(
                    new, spelled[0], is_given, step=step, probability=probability, alternatives=alternatives
                )
        before = now
        yield TracedState(sequence, step, float(state.time[0]), int(state.calls[0]), ids, tuple(traced), state.done)


def trace_task(
    engine: Engine, task: Task, request: SamplingRequest, number: int = 0, num_alternatives: int = 0
) -> Iterator[TracedState]:
    """Yields every state of the number-th text of a task, starting over from noise if it has a forbidden word."""
    for attempt in range(ATTEMPTS):
        for state in trace(traceable(engine, task, request, number, attempt), num_alternatives):
            yield replace(state, attempt=attempt)
        if state.is_final:
            return
    raise task.not_found(ATTEMPTS)


class _Recorder:
    """A network that remembers its last output at each position of its one sequence."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._answers: dict[int, Tensor] = {}

    def __call__(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        answer: Tensor = self._network(tokens, attention_mask, t, targets)
        self._answers |= dict(zip(targets[0].nonzero()[:, 0].tolist(), answer.unbind(), strict=True))
        return answer

    def read(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Like `CausalNetwork.read`."""
        answer, cache = self._network.read(tokens, cache)
        self._answers[cache.num_read] = answer[0]
        return answer, cache

    def at(self, position: int, token: int, number: int) -> tuple[float | None, list[tuple[int, float]]]:
        """The probability of a token in the last output at a position, and the most probable tokens."""
        answer = self._answers.get(position)
        if answer is None:
            return None, []
        probability = float(answer[token].double().exp())
        if not number:
            return probability, []
        best = answer.topk(min(number, len(answer)))
        return probability, list(zip(best.indices.tolist(), best.values.double().exp().tolist(), strict=True))


def aligned(pieces: Sequence[str | None], text: str) -> list[tuple[int, int]]:
    """The span of each token in the decoded text, in order; None stands for `[MASK]`.

    A token that cannot be found, such as a part of a character, has an empty span.
    """
    plain, at, spans = "".join(map(_plain, text)), 0, []
    for piece in pieces:
        wanted = MASK if piece is None else piece.removeprefix("##")
        start = (text if piece is None else plain).find(
            wanted if piece is None else "".join(map(_plain, wanted)), at, at + len(wanted) + _SLACK
        )
        found = (start, start + len(wanted)) if start >= 0 and wanted else (at, at)
        spans.append(found)
        at = found[1]
    return spans


_SLACK = 8
"""The most characters, such as white space, between two tokens."""


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [token for token, _ in pairs], [probability for _, probability in pairs]


def _plain(character: str) -> str:
    """A character as an uncased vocabulary may spell it: lower-case and without accents; always one character."""
    lowered = unicodedata.normalize("NFD", character.lower())[:1]
    return lowered or character
