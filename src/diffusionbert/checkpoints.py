"""A run folder: settings, log, checkpoints to resume from, and the model to use. Safetensors and JSON, no pickle.

    run/
      experiment.json            the settings
      beginning/                 what the run began with: tokenizer, the network's config, which rows
      log.jsonl                  one event per line (`training.log`)
      checkpoints/step-00000200/ weights, averaged weights, optimiser, position
      last.json  best.json       which checkpoint is which
      model/                     the best weights as a Hugging Face folder

Everything is written under another name first and then renamed, so that a kill or a full disk in the middle of a
write leaves what was there before. Tensors sharded over processes are gathered on the way out and dealt out again
on the way in; a run may resume on another number of processes. This module knows no method and no corpus.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from diffusionbert.errors import reason_of

_TEMPORARY, _REPLACED = ".unfinished", ".replaced"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.log = path / "log.jsonl"
        self.model = path / "model"
        self.beginning = path / "beginning"

    @property
    def config(self) -> Path:
        """The run's configuration; before registered names it was called experiment.json."""
        earlier = self.path / "experiment.json"
        return earlier if os.path.isfile(earlier) else self.path / "run.json"  # noqa: PTH113 - names may be too long

    def left_model(self) -> Path | None:
        """The folder of the model that the run has left; None if there is no run here."""
        if not os.path.isfile(self.config):  # noqa: PTH113 - a name too long for a file is no error here
            return None
        for folder in (self.model, _replaced(self.model)):  # a kill between two renames leaves the latter alone
            if folder.exists():
                return folder
        raise ValueError(f"{str(self.path)!r} is a run that has not left a model yet; let it finish, or --resume it")

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.checkpoints / f"step-{step:08d}"

    def require_free(self) -> None:
        """Refuses a folder that holds a run, or what a run would overwrite."""
        if self.config.exists():
            raise ValueError(
                f"{str(self.path)!r} holds a run already; go on with it by --resume, or choose another --output"
            )
        pointers = self._pointer("last"), self._pointer("best")
        mine = self.checkpoints, self.model, self.log, self.beginning, *pointers
        taken = next((path.name for path in mine if path.exists() and not _is_empty_folder(path)), None)
        if taken is not None:
            raise ValueError(
                f"{str(self.path)!r} is no run, but holds {taken!r}, which one would overwrite; choose another --output"
            )

    def named(self, name: str) -> Path | None:
        """The checkpoint that is `last` or `best`, if there is one."""
        pointer = self._pointer(name)
        if not pointer.exists():
            return None
        said = read_json(pointer)
        if not isinstance(said, dict) or not isinstance(said.get("checkpoint"), str):
            raise ValueError(f"{str(pointer)!r} names no checkpoint; remove it, and --resume takes the newest one")
        return self.checkpoints / Path(said["checkpoint"]).name

    def resumable(self) -> list[Path]:
        """Checkpoints to go on from, the one called `last` first, then the newest ones."""
        last = None
        with suppress(ValueError):  # a name that is damaged: the newest will do
            last = self.named("last")
        for replaced in self._replaced_checkpoints():
            _put_back(replaced.with_suffix(""))
        others = sorted(self._complete(), reverse=True)
        return others if last is None else [last, *(path for path in others if path != last)]

    def kept_beginning(self) -> Path | None:
        """What a run that can go on has kept of its beginning; None if it begins anew, or kept nothing."""
        can_go_on = any(self._complete()) or any(self._replaced_checkpoints())
        return self.beginning if self.beginning.is_dir() and can_go_on else None

    def name(self, name: str, checkpoint: Path) -> None:
        """Calls a checkpoint `last` or `best`."""
        write_json(self._pointer(name), {"checkpoint": checkpoint.name})

    def tidy(self, keep: int) -> None:
        """Removes all but the latest checkpoints, the best one, and what a kill left behind."""
        kept = {path for path in (self.named("last"), self.named("best")) if path}
        complete = sorted(self._complete())
        litter = (path for ending in (_TEMPORARY, _REPLACED) for path in self.checkpoints.glob(f"step-*{ending}"))
        for path in {*complete, *litter} - kept - {*complete[-keep:]}:
            shutil.rmtree(path)

    def _complete(self) -> Iterator[Path]:
        return self.checkpoints.glob("step-????????")

    def _replaced_checkpoints(self) -> Iterator[Path]:
        return self.checkpoints.glob(f"step-????????{_REPLACED}")

    def _pointer(self, name: str) -> Path:
        return self.path / f"{name}.json"


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def require_writable(folder: Path) -> None:
    """Refuses, before any work, a folder in which nothing can be written; nothing is made or left behind."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"nothing can be written to {str(folder)!r} ({error.strerror}); choose another --output"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one piece or not at all."""
    temporary = path.with_name(path.name + _TEMPORARY)
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Reads a JSON file; what is not there or not JSON is named in the error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {str(path)!r}; is its folder a run folder?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is no JSON ({error}); restore it, or make anew what it belongs to") from None


@contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to write to, which takes the place of `path` when all is written, or vanishes."""
    _put_back(path)
    temporary = path.with_name(path.name + _TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        _exchange(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_back(path: Path) -> None:
    """Gives a folder its name back, if a kill came when it had lost it and the one to replace it had not got it yet."""
    if not path.exists():
        with suppress(OSError):  # there is none, or another process was faster
            _replaced(path).rename(path)


def _replaced(path: Path) -> Path:
    """What a folder is called while another takes its place."""
    return path.with_name(path.name + _REPLACED)


def _exchange(new: Path, old: Path) -> None:
    """Lets one folder take another's place; if it cannot, the old one stays."""
    replaced = _replaced(old)
    if old.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        old.rename(replaced)
    try:
        new.rename(old)
    except OSError:
        _put_back(old)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


# ---- tensors ----------------------------------------------------------------------------------------------------


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors as safetensors."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} cannot be written ({error})") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Reads safetensors; a damaged file is named in the error."""
    try:
        return load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({reason_of(error)}); restore it, or make anew what it belongs to"
        ) from None


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; if it is sharded, every process must ask for it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def like(full: Tensor, pattern: Tensor) -> Tensor:
    """Deals a full tensor out as another one is dealt out."""
    if isinstance(pattern, DTensor):
        return distribute_tensor(full.to(pattern.device), pattern.device_mesh, pattern.placements)
    return full.to(pattern.device)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, each once even if tied."""
    return {_plain(name): whole(parameter) for name, parameter in module.named_parameters()}


def set_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts weights back; names must agree exactly."""
    parameters = {_plain(name): parameter for name, parameter in module.named_parameters()}
    _require_same_names(parameters, weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(like(weights[name], parameter))


def optimiser_state(optimiser: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """The optimiser's tensors, by parameter name and kind."""
    found = {}
    for name, parameter in module.named_parameters():
        for kind, value in optimiser.state[parameter].items():
            found[f"{_plain(name)}/{kind}"] = whole(value if isinstance(value, Tensor) else torch.tensor(value))
    return found


def set_optimiser_state(optimiser: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts the optimiser's tensors back."""
    for name, parameter in module.named_parameters():
        mine = {key.rpartition("/")[2]: value for key, value in state.items() if key.rpartition("/")[0] == _plain(name)}
        for kind, value in mine.items():
            # Counters are single numbers: on the parameter's device if the optimiser is fused, else on the CPU.
            is_fused = optimiser.defaults.get("fused") or optimiser.defaults.get("capturable")
            counter = value.to(parameter.device) if is_fused else value
            optimiser.state[parameter][kind] = like(value, parameter) if value.shape else counter


def _plain(name: str) -> str:
    """A parameter's name without what wrappers (DDP, torch.compile) add to it."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _require_same_names(mine: Iterable[str], given: Iterable[str]) -> None:
    missing, unknown = sorted(set(mine) - set(given)), sorted(set(given) - set(mine))
    if missing or unknown:
        raise ValueError(
            f"these weights do not fit the network: {len(missing)} missing, {len(unknown)} unknown, first "
            f"{(missing + unknown)[0]!r}; were they saved with other settings?"
        )
