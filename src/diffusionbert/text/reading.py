"""Reading: files, compressed or not, become lines, and lines become texts or a named flaw.

Lines are read within a hard limit, so that neither a file nor a line larger than memory does harm. What cannot be
used is named and given its place, never dropped in silence and never an error in the middle of a file; only a
file that cannot be read at all is one. This module knows nothing of corpora, their splits or tokens.
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
"""A line is never held beyond this many bytes."""
KNOWN_BYTES = 1 << 20
"""By how much of its beginning a file is known again."""
COMPRESSION = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of files that are decompressed as they are read."""


class Pair(NamedTuple):
    """A source that is given and a target that is to be written."""

    source: str
    target: str


class Place(NamedTuple):
    """Where a text was read; lines count from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Flaw(Enum):
    """Why a line cannot be used, in words that fit behind a number."""

    EMPTY = "empty"
    LONG = "over the limit of characters"
    NOT_UTF8 = "not UTF-8"
    NOT_JSON = "not JSON"
    NO_FIELD = "without a text in the named field"
    NOT_TWO_COLUMNS = "without exactly two columns"


class Item(NamedTuple):
    """What is read for every line: its content, or what is wrong with it."""

    content: str | Pair | Flaw
    place: Place


class Format(ABC):
    """How one line of a file is read."""

    @property
    @abstractmethod
    def paired(self) -> bool:
        """Whether it gives pairs."""

    @abstractmethod
    def parse(self, line: str) -> str | Pair | Flaw:
        """The content of a line that is UTF-8 and not blank."""


@final
@dataclass(frozen=True)
class PlainText(Format):
    """A sentence a line."""

    @property
    def paired(self) -> bool:
        """No."""
        return False

    def parse(self, line: str) -> str | Pair | Flaw:
        """The line itself."""
        return line


@final
@dataclass(frozen=True)
class TabSeparated(Format):
    """A source, a tab and a target a line."""

    @property
    def paired(self) -> bool:
        """Yes."""
        return True

    def parse(self, line: str) -> str | Pair | Flaw:
        """Two columns and no third."""
        columns = line.split("\t")
        return Pair(*columns) if len(columns) == 2 else Flaw.NOT_TWO_COLUMNS


@final
@dataclass(frozen=True)
class Fields:
    """One named field with a text, or two with a source and a target; `a.b` is the field b of the field a."""

    names: tuple[str, ...] = ("text",)

    def __post_init__(self) -> None:
        if len(self.names) not in (1, 2) or not all(self.names):
            raise ValueError(f"fields are {self.names}: name one for sentences, or two for source and target")

    @property
    def paired(self) -> bool:
        """Whether there are two."""
        return len(self.names) == 2

    def pick(self, example: object) -> str | Pair | Flaw:
        """Takes them from one example."""
        texts = [_member(example, name) for name in self.names]
        if not all(isinstance(text, str) for text in texts):
            return Flaw.NO_FIELD
        return Pair(*texts) if self.paired else texts[0]


TEXT_FIELD = Fields()


@final
@dataclass(frozen=True)
class JsonLines(Format):
    """A JSON object a line."""

    fields: Fields = TEXT_FIELD

    @property
    def paired(self) -> bool:
        """Whether two fields are named."""
        return self.fields.paired

    def parse(self, line: str) -> str | Pair | Flaw:
        """The named fields."""
        try:
            example = json.loads(line)
        except (ValueError, RecursionError):
            return Flaw.NOT_JSON
        return self.fields.pick(example)


@final
@dataclass(frozen=True)
class Shard:
    """A file as it was when the corpus was described."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> Shard:
        """Looks at a file without opening it."""
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    def items(self, format: Format) -> Iterator[Item]:
        """Reads it line by line."""
        if not self.path.is_file() or Shard.at(self.path) != self:
            raise ValueError(f"{str(self.path)!r} was changed or removed since this corpus was opened: start again")
        name = str(self.path)
        with open_compressed(self.path) as stream:
            for number, line in enumerate(_named_errors(bounded_lines(stream, LINE_BYTES), self.path), start=1):
                yield Item(_content(line, format), Place(name, number))


@lru_cache(maxsize=4096)
def content_hash(shard: Shard) -> str:
    """The SHA-256 of how a file begins, decompressed: wherever it lies, and whatever it is called.

    Its first MiB, so that large corpora need not be read, and one to which text was added is known again.
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
    """Opens a file as bytes, decompressed as its suffix says."""
    try:
        if path.suffix == ".zst":
            library = _zstandard(path)
            return io.BufferedReader(_ZstandardReader(path.open("rb"), library), LINE_BYTES)
        opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix, open)
        return cast(io.BufferedIOBase, opener(path, "rb"))
    except OSError as error:
        raise _unreadable(path, error) from error


def bounded_lines(stream: io.BufferedIOBase, limit: int) -> Iterator[bytes | None]:
    """Splits a stream at line ends; a line of `limit` bytes or more is passed over and gives None."""
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
    kind = "truncated" if isinstance(error, EOFError) else "damaged, or not what its suffix says, or not readable"
    return ValueError(f"{str(path)!r} is {kind} ({error}): restore the file and start again")


def _content(line: bytes | None, format: Format) -> str | Pair | Flaw:
    if line is None:
        return Flaw.LONG
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        return Flaw.NOT_UTF8
    return format.parse(text) if not text.isspace() and text else Flaw.EMPTY


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
    """A .zst file of one or more frames that, unlike the library's reader, notices when the last one is cut off."""

    def __init__(self, file: io.BufferedIOBase, library: Any) -> None:
        self._file = file
        self._library = library
        self._frame: Any = None
        self._pending = b""  # decompressed and not yet asked for

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
        """Decompresses a little: one input byte can stand for thousands of output bytes."""
        finished = self._frame is None or self._frame.eof
        compressed = (self._frame.unused_data if self._frame is not None and finished else b"") or self._file.read(4096)
        if not compressed:
            if not finished:
                raise EOFError("the last frame has no end")
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
