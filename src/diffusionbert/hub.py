"""What is asked of the Hub: a model's files, brought here before anything opens them, silence, and what to say else.

Opened by its name, a model is asked for file by file, and without a connection each of them is tried for half a
minute; brought here first, it is asked for once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils import logging as transformers_logging

from diffusionbert.errors import reason_of

TOKENIZER = ["*.json", "*.txt", "*.model"]
MODEL = [*TOKENIZER, "*.safetensors"]
"""The files of a model that are opened: none can run code."""


def brought(name_or_folder: str | Path, files: list[str]) -> Path:
    """A folder itself, or that of a name on the Hub: downloaded, or from the cache where there is no connection."""
    if os.path.isdir(name_or_folder):  # noqa: PTH112 - a name too long for a folder is no error here
        return Path(name_or_folder)
    with quiet(bars=sys.stderr.isatty()):
        return Path(snapshot_download(str(name_or_folder), allow_patterns=files))


def located(what: str, name_or_folder: str | Path, expected: str) -> Path:
    """Where the files of a model are, brought here if need be; one line says if they are nowhere."""
    try:
        return brought(name_or_folder, MODEL)
    except Exception as error:  # no such name, no connection
        raise absent(what, name_or_folder, expected, error) from error


def absent(what: str, name: str | Path, expected: str, error: Exception) -> ValueError:
    """What to say where neither a folder nor the Hub had it."""
    return ValueError(
        f"no {what} at {str(name)!r}: expected {expected}, or a name on the Hub and a connection to it "
        f"({reason_of(error)})"
    )


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Keeps away transformers' table of missing weights, which we say in one line, and its progress bars."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    if not bars:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
