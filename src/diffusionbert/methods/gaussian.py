"""Li et al. 2022, "Diffusion-LM improves controllable text generation", eq. 1 to 3: Gaussian noise on word vectors.

    nats(w) = KL(q(x_1 | w) ‖ N(0, 1)) + Σ over the grid's steps (s, t) of 𝔼 KL(q(x_s | x_t, w) ‖ p(x_s | x_t))
              + 𝔼[ -log p(w | x_0) ],      each KL = ½(SNR_s - SNR_t)·‖E(w) - x̂0(x_t, t)‖²
    loss(w) = (‖E(w) - x̂0(x_t, t)‖² + ‖mean of q(x_1 | w)‖²) / D - log p(w | x_0)      at one step, evenly drawn

x_0 is the vector at time 0, which is not quite E(w). The word vectors E learn, too; the rounding term keeps them apart.
The terms of x_1 are 0 for every schedule that ends at 0. Places that are not editable keep E(w) and cost nothing.

`nats` weighs errors by SNR, up to (1 - floor) / floor at t → 0, where the network's vectors are never quite right, and
of rare words not even its words: by far most of the bound. It is a bound whatever x̂0 is, so steps from times at which
x_t by itself tells the word, but for a few, take what it tells: the mean of E(w) given x_t alone, all words alike. The
network's guess does not count there. That is the bound of the chain that so goes; the sampler, which has no true words
to start from, moves the network's guess to the nearest word as soon as words are certain, as the paper does. Up to a
given time `clamped`, the guess is moved here as there. In the end words are drawn from p(w | x_0), where the sampler
takes the nearest ones unless it is told to draw. The step is drawn half evenly and half in proportion to log(1 +
D·SNR_s) - log(1 + D·SNR_t): what it would tell if the D axes of a vector were one Gaussian number.

Where the original departs: its equations sum squares over axes and steps, its code takes means over both, so that
rounding counts for more. So do we: summed over axes, the vectors shrink until rounding fails. Its code wants x_0, with
its noise, back at all steps but the first, which wants E(w); we want E(w) at all. It counts padding as words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusionbert.categorical import nats_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks.vectors import VectorNetwork, clamp_to_words
from diffusionbert.noise import Noise
from diffusionbert.processes import Gaussian
from diffusionbert.processes.gaussian import require_clamping
from diffusionbert.schedules import require_grid
from diffusionbert.shapes import (
    Batch,
    Grid,
    PerPlace,
    RowCounts,
    RowTimes,
    RowValues,
    Vectors,
    exact_bits,
    from_bits,
)


class GaussianDiffusion(Objective[VectorNetwork]):
    """The bound over a grid of steps, and the simplified loss that Diffusion-LM is trained by."""

    _grid: Tensor

    def __init__(self, process: Gaussian, grid: Grid, clamped: bool | float | None = None):
        """Steps from times up to `clamped` use the clamping trick, in `nats` alone; True or 1 is all of them. None is
        none of them, but where x_t tells words, it is believed.
        """
        super().__init__()
        require_grid(grid)
        require_clamping(clamped)
        self.process = process
        self.clamped = clamped
        self.register_buffer("_grid", exact_bits(grid), persistent=False)

    @property
    def grid(self) -> Grid:
        """The times between which steps are made."""
        return from_bits(self._grid)

    @property
    def likelihood(self) -> Likelihood:
        """A bound."""
        return Likelihood.BOUND

    def loss(self, network: VectorNetwork, x0: Batch, noise: Noise) -> RowValues:
        """The squared error at one step, every step alike, and the cost of rounding."""
        clean = network.embed(x0.tokens)
        num_steps = len(self.grid) - 1
        t = self.grid[1 + (noise.position(x0) * num_steps).long()]
        guess = network(self.process.corrupt(clean, x0.editable, x0.example, t, noise), x0.attend, t)
        left = self.process.signal(torch.ones_like(t))[:, None] * clean.double().square().mean(dim=-1)
        squares = (clean - guess).double().square().mean(dim=-1) + left
        return (torch.where(x0.editable, squares, 0.0) + self.rounding_nats(network, x0, clean, noise)).sum(dim=1)

    def nats(self, network: VectorNetwork, x0: Batch, noise: Noise) -> PerPlace:
        """The bound, its sum over the steps estimated from one of them."""
        clean = network.embed(x0.tokens)
        index, probability = self._drawn_step(noise.position(x0), clean.shape[-1])
        s, t = self.grid[index], self.grid[index + 1]
        steps = self.step_nats(network, x0, clean, s, t, noise) / probability[:, None]
        prior = torch.where(x0.editable, self.process.prior_divergence(clean), 0.0)
        return prior + steps + self.rounding_nats(network, x0, clean, noise)

    def step_nats(
        self, network: VectorNetwork, x0: Batch, clean: Vectors, s: RowTimes, t: RowTimes, noise: Noise
    ) -> PerPlace:
        """The divergence of step (s, t) at one drawn x_t."""
        x_t = self.process.corrupt(clean, x0.editable, x0.example, t, noise)
        guess = network(x_t, x0.attend, t)
        if self.clamped is None:
            told = x0.editable & self.process.tells_words(t, clean.shape[-1], network.writable.sum())[:, None]
            likely = network.likely(self.process.unscaled(x_t, t), self.process.signal_to_noise(t), told)
            guess = guess.masked_scatter(told[..., None], likely)
        else:
            guess = clamp_to_words(network, guess, x0.editable & (t <= self.clamped)[:, None])
        return torch.where(x0.editable, self.process.divergence(clean, guess, s, t), 0.0)

    def rounding_nats(self, network: VectorNetwork, x0: Batch, clean: Vectors, noise: Noise) -> PerPlace:
        """-log p(w | x at time 0) at one drawn x."""
        x = self.process.corrupt(clean, x0.editable, x0.example, x0.row_times(0.0), noise)
        log_p = network.log_words(x, x0.editable)
        return nats_of(log_p, x0.tokens, x0.editable)

    def step_probabilities(self, width: int) -> Grid:
        """With what probability `nats` draws each step of the grid."""
        told = torch.log1p(width * self.process.signal_to_noise(self.grid))
        return 0.5 / len(told.diff()) - 0.5 * told.diff() / (told[0] - told[-1])

    def _drawn_step(self, position: RowTimes, width: int) -> tuple[RowCounts, RowValues]:
        """The step up to which the probabilities sum to the position, and its probability."""
        probabilities = self.step_probabilities(width)
        index = torch.searchsorted(probabilities.cumsum(dim=0), position, right=True).clamp(max=len(probabilities) - 1)
        return index, probabilities[index]
