"""Estimates on languages small enough to know every expectation and variance, and their contract on any method."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from backbones import MASK, backbone_of, sentences, tokenizer_allowed
from languages import Language, Table, all_states, exact_nats, log_forward
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Linear, Spindle, uniform_grid
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.time_sampling import Early
from diffusionbert.likelihood.estimate import (
    EstimationBudget,
    SequenceDataset,
    count_bytes,
    count_words,
    estimate,
    fast_products,
    length_nats,
    round_nats,
)
from diffusionbert.likelihood.intervals import student_quantile
from diffusionbert.likelihood.scores import (
    Interval,
    Length,
    LikelihoodRates,
    LikelihoodSummary,
    Limit,
    Protocol,
    Scores,
    Unit,
    paired_bootstrap,
)
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.objectives.base import (
    Likelihood,
    LikelihoodDefinition,
    Objective,
    TimeGrid,
    TrainingModule,
)
from diffusionbert.objectives.continuous_time import ContinuousTime
from diffusionbert.objectives.discrete_time import DiscreteTime, DiscreteTimeConfig, Quantity
from diffusionbert.objectives.gaussian import GaussianConfig
from diffusionbert.objectives.order_agnostic import OrderAgnostic, OrderAgnosticGrid
from diffusionbert.storage.schema import Component, from_json, to_json

LANGUAGE = Language.random(3, 2, seed=6)
GRID = uniform_grid(8)
LINEAR = Absorbing(Linear(), LANGUAGE.mask_id)
OBJECTIVES = {
    "grid, linear": DiscreteTime(LINEAR, GRID),
    "grid, spindle": DiscreteTime(Absorbing(Spindle(0.3), LANGUAGE.mask_id, LANGUAGE.information()), GRID),
    "continuous time": ContinuousTime(LINEAR),
    "any order": OrderAgnostic(LANGUAGE.mask_id),
}
NETWORK = Table(LANGUAGE, seed=2)


def method_of(objective: Objective, network: nn.Module = NETWORK) -> TrainingModule:
    return TrainingModule(network, objective)


def corpus(num: int, seed: int) -> Batch:
    """Sentences drawn from the language, no two of one name in any corpus."""
    uniform = Noise(seed).uniform(torch.arange(num), Purpose.SAMPLE)
    drawn = torch.searchsorted(LANGUAGE.probabilities.cumsum(0), uniform).clamp(max=len(LANGUAGE.sentences) - 1)
    return replace(LANGUAGE.batch(LANGUAGE.sentences[drawn]), example=torch.arange(num) + num * seed)


def exact_of_language(objective: Objective) -> float:
    nats = exact_nats(objective, NETWORK, LANGUAGE.batch()).detach()
    return float((LANGUAGE.probabilities * nats).sum()) / LANGUAGE.length


def sentence_of(batch: Batch) -> Tensor:
    return (batch.tokens * torch.tensor([3, 1])).sum(dim=1)


# ---- what is estimated ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strata", [1, 3, 4])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_sentence_gets_an_unbiased_estimate(name, strata):
    """3 slices do not divide the 8 steps of the grid: a slice may end within a step."""
    objective = OBJECTIVES[name]
    exact = exact_nats(objective, NETWORK, LANGUAGE.batch()).detach()
    batch = LANGUAGE.batch(LANGUAGE.sentences.repeat(600, 1))
    found = estimate(method_of(objective), [batch], EstimationBudget(None, max_draws=2 * strata, strata=strata))
    drawn = found.scores.nats.view(600, -1)
    error = drawn.std(dim=0) / 600**0.5
    assert float(((drawn.mean(dim=0) - exact) / error).abs().max()) < 3.8
    # The sentence's own variance is unbiased, too: its mean is the variance of the drawn nats.
    variance = found.scores.draw_variance.view(600, -1).mean(dim=0)
    torch.testing.assert_close(variance, drawn.var(dim=0), rtol=0.5, atol=1e-9)
    assert float(variance.sum() / drawn.var(dim=0).sum()) == pytest.approx(1, abs=0.12)


def test_a_round_scatters_less_than_free_draws():
    batch = LANGUAGE.batch(LANGUAGE.sentences.repeat(300, 1))
    method = method_of(OBJECTIVES["any order"])
    free, sliced = (
        estimate(method, [batch], EstimationBudget(None, max_draws=16, strata=strata)).scores.draw_variance.mean()
        for strata in (1, 8)
    )
    assert float(sliced) < 0.8 * float(free)


def exact_moments(objective: DiscreteTime, strata: int) -> tuple[Tensor, Tensor]:
    """The mean of each sentence's nats and the variance of one round, by enumeration of times and states."""
    batch = LANGUAGE.batch()
    num_steps, num_sequences = len(objective.grid) - 1, len(batch.tokens)
    first, second = torch.zeros(2, num_steps, num_sequences, dtype=torch.float64)
    for step in range(num_steps):
        s, t = (objective.grid[end].expand(num_sequences) for end in (step, step + 1))
        for tokens in all_states(objective.process, batch.tokens):
            q = log_forward(objective.process, batch, tokens, t).exp()
            nats = objective.step_nats(NETWORK, batch.tokens, replace(batch, tokens=tokens), s, t).sum(dim=1).detach()
            first[step] += q * num_steps * nats
            second[step] += q * (num_steps * nats) ** 2
    position = (torch.arange(strata * 50_000, dtype=torch.float64) + 0.5) / (strata * 50_000)
    t, weight = Early().times(position)
    step = (t * num_steps).long()
    moments = weight[:, None] * first[step], weight[:, None].square() * second[step]
    of_slice = [moment.view(strata, -1, num_sequences).mean(dim=1) for moment in moments]
    return of_slice[0].mean(dim=0), (of_slice[1] - of_slice[0] ** 2).sum(dim=0) / strata**2


@pytest.mark.slow
def test_variances_over_sentences_and_over_draws_are_told_apart():
    """Against the law of total variance, with every time and every state enumerated."""
    objective, num, strata, num_rounds = OBJECTIVES["grid, spindle"], 8000, 4, 2
    mean, round_variance = exact_moments(objective, strata)
    torch.testing.assert_close(mean, exact_nats(objective, NETWORK, LANGUAGE.batch()).detach(), rtol=1e-5, atol=1e-5)
    batch, size = corpus(num, seed=1), num * LANGUAGE.length**2
    which = sentence_of(batch)
    over_sentences = float(mean[which].var()) / size
    over_draws = float(round_variance[which].mean()) / num_rounds / size
    budget = EstimationBudget(None, max_draws=num_rounds * strata, strata=strata)
    found = estimate(method_of(objective), [batch], budget).scores.spread
    assert found.draws == pytest.approx(over_draws, rel=0.06)
    assert found.sentences == pytest.approx(over_sentences, rel=0.15)
    assert 0.2 < over_sentences / over_draws < 0.7  # so that mixing them up would show
    p = LANGUAGE.probabilities
    language = float((p * mean**2).sum() - (p * mean).sum() ** 2)
    assert over_sentences * size == pytest.approx(language, rel=0.06)  # and the corpus is like its language


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_interval_covers_the_language_in_95_of_100_runs(name):
    """100 runs with sentences and draws of their own, side by side; at 0.95, 88 to 100 are 3 deviations."""
    objective, size = OBJECTIVES[name], 150
    exact = exact_of_language(objective)
    together = estimate(
        method_of(objective), [corpus(100 * size, seed=1)], EstimationBudget(None, max_draws=16, strata=8)
    )
    runs = [together.scores.select(torch.arange(run * size, (run + 1) * size)) for run in range(100)]
    rates = [run.rates(seed)[Unit.TOKEN] for seed, run in enumerate(runs)]
    assert 88 <= sum(rate.low <= exact <= rate.high for rate in rates) <= 100
    # Were it far too wide, it would cover as well: its width is that of the scatter over runs.
    scatter = np.std([rate.nats for rate in rates])
    assert np.mean([(rate.high - rate.low) / 2 for rate in rates]) == pytest.approx(1.96 * scatter, rel=0.2)


def test_the_interval_of_a_given_sentence_covers_its_own_nats():
    """By Student's t, which knows how little two rounds say: normal draws, each sentence for itself."""
    batch = LANGUAGE.batch(LANGUAGE.sentences[:1].expand(500, 2))
    method = bound_of(lambda x0, noise: 4 + noise.normal(x0.example, Purpose.GAUSS))
    for num_rounds in (2, 5):
        scores = estimate(
            method, [batch], EstimationBudget(None, max_draws=3 * num_rounds, strata=3), given=True
        ).scores
        rates = [scores.select(torch.tensor([row])).given_rates()[Unit.TOKEN] for row in range(500)]
        assert 0.925 <= sum(rate.low <= 2 <= rate.high for rate in rates) / 500 <= 0.975
        together = scores.given_rates()[Unit.TOKEN]
        assert (together.high - together.low) / 2 == pytest.approx(1.96 / math.sqrt(3 * num_rounds * 500) / 2, rel=0.15)


# ---- when it stops --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interval_that_ended_the_drawing_still_covers():
    """Skewed nats whose expectation is known; whether to go on is asked after each round."""

    def nats(x0: Batch, noise: Noise) -> Tensor:
        cost = 2 - noise.uniform(x0.example, Purpose.CORRUPT).log()
        return cost + Noise(1).uniform(x0.example, Purpose.SAMPLE)

    covered, draws = 0, set()
    for run in range(60):
        batch = replace(LANGUAGE.batch(LANGUAGE.sentences[:1].expand(40, 2)), example=torch.arange(40) + 40 * run)
        found = estimate(bound_of(nats), [batch], EstimationBudget(0.1, max_draws=20, strata=1, seed=run))
        rate = found.rates[Unit.SENTENCE]
        covered += rate.low <= 3.5 <= rate.high
        draws.add(found.protocol.num_draws)
    assert 52 <= covered <= 60
    assert len(draws) > 2
    assert max(draws) < 20


@pytest.mark.slow
def test_drawing_stops_as_soon_as_the_interval_is_narrow_enough():
    method, batch = method_of(OBJECTIVES["grid, linear"]), corpus(1000, seed=3)
    loose, tight = (estimate(method, [batch], EstimationBudget(precision, strata=2)) for precision in (0.05, 0.025))
    for found, precision in ((loose, 0.05), (tight, 0.025)):
        assert found.limited_by is None
        rate = found.rates[Unit.TOKEN]
        assert found.half_width == (rate.high - rate.low) / 2 <= math.log1p(precision)
    assert 4 <= loose.protocol.num_draws < tight.protocol.num_draws < 100
    one_less = tight.protocol.num_draws - 2
    assert estimate(method, [batch], EstimationBudget(None, one_less, strata=2)).half_width > math.log1p(0.025)
    again = estimate(method, [batch], EstimationBudget(None, tight.protocol.num_draws, strata=2))
    assert torch.equal(again.scores.nats, tight.scores.nats)  # a precision cuts draws off and changes none


@pytest.mark.slow
def test_where_sentences_are_too_few_drawing_stops_and_says_so():
    method, batch = method_of(OBJECTIVES["any order"]), corpus(50, seed=0)
    found = estimate(method, [batch], EstimationBudget(0.001, max_draws=4000, strata=1))
    assert found.limited_by is Limit.SENTENCES
    assert found.half_width > math.log1p(0.001)
    assert 3 <= found.protocol.num_draws < 100
    assert found.scores.spread.draws <= 0.1 * found.scores.spread.total
    before = estimate(method, [batch], EstimationBudget(None, found.protocol.num_draws - 1, strata=1)).scores.spread
    assert before.draws > 0.1 * before.total


def test_half_a_percent_takes_far_fewer_calls_than_walking_the_grid():
    """Walking the grid takes a call per step and batch; here several draws share one."""
    num_steps, network = 1024, Table(LANGUAGE, seed=2)
    method = TrainingModule(network, OrderAgnosticGrid(Linear(), uniform_grid(num_steps), LANGUAGE.mask_id))
    batch, sizes = corpus(1000, seed=3), []
    network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    found = estimate(method, [batch], EstimationBudget(0.005), given=True)
    assert found.half_width <= math.log1p(0.005)
    assert len(sizes) <= num_steps / 10
    assert sum(sizes) == 1000 * found.protocol.num_draws <= 1000 * num_steps / 10
    assert max(sizes) == 2000  # two draws of all sentences


def test_given_sentences_are_drawn_for_until_they_themselves_are_known():
    method, batch = method_of(OBJECTIVES["any order"]), corpus(50, seed=0)
    as_sample, for_themselves = (
        estimate(method, [batch], EstimationBudget(0.02, 400, 2), given=given) for given in (False, True)
    )
    assert as_sample.limited_by is Limit.SENTENCES
    assert for_themselves.limited_by is None
    assert for_themselves.half_width <= math.log1p(0.02) < as_sample.half_width
    assert for_themselves.protocol.num_draws > as_sample.protocol.num_draws


def test_where_draws_are_too_few_it_says_so():
    method, batch = method_of(OBJECTIVES["grid, linear"]), corpus(50, seed=0)
    for given in (False, True):
        found = estimate(method, [batch], EstimationBudget(0.001, max_draws=9, strata=2), given=given)
        assert found.limited_by is Limit.DRAWS
        assert found.protocol.num_draws == 8  # whole rounds alone
    assert (
        estimate(method, [batch], EstimationBudget(None, max_draws=4, strata=2)).limited_by is None
    )  # nothing was asked


def test_one_sentence_is_not_left_before_its_variance_is_known():
    """Two rounds that happen to agree would end the drawing at once."""
    objective, batch = OBJECTIVES["grid, linear"], LANGUAGE.batch(LANGUAGE.sentences[:1])
    found = estimate(method_of(objective), [batch], EstimationBudget(1e6, max_draws=100, strata=2), given=True)
    assert found.protocol.num_draws == 9 * 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_draws": 31}, r"`max_draws` >= 2 \* `strata`.*got strata=16 and max_draws=31"),
        ({"strata": 0}, "`strata` must be >= 1 .*got strata=0 and max_draws=256"),
        ({"precision": 0.0}, "`precision` must be > 0, got 0.0"),
        ({"precision": math.nan}, "`precision` must be > 0, got nan"),
    ],
)
def test_impossible_efforts_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        EstimationBudget(**wrong)


# ---- the same number, whatever the batches --------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Sequences in memory that remember how they were requested."""

    whole: Batch
    targets: list

    @property
    def lengths(self) -> np.ndarray:
        return self.whole.attention_mask.sum(dim=1).numpy()

    def batch(self, indices: Sequence[int]) -> Batch:
        self.targets.append(list(indices))
        return self.whole.select(torch.tensor(indices))


def bert_method(objective: Objective | None = None) -> tuple[TrainingModule, Batch]:
    backbone = backbone_of("bert")
    network = Denoiser(backbone, TimeAgnostic(), tokenizer_allowed())
    batch = sentences(backbone, (5, 9, 4, 12, 7, 9, 3, 20))
    batch = replace(batch, tokens=batch.tokens.masked_fill(batch.tokens == MASK, 11), example=batch.example * 7 + 3)
    process = Absorbing(Linear(), MASK)
    return TrainingModule(network, objective or DiscreteTime(process, uniform_grid(16))), batch


@pytest.mark.slow
def test_the_size_of_batches_changes_nothing():
    method, batch = bert_method()
    budget = EstimationBudget(None, max_draws=8, strata=4, seed=5)
    found, targets = [], []
    for tokens in (1, 40, 10_000):
        rows = Held(batch, [])
        assert isinstance(rows, SequenceDataset)
        found.append(estimate(method, rows, budget, batch_tokens=tokens))
        targets.append(rows.targets)
    found.append(estimate(method, [batch.select(torch.tensor(part)) for part in ([0, 1, 2], [3, 4, 5, 6, 7])], budget))
    for other in found[1:]:
        torch.testing.assert_close(other.scores.nats, found[0].scores.nats, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(other.scores.draw_variance, found[0].scores.draw_variance, atol=1e-3, rtol=1e-3)
        assert torch.equal(other.scores.tokens, torch.tensor([3, 7, 2, 10, 5, 7, 1, 18]))  # in the order of rows
        assert torch.equal(other.scores.example, batch.example)
    assert targets[0][:8] == [[7], [3], [1], [5], [4], [0], [2], [6]]  # by length, the longest first
    assert len(targets[2]) == 2  # one batch in each of two rounds
    again = estimate(method, Held(batch, []), budget, batch_tokens=40)
    assert torch.equal(again.scores.nats, found[1].scores.nats)
    assert again.summary() == found[1].summary()
    other_seed = estimate(method, Held(batch, []), replace(budget, seed=6))
    assert not torch.allclose(other_seed.scores.nats, found[0].scores.nats, rtol=0.01)


def test_draws_belong_to_the_name_and_not_to_the_order():
    method, batch = bert_method()
    nats = round_nats(method, batch, number=3, strata=2, seed=1)
    order = torch.tensor([4, 0, 7, 2])
    torch.testing.assert_close(
        round_nats(method, batch.select(order), number=3, strata=2, seed=1), nats[order], atol=1e-4, rtol=1e-5
    )
    assert not torch.allclose(round_nats(method, batch, number=4, strata=2, seed=1), nats, rtol=0.01)


def test_rows_of_one_name_are_refused():
    method, batch = bert_method()
    with pytest.raises(ValueError, match="same noise"):
        estimate(method, [batch, batch], EstimationBudget(None, 2, 1))


def test_the_method_is_left_as_it_was():
    """Also a part that its owner keeps from training, and also after a failure."""
    method, batch = bert_method()
    method.network.backbone.config.hidden_dropout_prob = 0.5
    dropout = [module for module in method.modules() if isinstance(module, nn.Dropout)]
    for module in dropout:
        module.p = 0.5
    method.eval()
    expected = estimate(method, [batch], EstimationBudget(None, 4, 2)).scores.nats
    method.train()
    dropout[0].eval()
    was = [module.training for module in method.modules()]
    assert torch.equal(estimate(method, [batch], EstimationBudget(None, 4, 2)).scores.nats, expected)
    with pytest.raises(ValueError, match="length model"):
        estimate(method, [batch], EstimationBudget(None, 4, 2), length_histogram=torch.ones(3))
    assert [module.training for module in method.modules()] == was
    assert all(parameter.grad is None for parameter in method.parameters())


def test_low_precision_is_noted_and_changes_little():
    method, batch = bert_method()
    full, half = (
        estimate(method, [batch], EstimationBudget(None, 4, 2), autocast=dtype) for dtype in (None, torch.bfloat16)
    )
    assert (full.protocol.arithmetic, half.protocol.arithmetic) == ("float32", "bfloat16")
    assert half.nats_per_token != full.nats_per_token
    assert half.nats_per_token == pytest.approx(full.nats_per_token, rel=0.05)


def test_progress_is_told_of_every_sentence_in_every_round():
    method, batch = bert_method()
    done: list[int] = []
    estimate(method, Held(batch, []), EstimationBudget(None, 6, 2), batch_tokens=40, advance=done.append)
    assert sum(done) == 3 * 8
    assert len(done) > 6


# ---- kinds ----------------------------------------------------------------------------------------------------------


class Costs(Objective):
    """Answers with given nats: `of(x0, noise)`, shared out evenly over a row's tokens."""

    def __init__(self, kind: Likelihood, of):
        super().__init__()
        self.kind, self.of, self.calls = kind, of, 0

    @property
    def likelihood(self) -> Likelihood:
        return self.kind

    def loss(self, network, x0, noise):
        return self.nats(network, x0, noise).sum(dim=1)

    def nats(self, network, x0, noise):
        self.calls += 1
        return (self.of(x0, noise) / x0.editable.sum(dim=1))[:, None] * x0.editable


def bound_of(of) -> TrainingModule:
    return method_of(Costs(Likelihood.BOUND, of))


def test_exact_likelihoods_take_one_draw_and_their_interval_is_over_sentences():
    objective = Costs(Likelihood.EXACT, lambda x0, noise: 1.0 + sentence_of(x0).double())
    batch = corpus(200, seed=0)
    found = estimate(method_of(objective), [batch], EstimationBudget(0.001))
    assert objective.calls == 1
    assert found.kind is Likelihood.EXACT
    assert found.protocol.num_draws == 1
    assert found.nats_per_token == pytest.approx(float(1 + sentence_of(batch).double().mean()) / 2)
    assert found.scores.spread.draws == 0
    assert found.half_width == pytest.approx(1.96 * float(sentence_of(batch).double().std()) / 2 / 200**0.5, rel=0.1)
    assert found.limited_by is Limit.SENTENCES
    given = estimate(method_of(objective), [batch], given=True)
    assert given.half_width == 0
    assert given.limited_by is None
    assert objective.calls == 2


def test_pseudo_likelihoods_carry_their_kind():
    printed = Absorbing(Spindle(0.3), LANGUAGE.mask_id, LANGUAGE.information(), reweighted=False)
    found = estimate(
        method_of(DiscreteTime(printed, GRID, Quantity.PAPER)), [corpus(20, 0)], EstimationBudget(None, 4, 2)
    )
    assert found.kind is Likelihood.PSEUDO
    assert found.summary().kind is Likelihood.PSEUDO


def test_a_method_without_a_likelihood_is_refused():
    method = method_of(Costs(Likelihood.NONE, lambda x0, noise: torch.ones(len(x0.tokens))))
    with pytest.raises(ValueError, match="this method has no likelihood"):
        estimate(method, [corpus(20, 0)])


def test_infinite_nats_are_counted_and_never_averaged_away():
    """One draw of sixteen finds sentence 0 impossible: from then on it is."""

    def nats(x0: Batch, noise: Noise) -> Tensor:
        free = 2 + noise.uniform(x0.example, Purpose.CORRUPT)
        return free.masked_fill((x0.example == 0) & (noise.step == 5), math.inf)

    batch = corpus(30, seed=0)
    for given in (False, True):
        found = estimate(bound_of(nats), [batch], EstimationBudget(0.05, max_draws=64, strata=4), given=given)
        assert found.scores.num_infinite == 1
        assert found.scores.draw_variance.isinf().tolist() == [True] + [False] * 29
        assert found.nats_per_token == found.rates[Unit.TOKEN].perplexity == found.half_width == math.inf
        assert found.limited_by is Limit.INFINITE
        summary = found.summary()
        assert summary.num_infinite == 1
        assert summary.rates.nats_per_token.value == math.inf
        assert summary.standard_error.total == math.inf
        assert from_json(json.loads(json.dumps(to_json(summary), allow_nan=False)), LikelihoodSummary) == summary
        # The others are as well known as if it were not there.
        alone = estimate(
            bound_of(nats),
            [batch.select(torch.arange(1, 30))],
            EstimationBudget(0.05, max_draws=64, strata=4),
            given=given,
        )
        torch.testing.assert_close(found.scores.finite.nats, alone.scores.nats)
        assert alone.limited_by is None
    assert found.scores.select(torch.tensor([0])).given_rates()[Unit.SENTENCE].nats == math.inf
    assert found.scores.select(torch.tensor([1])).given_rates()[Unit.SENTENCE].nats > 2
    # Resamples without the impossible sentence are finite: the lower end of the interval is.
    low = estimate(bound_of(nats), [batch], EstimationBudget(None, 8, 4)).rates[Unit.TOKEN].low
    assert 1 < low < 1.5
    hopeless = estimate(bound_of(lambda x0, noise: torch.full((len(x0.tokens),), math.inf)), [batch])
    assert hopeless.protocol.num_draws == 32
    assert hopeless.limited_by is Limit.INFINITE


def test_nats_that_are_no_numbers_are_a_failure():
    for value in (math.nan, -math.inf):
        method = bound_of(lambda x0, noise, value=value: torch.where(x0.example == 3, value, 1.0))
        with pytest.raises(FloatingPointError, match="1 of 20 sentences"):
            estimate(method, [corpus(20, 0)], EstimationBudget(None, 4, 2))


# ---- places, lengths, units -----------------------------------------------------------------------------------------


def test_the_length_model_sums_to_one_and_adds_one():
    histogram = torch.tensor([99, 3, 0, 5, 0])  # what stands at 0 is no length
    nats = length_nats(histogram, torch.arange(1, 5))
    torch.testing.assert_close((-nats).exp(), torch.tensor([4, 1, 6, 1], dtype=torch.float64) / 12)
    assert float((-nats).exp().sum()) == pytest.approx(1)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="lengths must be between 1 and 4 tokens for this length model"):
            length_nats(histogram, torch.tensor([2, wrong]))


def test_a_modeled_length_is_paid_once_by_each_sentence():
    method, batch = bert_method()
    histogram = torch.arange(30)
    given, modeled = (
        estimate(method, [batch], EstimationBudget(None, 4, 2), length_histogram=lengths)
        for lengths in (None, histogram)
    )
    paid = length_nats(histogram, given.scores.tokens)
    torch.testing.assert_close(modeled.scores.nats, given.scores.nats + paid)
    torch.testing.assert_close(modeled.scores.draw_variance, given.scores.draw_variance)
    assert (given.protocol.length, modeled.protocol.length) == (Length.GIVEN, Length.MODELED)
    assert to_json(modeled.summary())["protocol"]["length"] == "modelled"


def scores(nats: list[float], tokens: list[int], kind: Likelihood = Likelihood.BOUND, **units: list[int]) -> Scores:
    rounds = [torch.tensor(nats, dtype=torch.float64) + change for change in (-0.5, 0.5)]
    counts = {name: torch.tensor(numbers) for name, numbers in units.items()}
    return Scores.from_rounds(kind, torch.arange(len(nats)), rounds, torch.tensor(tokens), **counts)


def test_units_by_hand():
    """6 + 12 + 6 = 24 nats on 12 tokens, 8 words and 48 bytes."""
    worked = scores([6.0, 12.0, 6.0], [3, 6, 3], words=[2, 3, 3], bytes=[12, 20, 16])
    rates = worked.rates()
    assert {unit: rate.nats for unit, rate in rates.items()} == {
        Unit.SENTENCE: 8.0,
        Unit.TOKEN: 2.0,
        Unit.WORD: 3.0,
        Unit.BYTE: 0.5,
    }
    assert rates[Unit.WORD].perplexity == pytest.approx(math.exp(3))
    assert rates[Unit.BYTE].bits == pytest.approx(0.5 / math.log(2))
    found = estimate(
        bound_of(lambda x0, noise: torch.tensor([6.0, 12.0, 6.0])[x0.example] + (-1.0) ** noise.step),
        [
            replace(
                LANGUAGE.batch(LANGUAGE.sentences[:3]), editable=torch.tensor([[True, False], [True, True]])[[0, 1, 0]]
            )
        ],
        EstimationBudget(None, 4, 2),
        words=torch.tensor([1, 1, 1]),
        bytes=torch.tensor([4, 5, 3]),
        given=True,
    ).summary()
    rates = found.rates
    assert rates.nats_per_sentence.value == pytest.approx(8)
    assert rates.nats_per_token.value == pytest.approx(24 / 4)
    assert rates.nats_per_word.value == pytest.approx(24 / 3)
    assert rates.perplexity_per_token.value == pytest.approx(math.exp(6))
    assert rates.perplexity_per_word.value == pytest.approx(math.exp(8))
    assert rates.bits_per_byte.value == pytest.approx(2 / math.log(2))
    assert (found.num_sentences, found.num_tokens, found.num_words, found.num_bytes) == (3, 4, 3, 12)


def test_intervals_by_hand():
    """Two rounds that lie 1 apart have s² = 1/2, their mean 1/4; one degree of freedom gives 12.7 standard errors."""
    both = scores([6.0, 12.0], [3, 6], words=[2, 6], bytes=[10, 20])
    rates = LikelihoodRates.of(both.select(torch.tensor([1])).given_rates())
    margin = 12.7062 * 0.5
    assert rates.nats_per_sentence.value == 12
    assert rates.perplexity_per_token.value == pytest.approx(math.exp(2))
    assert rates.bits_per_byte.value == pytest.approx(12 / 20 / math.log(2))
    assert rates.nats_per_token.ci95 == pytest.approx((2 - margin / 6, 2 + margin / 6), rel=1e-4)
    assert rates.perplexity_per_word.ci95 == pytest.approx(
        (math.exp(2 - margin / 6), math.exp(2 + margin / 6)), rel=1e-3
    )
    assert rates.bits_per_byte.ci95 == pytest.approx(
        ((12 - margin) / 20 / math.log(2), (12 + margin) / 20 / math.log(2)), rel=1e-3
    )
    together = scores([6.0, 12.0], [3, 6]).given_rates()[Unit.TOKEN]
    assert (together.high - together.low) / 2 == pytest.approx(student_quantile(2.0) * math.sqrt(0.5) / 9)


def test_the_card_is_complete_and_is_json():
    method, batch = bert_method()
    definition = LikelihoodDefinition(time=TimeGrid(16), schedule=Component("linear"))
    protocol = Protocol(definition, data="d" * 64, weights="e" * 64)
    found = estimate(method, [batch], EstimationBudget(0.01, 64, 4, seed=7), protocol=protocol)
    plain = json.loads(json.dumps(to_json(found.summary()), allow_nan=False))
    assert from_json(plain, LikelihoodSummary) == found.summary()
    rates = found.summary().rates
    assert rates.perplexity_per_word is None  # words were not counted
    low, high = rates.perplexity_per_token.ci95
    assert low < rates.perplexity_per_token.value < high
    assert (math.log(low), math.log(high)) == pytest.approx(rates.nats_per_token.ci95)
    card = plain["protocol"]
    assert card["definition"] == {
        "quantity": "strict",
        "time": {"steps": 16},
        "estimator": "unspecified",
        "schedule": {"name": "linear", "settings": {}},
        "num_orders": None,
    }
    given = {"data": "d" * 64, "weights": "e" * 64, "packed": False, "source_given": False}
    filled = {"special_tokens": False, "seed": 7, "strata": 4, "precision": 0.01, "length": "given"}
    assert given.items() | filled.items() <= {**card, "definition": None}.items()
    assert card["num_draws"] == found.protocol.num_draws >= 8
    assert "2000 resamples" in str(found.protocol.interval)
    given_sentences = estimate(method, [batch], EstimationBudget(None, 4, 2), given=True)
    assert given_sentences.protocol.interval is Interval.DRAWS
    errors = found.summary().standard_error
    assert errors.total**2 == pytest.approx(errors.sentences**2 + errors.draws**2)
    alone = estimate(method, [batch.select(torch.tensor([1]))], EstimationBudget(None, 4, 2), given=True)
    assert alone.summary().standard_error.sentences is None


def test_huge_perplexities_do_not_overflow():
    assert scores([5000.0, 5000.0], [2, 2]).rates()[Unit.TOKEN].perplexity == math.inf


def test_words_and_bytes_of_a_text():
    assert count_words(" the café ( near\there ) .\n") == 7
    assert count_words("don't stop.") == 2
    assert count_bytes("café .") == 7
    assert count_words("") == count_bytes("") == 0


def test_flawed_counts_are_refused_before_anything_is_drawn():
    objective = Costs(Likelihood.BOUND, lambda x0, noise: torch.ones(len(x0.tokens)))
    method, batch = method_of(objective), corpus(20, 0)
    with pytest.raises(ValueError, match="`words` must have one count for each of the 20 sentences, got 19"):
        estimate(method, [batch], words=torch.ones(19, dtype=torch.long))
    with pytest.raises(ValueError, match="an interval needs at least 2 sentences, got 1"):
        estimate(method, [batch.select(torch.tensor([0]))])
    for given in (False, True):
        with pytest.raises(ValueError, match=f"an interval needs at least {1 if given else 2} sentences, got 0"):
            estimate(method, [], given=given)
    assert objective.calls == 0
    with pytest.raises(ValueError, match="sentence 1 has no word"):
        scores([1.0, 2.0], [1, 1], words=[1, 0])
    with pytest.raises(ValueError, match="at least two"):
        Scores.from_rounds(Likelihood.BOUND, torch.arange(2), [torch.ones(2)], torch.ones(2, dtype=torch.long))


def test_two_systems_are_compared_on_the_same_sentences_in_the_same_unit():
    chance = np.random.default_rng(0)
    tokens = chance.integers(5, 30, 80)
    hardness = tokens * chance.normal(3, 1, 80)
    units = {"words": (tokens // 2 + 1).tolist(), "bytes": (5 * tokens).tolist()}
    worse, better = (
        scores((hardness + chance.normal(0, 1, 80) + extra * tokens).tolist(), tokens.tolist(), **units)
        for extra in (0.2, 0.0)
    )
    found = paired_bootstrap(worse, better)
    assert found.value == pytest.approx(worse.rates()[Unit.TOKEN].nats - better.rates()[Unit.TOKEN].nats)
    assert 0 < found.low < found.value < found.high
    assert found.p_value < 0.002
    assert paired_bootstrap(better, worse).value == pytest.approx(-found.value)
    assert paired_bootstrap(worse, better, Unit.BYTE).value == pytest.approx(found.value / 5)
    finer = replace(better, tokens=2 * better.tokens)  # another vocabulary: only words and bytes compare
    assert paired_bootstrap(worse, finer).value > 1
    assert paired_bootstrap(worse, finer, Unit.WORD).value == paired_bootstrap(worse, better, Unit.WORD).value
    with pytest.raises(ValueError, match="same sentences"):
        paired_bootstrap(worse, better.select(torch.arange(79, -1, -1)))
    with pytest.raises(ValueError, match="'bound' and 'pseudo'"):
        paired_bootstrap(worse, replace(better, kind=Likelihood.PSEUDO))
    with pytest.raises(ValueError, match="no words were counted"):
        paired_bootstrap(worse, replace(better, words=None), Unit.WORD)
    with pytest.raises(ValueError, match="infinite"):
        paired_bootstrap(worse, replace(better, nats=better.nats.index_fill(0, torch.tensor([3]), math.inf)))


def test_products_are_fast_but_for_word_vectors():
    before = torch.get_float32_matmul_precision()
    for config, expected in ((DiscreteTimeConfig(), "high"), (GaussianConfig(), "highest")):
        with fast_products(config):
            assert torch.get_float32_matmul_precision() == expected
        assert torch.get_float32_matmul_precision() == before
