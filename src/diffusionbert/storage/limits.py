"""Limits on input from outside: files, folders and requests that would take all memory or never end.

Each limit has a default that no ordinary use reaches, and an environment variable that changes it, which messages name:
`DIFFUSIONBERT_MAX_LAYERS=2000`. Limits are checked before anything of that size is allocated. All text files are read
here, so that no pipe, device or binary file gets any further. This module does not depend on torch.
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
    """Bytes of a text file that is read as a whole: samples, logs, languages."""
    TOKENS = 1 << 22
    """Ids of a tokenizer."""
    GROWTH = 1 << 12
    """Characters that a tokenizer's rules may turn one character into."""
    LAYERS = 1 << 10
    """Layers of a network."""
    POSITIONS = 1 << 21
    """Positions of a sequence that is trained on."""
    EXPANSION = 200
    """Decompressed bytes per compressed byte of a file, beyond its first 64 MiB."""
    DECOMPRESSED_BYTES = 1 << 40
    """Decompressed bytes of a file."""
    EMPTY_LINES = 1 << 20
    """Consecutive empty lines in a corpus."""
    STEPS = 1_000_000
    """Steps of a time grid."""
    GENERATED_TOKENS = 100_000
    """Tokens of one generated text."""
    ALTERNATIVES = 1_000
    """Fillings of one text."""
    BLANK_TOKENS = 10_000
    """Tokens of all blanks in a text, over all lengths of a [BLANK]."""

    @property
    def variable(self) -> str:
        """The environment variable that changes the limit."""
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
            what: The start of the message, without the number: "'f.json' has too many bytes".
            remedy: What to do, other than raising the limit.
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
    """Raises ValueError for a pipe, device, socket or folder, where reading might never end; not for a missing file."""
    try:
        mode = path.stat().st_mode
    except OSError:  # opening it will raise its own error
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    if not stat.S_ISREG(mode):
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise ValueError(f"{str(path)!r} is {kind}, not a regular file; give a file")


def read_text(path: Path, limit: Limit = Limit.TEXT_BYTES) -> str:
    """Reads a regular file of limited size; raises ValueError if it is anything else, missing or not UTF-8."""
    require_regular(path)
    try:
        limit.require(path.stat().st_size, f"{str(path)!r} has too many bytes", "restore it")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}); restore it, or give another") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 ({error.reason}); convert it, or restore it") from None
