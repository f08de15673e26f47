"""Wang et al. 2025, "Remasking discrete diffusion models with inference-time scaling" (ReMDM), sections 3 and 4.

A step (s, t) hides a visible word v again with probability σ(v), and writes v at a hidden place with

    p(x_s = v | x_t = M) = p(v | x_t, t) · (ᾱ_s(v) - (1 - σ(v))·ᾱ_t(v)) / (1 - ᾱ_t(v)),    M otherwise

so that a word that is visible with probability ᾱ_t at t is so with probability ᾱ_s at s: whatever σ, the marginals
q(x_s | x0) are those of the schedule, as long as the fraction is a probability, σ ≤ σ_max = min(1, (1 - ᾱ_s) / ᾱ_t).
σ = 0 is ancestral sampling. The paper has one ᾱ for all words; here every word has its own, and so its own σ.

The network is asked about hidden places alone, and a visible word says nothing of whether it fits: σ is blind to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch

from diffusionbert.categorical import Shaping, draw
from diffusionbert.method import Sampler, State
from diffusionbert.networks import Network, ask
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Absorbing
from diffusionbert.schedules import Mean, Spindle, require_grid
from diffusionbert.shapes import Batch, Grid, PerPlace, Places


class Strategy(Enum):
    """How σ comes from η in [0, 1]."""

    CAP = "cap"
    """σ = min(η, σ_max)."""
    RESCALE = "rescale"
    """σ = η · σ_max."""


@dataclass(frozen=True)
class Loop:
    """Stays at one time for some steps, hiding as much as it writes; words are hidden again there and nowhere else."""

    time: float
    num_steps: int


@dataclass(frozen=True)
class Step:
    """From t to s, with η."""

    s: float
    t: float
    eta: float


class Remasking(Sampler[Network]):
    """Walks down the grid and hides some of what is written, so that it may be written better."""

    def __init__(
        self,
        process: Absorbing,
        grid: Grid,
        eta: float,
        strategy: Strategy = Strategy.CAP,
        loop: Loop | None = None,
        shaping: Shaping | None = None,
    ):
        super().__init__()
        require_grid(grid, partial=True)
        if isinstance(process.schedule, Spindle) and process.schedule.mean is Mean.SENTENCE:
            raise ValueError(
                f"{process.schedule} takes a word's survival from its sentence, which changes when words are hidden "
                "again, so that the marginals would not hold; use Mean.CORPUS, or Renoising, which claims none"
            )
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must lie in [0, 1], given {eta}; 0 never hides a word again")
        if loop is not None and not (0 < loop.time <= float(grid[-1]) and loop.num_steps > 0):
            raise ValueError(f"{loop} must have steps, and a time above 0 that the grid, up to {grid[-1]}, passes")
        self.process = process
        self.strategy = strategy
        self.shaping = shaping
        self.steps = _steps(grid.tolist(), eta, loop)

    def sample(self, network: Network, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields the prior and then the state after every step."""
        x = self.process.prior(canvas, Noise(seed))
        calls = torch.zeros_like(canvas.example)
        yield State(x.tokens, canvas.row_times(self.steps[0].t), calls)
        for number, step in enumerate(self.steps):
            hidden = self.process.asked(x)
            x, calls = self._step(network, x, hidden, step, Noise(seed, step=number)), calls + hidden.any(dim=1)
            yield State(x.tokens, canvas.row_times(step.s), calls)

    @torch.no_grad()
    def _step(self, network: Network, x_t: Batch, hidden: Places, step: Step, noise: Noise) -> Batch:
        words = self._worded(network, x_t, hidden, step.t, noise)
        alpha_s = self.process.survival(words, x_t.row_times(step.s))
        alpha_t = self.process.survival(words, x_t.row_times(step.t))
        sigma = self._sigma(alpha_s, alpha_t, step.eta)
        # A word that cannot be hidden at t and yet is believed in (no reweighting) is revealed at once.
        written = torch.where(alpha_t < 1, (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), 1.0)
        visible = torch.where(hidden, written, 1 - sigma)
        uniform = noise.uniform(x_t.example, Purpose.REMASK, x_t.tokens.shape[1])
        # Where nothing is editable, survival and so `visible` are 1.
        return replace(x_t, tokens=words.tokens.masked_fill(uniform >= visible, self.process.mask_id))

    def _worded(self, network: Network, x_t: Batch, hidden: Places, t: float, noise: Noise) -> Batch:
        """x_t with a word drawn from p(v | x_t, t) at every hidden place; whether it is revealed is decided after."""
        if not bool(hidden.any()):
            return x_t
        time = x_t.row_times(t)
        log_f = ask(network, x_t, time, hidden)
        # A step down to 0 reveals everything: it is p(v | x_t, t) itself.
        log_p = self.process.reverse(x_t, log_f, torch.zeros_like(time), time, self.shaping)
        uniform = noise.uniform(x_t.example, Purpose.WRITE, x_t.tokens.shape[1])
        return replace(x_t, tokens=x_t.tokens.masked_scatter(hidden, draw(log_p, uniform[hidden])))

    def _sigma(self, alpha_s: PerPlace, alpha_t: PerPlace, eta: float) -> PerPlace:
        # Where ᾱ_t = 0 no word is visible, and σ plays no part.
        highest = torch.where(alpha_t > 0, torch.minimum(alpha_t, 1 - alpha_s) / alpha_t, 0.0)
        return highest.clamp(max=eta) if self.strategy is Strategy.CAP else eta * highest


def _steps(grid: list[float], eta: float, loop: Loop | None) -> list[Step]:
    """The grid's steps, last first; a loop's are put in where its time is passed, and alone have η."""
    if loop is None:
        return [Step(s, t, eta) for s, t in itertools.pairwise(grid)][::-1]
    times = sorted({*grid, loop.time})
    around = [Step(s, t, 0.0) for s, t in itertools.pairwise(times)][::-1]
    place = [step.t for step in around].index(loop.time)
    return [*around[:place], *[Step(loop.time, loop.time, eta)] * loop.num_steps, *around[place:]]
