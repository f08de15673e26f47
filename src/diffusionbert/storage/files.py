"""Atomic writes of files and folders, safetensors, and the version of the code.

Everything is written under a temporary name and then renamed, so it appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusionbert import __version__
from diffusionbert.reporting import reason_of
from diffusionbert.storage.limits import Limit, read_text
from diffusionbert.storage.reader import (
    TensorRule,
    foreign,
    require_stored,
    require_values,
    stored_tensors,
)

TEMPORARY, REPLACED = ".unfinished", ".replaced"


def require_output(folder: str | Path) -> None:
    """Raises ValueError for a folder that nobody wants to fill: one without a name, or the root of the file system."""
    if folder == "" or Path(folder).resolve() == Path(Path(folder).resolve().anchor):
        raise ValueError(f"--output {str(folder)!r} would be filled with files; give a folder of its own")


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
    write_bytes(path, f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode())


def write_bytes(path: Path, contents: bytes) -> None:
    """Writes a file completely or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises ValueError if it is missing, damaged, too large or not a regular file."""
    if not path.exists():
        raise ValueError(f"{str(path)!r} does not exist; give a run directory or a model folder")
    text = read_text(path, Limit.JSON_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} is not valid JSON ({reason_of(error)}); restore it, or create its folder again"
        ) from None


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that replaces `path` when the context ends, and is removed after an error."""
    restore_replaced(path)
    temporary = path.with_name(path.name + TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _sync(temporary)
        _exchange(temporary, path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if type(error) in (SafetensorError, Exception):  # from Rust: safetensors and tokenizers
            raise OSError(f"{str(path)!r} cannot be written ({reason_of(error)})") from None
        raise


def _sync(folder: Path) -> None:
    """Flushes contents to disk, which they must reach before the folder is renamed.

    Files get the folder's permissions, which follow the umask; safetensors makes its files readable by the owner only.
    """
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)
            with file.open("r+b") as opened:  # Windows only flushes files that are open for writing
                os.fsync(opened.fileno())


def restore_replaced(path: Path) -> None:
    """Restores a folder if the process was killed between the two renames that replace it."""
    if not path.exists():
        with suppress(OSError):  # there is nothing to restore, or another process was faster
            replaced_path(path).rename(path)


def replaced_path(path: Path) -> Path:
    """The name of a folder while it is being replaced."""
    return path.with_name(path.name + REPLACED)


def _exchange(new: Path, old: Path) -> None:
    """Replaces a folder with another; after an error, the old one is still there."""
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
    """Writes tensors as safetensors, for use in an atomic folder."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path, rules: Mapping[str, TensorRule] | None = None) -> dict[str, Tensor]:
    """Reads safetensors; raises ValueError if the file is missing or damaged, or a tensor breaks its rule."""
    require_stored(path, stored_tensors(path), rules or {})
    with foreign(lambda error: ValueError(f"{str(path)!r} cannot be read ({reason_of(error)}); restore it")):
        tensors = load_file(path)
    require_values(path, tensors, rules or {})
    return tensors


# ---- cache ----------------------------------------------------------------------------------------------------------


def build_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns a folder, filled by `make` if it does not exist; one process builds it while the others wait.

    The folder appears complete or not at all, even if processes are killed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not folder.is_dir():  # another process may have built it while this one waited
                with atomic_folder(folder) as unfinished:
                    make(unfinished)
    return folder


# ---- code version ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeVersion:
    """Which code produced a result: the version of this package, its modules and, in a checkout, its git commit."""

    version: str = __version__
    commit: str | None = None
    """The commit of the checkout that the package is imported from, with `-dirty` if files were changed; None if
    installed."""
    sha256: str | None = None
    """A hash of the names and contents of all modules, wherever they were copied to."""


@cache
def code_version() -> CodeVersion:
    """The version of the running code."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    sha256 = digest.hexdigest()
    # An installed package may be inside an unrelated repository, which does not track it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return CodeVersion(sha256=sha256)
    commit = _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return CodeVersion(commit=commit, sha256=sha256)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
