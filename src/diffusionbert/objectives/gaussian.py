"""Li et al. 2022, "Diffusion-LM improves controllable text generation", eq. 1 to 3: Gaussian noise on word vectors.

    nats(w) = KL(q(x_1 | w) ‖ N(0, 1)) + Σ over the grid's steps (s, t) of 𝔼 KL(q(x_s | x_t, w) ‖ p(x_s | x_t))
              + 𝔼[ -log p(w | x_0) ],      each KL = ½(SNR_s - SNR_t)·‖E(w) - x̂0(x_t, t)‖²
    loss(w) = (‖E(w) - x̂0(x_t, t)‖² + ‖mean of q(x_1 | w)‖²) / D - log p(w | x_0)      at one uniformly drawn step

x_0 is the vector at time 0, which still has a little noise. The word vectors E are trained, too; the rounding term
keeps them apart. The x_1 terms are 0 for every schedule that ends at 0. Positions that are not editable keep E(w) and
cost nothing.

`nats` is a bound for any x̂0. It weights errors by the SNR, up to (1 - floor) / floor as t → 0, where the network's
vectors are never exact. So at times at which x_t alone nearly identifies the token, x̂0 is the mean of E(w) given x_t
alone, under a uniform prior over tokens; this is the bound of the chain that takes such steps. (With a time `clamped`,
x̂0 is moved to the nearest token up to that time instead, as in the sampler.) The step is drawn half uniformly and half
in proportion to log(1 + D·SNR_s) - log(1 + D·SNR_t), which would be the information of the step if the D axes of a
vector were one Gaussian number.

The paper's equations sum squares over axes and steps, while its code averages over both, which gives rounding a higher
weight. So do we: with sums over axes, the vectors shrink until rounding fails. Its code predicts the noisy x_0 at all
steps but the first, and counts padding as tokens; we predict E(w) at all steps, and do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.gaussian import Gaussian, require_clamping
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Cosine, NoiseSchedule, uniform_grid
from diffusionbert.diffusion.shapes import Batch, Counts, Grid, PerPosition, PerSequence, Times, Vectors
from diffusionbert.diffusion.tokens import TokenStatistics, nats_of
from diffusionbert.networks.embedding import EmbeddingDenoiser, VectorNetwork, clamp_to_words
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import (
    VECTORS,
    Estimator,
    GridObjective,
    Likelihood,
    LikelihoodDefinition,
    ObjectiveConfig,
    ScoringQuantities,
    ScoringQuantity,
    TimeGrid,
    require_num_steps,
)
from diffusionbert.registry import register
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.base import Sampler
from diffusionbert.samplers.exact import Exact
from diffusionbert.samplers.gaussian import GaussianAncestral
from diffusionbert.storage.schema import Component


@register("gaussian")
@dataclass(frozen=True)
class GaussianConfig(ObjectiveConfig):
    """Diffusion-LM: Gaussian noise on learned word vectors. On pairs, with the source not editable, it is DiffuSeq."""

    schedule: NoiseSchedule = Cosine()
    num_steps: int = 2000
    """T."""
    floor: float = 1e-4
    """The variance of the noise at t = 0: 1e-4 with the cosine schedule, 0.01 with the square root."""
    width: int | None = 128
    """The width of a word vector; None takes the backbone's, whose own word vectors are then the initial ones."""
    clamped: float | None = None
    """Up to this time, each predicted vector is moved to the nearest token, in the bound and in sampling; 0 is never.
    None: in sampling, when tokens are certain; the bound uses x_t itself then."""
    predicts_tokens: bool = False
    """Whether x̂0 is the mean of E(w) under a predicted distribution over tokens (Gulrajani & Hashimoto 2023), which
    starts from what x_t and the frequencies of tokens say."""

    has_word_vectors = True
    generates_on_masks = False
    sampler_aliases = (Exact, Ancestral)

    def __post_init__(self) -> None:
        require_num_steps(self.num_steps)

    def build(self, statistics: TokenStatistics) -> GaussianDiffusion:
        # What x_t says of a token is already part of a predicted distribution over tokens.
        clamped = 0.0 if self.predicts_tokens and self.clamped is None else self.clamped
        return GaussianDiffusion(self.process(statistics), uniform_grid(self.num_steps), clamped)

    def process(self, statistics: TokenStatistics) -> Gaussian:
        return Gaussian(self.schedule, self.floor)

    def make_network(self, backbone: PreTrainedModel, time: TimeEmbedding, statistics: TokenStatistics) -> nn.Module:
        process = self.process(statistics) if self.predicts_tokens else None
        network = EmbeddingDenoiser(backbone, statistics.allowed, self.width, process)
        if self.predicts_tokens:
            with torch.no_grad():
                network.bias.copy_(-statistics.information.values)  # the frequencies of tokens
        return network

    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        definition = LikelihoodDefinition(
            time=TimeGrid(self.num_steps), estimator=Estimator.STRATIFIED_TIMES, schedule=Component.of(self.schedule)
        )
        return ScoringQuantities((ScoringQuantity(VECTORS, definition, self.build),))

    def default_sampler(self) -> Sampler:
        return GaussianAncestral(self.clamped)

    def time_label(self, time: TimeEmbedding) -> str:
        return "input"


class GaussianDiffusion(GridObjective[VectorNetwork]):
    """The T-step bound, and the simplified loss that Diffusion-LM is trained with."""

    likelihood = Likelihood.BOUND

    def __init__(self, process: Gaussian, grid: Grid, clamped: bool | float | None = None):
        """`nats` uses the clamping trick for times up to `clamped`; None uses x_t where it identifies the token."""
        super().__init__(grid)
        require_clamping(clamped)
        self.process = process
        self.clamped = clamped

    def loss(self, network: VectorNetwork, x0: Batch, noise: Noise) -> PerSequence:
        clean = network.embed(x0.tokens)
        num_steps = len(self.grid) - 1
        t = self.grid[1 + (noise.stratified_uniform(x0) * num_steps).long()]
        guess = network(self.process.corrupt(clean, x0.editable, x0.example, t, noise), x0.attention_mask, t)
        left = self.process.signal(torch.ones_like(t))[:, None] * clean.double().square().mean(dim=-1)
        squares = (clean - guess).double().square().mean(dim=-1) + left
        return (torch.where(x0.editable, squares, 0.0) + self.rounding_nats(network, x0, clean, noise)).sum(dim=1)

    def nats(self, network: VectorNetwork, x0: Batch, noise: Noise) -> PerPosition:
        clean = network.embed(x0.tokens)
        index, probability = self._drawn_step(noise.stratified_uniform(x0), clean.shape[-1])
        s, t = self.grid[index], self.grid[index + 1]
        steps = self.step_nats(network, x0, clean, s, t, noise) / probability[:, None]
        prior = torch.where(x0.editable, self.process.prior_divergence(clean), 0.0)
        return prior + steps + self.rounding_nats(network, x0, clean, noise)

    def step_nats(
        self, network: VectorNetwork, x0: Batch, clean: Vectors, s: Times, t: Times, noise: Noise
    ) -> PerPosition:
        """The divergence of step (s, t) at one drawn x_t."""
        x_t = self.process.corrupt(clean, x0.editable, x0.example, t, noise)
        guess = network(x_t, x0.attention_mask, t)
        if self.clamped is None:
            is_certain = x0.editable & self.process.tells_words(t, clean.shape[-1], network.allowed.sum())[:, None]
            likely = network.likely(self.process.unscaled(x_t, t), self.process.signal_to_noise(t), is_certain)
            guess = guess.masked_scatter(is_certain[..., None], likely)
        else:
            guess = clamp_to_words(network, guess, x0.editable & (t <= self.clamped)[:, None])
        return torch.where(x0.editable, self.process.divergence(clean, guess, s, t), 0.0)

    def rounding_nats(self, network: VectorNetwork, x0: Batch, clean: Vectors, noise: Noise) -> PerPosition:
        """-log p(w | x at time 0) at one drawn x."""
        x = self.process.corrupt(clean, x0.editable, x0.example, x0.constant_times(0.0), noise)
        log_p = network.log_words(x, x0.editable)
        return nats_of(log_p, x0.tokens, x0.editable)

    def step_probabilities(self, width: int) -> Grid:
        """The probability with which `nats` draws each step of the grid."""
        information = torch.log1p(width * self.process.signal_to_noise(self.grid))
        return 0.5 / len(information.diff()) - 0.5 * information.diff() / (information[0] - information[-1])

    def _drawn_step(self, uniform: Times, width: int) -> tuple[Counts, PerSequence]:
        """Draws a step by inverting the CDF at a uniform number; returns its index and its probability."""
        probabilities = self.step_probabilities(width)
        index = torch.searchsorted(probabilities.cumsum(dim=0), uniform, right=True).clamp(max=len(probabilities) - 1)
        return index, probabilities[index]
