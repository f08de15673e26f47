"""Tables: one evaluation with its protocol as text, and systems by columns in four formats.

A `Table` is formatted as text, Markdown, JSON or LaTeX (with booktabs): numbers with intervals, the best in bold if a
test tells it from the others, differences with p-values, and footnotes. Whoever builds a table decides which numbers
may be ranked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, final

from diffusionbert.evaluation.conventions import Convention, ConventionScale
from diffusionbert.likelihood.scores import Length, PointEstimate
from diffusionbert.objectives.base import Likelihood

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from diffusionbert.evaluation.result import EvaluationResult, Generation

BEST = "*"
"""Marks the best number in plain text, and the footnote that explains the mark."""
DASH = "–"
TEXT_WIDTH = 240
"""The most characters per line of a table as plain text; notes below it are not wrapped."""


class Direction(Enum):
    """Which numbers are better; NEITHER is not ranked."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


_ARROWS = {Direction.LOWER: " ↓", Direction.HIGHER: " ↑", Direction.NEITHER: ""}


@final
@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    """The machine-readable name."""
    title: str
    better: Direction
    digits: int
    difference_unit: str = ""
    """The unit of differences between systems."""

    @property
    def heading(self) -> str:
        return self.title + _ARROWS[self.better]


@final
@dataclass(frozen=True)
class Cell:
    """A number, a text, or neither."""

    value: float | None = None
    interval: tuple[float, float] | None = None
    best: bool = False
    """Whether this is the best, or does not differ significantly from the best while others do."""
    text: str | None = None
    """A text instead of a number."""
    notes: tuple[str, ...] = ()
    """The marks of its footnotes."""

    def to_json(self) -> dict[str, object]:
        if self.text is not None:
            return {"text": self.text}
        assert self.value is not None
        return {
            "value": self.value if math.isfinite(self.value) else None,
            "infinite": not math.isfinite(self.value),
            "ci95": None if self.interval is None else [end if math.isfinite(end) else None for end in self.interval],
            "best": self.best,
            "notes": list(self.notes),
        }


@final
@dataclass(frozen=True)
class SystemDifference:
    """The difference between a system and another one, by default the best of a column."""

    column: Column
    system: str
    reference: str
    value: float
    """The system minus the reference."""
    ci95: tuple[float, float]
    p_value: float
    """The two-sided p-value, not corrected for the number of comparisons."""
    seeds: tuple[int, int] = (1, 1)
    """Training runs of the system and of the reference; the interval includes their spread if both have two or more."""
    noise: str = "independent"
    """The noise of the draws: `shared`, so that most of it cancels, `independent`, `none` if nothing is drawn, or
    `unknown`."""

    @property
    def relative(self) -> float | None:
        """The relative change of a perplexity; None for other figures."""
        return math.expm1(self.value) if self.column.difference_unit.startswith("nats per") else None

    def parts(self) -> tuple[str, ...]:
        """The texts that a table shows: column, systems, difference, interval, change, p, seeds, noise."""
        unit = f" {self.column.difference_unit}" if self.column.difference_unit.startswith("nats") else ""
        seeds = str(self.seeds[0]) if len({*self.seeds}) == 1 else f"{self.seeds[0]} and {self.seeds[1]}"
        return (
            self.column.title,
            f"{self.system} - {self.reference}",
            f"{self.value:+.4f}{unit}",
            f"[{self.ci95[0]:+.4f}, {self.ci95[1]:+.4f}]",
            "" if self.relative is None else f"{self.relative:+.1%}",
            p_text(self.p_value),
            seeds,
            self.noise,
        )


def p_text(p_value: float) -> str:
    """A p-value as tables show it."""
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.3g}"


_DIFFERENCE_HEADINGS = "figure", "systems", "difference", "95 %", "perplexity", "p", "seeds", "noise"


@final
@dataclass(frozen=True)
class Table:
    """Systems by columns, with footnotes, warnings and differences."""

    columns: tuple[Column, ...]
    names: tuple[str, ...]
    """The names of the systems."""
    cells: tuple[tuple[Cell, ...], ...]
    """One tuple per system, one cell per column."""
    footnotes: tuple[tuple[str, str], ...] = ()
    """A mark, which may be empty, and a text."""
    warnings: tuple[str, ...] = ()
    differences: tuple[SystemDifference, ...] = ()
    provenance: tuple[Mapping[str, object], ...] = ()
    """Hashes of the code, data and weights of each system."""

    def __str__(self) -> str:
        """Plain text: one column per system, with differences, footnotes and warnings below."""
        from rich.console import Console

        console = Console(width=TEXT_WIDTH, force_terminal=False, force_jupyter=False, no_color=True)
        with console.capture() as captured:
            console.print(to_terminal(self, styled=False))
        return "\n".join([*(line.rstrip() for line in captured.get().splitlines()), *below(self)])

    def to_json(self) -> dict[str, object]:
        """Plain JSON values; ∞ is null, with `infinite` next to it."""
        keys = [column.key for column in self.columns]
        return {
            "columns": [{"key": one.key, "title": one.title, "better": one.better.value} for one in self.columns],
            "systems": [
                {
                    "name": name,
                    "cells": {
                        key: cell.to_json()
                        for key, cell in zip(keys, row, strict=True)
                        if cell.value is not None or cell.text is not None
                    },
                    **({"provenance": dict(self.provenance[index])} if index < len(self.provenance) else {}),
                }
                for index, (name, row) in enumerate(zip(self.names, self.cells, strict=True))
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
                    "seeds": list(apart.seeds),
                    "noise": apart.noise,
                }
                for apart in self.differences
            ],
        }


def best_of(cells: Sequence[Cell], column: Column) -> int | None:
    """The index of the best finite number of a column; None if it has no direction or fewer than two numbers."""
    values = {index: cell.value for index, cell in enumerate(cells) if cell.value is not None}
    finite = {index: value for index, value in values.items() if math.isfinite(value)}
    if column.better is Direction.NEITHER or len(values) < 2 or not finite:
        return None
    sign = -1 if column.better is Direction.HIGHER else 1
    return min(finite, key=lambda index: sign * finite[index])


# ---- formats --------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Markup:
    """The markup of a format."""

    escape: Callable[[str], str]
    bold: str
    raised: str
    """The template of a superscript."""
    interval: str

    def parts(self, cell: Cell, column: Column) -> tuple[str, str, str]:
        """The number, its marks and its interval."""
        marks = "".join(map(self.mark, cell.notes))
        if cell.text is not None:
            return self.escape(cell.text), marks, ""
        if cell.value is None:
            return self.escape(DASH), marks, ""
        number = self.escape(_number(cell.value, column.digits))
        number = self.bold.format(number) if cell.best else number
        if cell.interval is None:
            return number, marks, ""
        return number, marks, self.interval.format(*(self.escape(_number(end, column.digits)) for end in cell.interval))

    def mark(self, mark: str) -> str:
        return self.raised.format(self.escape(mark)) if mark else ""

    def footnote(self, mark: str, text: str) -> str:
        """A line below the table."""
        return (
            f"{self.bold.format('bold')}: {self.escape(text)}" if mark == BEST else self.mark(mark) + self.escape(text)
        )

    def rows(self, table: Table) -> Iterator[list[str]]:
        """The heading and the systems, as rows of cell texts."""
        yield [self.escape(text) for text in ("system", *(column.heading for column in table.columns))]
        for name, row in zip(table.names, table.cells, strict=True):
            parts = [self.parts(cell, column) for column, cell in zip(table.columns, row, strict=True)]
            yield [
                self.escape(name),
                *(f"{number}{marks} {interval}".rstrip() for number, marks, interval in parts),
            ]


def to_markdown(table: Table) -> str:
    """The table in GitHub's Markdown."""
    markup = _Markup(escaped_for_markdown, "**{}**", "<sup>{}</sup>", "[{}, {}]")
    heading, *rows = (f"| {' | '.join(row)} |" for row in markup.rows(table))
    # Two spaces before the line break, or Markdown joins a footnote to the next.
    notes = [f"{markup.footnote(mark, text)}  " for mark, text in table.footnotes]
    warnings = [f"**Warning:** {markup.escape(text)}  " for text in table.warnings]
    line = f"|---|{'---:|' * len(table.columns)}"
    apart = []
    if table.differences:
        texts = (_DIFFERENCE_HEADINGS, *(one.parts() for one in table.differences))
        heads, *below = (f"| {' | '.join(map(markup.escape, text))} |" for text in texts)
        apart = ["", heads, f"|---|---|{'---:|' * (len(_DIFFERENCE_HEADINGS) - 2)}", *below]
    return "\n".join([heading, line, *rows, "", *notes, *warnings, *apart]).rstrip() + "\n"


def to_latex(table: Table) -> str:
    """The table as a LaTeX tabular with footnotes; needs the package booktabs."""
    markup = _Markup(escaped_for_latex, r"\textbf{{{}}}", r"$^{{\mathrm{{{}}}}}$", r"{{\scriptsize [{}, {}]}}")
    heading, *rows = (" & ".join(row) + r" \\" for row in markup.rows(table))
    lines = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        "\\toprule",
        heading,
        "\\midrule",
        *rows,
        "\\bottomrule",
        "\\end{tabular}",
        "",
        *(f"{markup.footnote(mark, text)}\\par" for mark, text in table.footnotes),
        *(f"\\textbf{{Warning:}} {markup.escape(text)}\\par" for text in table.warnings),
    ]
    if table.differences:
        heads, *below = (
            " & ".join(map(markup.escape, text)) + r" \\"
            for text in (_DIFFERENCE_HEADINGS, *(one.parts() for one in table.differences))
        )
        columns = "l" * 2 + "r" * (len(_DIFFERENCE_HEADINGS) - 2)
        lines += ["", f"\\begin{{tabular}}{{{columns}}}", "\\toprule", heads, "\\midrule", *below]
        lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines).rstrip() + "\n"


def to_terminal(table: Table, *, styled: bool) -> RichTable:
    """The table for a terminal, with one column per system, because figures are many and terminals narrow.

    Without styles, * marks the best.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    markup = _Markup(one_line, "{}" if styled else f"{{}}{BEST}", "{}", "[{}, {}]")
    shown = RichTable(box=None, pad_edge=False, header_style="dim")
    shown.add_column("")
    for name in table.names:
        shown.add_column(Text(one_line(name)), justify="right", overflow="fold")
    for column, cells in zip(table.columns, zip(*table.cells, strict=True), strict=True):
        texts = []
        for cell in cells:
            number, marks, interval = markup.parts(cell, column)
            text = Text.assemble((number, "bold" if cell.best else ""), marks)
            texts.append(text.append(f"\n{interval}", "dim") if interval else text)
        shown.add_row(Text(one_line(column.heading)), *texts)
    return shown


def below(table: Table) -> list[str]:
    """Differences, footnotes and warnings, one per line, as a terminal shows them."""
    differences = []
    for apart in table.differences:
        title, systems, value, interval, relative, p_value, seeds, noise = map(one_line, apart.parts())
        change = f"{relative} perplexity, " if relative else ""
        end = "" if noise == "none" else f", {noise} noise"
        trained = "seed" if seeds == "1" else "seeds"
        p_value = p_value if p_value.startswith("<") else f"= {p_value}"
        differences.append(f"  {title}: {systems} = {value} {interval}, {change}p {p_value}, {seeds} {trained}{end}")
    return [
        *(["differences, with 95 % intervals"] if differences else []),
        *differences,
        *(f"{mark} {one_line(text)}".strip() for mark, text in table.footnotes),
        *(f"warning: {one_line(text)}" for text in table.warnings),
    ]


def as_json(table: Table) -> str:
    """The table as one JSON object."""
    return json.dumps(table.to_json(), ensure_ascii=False, allow_nan=False) + "\n"


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "∞"
    return f"{value:,.{digits}f}" if abs(value) < 1e9 else f"{value:.1e}"


_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\|*_`<>[]"})
_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {
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
        "λ": r"$\lambda$",
    }
)


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


def escaped_for_markdown(text: str) -> str:
    """One line that Markdown shows literally."""
    return one_line(text).translate(_MARKDOWN)


def escaped_for_latex(text: str) -> str:
    """One line that LaTeX sets literally."""
    return one_line(text).translate(_LATEX)


# ---- one evaluation -------------------------------------------------------------------------------------------------


def result_table(result: EvaluationResult) -> str:
    """An evaluation as text: figures in columns, and how they were obtained below them."""
    lines = [result.name]
    for summary in result.likelihoods.values():
        lines.append(f"{summary.kind.value}, {summary.protocol.definition}")
        for name, digits in _RATES.items():
            found: PointEstimate | None = getattr(summary.rates, name)
            lines += [] if found is None else [_figure(name.replace("_", " "), digits, found)]
    if result.generation is not None:
        lines += _generation_lines(result.generation)
    if result.conventions is not None:
        lines.append("in the conventions of the literature")
        lines += [line for convention in result.conventions for line in _convention_lines(convention)]
    return "\n".join([*lines, *_protocol_lines(result), *(f"note: {note}" for note in result.notes)])


_RATES = {
    "nats_per_sentence": 1,
    "nats_per_token": 3,
    "perplexity_per_token": 2,
    "perplexity_per_word": 1,
    "bits_per_byte": 3,
}
"""The fields of `LikelihoodRates` to show, and their numbers of digits."""


def _figure(name: str, digits: int, found: PointEstimate | float | None, *real: float | None) -> str:
    """A line with a figure, its interval, and the same figure for real sentences."""
    value, ci95 = (found.value, found.ci95) if isinstance(found, PointEstimate) else (found, None)
    interval = "" if ci95 is None else f"[{_number(ci95[0], digits)}, {_number(ci95[1], digits)}]"
    shown = "".join(_number(one, digits) for one in real)
    return f"  {name:<25} {_number(value, digits):>12}  {interval:<20} {shown:>14}".rstrip()


def _generation_lines(found: Generation) -> Iterator[str]:
    own, real, speed = found.samples, found.real, found.speed
    if (answers := found.answers) is not None:
        yield f"{f'{answers.number:,} answers':<27} {'':>12}  {'95 %':<20} source copied"
        yield _figure("BLEU-4, own target", 3, answers.bleu4, answers.copied_bleu4)
        yield _figure("exact match", 3, answers.exact_match)
    yield f"{f'{own.number:,} samples':<27} {'':>12}  {'95 %':<20} real sentences"
    yield _figure("BLEU-4", 3, own.bleu4, real.bleu4.value)
    yield _figure("self-BLEU-4", 3, own.self_bleu4, real.self_bleu4.value)
    for n, fractions in enumerate(zip(own.distinct, real.distinct, strict=True), start=1):
        yield _figure(f"distinct-{n}", 3, *fractions)
    yield _figure("repeated 4-grams", 3, own.repeated_4grams, real.repeated_4grams)
    yield _figure("longest run of a word", 2, own.longest_run, real.longest_run)
    yield _figure("word entropy, all texts", 2, own.entropy_pooled, real.entropy_pooled)
    yield _figure("word entropy, each text", 2, own.entropy_per_text, real.entropy_per_text)
    yield _figure("words per text", 1, own.words_per_text, real.words_per_text)
    if found.judge is not None:
        judged, of_real = found.judge.samples, found.judge.real
        yield _figure("judge's perplexity", 1, PointEstimate(judged.perplexity, judged.ci95), of_real.perplexity)
        yield _figure("judge's token entropy", 2, judged.entropy, of_real.entropy)
    if found.mauve is not None:
        yield _figure("MAUVE", 3, found.mauve.value)
    yield _figure("seconds per sample", 3, speed.seconds_per_sample)
    yield _figure("tokens per second", 0, speed.tokens_per_second)
    yield _figure("network calls per sample", 1, speed.calls_per_sample)


def _convention_lines(found: Convention) -> Iterator[str]:
    meaning = found.meaning
    unit, digits = (", bits", 3) if meaning.scale is ConventionScale.BITS else ("", 2)
    untrained = "" if meaning.trained_for else "; NOT what it was trained for"
    yield f"{_figure(f'{meaning.name}{unit}', digits, found.value)}  {meaning.papers}{untrained}"
    yield f"      {meaning.quotient}; {meaning.note}"


def _protocol_lines(result: EvaluationResult) -> Iterator[str]:
    data, found = result.data, result.generation
    yield (
        f"on {data.num_sentences:,} of {data.num_in_corpus:,} sentences of {data.corpus}, split {data.split.value}, "
        f"sha256 {data.corpus_sha256[:12]}; sha256 of those {data.num_sentences:,} {data.sha256[:12]}, of the weights "
        f"{(result.weights.sha256 or 'unknown')[:12]}"
    )
    for name, summary in result.likelihoods.items():
        protocol, limit = summary.protocol, summary.limited_by
        draws = f"{protocol.num_draws} draws per sentence in {protocol.strata} strata, seed {protocol.seed}"
        yield (
            f"{name}: {protocol.definition.quantity}, {'packed text' if protocol.packed else 'single sentences'}, "
            f"{'source given, ' if protocol.source_given else ''}"
            f"special tokens {'counted' if protocol.special_tokens else 'not counted'}, "
            f"{'length given' if protocol.length is Length.GIVEN else '-log p(length) added'}, "
            f"{'nothing drawn' if summary.kind is Likelihood.EXACT else draws}, {protocol.arithmetic}; "
            f"{protocol.interval}{f'; wider than requested for lack of {limit.value}' if limit else ''}"
        )
    if found is None:
        return
    sampling, speed = found.sampling, found.speed
    if (answers := found.answers) is not None:
        chosen = "" if answers.num_candidates == 1 else f", the most agreed of {answers.num_candidates} candidates each"
        yield (
            f"answers: {'of the length of their targets' if answers.length_given else 'of lengths that sources have'}"
            f"{chosen}; BLEU-4 with n-grams pooled over answers, whitespace-separated words in lower case"
        )
    yield (
        f"unsmoothed BLEU-4, mean over {sampling.number:,} samples against all {data.num_in_corpus:,} sentences; "
        f"self-BLEU-4 of {'the same' if answers else f'{sampling.number:,} other'} samples, each against the rest; "
        "whitespace-separated words in lower case; sentences went through the model's tokenizer and back, as "
        "samples do; 95 % by bootstrap over samples"
    )
    yield (
        f"samples: {sampling.sampler}, {sampling.steps} steps, temperature {sampling.temperature}, top-k "
        f"{sampling.top_k or 'off'}, top-p {sampling.top_p or 'off'}, length {length_text(sampling.length)}, seed "
        f"{sampling.seed}; {speed.batch} at once on {speed.device}"
    )
    if found.judge is not None:
        yield f"judge: {found.judge.name}, {found.judge.convention}"
    if found.mauve is not None:
        yield f"MAUVE: features of {found.mauve.features}, {found.mauve.num_buckets} buckets"


def length_text(length: int | tuple[int, int] | None) -> str:
    """The length of samples in words."""
    if length is None:
        return "as in the training corpus"
    return f"{length[0]}-{length[1]}" if isinstance(length, tuple) else str(length)
