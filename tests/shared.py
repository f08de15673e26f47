"""Folders that the workers of one test run share: each is made once, by the first worker that needs it.

A shared folder is not changed after it is made: a test that writes into one takes a copy.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from diffusionbert.storage.files import build_once

VARIABLE = "DIFFUSIONBERT_TEST_RUN"


@cache
def folder() -> Path:
    """Where everything shared lies until the test run ends; `conftest.py` calls this before the workers start."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="diffusionbert-tests-")
        atexit.register(shutil.rmtree, os.environ[VARIABLE], ignore_errors=True)
    return Path(os.environ[VARIABLE])


def encoding_cache() -> Path:
    """A cache of vocabularies and encoded texts, keyed by their content."""
    return folder() / "cache"


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder of this name, filled by `make` in the worker that asks first, while the others wait."""
    return build_once(folder() / name, make)
