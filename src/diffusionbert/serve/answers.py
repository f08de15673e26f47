"""How requests are answered: turns typed requests into work on a model, and its results into typed responses.

This module knows the model but not HTTP. Functions named `…_work` return a piece of work, usually one text, as a
function that may run alongside others; it calls `emit` with every state if states were requested.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch

from diffusionbert.data.text import BLANK, MASK, EditedText, blank_marks
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.inference import generate, infill, score, trace
from diffusionbert.inference.choose import choose
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.tasks import Task, TokenProbability
from diffusionbert.inference.trace import TracedState
from diffusionbert.likelihood.orders import order_named
from diffusionbert.likelihood.sentence import SentenceBudget
from diffusionbert.model import TOP_P, sampling_request
from diffusionbert.samplers.config import SamplingRequest
from diffusionbert.serve import schema
from diffusionbert.serve.scheduler import pause

Emit = Callable[[TracedState], None]


def sampling_of(request: schema.Sampling) -> SamplingRequest:
    """The sampler of a request; temperature 0 takes the most probable token."""
    top_p = TOP_P if request.top_p is None else request.top_p
    temperature, top_k = request.temperature, request.top_k
    if temperature == 0:
        temperature, top_k = 1.0, 1
    return sampling_request(request.sampler, request.steps, temperature, top_k, top_p, None)


# ---- states ---------------------------------------------------------------------------------------------------------


def state_of(state: TracedState) -> schema.State:
    """A state in its JSON form."""
    tokens = [
        schema.StepToken(
            id=one.id,
            text=one.text,
            start=one.span[0],
            end=one.span[1],
            given=one.is_given,
            step=one.step,
            probability=one.probability,
            alternatives=list(map(alternative_of, one.alternatives)),
        )
        for one in state.tokens
    ]
    return schema.State(step=state.step, time=state.time, calls=state.calls, text=state.text, tokens=tokens)


def alternative_of(one: TokenProbability) -> schema.Alternative:
    """A token and its probability in their JSON form."""
    return schema.Alternative(id=one.id, text=one.token, probability=one.probability)


def _last(states: Iterator[TracedState], emit: Emit | None, until: Callable[[TracedState], bool]) -> TracedState:
    """The last state, or the first for which `until` is true."""
    state = next(states)
    while True:
        if emit is not None:
            emit(state)
        if until(state):
            return state
        pause()
        following = next(states, None)
        if following is None:
            return state
        state = following


# ---- completions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One text of a completion: its task, its number among the task's texts, and its stop strings."""

    task: Task
    number: int
    stop: tuple[str, ...]
    echo: bool = False
    logprobs: int | None = None


def prompts_of(request: schema.CompletionRequest, seed: int) -> list[Prompt]:
    """The texts of a completion, `n` for each prompt."""
    return [
        Prompt(
            Task(
                request.n,
                None,
                prompt,
                include=tuple(request.include),
                forbid=tuple(request.forbid),
                seed=seed,
                max_new_tokens=request.max_tokens,
                capitalize=request.capitalize,
                suffix=request.suffix or "",
            ),
            number,
            tuple(request.stop),
            request.echo,
            request.logprobs,
        )
        for prompt in request.prompt
        for number in range(request.n)
    ]


def completion_work(
    engine: Engine, prompt: Prompt, request: SamplingRequest, alternatives: int, emit: Emit | None
) -> Callable[[], TracedState]:
    """Generates one text; ends early once a stop string is certain."""

    def work() -> TracedState:
        deltas = Deltas(engine.vocabulary, prompt)
        number = max(alternatives, prompt.logprobs or 0)
        states = trace.trace_task(engine, prompt.task, request, prompt.number, number)
        can_stop = bool(prompt.stop) and prompt.logprobs is None
        return _last(states, emit, lambda state: can_stop and deltas.update(state).is_stopped)

    return work


class Deltas:
    """The final part of a text as it forms: every state may add characters, which concatenate to the whole text.

    A token is final if it and all tokens before it are unmasked, and the sampler never masks again. Its characters are
    final if the next tokens cannot change them: white space around punctuation, capitals and quotation marks must wait.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Prompt) -> None:
        self._vocabulary, self._prompt = vocabulary, prompt
        self._before: EditedText | None = None
        self._num_after = 0  # the tokens of the suffix
        self._num_final = -1
        self._hold = max(map(len, prompt.stop), default=1) - 1
        self.text = ""
        """The final characters so far."""
        self.is_stopped = False
        """Whether a stop string was found."""

    def update(self, state: TracedState) -> Deltas:
        """Processes a new state."""
        if self.is_stopped:
            return self
        if state.is_final:
            self._take(completed(self._prompt, state.text), hold=0)
        elif state.sequence.keeps_tokens and not self._prompt.task.forbid:
            stable = self._stable(state)
            if stable is not None:
                self._take(stable, hold=self._hold)
        return self

    def _take(self, text: str, hold: int) -> None:
        found = [index for index in (text.find(stop) for stop in self._prompt.stop) if index >= 0]
        if found:
            self.text, self.is_stopped = text[: min(found)], True
        else:
            self.text = text[: max(len(self.text), len(text) - hold)]

    def _stable(self, state: TracedState) -> str | None:
        """The characters of the final tokens that no later token can change; None if no token is new."""
        task = self._prompt.task
        if self._before is None:
            self._before = EditedText.of(self._vocabulary, task.prompt)
            around = EditedText.around(self._vocabulary, task.prompt, task.suffix) if task.suffix else self._before
            self._num_after = len(around.own) - len(self._before.own)
        own = [one.id for one in state.traced[len(self._before.own) : len(state.traced) - self._num_after]]
        number = next((index for index, token in enumerate(own) if token is None), len(own))
        if number == self._num_final or task.prompt.rstrip().endswith('"'):
            return None
        self._num_final = number
        texts = [self._rendered([token for token in own[:size] if token is not None])
                 for size in range(max(0, number - 2), number + 1)]  # fmt: skip
        return _common(texts).partition('"')[0].rstrip()  # how quotation marks attach depends on the rest

    def _rendered(self, tokens: Sequence[int]) -> str:
        assert self._before is not None
        longer, new = self._before.continued(len(tokens)), iter(tokens)
        editable = [
            self._before.end <= position < self._before.end + len(tokens) for position in range(len(longer.tokens))
        ]
        ids = [next(new) if is_new else token for token, is_new in zip(longer.tokens, editable, strict=True)]
        text = longer.render(ids, editable, capitalize=self._prompt.task.capitalize)
        return text[len(self._prompt.task.prompt) :]


def _common(texts: Sequence[str]) -> str:
    """The longest common prefix."""
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in columns)


def completed(prompt: Prompt, text: str) -> str:
    """The generated part of a text, without prompt and suffix."""
    return text[len(prompt.task.prompt) : len(text) - len(prompt.task.suffix)]


def choice_of(engine: Engine, index: int, prompt: Prompt, state: TracedState) -> schema.Choice:
    """The final choice for one text."""
    deltas = Deltas(engine.vocabulary, prompt).update(state)
    text = (prompt.task.prompt if prompt.echo else "") + deltas.text
    return schema.Choice(
        index=index,
        text=text,
        finish_reason="stop" if deltas.is_stopped else "length",
        logprobs=None if prompt.logprobs is None else logprobs_of(prompt, state, deltas.text),
    )


def logprobs_of(prompt: Prompt, state: TracedState, generated: str) -> schema.Logprobs:
    """log f of each token at the step that unmasked it; the token texts concatenate to the whole text."""
    start = len(prompt.task.prompt)
    end = start + len(generated)
    shown = [
        one
        for one in state.tokens
        if (prompt.echo or one.span[0] >= start) and one.span[0] < end and one.id is not None
    ]
    first = 0 if prompt.echo else start
    edges = [first, *(one.span[0] for one in shown[1:]), end]
    edges = [max(first, min(edge, end)) for edge in edges]
    # A token includes the white space before it, as in vocabularies whose tokens contain it.
    for number in range(1, len(edges) - 1):
        while edges[number] > edges[number - 1] and state.text[edges[number] - 1].isspace():
            edges[number] -= 1
    texts = [state.text[one:other] for one, other in pairwise(edges)][: len(shown)]
    return schema.Logprobs(
        tokens=texts,
        token_logprobs=[None if one.probability is None else _log(one.probability) for one in shown],
        top_logprobs=[_top_logprobs(text, one, prompt.logprobs or 0) for text, one in zip(texts, shown, strict=True)],
        text_offset=[edge - first for edge in edges[: len(shown)]],
    )


def _top_logprobs(text: str, token: trace.TracedToken, number: int) -> dict[str, float] | None:
    """log f of the most probable tokens, each spelled as it would be in place of the token, whose text is given."""
    found = {}
    for one in token.alternatives[:number]:
        begins_word = not one.token.startswith("##") and one.token[:1].isalnum() and token.span[0] > 0
        spelled = f" {one.token}" if begins_word else one.token.removeprefix("##")
        found[text if one.id == token.id else spelled] = _log(one.probability)
    return found or None


def _log(probability: float) -> float:
    return math.log(probability) if probability else -9999.0


def usage_of(engine: Engine, prompts: Sequence[Prompt]) -> schema.Usage:
    """The token counts of a request; each prompt counts once."""
    given = {(prompt.task.prompt, prompt.task.suffix) for prompt in prompts}
    before = sum(len(tokens) for pair in given for tokens in engine.vocabulary.own(list(filter(None, pair))))
    new = sum(prompt.task.max_new_tokens or 0 for prompt in prompts)
    return schema.Usage(prompt_tokens=before, completion_tokens=new, total_tokens=before + new)


# ---- canvas and rewriting -------------------------------------------------------------------------------------------


def canvas_work(
    engine: Engine, request: schema.CanvasRequest, seed: int, emit: Emit | None
) -> Callable[[], TracedState]:
    """Generates the masked positions of a canvas."""

    def work() -> TracedState:
        if wrong := [one for one in request.tokens if one.id is None and one.state != "masked"]:
            raise ValueError(f"a token without an `id` must be masked, got the state {wrong[0].state!r}")
        sequence = trace.traceable_canvas(
            engine,
            [None if one.state == "masked" else one.id for one in request.tokens],
            sampling_of(request),
            text=request.text,
            free=[one.state == "free" for one in request.tokens],
            strength=request.strength,
            seed=seed,
            forbid=tuple(request.forbid),
            capitalize=request.capitalize,
        )
        return _last(trace.trace(sequence, request.alternatives), emit, lambda state: False)

    return work


def rewrite_work(
    engine: Engine, request: schema.RewriteRequest, seed: int, number: int, emit: Emit | None
) -> Callable[[], tuple[str, list[str], TracedState | None]]:
    """Rewrites a text once; returns the text, the parts that the vocabulary does not know, and the last state."""
    task = Task(
        request.n,
        rewrite=request.text,
        strength=request.strength,
        forbid=tuple(request.forbid),
        seed=seed,
        capitalize=request.capitalize,
    )

    def work() -> tuple[str, list[str], TracedState | None]:
        sampling = sampling_of(request)
        edited = EditedText.of(engine.vocabulary, request.text)
        if request.spans is not None:
            chosen = trace.positions_in(edited, request.spans)
            if not any(chosen):
                raise ValueError(f"no word is in `spans` {request.spans}; give [[start, end]] in characters")
            given = [edited.tokens[position] for position in edited.own]
            states = trace.trace(
                trace.traceable_canvas(
                    engine,
                    [None if is_masked else token for token, is_masked in zip(given, chosen, strict=True)],
                    sampling,
                    text=request.text,
                    seed=seed,
                    number=number,
                    forbid=tuple(request.forbid),
                    capitalize=request.capitalize,
                ),
                request.alternatives,
            )
        elif len(edited.tokens) <= engine.max_positions:
            states = trace.trace_task(engine, task, sampling, number, request.alternatives)
        else:  # rewritten in windows, which have no step map of the whole text
            if request.diffusing:
                engine.require_positions(len(edited.tokens), "with `diffusing`, the text has", "shorten it")
            return generate.generate_one(engine, task, sampling, number).text, list(edited.unknown), None
        state = _last(states, emit, lambda state: False)
        return state.text, list(edited.unknown), state

    return work


# ---- tokens ---------------------------------------------------------------------------------------------------------


def tokenized(engine: Engine, text: str) -> list[schema.Token]:
    """The tokens of a text, where `[MASK]` is a masked token."""
    if BLANK in text:
        raise ValueError(f"{BLANK} has no fixed number of tokens; use {MASK} for each of them")
    vocabulary, at, found = engine.vocabulary, 0, list[schema.Token]()
    for match in [*blank_marks(vocabulary).finditer(text), None]:
        end = len(text) if match is None else match.start()
        found += _part(vocabulary, text, at, end)
        if match is not None:
            found.append(schema.Token(id=None, text=None, start=match.start(), end=match.end()))
            at = match.end()
    return found


def _part(vocabulary: Vocabulary, text: str, start: int, end: int) -> list[schema.Token]:
    """The tokens of a part of a text; right after a mask, the part may continue a word."""
    part = text[start:end]
    if start and not part[:1].isspace():
        ids = vocabulary.encode_after(part) if part else []
        pieces = vocabulary.spelled(ids)
        spans = trace.aligned(pieces, part)
    else:
        edited = EditedText.of(vocabulary, part)
        ids = [edited.tokens[position] for position in edited.own]
        pieces, spans = vocabulary.spelled(ids), [span for span in edited.spans if span is not None]
    return [
        schema.Token(id=token, text=piece, start=start + span[0], end=start + span[1])
        for token, piece, span in zip(ids, pieces, spans, strict=True)
    ]


# ---- fill, score, choose, embed -------------------------------------------------------------------------------------


def fill_work(engine: Engine, request: schema.FillRequest, index: int, text: str) -> Callable[[], schema.Filled]:
    """Fills the blanks of one text."""

    def work() -> schema.Filled:
        fillings = infill.fill(
            engine,
            text,
            request.num_alternatives,
            max_blank_tokens=request.max_blank_tokens,
            forbid=tuple(request.forbid),
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
            capitalize=request.capitalize,
        )
        number = request.probabilities
        probabilities = infill.token_probabilities(engine, text, number) if number else None
        return schema.Filled(
            index=index,
            fillings=[schema.Filling(**vars(one) | {"fillings": list(one.fillings)}) for one in fillings],
            probabilities=None
            if probabilities is None
            else [list(map(alternative_of, some)) for some in probabilities],
        )

    return work


def score_work(engine: Engine, request: schema.ScoreRequest, texts: list[str]) -> Callable[[], list[schema.TextScore]]:
    """Scores texts, which share their noise if they are compared."""

    def work() -> list[schema.TextScore]:
        settings = score.ScoreSettings(
            SentenceBudget(request.precision, request.max_draws, request.seed),
            request.steps,
            None if request.order is None else order_named(request.order),
            request.paired,
            tokens=request.tokens,
        )
        return [_score_of(engine, one) for one in score.score(engine, texts, settings) if one is not None]

    return work


def _score_of(engine: Engine, found: Any) -> schema.TextScore:
    plain = found.to_json()
    tokens = None
    if found.tokens is not None:
        _, places = engine.vocabulary.encode_spans(found.text)
        spans = [span for span in places if span is not None]
        tokens = [
            {"text": text, "nats": nats if math.isfinite(nats) else None, "start": start, "end": end}
            for (text, nats), (start, end) in zip(found.tokens, spans, strict=True)
        ]
    finite = {name: _finite(value) for name, value in plain.items()}
    return schema.TextScore.model_validate(finite | {"tokens": tokens, "index": 0})


def _finite(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_finite(one) for one in value]
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def choose_work(engine: Engine, request: schema.ChooseRequest, model: str) -> Callable[[], schema.ChooseResponse]:
    """Computes the probabilities of options."""

    def work() -> schema.ChooseResponse:
        [choice] = choose(
            engine, [request.text], [request.options], order=order_named(request.order), prior=request.prior
        )
        plain = choice.to_json()
        options = [{name: _finite(value) for name, value in one.items()} for one in plain["options"]]
        return schema.ChooseResponse.model_validate(plain | {"model": model, "best": choice.best, "options": options})

    return work


def embedding_work(engine: Engine, request: schema.EmbeddingRequest, text: str) -> Callable[[], list[float] | str]:
    """Embeds one text."""

    def work() -> list[float] | str:
        vector = score.embed(engine, [text])[0].cpu().to(torch.float32)
        if request.encoding_format == "float":
            return [float(number) for number in vector.tolist()]
        return base64.b64encode(vector.numpy().tobytes()).decode()

    return work
