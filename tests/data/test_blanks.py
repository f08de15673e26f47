"""Blanks: word boundaries, windows over long texts, and filled texts that keep the given text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import VOCABULARIES, byte_pairs, wordpiece

from diffusionbert.data.blanks import BlankCanvas, Blanks
from diffusionbert.data.tokenizer import Vocabulary


@pytest.fixture
def words() -> Vocabulary:
    return wordpiece()


def each(tokens: list[int]) -> list[list[int]]:
    """One token per blank."""
    return [[token] for token in tokens]


def rules(canvas: BlankCanvas) -> list[tuple[bool, bool]]:
    """Whether each editable position begins a word, and whether it continues one."""
    editable = canvas.batch.editable
    return list(zip(canvas.word_starts[editable].tolist(), canvas.word_continuations[editable].tolist(), strict=True))


def test_adjacent_blanks_are_separate(words):
    blanks = Blanks(words, "[MASK] [MASK] saw [BLANK][MASK] .")
    assert blanks.marks == ["[MASK]", "[MASK]", "[BLANK]", "[MASK]"]
    for gap in (1, 3):
        batch = blanks.canvas(gap).batch
        assert int(batch.editable.sum()) == 3 + gap
        assert bool(words.special[batch.tokens[0, [0, -1]]].all())
    king, queen, old, river, today = words.own(["king queen old river today"])[0]
    text, fillings = blanks.filled([[king], [queen], [old, river], [today]])
    assert fillings == ("king", "queen", "old river", "today")
    assert text == "king queen saw old river today ."


def test_filling_keeps_case_spaces_and_unknown_characters(words):
    blanks = Blanks(words, "The  OLD [MASK]\tsaw “Paris” 🙂 e.g. it's [MASK]!")
    text, _ = blanks.filled(each(words.own(["king river"])[0]))
    assert text == "The  OLD king\tsaw “Paris” 🙂 e.g. it's river!"


def test_blanks_work_with_any_mask_token():
    vocabulary = byte_pairs()
    for text in ("the [MASK] saw [BLANK] .", "the <mask> saw [BLANK] ."):
        blanks = Blanks(vocabulary, text)
        batch = blanks.canvas(2).batch
        assert int(batch.editable.sum()) == 3
        king, river = (vocabulary.pieces(word)[0] for word in ("king", "river"))
        assert blanks.filled([[king], [river, king]])[0] == "the king saw river king ."
        # The text around the blanks has the same tokens as without them.
        rest = batch.tokens[0][~batch.editable[0]].tolist()
        assert vocabulary.decode(rest) == "the saw ."


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_blank_after_a_space_begins_a_word_and_one_after_a_letter_continues_it(kind):
    vocabulary = VOCABULARIES[kind]()
    begins, continues, unknown = (True, False), (False, True), (False, False)
    assert rules(Blanks(vocabulary, "the tab [MASK]").canvas()) == [begins]
    assert rules(Blanks(vocabulary, "un[MASK]able").canvas()) == [continues]
    assert rules(Blanks(vocabulary, "the king[BLANK] saw").canvas(3)) == [continues, unknown, unknown]
    assert rules(Blanks(vocabulary, "a [MASK][MASK] [MASK]").canvas()) == [begins, unknown, begins]
    assert rules(Blanks(vocabulary, "[MASK] saw").canvas()) == [unknown if kind == "byte-level" else begins]
    assert rules(Blanks(vocabulary, "a ([MASK])").canvas()) == [begins if kind == "wordpiece" else unknown]


def test_a_chinese_character_is_a_word_in_a_wordpiece(words):
    assert rules(Blanks(words, "王[MASK]").canvas()) == [(True, False)]
    assert rules(Blanks(byte_pairs(), "王[MASK]").canvas()) == [(False, True)]


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_text_after_a_blank_continues_a_word_only_if_it_touches_the_blank(kind):
    vocabulary = VOCABULARIES[kind]()
    for text, continues in (("un[MASK]able", True), ("un[MASK] able", False)):
        tokens = Blanks(vocabulary, text).canvas().batch.tokens[0].tolist()
        after = tokens[tokens.index(vocabulary.mask_id) + 1]
        assert bool(vocabulary.continuation[after]) == continues, (text, tokens)
    [first, *_] = vocabulary.own(["x"])[0]
    assert Blanks(vocabulary, "un[MASK]able").filled([[first]])[0].count(" ") == 0


@pytest.mark.parametrize("text", ["", "no blank .", "the [mask] .", "the MASK .", "[ MASK ]"])
def test_a_text_without_blanks_is_rejected(words, text):
    with pytest.raises(ValueError, match=r"^nothing to fill in '.*'; use \[MASK\] for one token, \[BLANK\] for any"):
        Blanks(words, text)


@pytest.mark.parametrize("text", ["[CLS] the [MASK]", "the [MASK] [SEP] .", "the [MASK] [PAD]"])
def test_special_tokens_in_a_text_with_blanks_are_rejected(words, text):
    with pytest.raises(ValueError, match=r"^the text must not contain special tokens other than \[MASK\], got '"):
        Blanks(words, text)


PARTS = ["[MASK]", "[BLANK]", "king", "Saw", "🙂", ",", "e.g.", "\n", "  ", "é", "王", "un", "(", "\u200b"]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(PARTS), max_size=8),
    st.sampled_from(sorted(VOCABULARIES)),
    st.sampled_from(["", " "]),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_filling_keeps_the_text_around_the_blanks(parts, kind, separator, gap):
    vocabulary = VOCABULARIES[kind]()
    blanks = Blanks(vocabulary, separator.join(["[MASK]", *parts]))
    canvas = blanks.canvas(gap)
    widths = blanks.widths(gap)
    assert int(canvas.batch.editable.sum()) == sum(widths)
    tokens = [vocabulary.own(["x"])[0][-1:] * width for width in widths]
    text, fillings = blanks.filled(tokens, capitalize=True)
    assert len(fillings) == len(blanks.marks)
    at = 0
    for part in blanks.parts:
        at = text.index(part, at) + len(part)
    assert text.startswith(blanks.parts[0])
    assert text.endswith(blanks.parts[-1])


# ---- windows --------------------------------------------------------------------------------------------------------


def test_a_text_that_fits_is_shown_whole(words):
    blanks = Blanks(words, "the [MASK] saw [BLANK] .")
    assert blanks.groups(9, gap=3) == [range(2)]
    whole, window = blanks.canvas(3), blanks.canvas(3, widest=3, max_positions=9)
    assert torch.equal(whole.batch.tokens, window.batch.tokens)


def test_a_long_text_is_shown_in_windows_around_its_blanks(words):
    words_before, words_after = "the king saw " * 10, " a river today" * 10
    blanks = Blanks(words, f"{words_before}[MASK] and [MASK]{words_after} again [MASK]")
    assert blanks.groups(20, gap=1) == [range(2), range(2, 3)]
    first = blanks.canvas(1, range(2), max_positions=20).batch
    assert first.tokens.shape == (1, 20)
    positions = first.editable[0].nonzero()[:, 0].tolist()
    before, after = positions[0] - 1, 18 - positions[1]
    assert abs(before - after) <= 1
    king = words.own(["king"])[0]
    last = blanks.canvas(1, range(2, 3), [king, king], max_positions=20)
    assert last.batch.tokens.shape == (1, 20)
    assert int(last.batch.editable.sum()) == 1
    assert bool(last.batch.editable[0, -2])  # at the end of the text, all context is before the blank
    assert rules(last) == [(True, False)]


def test_all_lengths_of_a_blank_have_the_same_context(words):
    blanks = Blanks(words, "the king saw " * 10 + "[BLANK]" + " a river today" * 10)
    contexts = []
    for gap in (1, 2, 4):
        batch = blanks.canvas(gap, range(1), widest=4, max_positions=20).batch
        assert int(batch.editable.sum()) == gap
        assert batch.tokens.shape[1] == 16 + gap
        contexts.append(batch.tokens[0][~batch.editable[0]].tolist())
    assert contexts[0] == contexts[1] == contexts[2]


def test_many_blanks_are_filled_in_windows_of_half_the_length(words):
    blanks = Blanks(words, "[MASK] " * 23)
    groups = blanks.groups(24, gap=1)
    assert [len(group) for group in groups] == [12, 11]
    filled = [words.own(["king"])[0]] * 12
    batch = blanks.canvas(1, groups[1], filled, max_positions=24).batch
    assert int(batch.editable.sum()) == 11
    assert batch.tokens.shape[1] == 24
