"""Measures the bundled model, for the figures in docs/bundled_model.md.

    python benchmarks/bundled_model.py --corpus wiki.valid.txt.xz plain.valid.txt.xz --others FIRST_EDITION

Writes figures.json (the strict bound on the first sentences of each corpus, paired differences to other models, seconds
of a cold start), samples.txt (50 of `generate`, unselected) and curves.png (validation during training) to --output.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import diffusionbert
from diffusionbert.data.corpus import Cleaning, parse_corpus
from diffusionbert.data.sources import Split
from diffusionbert.inference.engine import load_engine
from diffusionbert.inference.score import estimate_nats
from diffusionbert.likelihood.estimate import EstimationBudget
from diffusionbert.likelihood.scores import paired_bootstrap
from diffusionbert.storage.files import write_json
from diffusionbert.storage.schema import to_json
from diffusionbert.training.log import TrainEvent, ValidationEvent, events_of

FOLDER = Path(__file__).parent.parent / "docs" / "bundled_model"
NUM_SAMPLES = 50


def measure(corpora: list[str], others: list[str], num_sentences: int, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    draw_curves(sorted(output.glob("stage-*.jsonl")), output / "curves.png")
    samples = diffusionbert.load().generate(num_return_sequences=NUM_SAMPLES, seed=0)
    (output / "samples.txt").write_text("\n".join(samples) + "\n", encoding="utf-8")
    budget = EstimationBudget(precision=None, strata=2, max_draws=4)
    models = {"bundled": load_engine(), **{Path(name).name: load_engine(name) for name in others}}
    figures = {"cold_generate_seconds": cold_start(), "corpora": {}}
    for corpus in corpora:
        texts = list(parse_corpus(corpus, Split.ALL, cleaning=Cleaning(lower=True)))[:num_sentences]
        estimates = {name: estimate_nats(model, texts, budget) for name, model in models.items()}
        figures["corpora"][Path(corpus).name] = {
            name: {
                "bound": to_json(estimate.summary()),
                "bundled_minus_this": vars(paired_bootstrap(estimates["bundled"].scores, estimate.scores)),
            }
            for name, estimate in estimates.items()
        }
        write_json(output / "figures.json", figures)


def draw_curves(logs: list[Path], path: Path) -> None:
    """Draws validation against the tokens seen in all stages so far."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    earlier = 0
    for number, log in enumerate(logs, 1):
        steps, seen = zip((0, 0), *((one.step, one.tokens_seen) for one in events_of(log, TrainEvent)), strict=True)
        found = [event for event in events_of(log, ValidationEvent) if earlier + event.step]
        tokens = earlier + np.interp([event.step for event in found], steps, seen)
        axis.plot(tokens, [event.nats_per_token for event in found], "o-", label=f"stage {number}")
        earlier += seen[-1]
    axis.set(xlabel="tokens seen, in millions", ylabel="bound, nats per token", xscale="log")
    axis.set_xticks([10**6 * number for number in (100, 200, 500, 1000, 2000, 4000)], minor=False)
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 10**6:,.0f}")
    axis.xaxis.set_minor_formatter(lambda *_: "")
    axis.set_xlim(10**8, 1.3 * earlier)
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.savefig(path, dpi=120)


def cold_start() -> float:
    """Seconds of `generate` in a new process: imports, loading, one sentence of 24 tokens."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "diffusionbert", "generate", "--length", "24"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", required=True)
    parser.add_argument("--others", nargs="*", default=[], help="models to compare with")
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    measure(options.corpus, options.others, options.sentences, options.output)
