"""Table 1 of He et al. 2022, "DiffusionBERT": one sentence being denoised by several systems.

Each system is shown at evenly spaced times, so that systems with different noise, steps and network calls can be
compared side by side. Tokens that are new since the row above are marked; masked positions are shown as [MASK].

All functions work on `StreamState`s; the only assumption about tokenizers is that `##` continues a word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TypedDict

from diffusionbert.evaluation.tables import escaped_for_latex, escaped_for_markdown
from diffusionbert.inference.tasks import StreamState

MASKED = "[MASK]"


class Word(TypedDict):
    """A word of a state: one position, or several whose tokens spell one word."""

    text: str
    """The word; `MASKED` at a masked position."""
    is_new: bool
    """Whether any of its tokens is new since the row above."""


class Row(TypedDict):
    """A system's state at one time; time runs from 1, where everything is masked, to 0."""

    system: str
    time: float
    calls: int
    words: list[Word]


def denoising_table(systems: Mapping[str, Sequence[StreamState]], number: int = 5) -> list[Row]:
    """The rows of the table: `number` states per system, in the given order of systems."""
    rows = []
    for system, states in systems.items():
        chosen = choose_states(states, number)
        for (_, before), (time, state) in pairwise([chosen[0], *chosen]):
            rows.append(Row(system=system, time=time, calls=state.calls, words=_words(state.pieces, before.pieces)))
    return rows


def choose_states(states: Sequence[StreamState], number: int) -> list[tuple[float, StreamState]]:
    """States at evenly spaced times, including the first and the last; a state that lasts long is repeated.

    A sampler yields a state when something changes: the state at time t is the last one not later than t. Where times
    do not decrease (as with Gibbs sampling), states are evenly spaced by their index instead.
    """
    times = [state.time for state in states]
    if times[0] <= times[-1] or any(after > before for before, after in pairwise(times)):
        indices = sorted({round((len(states) - 1) * at / (number - 1)) for at in range(number)})
        return [(times[index], states[index]) for index in indices]
    wanted = [times[0] + (times[-1] - times[0]) * at / (number - 1) for at in range(1, number)]
    # Times have rounding errors: a state that is later by less than 1e-9 counts as simultaneous.
    found = [states[bisect_right(times, 1e-9 - time, key=lambda other: -other) - 1] for time in wanted]
    return [(times[0], states[0]), *zip(wanted, found, strict=True)]


def _words(pieces: Sequence[str | None], before: Sequence[str | None]) -> list[Word]:
    """The words of a state, each new unless the state before has the same tokens at its positions."""
    words: list[Word] = []
    for at, piece in enumerate(pieces):
        if piece is None:
            words.append(Word(text=MASKED, is_new=False))
            continue
        is_new = at >= len(before) or before[at] != piece
        if piece.startswith("##") and at > 0 and pieces[at - 1] is not None:
            words[-1] = Word(text=words[-1]["text"] + piece[2:], is_new=words[-1]["is_new"] or is_new)
        else:
            words.append(Word(text=piece, is_new=is_new))
    return words


def to_markdown(rows: Sequence[Row]) -> str:
    """The table in GitHub's Markdown, new words in bold."""
    lines = ["| system | t | calls | text |", "|---|---:|---:|---|"]
    for name, own in groupby(rows, key=lambda row: row["system"]):
        for index, row in enumerate(own):
            first = "" if index else escaped_for_markdown(name)
            text = _sentence(row, escaped_for_markdown, "**{}**")
            lines.append(f"| {first} | {row['time']:.2f} | {row['calls']} | {text} |")
    return "\n".join(lines) + "\n"


def to_latex(rows: Sequence[Row]) -> str:
    """The table as a LaTeX tabular, new words in bold; needs the packages booktabs and multirow."""
    lines = ["% needs \\usepackage{booktabs,multirow}", "\\begin{tabular}{lrrl}", "\\toprule"]
    lines.append("system & $t$ & calls & text \\\\")
    for name, group in groupby(rows, key=lambda row: row["system"]):
        own = list(group)
        lines.append("\\midrule")
        for index, row in enumerate(own):
            first = "" if index else f"\\multirow{{{len(own)}}}{{*}}{{{escaped_for_latex(name)}}}"
            text = _sentence(row, escaped_for_latex, "\\textbf{{{}}}")
            lines.append(f"{first} & {row['time']:.2f} & {row['calls']} & \\texttt{{{text}}} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _sentence(row: Row, escape: Callable[[str], str], mark: str) -> str:
    """The words of a row; adjacent new words share one mark."""
    parts = []
    for is_new, words in groupby(row["words"], key=lambda word: word["is_new"]):
        # Tokens that are only white space cannot be marked.
        text = " ".join(filter(None, (escape(word["text"]).strip() for word in words)))
        parts.append(mark.format(text) if is_new and text else text)
    return " ".join(filter(None, parts))
