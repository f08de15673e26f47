"""Chang et al. 2022, "MaskGIT", section 3.2, and Kim et al. 2025, "Train for the worst, plan for the best", section 4:
easy-first writing.

Each round asks for a word at every hidden place of a row and keeps the words at its surest places. Of a row's n
places, ⌊(k + 1)·n / m⌋ are written after round k = 0, 1, …, m - 1, where m is n or the number of steps, whichever is
less. With a threshold, all words that reach it are kept besides (Wu et al. 2025, "Fast-dLLM"), so that easy rows
need fewer rounds.

Words come from f and not from f·(1 - ᾱ_t): that factor says which words the noise has hidden by time t, but here the
sampler and not the noise chooses what is hidden. So the last word of a row may be a common one under every schedule.

One place a round and with a criterion that does not look at the drawn word (margin, entropy), this is an
autoregressive factorisation in an order that depends on what is written: exact, if f is. Several places a round,
threshold or the probability of the drawn word make it a heuristic. It knows nothing of schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum

import torch

from diffusionbert.categorical import Shaping, draw, log_prob_of
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network, ask
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Absorbing
from diffusionbert.schedules import uniform_grid
from diffusionbert.shapes import AskedLogProbs, AskedTokens, Batch, PerAsked, Places
from diffusionbert.walking import HiddenShare, due_after


class Criterion(Enum):
    """What makes a place sure; more is surer."""

    PROBABILITY = "probability"
    """That of the drawn word."""
    MARGIN = "margin"
    """The likeliest word's probability less the second's."""
    ENTROPY = "entropy"
    """Minus the entropy, in nats: 0 is certain."""


class ConfidenceOrder(Sampler[Network]):
    """Writes the surest places first.

    A network that wants a time is told the share of the row's editable places that are hidden, times `end`.
    """

    def __init__(
        self,
        process: Absorbing,
        num_steps: int,
        criterion: Criterion,
        threshold: float | None = None,
        shaping: Shaping | None = None,
        end: float = 1.0,
    ):
        """`threshold` is on the criterion's own scale; with it, `num_steps` is the most rounds a row may take."""
        super().__init__()
        uniform_grid(num_steps, end)  # refuses what makes no grid
        low, high = (-torch.inf, 0.0) if criterion is Criterion.ENTROPY else (0.0, 1.0)
        if threshold is not None and not low <= threshold <= high:
            raise ValueError(
                f"threshold {threshold} is out of reach: the {criterion.value} lies in [{low}, {high}]; give one in "
                "between, or none"
            )
        self.process = process
        self.num_steps = num_steps
        self.criterion = criterion
        self.threshold = threshold
        self.shaping = shaping or Shaping()
        self.time = HiddenShare(process.mask_id, end)

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the prior and then the state after every round, until no row has anything hidden."""
        x = self.process.prior(canvas, Noise(seed))
        calls = torch.zeros_like(canvas.example)
        yield State(x.tokens, self.time(x), calls)
        for number in range(self.num_steps):
            hidden = self.process.asked(x)
            if not bool(hidden.any()):
                return
            x, calls = self._round(network, x, hidden, seed, number), calls + hidden.any(dim=1)
            yield State(x.tokens, self.time(x), calls)

    @torch.no_grad()
    def _round(self, network: Network, x: Batch, hidden: Places, seed: int, number: int) -> Batch:
        log_f = ask(network, x, self.time(x), hidden)
        # Confidence is that of the network among the words that may be written: after top_k=1 every place were certain.
        log_p = Shaping(forbidden=self.shaping.forbidden)(log_f)
        uniform = Noise(seed, step=number).per_place(x, Purpose.WRITE)
        words = draw(self.shaping(log_p), uniform[hidden])
        kept = self._kept(x, hidden, self._confidence(log_p, words), number)
        return replace(x, tokens=torch.where(kept, x.tokens.masked_scatter(hidden, words), x.tokens))

    def _confidence(self, log_p: AskedLogProbs, words: AskedTokens) -> PerAsked:
        if self.criterion is Criterion.PROBABILITY:
            return log_prob_of(log_p, words).exp()
        p = log_p.exp()
        if self.criterion is Criterion.MARGIN:
            best = p.topk(2, dim=-1).values.double()
            return best[:, 0] - best[:, 1]
        entropy: PerAsked = torch.special.entr(p).sum(dim=-1).double()
        return -entropy

    def _kept(self, x: Batch, hidden: Places, confidence: PerAsked, number: int) -> Places:
        """The surest hidden places of each row, as many as are due after this round, and those over the threshold."""
        length, num_hidden = x.editable.sum(dim=1), hidden.sum(dim=1)
        # A row that a threshold has put ahead still writes one place a round.
        quota = (due_after(number, length, self.num_steps) - (length - num_hidden)).clamp(min=1)
        scores = confidence.new_full(hidden.shape, -torch.inf).masked_scatter(hidden, confidence)
        rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        kept = rank < quota[:, None]
        if self.threshold is not None:
            kept = kept | (scores >= self.threshold)
        return kept & hidden
