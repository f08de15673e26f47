"""The bound over a grid, gathered by the number of hidden places: the same number as by steps, by brute force."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from languages import Language, Table, exact_nats
from torch import Tensor

from diffusionbert.evaluation import Effort, estimate
from diffusionbert.method import Likelihood, Method
from diffusionbert.methods.any_order import AnyOrder
from diffusionbert.methods.discrete import DiscreteTime
from diffusionbert.methods.grid_in_any_order import GridInAnyOrder
from diffusionbert.noise import Noise, Purpose
from diffusionbert.processes import Absorbing
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.schedules import Cosine, Linear, Spindle, uniform_grid
from diffusionbert.shapes import Batch

LANGUAGE = Language.random(2, 3, seed=3)
UNEVEN = torch.tensor([0.0, 0.05, 0.4, 0.93, 1.0], dtype=torch.float64)
GRIDS = {"one step": uniform_grid(1), "four steps": uniform_grid(4), "uneven": UNEVEN}


@dataclass(frozen=True)
class Chosen(Noise):
    """Noise whose draws are given: the slice of (0, 1), and in which order places are hidden."""

    place: float = 0.5
    order: tuple[int, ...] = ()

    def position(self, batch: Batch) -> Tensor:
        return torch.full((len(batch.tokens),), self.place, dtype=torch.float64)

    def uniform(self, example: Tensor, purpose: Purpose, *shape: int) -> Tensor:
        return torch.tensor(self.order).double().expand(len(example), -1) / 8


def expected_nats(objective, network: Table) -> Tensor:
    """The mean over every number of hidden places and every order, each as likely."""
    length = LANGUAGE.length
    chances = itertools.product(range(length), itertools.permutations(range(length)))
    draws = [
        objective.nats(network, LANGUAGE.batch(), Chosen(0, place=(k + 0.5) / length, order=order)).sum(dim=1)
        for k, order in chances
    ]
    return torch.stack(draws).mean(dim=0)


@pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_it_is_the_bound_over_the_steps(schedule, name):
    network, grid = Table(LANGUAGE, seed=4), GRIDS[name]
    by_steps = DiscreteTime(Absorbing(schedule, LANGUAGE.mask_id, LANGUAGE.information()), grid)
    by_count = GridInAnyOrder(schedule, grid, LANGUAGE.mask_id)
    with torch.no_grad():
        expected = exact_nats(by_steps, network, LANGUAGE.batch())
        torch.testing.assert_close(expected_nats(by_count, network), expected, rtol=1e-9, atol=1e-9)
    assert by_count.likelihood is Likelihood.BOUND


def test_finer_grids_come_near_to_any_order_from_above():
    network = Table(LANGUAGE, seed=4)
    with torch.no_grad():
        limit = expected_nats(AnyOrder(LANGUAGE.mask_id), network)
        gaps = [
            float(
                (expected_nats(GridInAnyOrder(Linear(), uniform_grid(steps), LANGUAGE.mask_id), network) - limit).mean()
            )
            for steps in (4, 40, 4000)
        ]
    # For a random network single sentences may profit from fewer steps; what falls is the size of the difference.
    assert abs(gaps[0]) > abs(gaps[1]) > abs(gaps[2])
    assert abs(gaps[2]) < 1e-3


def test_with_the_same_noise_it_hides_the_same_places_as_any_order():
    fine, limit = GridInAnyOrder(Linear(), uniform_grid(100_000), LANGUAGE.mask_id), AnyOrder(LANGUAGE.mask_id)
    network, noise = Table(LANGUAGE, seed=4), Noise(5, 2)
    drawn = [objective.nats(network, LANGUAGE.batch(), noise) for objective in (fine, limit)]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=1e-3, atol=1e-6)


def test_estimates_find_it():
    """Through `estimate`, with real noise: within its own interval."""
    network, grid = Table(LANGUAGE, seed=4), uniform_grid(3)
    process = Absorbing(Linear(), LANGUAGE.mask_id, LANGUAGE.information())
    objective = GridInAnyOrder(Linear(), grid, LANGUAGE.mask_id)
    method = Method(network, objective, Ancestral(process, grid))
    found = estimate(method, [LANGUAGE.batch()], Effort(None, 2048, strata=16), given=True)
    with torch.no_grad():
        exact = exact_nats(DiscreteTime(process, grid), network, LANGUAGE.batch())
    error = (found.scores.nats - exact) / found.scores.draw_variance.sqrt()
    assert float(error.abs().max()) < 4
    assert found.scores.draw_variance.max() < 1e-2


def test_one_step_counts_only_sentences_that_are_all_hidden():
    objective = GridInAnyOrder(Cosine(), uniform_grid(1), 9)
    weights = objective.weights(torch.tensor([5, 5, 5]), torch.tensor([1, 4, 5]))
    assert weights.tolist() == pytest.approx([0, 0, 1])


def test_a_schedule_by_token_is_refused():
    with pytest.raises(ValueError, match="use DiscreteTime"):
        GridInAnyOrder(Spindle(0.3), uniform_grid(4), 9)
