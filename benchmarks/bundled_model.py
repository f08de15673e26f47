"""Measures the model inside the package: the numbers of docs/bundled_model.md.

    python benchmarks/bundled_model.py --corpus wiki.valid.txt.xz --before runs/wiki-small-masked --judge JUDGE

Writes docs/bundled_model/figures.json (bounds before and after diffusion training and their paired difference, judge
perplexities and entropies, seconds of a cold start) and samples.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from diffusionbert.data.cleaning import Cleaning
from diffusionbert.data.corpus import parse_corpus
from diffusionbert.data.sources import Split
from diffusionbert.evaluation.judges import load_judge
from diffusionbert.evaluation.metrics import token_entropy
from diffusionbert.inference.tasks import Task
from diffusionbert.likelihood.estimate import EstimationBudget
from diffusionbert.likelihood.scores import paired_bootstrap
from diffusionbert.model import Model, load
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.storage.files import write_json
from diffusionbert.storage.schema import to_json

FOLDER = Path(__file__).parent.parent / "docs" / "bundled_model"
NUM_SAMPLES = 50
SETTINGS = {"top-k 30": SamplingRequest(config=SamplerConfig(top_k=30)), "nothing cut": SamplingRequest()}


def measure(corpus: str, before: str, judge: str, num_sentences: int) -> None:
    texts = list(parse_corpus(corpus, Split.ALL, cleaning=Cleaning(lower=True)))[:num_sentences]
    after = load()
    samples = {
        name: [written.text for written in after.write(Task(NUM_SAMPLES), how)] for name, how in SETTINGS.items()
    }
    (FOLDER / "samples.txt").write_text("\n".join(samples["top-k 30"]) + "\n", encoding="utf-8")
    shown = {**samples, "real sentences": [respelled(after, text) for text in texts[:NUM_SAMPLES]]}
    reader = load_judge(judge, after.device)
    judged = {name: vars(reader.read(sentences).judged()) for name, sentences in shown.items()}
    budget = EstimationBudget(precision=None, strata=4, max_draws=8)
    estimates = {"before": load(before).likelihood(texts, budget), "after": after.likelihood(texts, budget)}
    difference = paired_bootstrap(estimates["after"].scores, estimates["before"].scores)
    figures = {
        "corpus": Path(corpus).name,
        "bound": {name: to_json(estimate.summary()) for name, estimate in estimates.items()},
        "difference_nats_per_token": vars(difference),
        "judge": {"name": Path(judge).name, "convention": reader.convention, "texts": judged},
        "entropy": {name: token_entropy(sentences).pooled for name, sentences in shown.items()},
        "cold_generate_seconds": cold_start(),
    }
    write_json(FOLDER / "figures.json", figures)


def respelled(model: Model, text: str) -> str:
    """A text, encoded and decoded as samples are."""
    return model.vocabulary.decode(model.vocabulary.encode([text])[0])


def cold_start() -> float:
    """Seconds of `generate` in a new process: imports, loading, one sentence of 24 tokens."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "diffusionbert.cli.main", "generate", "--length", "24"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--before", required=True, help="the same network before diffusion training")
    parser.add_argument("--judge", required=True, help="a causal language model")
    parser.add_argument("--sentences", type=int, default=3000)
    options = parser.parse_args()
    measure(options.corpus, options.before, options.judge, options.sentences)
