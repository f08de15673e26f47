"""Generation: turns prompts, sources and texts to rewrite into canvases, samples them, and decodes the tokens.

Several tasks can share forward passes. Each is a sampler state (`samplers.base`) with its own noise and constraints, so
its texts do not depend on the other tasks.

A text longer than the model can read is rewritten in windows, from left to right. Each window generates a stretch of
half its length, with equal context on both sides (at the ends of the text, more on the other side). In it, earlier
stretches are already generated, and the positions that later ones will generate are masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from diffusionbert.data.canvas import batch_of, drawn_lengths
from diffusionbert.data.text import MASK, EditedText, require_no_blanks
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.inference.constraints import Constrained, place_words, unwrapped
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.tasks import GeneratedText, StreamState, Task
from diffusionbert.networks.base import Network
from diffusionbert.parallel import current
from diffusionbert.reporting import logger, report
from diffusionbert.samplers.base import Query, Sampler, State, concatenate_queries, sample, split_answer
from diffusionbert.samplers.blocks import room_before
from diffusionbert.samplers.config import SamplingRequest

FALLBACK_LENGTH = 24
"""The length of a text if the model has no length histogram."""
ATTEMPTS = 20
"""Attempts to generate a text without forbidden words; the first nearly always succeeds."""
USUAL_BLOCK = 32
"""The block size suggested in messages."""


def generate(engine: Engine, task: Task, request: SamplingRequest) -> Iterator[GeneratedText]:
    """Yields the texts of a task, batch by batch; each depends on the seed and its number, not on the batch.

    The processes of a distributed launch share the batches.
    """
    for [texts] in current().share(TaskPlan(engine, task, request).parts(), lambda part: _generate([part])):
        yield from texts


def generate_one(engine: Engine, task: Task, request: SamplingRequest, number: int) -> GeneratedText:
    """The number-th text of a task alone: the same that `generate` yields."""
    [[found]] = _generate([_Part(TaskPlan(engine, task, request), [torch.tensor([number])])])
    return found


def generate_together(engine: Engine, tasks: Sequence[Task], request: SamplingRequest) -> list[list[GeneratedText]]:
    """The texts of several tasks, generated with shared forward passes: the same texts that `generate` yields."""
    plans = [TaskPlan(engine, task, request) for task in tasks]
    found: list[list[GeneratedText]] = [[] for _ in tasks]
    parts = [(number, part) for number, plan in enumerate(plans) for part in plan.parts()]
    batches = list(_batches(engine, parts))
    generated = current().share(batches, lambda batch: _generate([part for _, part in batch]))
    for batch, several in zip(batches, generated, strict=True):
        for (number, _), texts in zip(batch, several, strict=True):
            found[number] += texts
    return found


def stream(engine: Engine, task: Task, request: SamplingRequest) -> Iterator[StreamState]:
    """Yields every state of a task's first text, from noise to text; starts over if it has a forbidden word."""
    plan = TaskPlan(engine, replace(task, number=1), request)
    if len(plan.windows) > 1:
        engine.require_positions(len(plan.text.tokens), f"{plan.text.text[:40]!r} has", "shorten it")
    canvas = plan.canvas.to(engine.device)
    for attempt in range(ATTEMPTS):
        seed = attempt_seed(task.seed, attempt)
        run = plan.run(canvas, seed)
        for state in sample(run.sampler, run.context, run.network, run.canvas, seed):
            shown = plan.stream_state(state)
            yield shown
        if not task.has_forbidden(shown.text):
            return
    raise task.not_found(ATTEMPTS)


def require_supported(engine: Engine, task: Task, request: SamplingRequest) -> None:
    """Raises ValueError if the model cannot do a task, before anything is generated."""
    make_canvas(engine, replace(task, number=1), request)
    engine.sampler(request, continues=task.continues)


def make_canvas(engine: Engine, task: Task, request: SamplingRequest) -> Batch:
    """The sequences of a task, with their editable positions."""
    return TaskPlan(engine, task, request).canvas


def constrained_network(engine: Engine, task: Task, **rules: Any) -> Any:
    """The network wrapped in the constraints of a task and in further rules for `Constrained`."""
    network: Any = engine.sampling_network
    if engine.masked_network is None:
        if task.include or task.forbid:
            raise ValueError("`include` and `forbid` need a masked language model, and this is not one; leave them out")
        return network
    if rules:
        network = _constrained(engine, network, **rules)
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
    return Constrained(network, continuation=engine.vocabulary.continuation.to(engine.device), **rules)


# ---- a task on a model ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class _Window:
    """The positions of a sequence that the model reads at once, and which of them are generated."""

    positions: Tensor
    """The positions, [W], including special tokens."""
    is_generated: Tensor
    """Which of them are generated, [W]."""

    @property
    def generated(self) -> Tensor:
        """The generated positions."""
        return self.positions[self.is_generated]

    def of(self, canvas: Batch, tokens: Tensor, mask_id: int | None) -> Batch:
        """This window of sequences generated so far; editable positions from here on are masked, given a `mask_id`."""
        positions, is_generated = (values.to(tokens.device) for values in (self.positions, self.is_generated))
        editable = canvas.editable[:, positions]
        shown = tokens[:, positions]
        if mask_id is not None:
            shown = shown.masked_fill(editable & (positions >= self.generated[0]), mask_id)
        return replace(
            canvas, tokens=shown, attention_mask=canvas.attention_mask[:, positions], editable=editable & is_generated
        )


@final
@dataclass(frozen=True, eq=False)
class SequenceRun:
    """Everything needed to sample some sequences of a task."""

    sampler: Sampler
    context: Any
    network: Any
    canvas: Batch


@final
class TaskPlan:
    """A task on a model; its text is encoded and checked once, on construction."""

    def __init__(self, engine: Engine, task: Task, request: SamplingRequest) -> None:
        if (task.source is not None) != engine.paired:
            raise ValueError(
                "this model was trained on pairs of source and target and generates from a source only; give `source`"
                if engine.paired
                else "this model was not trained on pairs and takes no `source`; leave it out, or train on .tsv pairs"
            )
        given = task.prompt if task.rewrite is None else task.rewrite
        require_no_blanks(engine.vocabulary, given, "a prompt" if task.rewrite is None else "a text to rewrite")
        self.engine, self.task, self.request = engine, task, request
        require_no_blanks(engine.vocabulary, task.suffix, "a suffix")
        if task.suffix and not engine.config.objective.generates_on_masks:
            raise ValueError(f"this model does not generate from {MASK}, so it takes no `suffix`; leave it out")
        self.text = (
            EditedText.around(engine.vocabulary, given, task.suffix)
            if task.suffix
            else EditedText.of(engine.vocabulary, given, task.source)
        )
        self.canvas = self._blank() if task.rewrite is None else self._rewriting()

    def _rewriting(self) -> Batch:
        task, text = self.task, self.text
        canvas = text.rewriting(task.strength, task.number, task.seed, task.forbid)
        if text.unknown:
            shown = ", ".join(map(repr, dict.fromkeys(text.unknown)))[:40]
            logger.warning("kept unchanged, because the vocabulary does not know it: %s in %r", shown, text.text[:40])
        return canvas

    def _blank(self) -> Batch:
        """One sequence per text, masked after the prompt."""
        given, around = len(self.text.own), len(self.text.tokens) - len(self.text.own)
        if self.request.block is None and given and around + given + 1 > self.engine.max_positions:
            raise ValueError(
                f"the prompt {self.task.prompt[:40]!r} has {given} tokens, which leaves nothing to generate: this "
                f"model reads at most {self.engine.max_length}; shorten it{self._longer()}"
            )
        if isinstance(self.task.length, tuple):  # every length that may be drawn must be possible
            self._require_space(around + self.task.length[1])
        lengths = _lengths(self.engine, self.task, given, None if self.request.block else self.engine.max_length)
        if self.task.source is not None and self.task.length is None and self.task.max_new_tokens is None:
            lengths = [min(length, max(given + 1, self.engine.max_positions - around)) for length in lengths]
        self._require_space(around + max(lengths))
        _require_length(min(lengths), given, self.task.prompt)
        sequences = {length: self.text.continued(length - given).tokens for length in set(lengths)}
        canvas = batch_of(self.engine.vocabulary, [sequences[length] for length in lengths])
        return replace(canvas, editable=canvas.attention_mask & (canvas.tokens == self.engine.vocabulary.mask_id))

    def _require_space(self, positions: int) -> None:
        """Raises ValueError if sequences of this length cannot be generated, before they take memory."""
        if self.request.block is None:
            what = "the text" if self.task.source is None else "source and text together"
            self.engine.require_positions(positions, f"{what} would have", f"ask for fewer{self._longer()}")
        elif self.task.include:
            self.engine.require_positions(positions, "with words to include, the text would have", "ask for fewer")

    def _longer(self) -> str:
        """How to get a longer text, if there is a way."""
        if self.task.include or not self.engine.config.objective.generates_on_masks:
            return ""
        block = min(USUAL_BLOCK, self.engine.max_positions - 2)
        return f", or use `block={block}`"

    @cached_property
    def windows(self) -> list[_Window | None]:
        """The windows of a text to rewrite, from left to right; a single None if the model can read the whole text."""
        own, around = self.text.own, len(self.text.tokens) - len(self.text.own)
        room = self.engine.max_positions - around
        if self.task.rewrite is None or len(own) <= room:
            return [None]
        stretch, windows = max(1, room // 2), list[_Window | None]()
        for first in range(0, len(own), stretch):
            start = min(max(0, first - (room - stretch) // 2), len(own) - room)
            special = [position for position, span in enumerate(self.text.spans) if span is None]
            shown = torch.tensor(sorted([*special, *own[start : start + room]]))
            last = own[min(first + stretch, len(own)) - 1]
            windows.append(_Window(shown, (shown >= own[first]) & (shown <= last)))
        return windows

    @cached_property
    def _networks(self) -> list[Any]:
        """The network with the task's constraints in each window."""
        return [
            self._network
            if window is None
            else constrained_network(self.engine, self.task, word_starts=self.text.word_starts[:, window.positions])
            for window in self.windows
        ]

    @cached_property
    def _network(self) -> Any:
        """The network with the task's constraints, so that no generated token continues a word of the given text."""
        if self.engine.masked_network is None:
            return constrained_network(self.engine, self.task)
        if self.task.rewrite is not None:
            return constrained_network(self.engine, self.task, word_starts=self.text.word_starts)
        if not self.text.own:
            return constrained_network(self.engine, self.task)
        if self.canvas.tokens.shape[1] <= self.engine.max_positions:
            starts = torch.arange(self.canvas.tokens.shape[1]) == self.text.end
            return constrained_network(self.engine, self.task, word_starts=starts)
        # In the windows of a long text, the end of the prompt has no fixed position. The first block sees all that
        # comes before it, or as much of its end as a window has.
        before = self.text.tokens[: self.text.end]
        seen = max(1, room_before(self.request.block or 0, self.engine.max_positions))
        end_of_prompt = before if len(before) <= 1 + seen else before[-seen:]
        return constrained_network(self.engine, self.task, included=[end_of_prompt])

    def parts(self) -> Iterator[_Part]:
        """The sequences of the task in batches, grouped by their number of masked positions."""
        counts = self.canvas.editable.sum(dim=1) if self.task.rewrite is not None else torch.zeros(self.task.number)
        at_once = self.engine.sequences_at_once(self.canvas.tokens.shape[1])
        for start in range(0, self.task.number, at_once):
            numbers = torch.arange(start, min(start + at_once, self.task.number))
            groups = [numbers[counts[numbers] == count] for count in sorted(set(counts[numbers].tolist()))]
            yield _Part(self, groups)

    def run(self, canvas: Batch, seed: int, number: int = 0, tokens: Tensor | None = None) -> SequenceRun:
        """Prepares sampling of sequences that have the same number of masked positions.

        Args:
            canvas: The sequences.
            seed: The seed of the noise.
            number: The index of the window.
            tokens: The tokens generated so far.
        """
        start_time = 1.0
        if self.task.rewrite is not None:  # time-conditioned networks start at the masked fraction
            start_time = int(canvas.editable.sum()) / (len(canvas.tokens) * len(self.text.own))
        network, window = self._networks[number], self.windows[number]
        if window is not None and tokens is not None:
            has_masks = self.engine.config.objective.generates_on_masks
            canvas = window.of(canvas, tokens, self.engine.vocabulary.mask_id if has_masks else None)
        if isinstance(network, Constrained) and (self.task.include or self.task.forbid):
            canvas = place_words(network, canvas, self.engine.vocabulary.mask_id, seed)
        sampler, context = self.engine.sampler(self.request, start_time, continues=self.task.continues)
        return SequenceRun(sampler, context, network, canvas)

    # ---- text -------------------------------------------------------------------------------------------------------

    def rendered(self, number: int, tokens: Sequence[int]) -> tuple[str, int]:
        """The text of a sequence and its number of tokens."""
        text, editable = self.canvas_text(number), self._editable[number]
        length = len(text.tokens)
        rendered = text.render(tokens[:length], editable[:length], capitalize=self.task.capitalize)
        return rendered, len(text.own)

    def canvas_text(self, number: int) -> EditedText:
        """The given text, with the generated positions of this sequence after a prompt."""
        if self.task.rewrite is not None:
            return self.text
        return self._continued[sum(self._editable[number])]

    @cached_property
    def _editable(self) -> list[list[bool]]:
        """The editable positions of each sequence."""
        editable: list[list[bool]] = self.canvas.editable.tolist()
        return editable

    @cached_property
    def _continued(self) -> dict[int, EditedText]:
        """The prompt followed by as many masked positions as each sequence has."""
        return {number: self.text.continued(number) for number in set(map(sum, self._editable))}

    def stream_state(self, state: State) -> StreamState:
        tokens, vocabulary = state.tokens[0].tolist(), self.engine.vocabulary
        own = [tokens[position] for position in self.canvas_text(0).own]
        pieces = zip(own, vocabulary.spelled(own), strict=True)
        shown = tuple(None if token == vocabulary.mask_id else piece for token, piece in pieces)
        text, _ = self.rendered(0, tokens)
        return StreamState(float(state.time[0]), int(state.calls[0]), shown, text, tuple(own))


@final
@dataclass(frozen=True, eq=False)
class _Part:
    """Some sequences of a task, by number, grouped by their number of masked positions."""

    plan: TaskPlan
    groups: list[Tensor]

    @property
    def size(self) -> int:
        """The number of sequences."""
        return sum(map(len, self.groups))


def _batches(engine: Engine, parts: Iterable[tuple[int, _Part]]) -> Iterator[list[tuple[int, _Part]]]:
    """Batches of parts of several tasks, each with at most as many sequences as are generated at once."""
    batch: list[tuple[int, _Part]] = []
    for number, part in parts:
        together = [*batch, (number, part)]
        longest = max(one.plan.canvas.tokens.shape[1] for _, one in together)
        if batch and sum(one.size for _, one in together) > engine.sequences_at_once(longest):
            yield batch
            together = [(number, part)]
        batch = together
    if batch:
        yield batch


def attempt_seed(seed: int, attempt: int) -> int:
    """The seed of a further attempt at a text that contained a forbidden word."""
    return seed + (attempt << 36)


def _generate(parts: Sequence[_Part]) -> list[list[GeneratedText]]:
    """Generates all sequences of some parts, and regenerates those whose text still contains a forbidden word.

    Forbidden words are excluded as token sequences, but at a high temperature a word may be spelled across punctuation
    (`& ##a`: `&a`).
    """
    found: list[dict[int, GeneratedText]] = [{} for _ in parts]
    for attempt in range(ATTEMPTS):
        missing = [
            (index, torch.tensor([number for number in group.tolist() if number not in found[index]]))
            for index, part in enumerate(parts)
            for group in part.groups
        ]
        missing = [(index, numbers) for index, numbers in missing if len(numbers)]
        if not missing:
            return [[texts[number] for number in sorted(texts)] for texts in found]
        plans = [(parts[index].plan, attempt_seed(parts[index].plan.task.seed, attempt)) for index, _ in missing]
        canvases = [
            plan.canvas.select(numbers).to(plan.engine.device)
            for (plan, _), (_, numbers) in zip(plans, missing, strict=True)
        ]
        ends = _sampled(plans, canvases)
        for (index, numbers), (plan, _), (all_tokens, all_calls) in zip(missing, plans, ends, strict=True):
            task, kept = plan.task, plan.text.unknown if plan.task.rewrite is not None else ()
            for number, tokens, calls in zip(numbers.tolist(), all_tokens.tolist(), all_calls.tolist(), strict=True):
                text, length = plan.rendered(number, tokens)
                if not task.has_forbidden(text):
                    steps = plan.request.config.steps
                    found[index][number] = GeneratedText(text, length, steps, int(calls), task.seed, kept)
    raise parts[0].plan.task.not_found(ATTEMPTS)


def _sampled(plans: Sequence[tuple[TaskPlan, int]], canvases: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
    """Samples sequences of several plans, window by window; returns their tokens and network calls."""
    found = [(canvas.tokens, torch.zeros_like(canvas.example)) for canvas in canvases]
    for number in range(max(len(plan.windows) for plan, _ in plans)):
        active = [index for index, (plan, _) in enumerate(plans) if number < len(plan.windows)]
        # As with blocks, each window has its own seed, and the first window keeps the given one.
        seeds = [plans[index][1] + (number << 32) for index in active]
        runs = [
            plans[index][0].run(canvases[index], seed, number, found[index][0])
            for index, seed in zip(active, seeds, strict=True)
        ]
        for index, state in zip(active, _last_states(runs, seeds), strict=True):
            window, (tokens, calls) = plans[index][0].windows[number], found[index]
            if window is None:
                found[index] = state.tokens, state.calls
                continue
            tokens = tokens.clone()
            tokens[:, window.generated] = state.tokens[:, window.is_generated.nonzero()[:, 0]]
            found[index] = tokens, calls + state.calls
    return found


def _last_states(runs: Sequence[SequenceRun], seeds: Sequence[int]) -> list[State]:
    """Samples several runs of one model at once: one forward pass per step for all their queries."""
    with torch.no_grad():
        states = [run.sampler.start(run.context, run.canvas, seed) for run, seed in zip(runs, seeds, strict=True)]
        sizes = [int(run.canvas.editable.sum()) for run in runs]
        total = sum(sizes)

        def done() -> int:
            left = sum(size * float(state.time.mean()) for size, state in zip(sizes, states, strict=True))
            return min(total - round(left), total - 1)

        while active := [number for number, state in enumerate(states) if not state.done]:
            report("generating tokens", done, total)
            queries = {number: runs[number].sampler.query(states[number]) for number in active}
            shared = {number: query for number, query in queries.items() if isinstance(query, Query)}
            answers: dict[int, Any] = dict(_shared_answers(runs, shared)) if len(shared) > 1 else {}
            for number in active:
                query = queries[number]
                if query is not None and number not in answers:
                    answers[number] = query.run(runs[number].network)
                states[number] = runs[number].sampler.update(states[number], answers.get(number))
        report("generating tokens", total, total)
    return states


def _shared_answers(runs: Sequence[SequenceRun], queries: dict[int, Query]) -> Iterator[tuple[int, Tensor]]:
    """Answers several queries with one forward pass, each under the constraints of its own run."""
    networks = {number: runs[number].network for number in queries}
    [network] = {unwrapped(one)[0] for one in networks.values()}
    answer = concatenate_queries(list(queries.values())).run(network)
    for (number, query), part in zip(queries.items(), split_answer(answer, list(queries.values())), strict=True):
        own = networks[number]
        if isinstance(own, Constrained) and query.is_in_order:
            part = own.constrain(query.tokens, query.targets, part)
        elif isinstance(own, Constrained):
            once = part.new_empty(int(query.targets.sum()), part.shape[1]).index_copy(0, query.number, part)
            part = own.constrain(query.tokens, query.targets, once).index_select(0, query.number)
        yield number, part


# ---- lengths --------------------------------------------------------------------------------------------------------


def _require_length(shortest: int, given: int, prompt: str) -> None:
    """Raises ValueError if a length leaves nothing to generate."""
    if shortest > given:
        return
    if not given:
        raise ValueError(f"`length` must be >= 1 token, got {shortest}")
    raise ValueError(
        f"`length` must be >= {given + 1} with a prompt of {given} tokens ({prompt[:40]!r}), got {shortest}; raise it, "
        "or shorten the prompt"
    )


def _lengths(engine: Engine, task: Task, given: int, most: int | None) -> list[int]:
    """The length of each text, including the prompt; `most` limits lengths that were not requested."""
    if task.max_new_tokens is not None:
        return [given + int(task.max_new_tokens)] * task.number
    histogram = engine.lengths_after(task.source)
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
        usual = max(FALLBACK_LENGTH, given + FALLBACK_LENGTH // 2)
        return [usual if most is None else min(usual, most)] * task.number
    return drawn_lengths(histogram, task.number, task.seed, shortest=given + 1)
