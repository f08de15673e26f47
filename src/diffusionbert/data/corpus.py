"""Corpora: the cleaned texts of one split of a source, streamed, with a report on the lines that cannot be used.

`parse_corpus` opens a corpus from a command-line argument:

    news.txt   news.txt.xz   shards/   'shards/*.jsonl.gz'   pairs.tsv   lm1b:FOLDER   hf:NAME[:CONFIG]   pydoc

No line is dropped silently: unusable lines are counted by reason, with the location of the first. A corpus may be
larger than memory. This module does not depend on tokenizers.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, final

from diffusionbert.data.files import COMPRESSION, Flaw, Format, Location, Pair, Shard
from diffusionbert.data.sources import Files, HuggingFace, OneBillionWords, PythonDocumentation, Source, Split
from diffusionbert.storage.limits import require_regular

VERSION = 1
"""Increment this when the same files yield different sentences; it is part of every cache key."""
MAX_CHARACTERS = 10_000
"""The maximum length of a text; longer ones are skipped and counted."""


@dataclass
class Tally:
    """A count, and the location of the first occurrence."""

    count: int
    first: str


@dataclass
class Report:
    """Counts of the lines that were kept and skipped; updated while a corpus is read."""

    kept: int = 0
    elsewhere: int = 0
    """Lines that belong to another split."""
    skipped: dict[str, Tally] = field(default_factory=dict)

    def skip(self, reason: str, location: Location) -> None:
        self.skipped.setdefault(reason, Tally(0, str(location))).count += 1

    def summary(self) -> str:
        """The counts in one line, such as `2 kept; 1 skipped: 1 empty (first at a.txt:3)`."""
        parts = [f"{self.kept:,} kept"]
        if self.skipped:
            reasons = (f"{tally.count:,} {reason} (first at {tally.first})" for reason, tally in self.skipped.items())
            parts.append(f"{sum(tally.count for tally in self.skipped.values()):,} skipped: {', '.join(reasons)}")
        if self.elsewhere:
            parts.append(f"{self.elsewhere:,} in another split")
        return "; ".join(parts)


@dataclass(frozen=True)
class Cleaning:
    """Settings for cleaning texts; runs of whitespace always become single spaces."""

    lower: bool = False
    detokenize: bool = False
    """Remove the spaces that One Billion Words and the Penn Treebank have around punctuation."""

    def check(self, text: str) -> str | Flaw:
        """Normalizes whitespace; returns the flaw if the text cannot be used."""
        text = " ".join(text.split())
        if not text:
            return Flaw.EMPTY
        if len(text) > MAX_CHARACTERS:
            return Flaw.LONG
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can contain half a surrogate pair
            return Flaw.NOT_UTF8
        return text

    def record(self, content: str | Pair, location: Location) -> Record:
        """Detokenizes and lower-cases the content according to the settings."""
        styled = [detokenize(text) if self.detokenize else text for text in _texts(content)]
        shown = [text.lower() for text in styled] if self.lower else styled
        return Record(shown[0] if isinstance(content, str) else Pair(*shown), location, styled[-1])


AS_IT_IS = Cleaning()


class Record(NamedTuple):
    """A text or pair that was kept, and where it was read."""

    content: str | Pair
    location: Location
    cased: str
    """The text, or the target of a pair, before it was lower-cased."""


@final
@dataclass(frozen=True)
class Corpus:
    """One split of a source, cleaned. Each iteration starts over and yields the texts, both texts of a pair."""

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
        """Yields the texts to keep and counts the others in `report`; raises at the end if none were kept."""
        part, num_kept = self.source.part(self.split), 0
        for item in self.source.items(self.split):
            content = self._checked(item.content)
            if isinstance(content, Flaw):
                report.skip(content.value, item.location)
            elif not part.has(content):
                report.elsewhere += 1
            else:
                num_kept += 1
                report.kept += 1
                yield self.cleaning.record(content, item.location)
        if not num_kept:
            part_of = "" if self.split is Split.ALL else f"the {self.split.value} split of "
            remedy = "give UTF-8 text, one sentence per line"
            if report.elsewhere:
                remedy = "give more sentences, or separate validation text (--validation FILE)"
            raise ValueError(f"{part_of}{self.source} is empty ({report.summary()}); {remedy}")

    def _checked(self, content: str | Pair | Flaw) -> str | Pair | Flaw:
        if isinstance(content, Flaw):
            return content
        if isinstance(content, str):
            return self.cleaning.check(content)
        source, target = map(self.cleaning.check, content)
        if isinstance(source, Flaw):
            return source
        return target if isinstance(target, Flaw) else Pair(source, target)

    def __iter__(self) -> Iterator[str]:
        for record in self.records(Report()):
            yield from _texts(record.content)


def _texts(content: str | Pair) -> Sequence[str]:
    return (content,) if isinstance(content, str) else content


def parse_corpus(
    spec: str,
    split: Split = Split.TRAIN,
    *,
    validation: str | None = None,
    held_out: float | None = None,
    fields: Sequence[str] = (),
    cleaning: Cleaning = AS_IT_IS,
) -> Corpus:
    """Opens one split of a corpus.

    Args:
        spec: A file, folder, glob, `lm1b:FOLDER`, `hf:NAME[:CONFIG]` or `pydoc`.
        split: The split to read.
        validation: A separate corpus for the validation split; all of `spec` is then training text.
        held_out: The fraction of the files' texts held out for validation; None means 0.01.
        fields: One field (text) or two (source and target) of JSONL files and Hugging Face datasets.
        cleaning: How texts are cleaned.

    Example:
        `list(parse_corpus("news.txt.xz", Split.VALIDATION))`
    """
    if validation is not None and split is Split.VALIDATION:
        source = parse_source(validation, fields)
        return Corpus(source, Split.ALL if isinstance(source, Files) else split, cleaning)
    source = parse_source(spec, fields)
    if held_out is not None and isinstance(source, Files):
        source = replace(source, validation_fraction=held_out)
    return Corpus(source, split if validation is None else Split.ALL, cleaning)


def parse_source(spec: str, fields: Sequence[str] = ()) -> Source:
    """Opens the source named by a command-line argument."""
    if len(fields) > 2 or not all(fields):
        raise ValueError(f"`fields` must be one name (text) or two (source and target), got {tuple(fields)}")
    named = tuple(fields) or ("text",)
    family, _, rest = spec.partition(":")
    source: Source
    if family == "hf" and rest:
        name, _, config = rest.partition(":")
        return HuggingFace(name, config or None, named)
    if spec == "pydoc":
        source = PythonDocumentation()
    elif family == "lm1b":
        source = OneBillionWords(Path(rest).expanduser())
    else:
        is_explicit = family in ("text", "tsv", "jsonl")
        paths = _find(rest if is_explicit else spec)
        format = family if is_explicit else _common_format(paths)
        shards = tuple(map(Shard.at, paths))
        if format == "jsonl":
            return Files(shards, Format("jsonl", named))
        source = Files(shards, Format("tsv" if format == "tsv" else "text"))
    if fields:
        raise ValueError(
            f"`fields` must be empty except for JSONL files and hf:NAME, got {tuple(fields)} for {spec!r}; omit them"
        )
    return source


def _find(pattern: str) -> list[Path]:
    """A file, the files directly in a folder, or the files that match a glob; sorted, without dotfiles."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.exists() and not path.is_dir():
        require_regular(path)
    if path.is_absolute() and glob.has_magic(path.parts[1] if len(path.parts) > 1 else ""):
        raise ValueError(f"{pattern!r} searches the whole file system; give a folder before the first wildcard")
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


# ---- detokenization -------------------------------------------------------------------------------------------------

_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
Rule = tuple[str, str, str]
"""A regular expression, its replacement, and characters of which each of its matches has one."""
_WORD_RULES: list[Rule] = [
    (r"\\([/*])", r"\1", "\\"),  # the Treebank has 1\/2
    (r"`` ?", '"', "`"),
    (r" ?''", '"', "'"),
    (r"(?i) (n't)\b", r"\1", "'"),
    (r"(?i)(?<=[\w.]) '(s|t|re|ve|ll|d|m)\b", r"'\1", "'"),
]
_PUNCTUATION_RULES: list[Rule] = [
    (r"([(\[{]) ", r"\1", "([{"),
    (r" ([)\]}])", r"\1", ")]}"),
    (r"([$£€]) (?=\d)", r"\1", "$£€"),
    (r""" (\.\.\.|[,.;:?!%])(?=[ "')\]]|$)""", r"\1", ",.;:?!%"),
]


def detokenize(text: str) -> str:
    """Removes the spaces around punctuation, except where the side is ambiguous (a lone `'`, ` - `).

    >>> detokenize("it 's fine , thanks .")
    "it's fine, thanks."
    """
    for name, bracket in _BRACKETS.items():
        text = text.replace(name, bracket)
    return substituted(_close_quotes(substituted(text, _WORD_RULES)), _PUNCTUATION_RULES)


def substituted(text: str, rules: Iterable[Rule]) -> str:
    """Applies regular expressions and their replacements in order."""
    for pattern, replacement, characters in rules:
        if any(character in text for character in characters):  # far faster than to search for the expression
            text = re.sub(pattern, replacement, text)
    return text


def _close_quotes(text: str) -> str:
    """Attaches `"` to the text it encloses: alternately if their number is even, else only at the start and end."""
    pieces = text.split(' " ')
    inner = len(pieces) - 1
    opened, closed = text.startswith('" '), text.endswith(' "')
    if inner == 0 or (inner + opened + closed) % 2 == 0:
        marks = itertools.cycle(['" ', ' "'] if opened else [' "', '" '])
        text = pieces[0] + "".join(mark + piece for mark, piece in zip(marks, pieces[1:], strict=False))
        text = ('"' + text[2:]) if opened else text
        text = (text[:-2] + '"') if closed else text
    return text
