"""The state of a run beside its tensors, and the result of a validation."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diffusionbert.objectives.base import Likelihood
from diffusionbert.training.batches import Position
from diffusionbert.training.log import ValidationEvent


@dataclass(frozen=True)
class Score:
    """The result of a validation."""

    nats_per_token: float
    standard_error: float
    kind: Likelihood

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(min(self.nats_per_token, 700.0))

    def event(self, step: int, time: float) -> ValidationEvent:
        """The row of the log; a loss is not called nats."""
        if self.kind is Likelihood.NONE:
            return ValidationEvent(step, time, self.kind, self.standard_error, loss_per_token=self.nats_per_token)
        return ValidationEvent(step, time, self.kind, self.standard_error, self.nats_per_token, self.perplexity)

    def summary(self) -> str:
        """One line."""
        figure = f"{self.nats_per_token:.4f} ± {1.96 * self.standard_error:.4f}"
        if self.kind is Likelihood.NONE:
            return f"held-out loss {figure} per token (no likelihood)"
        perplexity = f"{self.perplexity:.1f}" if self.perplexity < 1e9 else f"{self.perplexity:.1e}"
        return f"held-out {self.kind.value} {figure} nats per token (perplexity {perplexity})"


@dataclass(frozen=True)
class TrainState:
    """The state of a run beside its tensors."""

    step: int = 0
    position: Position = Position()
    tokens: int = 0
    best: float | None = None
    """The best validation so far, in nats per token."""
    best_step: int = 0
    best_tokens: int = 0
    """Tokens seen up to the best validation."""
    validations_since_best: int = 0

    @property
    def is_validated(self) -> bool:
        """Whether anything trained has been validated, or nothing is trained yet."""
        return self.step == 0 or self.best_step > 0 or self.validations_since_best > 0

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> TrainState:
        """Reads what `asdict` returned."""
        return cls(**plain | {"position": Position(**plain["position"])})


def score_of(nats: Tensor, tokens: Tensor, kind: Likelihood) -> Score:
    """Nats per token over all sentences, with the standard error of that ratio."""
    mean = float(nats.sum() / tokens.sum())
    residual = nats - mean * tokens
    error = math.sqrt(float(residual.square().sum())) / float(tokens.sum())
    return Score(mean, error, kind)


class Window:
    """The steps since the last row of the log."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.steps = 0
        self.tokens = 0
        self.started = time.perf_counter()

    def add(self, loss: Tensor, tokens: int) -> None:
        """Adds a step."""
        self.total = loss if self.total is None else self.total + loss
        self.steps += 1
        self.tokens += tokens

    @property
    def loss(self) -> Tensor:
        """The mean over the steps."""
        assert self.total is not None
        return self.total / self.steps

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / (time.perf_counter() - self.started)
