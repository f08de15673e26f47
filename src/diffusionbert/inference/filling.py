"""Hoogeboom et al. 2022, "Autoregressive diffusion models", eq. 7, on the blanks of a row: filling them jointly.

The nats of a filling x of n blanks are the mean, over all n! orders σ of writing it, of its chain rule:

    nats(x | context) = 1/n! · Σ_σ Σ_j -log f(x_σj | context, x_σ1 … x_σ(j-1)) ≥ -log (1/n! · Σ_σ p_σ(x | context))

which is -log p(x | context) itself if all orders agree. Blank i is written while exactly the set S ∋ i of k blanks is
hidden in (n - k)!·(k - 1)! of the orders: those before in any order, i, those after in any order. Hence the sum over
all subsets, exact in 2^n - 1 answers of the network,

    nats(x | context) = Σ_S Σ_{i ∈ S} (k - 1)!·(n - k)! / n! · -log f(x_i | context, x outside S)

Beyond a few blanks, some whole orders are drawn. Those of all fillings of a row are the same, so that ranks compare
fillings and not draws; and the better a network's conditionals agree with each other, the less a draw matters, which
is not so of single steps of many orders.

Any masked language model will do. A network that wants a time is told the share of hidden places among the row's
words, special tokens not counted: in training, that is where it would see so much hidden. This module knows no
strings, no processes and no schedules.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionbert.diffusion.categorical import LogitsWarper, draw, log_prob_of
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import (
    Batch,
    PerSequence,
    PositionMask,
    TargetLogProbs,
    Times,
    Tokens,
    TokenSet,
)
from diffusionbert.inference.constraints import Constrained
from diffusionbert.networks.base import Network


@dataclass(frozen=True)
class SearchBudget:
    """How hard to look for fillings, and how closely to look at each."""

    beams: int = 16
    """The partial fillings that are followed at a time; never fewer than the alternatives asked for."""
    draws: int = 16
    """The fillings drawn at random besides."""
    exact_up_to: int = 5
    """The most blanks for which nats are exact."""
    orders: int = 4
    """The orders of writing that are drawn for more blanks than that."""
    sequences_per_call: int = 64

    def __post_init__(self) -> None:
        if min(self.beams, self.orders, self.sequences_per_call) < 1 or min(self.draws, self.exact_up_to) < 0:
            raise ValueError(f"{self}: beams, orders and rows_per_call must be at least 1, the others at least 0")


@dataclass(frozen=True, eq=False)
class TokenFilling:
    """A row with its blanks filled."""

    tokens: Tensor
    """The row's L tokens, without padding."""
    nats: float
    """-log p(filling | context), as the module says it; less is better."""


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
    """The nats of what stands at the editable places of each row, given the other places, `[MASK]`s among them.

    Exact for at most `budget.exact_up_to` places, else an unbiased estimate, by the same orders for all rows of one
    `example` and one number of places. Of a `Constrained` network, the network inside is asked: given that no rule is
    broken, all nats are less by the same number.
    """
    budget = budget or SearchBudget()
    asker = _Asker(_unruled(network)[0], mask_id, special)
    count = x0.editable.sum(dim=1)
    nats = torch.zeros(len(count), dtype=torch.float64, device=count.device)
    for num_positions in sorted(set(count.tolist())):
        rows = (count == num_positions).nonzero()[:, 0]
        if num_positions:
            nats[rows] = _nats_of_equal_count(asker, x0.select(rows), num_positions, seed, budget)
    return nats


def fill(
    network: Network,
    canvas: Batch,
    mask_id: int,
    alternatives: int,
    seed: int,
    warper: LogitsWarper | None = None,
    *,
    special: TokenSet | None = None,
    budget: SearchBudget | None = None,
) -> list[list[TokenFilling]]:
    """For each row, the `alternatives` best ways to fill all its editable places, best first.

    They are the best of those found: by a beam search that fills each partial filling's surest place next; by the same
    with one beam, which is plain greedy filling, so that the best is never worse than that; and by some random draws.
    There are fewer if fewer fillings are possible. The warper and the rules of a `Constrained` network limit the
    fillings; temperature only sharpens the random draws; nats are the network's own.
    """
    if alternatives < 1:
        raise ValueError(f"alternatives must be at least 1, given {alternatives}")
    empty = (~canvas.editable.any(dim=1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"row {empty[0]} has nothing to fill: mark at least one editable place in each row")
    budget = budget or SearchBudget()
    budget = replace(budget, beams=max(budget.beams, alternatives))
    search = _Search(network, mask_id, special, warper or LogitsWarper(), budget)
    rows = [canvas.select(torch.tensor([row], device=canvas.tokens.device)) for row in range(len(canvas.tokens))]
    return [search.ranked(row, seed)[:alternatives] for row in rows]


@dataclass(frozen=True, eq=False)
class _Asker:
    """A network that is told the time by what is hidden."""

    network: Network
    mask_id: int
    special: Tensor | None

    def __call__(self, tokens: Tokens, attend: PositionMask, targets: PositionMask) -> TargetLogProbs:
        masked = tokens == self.mask_id
        words = attend if self.special is None else attend & (masked | ~self.special.to(tokens.device)[tokens])
        t: Times = masked.sum(dim=1).double() / words.sum(dim=1).clamp(min=1)
        return self.network(tokens, attend, t, targets)


def _unruled(network: Network) -> tuple[Network, list[Constrained]]:
    """The network inside, and the rules around it."""
    rules = []
    while isinstance(network, Constrained):
        rules.append(network)
        network = network.network
    return network, rules


def _nats_of_equal_count(ask: _Asker, x0: Batch, num_positions: int, seed: int, budget: SearchBudget) -> PerSequence:
    """The nats of rows that have equally many editable places."""
    masked, weight = _stages(x0, num_positions, seed, budget)
    shape = (len(x0.tokens), masked.shape[1])
    positions = x0.editable.nonzero()[:, 1].view(-1, 1, num_positions).expand(*shape, -1)
    nowhere = torch.zeros(*shape, x0.tokens.shape[1], dtype=torch.bool, device=positions.device)
    all_masked = nowhere.scatter(2, positions, masked.expand(*shape, -1)).flatten(0, 1)
    all_weight = weight.new_zeros(nowhere.shape).scatter(2, positions, weight.expand(*shape, -1)).flatten(0, 1)
    x0 = x0.select(torch.arange(shape[0], device=positions.device).repeat_interleave(shape[1]))
    x_t = replace(x0, tokens=x0.tokens.masked_fill(all_masked, ask.mask_id))
    targets = all_weight > 0
    log_f = _log_prob_of_places(ask, x0.tokens, x_t, targets, budget.sequences_per_call)
    nats = torch.zeros(len(targets), dtype=torch.float64, device=positions.device)
    nats.index_add_(0, targets.nonzero()[:, 0], -log_f * all_weight[targets])
    return nats.view(shape).sum(dim=1)


def _stages(x0: Batch, num_positions: int, seed: int, budget: SearchBudget) -> tuple[Tensor, Tensor]:
    """What is hidden, and the weight of each place's -log f then: both [rows or 1, stages, places]."""
    device = x0.tokens.device
    if num_positions <= budget.exact_up_to:
        subsets = list(itertools.product([False, True], repeat=num_positions))[1:]
        weights = [1 / (sum(subset) * math.comb(num_positions, sum(subset))) for subset in subsets]
        masked = torch.tensor([subsets], device=device)
        return masked, masked * torch.tensor(weights, dtype=torch.float64, device=device)[:, None]
    uniform = Noise(seed).uniform(x0.example, Purpose.ORDER, budget.orders, 1, num_positions)
    turn, stage = uniform.argsort(dim=-1), torch.arange(num_positions, device=device)[:, None]
    return (turn >= stage).flatten(1, 2), (turn == stage).double().flatten(1, 2) / budget.orders


def _log_prob_of_places(ask: _Asker, x0: Tokens, x_t: Batch, targets: PositionMask, sequences_per_call: int) -> Tensor:
    """log f(x0 | x_t) at all asked places, each different question asked once: fillings share many words."""
    questions, question = torch.unique(torch.cat([x_t.tokens, x_t.attend, targets], dim=1), dim=0, return_inverse=True)
    length = targets.shape[1]
    row = targets.nonzero()[:, 0]
    log_f = torch.zeros(len(row), dtype=torch.float64, device=x0.device)
    for first in range(0, len(questions), sequences_per_call):
        tokens, attend, positions = questions[first : first + sequences_per_call].split(length, dim=1)
        positions = positions.bool()
        answers = ask(tokens, attend.bool(), positions)
        number = (positions.flatten().cumsum(0) - 1).view(positions.shape)  # of a place among those asked
        here = (question >= first) & (question < first + sequences_per_call)
        mine = targets & here[:, None]
        log_f[here[row]] = log_prob_of(answers[number[question[here] - first][mine[here]]], x0[mine])
    return log_f


@dataclass(frozen=True, eq=False)
class _Search:
    """Looks for fillings of one row at a time."""

    network: Network
    mask_id: int
    special: Tensor | None
    warper: LogitsWarper
    budget: SearchBudget

    def ranked(self, row: Batch, seed: int) -> list[TokenFilling]:
        """All fillings found, best first."""
        found = torch.cat([self.beam(row, self.budget.beams), self.beam(row, 1), self.drawn(row, seed)])
        if not len(found):
            raise ValueError(f"no filling of {row.tokens[0].tolist()} is possible: forbid fewer words")
        found = torch.unique(found, dim=0)
        x0 = replace(row.select(torch.zeros(len(found), dtype=torch.long, device=found.device)), tokens=found)
        nats = filling_nats(self.network, x0, self.mask_id, seed, special=self.special, budget=self.budget)
        return [TokenFilling(found[best], float(nats[best])) for best in nats.argsort(stable=True).tolist()]

    @torch.no_grad()
    def beam(self, row: Batch, width: int) -> Tokens:
        """The `width` likeliest fillings, as far as one sees that fills the surest place first."""
        tokens = row.tokens.masked_fill(row.editable, self.mask_id)
        scores = torch.zeros(1, dtype=torch.float64, device=tokens.device)
        for _ in range(int(row.editable.sum())):
            if not len(tokens):
                break
            chosen, log_f, log_p = self.surest(row, tokens)
            best = log_f.double().masked_fill(~(log_p > -torch.inf), -torch.inf).topk(min(width, log_f.shape[-1]))
            extended = (scores[:, None] + best.values).flatten()
            scores, kept = extended.topk(min(width, int((extended > -torch.inf).sum())))
            parent = kept // best.values.shape[1]
            tokens = tokens[parent].masked_scatter(chosen[parent], best.indices.flatten()[kept])
        return tokens

    @torch.no_grad()
    def drawn(self, row: Batch, seed: int) -> Tokens:
        """Random fillings, the surest place first; dead ends are left out."""
        tokens = row.tokens.masked_fill(row.editable, self.mask_id).expand(self.budget.draws, -1)
        for step in range(int(row.editable.sum())):
            if not len(tokens):
                break
            chosen, _, log_p = self.surest(row, tokens)
            alive = (log_p > -torch.inf).any(dim=-1)
            uniform = Noise(seed, step).uniform(row.example, Purpose.SAMPLE, int(alive.sum()))[0]
            tokens = tokens[alive].masked_scatter(chosen[alive], draw(log_p[alive], uniform))
        return tokens

    def surest(self, row: Batch, tokens: Tokens) -> tuple[PositionMask, TargetLogProbs, TargetLogProbs]:
        """The hidden place of each partial filling at which the network is surest of a word that may be written.

        Also log f there, and the same shaped and without what would break a rule if this place alone were written.
        """
        parts = [self._surest(row, part) for part in torch.split(tokens, self.budget.sequences_per_call)]
        chosen, log_f, log_p = (torch.cat(part) for part in zip(*parts, strict=True))
        return chosen, log_f, log_p

    def _surest(self, row: Batch, tokens: Tokens) -> tuple[PositionMask, TargetLogProbs, TargetLogProbs]:
        network, rules = _unruled(self.network)
        ask = _Asker(network, self.mask_id, self.special)
        masked = row.editable & (tokens == self.mask_id)
        log_f = ask(tokens, row.attend.expand_as(masked), masked)
        sureness = LogitsWarper(forbidden=self.warper.forbidden)(log_f).amax(dim=-1)
        surest = sureness.new_full(masked.shape, -torch.inf).masked_scatter(masked, sureness).argmax(dim=1)
        chosen = masked & (torch.arange(masked.shape[1], device=masked.device) == surest[:, None])
        log_f = allowed = log_f[chosen[masked]]
        for rule in rules:
            allowed = rule.forbid(tokens, chosen, allowed)
        return chosen, log_f, self.warper(allowed)
