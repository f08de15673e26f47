"""What a checkpoint holds: how it is gathered from what is trained, written, read, and put back.

    step-00001000/
      weights.safetensors, optimiser.safetensors, averages.safetensors (if there are any)
      standing.json (with the scale of the loss, if there is one)

Under sharding all processes gather, and one writes. Knows nothing of the loop.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from diffusionbert.objectives.base import TrainingModule
from diffusionbert.reporting import reason_of
from diffusionbert.storage.files import (
    atomic_folder,
    load_tensors,
    read_json,
    save_tensors,
    write_json,
)
from diffusionbert.training.ema import EMA
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.state import TrainState
from diffusionbert.training.tensors import optimiser_state, set_optimiser_state, set_weights, weights_of

_TENSORS = "weights", "optimiser", "averages"


@dataclass(frozen=True, eq=False)
class Saved:
    """One checkpoint."""

    state: TrainState
    num_averaged: int
    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    scaler: dict[str, float] | None
    """By how much the loss is scaled in half precision, and since when."""

    @classmethod
    def of(
        cls,
        method: TrainingModule,
        optimiser: Optimizer,
        ema: EMA | None,
        scaler: GradScaler | None,
        state: TrainState,
    ) -> Saved:
        """Gathers what there is now; weights that are no numbers are refused."""
        weights = weights_of(method)
        if not all(bool(weight.isfinite().all()) for weight in weights.values()):
            raise FloatingPointError(
                f"the weights are no numbers any more at step {state.step}; the last checkpoint is good: "
                "resume with a lower learning rate or in bf16"
            )
        averaged: dict[str, Tensor] | None = None
        if ema:
            with ema.in_place_of(method):
                averaged = weights_of(method)
        num_averaged = ema.num_updates if ema else 0
        scale = scaler.state_dict() if scaler else None
        return cls(state, num_averaged, weights, optimiser_state(optimiser, method), averaged, scale)

    def write(self, path: Path) -> None:
        """Writes it whole or not at all."""
        with atomic_folder(path) as folder:
            for name, tensors in zip(_TENSORS, (self.weights, self.optimiser, self.ema), strict=True):
                if tensors is not None:
                    save_tensors(tensors, folder / f"{name}.safetensors")
            beside = {"num_averaged": self.num_averaged, "scaler": self.scaler}
            write_json(folder / "standing.json", asdict(self.state) | beside)

    @classmethod
    def read(cls, path: Path) -> Saved:
        """Reads all of it, or raises ValueError."""
        if not path.is_dir():
            raise ValueError(f"the checkpoint {str(path)!r} is gone; restore it, or start anew in another --output")
        try:
            plain = dict(read_json(path / "standing.json"))
            num_averaged, scaler = plain.pop("num_averaged"), plain.pop("scaler", None)
            state = TrainState.from_json(plain)
        except (KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise ValueError(f"{str(path / 'standing.json')!r} is damaged ({reason}); restore it") from None
        files = {name: path / f"{name}.safetensors" for name in _TENSORS}
        is_averaged = num_averaged > 0 or files["averages"].exists()
        tensors = {name: load_tensors(file) for name, file in files.items() if name != "averages" or is_averaged}
        return cls(state, num_averaged, tensors["weights"], tensors["optimiser"], tensors.get("averages"), scaler)

    def put_back(
        self, method: TrainingModule, optimiser: Optimizer, ema: EMA | None, scaler: GradScaler | None
    ) -> None:
        """Gives weights, optimiser, averages and the scale of the loss what they had."""
        if ema and self.ema is None:
            raise ValueError(
                "the run was trained without averaged weights, and they cannot begin in the middle; leave out --ema"
            )
        set_weights(method, self.weights)
        set_optimiser_state(optimiser, method, self.optimiser)
        if ema and self.ema is not None:
            ema.restore(self.ema, self.num_averaged)
        if scaler and self.scaler:
            scaler.load_state_dict(self.scaler)


def newest_whole(run: RunFolder) -> tuple[Path, Saved, str | None]:
    """The last checkpoint, or, if that is damaged, the newest one that is not; and what the damage is."""
    damage: list[str] = []
    for path in run.resumable():
        saved = _read_or_note(path, damage)
        if saved is not None:
            return path, saved, next(iter(damage), None)
    if damage:
        raise ValueError(f"no checkpoint of {str(run.path)!r} is whole: {damage[0]}")
    raise ValueError(f"{str(run.path)!r} has no checkpoint to resume from; start it without --resume")


def _read_or_note(path: Path, damage: list[str]) -> Saved | None:
    try:
        return Saved.read(path)
    except ValueError as error:
        damage.append(str(error))
        return None


def weights_to_use(checkpoint: Path) -> dict[str, Tensor]:
    """The averaged weights of a checkpoint, if it has any; else its weights."""
    ema = checkpoint / "averages.safetensors"
    return load_tensors(ema if ema.exists() else checkpoint / "weights.safetensors")
