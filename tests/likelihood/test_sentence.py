"""Estimates of single sentences: their intervals, their stopping, their independence of company."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from languages import Language, Table, exact_nats
from torch import Tensor, nn
from torch.nn.functional import pad

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.likelihood.sentence import SentenceBudget, Uncertainty, estimate_sentences
from diffusionbert.objectives.base import Likelihood, Objective, Round, TrainingModule
from diffusionbert.objectives.continuous_time import ContinuousTime
from diffusionbert.objectives.order_agnostic import OrderAgnostic

LANGUAGE = Language.random(2, 7, seed=3)


@dataclass(frozen=True)
class Given:
    """Sentences of a batch."""

    whole: Batch

    @property
    def lengths(self) -> np.ndarray:
        return self.whole.attention_mask.sum(dim=1).numpy()

    def batch(self, indices: list[int]) -> Batch:
        return self.whole.select(torch.tensor(indices))


def method(objective: Objective | None = None, scale: float = 1.5) -> TrainingModule:
    return TrainingModule(Table(LANGUAGE, scale=scale, seed=4), objective or OrderAgnostic(LANGUAGE.mask_id))


def sentences(*indices: int, same_key: bool = False) -> Given:
    batch = LANGUAGE.batch(LANGUAGE.sentences[list(indices)])
    return Given(replace(batch, example=torch.zeros_like(batch.example) if same_key else torch.tensor(indices)))


def truth(indices: range, scale: float = 1.5) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = exact_nats(
            OrderAgnostic(LANGUAGE.mask_id), method(scale=scale).network, LANGUAGE.batch(LANGUAGE.sentences[indices])
        )
    return found


class Skewed(Objective):
    """Parts with known means: normal numbers and a fraction of their squares, of another size in every sentence."""

    likelihood = Likelihood.BOUND

    def loss(self, network: nn.Module, x0: Batch, noise: Noise) -> Tensor:
        raise NotImplementedError

    nats = loss

    def draw_round(self, network: nn.Module, x0: Batch, noise: Noise) -> Round:
        normal = noise.normal(x0.example, Purpose.GAUSS, 7)
        sizes = (0.5 + x0.example[:, None] % 5) * torch.linspace(0.5, 1.5, 7)
        parts = 5 + sizes * (normal + 0.2 * (normal.square() - 1)) / 8
        return Round(pad(parts[..., None], (0, x0.tokens.shape[1] - 1)), (20,) * len(parts))


@pytest.mark.slow
def test_intervals_cover_the_truth_after_stopping_by_their_width():
    sized = TrainingModule(nn.Linear(1, 1), Skewed())
    tokens = torch.zeros(600, 10, dtype=torch.long)
    rows = Given(Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool)))
    found = estimate_sentences(sized, rows, SentenceBudget(0.1))
    intervals = [one.uncertainty.interval(one.nats) for one in found]
    assert 0.93 <= np.mean([low <= 35 <= high for low, high in intervals]) <= 0.97
    assert all((high - low) / 2 <= math.log1p(0.1) * 10 for low, high in intervals)
    assert len({one.num_draws for one in found}) >= 3  # sentences stop at different times


@pytest.mark.slow
def test_estimates_are_unbiased():
    indices = range(0, 128, 32)
    budget = [SentenceBudget(0.3, seed=seed) for seed in range(25)]
    found = torch.tensor([[one.nats for one in estimate_sentences(method(), sentences(*indices), b)] for b in budget])
    error = (found.mean(dim=0) - truth(indices)) / (found.std(dim=0) / math.sqrt(len(budget)))
    assert float(error.abs().max()) < 3.5


def test_a_sentence_does_not_depend_on_its_company():
    budget = SentenceBudget(0.2)
    alone = estimate_sentences(method(), sentences(5), budget)[0]
    together = estimate_sentences(method(), sentences(*range(20)), budget)[5]
    assert torch.equal(alone.token_nats, together.token_nats)
    assert (alone.uncertainty, alone.num_draws) == (together.uncertainty, together.num_draws)
    assert float(alone.token_nats.sum()) == alone.nats


def test_more_precision_takes_more_draws():
    wide, narrow = (estimate_sentences(method(), sentences(9), SentenceBudget(p))[0] for p in (0.3, 0.07))
    assert narrow.num_draws > 4 * wide.num_draws
    assert narrow.uncertainty.half_width <= math.log1p(0.07) * 7
    assert narrow.precision_reached
    assert wide.precision_reached


def test_the_limit_of_draws_is_kept_and_said():
    [found] = estimate_sentences(method(), sentences(9), SentenceBudget(0.001, max_draws=60))
    assert not found.precision_reached
    assert 30 < found.num_draws <= 60
    assert math.isfinite(found.uncertainty.half_width)


def test_a_single_round_has_an_unknown_interval():
    [found] = estimate_sentences(method(), sentences(9), SentenceBudget(0.1, max_draws=1))
    assert not found.precision_reached
    assert found.uncertainty.interval(found.nats, 0.0) == (0.0, math.inf)


def test_other_objectives_draw_stratified_times():
    process = Absorbing(Linear(), LANGUAGE.mask_id, LANGUAGE.information())
    timed = method(ContinuousTime(process))
    [found] = estimate_sentences(timed, sentences(9), SentenceBudget(0.3))
    assert found.num_draws % 16 == 0
    assert found.num_draws > estimate_sentences(method(), sentences(9), SentenceBudget(0.3))[0].num_draws
    assert abs(found.nats - float(truth(range(9, 10)))) < 2 * found.uncertainty.half_width


@pytest.mark.slow
def test_paired_sentences_have_precise_differences():
    """For sentences that differ in a token, and equally many draws for all of them."""
    budget = SentenceBudget(0.15)
    exact = truth(range(128))
    covered = []
    for seed in range(15):
        found = estimate_sentences(
            method(), sentences(64, 65, 66, same_key=True), replace(budget, seed=seed), paired=True
        )
        assert len({one.num_draws for one in found}) == 1
        assert found[0].difference is not None
        assert found[0].difference.ci95 == (0.0, 0.0)
        for one, index in zip(found, (64, 65, 66), strict=True):
            low, high = one.difference.ci95
            assert one.difference.nats == pytest.approx(one.nats - found[0].nats)
            assert one.precision_reached == ((high - low) / 2 <= budget.half_width * 7)
            covered.append(low <= float(exact[index] - exact[64]) <= high)
    assert sum(covered) >= 0.9 * len(covered)


def test_uncertainties_add_up():
    one = Uncertainty(3.0, 10.0)
    assert Uncertainty.summed([one]) == one
    both = Uncertainty.summed([one, Uncertainty(4.0, 10.0)])
    assert both.standard_error == pytest.approx(5)
    assert 10 < both.degrees_of_freedom < 20
    assert Uncertainty.summed([one, Uncertainty()]).standard_error == pytest.approx(3)
    assert Uncertainty.summed([Uncertainty(), Uncertainty()]) == Uncertainty()
    assert Uncertainty(2.0, 1e9).interval(3.0, lowest=0.0) == pytest.approx((0.0, 3 + 1.96 * 2), abs=0.01)


@pytest.mark.parametrize(
    "wrong", [{"precision": 0.0}, {"precision": math.nan}, {"max_draws": 0}, {"seed": 0.5}], ids=str
)
def test_budgets_are_checked(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        SentenceBudget(**wrong)
