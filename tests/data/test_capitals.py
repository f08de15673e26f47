"""Capital letters where English has them for certain."""

from __future__ import annotations

import pytest

from diffusionbert.data.capitals import capitalized


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("he saw it . then he left", "He saw it . Then he left"),
        ("what? yes! no. he left", "What? Yes! No. he left"),  # "no. 7" is a number
        ("the u.s. officials met mr. smith", "The u.s. officials met mr. smith"),
        ('it ended. "so what," i said', 'It ended. "So what," I said'),
        ("i'm sure i've seen what i saw, i.e. nothing", "I'm sure I've seen what I saw, i.e. nothing"),
        ("world war i. the end", "World war I. the end"),
        ("a wi-fi i-beam in i/o", "A wi-fi i-beam in i/o"),
        ("(the end)", "(The end)"),
        ("12 kings", "12 kings"),
        ("ßtrange", "ßtrange"),  # its upper case has two letters
        ("", ""),
        ("  a", "  A"),
    ],
)
def test_sentences_and_i_are_capitalized(text, expected):
    assert capitalized(text, [(0, len(text))]) == expected


def test_given_text_is_not_changed():
    text = "once i saw. then i left"
    assert capitalized(text, []) == text
    assert capitalized(text, [(12, len(text))]) == "once i saw. Then I left"
    assert capitalized(text, [(13, len(text))]) == "once i saw. then I left"


def test_a_long_word_costs_no_quadratic_time():
    text = "a" * 200_000 + "." * 1000
    assert capitalized(text, [(0, len(text))])[:2] == "Aa"
