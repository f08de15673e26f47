"""Encoded corpora: the token sequences of a corpus in memory-mapped files.

`encode_corpus` encodes a corpus once into a cache folder whose name is a hash of the corpus, the vocabulary and the
settings. The folder appears complete or not at all. The editable positions of a sequence are those between its last two
special tokens. This module does not depend on networks or noise.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionbert.data import encoding
from diffusionbert.data.corpus import Corpus, Report
from diffusionbert.data.encoding import Encoder
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.storage.files import build_once, read_json, restore_replaced
from diffusionbert.storage.limits import Limit
from diffusionbert.storage.schema import from_json

VERSION = 3
"""Increment this when the files or their meaning change; it is part of every cache key."""


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
    letter_case: Tensor | None = None
    """The usual letter case of words (`data.letter_case`), if the tokenizer lower-cases text of natural case."""

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


def source_lengths(sequences: Encoded, at_once: int = 4096) -> Tensor:
    """The joint length histogram of a corpus of pairs: rows (source tokens, target tokens, number of pairs), [K, 3]."""
    parts = [range(start, min(start + at_once, len(sequences))) for start in range(0, len(sequences), at_once)]
    found = Counter[tuple[int, int]]()
    for batch in map(sequences.batch, parts):
        own = batch.attention_mask & ~sequences.special[batch.tokens]
        targets = batch.editable.sum(dim=1)
        found.update(zip((own.sum(dim=1) - targets).tolist(), targets.tolist(), strict=True))
    return torch.tensor([(*lengths, number) for lengths, number in sorted(found.items())])


def encode_corpus(corpus: Corpus, vocabulary: Vocabulary, cache: Path, *, max_length: int = 128) -> Encoded:
    """Opens the encoded corpus in the cache, encoding it first if necessary.

    Args:
        corpus: The texts.
        vocabulary: The tokenizer.
        cache: The folder that holds encoded corpora.
        max_length: The maximum number of tokens per sequence, including special tokens; longer ones are skipped.
    """
    smallest = vocabulary.num_special(paired=corpus.paired) + 1
    if max_length < smallest:
        raise ValueError(
            f"`max_length` must be >= {smallest} (special tokens included), got {max_length}; 128 is usual"
        )
    Limit.POSITIONS.require(max_length, "`max_length` is too large", "128 is usual")
    settings = [VERSION, corpus.fingerprint, vocabulary.fingerprint, max_length]
    folder = cache / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    if not folder.is_dir():
        _build(Encoder(corpus, vocabulary, max_length, cache / f"{folder.name}.parts-{encoding.PART}", folder))
    return open_encoded(folder)


def _build(encoder: Encoder) -> None:
    """Encodes a corpus, sharing the work with all processes that call this at the same time."""
    restore_replaced(encoder.target)
    try:
        number, report = encoder.encode()
        build_once(encoder.target, lambda folder: encoder.merge(folder, number, report))
    except FileNotFoundError:  # another process finished first and removed the parts
        if not encoder.target.is_dir():
            raise
    shutil.rmtree(encoder.folder, ignore_errors=True)


def open_encoded(folder: Path) -> Encoded:
    """Opens a folder made by `encode_corpus`; tokens are read from disk on access."""
    try:
        values = read_json(folder / "encoded.json")
        if values["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"tokens of type {values['dtype']!r:.40}")
        # Indexing a memmap is slow; indexing an array over the same pages is not.
        tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype=values["dtype"], mode="r"))
        offsets = np.asarray(np.memmap(folder / "offsets.bin", dtype=np.int64, mode="r"))
        counts = torch.from_numpy(np.load(folder / "counts.npy", allow_pickle=False))
        case = folder / "letter_case.npy"
        letter_case = torch.from_numpy(np.load(case, allow_pickle=False)) if case.exists() else None
        if len(offsets) != values["num_sequences"] + 1 or len(tokens) != offsets[-1]:
            raise ValueError("it is incomplete")
        special = torch.zeros(len(counts), dtype=torch.bool)
        special[from_json(values["special"], list[int], "special")] = True
        histogram = torch.tensor(from_json(values["length_histogram"], list[int], "length_histogram"))
        report = from_json(values["report"], Report)
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError) as error:
        raise ValueError(
            f"{str(folder)!r} is not an encoded corpus ({error}); delete that folder and encode again"
        ) from error
    numbers = tokens, offsets, special, values["pad_id"], counts, histogram
    return Encoded(folder, *numbers, report, values["fingerprint"], letter_case)
