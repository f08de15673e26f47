"""Joint infilling: fills the blanks of many sequences together, and ranks the fillings by their nats.

Blanks of unknown length are filled at several lengths. Nats given the length cannot compare lengths: their sum favors
short fillings, because every token costs something; their mean per token favors long ones, because later tokens of a
phrase are easy to predict. The context tells how likely a length is: with three masks in "New [ ] [ ] [ ] is a city",
the surrounding tokens are less likely than with one. By Bayes' rule, normalized over the candidate lengths,

    nats(length, x | context) = -log p(length | context) + nats(x | context, length)
    p(length | context) ∝ p(length) · p(context | length)

where p(context | length) is the probability of the unmasked tokens while the blanks stay masked. It is estimated with
the same unmasking orders for all lengths, so that differences between lengths have little variance. Given lengths have
probability 1, so the nats of both kinds of blanks are comparable, and Σ exp(-nats) ≤ 1 over all fillings of a text.

This module does not depend on strings, processes or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch, PerSequence, PositionMask, TargetLogProbs, Tokens, TokenSet
from diffusionbert.diffusion.tokens import LogitsWarper, draw
from diffusionbert.inference.constraints import Constrained, unwrapped
from diffusionbert.inference.filling_nats import BatchedNetwork, SearchBudget
from diffusionbert.networks.base import Network
from diffusionbert.reporting import report

_REQUESTS_AT_ONCE = 16
"""The most requests that share forward passes: enough to fill the batches, few enough for a laptop's memory."""


@dataclass(frozen=True, eq=False)
class Gap:
    """A sequence whose blanks have one of the candidate lengths, which may be 0."""

    canvas: Batch
    """One sequence; the positions of its blanks are editable."""
    context: PositionMask
    """The unmasked tokens of the sentence, without special tokens: the same for every length."""
    length_nats: PerSequence
    """-log p(length of the sequence); 0 if lengths are not modeled."""
    word_starts: PositionMask | None = None
    """Editable positions that must not get a continuation token."""
    word_continuations: PositionMask | None = None
    """Editable positions that must get a continuation token."""


@dataclass(frozen=True, eq=False)
class TokenFilling:
    """A sequence with its blanks filled."""

    tokens: Tensor
    """The L tokens of the sequence, without padding."""
    nats: float
    """The NELBO of the filling and of its length, given the context; lower is better.

    -log p(length, filling | context) as in the module docstring, where p(length | context) is normalized over
    the candidate lengths. If a request has a single length, this is -log p(filling | context, length).
    """
    length_nats: float = 0.0
    """The part of `nats` that is -log p(length | context)."""
    gap: int = 0
    """The index of its gap in the request."""


@torch.no_grad()
def fill_gaps(
    network: Network,
    requests: Sequence[Sequence[Gap]],
    mask_id: int,
    alternatives: int,
    seed: int,
    warper: LogitsWarper | None = None,
    *,
    special: TokenSet | None = None,
    continuation: TokenSet | None = None,
    budget: SearchBudget | None = None,
) -> list[list[TokenFilling]]:
    """Fills all blanks of each request jointly and ranks the fillings of all lengths together.

    Candidates come from a beam search that always fills the most confident position next, from the same search with one
    beam (greedy filling, so that the best filling is never worse than the greedy one), and from random draws. Forward
    passes are shared by all of these, all lengths and all requests. The search scores candidates by the chain rule in
    its own order, an exact likelihood; the best of them are then ranked by their nats. A request's fillings do not
    depend on the other requests.

    Args:
        network: Any network. The rules of a `Constrained` one apply, but do not change the nats.
        requests: One sentence each, given once per candidate length of its blanks.
        mask_id: The id of `[MASK]`.
        alternatives: The number of fillings per request.
        seed: The same seed gives the same fillings.
        warper: Forbidden tokens, top-k and top-p restrict the candidates; temperature affects only the random draws.
        special: Special tokens, which do not count toward the time.
        continuation: The tokens that continue a word, for the gaps' `word_starts` and `word_continuations`.
        budget: The search budget.

    Returns:
        The fillings of each request, best first; fewer than `alternatives` if fewer exist or were found, none if the
        rules exclude all.
    """
    if alternatives < 1:
        raise ValueError(f"`alternatives` must be >= 1, got {alternatives}")
    for gaps in requests:
        _require_same_context(gaps)
    budget = budget or SearchBudget()
    innermost, rules = unwrapped(network)
    batched = BatchedNetwork(innermost, mask_id, special, budget.tokens_per_call)
    found: list[list[TokenFilling]] = []
    for first in range(0, len(requests), _REQUESTS_AT_ONCE):
        together = _Gaps.of(requests[first : first + _REQUESTS_AT_ONCE], mask_id)
        found += _Search(
            batched, rules, warper or LogitsWarper(), continuation, budget, alternatives, seed, together
        ).ranked()
    return [fillings[:alternatives] for fillings in found]


def _require_same_context(gaps: Sequence[Gap]) -> None:
    """Raises ValueError unless all gaps are in the same sentence."""
    if not gaps:
        raise ValueError("a request must not be empty; give one gap per candidate length")
    if any(len(gap.canvas.tokens) != 1 for gap in gaps):
        raise ValueError("a gap must have one sequence; give each sentence as a request of its own")
    contexts = [gap.canvas.tokens[gap.context].tolist() for gap in gaps]
    if any(context != contexts[0] for context in contexts):
        raise ValueError("all gaps must be in the same sentence; give the same context tokens, in the same order")
    if any(bool((gap.context & gap.canvas.editable).any()) for gap in gaps):
        raise ValueError("a position must not be both context and editable; mark only unmasked tokens as context")


_BEAM, _GREEDY = -1, 0
"""The kinds of partial fillings; random draws are numbered from 1."""


@dataclass(frozen=True, eq=False)
class _Gaps:
    """The gaps of many requests, padded to one length."""

    request: Tensor
    """The request of each gap."""
    canvas: Batch
    """The sequences, masked at all editable positions."""
    context: PositionMask
    length_nats: PerSequence
    word_starts: PositionMask
    word_continuations: PositionMask

    @classmethod
    def of(cls, requests: Sequence[Sequence[Gap]], mask_id: int) -> _Gaps:
        gaps = [gap for request in requests for gap in request]
        length = max(gap.canvas.tokens.shape[1] for gap in gaps)

        def padded(tensors: Sequence[Tensor], value: int = 0) -> Tensor:
            return torch.cat([pad(tensor, (0, length - tensor.shape[1]), value=value) for tensor in tensors])

        editable = padded([gap.canvas.editable for gap in gaps])
        # Padding is filled with masks, which no rule can match.
        tokens = padded([gap.canvas.tokens for gap in gaps], mask_id).masked_fill(editable, mask_id)
        return cls(
            torch.tensor([number for number, request in enumerate(requests) for _ in request], device=tokens.device),
            Batch(
                tokens,
                padded([gap.canvas.attention_mask for gap in gaps]),
                editable,
                torch.cat([gap.canvas.example for gap in gaps]),
                torch.cat([gap.canvas.strata for gap in gaps]),
            ),
            padded([gap.context for gap in gaps]),
            torch.cat([gap.length_nats for gap in gaps]),
            padded([_or_nowhere(gap.word_starts, gap) for gap in gaps]),
            padded([_or_nowhere(gap.word_continuations, gap) for gap in gaps]),
        )


@dataclass(frozen=True, eq=False)
class _States:
    """Partial fillings of many gaps."""

    gap: Tensor
    kind: Tensor
    tokens: Tokens
    nats: PerSequence
    """The nats so far, by the chain rule in the search's own order."""

    def select(self, index: Tensor) -> _States:
        return _States(self.gap[index], self.kind[index], self.tokens[index], self.nats[index])

    def distinct(self) -> tuple[Tensor, Tensor]:
        """The indices of distinct partial fillings, and for each partial filling which of these it equals."""
        unique, number = torch.unique(torch.cat([self.gap[:, None], self.tokens], dim=1), dim=0, return_inverse=True)
        index = torch.arange(len(number), device=number.device)
        return index.new_full((len(unique),), len(index)).scatter_reduce(0, number, index, "amin"), number

    @staticmethod
    def cat(parts: Sequence[_States]) -> _States:
        columns = zip(*((part.gap, part.kind, part.tokens, part.nats) for part in parts), strict=True)
        return _States(*map(torch.cat, columns))


@dataclass(frozen=True, eq=False)
class _Search:
    """Searches for the fillings of some requests together."""

    network: BatchedNetwork
    rules: Sequence[Constrained]
    warper: LogitsWarper
    continuation: Tensor | None
    budget: SearchBudget
    alternatives: int
    seed: int
    gaps: _Gaps

    def ranked(self) -> list[list[TokenFilling]]:
        """The ranked candidates of each request, best first."""
        request, canvas = self.gaps.request, self.gaps.canvas
        length_nats = self.length_nats()
        found = self.preselected(self.candidates(), length_nats)
        x0 = canvas.select(found.gap)
        x0 = replace(x0, tokens=found.tokens[:, : x0.tokens.shape[1]])
        nats = length_nats[found.gap] + self.network.nats(x0, self.seed, self.budget)
        results: list[list[TokenFilling]] = [[] for _ in range(int(request.max()) + 1)]
        lengths, number = canvas.attention_mask.sum(dim=1).tolist(), request.tolist()
        for index in nats.argsort(stable=True).tolist():
            gap = int(found.gap[index])
            tokens = found.tokens[index, : lengths[gap]]
            filling = TokenFilling(tokens, float(nats[index]), float(length_nats[gap]), gap - number.index(number[gap]))
            results[number[gap]].append(filling)
        return results

    def per_request(self, number: int) -> Tensor:
        """A number of beams or candidates per request, halved for several lengths or more blanks than steps."""
        num_blanks, num_gaps = self.gaps.canvas.editable.sum(dim=1), self.gaps.request.bincount()
        hard = (num_gaps[self.gaps.request] > 1) | (num_blanks > self.budget.steps)
        half = torch.zeros_like(num_gaps).index_add(0, self.gaps.request, hard.long()) > 0
        return torch.where(half, (number + 1) // 2, number).clamp(min=self.alternatives)

    def length_nats(self) -> PerSequence:
        """-log p(length | context) of each gap."""
        request, canvas = self.gaps.request, self.gaps.canvas
        nats = self.gaps.length_nats.double().clone()
        several = (request.bincount()[request] > 1).nonzero()[:, 0]
        if len(several):
            x0 = replace(canvas, editable=self.gaps.context).select(several)
            nats[several] += self.network.nats(x0, self.seed, replace(self.budget, orders=self.budget.context_orders))
        for number in range(int(request.max()) + 1):
            nats[request == number] += (-nats[request == number]).logsumexp(dim=0)
        return nats

    def preselected(self, found: _States, length_nats: PerSequence) -> _States:
        """The candidates to rank: the best of each request by the search's own score, and its best greedy filling."""
        found = replace(found, nats=found.nats + length_nats[found.gap])
        greedy = found.select((found.kind == _GREEDY).nonzero()[:, 0])
        request, number = self.gaps.request, self.per_request(self.budget.ranked)
        greedy = greedy.select(_best(greedy.nats, request[greedy.gap], torch.ones_like(number)))
        distinct = found.select(found.distinct()[0])
        best = distinct.select(_best(distinct.nats, request[distinct.gap], number))
        both = _States.cat([best, greedy])
        return both.select(both.distinct()[0])

    def candidates(self) -> _States:
        """Complete fillings of all gaps by beam search, greedy search and random draws."""
        canvas, finished = self.gaps.canvas, []
        kinds = torch.arange(_BEAM, self.budget.draws + 1, device=canvas.tokens.device)
        gap = torch.arange(len(canvas.tokens), device=kinds.device).repeat_interleave(len(kinds))
        start = torch.zeros(len(gap), dtype=torch.float64, device=kinds.device)
        states = _States(gap, kinds.repeat(len(canvas.tokens)), canvas.tokens[gap], start)
        num_blanks = num_masked = canvas.editable.sum(dim=1)
        total = int(num_blanks.max())
        num_pairs = (num_blanks - self.budget.steps).clamp(min=0).minimum(num_blanks // 4)
        while True:
            done = num_masked[states.gap] == 0
            finished.append(states.select(done.nonzero()[:, 0]))
            states = states.select((~done).nonzero()[:, 0])
            report("searching for tokens", total - int(num_masked.max()), total)
            if not len(states.gap):
                return _States.cat(finished)
            num_filled = 1 + (num_masked <= 2 * num_pairs).long()
            distinct, query = states.distinct()
            positions, log_f = self.most_confident(states.select(distinct), int(num_filled.max()))
            for number in range(positions.shape[1]):
                active = (num_filled[states.gap] > number).nonzero()[:, 0]
                waiting = (num_filled[states.gap] <= number).nonzero()[:, 0]
                extended, parent = self.extended(
                    states.select(active),
                    positions[query[active], number],
                    log_f[:, number],
                    query[active],
                    num_blanks - num_masked,
                )
                states = _States.cat([extended, states.select(waiting)])
                query = torch.cat([query[active][parent], query[waiting]])
                num_masked = num_masked - (num_filled > number).long()

    def most_confident(self, states: _States, number: int) -> tuple[Tensor, Tensor]:
        """The masked positions with the most probable allowed token, and log f there.

        Of two positions, the second is not next to the first if that can be avoided: neighbors depend on each other.

        Returns:
            Positions [states, number], and log f [states, number, V].
        """
        masked = self.gaps.canvas.editable[states.gap] & (states.tokens == self.network.mask_id)
        attention_mask = self.gaps.canvas.attention_mask[states.gap]
        order, parts = [], []
        for rows, log_f in self.network(states.tokens, attention_mask, masked):
            row, position = masked[rows].nonzero().unbind(dim=1)
            allowed = self.allowed(log_f, states.gap[rows][row], position)
            confidence = allowed.new_full(masked[rows].shape, -torch.inf)
            lowest = torch.finfo(allowed.dtype).min
            confidence[row, position] = allowed.amax(dim=-1).clamp(min=lowest)
            best = confidence.argmax(dim=1, keepdim=True)
            if number == 2:
                distance = (torch.arange(masked.shape[1], device=best.device) - best).abs()
                confidence = confidence.masked_fill(distance == 0, -torch.inf)
                far = torch.where(distance == 1, confidence.clamp(max=lowest), confidence)
                best = torch.cat([best, far.argmax(dim=1, keepdim=True)], dim=1)
            index = torch.zeros_like(masked[rows], dtype=torch.long)
            index[row, position] = torch.arange(len(row), device=row.device)
            order.append(best)
            parts.append((rows, log_f[index.gather(1, best)]))
        inverse = torch.cat([rows for rows, _ in parts]).argsort()
        return torch.cat(order)[inverse], torch.cat([log_f for _, log_f in parts])[inverse]

    def extended(
        self, states: _States, positions: Tensor, log_f: TargetLogProbs, query: Tensor, step: Tensor
    ) -> tuple[_States, Tensor]:
        """Fills one position of each partial filling; drops those for which the rules allow no token.

        Args:
            states: The partial fillings.
            positions: The position to fill in each of them.
            log_f: log f at these positions, for each query.
            query: The index of each partial filling's query.
            step: The number of blanks filled so far in each gap.

        Returns:
            The longer partial fillings, and for each the index of the one it extends.
        """
        distinct, index = states.distinct()
        position, tokens = positions[distinct], states.tokens[distinct]
        log_f = log_f[query[distinct]]
        allowed = self.allowed(log_f, states.gap[distinct], position)
        chosen = torch.arange(tokens.shape[1], device=tokens.device) == position[:, None]
        for rules in self.rules:
            allowed = rules.forbid(tokens, chosen, allowed)
        log_p = self.warper(allowed)
        width = self.per_request(self.budget.beams)[self.gaps.request]
        best = log_f.masked_fill(~(log_p > -torch.inf), -torch.inf).topk(min(int(width.max()), log_f.shape[-1]))

        beams, greedy = (states.kind == _BEAM).nonzero()[:, 0], (states.kind == _GREEDY).nonzero()[:, 0]
        nats = (states.nats[beams, None] - best.values[index[beams]].double()).flatten()
        kept = _best(nats, states.gap[beams].repeat_interleave(best.values.shape[1]), width)
        beams, found = beams[kept // best.values.shape[1]], best.indices[index[beams]].flatten()[kept]
        drawn = ((states.kind > _GREEDY) & (best.values[index, 0] > -torch.inf)).nonzero()[:, 0]
        uniform = Noise(self.seed, step).uniform(self.gaps.canvas.example, Purpose.SAMPLE, max(self.budget.draws, 1))
        number = uniform[states.gap[drawn], states.kind[drawn] - 1]

        parent = torch.cat([beams, greedy, drawn])
        token = torch.cat([found, best.indices[index[greedy], 0], draw(log_p[index[drawn]], number)])
        value = torch.where(log_p[index[parent], token] > -torch.inf, log_f[index[parent], token].double(), -torch.inf)
        parent, token, value = (column[value > -torch.inf] for column in (parent, token, value))
        longer = states.select(parent)
        longer.tokens[torch.arange(len(parent), device=parent.device), positions[parent]] = token
        return replace(longer, nats=longer.nats - value), parent

    def allowed(self, log_f: TargetLogProbs, gap: Tensor, position: Tensor) -> TargetLogProbs:
        """log f without the tokens that the warper forbids or that violate a word boundary."""
        log_f = log_f.index_fill(
            -1, torch.tensor(self.warper.forbidden, dtype=torch.long, device=gap.device), -torch.inf
        )
        starts, continues = self.gaps.word_starts[gap, position], self.gaps.word_continuations[gap, position]
        if self.continuation is None or not bool((starts | continues).any()):
            return log_f
        continuation = pad(self.continuation, (0, log_f.shape[-1] - len(self.continuation))).to(gap.device)
        wrong = starts[:, None] & continuation | continues[:, None] & ~continuation
        return log_f.masked_fill(wrong, -torch.inf)


def _or_nowhere(mask: PositionMask | None, gap: Gap) -> PositionMask:
    return torch.zeros_like(gap.context) if mask is None else mask


def _best(nats: Tensor, group: Tensor, number: Tensor) -> Tensor:
    """The indices of the lowest nats in each group, at most `number` per group."""
    order = nats.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    ordered = group[order]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
    return order[rank < number[ordered]]
