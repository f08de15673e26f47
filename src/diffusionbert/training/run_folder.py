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

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from diffusionbert.storage.files import REPLACED, TEMPORARY, read_json, replaced_path, restore_replaced, write_json


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
        for folder in (self.model, replaced_path(self.model)):  # a kill between two renames leaves the latter alone
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
            restore_replaced(replaced.with_suffix(""))
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
        litter = (path for ending in (TEMPORARY, REPLACED) for path in self.checkpoints.glob(f"step-*{ending}"))
        for path in {*complete, *litter} - kept - {*complete[-keep:]}:
            shutil.rmtree(path)

    def _complete(self) -> Iterator[Path]:
        return self.checkpoints.glob("step-????????")

    def _replaced_checkpoints(self) -> Iterator[Path]:
        return self.checkpoints.glob(f"step-????????{REPLACED}")

    def _pointer(self, name: str) -> Path:
        return self.path / f"{name}.json"


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
