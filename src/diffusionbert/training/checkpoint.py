"""Checkpoints: the tensors and the state that training resumes from exactly.

    step-00001000/
      weights.safetensors    the parameters
      optimizer.safetensors  the state of the optimizer
      ema.safetensors        the EMA of the parameters, if there is one
      state.json             format, training state, number of EMA updates, loss scale

With sharded parameters, all processes gather and one of them writes. This module knows nothing about the training loop.
Checkpoints of earlier versions, with optimiser.safetensors, averages.safetensors and standing.json, are still read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from diffusionbert.reporting import reason_of
from diffusionbert.storage.files import atomic_folder, load_tensors, read_json, save_tensors, write_json
from diffusionbert.storage.reader import StoredTensor, stored_tensors
from diffusionbert.storage.schema import from_json, to_json
from diffusionbert.training.batches import BatchPosition
from diffusionbert.training.optim import EMA, distributed_like, full_copy
from diffusionbert.training.run_folder import RunFolder

FORMAT = 1
"""The version of state.json."""


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


@dataclass(frozen=True)
class CheckpointHeader:
    """The contents of state.json."""

    state: TrainState
    num_ema_updates: int = 0
    loss_scale: dict[str, int | float] | None = None
    """The state of the `GradScaler`, in half precision."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"`format` must be {FORMAT}, got {self.format}; a newer version of diffusionbert wrote it")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that training depends on at one step."""

    header: CheckpointHeader
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    ema: dict[str, Tensor] | None

    @classmethod
    def of(
        cls, module: nn.Module, optimizer: Optimizer, ema: EMA | None, scaler: GradScaler | None, state: TrainState
    ) -> Checkpoint:
        """Gathers the current state; raises FloatingPointError if a parameter is infinite or NaN."""
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
        scale = scaler.state_dict() if scaler and scaler.is_enabled() else None
        scale = scale and {name.removeprefix("_"): value for name, value in scale.items()}
        header = CheckpointHeader(state, ema.num_updates if ema else 0, scale)
        return cls(header, weights, optimizer_state(optimizer, module), averages)

    def write(self, path: Path) -> None:
        """Writes the folder completely or not at all."""
        with atomic_folder(path) as folder:
            save_tensors(self.weights, folder / "weights.safetensors")
            save_tensors(self.optimizer, folder / "optimizer.safetensors")
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
            load_tensors(_optimizer_file(path)),
            load_tensors(ema) if header.num_ema_updates > 0 or ema.exists() else None,
        )

    def restore(self, module: nn.Module, optimizer: Optimizer, ema: EMA | None, scaler: GradScaler | None) -> None:
        """Sets parameters, optimizer, EMA and loss scale to those of the checkpoint."""
        if ema and self.ema is None:
            raise ValueError("the run was trained without EMA, which must start at the first step; leave out --ema")
        set_weights(module, self.weights)
        set_optimizer_state(optimizer, module, self.optimizer)
        if ema and self.ema is not None:
            ema.restore(self.ema, self.header.num_ema_updates)
        if scaler and (scale := self.header.loss_scale):
            scaler.load_state_dict({**scale, "_growth_tracker": scale["growth_tracker"]})


def newest_complete(run: RunFolder) -> tuple[Path, Checkpoint, str | None]:
    """The last checkpoint or, if it is damaged, the newest complete one; and a message about any damage."""
    damage: list[str] = []
    for path in run.resume_candidates():
        try:
            return path, Checkpoint.read(path), next(iter(damage), None)
        except ValueError as error:  # noqa: PERF203 - there are few checkpoints
            damage.append(str(error))
    if damage:
        raise ValueError(f"no checkpoint of {str(run.path)!r} is complete: {damage[0]}")
    raise ValueError(f"{str(run.path)!r} has no checkpoint to resume from; train in another --output")


def stored_weights(run: RunFolder) -> dict[str, StoredTensor]:
    """Types and shapes of the parameters in the newest readable checkpoint; empty if there is none."""
    for path in run.resume_candidates():
        with suppress(ValueError):
            return stored_tensors(path / "weights.safetensors")
    return {}


def weights_to_export(checkpoint: Path) -> dict[str, Tensor]:
    """The EMA of a checkpoint, if it has one; else its parameters."""
    ema = _ema_file(checkpoint)
    return load_tensors(ema if ema.exists() else checkpoint / "weights.safetensors")


def _optimizer_file(checkpoint: Path) -> Path:
    earlier = checkpoint / "optimiser.safetensors"
    return earlier if earlier.exists() else checkpoint / "optimizer.safetensors"


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
    """Converts standing.json, of earlier versions, to state.json."""
    if not isinstance(plain, dict) or "num_averaged" not in plain:
        return plain
    state = {name: value for name, value in plain.items() if name not in ("num_averaged", "scaler")}
    scale = plain.get("scaler") or None
    if isinstance(scale, dict):
        scale = {name.removeprefix("_"): value for name, value in scale.items()}
    return {"state": state, "num_ema_updates": plain["num_averaged"], "loss_scale": scale}


# ---- tensors by name ------------------------------------------------------------------------------------------------


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Full copies of all parameters by name; tied ones appear once."""
    return {name: full_copy(parameter) for name, parameter in _parameters(module).items()}


def set_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Sets all parameters; the names must match."""
    parameters = _parameters(module)
    missing, unknown = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing or unknown:
        raise ValueError(
            f"the parameters do not fit the network: {len(missing)} missing, {len(unknown)} unknown, first "
            f"{(missing + unknown)[0]!r}; use the settings they were saved with"
        )
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape or not weights[name].is_floating_point():
            raise ValueError(
                f"the parameters do not fit the network: {name!r} must be {list(parameter.shape)}, got "
                f"{list(weights[name].shape)} of {weights[name].dtype}; restore the checkpoint"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(distributed_like(weights[name], parameter))


def optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the optimizer, named parameter/kind."""
    return {
        f"{name}/{kind}": full_copy(torch.as_tensor(value))
        for name, parameter in _parameters(module).items()
        for kind, value in optimizer.state[parameter].items()
    }


def set_optimizer_state(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Sets the tensors of the optimizer."""
    parameters = _parameters(module)
    # Counters are single numbers: on the parameter's device if the optimizer is fused, else on the CPU.
    is_fused = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    for key, value in state.items():
        name, _, kind = key.rpartition("/")
        if (parameter := parameters.get(name)) is not None:
            if value.shape and value.shape != parameter.shape:
                raise ValueError(
                    f"the optimizer's state does not fit the network: {key!r} must be {list(parameter.shape)}, got "
                    f"{list(value.shape)}; restore the checkpoint"
                )
            counter = value.to(parameter.device) if is_fused else value
            optimizer.state[parameter][kind] = distributed_like(value, parameter) if value.shape else counter


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, without the prefixes of DDP and torch.compile."""
    return {
        ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod")): parameter
        for name, parameter in module.named_parameters()
    }
