"""Model files from the Hugging Face Hub: a snapshot is downloaded before anything opens it, and errors are one line.

If transformers opened a model by name, it would request one file after another and, without a connection, retry each of
them for half a minute. A snapshot is requested once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from huggingface_hub import snapshot_download
from transformers.utils import logging as transformers_logging
from typing_extensions import Unpack

from diffusionbert.reporting import reason_of

TOKENIZER = ["*.json", "*.txt", "*.model"]
MODEL = [*TOKENIZER, "*.safetensors"]
"""The files of a model that are downloaded: none of them can run code."""


class HubOptions(TypedDict, total=False):
    """How to fetch a model that is given by its name on the Hub."""

    revision: str | None
    """A branch, a tag or a commit."""
    token: str | bool | None
    """An access token; True uses the one stored by logging in, False none."""
    local_files_only: bool
    """Whether to use only the local cache."""


def fetch(name_or_folder: str | Path, files: list[str], **options: Unpack[HubOptions]) -> Path:
    """Returns a folder itself, or the snapshot of a name on the Hub (from the cache if there is no connection)."""
    if os.path.isdir(name_or_folder):  # noqa: PTH112 - a name too long for a folder is no error here
        return Path(name_or_folder)
    with quiet(bars=sys.stderr.isatty()):
        return Path(snapshot_download(str(name_or_folder), allow_patterns=files, **options))


def locate(what: str, name_or_folder: str | Path, expected: str, **options: Unpack[HubOptions]) -> Path:
    """Returns the folder with a model's files, downloaded if necessary; `what` and `expected` are for the error."""
    try:
        return fetch(name_or_folder, MODEL, **options)
    except Exception as error:  # no such name, no connection
        raise not_found(what, name_or_folder, expected, error) from error


def not_found(what: str, name: str | Path, expected: str, error: BaseException) -> ValueError:
    """Makes the error for a name that is neither a folder nor on the Hub."""
    return ValueError(
        f"no {what} at {str(name)!r}: expected {expected}, or a name on the Hub and a connection to it "
        f"({reason_of(error)})"
    )


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Silences transformers' table of missing weights, which we report in one line, and its progress bars."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)  # errors are raised anyway
    if not bars:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
