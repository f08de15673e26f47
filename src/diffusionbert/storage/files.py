"""Atomic writes of JSON and of folders, and safetensors: each is written under a temporary name, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusionbert.reporting import reason_of

TEMPORARY, REPLACED = ".unfinished", ".replaced"


def require_writable(folder: Path) -> None:
    """Raises ValueError unless a folder can be written to; leaves nothing behind."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{str(folder)!r} is not writable ({error.strerror}); choose another --output") from None


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file completely or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises ValueError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{str(path)!r} does not exist; give a run directory or a model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}); restore it, or create its folder again") from None


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Opens a temporary folder, which replaces `path` when the context ends and is removed after an error."""
    restore_replaced(path)
    temporary = path.with_name(path.name + TEMPORARY)
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


def restore_replaced(path: Path) -> None:
    """Restores a folder if the process was killed between the two renames that replace it."""
    if not path.exists():
        with suppress(OSError):  # there is nothing to restore, or another process was faster
            replaced_path(path).rename(path)


def replaced_path(path: Path) -> Path:
    """The name of a folder while it is being replaced."""
    return path.with_name(path.name + REPLACED)


def _exchange(new: Path, old: Path) -> None:
    """Replaces a folder by another; after an error the old one is still there."""
    replaced = replaced_path(old)
    if old.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        old.rename(replaced)
    try:
        new.rename(old)
    except OSError:
        restore_replaced(old)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors as safetensors."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} cannot be written ({error})") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Reads safetensors; raises ValueError if the file is missing or damaged."""
    try:
        return load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({reason_of(error)}); restore it, or create its folder again"
        ) from None
