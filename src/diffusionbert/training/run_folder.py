"""A run directory: configuration, log, checkpoints to resume from, and the model. Safetensors and JSON, no pickle.

    run/
      run.json                   the configuration
      start/                     what resuming needs: tokenizer, configuration of the backbone, fingerprints of the data
      log.jsonl                  one event per line (`training.log`)
      checkpoints/step-00000200/ parameters, optimizer, EMA, state (`training.checkpoint`)
      last.json  best.json       the names of the last and of the best checkpoint
      model/                     the best parameters as a Hugging Face folder (`training.model_folder`)

Every file is written under a temporary name and then renamed, so that a killed process or a full disk leaves the
earlier files intact. In earlier versions, run.json was experiment.json and start/ was beginning/; both are still read.
This module knows nothing about the objective or the data.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from diffusionbert.storage.files import REPLACED, TEMPORARY, read_json, replaced_path, restore_replaced, write_json

Pointer = Literal["last", "best"]
FINGERPRINTS = "data.json"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.log = path / "log.jsonl"
        self.model = path / "model"

    @property
    def config(self) -> Path:
        """The run's configuration; experiment.json in earlier versions."""
        earlier = self.path / "experiment.json"
        return earlier if os.path.isfile(earlier) else self.path / "run.json"  # noqa: PTH113 - names may be too long

    @property
    def start(self) -> Path:
        """What resuming needs besides checkpoints; beginning/ in earlier versions."""
        earlier = self.path / "beginning"
        return earlier if earlier.is_dir() else self.path / "start"

    @property
    def fingerprints(self) -> Path:
        """The hashes of the encoded training and validation text; rows.json in earlier versions."""
        earlier = self.start / "rows.json"
        return earlier if earlier.exists() else self.start / FINGERPRINTS

    def find_model(self) -> Path | None:
        """The folder of the exported model; None if this is not a run directory."""
        if not os.path.isfile(self.config):  # noqa: PTH113 - a name too long for a file is no error here
            return None
        for folder in (self.model, replaced_path(self.model)):  # if killed between two renames, only the latter exists
            if folder.exists():
                return folder
        raise ValueError(f"{str(self.path)!r} is a run without a model yet; wait until it ends, or --resume it")

    def checkpoint(self, step: int) -> Path:
        """The path of the checkpoint of a step."""
        return self.checkpoints / f"step-{step:08d}"

    def require_free(self) -> None:
        """Refuses a folder that holds a run, or files that a run would overwrite."""
        if self.config.exists():
            can_resume = self.start.is_dir() and any((*self._complete_checkpoints(), *self._replaced_checkpoints()))
            remedy = "--resume it, or choose" if can_resume else "it has no checkpoint to resume from, so choose"
            raise ValueError(f"{str(self.path)!r} already holds a run; {remedy} another --output")
        own = self.checkpoints, self.model, self.log, self.start, self.path / "last.json", self.path / "best.json"
        for path in own:
            if path.exists() and not (path.is_dir() and not any(path.iterdir())):
                raise ValueError(
                    f"{str(self.path)!r} is not a run, but holds {path.name!r}, which a run would overwrite; choose "
                    "another --output"
                )

    def read_pointer(self, name: Pointer) -> Path | None:
        """The last or the best checkpoint; None if there is none."""
        file = self.path / f"{name}.json"
        if not file.exists():
            return None
        plain = read_json(file)
        if not isinstance(plain, dict) or not isinstance(plain.get("checkpoint"), str):
            raise ValueError(f"{str(file)!r} does not name a checkpoint; delete it to --resume from the newest one")
        return self.checkpoints / Path(plain["checkpoint"]).name

    def write_pointer(self, name: Pointer, checkpoint: Path) -> None:
        """Marks a checkpoint as the last or the best one."""
        write_json(self.path / f"{name}.json", {"checkpoint": checkpoint.name})

    def has_better_than(self, checkpoint: Path) -> bool:
        """Whether the best checkpoint, which may be gone, is later than this one."""
        with suppress(ValueError):  # a damaged pointer
            best = self.read_pointer("best")
            return best is not None and best.name > checkpoint.name
        return False

    def resume_candidates(self) -> list[Path]:
        """Checkpoints to resume from, in order: the last one, then the others from newest to oldest."""
        for replaced in self._replaced_checkpoints():
            restore_replaced(replaced.with_suffix(""))
        found = sorted(self._complete_checkpoints(), reverse=True)
        with suppress(ValueError):  # a damaged pointer: the newest checkpoint will do
            if last := self.read_pointer("last"):
                found = [last, *(path for path in found if path != last)]
        return found

    def resumable_start(self) -> Path | None:
        """The start folder, if it and a checkpoint to resume from exist; else None."""
        has_checkpoint = any(self._complete_checkpoints()) or any(self._replaced_checkpoints())
        return self.start if self.start.is_dir() and has_checkpoint else None

    def remove_old_checkpoints(self, keep: int) -> None:
        """Removes all checkpoints except the latest `keep` and the best, and what killed processes left behind."""
        kept = {path for path in (self.read_pointer("last"), self.read_pointer("best")) if path}
        complete = sorted(self._complete_checkpoints())
        litter = (path for ending in (TEMPORARY, REPLACED) for path in self.checkpoints.glob(f"step-*{ending}"))
        for path in {*complete, *litter} - kept - {*complete[-keep:]}:
            shutil.rmtree(path)

    def _complete_checkpoints(self) -> Iterator[Path]:
        return self.checkpoints.glob("step-????????")

    def _replaced_checkpoints(self) -> Iterator[Path]:
        return self.checkpoints.glob(f"step-????????{REPLACED}")
