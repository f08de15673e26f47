r"""Measures gain and forgetting by learning rate and by how far the weights are moved back, for `docs/adapting.md`.

    python benchmarks/moving_back.py news.txt docs/adapting/shares.json --domain news.valid.txt \
        --real wiki.valid.txt plain.valid.txt

Each learning rate is trained once, with the objective and batches of `adapt`, for a fixed number of steps. The weights
are then moved back, w = w_start + share · (w_trained - w_start), and the bound is estimated on other text of the
domain, on samples of the start (which `adapt` uses to choose the share), and on real generic text, with the same noise
before and after.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from adapting import real_sentences

from diffusionbert.data.canvas import Sentences
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.score import estimate_sequences
from diffusionbert.likelihood.scores import Estimate
from diffusionbert.networks.loading import Pretrained
from diffusionbert.storage.files import code_version, write_json
from diffusionbert.storage.schema import to_json
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.optim import low_precision
from diffusionbert.training.run import default_cache, train, with_held_out
from diffusionbert.workflows.adapt import BUDGET
from diffusionbert.workflows.adapt_report import Change
from diffusionbert.workflows.generic_text import generic_texts

_BATCH = 1024  # tokens


def config_of(start: Engine, corpus: Path, rate: float, steps: int, precision: str) -> RunConfig:
    """The configuration of `adapt`, except for the number of steps; the last step is validated and exported."""
    own = start.config.data
    data = DataConfig(
        str(corpus),
        vocabulary=str(start.folder),
        lower=own.lower,
        detokenize=own.detokenize,
        max_length=start.max_positions,
    )
    training = TrainingConfig(
        steps=steps,
        batching=TokenBudget(_BATCH),
        learning_rate=rate,
        warmup=max(1, steps // 10),
        weight_decay=0.0,
        precision=precision,
        validate_every=steps,
        validation_sentences=100,
        validation_draws=2,
        save_every=steps,
    )
    return replace(start.config, data=with_held_out(data), backbone=Pretrained(str(start.folder)), training=training)


def bounds(engine: Engine, texts: dict[str, Sentences], precision: str) -> dict[str, Estimate]:
    """The bound on each text, in the precision of training, as `adapt` estimates it."""
    low = low_precision(TrainingConfig(precision=precision))
    return {
        name: estimate_sequences(engine, one, BUDGET, autocast=low, batch_tokens=_BATCH) for name, one in texts.items()
    }


def move(engine: Engine, start: Engine, trained: dict[str, torch.Tensor], share: float) -> None:
    """Sets an engine's weights to a point between the start (0) and the trained weights (1)."""
    first = dict(start.module().named_parameters())
    with torch.no_grad():
        for name, weight in engine.module().named_parameters():
            weight.copy_(torch.lerp(first[name], trained[name], share))


def line_of(row: dict[str, Any]) -> str:
    changes = "  ".join(
        f"{name} {change['difference']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
        for name, change in row["changes"].items()
    )
    return f"rate {row['learning_rate']:g}, share {row['share']:g}: {changes}"


def main() -> None:
    """Trains once per learning rate and estimates the bounds for each share, writing after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--domain", required=True, help="other text of the same domain")
    parser.add_argument("--real", nargs="*", default=[], help="files of generic text")
    parser.add_argument("--model", default=None)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-4])
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.3])
    parser.add_argument("--sentences", type=int, default=100, help="sentences per file")
    parser.add_argument("--precision", default="bf16", help="use `no` on processors without bfloat16")
    options = parser.parse_args()
    rows = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else []
    start = load_engine(options.model)
    texts = {"domain": real_sentences(start, options.domain, options.sentences)}
    texts["samples"] = Sentences(start.vocabulary, tuple(generic_texts(start, default_cache())))
    texts |= {Path(spec).name: real_sentences(start, spec, options.sentences) for spec in options.real}
    before = bounds(start, texts, options.precision)
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder) / "lines.txt"
            with options.text.open(encoding="utf-8") as stream:
                corpus.write_text("".join(islice(stream, options.lines)), encoding="utf-8")
            config = config_of(start, corpus, rate, options.steps, options.precision)
            run = train(config, Path(folder) / "run")
            engine = load_engine(run.path)
        trained = {name: weight.detach().clone() for name, weight in engine.module().named_parameters()}
        for share in options.shares:
            move(engine, start, trained, share)
            after = bounds(engine, texts, options.precision)
            row = {
                "learning_rate": rate,
                "steps": run.state.best_step,
                "share": share,
                "lines": options.lines,
                "changes": {name: to_json(Change.of(before[name], after[name])) for name in texts},
                "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
                "code": to_json(code_version()),
            }
            rows.append(row)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.output, rows)
            print(line_of(row), flush=True)


if __name__ == "__main__":
    main()
