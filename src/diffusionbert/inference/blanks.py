"""A blank of unknown length: fillings of several lengths, ranked by the chain rule of the whole row.

    nats(row) = -log p(length) + nats(context | length, blank hidden) + nats(filling | context, length)

A filling's own nats, the last term, do not compare lengths. Their sum prefers short fillings, because every further
word costs something; their mean per word prefers long ones, because the later words of a phrase are easy. Both forget
that the terms are given different lengths, so that they answer different questions: the sum says how surprising the
words are *once it is known how many there are*, and never whether the sentence leaves room for so many. That is said by
the context: with three blanks in "New [ ] [ ] [ ] is a city", the words around fit together less well than with one.
By Bayes' rule,

    p(length, filling | context) ∝ p(length) · p(context | length) · p(filling | context, length)

and p(context | length) is what the network thinks of the visible words while the blank stays hidden. It depends on
the length alone and is estimated by `filling_nats`, in the same orders of writing for all lengths: the difference
between two lengths then has little noise.

This module knows no strings: it is given the sentence once for each length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from diffusionbert.diffusion.categorical import LogitsWarper
from diffusionbert.diffusion.shapes import Batch, PerSequence, PositionMask, TokenSet
from diffusionbert.inference.filling import SearchBudget, TokenFilling, fill, filling_nats
from diffusionbert.networks.base import Network


@dataclass(frozen=True, eq=False)
class Gap:
    """Sentences whose blanks have been given a length, which may be 0."""

    canvas: Batch
    """Editable are the places of the blank, and others that are to be filled with it."""
    context: PositionMask
    """The visible words of the sentence, without special tokens: the same at every length."""
    length_nats: PerSequence
    """-log p(length of the row); 0 where nothing is known of lengths."""


def fill_gaps(
    network: Network,
    gaps: Sequence[Gap],
    mask_id: int,
    alternatives: int,
    seed: int,
    warper: LogitsWarper | None = None,
    *,
    special: TokenSet | None = None,
    budget: SearchBudget | None = None,
) -> list[list[TokenFilling]]:
    """For each row, the `alternatives` best fillings of every length, all in one order, best first.

    Each gap holds the same sentences with blanks of another length. The nats are those of the whole row, -log p(row)
    as the module says it; a filling of no words has no nats of its own.
    """
    _require_same_context(gaps)
    merged: list[list[TokenFilling]] = [[] for _ in gaps[0].canvas.tokens]
    for gap in gaps:
        canvas = replace(gap.canvas, tokens=gap.canvas.tokens.masked_fill(gap.canvas.editable, mask_id))
        around = filling_nats(
            network, replace(canvas, editable=gap.context), mask_id, seed, special=special, budget=budget
        )
        common = (around + gap.length_nats).tolist()
        for row, found in enumerate(merged):
            alone = canvas.select(torch.tensor([row], device=canvas.tokens.device))
            fillings = [TokenFilling(alone.tokens[0], 0.0)]
            if bool(alone.editable.any()):
                fillings = fill(network, alone, mask_id, alternatives, seed, warper, special=special, budget=budget)[0]
            found += [replace(filling, nats=filling.nats + common[row]) for filling in fillings]
    return [sorted(found, key=lambda filling: filling.nats) for found in merged]


def _require_same_context(gaps: Sequence[Gap]) -> None:
    """Raises ValueError unless all gaps stand in the same sentences."""
    if not gaps:
        raise ValueError("there is no length to choose from: give at least one gap")
    contexts = [(gap.context.sum(dim=1).tolist(), gap.canvas.tokens[gap.context].tolist()) for gap in gaps]
    if any(context != contexts[0] for context in contexts):
        raise ValueError("the gaps stand in different sentences: give the same context words, row by row, to each")
    if any(bool((gap.context & gap.canvas.editable).any()) for gap in gaps):
        raise ValueError("a place is both context and to be filled: mark visible words alone as context")
