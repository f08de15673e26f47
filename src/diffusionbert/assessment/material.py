"""What a model is assessed on: the sentences of a corpus, which of them are scored, and names that make them pairs.

A sentence is named by its number in the corpus as read, whichever others a model had to leave out as too long, so that
two models are compared on the same sentences. A part of a corpus is always the same part, for every model and seed,
and a smaller part lies within a larger one. Knows a model's vocabulary and room, and nothing of likelihoods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from diffusionbert.model_folder import training_source
from diffusionbert.text.cleaning import Cleaning
from diffusionbert.text.corpus import Corpus, Report, parse_corpus, parse_source
from diffusionbert.text.sources import Files, HuggingFace, PythonDocumentation, Source, Split
from diffusionbert.text.vocabulary import Vocabulary
from diffusionbert.training.config import DataConfig


@dataclass(frozen=True)
class Provenance:
    """Where sentences were read, in words."""

    corpus: str
    split: Split
    report: str = ""
    """What was kept and skipped."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """What a model was trained on."""

    data: DataConfig
    contents: frozenset[str] | None = None
    """By which its text is known, also as a copy (`Source.contents`); None if the model does not say."""


_SEEN = "the model was trained on these sentences: none of these figures is about new text"
_UNTOLD = "whether the model was trained on these sentences cannot be told: these figures may not be about new text"


@final
@dataclass(frozen=True, eq=False)
class Material:
    """Sentences as a model sees them."""

    provenance: Provenance
    texts: tuple[str, ...]
    """All of them, as read."""
    tokens: tuple[tuple[int, ...], ...]
    """The rows of all of them, special tokens included."""
    numbers: tuple[int, ...]
    """Those that are scored, rising."""
    num_overlong: int
    """Sentences longer than the model reads, which are not scored."""
    vocabulary: Vocabulary

    @property
    def scored(self) -> tuple[str, ...]:
        """The sentences that are scored."""
        return tuple(self.texts[number] for number in self.numbers)

    @cached_property
    def decoded(self) -> tuple[str, ...]:
        """All sentences, cut into tokens and put together again, as samples are: like beside like."""
        return tuple(self.vocabulary.decode(row) for row in self.tokens)

    def some(self, number: int) -> list[int]:
        """So many sentences, or all if there are fewer: always the same ones."""
        return sorted(sorted(range(len(self.texts)), key=_chance)[:number])

    def to_json(self) -> dict[str, Any]:
        """Where they come from, and hashes by which anyone can tell whether theirs are the same."""
        return {
            "corpus": self.provenance.corpus,
            "split": self.provenance.split.value,
            "sha256": sha256_of(self.scored),
            "num_sentences": len(self.numbers),
            "corpus_sha256": sha256_of(self.texts),
            "num_in_corpus": len(self.texts),
            "num_overlong": self.num_overlong,
            "report": self.provenance.report,
        }


def gather(
    corpus: Corpus,
    name: str,
    vocabulary: Vocabulary,
    max_length: int,
    sentences: int | None = None,
    trained: Trained | None = None,
) -> Material:
    """Reads a corpus; of the sentences of at most `max_length` tokens, so many are to be scored, else all.

    If the model was `trained` on them, or nobody can tell, a note says so.
    """
    if sentences is not None and sentences < 2:
        raise ValueError(f"an interval over sentences needs at least two of them, asked for {sentences}; 1000 is usual")
    if corpus.paired:
        raise ValueError(f"{name!r} holds pairs, but single sentences are assessed; give their targets as a text file")
    report = Report()
    texts = tuple(str(record.content) for record in corpus.records(report))
    num_special = vocabulary.num_special(paired=False)
    rows = tuple(map(tuple, vocabulary.encode(texts)))
    lengths = [len(row) - num_special for row in rows]
    fitting = [number for number, length in enumerate(lengths) if 1 <= length <= max_length]
    num_overlong = sum(length > max_length for length in lengths)
    if len(fitting) < 2:
        raise ValueError(
            f"{len(fitting)} of the {len(texts)} sentences of {name!r} fit into the {max_length} tokens that this "
            "model reads, but an interval needs two; give a corpus with more sentences"
        )
    chosen = fitting if sentences is None else sorted(sorted(fitting, key=_chance)[:sentences])
    notes = () if trained is None else _warnings(corpus, trained)
    provenance = Provenance(name, corpus.split, report.summary(), notes)
    return Material(provenance, texts, rows, tuple(chosen), num_overlong, vocabulary)


def held_out(name: str, trained: Trained, cleaning: Cleaning, fields: Sequence[str] = ()) -> Corpus:
    """The part of a corpus that a model may be tested on: its test split, else what training held out, else all."""
    source = parse_source(name, fields)
    if not isinstance(source, Files | PythonDocumentation):
        split = Split.TEST
    else:
        split = Split.VALIDATION if trained.data.validation is None and _is_training(source, trained) else Split.ALL
    return parse_corpus(name, split, fields=fields, cleaning=cleaning)


def _warnings(corpus: Corpus, trained: Trained) -> tuple[str, ...]:
    """What must be said of a part that a model may know; with a validation corpus of its own, it held nothing out."""
    held_back = {Split.TEST} | ({Split.VALIDATION} if trained.data.validation is None else set())
    if corpus.split in held_back:
        return ()
    is_training = _is_training(corpus.source, trained)
    if is_training is None:
        return (_UNTOLD,)
    return (_SEEN,) if is_training else ()


def _is_training(source: Source, trained: Trained) -> bool | None:
    """Whether a model was trained on this source or a copy of one of its files; None where that cannot be told."""
    own, known = None, trained.contents
    with suppress(OSError, ValueError):  # its files lie elsewhere, or are damaged
        own = training_source(trained.data)
        known = own.contents() if known is None else known
    if isinstance(source, HuggingFace | PythonDocumentation) and str(source) == str(own):
        return True
    contents = None if known is None else source.contents()
    return None if known is None or contents is None else not known.isdisjoint(contents)


def sha256_of(texts: Sequence[str]) -> str:
    """Names texts: each followed by a line feed, as UTF-8, so that `sha256sum` of such a file agrees."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def _chance(number: int) -> bytes:
    """Orders sentences at random, in the same way for ever."""
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=8).digest()
