"""The training state without tensors, validation results, and means over the steps between two rows of the log."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from torch import Tensor

from diffusionbert.objectives.base import Likelihood
from diffusionbert.training.batches import BatchPosition
from diffusionbert.training.log import ValidationEvent


@dataclass(frozen=True)
class ValidationResult:
    """Nats (or loss) per token of held-out text."""

    nats_per_token: float
    standard_error: float
    kind: Likelihood

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(min(self.nats_per_token, 700.0))

    def event(self, step: int, time: float) -> ValidationEvent:
        """The row of the log, in which a loss is not called nats."""
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


@dataclass(frozen=True)
class TrainState:
    """The training state without tensors."""

    step: int = 0
    position: BatchPosition = BatchPosition()
    tokens: int = 0
    """Tokens trained on so far."""
    best: float | None = None
    """The best validation so far, in nats per token."""
    best_step: int = 0
    best_tokens: int = 0
    """Tokens trained on up to the best validation."""
    validations_since_best: int = 0

    @property
    def is_validated(self) -> bool:
        """Whether trained parameters have been validated, or there are none yet."""
        return self.step == 0 or self.best_step > 0 or self.validations_since_best > 0


def validation_result(nats: Tensor, tokens: Tensor, kind: Likelihood) -> ValidationResult:
    """The ratio Σ nats / Σ tokens over all sequences, with its standard error."""
    mean = float(nats.sum() / tokens.sum())
    residual = nats - mean * tokens
    error = math.sqrt(float(residual.square().sum())) / float(tokens.sum())
    return ValidationResult(mean, error, kind)


class LogInterval:
    """The mean loss and the speed of the steps between two rows of the log."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.steps = 0
        self.tokens = 0
        self.start_time = time.perf_counter()

    def add(self, loss: Tensor, tokens: int) -> None:
        """Adds a step."""
        self.total = loss if self.total is None else self.total + loss
        self.steps += 1
        self.tokens += tokens

    @property
    def loss(self) -> Tensor:
        assert self.total is not None
        return self.total / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (time.perf_counter() - self.start_time)
