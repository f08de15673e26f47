"""A device without float64, which none here is: the CPU is said to be one, and float64 inside the network refused."""

from __future__ import annotations

import pytest
import torch
from tiny_models import run_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import diffusionbert.inference.engine as engine_module
import diffusionbert.networks.remote as remote
from diffusionbert import load
from diffusionbert.model import Model
from diffusionbert.networks.remote import Remote, has_float64, working_device
from diffusionbert.training import run
from diffusionbert.training.config import TrainingConfig

MPS = torch.device("mps")


class WithoutFloat64(TorchDispatchMode):
    """Refuses float64, as MPS does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, found)):
            if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64:
                raise TypeError("MPS does not support float64")
        return found


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Makes the CPU a device without float64, and lists what is called on it."""
    called = []

    def run_there(function, *arguments, **options):
        called.append(getattr(function, "__name__", type(function).__name__))
        with WithoutFloat64():
            return function(*arguments, **options)

    monkeypatch.setattr(engine_module, "has_float64", lambda device: False)
    monkeypatch.setattr(remote, "_run", run_there)
    return called


def answers(model: Model) -> dict[str, object]:
    masked = model.engine.config.objective.generates_on_masks
    texts = model.generate("the king", num_return_sequences=3, length=9, steps=6, seed=1)
    found: dict[str, object] = {"generate": texts}
    if masked:
        found["fill"] = model.fill("the [MASK] saw a [MASK] .", seed=1)
        found["rewrite"] = model.rewrite("the king saw a river today .", 0.5, seed=1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "decoder", "vectors"])
def test_texts_and_scores_are_those_of_a_device_with_float64(calls, monkeypatch, kind):
    there = load(run_of(kind), device="cpu")
    assert isinstance(there.engine.network, Remote)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "has_float64", has_float64)
        here = load(run_of(kind), device="cpu")
    assert not isinstance(here.engine.network, Remote)
    assert answers(there) == answers(here)
    assert calls
    if kind != "vectors":
        mine, theirs = (each.score(["the king saw a river ."], precision=0.5)[0] for each in (there, here))
        assert mine.nats == pytest.approx(theirs.nats, abs=1e-4)


def test_a_remote_network_is_saved_as_any_other(calls, tmp_path):
    model = load(run_of("layers"), device="cpu")
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "beside.safetensors").exists()
    assert model.engine.num_parameters == load(tmp_path / "model", device="cpu").engine.num_parameters


def test_only_what_has_float64_computes_around_a_network():
    assert working_device(MPS) == torch.device("cpu")
    assert working_device(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_training_takes_the_cpu_where_the_accelerator_has_no_float64(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: MPS)
    assert run.make_accelerator(TrainingConfig(), None).device.type == "cpu"
