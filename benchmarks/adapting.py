"""Adapts a model to the first lines of a text and stores bounds and samples before and after, for `docs/adapting.md`.

    python benchmarks/adapting.py news.txt docs/adapting/news.json --lines 200 2000 --real wiki.valid.txt

`--real` gives files of real generic text, to compare with the samples of the start that `adapt` uses.
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


def main() -> None:
    """Adapts once per number of lines; writes after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=None)
    parser.add_argument("--name", default="bundled", help="the name of the model in the file")
    parser.add_argument("--lines", type=int, nargs="+", default=[200, 2000, 20_000])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--real", nargs="*", default=[])
    parser.add_argument("--sentences", type=int, default=150, help="sentences per file of real text")
    options = parser.parse_args()
    set_verbosity("info")
    rows = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else []
    with Path(options.text).open(encoding="utf-8") as stream:
        texts = list(islice(stream, max(options.lines)))
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
        rows.append(
            {
                "lines": number,
                "lora": options.lora,
                "minutes": options.minutes,
                "report": report,
                "real": real,
                "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
                "load_before": load,
                "code": to_json(code_version()),
            }
        )
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, rows)
        print(adapted.report.table())


if __name__ == "__main__":
    main()
