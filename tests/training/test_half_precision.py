"""Training in half precision throughout: what it computes, and what stays in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from accelerate.state import AcceleratorState
from training_worker import MadeUpSequences
from transformers import FNetConfig, FNetForMaskedLM

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Spindle
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks import base
from diffusionbert.networks.loading import NewBert, NewDecoder, NewModernBert
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import ObjectiveConfig, TrainingModule
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.training.batches import FixedSequences
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.half_precision import HalfPrecision, suits
from diffusionbert.training.run import make_accelerator
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.trainer import Trainer

SIZE = 50
STATISTICS = TokenStatistics(3, 0, torch.arange(SIZE) >= 5, (), torch.arange(SIZE) + 1)
LINEAR = DiscreteTimeConfig(num_steps=16)
AUTOREGRESSIVE = ObjectiveConfig.registry.get("autoregressive")()
FAMILIES = {"bert": NewBert, "modernbert": NewModernBert, "decoder": NewDecoder}


def module_of(
    family: str = "bert", objective: ObjectiveConfig = LINEAR, time: TimeEmbedding = TimeEmbedding.NONE
) -> TrainingModule:
    torch.manual_seed(0)
    backbone = FAMILIES[family](2, 32, 2, 0.0).build(SIZE, 40, 0, causal=objective.is_causal)
    config = RunConfig(DataConfig("made up", max_length=30), time=time, objective=objective)
    return config.make_module(STATISTICS, backbone).train()


def batch_of(size: int, length: int) -> Batch:
    """Random sequences between `[CLS]` and `[SEP]`; the first is shorter."""
    tokens = torch.randint(5, SIZE, (size, length), generator=torch.Generator().manual_seed(length))
    tokens[:, 0], tokens[:, -1] = 1, 2
    tokens[0, -2], tokens[0, -1] = 2, 0
    return Noise(0).stratify(Batch.of(tokens, tokens >= 5, tokens > 0))


def gradient(module: TrainingModule) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def train(module: TrainingModule, half: HalfPrecision | None, batches: list[Batch]) -> float:
    """The loss of all batches, whose gradients add up."""
    total = 0.0
    for batch in batches:
        if half is None:
            (loss := module(batch, Noise(1, 7), 10.0)).backward()
        else:
            with half.applied():
                (loss := module(batch, Noise(1, 7), 10.0)).backward()
            half.add_gradients()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize(
    ("family", "objective", "time"),
    [
        ("bert", LINEAR, TimeEmbedding.NONE),
        ("bert", LINEAR, TimeEmbedding.PREFIX),
        ("bert", LINEAR, TimeEmbedding.LAYERS),
        ("bert", DiscreteTimeConfig(Spindle(0.3), num_steps=16, hybrid=0.01), TimeEmbedding.NONE),
        ("modernbert", LINEAR, TimeEmbedding.NONE),
        ("modernbert", LINEAR, TimeEmbedding.LAYERS),
        ("decoder", AUTOREGRESSIVE, TimeEmbedding.NONE),
    ],
)
def test_loss_and_gradient_are_those_of_float32_to_rounding(family, objective, time):
    module, batches = module_of(family, objective, time), [batch_of(6, 12), batch_of(4, 9)]
    expected = train(module, None, batches)
    exact = gradient(module).clone()
    module.zero_grad()
    found = train(module, HalfPrecision(module), batches)
    assert found == pytest.approx(expected, rel=2e-3)
    assert gradient(module).dtype == torch.float32
    assert float((gradient(module) - exact).norm() / exact.norm()) < 0.03


def test_the_network_computes_in_bfloat16_and_keeps_its_parameters():
    module, seen = module_of(), []
    before = {name: (id(parameter), parameter.clone()) for name, parameter in module.named_parameters()}
    backbone = module.network.backbone
    backbone.base_model.encoder.layer[0].output.LayerNorm.register_forward_hook(
        lambda layer, inputs, output: seen.append((inputs[0].dtype, output.dtype))
    )
    half = HalfPrecision(module)
    with half.applied():
        tied = backbone.get_output_embeddings().weight is backbone.get_input_embeddings().weight
        loss = module(batch_of(4, 9), Noise(1, 7), 10.0)
        loss.backward()
    half.add_gradients()
    assert tied
    assert loss.dtype == torch.float64  # as without half precision
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    for name, parameter in module.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_an_error_inside_gives_the_parameters_back():
    module = module_of()
    before = list(module.parameters())
    half = HalfPrecision(module)
    with pytest.raises(OSError, match="gone"), half.applied():
        raise OSError("the disk is gone")
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))


def test_the_backward_pass_may_compute_logits_again(monkeypatch):
    module, batch = module_of(), batch_of(6, 12)
    whole = train(module, HalfPrecision(module), [batch]), gradient(module).clone()
    module.zero_grad()
    monkeypatch.setattr(base, "VALUES_AT_ONCE", 4 * SIZE)
    in_parts = module_of()
    in_parts.load_state_dict(module.state_dict())
    loss = train(in_parts, HalfPrecision(in_parts), [batch])
    assert loss == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(gradient(in_parts), whole[1], rtol=0.05, atol=1e-3)


def test_word_vectors_and_frozen_parameters_need_autocast():
    assert suits(module_of())
    assert suits(module_of("decoder", AUTOREGRESSIVE))
    assert suits(module_of(time=TimeEmbedding.PREFIX))
    assert not suits(module_of(objective=ObjectiveConfig.registry.get("gaussian")()))
    frozen = module_of()
    next(frozen.network.backbone.parameters()).requires_grad_(False)
    assert not suits(frozen)


def test_so_do_classes_that_do_not_compute_in_half_precision():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "max_position_embeddings": 40}
    config = FNetConfig(vocab_size=SIZE, pad_token_id=0, **sizes)
    module = RunConfig(DataConfig("made up", max_length=30), objective=LINEAR).make_module(
        STATISTICS, FNetForMaskedLM(config)
    )
    assert not suits(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert bool(module(batch_of(4, 9), Noise(1, 7), 10.0).isfinite())
    with pytest.raises(RuntimeError, match="BFloat16"):
        train(module, HalfPrecision(module), [batch_of(4, 9)])


@pytest.fixture
def own_accelerator() -> Iterator[None]:
    """Accelerate keeps the precision of a process; tests after this one have their own."""
    yield
    AcceleratorState._reset_state()


@pytest.mark.usefixtures("own_accelerator")
def test_a_trainer_updates_float32_parameters_by_them(tmp_path):
    """As on a GPU, on a CPU; where a GPU is missing, training in bf16 is by autocast."""

    def trained(by_half: bool) -> tuple[list[float], torch.Tensor]:
        settings = TrainingConfig(steps=12, batching=FixedSequences(8), micro_tokens=64, warmup=2, precision="bf16")
        module, data = module_of("modernbert"), MadeUpSequences(100, seed=1)
        accelerator, run = make_accelerator(settings, None, cpu=True), RunFolder(tmp_path)
        trainer = Trainer(module, data, data, settings, run, lambda weights, folder: None, accelerator)
        assert trainer.step.half is None
        trainer.step.half = HalfPrecision(module) if by_half else None
        with closing(trainer.steps()) as steps:
            losses = [float(next(steps)[0]) for _ in range(12)]
        return losses, torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    (expected, autocast), (found, half) = trained(by_half=False), trained(by_half=True)
    assert half.dtype == torch.float32
    assert found == pytest.approx(expected, rel=0.01)
    assert float((half - autocast).norm() / autocast.norm()) < 0.02
