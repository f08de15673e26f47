"""Limits on what comes from outside: files, folders and requests that would take all memory or never end.

Each has a default that no ordinary use reaches, and an environment variable that changes it and that messages name:
`DIFFUSIONBERT_MAX_LAYERS=2000`. They are checked before anything of that size is allocated. This module does not
depend on torch. What is read as text is read here, so that no pipe, device or binary file gets further.
"""

from __future__ import annotations

import math
import os
import stat
from enum import Enum, unique
from pathlib import Path


@unique
class Limit(Enum):
    """A limit by name, with its default."""

    JSON_BYTES = 1 << 26
    """Bytes of a JSON file."""
    TEXT_BYTES = 1 << 30
    """Bytes of a file that is read as a whole: samples, logs, languages."""
    TOKENS = 1 << 22
    """Ids of a tokenizer."""
    GROWTH = 1 << 12
    """Characters that the rules of a tokenizer may make of one."""
    LAYERS = 1 << 10
    """Layers of a network."""
    POSITIONS = 1 << 21
    """Positions of a sequence that is trained on."""
    EXPANSION = 200
    """Decompressed bytes per compressed byte of a file, beyond its first 64 MiB."""
    DECOMPRESSED_BYTES = 1 << 40
    """Decompressed bytes of a file."""
    EMPTY_LINES = 1 << 20
    """Empty lines of a corpus one after the other."""
    STEPS = 1_000_000
    """Steps of a time grid."""
    GENERATED_TOKENS = 100_000
    """Tokens of one generated text."""
    ALTERNATIVES = 1_000
    """Fillings of one text."""
    BLANK_TOKENS = 10_000
    """Tokens of all blanks of a text, over all lengths of a [BLANK]."""

    @property
    def variable(self) -> str:
        """The environment variable that changes it."""
        return f"DIFFUSIONBERT_MAX_{self.name}"

    @property
    def most(self) -> int:
        """The largest number that is accepted."""
        given = os.environ.get(self.variable)
        if given is None:
            return int(self.value)
        if not given.isdecimal():
            raise ValueError(f"{self.variable} must be a whole number, got {given[:40]!r}")
        return int(given)

    def require(self, number: int | float, what: str, remedy: str) -> None:
        """Raises ValueError if a number is beyond the limit.

        Args:
            number: The number.
            what: What has so many, for the message: "'f.json' has … bytes" without the number.
            remedy: What to do, beside raising the limit.
        """
        if number > self.most:
            shown = f"{number:,}" if abs(number) < 10**15 else "10¹⁵ or more"
            raise ValueError(f"{what}, got {shown}, at most {self.most:,}; {remedy}, or set {self.variable}")


def memory_bytes() -> float:
    """The memory of this machine; infinite if unknown."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return math.inf


def require_regular(path: Path) -> None:
    """Raises ValueError for a pipe, a device, a socket or a folder, which could be read forever; not if missing."""
    try:
        mode = path.stat().st_mode
    except OSError:  # which has an error of its own when it is opened
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    if not stat.S_ISREG(mode):
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise ValueError(f"{str(path)!r} is {kind}, not a regular file; give a file")


def read_text(path: Path, limit: Limit = Limit.TEXT_BYTES) -> str:
    """Reads a regular file of a bounded size; raises ValueError if it is none, is missing or is not UTF-8."""
    require_regular(path)
    try:
        limit.require(path.stat().st_size, f"{str(path)!r} has too many bytes", "restore it")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}); restore it, or give another") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 ({error.reason}); convert it, or restore it") from None
