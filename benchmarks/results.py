"""The experiment: keeps what runs on a GPU left behind, and writes docs/results.md from it.

    python benchmarks/results.py keep experiment
    python benchmarks/results.py report

`keep` copies settings, logs, scores and some samples into docs/results, without weights. `report` needs neither models
nor corpora: every table, picture and verdict of the page comes from the kept files, and what is not there yet is named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from budgets import beyond
from conduct import commands, costs, what_was_run
from drawn import convergence, speeds, spindle, texts, tradeoffs, written
from kept import NotRun, Results, pack, unpack
from sections import claims, main_table, other_text, ratio, seeds

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
Section = Callable[[Results, Path], str]
SECTIONS: tuple[Section, ...] = (
    what_was_run,
    ratio,
    claims,
    main_table,
    other_text,
    seeds,
    speeds,
    tradeoffs,
    convergence,
    spindle,
    written,
    texts,
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
        return "\n\n".join(_written(section, results, pictures) for section in SECTIONS)


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    keeping = actions.add_parser("keep", help="copy what a report needs")
    keeping.add_argument("source", type=Path, help="the folder that benchmarks/experiment.py wrote")
    keeping.add_argument("--workers", type=int, default=10, help="how many rows ran side by side")
    actions.add_parser("report", help="write docs/results.md")
    options = parser.parse_args()
    try:
        if options.action == "keep":
            pack(options.source, PAGE.with_suffix(""), options.workers)
        else:
            report()
    except ValueError as error:
        parser.exit(1, f"{error}\n")
