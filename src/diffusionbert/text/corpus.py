"""Corpora: a source's texts, cleaned and streamed, with a report on every line that could not be used.

A `Corpus` is one split of a source. `parse_corpus` makes one from a word of the command line:

    news.txt   news.txt.xz   shards/   'shards/*.jsonl.gz'   pairs.tsv   lm1b:FOLDER   hf:NAME[:CONFIG]   pydoc

Nothing is lost in silence: a line that cannot be used is counted by kind, with the place of the first. A corpus
may be larger than memory. This module knows nothing of tokens.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from diffusionbert.text.cleaning import AS_IT_IS, Cleaning
from diffusionbert.text.reading import (
    COMPRESSION,
    TEXT_FIELD,
    Fields,
    Flaw,
    JsonLines,
    Pair,
    Place,
    PlainText,
    Shard,
    TabSeparated,
)
from diffusionbert.text.sources import Files, HuggingFace, OneBillionWords, PythonDocumentation, Source, Split

VERSION = 1
"""Raised when the same files would give other sentences, so that no cache outlives the change."""


@dataclass
class Tally:
    """How often something happened, and where first."""

    count: int
    first: str


@dataclass
class Report:
    """What became of every line; filled while a corpus is read."""

    kept: int = 0
    elsewhere: int = 0
    """Lines that belong to another split."""
    skipped: dict[str, Tally] = field(default_factory=dict)
    shortened: Tally | None = None

    def skip(self, kind: str, place: Place) -> None:
        """Counts a line that cannot be used."""
        self.skipped.setdefault(kind, Tally(0, str(place))).count += 1

    def take_back(self, kind: str, place: Place) -> None:
        """Counts as skipped what was kept before."""
        self.kept -= 1
        self.skip(kind, place)

    def shorten(self, place: Place) -> None:
        """Counts a kept text that lost its end."""
        self.shortened = self.shortened or Tally(0, str(place))
        self.shortened.count += 1

    def summary(self) -> str:
        """One paragraph for people."""
        parts = [f"{self.kept:,} kept"]
        if self.shortened:
            parts.append(f"{self.shortened.count:,} of them cut (first at {self.shortened.first})")
        if self.skipped:
            kinds = (f"{tally.count:,} {kind} (first at {tally.first})" for kind, tally in self.skipped.items())
            parts.append(f"{sum(tally.count for tally in self.skipped.values()):,} skipped: {', '.join(kinds)}")
        if self.elsewhere:
            parts.append(f"{self.elsewhere:,} in another split")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """The reverse of `to_json`."""
        skipped = {kind: Tally(**tally) for kind, tally in values["skipped"].items()}
        shortened = Tally(**values["shortened"]) if values["shortened"] else None
        return cls(values["kept"], values["elsewhere"], skipped, shortened)


class Record(NamedTuple):
    """A text, or pair of texts, that is kept."""

    content: str | Pair
    place: Place


@final
@dataclass(frozen=True)
class Corpus:
    """One split of a source, cleaned. Iterating gives its texts, from the start each time; of a pair both."""

    source: Source
    split: Split = Split.TRAIN
    cleaning: Cleaning = AS_IT_IS

    def __post_init__(self) -> None:
        self.source.part(self.split)  # a split that is not there is an error now, not in the middle of the work

    @property
    def paired(self) -> bool:
        """Whether it gives pairs."""
        return self.source.paired

    @property
    def fingerprint(self) -> str:
        """Names this corpus in cache keys: other files, another split and other settings have another one."""
        description = f"{VERSION} {self.source.identity()} {self.split.value} {self.cleaning}"
        return hashlib.sha256(description.encode()).hexdigest()

    def records(self, report: Report) -> Iterator[Record]:
        """Streams what is kept and reports what is not; raises at the end if nothing was kept."""
        part, num_kept = self.source.part(self.split), 0
        for item in self.source.items(self.split):
            content = item.content if isinstance(item.content, Flaw) else self.cleaning.check(item.content)
            if isinstance(content, Flaw):
                report.skip(content.value, item.place)
            elif not part.has(content):
                report.elsewhere += 1
            else:
                num_kept += 1
                report.kept += 1
                yield Record(self.cleaning.restyle(content), item.place)
        if not num_kept:
            part_of = "" if self.split is Split.ALL else f"the {self.split.value} split of "
            remedy = (
                "give more sentences or, to train on few, validation text of its own (--validation FILE)"
                if report.elsewhere
                else "give UTF-8 text, one sentence a line"
            )
            raise ValueError(f"{part_of}{self.source} is empty ({report.summary()}): {remedy}")

    def __iter__(self) -> Iterator[str]:
        for content, _ in self.records(Report()):
            yield from (content,) if isinstance(content, str) else content


def parse_corpus(
    spec: str,
    split: Split = Split.TRAIN,
    *,
    validation: str | None = None,
    fields: Sequence[str] = (),
    cleaning: Cleaning = AS_IT_IS,
    validation_share: float | None = None,
) -> Corpus:
    """Opens one split of the corpus that a word of the command line names.

    `validation` names a corpus of its own for that split; all of `spec` is then training. `fields` are for JSONL
    and Hugging Face datasets. `validation_share` is 0.01 unless given, for pydoc 0.05.
    """
    if validation is None:
        return Corpus(parse_source(spec, fields, validation_share), split, cleaning)
    if split is not Split.VALIDATION:
        return Corpus(parse_source(spec, fields, 0.0), split, cleaning)
    source = parse_source(validation, fields, validation_share)
    return Corpus(source, Split.ALL if isinstance(source, Files) else split, cleaning)


def parse_source(spec: str, fields: Sequence[str] = (), validation_share: float | None = None) -> Source:
    """Turns a word of the command line into the source it names."""
    share = {} if validation_share is None else {"validation_share": validation_share}
    named = Fields(tuple(fields)) if fields else TEXT_FIELD
    family, _, rest = spec.partition(":")
    if family == "hf" and rest:
        name, _, config = rest.partition(":")
        return HuggingFace(name, config or None, named, **share)
    if spec == "pydoc" or family == "lm1b":
        _refuse(fields, spec)
        return PythonDocumentation(**share) if spec == "pydoc" else OneBillionWords(Path(rest).expanduser(), **share)
    explicit = family in ("text", "tsv", "jsonl")
    paths = _find(rest if explicit else spec)
    shards, format = tuple(map(Shard.at, paths)), family if explicit else _common_format(paths)
    if format == "jsonl":
        return Files(shards, JsonLines(named), **share)
    _refuse(fields, spec)
    return Files(shards, TabSeparated() if format == "tsv" else PlainText(), **share)


def _refuse(fields: Sequence[str], spec: str) -> None:
    if fields:
        raise ValueError(f"fields {tuple(fields)} are for JSONL files and hf:NAME, not for {spec!r}: leave them away")


def _find(pattern: str) -> list[Path]:
    """A file, the files directly in a folder, or those a glob matches; sorted, without hidden ones."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    is_folder = bool(pattern) and path.is_dir()  # an empty word is not the current folder
    matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207, a Path's own glob takes no absolute pattern
    found = path.iterdir() if is_folder else map(Path, matches)
    paths = sorted(file for file in found if file.is_file() and not file.name.startswith("."))
    if not paths:
        where = "no files directly in folder" if is_folder else "no file, folder or glob matches"
        raise ValueError(
            f"{where} {pattern!r}: give a file, a folder or a glob of files, lm1b:FOLDER, hf:NAME[:CONFIG] or pydoc"
        )
    return paths


def _common_format(paths: list[Path]) -> str:
    """The format that the suffixes tell: .tsv, .jsonl, or else text."""
    suffixes = {".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
    plain = [path.with_suffix("") if path.suffix in COMPRESSION else path for path in paths]
    formats = sorted({suffixes.get(path.suffix, "text") for path in plain})
    if len(formats) > 1:
        raise ValueError(
            f"{str(paths[0].parent)!r} holds files of different formats ({', '.join(formats)}): name those you want by "
            "a glob, or their format by text:, tsv: or jsonl: before it"
        )
    return formats[0]
