"""Proposals: an inverse that inverts, a density that is one, weights that keep the loss unbiased."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from languages import SKEWED, Table, exact_nats
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Linear, Spindle, uniform_grid
from diffusionbert.diffusion.time_sampling import Bell, Early, TimeSampling, UniformTimes
from diffusionbert.objectives.base import Objective
from diffusionbert.objectives.continuous_time import ContinuousTime
from diffusionbert.objectives.discrete_time import DiscreteTime

DEPTHS = [0.0, 0.3, 0.8, 0.99]


def positions(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def distribution(depth: float, t: Tensor) -> Tensor:
    """The integral of 1 - depth·cos(2πt)."""
    return t - depth * torch.sin(2 * math.pi * t) / (2 * math.pi)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_bell_inverts_its_distribution_function(depth):
    position = torch.cat([torch.tensor([0.0, 1e-12, 2**-53], dtype=torch.float64), positions(4001)])
    t, _ = Bell(depth).times(position)
    torch.testing.assert_close(distribution(depth, t), position, atol=1e-14, rtol=0)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_bells_weights_are_one_over_its_density(depth):
    """The density is the slope of the distribution function, and integrates to 1."""
    t, weight = Bell(depth).times(positions(2001))
    slope = (distribution(depth, t + 1e-6) - distribution(depth, t - 1e-6)) / 2e-6
    torch.testing.assert_close(1 / weight, slope, atol=1e-8, rtol=0)
    even = positions(4000)
    assert float((1 - depth * torch.cos(2 * math.pi * even)).mean()) == pytest.approx(1, abs=1e-12)
    # Under the density, weights of one over it measure the length of the interval, and moments of even times.
    t, weight = Bell(depth).times(positions(100_000))
    assert float(weight.mean()) == pytest.approx(1, abs=1e-4)
    assert float((weight * t).mean()) == pytest.approx(1 / 2, abs=1e-4)
    assert float((weight * t**2).mean()) == pytest.approx(1 / 3, abs=1e-4)


def test_even_is_the_bell_of_no_depth():
    position = positions(100)
    for proposal in (UniformTimes(), Bell(0.0)):
        t, weight = proposal.times(position)
        torch.testing.assert_close(t, position, atol=1e-15, rtol=0)
        assert torch.equal(weight, torch.ones_like(weight))


def test_slices_stay_slices_and_draws_gather_in_the_middle():
    t, _ = Bell(0.8).times(positions(10_000))
    assert bool((t[1:] > t[:-1]).all())
    in_the_middle = float(((t > 0.25) & (t < 0.75)).double().mean())
    assert in_the_middle == pytest.approx(0.5 + 0.8 / math.pi, abs=1e-3)
    assert float((t < 0.1).double().mean()) > 0.02  # …yet some from the ends


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bell_never_draws_the_end(depth, dtype):
    """A time of 1 would be a step beyond the grid."""
    position = torch.tensor([0.0, 0.5, 1.0], dtype=dtype)
    position[2] = torch.nextafter(position[2], position[0])  # the largest number below 1
    t, weight = Bell(depth).times(position)
    assert t.dtype == weight.dtype == dtype
    assert bool(((t >= 0) & (t < 1)).all())
    assert bool(weight.isfinite().all())


def test_an_unweighted_bell_counts_every_draw_alike():
    t, weight = Bell(0.8, weighted=False).times(positions(100))
    assert torch.equal(weight, torch.ones_like(weight))
    assert torch.equal(t, Bell(0.8).times(positions(100))[0])


@pytest.mark.parametrize("depth", [-0.1, 1.0, 2.0, math.nan])
def test_other_depths_are_refused(depth):
    with pytest.raises(ValueError, match=rf"\[0, 1\), got {depth}"):
        Bell(depth)


OBJECTIVES = {
    "discrete": lambda sampling: DiscreteTime(process(), uniform_grid(5), time_sampling=sampling),
    "continuous": lambda sampling: ContinuousTime(process(), time_sampling=sampling),
    "discrete, linear": lambda sampling: DiscreteTime(
        Absorbing(Linear(), SKEWED.mask_id, SKEWED.information()), uniform_grid(5), time_sampling=sampling
    ),
}


def process() -> Absorbing:
    return Absorbing(Spindle(0.3, floor=0.05), SKEWED.mask_id, SKEWED.information())


@torch.no_grad()
def drawn(objective: Objective, network: Table, verb: str, count: int) -> tuple[Tensor, Tensor]:
    """The mean and its standard error over many draws of each sentence of the language, times stratified."""
    sentences = SKEWED.sentences.repeat_interleave(count, dim=0)
    edges = torch.arange(count + 1, dtype=torch.float64) / count
    strata = torch.stack([edges[:-1], edges[1:]], dim=1).repeat(len(SKEWED.sentences), 1)
    batch = replace(SKEWED.batch(sentences), strata=strata)
    values = getattr(objective, verb)(network, batch, Noise(3))
    values = (values.sum(dim=1) if verb == "nats" else values).view(-1, count)
    return values.mean(dim=1), values.std(dim=1) / math.sqrt(count)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("proposal", [UniformTimes(), Early(), Bell(0.8)], ids=str)
def test_a_weighted_loss_is_unbiased(name, proposal: TimeSampling):
    """Against the sum (or integral) over every time and every corrupted state."""
    objective, network = OBJECTIVES[name](proposal), Table(SKEWED)
    expected = exact_nats(objective, network, SKEWED.batch()).detach()
    mean, error = drawn(objective, network, "loss", 40_000)
    assert bool((error < 0.025 * expected).all())
    assert bool(((mean - expected).abs() < 4 * error).all()), (mean, expected, error)


def test_an_unweighted_loss_is_another_and_nats_know_no_proposal():
    objective, network = OBJECTIVES["discrete"](Bell(0.8, weighted=False)), Table(SKEWED)
    expected = exact_nats(objective, network, SKEWED.batch()).detach()
    loss, error = drawn(objective, network, "loss", 20_000)
    assert bool(((loss - expected).abs() > 6 * error).any())
    nats, error = drawn(objective, network, "nats", 20_000)
    assert bool(((nats - expected).abs() < 4 * error).all())


def test_early_times_tame_what_grows_like_one_over_t():
    """E[(1/t)²·t] is infinite for even times; for early ones it is ∫ t · (1/t)² · 2√t dt = 4."""
    t, weight = Early().times(positions(1_000_000))
    assert float((t * (weight / t) ** 2).mean()) == pytest.approx(4 * math.log(3), abs=0.01)
    assert float((t * (1 / t) * weight).mean()) == pytest.approx(1, abs=1e-6)  # and the estimate stays right
