"""What a run knows and notes of itself: where it stands, what a validation found, what its log says."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from diffusionbert.batches import Position
from diffusionbert.method import Likelihood


@dataclass(frozen=True)
class Score:
    """What a validation found."""

    nats_per_token: float
    standard_error: float
    kind: Likelihood

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(min(self.nats_per_token, 700.0))

    def to_json(self) -> dict[str, float | str]:
        """What the log keeps; a loss is not called nats."""
        error = {"validation_standard_error": self.standard_error, "likelihood": self.kind.value}
        if self.kind is Likelihood.NONE:
            return {"validation_loss_per_token": self.nats_per_token, **error}
        return {
            "validation_nats_per_token": self.nats_per_token,
            "validation_perplexity_per_token": self.perplexity,
            **error,
        }

    def summary(self) -> str:
        """One line."""
        figure = f"{self.nats_per_token:.4f} ± {1.96 * self.standard_error:.4f}"
        if self.kind is Likelihood.NONE:
            return f"loss on held-out text {figure} a token (there is no likelihood)"
        perplexity = f"{self.perplexity:.1f}" if self.perplexity < 1e9 else f"{self.perplexity:.1e}"
        return f"{self.kind.value} on held-out text {figure} nats a token (perplexity {perplexity})"


@dataclass(frozen=True)
class Standing:
    """Where a run stands, beside its tensors."""

    step: int = 0
    position: Position = Position()
    tokens: int = 0
    best: float | None = None
    """The best validation so far, in nats per token."""
    best_step: int = 0
    validations_since_best: int = 0

    @property
    def is_validated(self) -> bool:
        """Whether anything has been validated since the first step: before, the best would be what was not trained."""
        return self.step == 0 or self.best_step > 0 or self.validations_since_best > 0

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Standing:
        """Reads what `asdict` gave."""
        return cls(**plain | {"position": Position(**plain["position"])})


def score_of(nats: Tensor, tokens: Tensor, kind: Likelihood) -> Score:
    """Nats a token over all sentences, with the standard error of that ratio."""
    mean = float(nats.sum() / tokens.sum())
    residual = nats - mean * tokens
    error = math.sqrt(float(residual.square().sum())) / float(tokens.sum())
    return Score(mean, error, kind)


class Window:
    """What happened since the last line of the log."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.steps = 0
        self.tokens = 0
        self.started = time.perf_counter()

    def add(self, loss: Tensor, tokens: int) -> None:
        """Notes a step."""
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
        """Tokens a second."""
        return self.tokens / (time.perf_counter() - self.started)


def forget_after(log: Path, step: int) -> None:
    """Drops what a run logged after the checkpoint it goes back to."""
    if not log.exists():
        return
    kept = [line for line in log.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    temporary = log.with_name(log.name + ".unfinished")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(log)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # cut off by a kill
        return math.inf
