"""Reads lines of plain or compressed files as texts, pairs or named flaws.

Lines have a maximum size, so files and lines may be larger than memory. A line that cannot be used yields its flaw and
location instead of raising; only a file that cannot be read raises.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, final

from diffusionbert.storage.limits import Limit, require_regular

LINE_BYTES = 1 << 20
"""The maximum number of bytes of a line held in memory."""
KNOWN_BYTES = 1 << 20
"""The number of leading bytes that identify a file."""
_UNCOUNTED = 1 << 26  # decompressed bytes allowed for any file, however well it is compressed
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSION = (*_OPENERS, ".zst")
"""Suffixes of files that are decompressed as they are read."""


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


@dataclass(frozen=True)
class Format:
    """How a line is parsed: as plain text, as source and target separated by a tab, or as a JSON object with fields."""

    name: Literal["text", "tsv", "jsonl"] = "text"
    fields: tuple[str, ...] = ()

    @property
    def paired(self) -> bool:
        return self.name == "tsv" or len(self.fields) == 2

    def parse(self, line: bytes | None) -> str | Pair | Flaw:
        """The content of a line; None stands for one that is too long."""
        if line is None:
            return Flaw.LONG
        try:
            text = line.removeprefix(codecs.BOM_UTF8).decode()
        except UnicodeDecodeError:
            return Flaw.NOT_UTF8
        if not text.strip():
            return Flaw.EMPTY
        if self.name == "text":
            return text
        if self.name == "tsv":
            columns = text.split("\t")
            return Pair(*columns) if len(columns) == 2 else Flaw.NOT_TWO_COLUMNS
        try:
            example = json.loads(text)
        except (ValueError, RecursionError):
            return Flaw.NOT_JSON
        return pick(example, self.fields)


def pick(example: object, fields: tuple[str, ...]) -> str | Pair | Flaw:
    """The text, or the pair, in one or two fields of an example; `a.b` is field b of field a."""
    texts: list[Any] = []
    for name in fields:
        found = example
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        texts.append(found)
    if not all(isinstance(text, str) for text in texts):
        return Flaw.NO_FIELD
    return Pair(*texts) if len(texts) == 2 else str(texts[0])


@final
@dataclass(frozen=True)
class Shard:
    """A file with its size and modification time, so that later changes are detected."""

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
        with _opened(self.path) as stream:
            yield from items_of(stream, format, str(self.path))


def items_of(stream: io.BufferedIOBase, format: Format, name: str) -> Iterator[Item]:
    """The lines of an open file with this name."""
    num_empty = 0
    for number, line in enumerate(bounded_lines(stream, LINE_BYTES), start=1):
        content = format.parse(line)
        num_empty = num_empty + 1 if content is Flaw.EMPTY else 0
        if num_empty % 4096 == 4095:
            Limit.EMPTY_LINES.require(num_empty, f"{name!r} has too many empty lines", "give text")
        yield Item(content, Location(name, number))


@lru_cache(maxsize=4096)
def content_hash(shard: Shard) -> str:
    """The SHA-256 of a file's first MiB, decompressed; it does not depend on the path.

    Large files need not be read to the end, and appending text to a file does not change its hash.
    """
    digest, left = hashlib.sha256(), KNOWN_BYTES
    with _opened(shard.path) as stream:
        while left and (block := stream.read(left)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens a file as bytes, decompressed according to its suffix; read errors name the file."""
    require_regular(path)
    try:
        if path.suffix not in COMPRESSION:
            opened = path.open("rb")
        else:
            source = _ZstandardReader(path) if path.suffix == ".zst" else _OPENERS[path.suffix](path, "rb")
            opened = io.BufferedReader(_Bounded(path, source), LINE_BYTES)
        with opened as stream:
            yield cast(io.BufferedIOBase, stream)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        kind = "truncated" if isinstance(error, EOFError) else "damaged, unreadable or not of the format of its suffix"
        raise ValueError(f"{str(path)!r} is {kind} ({error}); restore the file and start again") from error


def bounded_lines(stream: io.BufferedIOBase, limit: int) -> Iterator[bytes | None]:
    """Yields the lines of a stream, with None for each line of `limit` bytes or more."""
    while line := stream.readline(limit):
        if len(line) < limit or line.endswith(b"\n"):
            yield line
            continue
        while (rest := stream.readline(limit)) and not rest.endswith(b"\n"):
            pass
        yield None


class _Bounded(io.RawIOBase):
    """Decompressed bytes, limited in number and in ratio to the compressed ones: no real text compresses that well."""

    def __init__(self, path: Path, source: Any) -> None:
        self._path, self._source, self._compressed, self._done = path, source, path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        number = int(self._source.readinto(buffer))
        self._done += number
        beyond = max(0, self._done - _UNCOUNTED) // max(1, self._compressed)
        what = f"{str(self._path)!r} decompresses to too many bytes"
        Limit.EXPANSION.require(beyond, f"{what} per compressed byte", "check it")
        Limit.DECOMPRESSED_BYTES.require(self._done, what, "split it")
        return number

    def close(self) -> None:
        self._source.close()
        super().close()


class _ZstandardReader(io.RawIOBase):
    """Reads a .zst file of one or more frames; unlike the library's reader, it detects a truncated last frame."""

    def __init__(self, path: Path) -> None:
        try:
            library = importlib.import_module("zstandard")
        except ImportError:
            raise ValueError(f"{str(path)!r} needs the package zstandard: pip install zstandard") from None
        self._file = path.open("rb")
        self._blocks = self._decompressed(library)
        self._pending = b""  # decompressed but not yet read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._pending = self._pending or next(filter(None, self._blocks), b"")
        taken = self._pending[: len(buffer)]
        self._pending = self._pending[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def _decompressed(self, library: Any) -> Iterator[bytes]:
        """Yields small blocks, since one input byte can expand to thousands of output bytes."""
        frame, compressed = None, b""
        while compressed := compressed or self._file.read(4096):
            frame = frame or library.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(compressed)
            except library.ZstdError as error:
                raise OSError(str(error)) from error
            compressed = frame.unused_data
            frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("the last frame is incomplete")

    def close(self) -> None:
        self._file.close()
        super().close()
