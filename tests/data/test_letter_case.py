"""The usual letter case of words: learned while a corpus is encoded, stored with a model, used on generated text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from shared import encoding_cache, shared
from tiny_models import config_of, model_of

from diffusionbert.data import letter_case
from diffusionbert.data.corpus import Cleaning, parse_corpus
from diffusionbert.data.dataset import encode_corpus
from diffusionbert.data.letter_case import UPPER, count_forms, form_of, in_form, learned, with_capitals
from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece
from diffusionbert.model import load
from diffusionbert.networks.loading import Pretrained
from diffusionbert.training.run import train

TEXTS = [
    "Yesterday we met Lily in Paris and saw the new house.",
    "Then Lily went to New York with a new map of NASA.",
    'He said: "Green tea, Lily?" and it was a green house.',
    "The old McDonald isn't in Paris. Paris isn't old.",
    "But she likes New York, and NASA likes Lily.",
    "So they will not go with Will to New York.",
    "And will she say that the new will is old?",
] * 3


@pytest.fixture(scope="module")
def uncased() -> Vocabulary:
    vocabulary = train_wordpiece([text.lower() for text in TEXTS], 600)
    return replace(vocabulary, letter_case=learned(count_forms(TEXTS, vocabulary), vocabulary.size))


@given(st.text("aBcdE", min_size=1, max_size=8))
def test_a_form_restores_a_word(word):
    assert in_form(word.lower(), form_of(word)) == word


@pytest.mark.parametrize(
    ("word", "form"), [("paris", 0), ("Paris", 1), ("I", 1), ("McDonald", 0b101), ("WASHINGTON", UPPER), ("1940", 0)]
)
def test_forms(word, form):
    assert form_of(word) == form
    assert in_form(word.lower(), form) == word


def test_a_letter_whose_capital_has_two_characters_stays():
    assert in_form("ßa", UPPER) == "ßA"


@pytest.mark.parametrize(
    "text",
    [
        "We saw Lily and NASA in Paris.",
        "A new map of New York, a green house.",  # "new" by the word after it
        "He met the old McDonald.",
        "It isn't Lily's.",
        "Paris is old. Green tea will do. Will it?",  # sentences begin with capitals
    ],
)
def test_words_get_their_usual_form(uncased, text):
    assert with_capitals(text.lower(), [(0, len(text))], uncased) == text


def test_text_that_was_not_generated_stays(uncased):
    text = "lily saw lily in paris and lilypad"
    start = text.index("lily", 3)
    assert with_capitals(text, [(start, start + 4)], uncased) == "lily saw Lily in paris and lilypad"
    assert with_capitals(text, [(text.index("pad"), len(text))], uncased) == text
    assert with_capitals(text, [], uncased) == text


def test_without_a_table_sentences_alone_are_capitalized(uncased):
    plain = replace(uncased, letter_case=None)
    assert with_capitals("lily met lily", [(0, 13)], plain) == "Lily met lily"


def test_a_cased_vocabulary_shows_what_it_generates():
    cased = train_wordpiece(TEXTS, 600, lower=False)
    assert with_capitals("lily met lily", [(0, 13)], cased) == "lily met lily"


def test_words_are_encoded_together_as_they_are_alone(uncased):
    words = ["paris", "mcdonald", "a", "日本", "x日y", "☃", "zzzq", "nasa", "1940"]
    found = letter_case._first_tokens(words, uncased)
    assert found == letter_case._first_tokens(words, uncased, at_once=1)
    assert found == letter_case._first_tokens(words[::-1], uncased, at_once=2)[::-1]


def test_counts_of_parts_add_up(uncased):
    parts = [count_forms(TEXTS[start : start + 5], uncased) for start in range(0, len(TEXTS), 5)]
    again = learned(np.concatenate(parts, axis=1), uncased.size)
    assert again is not None
    assert torch.equal(again, uncased.letter_case)


def test_text_without_natural_case_teaches_nothing(uncased):
    assert learned(count_forms([text.lower() for text in TEXTS], uncased), uncased.size) is None
    assert learned(count_forms([], uncased), uncased.size) is None


# ---- corpora and models ---------------------------------------------------------------------------------------------


def texts() -> Path:
    return shared("cased-text", lambda output: (output / "cased.txt").write_text("\n".join(TEXTS) + "\n")) / "cased.txt"


@pytest.mark.parametrize("cleaned", [True, False])
def test_it_is_learned_while_a_corpus_is_encoded(uncased, cleaned, tmp_path):
    corpus = parse_corpus(str(texts()), validation=str(texts()), cleaning=Cleaning(lower=cleaned))
    found = encode_corpus(corpus, uncased, tmp_path).letter_case
    assert found is not None
    assert torch.equal(found, uncased.letter_case)
    cased = train_wordpiece(TEXTS, 600, lower=False)
    assert encode_corpus(corpus, cased, tmp_path).letter_case is None


def run() -> Path:
    config = config_of("linear", steps=1, data=texts())
    config = replace(config, data=replace(config.data, validation=str(texts()), vocabulary=600))
    return shared("cased-run", lambda output: train(config, output, cache=encoding_cache()))


def test_a_model_keeps_it_and_shows_it(tmp_path):
    model = load(run(), device="cpu")
    assert model.generate("we met", length=4, include=["lily"], seed=0)[0].endswith(" Lily")
    assert "lily" in model.generate("we met", length=4, include=["lily"], seed=0, capitalize=False)[0]
    again = load(model.save_pretrained(tmp_path / "saved"), device="cpu")
    assert torch.equal(again.engine.vocabulary.letter_case, model.engine.vocabulary.letter_case)
    file = tmp_path / "saved" / "token_counts.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"letter_case": tensors["letter_case"][:-1].clone()}, file)
    with pytest.raises(ValueError, match="must hold letter_case"):
        load(tmp_path / "saved")


def test_a_run_keeps_what_its_start_knows_of_rare_words(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("In lily fields we met Map.\n" * 25 + "There is a map of paris.\n")
    start, config = str(run() / "model"), config_of("linear", steps=1, data=text)
    data = replace(config.data, validation=str(text), vocabulary=start)
    train(replace(config, data=data, backbone=Pretrained(start)), tmp_path / "run", cache=encoding_cache())
    model = load(tmp_path / "run", device="cpu")
    text_shown = "we saw lily and map in paris and new york"
    shown = with_capitals(text_shown, [(3, len(text_shown))], model.engine.vocabulary)
    assert shown == "we saw lily and Map in Paris and New York"


def test_models_of_lower_case_text_have_none():
    assert model_of("linear").engine.vocabulary.letter_case is None
