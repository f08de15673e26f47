"""Sources: where texts lie and how they are split, one type a family.

Plain files, the One Billion Word benchmark's folder, a Hugging Face dataset, and the English that comes with Python.
A source without splits of its own is split by a hash of each text, so that neither the order of lines nor the
sharding matters. This module knows nothing of cleaning, reports or tokens.
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
from pathlib import Path
from typing import Any, final

from diffusionbert.errors import reason_of
from diffusionbert.text.reading import TEXT_FIELD, Fields, Format, Item, Pair, Place, PlainText, Shard, content_hash


class Split(Enum):
    """The part of a corpus that is read."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"
    ALL = "all"
    """Training and validation together: for a file that is a split of its own. Of a Hub dataset with a validation split
    of its own, training alone."""


@dataclass(frozen=True)
class Part:
    """The texts whose hash, as a fraction, lies in [low, high)."""

    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of(cls, split: Split, validation_share: float) -> Part:
        """Validation is a share of the whole, training the rest."""
        if not 0 <= validation_share < 1:
            raise ValueError(f"the validation share is {validation_share}, but must lie in [0, 1): 0.01 is usual")
        if split is Split.TRAIN:
            return cls(validation_share, 1.0)
        return cls(0.0, validation_share) if split is Split.VALIDATION else cls()

    def has(self, content: str | Pair) -> bool:
        """Whether a text lies in this part; pairs with the same source stay together."""
        if (self.low, self.high) == (0.0, 1.0):
            return True
        text = content if isinstance(content, str) else content.source
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return self.low <= int.from_bytes(digest, "big") / 2**64 < self.high


class Source(ABC):
    """Where texts lie; one final type a family."""

    @property
    @abstractmethod
    def paired(self) -> bool:
        """Whether it gives pairs."""

    @abstractmethod
    def __str__(self) -> str:
        """How people call it."""

    @abstractmethod
    def identity(self) -> str:
        """All that decides its texts, for cache keys; opens no file."""

    @abstractmethod
    def contents(self) -> frozenset[str] | None:
        """Hashes of all texts but a test split's, by which copies are known; None where there are no files."""

    @abstractmethod
    def part(self, split: Split) -> Part:
        """Which of `items(split)` belong to the split; raises if the source has no such split."""

    @abstractmethod
    def items(self, split: Split) -> Iterator[Item]:
        """Reads every line in which texts of the split can be."""


@final
@dataclass(frozen=True)
class Files(Source):
    """Files of one format, one text or pair a line, without splits of their own."""

    shards: tuple[Shard, ...]
    format: Format
    validation_share: float = 0.01

    @property
    def paired(self) -> bool:
        """As the format says."""
        return self.format.paired

    def __str__(self) -> str:
        others = f" and {len(self.shards) - 1} other files" if len(self.shards) > 1 else ""
        return f"{str(self.shards[0].path)!r}{others}"

    def identity(self) -> str:
        """Names, sizes and times of the files, wherever their folder lies."""
        files = [(shard.path.name, shard.size, shard.mtime_ns) for shard in self.shards]
        return f"{self.format} {self.validation_share} {files}"

    def contents(self) -> frozenset[str] | None:
        """One of each file."""
        return frozenset(map(content_hash, self.shards))

    def part(self, split: Split) -> Part:
        """By hash; there is no test split."""
        if split is Split.TEST:
            raise ValueError("plain files have no test split: give the test file as a corpus of its own, split 'all'")
        return Part.of(split, self.validation_share)

    def items(self, split: Split) -> Iterator[Item]:
        """One file after another."""
        for shard in self.shards:
            yield from shard.items(self.format)


@final
@dataclass(frozen=True)
class OneBillionWords(Source):
    """The One Billion Word benchmark's published folder (Chelba et al. 2013) with its standard split.

    Training is `news.en-00001` to `-00099`, less the share held out for validation; the test set is
    `news.en.heldout-00000-of-00050`, on which the literature reports.
    """

    folder: Path
    validation_share: float = 0.01

    @property
    def paired(self) -> bool:
        """No."""
        return False

    def __str__(self) -> str:
        return f"'lm1b:{self.folder}'"

    def identity(self) -> str:
        """Names, sizes and times of all shards that are there."""
        shards = [Shard.at(path) for split in (Split.ALL, Split.TEST) for path in self._paths(split) if path.is_file()]
        return f"lm1b {Files(tuple(shards), PlainText(), self.validation_share).identity()}"

    def contents(self) -> frozenset[str] | None:
        """One of each training shard that is there."""
        return frozenset(content_hash(Shard.at(path)) for path in self._paths(Split.ALL) if path.is_file())

    def part(self, split: Split) -> Part:
        """By hash within the training shards, or the whole test shard; all shards of the split must be there."""
        paths = self._paths(split)
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise ValueError(
                f"{len(missing)} of the {len(paths)} {split.value} shards of the One Billion Word benchmark are not in "
                f"{str(self.folder)!r}, first {missing[0].relative_to(self.folder)}: unpack the whole archive there, "
                "or name the shards you have by a glob"
            )
        return Part.of(split, self.validation_share)

    def items(self, split: Split) -> Iterator[Item]:
        """One shard after another."""
        for path in self._paths(split):
            yield from Shard.at(path).items(PlainText())

    def _paths(self, split: Split) -> list[Path]:
        if split is Split.TEST:
            return [self.folder / "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050"]
        training = self.folder / "training-monolingual.tokenized.shuffled"
        return [training / f"news.en-{number:05}-of-00100" for number in range(1, 100)]


@final
@dataclass(frozen=True)
class HuggingFace(Source):
    """A dataset of the Hugging Face Hub, streamed; without a validation split of its own, it is cut from training."""

    name: str
    config: str | None = None
    fields: Fields = TEXT_FIELD
    validation_share: float = 0.01

    @property
    def paired(self) -> bool:
        """Whether two fields are named."""
        return self.fields.paired

    def __str__(self) -> str:
        return f"'hf:{self.name}'" if self.config is None else f"'hf:{self.name}:{self.config}'"

    def identity(self) -> str:
        """Its name: the Hub's later changes to a dataset are not seen."""
        return repr(self)

    def contents(self) -> frozenset[str] | None:
        """None: the dataset is streamed, and known by its name alone."""
        return None

    def part(self, split: Split) -> Part:
        """The dataset's own split, or a share of its training split."""
        if split is Split.TEST and "test" not in self._own_splits:
            raise ValueError(f"dataset {self.name!r} has no test split, only {', '.join(self._own_splits)}")
        return Part() if "validation" in self._own_splits else Part.of(split, self.validation_share)

    def items(self, split: Split) -> Iterator[Item]:
        """Example after example."""
        own = split.value if split.value in self._own_splits else "train"
        examples = self._ask("load_dataset", split=own, streaming=True)
        for number, example in enumerate(examples, start=1):
            yield Item(self.fields.pick(example), Place(f"hf:{self.name}/{own}", number))

    @cached_property
    def _own_splits(self) -> tuple[str, ...]:
        return tuple(self._ask("get_dataset_split_names"))

    def _ask(self, function: str, **options: Any) -> Any:
        try:
            datasets = importlib.import_module("datasets")
        except ImportError:
            raise ValueError(
                f"'hf:{self.name}' needs the package datasets: pip install 'diffusionbert[data]'"
            ) from None
        try:
            return getattr(datasets, function)(self.name, self.config, **options)
        except Exception as error:  # whatever the library stumbles over, the user gets one line
            raise ValueError(
                f"dataset {self.name!r} (config {self.config!r}) cannot be opened ({reason_of(error)}): check its "
                "name and config, and the connection to the Hub"
            ) from error


@final
@dataclass(frozen=True)
class PythonDocumentation(Source):
    """The English sentences in Python's own help topics, which are there wherever Python is."""

    validation_share: float = 0.05

    @property
    def paired(self) -> bool:
        """No."""
        return False

    def __str__(self) -> str:
        return "'pydoc'"

    def identity(self) -> str:
        """The text itself, which differs between versions of Python."""
        return f"pydoc {self.validation_share} {min(self.contents())}"

    def contents(self) -> frozenset[str]:
        """One of the whole text."""
        texts = "\n".join(item.content for item in self.items(Split.ALL) if isinstance(item.content, str))
        return frozenset({hashlib.sha256(texts.encode()).hexdigest()})

    def part(self, split: Split) -> Part:
        """By hash; there is no test split."""
        if split is Split.TEST:
            raise ValueError("'pydoc' has no test split: use its validation split")
        return Part.of(split, self.validation_share)

    def items(self, split: Split) -> Iterator[Item]:
        """Prose alone, each sentence once: no headings, tables, signatures or code."""
        from pydoc_data.topics import topics

        paragraphs = re.split(r"\n\s*\n", "\n\n".join(topics.values()))
        sentences = (
            sentence
            for paragraph in paragraphs
            for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", _unmarked(" ".join(paragraph.split())))
        )
        prose = (sentence for sentence in dict.fromkeys(sentences) if _PROSE.fullmatch(sentence))
        for number, sentence in enumerate(prose, start=1):
            yield Item(sentence, Place("pydoc", number))


# At least four words of plain letters and digits, with the punctuation of prose.
_PROSE = re.compile(r"(?!New in |Changed in |See )[A-Z][a-z]*,?(?: \(?[A-Za-z0-9][A-Za-z0-9’'/-]*\)?[,;:]?){3,}[.!?]")


def _unmarked(text: str) -> str:
    """Takes off bullets, footnote numbers and the marks around *names* and "code" that is a single word."""
    text = re.sub(r"^(?:\*|\[\d+\]) ", "", text)
    return re.sub(r'(["*])([A-Za-z]+)\1', r"\2", text)
