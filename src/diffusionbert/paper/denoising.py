"""Table 1 of He et al. 2022, "DiffusionBERT": one sentence being written by several systems, step by step.

Each system shows the state it was in at evenly spaced times, from the first to the last, so that systems with different
noise, steps and calls stand side by side. What came since the row above is marked; hidden places say [MASK]. The cells
of `tables.Table` are numbers to be ranked, and these are sentences: only its escaping is shared.

Pure functions on `Moment`s; knows no model and no tokenizer, but that `##` continues a word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, final

from diffusionbert.assessment.tables import escaped_for_latex, escaped_for_markdown
from diffusionbert.tasks import Moment

HIDDEN = "[MASK]"


@final
@dataclass(frozen=True)
class Word:
    """What a place, or several that spell one word, shows."""

    text: str
    """`HIDDEN` where nothing is written yet."""
    is_new: bool
    """Whether any of it came since the row above."""


@final
@dataclass(frozen=True)
class Row:
    """A system at a time."""

    system: str
    time: float
    """From 1, where nothing is written, to 0."""
    calls: int
    """How often the network had been asked."""
    words: tuple[Word, ...]

    def to_json(self) -> dict[str, Any]:
        """Gives it as plain data."""
        words = [{"text": word.text, "new": word.is_new} for word in self.words]
        return {"system": self.system, "time": self.time, "calls": self.calls, "words": words}


def from_json(plain: Sequence[dict[str, Any]]) -> tuple[Row, ...]:
    """Reads what `to_json` gave."""
    return tuple(
        Row(row["system"], row["time"], row["calls"], tuple(Word(word["text"], word["new"]) for word in row["words"]))
        for row in plain
    )


def denoising_table(systems: Mapping[str, Sequence[Moment]], number: int = 5) -> tuple[Row, ...]:
    """The rows of the table: so many of each system, in the order given."""
    if not systems:
        raise ValueError("no system is given; give the moments of at least one")
    rows = []
    for name, moments in systems.items():
        if not moments:
            raise ValueError(f"{name!r} has no moments; give what `Model.stream` yields, as a list")
        chosen = chosen_moments(moments, number)
        for (_, before), (time, moment) in pairwise([chosen[0], *chosen]):
            rows.append(Row(name, time, moment.calls, _words(moment.pieces, before.pieces)))
    return tuple(rows)


def chosen_moments(moments: Sequence[Moment], number: int) -> list[tuple[float, Moment]]:
    """States at evenly spaced times, the first and the last among them; one that lasts longer may come again.

    A sampler says when something changed: its state at a time is the last that is not later. Where times are not those
    of one way down, states are evenly spaced by their number instead.
    """
    if number < 2:
        raise ValueError(f"{number} moments are asked for; the first and the last are at least 2")
    if len(moments) == 1:
        return [(moments[0].time, moments[0])]
    times = [moment.time for moment in moments]
    if times[0] <= times[-1] or any(after > before for before, after in pairwise(times)):
        last = len(moments) - 1
        chosen = [moments[index] for index in sorted({round(last * at / (number - 1)) for at in range(number)})]
        return [(moment.time, moment) for moment in chosen]
    wanted = [times[0] + (times[-1] - times[0]) * at / (number - 1) for at in range(1, number)]
    # Times are sums and quotients of floats: what is later by less than a billionth is not later.
    found = [moments[bisect_right(times, 1e-9 - time, key=lambda other: -other) - 1] for time in wanted]
    return [(times[0], moments[0]), *zip(wanted, found, strict=True)]


def _words(pieces: Sequence[str | None], before: Sequence[str | None]) -> tuple[Word, ...]:
    """The words of a state, and whether the one before had them at the same places."""
    words: list[Word] = []
    for at, piece in enumerate(pieces):
        if piece is None:
            words.append(Word(HIDDEN, False))
            continue
        is_new = at >= len(before) or before[at] != piece
        if piece.startswith("##") and at > 0 and pieces[at - 1] is not None:
            words[-1] = Word(words[-1].text + piece[2:], words[-1].is_new or is_new)
        else:
            words.append(Word(piece, is_new))
    return tuple(words)


# ---- formats --------------------------------------------------------------------------------------------------------


def to_markdown(rows: Sequence[Row]) -> str:
    """A table of GitHub's Markdown, new words in bold."""
    lines = ["| system | t | calls | text |", "|---|---:|---:|---|"]
    for name, own in groupby(rows, key=lambda row: row.system):
        for index, row in enumerate(own):
            first = "" if index else escaped_for_markdown(name)
            text = _sentence(row, escaped_for_markdown, "**{}**")
            lines.append(f"| {first} | {row.time:.2f} | {row.calls} | {text} |")
    return "\n".join(lines) + "\n"


def to_latex(rows: Sequence[Row]) -> str:
    """A tabular, new words in bold; needs the packages booktabs and multirow."""
    lines = [
        "% needs \\usepackage{booktabs,multirow}",
        "\\begin{tabular}{lrrl}",
        "\\toprule",
        "system & $t$ & calls & text \\\\",
    ]
    for name, group in groupby(rows, key=lambda row: row.system):
        own = list(group)
        lines.append("\\midrule")
        for index, row in enumerate(own):
            first = "" if index else f"\\multirow{{{len(own)}}}{{*}}{{{escaped_for_latex(name)}}}"
            text = _sentence(row, escaped_for_latex, "\\textbf{{{}}}")
            lines.append(f"{first} & {row.time:.2f} & {row.calls} & \\texttt{{{text}}} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Gives the rows as plain data."""
    return [row.to_json() for row in rows]


def _sentence(row: Row, escape: Callable[[str], str], mark: str) -> str:
    """The words of a row, neighbours that are new marked together."""
    parts = []
    for is_new, words in groupby(row.words, key=lambda word: word.is_new):
        # A vocabulary may hold tokens of white space alone, around which no mark could be put.
        text = " ".join(filter(None, (escape(word.text).strip() for word in words)))
        parts.append(mark.format(text) if is_new and text else text)
    return " ".join(filter(None, parts))
