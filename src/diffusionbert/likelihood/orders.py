"""Exact likelihoods in a deterministic order of generation (the chain rule, as in Uria et al. 2014).

    -log p(x0) = Σ_k -log f(x0 at i_k | state_k),     i_k chosen from state_k alone

For any rule that chooses the next position from the current state, p is a probability: Σ exp(-nats) over all sequences
is 1, without draws and without an interval. A rule that looks at the true token of a masked position would not give
one. This is the likelihood of generating in that order, which differs from the order-agnostic bound, an average over
orders. A time-conditioned network is given the fraction of the text's positions that are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, Counts, Flags, PerPosition, PositionMask, TargetLogProbs, per_position
from diffusionbert.diffusion.tokens import entropy_of, log_prob_of, nats_of
from diffusionbert.networks.base import Network
from diffusionbert.objectives.base import Estimator, Likelihood, LikelihoodDefinition, Objective, ScoringQuantity


class Order(Enum):
    """Which masked position is generated next."""

    LEFT_TO_RIGHT = "left-to-right"
    CONFIDENCE = "confidence"
    """The position with the most probable token."""
    ENTROPY = "entropy"
    """The position whose distribution has the lowest entropy."""

    @classmethod
    def named(cls, name: str) -> Order:
        """The order with this name; raises ValueError if there is none."""
        if name not in [order.value for order in cls]:
            known = ", ".join(order.value for order in cls)
            raise ValueError(f"`order` must be one of {known}, got {name!r:.40}")
        return cls(name)

    @property
    def quantity(self) -> ScoringQuantity:
        """The exact likelihood in this order, as a quantity for scoring text."""
        estimators = dict(zip(Order, (Estimator.LEFT_TO_RIGHT, Estimator.CONFIDENCE, Estimator.ENTROPY), strict=True))
        definition = LikelihoodDefinition("nll", estimator=estimators[self])
        return ScoringQuantity(self.value, definition, lambda statistics: OrderLikelihood(self, statistics.mask_id))


class OrderLikelihood(Objective[Network]):
    """The exact likelihood of generating in a given order; nothing is drawn."""

    likelihood = Likelihood.EXACT

    def __init__(self, order: Order, mask_id: int):
        super().__init__()
        self.order, self.mask_id = order, mask_id

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPosition:
        at_once = 4096 if x0.tokens.device.type == "cpu" else 65_536
        return order_nats(network, x0, self.mask_id, self.order, positions_at_once=at_once)


@torch.no_grad()
def order_nats(
    network: Network,
    x0: Batch,
    mask_id: int,
    order: Order,
    text: PositionMask | None = None,
    positions_at_once: int = 4096,
) -> PerPosition:
    """-log p of each editable token in the given order, given all other positions.

    Args:
        network: A masked network.
        x0: The sequences.
        mask_id: The id of `[MASK]`.
        order: The order of generation.
        text: The positions that count for the time; by default the editable ones.
        positions_at_once: The most positions in one network call.

    Returns:
        Nats [B, L], 0 where nothing is generated. Left to right, the states of all tokens are known and computed
        together; the other orders take as many calls as the longest sequence has tokens, shared by all sequences.
    """
    at_once = max(1, positions_at_once // max(1, x0.tokens.shape[1]))
    num_counted = (x0.editable if text is None else text).sum(dim=1).clamp(min=1)
    if order is Order.LEFT_TO_RIGHT:
        return _left_to_right(network, x0, num_counted, mask_id, at_once)
    rows = torch.arange(len(x0.tokens), device=x0.tokens.device)
    return torch.cat([_adaptive(network, x0, num_counted, some, mask_id, order) for some in torch.split(rows, at_once)])


@torch.no_grad()
def is_greedy(network: Network, x0: Batch, mask_id: int, positions_at_once: int = 4096) -> Flags:
    """Whether greedy left-to-right generation yields a sequence's own tokens at its editable positions."""
    at_once = max(1, positions_at_once // max(1, x0.tokens.shape[1]))
    num_counted = x0.editable.sum(dim=1).clamp(min=1)
    other = torch.zeros(len(x0.tokens), dtype=torch.bool, device=x0.tokens.device)
    for row, position, log_f in _states(network, x0, num_counted, mask_id, at_once):
        other[row[log_f.argmax(dim=-1) != x0.tokens[row, position]]] = True
    return ~other


def _left_to_right(network: Network, x0: Batch, num_counted: Counts, mask_id: int, at_once: int) -> PerPosition:
    """The nats of all tokens."""
    nats = torch.zeros(x0.tokens.shape, dtype=torch.float64, device=x0.tokens.device)
    for row, position, log_f in _states(network, x0, num_counted, mask_id, at_once):
        nats[row, position] = -log_prob_of(log_f, x0.tokens[row, position])
    return nats


def _states(
    network: Network, x0: Batch, num_counted: Counts, mask_id: int, at_once: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Sequences, positions and log-probabilities of editable tokens, each given only those before it."""
    where = torch.arange(x0.tokens.shape[1], device=x0.tokens.device)
    for states in torch.split(x0.editable.nonzero(), at_once):
        row, position = states.unbind(dim=1)
        masked, targets = x0.editable[row] & (where >= position[:, None]), where == position[:, None]
        fraction = masked.sum(dim=1).double() / num_counted[row]
        tokens = x0.tokens[row].masked_fill(masked, mask_id)
        yield row, position, network(tokens, x0.attention_mask[row], fraction, targets)


def _adaptive(network: Network, x0: Batch, num_counted: Tensor, rows: Tensor, mask_id: int, order: Order) -> Tensor:
    """The nats of some sequences; each call unmasks one position of each."""
    width = x0.tokens.shape[1]
    nats = torch.zeros(len(rows), width, dtype=torch.float64, device=rows.device)
    masked = x0.editable[rows]
    while bool(masked.any()):
        active = masked.any(dim=1).nonzero()[:, 0]
        some = x0.select(rows[active])
        targets = masked[active, : some.tokens.shape[1]]
        tokens = some.tokens.masked_fill(targets, mask_id)
        fraction = targets.sum(dim=1).double() / num_counted[rows[active]]
        log_f = network(tokens, some.attention_mask, fraction, targets)
        best = per_position(_preference(log_f, order), targets).masked_fill(~targets, -torch.inf).argmax(dim=1)
        chosen = torch.arange(targets.shape[1], device=rows.device) == best[:, None]
        nats[active, best] = nats_of(log_f, some.tokens, targets)[chosen]
        masked[active, best] = False
    return nats


def _preference(log_f: TargetLogProbs, order: Order) -> Tensor:
    """A score that is highest where to generate next; ties go to the left."""
    if order is Order.CONFIDENCE:
        return log_f.amax(dim=-1)
    return -entropy_of(log_f)
