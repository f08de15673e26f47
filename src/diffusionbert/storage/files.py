"""Files that appear whole or not at all: JSON, safetensors and folders, written under another name and renamed."""

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
    temporary = path.with_name(path.name + TEMPORARY)
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
def atomic_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to write to, which takes the place of `path` when all is written, or vanishes."""
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
    """Gives a folder its name back, if a kill came when it had lost it and the one to replace it had not got it yet."""
    if not path.exists():
        with suppress(OSError):  # there is none, or another process was faster
            replaced_path(path).rename(path)


def replaced_path(path: Path) -> Path:
    """What a folder is called while another takes its place."""
    return path.with_name(path.name + REPLACED)


def _exchange(new: Path, old: Path) -> None:
    """Lets one folder take another's place; if it cannot, the old one stays."""
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
    """Reads safetensors; a damaged file is named in the error."""
    try:
        return load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({reason_of(error)}); restore it, or make anew what it belongs to"
        ) from None
