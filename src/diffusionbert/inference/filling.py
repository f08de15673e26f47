"""Joint infilling: the blanks of a sequence are filled and ranked together (Hoogeboom et al. 2022, "Autoregressive
diffusion models", eq. 7).

The NELBO of a filling x of n blanks, in nats, is the mean of its chain rule over all n! orders σ of unmasking:

    nats(x | context) = 1/n! · Σ_σ Σ_j -log f(x_σj | context, x_σ1 … x_σ(j-1)) ≥ -log (1/n! · Σ_σ p_σ(x | context))

It equals -log p(x | context) if all orders agree. In (n - k)!·(k - 1)! of the orders, blank i is unmasked while exactly
the set S ∋ i of k blanks is masked: the blanks outside S come before it in any order, the others in S after it in any
order. Summing over subsets is therefore exact with 2^n - 1 network outputs:

    nats(x | context) = Σ_S Σ_{i ∈ S} (k - 1)!·(n - k)! / n! · -log f(x_i | context, x outside S)

With more blanks, a few whole orders are drawn. All fillings of a sequence share them, so that the ranking compares
fillings, not draws. Whole orders have little variance if the network's conditionals are nearly consistent; single steps
of many orders would not.

Any masked language model can be used. A time-conditioned network gets t = the fraction of masked positions among the
sequence's tokens, special tokens excluded, as in training. This module does not depend on strings, processes or
schedules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    sequence_index,
)
from diffusionbert.diffusion.tokens import LogitsWarper, draw, log_prob_of
from diffusionbert.inference.constraints import Constrained
from diffusionbert.networks.base import Network


@dataclass(frozen=True)
class SearchBudget:
    """The budget for searching and ranking fillings."""

    beams: int = 16
    """The beam width; at least the number of requested alternatives is used."""
    draws: int = 16
    """The number of random fillings added to those of the beam search."""
    exact_up_to: int = 5
    """The largest number of blanks for which nats are summed over all subsets."""
    orders: int = 4
    """The number of unmasking orders drawn for more blanks."""
    sequences_per_call: int = 64
    """The largest batch of sequences in one call of the network."""

    def __post_init__(self) -> None:
        if min(self.beams, self.orders, self.sequences_per_call) < 1 or min(self.draws, self.exact_up_to) < 0:
            raise ValueError(
                f"`beams`, `orders` and `sequences_per_call` must be >= 1, `draws` and `exact_up_to` >= 0, got {self}"
            )


@dataclass(frozen=True, eq=False)
class TokenFilling:
    """A sequence with its blanks filled."""

    tokens: Tensor
    """The L tokens of the sequence, without padding."""
    nats: float
    """The NELBO of the filling given its context, as in the module docstring; lower is better."""


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
    """The NELBO, in nats, of the tokens at the editable positions, given all other positions (also `[MASK]`s).

    Constraints are ignored: conditioning on "no rule is broken" lowers the nats of all fillings by the same constant.

    Args:
        network: Any network; the one inside if it is `Constrained`.
        x0: The filled sequences; their blanks are editable.
        mask_id: The id of `[MASK]`.
        seed: Seeds the orders.
        special: Special tokens, which do not count for the time.
        budget: The search budget.

    Returns:
        Nats per sequence: exact for at most `budget.exact_up_to` blanks, otherwise an unbiased estimate with the same
        orders for all sequences with the same `example` key and number of blanks.
    """
    budget = budget or SearchBudget()
    timed = _TimedNetwork(_unwrap(network)[0], mask_id, special)
    counts = x0.editable.sum(dim=1)
    nats = torch.zeros(len(counts), dtype=torch.float64, device=counts.device)
    for num_blanks in set(counts.tolist()) - {0}:
        rows = (counts == num_blanks).nonzero()[:, 0]
        nats[rows] = _nats_of_equal_count(timed, x0.select(rows), num_blanks, seed, budget)
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
    """Fills all editable positions of each sequence and ranks the fillings by their nats.

    Candidates come from a beam search that always fills the most confident position next, from the same search with one
    beam (greedy filling, so the best filling is never worse than the greedy one), and from random draws.

    Args:
        network: Any network. The rules of a `Constrained` one hold, but do not change the nats.
        canvas: The sequences; their blanks are editable.
        mask_id: The id of `[MASK]`.
        alternatives: The number of fillings per sequence.
        seed: The same seed gives the same fillings.
        warper: Forbidden tokens, top-k and top-p restrict the candidates; temperature affects the random draws only.
        special: Special tokens, which do not count for the time.
        budget: The search budget.

    Returns:
        For each sequence its fillings, best first; fewer than `alternatives` if fewer exist or were found.
    """
    if alternatives < 1:
        raise ValueError(f"`alternatives` must be >= 1, got {alternatives}")
    empty = (~canvas.editable.any(dim=1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(
            f"sequence {empty[0]} has nothing to fill; mark at least one position per sequence as editable"
        )
    budget = budget or SearchBudget()
    budget = replace(budget, beams=max(budget.beams, alternatives))
    search = _Search(network, mask_id, special, warper or LogitsWarper(), budget)
    rows = [canvas.select(torch.tensor([row], device=canvas.tokens.device)) for row in range(len(canvas.tokens))]
    return [search.ranked(row, seed)[:alternatives] for row in rows]


@dataclass(frozen=True, eq=False)
class _TimedNetwork:
    """A network whose time is computed from the fraction of masked positions."""

    network: Network
    mask_id: int
    special: Tensor | None

    def __call__(self, tokens: Tokens, attend: PositionMask, targets: PositionMask) -> TargetLogProbs:
        masked = tokens == self.mask_id
        counted = attend if self.special is None else attend & (masked | ~self.special.to(tokens.device)[tokens])
        t: Times = masked.sum(dim=1).double() / counted.sum(dim=1).clamp(min=1)
        return self.network(tokens, attend, t, targets)


def _unwrap(network: Network) -> tuple[Network, list[Constrained]]:
    """The innermost network and the constraints around it."""
    constraints = []
    while isinstance(network, Constrained):
        constraints.append(network)
        network = network.network
    return network, constraints


def _nats_of_equal_count(
    network: _TimedNetwork, x0: Batch, num_blanks: int, seed: int, budget: SearchBudget
) -> PerSequence:
    """The nats of sequences that have the same number of blanks."""
    masked, weight = _stages(x0, num_blanks, seed, budget)
    shape = (len(x0.tokens), masked.shape[1])
    positions = x0.editable.nonzero()[:, 1].view(-1, 1, num_blanks).expand(*shape, -1)
    nowhere = torch.zeros(*shape, x0.tokens.shape[1], dtype=torch.bool, device=positions.device)
    all_masked = nowhere.scatter(2, positions, masked.expand(*shape, -1)).flatten(0, 1)
    all_weight = weight.new_zeros(nowhere.shape).scatter(2, positions, weight.expand(*shape, -1)).flatten(0, 1)
    x0 = x0.select(torch.arange(shape[0], device=positions.device).repeat_interleave(shape[1]))
    x_t = replace(x0, tokens=x0.tokens.masked_fill(all_masked, network.mask_id))
    targets = all_weight > 0
    log_f = _log_prob_at(network, x0.tokens, x_t, targets, budget.sequences_per_call)
    nats = torch.zeros(len(targets), dtype=torch.float64, device=positions.device)
    nats.index_add_(0, sequence_index(targets), -log_f * all_weight[targets])
    return nats.view(shape).sum(dim=1)


def _stages(x0: Batch, num_blanks: int, seed: int, budget: SearchBudget) -> tuple[Tensor, Tensor]:
    """Which blanks are masked, and the weight of each blank's -log f then: both [B or 1, stages, blanks]."""
    device = x0.tokens.device
    if num_blanks <= budget.exact_up_to:
        subsets = list(itertools.product([False, True], repeat=num_blanks))[1:]
        weights = [1 / (sum(subset) * math.comb(num_blanks, sum(subset))) for subset in subsets]
        masked = torch.tensor([subsets], device=device)
        return masked, masked * torch.tensor(weights, dtype=torch.float64, device=device)[:, None]
    uniform = Noise(seed).uniform(x0.example, Purpose.ORDER, budget.orders, 1, num_blanks)
    rank, stage = uniform.argsort(dim=-1), torch.arange(num_blanks, device=device)[:, None]
    return (rank >= stage).flatten(1, 2), (rank == stage).double().flatten(1, 2) / budget.orders


def _log_prob_at(
    network: _TimedNetwork, x0: Tokens, x_t: Batch, targets: PositionMask, sequences_per_call: int
) -> Tensor:
    """log f(x0 | x_t) at the target positions; equal queries, which fillings often share, are made once."""
    queries, query = torch.unique(torch.cat([x_t.tokens, x_t.attend, targets], dim=1), dim=0, return_inverse=True)
    length = targets.shape[1]
    row = sequence_index(targets)
    log_f = torch.zeros(len(row), dtype=torch.float64, device=x0.device)
    for first in range(0, len(queries), sequences_per_call):
        tokens, attend, positions = queries[first : first + sequences_per_call].split(length, dim=1)
        positions = positions.bool()
        answers = network(tokens, attend.bool(), positions)
        number = (positions.flatten().cumsum(0) - 1).view(positions.shape)  # index of a position in `answers`
        answered = (query >= first) & (query < first + sequences_per_call)
        answered_positions = targets & answered[:, None]
        index = number[query[answered] - first][answered_positions[answered]]
        log_f[answered[row]] = log_prob_of(answers[index], x0[answered_positions])
    return log_f


@dataclass(frozen=True, eq=False)
class _Search:
    """Searches for fillings, one sequence at a time."""

    network: Network
    mask_id: int
    special: Tensor | None
    warper: LogitsWarper
    budget: SearchBudget

    def ranked(self, row: Batch, seed: int) -> list[TokenFilling]:
        """All candidates, best first."""
        found = torch.cat([self.beam(row, self.budget.beams), self.beam(row, 1), self.drawn(row, seed)])
        if not len(found):
            raise ValueError(f"no filling of {str(row.tokens[0].tolist())[:40]} is possible; forbid fewer words")
        found = torch.unique(found, dim=0)
        x0 = replace(row.select(torch.zeros(len(found), dtype=torch.long, device=found.device)), tokens=found)
        nats = filling_nats(self.network, x0, self.mask_id, seed, special=self.special, budget=self.budget)
        return [TokenFilling(found[best], float(nats[best])) for best in nats.argsort(stable=True).tolist()]

    @torch.no_grad()
    def beam(self, row: Batch, width: int) -> Tokens:
        """Beam search over fillings, the most confident position first."""
        tokens = row.tokens.masked_fill(row.editable, self.mask_id)
        scores = torch.zeros(1, dtype=torch.float64, device=tokens.device)
        for _ in range(int(row.editable.sum())):
            if not len(tokens):
                break
            chosen, log_f, log_p = self.most_confident(row, tokens)
            best = log_f.double().masked_fill(~(log_p > -torch.inf), -torch.inf).topk(min(width, log_f.shape[-1]))
            extended = (scores[:, None] + best.values).flatten()
            scores, kept = extended.topk(min(width, int((extended > -torch.inf).sum())))
            parent = kept // best.values.shape[1]
            tokens = tokens[parent].masked_scatter(chosen[parent], best.indices.flatten()[kept])
        return tokens

    @torch.no_grad()
    def drawn(self, row: Batch, seed: int) -> Tokens:
        """Random fillings, the most confident position first; dead ends are dropped."""
        tokens = row.tokens.masked_fill(row.editable, self.mask_id).expand(self.budget.draws, -1)
        for step in range(int(row.editable.sum())):
            if not len(tokens):
                break
            chosen, _, log_p = self.most_confident(row, tokens)
            alive = (log_p > -torch.inf).any(dim=-1)
            uniform = Noise(seed, step).uniform(row.example, Purpose.SAMPLE, int(alive.sum()))[0]
            tokens = tokens[alive].masked_scatter(chosen[alive], draw(log_p[alive], uniform))
        return tokens

    def most_confident(self, row: Batch, tokens: Tokens) -> tuple[PositionMask, TargetLogProbs, TargetLogProbs]:
        """The masked position of each partial filling at which some allowed token has the highest probability.

        Also log f at this position, and the same after warping and after the rules for filling it alone.
        """
        parts = [self._most_confident(row, part) for part in torch.split(tokens, self.budget.sequences_per_call)]
        chosen, log_f, log_p = (torch.cat(part) for part in zip(*parts, strict=True))
        return chosen, log_f, log_p

    def _most_confident(self, row: Batch, tokens: Tokens) -> tuple[PositionMask, TargetLogProbs, TargetLogProbs]:
        network, constraints = _unwrap(self.network)
        masked = row.editable & (tokens == self.mask_id)
        log_f = _TimedNetwork(network, self.mask_id, self.special)(tokens, row.attend.expand_as(masked), masked)
        confidence = LogitsWarper(forbidden=self.warper.forbidden)(log_f).amax(dim=-1)
        best = confidence.new_full(masked.shape, -torch.inf).masked_scatter(masked, confidence).argmax(dim=1)
        chosen = masked & (torch.arange(masked.shape[1], device=masked.device) == best[:, None])
        log_f = constrained = log_f[chosen[masked]]
        for rules in constraints:
            constrained = rules.forbid(tokens, chosen, constrained)
        return chosen, log_f, self.warper(constrained)


# ---- blanks of unknown length ---------------------------------------------------------------------------------------
#
# Blanks of unknown length: fillings of several lengths, ranked by the chain rule of the whole sequence.
#
#     nats(sequence) = -log p(length) + nats(context | length, blank masked) + nats(filling | context, length)
#
# The last term alone cannot compare lengths. Its sum prefers short fillings, because every token costs something; its
# mean per token prefers long ones, because later tokens of a phrase are easy to predict. Both condition on the length,
# so neither says how likely the length is. The context does: with three blanks in "New [ ] [ ] [ ] is a city", the
# surrounding tokens are less likely than with one. By Bayes' rule,
#
#     p(length, filling | context) ∝ p(length) · p(context | length) · p(filling | context, length)
#
# where p(context | length) is the probability of the unmasked tokens while the blank stays masked. It does not depend
# on the filling. `filling_nats` estimates it with the same unmasking orders for all lengths, so that differences
# between lengths have little variance.
#
# This module does not depend on strings: it gets each sentence once per length.


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
