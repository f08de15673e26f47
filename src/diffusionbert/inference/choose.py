"""Chooses among options for a blank by the exact likelihood of each option's tokens, given the text on both sides.

    p(option | context) ∝ p(length | context) · p(tokens of the option | context, length)

The last factor is the likelihood in a deterministic order of generation (`likelihood.orders`), a distribution over
fillings of that length. The first is a prior over the options' lengths in tokens, named with every result:

    uniform    all lengths among the options are equally likely, whatever the context
    context    p(length of the text) · p(context | length), the context's own likelihood with that many masks in between
               (by Bayes' rule, as for blanks of unknown length)

Probabilities are normalized over the options. Scoring each mask on its own, Σ -log f(token | all of the option masked),
would not give a distribution over options of several tokens, because it ignores that tokens depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from diffusionbert.data.canvas import batch_of
from diffusionbert.data.text import BLANK, MASK
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch, PositionMask
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.tasks import Choice, Option
from diffusionbert.likelihood.orders import AnyOrder, Order, order_nats
from diffusionbert.networks.masked import MaskedNetwork
from diffusionbert.reporting import logger, require_type

PRIORS = ("uniform", "context")
"""The priors over the lengths of options."""


def choose(
    engine: Engine,
    texts: Sequence[str],
    options: Sequence[Sequence[str]],
    *,
    order: AnyOrder = Order.LEFT_TO_RIGHT,
    prior: str = "uniform",
) -> list[Choice]:
    """Computes the probabilities of the options for the blank of each text.

    Args:
        engine: A model that generates from `[MASK]`.
        texts: Texts with one `[BLANK]` each; a text without one is continued.
        options: Two or more options per text.
        order: The order in which an option's tokens are generated.
        prior: The prior over the lengths of the options, one of `PRIORS`.

    Returns:
        One choice per text.
    """
    if prior not in PRIORS:
        raise ValueError(f"`prior` must be one of {', '.join(PRIORS)}, got {prior!r:.40}")
    if len(texts) != len(options):
        raise ValueError(f"each text needs a list of options, got {len(texts)} texts and {len(options)} lists")
    if alone := next((some for some in options if isinstance(some, str)), None):
        raise ValueError(f"each text needs a list of options of its own, got {alone!r:.40} instead of a list")
    engine.require_single_texts("choose for")
    network = engine.masked_network
    if network is None or not engine.config.objective.generates_on_masks:
        raise ValueError(f"this model does not generate from {MASK}, so it cannot choose options; use another model")
    fitted = [_fitted(engine, text, tuple(some)) for text, some in zip(texts, options, strict=True)]
    # On a CPU, the options of one text form a batch, so that the result does not depend on other texts.
    groups = [[one] for one in fitted] if engine.device.type == "cpu" else [fitted] if fitted else []
    choices = []
    for group in groups:
        weighed = _weighed(engine, network, [row for one in group for row in one], order, prior)
        for rows in group:
            own, weighed = weighed[: len(rows)], weighed[len(rows) :]
            choices.append(own)
    return [
        Choice(text, _normalized(some, rows, found, engine.vocabulary.unk_id), order.value, prior)
        for text, some, rows, found in zip(texts, options, fitted, choices, strict=True)
    ]


@dataclass(frozen=True)
class _Fitted:
    """A text with an option in its blank."""

    tokens: tuple[int, ...]
    """The tokens of the text with the option, including special tokens."""
    is_option: tuple[bool, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.is_option)

    @property
    def option(self) -> tuple[int, ...]:
        """The tokens of the option."""
        return tuple(token for token, own in zip(self.tokens, self.is_option, strict=True) if own)

    def masked(self, mask_id: int) -> _Fitted:
        """The same with the option masked, which is equal for all options of the same length and context."""
        tokens = [mask_id if own else token for token, own in zip(self.tokens, self.is_option, strict=True)]
        return replace(self, tokens=tuple(tokens))


def _fitted(engine: Engine, text: str, options: tuple[str, ...]) -> list[_Fitted]:
    """The text with each option in its blank; raises ValueError for options that cannot be compared."""
    require_type("text", text, str, "a string")
    for option in options:
        require_type("an option", option, str, "a string")
    if len(options) < 2:
        raise ValueError(f"a text needs two or more options, got {len(options)} for {text[:40]!r}")
    if not all(option.strip() for option in options):
        raise ValueError(f"an option must not be empty, got {list(options)!r:.40}; leave it out")
    if twice := next((option for option in options if options.count(option) > 1), None):
        raise ValueError(f"options must differ, got {twice[:40]!r} {options.count(twice)} times; leave all but one out")
    if text.count(BLANK) > 1 or MASK in text:
        raise ValueError(
            f"a text to choose for must have one {BLANK}, or none to be continued, got {text[:40]!r}; use {BLANK} for "
            "the option, whatever its length, and `fill` for further blanks"
        )
    before, _, after = text.partition(BLANK)
    if BLANK not in text and before and not before[-1].isspace():
        before += " "
    fitted = [_encoded(engine.vocabulary, before, option, after) for option in options]
    longest = max(len(one.tokens) for one in fitted)
    engine.require_positions(longest, f"{text[:40]!r} with its longest option has", "shorten it")
    first: dict[_Fitted, str] = {}
    for one, option in zip(fitted, options, strict=True):
        if (same := first.setdefault(one, option)) != option:
            logger.warning("the model reads the options %r and %r alike", same[:40], option[:40])
    return fitted


def _encoded(vocabulary: Vocabulary, before: str, option: str, after: str) -> _Fitted:
    """Encodes a text; the tokens that overlap the option belong to it."""
    start, end = len(before), len(before) + len(option)
    tokens, spans = vocabulary.encode_spans(before + option + after)
    is_option = tuple(span is not None and span[0] < end and span[1] > start for span in spans)
    if not any(is_option):
        raise ValueError(f"the option {option[:40]!r} has no tokens; give a word or a phrase")
    return _Fitted(tuple(tokens), is_option)


@torch.no_grad()
def _weighed(
    engine: Engine, network: MaskedNetwork, rows: Sequence[_Fitted], order: AnyOrder, prior: str
) -> list[tuple[float, float]]:
    """For each text with an option, the nats of the option and of its length, the latter up to a constant per text."""
    mask_id = engine.vocabulary.mask_id
    batch, text = _batch(engine, rows)
    nats = order_nats(network, batch, mask_id, order, text).sum(dim=1).tolist()
    if prior == "uniform":
        return [(one, 0.0) for one in nats]
    contexts = list(dict.fromkeys(row.masked(mask_id) for row in rows))
    batch, text = _batch(engine, contexts)
    around = replace(batch, editable=text & ~batch.editable)
    context_nats = order_nats(network, around, mask_id, Order.LEFT_TO_RIGHT, text).sum(dim=1).cpu()
    total = context_nats + engine.length_nats(text.sum(dim=1).cpu())
    by_context = dict(zip(contexts, total.tolist(), strict=True))
    return [(one, by_context[row.masked(mask_id)]) for one, row in zip(nats, rows, strict=True)]


def _batch(engine: Engine, rows: Sequence[_Fitted]) -> tuple[Batch, PositionMask]:
    """A batch in which the options are editable, and the positions of the text."""
    batch = batch_of(engine.vocabulary, [row.tokens for row in rows])
    editable = torch.zeros_like(batch.attention_mask)
    for index, row in enumerate(rows):
        editable[index, : len(row.is_option)] = torch.tensor(row.is_option)
    text = editable | (batch.attention_mask & ~engine.vocabulary.special[batch.tokens])
    return replace(batch, editable=editable).to(engine.device), text.to(engine.device)


def _normalized(
    options: Sequence[str], rows: Sequence[_Fitted], found: Sequence[tuple[float, float]], unk_id: int | None
) -> tuple[Option, ...]:
    """The options with their probabilities; the prior over lengths is normalized over the lengths that occur."""
    nats, length = torch.tensor(found, dtype=torch.float64).unbind(dim=1)
    by_length = {row.num_tokens: float(value) for row, value in zip(rows, length, strict=True)}
    length = length + torch.tensor(list(by_length.values()), dtype=torch.float64).neg().logsumexp(dim=0)
    probabilities = (nats + length).neg().softmax(dim=0)
    return tuple(
        Option(option, probability, own, of_length, row.num_tokens, sum(token == unk_id for token in row.option))
        for option, probability, own, of_length, row in zip(
            options, probabilities.tolist(), nats.tolist(), length.tolist(), rows, strict=True
        )
    )
