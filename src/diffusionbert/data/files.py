"""File reading: lines of plain or compressed files become texts, pairs or named flaws.

Lines have a maximum size, so files and lines may be larger than memory. A line that cannot be used yields its flaw and
location instead of an error; only a file that cannot be read raises. This module does not depend on corpora, splits or
tokenizers.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import importlib
import io
import json
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast, final

LINE_BYTES = 1 << 20
"""The maximum bytes of a line that are held in memory."""
KNOWN_BYTES = 1 << 20
"""The number of leading bytes that identify a file."""
COMPRESSION = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of files that are decompressed while they are read."""


class Pair(NamedTuple):
    """A given source and the target to be generated."""

    source: str
    target: str


class Location(NamedTuple):
    """The file and line of a text; lines count from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Flaw(Enum):
    """Why a line cannot be used, worded to follow a count."""

    EMPTY = "empty"
    LONG = "over the character limit"
    NOT_UTF8 = "not UTF-8"
    NOT_JSON = "not JSON"
    NO_FIELD = "without text in the named field"
    NOT_TWO_COLUMNS = "without exactly two columns"


class Item(NamedTuple):
    """The content of a line, or its flaw."""

    content: str | Pair | Flaw
    location: Location


class Format(ABC):
    """How a line of a file is parsed."""

    @property
    @abstractmethod
    def paired(self) -> bool:
        """Whether lines contain pairs of source and target."""

    @abstractmethod
    def parse(self, line: str) -> str | Pair | Flaw:
        """Returns the content of a line, which is never blank."""


@final
@dataclass(frozen=True)
class PlainText(Format):
    """One sentence per line."""

    @property
    def paired(self) -> bool:
        return False

    def parse(self, line: str) -> str | Pair | Flaw:
        return line


@final
@dataclass(frozen=True)
class TabSeparated(Format):
    """Source, tab and target on each line."""

    @property
    def paired(self) -> bool:
        return True

    def parse(self, line: str) -> str | Pair | Flaw:
        columns = line.split("\t")
        return Pair(*columns) if len(columns) == 2 else Flaw.NOT_TWO_COLUMNS


@final
@dataclass(frozen=True)
class Fields:
    """Names of one field (text) or two (source and target); `a.b` is field b of field a."""

    names: tuple[str, ...] = ("text",)

    def __post_init__(self) -> None:
        if len(self.names) not in (1, 2) or not all(self.names):
            raise ValueError(f"`fields` must be one name (text) or two (source and target), got {self.names}")

    @property
    def paired(self) -> bool:
        return len(self.names) == 2

    def pick(self, example: object) -> str | Pair | Flaw:
        """Returns the text or pair of one example."""
        texts = [_member(example, name) for name in self.names]
        if not all(isinstance(text, str) for text in texts):
            return Flaw.NO_FIELD
        return Pair(*texts) if self.paired else texts[0]


TEXT_FIELD = Fields()


@final
@dataclass(frozen=True)
class JsonLines(Format):
    """One JSON object per line."""

    fields: Fields = TEXT_FIELD

    @property
    def paired(self) -> bool:
        return self.fields.paired

    def parse(self, line: str) -> str | Pair | Flaw:
        try:
            example = json.loads(line)
        except (ValueError, RecursionError):
            return Flaw.NOT_JSON
        return self.fields.pick(example)


@final
@dataclass(frozen=True)
class Shard:
    """A file with its size and modification time, by which later changes are detected."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> Shard:
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    def items(self, format: Format) -> Iterator[Item]:
        if not self.path.is_file() or Shard.at(self.path) != self:
            raise ValueError(f"{str(self.path)!r} was changed or removed after the corpus was opened; start again")
        name = str(self.path)
        with open_compressed(self.path) as stream:
            for number, line in enumerate(_named_errors(bounded_lines(stream, LINE_BYTES), self.path), start=1):
                yield Item(_content(line, format), Location(name, number))


@lru_cache(maxsize=4096)
def content_hash(shard: Shard) -> str:
    """The SHA-256 of a file's first MiB, decompressed, whatever its path.

    Large files need not be read to the end, and a file to which text was appended keeps its hash.
    """
    digest, left = hashlib.sha256(), KNOWN_BYTES
    try:
        with open_compressed(shard.path) as stream:
            while left and (block := stream.read(left)):
                digest.update(block)
                left -= len(block)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(shard.path, error) from error
    return digest.hexdigest()


def open_compressed(path: Path) -> io.BufferedIOBase:
    """Opens a file as bytes, decompressed according to its suffix."""
    try:
        if path.suffix == ".zst":
            library = _zstandard(path)
            return io.BufferedReader(_ZstandardReader(path.open("rb"), library), LINE_BYTES)
        opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix, open)
        return cast(io.BufferedIOBase, opener(path, "rb"))
    except OSError as error:
        raise _unreadable(path, error) from error


def bounded_lines(stream: io.BufferedIOBase, limit: int) -> Iterator[bytes | None]:
    """Yields the lines of a stream, with None for each line of `limit` bytes or more."""
    while line := stream.readline(limit):
        if len(line) < limit or line.endswith(b"\n"):
            yield line
            continue
        while (rest := stream.readline(limit)) and not rest.endswith(b"\n"):
            pass
        yield None


def _named_errors(lines: Iterator[bytes | None], path: Path) -> Iterator[bytes | None]:
    try:
        yield from lines
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    kind = "truncated" if isinstance(error, EOFError) else "damaged, unreadable or not of the format of its suffix"
    return ValueError(f"{str(path)!r} is {kind} ({error}); restore the file and start again")


def _content(line: bytes | None, format: Format) -> str | Pair | Flaw:
    if line is None:
        return Flaw.LONG
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        return Flaw.NOT_UTF8
    return format.parse(text) if text.strip() else Flaw.EMPTY


def _zstandard(path: Path) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise ValueError(f"{str(path)!r} needs the package zstandard: pip install zstandard") from None


def _member(example: object, name: str) -> Any:
    for key in name.split("."):
        if not isinstance(example, Mapping):
            return None
        example = example.get(key)
    return example


class _ZstandardReader(io.RawIOBase):
    """Reads a .zst file of one or more frames; unlike the library's reader, it detects a truncated last frame."""

    def __init__(self, file: io.BufferedIOBase, library: Any) -> None:
        self._file = file
        self._library = library
        self._frame: Any = None
        self._pending = b""  # decompressed but not yet read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            if not self._advance():
                return 0
        taken = self._pending[: len(buffer)]
        self._pending = self._pending[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def _advance(self) -> bool:
        """Decompresses a small block, since one input byte can yield thousands of output bytes."""
        finished = self._frame is None or self._frame.eof
        compressed = (self._frame.unused_data if self._frame is not None and finished else b"") or self._file.read(4096)
        if not compressed:
            if not finished:
                raise EOFError("the last frame is incomplete")
            return False
        if finished:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._pending = self._frame.decompress(compressed)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from error
        return True

    def close(self) -> None:
        self._file.close()
        super().close()
