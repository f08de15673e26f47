"""Vocabularies and encoded corpora: round trips of text, counts, batches, and caches that are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import SENTENCES, byte_level, gpt2_tokenizer, llama_tokenizer
from transformers import (
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from diffusionbert.data.files import Pair
from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece


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
    [tokens] = vocabulary.encode(["the [MASK] object"], marked=True)
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
