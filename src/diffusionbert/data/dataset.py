"""Encoded corpora: the token sequences of a corpus in memory-mapped files.

`encode_corpus` encodes a corpus once into a cache folder whose name is a hash of the corpus, the vocabulary and the
settings. The folder appears complete or not at all. The same pass counts tokens and lengths. The editable positions of
a sequence are those between its last two special tokens. This module does not depend on networks or noise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.data.corpus import Corpus, Record, Report
from diffusionbert.data.files import Pair
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.reporting import progress_line
from diffusionbert.storage.files import build_once
from diffusionbert.storage.schema import from_json, to_json

VERSION = 2
"""To be incremented when the files or their meaning change; part of every cache key."""
CHUNK = 8192
"""Texts that are encoded at a time: enough to use all cores, few enough to fit in memory."""


@final
@dataclass(frozen=True, eq=False)
class Encoded:
    """Token sequences in memory-mapped files, with token and length counts."""

    folder: Path
    tokens: NDArray[Any]
    """All sequences, concatenated."""
    offsets: NDArray[np.int64]
    """Sequence i is `tokens[offsets[i]:offsets[i + 1]]`."""
    special: Tensor
    """Which ids are special, [V]."""
    pad_id: int
    counts: Tensor
    """How often each id occurs at an editable position, [V]; `TokenInformation` is computed from it."""
    length_histogram: Tensor
    """At n, the number of sequences with n editable tokens, [max_length + 1]."""
    report: Report
    fingerprint: str
    """A hash of the sequences, for evaluation protocols."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens per sequence, including special tokens."""
        return np.diff(self.offsets)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Makes a batch, padded on the right; the example keys of its sequences are their indices."""
        chosen = np.asarray(indices, dtype=np.int64)
        starts, ends = self.offsets[chosen, None], self.offsets[chosen + 1, None]
        flat = starts + np.arange((ends - starts).max())
        attention_mask = torch.from_numpy(flat < ends)
        flat = np.minimum(flat, len(self.tokens) - 1)
        tokens = torch.from_numpy(self.tokens[flat].astype(np.int64)).masked_fill(~attention_mask, self.pad_id)
        special = self.special[tokens] & attention_mask
        num_following = special.flip(1).cumsum(1).flip(1)  # special tokens from here on
        editable = attention_mask & ~special & (num_following == 1)
        strata = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(len(chosen), 2)
        return Batch(tokens, attention_mask, editable, torch.from_numpy(chosen), strata)


def encode_corpus(corpus: Corpus, vocabulary: Vocabulary, cache: Path, *, max_length: int = 128) -> Encoded:
    """Opens the encoded corpus in the cache, after encoding it if necessary.

    Args:
        corpus: The texts.
        vocabulary: The tokenizer.
        cache: The folder in which encoded corpora are kept.
        max_length: The maximum number of tokens per sequence, including special tokens; longer ones are skipped.
    """
    smallest = vocabulary.num_special(paired=corpus.paired) + 1
    if max_length < smallest:
        raise ValueError(
            f"`max_length` must be >= {smallest} (special tokens included), got {max_length}; 128 is usual"
        )
    settings = [VERSION, corpus.fingerprint, vocabulary.fingerprint, max_length]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    return open_encoded(build_once(cache / key, lambda folder: _write(folder, corpus, vocabulary, max_length)))


def open_encoded(folder: Path) -> Encoded:
    """Opens a folder made by `encode_corpus`; tokens are read from disk on access."""
    try:
        values = json.loads((folder / "encoded.json").read_text(encoding="utf-8"))
        # Indexing a memmap is slow; indexing an array over the same pages is not.
        tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype=values["dtype"], mode="r"))
        offsets = np.asarray(np.memmap(folder / "offsets.bin", dtype=np.int64, mode="r"))
        counts = torch.from_numpy(np.load(folder / "counts.npy", allow_pickle=False))
        if len(offsets) != values["num_sequences"] + 1 or len(tokens) != offsets[-1]:
            raise ValueError("it is incomplete")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(folder)!r} is not an encoded corpus ({error}); delete that folder and encode again"
        ) from error
    special = torch.zeros(len(counts), dtype=torch.bool)
    special[values["special"]] = True
    histogram, report = torch.tensor(values["length_histogram"]), from_json(values["report"], Report)
    return Encoded(folder, tokens, offsets, special, values["pad_id"], counts, histogram, report, values["fingerprint"])


def _write(folder: Path, corpus: Corpus, vocabulary: Vocabulary, max_length: int) -> None:
    """Encodes and counts in one pass over the corpus, with one chunk in memory."""
    dtype = np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.uint32)
    special, report = vocabulary.special.numpy(), Report()
    counts, histogram = np.zeros(vocabulary.size, np.int64), np.zeros(max_length + 1, np.int64)
    tokens_hash, lengths_hash, end = hashlib.sha256(), hashlib.sha256(), np.int64(0)
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "offsets.bin").open("wb") as offsets_file:
        offsets_file.write(end.tobytes())
        for tokens, lengths in _encoded_sequences(corpus, vocabulary, max_length, report):
            editable = _editable(special[tokens], lengths)
            counts += np.bincount(tokens[editable], minlength=len(counts))
            histogram += np.bincount(_sums(editable, lengths), minlength=len(histogram))
            tokens_file.write(tokens.astype(dtype).tobytes())
            offsets_file.write((end + lengths.cumsum()).tobytes())
            end += lengths.sum()
            tokens_hash.update(tokens.astype("<u4").tobytes())
            lengths_hash.update(lengths.astype("<u4").tobytes())
    if not report.kept:
        raise ValueError(
            f"no sequence is left ({report.summary()}); raise `max_length` from {max_length}, or shorten the texts"
        )
    np.save(folder / "counts.npy", counts, allow_pickle=False)
    description = {
        "dtype": dtype.name,
        "num_sequences": int(histogram.sum()),
        "special": vocabulary.special.nonzero()[:, 0].tolist(),
        "pad_id": vocabulary.pad_id,
        "length_histogram": histogram.tolist(),
        "report": to_json(report),
        "fingerprint": hashlib.sha256(tokens_hash.digest() + lengths_hash.digest()).hexdigest(),
    }
    (folder / "encoded.json").write_text(json.dumps(description, indent=1), encoding="utf-8")


def _encoded_sequences(
    corpus: Corpus, vocabulary: Vocabulary, max_length: int, report: Report
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields the usable sequences chunk by chunk, concatenated, with their lengths; counts the others in `report`."""
    num_special = vocabulary.num_special(paired=corpus.paired)
    special = vocabulary.special.numpy()
    with progress_line(None) as show:
        num_encoded = 0
        for chunk, sequences in _encoded_chunks(corpus.records(report), vocabulary):
            lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
            tokens = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
            is_special = special[tokens]
            reasons = {
                f"longer than {max_length} tokens": lengths > max_length,
                "with a special token in the text": _sums(is_special, lengths) != num_special,
                "without tokens": _sums(_editable(is_special, lengths), lengths) == 0,
            }
            kept = np.ones(len(sequences), dtype=np.bool_)
            for reason, flawed in reasons.items():
                for index in (kept & flawed).nonzero()[0].tolist():
                    report.kept -= 1
                    report.skip(reason, chunk[index].location)
                kept &= ~flawed
            if kept.any():
                yield tokens[np.repeat(kept, lengths)], lengths[kept]
            num_encoded += len(chunk)
            show(num_encoded, "sentences encoded")


def _encoded_chunks(
    records: Iterator[Record], vocabulary: Vocabulary
) -> Iterator[tuple[list[Record], list[list[int]]]]:
    """Reads the next chunk while the tokenizer encodes the last one on all cores."""
    with ThreadPoolExecutor(max_workers=1) as background:
        waiting: list[tuple[list[Record], Future[list[list[int]]]]] = []
        while chunk := list(islice(records, CHUNK)):
            waiting.append((chunk, background.submit(_encode, chunk, vocabulary)))
            if len(waiting) > 1:
                done, encoded = waiting.pop(0)
                yield done, encoded.result()
        for done, encoded in waiting:
            yield done, encoded.result()


def _encode(chunk: list[Record], vocabulary: Vocabulary) -> list[list[int]]:
    pairs = [record.content for record in chunk if isinstance(record.content, Pair)]
    if pairs:
        return vocabulary.encode_pairs(pairs)
    return vocabulary.encode([record.content for record in chunk if isinstance(record.content, str)])


def _sums(flags: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of flags that are set in each sequence."""
    sums: NDArray[np.int64] = np.add.reduceat(flags, lengths.cumsum() - lengths, dtype=np.int64)
    return sums


def _editable(is_special: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The positions between the last two special tokens of each sequence: exactly one special token follows."""
    up_to = is_special.cumsum()
    num_following = np.repeat(up_to[lengths.cumsum() - 1], lengths) - up_to
    editable: NDArray[np.bool_] = ~is_special & (num_following == 1)
    return editable
