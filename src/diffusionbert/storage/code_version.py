"""Which code produced a result: the package's version and, in a checkout, its git commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diffusionbert import __version__


@dataclass(frozen=True)
class CodeVersion:
    """A version of this package."""

    version: str = __version__
    commit: str | None = None
    """Of the checkout that the package is imported from, with `-dirty` if files were changed; None if installed."""


@cache
def code_version() -> CodeVersion:
    """The version of the running code."""
    package = Path(__file__).parents[1]
    # An installed package may lie inside somebody else's repository, which does not track it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return CodeVersion()
    return CodeVersion(commit=_git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
