"""The learned schedule: both parts of its gradient on enumerable languages, the bound, and the gain by learning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from backbones import MASK, NUM_SPECIAL, NUM_TOKENIZER_IDS, VOCAB_SIZE, backbone_of, sentences, tokenizer_allowed
from drawing import drawing
from languages import SKEWED, Bayes, Language, Table, exact_log_likelihood, exact_nats, quadrature
from scipy import stats
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing, LearnedExponents
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Linear, Power, Spindle, TokenInformation
from diffusionbert.diffusion.shapes import Batch, per_position
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.objectives.continuous_time import ContinuousTime, LearnedSchedule
from diffusionbert.samplers import last_state
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.exact import SkipExact
from diffusionbert.training.checkpoint import set_weights, weights_of

RANDOM = Language.random(3, 2, seed=5)


def learned(language: Language, exponents: list[float] | None = None) -> Absorbing:
    initial = torch.ones(language.vocabulary) if exponents is None else torch.tensor(exponents)
    return Absorbing(Power(), language.mask_id, LearnedExponents(initial))


def exponents_of(process: Absorbing) -> LearnedExponents:
    assert process.learned is not None
    return process.learned


def every_noise(process: Absorbing, language: Language, num_draws: int) -> tuple[Tensor, list[Batch], Tensor, Tensor]:
    """Every (x0, draws of x_t, t) with its probability: t by quadrature, q = Π t^w or 1 - t^w from the definition."""
    patterns = torch.tensor(list(itertools.product([False, True], repeat=language.length * num_draws)))
    times, lengths = quadrature(process, language.batch(), 40)
    sizes = (len(times), len(patterns), len(language.sentences))
    at, pattern, row = (index.flatten() for index in torch.meshgrid(*map(torch.arange, sizes), indexing="ij"))
    clean, t = language.batch(language.sentences[row]), times[at]
    masked = patterns[pattern].view(-1, num_draws, language.length)
    gone = t[:, None] ** process.information[clean.tokens]
    weight = lengths[at] * torch.where(masked, gone[:, None], 1 - gone[:, None]).flatten(1).prod(dim=1)
    draws = [replace(clean, tokens=clean.tokens.masked_fill(drawn, language.mask_id)) for drawn in masked.unbind(1)]
    # The process knows 1 - ᾱ and not t^w, which rounds; what is left out has less than this of all probability.
    kept = ((weight > 0) & ~(masked & (gone < 1e-11)[:, None]).flatten(1).any(dim=1)).nonzero()[:, 0]
    return clean.tokens[kept], [draw.select(kept) for draw in draws], t[kept], weight[kept]


def exact_bound(process: Absorbing, network: nn.Module, language: Language) -> Tensor:
    """The bound of each sentence, with gradients for the exponents through the rate and through the noise."""
    x0, (x_t,), t, weight = every_noise(process, language, 1)
    targets = process.targets(x_t)
    rate = process.rate(x0, x_t, network(x_t.tokens, x_t.attention_mask, t, targets), t)
    nats = weight * per_position(rate, targets).sum(dim=1)
    powers = language.num_words ** torch.arange(language.length - 1, -1, -1)
    return torch.zeros(len(language.sentences), dtype=torch.float64).index_add(0, x0 @ powers, nats)


def expected(language: Language, nats: Tensor) -> Tensor:
    return (language.probabilities * nats).sum()


# ---- the exponents ----------------------------------------------------------------------------------------------


def test_exponents_start_at_the_given_values_and_never_leave_their_range():
    initial = torch.tensor([0.6, 0.7, 2.5, 10.0])
    exponents = LearnedExponents(initial)
    torch.testing.assert_close(exponents(), initial.double(), atol=0, rtol=1e-5)
    assert exponents().dtype == torch.float64
    with torch.no_grad():
        exponents.logits.copy_(torch.tensor([-1e6, -3.0, 3.0, 1e6]))
    extremes = [float(extreme) for extreme in exponents().detach().aminmax()]
    assert extremes == pytest.approx([LearnedExponents.LOWEST, LearnedExponents.HIGHEST])
    exponents().sum().backward()
    assert bool(torch.isfinite(exponents.logits.grad).all())


@pytest.mark.parametrize("initial", [[1.0, 0.5], [1.0, 10.1], [1.0, float("nan")], [1.0, -1.0]], ids=str)
def test_exponents_out_of_range_are_refused(initial):
    with pytest.raises(ValueError, match=r"between 0\.6 and 10"):
        LearnedExponents(torch.tensor(initial))


def test_half_precision_changes_exponents_slightly_and_consistently():
    process = learned(RANDOM, [0.8, 1.7, 6.0, 1.0])
    before = process.information.detach().clone()
    objective = LearnedSchedule(process).bfloat16()
    assert objective.process is process
    torch.testing.assert_close(process.information.detach(), before, rtol=0.01, atol=0)
    nats = exact_bound(process, Table(RANDOM), RANDOM)
    assert float((-nats).exp().sum().detach()) <= 1 + 1e-9


def test_learned_exponents_act_as_fixed_ones_of_the_same_values():
    process, network = learned(RANDOM, [0.8, 1.7, 6.0, 1.0]), Table(RANDOM, seed=1)
    fixed = Absorbing(Power(), RANDOM.mask_id, TokenInformation(process.information.detach(), 1.0))
    x0, (x_t,), t, _ = every_noise(process, RANDOM, 1)
    log_f = network(x_t.tokens, x_t.attention_mask, t, process.targets(x_t))
    for other in (fixed, process.fixed()):
        assert not other.survival(x_t, t).requires_grad
        assert torch.equal(process.survival(x_t, t), other.survival(x_t, t))
        assert torch.equal(process.rate(x0, x_t, log_f, t), other.rate(x0, x_t, log_f, t))
        assert torch.equal(process.divergence(x0, x_t, log_f, t / 2, t), other.divergence(x0, x_t, log_f, t / 2, t))
        assert torch.equal(process.reverse(x_t, log_f, t / 2, t), other.reverse(x_t, log_f, t / 2, t))
    assert process.survival(x_t, t).requires_grad
    assert process.information.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("verb", ["rate", "divergence", "loss"])
def test_gradients_are_finite_at_both_ends_and_for_tokens_that_cannot_be_masked_yet(verb, dtype):
    """At t = 1e-4 a token of exponent 9.9 is masked with probability 1e-40, which 1 - ᾱ rounds to 0."""
    process = learned(RANDOM, [0.61, 1.0, 9.9, 1.0])
    network = Table(RANDOM, scale=30.0).to(dtype)
    t = torch.tensor([0.0, 0.0, 1e-20, 1e-4, 1e-4, 0.5, 1.0, 1.0], dtype=torch.float64)
    tokens = torch.tensor([[0, 2], [0, 0], [0, 1], [0, 2], [2, 1], [2, 2], [2, 0], [1, 1]])
    x0 = RANDOM.batch(tokens)
    masked = torch.tensor([[0, 0], [0, 0], [1, 0], [1, 0], [0, 1], [1, 1], [1, 1], [1, 1]]).bool()
    x_t = replace(x0, tokens=tokens.masked_fill(masked, RANDOM.mask_id))
    if verb == "loss":
        loss = LearnedSchedule(process).paired_nats(network, tokens, x_t, x_t, t)
    else:
        log_f = network(x_t.tokens, x_t.attention_mask, t, masked)
        times = (t,) if verb == "rate" else (torch.zeros_like(t), t)
        loss = getattr(process, verb)(tokens, x_t, log_f, *times)
    assert bool(torch.isfinite(loss).all())
    loss.sum().backward()
    for parameter in (network.logits, exponents_of(process).logits):
        assert bool(torch.isfinite(parameter.grad).all())
        assert float(parameter.grad.abs().max()) > 0


def test_a_schedule_without_learned_exponents_is_refused():
    exponents = LearnedExponents(torch.ones(RANDOM.vocabulary))
    for schedule in (Spindle(0.3), Linear()):
        with pytest.raises(ValueError, match="need the schedule Power"):
            Absorbing(schedule, RANDOM.mask_id, exponents)
    with pytest.raises(ValueError, match="nothing to learn"):
        LearnedSchedule(Absorbing(Power(), RANDOM.mask_id, RANDOM.information()))
    with pytest.raises(ValueError, match="reweight"):
        LearnedSchedule(Absorbing(Power(), RANDOM.mask_id, exponents, reweighted=False))
    short = LearnedSchedule(Absorbing(Power(), RANDOM.mask_id, LearnedExponents(torch.ones(3))))
    with pytest.raises(ValueError, match="whole vocabulary"):
        short.loss(Table(RANDOM), RANDOM.batch(), Noise(0))


# ---- the gradient -----------------------------------------------------------------------------------------------


def gradients(loss: Tensor, process: Absorbing, network: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [exponents_of(process).logits, *network.parameters()], retain_graph=True))


def expected_loss(process: Absorbing, network: nn.Module, language: Language) -> Tensor:
    """The expected surrogate loss over all pairs of draws; their probability is not differentiated."""
    x0, (first, second), t, weight = every_noise(process, language, 2)
    powers = language.num_words ** torch.arange(language.length - 1, -1, -1)
    value = LearnedSchedule(process).paired_nats(network, x0, first, second, t)
    return (language.probabilities[x0 @ powers] * weight.detach() * value).sum()


@pytest.mark.parametrize("exponents", [[1.0] * 4, [0.7, 2.0, 5.0, 1.0]], ids=str)
@pytest.mark.parametrize("language", [SKEWED, RANDOM], ids=["two words", "three words"])
def test_the_expected_gradient_of_the_loss_is_that_of_the_exact_bound(language, exponents):
    process, network = learned(language, exponents[: language.vocabulary]), Table(language, seed=2)
    bound, loss = expected(language, exact_bound(process, network, language)), expected_loss(process, network, language)
    assert float(loss.detach()) == pytest.approx(float(bound.detach()), rel=1e-9)  # the surrogate adds no value
    exact, estimated = (gradients(value, process, network) for value in (bound, loss))
    for one, other in zip(exact, estimated, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # the exponents' is summed in float32
    assert float(exact[0].abs().max()) > 0.01


def test_the_gradient_of_the_exact_bound_agrees_with_finite_differences():
    process, network = learned(SKEWED, [0.8, 2.0, 1.0]), Table(SKEWED, seed=2)
    exact = gradients(expected(SKEWED, exact_bound(process, network, SKEWED)), process, network)[0]
    width, logits = 1e-3, exponents_of(process).logits
    for word in range(2):
        values = []
        for step in (-width, width):
            with torch.no_grad():
                logits[word] += step
                values.append(expected(SKEWED, exact_bound(process, network, SKEWED)))
                logits[word] -= step
        assert float((values[1] - values[0]) / (2 * width)) == pytest.approx(float(exact[word]), rel=1e-3)


def test_without_the_score_term_the_gradient_of_the_exponents_is_wrong():
    process, network = learned(SKEWED, [0.8, 2.0, 1.0]), Table(SKEWED, seed=2)
    x0, (x_t,), t, weight = every_noise(process, SKEWED, 1)
    targets = process.targets(x_t)
    log_f = network(x_t.tokens, x_t.attention_mask, t, targets)
    rate = per_position(process.rate(x0, x_t, log_f, t), targets).sum(dim=1)
    pathwise = (SKEWED.probabilities[x0 @ torch.tensor([2, 1])] * weight.detach() * rate).sum()
    right = gradients(expected(SKEWED, exact_bound(process, network, SKEWED)), process, network)
    wrong = gradients(pathwise, process, network)
    torch.testing.assert_close(wrong[1], right[1], rtol=1e-6, atol=1e-9)  # the network's is right
    assert float((wrong[0] - right[0]).abs().max()) > 0.3 * float(right[0].abs().max())


def test_the_score_must_be_that_of_the_sequence_and_not_of_the_position():
    """The rate of each position with its own log q ignores that masking one token makes others harder to predict."""
    process, network = learned(SKEWED, [0.8, 2.0, 1.0]), Table(SKEWED, seed=2)
    x0, (x_t,), t, weight = every_noise(process, SKEWED, 1)
    targets = process.targets(x_t)
    rate = per_position(process.rate(x0, x_t, network(x_t.tokens, x_t.attention_mask, t, targets), t), targets)
    alpha = process.survival(replace(x_t, tokens=x0), t)
    log_q = torch.where(targets, 1 - alpha, alpha).log()
    probability = SKEWED.probabilities[x0 @ torch.tensor([2, 1])] * weight.detach()
    right = gradients(expected(SKEWED, exact_bound(process, network, SKEWED)), process, network)[0]
    for row_wise in (True, False):
        score = rate.detach().sum(1) * log_q.sum(1) if row_wise else (rate.detach() * log_q).sum(1)
        gradient = gradients((probability * (rate.sum(dim=1) + score)).sum(), process, network)[0]
        assert torch.allclose(gradient, right, rtol=1e-5, atol=1e-8) == row_wise


def test_drawn_gradients_average_to_the_exact_ones():
    """Value and gradient of `loss` over many sequences, against the enumerated ones."""
    process, network = learned(SKEWED, [1.5, 2.5, 1.0]), Table(SKEWED, seed=2)
    rows, parts = 2000, 20
    sentence = SKEWED.sentences[1]
    exact_value = exact_bound(process, network, SKEWED)[1]
    exact = gradients(exact_value, process, network)
    many = SKEWED.batch(sentence.expand(rows * parts, -1))
    objective, values, drawn = LearnedSchedule(process), [], []
    for part in range(parts):
        loss = objective.loss(network, many.select(torch.arange(part * rows, (part + 1) * rows)), Noise(3)).mean()
        values.append(loss.detach())
        drawn.append(gradients(loss, process, network))
    samples = [torch.stack(kind) for kind in ([torch.stack(values)], *zip(*drawn, strict=True))]
    samples[0] = torch.stack(values)
    for sample, truth in zip(samples, [exact_value.detach(), *exact], strict=True):
        error = sample.std(dim=0) / parts**0.5
        assert bool(((sample.mean(dim=0) - truth).abs() <= 5 * error + 1e-9).all())


class Neighbors(nn.Module):
    """Random logits as sums over both neighbors, for sentences too long to enumerate."""

    def __init__(self, num_words: int):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(num_words + 1, num_words, dtype=torch.float64))

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        logits = (self.logits[tokens.roll(1, dims=1)] + self.logits[tokens.roll(-1, dims=1)])[targets]
        return nn.functional.pad(logits.log_softmax(dim=-1), (0, 1), value=-torch.inf)


@pytest.mark.slow
def test_the_baseline_lowers_the_variance_of_long_sentences():
    """Both kinds use two draws. For two or three tokens the baseline itself is too noisy."""
    process, network = Absorbing(Power(), 5, LearnedExponents(torch.full((6,), 1.5))), Neighbors(5)
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    for step in range(50):
        tokens = torch.randint(5, (1, 48))
        x0 = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))
        t = Noise(0, step).stratified_uniform(x0)
        draws = [process.corrupt(x0, t, Noise(seed, step)) for seed in (1, 2)]
        paired = LearnedSchedule(process).paired_nats(network, tokens, draws[0], draws[1], t)
        scores = [process.log_corrupt(tokens, x_t, t) for x_t in draws]
        rates = [LearnedSchedule(process).paired_nats(network, tokens, x_t, x_t, t) for x_t in draws]
        single = sum(rate + rate.detach() * score for rate, score in zip(rates, scores, strict=True)) / 2
        for baseline, loss in ((True, paired), (False, single)):
            found[baseline].append(gradients(loss.sum(), process, network)[0])
    with_baseline, without = (float(torch.stack(found[kind]).var(dim=0).sum()) for kind in (True, False))
    assert with_baseline < 0.5 * without


# ---- the bound --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponents", [[1.0] * 4, [0.7, 1.0, 4.0, 1.0], [9.0, 0.7, 2.0, 1.0]], ids=str)
def test_nats_are_those_of_a_distribution_for_all_exponents(exponents):
    process = learned(RANDOM, exponents)
    objective = LearnedSchedule(process)
    assert objective.likelihood is Likelihood.BOUND
    for network in (Table(RANDOM, seed=3), Table(RANDOM, scale=0.1), Bayes(RANDOM, process)):
        nats = exact_bound(process, network, RANDOM).detach()
        assert float((-nats).exp().sum()) <= 1 + 1e-6
        assert float(expected(RANDOM, nats)) >= RANDOM.entropy - 1e-6


@pytest.mark.parametrize("exponents", [[0.7, 1.0, 4.0, 1.0], [9.0, 0.7, 2.0, 1.0]], ids=str)
def test_the_time_conditioned_bayes_denoiser_has_the_same_bound_for_all_exponents(exponents):
    """It is -log p of every sentence, so that only imperfect networks can gain by learning."""
    process = learned(RANDOM, exponents)
    nats = exact_bound(process, Bayes(RANDOM, process), RANDOM).detach()
    torch.testing.assert_close(nats, -RANDOM.probabilities.log(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("exponent", [1.0, 2.5])
def test_equal_exponents_are_the_linear_bound(exponent):
    network = Table(RANDOM, seed=3)
    linear = exact_nats(ContinuousTime(Absorbing(Linear(), RANDOM.mask_id)), network, RANDOM.batch())
    nats = exact_bound(learned(RANDOM, [exponent] * 4), network, RANDOM)
    torch.testing.assert_close(nats, linear, atol=1e-5, rtol=0)


def test_only_ratios_of_exponents_matter_for_a_time_agnostic_network():
    network = Table(RANDOM, seed=3)
    one, other = (
        exact_bound(learned(RANDOM, [scale * w for w in (0.8, 1.5, 3.0, 1.0)]), network, RANDOM) for scale in (1, 3)
    )
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_drawn_nats_average_to_the_exact_ones_without_gradients_for_exponents():
    process, network, draws = learned(RANDOM, [0.8, 1.5, 3.0, 1.0]), Table(RANDOM, seed=3), 20000
    exact = float(exact_bound(process, network, RANDOM)[5].detach())
    many = RANDOM.batch(RANDOM.sentences[5].expand(draws, -1))
    nats = LearnedSchedule(process).nats(network, many, Noise(1))
    nats.sum().backward()
    assert exponents_of(process).logits.grad is None
    assert network.logits.grad is not None
    rows = nats.detach().sum(dim=1)
    assert float(rows.mean()) == pytest.approx(exact, abs=4 * float(rows.std()) / draws**0.5)


# ---- what learning gains ----------------------------------------------------------------------------------------

PHRASES = torch.zeros(5, 5, dtype=torch.float64)
PHRASES[0, 3], PHRASES[1, 3], PHRASES[2, 4] = 0.5, 0.3, 0.2
AGREEMENT = Language(5, 2, PHRASES.flatten())
"""A noun (0, 1 or 2) and then the ending (3 or 4) that it demands."""


class Reader(nn.Module):
    """An imperfect network: each position depends on the token to its left alone."""

    def __init__(self, language: Language):
        super().__init__()
        self.mask_id = language.mask_id
        shape = (language.length, language.vocabulary, language.num_words)
        self.logits = nn.Parameter(torch.zeros(shape, dtype=torch.float64))

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        left = nn.functional.pad(tokens, (1, 0), value=self.mask_id)[:, :-1]
        log_f = self.logits[torch.arange(tokens.shape[1]), left].log_softmax(dim=-1)
        return nn.functional.pad(log_f, (0, 1), value=-torch.inf)[targets]


def lowest(nats: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> float:
    """The expected nats after minimization by LBFGS."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=40, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = expected(AGREEMENT, nats())
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(expected(AGREEMENT, nats()).detach())


def exactly_trained(kind: Callable[[Language], nn.Module]) -> tuple[float, float, Tensor]:
    """The lowest bound under the linear schedule, then the lowest with exponents free, and those exponents."""
    process, network = learned(AGREEMENT), kind(AGREEMENT)
    linear = lowest(lambda: exact_bound(process, network, AGREEMENT), network.parameters())
    everything = [*network.parameters(), *process.parameters()]
    free = lowest(lambda: exact_bound(process, network, AGREEMENT), everything)
    return linear, free, process.information.detach()


@pytest.mark.slow
def test_a_weak_network_gains_by_an_order_of_generation_that_suits_it():
    """The noun determines its ending, but not the other way round; the spindle has the wrong order."""
    linear, free, exponents = exactly_trained(Reader)
    process, network = Absorbing(Spindle(0.3), AGREEMENT.mask_id, AGREEMENT.information()), Reader(AGREEMENT)
    objective = ContinuousTime(process)
    spindle = lowest(lambda: exact_nats(objective, network, AGREEMENT.batch()), network.parameters())
    assert AGREEMENT.entropy == pytest.approx(1.0297, abs=1e-4)
    assert linear == pytest.approx(1.280, abs=0.001)
    assert spindle == pytest.approx(1.312, abs=0.001)
    assert free == pytest.approx(1.058, abs=0.001)  # the range of exponents alone keeps it from the entropy
    assert float(exponents[:3].min()) > 5 * float(exponents[3:5].max())


@pytest.mark.slow
def test_a_network_that_can_be_perfect_gains_nothing():
    """A time-agnostic network can be perfect with equal exponents, and with no others."""
    linear, free, exponents = exactly_trained(Table)
    assert linear == pytest.approx(AGREEMENT.entropy, abs=1e-4)
    assert AGREEMENT.entropy - 1e-6 <= free <= linear + 1e-9
    assert float(exponents.std()) < 0.1
    process, network = learned(AGREEMENT, [8.0, 1.0, 3.0, 0.7, 5.0, 1.0]), Table(AGREEMENT, scale=0.1)
    others = lowest(lambda: exact_bound(process, network, AGREEMENT), network.parameters())
    assert others > AGREEMENT.entropy + 0.002


@pytest.mark.slow
def test_training_with_drawn_losses_approaches_the_exact_optimum():
    process, network = learned(AGREEMENT), Reader(AGREEMENT)
    objective, steps = LearnedSchedule(process), 160
    rates = (0.2, 0.02)
    optimizer = torch.optim.Adam([{"params": network.parameters()}, {"params": process.parameters()}])
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        drawn = torch.multinomial(AGREEMENT.probabilities, 128, replacement=True)
        x0 = Noise(0, step).stratify(AGREEMENT.batch(AGREEMENT.sentences[drawn]))
        optimizer.zero_grad()
        objective.loss(network, x0, Noise(0, step)).mean().backward()
        optimizer.step()
    reached = float(expected(AGREEMENT, exact_bound(process, network, AGREEMENT)).detach())
    assert AGREEMENT.entropy < reached < 1.18  # linear 1.280, optimum 1.058


# ---- sampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ancestral, SkipExact])
def test_samples_follow_the_exact_distribution(kind):
    process, network = learned(RANDOM, [0.7, 1.5, 6.0, 1.0]), Table(RANDOM, seed=2)
    grid, rows = torch.tensor([0.0, 0.1, 0.15, 0.7, 1.0], dtype=torch.float64), 20000
    probabilities = exact_log_likelihood(process, network, RANDOM, grid).exp().detach()
    assert float(probabilities.sum()) == pytest.approx(1)
    canvas = RANDOM.batch(torch.full((rows, 2), RANDOM.mask_id))
    *_, last = drawing(kind(), process, grid=grid).sample(network, canvas, seed=11)
    counts = torch.bincount(last.tokens @ torch.tensor([3, 1]), minlength=9)
    assert stats.chisquare(counts.numpy(), (probabilities / probabilities.sum() * rows).numpy()).pvalue > 0.01
    linear = exact_log_likelihood(Absorbing(Linear(), RANDOM.mask_id), network, RANDOM, grid).exp().detach()
    assert stats.chisquare(counts.numpy(), (linear / linear.sum() * rows).numpy()).pvalue < 1e-6


# ---- the contract, on a real network ----------------------------------------------------------------------------


def method() -> TrainingModule:
    network = Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()
    process = Absorbing(Power(), MASK, LearnedExponents(torch.ones(VOCAB_SIZE)))
    return TrainingModule(network, LearnedSchedule(process))


def sampled(method: TrainingModule, canvas: Batch) -> Tensor:
    sampler = drawing(SkipExact(), method.objective.process, steps=16)
    return last_state(sampler.sample(method.network, canvas, seed=0)).tokens


def easy_batch(rows: int = 12, length: int = 10) -> Batch:
    """Sentences that repeat one token."""
    tokens = torch.randint(NUM_SPECIAL, 9, (rows, 1)).repeat(1, length)
    tokens[:, 0] = 2
    editable = torch.ones(rows, length, dtype=torch.bool)
    editable[:, 0] = False
    return Batch.of(tokens, editable)


def test_exponents_are_one_parameter_of_the_module_and_are_saved_with_it():
    tested, fresh, x0 = method(), method(), easy_batch()
    names = [name for name, _ in tested.named_parameters() if not name.startswith("network.")]
    assert names == ["objective.process.learned.logits"]
    assert [name for name in weights_of(tested) if not name.startswith("network.")] == names
    with torch.no_grad():
        for parameter in tested.parameters():
            nn.init.normal_(parameter, std=0.1)
    set_weights(fresh, weights_of(tested))
    assert torch.equal(fresh.nats(x0, Noise(2)), tested.nats(x0, Noise(2)))
    canvas = easy_batch(4)
    assert torch.equal(sampled(tested, canvas), sampled(fresh, canvas))


def test_noise_belongs_to_the_example_and_parts_add_up():
    tested, whole = method(), easy_batch()
    losses = tested.objective.loss(tested.network, whole, Noise(5, step=9))
    total = torch.autograd.grad(losses.sum(), list(tested.parameters()), allow_unused=True)
    order, parts = torch.randperm(12), []
    for part in (order[:5], order[5:]):
        of_part = tested.objective.loss(tested.network, whole.select(part), Noise(5, step=9))
        torch.testing.assert_close(of_part, losses[part], atol=1e-4, rtol=1e-5)
        parts.append(torch.autograd.grad(of_part.sum(), list(tested.parameters()), allow_unused=True))
    for one, first, second in zip(total, *parts, strict=True):
        if one is not None:
            torch.testing.assert_close(first + second, one, atol=2e-3, rtol=2e-3)
    assert not torch.allclose(tested.objective.loss(tested.network, whole, Noise(5, step=10)), losses)


@pytest.mark.slow
def test_it_learns_with_one_learning_rate_and_samples_tokens():
    tested, whole = method(), easy_batch(32)
    optimizer = torch.optim.AdamW(tested.parameters(), lr=3e-3, weight_decay=0)

    def nats() -> float:
        with torch.no_grad():
            return float(torch.stack([tested.nats(whole, Noise(99, step)).sum() for step in range(8)]).mean())

    before, exponents = nats(), tested.objective.process.information.detach().clone()
    for step in range(25):
        optimizer.zero_grad()
        tested(whole, Noise(0, step), whole.num_tokens).backward()
        optimizer.step()
    assert nats() < 0.6 * before
    moved = (tested.objective.process.information.detach() / exponents).log().abs()
    assert 0.01 < float(moved[NUM_SPECIAL:9].max()) < 1
    assert float(moved[:NUM_SPECIAL].max()) == 0  # never written
    canvas = sentences(tested.network.backbone)
    tokens = sampled(tested, canvas)
    assert torch.equal(tokens[~canvas.editable], canvas.tokens[~canvas.editable])
    words = tokens[canvas.editable]
    assert bool(((words >= NUM_SPECIAL) & (words < NUM_TOKENIZER_IDS)).all())
