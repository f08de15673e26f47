"""The EMA of parameters, against a running mean by hand; Muon with AdamW, against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from backbones import backbone_of
from torch import nn
from training_worker import training_module

from diffusionbert.networks.loading import NewDecoder
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.optim import EMA, fitting_ema, layer_matrices, muon_step, new_optimizer

CPU = torch.device("cpu")


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


# ---- Muon -------------------------------------------------------------------------------------------------------


def with_gradients(made: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_and_adamw_step_as_torchs_own():
    ours, theirs = training_module(0.0), training_module(0.0)
    optimizer = new_optimizer(ours, TrainingConfig(optimizer="muon", weight_decay=0.1), CPU)
    stepper = Accelerator(cpu=True).prepare_optimizer(optimizer)  # which loads the optimizer's own state into it
    names = {name for name, _ in theirs.named_parameters() if name.endswith("weight") and ".layer." in name}
    names = {name for name in names if "LayerNorm" not in name}
    weights = dict(theirs.named_parameters())
    rest = [weight for name, weight in weights.items() if name not in names]
    decayed = {"params": [weight for weight in rest if weight.ndim > 1], "weight_decay": 0.1}
    others = {"params": [weight for weight in rest if weight.ndim <= 1], "weight_decay": 0.0}
    matrices = [weights[name] for name in sorted(names)]
    assert len(matrices) == 2 * 6
    expected = [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([decayed, others]),
    ]
    for step, rate in enumerate((1e-2, 3e-2, 2e-2)):
        for made in (ours, theirs):
            with_gradients(made, step)
        for each in (stepper, *expected):
            for group in each.param_groups:
                group["lr"] = rate
            each.step()
    for (name, mine), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, reference), name
        assert optimizer.state[mine].keys() == (
            {"momentum_buffer"} if name in names else {"step", "exp_avg", "exp_avg_sq"}
        )


def test_muon_for_many_matrices_at_once_equals_torchs_own(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # products of bfloat16 round differently
    shapes = [(24, 8), (8, 8), (24, 8), (8, 16), (8, 8)]
    ours, theirs = (nn.ParameterList(torch.full(shape, 0.5) for shape in shapes) for _ in range(2))
    settings = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    mine, reference = torch.optim.Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for step in range(3):
        for made in (ours, theirs):
            with_gradients(made, step)
        ours[1].grad = theirs[1].grad = None  # a matrix without a gradient stays as it is
        muon_step(mine)
        reference.step()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=0)
    assert torch.equal(ours[1], torch.full((8, 8), 0.5))
    torch.testing.assert_close(
        mine.state[ours[0]]["momentum_buffer"], reference.state[theirs[0]]["momentum_buffer"], atol=1e-7, rtol=0
    )


@pytest.mark.parametrize(
    ("made", "number"),
    [
        (lambda: backbone_of("bert"), 2 * 6),
        (lambda: backbone_of("new-modernbert"), 2 * 4),
        (lambda: backbone_of("deberta-v2"), 2 * 6),
        (lambda: backbone_of("albert"), 6),  # all layers are one
        (lambda: NewDecoder(3, 32, 2).build(50, 24, 0, causal=True), 3 * 4),
    ],
    ids=["bert", "modernbert", "deberta", "albert", "gpt2"],
)
def test_muon_is_for_the_matrices_of_layers(made, number):
    model = made()
    matrices = layer_matrices(model)
    assert len(matrices) == number
    assert all(min(matrix.shape) >= 32 for matrix in matrices)
    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert not {id(matrix) for matrix in matrices} & {id(table) for table in tables}


def test_networks_and_versions_without_muon_are_refused(monkeypatch):
    settings = TrainingConfig(optimizer="muon")
    with pytest.raises(ValueError, match="is for the matrices of layers, and this network has none; use adamw"):
        new_optimizer(module(), settings, CPU)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"muon needs torch 2\.9 or newer, got .*; pip install -U torch, or use adamw"):
        new_optimizer(training_module(0.0), settings, CPU)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99, 0.9995])
def test_the_decay_is_reached_when_it_is_said_to_be(decay):
    step = EMA.step_reached(decay)
    assert EMA.decay_at(step, decay) == decay
    assert step == 1 or EMA.decay_at(step - 1, decay) < decay


@pytest.mark.parametrize("steps", [3, 200, 2000, 14_000])
def test_a_fitting_decay_acts_within_the_run_and_forgets_its_first_half(steps):
    decay = fitting_ema(steps)
    assert EMA.step_reached(decay) <= max(8, 0.45 * steps)
    if steps >= 200:
        assert decay ** (steps / 2) < 1e-4
