"""Blanks of unknown length: fillings of several lengths, ranked by the chain rule of the whole sequence.

    nats(sequence) = -log p(length) + nats(context | length, blank masked) + nats(filling | context, length)

The last term alone cannot compare lengths. Its sum prefers short fillings, because every token costs something; its
mean per token prefers long ones, because later tokens of a phrase are easy to predict. Both condition on the length, so
neither says how likely the length is. The context does: with three blanks in "New [ ] [ ] [ ] is a city", the
surrounding tokens are less likely than with one. By Bayes' rule,

    p(length, filling | context) ∝ p(length) · p(context | length) · p(filling | context, length)

where p(context | length) is the probability of the unmasked tokens while the blank stays masked. It does not depend on
the filling. `filling_nats` estimates it with the same unmasking orders for all lengths, so that differences between
lengths have little variance.

This module does not depend on strings: it gets each sentence once per length.
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
    """Sentences whose blanks have one of the candidate lengths, which may be 0."""

    canvas: Batch
    """The positions of the blank, and of other blanks to fill with it, are editable."""
    context: PositionMask
    """The unmasked tokens of the sentence, without special tokens: the same for every length."""
    length_nats: PerSequence
    """-log p(length of the sequence); 0 if lengths are not modelled."""


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
    """Fills blanks of unknown length and ranks the fillings of all lengths together.

    Args:
        network: Any network.
        gaps: The same sentences, once per candidate length of their blanks.
        mask_id: The id of `[MASK]`.
        alternatives: The number of fillings per length.
        seed: The same seed gives the same fillings.
        warper: As for `fill`.
        special: Special tokens, which do not count for the time.
        budget: The search budget.

    Returns:
        For each sentence the fillings of all lengths, best first. Their nats are those of the whole sequence, as in the
        module docstring; an empty filling adds none.
    """
    _require_same_context(gaps)
    merged: list[list[TokenFilling]] = [[] for _ in gaps[0].canvas.tokens]
    for gap in gaps:
        canvas = replace(gap.canvas, tokens=gap.canvas.tokens.masked_fill(gap.canvas.editable, mask_id))
        context_nats = filling_nats(
            network, replace(canvas, editable=gap.context), mask_id, seed, special=special, budget=budget
        )
        common = (context_nats + gap.length_nats).tolist()
        for row, found in enumerate(merged):
            alone = canvas.select(torch.tensor([row], device=canvas.tokens.device))
            fillings = [TokenFilling(alone.tokens[0], 0.0)]
            if bool(alone.editable.any()):
                fillings = fill(network, alone, mask_id, alternatives, seed, warper, special=special, budget=budget)[0]
            found += [replace(filling, nats=filling.nats + common[row]) for filling in fillings]
    return [sorted(found, key=lambda filling: filling.nats) for found in merged]


def _require_same_context(gaps: Sequence[Gap]) -> None:
    """Raises ValueError unless all gaps are in the same sentences."""
    if not gaps:
        raise ValueError("`gaps` must not be empty; give one gap per candidate length")
    contexts = [(gap.context.sum(dim=1).tolist(), gap.canvas.tokens[gap.context].tolist()) for gap in gaps]
    if any(context != contexts[0] for context in contexts):
        raise ValueError("all gaps must be in the same sentences; give the same context tokens, in the same order")
    if any(bool((gap.context & gap.canvas.editable).any()) for gap in gaps):
        raise ValueError("a position must not be both context and editable; mark only unmasked tokens as context")
