"""Canvases: what is given stays, what is to be written is marked, and texts come back as they were."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import plain_roberta, toy_sentences
from torch import Tensor

from diffusionbert.shapes import Batch
from diffusionbert.text.canvas import Blanks, Sentences, batch_of, blank, drawn_lengths, num_tokens, rewriting
from diffusionbert.text.vocabulary import Vocabulary, train_wordpiece

SENTENCE = "the old king saw the city of paris today ."


@cache
def lower_case() -> Vocabulary:
    """As the bundled model's."""
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
    """Each row begins and ends with a special token that is not editable, and padding comes after."""
    last = canvas.attend.sum(dim=1) - 1
    rows = torch.arange(len(last))
    ends = torch.stack([canvas.tokens[:, 0], canvas.tokens[rows, last]])
    return bool(
        vocabulary.special[ends].all()
        and not canvas.editable[:, 0].any()
        and not canvas.editable[rows, last].any()
        and (canvas.tokens[~canvas.attend] == vocabulary.pad_id).all()
        and not (canvas.editable & ~canvas.attend).any()
    )


# ---- nothing given, or a prompt -------------------------------------------------------------------------------------


def test_an_empty_canvas_has_as_many_hidden_places_as_asked_for(words):
    canvas = blank(words, [5, 1, 3])
    assert canvas.editable.sum(dim=1).tolist() == [5, 1, 3]
    assert canvas.attend.sum(dim=1).tolist() == [7, 3, 5]
    assert bool((canvas.tokens[canvas.editable] == words.mask_id).all())
    assert canvas.example.tolist() == [0, 1, 2]
    assert is_framed(words, canvas)


def test_a_prompt_stands_first_and_is_frozen(words):
    given = ids(words, "the old king")
    canvas = blank(words, [6, 4], "the old king")
    assert canvas.editable.sum(dim=1).tolist() == [3, 1]
    assert canvas.tokens[:, 1:4].tolist() == [given, given]
    assert not canvas.editable[:, :4].any()
    assert is_framed(words, canvas)


def test_a_source_stands_before_and_is_frozen(words):
    canvas = blank(words, [4], "the", source="a queen")
    row = canvas.tokens[0].tolist()
    sep = words.tokenizer.sep_token_id
    assert row == [words.tokenizer.cls_token_id, *ids(words, "a queen"), sep, *ids(words, "the"), *[words.mask_id] * 3,
                   sep]  # fmt: skip
    assert canvas.editable[0].tolist() == [token == words.mask_id for token in row]


def test_a_prompt_cannot_forge_special_tokens(words):
    canvas = blank(words, [30], "[MASK] [SEP] [CLS]")
    assert int(words.special[canvas.tokens[0]].sum()) == 2 + int(canvas.editable.sum())
    assert int(canvas.editable.sum()) == 30 - num_tokens(words, "[MASK] [SEP] [CLS]")


@pytest.mark.parametrize(
    ("lengths", "prompt", "message"),
    [
        ([0], "", "at least 1 token"),
        ([5, -1], "", "at least 1 token"),
        ([3], "the old king", r"no room.*4 or more"),
        ([9, 2], "the old king", r"no room.*4 or more"),
    ],
)
def test_a_length_without_room_is_refused(words, lengths, prompt, message):
    with pytest.raises(ValueError, match=message):
        blank(words, lengths, prompt)


def test_tokens_are_counted_without_special_ones(words, byte_level):
    assert num_tokens(words, "") == 0
    assert num_tokens(words, SENTENCE) == len(SENTENCE.split())
    assert num_tokens(words, "the 🙂") == 2  # one of them unknown
    assert num_tokens(byte_level, "the 🙂") > 2


# ---- blanks ---------------------------------------------------------------------------------------------------------


def test_blanks_are_told_apart_also_where_they_touch(words):
    given = Blanks(words, "[MASK] [MASK] saw [BLANK][MASK] .")
    assert given.marks == ["[MASK]", "[MASK]", "[BLANK]", "[MASK]"]
    for gap in (1, 3):
        canvas = given.canvas(gap)
        assert int(canvas.editable.sum()) == 3 + gap
        assert is_framed(words, canvas)
    text, fillings = given.filled(ids(words, "king queen old river today"), 2)
    assert fillings == ("king", "queen", "old river", "today")
    assert text == "king queen saw old river today ."


def test_blanks_may_stand_first_and_last(words):
    given = Blanks(words, "[MASK] saw [MASK]")
    nobody, again = ids(words, "nobody"), ids(words, "again")
    assert given.filled([*nobody, *again]) == ("nobody saw again", ("nobody", "again"))
    assert int(given.canvas().editable[0, 1]) == 1


def test_the_given_words_come_back_as_they_were(words):
    """Case, spaces, what the vocabulary does not know: a filled text is the given one with its blanks replaced."""
    given = Blanks(words, "The  OLD [MASK]\tsaw “Paris” 🙂 e.g. it's [MASK]!")
    text, _ = given.filled([ids(words, "king")[0], ids(words, "river")[0]])
    assert text == "The  OLD king\tsaw “Paris” 🙂 e.g. it's river!"


def test_a_piece_that_continues_a_word_is_joined_to_it(words):
    [*_, last] = ids(words, "kingx")
    assert words.continuation[last]
    text, fillings = Blanks(words, "the king [MASK] .").filled([last])
    assert (text, fillings) == ("the kingx .", ("x",))


def test_words_are_not_glued_where_no_space_was_typed(words):
    king, queen = ids(words, "king queen")
    text, fillings = Blanks(words, "the[MASK][MASK]saw[BLANK].").filled([king, queen, king])
    assert fillings == ("king", "queen", "king")
    assert text.split() == ["the", "king", "queen", "saw", "king."]


def test_any_vocabulary_understands_the_usual_marks(byte_level):
    for text in ("the [MASK] saw [BLANK] .", "the <mask> saw [BLANK] ."):
        given = Blanks(byte_level, text)
        canvas = given.canvas(2)
        assert int(canvas.editable.sum()) == 3
        king, river = (byte_level.pieces(word)[0] for word in ("king", "river"))
        assert given.filled([king, river, king], 2)[0] == "the king saw river king ."
        # The words around are the same tokens as without the blanks.
        rest = canvas.tokens[0][~canvas.editable[0]].tolist()
        assert byte_level.decode(rest) == "the saw ."


@pytest.mark.parametrize("text", ["", "no blank .", "the [mask] .", "the MASK .", "[ MASK ]"])
def test_a_text_without_blanks_is_refused(words, text):
    with pytest.raises(ValueError, match="nothing to fill"):
        Blanks(words, text)


@pytest.mark.parametrize("text", ["[CLS] the [MASK]", "the [MASK] [SEP] .", "the [MASK] [PAD]"])
def test_forged_special_tokens_are_refused(words, text):
    with pytest.raises(ValueError, match="special tokens"):
        Blanks(words, text).canvas()


@given(st.lists(st.sampled_from(["[MASK]", "[BLANK]", "king", "Saw", "🙂", ",", "e.g."]), max_size=8))
@settings(deadline=None, max_examples=40)
def test_filling_keeps_everything_around(parts):
    text = " ".join(["[MASK]", *parts])
    given = Blanks(lower_case(), text)
    hidden = int(given.canvas(2).editable.sum())
    [river] = ids(lower_case(), "river")
    filled, fillings = given.filled([river] * hidden, 2)
    assert filled == text.replace("[MASK]", "river").replace("[BLANK]", "river river")
    assert " ".join(fillings).split() == ["river"] * hidden


# ---- rewriting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strength", "hidden"), [(0.01, 1), (0.3, 3), (0.4, 4), (0.5, 5), (1.0, 10)])
def test_rewriting_hides_that_share_of_the_tokens(words, strength, hidden):
    canvas = rewriting(words, SENTENCE, strength, 4, seed=0)
    assert canvas.editable.sum(dim=1).tolist() == [hidden] * 4
    assert canvas.tokens[:, 1:-1].tolist() == [ids(words, SENTENCE)] * 4
    assert is_framed(words, canvas)


def test_rows_hide_different_tokens_and_the_seed_decides_which(words):
    first, again, other = (rewriting(words, SENTENCE, 0.4, 8, seed).editable for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) > 1
    assert torch.equal(first[:3], rewriting(words, SENTENCE, 0.4, 3, seed=0).editable)


def test_every_place_is_hidden_about_as_often(words):
    share = rewriting(words, SENTENCE, 0.4, 2000, seed=0).editable.double().mean(dim=0)[1:-1]
    assert float((share - 0.4).abs().max()) < 0.05


def test_unwanted_words_are_always_hidden(words):
    for strength, number in ((0.1, 3), (0.6, 6)):
        hidden = rewriting(words, SENTENCE, strength, 20, seed=0, unwanted=["paris", "old king"]).editable
        assert hidden.sum(dim=1).tolist() == [number] * 20
    canvas = rewriting(words, SENTENCE, 0.1, 20, seed=0, unwanted=["paris", "old king"])
    places = [SENTENCE.split().index(word) + 1 for word in ("paris", "old", "king")]
    assert bool(canvas.editable[:, places].all())
    assert bool((canvas.editable.sum(dim=1) <= 4).all())


@pytest.mark.parametrize("strength", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_outside_0_and_1_is_refused(words, strength):
    with pytest.raises(ValueError, match="strength"):
        rewriting(words, SENTENCE, strength, 1, seed=0)


@pytest.mark.parametrize("text", ["", "   ", "\x00"])
def test_there_must_be_something_to_rewrite(words, text):
    with pytest.raises(ValueError, match="nothing to rewrite"):
        rewriting(words, text, 0.4, 1, seed=0)


# ---- sentences, batches, lengths ------------------------------------------------------------------------------------


def test_sentences_are_picked_by_number_and_keep_their_names(words):
    rows = Sentences(words, ("the king .", SENTENCE, "nobody"))
    assert rows.lengths.tolist() == [5, 12, 3]
    batch = rows.batch([2, 0])
    assert batch.example.tolist() == [2, 0]
    assert batch.editable.sum(dim=1).tolist() == [1, 3]
    assert words.decode(batch.tokens[1]) == "the king."
    assert is_framed(words, batch)


def test_an_unknown_character_is_a_token_like_others(words):
    batch = Sentences(words, ("the 🙂 .",)).batch([0])
    assert int(batch.editable.sum()) == 3


def test_a_batch_of_no_rows_is_empty(words):
    assert batch_of(words, []).tokens.shape == (0, 0)


def frequencies(lengths: list[int], size: int) -> Tensor:
    return torch.tensor(lengths).bincount(minlength=size).double() / len(lengths)


def test_lengths_are_drawn_as_the_corpus_has_them():
    histogram = torch.tensor([7, 0, 10, 30, 0, 60])  # no sentence has 0 tokens, whatever is said
    drawn = frequencies(drawn_lengths(histogram, 20_000, seed=0), 6)
    assert float((drawn - torch.tensor([0, 0, 0.1, 0.3, 0, 0.6])).abs().max()) < 0.015


def test_lengths_leave_room_for_what_is_given():
    drawn = frequencies(drawn_lengths(torch.tensor([0, 50, 10, 30, 10]), 20_000, seed=1, shortest=2), 5)
    assert float((drawn - torch.tensor([0, 0, 0.2, 0.6, 0.2])).abs().max()) < 0.015
    with pytest.raises(ValueError, match="5 or more"):
        drawn_lengths(torch.tensor([0, 50, 10, 30, 10]), 3, seed=0, shortest=5)


def test_a_length_belongs_to_its_row():
    histogram = torch.ones(50)
    assert drawn_lengths(histogram, 7, seed=3)[:4] == drawn_lengths(histogram, 4, seed=3)
    assert drawn_lengths(histogram, 7, seed=3) != drawn_lengths(histogram, 7, seed=4)
    assert set(drawn_lengths(histogram, 5000, seed=0)) == set(range(1, 50))
