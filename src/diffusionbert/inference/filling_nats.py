"""The nats of a joint filling of blanks (Hoogeboom et al. 2022, "Autoregressive diffusion models", eq. 7).

The NELBO of a filling x of n blanks, in nats, is the mean of its chain rule over all n! orders σ of unmasking:

    nats(x | context) = 1/n! · Σ_σ Σ_j -log f(x_σj | context, x_σ1 … x_σ(j-1)) ≥ -log (1/n! · Σ_σ p_σ(x | context))

It equals -log p(x | context) if all orders agree. In (n - k)!·(k - 1)! of the orders, blank i is unmasked while exactly
the set S ∋ i of k blanks is masked: the blanks outside S come before it in any order, the others in S after it in any
order. Summing over subsets is therefore exact with 2^n - 1 network outputs:

    nats(x | context) = Σ_S Σ_{i ∈ S} (k - 1)!·(n - k)! / n! · -log f(x_i | context, x outside S)

With more blanks, a few whole orders are drawn. All fillings of a sequence share them, so that the ranking compares
fillings rather than draws. Whole orders have little variance if the network's conditionals are nearly consistent;
single steps of many orders would not.

Any masked language model can be used. A time-conditioned network gets t = the fraction of masked positions among the
sequence's tokens, special tokens excluded, as in training. This module does not depend on strings, processes or
schedules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import (
    Batch,
    PerSequence,
    PositionMask,
    TargetLogProbs,
    Times,
    Tokens,
    TokenSet,
    batch_sizes,
    sequence_index,
)
from diffusionbert.diffusion.tokens import log_prob_of
from diffusionbert.inference.constraints import unwrapped
from diffusionbert.networks.base import Network
from diffusionbert.reporting import report


@dataclass(frozen=True)
class SearchBudget:
    """The budget for searching and ranking fillings."""

    beams: int = 16
    """The beam width. It is halved for each of several lengths and with more than `steps` blanks, but is never less
    than the number of requested alternatives."""
    draws: int = 2
    """The number of random fillings added to those of the beam search."""
    steps: int = 24
    """With more blanks than this, some of the last ones (at most half of all) are filled two at a time."""
    ranked: int = 8
    """The number of candidates whose nats are computed, besides the greedy filling; halved like the beam width."""
    exact_up_to: int = 5
    """The largest number of blanks for which nats are summed over all subsets."""
    orders: int = 4
    """The number of unmasking orders drawn for more blanks."""
    context_orders: int = 2
    """The number of unmasking orders drawn for the context of blanks of unknown length."""
    tokens_per_call: int = 8192
    """The most tokens, including padding, per call of the network."""

    def __post_init__(self) -> None:
        if min(value for name, value in vars(self).items() if name not in ("draws", "exact_up_to")) < 1:
            raise ValueError(f"except for `draws` and `exact_up_to`, a search budget must be >= 1, got {self}")
        if min(self.draws, self.exact_up_to) < 0:
            raise ValueError(f"`draws` and `exact_up_to` must be >= 0, got {self}")


@torch.no_grad()
def filling_nats(
    network: Network,
    x0: Batch,
    mask_id: int,
    seed: int = 0,
    *,
    special: TokenSet | None = None,
    budget: SearchBudget | None = None,
) -> PerSequence:
    """The NELBO, in nats, of the tokens at the editable positions, given all other positions (`[MASK]` included).

    Constraints are ignored: conditioning on "no rule is broken" lowers the nats of all fillings by the same constant.

    Args:
        network: Any network; a `Constrained` one is unwrapped.
        x0: The filled sequences, with their blanks editable.
        mask_id: The id of `[MASK]`.
        seed: The seed of the orders.
        special: Special tokens, which do not count toward the time.
        budget: The search budget.

    Returns:
        Nats per sequence: exact for at most `budget.exact_up_to` blanks, otherwise an unbiased estimate with the same
        orders for all sequences with the same `example` key and number of blanks.
    """
    budget = budget or SearchBudget()
    return BatchedNetwork(unwrapped(network)[0], mask_id, special, budget.tokens_per_call).nats(x0, seed, budget)


def masked_fraction(tokens: Tokens, attention_mask: PositionMask, mask_id: int, special: TokenSet | None) -> Times:
    """The time of given sequences: the fraction of their tokens, without special ones, that are masked."""
    masked = (tokens == mask_id) & attention_mask
    counted = attention_mask if special is None else attention_mask & (masked | ~special.to(tokens.device)[tokens])
    t: Times = masked.sum(dim=1).double() / counted.sum(dim=1).clamp(min=1)
    return t


@dataclass(frozen=True, eq=False)
class BatchedNetwork:
    """A network that batches sequences of all lengths, and sets the time to the fraction of masked positions."""

    network: Network
    mask_id: int
    special: Tensor | None
    tokens_per_call: int

    def __call__(
        self, tokens: Tokens, attention_mask: PositionMask, targets: PositionMask
    ) -> Iterator[tuple[Tensor, TargetLogProbs]]:
        """Yields the indices of each batch's sequences and the output for them; similar lengths share a batch."""
        lengths, order = attention_mask.sum(dim=1).sort(stable=True)
        for rows in torch.split(order, batch_sizes(lengths.tolist(), self.tokens_per_call)):
            length = int(attention_mask[rows].sum(dim=1).max())
            part, seen = tokens[rows, :length], attention_mask[rows, :length]
            t = masked_fraction(part, seen, self.mask_id, self.special)
            yield rows, self.network(part, seen, t, targets[rows, :length])

    def nats(self, x0: Batch, seed: int, budget: SearchBudget) -> PerSequence:
        """Like `filling_nats`, but all sequences share calls."""
        counts = x0.editable.sum(dim=1)
        nats = torch.zeros(len(counts), dtype=torch.float64, device=counts.device)
        queries = [
            _queries(x0, (counts == count).nonzero()[:, 0], count, seed, budget)
            for count in sorted({*counts.tolist()} - {0})
        ]
        if not queries:
            return nats
        sequence, masked, weight = (torch.cat(parts) for parts in zip(*queries, strict=True))
        x_t, targets = x0.tokens[sequence].masked_fill(masked, self.mask_id), weight > 0
        log_f = self.log_prob_at(x0.tokens[sequence], x_t, x0.attention_mask[sequence], targets)
        return nats.index_add_(0, sequence[sequence_index(targets)], -log_f * weight[targets])

    def log_prob_at(self, x0: Tokens, x_t: Tokens, attention_mask: PositionMask, targets: PositionMask) -> Tensor:
        """log f(x0 | x_t) at the target positions; equal queries, which are common among fillings, are made once."""
        length = targets.shape[1]
        unique, query = torch.unique(torch.cat([x_t, attention_mask, targets], dim=1), dim=0, return_inverse=True)
        x_t, attention_mask, asked = (
            unique[:, :length],
            unique[:, length : 2 * length].bool(),
            unique[:, 2 * length :].bool(),
        )
        log_f = torch.zeros(targets.shape, dtype=torch.float64, device=x0.device)
        done = 0
        for rows, answers in self(x_t, attention_mask, asked):
            done += len(rows)
            report("scoring fillings", done, len(unique))
            row_of = torch.full((len(unique),), -1, device=x0.device)
            row_of[rows] = torch.arange(len(rows), device=x0.device)
            number = (asked[rows].flatten().cumsum(0) - 1).view(len(rows), -1)  # index of a position in `answers`
            answered = targets & (row_of[query] >= 0)[:, None]
            index = number[row_of[query][sequence_index(answered)], answered.nonzero()[:, 1]]
            log_f[answered] = log_prob_of(answers[index], x0[answered])
        return log_f[targets]


def _queries(
    x0: Batch, sequences: Tensor, num_blanks: int, seed: int, budget: SearchBudget
) -> tuple[Tensor, PositionMask, Tensor]:
    """The queries for the nats of sequences with the same number of blanks.

    Each query is the index of its sequence, its masked positions, and the weight of -log f at each position.
    """
    masked, weight = _stages(x0.example[sequences], num_blanks, seed, budget)
    shape = (len(sequences), masked.shape[1])
    positions = x0.editable[sequences].nonzero()[:, 1].view(-1, 1, num_blanks).expand(*shape, -1)
    nowhere = torch.zeros(*shape, x0.tokens.shape[1], dtype=torch.bool, device=positions.device)
    all_masked = nowhere.scatter(2, positions, masked.expand(*shape, -1)).flatten(0, 1)
    all_weight = weight.new_zeros(nowhere.shape).scatter(2, positions, weight.expand(*shape, -1)).flatten(0, 1)
    return sequences.repeat_interleave(shape[1]), all_masked, all_weight


def _stages(example: Tensor, num_blanks: int, seed: int, budget: SearchBudget) -> tuple[Tensor, Tensor]:
    """Which blanks are masked at each stage, and the weight of each blank's -log f; both [B or 1, stages, blanks]."""
    if num_blanks <= budget.exact_up_to:
        subsets = torch.tensor([*itertools.product([False, True], repeat=num_blanks)][1:], device=example.device)
        masked = subsets.view(1, -1, num_blanks)
        sizes = masked.sum(dim=-1).tolist()[0]
        weights = torch.tensor([1 / (size * math.comb(num_blanks, size)) for size in sizes], dtype=torch.float64)
        return masked, masked * weights.to(example.device)[:, None]
    uniform = Noise(seed).uniform(example, Purpose.ORDER, budget.orders, 1, num_blanks)
    rank, stage = uniform.argsort(dim=-1), torch.arange(num_blanks, device=example.device)[:, None]
    return (rank >= stage).flatten(1, 2), (rank == stage).double().flatten(1, 2) / budget.orders
