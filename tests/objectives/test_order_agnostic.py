"""The T-step bound, its terms collected by the number of masked positions, against the sum over steps."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from languages import Language, Table, exact_nats
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Cosine, Linear, Spindle, uniform_grid
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import nats_of
from diffusionbert.likelihood.estimate import EstimationBudget, estimate
from diffusionbert.objectives import order_agnostic
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.objectives.discrete_time import DiscreteTime
from diffusionbert.objectives.order_agnostic import OrderAgnostic, OrderAgnosticGrid

LANGUAGE = Language.random(2, 3, seed=3)
UNEVEN = torch.tensor([0.0, 0.05, 0.4, 0.93, 1.0], dtype=torch.float64)
GRIDS = {"one step": uniform_grid(1), "four steps": uniform_grid(4), "uneven": UNEVEN}


@dataclass(frozen=True)
class Chosen(Noise):
    """Noise with given draws: the number in (0, 1), and the order in which positions are masked."""

    position: float = 0.5
    order: tuple[int, ...] = ()

    def stratified_uniform(self, batch: Batch) -> Tensor:
        return torch.full((len(batch.tokens),), self.position, dtype=torch.float64)

    def uniform(self, example: Tensor, purpose: Purpose, *shape: int) -> Tensor:
        return torch.tensor(self.order).double().expand(len(example), -1) / 8


def expected_nats(objective, network: Table, law: Tensor | None = None) -> Tensor:
    """The mean over all orders, and over all numbers of masked positions with their probabilities."""
    length = LANGUAGE.length
    law = torch.full((length,), 1 / length).double() if law is None else law
    total = torch.zeros(len(LANGUAGE.sentences), dtype=torch.float64)
    for fraction, end in zip(law.tolist(), law.cumsum(dim=0).tolist(), strict=True):
        if fraction > 1e-12:
            for order in itertools.permutations(range(length)):
                noise = Chosen(0, position=end - fraction / 2, order=order)
                total += fraction / 6 * objective.nats(network, LANGUAGE.batch(), noise).sum(dim=1)
    return total


@pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_it_equals_the_bound_summed_over_steps(schedule, name):
    network, grid = Table(LANGUAGE, seed=4), GRIDS[name]
    by_steps = DiscreteTime(Absorbing(schedule, LANGUAGE.mask_id, LANGUAGE.information()), grid)
    by_count = OrderAgnosticGrid(schedule, grid, LANGUAGE.mask_id)
    with torch.no_grad():
        expected = exact_nats(by_steps, network, LANGUAGE.batch())
        law = by_count.distribution(LANGUAGE.length)
        torch.testing.assert_close(expected_nats(by_count, network, law), expected, rtol=1e-9, atol=1e-9)
    assert float(law.sum()) == pytest.approx(1)
    assert by_count.likelihood is Likelihood.BOUND


def test_finer_grids_approach_the_order_agnostic_bound():
    network, gaps = Table(LANGUAGE, seed=4), []
    with torch.no_grad():
        limit = expected_nats(OrderAgnostic(LANGUAGE.mask_id), network)
        for steps in (4, 40, 4000):
            objective = OrderAgnosticGrid(Linear(), uniform_grid(steps), LANGUAGE.mask_id)
            gaps.append(float((expected_nats(objective, network, objective.distribution(3)) - limit).abs().max()))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-3


def test_with_the_same_noise_it_masks_the_positions_of_the_order_agnostic_objective():
    fine, limit = OrderAgnosticGrid(Linear(), uniform_grid(100_000), LANGUAGE.mask_id), OrderAgnostic(LANGUAGE.mask_id)
    network, noise = Table(LANGUAGE, seed=4), Noise(5, 2)
    drawn = [objective.nats(network, LANGUAGE.batch(), noise) for objective in (fine, limit)]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_the_estimate_agrees_within_its_interval():
    """With `estimate` and real noise."""
    network, grid = Table(LANGUAGE, seed=4), uniform_grid(3)
    process = Absorbing(Linear(), LANGUAGE.mask_id, LANGUAGE.information())
    objective = OrderAgnosticGrid(Linear(), grid, LANGUAGE.mask_id)
    method = TrainingModule(network, objective)
    found = estimate(method, [LANGUAGE.batch()], EstimationBudget(None, 2048, strata=16), given=True)
    with torch.no_grad():
        exact = exact_nats(DiscreteTime(process, grid), network, LANGUAGE.batch())
    error = (found.scores.nats - exact) / found.scores.draw_variance.sqrt()
    assert float(error.abs().max()) < 4
    assert found.scores.draw_variance.max() < 1e-2


def test_one_step_masks_everything_and_has_no_variance():
    objective = OrderAgnosticGrid(Cosine(), uniform_grid(1), LANGUAGE.mask_id)
    assert objective.distribution(5).tolist() == pytest.approx([0, 0, 0, 0, 1])
    network = Table(LANGUAGE, seed=4)
    draws = [objective.nats(network, LANGUAGE.batch(), Noise(step)) for step in range(3)]
    for draw in draws[1:]:
        torch.testing.assert_close(draw, draws[0])


def test_sequences_of_different_lengths_have_their_own_distributions():
    """In one batch."""
    objective = OrderAgnosticGrid(Linear(), uniform_grid(4), LANGUAGE.mask_id)
    tokens = torch.zeros(2001, 8, dtype=torch.long)
    editable = torch.arange(8) < torch.tensor([1, 8]).repeat(1000)[:, None]
    editable = torch.cat([editable, torch.zeros(1, 8, dtype=torch.bool)])  # and a row with nothing to write
    targets = []

    def network(tokens: Tensor, attention_mask: Tensor, t: Tensor, masked: Tensor) -> Tensor:
        targets.append(masked.sum(dim=1))
        return torch.zeros(int(masked.sum()), 3).double().log_softmax(dim=-1)

    objective.nats(network, Batch.of(tokens, editable), Noise(1))
    assert int(targets[0][-1]) == 0
    assert set(targets[0][:-1:2].tolist()) == {1}
    found = targets[0][1::2].bincount(minlength=9)[1:] / 1000
    assert float((found - objective.distribution(8)).abs().max()) < 0.05


def test_a_token_dependent_schedule_is_refused():
    with pytest.raises(ValueError, match="use DiscreteTime"):
        OrderAgnosticGrid(Spindle(0.3), uniform_grid(4), 9)


# ---- balanced rounds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(Noise):
    """Noise with given numbers: one for every stratum's level, and the rank of every position."""

    level: float = 0.5
    order: tuple[int, ...] = ()

    def uniform(self, example: Tensor, purpose: Purpose, *shape: int) -> Tensor:
        if purpose is Purpose.TIME:
            return torch.full((len(example), *shape), self.level, dtype=torch.float64)
        return (torch.tensor(self.order).double() / 8)[None, :, None].expand(len(example), *shape)


LONGER = Language.random(2, 4, seed=3)
EDGES = {"one": (0.0, 1.0), "two": (0.0, 0.4, 1.0), "by level": (0.0, 0.1, 0.2, 0.3, 0.4, 0.9, 1.0)}
"""The last has more strata than there are positions, which then have a stratum per level."""
OBJECTIVES = {
    "continuous": OrderAgnostic(LONGER.mask_id),
    "grid": OrderAgnosticGrid(Cosine(), uniform_grid(3), LONGER.mask_id),
}


@pytest.mark.slow
@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_balanced_round_is_unbiased_at_every_position(monkeypatch, objective, edges):
    """All orders, and all levels of each stratum with their probabilities, against all masks."""
    monkeypatch.setattr(order_agnostic, "_EDGES", edges)
    monkeypatch.setattr(order_agnostic, "_NEIGHBOR", 3.0)
    network, x0, n = Table(LONGER, seed=4), LONGER.batch(), LONGER.length
    law = objective.distribution(n) if objective is OBJECTIVES["grid"] else torch.full((n,), 1 / n).double()
    expected = torch.zeros(x0.tokens.shape, dtype=torch.float64)
    for mask in itertools.product([False, True], repeat=n):
        if not any(mask):
            continue
        masked = torch.tensor(mask).expand_as(x0.tokens)
        log_f = network(
            x0.tokens.masked_fill(masked, LONGER.mask_id), x0.attention_mask, x0.fraction_of(masked), masked
        )
        k = sum(mask)
        expected += law[k - 1] * n / k / math.comb(n, k) * nats_of(log_f, x0.tokens, masked)
    nodes = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1] + 1 / 4000  # of the levels, within each stratum
    used = edges if n >= len(edges) else tuple(torch.linspace(0, 1, n + 1).tolist())
    cumulative = law.cumsum(dim=0)
    found = torch.zeros_like(expected)
    with torch.no_grad():
        for stratum, (low, high) in enumerate(itertools.pairwise(used)):
            levels = torch.searchsorted(cumulative, low + (high - low) * nodes, right=True).clamp(max=n - 1)
            for level in levels.unique().tolist():
                fraction = _fraction(cumulative, level, low, high)
                node = float(nodes[levels == level][0])
                for order in itertools.permutations(range(n)):
                    parts = objective.draw_round(network, x0, Given(0, level=node, order=order)).parts
                    found += fraction / math.factorial(n) * parts[:, stratum]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def _fraction(cumulative: Tensor, level: int, low: float, high: float) -> float:
    begin = float(cumulative[level - 1]) if level else 0.0
    end = float(cumulative[level]) if level + 1 < len(cumulative) else 1.0
    return (min(end, high) - max(begin, low)) / (high - low)


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 40])
def test_a_round_masks_every_position_in_every_stratum(length):
    asked = []

    def network(tokens: Tensor, attention_mask: Tensor, t: Tensor, masked: Tensor) -> Tensor:
        asked.append(masked)
        return torch.zeros(int(masked.sum()), 3).double().log_softmax(dim=-1)

    x0 = Batch.of(torch.zeros(1, length + 2, dtype=torch.long), torch.ones(1, length + 2, dtype=torch.bool))
    x0 = replace(x0, editable=torch.tensor([[False, *[True] * length, False]]))
    found = OrderAgnostic(2).draw_round(network, x0, Noise(3, 1))
    masked = torch.cat(asked)
    assert found.num_sequences == (len(masked),)
    assert masked[:, 1:-1].any(dim=0).all()
    assert not masked[:, [0, -1]].any()
    num_strata = min(length, 7)
    counts = masked.sum(dim=0)[1:-1]
    assert int(counts.min()) >= num_strata
    assert found.parts.shape == (1, 7, length + 2)
    assert int((found.parts[0].abs().sum(dim=1) > 0).sum()) == num_strata
    if length <= 2:  # all masks are made
        assert float(found.parts.sum()) == pytest.approx(length * math.log(3))


def test_rounds_of_a_batch_are_those_of_its_sequences():
    network, objective = Table(LONGER, seed=4), OrderAgnostic(LONGER.mask_id)
    batch = replace(LONGER.batch(), editable=torch.tensor([True, True, False, True]).expand(16, 4))
    together = objective.draw_round(network, batch, Noise(5, 2))
    for index in (0, 7):
        alone = objective.draw_round(network, batch.select(torch.tensor([index])), Noise(5, 2))
        torch.testing.assert_close(together.parts[index], alone.parts[0])
        assert together.num_sequences[index] == alone.num_sequences[0]
        assert not alone.parts[0][:, 2].any()
