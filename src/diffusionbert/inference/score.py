"""Scores of texts: nats with an interval over draws, perplexities, bits per byte, and the nats of each token."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.data.canvas import Sentences, batch_of, num_source_tokens
from diffusionbert.data.files import Pair
from diffusionbert.data.text import MASK, require_no_blanks
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.tasks import TextScore, TotalScore
from diffusionbert.likelihood.estimate import (
    UNSPECIFIED_PROTOCOL,
    EstimationBudget,
    SequenceDataset,
    count_bytes,
    count_words,
    estimate,
)
from diffusionbert.likelihood.orders import AnyOrder, Order, RandomOrders, order_nats
from diffusionbert.likelihood.scores import Estimate, Interval, Protocol, Rate
from diffusionbert.likelihood.sentence import (
    Difference,
    SentenceBudget,
    SentenceEstimate,
    Uncertainty,
    estimate_sentences,
)
from diffusionbert.objectives.base import (
    CONTINUOUS,
    Likelihood,
    ScoringQuantity,
    TimeGrid,
)
from diffusionbert.parallel import current
from diffusionbert.reporting import require_type


@dataclass(frozen=True)
class ScoreSettings:
    """Which quantity to compute as the score of a text, and how precisely."""

    budget: SentenceBudget = SentenceBudget()
    steps: int | str | None = None
    """T for the T-step bound, "continuous" for the continuous-time bound; None is the latter if the model has it."""
    order: AnyOrder | None = None
    """Compute the exact likelihood in this order of generation instead of a bound."""
    paired: bool = False
    """Whether the texts share their noise and are compared with the first text."""
    overlong: str = "window"
    """What to do with texts longer than the model can read, one of `OVERLONG`."""
    tokens: bool = False
    """Whether to return the nats of each token."""

    def __post_init__(self) -> None:
        if self.overlong not in OVERLONG:
            raise ValueError(f"`overlong` must be one of {', '.join(OVERLONG)}, got {self.overlong!r:.40}")
        is_steps = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not (self.steps is None or self.steps == CONTINUOUS or (is_steps and int(self.steps) >= 1)):
            raise ValueError(f'`steps` must be a whole number >= 1, or "continuous", got {self.steps!r:.40}')
        if self.order is not None and self.steps is not None:
            raise ValueError("an `order` has no time grid; give at most one of `order` and `steps`")


OVERLONG = ("window", "skip", "error")
"""What to do with texts longer than the model can read. The first window has as many tokens as the model can read; in
each further one, the first half are tokens already scored, given as context, and the tokens after them are scored."""


def score(
    engine: Engine,
    texts: Sequence[str],
    settings: ScoreSettings | None = None,
    *,
    given: Sequence[str] | None = None,
) -> list[TextScore | None]:
    """Scores texts, all to the same precision; a score depends only on its own text and the settings.

    Args:
        engine: A model with a likelihood or a bound on one.
        texts: One or more texts.
        settings: Which quantity to compute, and how precisely.
        given: What each text is conditional on: its source if the model was trained on pairs, otherwise the text before
            it, as much of it as there is room for.

    Returns:
        One score per text; None for skipped texts.
    """
    settings = settings or ScoreSettings()
    quantity = scoring_quantity(engine, settings.steps)
    windows = (
        _windows(engine, texts, settings) if given is None else conditional_windows(engine, texts, settings, given)
    )
    unique = {window: number for number, window in enumerate(dict.fromkeys(itertools.chain(*windows)))}
    rows = _Windows(engine.vocabulary, tuple(unique), settings.paired)
    if settings.order is not None and not engine.config.objective.is_causal:
        estimates = _ordered(engine, rows, settings.order)
        name, kind = f"exact likelihood, {settings.order.value}", Likelihood.EXACT
        definition = settings.order.quantity.definition
    elif settings.order in (None, Order.LEFT_TO_RIGHT):
        module = engine.module(quantity.build(engine.statistics))
        estimates = estimate_sentences(module, rows, settings.budget, paired=settings.paired) if unique else []
        name, kind, definition = quantity.description, module.objective.likelihood, quantity.definition
    else:
        raise ValueError(f"this model generates from left to right, not by {settings.order.value}; leave out `order`")
    found: list[TextScore | None] = []
    for text, parts in zip(texts, windows, strict=True):
        own = [estimates[unique[window]] for window in parts]
        protocol = Protocol(
            definition,
            interval=Interval.DRAWS,
            num_draws=sum(one.num_draws for one in own),
            seed=settings.budget.seed,
            precision=None if kind is Likelihood.EXACT else settings.budget.precision,
        )
        found.append(_text_score(engine, text, parts, own, settings, (name, kind, protocol)) if parts else None)
    return found


def scoring_quantity(engine: Engine, steps: int | str | None) -> ScoringQuantity:
    """The bound for these steps; by default the continuous-time bound if there is one, otherwise the model's own."""
    objective = engine.config.objective
    if isinstance(steps, int):
        objective = objective.with_steps(steps)
    quantities = objective.scoring_quantities(engine.config.time)
    wanted = TimeGrid(steps if isinstance(steps, int) else None)
    found = next((one for one in quantities.available if one.definition.time == wanted), None)
    if found is None and steps is not None and quantities.available:
        known = ", ".join(quantity.description for quantity in quantities.available)
        raise ValueError(f"this model has no bound for `steps` {steps}; leave it out for what there is: {known}")
    return found or quantities.primary


def total_score(scores: Sequence[TextScore | None]) -> TotalScore:
    """The sum of scores of one quantity, with its interval over draws.

    Args:
        scores: The result of `score`; None stands for a skipped text.

    Returns:
        The total.

    Examples:
        >>> import diffusionbert
        >>> from diffusionbert.inference.score import total_score
        >>> total_score(diffusionbert.load().score(["the king .", "the queen ."])).num_texts
        2
    """
    sums = ScoreSums()
    for one in scores:
        sums.add(one)
    return sums.total()


class ScoreSums:
    """Adds up scores of one quantity. Its state is plain data, which can be stored and restored.

    Args:
        numbers: The sums so far.
    """

    def __init__(self, numbers: dict[str, Any] | None = None) -> None:
        self.numbers: dict[str, Any] = {} if numbers is None else numbers
        self._repeats = Counter[tuple[float, ...]]()

    def add(self, score: TextScore | None) -> None:
        """Adds a score; None stands for a skipped text. Raises ValueError for a score of another quantity."""
        if score is None:
            self._increase(num_skipped=1)
            return
        name = [score.kind.value, score.quantity]
        if self.numbers.setdefault("name", name) != name:
            raise ValueError(f"a total needs scores of one quantity, got {self.numbers['name'][1]}, {name[1]}")
        self.numbers["conditional_on"] = max(self.numbers.get("conditional_on", ""), score.conditional_on, key=len)
        # Equal texts share their draws, so their errors add up: n of them have n² times the variance of one.
        key, variance = (score.nats, score.num_tokens, score.standard_error), score.standard_error**2
        self._repeats[key] += 1
        now, before = self._repeats[key], self._repeats[key] - 1
        # So do texts that were compared share them: at worst, their standard errors add up.
        self.numbers["is_shared"] = self.numbers.get("is_shared", False) or score.difference is not None
        if math.isfinite(score.degrees_of_freedom):
            self.numbers["degrees"] = min(self.numbers.get("degrees", math.inf), score.degrees_of_freedom)
        self._increase(
            num_texts=1,
            standard_error=score.standard_error,
            num_imprecise=int(not score.precision_reached),
            nats=score.nats,
            variance=(now**2 - before**2) * variance,
            squared_variance_by_degrees=(now**4 - before**4) * variance**2 / score.degrees_of_freedom,
            **{name: getattr(score, name) for name in _SIZES},
        )

    def _increase(self, **numbers: float | int) -> None:
        for name, number in numbers.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + number

    def total(self) -> TotalScore:
        """The sum; raises ValueError if there is no score."""
        if "name" not in self.numbers:
            raise ValueError("a total needs one or more scores, got none")
        kind, quantity = self.numbers["name"]
        values = {name: self.numbers.get(name, 0.0) for name in ("nats", "variance", "squared_variance_by_degrees")}
        nats, variance, fourth = values.values()
        counts = {
            name: int(self.numbers.get(name, 0)) for name in (*_SIZES, "num_texts", "num_skipped", "num_imprecise")
        }
        error, degrees = math.sqrt(variance), variance**2 / fourth if fourth else math.inf
        if self.numbers.get("is_shared"):
            error, degrees = self.numbers["standard_error"], self.numbers.get("degrees", math.inf)
        return TotalScore(
            nats,
            Uncertainty(error, degrees).interval(nats, 0.0),
            *_rates(nats, counts["num_tokens"], counts["num_words"], counts["num_bytes"]),
            Likelihood(kind),
            quantity,
            self.numbers["conditional_on"],
            **counts,
        )


_SIZES = ("num_tokens", "num_words", "num_bytes", "num_draws", "num_unknown")


@dataclass(frozen=True)
class _Window:
    """A part of a text that the model reads at once."""

    tokens: tuple[int, ...]
    """The tokens, including special ones."""
    num_given: int
    """The number of leading text tokens that are context, not scored in this window."""


@dataclass(frozen=True)
class _Windows:
    """Windows in memory; their noise is keyed by their own tokens, or shared by all."""

    vocabulary: Vocabulary
    windows: tuple[_Window, ...]
    share_key: bool

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(window.tokens) for window in self.windows], dtype=np.int64)

    @cached_property
    def _keys(self) -> list[int]:
        """The noise key of each window; computed once, because every round of draws makes new batches."""
        keys = [_key(window) for window in (self.windows[:1] if self.share_key else self.windows)]
        return keys * len(self.windows) if self.share_key else keys

    def batch(self, indices: Sequence[int]) -> Batch:
        batch = batch_of(self.vocabulary, [self.windows[index].tokens for index in indices])
        own = batch.attention_mask & ~self.vocabulary.special[batch.tokens]
        given = torch.tensor([self.windows[index].num_given for index in indices])
        example = torch.tensor([self._keys[index] for index in indices])
        return replace(batch, editable=own & (own.cumsum(dim=1) > given[:, None]), example=example)


def _key(window: _Window) -> int:
    return int.from_bytes(hashlib.blake2b(repr(window).encode(), digest_size=7).digest(), "big")


def conditional_windows(
    engine: Engine, texts: Sequence[str], settings: ScoreSettings, given: Sequence[str]
) -> list[list[_Window]]:
    """One window for each text and what it is conditional on; none if the text is skipped."""
    require_texts(engine, texts, given if engine.paired else None)
    vocabulary, found = engine.vocabulary, list[list[_Window]]()
    for number, (before, text) in enumerate(zip(given, texts, strict=True), start=1):
        require_no_blanks(vocabulary, text, "a scored text")
        if engine.paired:
            [tokens] = vocabulary.encode_pairs([Pair(before, text)])
            num_given, num_over = num_source_tokens(vocabulary, tokens), len(tokens) - engine.max_positions
        else:
            [tokens], [context] = vocabulary.encode([before + text]), vocabulary.own([before])
            own = [token for token in tokens if not vocabulary.special[token]]
            num_given = next((n for n, (a, b) in enumerate(zip(context, own, strict=False)) if a != b), len(context))
            begin, num_dropped = tokens.index(own[0]) if own else 0, max(0, len(tokens) - engine.max_positions)
            num_over = num_dropped - min(num_dropped, num_given)  # the text itself is too long
            tokens = tokens[:begin] + tokens[begin + num_dropped :]
            num_given -= num_dropped
        if num_given == sum(not vocabulary.special[token] for token in tokens):
            raise ValueError(f"text {number} has no tokens ({text!r:.40}); leave it out")
        if num_over > 0 and not (engine.paired and settings.overlong == "skip"):
            what = f"text {number} ({text[:40]!r} …){' and its source have' if engine.paired else ' has'}"
            engine.require_positions(engine.max_positions + num_over, what, "shorten it, or leave it out")
        found.append([] if num_over > 0 else [_Window(tuple(tokens), num_given)])
    return found


def _windows(engine: Engine, texts: Sequence[str], settings: ScoreSettings) -> list[list[_Window]]:
    """The windows of each text, none if it is skipped; raises ValueError if a text cannot be scored."""
    require_texts(engine, texts)
    for text in texts:
        require_no_blanks(engine.vocabulary, text, "a scored text")
    sequences = engine.vocabulary.encode(texts)
    if settings.overlong == "error" or settings.paired:
        require_positions(engine, texts, [len(sequence) for sequence in sequences])
    found = []
    for number, sequence in enumerate(sequences, start=1):
        own = [index for index, token in enumerate(sequence) if not engine.vocabulary.special[token]]
        if not own:
            raise ValueError(f"text {number} has no tokens ({texts[number - 1]!r:.40}); leave it out")
        begin, end, most = own[0], own[-1] + 1, engine.max_length
        overlap = most // 2
        starts = [begin, *range(begin + most - overlap, end - overlap, most - overlap)]
        pieces = [(start, min(start + most, end)) for start in starts]
        is_skipped = settings.overlong == "skip" and len(pieces) > 1
        found.append(
            [
                _Window(
                    tuple(sequence[:begin] + sequence[start:stop] + sequence[end:]), overlap if start > begin else 0
                )
                for start, stop in ([] if is_skipped else pieces)
            ]
        )
    return found


@torch.no_grad()
def _ordered(engine: Engine, rows: _Windows, order: AnyOrder) -> list[SentenceEstimate]:
    """The exact nats of each window in an order of generation."""
    network = engine.masked_network
    if network is None or not engine.config.objective.generates_on_masks:
        raise ValueError(f"this model does not generate from {MASK}, so it takes no `order`; leave it out")
    by_length = sorted(range(len(rows.windows)), key=lambda index: -int(rows.lengths[index]))
    is_fixed = order is Order.LEFT_TO_RIGHT or isinstance(order, RandomOrders)
    is_alone = is_fixed and engine.device.type == "cpu"  # so that not even rounding can differ
    size = 1 if is_alone else engine.sequences_at_once(int(max(rows.lengths, default=1)))
    per_token = order.number if isinstance(order, RandomOrders) else 1

    def estimates(group: list[int]) -> list[SentenceEstimate]:
        x0 = rows.batch(group).to(engine.device)
        nats = order_nats(network, x0, engine.vocabulary.mask_id, order)
        return [
            SentenceEstimate(values[editable], Uncertainty(), per_token * int(editable.sum()), True)
            for values, editable in zip(nats.cpu(), x0.editable.cpu(), strict=True)
        ]

    groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    found = dict(zip(by_length, itertools.chain(*current().share(groups, estimates)), strict=True))
    if not rows.share_key:
        return [found[index] for index in range(len(rows.windows))]
    differences = [found[index].nats - found[0].nats for index in range(len(rows.windows))]
    return [replace(found[index], difference=Difference(one, (one, one))) for index, one in enumerate(differences)]


def _text_score(
    engine: Engine,
    text: str,
    windows: Sequence[_Window],
    estimates: Sequence[SentenceEstimate],
    settings: ScoreSettings,
    named: tuple[str, Likelihood, Protocol],
) -> TextScore:
    """The score of a text from the estimates of its windows."""
    vocabulary, (quantity, kind, protocol) = engine.vocabulary, named
    token_nats = torch.cat([one.token_nats for one in estimates]).tolist()
    own = [
        token
        for window in windows
        for token in [token for token in window.tokens if not vocabulary.special[token]][window.num_given :]
    ]
    nats, uncertainty = math.fsum(token_nats), Uncertainty.summed([one.uncertainty for one in estimates])
    sizes = (len(own), count_words(text), count_bytes(text))
    given = "length"
    if len(windows) > 1:
        given += f"; each window on up to {windows[1].num_given} tokens before it"
    elif engine.paired or windows[0].num_given:
        given += ", source" if engine.paired else ", text before it"
    return TextScore(
        text,
        nats,
        uncertainty.interval(nats, 0.0),
        *_rates(nats, *sizes),
        kind,
        quantity,
        given,
        *sizes,
        protocol.num_draws,
        all(one.precision_reached for one in estimates),
        uncertainty.standard_error,
        uncertainty.degrees_of_freedom,
        protocol,
        0 if vocabulary.unk_id is None else own.count(vocabulary.unk_id),
        tuple(zip(vocabulary.spelled(own), token_nats, strict=True)) if settings.tokens else None,
        estimates[0].difference,
    )


def _rates(nats: float, num_tokens: int, num_words: int, num_bytes: int) -> tuple[float, float, float, float]:
    """Nats and perplexity per token, perplexity per word, bits per byte."""
    token, word = (Rate(nats / size, 0.0, 0.0) for size in (num_tokens, num_words))
    return token.nats, token.perplexity, word.perplexity, Rate(nats / num_bytes, 0.0, 0.0).bits


def estimate_nats(
    engine: Engine,
    texts: Sequence[str],
    budget: EstimationBudget,
    *,
    sources: Sequence[str] | None = None,
    quantity: ScoringQuantity | None = None,
    given: bool = False,
    length_histogram: Tensor | None = None,
    protocol: Protocol = UNSPECIFIED_PROTOCOL,
    advance: Callable[[int], None] = lambda num_sentences: None,
) -> Estimate:
    """Estimates the likelihood of texts. Noise is keyed by a text's index, so all models get the same draws for a list.

    Args:
        engine: The model.
        texts: One or more texts.
        budget: The precision and the most draws.
        sources: The source of each text, for a model trained on pairs.
        quantity: What to estimate; None is the model's own quantity.
        given: Whether the interval is for exactly these texts (True) or for the language they were sampled from.
        length_histogram: Adds -log p(length) according to this histogram.
        protocol: The known parts of the evaluation protocol.
        advance: Called once per round with the number of texts done.
    """
    return estimate_sequences(
        engine,
        encode_texts(engine, texts, sources),
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


def require_texts(engine: Engine, texts: Sequence[str], sources: Sequence[str] | None = None) -> None:
    """Raises ValueError unless these are texts, with sources if and only if the model was trained on pairs."""
    if not texts or isinstance(texts, str):
        raise ValueError(f"texts must be a list of one or more texts, got {texts!r:.40}")
    for text in texts:
        require_type("each text", text, str, "a string")
    if sources is None:
        engine.require_single_texts("score")
        return
    if not engine.paired:
        raise ValueError("this model was not trained on pairs and takes no `source`; leave it out")
    if len(sources) != len(texts):
        raise ValueError(f"each text needs one source, got {len(sources)} for {len(texts)} texts; give a list of them")
    for source in sources:
        require_type("each source", source, str, "a string")


def require_positions(engine: Engine, texts: Sequence[str], lengths: Sequence[int]) -> None:
    """Raises ValueError if the longest text has more positions than the model can read."""
    longest = int(np.argmax(lengths))
    what = f"text {longest + 1} ({texts[longest][:40]!r} …) has"
    engine.require_positions(int(lengths[longest]), what, "split it, or leave it out")


def encode_texts(engine: Engine, texts: Sequence[str], sources: Sequence[str] | None = None) -> Sentences:
    """Encodes texts, with their sources; raises ValueError for texts that the model cannot read at once."""
    require_texts(engine, texts, sources)
    sentences = Sentences(engine.vocabulary, tuple(texts), None if sources is None else tuple(sources))
    if sources is None:
        empty = (sentences.lengths <= engine.vocabulary.num_special(paired=False)).nonzero()[0].tolist()
    else:
        empty = [number for number, own in enumerate(engine.vocabulary.own(texts)) if not own]
    if empty:
        raise ValueError(f"text {empty[0] + 1} has no tokens ({texts[empty[0]]!r:.40}); leave it out")
    require_positions(engine, texts, sentences.lengths.tolist())
    return sentences


@torch.no_grad()
def embed(engine: Engine, texts: Sequence[str]) -> Tensor:
    """The mean of the last layer over each text's own tokens, [N, D]; a time-conditioned network gets t = 0.

    A text longer than the model can read is split into parts, which are read separately.
    """
    network = engine.masked_network
    if network is None:
        raise ValueError("embeddings need a masked language model, and this is not one; use another model")
    require_texts(engine, texts)
    vocabulary, parts = engine.vocabulary, list[tuple[int, list[int]]]()
    for number, sequence in enumerate(vocabulary.encode(texts)):
        own = [position for position, token in enumerate(sequence) if not vocabulary.special[token]]
        if not own:
            raise ValueError(f"text {number + 1} has no tokens ({texts[number]!r:.40}); leave it out")
        begin, end = own[0], own[-1] + 1
        stops = [(start, min(start + engine.max_length, end)) for start in range(begin, end, engine.max_length)]
        parts += [(number, sequence[:begin] + sequence[start:stop] + sequence[end:]) for start, stop in stops]
    parts.sort(key=lambda part: len(part[1]))
    at_once = engine.sequences_at_once(len(parts[-1][1]))
    width, num_own = engine.network.backbone.config.hidden_size, torch.zeros(len(texts), 1, device=engine.device)
    sums = torch.zeros(len(texts), width, dtype=torch.float64, device=engine.device)
    for first in range(0, len(parts), at_once):
        some = parts[first : first + at_once]
        batch = batch_of(vocabulary, [sequence for _, sequence in some])
        own_tokens = (batch.attention_mask & ~vocabulary.special[batch.tokens])[..., None].to(engine.device)
        batch = batch.to(engine.device)
        rows = torch.tensor([number for number, _ in some], device=engine.device)
        states = network.hidden_states(batch.tokens, batch.attention_mask).double()
        sums.index_add_(0, rows, (states * own_tokens).sum(dim=1))
        num_own.index_add_(0, rows, own_tokens.sum(dim=1).float())
    return (sums / num_own).float()
