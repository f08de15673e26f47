"""Restores the capital letters that English is certain to have: the first letter of a sentence, and the word "I".

This is for the output of uncased models. A period may also end an abbreviation ("u.s. officials"), so nothing is
capitalized after one that might. No rule is certain about names; their case is learned (`data.letter_case`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

ABBREVIATIONS = frozenset([
    "mr", "mrs", "ms", "dr", "st", "vs", "etc", "inc", "corp", "co", "ltd", "jr", "sr", "prof", "gen", "gov", "sen",
    "rep", "rev", "hon", "col", "capt", "lt", "sgt", "maj", "adm", "no", "nos", "vol", "fig", "figs", "dept",
    "univ", "assn", "bros", "est", "approx", "al", "ed", "eds", "pp", "ch", "sec", "cf", "ca", "jan", "feb", "mar",
    "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "mt", "ft", "hr", "hrs", "min", "oz", "lb",
    "lbs", "ave", "blvd",
])  # fmt: skip
"""Words after which a period need not end a sentence."""
_I = re.compile(r"(?<![\w.'’@#/-])i(?=['’](?:m|ll|ve|d|re)\b|(?![\w'’/-])(?!\.\w))")
_START = re.compile(r"""(?P<stop>^\s*|[.!?]+["'”’)\]]*\s+)["'“‘(\[]*(?P<letter>[^\W\d_])""")
_LAST_WORD = re.compile(r"[\w.]*$")


def capitalized(text: str, generated: Sequence[tuple[int, int]]) -> str:
    """Capitalizes the generated parts of a text; the rest stays as it is.

    Args:
        text: The whole text, which shows where sentences start.
        generated: The start and end of each generated part, in characters.

    Examples:
        >>> capitalized("he saw what i saw . then i left", [(0, 31)])
        'He saw what I saw . Then I left'
    """
    letters = list(text)
    positions = [match.start() for match in _I.finditer(text)]
    positions += [match.start("letter") for match in _starts(text)]
    for position in positions:
        if len(text[position].upper()) == 1 and any(start <= position < end for start, end in generated):
            letters[position] = text[position].upper()
    return "".join(letters)


def _starts(text: str) -> Iterator[re.Match[str]]:
    """The first letters of sentences, where the sentence start is certain."""
    for match in _START.finditer(text):
        before = text[max(0, match.start() - 20) : match.start()].rstrip().lower()
        word = _LAST_WORD.search(before)[0]  # type: ignore[index]
        may_abbreviate = "." in word or len(word) == 1 or word in ABBREVIATIONS
        if not (match["stop"].startswith(".") and may_abbreviate):
            yield match
