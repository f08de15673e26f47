"""Encodes a corpus part by part, shared by all processes that need it, across launches and machines.

    cache/KEY.parts-32768/000000.npz, 000001.npz, …   ->   cache/KEY/tokens.bin, offsets.bin, counts.npy, encoded.json,
                                                           letter_case.npy

Every process reads the whole corpus, which takes a fourteenth of the time of encoding it, and encodes the parts that no
other process has. It claims a part with a file lock; the system releases the lock if its holder dies, and another
process takes the part over. A part is written completely or not at all, so a stopped run resumes where it was. Once all
parts exist, one process merges them. Processes wait by polling locks, so nothing can time out, and the files do not
depend on who encoded what.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, final

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from diffusionbert.data.corpus import Corpus, Record, Report, Tally
from diffusionbert.data.files import Pair
from diffusionbert.data.letter_case import count_forms, learned
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.parallel import launch
from diffusionbert.reporting import progress_line
from diffusionbert.storage.schema import from_json, to_json

CHUNK = 8192
"""Texts encoded at a time: enough to use all cores, few enough to fit in memory."""
PART = 4 * CHUNK
"""Texts per part, a few seconds of work."""


@final
@dataclass(frozen=True, eq=False)
class Encoder:
    """Encodes the parts of a corpus into a folder, and merges them.

    Args:
        corpus: The texts.
        vocabulary: The tokenizer.
        max_length: The maximum number of tokens per sequence, including special tokens; longer ones are skipped.
        folder: The folder of the parts.
        target: The folder of the merged corpus; once it exists, no parts are needed.
    """

    corpus: Corpus
    vocabulary: Vocabulary
    max_length: int
    folder: Path
    target: Path

    def encode(self) -> tuple[int, Report]:
        """Encodes until all parts exist; returns their number and a report on what was read."""
        while True:
            number, report = self._pass()
            for part in range(number):
                self._wait_for(part)
            if not any(map(self._is_needed, range(number))):
                return number, report

    def _pass(self) -> tuple[int, Report]:
        """Reads the corpus once and encodes the parts that no other process has, each while the next is being read."""
        report, number, num_read = Report(), 0, 0
        records = self.corpus.records(report)
        with progress_line(None, visible=launch().is_main) as show, ThreadPoolExecutor(max_workers=1) as background:
            encoding: Future[None] | None = None
            while (part := list(islice(records, PART))) and not self.target.is_dir():
                if encoding is not None:
                    encoding.result()
                    show(num_read, "sentences encoded")
                encoding = background.submit(self._encode_part, number, part)
                number, num_read = number + 1, num_read + len(part)
            if encoding is not None:
                encoding.result()
                show(num_read, "sentences encoded")
        return number, report

    def _encode_part(self, number: int, records: list[Record]) -> None:
        """Encodes a part, unless it is complete or another process is encoding it."""
        if self._is_needed(number):
            with suppress(Timeout), FileLock(self._lock(number), timeout=0):
                if self._is_needed(number):
                    self._save(number, self._encoded(records) | {"forms": self._forms(number, records)})

    def _wait_for(self, number: int) -> None:
        """Waits until a part is complete or the process encoding it has died."""
        if self._is_needed(number):
            with FileLock(self._lock(number), poll_interval=0.2):
                pass

    def _is_needed(self, number: int) -> bool:
        """Whether a part is missing and was not merged; parts are removed only once the target exists."""
        return not self._file(number).exists() and not self.target.is_dir()

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.npz"

    def _lock(self, number: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f".{number:06}.lock"

    def _save(self, number: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Writes a part completely or not at all."""
        with NamedTemporaryFile(dir=self.folder, delete=False) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes it for `allow_pickle`
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(self._file(number))

    def _encoded(self, records: list[Record]) -> dict[str, NDArray[Any]]:
        """The usable sequences, concatenated, with their lengths and counts, and a report on the others."""
        report = Report()
        found = [
            _usable(records[start : start + CHUNK], self.vocabulary, self.max_length, report)
            for start in range(0, len(records), CHUNK)
        ]
        tokens, lengths = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        editable = _editable(self.vocabulary.special.numpy()[tokens], lengths)
        return {
            "tokens": tokens.astype(self._dtype),
            "lengths": lengths.astype(np.uint32),
            "counts": np.bincount(tokens[editable], minlength=self.vocabulary.size).astype(np.uint32),
            "histogram": np.bincount(_sums(editable, lengths), minlength=self.max_length + 1).astype(np.uint32),
            "skipped": np.array(json.dumps(to_json(report)["skipped"])),
        }

    def _forms(self, number: int, records: list[Record]) -> NDArray[np.int64]:
        """The letter case of words in a sample of a part; later parts are sampled more thinly.

        Counting takes as long as encoding, and more text adds little.
        """
        if not self.vocabulary.lowers:
            return np.zeros((2, 0), np.int64)
        every = max(1, len(records) // max(1, CHUNK // min(number + 1, 8)))
        return count_forms((record.cased for record in records[::every]), self.vocabulary)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.vocabulary.size <= 1 << 16 else np.uint32)

    def merge(self, folder: Path, number: int, report: Report) -> None:
        """Writes the encoded corpus with one part in memory at a time; raises ValueError if no sequence is left.

        Args:
            folder: The output folder.
            number: The number of parts.
            report: The report on what was read, to which the skipped texts of the parts are added.
        """
        vocabulary, max_length = self.vocabulary, self.max_length
        counts, histogram = np.zeros(vocabulary.size, np.int64), np.zeros(max_length + 1, np.int64)
        forms: list[NDArray[np.int64]] = []
        tokens_hash, lengths_hash, end = hashlib.sha256(), hashlib.sha256(), np.int64(0)
        with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "offsets.bin").open("wb") as offsets_file:
            offsets_file.write(end.tobytes())
            for index in range(number):
                with np.load(self._file(index), allow_pickle=False) as part:
                    tokens, lengths = part["tokens"], part["lengths"].astype(np.int64)
                    counts += part["counts"]
                    histogram += part["histogram"]
                    forms.append(part["forms"])
                    skipped = from_json(json.loads(str(part["skipped"])), dict[str, Tally])
                tokens_file.write(tokens.tobytes())
                offsets_file.write((end + lengths.cumsum()).tobytes())
                end += lengths.sum()
                tokens_hash.update(tokens.astype("<u4").tobytes())
                lengths_hash.update(lengths.astype("<u4").tobytes())
                for reason, tally in skipped.items():
                    report.kept -= tally.count
                    report.skipped.setdefault(reason, Tally(0, tally.first)).count += tally.count
        if not report.kept:
            raise ValueError(
                f"no sequence is left ({report.summary()}); raise `max_length` from {max_length}, or shorten the texts"
            )
        np.save(folder / "counts.npy", counts, allow_pickle=False)
        if (letter_case := learned(np.concatenate(forms, axis=1), vocabulary.size)) is not None:
            np.save(folder / "letter_case.npy", letter_case.numpy(), allow_pickle=False)
        description = {
            "dtype": self._dtype.name,
            "num_sequences": int(histogram.sum()),
            "special": vocabulary.special.nonzero()[:, 0].tolist(),
            "pad_id": vocabulary.pad_id,
            "length_histogram": histogram.tolist(),
            "report": to_json(report),
            "fingerprint": hashlib.sha256(tokens_hash.digest() + lengths_hash.digest()).hexdigest(),
        }
        (folder / "encoded.json").write_text(json.dumps(description, indent=1), encoding="utf-8")


def _usable(
    records: list[Record], vocabulary: Vocabulary, max_length: int, report: Report
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The usable sequences of some texts, concatenated, with their lengths; counts the others in `report`."""
    sequences = _encode(records, vocabulary)
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    tokens = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
    is_special = vocabulary.special.numpy()[tokens]
    num_special = vocabulary.num_special(paired=isinstance(records[0].content, Pair))
    reasons = {
        f"longer than {max_length} tokens": lengths > max_length,
        "with a special token in the text": _sums(is_special, lengths) != num_special,
        "without tokens": _sums(_editable(is_special, lengths), lengths) == 0,
    }
    kept = np.ones(len(sequences), dtype=np.bool_)
    for reason, flawed in reasons.items():
        for index in (kept & flawed).nonzero()[0].tolist():
            report.skip(reason, records[index].location)
        kept &= ~flawed
    return tokens[np.repeat(kept, lengths)], lengths[kept]


def _encode(records: list[Record], vocabulary: Vocabulary) -> list[list[int]]:
    pairs = [record.content for record in records if isinstance(record.content, Pair)]
    if pairs:
        return vocabulary.encode_pairs(pairs)
    return vocabulary.encode([record.content for record in records if isinstance(record.content, str)])


def _sums(flags: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of flags set in each sequence."""
    if not len(lengths):
        return np.zeros(0, np.int64)
    sums: NDArray[np.int64] = np.add.reduceat(flags, lengths.cumsum() - lengths, dtype=np.int64)
    return sums


def _editable(is_special: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The positions between the last two special tokens of each sequence: exactly one special token follows."""
    up_to = is_special.cumsum()
    num_following = np.repeat(up_to[lengths.cumsum() - 1], lengths) - up_to
    editable: NDArray[np.bool_] = ~is_special & (num_following == 1)
    return editable
