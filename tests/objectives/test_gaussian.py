"""Diffusion-LM: its bound against integrals, its network on all architectures, its sampler against exact ones."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from backbones import (
    ARCHITECTURES,
    MASK,
    NUM_SPECIAL,
    NUM_TOKENIZER_IDS,
    VOCAB_SIZE,
    backbone_of,
    sentences,
    tokenizer_allowed,
)
from drawing import Drawing, drawing
from languages import SKEWED, Language
from torch import Tensor, nn

from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Cosine, Linear, Spindle, Sqrt, uniform_grid
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper, TokenStatistics
from diffusionbert.networks.embedding import EmbeddingDenoiser, VectorNetwork, clamp_to_words
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.objectives.gaussian import GaussianConfig, GaussianDiffusion
from diffusionbert.samplers.gaussian import GaussianAncestral

COIN = Language(2, 1, [0.8, 0.2])
PROCESSES = {
    "cosine": Gaussian(Cosine(), floor=1e-4),
    "sqrt": Gaussian(Sqrt(), floor=0.01),
    "linear": Gaussian(Linear(), floor=0.05),
}
CLAMPED: list[bool | float] = [0.0, 0.3, True]


# ---- languages that can be enumerated -----------------------------------------------------------------------------


class OnALine(nn.Module):
    """Two tokens at ±2 on one axis, and the posterior mean of each position: the best network.

    `error` is added to its outputs, for a network that is wrong.
    """

    def __init__(self, language: Language, process: Gaussian, error: float = 0.0):
        super().__init__()
        self.language, self.process, self.error = language, process, error
        self.allowed = torch.tensor([True, True, False])
        self.table = torch.tensor([[-2.0], [2.0], [0.0]], dtype=torch.float64)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def guess(self, x_t: Tensor, t: Tensor, clamp: float | None) -> Tensor:
        """x̂0 [sequences × positions] at one time: clamped by hand, or from x_t alone where it determines the token."""
        alpha = signal(self.process, t)
        if clamp is None and alpha / (1 - alpha) > 4 * math.log(2):
            return 2 * torch.tanh(2 * alpha.sqrt() * x_t / (1 - alpha))  # of two words that are alike
        clamp = 0.0 if clamp is None else clamp
        found = self(x_t[..., None], torch.ones_like(x_t, dtype=torch.bool), t.expand(len(x_t)))[..., 0]
        return torch.where(found > 0, self.table[1], self.table[0]) if float(t) <= clamp else found

    def forward(self, x_t: Tensor, attention_mask: Tensor, t: Tensor) -> Tensor:
        alpha = signal(self.process, t)[:, None, None]
        means = alpha.sqrt() * self.embed(self.language.sentences)[None, ..., 0]  # sequences × sentences × positions
        distance = (x_t[:, None, :, 0] - means).square() / (2 * (1 - alpha))
        posterior = (self.language.probabilities.log() - distance.sum(dim=-1)).softmax(dim=1)
        mean = torch.einsum("bs,sl->bl", posterior, self.embed(self.language.sentences)[..., 0])
        return (mean + self.error * torch.sin(3 * x_t[..., 0] + t[:, None]))[..., None]

    def log_words(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = x[targets] @ self.table.T
        return logits.masked_fill(~self.allowed, -torch.inf).log_softmax(dim=-1)

    def nearest(self, x: Tensor, targets: Tensor, forbidden: tuple[int, ...] = ()) -> Tensor:
        return (x[targets][:, 0] > 0).long()

    def likely(self, x: Tensor, precision: Tensor, targets: Tensor) -> Tensor:
        weights = (-precision[:, None, None] / 2 * (x - self.table[:2, 0]).square()).softmax(dim=-1)[targets]
        return weights @ self.table[:2]


def signal(process: Gaussian, t: Tensor) -> Tensor:
    return (1 - process.floor) * process.schedule.survival(t, torch.ones(1, dtype=torch.float64))


def posterior_moments(process: Gaussian, x_t: Tensor, x0: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of x_s given x_t and x0, from the joint distribution of x_s and x_t given x0."""
    alpha_s, alpha_t = signal(process, s), signal(process, t)
    covariance = (alpha_t / alpha_s).sqrt() * (1 - alpha_s)
    mean = alpha_s.sqrt() * x0 + covariance / (1 - alpha_t) * (x_t - alpha_t.sqrt() * x0)
    return mean, ((1 - alpha_s) - covariance.square() / (1 - alpha_t)).sqrt()


def expected_nats(objective: GaussianDiffusion, network: OnALine, language: Language, nodes: int = 120) -> Tensor:
    """The bound of every sentence from its definition, by integrals over x_t, with the divergences of torch."""
    process = objective.process
    line = torch.linspace(-7, 7, nodes, dtype=torch.float64)
    weight = torch.distributions.Normal(0.0, 1.0).log_prob(line).softmax(dim=0)
    count = language.length
    epsilon = torch.cartesian_prod(*[line] * count).reshape(-1, count)
    weights = torch.cartesian_prod(*[weight] * count).reshape(-1, count).prod(dim=1)
    everywhere, total = torch.ones_like(epsilon, dtype=torch.bool), []
    for sentence in language.sentences:
        clean = network.embed(sentence)[:, 0]
        nats = torch.zeros((), dtype=torch.float64)
        for s, t in itertools.pairwise(objective.grid):
            alpha = signal(process, t)
            x_t = alpha.sqrt() * clean + (1 - alpha).sqrt() * epsilon
            guess = network.guess(x_t, t, objective.clamped)
            q, p = (
                torch.distributions.Normal(*posterior_moments(process, x_t, x0, s, t))
                for x0 in (clean.expand_as(x_t), guess)
            )
            nats = nats + (weights * torch.distributions.kl_divergence(q, p).sum(dim=1)).sum()
        x = (1 - process.floor) ** 0.5 * clean + process.floor**0.5 * epsilon
        log_p = network.log_words(x[..., None], everywhere).reshape(*x.shape, 3)
        chosen = log_p.gather(-1, sentence.expand_as(x)[..., None])[..., 0].sum(dim=1)
        total.append(nats - (weights * chosen).sum())
    return torch.stack(total)


def exact_chain(network: OnALine, process: Gaussian, grid: Tensor, clamp: float | None) -> Tensor:
    """p(w) of both tokens of `COIN`: the density of the reverse chain on a fine grid of x."""
    line = torch.linspace(-7, 7, 1401, dtype=torch.float64)
    density = torch.distributions.Normal(0.0, 1.0).log_prob(line).softmax(dim=0)
    for s, t in reversed(list(itertools.pairwise(grid))):
        x_t = line[:, None]
        mean, deviation = posterior_moments(process, x_t, network.guess(x_t, t, clamp), s, t)
        density = density @ torch.distributions.Normal(mean, deviation).log_prob(line).softmax(dim=1)
    everywhere = torch.ones(len(line), 1, dtype=torch.bool)
    return density @ network.log_words(line[:, None, None], everywhere)[:, :2].exp()


def averaged_nats(objective: GaussianDiffusion, network: nn.Module, language: Language, draws: int) -> Tensor:
    """Many draws of `nats` of each sentence, and the standard error of their mean."""
    tokens = language.sentences.repeat_interleave(draws, dim=0)
    nats = objective.nats(network, language.batch(tokens), Noise(3)).sum(dim=1).view(-1, draws)
    return torch.stack([nats.mean(dim=1), nats.std(dim=1) / draws**0.5])


@pytest.mark.slow
@pytest.mark.parametrize("clamp", [*CLAMPED, None])
@pytest.mark.parametrize("name", PROCESSES)
def test_draws_of_the_bound_average_to_its_integral(name, clamp):
    objective = GaussianDiffusion(PROCESSES[name], uniform_grid(6) ** 2, clamp)
    for language in (COIN, SKEWED):
        network = OnALine(language, objective.process, error=0.3)
        expected = expected_nats(objective, network, language)
        mean, error = averaged_nats(objective, network, language, draws=20_000)
        assert float(((mean - expected) / error).abs().max()) < 4
        assert float((error / expected).max()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("clamp", [*CLAMPED, None])
@pytest.mark.parametrize("name", PROCESSES)
def test_the_bound_is_above_the_nll_of_the_chain(name, clamp):
    process, grid = PROCESSES[name], uniform_grid(6)
    if name == "cosine":
        process = replace(process, floor=0.003)  # or the line would have to be finer still
    objective = GaussianDiffusion(process, grid, clamp)
    for error in (0.0, 0.5):
        network = OnALine(COIN, process, error)
        likelihood = exact_chain(network, process, grid, clamp)
        assert float(likelihood.sum()) == pytest.approx(1, abs=1e-6)
        nats = expected_nats(objective, network, COIN)
        assert bool((nats >= -likelihood.log() - 1e-9).all())


@pytest.mark.slow
@pytest.mark.parametrize("error", [0.0, 0.4])
@pytest.mark.parametrize("name", PROCESSES)
def test_total_probability_is_at_most_one_and_no_bound_lies_below_the_entropy(name, error):
    for language, clamp in itertools.product((COIN, SKEWED), [*CLAMPED, None]):
        objective = GaussianDiffusion(PROCESSES[name], uniform_grid(8), clamp)
        nats = expected_nats(objective, OnALine(language, objective.process, error), language, nodes=80)
        assert float((-nats).exp().sum()) <= 1 + 1e-9
        assert float((language.probabilities * nats).sum()) >= language.entropy


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_the_bound_is_nearly_tight_for_the_best_network_and_many_steps(name):
    """With many steps only the rounding is lost: 0.001 nats here."""
    process, nats = PROCESSES[name], {}
    for steps in (25, 250):
        objective = GaussianDiffusion(process, uniform_grid(steps) ** 2, clamped=0.0)
        expected = expected_nats(objective, OnALine(COIN, process), COIN, nodes=250)
        nats[steps] = float((COIN.probabilities * expected).sum())
    assert COIN.entropy < nats[250] < COIN.entropy + 0.02
    assert nats[250] < nats[25]


def test_single_steps_add_up_to_all_steps():
    """With fixed noise, steps weighted by their probabilities give exactly the sum over all steps."""
    process, grid = PROCESSES["sqrt"], uniform_grid(9)
    objective, network = GaussianDiffusion(process, grid), OnALine(SKEWED, process, error=0.2)
    x0, noise = SKEWED.batch(), Noise(4)
    clean = network.embed(x0.tokens)
    probabilities = objective.step_probabilities(width=1)
    edges = torch.cat([torch.zeros(1), probabilities.cumsum(dim=0)])
    drawn, whole = 0.0, objective.rounding_nats(network, x0, clean, noise)
    for index in range(9):
        for quantile in (edges[index] + 1e-9, edges[index + 1] - 1e-9):
            fixed = replace(x0, strata=quantile.expand(4, 2))
            drawn = drawn + probabilities[index] / 2 * objective.nats(network, fixed, noise)
        s, t = (time.expand(4) for time in grid[index : index + 2])
        whole = whole + objective.step_nats(network, x0, clean, s, t, noise)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(drawn, whole)


def test_steps_are_drawn_so_that_few_draws_suffice():
    """A network whose vectors are never exact: with uniformly drawn steps the variance would be far larger."""
    process, grid = PROCESSES["cosine"], uniform_grid(500)
    objective, network = GaussianDiffusion(process, grid, clamped=0.0), OnALine(COIN, process, error=0.2)
    draws, sentences = 32, 200
    tokens = torch.ones(draws * sentences, 1, dtype=torch.long)
    slices = torch.arange(draws + 1, dtype=torch.float64) / draws
    x0 = COIN.batch(tokens)
    x0 = replace(x0, strata=torch.stack([slices[:-1], slices[1:]], dim=1).repeat(sentences, 1))
    estimates = objective.nats(network, x0, Noise(0)).view(sentences, draws).mean(dim=1)
    index = (Noise(0).stratified_uniform(x0) * 500).long()
    clean = network.embed(tokens)
    evenly = 500 * objective.step_nats(network, x0, clean, grid[index], grid[index + 1], Noise(0))
    evenly = evenly.view(sentences, draws).mean(dim=1)
    assert float(estimates.std()) < 0.4 * float(estimates.mean())
    assert float(estimates.std()) < 0.4 * float(evenly.std())


def test_frozen_tokens_are_given_and_have_no_cost():
    """The clean second token of a sentence determines the first: the cost is that of the conditional."""
    process = PROCESSES["sqrt"]
    objective, network = GaussianDiffusion(process, uniform_grid(40) ** 2, clamped=0.0), OnALine(SKEWED, process)

    class Given(OnALine):
        def forward(self, x_t: Tensor, attention_mask: Tensor, t: Tensor) -> Tensor:
            assert bool((x_t[:, 1] == self.table[1]).all())  # not a bit of noise
            alpha = signal(self.process, t)[:, None]
            joint = self.language.probabilities.view(2, 2)[:, 1].log()
            distance = (x_t[:, 0] - alpha.sqrt() * self.table[:2, 0]).square() / (2 * (1 - alpha))
            guess = (joint - distance).softmax(dim=1) @ self.table[:2]
            return torch.stack([guess, torch.zeros_like(guess)], dim=1)

    network = Given(SKEWED, process)
    tokens = torch.tensor([[0, 1]]).expand(4000, 2)
    x0 = replace(SKEWED.batch(tokens), editable=torch.tensor([[True, False]]).expand(4000, 2))
    nats = objective.nats(network, Noise(0).stratify(x0), Noise(0))
    assert bool((nats[:, 1] == 0).all())
    conditional = -math.log(0.13 / (0.13 + 0.05))
    assert float(nats[:, 0].mean()) == pytest.approx(conditional, abs=0.05)
    loss = objective.loss(network, x0, Noise(0))
    of_frozen = objective.loss(network, replace(x0, editable=torch.zeros_like(x0.editable)), Noise(0))
    assert float(loss.min()) > 0
    assert bool((of_frozen == 0).all())


def test_the_loss_is_the_squared_error_of_a_step_and_the_cost_of_rounding():
    process = PROCESSES["linear"]
    objective, network = GaussianDiffusion(process, uniform_grid(4)), OnALine(SKEWED, process, error=0.2)
    x0, noise = SKEWED.batch(), Noise(2)
    t = (noise.stratified_uniform(x0) * 4).floor() / 4 + 0.25
    clean = network.embed(x0.tokens)
    epsilon = noise.normal(x0.example, Purpose.GAUSS, 2, 1)
    alpha = 0.95 * (1 - t)[:, None, None]
    x_t, start = alpha.sqrt() * clean + (1 - alpha).sqrt() * epsilon, 0.95**0.5 * clean + 0.05**0.5 * epsilon
    squares = (network(x_t, x0.attention_mask, t) - clean).square().sum(dim=(1, 2))
    rounding = -network.log_words(start, x0.editable).gather(1, x0.tokens.view(-1, 1)).view(4, 2).sum(dim=1)
    torch.testing.assert_close(objective.loss(network, x0, noise), squares + rounding)


# ---- networks that predict tokens ------------------------------------------------------------------------------------


FREQUENT = torch.arange(1, VOCAB_SIZE + 1) ** 2
"""How often each token occurs."""


def predicting(process: str = "cosine", steps: int = 2000, counts: Tensor = FREQUENT) -> TrainingModule:
    """A new network that predicts tokens, with its objective, as a run makes them."""
    own = PROCESSES[process]
    config = GaussianConfig(own.schedule, steps, own.floor, width=16, predicts_tokens=True)
    statistics = TokenStatistics(MASK, 0, tokenizer_allowed(), (), counts[:NUM_TOKENIZER_IDS]).padded(VOCAB_SIZE)
    torch.manual_seed(0)
    network = config.make_network(backbone_of("bert"), TimeEmbedding.NONE, statistics)
    return TrainingModule(network, config.build(statistics)).eval()


def test_a_new_network_predicts_the_posterior_of_each_token_given_its_own_vector():
    tested, x0 = predicting(), batch()
    allowed, table = tested.network.allowed, tested.network.table.detach().double()
    prior = (FREQUENT * allowed).double() + allowed  # smoothed
    t = torch.linspace(0.05, 1, 12).double()
    alpha = signal(tested.objective.process, t)[:, None, None]
    x_t = tested.objective.process.corrupt(table[x0.tokens], x0.editable, x0.example, t, Noise(0))
    of_token = torch.distributions.Normal(alpha[..., None].sqrt() * table, (1 - alpha[..., None]).sqrt())
    log_p = (prior.log() + of_token.log_prob(x_t[:, :, None]).sum(dim=-1)).log_softmax(dim=-1)
    with torch.no_grad():
        own = tested.network.log_posterior(x_t, t, x0.attention_mask)
        torch.testing.assert_close(own, log_p[x0.attention_mask], atol=1e-4, rtol=1e-4)
        found = tested.network(x_t, x0.attention_mask, t)
    means = log_p.exp() @ table
    torch.testing.assert_close(found.double()[x0.attention_mask], means[x0.attention_mask], atol=1e-4, rtol=1e-4)
    clean = torch.zeros_like(t)
    x = tested.objective.process.corrupt(table[x0.tokens], x0.editable, x0.example, clean, Noise(0))
    with torch.no_grad():
        rounded = tested.network.log_words(x, x0.editable)
        torch.testing.assert_close(rounded, tested.network.log_posterior(x, clean, x0.editable))
    assert torch.equal(rounded.argmax(dim=-1), x0.tokens[x0.editable])


@pytest.mark.parametrize("process", PROCESSES)
def test_the_bound_of_a_new_network_that_predicts_tokens_is_that_of_their_frequencies(process):
    """Squared errors of the best denoiser, weighted by SNR, add up to the information about a token."""
    tested = predicting(process)
    allowed = tested.network.allowed.nonzero()[:, 0]
    log_p = ((FREQUENT[allowed] + 1).double() / (FREQUENT[allowed] + 1).sum()).log()
    draws = 512
    tokens = allowed.repeat_interleave(draws)[:, None]
    x0 = Noise(0).stratify(Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool)))
    strata = torch.arange(draws + 1).double() / draws
    x0 = replace(x0, strata=torch.stack([strata[:-1], strata[1:]], dim=1).repeat(len(allowed), 1))
    with torch.no_grad():
        nats = tested.nats(x0, Noise(1)).view(-1, draws).mean(dim=1)
    entropy = float(-(log_p.exp() * log_p).sum())
    assert float((log_p.exp() * nats).sum()) == pytest.approx(entropy, rel=0.03)


# ---- the sampler ----------------------------------------------------------------------------------------------------


def on_vectors(
    network: VectorNetwork, process: str, steps: int, clamp: float | None = None, **settings: Any
) -> Drawing:
    return drawing(GaussianAncestral(clamp), PROCESSES[process], steps=steps, word_vectors=network, **settings)


@pytest.mark.parametrize("clamp", CLAMPED)
def test_sampled_tokens_have_the_frequencies_of_the_chain(clamp):
    process, grid, rows = PROCESSES["linear"], torch.tensor([0.0, 0.1, 0.3, 0.6, 1.0]).double(), 20_000
    network = OnALine(COIN, process, error=0.5)
    network.table = network.table / 4  # so that rounding is a gamble, too
    canvas = COIN.batch(torch.full((rows, 1), 2))
    sampler = drawing(
        GaussianAncestral(clamp), process, grid=grid, warper=LogitsWarper(top_p=1.0), word_vectors=network
    )
    *_, last = sampler.sample(network, canvas, seed=1)
    fraction, expected = float((last.tokens == 1).double().mean()), float(exact_chain(network, process, grid, clamp)[1])
    assert fraction == pytest.approx(expected, abs=4 * (expected * (1 - expected) / rows) ** 0.5)


def test_fewer_steps_and_partial_grids_take_one_call_per_step():
    network = denoiser()
    canvas = sentences(network.backbone)
    for steps in (1, 3):
        states = list(on_vectors(network, "sqrt", steps).sample(network, canvas, seed=0))
        assert [float(state.time[0]) for state in states] == pytest.approx([1 - k / steps for k in range(steps + 1)])
        assert [state.calls.tolist() for state in states] == [[k] * 3 for k in range(steps + 1)]


def test_a_grid_that_ends_before_1_starts_from_the_given_tokens():
    network = denoiser()
    canvas = batch(rows=6)
    *_, near = on_vectors(network, "cosine", 1, 0.0, end=0.001).sample(network, canvas, 0)
    first, *_ = on_vectors(network, "cosine", 1, end=0.001).sample(network, canvas, 0)
    assert torch.equal(first.tokens, canvas.tokens)  # hardly any noise
    assert near.tokens.shape == canvas.tokens.shape
    with pytest.raises(ValueError, match="not allowed, such as"):
        next(on_vectors(network, "cosine", 1, end=0.5).sample(network, masked(canvas), 0))


def test_at_time_1_the_tokens_of_the_canvas_do_not_matter():
    network, canvas = denoiser(), batch(rows=4)
    sampler = on_vectors(network, "sqrt", 4)
    for one, other in zip(
        sampler.sample(network, canvas, seed=3), sampler.sample(network, masked(canvas), seed=3), strict=True
    ):
        assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("warper", [LogitsWarper(forbidden=(7, 8)), LogitsWarper(2.0, top_k=9, forbidden=(7, 8))])
def test_a_batch_equals_its_sequences_one_by_one_and_has_allowed_tokens(warper):
    network = denoiser()
    canvas = sentences(network.backbone)
    canvas = replace(canvas, editable=canvas.editable & (torch.arange(3) != 1)[:, None])  # nothing to do in row 1
    sampler = on_vectors(network, "sqrt", 5, warper=warper)
    states = list(sampler.sample(network, canvas, seed=7))
    assert states[-1].calls.tolist() == [5, 0, 5]
    for row in range(3):
        alone = canvas.select(torch.tensor([row]))
        for state, of_row in zip(states, sampler.sample(network, alone, seed=7), strict=True):
            assert torch.equal(state.tokens[row, : of_row.tokens.shape[1]], of_row.tokens[0])
    for state in states:
        assert torch.equal(state.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
        written = state.tokens[canvas.editable]
        assert bool(network.allowed[written].all())
        assert not bool(torch.isin(written, torch.tensor([7, 8])).any())
    *_, again = sampler.sample(network, canvas, seed=7)
    *_, other = sampler.sample(network, canvas, seed=8)
    assert torch.equal(again.tokens, states[-1].tokens)
    assert not torch.equal(other.tokens, states[-1].tokens)


def test_without_a_logits_warper_the_last_token_is_the_nearest_and_with_top_k_1_the_most_probable():
    """They differ: the most probable token may have a long vector or a large bias."""
    network, canvas = denoiser(), batch(rows=8)
    network.bias.data[10] = 1e6
    *_, nearest = on_vectors(network, "sqrt", 3).sample(network, canvas, seed=0)
    *_, likeliest = on_vectors(network, "sqrt", 3, warper=LogitsWarper(top_k=1)).sample(network, canvas, seed=0)
    assert bool((likeliest.tokens[:, 1:] == 10).all())
    assert not bool((nearest.tokens[:, 1:] == 10).all())


class Watched:
    """A network whose prediction is always 0 (or that of `guess`), which records its inputs."""

    def __init__(self, network: EmbeddingDenoiser, guess: float = 0.0):
        self.network, self.guess, self.allowed = network, guess, network.allowed
        self.rounded, self.targets, self.forbidden = [], [], set()

    def embed(self, tokens):
        return self.network.embed(tokens)

    def __call__(self, x_t, attention_mask, t):
        self.targets.append(x_t)
        return torch.full_like(x_t, self.guess)

    def log_words(self, x, targets):
        return self.network.log_words(x, targets)

    def nearest(self, x, targets, forbidden=()):
        self.rounded.append(x)
        self.forbidden.add(forbidden)
        return self.network.nearest(x, targets, forbidden)

    def likely(self, x, precision, targets):
        return self.network.likely(x, precision, targets)


def test_intermediate_vectors_have_the_variance_of_their_time():
    """With predictions of 0, x_s is 0 with noise of variance 1 - ᾱ_s. Frozen vectors stay."""
    process, grid, network = PROCESSES["sqrt"], uniform_grid(4), Watched(denoiser(width=4))
    canvas = batch(rows=500)
    list(on_vectors(network, "sqrt", 4, 0.0).sample(network, canvas, seed=0))
    for x, t in zip(network.rounded, reversed(grid), strict=True):
        variance = float(1 - signal(process, t))
        assert float(x[canvas.editable].detach().square().mean()) == pytest.approx(variance, rel=0.05)
    assert len(network.targets) == 4
    for x in network.targets:
        assert torch.equal(x[~canvas.editable], network.embed(canvas.tokens)[~canvas.editable])


def test_clamping_moves_predictions_to_vectors_of_allowed_tokens():
    """With the clamping trick, the last step ends near the vector of a token, whatever the network predicts."""
    canvas = batch(rows=8)
    for clamp, near in ((1.0, True), (0.0, False)):
        network = Watched(denoiser(), guess=0.2)
        sampler = on_vectors(network, "cosine", 2, clamp, warper=LogitsWarper(forbidden=(7,)))
        *_, last = sampler.sample(network, canvas, seed=0)
        words = network.embed(last.tokens)[canvas.editable]
        distance = (network.rounded[-1][canvas.editable] - words).detach().square().mean()
        assert (float(distance) < 2e-4) is near
        assert network.forbidden == {(7,)}


# ---- the network ----------------------------------------------------------------------------------------------------


def denoiser(architecture: str = "bert", width: int = 16) -> EmbeddingDenoiser:
    return EmbeddingDenoiser(backbone_of(architecture), tokenizer_allowed(), width).eval()


def batch(rows: int = 12, length: int = 10) -> Batch:
    """Sentences of a language that repeats one token."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(NUM_SPECIAL, 9, (rows, 1), generator=generator).repeat(1, length)
    tokens[:, 0] = 2
    editable = torch.ones(rows, length, dtype=torch.bool)
    editable[:, 0] = False
    return Noise(8).stratify(Batch.of(tokens, editable))


def masked(canvas: Batch) -> Batch:
    return replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, MASK))


def method(width: int = 16, clamp: float = 0.3, architecture: str = "bert") -> TrainingModule:
    process, grid = PROCESSES["sqrt"], uniform_grid(16)
    objective = GaussianDiffusion(process, grid, clamp)
    return TrainingModule(denoiser(architecture, width), objective)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_trainable_parameter_gets_a_gradient(architecture):
    """Distributed training waits for them, also without editable positions."""
    tested = method(architecture=architecture)
    x0 = sentences(tested.network.backbone)
    for whole in (x0, replace(x0, editable=torch.zeros_like(x0.editable))):
        tested.zero_grad()
        tested(whole, Noise(0), max(1.0, float(whole.num_tokens))).backward()
        targets = {name for name, parameter in tested.named_parameters() if parameter.requires_grad}
        assert targets == {name for name, parameter in tested.named_parameters() if parameter.grad is not None}
    names = {name.removeprefix("network.") for name in targets}
    assert {"table", "bias", "up.weight", "down.2.weight", "time.mix.0.weight"} <= names
    assert any("layer" in name for name in names)


def test_the_network_satisfies_its_protocol_also_by_static_lookup():
    """Since Python 3.12 `isinstance` with a protocol looks up attributes statically: no buffers, no submodules."""
    for name in ("allowed", "embed", "log_words", "nearest", "__call__"):
        inspect.getattr_static(denoiser("bert"), name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_and_other_sequences_do_not_matter(architecture):
    network = denoiser(architecture)
    x0 = sentences(network.backbone)
    assert isinstance(network, VectorNetwork)
    assert len(network.allowed) == network.backbone.config.vocab_size
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    guess = network(network.embed(x0.tokens), x0.attention_mask, t)
    assert guess.shape == (3, 9, 16)
    for row in range(3):
        alone = x0.select(torch.tensor([row]))
        found = network(network.embed(alone.tokens), alone.attention_mask, t[row : row + 1])
        torch.testing.assert_close(guess[row, : found.shape[1]], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_table_as_wide_as_the_embeddings_of_the_backbone_starts_from_them(architecture):
    """Clean vectors enter a pretrained encoder as its own embeddings, at every time."""
    backbone = backbone_of(architecture)
    words = backbone.get_input_embeddings()
    words.weight.data += 0.5
    network = EmbeddingDenoiser(backbone, tokenizer_allowed(), words.embedding_dim).eval()
    network.down = nn.Linear(32, network.width, bias=False)
    nn.init.eye_(network.down.weight)  # shows the first axes of what leaves the encoder
    x0 = sentences(backbone)
    bare = backbone.base_model(input_ids=x0.tokens, attention_mask=x0.attention_mask.long()).last_hidden_state
    bare = bare[..., : network.width]
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    found = network(network.embed(x0.tokens), x0.attention_mask, t)
    torch.testing.assert_close(found[x0.attention_mask], bare[x0.attention_mask], atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(network.up(network.embed(x0.tokens)), words(x0.tokens))
    assert [float(value) for value in torch.std_mean(network.table.detach())] == pytest.approx([1, 0], abs=1e-3)


def test_the_network_is_time_conditioned():
    network, x0 = denoiser(), batch(rows=2)
    nn.init.normal_(network.time.mix[-1].weight)
    with torch.no_grad():
        early, late = (
            network(network.embed(x0.tokens), x0.attention_mask, torch.full((2,), t).double()) for t in (0.2, 0.8)
        )
    assert float((early - late).abs().max()) > 0.01


def test_other_tables_start_with_unit_variance():
    assert float(denoiser(width=64).table.detach().std()) == pytest.approx(1, abs=0.05)
    assert EmbeddingDenoiser(backbone_of("bert"), tokenizer_allowed()).width == 128


def test_rounding_by_hand():
    network = denoiser()
    nn.init.normal_(network.bias)
    x = torch.randn(2, 5, 16)
    targets = torch.rand(2, 5) < 0.6
    logits = x[targets] @ network.table.T + network.bias
    allowed = torch.nn.functional.pad(tokenizer_allowed(), (0, VOCAB_SIZE - NUM_TOKENIZER_IDS))
    expected = logits.masked_fill(~allowed, -torch.inf).log_softmax(dim=-1)
    torch.testing.assert_close(network.log_words(x, targets), expected)
    distance = torch.cdist(x[targets], network.table).masked_fill(~allowed, torch.inf)
    assert torch.equal(network.nearest(x, targets), distance.argmin(dim=1))
    best = network.nearest(x, targets).unique()
    distance[:, best] = torch.inf
    assert torch.equal(network.nearest(x, targets, tuple(best.tolist())), distance.argmin(dim=1))
    precision = torch.tensor([0.3, 5.0])
    weights = (
        -precision.repeat_interleave(targets.sum(dim=1))[:, None] / 2 * torch.cdist(x[targets], network.table) ** 2
    )
    mean = weights.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ network.table
    torch.testing.assert_close(network.likely(x, precision, targets), mean.detach(), rtol=1e-3, atol=1e-4)
    moved = clamp_to_words(network, x, targets)
    assert torch.equal(moved[~targets], x[~targets])
    assert torch.equal(moved[targets], network.table[network.nearest(x, targets)])


def test_autocast_leaves_the_table_in_full_precision():
    network, x0 = denoiser(), batch()
    x = torch.randn(12, 10, 16)
    with torch.no_grad():
        words, nearest = network.log_words(x, x0.editable), network.nearest(x, x0.editable)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(network.log_words(x, x0.editable), words)
            assert torch.equal(network.nearest(x, x0.editable), nearest)
            guess = network(x, x0.attention_mask, torch.zeros(12))
    assert not torch.equal(guess, guess.bfloat16().float())  # the last projection was no half-precision one


@pytest.mark.slow
@pytest.mark.parametrize(("width", "num_words"), [(16, 20), (64, 400)])
def test_the_nearest_token_is_right_where_tokens_are_certain(width, num_words):
    """At the noisiest time that counts as certain, and not at a much noisier one."""
    process, times = PROCESSES["cosine"], torch.linspace(0, 1, 1001, dtype=torch.float64)
    certain = process.is_certain(times, width, torch.tensor(num_words))
    assert bool((certain[:-1] >= certain[1:]).all())  # once and for all
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(num_words, width, generator=generator, dtype=torch.float64)
    chosen = torch.randint(num_words, (40_000,), generator=generator)

    def distances(t: float) -> tuple[Tensor, Tensor]:
        """To all tokens, and to the right one."""
        alpha = process.signal(torch.tensor([t], dtype=torch.float64))
        noise = torch.randn(len(chosen), width, generator=generator, dtype=torch.float64)
        x_t = alpha.sqrt() * words[chosen] + (1 - alpha).sqrt() * noise
        found = torch.cdist(x_t, alpha.sqrt() * words)
        return found, found.gather(1, chosen[:, None])

    def error_rate(t: float) -> float:
        return float((distances(t)[0].argmin(dim=1) != chosen).double().mean())

    last = float(times[certain][-1])
    assert error_rate(last) < 1 / num_words
    assert error_rate((1 + last) / 2) > 5 / num_words
    telling = process.tells_words(times, width, torch.tensor(num_words))
    assert bool((telling | ~certain).all())
    last, nearer = float(times[telling][-1]), {}
    for t in (last, (1 + last) / 2):
        found, right = distances(t)
        nearer[t] = float((found < right).double().sum(dim=1).mean())
    assert nearer[last] < 1 < nearer[(1 + last) / 2]


def test_where_the_noisy_vector_determines_the_token_the_prediction_is_not_used():
    """There the bound of a network that confuses tokens equals that of a perfect one."""
    objective, network, x0 = GaussianDiffusion(PROCESSES["cosine"], uniform_grid(64)), denoiser(width=64), batch()
    wrong = Watched(network, guess=0.2)
    clean, t = network.embed(x0.tokens), x0.constant_times(0.1)
    assert bool(objective.process.is_certain(t, 64, network.allowed.sum()).all())
    nats = objective.step_nats(wrong, x0, clean, x0.constant_times(0.05), t, Noise(0))
    assert float(nats.detach().abs().max()) < 1e-6
    moved = GaussianDiffusion(PROCESSES["cosine"], uniform_grid(64), clamped=0.3)
    assert float(moved.step_nats(wrong, x0, clean, x0.constant_times(0.05), t, Noise(0)).detach().max()) > 100


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="`width` of word vectors must be at least 1"):
        EmbeddingDenoiser(backbone_of("bert"), tokenizer_allowed(), width=0)
    network = denoiser()
    with pytest.raises(ValueError, match="at most 24"):
        network(torch.zeros(1, 25, 16), torch.ones(1, 25, dtype=torch.bool), torch.zeros(1))
    with pytest.raises(ValueError, match="forbid fewer"):
        network.nearest(torch.zeros(1, 2, 16), torch.ones(1, 2, dtype=torch.bool), tuple(range(VOCAB_SIZE)))
    with pytest.raises(ValueError, match="grid"):
        GaussianDiffusion(PROCESSES["sqrt"], uniform_grid(4, end=0.5))
    with pytest.raises(ValueError, match="clamped"):
        GaussianDiffusion(PROCESSES["sqrt"], uniform_grid(4), clamped=2.0)
    with pytest.raises(ValueError, match="clamped"):
        GaussianAncestral(2.0)


def test_the_loss_averages_squares_over_the_width():
    """As in the original code; summed, they would outweigh the rounding."""
    tested, x0, noise = method(), batch(), Noise(2)
    process, network = tested.objective.process, tested.network
    t = (noise.stratified_uniform(x0) * 16).floor() / 16 + 1 / 16
    with torch.no_grad():
        clean = network.embed(x0.tokens)
        guess = network(process.corrupt(clean, x0.editable, x0.example, t, noise), x0.attention_mask, t)
        squares = ((guess - clean).square().mean(dim=-1) * x0.editable).sum(dim=1)
        rounding = tested.objective.rounding_nats(network, x0, clean, noise).sum(dim=1)
        expected = squares.double() + rounding
        torch.testing.assert_close(tested.objective.loss(network, x0, noise), expected, rtol=1e-6, atol=1e-6)


# ---- the contract ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("predicted", ["vectors", "tokens"])
def test_it_learns_a_language_that_repeats_a_token(predicted):
    """4 sentences of 9 tokens: log 4 nats per sentence, where an untrained network has 9·log 42 = 34."""
    whole = batch(rows=32)
    counts = whole.tokens[whole.editable].bincount(minlength=VOCAB_SIZE)
    tested = method() if predicted == "vectors" else predicting("sqrt", 16, counts)
    optimizer = torch.optim.AdamW(tested.parameters(), lr=3e-3, weight_decay=0.0)

    def figure() -> float:
        with torch.no_grad():
            return float(torch.stack([tested.nats(whole, Noise(99, k)).sum(dim=1).mean() for k in range(6)]).mean())

    before = figure()
    for step in range(100):
        loss = tested(Noise(0, step).stratify(whole), Noise(0, step), whole.num_tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert before > (30 if predicted == "vectors" else 9 * math.log(4))
    assert math.log(4) < figure() < 8
    *_, last = on_vectors(tested.network, "sqrt", 16, 0.3).sample(tested.network, masked(whole), seed=0)
    repeated = float((last.tokens[:, 2:] == last.tokens[:, 1:2]).double().mean())
    assert repeated > (0.9 if predicted == "vectors" else 0.6)  # by chance, a quarter
    assert float((last.tokens[:, 1:] < 9).double().mean()) > 0.95


def test_saved_and_loaded_parameters_give_the_same_nats(tmp_path):
    tested, fresh, whole = method(), method(), batch()
    for parameter in tested.parameters():
        nn.init.normal_(parameter, std=0.1)
    fresh.load_state_dict(tested.state_dict())
    assert torch.equal(fresh.nats(whole, Noise(2)), tested.nats(whole, Noise(2)))
    # As a folder: the backbone by its own means, the rest beside it.
    tested.network.backbone.save_pretrained(tmp_path)
    backbone = type(tested.network.backbone).from_pretrained(tmp_path).eval()
    beside = {n: v for n, v in tested.network.state_dict().items() if not n.startswith("backbone.")}
    again = EmbeddingDenoiser(backbone, tokenizer_allowed(), width=16).eval()
    unknown = again.load_state_dict(beside, strict=False)
    assert not unknown.unexpected_keys
    assert all(name.startswith("backbone.") for name in unknown.missing_keys)
    assert torch.equal(TrainingModule(again, tested.objective).nats(whole, Noise(2)), tested.nats(whole, Noise(2)))


def test_half_precision_hardly_changes_the_bound():
    tested, whole = method(clamp=0.0), batch()
    with torch.no_grad():
        full = tested.nats(whole, Noise(2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = tested.nats(whole, Noise(2))
        half = tested.bfloat16().nats(whole, Noise(2))
    assert torch.equal(tested.objective.grid, uniform_grid(16))
    assert mixed.dtype == half.dtype == full.dtype == torch.float64
    torch.testing.assert_close(mixed.sum(dim=1), full.sum(dim=1), rtol=0.05, atol=0.1)
    torch.testing.assert_close(half.sum(dim=1), full.sum(dim=1), rtol=0.1, atol=0.1)


def test_it_is_a_bound_and_has_no_parameters_of_its_own():
    tested = method()
    assert tested.objective.likelihood is Likelihood.BOUND
    assert all(name.startswith("network.") for name in tested.state_dict())
    assert {tensor.device.type for tensor in tested.to("meta").state_dict().values()} == {"meta"}


def test_a_token_dependent_schedule_is_refused_and_others_are_named():
    with pytest.raises(ValueError, match="use linear, cosine or sqrt"):
        Gaussian(Spindle(0.3))
