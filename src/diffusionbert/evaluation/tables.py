"""Tables of systems: numbers with intervals, the best in bold, the second underlined, footnotes; in four formats.

A `Table` is printed as text or shown as Markdown, JSON or LaTeX (with booktabs). Its author decides which numbers may
be ranked; this module does not know what they mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from rich.table import Table as RichTable

SIGNIFICANT = "†"
DASH = "–"
TEXT_WIDTH = 240
"""The most characters per line of a table as plain text; notes below it are not wrapped."""


class Direction(Enum):
    """Which numbers are better."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"
    """Not ranked."""

    @property
    def arrow(self) -> str:
        """The sign in a heading."""
        return {"lower": " ↓", "higher": " ↑", "neither": ""}[self.value]


@final
@dataclass(frozen=True)
class Column:
    """A column."""

    key: str
    """A name for programs."""
    title: str
    better: Direction
    digits: int
    difference_unit: str = ""
    """What differences between systems are given in."""


@final
@dataclass(frozen=True)
class Cell:
    """A number, or None."""

    value: float | None = None
    interval: tuple[float, float] | None = None
    best: bool = False
    second: bool = False
    significant: bool = False
    """Whether it differs significantly from the best."""
    notes: tuple[str, ...] = ()
    """Marks of footnotes."""


@final
@dataclass(frozen=True)
class SystemDifference:
    """How far a system is from the best of a column."""

    column: Column
    system: str
    reference: str
    """The best system."""
    value: float
    """The system minus the reference."""
    ci95: tuple[float, float]
    p_value: float
    """Two-sided, not corrected for the number of comparisons."""


@final
@dataclass(frozen=True)
class Table:
    """Systems by columns, with footnotes, warnings and differences."""

    columns: tuple[Column, ...]
    names: tuple[str, ...]
    """Of the systems."""
    cells: tuple[tuple[Cell, ...], ...]
    """One tuple per system, one cell per column."""
    footnotes: tuple[tuple[str, str], ...] = ()
    """A mark, which may be empty, and a text."""
    warnings: tuple[str, ...] = ()
    differences: tuple[SystemDifference, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.cells)
        assert all(len(row) == len(self.columns) for row in self.cells)

    def __str__(self) -> str:
        return to_text(self)

    def to_json(self) -> dict[str, object]:
        """Plain JSON values; ∞ is null with `infinite` beside it."""
        return {
            "columns": [
                {"key": column.key, "title": column.title, "better": column.better.value} for column in self.columns
            ],
            "systems": [
                {
                    "name": name,
                    "cells": {
                        column.key: _plain(cell)
                        for column, cell in zip(self.columns, row, strict=True)
                        if cell.value is not None
                    },
                }
                for name, row in zip(self.names, self.cells, strict=True)
            ],
            "footnotes": [{"mark": mark, "text": text} for mark, text in self.footnotes],
            "warnings": list(self.warnings),
            "differences": [
                {
                    "column": apart.column.key,
                    "unit": apart.column.difference_unit,
                    "system": apart.system,
                    "reference": apart.reference,
                    "value": apart.value,
                    "ci95": list(apart.ci95),
                    "p_value": apart.p_value,
                }
                for apart in self.differences
            ],
        }


def ranked(cells: tuple[Cell, ...], column: Column) -> tuple[Cell, ...]:
    """Marks the best and the second of a column; numbers that look equal share a rank, and if all do there is none."""
    shown = [None if cell.value is None else round(cell.value, column.digits) for cell in cells]
    different = sorted({value for value in shown if value is not None}, reverse=column.better is Direction.HIGHER)
    if column.better is Direction.NEITHER or len(different) < 2:
        return cells
    # An infinite value is never the best.
    best, second = (value if math.isfinite(value) else None for value in different[:2])
    return tuple(
        replace(cell, best=value is not None and value == best, second=value is not None and value == second)
        for cell, value in zip(cells, shown, strict=True)
    )


# ---- formats --------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Markup:
    """The markup of a format."""

    escape: Callable[[str], str]
    bold: str
    underlined: str
    raised: str
    """A superscript."""
    interval: str


def to_markdown(table: Table) -> str:
    """A table of GitHub's Markdown."""
    markup = _Markup(escaped_for_markdown, "**{}**", "<u>{}</u>", "<sup>{}</sup>", "[{}, {}]")
    heading = ["system", *(f"{column.title}{column.better.arrow}" for column in table.columns)]
    lines = [f"| {' | '.join(map(markup.escape, heading))} |", f"|---|{'---:|' * len(table.columns)}"]
    for name, row in zip(table.names, table.cells, strict=True):
        lines.append(f"| {' | '.join([markup.escape(name), *_shown(table, row, markup)])} |")
    # Two blanks before the break, or Markdown joins a footnote to the next.
    below = [f"{_raised(mark, markup)}{markup.escape(text)}  " for mark, text in table.footnotes]
    warnings = [f"**Warning:** {markup.escape(text)}  " for text in table.warnings]
    return "\n".join([*lines, "", *below, *warnings]).rstrip() + "\n"


def to_latex(table: Table) -> str:
    """A tabular with its footnotes; needs the package booktabs."""
    markup = _Markup(
        escaped_for_latex, r"\textbf{{{}}}", r"\underline{{{}}}", r"$^{{\mathrm{{{}}}}}$", r"{{\scriptsize [{}, {}]}}"
    )
    heading = ["system", *(f"{column.title}{column.better.arrow}" for column in table.columns)]
    lines = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        "\\toprule",
        " & ".join(map(markup.escape, heading)) + r" \\",
        "\\midrule",
        *(
            " & ".join([markup.escape(name), *_shown(table, row, markup)]) + r" \\"
            for name, row in zip(table.names, table.cells, strict=True)
        ),
        "\\bottomrule",
        "\\end{tabular}",
        "",
        *(f"{_raised(mark, markup)}{markup.escape(text)}\\par" for mark, text in table.footnotes),
        *(f"\\textbf{{Warning:}} {markup.escape(text)}\\par" for text in table.warnings),
    ]
    return "\n".join(lines).rstrip() + "\n"


def to_terminal(table: Table, *, styled: bool) -> RichTable:
    """A table for a console, one column per system, because figures are many and terminals narrow.

    Without styles, * marks the best and ° the second.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    markup = _Markup(one_line, "{}" if styled else "{}*", "{}" if styled else "{}°", "{}", "[{}, {}]")
    shown = RichTable(box=None, pad_edge=False, header_style="dim")
    shown.add_column("")
    for name in table.names:
        shown.add_column(Text(markup.escape(name)), justify="right", overflow="fold")
    for column, cells in zip(table.columns, zip(*table.cells, strict=True), strict=True):
        texts = []
        for cell in cells:
            number, marks, interval = _parts(cell, column, markup)
            text = Text(number, "bold" if cell.best else "underline" if cell.second else "")
            text = Text().append_text(text).append(marks)
            texts.append(text.append(f"\n{interval}", "dim") if interval else text)
        shown.add_row(Text(f"{markup.escape(column.title)}{column.better.arrow}"), *texts)
    return shown


def to_text(table: Table) -> str:
    """Plain text: one column per system, with differences, footnotes and warnings below."""
    from rich.console import Console

    console = Console(width=TEXT_WIDTH, force_terminal=False, force_jupyter=False, no_color=True)
    with console.capture() as captured:
        console.print(to_terminal(table, styled=False))
    return "\n".join([*(line.rstrip() for line in captured.get().splitlines()), *below(table)])


def below(table: Table) -> list[str]:
    """Differences, footnotes and warnings, one per line, as a terminal shows them."""
    notes = [f"{mark} {one_line(text)}".strip() for mark, text in table.footnotes]
    return [*_differences(table), *notes, *(f"warning: {one_line(text)}" for text in table.warnings)]


def _differences(table: Table) -> list[str]:
    """One line for each difference, below a heading."""
    lines = [
        f"  {one_line(apart.column.title)}: {one_line(apart.system)} - {one_line(apart.reference)} = "
        f"{apart.value:+.4f} "
        f"[{apart.ci95[0]:+.4f}, {apart.ci95[1]:+.4f}] {apart.column.difference_unit}, p = {apart.p_value:.3g}"
        for apart in table.differences
    ]
    return ["differences from the best, with 95 % intervals", *lines] if lines else []


def as_json(table: Table) -> str:
    """One JSON object."""
    return json.dumps(table.to_json(), ensure_ascii=False, allow_nan=False) + "\n"


def _shown(table: Table, row: tuple[Cell, ...], markup: _Markup) -> list[str]:
    return [_cell(cell, column, markup) for column, cell in zip(table.columns, row, strict=True)]


def _cell(cell: Cell, column: Column, markup: _Markup) -> str:
    number, marks, interval = _parts(cell, column, markup)
    return f"{number}{marks} {interval}".rstrip()


def _parts(cell: Cell, column: Column, markup: _Markup) -> tuple[str, str, str]:
    """The number, its marks and its interval."""
    marks = "".join(_raised(mark, markup) for mark in (*(SIGNIFICANT * cell.significant), *cell.notes))
    if cell.value is None:
        return markup.escape(DASH), marks, ""
    number = markup.escape(_number(cell.value, column.digits))
    number = markup.bold.format(number) if cell.best else markup.underlined.format(number) if cell.second else number
    if cell.interval is None:
        return number, marks, ""
    low, high = (markup.escape(_number(end, column.digits)) for end in cell.interval)
    return number, marks, markup.interval.format(low, high)


def _raised(mark: str, markup: _Markup) -> str:
    if not mark:
        return ""
    # A dagger is a mathematical symbol in LaTeX; all other marks are letters.
    symbol = r"\dagger" if markup.escape is escaped_for_latex and mark == SIGNIFICANT else markup.escape(mark)
    return markup.raised.format(symbol)


def _number(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "∞"
    return f"{value:,.{digits}f}" if abs(value) < 1e9 else f"{value:.1e}"


def _plain(cell: Cell) -> dict[str, object]:
    assert cell.value is not None
    return {
        "value": cell.value if math.isfinite(cell.value) else None,
        "infinite": not math.isfinite(cell.value),
        "ci95": None if cell.interval is None else [end if math.isfinite(end) else None for end in cell.interval],
        "best": cell.best,
        "second": cell.second,
        "differs_from_best": cell.significant,
        "notes": list(cell.notes),
    }


_MARKDOWN = {character: f"\\{character}" for character in "\\|*_`<>[]"}
_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "–": "--",
    "…": r"\dots{}",
    "°": r"\textdegree{}",
    "∞": r"$\infty$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    "→": r"$\to$",
    "≤": r"$\le$",
    "†": r"$\dagger$",
    "λ": r"$\lambda$",
}


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


def escaped_for_markdown(text: str) -> str:
    """One line that Markdown shows literally."""
    return "".join(_MARKDOWN.get(character, character) for character in one_line(text))


def escaped_for_latex(text: str) -> str:
    """One line that LaTeX sets literally."""
    return "".join(_LATEX.get(character, character) for character in one_line(text))
