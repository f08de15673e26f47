"""Corpora: cleaned texts of one split of a source, streamed, with a report on every line that cannot be used.

`parse_corpus` opens a corpus from a command-line argument:

    news.txt   news.txt.xz   shards/   'shards/*.jsonl.gz'   pairs.tsv   lm1b:FOLDER   hf:NAME[:CONFIG]   pydoc

No line is dropped silently: unusable lines are counted by reason, with the location of the first. A corpus may be
larger than memory. This module does not depend on tokenizers.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from diffusionbert.data.cleaning import AS_IT_IS, Cleaning
from diffusionbert.data.files import (
    COMPRESSION,
    TEXT_FIELD,
    Fields,
    Flaw,
    JsonLines,
    Location,
    Pair,
    PlainText,
    Shard,
    TabSeparated,
)
from diffusionbert.data.sources import (
    Files,
    HuggingFace,
    OneBillionWords,
    PythonDocumentation,
    Source,
    Split,
)

VERSION = 1
"""To be incremented when the same files yield other sentences; part of every cache key."""


@dataclass
class Tally:
    """A count, and the location of the first occurrence."""

    count: int
    first: str


@dataclass
class Report:
    """Counts of the lines that were kept, skipped or cut; updated while a corpus is read."""

    kept: int = 0
    elsewhere: int = 0
    """Lines that belong to another split."""
    skipped: dict[str, Tally] = field(default_factory=dict)
    shortened: Tally | None = None

    def skip(self, reason: str, location: Location) -> None:
        """Counts a line that cannot be used."""
        self.skipped.setdefault(reason, Tally(0, str(location))).count += 1

    def take_back(self, reason: str, location: Location) -> None:
        """Counts a line as skipped that was counted as kept."""
        self.kept -= 1
        self.skip(reason, location)

    def shorten(self, location: Location) -> None:
        """Counts a kept text whose end was cut off."""
        self.shortened = self.shortened or Tally(0, str(location))
        self.shortened.count += 1

    def summary(self) -> str:
        """The counts in one line, such as `2 kept; 1 skipped: 1 empty (first at a.txt:3)`."""
        parts = [f"{self.kept:,} kept"]
        if self.shortened:
            parts.append(f"{self.shortened.count:,} of them cut (first at {self.shortened.first})")
        if self.skipped:
            reasons = (f"{tally.count:,} {reason} (first at {tally.first})" for reason, tally in self.skipped.items())
            parts.append(f"{sum(tally.count for tally in self.skipped.values()):,} skipped: {', '.join(reasons)}")
        if self.elsewhere:
            parts.append(f"{self.elsewhere:,} in another split")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        skipped = {reason: Tally(**tally) for reason, tally in values["skipped"].items()}
        shortened = Tally(**values["shortened"]) if values["shortened"] else None
        return cls(values["kept"], values["elsewhere"], skipped, shortened)


class Record(NamedTuple):
    """A text, or pair of texts, that is kept, and where it was read."""

    content: str | Pair
    location: Location


@final
@dataclass(frozen=True)
class Corpus:
    """One split of a source, cleaned. Each iteration starts anew and yields the texts, both of a pair."""

    source: Source
    split: Split = Split.TRAIN
    cleaning: Cleaning = AS_IT_IS

    def __post_init__(self) -> None:
        self.source.part(self.split)  # raises early if the source has no such split

    @property
    def paired(self) -> bool:
        """Whether its contents are pairs of source and target."""
        return self.source.paired

    @property
    def fingerprint(self) -> str:
        """A hash of the files, the split and the settings, for cache keys."""
        description = f"{VERSION} {self.source.identity()} {self.split.value} {self.cleaning}"
        return hashlib.sha256(description.encode()).hexdigest()

    def records(self, report: Report) -> Iterator[Record]:
        """Yields the texts to keep and counts the others in `report`; raises at the end if none was kept."""
        part, num_kept = self.source.part(self.split), 0
        for item in self.source.items(self.split):
            content = item.content if isinstance(item.content, Flaw) else self.cleaning.check(item.content)
            if isinstance(content, Flaw):
                report.skip(content.value, item.location)
            elif not part.has(content):
                report.elsewhere += 1
            else:
                num_kept += 1
                report.kept += 1
                yield Record(self.cleaning.restyle(content), item.location)
        if not num_kept:
            part_of = "" if self.split is Split.ALL else f"the {self.split.value} split of "
            remedy = (
                "give more sentences, or separate validation text (--validation FILE)"
                if report.elsewhere
                else "give UTF-8 text, one sentence per line"
            )
            raise ValueError(f"{part_of}{self.source} is empty ({report.summary()}); {remedy}")

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
    """Opens one split of a corpus.

    Args:
        spec: A file, folder, glob, `lm1b:FOLDER`, `hf:NAME[:CONFIG]` or `pydoc`.
        split: The split to read.
        validation: A separate corpus for the validation split; all of `spec` is then training text.
        fields: One field (text) or two (source and target) of JSONL files and Hugging Face datasets.
        cleaning: How texts are cleaned.
        validation_share: The fraction held out for validation if the source has no validation split; 0.01 by default,
            0.05 for `pydoc`.

    Example:
        `list(parse_corpus("news.txt.xz", Split.VALIDATION, validation_share=0.02))`
    """
    if validation is None:
        return Corpus(parse_source(spec, fields, validation_share), split, cleaning)
    if split is not Split.VALIDATION:
        return Corpus(parse_source(spec, fields, 0.0), split, cleaning)
    source = parse_source(validation, fields, validation_share)
    return Corpus(source, Split.ALL if isinstance(source, Files) else split, cleaning)


def parse_source(spec: str, fields: Sequence[str] = (), validation_share: float | None = None) -> Source:
    """Opens the source that a command-line argument names."""
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
        raise ValueError(
            f"`fields` must be empty except for JSONL files and hf:NAME, got {tuple(fields)} for {spec!r}; omit them"
        )


def _find(pattern: str) -> list[Path]:
    """A file, the files directly in a folder, or the files that match a glob; sorted, without dotfiles."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    is_folder = bool(pattern) and path.is_dir()  # Path("") is the current folder
    matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207, Path.glob takes no absolute pattern
    found = path.iterdir() if is_folder else map(Path, matches)
    paths = sorted(file for file in found if file.is_file() and not file.name.startswith("."))
    if not paths:
        where = "no files directly in folder" if is_folder else "no file, folder or glob matches"
        raise ValueError(
            f"{where} {pattern!r}; give a file, a folder or a glob of files, lm1b:FOLDER, hf:NAME[:CONFIG] or pydoc"
        )
    return paths


def _common_format(paths: list[Path]) -> str:
    """The format by suffix: `tsv`, `jsonl`, otherwise `text`."""
    suffixes = {".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
    plain = [path.with_suffix("") if path.suffix in COMPRESSION else path for path in paths]
    formats = sorted({suffixes.get(path.suffix, "text") for path in plain})
    if len(formats) > 1:
        raise ValueError(
            f"{str(paths[0].parent)!r} contains files of different formats ({', '.join(formats)}); select files by a "
            "glob, or put their format (text:, tsv: or jsonl:) before the name"
        )
    return formats[0]
