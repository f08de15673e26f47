"""What `load` returns: a model that generates, fills, rewrites, scores, and shows how it does so.

Here strings meet tensors: texts become canvases (`canvas`), a sampler or a search writes on them, and what is written
becomes text again. The command line and the page are thin shells around this object.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from torch.nn.functional import pad

from diffusionbert import filling
from diffusionbert.blanks import Gap, fill_gaps
from diffusionbert.canvas import BLANK, Sentences, blank, blanks, drawn_lengths, rewriting
from diffusionbert.categorical import Shaping
from diffusionbert.checkpoints import RunFolder
from diffusionbert.constraints import Constrained, place_words
from diffusionbert.evaluation import Effort, count_bytes, count_words, estimate, length_nats, surprise
from diffusionbert.experiments import build, build_sampler, scoring
from diffusionbert.method import Likelihood, Method, Objective, State
from diffusionbert.metrics import most_agreed
from diffusionbert.model_folder import Opened, add_conditioning, read_model
from diffusionbert.networks import Denoiser, Network, quiet
from diffusionbert.protocol import Protocol
from diffusionbert.sampling import Sampling
from diffusionbert.scores import Estimate, Unit
from diffusionbert.shapes import Batch

BUNDLED = Path(__file__).parent / "bundled"
"""The model inside the package."""
USUAL_LENGTH = 24
"""Of a model that does not know the lengths of its corpus."""
ROWS_AT_ONCE = 32
"""Rows written side by side; what is written does not depend on it."""


@dataclass(frozen=True)
class Task:
    """What is to be written."""

    number: int = 1
    length: int | tuple[int, int] | None = None
    """Tokens of the sentence, or a range to draw from; None draws as the training corpus does."""
    prompt: str = ""
    source: str | None = None
    """For models trained on pairs: the text to be answered."""
    include: tuple[str, ...] = ()
    """Words that must occur, wherever."""
    forbid: tuple[str, ...] = ()
    """Words that must not."""
    rewrite: str | None = None
    """A sentence of which a share is hidden and written anew."""
    strength: float = 0.4
    """That share."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"at least one text must be asked for, given {self.number}")
        if self.rewrite is not None and (self.prompt or self.source or self.length):
            raise ValueError(
                "a text that is rewritten keeps its own length and words: leave out length, prompt, source"
            )
        both = {word.lower() for word in self.include} & {word.lower() for word in self.forbid}
        if both:
            raise ValueError(f"{min(both)!r} is both to be included and forbidden; drop one of the two")


@dataclass(frozen=True)
class Written:
    """One generated text."""

    text: str
    length: int
    """Its number of tokens."""
    steps: int
    calls: int
    """How often the network was asked about it."""
    seed: int


@dataclass(frozen=True)
class Moment:
    """One state of a text on its way."""

    time: float
    calls: int
    pieces: tuple[str | None, ...]
    """The tokens as the vocabulary spells them; None where one is hidden."""
    text: str
    """What is written so far, hidden places left out."""


@dataclass(frozen=True)
class Filled:
    """A text with its blanks filled."""

    text: str
    fillings: tuple[str, ...]
    """What was written into each blank, from left to right."""
    nats: float
    """-log p(fillings | context); where blanks of unknown length are compared, -log p(text)."""


@dataclass(frozen=True)
class SentenceScore:
    """How much a sentence surprises the model."""

    text: str
    nats: float
    perplexity_per_token: float
    perplexity_per_word: float
    bits_per_byte: float
    ci95: tuple[float, float]
    """Of the nats, over draws."""
    likelihood: Likelihood
    protocol: Protocol

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        plain = {name: value for name, value in vars(self).items() if name not in ("likelihood", "protocol")}
        return plain | {"likelihood": self.likelihood.value, "protocol": self.protocol.to_json()}


@final
class Model:
    """A masked language model that writes."""

    def __init__(self, opened: Opened, name: str, device: torch.device):
        self.name, self.device = name, device
        self.vocabulary, self.length_histogram = opened.vocabulary, opened.length_histogram
        method = build(replace(opened.experiment, data=replace(opened.experiment.data, max_length=1)), opened.lexicon)
        add_conditioning(method, opened.folder)
        self.network: Denoiser = method.network.to(device).eval()  # type: ignore[assignment]
        self.experiment = opened.experiment
        self.lexicon = opened.lexicon.padded(len(self.network.writable))

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
        task = Task(number, length, prompt, include=tuple(include), forbid=tuple(forbid), seed=seed)
        sampling = Sampling(steps=steps, temperature=temperature, top_k=top_k, top_p=top_p)
        return [written.text for written in self.write(task, sampling)]

    def rewrite(self, text: str, strength: float = 0.4, *, number: int = 1, seed: int = 0) -> list[str]:
        """Hides a share of a text and writes it anew."""
        task = Task(number, rewrite=text, strength=strength, seed=seed)
        return [written.text for written in self.write(task, Sampling(top_k=30))]

    def write(self, task: Task, sampling: Sampling) -> Iterator[Written]:
        """Writes the texts of a task, some at a time."""
        canvas = self._canvas(task)
        for start in range(0, len(canvas.tokens), ROWS_AT_ONCE):
            rows = torch.arange(start, min(start + ROWS_AT_ONCE, len(canvas.tokens)))
            *_, last = self._states(task, sampling, canvas.rows(rows))
            for row, calls in zip(last.tokens, last.calls.tolist(), strict=True):
                own = self._own(row)
                yield Written(self.vocabulary.decode(own), len(own), sampling.steps, int(calls), task.seed)

    def answer(self, task: Task, sampling: Sampling, candidates: int) -> list[Written]:
        """Answers a source: of so many candidates, the one with the least expected loss (Kumar & Byrne 2004).

        The loss is 1 - BLEU, and what the other candidates are stands for what the answer may be.
        """
        everything = list(self.write(replace(task, number=task.number * candidates), sampling))
        groups = [everything[start :: task.number] for start in range(task.number)]
        return [group[most_agreed([written.text for written in group])] for group in groups]

    def stream(
        self, *, length: int | None = None, steps: int = 128, seed: int = 0, prompt: str = "", top_k: int | None = 30
    ) -> Iterator[Moment]:
        """Yields every state of one text; `watch` has all the knobs."""
        return self.watch(Task(length=length, prompt=prompt, seed=seed), Sampling(steps=steps, top_k=top_k))

    def watch(self, task: Task, sampling: Sampling) -> Iterator[Moment]:
        """Yields every state of a task's first text."""
        canvas = self._canvas(replace(task, number=1))
        for state in self._states(task, sampling, canvas):
            yield self._moment(state)

    def _states(self, task: Task, sampling: Sampling, canvas: Batch) -> Iterator[State]:
        canvas = canvas.to(self.device)
        network, canvas = self._constrained(task, canvas)
        words = canvas.attend & ~self.vocabulary.special.to(self.device)[canvas.tokens]
        hidden = canvas.editable.sum() / (words | canvas.editable).sum()
        # A network that is told the time, or a schedule by token, must know how much is hidden at the start.
        end = float(hidden) if task.rewrite is not None else 1.0
        window = self.max_places
        if sampling.block is None:
            self._require_room(canvas.tokens.shape[1])
        sampler = build_sampler(self.experiment, self.lexicon, sampling, end, window).to(self.device)
        return sampler.sample(network, canvas, task.seed)

    def _canvas(self, task: Task) -> Batch:
        if task.rewrite is not None:
            return rewriting(self.vocabulary, task.rewrite, task.strength, task.number, task.seed)
        return blank(self.vocabulary, self._lengths(task), task.prompt, task.source)

    def _lengths(self, task: Task) -> list[int]:
        if isinstance(task.length, int):
            return [task.length] * task.number
        histogram = self.length_histogram
        if task.length is None and histogram is None:
            return [USUAL_LENGTH] * task.number
        given = len(self.vocabulary.pieces(task.prompt)) if task.prompt.strip() else 0
        if task.length is not None:
            low, high = task.length
            if not 1 <= low <= high:
                raise ValueError(f"a range of lengths must rise from 1 or more, given {low}-{high}")
            histogram = torch.zeros(high + 1)
            histogram[low:] = 1
        assert histogram is not None
        return drawn_lengths(histogram, task.number, task.seed, shortest=given + 1)

    def _constrained(self, task: Task, canvas: Batch) -> tuple[Network, Batch]:
        if not task.include and not task.forbid:
            return self.network, canvas
        network = Constrained(
            self.network,
            forbidden=[self.vocabulary.pieces(word) for word in task.forbid],
            included=[self.vocabulary.pieces(word) for word in task.include],
            continuation=self.vocabulary.continuation,
        ).to(self.device)
        return network, place_words(network, canvas, self.vocabulary.mask_id, task.seed)

    def _require_room(self, places: int) -> None:
        most = self.max_places
        if places > most:
            special = self.vocabulary.num_special(paired=False)
            raise ValueError(
                f"a text of {places - special} tokens is longer than this model reads at once, {most - special}; "
                "ask for less, or write it in blocks (block=32, --block 32)"
            )

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
        pieces = self.vocabulary.tokenizer.convert_ids_to_tokens(own)
        shown = tuple(None if token == mask else str(piece) for token, piece in zip(own, pieces, strict=True))
        return Moment(float(state.time[0]), int(state.calls[0]), shown, self.vocabulary.decode(own))

    # ---- fill -------------------------------------------------------------------------------------------------------

    def fill(self, text: str, *, seed: int = 0) -> str:
        """Fills every `[MASK]` of a text jointly, and every `[BLANK]` with as many tokens as suit it best."""
        return self.fillings(text, 1, seed=seed)[0].text

    def fillings(
        self, text: str, alternatives: int = 5, *, seed: int = 0, forbid: Sequence[str] = (), longest: int = 4
    ) -> list[Filled]:
        """The best whole fillings of a text that were found, best first; a `[BLANK]` has 1 to `longest` tokens."""
        network, _ = self._constrained(Task(forbid=tuple(forbid)), blanks(self.vocabulary, text, 1).to(self.device))
        shaping = Shaping(forbidden=self.lexicon.forbidden)
        special = pad(self.vocabulary.special, (0, len(self.network.writable) - self.vocabulary.size))
        mask_id = self.vocabulary.mask_id
        if BLANK in text:
            gaps = [self._gap(text, length) for length in range(1, longest + 1)]
            found = fill_gaps(network, gaps, mask_id, alternatives, seed, shaping, special=special)[0][:alternatives]
            return [self._filled(gaps, filled) for filled in found]
        canvas = blanks(self.vocabulary, text).to(self.device)
        if not bool(canvas.editable.any()):
            mask = self.vocabulary.tokenizer.mask_token
            raise ValueError(f"there is nothing to fill in {text!r}; write {mask} for a token, {BLANK} for any number")
        self._require_room(canvas.tokens.shape[1])
        found = filling.fill(network, canvas, mask_id, alternatives, seed, shaping, special=special)[0]
        return [
            self._filled([Gap(canvas, canvas.editable, canvas.attend.sum(dim=1).double())], filled) for filled in found
        ]

    def _gap(self, text: str, length: int) -> Gap:
        canvas = blanks(self.vocabulary, text, length).to(self.device)
        self._require_room(canvas.tokens.shape[1])
        context = ~canvas.editable & ~self.vocabulary.special.to(self.device)[canvas.tokens]
        num_tokens = (canvas.editable | context).sum(dim=1)
        if self.length_histogram is None or int(num_tokens) >= len(self.length_histogram):
            nats = torch.zeros(1, dtype=torch.float64, device=self.device)
        else:
            nats = length_nats(self.length_histogram, num_tokens.cpu()).to(self.device)
        return Gap(canvas, context, nats)

    def _filled(self, gaps: Sequence[Gap], found: filling.Filling) -> Filled:
        [canvas] = [gap.canvas for gap in gaps if gap.canvas.tokens.shape[1] == len(found.tokens)]
        tokens, editable = found.tokens.cpu(), canvas.editable[0].cpu()
        # Neighbouring blanks are one filling of several tokens only where they were one [BLANK]; each is told apart.
        starts = [place for place in editable.nonzero()[:, 0].tolist() if not editable[place - 1]]
        runs = [tokens[start : start + _run(editable, start)] for start in starts]
        return Filled(
            self.vocabulary.decode(self._own(tokens)), tuple(self.vocabulary.decode(run) for run in runs), found.nats
        )

    # ---- score ------------------------------------------------------------------------------------------------------

    def score(self, texts: Sequence[str], *, precision: float = 0.05, seed: int = 0) -> list[SentenceScore]:
        """How much each sentence surprises the model, each with an interval over draws.

        Draws go on until the perplexity of all sentences together is as precise as asked.
        """
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
            )
            for text, rates in zip(texts, by_sentence, strict=True)
        ]

    def likelihood(
        self,
        texts: Sequence[str],
        effort: Effort,
        *,
        given: bool = False,
        advance: Callable[[int], None] = lambda num_sentences: None,
    ) -> Estimate:
        """The likelihood of sentences: of these very ones if they are `given`, else of what they are a sample of."""
        rows = self._sentences(texts)
        return estimate(
            self._scored,
            rows,
            effort,
            words=torch.tensor([count_words(text) for text in texts]),
            bytes=torch.tensor([count_bytes(text) for text in texts]),
            given=given,
            protocol=Protocol(steps=self._scored_by[1]),
            advance=advance,
        )

    def surprise(self, text: str, *, draws: int = 64, seed: int = 0) -> list[tuple[str, float]]:
        """Each token of a sentence and the nats that it costs."""
        batch = self._sentences([text]).batch([0]).to(self.device)
        nats = surprise(self._scored, batch, draws, seed)[0]
        places = batch.editable[0]
        pieces = self.vocabulary.tokenizer.convert_ids_to_tokens(batch.tokens[0][places].tolist())
        return list(zip(map(str, pieces), nats[places].tolist(), strict=True))

    def _sentences(self, texts: Sequence[str]) -> Sentences:
        if not texts:
            raise ValueError("there are no sentences; give at least one")
        rows = Sentences(self.vocabulary, tuple(texts))
        empty = (rows.lengths <= self.vocabulary.num_special(paired=False)).nonzero()[0].tolist()
        if empty:
            raise ValueError(f"sentence {empty[0] + 1} has no words ({texts[empty[0]]!r}); leave it out")
        self._require_room(int(rows.lengths.max()))
        return rows

    @cached_property
    def _scored_by(self) -> tuple[Objective[Network], str]:
        objective, name = scoring(self.experiment, self.lexicon)
        return objective.to(self.device), name

    @cached_property
    def _scored(self) -> Method:
        return Method(self.network, self._scored_by[0], build_sampler(self.experiment, self.lexicon, Sampling()))


def _run(editable: Tensor, start: int) -> int:
    """The number of editable places in a row from a start on."""
    rest = editable[start:]
    return int(rest.long().cumprod(dim=0).sum())


def load(name_or_folder: str | Path | None = None, device: str | torch.device | None = None) -> Model:
    """Opens a model: the bundled one, a run folder, a model folder, any masked language model's folder or Hub name."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if name_or_folder is None:
        return Model(read_model(BUNDLED), "bundled", chosen)
    folder = Path(name_or_folder)
    run = RunFolder(folder)
    if run.experiment.exists():
        if not run.model.exists():
            raise ValueError(f"{str(folder)!r} is a run that has not left a model yet; let it finish, or --resume it")
        folder = run.model
    elif not folder.is_dir():
        folder = _downloaded(str(name_or_folder))
    return Model(read_model(folder), str(name_or_folder), chosen)


def _downloaded(name: str) -> Path:
    """A model of the Hub, or of its cache where there is no connection."""
    try:
        with quiet(bars=sys.stderr.isatty()):
            return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except Exception as error:  # no such name, no connection: one line in any case
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"no model at {name!r}: expected a run folder, a model's folder, or a name on the Hub and a connection to "
            f"it ({reason})"
        ) from error
