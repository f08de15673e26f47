"""`compare`: evaluations side by side in one table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from diffusionbert.cli.common import Flag, OptionalPath, OptionalText, option

if TYPE_CHECKING:
    from diffusionbert.evaluation.tables import Table


@dataclass(frozen=True)
class Compare:
    """Compare evaluations in one table, with differences, intervals and p-values; significantly best ones are marked.

    Example: diffusionbert compare runs/one runs/two --reference one --format latex
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], option("RUN [RUN ...]")] = ()
    """Run directories, or directories written by `evaluate --output`."""
    format: Literal["table", "markdown", "json", "latex"] = "table"
    """The format of the table."""
    unit: Annotated[Literal["token", "word", "byte"] | None, option("{token,word,byte}")] = None
    """The unit of likelihoods. Default: tokens if all vocabularies agree, otherwise words."""
    quantity: OptionalText = None
    """Show only this likelihood: grid, continuous, exact, pseudo, …"""
    reference: OptionalText = None
    """The system to compare the others with, by its name in the table. Default: the best of each column."""
    merge_seeds: Flag = False
    """Merge runs that differ only in their training seed; differences then include the spread over seeds."""
    output: OptionalPath = None
    """A file to write to. Default: standard output."""
    json: Flag = False
    """The same as --format json."""

    def run(self) -> None:
        """Prints the table or writes it to a file."""
        from diffusionbert.evaluation.compare import compare
        from diffusionbert.likelihood.scores import Unit

        if self.json and self.format not in ("table", "json"):
            raise ValueError(f"--json and --format {self.format} contradict each other; give one of them")
        table = compare(
            self.runs,
            None if self.unit is None else Unit(self.unit),
            reference=self.reference,
            quantity=self.quantity,
            merge_seeds=self.merge_seeds,
        )
        form = "json" if self.json else self.format
        if self.output is None:
            _print(table, form)
            return
        try:
            self.output.write_text(_text(table, form), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{str(self.output)!r} cannot be written ({error.strerror}); give another file") from None


def _print(table: Table, form: str) -> None:
    from rich.console import Console

    from diffusionbert.evaluation.tables import below, to_terminal

    console = Console(highlight=False)
    if form != "table" or not console.is_terminal:
        print(_text(table, form), end="")
        return
    console.print(to_terminal(table, styled=True))
    for line in below(table):
        console.print(line, style="dim" if not line.startswith("warning") else "yellow", markup=False, soft_wrap=True)


def _text(table: Table, form: str) -> str:
    from diffusionbert.evaluation.tables import as_json, to_latex, to_markdown

    shown = {"json": as_json, "markdown": to_markdown, "latex": to_latex}.get(form)
    return f"{table}\n" if shown is None else shown(table)
