"""A training step: its fast paths against the simple one, and what they cost in calls and compilations."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from training_worker import MadeUpSequences

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Linear, Mean, Spindle
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.time_sampling import Bell
from diffusionbert.diffusion.tokens import DensePrediction, TokenStatistics
from diffusionbert.networks import base
from diffusionbert.networks.loading import NewBert, NewModernBert
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import ObjectiveConfig, TrainingModule
from diffusionbert.objectives.continuous_time import ContinuousTimeConfig
from diffusionbert.objectives.discrete_time import DiscreteTime, DiscreteTimeConfig, Quantity
from diffusionbert.training import step
from diffusionbert.training.batches import FixedSequences
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.run import make_accelerator
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.step import _aligned, ahead, compile_cache, compile_module
from diffusionbert.training.trainer import Trainer

SIZE = 50
STATISTICS = TokenStatistics(3, 0, torch.arange(SIZE) >= 5, (), torch.arange(SIZE) + 1)
SENTENCE = Spindle(0.3, Mean.SENTENCE, floor=0.05)
OBJECTIVES: dict[str, ObjectiveConfig] = {
    "linear": DiscreteTimeConfig(num_steps=16),
    "hybrid": DiscreteTimeConfig(num_steps=16, hybrid=0.01, time_sampling=Bell(0.8)),
    "spindle": DiscreteTimeConfig(Spindle(0.3), num_steps=16),
    "sentence mean": DiscreteTimeConfig(SENTENCE, num_steps=16),
    "paper's quantity": DiscreteTimeConfig(SENTENCE, num_steps=16, quantity=Quantity.PAPER),
    "complementary": DiscreteTimeConfig(num_steps=16, complementary=True),
    "continuous": ContinuousTimeConfig(),
    "continuous spindle": ContinuousTimeConfig(Spindle(0.3)),
    **{name: ObjectiveConfig.registry.get(name)() for name in ("masked-lm", "cmlm", "order-agnostic")},
}


def bert() -> transformers.PreTrainedModel:
    return NewBert(2, 16, 2, dropout=0.0).build(SIZE, 40, 0, causal=False)


SMALL = {
    "vocab_size": SIZE, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip


def roberta() -> transformers.PreTrainedModel:
    config = transformers.RobertaConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.RobertaForMaskedLM(config)


def modernbert() -> transformers.PreTrainedModel:
    special = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    # Layers differ: some attend to all positions, some to their neighbors.
    config = transformers.ModernBertConfig(**SMALL | special | {"num_hidden_layers": 4})
    return transformers.ModernBertForMaskedLM(config)


def module_of(objective: ObjectiveConfig, backbone=bert, time: TimeEmbedding = TimeEmbedding.NONE) -> TrainingModule:
    torch.manual_seed(0)
    config = RunConfig(DataConfig("made up", max_length=30), time=time, objective=objective)
    return config.make_module(STATISTICS, backbone()).train()


def batch_of(size: int, length: int) -> Batch:
    """Random sequences between `[CLS]` and `[SEP]`; the first is shorter."""
    tokens = torch.randint(5, SIZE, (size, length), generator=torch.Generator().manual_seed(length))
    tokens[:, 0], tokens[:, -1] = 1, 2
    tokens[0, -2], tokens[0, -1] = 2, 0
    return Noise(0).stratify(Batch.of(tokens, tokens >= 5, tokens > 0))


def loss_and_gradient(module: TrainingModule, batch: Batch, drawn=None) -> tuple[torch.Tensor, torch.Tensor]:
    module.zero_grad()
    loss = module(batch, Noise(1, 7), torch.tensor(10.0), drawn)
    loss.backward()
    gradients = [weight.grad.flatten() for weight in module.parameters() if weight.grad is not None]
    return loss.detach(), torch.cat(gradients)


# ---- shapes that do not depend on what is drawn ---------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("time", [TimeEmbedding.NONE, TimeEmbedding.PREFIX, TimeEmbedding.LAYERS])
def test_fixed_targets_change_neither_loss_nor_gradient(name, time):
    if time is not TimeEmbedding.NONE and not OBJECTIVES[name].takes_time:
        pytest.skip("a time-agnostic objective")
    module, batch = module_of(OBJECTIVES[name], time=time), batch_of(5, 12)
    assert module.objective.is_capturable
    expected, found = (loss_and_gradient(module, replace(batch, has_fixed_targets=fixed)) for fixed in (False, True))
    assert bool(found[1].isfinite().all())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sundae", "gaussian", "learned-schedule"])
def test_objectives_whose_shapes_depend_on_draws_say_so(name):
    assert not module_of(ObjectiveConfig.registry.get(name)()).objective.is_capturable


@pytest.mark.parametrize("name", ["linear", "spindle", "continuous", "complementary"])
def test_what_is_drawn_ahead_is_what_the_loss_draws(name):
    module, batch = module_of(OBJECTIVES[name]), batch_of(4, 10)
    drawn = module.objective.draw(batch, Noise(1, 7))
    assert drawn is not None
    expected, found = loss_and_gradient(module, batch), loss_and_gradient(module, batch, drawn)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_an_own_loss_is_never_bypassed_by_draws_ahead():
    class Half(DiscreteTime):
        def loss(self, network, x0, noise):
            return super().loss(network, x0, noise) / 2

    objective = module_of(OBJECTIVES["linear"]).objective
    assert objective.draws_ahead
    assert not Half(objective.process, objective.grid).draws_ahead


@pytest.mark.parametrize("name", ["linear", "hybrid", "sentence mean"])
def test_an_uncompiled_head_is_computed_once(name, monkeypatch):
    module, calls = module_of(OBJECTIVES[name]), []
    computed = base.TargetHead.log_probs
    monkeypatch.setattr(base.TargetHead, "log_probs", lambda *inputs: calls.append(1) or computed(*inputs))
    loss_and_gradient(module, batch_of(4, 10))
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["linear", "hybrid", "spindle"])
def test_a_compiled_head_is_reduced_once(name):
    module, calls = module_of(OBJECTIVES[name]), []
    module.network._head._reduce = lambda *inputs: calls.append(1) or base._reduced(*inputs)
    loss_and_gradient(module, batch_of(4, 10))
    assert len(calls) == 1


def test_noise_does_not_depend_on_padding():
    module, batch = module_of(OBJECTIVES["linear"]), batch_of(4, 10)
    aligned = _aligned(batch, max_length=39, pad_id=0)
    assert aligned.tokens.shape == (4, 16)
    assert _aligned(batch, max_length=13, pad_id=0).tokens.shape == (4, 13)
    assert _aligned(aligned, max_length=39, pad_id=0) is aligned
    assert not aligned.attention_mask[:, 10:].any()
    torch.testing.assert_close(
        loss_and_gradient(module, aligned), loss_and_gradient(module, batch), rtol=1e-5, atol=1e-6
    )


# ---- log-probabilities in parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "spindle", "sentence mean", "continuous spindle", "masked-lm"])
def test_parts_of_the_vocabulary_s_values_add_up_to_the_whole(name, monkeypatch):
    """No part is larger than allowed, and each is computed twice: forward, and again for its gradient."""
    module, batch, sizes = module_of(OBJECTIVES[name]), batch_of(6, 20), []
    expected = loss_and_gradient(module, batch)
    computed = base.TargetHead.log_probs

    def log_probs(self, backbone, hidden, allowed):
        sizes.append(len(hidden))
        return computed(self, backbone, hidden, allowed)

    monkeypatch.setattr(base.TargetHead, "log_probs", log_probs)
    module.network._head._values_at_once = 8 * SIZE
    found = loss_and_gradient(module, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(sizes) >= 4
    assert max(sizes) == 8


def test_a_prediction_in_parts_has_the_same_reductions():
    network, batch = module_of(OBJECTIVES["linear"]).network, batch_of(6, 20)
    targets = base.Targets.of(batch.editable)
    t, generator = batch.constant_times(0.5), torch.Generator().manual_seed(1)
    dense = DensePrediction(network(batch.tokens, batch.attention_mask, t, batch.editable))
    network._head._values_at_once = 7 * SIZE
    parts = base.predict(network, batch, t, targets)
    weights = torch.randn(6, SIZE, generator=generator).double()
    tokens = targets.take(batch.tokens)
    for mine, theirs in zip(
        parts.log_probs(tokens, [weights, -weights], targets.sequences),
        dense.log_probs(tokens, [weights, -weights], targets.sequences),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(parts.mean(weights[0]), dense.mean(weights[0]))
    torch.testing.assert_close(parts.dense(), dense.dense())


# ---- compilation ----------------------------------------------------------------------------------------------------


def compile_for_weights() -> None:
    """Objectives that reduce with other numbers of weights: in one process they share what is compiled."""
    torch._dynamo.reset()
    for name in ("spindle", "linear", "hybrid", "spindle"):
        module, batch = module_of(OBJECTIVES[name]), batch_of(6, 20)
        expected = loss_and_gradient(module, batch)
        module.network.compile_training("aot_eager")
        torch.testing.assert_close(loss_and_gradient(module, batch), expected, rtol=1e-4, atol=1e-5)


def compile_once(backbone) -> None:
    """One graph for the encoder, one for the head with its reductions, one for the weights of a spindle."""
    torch._dynamo.reset()
    module = module_of(OBJECTIVES["spindle"], backbone, TimeEmbedding.LAYERS)
    plain, counter = copy.deepcopy(module), CompileCounterWithBackend("aot_eager")
    module.network.compile_training(counter)
    module.objective.compile_training(counter)
    for size, length in ((4, 12), (6, 20), (3, 9)):
        batch = batch_of(size, length)
        found, expected = loss_and_gradient(module, batch), loss_and_gradient(plain, batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len([graph for graph in counter.graphs if len(graph.graph.nodes)]) == 3


def compile_packed_once() -> None:
    """One graph for the encoder, one for the head: numbers of rows and their width are not compiled in."""
    torch._dynamo.reset()
    module = module_of(OBJECTIVES["linear"], lambda: NewModernBert(2, 16, 2, 0.0).build(SIZE, 40, 0, causal=False))
    plain, counter = copy.deepcopy(module), CompileCounterWithBackend("aot_eager")
    module.network.compile_training(counter)
    for size, length in ((4, 12), (6, 20), (3, 9)):
        batch = batch_of(size, length)
        found, expected = loss_and_gradient(module, batch.packed()), loss_and_gradient(plain, batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len([graph for graph in counter.graphs if len(graph.graph.nodes)]) == 2


@pytest.mark.slow
def test_a_network_is_compiled_once_for_all_shapes():
    """In a process of its own, because the compiler cannot trace the shape checks that tests put into all functions."""
    code = "import test_step as test\nfor each in (test.roberta, test.modernbert): test.compile_once(each)"
    code += "\ntest.compile_packed_once()\ntest.compile_for_weights()"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_the_network_stays_as_it_is(monkeypatch):
    module, lines = module_of(OBJECTIVES["linear"]), []
    monkeypatch.setattr(step.shutil, "which", lambda name: None)
    monkeypatch.setattr(step.logger, "warning", lines.append)
    compile_module(module, sharded=False)
    assert lines == ["training without compilation, which needs a C++ compiler on this machine"]
    assert module.network.backbone.base_model._compiled_call_impl is None


# ---- batches ahead --------------------------------------------------------------------------------------------------


def test_items_are_computed_one_ahead_and_in_order():
    made: list[int] = []

    def items():
        for number in range(100):
            made.append(number)
            yield number

    with closing(ahead(items())) as found:
        assert [next(found) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(made) <= 7
    assert threading.active_count() < 20


def test_items_end_where_they_end():
    assert list(ahead(iter("abc"))) == ["a", "b", "c"]


def test_an_error_of_the_preparing_thread_reaches_the_loop():
    def items():
        yield 1
        raise OSError("the disk is gone")

    found = ahead(items())
    assert next(found) == 1
    with pytest.raises(OSError, match="gone"):
        next(found)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_captured_steps_train_the_same_model(name, tmp_path: Path):
    def trained(settings: TrainingConfig) -> tuple[torch.Tensor, int]:
        module = module_of(OBJECTIVES[name])
        accelerator, run = make_accelerator(settings, None), RunFolder(tmp_path)
        data = MadeUpSequences(100, seed=1)
        trainer = Trainer(module, data, data, settings, run, lambda weights, folder: None, accelerator)
        with closing(trainer.steps()) as steps:
            for _ in range(30):
                next(steps)
        return torch.cat([weight.detach().flatten() for weight in module.parameters()]), len(trainer.step.graphs)

    settings = TrainingConfig(steps=30, batching=FixedSequences(8), warmup=2, ema=0.9)
    captured, num_graphs = trained(settings)
    computed, none = trained(replace(settings, cuda_graphs=False))
    assert num_graphs > 0
    assert none == 0
    torch.testing.assert_close(captured, computed, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("schedule", [Linear(), Spindle(0.3)])
def test_capturing_is_for_gpus(schedule, tmp_path):
    """On a CPU a step runs as it is, whatever the settings say."""
    settings = TrainingConfig(steps=2, batching=FixedSequences(4))
    module = module_of(DiscreteTimeConfig(schedule, num_steps=4))
    data, accelerator = MadeUpSequences(20, seed=1), make_accelerator(settings, None, cpu=True)
    trainer = Trainer(module, data, data, settings, RunFolder(tmp_path), lambda weights, folder: None, accelerator)
    assert not trainer.step.can_capture
    assert trainer.step.stream is trainer.step.draw_stream is None


# ---- the compile cache ----------------------------------------------------------------------------------------------


def test_a_compile_cache_is_read_and_written_only_where_the_user_says(tmp_path, monkeypatch):
    file, read = tmp_path / "kernels.bin", []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda contents: read.append(contents) or True)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"kernels", None))
    with compile_cache(None):
        pass
    assert not list(tmp_path.iterdir())
    with compile_cache(file):
        assert read == []
    with compile_cache(file, is_written=False):
        assert read == [b"kernels"]
    assert file.read_bytes() == b"kernels"


def test_a_damaged_compile_cache_is_named_in_one_line(tmp_path, monkeypatch):
    file, lines = tmp_path / "kernels.bin", []
    file.write_bytes(b"of another version")
    monkeypatch.setattr(step.logger, "warning", lines.append)
    with compile_cache(file):
        pass
    assert len(lines) == 1
    assert "compiling anew" in lines[0]
