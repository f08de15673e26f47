"""Exact skipping for schedules by token (the spindle, He et al. 2022, eq. 9-11), with a time-agnostic network.

An answer f(v | x_t) that does not depend on the time stands until a token of the row changes. As long as it does, word
and interval (s, s') of the next reveal of a place hidden at t have a joint law, which is drawn word first:

    P(v, (s, s')) = f(v)·(ᾱ_s(v) - ᾱ_s'(v)) / G_t,   G_t = Σ_u f(u)·(1 - ᾱ_t(u))
    v ~ f(v)·(1 - ᾱ_t(v)) / G_t = p(v | x_t, t)               what hides there
    visible at s if u < r_{s|t}(v)                            one number u for all s; the first such s, by bisection

So the probability Σ_v p(v | x_t, t)·(1 - r_{s|t}(v)) = G_s/G_t to stay hidden needs no sum over vocabulary and grid.
The earliest event of a row happens; its other places are drawn anew with the network's new answer, since the chain is
Markov. The guessed sentence mean ĉ stands as long as f does, so all this holds with it, too.

Temperature, top-k and top-p act on p(v | x_t, t), which then no longer telescopes; neither does it without reweighting.
All rows then walk down the grid together, with the answers that stand. A place whose u is above every word's r_{s|t}
stays hidden whatever its word, so only the few others are looked at.

Texts are distributed exactly as `Ancestral` distributes them over the same grid. This module cannot see whether a
network is told the time: whoever chooses this sampler must know that it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Absorbing
from diffusionbert.schedules import require_grid
from diffusionbert.shapes import (
    AskedLogProbs,
    AskedRows,
    AskedTokens,
    Batch,
    Grid,
    PerAsked,
    Places,
    RowCounts,
    RowKeys,
    exact_bits,
    from_bits,
    rows_of,
)


@dataclass(frozen=True, eq=False)
class _Answer:
    """What a network said of places that were hidden."""

    places: Places
    log_f: AskedLogProbs
    center: Tensor
    """The means of information guessed from it; rows that share one go through the vocabulary together."""
    group: RowKeys
    """Which of these means is each row's."""


class SkipExact(Sampler[Network]):
    """Asks a time-agnostic network again only when a token of the row has changed: at most L calls a row.

    A grid that ends before 1 goes on from there: all that is editable was hidden at that time.
    """

    _grid: Tensor

    def __init__(self, process: Absorbing, grid: Grid, shaping: Shaping | None = None):
        super().__init__()
        require_grid(grid, partial=True)
        self.process = process
        self.shaping = shaping
        self.register_buffer("_grid", exact_bits(grid), persistent=False)
        # Forbidding words is the same as a network that does not believe in them.
        only_forbids = shaping is None or replace(shaping, forbidden=()) == Shaping()
        self.jumps = not process.schedule.by_token or (process.reweighted and only_forbids)

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the prior and then every state: one event for each unfinished row, or one step of the grid."""
        return (self._jumping if self.jumps else self._walking)(network, canvas, seed)

    def _jumping(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        grid = from_bits(self._grid).to(canvas.tokens.device)
        x = self.process.prior(canvas, Noise(seed))
        calls = torch.zeros_like(canvas.example)
        at = torch.where(self.process.asked(x).any(dim=1), len(grid) - 1, 0)
        yield State(x.tokens, grid[at], calls)
        num_rounds = 0
        while bool(at.any()):
            calls = calls + (at > 0)
            # Every unfinished row has had one event a round, so the round is the row's own count of them.
            x, at = self._jump(network, x, grid, at, Noise(seed, step=num_rounds))
            num_rounds += 1
            yield State(x.tokens, grid[at], calls)

    @torch.no_grad()
    def _jump(self, network: Network, x: Batch, grid: Grid, at: RowCounts, noise: Noise) -> tuple[Batch, RowCounts]:
        """Takes each row from grid[at] to its next event; a row that is finished stands at grid[0]."""
        asked = self.process.asked(x)
        active, rows, t = at > 0, rows_of(asked), grid[at]
        log_f = network(x.tokens[active], x.attend[active], t[active], asked[active])
        center = self.process.guessed_center(x, log_f)
        log_p = self.process.log_words(log_f, rows, t, center, self.shaping)
        words = draw(log_p, noise.per_place(x, Purpose.WRITE)[asked])
        shown = self._shown_at(words, grid, at[rows], center[rows], noise.per_place(x, Purpose.REVEAL)[asked])
        shown_at = torch.full_like(x.tokens, -1).masked_scatter(asked, shown)
        next_at = shown_at.amax(dim=1)
        due = asked & (shown_at == next_at[:, None])
        tokens = x.tokens.masked_scatter(due, words[due[asked]])
        return replace(x, tokens=tokens), torch.where((asked & ~due).any(dim=1), next_at, 0)

    def _shown_at(
        self, words: AskedTokens, grid: Grid, at: AskedRows, center: PerAsked, uniform: PerAsked
    ) -> AskedRows:
        """The largest k below `at` with uniform < r_{grid[k] | grid[at]}, which rises to 1 as k falls to 0."""
        low, high, t = torch.zeros_like(at), at, grid[at]
        for _ in range(len(grid).bit_length()):
            middle = (low + high) // 2
            shown = uniform < self.process.reveal_of(words, grid[middle], t, center)
            low, high = torch.where(shown, middle, low), torch.where(shown, high, middle)
        return low

    def _walking(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        grid = from_bits(self._grid).to(canvas.tokens.device)
        x = self.process.prior(canvas, Noise(seed))
        again = unfinished = self.process.asked(x).any(dim=1)
        calls, answer = torch.zeros_like(canvas.example), None
        yield State(x.tokens, torch.where(unfinished, grid[-1], 0.0), calls)
        for index in reversed(range(len(grid) - 1)):
            if not bool(unfinished.any()):
                return
            if answer is None or bool(again.any()):
                answer, calls = self._ask(network, x, grid[index + 1], again, answer), calls + again
            before, x = x, self._step(x, answer, grid[index], grid[index + 1], Noise(seed, step=index))
            unfinished = self.process.asked(x).any(dim=1)
            again = unfinished & (x.tokens != before.tokens).any(dim=1)
            yield State(x.tokens, torch.where(unfinished, grid[index], 0.0), calls)

    @torch.no_grad()
    def _ask(self, network: Network, x: Batch, t: Tensor, again: Tensor, known: _Answer | None) -> _Answer:
        """The answer for all hidden places: anew in the rows `again`, in the others what is known."""
        asked = self.process.asked(x)
        log_f = network(x.tokens[again], x.attend[again], t.expand(int(again.sum())), asked[again])
        if known is not None:
            standing = asked & ~again[:, None]
            merged = log_f.new_empty(int(asked.sum()), log_f.shape[1])
            merged[standing[asked]] = known.log_f[standing[known.places]]
            merged[~standing[asked]] = log_f
            log_f = merged
        center, group = torch.unique(self.process.guessed_center(x, log_f), return_inverse=True)
        return _Answer(asked, log_f, center, group)

    @torch.no_grad()
    def _step(self, x_t: Batch, answer: _Answer, s: Tensor, t: Tensor, noise: Noise) -> Batch:
        """Draws x_s; looks only at places that some word would show."""
        center, group = answer.center, answer.group
        s, t = s.expand_as(center), t.expand_as(center)
        uniform = noise.per_place(x_t, Purpose.REVEAL)
        fastest = self.process.fastest_reveal(s, t, center)[group]
        looked_at = self.process.asked(x_t) & (uniform < fastest[:, None])
        if not bool(looked_at.any()):
            return x_t
        rows = group[rows_of(looked_at)]
        log_p = self.process.log_words(answer.log_f[looked_at[answer.places]], rows, t, center, self.shaping)
        words = draw(log_p, noise.per_place(x_t, Purpose.WRITE)[looked_at])
        shown = uniform[looked_at] < self.process.reveal_of(words, s[rows], t[rows], center[rows])
        tokens = x_t.tokens.masked_scatter(looked_at, torch.where(shown, words, self.process.mask_id))
        return replace(x_t, tokens=tokens)
