"""The log of a run: one JSON object per line, each with `event`, `step` and `time` (docs/formats.md).

    run           once, at the start: what is trained, and what the numbers in the log mean
    train         every `log_every` steps: the mean loss since the last such row
    validation    every `validate_every` steps: the likelihood of held-out text, or the loss of an objective without one

`pd.read_json("log.jsonl", lines=True)` reads it. Rows of format 1, which had no `event`, are converted when read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from diffusionbert.objectives.base import Likelihood
from diffusionbert.storage.limits import read_text
from diffusionbert.storage.schema import Component, from_json, to_json
from diffusionbert.training.config import RunConfig

LOG_FORMAT = 2
"""Increased when rows or their meaning change."""


@dataclass(frozen=True)
class RunEvent:
    """The first row: what is trained."""

    event: ClassVar[str] = "run"
    step: int
    time: float
    format: int = LOG_FORMAT
    unit: str = "nats per token"
    """The unit of losses and validations."""
    kind: Likelihood = Likelihood.NONE
    """The kind of the validated likelihood."""
    quantity: str | None = None
    """`strict`, `paper`, `nll`, …"""
    objective: str | None = None
    schedule: str | None = None
    diffusion_steps: int | None = None
    """T; None in continuous time."""
    time_conditioning: str | None = None
    backbone: str | None = None
    start: str | None = None
    parameters: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class TrainEvent:
    """Training since the last such row."""

    event: ClassVar[str] = "train"
    step: int
    time: float | None
    loss: float
    """The mean over tokens."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None
    epoch: int | None = None
    tokens_seen: int | None = None


@dataclass(frozen=True)
class ValidationEvent:
    """A validation on held-out text."""

    event: ClassVar[str] = "validation"
    step: int
    time: float | None
    kind: Likelihood
    standard_error: float
    """The standard error of nats (or loss) per token, over sentences."""
    nats_per_token: float | None = None
    perplexity_per_token: float | None = None
    loss_per_token: float | None = None
    """Replaces nats if the objective has no likelihood."""


Event = RunEvent | TrainEvent | ValidationEvent
EventT = TypeVar("EventT", RunEvent, TrainEvent, ValidationEvent)
_EVENTS: dict[str, type[Event]] = {cls.event: cls for cls in (RunEvent, TrainEvent, ValidationEvent)}


def row(event: Event) -> dict[str, int | float | str]:
    """The fields of a row, except unknown ones."""
    plain = {name: value for name, value in to_json(event).items() if value is not None}
    return {"event": event.event, **plain}


def append(log: Path, event: Event) -> None:
    """Adds a row."""
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row(event)) + "\n")


def read_log(log: Path) -> list[Event]:
    """Reads all rows except incomplete lines, which a killed process leaves behind, and rows of unknown events."""
    found = []
    for number, line in enumerate(read_text(log).splitlines() if log.exists() else (), start=1):
        try:
            plain = json.loads(line)
        except (ValueError, RecursionError):
            continue
        plain = _from_format_1(plain) if isinstance(plain, dict) and "event" not in plain else plain
        cls = _EVENTS.get(str(plain.get("event"))) if isinstance(plain, dict) else None
        if cls is not None:
            known = {field.name: plain[field.name] for field in fields(cls) if plain.get(field.name) is not None}
            found.append(from_json({"time": None, **known}, cls, f"{log}:{number}"))
    return found


def events_of(log: Path, kind: type[EventT]) -> list[EventT]:
    """Reads the rows of one kind of event."""
    return [event for event in read_log(log) if isinstance(event, kind)]


def remove_after(log: Path, step: int) -> None:
    """Removes the rows after the step that a run resumes from."""
    if not log.exists():
        return
    kept = [line for line in read_text(log).splitlines() if _step(line) <= step]
    temporary = log.with_name(log.name + ".unfinished")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(log)


def _from_format_1(plain: Mapping[str, object]) -> dict[str, object]:
    """Converts a row of format 1, in which the keys imply the event."""
    if "validation_standard_error" in plain:
        row = {name.removeprefix("validation_"): value for name, value in plain.items()}
        return {"event": "validation", "kind": row.pop("likelihood", None), **row}
    if "loss" in plain:
        return {"event": "train", **plain, "tokens_seen": plain.get("tokens")}
    return {}


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # incomplete: the process was killed
        return math.inf


@dataclass(frozen=True)
class ValidationResult:
    """Nats (or loss) per token of held-out text."""

    nats_per_token: float
    standard_error: float
    kind: Likelihood

    @classmethod
    def of(cls, nats: Tensor, tokens: Tensor, kind: Likelihood) -> ValidationResult:
        """The ratio Σ nats / Σ tokens over all sequences, with its standard error."""
        mean = float(nats.sum() / tokens.sum())
        error = math.sqrt(float((nats - mean * tokens).square().sum())) / float(tokens.sum())
        return cls(mean, error, kind)

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(min(self.nats_per_token, 700.0))

    def event(self, step: int, time: float) -> ValidationEvent:
        """The log row, in which a loss is not called nats."""
        if self.kind is Likelihood.NONE:
            return ValidationEvent(step, time, self.kind, self.standard_error, loss_per_token=self.nats_per_token)
        return ValidationEvent(step, time, self.kind, self.standard_error, self.nats_per_token, self.perplexity)

    def summary(self) -> str:
        """The result in one line."""
        figure = f"{self.nats_per_token:.4f} ± {1.96 * self.standard_error:.4f}"
        if self.kind is Likelihood.NONE:
            return f"held-out loss {figure} per token (no likelihood)"
        perplexity = f"{self.perplexity:.1f}" if self.perplexity < 1e9 else f"{self.perplexity:.1e}"
        return f"held-out {self.kind.value} {figure} nats per token (perplexity {perplexity})"


# ---- model description ----------------------------------------------------------------------------------------------

PRETRAINED, SCRATCH = "pretrained", "scratch"


@dataclass(frozen=True)
class ModelDescription:
    """What a log and a result say about a model; None where something is unknown or does not apply."""

    objective: Component | None = None
    schedule: Component | None = None
    diffusion_steps: int | None = None
    """T of the training objective; None in continuous time."""
    quantity: str | None = None
    """The quantity that was trained, if the objective has several."""
    time_conditioning: str | None = None
    backbone: str | None = None
    """The model type of its `PreTrainedModel`, for example bert."""
    start: str | None = None
    """What training started from: `pretrained` or `scratch`."""
    parameters: int | None = None
    seed: int | None = None
    """The seed of training."""
    training_steps: int | None = None
    """The planned number of steps; the weights may be from an earlier one."""
    tokens_seen: int | None = None
    """The number of tokens trained on up to these weights, including repeated ones but not pretraining."""
    pretraining_tokens: int | None = None
    """The number of tokens of all training before this run; 0 from scratch."""
    epochs: float | None = None
    """How often the training text was read up to these weights."""
    optimizer: str | None = None
    learning_rate: float | None = None
    ema: float | None = None


def describe(config: RunConfig, network: nn.Module) -> ModelDescription:
    """Describes the model of a configuration."""
    objective, backbone = config.objective, getattr(network, "backbone", None)
    return ModelDescription(
        objective=Component.of(objective),
        schedule=None if objective.schedule is None else Component.of(objective.schedule),
        diffusion_steps=objective.num_steps,
        quantity=None if objective.quantity is None else str(objective.quantity.value),
        time_conditioning=config.time.value,
        backbone=None if backbone is None else str(backbone.config.model_type),
        start=SCRATCH if config.backbone.pretrained is None else PRETRAINED,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        seed=config.training.seed,
        training_steps=config.training.steps,
        optimizer=config.training.optimizer,
        learning_rate=config.training.learning_rate,
        ema=config.training.ema,
    )
