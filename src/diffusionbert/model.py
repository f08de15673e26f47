"""What `load` returns: a model that generates, fills, rewrites, scores, and shows how it does so.

Here strings meet tensors: texts become canvases (`canvas`), a sampler or a search writes on them, and what is written
becomes text again. The command line is a thin shell around this object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from diffusionbert import filling
from diffusionbert.blanks import Gap, fill_gaps
from diffusionbert.categorical import Shaping
from diffusionbert.constraints import Constrained, place_words
from diffusionbert.errors import require_kind
from diffusionbert.likelihood.evaluation import (
    UNSAID,
    Effort,
    count_bytes,
    count_words,
    estimate,
    length_nats,
    surprise,
)
from diffusionbert.likelihood.protocol import Protocol
from diffusionbert.likelihood.scores import Estimate, Unit
from diffusionbert.method import LikelihoodDefinition, Objective, TrainingModule
from diffusionbert.metrics import most_agreed
from diffusionbert.model_folder import ModelMetadata, find_model, read_model, restore_beside
from diffusionbert.networks import Backed, Denoiser, Network
from diffusionbert.networks.config import TimeEmbedding
from diffusionbert.processes import Gaussian, Process
from diffusionbert.samplers import Sampler, SamplerConfig, SamplingContext, SamplingRequest, State, last_state, sample
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.shapes import Batch
from diffusionbert.tasks import Filled, Moment, SentenceScore, Task, Written, has_word, words_of
from diffusionbert.text.canvas import BLANK, Blanks, Sentences, blank, drawn_lengths, num_tokens, rewriting

FALLBACK_LENGTH = 24
"""Of a model that does not know the lengths of its corpus."""
ATTEMPTS = 20
"""To write a text without forbidden words; one nearly always does."""
ROWS_AT_ONCE = {"cpu": 32, "cuda": 512}
"""Rows written side by side, at most; what is written does not depend on it."""
WEIGHED_AT_ONCE = 750_000_000
"""Words times places, at most, that are weighed at once: 6 GB in double precision."""
Way = tuple[Objective[Any], LikelihoodDefinition]
"""An objective by which sentences are scored, and which number that gives."""


@final
class Model:
    """A language model that writes: a masked one, or that of any other method."""

    def __init__(self, metadata: ModelMetadata, folder: Path, name: str, device: torch.device):
        self.name, self.device = name, device
        self.vocabulary, self.length_histogram = metadata.vocabulary, metadata.length_histogram
        self.paired, self.training_text = metadata.paired, metadata.training_text
        self.trained, self.tokens_seen = metadata.trained, metadata.tokens_seen
        network = metadata.config.make_network(metadata.statistics)
        restore_beside(network, folder, metadata.config)
        self.network = cast("Backed", network.to(device).eval())
        self.experiment = metadata.config
        self.lexicon = metadata.statistics.padded(len(self.network.writable))

    def rows_at_once(self, places: int) -> int:
        """How many texts of so many places are written side by side."""
        most = ROWS_AT_ONCE.get(self.device.type, ROWS_AT_ONCE["cpu"])
        return max(1, min(most, WEIGHED_AT_ONCE // (max(1, places) * len(self.lexicon.allowed))))

    def over(self, num_steps: int) -> Model:
        """The same network with another number of steps T in its bound; for methods that have none, the same."""
        other = copy(self)
        other.experiment = replace(self.experiment, objective=self.experiment.objective.with_steps(num_steps))
        other.__dict__.pop("_scored_by", None)
        return other

    @property
    def num_weights(self) -> int:
        """How many numbers were trained."""
        assert isinstance(self.network, nn.Module)
        return sum(parameter.numel() for parameter in self.network.parameters())

    @property
    def encoder(self) -> Denoiser:
        """The network, if it is a masked language model."""
        if not isinstance(self.network, Denoiser):
            raise ValueError(f"{self.name!r} is no masked language model, but one is needed here; give another model")
        return self.network

    @property
    def max_places(self) -> int:
        """The most places of a row, special tokens included: what the network can read and was trained to."""
        return min(self.network.max_length, self.experiment.data.max_length)

    @property
    def max_length(self) -> int:
        """The most tokens a sentence may have."""
        return self.max_places - self.vocabulary.num_special(paired=False)

    # ---- generate ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        number: int = 1,
        *,
        length: int | tuple[int, int] | None = None,
        steps: int = 128,
        seed: int = 0,
        prompt: str = "",
        include: Sequence[str] = (),
        forbid: Sequence[str] = (),
        temperature: float = 1.0,
        top_k: int | None = 30,
        top_p: float | None = None,
    ) -> list[str]:
        """Writes texts. `write` has all the knobs, and says what each text cost."""
        task = Task(number, length, prompt, include=words_of(include), forbid=words_of(forbid), seed=seed)
        config = SamplerConfig(steps, temperature, top_k, top_p)
        return [written.text for written in self.write(task, SamplingRequest(config=config))]

    def rewrite(self, text: str, strength: float = 0.4, *, number: int = 1, seed: int = 0) -> list[str]:
        """Hides a share of a text and writes it anew."""
        task = Task(number, rewrite=text, strength=strength, seed=seed)
        return [written.text for written in self.write(task, SamplingRequest(config=SamplerConfig(top_k=30)))]

    def write(self, task: Task, sampling: SamplingRequest) -> Iterator[Written]:
        """Writes the texts of a task, some at a time."""
        canvas = self._canvas(task, sampling)
        number, at_once = len(canvas.tokens), self.rows_at_once(canvas.tokens.shape[1])
        for start in range(0, number, at_once):
            rows = torch.arange(start, min(start + at_once, number))
            yield from self._written(task, sampling, canvas.rows(rows))

    def require(self, task: Task, sampling: SamplingRequest) -> None:
        """Refuses, before anything is written, lengths and samplers that this model has not."""
        self._canvas(replace(task, number=1), sampling)
        self._sampler(sampling)

    def _written(self, task: Task, sampling: SamplingRequest, canvas: Batch) -> list[Written]:
        """Writes all rows of a canvas, and those again in which a forbidden word can be read all the same.

        Pieces are forbidden, but a weak or hot network may spell a word across punctuation: `& ##a` reads as `&a`.
        """
        found: dict[int, Written] = {}
        for attempt in range(ATTEMPTS):
            missing = torch.tensor([row for row in range(len(canvas.tokens)) if row not in found])
            again = replace(task, seed=task.seed + (attempt << 36))
            end = last_state(self._states(again, sampling, canvas.rows(missing)))
            for number, row, calls in zip(missing.tolist(), end.tokens, end.calls.tolist(), strict=True):
                own = self._own(row)
                text = self._text(own, task.prompt)
                if not any(has_word(text, word, given=len(task.prompt)) for word in task.forbid):
                    found[number] = Written(text, len(own), sampling.config.steps, int(calls), task.seed)
            if len(found) == len(canvas.tokens):
                return [found[row] for row in range(len(canvas.tokens))]
        raise RuntimeError(
            f"no text without {', '.join(task.forbid)} was found in {ATTEMPTS} attempts; forbid fewer words"
        )

    def answer(self, task: Task, sampling: SamplingRequest, candidates: int) -> list[Written]:
        """Answers a source: of so many candidates, the one with the least expected loss (Kumar & Byrne 2004).

        The loss is 1 - BLEU, and what the other candidates are stands for what the answer may be.
        """
        everything = list(self.write(replace(task, number=task.number * candidates), sampling))
        groups = [everything[start : start + candidates] for start in range(0, len(everything), candidates)]
        return [group[most_agreed([written.text for written in group])] for group in groups]

    def stream(
        self, *, length: int | None = None, steps: int = 128, seed: int = 0, prompt: str = "", top_k: int | None = 30
    ) -> Iterator[Moment]:
        """Yields every state of one text; `watch` has all the knobs."""
        request = SamplingRequest(config=SamplerConfig(steps, top_k=top_k))
        return self.watch(Task(length=length, prompt=prompt, seed=seed), request)

    def watch(self, task: Task, sampling: SamplingRequest) -> Iterator[Moment]:
        """Yields every state of a task's first text."""
        canvas = self._canvas(replace(task, number=1), sampling)
        for state in self._states(task, sampling, canvas):
            yield self._moment(state)

    def _states(self, task: Task, sampling: SamplingRequest, canvas: Batch) -> Iterator[State]:
        network, canvas = self._constrained(task, canvas.to(self.device))
        words = canvas.editable | (canvas.attend & ~self.vocabulary.special.to(self.device)[canvas.tokens])
        # A network that is told the time, or a schedule by token, must know how much is hidden at the start.
        start_time = 1.0 if task.rewrite is None else int(canvas.editable.sum()) / int(words.sum())
        sampler, context = self._sampler(sampling, start_time)
        return sample(sampler, context, network, canvas, task.seed)

    def _canvas(self, task: Task, sampling: SamplingRequest) -> Batch:
        if (task.source is not None) != self.paired:
            raise ValueError(
                "this model was trained on pairs: it answers a source and does nothing else; give a source"
                if self.paired
                else "this model was not trained on pairs and answers no source; leave it out, or train on .tsv pairs"
            )
        if task.rewrite is not None:
            self._require_space(len(self.vocabulary.encode([task.rewrite])[0]), task, sampling)
            return rewriting(self.vocabulary, task.rewrite, task.strength, task.number, task.seed, task.forbid)
        given = num_tokens(self.vocabulary, task.prompt)
        around = blank(self.vocabulary, [given + 1], task.prompt, task.source).tokens.shape[1] - given - 1
        if isinstance(task.length, tuple):  # whatever is drawn: all of them must be possible
            self._require_space(around + task.length[1], task, sampling)
        lengths = self._lengths(task)
        self._require_space(around + max(lengths), task, sampling)
        return blank(self.vocabulary, lengths, task.prompt, task.source)

    def _require_space(self, places: int, task: Task, sampling: SamplingRequest) -> None:
        """Raises ValueError if rows of so many places cannot be written: before they are made, and fill the memory."""
        if sampling.block is None:
            blocks = (
                ", or write in blocks (block=32, --block 32)" if self.experiment.objective.generates_on_masks else ""
            )
            self._require_room(places, "the text would have", f"ask for less{blocks}")
        elif task.include:
            self._require_room(places, "with words to be included, the text would have", "ask for less")

    def _lengths(self, task: Task) -> list[int]:
        if not isinstance(task.length, tuple | None):
            return [int(task.length)] * task.number
        histogram, given = self.length_histogram, num_tokens(self.vocabulary, task.prompt)
        if task.length is not None:
            low, high = task.length
            if not 1 <= low <= high or high <= given:
                raise ValueError(
                    f"a range of lengths must rise, from 1 or more to more than the prompt's {given} tokens, "
                    f"given {low}-{high}"
                )
            histogram = torch.zeros(high + 1)
            histogram[low:] = 1
        if histogram is None or not bool(histogram[given + 1 :].any()):
            return [min(max(FALLBACK_LENGTH, given + FALLBACK_LENGTH // 2), self.max_length)] * task.number
        return drawn_lengths(histogram, task.number, task.seed, shortest=given + 1)

    def _constrained(self, task: Task, canvas: Batch) -> tuple[Any, Batch]:
        if not isinstance(self.network, Denoiser):  # neither a decoder nor vectors answer place by place
            if task.include or task.forbid:
                raise ValueError("words can be included and forbidden by masked language models alone; leave them out")
            return self.network, canvas
        network: Network = self.network
        [prompt] = self.vocabulary.own([task.prompt])
        if prompt:  # its last word is whole
            network = Constrained(network, included=[prompt], continuation=self.vocabulary.continuation)
        if task.include or task.forbid:
            network = Constrained(
                network,
                forbidden=[pieces for word in task.forbid for pieces in self.vocabulary.spellings(word)],
                included=[self.vocabulary.pieces(word) for word in task.include],
                continuation=self.vocabulary.continuation,
                spelled=lambda word: repr(self.vocabulary.decode(word)),
            ).to(self.device)
            canvas = place_words(network, canvas, self.vocabulary.mask_id, task.seed)
        return network.to(self.device) if isinstance(network, Constrained) else network, canvas

    def _require_single(self, verb: str) -> None:
        if self.paired:
            raise ValueError(
                f"this model was trained on pairs and {verb} no single sentence; give it a source to answer"
            )

    def _require_room(self, places: int, what: str, remedy: str) -> None:
        """Raises ValueError if a row is longer than the model reads at once."""
        if places > self.max_places:
            num = places - self.max_places + self.max_length
            raise ValueError(f"{what} {num} tokens, more than the {self.max_length} that this model reads; {remedy}")

    def _text(self, own: Tensor, prompt: str) -> str:
        """The text of a sentence, its prompt as it was given."""
        given = num_tokens(self.vocabulary, prompt)
        text, begin = self.vocabulary.decode(own), self.vocabulary.decode(own[:given])
        # A detached hyphen or apostrophe at its end may be drawn to what follows.
        rest = text[len(begin) :] if text.startswith(begin) else f" {self.vocabulary.decode(own[given:])}"
        return prompt + (rest.lstrip() if prompt[-1:].isspace() else rest)

    def _own(self, row: Tensor) -> Tensor:
        """The sentence of a row: what stands between its last two special tokens, hidden places included."""
        row = row.cpu()
        frame = (
            self.vocabulary.special[row] & (row != self.vocabulary.mask_id) & (row != self.vocabulary.pad_id)
        ).nonzero()
        return row[int(frame[-2]) + 1 : int(frame[-1])]

    def _moment(self, state: State) -> Moment:
        own = self._own(state.tokens[0]).tolist()
        mask = self.vocabulary.mask_id
        spelled = self.vocabulary.spelled(own)
        shown = tuple(None if token == mask else piece for token, piece in zip(own, spelled, strict=True))
        return Moment(float(state.time[0]), int(state.calls[0]), shown, self.vocabulary.decode(own), tuple(own))

    # ---- fill -------------------------------------------------------------------------------------------------------

    def fill(self, text: str, *, seed: int = 0) -> str:
        """Fills every `[MASK]` of a text jointly, and every `[BLANK]` with as many tokens as suit it best."""
        return self.fillings(text, 1, seed=seed)[0].text

    def fillings(
        self, text: str, alternatives: int = 5, *, seed: int = 0, forbid: Sequence[str] = (), longest: int = 4
    ) -> list[Filled]:
        """The best whole fillings of a text that were found, best first; a `[BLANK]` has 1 to `longest` tokens."""
        if longest < 1 or alternatives < 1:
            raise ValueError(f"longest ({longest}) and alternatives ({alternatives}) must be at least 1")
        require_kind("what is filled", text, str, "a text; fill several one by one")
        self._require_single("fills")
        if not self.experiment.objective.generates_on_masks:
            raise ValueError("this model does not write on [MASK], so it fills no blanks; use another model")
        task, given = Task(forbid=words_of(forbid)), Blanks(self.vocabulary, text)
        num_blanks = given.marks.count(BLANK)
        self._require_room_for(given, num_blanks, longest)
        gaps = [self._gap(given.canvas(width)) for width in range(1, longest + 1 if num_blanks else 2)]
        network, _ = self._constrained(task, gaps[0].canvas)
        shaping, mask_id = Shaping(forbidden=self.lexicon.never_sampled), self.vocabulary.mask_id
        special = pad(self.vocabulary.special, (0, len(self.network.writable) - self.vocabulary.size))
        if num_blanks:
            found = fill_gaps(network, gaps, mask_id, alternatives, seed, shaping, special=special)[0][:alternatives]
        else:
            found = filling.fill(network, gaps[0].canvas, mask_id, alternatives, seed, shaping, special=special)[0]
        return [self._filled(given, gaps, filled) for filled in found]

    def _require_room_for(self, given: Blanks, num_blanks: int, longest: int) -> None:
        """Raises ValueError if a text, or its blanks at their longest, are more than the model reads."""
        places = given.canvas(1).tokens.shape[1]
        self._require_room(places, f"{given.text!r} has", "shorten it")
        most = 1 + (self.max_places - places) // num_blanks if num_blanks else longest
        if longest > most:
            raise ValueError(
                f"longest is {longest}, too large by {longest - most}: in {given.text!r} this model, which reads "
                f"{self.max_length} tokens, has room for {most} in each [BLANK]"
            )

    def _gap(self, canvas: Batch) -> Gap:
        canvas = canvas.to(self.device)
        context = ~canvas.editable & ~self.vocabulary.special.to(self.device)[canvas.tokens]
        length = (canvas.editable | context).sum(dim=1).cpu()
        histogram = self.length_histogram
        knows = histogram is not None and int(length) < len(histogram)
        nats = length_nats(histogram, length) if histogram is not None and knows else torch.zeros(1).double()
        return Gap(canvas, context, nats.to(self.device))

    def _filled(self, given: Blanks, gaps: Sequence[Gap], found: filling.Filling) -> Filled:
        sizes = [gap.canvas.tokens.shape[1] for gap in gaps]
        width = sizes.index(len(found.tokens)) + 1
        written = found.tokens[gaps[width - 1].canvas.editable[0]].tolist()
        text, fillings = given.filled(written, width)
        return Filled(text, fillings, found.nats)

    # ---- score ------------------------------------------------------------------------------------------------------

    def score(self, texts: Iterable[str], *, precision: float = 0.05, seed: int = 0) -> list[SentenceScore]:
        """How much each sentence surprises the model, each with an interval over draws.

        Draws go on until the perplexity of all sentences together is as precise as asked.
        """
        require_kind("what is scored", texts, Iterable, "a list of sentences")
        texts = texts if isinstance(texts, str) else list(texts)
        found = self.likelihood(texts, Effort(precision=precision, seed=seed), given=True)
        by_sentence = [found.scores.rows(torch.tensor([index])).given_rates() for index in range(len(texts))]
        return [
            SentenceScore(
                text,
                rates[Unit.SENTENCE].nats,
                rates[Unit.TOKEN].perplexity,
                rates[Unit.WORD].perplexity,
                rates[Unit.BYTE].nats / math.log(2),
                (rates[Unit.SENTENCE].low, rates[Unit.SENTENCE].high),
                found.kind,
                found.protocol,
                row.count(-1 if self.vocabulary.unk_id is None else self.vocabulary.unk_id),
            )
            for text, rates, row in zip(texts, by_sentence, self.vocabulary.encode(texts), strict=True)
        ]

    def likelihood(
        self,
        texts: Sequence[str],
        effort: Effort,
        *,
        way: Way | None = None,
        given: bool = False,
        length_histogram: Tensor | None = None,
        protocol: Protocol = UNSAID,
        advance: Callable[[int], None] = lambda num_sentences: None,
    ) -> Estimate:
        """The likelihood of sentences, each by itself: of these very ones if they are `given`, else of what they are a
        sample of. Unless another way is given it is the model's own; with a histogram, lengths are paid for, too.
        """
        objective, definition = way or self._scored_by
        return estimate(
            self.method(objective.to(self.device)),
            self._sentences(texts),
            effort,
            words=torch.tensor([count_words(text) for text in texts]),
            bytes=torch.tensor([count_bytes(text) for text in texts]),
            length_histogram=length_histogram,
            given=given,
            protocol=replace(protocol, definition=definition),
            advance=advance,
        )

    def surprise(self, text: str, *, draws: int = 64, seed: int = 0) -> list[tuple[str, float]]:
        """Each token of a sentence and the nats that it costs."""
        batch = self._sentences([text]).batch([0]).to(self.device)
        nats = surprise(self.method(self._scored_by[0]), batch, draws, seed)[0]
        places = batch.editable[0]
        spelled = self.vocabulary.spelled(batch.tokens[0][places].tolist())
        return list(zip(spelled, nats[places].tolist(), strict=True))

    def _sentences(self, texts: Sequence[str]) -> Sentences:
        if not texts or isinstance(texts, str):
            raise ValueError(f"a list of one or more sentences is expected, given {texts!r}")
        for text in texts:
            require_kind("a sentence", text, str, "a text")
        self._require_single("scores")
        rows = Sentences(self.vocabulary, tuple(texts))
        empty = (rows.lengths <= self.vocabulary.num_special(paired=False)).nonzero()[0].tolist()
        if empty:
            raise ValueError(f"sentence {empty[0] + 1} has no words ({texts[empty[0]]!r}); leave it out")
        longest = int(rows.lengths.argmax())
        self._require_room(
            int(rows.lengths[longest]),
            f"sentence {longest + 1} ({texts[longest][:40]!r} …) has",
            "split it, or leave it out",
        )
        return rows

    @cached_property
    def _scored_by(self) -> Way:
        own = self.experiment.objective.scoring_quantities(self.experiment.time).primary
        return own.build(self.lexicon).to(self.device), own.definition

    @cached_property
    def _process(self) -> Process | Gaussian | None:
        return self.experiment.objective.process(self.lexicon)

    def _sampler(self, request: SamplingRequest, start_time: float = 1.0) -> tuple[Sampler, SamplingContext]:
        """The sampler of a request and its context; raises ValueError if the model cannot be sampled like this."""
        objective, process = self.experiment.objective, self._process
        sampler = objective.choose_sampler(request.sampler)
        if start_time < 1 and not isinstance(process, Process):
            raise ValueError("this model does not generate at [MASK], so it rewrites no text; use another model")
        if request.block is not None:
            sampler = Blocks(request.block, sampler)
        context = SamplingContext(
            mask_id=self.lexicon.mask_id,
            process=process.to(self.device) if isinstance(process, Process) else process,
            config=request.config,
            allowed_tokens=self.lexicon.allowed.to(self.device),
            forbidden=self.lexicon.never_sampled,
            time_agnostic=self.experiment.time is TimeEmbedding.NONE,
            start_time=start_time,
            max_length=self.max_places,
            word_vectors=cast("Any", self.network) if isinstance(process, Gaussian) else None,
            causal=objective.is_causal,
        )
        return sampler.resolve(context), context

    def method(self, objective: Objective[Any]) -> TrainingModule:
        """This model with another objective."""
        assert isinstance(self.network, nn.Module)
        return TrainingModule(self.network, objective)


def load(name_or_folder: str | Path | None = None, device: str | torch.device | None = None) -> Model:
    """Opens a model: the bundled one, a run folder, a model folder, any masked language model's folder or Hub name."""
    require_kind("a model", name_or_folder, (str, Path, type(None)), "a folder or a name on the Hub")
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = "bundled" if name_or_folder is None else str(name_or_folder)
    if not name.strip():
        raise ValueError("the name of the model is empty; give a folder or a Hub name, or none for the model inside")
    folder = find_model(name)
    return Model(read_model(folder), folder, name, chosen)
