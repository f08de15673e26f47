"""The evaluation set: the sentences of a corpus, and which of them are scored.

A sentence is identified by its number in the corpus as read, no matter which other sentences are too long for a model,
so that models are compared on the same sentences. A subset is the same for every model and seed, and larger subsets
contain smaller ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import final

from diffusionbert.data.corpus import Cleaning, Corpus, Report, parse_corpus, parse_source
from diffusionbert.data.encoding import CHUNK
from diffusionbert.data.files import Pair
from diffusionbert.data.sources import Files, HuggingFace, PythonDocumentation, Source, Split
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.inference.engine import Engine
from diffusionbert.parallel import current
from diffusionbert.reporting import logger
from diffusionbert.training.config import DataConfig
from diffusionbert.training.model_folder import training_source

_SEEN = "the model was trained on these sentences: these figures are not for unseen text"
_UNKNOWN = "it is unknown whether the model was trained on these sentences: these figures may not be for unseen text"


@dataclass(frozen=True)
class Trained:
    """What a model was trained on."""

    data: DataConfig
    contents: frozenset[str] | None = None
    """Hashes of its files (`Source.contents`), which also identify copies; None if unknown."""


@dataclass(frozen=True)
class EvaluationSetRecord:
    """The description of the evaluation set in a result; hashes are those of `sha256sum` for one sentence per line."""

    corpus: str
    split: Split
    sha256: str
    """The hash of the scored sentences."""
    num_sentences: int
    """The number of scored sentences."""
    corpus_sha256: str
    """The hash of all sentences."""
    num_in_corpus: int
    num_overlong: int
    """The number of sentences too long for the model, which are not scored."""
    report: str = ""
    """What was kept and what was skipped while reading."""


@final
@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """An evaluation set, encoded for a model."""

    record: EvaluationSetRecord
    notes: tuple[str, ...]
    """Warnings about text that was skipped, or that the model may have been trained on."""
    texts: tuple[str, ...]
    """All sentences, as read."""
    sequences: tuple[tuple[int, ...], ...]
    """The tokens of all sentences, including special tokens."""
    numbers: tuple[int, ...]
    """The numbers of the scored sentences, ascending."""
    vocabulary: Vocabulary
    sources: tuple[str, ...] | None = None
    """For pairs, the source of each sentence; the sentence is its target."""

    @property
    def scored(self) -> tuple[str, ...]:
        return tuple(self.texts[number] for number in self.numbers)

    @property
    def scored_sources(self) -> tuple[str, ...] | None:
        return None if self.sources is None else tuple(self.sources[number] for number in self.numbers)

    @cached_property
    def decoded(self) -> tuple[str, ...]:
        """All sentences after a round trip through the tokenizer, since generated text is decoded from tokens, too."""
        own = self.sequences if self.sources is None else self.vocabulary.encode(self.texts)
        return tuple(self.vocabulary.decode(sequence) for sequence in own)

    def some(self, number: int) -> list[int]:
        """The numbers of a fixed random subset of sentences, or of all sentences if there are fewer."""
        return _random_subset(range(len(self.texts)), number)


def open_evaluation_set(
    engine: Engine,
    data: str,
    *,
    split: Split | None = None,
    field: str | None = None,
    target_field: str | None = None,
    cased: bool = False,
    detokenize: bool = False,
    sentences: int | None = None,
) -> EvaluationSet:
    """Reads and encodes an evaluation set for a model.

    Args:
        engine: The model.
        data: A corpus, as for training.
        split: The split to read; None is the test split, otherwise the text held out from training, otherwise all.
        field: The field of JSON lines that holds the text, or the source of a pair.
        target_field: The field of JSON lines that holds the target of a pair.
        cased: Keep upper case even if the model was trained on lower-cased text.
        detokenize: Remove the spaces around punctuation even if training did not.
        sentences: The number of sentences to score, always the same ones; None scores all.
    """
    trained = Trained(engine.config.data, engine.training_text)
    cleaning = Cleaning(trained.data.lower and not cased, trained.data.detokenize or detokenize)
    fields = [one for one in (field, target_field) if one]
    split = default_split(data, trained, fields) if split is None else split
    is_held_out = split is Split.VALIDATION and _is_training(parse_source(data, fields), trained)
    held_out = trained.data.held_out if is_held_out else None
    corpus = parse_corpus(data, split, held_out=held_out, fields=fields, cleaning=cleaning)
    if corpus.paired != engine.paired:
        raise ValueError(
            f"{data!r} holds single sentences, but the model was trained on pairs; give a .tsv file of them"
            if engine.paired
            else f"{data!r} holds pairs, but the model was trained on single sentences; give the targets as a text file"
        )
    found = read_evaluation_set(corpus, data, engine.vocabulary, engine.max_length, sentences, trained)
    for note in found.notes:  # warn before hours of work
        logger.info("note: %s", note)
    return found


def read_evaluation_set(
    corpus: Corpus,
    name: str,
    vocabulary: Vocabulary,
    max_length: int,
    sentences: int | None = None,
    trained: Trained | None = None,
) -> EvaluationSet:
    """Reads a corpus as an evaluation set; notes say what was skipped, and whether the model may have seen it."""
    if sentences is not None and sentences < 2:
        raise ValueError(f"`sentences` must be at least two for an interval, got {sentences}; 1000 is usual")
    report = Report()
    contents = [record.content for record in corpus.records(report)]
    pairs = [one for one in contents if isinstance(one, Pair)]
    texts = tuple(pair.target for pair in pairs) if corpus.paired else tuple(map(str, contents))
    pieces = [slice(start, start + CHUNK) for start in range(0, len(texts), CHUNK)]

    def encoded(piece: slice) -> list[list[int]]:
        return vocabulary.encode_pairs(pairs[piece]) if corpus.paired else vocabulary.encode(texts[piece])

    sequences = tuple(map(tuple, chain(*current().share(pieces, encoded))))
    # Source and target share the model's positions, with one more special token between them.
    lengths = [len(sequence) - vocabulary.num_special(paired=False) for sequence in sequences]
    identified = [f"{pair.source}\t{pair.target}" for pair in pairs] if corpus.paired else list(texts)
    fitting = [number for number, length in enumerate(lengths) if 1 <= length <= max_length]
    if len(fitting) < 2:
        raise ValueError(
            f"{len(fitting)} of {len(texts)} sentences of {name!r} fit into the model's {max_length} tokens, but an "
            "interval needs two; give a corpus with more sentences"
        )
    numbers = tuple(fitting if sentences is None else _random_subset(fitting, sentences))
    record = EvaluationSetRecord(
        name,
        corpus.split,
        sha256_of([identified[number] for number in numbers]),
        len(numbers),
        sha256_of(identified),
        len(texts),
        sum(length > max_length for length in lengths),
        report.summary(),
    )
    notes = () if trained is None else _training_notes(corpus, trained)
    notes += (f"text: {record.report}",) if report.skipped else ()
    sources = tuple(pair.source for pair in pairs) if corpus.paired else None
    return EvaluationSet(record, notes, texts, sequences, numbers, vocabulary, sources)


def default_split(name: str, trained: Trained, fields: Sequence[str] = ()) -> Split:
    """The split to evaluate on: test, otherwise the text held out from training, otherwise all."""
    source = parse_source(name, fields)
    if not isinstance(source, Files | PythonDocumentation):
        return Split.TEST
    return Split.VALIDATION if trained.data.validation is None and _is_training(source, trained) else Split.ALL


def _training_notes(corpus: Corpus, trained: Trained) -> tuple[str, ...]:
    """Notes on text that the model may have seen; a run with a separate validation corpus held nothing out."""
    held_out = {Split.TEST} | ({Split.VALIDATION} if trained.data.validation is None else set())
    if corpus.split in held_out:
        return ()
    is_training = _is_training(corpus.source, trained)
    return (_UNKNOWN,) if is_training is None else (_SEEN,) if is_training else ()


def _is_training(source: Source, trained: Trained) -> bool | None:
    """Whether a model was trained on this source or on a copy of one of its files; None if unknown."""
    own, known = None, trained.contents
    with suppress(OSError, ValueError):  # its files are elsewhere, or damaged
        own = training_source(trained.data)
        known = own.contents() if known is None else known
    if isinstance(source, HuggingFace | PythonDocumentation) and str(source) == str(own):
        return True
    contents = None if known is None else source.contents()
    return None if known is None or contents is None else not known.isdisjoint(contents)


def sha256_of(texts: Sequence[str]) -> str:
    """The hash of texts, as `sha256sum` gives it for a UTF-8 file with one text per line."""
    return hashlib.sha256("".join(f"{text}\n" for text in texts).encode()).hexdigest()


def _random_subset(numbers: Sequence[int], size: int) -> list[int]:
    """A fixed random subset, ascending; larger subsets contain smaller ones."""
    chosen = sorted(numbers, key=lambda number: hashlib.blake2b(number.to_bytes(8, "big"), digest_size=8).digest())
    return sorted(chosen[:size])
