"""Processes: closed forms against dense transition matrices, and identities of posterior and reverse step."""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import replace

import pytest
import torch
from languages import Language, Table

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import (
    Cosine,
    Linear,
    Mean,
    NoiseSchedule,
    Power,
    Spindle,
    Sqrt,
    TokenInformation,
    uniform_grid,
)
from diffusionbert.diffusion.shapes import Batch, sequence_index
from diffusionbert.diffusion.tokens import LogitsWarper, finite_log, log_sum_of
from diffusionbert.diffusion.uniform import Uniform

LANGUAGE = Language.random(num_words=3, length=2, seed=5)
ALIKE: list[NoiseSchedule] = [Linear(), Cosine(), Sqrt()]
SPINDLES = [Spindle(0.4), Spindle(0.4, floor=0.05), Spindle(0.4, Mean.SENTENCE, floor=0.05)]
SCHEDULES = [*ALIKE, Power(), *SPINDLES]
GRID = uniform_grid(12)


def absorbing(schedule: NoiseSchedule, **settings: bool) -> Absorbing:
    return Absorbing(schedule, LANGUAGE.mask_id, LANGUAGE.information(), **settings)


PROCESSES: list[Process] = [
    *(absorbing(schedule) for schedule in SCHEDULES),
    *(Uniform(schedule, LANGUAGE.allowed) for schedule in ALIKE),
]


def transition(process: Process, x0: torch.Tensor, s: float, t: float) -> torch.Tensor:
    """The dense matrix Q[i, j] = q(x_t = j | x_s = i) of each position of one sentence (position × from × to)."""
    V = LANGUAGE.vocabulary
    times = [torch.tensor([time], dtype=torch.float64) for time in (s, t)]
    if isinstance(process, Uniform):
        alpha_s, alpha_t = (process.schedule.survival(time, torch.ones_like(time)) for time in times)
        beta = 1 - alpha_t / alpha_s
        words = LANGUAGE.allowed.double()
        matrix = (1 - beta) * torch.eye(V, dtype=torch.float64) + beta * words[None] / words.sum()
        return matrix.expand(len(x0), V, V)
    assert isinstance(process, Absorbing)
    sentence = LANGUAGE.batch(x0[None])
    alpha_s, alpha_t = (process.survival(sentence, time)[0] for time in times)
    # A token can only turn into [MASK]. Its rate depends on the token, so each position has its own matrix.
    beta = torch.where(alpha_s > 0, 1 - alpha_t / alpha_s, 1.0)
    matrix = (1 - beta)[:, None, None] * torch.eye(V, dtype=torch.float64)
    matrix[:, :, LANGUAGE.mask_id] += beta[:, None]
    return matrix


def posterior(process: Process, x0: torch.Tensor, x_t: torch.Tensor, s: float, t: float) -> torch.Tensor:
    """q(x_s | x_t, x0) by Bayes' rule on dense matrices (position × V)."""
    positions = torch.arange(len(x0))
    marginal = transition(process, x0, 0.0, s)[positions, x0]
    likelihood = transition(process, x0, s, t)[positions, :, x_t]
    joint = marginal * likelihood
    return joint / joint.sum(dim=-1, keepdim=True)


@functools.cache
def reachable(process: Process) -> list[tuple[torch.Tensor, torch.Tensor, float, float]]:
    """Every sentence, corrupted state and step of the grid that the forward process can produce."""
    positions = torch.arange(LANGUAGE.length)
    cases = []
    for x0 in LANGUAGE.sentences:
        for s, t in itertools.pairwise(GRID.tolist()):
            marginal = transition(process, x0, 0.0, t)[positions, x0]
            cases += [(x0, x_t, s, t) for x_t in LANGUAGE.states if bool((marginal[positions, x_t] > 0).all())]
    return cases


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_corruption_follows_the_product_of_step_matrices(process):
    """The t-step marginal is the product of dense one-step matrices, and `corrupt` draws from it."""
    x0 = LANGUAGE.sentences[5]
    product = torch.eye(LANGUAGE.vocabulary, dtype=torch.float64).expand(len(x0), -1, -1)
    for index in range(5):
        product = product @ transition(process, x0, float(GRID[index]), float(GRID[index + 1]))
    positions = torch.arange(len(x0))
    torch.testing.assert_close(product[positions, x0], transition(process, x0, 0.0, float(GRID[5]))[positions, x0])

    draws = LANGUAGE.batch(x0.expand(20000, -1))
    x_t = process.corrupt(draws, GRID[5].expand(20000), Noise(0)).tokens
    for position in positions:
        frequency = torch.bincount(x_t[:, position], minlength=LANGUAGE.vocabulary).double() / 20000
        torch.testing.assert_close(frequency, product[position, x0[position]], atol=0.015, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_divergence_equals_the_dense_kl(process):
    """The closed form against the KL from dense posteriors to p(x_s | x_t), in all reachable states."""
    network = Table(LANGUAGE, seed=3)
    cases = reachable(process)
    x0, x_t = torch.stack([case[0] for case in cases]), LANGUAGE.batch(torch.stack([case[1] for case in cases]))
    s, t = (torch.tensor([case[i] for case in cases], dtype=torch.float64) for i in (2, 3))
    targets = process.targets(x_t)
    log_f = network(x_t.tokens, x_t.attention_mask, t, targets)
    divergence = process.divergence(x0, x_t, log_f, s, t)
    log_p = process.reverse(x_t, log_f, s, t)
    q = torch.cat([posterior(process, *case)[targets[i]] for i, case in enumerate(cases)])
    dense = (torch.xlogy(q, q) - torch.where(q > 0, q * log_p, 0.0)).sum(dim=-1)
    torch.testing.assert_close(divergence, dense, atol=1e-12, rtol=1e-10)
    assert len(divergence) > 100
    assert float(divergence.detach().min()) > -1e-12


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_the_reverse_step_is_the_mixture_of_posteriors(process):
    """p(x_s | x_t) = Σ_v p(v | x_t, t) q(x_s | x_t, v), with dense posteriors; and it sums to 1."""
    network = Table(LANGUAGE, seed=4)
    # Uniform noise never gives [MASK].
    states = [state for state in LANGUAGE.states if isinstance(process, Absorbing) or LANGUAGE.mask_id not in state]
    x_t = LANGUAGE.batch(torch.stack(states))
    rows = len(states)
    targets = process.targets(x_t)
    for s, t in ((0.0, 0.25), (0.25, 0.5), (0.5, 1.0), (0.0, 1.0)):
        at = [torch.full((rows,), time, dtype=torch.float64) for time in (s, t)]
        log_f = network(x_t.tokens, x_t.attention_mask, at[1], targets)
        log_p = process.reverse(x_t, log_f, *at)
        torch.testing.assert_close(log_p.exp().sum(dim=-1), torch.ones(len(log_p), dtype=torch.float64))
        if isinstance(process.schedule, Spindle) and process.schedule.mean is Mean.SENTENCE:
            continue  # its c is an estimate: see test_the_guessed_center_is_the_mean_of_known_and_expected_information
        mixture = torch.zeros_like(log_p)
        for word in range(LANGUAGE.num_words):
            alpha_t = 1 - transition(process, torch.tensor([word, word]), 0.0, t)[0, word, LANGUAGE.mask_id]
            p_masked = 1 - alpha_t if isinstance(process, Absorbing) else torch.tensor(1.0, dtype=torch.float64)
            for target, current in enumerate(x_t.tokens[targets].tolist()):
                if float(p_masked) > 0:
                    q = posterior(process, torch.tensor([word]), torch.tensor([current]), s, t)[0]
                    mixture[target] += log_f[target, word].exp() * p_masked * q
        mixture = mixture / mixture.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(log_p.exp(), mixture, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_reverse_with_a_one_hot_network_satisfies_the_tower_rule(process):
    """If f is one-hot at x0, `reverse` is the posterior: t → s → r must equal t → r."""
    r, s, t = 0.2, 0.45, 0.8
    words = range(LANGUAGE.num_words)
    # Sequences of one position, for every true and every noisy token, so that a step is a V×V matrix per true token.
    tokens = range(LANGUAGE.vocabulary) if isinstance(process, Absorbing) else words

    def matrix(word: int, low: float, high: float) -> torch.Tensor:
        steps = torch.eye(LANGUAGE.vocabulary, dtype=torch.float64)
        x = LANGUAGE.batch(torch.tensor(list(tokens))[:, None])
        targets = process.targets(x)
        one_hot = torch.full((int(targets.sum()), LANGUAGE.vocabulary), -torch.inf, dtype=torch.float64)
        one_hot[:, word] = 0.0
        times = [torch.full((len(x.tokens),), time, dtype=torch.float64) for time in (low, high)]
        steps[x.tokens[targets]] = process.reverse(x, one_hot, *times).exp()
        return steps

    for word in words:
        survival = (
            float(process.survival(LANGUAGE.batch(torch.tensor([[word]])), torch.tensor([s]).double()))
            if isinstance(process, Absorbing)
            else 0.0
        )
        if survival < 1:  # a token that cannot be masked at s has no reverse step from there
            torch.testing.assert_close(
                matrix(word, s, t) @ matrix(word, r, s), matrix(word, r, t), atol=1e-12, rtol=1e-9
            )


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_the_dense_posterior_satisfies_the_tower_rule(process):
    """Σ_{x_s} q(x_r | x_s, x0) q(x_s | x_t, x0) = q(x_r | x_t, x0) for r < s < t."""
    for x0, x_t, s, t in reachable(process):
        if s not in (float(GRID[2]), float(GRID[7])):
            continue  # two of the twelve steps, for speed
        r = s / 2
        composed = torch.zeros(len(x0), LANGUAGE.vocabulary, dtype=torch.float64)
        middle = posterior(process, x0, x_t, s, t)
        for token in range(LANGUAGE.vocabulary):
            state = torch.full_like(x0, token)
            possible = middle[:, token] > 0
            onward = posterior(process, x0, state, r, s)
            composed[possible] += middle[possible, token, None] * onward[possible]
        torch.testing.assert_close(composed, posterior(process, x0, x_t, r, t), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_unmasking_probabilities_compose_over_intervals(schedule):
    """Staying masked from t to r is staying masked from t to s and from s to r."""
    process = absorbing(schedule)
    x0 = LANGUAGE.sentences
    masked = process.prior(LANGUAGE.batch(), Noise(0))
    for r, s, t in ((0.1, 0.4, 0.8), (0.0, 0.3, 0.6), (0.25, 0.5, 1.0)):
        at = {time: torch.full((len(x0),), time, dtype=torch.float64) for time in (r, s, t)}
        stay = {
            pair: 1 - process.unmask_probability(x0, masked, at[pair[0]], at[pair[1]])
            for pair in ((r, s), (s, t), (r, t))
        }
        maskable = process.survival(LANGUAGE.batch(), at[s])[process.targets(masked)] < 1
        torch.testing.assert_close((stay[r, s] * stay[s, t])[maskable], stay[r, t][maskable], atol=1e-14, rtol=1e-10)


@pytest.mark.parametrize("process", [*map(absorbing, ALIKE), absorbing(Spindle(0.0))], ids=str)
def test_a_token_independent_schedule_gives_r_times_cross_entropy(process):
    x0 = LANGUAGE.sentences
    masked = process.prior(LANGUAGE.batch(), Noise(0))
    targets = process.targets(masked)
    for s, t in ((0.0, 0.1), (0.3, 0.35), (0.9, 1.0)):
        at = [torch.full((len(x0),), time, dtype=torch.float64) for time in (s, t)]
        log_f = Table(LANGUAGE, seed=1)(masked.tokens, masked.attention_mask, at[1], targets)
        own = log_f.gather(-1, x0[targets][:, None])[:, 0]
        expected = -process.unmask_probability(x0, masked, *at) * own
        torch.testing.assert_close(process.divergence(x0, masked, log_f, *at), expected, atol=1e-13, rtol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_rate_is_the_divergence_of_a_short_step(schedule):
    process = absorbing(schedule)
    x0 = LANGUAGE.sentences
    masked = process.prior(LANGUAGE.batch(), Noise(0))
    targets = process.targets(masked)
    width = 1e-6
    for time in (0.3, 0.55, 0.8, 0.95):
        t = torch.full((len(x0),), time, dtype=torch.float64)
        maskable = (process.survival(LANGUAGE.batch(), t) < 1)[targets]
        log_f = Table(LANGUAGE, seed=1)(masked.tokens, masked.attention_mask, t, targets)
        rate = process.rate(x0, masked, log_f, t)
        short = process.divergence(x0, masked, log_f, t - width, t) / width
        torch.testing.assert_close(rate[maskable], short[maskable], atol=1e-4, rtol=1e-4)
        assert int(maskable.sum()) >= 6


@pytest.mark.slow
def test_gradients_are_finite_in_the_first_and_last_step_and_where_the_clamp_acts():
    """At s = 0 nothing stays masked, and frequent tokens cannot be masked early: neither may make a gradient NaN."""
    for process in PROCESSES:
        network = Table(LANGUAGE, scale=30.0).float()  # so peaked that float32 probabilities underflow
        for x0, x_t, s, t in reachable(process):
            if s > 0 and t < 1:
                continue  # only the first and the last step
            state = LANGUAGE.batch(x_t[None])
            at = [torch.tensor([time], dtype=torch.float64) for time in (s, t)]
            log_f = network(state.tokens, state.attention_mask, at[1], process.targets(state))
            loss = process.divergence(x0[None], state, log_f, *at).sum()
            network.zero_grad()
            loss.backward()
            assert bool(torch.isfinite(loss))
            assert network.logits.grad is not None
            assert bool(torch.isfinite(network.logits.grad).all()), process


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1.0, 100.0, 1e4])
def test_a_step_in_which_no_token_can_be_unmasked_has_a_finite_gradient(strength):
    """The survival of a strong spindle is almost always 0 or 1, so in most steps no token changes."""
    process = absorbing(Spindle(strength))
    network = Table(LANGUAGE).float()
    num_idle = 0
    for x0, x_t, s, t in reachable(process):
        state = LANGUAGE.batch(x_t[None])
        at = [torch.tensor([time], dtype=torch.float64) for time in (s, t)]
        log_f = network(state.tokens, state.attention_mask, at[1], process.targets(state))
        unmasking, _ = process._divergence_weights(*at, process.guessed_center(state, log_f))
        if unmasking[:, LANGUAGE.allowed].max() == 0:
            num_idle += 1
            sums = log_sum_of(log_f, finite_log(unmasking), torch.zeros(len(log_f), dtype=torch.long))
            assert bool((sums == -torch.inf).all())
        for loss in (process.divergence(x0[None], state, log_f, *at), process.rate(x0[None], state, log_f, at[1])):
            network.zero_grad()
            loss.sum().backward(retain_graph=True)
            assert bool(torch.isfinite(loss).all())
            assert network.logits.grad is not None
            assert bool(torch.isfinite(network.logits.grad).all())
    assert num_idle or strength < 100


def test_float32_networks_give_the_same_divergence_as_float64_ones():
    """Errors add up over 2048 small steps of the bound."""
    process = absorbing(Spindle(0.4))
    masked = process.prior(LANGUAGE.batch(), Noise(0))
    network = Table(LANGUAGE, seed=1)
    grid = uniform_grid(2048)
    for index in (300, 1000, 2000):
        s, t = (grid[i].expand(len(LANGUAGE.sentences)) for i in (index, index + 1))
        log_f = network(masked.tokens, masked.attention_mask, t, process.targets(masked))
        double = process.divergence(LANGUAGE.sentences, masked, log_f, s, t)
        single = process.divergence(LANGUAGE.sentences, masked, log_f.float(), s, t)
        torch.testing.assert_close(single, double, rtol=1e-5, atol=1e-9)


def test_the_guessed_center_is_the_mean_of_known_and_expected_information():
    process = absorbing(Spindle(0.4, Mean.SENTENCE, floor=0.05))
    x_t = LANGUAGE.batch(torch.tensor([[1, LANGUAGE.mask_id]]))
    log_f = torch.tensor([[0.2, 0.3, 0.5, 0.0]], dtype=torch.float64).log()
    h = LANGUAGE.information().values
    expected = (h[1] + 0.2 * h[0] + 0.3 * h[1] + 0.5 * h[2]) / 2
    s, t = torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64)
    alpha_s, alpha_t = (process.schedule.survival(time, h[:3] / expected) for time in (s, t))
    f = log_f[0, :3].exp()
    total = (f * (1 - alpha_t)).sum()
    dense = torch.cat([f * (alpha_s - alpha_t) / total, ((f * (1 - alpha_s)).sum() / total)[None]])
    torch.testing.assert_close(process.reverse(x_t, log_f, s, t)[0].exp(), dense)


SPECIAL_TOKENS = [
    pytest.param([4], [], id="[CLS]"),
    pytest.param([], [5], id="[SEP]"),
    pytest.param([], [6, 6], id="padding"),
    pytest.param([4], [5, 6, 6], id="all"),
]


@pytest.mark.parametrize(("before", "after"), SPECIAL_TOKENS)
def test_special_tokens_and_padding_do_not_count_in_the_sentence_mean(before, after):
    """Neither in the c of the forward process nor in the guessed ĉ of the reverse process."""
    h = torch.tensor([1.0, 2.5, 6.0, 3.0, 0.1, 20.0, 50.0], dtype=torch.float64)  # 3 is [MASK]
    process = Absorbing(Spindle(0.4, Mean.SENTENCE, floor=0.05), 3, TokenInformation(h, mean=4.0))
    sentence, partly_masked, num_before = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 3, 3]]), len(before)
    inner = slice(num_before, num_before + 3)

    def surrounded(words: torch.Tensor) -> Batch:
        tokens = torch.cat([torch.tensor([before]).long(), words, torch.tensor([after]).long()], dim=1)
        editable = torch.zeros_like(tokens, dtype=torch.bool)
        editable[:, inner] = True
        return Batch.of(tokens, editable, attention_mask=tokens != 6)

    def alone(words: torch.Tensor) -> Batch:
        return Batch.of(words, torch.ones_like(words, dtype=torch.bool))

    s, t = (torch.tensor([time], dtype=torch.float64) for time in (0.3, 0.6))
    given = process.survival(surrounded(sentence), t)[:, inner]
    torch.testing.assert_close(given, process.schedule.survival(t[:, None], h[sentence] / ((1.0 + 2.5 + 6.0) / 3)))
    torch.testing.assert_close(given, process.survival(alone(sentence), t))

    f = torch.tensor([[0.2, 0.3, 0.5, 0.0, 0.0, 0.0, 0.0], [0.6, 0.3, 0.1, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    x_t, x_t_alone, log_f = surrounded(partly_masked), alone(partly_masked), f.log()
    guessed = process.guessed_center(x_t, log_f)
    torch.testing.assert_close(guessed, ((h[0] + (f @ h).sum()) / 3)[None])
    torch.testing.assert_close(guessed, process.guessed_center(x_t_alone, log_f))
    torch.testing.assert_close(process.reverse(x_t, log_f, s, t), process.reverse(x_t_alone, log_f, s, t))
    x0 = surrounded(sentence).tokens
    torch.testing.assert_close(
        process.divergence(x0, x_t, log_f, s, t), process.divergence(sentence, x_t_alone, log_f, s, t)
    )


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_frozen_positions_never_change(process):
    editable = torch.tensor([[True, False]]).expand(9, 2)
    x0 = replace(LANGUAGE.batch(), editable=editable)
    for x in (process.prior(x0, Noise(1)), process.corrupt(x0, torch.full((9,), 0.99, dtype=torch.float64), Noise(1))):
        assert torch.equal(x.tokens[:, 1], x0.tokens[:, 1])
        assert not bool(process.targets(x)[:, 1].any())
    assert not torch.equal(x.tokens[:, 0], x0.tokens[:, 0])


def test_a_mask_token_that_is_not_editable_is_not_a_target():
    process = absorbing(Linear())
    tokens = torch.tensor([[LANGUAGE.mask_id, LANGUAGE.mask_id]])
    assert process.targets(Batch.of(tokens, torch.tensor([[True, False]]))).tolist() == [[True, False]]


def test_the_warper_acts_on_tokens_and_not_on_staying_masked():
    """The probability of staying masked depends on the schedule only, however sharp the token distribution is."""
    process = absorbing(Linear())
    masked = process.prior(LANGUAGE.batch(), Noise(0))
    s, t = torch.full((9,), 0.7, dtype=torch.float64), torch.full((9,), 0.8, dtype=torch.float64)
    log_f = Table(LANGUAGE, seed=1)(masked.tokens, masked.attention_mask, t, process.targets(masked))
    for shape in (None, lambda log_p: (log_p * 10).log_softmax(dim=-1)):
        log_p = process.reverse(masked, log_f, s, t, shape)
        torch.testing.assert_close(log_p[:, LANGUAGE.mask_id].exp(), torch.full((18,), 7 / 8, dtype=torch.float64))


def test_the_warper_acts_on_uniform_noise():
    process = Uniform(Linear(), LANGUAGE.allowed)
    x_t = LANGUAGE.batch()
    s, t = torch.zeros(9, dtype=torch.float64), torch.full((9,), 0.5, dtype=torch.float64)
    log_f = Table(LANGUAGE, seed=1)(x_t.tokens, x_t.attention_mask, t, process.targets(x_t))
    greedy = process.reverse(x_t, log_f, s, t, LogitsWarper(top_k=1))
    assert bool(((greedy.exp() > 0).sum(dim=-1) == 1).all())
    torch.testing.assert_close(greedy.argmax(dim=-1), log_f.argmax(dim=-1))


def test_no_gradient_flows_through_the_guessed_center():
    process = absorbing(Spindle(0.4, Mean.SENTENCE, floor=0.05))
    x_t = LANGUAGE.batch(torch.full((1, 2), LANGUAGE.mask_id))
    logits = torch.zeros(2, LANGUAGE.num_words, dtype=torch.float64, requires_grad=True)
    log_f = torch.nn.functional.pad(logits.log_softmax(dim=-1), (0, 1), value=-torch.inf)
    assert not process.guessed_center(x_t, log_f).requires_grad


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_log_clean_is_the_reweighted_network_output(schedule):
    """p(x0 | x_t, t) ∝ f(x0)·(1 - ᾱ_t(x0)), by brute force over the tokens."""
    process = absorbing(schedule)
    masked = process.prior(LANGUAGE.batch(), Noise(0))
    targets = process.targets(masked)
    t = torch.full((9,), 0.7, dtype=torch.float64)
    log_f = Table(LANGUAGE, seed=1)(masked.tokens, masked.attention_mask, t, targets)
    center = process.guessed_center(masked, log_f)[sequence_index(targets)]
    information = LANGUAGE.information().values / center[:, None] if schedule.by_token else torch.ones(18, 4).double()
    weight = log_f.exp() * (1 - schedule.survival(t[:1, None], information))
    expected = (weight / weight.sum(dim=-1, keepdim=True)).gather(-1, LANGUAGE.sentences[targets][:, None])[:, 0].log()
    torch.testing.assert_close(process.log_clean(LANGUAGE.sentences, masked, log_f, t), expected)
    for s in (torch.zeros_like(t), t - 0.1):
        plain, hybrid = (process.divergence(LANGUAGE.sentences, masked, log_f, s, t, hybrid=own) for own in (0.0, 0.5))
        torch.testing.assert_close(hybrid - plain, -0.5 * expected)


@pytest.mark.parametrize("process", [absorbing(Spindle(0.4)), Uniform(Linear(), LANGUAGE.allowed)], ids=str)
def test_a_vocabulary_of_another_size_is_rejected(process):
    x_t = process.prior(LANGUAGE.batch(), Noise(0))
    times = [torch.full((9,), time, dtype=torch.float64) for time in (0.4, 0.5)]
    with pytest.raises(ValueError, match="whole vocabulary"):
        process.divergence(LANGUAGE.sentences, x_t, torch.zeros(18, 6).log_softmax(dim=-1), *times)


def test_casting_a_process_does_not_round_its_information():
    process = absorbing(Spindle(0.4))
    exact = process.information.clone()
    for cast in (process.bfloat16(), process.half(), process.float()):
        assert torch.equal(cast.information, exact)


def test_the_reverse_step_has_no_argument_x0():
    for process in (Process, Absorbing, Uniform, Gaussian):
        assert "x0" not in inspect.signature(process.reverse).parameters


def test_invalid_processes_are_rejected():
    with pytest.raises(ValueError, match=r"needs token information; give TokenInformation\.from_counts"):
        Absorbing(Spindle(0.3), mask_id=3)
    with pytest.raises(
        ValueError, match=r"needs a token-independent schedule, got spindle \(.*\); use linear, cosine or sqrt"
    ):
        Uniform(Spindle(0.3), LANGUAGE.allowed)
    with pytest.raises(
        ValueError, match=r"needs a token-independent schedule, got spindle \(.*\); use linear, cosine or sqrt"
    ):
        Gaussian(Spindle(0.3))
    with pytest.raises(
        ValueError, match=r"`floor`, the variance at t = 0, must be in \(0, 1\), got 0\.0; 1e-4 is usual"
    ):
        Gaussian(Linear(), floor=0.0)


def test_no_v_by_v_tensor_is_made():
    """A step over a vocabulary of 30,000 makes N×V tensors only; V×V would be 3.6 GB."""
    V, rows = 30_000, 4
    editable = torch.ones(rows, 2, dtype=torch.bool)
    x0 = Batch.of(torch.randint(V - 1, (rows, 2)), editable)
    times = [torch.full((rows,), time, dtype=torch.float64) for time in (0.4, 0.5)]
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            result = function(*arguments, **(keywords or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    information = TokenInformation.from_counts(torch.arange(V), allowed=torch.arange(V) < V - 1)
    for process in (
        Absorbing(Linear(), V - 1),
        Absorbing(Spindle(0.3), V - 1, information),
        Absorbing(Spindle(0.3, Mean.SENTENCE, 0.05), V - 1, information),
        Uniform(Linear(), torch.arange(V) < V - 1),
    ):
        x_t = process.corrupt(x0, times[1], Noise(0))
        log_f = torch.randn(int(process.targets(x_t).sum()), V).log_softmax(dim=-1)
        with Watch():
            process.divergence(x0.tokens, x_t, log_f, *times)
            process.reverse(x_t, log_f, *times)
    assert largest <= rows * 2 * V


class HalfWay(NoiseSchedule):
    """A schedule that ends at one half: not valid for text, but its prior term is not 0."""

    by_token = False

    def survival(self, t, relative_information):
        return 1 - t / 2

    def masking_density(self, t, relative_information):
        return torch.full_like(t, 0.5)


class TestGaussian:
    def test_reverse_is_the_bayes_posterior(self):
        """Against the moments of the product of both densities on a fine grid."""
        process = Gaussian(Cosine(), floor=0.01)
        x0, x_t = 0.7, -0.4
        s, t = torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64)
        alpha_s, alpha_t = (float(0.99 * Cosine().survival(time, torch.ones(1))) for time in (s, t))
        line = torch.linspace(-6, 6, 20001, dtype=torch.float64)
        step = alpha_t / alpha_s
        log_density = -((line - alpha_s**0.5 * x0) ** 2) / (2 * (1 - alpha_s))
        log_density = log_density - (x_t - step**0.5 * line) ** 2 / (2 * (1 - step))
        weight = log_density.softmax(dim=0)
        mean = float((weight * line).sum())
        deviation = float((weight * (line - mean) ** 2).sum().sqrt())
        vectors = [torch.full((1, 1, 1), value, dtype=torch.float64) for value in (x_t, x0)]
        got_mean, got_deviation = process.reverse(*vectors, s, t)
        assert float(got_mean) == pytest.approx(mean, abs=1e-6)
        assert float(got_deviation) == pytest.approx(deviation, abs=1e-6)

    def test_divergence_is_the_kl_between_the_two_posteriors(self):
        process = Gaussian(Linear())
        generator = torch.Generator().manual_seed(0)
        x_t, x0, guess = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
        s, t = torch.tensor([0.0, 0.5], dtype=torch.float64), torch.tensor([0.1, 1.0], dtype=torch.float64)
        (q_mean, deviation), (p_mean, _) = process.reverse(x_t, x0, s, t), process.reverse(x_t, guess, s, t)
        expected = torch.distributions.kl_divergence(
            torch.distributions.Normal(q_mean, deviation), torch.distributions.Normal(p_mean, deviation)
        ).sum(dim=-1)
        torch.testing.assert_close(process.divergence(x0, guess, s, t), expected)

    def test_corruption_has_the_right_moments_and_keeps_frozen_positions(self):
        process = Gaussian(Cosine(), floor=0.01)
        x0 = torch.full((4000, 2, 3), 2.0)
        editable = torch.tensor([[True, False]]).expand(4000, 2)
        t = torch.full((4000,), 0.4, dtype=torch.float64)
        x_t = process.corrupt(x0, editable, torch.arange(4000), t, Noise(0))
        alpha = 0.99 * float(Cosine().survival(t[:1], torch.ones(1)))
        assert torch.equal(x_t[:, 1], x0[:, 1])
        assert float(x_t[:, 0].mean()) == pytest.approx(2 * alpha**0.5, abs=0.02)
        assert float(x_t[:, 0].var()) == pytest.approx(1 - alpha, abs=0.02)

    def test_half_precision_keeps_small_noise(self):
        """The standard deviation at t = 0 is √1e-4, but 1 - ᾱ in bfloat16 would be 0."""
        x0 = torch.zeros(500, 2, 4, dtype=torch.bfloat16)
        editable = torch.ones(500, 2, dtype=torch.bool)
        x_t = Gaussian(Linear()).corrupt(x0, editable, torch.arange(500), torch.zeros(500).double(), Noise(0))
        assert float(x_t.double().std()) == pytest.approx(0.01, rel=0.05)

    def test_the_prior_keeps_frozen_positions(self):
        x0 = torch.full((3, 2, 4), 2.0)
        editable = torch.tensor([[True, False]]).expand(3, 2)
        assert torch.equal(Gaussian(Linear()).prior(x0, editable, torch.arange(3), Noise(0))[:, 1], x0[:, 1])

    def test_the_prior_term_is_the_kl_from_a_standard_normal(self):
        process = Gaussian(HalfWay(), floor=0.01)
        x0 = torch.randn(2, 3, 4, dtype=torch.float64)
        alpha = 0.99 * 0.5
        expected = torch.distributions.kl_divergence(
            torch.distributions.Normal(alpha**0.5 * x0, (1 - alpha) ** 0.5), torch.distributions.Normal(0.0, 1.0)
        ).sum(dim=-1)
        torch.testing.assert_close(process.prior_divergence(x0), expected)

    def test_the_prior_term_vanishes_when_survival_ends_at_zero(self):
        assert float(Gaussian(Cosine()).prior_divergence(torch.randn(2, 3, 4)).abs().max()) == 0


def test_rows_of_gives_the_batch_index_of_each_marked_position():
    assert sequence_index(torch.tensor([[True, False, True], [False, False, True]])).tolist() == [0, 0, 1]
