"""Complementary masks (`Draw.antithetic`): each sequence is drawn from noise and from its mirror image."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from languages import SKEWED, Table, exact_nats

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Linear, Spindle, TokenInformation, uniform_grid
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.time_sampling import Bell, Early, UniformTimes
from diffusionbert.objectives.base import Objective, ObjectiveConfig
from diffusionbert.objectives.continuous_time import ContinuousTime, ContinuousTimeConfig
from diffusionbert.objectives.discrete_time import DiscreteTime, DiscreteTimeConfig
from diffusionbert.storage.schema import from_text

MASK = 9


def sequences(number: int = 200, length: int = 7) -> Batch:
    """Sequences whose first position is not editable, each with its stratum."""
    tokens = torch.arange(number * length).view(number, length) % MASK
    editable = torch.ones_like(tokens, dtype=torch.bool)
    editable[:, 0] = False
    return Noise(3).stratify(Batch.of(tokens, editable))


def test_mirrored_numbers_add_up_to_one():
    x0, noise = sequences(), Noise(1, step=2)
    first, second = (one.per_position(x0, Purpose.CORRUPT) for one in (noise, noise.mirrored()))
    assert bool((first + second == 1).all())
    times = [one.stratified_uniform(x0) for one in (noise, noise.mirrored())]
    torch.testing.assert_close(sum(times), torch.ones(200, dtype=torch.float64), atol=1e-15, rtol=0)
    assert noise.mirrored().mirrored() == noise


@pytest.mark.parametrize("time_sampling", [UniformTimes(), Bell(0.8)])
def test_in_continuous_time_each_token_is_masked_once(time_sampling):
    x0 = sequences()
    objective = ContinuousTime(Absorbing(Linear(), MASK), time_sampling, complementary=True)
    drawn = objective.draw(x0, Noise(0))
    torch.testing.assert_close(drawn.t[:200] + drawn.t[200:], torch.ones(200, dtype=torch.float64))
    masked = drawn.targets.mask
    assert torch.equal(masked[:200] ^ masked[200:], x0.editable)
    assert 0 < int(masked[:200].sum()) < int(x0.editable.sum())


def test_on_a_time_grid_the_masks_overlap_by_one_step():
    x0, num_steps = sequences(4000), 8
    objective = DiscreteTime(Absorbing(Linear(), MASK), uniform_grid(num_steps), complementary=True)
    masked = objective.draw(x0, Noise(0)).targets.mask
    first, second = masked[:4000], masked[4000:]
    assert torch.equal(first | second, x0.editable)
    overlap = float((first & second).sum() / x0.editable.sum())
    assert overlap == pytest.approx(1 / num_steps, rel=0.05)


INFORMATION = TokenInformation.from_counts(torch.tensor([80, 20, 0]))
OBJECTIVES: dict[str, Callable[[Absorbing], Objective]] = {
    "discrete": lambda process: DiscreteTime(process, uniform_grid(6), complementary=True),
    "continuous": lambda process: ContinuousTime(process, Early(), complementary=True),
}


@pytest.mark.parametrize("schedule", [Linear(), Spindle(0.2)], ids=["linear", "spindle"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_is_an_unbiased_estimate_of_the_bound(name, schedule):
    """For every schedule, also where the masks are not complementary."""
    objective, network, number = OBJECTIVES[name](Absorbing(schedule, SKEWED.mask_id, INFORMATION)), Table(SKEWED), 4000
    draws = objective.loss(network, SKEWED.batch(SKEWED.sentences.repeat(number, 1)), Noise(0)).detach()
    draws = draws.view(number, -1)
    expected = exact_nats(objective, network, SKEWED.batch()).detach()
    assert bool(((draws.mean(dim=0) - expected).abs() < 4 * draws.std(dim=0) / number**0.5).all())


@pytest.mark.parametrize("config", [DiscreteTimeConfig, ContinuousTimeConfig])
def test_a_configuration_asks_for_it(config):
    found = from_text(f"{ObjectiveConfig.registry.name_of(config())}:complementary=true", ObjectiveConfig, "objective")
    assert found == config(complementary=True)
