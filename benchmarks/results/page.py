"""docs/results.md from what was kept: which sections it has, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from budgets import beyond
from conduct import commands, costs, what_was_run
from drawn import convergence, speeds, spindle, texts, tradeoffs, written
from kept import NotRun, Results, unpack
from plateau import plateau
from recipes import recipes
from sections import claims, main_table, other_text, ratio, seeds
from summary import summary

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
Section = Callable[[Results, Path], str]
SECTIONS: tuple[Section, ...] = (
    summary,
    what_was_run,
    ratio,
    claims,
    main_table,
    other_text,
    seeds,
    speeds,
    tradeoffs,
    convergence,
    plateau,
    spindle,
    written,
    texts,
    recipes,
    beyond,
    costs,
    commands,
)


def body(kept: Path, pictures: Path) -> str:
    """The generated part of the page; its pictures are written."""
    with TemporaryDirectory() as folder:
        unpack(kept, Path(folder))
        results = Results(Path(folder))
        if not results.seeds:
            raise ValueError(f"{str(kept)!r} holds nothing; keep an experiment first")
        return "\n\n".join(filter(None, (_written(section, results, pictures) for section in SECTIONS)))


def _written(section: Section, results: Results, pictures: Path) -> str:
    try:
        return section(results, pictures)
    except NotRun as missing:
        return f"Not run yet: {missing}."


def report(page: Path = PAGE) -> None:
    """Writes the part of the page between the marks, and the pictures beside what was kept."""
    kept = page.with_suffix("")
    begin, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, other_mark, end = rest.partition(END)
    if not mark or not other_mark:
        raise ValueError(f"{str(page)!r} lacks the marks {BEGIN} and {END}; put them where the report goes")
    page.write_text(f"{begin}{BEGIN}\n\n{body(kept, kept)}\n\n{END}{end}", encoding="utf-8")
