"""Corpora: file formats, reports on unusable lines, and splits."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from diffusionbert.data import corpus as corpus_module
from diffusionbert.data import files as reading
from diffusionbert.data.corpus import AS_IT_IS, Cleaning, Corpus, Report, detokenize, parse_corpus, parse_source
from diffusionbert.data.files import Pair, bounded_lines
from diffusionbert.data.sources import Split
from diffusionbert.storage.schema import from_json, to_json

LINES = [f"This is sentence number {number} ." for number in range(300)]


def text_of(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def write(path: Path, content: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def read(corpus: Corpus) -> tuple[list[str | Pair], Report]:
    report = Report()
    return [record.content for record in corpus.records(report)], report


def split_of(spec: str, split: Split, fraction: float, cleaning: Cleaning = AS_IT_IS) -> Corpus:
    """One split of a source of which this fraction is held out."""
    return Corpus(replace(parse_source(spec), validation_fraction=fraction), split, cleaning)


def read_all(spec: str, **options: object) -> tuple[list[str | Pair], Report]:
    return read(parse_corpus(spec, Split.ALL, **options))


COMPRESSORS = {
    ".txt": bytes,
    "": bytes,
    ".gz": gzip.compress,
    ".txt.bz2": bz2.compress,
    ".txt.xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_plain_and_compressed_text_files_are_read(tmp_path, suffix):
    spec = write(tmp_path / f"news{suffix}", COMPRESSORS[suffix](text_of(LINES)))
    assert read_all(spec) == (LINES, Report(kept=300))


@pytest.mark.parametrize("suffix", [".gz", ".txt.bz2", ".txt.xz", ".zst"])
def test_concatenated_compressed_streams_are_read(tmp_path, suffix):
    compress = COMPRESSORS[suffix]
    spec = write(tmp_path / f"news{suffix}", compress(text_of(LINES[:9])) + compress(text_of(LINES[9:])))
    assert read_all(spec)[0] == LINES


@pytest.mark.parametrize("suffix", [".gz", ".txt.bz2", ".txt.xz", ".zst"])
def test_the_error_names_a_truncated_file(tmp_path, suffix):
    spec = write(tmp_path / f"news{suffix}", COMPRESSORS[suffix](text_of(LINES))[:-20])
    with pytest.raises(ValueError, match=rf"news{suffix}' is truncated .*restore the file"):
        read_all(spec)


@pytest.mark.parametrize("suffix", [".gz", ".txt.bz2", ".txt.xz", ".zst"])
def test_the_error_names_a_damaged_file(tmp_path, suffix):
    with pytest.raises(ValueError, match=rf"news{suffix}' is damaged, unreadable or not of the format of its suffix"):
        read_all(write(tmp_path / f"news{suffix}", text_of(LINES)))


def test_zstandard_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"^'.*news\.zst' needs the package zstandard: pip install zstandard$"):
        read_all(write(tmp_path / "news.zst", COMPRESSORS[".zst"](b"a\n")))


def test_folders_and_globs_are_sorted_and_skip_dotfiles(tmp_path):
    write(tmp_path / "b.txt", "second\n")
    write(tmp_path / "a.txt.gz", gzip.compress(b"first\n"))
    write(tmp_path / ".hidden", "never\n")
    write(tmp_path / "deeper" / "c.txt", "third")
    assert read_all(str(tmp_path))[0] == ["first", "second"]
    assert read_all(f"{tmp_path}/*.txt")[0] == ["second"]
    assert read_all(f"{tmp_path}/**/*.txt")[0] == ["second", "third"]


def test_a_file_name_may_look_like_a_glob(tmp_path):
    assert read_all(write(tmp_path / "a[1].txt", "yes\n"))[0] == ["yes"]


def test_missing_files_and_empty_folders_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"no file, folder or glob matches '.*none\.txt'; give a file, a folder"):
        parse_corpus(str(tmp_path / "none.txt"))
    for empty in ("", "text:", "hf:"):
        with pytest.raises(ValueError, match="no file, folder or glob matches"):
            parse_corpus(empty)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no files directly in folder"):
        parse_corpus(str(tmp_path / "empty"))


def test_a_folder_of_mixed_formats_is_rejected(tmp_path):
    write(tmp_path / "a.txt", "a\n")
    write(tmp_path / "b.tsv", "a\tb\n")
    with pytest.raises(ValueError, match=r"different formats \(text, tsv\); select files by a glob"):
        parse_corpus(str(tmp_path))
    assert read_all(f"text:{tmp_path}")[0] == ["a", "a b"]


def test_unusable_lines_are_counted_with_the_first_location_of_each_reason(tmp_path, monkeypatch):
    content = b"\xef\xbb\xbfgood one\r\n\n  \t \n" + b"x" * 51 + b"\n\xff\xfe\n" + b"caf\xc3\xa9  au\tlait\n\xe9\n"
    spec = write(tmp_path / "bad.txt", content)
    monkeypatch.setattr(corpus_module, "MAX_CHARACTERS", 50)
    texts, report = read_all(spec)
    assert texts == ["good one", "café au lait"]
    assert report.summary() == (
        f"2 kept; 5 skipped: 2 empty (first at {spec}:2), 1 over the character limit (first at {spec}:4), "
        f"2 not UTF-8 (first at {spec}:5)"
    )
    assert from_json(json.loads(json.dumps(to_json(report))), Report) == report


def test_unusable_json_lines_are_counted(tmp_path):
    lines = ['{"text": "yes", "n": 1}', "{oops", '{"other": "x"}', '{"text": 3}', "[1]", '{"text": "\\ud800"}', ""]
    lines.append("[" * 100_000)
    spec = write(tmp_path / "data.jsonl.gz", gzip.compress(text_of(lines)))
    texts, report = read_all(spec)
    assert texts == ["yes"]
    assert {reason: (tally.count, tally.first) for reason, tally in report.skipped.items()} == {
        "not JSON": (2, f"{spec}:2"),
        "without text in the named field": (3, f"{spec}:3"),
        "not UTF-8": (1, f"{spec}:6"),
        "empty": (1, f"{spec}:7"),
    }


def test_json_fields_are_selected_by_name(tmp_path):
    spec = write(tmp_path / "data.jsonl", '{"body": {"en": "a", "de": "b"}, "title": "c"}\n')
    assert read_all(spec, fields=["title"])[0] == ["c"]
    assert read_all(spec, fields=["body.en"])[0] == ["a"]
    assert read_all(spec, fields=["body.en", "body.de"])[0] == [Pair("a", "b")]
    with pytest.raises(ValueError, match=r"empty .*1 without text in the named field"):
        read_all(spec, fields=["absent"])
    with pytest.raises(
        ValueError, match=r"^`fields` must be one name \(text\) or two \(source and target\), got \('a', 'b', 'c'\)"
    ):
        parse_corpus(spec, fields=["a", "b", "c"])


@pytest.mark.parametrize("spec", ["pydoc", "lm1b:somewhere", __file__])
def test_fields_are_rejected_for_sources_without_fields(spec):
    with pytest.raises(
        ValueError, match=r"^`fields` must be empty except for JSONL files and hf:NAME, got \('text',\) for"
    ):
        parse_corpus(spec, fields=["text"])


def test_pairs_are_read_from_two_columns(tmp_path):
    spec = write(tmp_path / "pairs.tsv", "How are you ?\tFine .\none\na\tb\tc\n\tb\na\t\n\n x y \tz\n")
    corpus = parse_corpus(spec, Split.ALL)
    texts, report = read(corpus)
    assert corpus.paired
    assert texts == [Pair("How are you ?", "Fine ."), Pair("x y", "z")]
    assert report.skipped["without exactly two columns"].first == f"{spec}:2"
    assert {reason: tally.count for reason, tally in report.skipped.items()} == {
        "without exactly two columns": 2,
        "empty": 3,
    }
    assert list(corpus) == ["How are you ?", "Fine .", "x y", "z"]


def test_the_error_for_an_empty_corpus_gives_the_reason(tmp_path):
    with pytest.raises(ValueError, match=r"^'.*a\.txt' is empty \(0 kept; 2 skipped: 2 empty \(first at"):
        read_all(write(tmp_path / "a.txt", "\n\n"))
    nothing, few = write(tmp_path / "b.txt", ""), write(tmp_path / "c.txt", "only one\n")
    for split, part_of in ((Split.ALL, ""), (Split.TRAIN, "the train split of ")):
        message = rf"^{part_of}'.*b\.txt' is empty \(0 kept\); give UTF-8 text, one sentence per line$"
        with pytest.raises(ValueError, match=message):
            read(parse_corpus(nothing, split))
    message = r"^the validation split of '.*c\.txt' is empty .*1 in another split\); .*--validation FILE"
    with pytest.raises(ValueError, match=message):
        read(parse_corpus(few, Split.VALIDATION))
    with pytest.raises(ValueError, match=r"a\.txt' and 1 other files is empty"):
        read_all(str(tmp_path / "[ab].txt"))


def test_sources_are_named_as_on_the_command_line():
    assert str(parse_source("hf:squad:plain")) == "'hf:squad:plain'"
    assert str(parse_source("hf:squad")) == "'hf:squad'"
    assert str(parse_source("lm1b:there")) == "'lm1b:there'"
    assert str(parse_source("pydoc")) == "'pydoc'"


def test_long_lines_are_read_in_bounded_memory(tmp_path, monkeypatch):
    class Recorder(io.BufferedReader):
        """A stream that records the length of its longest line."""

        largest = 0

        def readline(self, limit=-1):
            line = super().readline(limit)
            self.largest = max(self.largest, len(line))
            return line

    path = tmp_path / "one.txt"
    write(path, b"short\n" + b"x" * 100_000 + b"\nlast")
    with Recorder(io.FileIO(path)) as recorder:
        assert list(bounded_lines(recorder, 64)) == [b"short\n", None, b"last"]
    assert recorder.largest == 64
    monkeypatch.setattr(reading, "LINE_BYTES", 64)
    texts, report = read_all(str(path))
    assert texts == ["short", "last"]
    assert report.skipped["over the character limit"].first == f"{path}:2"


def test_a_changed_file_is_detected(tmp_path):
    spec = write(tmp_path / "a.txt", "one\n")
    corpus = parse_corpus(spec, Split.ALL)
    write(tmp_path / "a.txt", "two sentences\n")
    with pytest.raises(ValueError, match=r"a\.txt' was changed or removed after the corpus was opened; start again"):
        read(corpus)


def test_the_validation_split_depends_on_content_alone(tmp_path):
    write(tmp_path / "one" / "a.txt", text_of(LINES))
    write(tmp_path / "two" / "a.txt", text_of(LINES[:-151:-1]))
    write(tmp_path / "two" / "b.txt", text_of(LINES[149::-1]))
    for cleaning in (Cleaning(), Cleaning(lower=True)):
        parts = {}
        for folder in ("one", "two"):
            for split in (Split.TRAIN, Split.VALIDATION):
                texts, report = read(split_of(str(tmp_path / folder), split, 0.1, cleaning))
                parts[folder, split] = set(texts)
                assert report.elsewhere == len(LINES) - len(texts)
        assert parts["one", Split.TRAIN] == parts["two", Split.TRAIN]
        assert parts["one", Split.VALIDATION] == parts["two", Split.VALIDATION]
        assert not parts["one", Split.TRAIN] & parts["one", Split.VALIDATION]
        assert len(parts["one", Split.TRAIN] | parts["one", Split.VALIDATION]) == len(LINES)
        assert 10 <= len(parts["one", Split.VALIDATION]) <= 60


def test_pairs_with_the_same_source_are_in_the_same_split(tmp_path):
    lines = [f"question {number % 50}\tanswer {number}" for number in range(200)]
    spec = write(tmp_path / "pairs.tsv", text_of(lines))
    train, validation = (
        {pair.source for pair in read(split_of(spec, split, 0.2))[0]} for split in (Split.TRAIN, Split.VALIDATION)
    )
    assert not train & validation
    assert len(train | validation) == 50


def test_with_a_separate_validation_corpus_all_text_is_training(tmp_path):
    spec, other = write(tmp_path / "a.txt", text_of(LINES)), write(tmp_path / "v.txt", "held out\n")
    assert read(parse_corpus(spec, Split.TRAIN, validation=other))[0] == LINES
    assert read(parse_corpus(spec, Split.VALIDATION, validation=other))[0] == ["held out"]


def test_a_missing_split_is_rejected(tmp_path):
    spec = write(tmp_path / "a.txt", "a\n")
    with pytest.raises(ValueError, match="plain files have no test split; give the test file as a separate corpus"):
        parse_corpus(spec, Split.TEST)


def lm1b_folder(folder: Path) -> Path:
    lines = iter(f"Training sentence {number} ." for number in range(990))
    for shard in range(1, 100):
        path = folder / f"training-monolingual.tokenized.shuffled/news.en-{shard:05}-of-00100"
        write(path, text_of([next(lines) for _ in range(10)]))
    for shard in range(2):
        path = folder / f"heldout-monolingual.tokenized.shuffled/news.en.heldout-{shard:05}-of-00050"
        write(path, f"Held out {shard} .\n")
    return folder


def test_one_billion_words_has_its_standard_split(tmp_path):
    spec = f"lm1b:{lm1b_folder(tmp_path)}"
    train, validation, test = (read(parse_corpus(spec, split))[0] for split in list(Split)[:3])
    assert not set(train) & set(validation)
    assert set(train) | set(validation) == {f"Training sentence {number} ." for number in range(990)}
    assert 1 <= len(validation) <= 30
    assert test == ["Held out 0 ."]


def test_one_billion_words_reports_missing_shards(tmp_path):
    lm1b_folder(tmp_path)
    for number in (7, 50):
        (tmp_path / f"training-monolingual.tokenized.shuffled/news.en-{number:05}-of-00100").unlink()
    with pytest.raises(ValueError, match=r"2 of the 99 train shards .*first training-.*/news\.en-00007-of-00100; unp"):
        parse_corpus(f"lm1b:{tmp_path}")
    assert read(parse_corpus(f"lm1b:{tmp_path}", Split.TEST))[0] == ["Held out 0 ."]
    with pytest.raises(ValueError, match="1 of the 1 test shards"):
        parse_corpus(f"lm1b:{tmp_path / 'elsewhere'}", Split.TEST)


class TinyDatasets:
    """The part of the package `datasets` that is used, for one small dataset."""

    def __init__(self, **splits):
        self.splits = splits

    def get_dataset_split_names(self, name, config=None):
        if name != "tiny/set" or config not in (None, "en"):
            raise FileNotFoundError(f"Dataset {name} ({config}) does not exist\nand more")
        return list(self.splits)

    def load_dataset(self, name, config, *, split, streaming):
        assert streaming
        return iter([{"text": text, "other": None} for text in self.splits[split]])


@pytest.fixture
def with_datasets(monkeypatch):
    def install(**splits):
        tiny = TinyDatasets(**splits)
        functions = {name: getattr(tiny, name) for name in ("get_dataset_split_names", "load_dataset")}
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(**functions))

    return install


def test_hugging_face_datasets_keep_their_own_splits(with_datasets):
    with_datasets(train=["a", "", "b"], validation=["c"])
    texts, report = read(parse_corpus("hf:tiny/set:en"))
    assert texts == ["a", "b"]
    assert report.skipped["empty"].first == "hf:tiny/set/train:2"
    assert read(parse_corpus("hf:tiny/set", Split.VALIDATION))[0] == ["c"]
    with pytest.raises(ValueError, match="'tiny/set' has no test split, only train, validation; use one of them"):
        parse_corpus("hf:tiny/set", Split.TEST)
    with pytest.raises(ValueError, match="3 without text in the named field"):
        read(parse_corpus("hf:tiny/set", fields=["other"]))


def test_hugging_face_datasets_without_validation_are_split_by_hash(with_datasets):
    with_datasets(train=LINES, test=["t"])
    train, validation, test = (read(split_of("hf:tiny/set", split, 0.1))[0] for split in list(Split)[:3])
    assert sorted(train + validation) == sorted(LINES)
    assert test == ["t"]


def test_hugging_face_errors_are_one_line(with_datasets, monkeypatch):
    with_datasets(train=["a"])
    with pytest.raises(ValueError, match=r"^dataset 'no/such' \(config None\) cannot be opened \(Dataset .* exist\)"):
        parse_corpus("hf:no/such")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"^'hf:tiny/set' needs .*: pip install 'diffusionbert\[data\]'$"):
        parse_corpus("hf:tiny/set")


def test_pydoc_contains_prose_only():
    train, validation = (read(parse_corpus("pydoc", split))[0] for split in (Split.TRAIN, Split.VALIDATION))
    assert len(train) > 500
    assert 0.02 < len(validation) / len(train) < 0.1
    assert not set(train) & set(validation)
    assert not [text for text in train if any(sign in text for sign in "=_{}[]<>*\\|@") or len(text.split()) < 4]
    with pytest.raises(ValueError, match="'pydoc' has no test split; use its validation split"):
        parse_corpus("pydoc", Split.TEST)


def test_cleaning_lower_cases_and_detokenizes(tmp_path):
    spec = write(tmp_path / "a.txt", "He said it 's Fine .\n")
    assert read_all(spec, cleaning=Cleaning(lower=True))[0] == ["he said it 's fine ."]
    assert read_all(spec, cleaning=Cleaning(detokenize=True))[0] == ["He said it's Fine."]


@pytest.mark.parametrize(
    ("tokenized", "natural"),
    [
        ("But now , it 's clear they won 't talk .", "But now, it's clear they won't talk."),
        (
            "I do n't know what they 've done : you 'll see !",
            "I don't know what they've done: you'll see!",
        ),
        ('" We bought it , " she said , " as it was . "', '"We bought it," she said, "as it was."'),
        (
            'Referred to as " kickbacks , " were " common " .',
            'Referred to as "kickbacks," were "common".',
        ),
        ('" A quotation that goes on .', '"A quotation that goes on.'),
        ('and that ends here . "', 'and that ends here."'),
        ('an odd " one stays .', 'an odd " one stays.'),
        ("`` Yes , '' he said -LRB- twice -RRB- .", '"Yes," he said (twice).'),
        ("At $ 2,900 a month , 5 % of CO2 [ in air ] ...", "At $2,900 a month, 5% of CO2 [in air]..."),
        ("Jeremiah Wright Jr . , of the U.S. 's best 1\\/2", "Jeremiah Wright Jr., of the U.S.'s best 1/2"),
        ("MIAMI - the workers ' union -- 18-12 -- in 1.5 .", "MIAMI - the workers ' union -- 18-12 -- in 1.5."),
        ("It's already \"fine\" (really), isn't it?", "It's already \"fine\" (really), isn't it?"),
    ],
)
def test_detokenizing_restores_natural_text_and_keeps_it(tokenized, natural):
    assert detokenize(tokenized) == natural
    assert detokenize(natural) == natural


def test_different_corpora_have_different_fingerprints(tmp_path):
    spec = write(tmp_path / "a.txt", text_of(LINES))
    base = parse_corpus(spec).fingerprint
    assert parse_corpus(spec).fingerprint == base
    others = [
        parse_corpus(spec, Split.VALIDATION),
        split_of(spec, Split.TRAIN, 0.02),
        parse_corpus(spec, cleaning=Cleaning(lower=True)),
        parse_corpus(f"tsv:{spec}"),
        parse_corpus("pydoc"),
        parse_corpus("pydoc", Split.VALIDATION),
        parse_corpus(f"lm1b:{lm1b_folder(tmp_path / 'lm1b')}"),
    ]
    os.utime(spec, ns=(1, 1))
    others.append(parse_corpus(spec))
    assert len({base, *(corpus.fingerprint for corpus in others)}) == 1 + len(others)


def test_the_content_hash_depends_on_the_first_bytes_alone(tmp_path):
    """Not on the name, the compression or appended text."""
    lines = b"".join(b"line %d\n" % number for number in range(120_000))
    assert len(lines) > reading.KNOWN_BYTES
    with lzma.open(tmp_path / "own.txt.xz", "wb", preset=0) as own:
        own.write(lines)
    hashes = [reading.content_hash(reading.Shard.at(tmp_path / "own.txt.xz"))]
    for name, content in (("longer.txt", lines + b"more\n"), ("other.txt", b"other\n" + lines), ("short.txt", b"line")):
        (tmp_path / name).write_bytes(content)
        hashes.append(reading.content_hash(reading.Shard.at(tmp_path / name)))
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(("lines", "number"), [(3, 2), (50, 5), (1000, 100), (3000, 200)])
def test_a_small_corpus_holds_out_a_tenth_or_two_hundred_lines(tmp_path, lines, number):
    spec = write(tmp_path / "a.txt", "".join(f" line  {one} \n\n" for one in range(lines)))
    held_out = parse_source(spec).fraction_to_hold_out()
    validation, train = (
        read(parse_corpus(spec, split, held_out=held_out))[0] for split in (Split.VALIDATION, Split.TRAIN)
    )
    assert len(validation) == number
    assert len(train) == lines - number


def test_a_large_corpus_holds_out_one_percent(tmp_path):
    spec = write(tmp_path / "a.txt", "line\n" * 20_001)
    assert parse_source(spec).fraction_to_hold_out() == 0.01
