"""Tokenizers and encoded datasets: round trips of text, counts, batches, and caches that are complete or absent."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import SENTENCES, byte_level, gpt2_tokenizer, llama_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from diffusionbert.data import encoding
from diffusionbert.data.corpus import _PUNCTUATION_RULES, _WORD_RULES, Corpus, parse_corpus, substituted
from diffusionbert.data.dataset import Encoded, encode_corpus, open_encoded
from diffusionbert.data.files import Pair
from diffusionbert.data.sources import Split
from diffusionbert.data.tokenizer import _INNER_RULES, Vocabulary, train_wordpiece
from diffusionbert.diffusion.schedules import TokenInformation
from diffusionbert.storage import files as cache_module


def bert_like() -> Vocabulary:
    return train_wordpiece(SENTENCES, 600)


def roberta_like() -> Vocabulary:
    """Byte-level BPE with RoBERTa's template: [UNK] is never needed, and pairs have two separators."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return Vocabulary(with_special_tokens(tokenizer))


def xlmr_like() -> Vocabulary:
    """A Unigram model whose pieces include the spelling of the special tokens."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [(token, 0.0) for token in special] + [(piece, -2.0) for piece in ("▁", "a", "b", "c", "▁a", "ab")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return Vocabulary(with_special_tokens(tokenizer))


def with_special_tokens(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in names.items()}
    )


KINDS = {"bert": bert_like, "roberta": roberta_like, "xlmr": xlmr_like}


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request) -> Vocabulary:
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def wordpiece() -> Vocabulary:
    return bert_like()


def corpus_of(path: Path, lines: list[str]) -> Corpus:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return parse_corpus(str(path), Split.ALL)


def sequence(encoded: Encoded, index: int) -> list[int]:
    return encoded.tokens[encoded.offsets[index] : encoded.offsets[index + 1]].tolist()


# Vocabularies


def test_every_id_is_either_special_or_allowed(vocabulary):
    special = set(vocabulary.special.nonzero()[:, 0].tolist())
    assert {vocabulary.mask_id, vocabulary.pad_id} <= special
    assert vocabulary.unk_id not in special
    assert vocabulary.size == len(vocabulary.tokenizer)
    assert (vocabulary.special ^ vocabulary.allowed).all()
    assert vocabulary.forbidden.nonzero()[:, 0].tolist() == [vocabulary.unk_id]
    assert (vocabulary.forbidden <= vocabulary.allowed).all()


def test_sequences_follow_the_template_of_transformers(vocabulary):
    text = "a b the value of an object"
    assert vocabulary.encode([text])[0] == vocabulary.tokenizer(text)["input_ids"]
    pair = Pair("a the value", "b an object")
    assert vocabulary.encode_pairs([pair])[0] == vocabulary.tokenizer(*pair)["input_ids"]
    tokens = torch.tensor(vocabulary.encode([text])[0])
    assert int(vocabulary.special[tokens].sum()) == vocabulary.num_special(paired=False) == 2


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_text_survives_the_round_trip(kind):
    vocabulary = KINDS[kind]()
    text = "the value of an object, if any, isn't known (yet)."
    tokens = vocabulary.encode([text])[0]
    assert vocabulary.decode(tokens).replace(" ", "") == text.replace(" ", "")
    assert vocabulary.decode(torch.tensor(tokens)) == vocabulary.decode(tokens)
    assert vocabulary.encode([vocabulary.decode(tokens)])[0] == tokens
    assert vocabulary.decode([vocabulary.pad_id, vocabulary.mask_id]) == vocabulary.decode([]) == ""


def test_special_tokens_in_a_text_are_characters(wordpiece):
    [plain] = wordpiece.encode(["the [MASK] of [SEP] an object [UNK]"])
    assert int(wordpiece.special[plain].sum()) == 2
    assert wordpiece.mask_id not in plain
    assert wordpiece.decode(plain) == "the [mask] of [sep] an object [unk]"


def test_the_state_of_the_shared_tokenizer_is_ignored(wordpiece):
    vocabulary = Vocabulary(wordpiece.tokenizer)
    wordpiece.tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=3)
    assert vocabulary.fingerprint == wordpiece.fingerprint
    assert [len(tokens) for tokens in vocabulary.encode(["a", "a b c"])] == [3, 5]


def test_a_saved_vocabulary_can_be_loaded(vocabulary, tmp_path):
    vocabulary.save(tmp_path)
    reopened = Vocabulary.load(tmp_path)
    assert reopened.fingerprint == vocabulary.fingerprint
    texts = SENTENCES[:20]
    assert reopened.encode(texts) == vocabulary.encode(texts)
    assert AutoTokenizer.from_pretrained(str(tmp_path))(texts)["input_ids"] == vocabulary.encode(texts)


def test_unsuitable_tokenizers_are_rejected_in_one_line(tmp_path, wordpiece):
    with pytest.raises(ValueError, match=r"^no folder '.*none'; give a tokenizer's folder, or its Hub name$"):
        Vocabulary.load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"^no tokenizer at 'no/such': expected a folder with tokenizer\.json.*$"):
        Vocabulary.load("no/such")
    bare = PreTrainedTokenizerFast(tokenizer_object=wordpiece.tokenizer.backend_tokenizer, pad_token="[PAD]")
    with pytest.raises(ValueError, match="has no mask_token; use that of a masked language model"):
        Vocabulary(bare)
    # Without its files, transformers silently makes a tokenizer of five special tokens.
    wordpiece.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has special tokens only; restore its missing vocabulary file"):
        Vocabulary.load(tmp_path)
    bare = Tokenizer(models.WordLevel({"<pad>": 0, "<mask>": 1, "a": 2, "b": 3}, unk_token="b"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", mask_token="<mask>")
    with pytest.raises(ValueError, match="must add special tokens around a text"):
        Vocabulary(tokenizer)


class SlowTokenizer(BertTokenizer):
    """A tokenizer without a fast version."""

    is_fast = False


def test_slow_tokenizers_are_rejected(wordpiece):
    with pytest.raises(ValueError, match=r"is not a fast tokenizer; use one with a tokenizer\.json"):
        Vocabulary(SlowTokenizer(vocab=wordpiece.tokenizer.get_vocab()))


# Training a WordPiece


def test_wordpiece_training_is_deterministic_in_any_order(wordpiece):
    # The library alone gives another vocabulary each time, even within one process.
    fingerprints = {train_wordpiece(SENTENCES[::order], 600).fingerprint for order in (1, -1, 1)}
    assert fingerprints == {wordpiece.fingerprint}


def test_a_wordpiece_has_the_given_size_and_case(wordpiece):
    assert wordpiece.size == 600
    assert wordpiece.tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    cased = train_wordpiece(SENTENCES, 700, lower=False)
    assert cased.decode(cased.encode(["The Object"])[0]) == "The Object"
    assert wordpiece.decode(wordpiece.encode(["The Object"])[0]) == "the object"
    assert wordpiece.unk_id not in wordpiece.encode(['zz\'q "x" 3-4!'])[0]
    assert train_wordpiece(["a tiny text"], 600).size < 600
    rare = [chr(0x4E00 + number) for number in range(900)]
    assert train_wordpiece([*SENTENCES, *rare], 600).size == 600
    with pytest.raises(
        ValueError, match="`size` of the vocabulary must be >= 512, got 50; thousands of tokens are usual"
    ):
        train_wordpiece(SENTENCES, 50)
    with pytest.raises(ValueError, match="no text to train a vocabulary on; give some sentences"):
        train_wordpiece([], 600)


# Encoded corpora

TEXTS = ["a b the value of an object", "a", "a b c", "the object itself is an object", "a b a b"]


def test_encoded_sequences_and_counts_are_correct(tmp_path, vocabulary):
    encoded = encode_corpus(corpus_of(tmp_path / "a.txt", TEXTS), vocabulary, tmp_path / "cache", max_length=64)
    sequences = vocabulary.encode(TEXTS)
    assert len(encoded) == len(TEXTS)
    assert [sequence(encoded, index) for index in range(len(TEXTS))] == sequences
    assert encoded.lengths.tolist() == [len(tokens) for tokens in sequences]
    inner = Counter(token for tokens in sequences for token in tokens[1:-1])
    assert {token: count for token, count in enumerate(encoded.counts.tolist()) if count} == inner
    histogram = Counter(len(tokens) - 2 for tokens in sequences)
    assert {length: count for length, count in enumerate(encoded.length_histogram.tolist()) if count} == histogram
    assert encoded.report.summary() == "5 kept"
    information = TokenInformation.from_counts(encoded.counts, allowed=vocabulary.allowed)
    assert information.values.shape == (vocabulary.size,)


def test_batches_are_padded_and_only_text_is_editable(tmp_path, vocabulary):
    encoded = encode_corpus(corpus_of(tmp_path / "a.txt", TEXTS), vocabulary, tmp_path / "cache")
    indices = [3, 1, 3]
    batch = encoded.batch(indices)
    sequences = [vocabulary.encode(TEXTS)[index] for index in indices]
    assert batch.tokens.shape == (3, max(map(len, sequences)))
    for number, tokens in enumerate(sequences):
        padding = batch.tokens.shape[1] - len(tokens)
        assert batch.tokens[number].tolist() == tokens + [vocabulary.pad_id] * padding
        assert batch.attention_mask[number].tolist() == [True] * len(tokens) + [False] * padding
        assert batch.editable[number].tolist() == [False] + [True] * (len(tokens) - 2) + [False] * (padding + 1)
    assert batch.example.tolist() == indices
    assert batch.strata.tolist() == [[0.0, 1.0]] * 3


def test_an_unknown_token_is_editable(tmp_path, wordpiece):
    encoded = encode_corpus(corpus_of(tmp_path / "a.txt", ["the 中 object"]), wordpiece, tmp_path)
    batch = encoded.batch([0])
    assert batch.editable[batch.tokens == wordpiece.unk_id].tolist() == [True]
    assert encoded.counts[wordpiece.unk_id] == 1


def test_the_source_of_a_pair_is_not_editable(tmp_path, vocabulary):
    (tmp_path / "pairs.tsv").write_text("a b c\ta b\na\tb a b the object\n", encoding="utf-8")
    corpus = parse_corpus(str(tmp_path / "pairs.tsv"), Split.ALL)
    encoded = encode_corpus(corpus, vocabulary, tmp_path / "cache")
    targets = [tokens[1:-1] for tokens in vocabulary.encode(["a b", "b a b the object"])]
    batch = encoded.batch([0, 1])
    for number, target in enumerate(targets):
        assert batch.tokens[number][batch.editable[number]].tolist() == target
        last = int(batch.attention_mask[number].sum()) - 1
        assert batch.editable[number].nonzero()[:, 0].tolist() == list(range(last - len(target), last))
    assert int(encoded.counts.sum()) == sum(map(len, targets))


def test_unusable_sequences_are_counted(tmp_path, wordpiece):
    path = tmp_path / "a.txt"
    corpus = corpus_of(
        path, ["the object", "the " * 7, "\u200b", "the " * 6]
    )  # BERT drops the only character of the third
    encoded = encode_corpus(corpus, wordpiece, tmp_path, max_length=8)
    assert len(encoded) == 2
    assert encoded.report.summary() == (
        f"2 kept; 2 skipped: 1 longer than 8 tokens (first at {path}:2), 1 without tokens (first at {path}:3)"
    )
    assert encoded.length_histogram.tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0]


def test_a_text_that_encodes_to_a_special_token_is_skipped(tmp_path):
    corpus = corpus_of(tmp_path / "a.txt", ["ab c", "a <mask> b"])
    encoded = encode_corpus(corpus, xlmr_like(), tmp_path)
    assert len(encoded) == 1
    assert "1 with a special token in the text" in encoded.report.summary()


def test_an_empty_result_is_an_error_and_is_not_cached(tmp_path, wordpiece):
    corpus = corpus_of(tmp_path / "a.txt", ["the object is an object"])
    with pytest.raises(ValueError, match=r"no sequence is left \(0 kept; 1 skipped: .*; raise `max_length` from 4"):
        encode_corpus(corpus, wordpiece, tmp_path / "cache", max_length=4)
    assert not folders(tmp_path / "cache")
    with pytest.raises(
        ValueError, match=r"^`max_length` must be >= 3 \(special tokens included\), got 2; 128 is usual"
    ):
        encode_corpus(corpus, wordpiece, tmp_path / "cache", max_length=2)


def test_the_result_does_not_depend_on_the_chunk_size(tmp_path, wordpiece, monkeypatch):
    corpus = corpus_of(tmp_path / "a.txt", [*SENTENCES[:50], "\u200b"])
    whole = encode_corpus(corpus, wordpiece, tmp_path / "one", max_length=40)
    monkeypatch.setattr(encoding, "CHUNK", 7)
    monkeypatch.setattr(encoding, "PART", 19)
    pieces = encode_corpus(corpus, wordpiece, tmp_path / "two", max_length=40)
    assert pieces.fingerprint == whole.fingerprint
    assert np.array_equal(pieces.tokens, whole.tokens)
    assert np.array_equal(pieces.offsets, whole.offsets)
    assert torch.equal(pieces.counts, whole.counts)
    assert torch.equal(pieces.length_histogram, whole.length_histogram)
    assert pieces.report == whole.report


def test_large_vocabularies_use_32_bits(tmp_path):
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4} | {f"w{n}": n for n in range(5, 70_000)}
    vocabulary = Vocabulary(BertTokenizer(vocab=words))
    encoded = encode_corpus(corpus_of(tmp_path / "a.txt", ["w69999 w5"]), vocabulary, tmp_path)
    assert encoded.tokens.dtype == np.uint32
    assert sequence(encoded, 0) == [2, 69_999, 5, 3]


# The cache


def test_a_cached_corpus_is_not_read_again(tmp_path, wordpiece):
    corpus = corpus_of(tmp_path / "a.txt", TEXTS)
    first = encode_corpus(corpus, wordpiece, tmp_path / "cache")
    (tmp_path / "a.txt").unlink()
    second = encode_corpus(corpus, wordpiece, tmp_path / "cache")
    assert second.folder == first.folder
    assert second.fingerprint == first.fingerprint
    assert sequence(open_encoded(first.folder), 2) == sequence(first, 2)


def test_different_settings_use_different_folders(tmp_path, wordpiece):
    corpus, cache = corpus_of(tmp_path / "a.txt", TEXTS), tmp_path / "cache"
    other_corpus = corpus_of(tmp_path / "b.txt", TEXTS)
    folders = [
        encode_corpus(corpus, wordpiece, cache).folder,
        encode_corpus(corpus, wordpiece, cache, max_length=64).folder,
        encode_corpus(corpus, roberta_like(), cache).folder,
        encode_corpus(other_corpus, wordpiece, cache).folder,
    ]
    assert len(set(folders)) == len(folders)
    assert open_encoded(folders[0]).fingerprint == open_encoded(folders[3]).fingerprint


def folders(cache: Path) -> list[Path]:
    """Those of encoded corpora, without those of their parts."""
    return [path for path in cache.iterdir() if path.is_dir() and ".parts" not in path.name]


def test_the_partial_folder_of_a_killed_run_is_removed_by_the_next(tmp_path, wordpiece, monkeypatch):
    corpus, cache = corpus_of(tmp_path / "a.txt", SENTENCES), tmp_path / "cache"
    with monkeypatch.context() as killed:  # the state after SIGKILL: files written, no cleanup
        killed.setattr(cache_module, "_sync", lambda file: 1 / 0)
        killed.setattr(cache_module.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(ZeroDivisionError):
            encode_corpus(corpus, wordpiece, cache)
    (partial,) = folders(cache)
    files = {"tokens.bin", "offsets.bin", "counts.npy", "encoded.json", "letter_case.npy"}
    assert files == {path.name for path in partial.iterdir()}
    encoded = encode_corpus(corpus, wordpiece, cache)
    assert [path for path in cache.iterdir() if path.is_dir()] == [encoded.folder]
    assert len(encoded) == len(SENTENCES)


def test_a_damaged_folder_is_rejected(tmp_path, wordpiece):
    folder = encode_corpus(corpus_of(tmp_path / "a.txt", TEXTS), wordpiece, tmp_path / "cache").folder
    with pytest.raises(ValueError, match=r"none' is not an encoded corpus \(.*\); delete that folder and encode again"):
        open_encoded(tmp_path / "none")
    tokens = folder / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"is not an encoded corpus \(it is incomplete\); delete that folder and"):
        open_encoded(folder)
    (folder / "encoded.json").write_text("[]")
    with pytest.raises(ValueError, match="is not an encoded corpus"):
        open_encoded(folder)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(tmp_path, wordpiece, monkeypatch, capsys):
    corpus = corpus_of(tmp_path / "a.txt", TEXTS)
    encode_corpus(corpus, wordpiece, tmp_path / "one")
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    encode_corpus(corpus, wordpiece, tmp_path / "two")
    assert "5/?" in terminal.getvalue()
    assert capsys.readouterr().out == ""


# Words and their pieces


def test_continuation_pieces_of_each_kind_of_vocabulary(vocabulary):
    names = vocabulary.tokenizer.convert_ids_to_tokens(list(range(vocabulary.size)))
    found = {name for name, marked in zip(names, vocabulary.continuation.tolist(), strict=True) if marked}
    if names[0] == "[PAD]":
        assert found == {name for name in names if name.startswith("##")}
    elif "▁" in names:
        assert found == {"a", "b", "c", "ab"}
    else:
        ascii_names = {name for name in names if name.isascii() and vocabulary.allowed[names.index(name)]}
        assert {"s", "sing", "9"} <= found
        assert not {"Ġlist", "Ġ", "<unk>"} & found
        assert found & ascii_names == {name for name in ascii_names if name[0].isalnum()}
        assert "Ã" in found  # the first half of é, which a following piece completes
    assert not (vocabulary.continuation & vocabulary.special).any()


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_decoding_joins_exactly_the_continuation_pieces_to_a_word(kind):
    vocabulary = KINDS[kind]()
    word = vocabulary.pieces("value")
    for piece in vocabulary.allowed.nonzero()[:, 0].tolist():
        text = vocabulary.decode([*vocabulary.pieces("the"), *word, piece])
        if "\ufffd" not in text:
            after = text.strip().removeprefix("the").strip().removeprefix("value")
            assert bool(vocabulary.continuation[piece]) == after[:1].isalnum(), (text, piece)


def test_partial_characters_and_combining_marks_are_continuations():
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = ["▁", "▁a", "a", "\u093e", "'", "—", "<0xC3>", "<0x2E>", "7", "x-", "-x"]
    model = models.Unigram([(piece, -1.0) for piece in special + pieces], unk_id=3, byte_fallback=False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    fast = with_special_tokens(tokenizer)
    fast.add_special_tokens({"extra_special_tokens": ["zz"]})  # special, so not a continuation
    vocabulary = Vocabulary(fast)
    assert vocabulary.special[fast.convert_tokens_to_ids("zz")]
    names = vocabulary.tokenizer.convert_ids_to_tokens(vocabulary.continuation.nonzero()[:, 0].tolist())
    assert set(names) == {"a", "\u093e", "<0xC3>", "7", "x-"}  # a letter, a vowel sign, part of a character, …


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pieces_of_a_word_match_its_encoding_inside_a_sentence(kind):
    vocabulary = KINDS[kind]()
    for word in ("the", "object", "zebras", "isn't", "an object"):
        tokens, pieces = vocabulary.encode([f"is {word} ("])[0], vocabulary.pieces(word)
        assert any(tokens[start : start + len(pieces)] == pieces for start in range(len(tokens)))
        assert not vocabulary.special[pieces].any()
        assert not vocabulary.continuation[pieces[0]]
        assert vocabulary.decode(pieces).strip() == word
    assert len(vocabulary.pieces("zebras")) > 1


def test_a_word_that_cannot_be_encoded_is_rejected(wordpiece):
    for word in ("", " ", "☃"):
        with pytest.raises(ValueError, match=r"^this vocabulary cannot encode '.*'; give a word made of characters"):
            wordpiece.pieces(word)
    assert wordpiece.mask_id not in wordpiece.pieces("[MASK]")


@pytest.mark.parametrize(
    "text",
    [
        "the women's hall, a three-year-old object (of 1,000)",
        'is it "an object" or 5.50?',
        "o'neill isn't, and they're: it's",
    ],
)
def test_decoding_a_wordpiece_restores_the_spaces_around_punctuation(text):
    sentences = [text, "the women hall a three year old object of 1 000 is it an or 5 50 o neill isn t they re"] * 3
    vocabulary = train_wordpiece(sentences, 512)
    [tokens] = vocabulary.encode([text])
    assert vocabulary.decode(tokens) == text
    assert vocabulary.encode([vocabulary.decode(tokens)])[0] == tokens


def test_text_that_is_not_utf8_is_rejected(wordpiece):
    for encode in (lambda text: wordpiece.encode([text]), wordpiece.pieces):
        with pytest.raises(ValueError, match="is not UTF-8; convert it"):
            encode("caf\udce9")


# The tokenizers of decoders


DECODERS = {"gpt2": (gpt2_tokenizer, GPT2Config), "llama": (llama_tokenizer, LlamaConfig)}


@pytest.fixture(params=DECODERS)
def decoder_folder(request, tmp_path) -> Path:
    """A decoder's folder, as on the Hub."""
    make, config = DECODERS[request.param]
    make().save_pretrained(tmp_path / "decoder")
    config().save_pretrained(tmp_path / "decoder")
    return tmp_path / "decoder"


def test_missing_tokens_are_added_to_a_decoders_tokenizer(decoder_folder):
    before, vocabulary = AutoTokenizer.from_pretrained(str(decoder_folder)), Vocabulary.load(decoder_folder)
    begin, end = before.bos_token_id, before.eos_token_id
    added = [vocabulary.mask_id] + ([vocabulary.pad_id] if before.pad_token is None else [])
    assert added == list(range(len(before), vocabulary.size))
    assert vocabulary.pad_id == before.pad_token_id or before.pad_token is None
    special = {begin, end, vocabulary.mask_id, vocabulary.pad_id}
    assert set(vocabulary.special.nonzero()[:, 0].tolist()) == special
    assert int(vocabulary.allowed.sum()) == vocabulary.size - len(special)
    text, other = "the value of an object", "a string"
    inner, target = (before(words, add_special_tokens=False)["input_ids"] for words in (text, other))
    assert vocabulary.encode([text]) == [[begin, *inner, end]]
    assert vocabulary.encode_pairs([Pair(text, other)]) == [[begin, *inner, end, *target, end]]
    assert (vocabulary.num_special(paired=False), vocabulary.num_special(paired=True)) == (2, 3)
    assert vocabulary.decode(vocabulary.encode([text])[0]) == text


def test_the_end_of_text_token_is_not_the_unknown_token(tmp_path):
    gpt2_tokenizer().save_pretrained(tmp_path)
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.tokenizer.unk_token == "<|endoftext|>"
    assert vocabulary.unk_id is None
    assert not vocabulary.forbidden.any()
    [plain] = vocabulary.encode(["<|endoftext|> [MASK]"])
    assert int(vocabulary.special[plain].sum()) == 2


@pytest.mark.parametrize("name", ["eos_token", "unk_token"])
def test_padding_that_is_another_special_token_is_replaced(name, tmp_path):
    """Otherwise the end of a text could not be distinguished from padding."""
    tokenizer = llama_tokenizer()
    tokenizer.pad_token = getattr(tokenizer, name)
    tokenizer.save_pretrained(tmp_path)
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.pad_id == vocabulary.tokenizer.convert_tokens_to_ids("[PAD]")
    assert bool(vocabulary.special[vocabulary.pad_id])
    assert vocabulary.pad_id not in vocabulary.encode(["a string"])[0]
    assert vocabulary.unk_id == tokenizer.unk_token_id


def test_a_decoders_mask_includes_the_space_before_it(decoder_folder):
    vocabulary = Vocabulary.load(decoder_folder)
    first, last = vocabulary.encode(["the"])[0], vocabulary.encode([" object"])[0]
    tokens = vocabulary.tokenizer("the [MASK] object")["input_ids"]
    assert tokens == [*first[:-1], vocabulary.mask_id, *last[1:]]


def test_a_saved_vocabulary_of_a_decoder_can_be_loaded(decoder_folder, tmp_path):
    """Even beside the decoder's config.json, by which transformers selects a tokenizer class."""
    vocabulary = Vocabulary.load(decoder_folder)
    for folder in (tmp_path / "alone", decoder_folder):
        vocabulary.save(folder)
        reopened = Vocabulary.load(folder)
        assert reopened.fingerprint == vocabulary.fingerprint
        assert (reopened.mask_id, reopened.pad_id, reopened.unk_id) == (
            vocabulary.mask_id,
            vocabulary.pad_id,
            vocabulary.unk_id,
        )
        opened = AutoTokenizer.from_pretrained(str(folder))
        assert opened(SENTENCES[:20])["input_ids"] == vocabulary.encode(SENTENCES[:20])
        assert opened("a", "b")["input_ids"] == vocabulary.encode_pairs([Pair("a", "b")])[0]


def test_a_tokenizer_without_beginning_or_end_tokens_is_rejected(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=byte_level([])).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="has neither mask_token nor bos_token, cls_token or eos_token; use that of"
    ) as caught:
        Vocabulary.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_with_a_mask_are_loaded_unchanged(kind, tmp_path):
    KINDS[kind]().save(tmp_path)
    opened, plain = Vocabulary.load(tmp_path).tokenizer, AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(opened) is type(plain)
    assert opened.backend_tokenizer.to_str() == plain.backend_tokenizer.to_str()
    assert opened.special_tokens_map == plain.special_tokens_map


@pytest.mark.parametrize(
    "text",
    [
        'the king "saw" it.',
        'films such as "platoon", "full metal jacket", and "the end".',
        'he said, "that is nice. can we play? the lady said, "yes.',  # the first quotation is not closed
        '"so what," she said. "it is late."',
        'the king said: "no"',
        "the players' club, a king's son, and 'no' or 'yes'.",
        "i do not know; i don't.",
        "the u.s. and a.b.c. at 10:30, and/or r&b, #1 of 1,000 or 2.5%.",
        'she saw "".',
    ],
)
def test_text_is_decoded_as_people_write_it(text):
    characters = train_wordpiece([text, "abcdefghijklmnopqrstuvwxyz"], 600)
    assert characters.decode(characters.encode([text])[0]) == text


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="aosn t12.,:;'’\"`-/&#%$()[\\*?", max_size=30))
def test_a_rule_is_left_out_only_where_it_has_no_match(text):
    for pattern, replacement, characters in [*_INNER_RULES, *_WORD_RULES, *_PUNCTUATION_RULES]:
        expected = re.sub(pattern, replacement, text)
        assert substituted(text, [(pattern, replacement, characters)]) == expected
        text = expected
