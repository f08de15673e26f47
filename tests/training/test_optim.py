"""The EMA of parameters: against a running mean by hand, and applied to a module for a while."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from diffusionbert.training.optim import EMA


def module() -> nn.Module:
    """Two layers, one of them tied to a third."""
    made = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    made[2].weight = made[0].weight
    return made


def walk(made: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def values(made: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_averages_are_the_running_mean_with_a_smaller_decay_at_first(decay):
    made, generator = module(), torch.Generator().manual_seed(1)
    ema = EMA(made, decay)
    expected = {name: value.double() for name, value in values(made).items()}
    for update in range(1, 31):
        walk(made, generator)
        ema.update()
        now = min(decay, (1 + update) / (10 + update))
        expected = {name: now * mean + (1 - now) * values(made)[name] for name, mean in expected.items()}
    assert ema.num_updates == 30
    assert ema.averages.keys() == expected.keys()
    for name, mean in expected.items():
        torch.testing.assert_close(ema.averages[name].double(), mean, atol=1e-5, rtol=0)


def test_the_initial_parameters_are_soon_forgotten():
    made = module()
    ema = EMA(made, 0.9999)
    start = values(made)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(1)
    for _ in range(20):
        ema.update()
    for name, average in ema.averages.items():
        torch.testing.assert_close(average, start[name] + 1, atol=1e-3, rtol=0)


def test_an_update_does_not_change_the_parameters():
    made = module()
    ema = EMA(made, 0.9)
    walk(made, torch.Generator().manual_seed(1))
    before = values(made)
    ema.update()
    assert all(torch.equal(value, before[name]) for name, value in values(made).items())
    assert not any(average.requires_grad for average in ema.averages.values())


@pytest.mark.parametrize("failing", [False, True])
def test_a_module_has_its_own_parameters_again_after_the_averages(failing):
    made = module()
    ema = EMA(made, 0.9)
    walk(made, torch.Generator().manual_seed(1))
    ema.update()
    own, mean = values(made), copy.deepcopy(ema.averages)
    try:
        with ema.applied_to(made):
            assert all(torch.equal(value, mean[name]) for name, value in values(made).items())
            assert made[2].weight is made[0].weight
            if failing:
                raise RuntimeError("in the middle of a validation")
    except RuntimeError:
        assert failing
    assert all(torch.equal(value, own[name]) for name, value in values(made).items())
    assert all(torch.equal(value, mean[name]) for name, value in ema.averages.items())


def test_restored_averages_continue_exactly():
    made, generator = module(), torch.Generator().manual_seed(1)
    straight = EMA(made, 0.99)
    for _ in range(5):
        walk(made, generator)
        straight.update()
    saved = {name: average.clone() for name, average in straight.averages.items()}
    resumed = EMA(made, 0.99)
    resumed.restore(saved, straight.num_updates)
    for _ in range(5):
        walk(made, generator)
        straight.update()
        resumed.update()
    assert resumed.num_updates == straight.num_updates == 10
    assert all(torch.equal(value, straight.averages[name]) for name, value in resumed.averages.items())
    assert not any(torch.equal(value, saved[name]) for name, value in resumed.averages.items())
