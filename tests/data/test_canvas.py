"""Canvases: given tokens are frozen, masked positions are editable, and filled texts keep the given text."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import plain_roberta, toy_sentences
from torch import Tensor

from diffusionbert.data.canvas import (
    Blanks,
    Sentences,
    batch_of,
    blank,
    drawn_lengths,
    num_tokens,
    rewriting,
)
from diffusionbert.data.tokenizer import Vocabulary, train_wordpiece
from diffusionbert.diffusion.shapes import Batch

SENTENCE = "the old king saw the city of paris today ."


@cache
def lower_case() -> Vocabulary:
    """A lower-casing WordPiece, like the bundled model's."""
    return train_wordpiece(toy_sentences(200), 512)


@pytest.fixture
def words() -> Vocabulary:
    return lower_case()


@pytest.fixture(scope="module")
def byte_level() -> Vocabulary:
    return Vocabulary.load(plain_roberta())


def ids(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.encode([text])[0][1:-1]


def is_framed(vocabulary: Vocabulary, canvas: Batch) -> bool:
    """Whether each sequence begins and ends with a special token, and only positions between them are editable."""
    last = canvas.attend.sum(dim=1) - 1
    sequence = torch.arange(len(last))
    ends = torch.stack([canvas.tokens[:, 0], canvas.tokens[sequence, last]])
    return bool(
        vocabulary.special[ends].all()
        and not canvas.editable[:, 0].any()
        and not canvas.editable[sequence, last].any()
        and (canvas.tokens[~canvas.attend] == vocabulary.pad_id).all()
        and not (canvas.editable & ~canvas.attend).any()
    )


# ---- unconditional, or with a prompt --------------------------------------------------------------------------------


def test_an_empty_canvas_has_the_requested_number_of_masked_positions(words):
    canvas = blank(words, [5, 1, 3])
    assert canvas.editable.sum(dim=1).tolist() == [5, 1, 3]
    assert canvas.attend.sum(dim=1).tolist() == [7, 3, 5]
    assert bool((canvas.tokens[canvas.editable] == words.mask_id).all())
    assert canvas.example.tolist() == [0, 1, 2]
    assert is_framed(words, canvas)


def test_a_prompt_comes_first_and_is_not_editable(words):
    given = ids(words, "the old king")
    canvas = blank(words, [6, 4], "the old king")
    assert canvas.editable.sum(dim=1).tolist() == [3, 1]
    assert canvas.tokens[:, 1:4].tolist() == [given, given]
    assert not canvas.editable[:, :4].any()
    assert is_framed(words, canvas)


def test_a_source_precedes_the_target_and_is_not_editable(words):
    canvas = blank(words, [4], "the", source="a queen")
    tokens = canvas.tokens[0].tolist()
    sep = words.tokenizer.sep_token_id
    target = [*ids(words, "the"), *[words.mask_id] * 3]
    assert tokens == [words.tokenizer.cls_token_id, *ids(words, "a queen"), sep, *target, sep]
    assert canvas.editable[0].tolist() == [token == words.mask_id for token in tokens]


def test_a_prompt_cannot_forge_special_tokens(words):
    canvas = blank(words, [30], "[MASK] [SEP] [CLS]")
    assert int(words.special[canvas.tokens[0]].sum()) == 2 + int(canvas.editable.sum())
    assert int(canvas.editable.sum()) == 30 - num_tokens(words, "[MASK] [SEP] [CLS]")


@pytest.mark.parametrize(
    ("lengths", "prompt", "message"),
    [
        ([0], "", "^`length` must be >= 1 token, got 0$"),
        ([5, -1], "", "^`length` must be >= 1 token, got -1$"),
        (
            [3],
            "the old king",
            r"^`length` must be >= 4 with a prompt of 3 tokens \('the old king'\), got 3; raise it, or shorten",
        ),
        (
            [9, 2],
            "the old king",
            r"^`length` must be >= 4 with a prompt of 3 tokens \('the old king'\), got 2; raise it",
        ),
    ],
)
def test_a_length_that_leaves_nothing_to_generate_is_rejected(words, lengths, prompt, message):
    with pytest.raises(ValueError, match=message):
        blank(words, lengths, prompt)


def test_token_counts_exclude_special_tokens(words, byte_level):
    assert num_tokens(words, "") == 0
    assert num_tokens(words, SENTENCE) == len(SENTENCE.split())
    assert num_tokens(words, "the 🙂") == 2  # one of them is [UNK]
    assert num_tokens(byte_level, "the 🙂") > 2


# ---- blanks ---------------------------------------------------------------------------------------------------------


def test_adjacent_blanks_are_separate(words):
    given = Blanks(words, "[MASK] [MASK] saw [BLANK][MASK] .")
    assert given.marks == ["[MASK]", "[MASK]", "[BLANK]", "[MASK]"]
    for gap in (1, 3):
        canvas = given.canvas(gap)
        assert int(canvas.editable.sum()) == 3 + gap
        assert is_framed(words, canvas)
    text, fillings = given.filled(ids(words, "king queen old river today"), 2)
    assert fillings == ("king", "queen", "old river", "today")
    assert text == "king queen saw old river today ."


def test_blanks_at_the_beginning_and_end(words):
    given = Blanks(words, "[MASK] saw [MASK]")
    nobody, again = ids(words, "nobody"), ids(words, "again")
    assert given.filled([*nobody, *again]) == ("nobody saw again", ("nobody", "again"))
    assert int(given.canvas().editable[0, 1]) == 1


def test_filling_keeps_case_spaces_and_unknown_characters(words):
    given = Blanks(words, "The  OLD [MASK]\tsaw “Paris” 🙂 e.g. it's [MASK]!")
    text, _ = given.filled([ids(words, "king")[0], ids(words, "river")[0]])
    assert text == "The  OLD king\tsaw “Paris” 🙂 e.g. it's river!"


def test_a_continuation_piece_is_joined_to_the_word_before_it(words):
    [*_, last] = ids(words, "kingx")
    assert words.continuation[last]
    text, fillings = Blanks(words, "the king [MASK] .").filled([last])
    assert (text, fillings) == ("the kingx .", ("x",))


def test_fillings_are_separated_from_adjacent_words(words):
    king, queen = ids(words, "king queen")
    text, fillings = Blanks(words, "the[MASK][MASK]saw[BLANK].").filled([king, queen, king])
    assert fillings == ("king", "queen", "king")
    assert text.split() == ["the", "king", "queen", "saw", "king."]


def test_blanks_work_with_any_mask_token(byte_level):
    for text in ("the [MASK] saw [BLANK] .", "the <mask> saw [BLANK] ."):
        given = Blanks(byte_level, text)
        canvas = given.canvas(2)
        assert int(canvas.editable.sum()) == 3
        king, river = (byte_level.pieces(word)[0] for word in ("king", "river"))
        assert given.filled([king, river, king], 2)[0] == "the king saw river king ."
        # The text around the blanks has the same tokens as without them.
        rest = canvas.tokens[0][~canvas.editable[0]].tolist()
        assert byte_level.decode(rest) == "the saw ."


@pytest.mark.parametrize("text", ["", "no blank .", "the [mask] .", "the MASK .", "[ MASK ]"])
def test_a_text_without_blanks_is_rejected(words, text):
    with pytest.raises(ValueError, match=r"^nothing to fill in '.*'; use \[MASK\] for one token, \[BLANK\] for any"):
        Blanks(words, text)


@pytest.mark.parametrize("text", ["[CLS] the [MASK]", "the [MASK] [SEP] .", "the [MASK] [PAD]"])
def test_special_tokens_in_a_text_with_blanks_are_rejected(words, text):
    with pytest.raises(ValueError, match=r"^the text must not contain special tokens other than \[MASK\], got '"):
        Blanks(words, text).canvas()


@given(st.lists(st.sampled_from(["[MASK]", "[BLANK]", "king", "Saw", "🙂", ",", "e.g."]), max_size=8))
@settings(deadline=None, max_examples=40)
def test_filling_keeps_the_text_around_the_blanks(parts):
    text = " ".join(["[MASK]", *parts])
    given = Blanks(lower_case(), text)
    num_masked = int(given.canvas(2).editable.sum())
    [river] = ids(lower_case(), "river")
    filled, fillings = given.filled([river] * num_masked, 2)
    assert filled == text.replace("[MASK]", "river").replace("[BLANK]", "river river")
    assert " ".join(fillings).split() == ["river"] * num_masked


# ---- rewriting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strength", "num_masked"), [(0.01, 1), (0.3, 3), (0.4, 4), (0.5, 5), (1.0, 10)])
def test_rewriting_masks_the_given_fraction_of_the_tokens(words, strength, num_masked):
    canvas = rewriting(words, SENTENCE, strength, 4, seed=0)
    assert canvas.editable.sum(dim=1).tolist() == [num_masked] * 4
    assert canvas.tokens[:, 1:-1].tolist() == [ids(words, SENTENCE)] * 4
    assert is_framed(words, canvas)


def test_sequences_mask_different_tokens_determined_by_the_seed(words):
    first, again, other = (rewriting(words, SENTENCE, 0.4, 8, seed).editable for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(editable) for editable in first.tolist()}) > 1
    assert torch.equal(first[:3], rewriting(words, SENTENCE, 0.4, 3, seed=0).editable)


def test_rewriting_masks_all_positions_equally_often(words):
    share = rewriting(words, SENTENCE, 0.4, 2000, seed=0).editable.double().mean(dim=0)[1:-1]
    assert float((share - 0.4).abs().max()) < 0.05


def test_rewriting_always_masks_unwanted_words(words):
    for strength, number in ((0.1, 3), (0.6, 6)):
        editable = rewriting(words, SENTENCE, strength, 20, seed=0, unwanted=["paris", "old king"]).editable
        assert editable.sum(dim=1).tolist() == [number] * 20
    canvas = rewriting(words, SENTENCE, 0.1, 20, seed=0, unwanted=["paris", "old king"])
    positions = [SENTENCE.split().index(word) + 1 for word in ("paris", "old", "king")]
    assert bool(canvas.editable[:, positions].all())
    assert bool((canvas.editable.sum(dim=1) <= 4).all())


@pytest.mark.parametrize("strength", [0.0, -0.1, 1.01, float("nan")])
def test_a_strength_outside_0_and_1_is_rejected(words, strength):
    with pytest.raises(ValueError, match=r"^`strength` must be in \(0, 1\], got .*; 0\.4 masks 40 %"):
        rewriting(words, SENTENCE, strength, 1, seed=0)


@pytest.mark.parametrize("text", ["", "   ", "\x00"])
def test_a_text_without_tokens_cannot_be_rewritten(words, text):
    with pytest.raises(ValueError, match=r"^nothing to rewrite in '.*'; give a sentence$"):
        rewriting(words, text, 0.4, 1, seed=0)


# ---- sentences, batches, lengths ------------------------------------------------------------------------------------


def test_batches_of_sentences_are_selected_by_index(words):
    sentences = Sentences(words, ("the king .", SENTENCE, "nobody"))
    assert sentences.lengths.tolist() == [5, 12, 3]
    batch = sentences.batch([2, 0])
    assert batch.example.tolist() == [2, 0]
    assert batch.editable.sum(dim=1).tolist() == [1, 3]
    assert words.decode(batch.tokens[1]) == "the king."
    assert is_framed(words, batch)


def test_an_unknown_character_is_an_editable_token(words):
    batch = Sentences(words, ("the 🙂 .",)).batch([0])
    assert int(batch.editable.sum()) == 3


def test_a_batch_of_no_sequences_is_empty(words):
    assert batch_of(words, []).tokens.shape == (0, 0)


def frequencies(lengths: list[int], size: int) -> Tensor:
    return torch.tensor(lengths).bincount(minlength=size).double() / len(lengths)


def test_lengths_follow_the_histogram():
    histogram = torch.tensor([7, 0, 10, 30, 0, 60])  # length 0 is never drawn
    drawn = frequencies(drawn_lengths(histogram, 20_000, seed=0), 6)
    assert float((drawn - torch.tensor([0, 0, 0.1, 0.3, 0, 0.6])).abs().max()) < 0.015


def test_lengths_have_a_minimum():
    drawn = frequencies(drawn_lengths(torch.tensor([0, 50, 10, 30, 10]), 20_000, seed=1, shortest=2), 5)
    assert float((drawn - torch.tensor([0, 0, 0.2, 0.6, 0.2])).abs().max()) < 0.015
    with pytest.raises(ValueError, match=r"^the training corpus has no sequence of 5 or more tokens; give `length`$"):
        drawn_lengths(torch.tensor([0, 50, 10, 30, 10]), 3, seed=0, shortest=5)


def test_each_length_depends_on_the_seed_and_the_index_alone():
    histogram = torch.ones(50)
    assert drawn_lengths(histogram, 7, seed=3)[:4] == drawn_lengths(histogram, 4, seed=3)
    assert drawn_lengths(histogram, 7, seed=3) != drawn_lengths(histogram, 7, seed=4)
    assert set(drawn_lengths(histogram, 5000, seed=0)) == set(range(1, 50))
