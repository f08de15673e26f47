"""Encoded corpora: all rows of a corpus in memory-mapped files, written once and opened at once ever after.

`encode_corpus` keeps them in a cache, in a folder named by everything that decides them. The folder appears whole
or not at all, so a process that is killed, or a second one beside it, does no harm. The same pass counts tokens and
lengths. A row is what `vocabulary` says it is: what may be edited stands between its last two special tokens. This
module knows nothing of networks or noise.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.shapes import Batch
from diffusionbert.text.cache import made_once
from diffusionbert.text.corpus import Corpus, Record, Report
from diffusionbert.text.reading import Pair
from diffusionbert.text.vocabulary import Vocabulary

VERSION = 1
"""Raised when the files or their meaning change, so that no older cache is opened."""
CHUNK = 8192
"""Texts that are encoded at a time: enough to keep all cores busy, little enough for any memory."""


class Overlong(Enum):
    """What becomes of a row with more than `max_length` tokens; either way it is counted."""

    SKIP = "skip"
    CUT = "cut"
    """Its end is cut off, of a pair the target's."""


@final
@dataclass(frozen=True, eq=False)
class Encoded:
    """Rows of tokens in memory-mapped files, with what was counted while they were written."""

    folder: Path
    tokens: NDArray[Any]
    """All rows, one after another."""
    offsets: NDArray[np.int64]
    """Row i is `tokens[offsets[i]:offsets[i + 1]]`."""
    special: Tensor
    """Which ids are special, [V]."""
    pad_id: int
    max_length: int
    counts: Tensor
    """How often each id is an editable token, [V]: what token information is made of."""
    length_histogram: Tensor
    """At n, the number of rows with n editable tokens, [max_length + 1]."""
    report: Report
    fingerprint: str
    """A hash of the rows themselves, for the protocol of a measurement."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens in each row, special ones included."""
        return np.diff(self.offsets)

    def row(self, index: int) -> NDArray[np.int64]:
        """The tokens of one row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Puts rows side by side, padded on the right; each is named by its index."""
        rows = np.asarray(indices, dtype=np.int64)
        if rows.size == 0 or rows.min() < 0 or rows.max() >= len(self):
            raise IndexError(f"a batch of rows {rows.tolist()}: give at least one, each from 0 to {len(self) - 1}")
        starts, ends = self.offsets[rows, None], self.offsets[rows + 1, None]
        flat = starts + np.arange((ends - starts).max())
        attend = torch.from_numpy(flat < ends)
        flat = np.minimum(flat, len(self.tokens) - 1)
        tokens = torch.from_numpy(self.tokens[flat].astype(np.int64)).masked_fill(~attend, self.pad_id)
        special = self.special[tokens] & attend
        num_ahead = special.flip(1).cumsum(1).flip(1)  # special tokens from here on
        editable = attend & ~special & (num_ahead == 1)
        strata = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(len(rows), 2)
        return Batch(tokens, attend, editable, torch.from_numpy(rows), strata)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_encoded, (self.folder,)  # a worker process opens the files and is not sent their content


def encode_corpus(
    corpus: Corpus,
    vocabulary: Vocabulary,
    cache: Path,
    *,
    max_length: int = 128,
    overlong: Overlong = Overlong.SKIP,
) -> Encoded:
    """Encodes a corpus into the cache, or opens what is there; rows have at most `max_length` tokens."""
    smallest = vocabulary.num_special(paired=corpus.paired) + 1
    if max_length < smallest:
        raise ValueError(f"max_length is {max_length}, but a row with one word has {smallest} tokens: 128 is usual")
    settings = [VERSION, corpus.fingerprint, vocabulary.fingerprint, max_length, overlong.value]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    return open_encoded(made_once(cache / key, lambda folder: _write(folder, corpus, vocabulary, max_length, overlong)))


def open_encoded(folder: Path) -> Encoded:
    """Opens what `encode_corpus` wrote; memory is used only for the rows that are read."""
    try:
        values = json.loads((folder / "encoded.json").read_text(encoding="utf-8"))
        # A memmap's own indexing is slow; an array over the same pages is not.
        tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype=values["dtype"], mode="r"))
        offsets = np.asarray(np.memmap(folder / "offsets.bin", dtype=np.int64, mode="r"))
        counts = np.load(folder / "counts.npy", allow_pickle=False)
        whole = values["version"] == VERSION and len(offsets) == values["num_rows"] + 1 and len(tokens) == offsets[-1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(folder)!r} is no encoded corpus ({error}): delete that folder and encode again"
        ) from error
    if not whole:
        raise ValueError(f"{str(folder)!r} is incomplete or of another version: delete that folder and encode again")
    special = torch.zeros(len(counts), dtype=torch.bool)
    special[values["special"]] = True
    return Encoded(
        folder,
        tokens,
        offsets,
        special,
        values["pad_id"],
        values["max_length"],
        torch.from_numpy(counts),
        torch.tensor(values["length_histogram"]),
        Report.from_json(values["report"]),
        values["fingerprint"],
    )


def _write(folder: Path, corpus: Corpus, vocabulary: Vocabulary, max_length: int, overlong: Overlong) -> None:
    """One pass over the corpus; memory holds a chunk of it."""
    dtype = np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.uint32)
    special, report = vocabulary.special.numpy(), Report()
    counts, histogram = np.zeros(vocabulary.size, np.int64), np.zeros(max_length + 1, np.int64)
    tokens_hash, lengths_hash, end = hashlib.sha256(), hashlib.sha256(), np.int64(0)
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "offsets.bin").open("wb") as offsets_file:
        offsets_file.write(end.tobytes())
        for tokens, lengths in _rows(corpus, vocabulary, max_length, overlong, report):
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
            f"no row is left ({report.summary()}): raise max_length from {max_length}, or cut what is too long"
        )
    np.save(folder / "counts.npy", counts, allow_pickle=False)
    description = {
        "version": VERSION,
        "dtype": dtype.name,
        "num_rows": int(histogram.sum()),
        "special": vocabulary.special.nonzero()[:, 0].tolist(),
        "pad_id": vocabulary.pad_id,
        "max_length": max_length,
        "length_histogram": histogram.tolist(),
        "report": report.to_json(),
        "fingerprint": hashlib.sha256(tokens_hash.digest() + lengths_hash.digest()).hexdigest(),
        "vocabulary": vocabulary.fingerprint,
        "corpus": corpus.fingerprint,
    }
    (folder / "encoded.json").write_text(json.dumps(description, indent=1), encoding="utf-8")


_Flat = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows one after another, and the length of each."""


def _rows(
    corpus: Corpus, vocabulary: Vocabulary, max_length: int, overlong: Overlong, report: Report
) -> Iterator[_Flat]:
    """Encodes chunk by chunk and takes out, with report, the rows that cannot be used."""
    num_special = vocabulary.num_special(paired=corpus.paired)
    special = vocabulary.special.numpy()
    with _progress() as advance:
        for chunk, rows in _encoded_chunks(corpus.records(report), vocabulary):
            cut = [index for index, row in enumerate(rows) if len(row) > max_length] if overlong is Overlong.CUT else []
            for index in cut:
                rows[index] = _cut(rows[index], max_length, special)
            tokens, lengths = _flat(rows)
            marks = special[tokens]
            reasons = {
                f"of more than {max_length} tokens": lengths > max_length,
                "with a special token in the text": _sums(marks, lengths) != num_special,
                "without a token": _sums(_editable(marks, lengths), lengths) == 0,
            }
            kept = np.ones(len(rows), dtype=np.bool_)
            for reason, flawed in reasons.items():
                for index in (kept & flawed).nonzero()[0].tolist():
                    report.take_back(reason, chunk[index].place)
                kept &= ~flawed
            for index in cut:
                if kept[index]:
                    report.shorten(chunk[index].place)
            if kept.any():
                yield tokens[np.repeat(kept, lengths)], lengths[kept]
            advance(len(chunk))


def _encoded_chunks(
    records: Iterator[Record], vocabulary: Vocabulary
) -> Iterator[tuple[list[Record], list[list[int]]]]:
    """Reads the next chunk while the tokenizer, on all cores, encodes the last one."""
    with ThreadPoolExecutor(max_workers=1) as background:
        waiting: list[tuple[list[Record], Future[list[list[int]]]]] = []
        while chunk := list(islice(records, CHUNK)):
            waiting.append((chunk, background.submit(_encode, chunk, vocabulary)))
            if len(waiting) > 1:
                done, rows = waiting.pop(0)
                yield done, rows.result()
        for done, rows in waiting:
            yield done, rows.result()


def _cut(row: list[int], max_length: int, special: NDArray[np.bool_]) -> list[int]:
    """Takes away the end of what may be edited, unless nothing of it would be left."""
    start = 1 + max(place for place, token in enumerate(row[:-1]) if special[token])
    return row[: max_length - 1] + row[-1:] if start < max_length - 1 else row


def _encode(chunk: list[Record], vocabulary: Vocabulary) -> list[list[int]]:
    pairs = [record.content for record in chunk if isinstance(record.content, Pair)]
    if pairs:
        return vocabulary.encode_pairs(pairs)
    return vocabulary.encode([record.content for record in chunk if isinstance(record.content, str)])


def _flat(rows: list[list[int]]) -> _Flat:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum())), lengths


def _sums(flags: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many flags are set in each row."""
    up_to = np.concatenate([[0], flags.cumsum()])
    ends = lengths.cumsum()
    sums: NDArray[np.int64] = up_to[ends] - up_to[ends - lengths]
    return sums


def _editable(marks: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The places between the last two special tokens of each row: before exactly one of its marks."""
    up_to = marks.cumsum()
    num_ahead = np.repeat(up_to[lengths.cumsum() - 1], lengths) - up_to
    editable: NDArray[np.bool_] = ~marks & (num_ahead == 1)
    return editable


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Shows how many sentences are done and the time it took, on a terminal alone."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

    columns = SpinnerColumn(), "encoding", MofNCompleteColumn(), "sentences", TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("encoding", total=None)
        yield lambda count: progress.advance(task, count)
