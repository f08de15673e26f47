"""Folders of a cache: each is made once, whole or not at all, however many processes want it and may be killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, filled by `make` unless it is there; of several processes one makes it, and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        _sweep(folder.parent)
        with FileLock(_lock_of(folder)):  # whoever waits here finds the work done
            if not folder.is_dir():
                _make_whole(folder, make)
    return folder


def _lock_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _sweep(cache: Path) -> None:
    """Removes what killed runs left behind: unfinished folders whose lock nobody holds."""
    for litter in cache.glob(".*.partial"):
        with suppress(Timeout), FileLock(_lock_of(cache / litter.name.split(".")[1]), timeout=0):
            shutil.rmtree(litter, ignore_errors=True)


def _make_whole(folder: Path, make: Callable[[Path], None]) -> None:
    """Writes beside the folder and renames at the end, so that it appears whole or not at all."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        make(partial)
        for file in partial.iterdir():
            _sync(file)  # the name must not reach the disk before what it names
        partial.chmod(0o755)  # mkdtemp keeps others out, but a cache is shared
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
