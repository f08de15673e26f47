"""What a log and a result say of a model: its objective, schedule, T, time conditioning, backbone, start and size."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from enum import Enum

from torch import nn

from diffusionbert.storage.component import Component
from diffusionbert.training.config import RunConfig

PRETRAINED, SCRATCH = "pretrained", "scratch"


@dataclass(frozen=True)
class ModelDescription:
    """A model in a few facts; None where one is unknown or does not apply."""

    objective: Component | None = None
    schedule: Component | None = None
    diffusion_steps: int | None = None
    """T of the training objective; None in continuous time."""
    quantity: str | None = None
    """The quantity that was trained, where the objective has several."""
    time_conditioning: str | None = None
    backbone: str | None = None
    """The model type of its `PreTrainedModel`, for example bert."""
    start: str | None = None
    """What training started from: `pretrained` or `scratch`."""
    parameters: int | None = None
    seed: int | None = None
    """Of training."""
    training_steps: int | None = None
    """Planned; the weights may be those of an earlier step."""
    tokens_seen: int | None = None
    """Tokens of training up to these weights, repeated ones included; pretraining is not counted."""


def describe(config: RunConfig, network: nn.Module) -> ModelDescription:
    """Describes the model of a configuration."""
    objective, backbone = config.objective, getattr(network, "backbone", None)
    schedule, quantity = getattr(objective, "schedule", None), getattr(objective, "quantity", None)
    return ModelDescription(
        objective=Component.of(objective),
        schedule=Component.of(schedule) if is_dataclass(schedule) else None,
        diffusion_steps=getattr(objective, "num_steps", None),
        quantity=str(quantity.value) if isinstance(quantity, Enum) else None,
        time_conditioning=config.time.value,
        backbone=None if backbone is None else str(backbone.config.model_type),
        start=SCRATCH if config.backbone.pretrained is None else PRETRAINED,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        seed=config.training.seed,
        training_steps=config.training.steps,
    )
