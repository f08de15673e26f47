"""A corpus encoded by several processes: the same files as by one, whoever fails, is killed or joins late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_tokenizers import SENTENCES

from diffusionbert.data import encoding
from diffusionbert.data.corpus import Corpus, parse_corpus
from diffusionbert.data.dataset import encode_corpus
from diffusionbert.data.encoding import Encoder
from diffusionbert.data.sources import Split
from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece

TEXTS = [*SENTENCES[:90], "", "the " * 130, *SENTENCES[90:140], "\u200b"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return train_wordpiece(SENTENCES, 600)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch) -> None:
    monkeypatch.setattr(encoding, "CHUNK", 7)
    monkeypatch.setattr(encoding, "PART", 20)


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return parse_corpus(str(tmp_path / "a.txt"), Split.ALL)


def files(cache: Path) -> dict[str, bytes]:
    """All files of a cache; the lock of the merge is empty."""
    return {str(file.relative_to(cache)): file.read_bytes() for file in cache.rglob("*") if file.is_file()}


@pytest.fixture
def alone(corpus, vocabulary, tmp_path) -> dict[str, bytes]:
    """What one process makes."""
    encode_corpus(corpus, vocabulary, tmp_path / "alone")
    return files(tmp_path / "alone")


def test_parts_are_merged_in_order(corpus, vocabulary, alone, tmp_path):
    encoded = encode_corpus(corpus, vocabulary, tmp_path / "alone")
    sequences = [encoded.tokens[start:end].tolist() for start, end in pairwise(encoded.offsets)]
    assert sequences == vocabulary.encode([*SENTENCES[:140]])
    path = tmp_path / "a.txt"
    assert encoded.report.summary() == (
        f"140 kept; 3 skipped: 1 empty (first at {path}:91), 1 longer than 128 tokens (first at {path}:92), "
        f"1 without tokens (first at {path}:143)"
    )


@pytest.mark.parametrize("number", [2, 3])
def test_several_make_the_same_files_as_one(corpus, vocabulary, alone, tmp_path, monkeypatch, number):
    encode, together, taken = Encoder._encoded, threading.Barrier(number), Counter()

    def counted(self, records):
        if taken[threading.get_ident()] == 0:
            together.wait(timeout=60)  # so that each of them has a part
        taken[threading.get_ident()] += 1
        return encode(self, records)

    monkeypatch.setattr(Encoder, "_encoded", counted)
    with ThreadPoolExecutor(number) as threads:
        calls = [threads.submit(encode_corpus, corpus, vocabulary, tmp_path / "cache") for _ in range(number)]
    assert len({call.result().fingerprint for call in calls}) == 1
    assert files(tmp_path / "cache") == alone
    assert len(taken) == number
    assert sum(taken.values()) == 8  # 142 texts, each encoded once


def test_an_interrupted_run_is_continued(corpus, vocabulary, alone, tmp_path, monkeypatch):
    encode, number = Encoder._encoded, iter(range(3))

    def interrupted(self, records):
        if next(number, None) is None:
            raise KeyboardInterrupt
        return encode(self, records)

    monkeypatch.setattr(Encoder, "_encoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(corpus, vocabulary, tmp_path / "cache")
    (parts,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert sorted(path.name for path in parts.glob("*.npz")) == ["000000.npz", "000001.npz", "000002.npz"]
    again = []
    monkeypatch.setattr(Encoder, "_encoded", lambda self, records: again.append(records) or encode(self, records))
    encode_corpus(corpus, vocabulary, tmp_path / "cache")
    assert len(again) == 5
    assert files(tmp_path / "cache") == alone


def test_a_failure_leaves_the_work_to_the_others(corpus, vocabulary, alone, tmp_path, monkeypatch):
    save, is_first = Encoder._save, iter([True])

    def failing(self, number, arrays):
        if next(is_first, False):
            raise OSError("the disk is full")
        save(self, number, arrays)

    monkeypatch.setattr(Encoder, "_save", failing)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(encode_corpus, corpus, vocabulary, tmp_path / "cache") for _ in range(2)]
    assert sorted(str(call.exception()) for call in calls) == ["None", "the disk is full"]
    assert files(tmp_path / "cache") == alone


@pytest.mark.slow
def test_the_part_of_a_killed_process_is_taken_over(corpus, vocabulary, alone, tmp_path):
    """Another process claims the first part and hangs; this one encodes the others, and waits until it is killed."""
    vocabulary.save(tmp_path / "vocabulary")
    claimed, cache = tmp_path / "claimed", tmp_path / "cache"
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from diffusionbert.data import encoding\nfrom diffusionbert.data.corpus import parse_corpus\n"
        "from diffusionbert.data.dataset import encode_corpus\nfrom diffusionbert.data.sources import Split\n"
        "from diffusionbert.data.tokenizer import Vocabulary\n"
        "encoding.PART, (text, vocabulary, cache, claimed) = 20, sys.argv[1:]\n"
        "encoding.Encoder._encoded = lambda self, records: (Path(claimed).touch(), time.sleep(600))\n"
        "corpus = parse_corpus(text, Split.ALL)\n"
        "encode_corpus(corpus, Vocabulary.load(vocabulary), Path(cache))\n"
    )
    command = [sys.executable, "-c", code, *map(str, (tmp_path / "a.txt", tmp_path / "vocabulary", cache, claimed))]
    other = subprocess.Popen(command)
    try:
        while not claimed.exists():
            assert other.poll() is None
            time.sleep(0.05)
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(encode_corpus, corpus, vocabulary, cache)
            while len(list(cache.glob("*.parts-20/*.npz"))) < 7:
                assert not call.done()
                time.sleep(0.05)
            os.kill(other.pid, signal.SIGKILL)
            call.result(timeout=60)
    finally:
        other.kill()
        other.wait()
    assert files(cache) == alone
