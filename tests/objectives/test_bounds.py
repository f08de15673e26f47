"""Likelihoods on enumerable languages: sums over all sentences, times, states and trajectories.

`docs/mathematics.md` explains the numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from backbones import backbone_of
from languages import PAPER, SKEWED, Bayes, Language, Table, exact_log_likelihood, exact_nats
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from diffusionbert.diffusion.absorbing import Absorbing
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
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import (
    LayerwiseTime,
    LearnedTime,
    PrefixTime,
    SinusoidalTime,
    TimeAgnostic,
)
from diffusionbert.objectives.base import Likelihood, Objective
from diffusionbert.objectives.continuous_time import ContinuousTime
from diffusionbert.objectives.discrete_time import DiscreteTime, Quantity
from diffusionbert.objectives.order_agnostic import OrderAgnostic

SPINDLES = [Spindle(0.3), Spindle(0.3, floor=0.05), Spindle(0.3, Mean.SENTENCE, floor=0.05)]
ALIKE: list[NoiseSchedule] = [Linear(), Cosine(), Sqrt()]
SCHEDULES = [*ALIKE, Power(), *SPINDLES]
UNEVEN = torch.tensor([0.0, 0.05, 0.4, 0.5, 0.93, 1.0], dtype=torch.float64)


def expectation(language: Language, nats: Tensor) -> float:
    return float((language.probabilities * nats.detach()).sum())


def total_probability(nats: Tensor) -> float:
    return float((-nats.detach()).exp().sum())


def best(language: Language, objective: Objective, num_steps: int = 0) -> tuple[Table, float]:
    """The best network, time-agnostic unless `num_steps` is given, and its expected nats."""
    table = Table(language, num_steps, scale=0.1)
    optimizer = torch.optim.LBFGS(table.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (language.probabilities * exact_nats(objective, table, language.batch())).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return table, expectation(language, exact_nats(objective, table, language.batch()))


# ---- total probability ------------------------------------------------------------------------------------------

NUM_WORDS, LENGTH = 3, 2
MASK, CLS, SEP, PAD = range(NUM_WORDS, NUM_WORDS + 4)
VOCABULARY = NUM_WORDS + 4


def all_sentences() -> Batch:
    """Every sentence over three tokens, as `[CLS] w w [SEP]`."""
    words = Language.random(NUM_WORDS, LENGTH).sentences
    tokens = nn.functional.pad(nn.functional.pad(words, (1, 0), value=CLS), (0, 1), value=SEP)
    editable = torch.tensor([False, True, True, False]).expand_as(tokens)
    return Batch.of(tokens, editable)


def tiny_bert(conditioning: str) -> Denoiser:
    """A tiny random BERT in float64 whose output depends strongly on the time."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        pad_token_id=PAD,
        initializer_range=0.5,
    )
    backbone = BertForMaskedLM(config)
    time = {
        "agnostic": lambda: TimeAgnostic(),
        "prefix": lambda: PrefixTime(backbone, num_steps=8),
        "layer-wise, sinusoidal": lambda: LayerwiseTime(backbone, SinusoidalTime(16)),
        "layer-wise, learned": lambda: LayerwiseTime(backbone, LearnedTime(8, 16)),
    }[conditioning]()
    for parameter in time.parameters():
        nn.init.normal_(parameter, std=0.5)
    return Denoiser(backbone, time, torch.arange(VOCABULARY) < NUM_WORDS).double().eval()


def objectives() -> dict[str, Objective]:
    """Every objective that claims a bound, with every schedule it takes."""
    counts = torch.tensor([70, 20, 10, 0, 0, 0, 0])
    information = TokenInformation.from_counts(counts, allowed=torch.arange(VOCABULARY) < NUM_WORDS)
    found: dict[str, Objective] = {"any order": OrderAgnostic(MASK)}
    for schedule in SCHEDULES:
        process = Absorbing(schedule, MASK, information)
        unweighted = Absorbing(schedule, MASK, information, reweighted=False)
        found[f"8 steps, {schedule}"] = DiscreteTime(process, uniform_grid(8))
        found[f"uneven steps, {schedule}"] = DiscreteTime(process, UNEVEN)
        found[f"8 steps, {schedule}, not reweighted"] = DiscreteTime(unweighted, uniform_grid(8))
        found[f"continuous time, {schedule}"] = ContinuousTime(process)
    for schedule in ALIKE:
        process = Uniform(schedule, torch.arange(VOCABULARY) < NUM_WORDS)
        found[f"8 steps, uniform noise, {schedule}"] = DiscreteTime(process, uniform_grid(8))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("conditioning", ["agnostic", "prefix", "layer-wise, sinusoidal", "layer-wise, learned"])
@pytest.mark.parametrize("name", objectives())
def test_total_probability_is_at_most_one(name, conditioning):
    """Σ exp(-nats) over all sentences."""
    objective = objectives()[name]
    assert objective.likelihood is Likelihood.BOUND
    with torch.no_grad():
        per_panel = 40 if conditioning == "agnostic" else 800
        nats = exact_nats(objective, tiny_bert(conditioning), all_sentences(), per_panel)
    assert 0 < total_probability(nats) <= 1 + 1e-9


def greatest_total(language: Language, objective: Objective, num_steps: int) -> float:
    """The greatest Σ exp(-nats) that any network can reach, time-aware if `num_steps` is not 0."""
    table = Table(language, num_steps, scale=0.1)
    optimizer = torch.optim.LBFGS(table.parameters(), max_iter=40, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (-exact_nats(objective, table, language.batch())).logsumexp(dim=0).neg()
        loss.backward()
        return loss

    optimizer.step(closure)
    return total_probability(exact_nats(objective, table, language.batch()))


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 8])
@pytest.mark.parametrize("reweighted", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_trained_network_reaches_a_total_above_one(schedule, reweighted, num_steps):
    """The networks above are random and leave slack; this one is trained for the greatest total."""
    process = Absorbing(schedule, PAPER.mask_id, PAPER.information(), reweighted)
    assert greatest_total(PAPER, DiscreteTime(process, uniform_grid(8)), num_steps) <= 1 + 1e-9
    if schedule.by_token and not reweighted:  # …and it can: the same search breaks the paper's quantity
        assert greatest_total(PAPER, DiscreteTime(process, uniform_grid(8), Quantity.PAPER), num_steps) > 1.1


@pytest.mark.parametrize(("mean", "expected"), [(Mean.SENTENCE, 1.12), (Mean.CORPUS, 1.55)])
def test_the_papers_quantity_sums_above_one(mean, expected):
    """With the best network, it also lies below the entropy."""
    schedule = Spindle(0.3, mean, floor=0.05)
    process = Absorbing(schedule, PAPER.mask_id, PAPER.information(), reweighted=False)
    network = Bayes(PAPER, process)
    paper = DiscreteTime(process, uniform_grid(16), Quantity.PAPER)
    strict = DiscreteTime(process, uniform_grid(16), Quantity.STRICT)
    assert paper.likelihood is Likelihood.PSEUDO
    paper_nats, strict_nats = (exact_nats(objective, network, PAPER.batch()) for objective in (paper, strict))
    assert total_probability(paper_nats) == pytest.approx(expected, abs=0.005)
    assert expectation(PAPER, paper_nats) < PAPER.entropy - 0.05
    assert total_probability(strict_nats) <= 1
    assert expectation(PAPER, strict_nats) >= PAPER.entropy


@pytest.mark.parametrize("schedule", ALIKE, ids=str)
def test_the_two_quantities_agree_under_a_token_independent_schedule(schedule):
    process = Absorbing(schedule, SKEWED.mask_id)
    nats = [exact_nats(DiscreteTime(process, UNEVEN, quantity), Table(SKEWED), SKEWED.batch()) for quantity in Quantity]
    torch.testing.assert_close(nats[0], nats[1])
    assert DiscreteTime(process, UNEVEN, Quantity.PAPER).likelihood is Likelihood.BOUND


# ---- the best networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", [SKEWED, PAPER, Language.random(4, 2), Language.random(2, 3, seed=1)])
def test_the_order_agnostic_bound_of_the_bayes_denoiser_is_the_entropy(language):
    network = Bayes(language, Absorbing(Linear(), language.mask_id))
    nats = exact_nats(OrderAgnostic(language.mask_id), network, language.batch())
    assert expectation(language, nats) == pytest.approx(language.entropy, abs=1e-12)
    torch.testing.assert_close(nats, -language.probabilities.log())  # sentence by sentence


@pytest.mark.parametrize("schedule", [*ALIKE, Power(), *SPINDLES[:2]], ids=str)
def test_the_bound_falls_towards_the_entropy_as_steps_grow(schedule):
    language = Language.random(3, 2, seed=2)
    process = Absorbing(schedule, language.mask_id, language.information())
    network = Bayes(language, process)
    gaps = [
        expectation(language, exact_nats(DiscreteTime(process, uniform_grid(steps)), network, language.batch()))
        - language.entropy
        for steps in (4, 16, 64, 256)
    ]
    assert all(coarse > 3 * fine > 0 for coarse, fine in itertools.pairwise(gaps)), gaps  # about 1/T
    assert gaps[-1] < 0.005
    limit = expectation(language, exact_nats(ContinuousTime(process), network, language.batch()))
    assert limit == pytest.approx(language.entropy, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*ALIKE, Power(), *SPINDLES[:2]], ids=str)
def test_continuous_time_is_the_limit_of_ever_finer_grids(schedule):
    """Also for a network that is wrong: the two are the same quantity, not merely both bounds."""
    process = Absorbing(schedule, SKEWED.mask_id, SKEWED.information())
    network, x0 = Table(SKEWED, seed=8), SKEWED.batch()
    limit = exact_nats(ContinuousTime(process), network, x0)
    errors = [
        float((exact_nats(DiscreteTime(process, uniform_grid(steps)), network, x0) - limit).abs().max().detach())
        for steps in (64, 512, 4096)
    ]
    assert errors[2] < 2e-3
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("schedule", ALIKE, ids=str)
def test_the_order_agnostic_bound_is_the_continuous_time_bound_of_a_time_agnostic_network(schedule):
    process = Absorbing(schedule, SKEWED.mask_id)
    network, x0 = Table(SKEWED, seed=9), SKEWED.batch()
    any_order, continuous = OrderAgnostic(SKEWED.mask_id), ContinuousTime(process)
    # The quadrature begins at 1e-11, where √t is not small yet.
    error = 1e-5 if isinstance(schedule, Sqrt) else 1e-7
    torch.testing.assert_close(
        exact_nats(any_order, network, x0), exact_nats(continuous, network, x0), atol=error, rtol=0
    )


def test_a_time_agnostic_network_is_right_under_the_spindle_only_with_the_reweighting():
    information, grid = SKEWED.information(), uniform_grid(64)
    figures = {
        reweighted: best(SKEWED, DiscreteTime(Absorbing(Spindle(0.3), SKEWED.mask_id, information, reweighted), grid))[
            1
        ]
        for reweighted in (True, False)
    }
    linear = best(SKEWED, DiscreteTime(Absorbing(Linear(), SKEWED.mask_id), grid))[1]
    assert linear == pytest.approx(SKEWED.entropy, rel=0.001)
    assert figures[True] == pytest.approx(SKEWED.entropy, rel=0.01)
    assert figures[False] > 1.3 * SKEWED.entropy


# ---- the bound below the likelihood -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("reweighted", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("num_steps", [0, 5])
def test_the_exact_log_likelihood_is_never_below_the_bound(schedule, reweighted, num_steps):
    """`num_steps` of the network's table: 0 is time-agnostic."""
    language = Language.random(3, 2, seed=3)
    process = Absorbing(schedule, language.mask_id, language.information(), reweighted)
    for seed in range(3):
        network = Table(language, num_steps, seed=seed)
        for grid in (uniform_grid(5), UNEVEN):
            exact = exact_log_likelihood(process, network, language, grid)
            bound = exact_nats(DiscreteTime(process, grid), network, language.batch())
            assert float(exact.exp().sum().detach()) == pytest.approx(1)
            assert bool((exact >= -bound - 1e-12).all())
            assert bool((exact > -bound + 1e-3).any())  # the two are different computations


@pytest.mark.parametrize("schedule", ALIKE, ids=str)
def test_the_exact_log_likelihood_is_never_below_the_bound_under_uniform_noise(schedule):
    language = Language.random(3, 2, seed=3)
    process = Uniform(schedule, language.allowed)
    for grid in (uniform_grid(5), UNEVEN):
        network = Table(language, seed=4)
        exact = exact_log_likelihood(process, network, language, grid)
        bound = exact_nats(DiscreteTime(process, grid), network, language.batch())
        assert float(exact.exp().sum().detach()) == pytest.approx(1)
        assert bool((exact >= -bound - 1e-12).all())


# ---- the estimators ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", objectives())
def test_drawn_nats_average_to_the_exact_ones(name):
    """`nats` and `loss` draw times and noise; their mean must be the enumerated value."""
    objective, x0, draws = objectives()[name], all_sentences(), 4000
    network = tiny_bert("agnostic" if isinstance(objective, ContinuousTime) else "layer-wise, sinusoidal")
    with torch.no_grad():
        exact = exact_nats(objective, network, x0)[4]
        many = Batch.of(x0.tokens[4].expand(draws, -1), x0.editable[4].expand(draws, -1))
        plain = objective.nats(network, many, Noise(1)).sum(dim=1)
        stratified = objective.nats(network, Noise(2).stratify(many), Noise(2)).sum(dim=1)
        loss = objective.loss(network, many, Noise(1))
    assert torch.equal(loss, plain) == isinstance(objective, OrderAgnostic)  # the others' nats draw other times
    for estimate in (plain, stratified, loss):
        error = float(estimate.std()) / draws**0.5
        assert float(estimate.mean()) == pytest.approx(float(exact), abs=4 * error + 1e-9)


def test_stratified_times_lower_the_variance():
    """In a language that repeats each token three times, only the first one generated has a cost."""
    language = Language(3, 3, [1 / 3 if len(set(divmod(i, 9)[:1] + divmod(i % 9, 3))) == 1 else 0.0 for i in range(27)])
    objective, network = OrderAgnostic(language.mask_id), Bayes(language, Absorbing(Linear(), language.mask_id))
    batch = language.batch(language.sentences[13].expand(30, -1))
    means = [
        torch.stack(
            [objective.nats(network, rows(Noise(0, step)), Noise(0, step)).sum(dim=1).mean() for step in range(50)]
        )
        for rows in (lambda _: batch, lambda noise: noise.stratify(batch))
    ]
    assert float(means[1].mean()) == pytest.approx(language.entropy, abs=0.05)
    assert float(means[1].var()) < 0.1 * float(means[0].var())


@pytest.mark.parametrize(
    "process", [Absorbing(Linear(), MASK), Uniform(Linear(), torch.arange(VOCABULARY) < NUM_WORDS)]
)
def test_the_hybrid_term_is_a_weighted_cross_entropy_of_the_loss_alone(process):
    network, x0 = tiny_bert("agnostic"), all_sentences()
    plain, hybrid = (DiscreteTime(process, uniform_grid(8), hybrid=weight) for weight in (0.0, 0.01))
    with torch.no_grad():
        added = hybrid.loss(network, x0, Noise(3)) - plain.loss(network, x0, Noise(3))
        index = (Noise(3).stratified_uniform(x0) * 8).long()
        x_t = process.corrupt(x0, uniform_grid(8)[index + 1], Noise(3))
        targets = process.targets(x_t)
        log_f = network(x_t.tokens, x_t.attention_mask, uniform_grid(8)[index + 1], targets)
        cross_entropy = torch.zeros(x0.tokens.shape, dtype=torch.float64)
        cross_entropy[targets] = -log_f.gather(-1, x0.tokens[targets][:, None])[:, 0]
        torch.testing.assert_close(added, 8 * 0.01 * cross_entropy.sum(dim=1))
        assert torch.equal(hybrid.nats(network, x0, Noise(3)), plain.nats(network, x0, Noise(3)))


@pytest.mark.slow
def test_frozen_positions_have_no_cost_and_padding_changes_nothing():
    network, x0 = tiny_bert("prefix"), all_sentences()
    frozen = replace(x0, editable=torch.zeros_like(x0.editable))
    padded = Batch(
        nn.functional.pad(x0.tokens, (0, 2), value=PAD),
        nn.functional.pad(x0.attention_mask, (0, 2), value=False),
        nn.functional.pad(x0.editable, (0, 2), value=False),
        x0.example,
        x0.strata,
    )
    with torch.no_grad():
        for objective in objectives().values():
            assert float(objective.nats(network, frozen, Noise(0)).abs().max()) == 0
            longer, nats = objective.nats(network, padded, Noise(5)), objective.nats(network, x0, Noise(5))
            torch.testing.assert_close(longer, nn.functional.pad(nats, (0, 2)), atol=1e-9, rtol=1e-9)


def test_invalid_objectives_are_refused():
    information = SKEWED.information()
    printed = Absorbing(Spindle(0.3, Mean.SENTENCE), SKEWED.mask_id, information)
    for make in (lambda: DiscreteTime(printed, UNEVEN), lambda: ContinuousTime(printed)):
        with pytest.raises(ValueError, match="floor"):
            make()
    with pytest.raises(ValueError, match="reweight again"):
        DiscreteTime(printed, UNEVEN, Quantity.PAPER)
    without = Absorbing(Spindle(0.3, Mean.SENTENCE), SKEWED.mask_id, information, reweighted=False)
    DiscreteTime(without, UNEVEN, Quantity.PAPER)  # no bound, but defined
    with pytest.raises(ValueError, match="reweight"):
        ContinuousTime(Absorbing(Spindle(0.3), SKEWED.mask_id, information, reweighted=False))
    with pytest.raises(ValueError, match="absorbing"):
        DiscreteTime(Uniform(Linear(), SKEWED.allowed), UNEVEN, Quantity.PAPER)
    for grid in ([0.0, 0.5], [0.1, 1.0], [0.0, 0.6, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0], [1.0]):
        with pytest.raises(ValueError, match="rise from 0 to 1"):
            DiscreteTime(Absorbing(Linear(), 2), torch.tensor(grid))


def test_the_printed_spindle_without_a_floor_has_an_infinite_bound():
    """So that it must be refused: the divergence is infinite even for a network with full support."""
    language = Language(2, 3, Language.random(2, 3, seed=0).probabilities)
    process = Absorbing(Spindle(0.6, Mean.SENTENCE), language.mask_id, language.information())
    objective = DiscreteTime(
        Absorbing(Spindle(0.6, Mean.SENTENCE, 0.5), language.mask_id, language.information()), UNEVEN
    )
    objective.process = process
    assert bool(exact_nats(objective, Table(language), language.batch()).isinf().any())


def test_logits_are_computed_at_masked_positions_only():
    """The head of a real backbone gets as many vectors as there are masks."""
    backbone = backbone_of("bert")
    seen: list[int] = []
    backbone.get_output_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[-2]))
    network = Denoiser(backbone, TimeAgnostic(), torch.arange(50) > 4)
    tokens = torch.randint(5, 50, (8, 12))
    x0 = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))
    process = Absorbing(Linear(), mask_id=4)
    DiscreteTime(process, uniform_grid(10)).loss(network, x0, Noise(0))
    index = (Noise(0).stratified_uniform(x0) * 10).long()
    masked = process.targets(process.corrupt(x0, uniform_grid(10)[index + 1], Noise(0)))
    assert seen == [int(masked.sum())]
    assert 0 < int(masked.sum()) < tokens.numel()


def test_times_and_noise_are_drawn_from_different_numbers():
    """With one editable position, a shared number would mask it at every time or at none."""
    language = Language(2, 1, [0.7, 0.3])
    process = Absorbing(Linear(), language.mask_id)
    network = Bayes(language, process)
    objective = DiscreteTime(process, uniform_grid(8))
    many = language.batch(torch.zeros(4000, 1, dtype=torch.long))
    exact = float(exact_nats(objective, network, language.batch())[0])
    drawn = objective.nats(network, many, Noise(0)).sum(dim=1)
    assert float(drawn.mean()) == pytest.approx(exact, abs=4 * float(drawn.std()) / 4000**0.5)
    assert exact == pytest.approx(-torch.tensor(0.7).double().log().item())


@pytest.mark.slow
@pytest.mark.parametrize(("quantity", "is_right"), [(Quantity.STRICT, True), (Quantity.PAPER, False)])
def test_only_the_strict_bound_trains_a_network_that_samples_the_language(quantity, is_right):
    """Weighted by r(x0), the cross-entropy is lowest at f ∝ r·posterior: the paper's quantity trains another f."""
    process = Absorbing(Spindle(0.3, floor=0.05), PAPER.mask_id, PAPER.information(), reweighted=False)
    table, _ = best(PAPER, DiscreteTime(process, uniform_grid(32), quantity), num_steps=32)
    written = exact_log_likelihood(process, table, PAPER, uniform_grid(32)).exp().detach()
    distance = float((written - PAPER.probabilities).abs().sum()) / 2
    assert distance < 0.02 if is_right else distance > 0.15
