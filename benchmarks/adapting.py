"""Adapts a model to the first lines of a text and stores bounds and samples before and after, for `docs/adapting.md`.

    python benchmarks/adapting.py news.txt docs/adapting/news.json
    python benchmarks/adapting.py news.txt docs/adapting/news.json --lines 200 --lora

A row replaces an earlier one of the same settings. The table of all rows is printed, and their samples are written to a
.txt file beside the JSON; `--lines` without numbers does only that. `--real` gives files of real generic text, to
compare with the samples of the start that `adapt` uses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from diffusionbert.data.canvas import Sentences
from diffusionbert.data.corpus import Cleaning, parse_corpus
from diffusionbert.data.sources import Split
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.score import estimate_sequences
from diffusionbert.reporting import set_verbosity
from diffusionbert.storage.files import code_version, write_json
from diffusionbert.storage.schema import to_json
from diffusionbert.workflows.adapt import BUDGET, adapt
from diffusionbert.workflows.adapt_report import Change


def real_sentences(engine: Engine, spec: str, number: int) -> Sentences:
    """The first sentences of a file, without those longer than the model can read."""
    cleaning = Cleaning(lower=engine.config.data.lower, detokenize=engine.config.data.detokenize)
    texts = list(islice(parse_corpus(spec, Split.ALL, cleaning=cleaning), number))
    lengths = map(len, engine.vocabulary.encode(texts))
    kept = tuple(text for text, length in zip(texts, lengths, strict=True) if length <= engine.max_positions)
    return Sentences(engine.vocabulary, kept)


def real_change(before: Engine, after: Engine, spec: str, number: int) -> dict[str, Any]:
    """The change of the bound on real text."""
    sentences = real_sentences(before, spec, number)
    first, second = (estimate_sequences(engine, sentences, BUDGET) for engine in (before, after))
    found: dict[str, Any] = to_json(Change.of(first, second))
    return found


def settings_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart."""
    return row["report"]["start"], row["lines"], row["lora"], row["minutes"]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| lines | trained | seconds | steps of 1,024 tokens | share | held-out text | samples of the start |",
        "|---:|---|---:|---:|---:|---|---|",
    ]
    for row in rows:
        report, trained = row["report"], "adapter" if row["lora"] else "weights"
        steps = report["steps"] * report["batch_tokens"] / 1024
        figures = f"{row['lines']:,} | {trained} | {report['seconds']:.0f} | {steps:.0f} | {report['share']:.2f}"
        lines.append(f"| {figures} | {_change(report['domain'])} | {_change(report['generic'])} |")
    return "\n".join(lines)


def _change(change: dict[str, float]) -> str:
    low, difference, high = (f"{change[name]:+.3f}".replace("-", "−") for name in ("low", "difference", "high"))
    return f"{change['before']:.3f} → {change['after']:.3f}: {difference} [{low}, {high}]"


def samples(rows: list[dict[str, Any]]) -> str:
    """All samples of the rows, as they were generated; those of the start once."""
    texts: dict[tuple[str, ...], str] = {}
    for row in rows:
        report, how = row["report"], " (adapter)" * row["lora"]
        texts.setdefault(tuple(report["samples_before"]), report["start"])
        texts.setdefault(tuple(report["samples_after"]), f"adapted to {row['lines']:,} lines{how}")
    return "\n".join("\n".join([f"{title}:", "", *own, ""]) for own, title in texts.items())


def main() -> None:
    """Adapts once per number of lines; writes after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=None)
    parser.add_argument("--name", default="bundled", help="the name of the model in the file")
    parser.add_argument("--lines", type=int, nargs="*", default=[200, 2000, 20_000])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--real", nargs="*", default=[])
    parser.add_argument("--sentences", type=int, default=150, help="sentences per file of real text")
    options = parser.parse_args()
    set_verbosity("info")
    rows = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else []
    with Path(options.text).open(encoding="utf-8") as stream:
        texts = list(islice(stream, max(options.lines, default=0)))
    for number in options.lines:
        with tempfile.TemporaryDirectory() as folder:
            load = os.getloadavg()[0]
            adapted = adapt(
                texts[:number],
                options.model,
                Path(folder) / "run",
                minutes=options.minutes,
                lora=options.lora,
                merge=options.lora,
                samples=10,
            )
            start = load_engine(options.model)
            real = {
                Path(spec).name: real_change(start, adapted.model.engine, spec, options.sentences)
                for spec in options.real
            }
        report = to_json(adapted.report) | {"start": options.name, "data": Path(options.text).name, "model": ""}
        row = {
            "lines": number,
            "lora": options.lora,
            "minutes": options.minutes,
            "report": report,
            "real": real,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "load_before": load,
            "code": to_json(code_version()),
        }
        rows = [*(one for one in rows if settings_of(one) != settings_of(row)), row]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, rows)
        print(adapted.report.table())
    print(table(rows))
    options.output.with_suffix(".txt").write_text(samples(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
