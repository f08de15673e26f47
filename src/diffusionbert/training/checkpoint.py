"""Checkpoints: the tensors and the state from which training resumes exactly.

    step-00001000/
      weights.safetensors    the parameters
      optimiser.safetensors  the state of the optimiser
      ema.safetensors        the EMA of the parameters, if there is one
      state.json             format, training state, number of EMA updates, loss scale

With sharded parameters all processes gather, and one of them writes. Does not depend on the training loop. Checkpoints
of earlier versions, with averages.safetensors and standing.json, are still read.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.reporting import reason_of
from diffusionbert.storage.files import (
    atomic_folder,
    load_tensors,
    read_json,
    save_tensors,
    write_json,
)
from diffusionbert.storage.schema import from_json, to_json
from diffusionbert.training.batches import BatchPosition
from diffusionbert.training.ema import EMA
from diffusionbert.training.log import ValidationEvent
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.tensors import optimiser_state, set_optimiser_state, set_weights, weights_of

FORMAT = 1
"""The version of state.json."""


@dataclass(frozen=True)
class LossScale:
    """The state of a `GradScaler`: the factor of the loss in half precision, and the rule by which it changes."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int
    """Steps without overflow since the factor last changed."""

    @classmethod
    def of(cls, scaler: GradScaler) -> LossScale:
        return cls(**{name.removeprefix("_"): value for name, value in scaler.state_dict().items()})

    def restore(self, scaler: GradScaler) -> None:
        """Sets the state of a scaler to this one."""
        plain = to_json(self)
        scaler.load_state_dict(plain | {"_growth_tracker": plain.pop("growth_tracker")})


@dataclass(frozen=True)
class CheckpointHeader:
    """The contents of state.json."""

    state: TrainState
    num_ema_updates: int = 0
    loss_scale: LossScale | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"`format` must be {FORMAT}, got {self.format}; a newer version of diffusionbert wrote it")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All that training depends on at one step."""

    header: CheckpointHeader
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    ema: dict[str, Tensor] | None

    @property
    def state(self) -> TrainState:
        return self.header.state

    @classmethod
    def of(
        cls,
        module: TrainingModule,
        optimiser: Optimizer,
        ema: EMA | None,
        scaler: GradScaler | None,
        state: TrainState,
    ) -> Checkpoint:
        """Gathers the present state; raises FloatingPointError if a parameter is infinite or NaN."""
        weights = weights_of(module)
        if not all(bool(weight.isfinite().all()) for weight in weights.values()):
            raise FloatingPointError(
                f"the parameters are not finite at step {state.step}, but the last checkpoint is good: "
                "resume with a lower learning rate or in bf16"
            )
        averages: dict[str, Tensor] | None = None
        if ema:
            with ema.applied_to(module):
                averages = weights_of(module)
        loss_scale = LossScale.of(scaler) if scaler and scaler.is_enabled() else None
        header = CheckpointHeader(state, ema.num_updates if ema else 0, loss_scale)
        return cls(header, weights, optimiser_state(optimiser, module), averages)

    def write(self, path: Path) -> None:
        """Writes the folder completely or not at all."""
        with atomic_folder(path) as folder:
            save_tensors(self.weights, folder / "weights.safetensors")
            save_tensors(self.optimiser, folder / "optimiser.safetensors")
            if self.ema is not None:
                save_tensors(self.ema, folder / "ema.safetensors")
            write_json(folder / "state.json", to_json(self.header))

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Reads the folder completely; raises ValueError if a file is missing or damaged."""
        if not path.is_dir():
            raise ValueError(f"the checkpoint {str(path)!r} is missing; restore it, or train in another --output")
        header, ema = _read_header(path), _ema_file(path)
        return cls(
            header,
            load_tensors(path / "weights.safetensors"),
            load_tensors(path / "optimiser.safetensors"),
            load_tensors(ema) if header.num_ema_updates > 0 or ema.exists() else None,
        )

    def restore(self, module: TrainingModule, optimiser: Optimizer, ema: EMA | None, scaler: GradScaler | None) -> None:
        """Sets parameters, optimiser, EMA and loss scale to those of the checkpoint."""
        if ema and self.ema is None:
            raise ValueError("the run was trained without EMA, which must start at the first step; leave out --ema")
        set_weights(module, self.weights)
        set_optimiser_state(optimiser, module, self.optimiser)
        if ema and self.ema is not None:
            ema.restore(self.ema, self.header.num_ema_updates)
        if scaler and self.header.loss_scale:
            self.header.loss_scale.restore(scaler)


def newest_complete(run: RunFolder) -> tuple[Path, Checkpoint, str | None]:
    """The last checkpoint or, if it is damaged, the newest complete one; and a message about the damage."""
    damage: list[str] = []
    for path in run.resume_candidates():
        try:
            return path, Checkpoint.read(path), next(iter(damage), None)
        except ValueError as error:  # noqa: PERF203 - there are few checkpoints
            damage.append(str(error))
    if damage:
        raise ValueError(f"no checkpoint of {str(run.path)!r} is complete: {damage[0]}")
    raise ValueError(f"{str(run.path)!r} has no checkpoint to resume from; start it without --resume")


def weights_to_export(checkpoint: Path) -> dict[str, Tensor]:
    """The EMA of a checkpoint, if it has one; else its parameters."""
    ema = _ema_file(checkpoint)
    return load_tensors(ema if ema.exists() else checkpoint / "weights.safetensors")


def _ema_file(checkpoint: Path) -> Path:
    earlier = checkpoint / "averages.safetensors"
    return earlier if earlier.exists() else checkpoint / "ema.safetensors"


def _read_header(checkpoint: Path) -> CheckpointHeader:
    file, earlier = checkpoint / "state.json", checkpoint / "standing.json"
    is_earlier = earlier.exists() and not file.exists()
    file = earlier if is_earlier else file
    plain = read_json(file)
    try:
        return from_json(_upgraded(plain) if is_earlier else plain, CheckpointHeader, file.name)
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is damaged ({reason_of(error)}); restore it") from None


def _upgraded(plain: Any) -> Any:
    """The contents of standing.json, of earlier versions, as those of state.json."""
    if not isinstance(plain, dict) or "num_averaged" not in plain:
        return plain
    state = {name: value for name, value in plain.items() if name not in ("num_averaged", "scaler")}
    scale = plain.get("scaler") or None
    if isinstance(scale, dict):
        scale = {name.removeprefix("_"): value for name, value in scale.items()}
    return {"state": state, "num_ema_updates": plain["num_averaged"], "loss_scale": scale}


# ---- state ----------------------------------------------------------------------------------------------------------
#
# The training state without tensors, validation results, and means over the steps between two rows of the log.


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
