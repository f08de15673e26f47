"""Cached folders: each is built once and appears complete or not at all, even with several or killed processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout


def build_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns a folder, filled by `make` if it does not exist; one process builds it while the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        _remove_abandoned(folder.parent)
        with FileLock(_lock_path(folder)):
            if not folder.is_dir():  # another process may have built it while this one waited
                _build(folder, make)
    return folder


def _lock_path(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _remove_abandoned(cache: Path) -> None:
    """Removes the incomplete folders of killed processes: those whose lock is free."""
    for partial in cache.glob(".*.partial"):
        with suppress(Timeout), FileLock(_lock_path(cache / partial.name.split(".")[1]), timeout=0):
            shutil.rmtree(partial, ignore_errors=True)


def _build(folder: Path, make: Callable[[Path], None]) -> None:
    """Builds a temporary folder and renames it when it is complete."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        make(partial)
        for file in partial.iterdir():
            _sync(file)  # contents must reach the disk before the rename does
        partial.chmod(0o755)  # mkdtemp makes private folders, but a cache is shared
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
