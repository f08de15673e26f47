"""Which weights are decayed, which learning rate and precision a step has, and into which blocks a network falls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, get_scheduler

from diffusionbert.training.config import TrainingConfig


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The parts of a Hugging Face model that are never split, less those that share weights with others."""
    names = {
        name
        for model in module.modules()
        if isinstance(model, PreTrainedModel)
        for name in model._no_split_modules or ()
    }
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    return [
        block
        for block in module.modules()
        if type(block).__name__ in names and all(uses[id(parameter)] == 1 for parameter in block.parameters())
    ]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Biases and norms are not decayed."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def new_optimiser(module: nn.Module, settings: TrainingConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, in one kernel where there is one."""
    groups = parameter_groups(module, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=device.type == "cuda")


def low_precision(settings: TrainingConfig) -> torch.dtype | None:
    """In which most of a network is computed; None if all of it is in full precision."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision)


def learning_rate(settings: TrainingConfig) -> Callable[[int], float]:
    """The learning rate at a step, as transformers' schedules have it, with no state to save."""
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(
        settings.decay, stand_in, num_warmup_steps=settings.warmup, num_training_steps=settings.steps + 1
    )
    factor = schedule.lr_lambdas[0]
    return lambda step: settings.learning_rate * float(factor(step + 1))
