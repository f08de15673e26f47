"""Exact likelihoods in given orders of generation (the chain rule, as in Uria et al. 2014).

    -log p(x0) = Σ_k -log f(x0 at i_k | state_k),     i_k chosen from state_k alone

For any rule that chooses the next position from the current state, p is a probability: Σ exp(-nats) over all sequences
is 1, without draws and without an interval. A rule that looks at the true token of a masked position would not give
one. This is the likelihood of generating in that order, which differs from the order-agnostic bound, an average over
orders. A time-conditioned network is given the fraction of positions that are masked, usually of the editable ones.

Random orders are a mixture. For each number of tokens, K orders σ_1, …, σ_K are fixed, and a text is generated in one
of them, chosen at random:

    -log p_K(x0) = -log 1/K Σ_k p(x0 | σ_k)

This, too, is a probability. For a time-agnostic network, its mean over the choice of one order is the order-agnostic
bound, which averages *outside* the logarithm. With more orders, the mean never rises, and it tends to the nats of the
diffusion itself, -log E p(x0 | σ) (Burda et al. 2016, theorem 1). So the bound is at least as loose as the difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import (
    Batch,
    Counts,
    Flags,
    PerPosition,
    PositionMask,
    TargetLogProbs,
    Values,
    per_position,
)
from diffusionbert.diffusion.tokens import entropy_of, log_prob_of, nats_of
from diffusionbert.networks.base import Network
from diffusionbert.objectives.base import Estimator, Likelihood, LikelihoodDefinition, Objective, ScoringQuantity
from diffusionbert.reporting import require_type


class Order(Enum):
    """Which masked position is generated next."""

    LEFT_TO_RIGHT = "left-to-right"
    CONFIDENCE = "confidence"
    """The position with the most probable token."""
    ENTROPY = "entropy"
    """The position whose distribution has the lowest entropy."""

    @property
    def quantity(self) -> ScoringQuantity:
        """The exact likelihood in this order, as a quantity for scoring text."""
        estimators = dict(zip(Order, (Estimator.LEFT_TO_RIGHT, Estimator.CONFIDENCE, Estimator.ENTROPY), strict=True))
        definition = LikelihoodDefinition("nll", estimator=estimators[self])
        return ScoringQuantity(self.value, definition, lambda statistics: OrderLikelihood(self, statistics.mask_id))


@dataclass(frozen=True)
class RandomOrders:
    """Random orders, fixed for each number of tokens; a text is generated in one of them, chosen at random."""

    number: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= MOST_ORDERS:
            raise ValueError(f"the number of random orders must be 1 to {MOST_ORDERS}, got {self.number}")

    @property
    def value(self) -> str:
        """Its name: random-K."""
        return f"random-{self.number}"

    @property
    def quantity(self) -> ScoringQuantity:
        """The exact likelihood of this mixture, as a quantity for scoring text."""
        definition = LikelihoodDefinition("nll", estimator=Estimator.RANDOM_ORDERS, num_orders=self.number)
        return ScoringQuantity(self.value, definition, lambda statistics: OrderLikelihood(self, statistics.mask_id))


MOST_ORDERS = 4096
"""The largest number of random orders."""
AnyOrder = Order | RandomOrders


def random_orders_named(name: str) -> RandomOrders | None:
    """The K random orders that are called random-K; None if the name is another one."""
    found = re.fullmatch(r"random-(\d{1,9})", name)
    return None if found is None else RandomOrders(int(found[1]))


def order_named(name: str) -> AnyOrder:
    """The order with this name, or so many random ones (random-K); raises ValueError if there is none."""
    require_type("order", name, str, "the name of an order")
    if (found := random_orders_named(name)) is not None:
        return found
    if name not in [order.value for order in Order]:
        known = ", ".join(order.value for order in Order)
        raise ValueError(f"`order` must be one of {known} or random-K, such as random-16, got {name!r:.40}")
    return Order(name)


class OrderLikelihood(Objective[Network]):
    """The exact likelihood of generating in a given order; nothing is drawn."""

    likelihood = Likelihood.EXACT

    def __init__(self, order: AnyOrder, mask_id: int):
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
    order: AnyOrder,
    text: PositionMask | None = None,
    positions_at_once: int = 4096,
) -> PerPosition:
    """-log p of each editable token in the given order, given all other positions.

    Under random orders, a token has no nats of its own. It is given the mean of its nats over the orders, weighted by
    their probabilities given the text, and an equal share of what is then missing to the text's nats.

    Args:
        network: A masked network.
        x0: The sequences.
        mask_id: The id of `[MASK]`.
        order: The order of generation.
        text: The positions that count for the time; by default the editable ones.
        positions_at_once: The most positions in one network call.

    Returns:
        Nats [B, L], 0 where nothing is generated. In a fixed order, the states of all tokens are known and computed
        together; adaptive orders take as many calls as the longest sequence has tokens, shared by all sequences.
    """
    if isinstance(order, RandomOrders):
        drawn = random_orders_nats(network, x0, mask_id, order.number, text, positions_at_once)
        return _mixture(torch.stack([*drawn]), x0)
    if order is Order.LEFT_TO_RIGHT:
        return _fixed(network, x0, _place(x0), mask_id, text, positions_at_once)
    rows = torch.split(torch.arange(len(x0.tokens), device=x0.tokens.device), _sequences_at_once(x0, positions_at_once))
    num_counted = _num_counted(x0, text)
    return torch.cat([_adaptive(network, x0, num_counted, some, mask_id, order) for some in rows])


def random_orders_nats(
    network: Network,
    x0: Batch,
    mask_id: int,
    number: int,
    text: PositionMask | None = None,
    positions_at_once: int = 4096,
) -> Iterator[PerPosition]:
    """The nats [B, L] in each of the first K random orders, one order after another; arguments as in `order_nats`."""
    for drawn in range(number):
        yield _fixed(network, x0, _random_rank(x0, drawn), mask_id, text, positions_at_once)


@torch.no_grad()
def is_greedy(network: Network, x0: Batch, mask_id: int, positions_at_once: int = 4096) -> Flags:
    """Whether greedy left-to-right generation yields a sequence's own tokens at its editable positions."""
    other = torch.zeros(len(x0.tokens), dtype=torch.bool, device=x0.tokens.device)
    for row, position, log_f in _states(network, x0, _place(x0), mask_id, None, positions_at_once):
        other[row[log_f.argmax(dim=-1) != x0.tokens[row, position]]] = True
    return ~other


def _sequences_at_once(x0: Batch, positions: int) -> int:
    """How many sequences have so many positions."""
    return max(1, positions // max(1, x0.tokens.shape[1]))


def _num_counted(x0: Batch, text: PositionMask | None) -> Counts:
    """The number of positions that count for the time: those of the text, by default the editable ones."""
    return (x0.editable if text is None else text).sum(dim=1).clamp(min=1)


def _place(x0: Batch) -> Values:
    """The rank [B, L] of each position from left to right."""
    return torch.arange(x0.tokens.shape[1], device=x0.tokens.device).double().expand_as(x0.tokens)


def _random_rank(x0: Batch, number: int) -> Values:
    """Random ranks [B, L] of editable positions, which depend on how many these are and on the order's number alone."""
    uniform = Noise(0, number).uniform(x0.editable.sum(dim=1), Purpose.ORDER, x0.tokens.shape[1])
    return uniform.gather(1, (x0.editable.cumsum(dim=1) - 1).clamp(min=0))


def _mixture(nats: Values, x0: Batch) -> PerPosition:
    """The nats [B, L] of a mixture of orders, from those of each order [K, B, L]; of the first if all are infinite."""
    log_p = -nats.sum(dim=2)
    mixed = math.log(len(nats)) - log_p.logsumexp(dim=0)
    weight = (log_p - log_p.logsumexp(dim=0)).exp()[:, :, None]
    mean = torch.where(weight > 0, weight * nats, 0.0).sum(dim=0)
    missing = (mixed - mean.sum(dim=1)) / x0.editable.sum(dim=1).clamp(min=1)
    return torch.where(mixed[:, None].isfinite(), mean + missing[:, None] * x0.editable, nats[0])


@torch.no_grad()
def _fixed(
    network: Network, x0: Batch, rank: Values, mask_id: int, text: PositionMask | None, positions_at_once: int
) -> PerPosition:
    """The nats of all tokens in the order of their ranks."""
    nats = torch.zeros(x0.tokens.shape, dtype=torch.float64, device=x0.tokens.device)
    for row, position, log_f in _states(network, x0, rank, mask_id, text, positions_at_once):
        nats[row, position] = -log_prob_of(log_f, x0.tokens[row, position])
    return nats


def _states(
    network: Network, x0: Batch, rank: Values, mask_id: int, text: PositionMask | None, positions_at_once: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Sequences, positions and log-probabilities of editable tokens, each given only those of lower rank."""
    where, num_counted = torch.arange(x0.tokens.shape[1], device=x0.tokens.device), _num_counted(x0, text)
    for states in torch.split(x0.editable.nonzero(), _sequences_at_once(x0, positions_at_once)):
        if not len(states):
            return  # nothing is editable
        row, position = states.unbind(dim=1)
        masked = x0.editable[row] & (rank[row] >= rank[row, position][:, None])
        targets = where == position[:, None]
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
