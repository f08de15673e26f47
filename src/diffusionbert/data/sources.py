"""Sources of text and their splits: plain files, the One Billion Word benchmark, Hugging Face datasets, Python's help.

A source without splits of its own is split by a hash of each text, independently of line order and sharding.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, final

from diffusionbert.data.files import Flaw, Format, Item, Location, Pair, Shard, content_hash, pick
from diffusionbert.reporting import reason_of


class Split(Enum):
    """A split of a corpus."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"
    ALL = "all"
    """Training and validation text together, for a file that is itself one split. For a Hub dataset that has a
    validation split, only the training split."""


HELD_OUT = 200
"""The number of validation sentences of a small corpus; with fewer, the best checkpoint would be chosen by chance."""
_LARGE = 100 * HELD_OUT  # lines; 1 % of this many is enough


class Part(NamedTuple):
    """The texts whose hash, scaled to [0, 1), lies in [low, high)."""

    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of(cls, split: Split, validation_fraction: float) -> Part:
        """Validation is the first `validation_fraction` of the hash range, training the rest."""
        if split is Split.TRAIN:
            return cls(validation_fraction, 1.0)
        return cls(0.0, validation_fraction) if split is Split.VALIDATION else cls()

    def has(self, content: str | Pair) -> bool:
        """Whether a text belongs to this part; pairs are assigned by their source."""
        if self == (0.0, 1.0):
            return True
        return self.low <= _place(content) < self.high


def _place(content: str | Pair) -> float:
    """The hash of a text, or of a pair's source, scaled to [0, 1); white space does not matter."""
    text = " ".join((content if isinstance(content, str) else content.source).split())
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class Source(ABC):
    """Where texts are stored; `str` gives its name in messages."""

    @property
    @abstractmethod
    def paired(self) -> bool:
        """Whether it contains pairs of source and target."""

    @abstractmethod
    def identity(self) -> str:
        """Identifies its texts in cache keys without opening a file."""

    @abstractmethod
    def contents(self) -> frozenset[str] | None:
        """Hashes that identify copies of its training and validation text; None if it has no files."""

    @abstractmethod
    def part(self, split: Split) -> Part:
        """The part of `items(split)` that belongs to the split; raises if the source has no such split."""

    @abstractmethod
    def items(self, split: Split) -> Iterator[Item]:
        """Yields every line that may belong to the split."""


@final
@dataclass(frozen=True)
class Files(Source):
    """Files of one format, one text or pair per line, split by hash."""

    shards: tuple[Shard, ...]
    format: Format
    validation_fraction: float = 0.01

    @property
    def paired(self) -> bool:
        return self.format.paired

    def fraction_to_hold_out(self) -> float:
        """The fraction that holds out a tenth of the distinct texts, at most 200 of them; 1 % for a large corpus.

        The count is exact for a small corpus, where a random tenth could be empty. Reads no more lines than needed.
        """
        items = [item.content for item in islice(self.items(Split.ALL), _LARGE)]
        if len(items) >= _LARGE:
            return 0.01
        found = sorted({_place(one) for one in items if not isinstance(one, Flaw)})
        count = max(2, min(HELD_OUT, len(found) // 10))
        return (found[count - 1] + found[count]) / 2 if len(found) > count else 0.1

    def __str__(self) -> str:
        others = f" and {len(self.shards) - 1} other files" if len(self.shards) > 1 else ""
        return f"{str(self.shards[0].path)!r}{others}"

    def identity(self) -> str:
        # File names without folders, so that a moved corpus keeps its cache.
        files = [(shard.path.name, shard.size, shard.mtime_ns) for shard in self.shards]
        return f"{self.format} {self.validation_fraction} {files}"

    def contents(self) -> frozenset[str] | None:
        return frozenset(map(content_hash, self.shards))

    def part(self, split: Split) -> Part:
        if split is Split.TEST:
            raise ValueError("plain files have no test split; give the test file as a separate corpus with split 'all'")
        return Part.of(split, self.validation_fraction)

    def items(self, split: Split) -> Iterator[Item]:
        for shard in self.shards:
            yield from shard.items(self.format)


@final
@dataclass(frozen=True)
class OneBillionWords(Source):
    """The published folder of the One Billion Word benchmark (Chelba et al. 2013) with its standard split.

    The training text is `news.en-00001` to `-00099` without the held-out validation fraction. The test set is
    `news.en.heldout-00000-of-00050`, as in the literature.
    """

    folder: Path
    validation_fraction: float = 0.01
    paired = False

    def __str__(self) -> str:
        return f"'lm1b:{self.folder}'"

    def identity(self) -> str:
        return f"lm1b {self._files(Split.ALL).identity()} {self._files(Split.TEST).identity()}"

    def contents(self) -> frozenset[str] | None:
        return self._files(Split.ALL).contents()

    def part(self, split: Split) -> Part:
        paths = self._paths(split)
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise ValueError(
                f"{len(missing)} of the {len(paths)} {split.value} shards of the One Billion Word benchmark are not in "
                f"{str(self.folder)!r}, first {missing[0].relative_to(self.folder)}; unpack the whole archive there, "
                "or give the shards you have as a glob"
            )
        return Part.of(split, self.validation_fraction)

    def items(self, split: Split) -> Iterator[Item]:
        return self._files(split).items(split)

    def _files(self, split: Split) -> Files:
        shards = [Shard.at(path) for path in self._paths(split) if path.is_file()]
        return Files(tuple(shards), Format(), self.validation_fraction)

    def _paths(self, split: Split) -> list[Path]:
        if split is Split.TEST:
            return [self.folder / "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050"]
        training = self.folder / "training-monolingual.tokenized.shuffled"
        return [training / f"news.en-{number:05}-of-00100" for number in range(1, 100)]


@final
@dataclass(frozen=True)
class HuggingFace(Source):
    """A streamed Hugging Face dataset; if it has no validation split, one is held out from its training split."""

    name: str
    config: str | None = None
    fields: tuple[str, ...] = ("text",)
    validation_fraction: float = 0.01

    @property
    def paired(self) -> bool:
        return len(self.fields) == 2

    def __str__(self) -> str:
        return f"'hf:{self.name}'" if self.config is None else f"'hf:{self.name}:{self.config}'"

    def identity(self) -> str:
        """Its name; later changes to the dataset on the Hub are not detected."""
        return repr(self)

    def contents(self) -> frozenset[str] | None:
        return None

    def part(self, split: Split) -> Part:
        if split is Split.TEST and "test" not in self._own_splits:
            raise ValueError(
                f"dataset {self.name!r} has no test split, only {', '.join(self._own_splits)}; use one of them"
            )
        return Part() if "validation" in self._own_splits else Part.of(split, self.validation_fraction)

    def items(self, split: Split) -> Iterator[Item]:
        own = split.value if split.value in self._own_splits else "train"
        examples = self._call("load_dataset", split=own, streaming=True)
        for number, example in enumerate(examples, start=1):
            yield Item(pick(example, self.fields), Location(f"hf:{self.name}/{own}", number))

    @cached_property
    def _own_splits(self) -> tuple[str, ...]:
        return tuple(self._call("get_dataset_split_names"))

    def _call(self, function: str, **options: Any) -> Any:
        try:
            datasets = importlib.import_module("datasets")
        except ImportError:
            raise ValueError(
                f"'hf:{self.name}' needs the package datasets: pip install 'diffusionbert[data]'"
            ) from None
        try:
            return getattr(datasets, function)(self.name, self.config, **options)
        except Exception as error:  # the library raises many types; users get one line
            raise ValueError(
                f"dataset {self.name!r} (config {self.config!r}) cannot be opened ({reason_of(error)}); check its "
                "name and config, and the connection to the Hub"
            ) from error


@final
@dataclass(frozen=True)
class PythonDocumentation(Source):
    """The English sentences of Python's help topics, available without a download."""

    validation_fraction: float = 0.05
    paired = False

    def __str__(self) -> str:
        return "'pydoc'"

    def identity(self) -> str:
        # A hash of the text, which differs between versions of Python.
        return f"pydoc {self.validation_fraction} {min(self.contents())}"

    def contents(self) -> frozenset[str]:
        texts = "\n".join(str(item.content) for item in self.items(Split.ALL))
        return frozenset({hashlib.sha256(texts.encode()).hexdigest()})

    def part(self, split: Split) -> Part:
        if split is Split.TEST:
            raise ValueError("'pydoc' has no test split; use its validation split")
        return Part.of(split, self.validation_fraction)

    def items(self, split: Split) -> Iterator[Item]:
        """Yields each sentence of prose once; skips headings, tables, signatures and code."""
        from pydoc_data.topics import topics

        sentences: dict[str, None] = {}
        for paragraph in re.split(r"\n\s*\n", "\n\n".join(topics.values())):
            # Drop bullets, footnote numbers, and the marks around *names* and one-word "code".
            text = re.sub(r"^(?:\*|\[\d+\]) ", "", " ".join(paragraph.split()))
            text = re.sub(r'(["*])([A-Za-z]+)\1', r"\2", text)
            sentences |= dict.fromkeys(re.split(r"(?<=[.!?]) (?=[A-Z])", text))
        for number, sentence in enumerate(filter(_PROSE.fullmatch, sentences), start=1):
            yield Item(sentence, Location("pydoc", number))


# At least four words of plain letters and digits, with ordinary punctuation.
_PROSE = re.compile(r"(?!New in |Changed in |See )[A-Z][a-z]*,?(?: \(?[A-Za-z0-9][A-Za-z0-9’'/-]*\)?[,;:]?){3,}[.!?]")
