"""Measures the bundled model: the numbers of docs/bundled_model.md.

    python benchmarks/bundled_model.py --corpus wiki.valid.txt.xz --before runs/wiki-small-masked --judge JUDGE

Writes figures.json (bounds before and after diffusion training and their paired difference, judge
perplexities and entropies, seconds of a cold start) and samples.txt to --output.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from diffusionbert.data.corpus import Cleaning, parse_corpus
from diffusionbert.data.sources import Split
from diffusionbert.evaluation.judges import load_judge
from diffusionbert.evaluation.metrics import token_entropy
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.generate import generate
from diffusionbert.inference.score import estimate_nats
from diffusionbert.inference.tasks import Task
from diffusionbert.likelihood.estimate import EstimationBudget
from diffusionbert.likelihood.scores import paired_bootstrap
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.storage.files import write_json
from diffusionbert.storage.schema import to_json

FOLDER = Path(__file__).parent.parent / "docs" / "bundled_model"
NUM_SAMPLES = 50
SETTINGS = {"top-k 30": SamplingRequest(config=SamplerConfig(top_k=30)), "nothing cut": SamplingRequest()}


def measure(corpus: str, before: str, judge: str, num_sentences: int, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    texts = list(parse_corpus(corpus, Split.ALL, cleaning=Cleaning(lower=True)))[:num_sentences]
    after = load_engine()
    samples = {
        name: [one.text for one in generate(after, Task(NUM_SAMPLES), request)] for name, request in SETTINGS.items()
    }
    (output / "samples.txt").write_text("\n".join(samples["top-k 30"]) + "\n", encoding="utf-8")
    shown = {**samples, "real sentences": [respelled(after, text) for text in texts[:NUM_SAMPLES]]}
    reader = load_judge(judge, after.device)
    judged = {name: vars(reader.read(sentences).judged()) for name, sentences in shown.items()}
    budget = EstimationBudget(precision=None, strata=4, max_draws=8)
    models = {"before": load_engine(before), "after": after}
    estimates = {name: estimate_nats(model, texts, budget) for name, model in models.items()}
    difference = paired_bootstrap(estimates["after"].scores, estimates["before"].scores)
    figures = {
        "corpus": Path(corpus).name,
        "bound": {name: to_json(estimate.summary()) for name, estimate in estimates.items()},
        "difference_nats_per_token": vars(difference),
        "judge": {"name": Path(judge).name, "convention": reader.convention, "texts": judged},
        "entropy": {name: token_entropy(sentences).pooled for name, sentences in shown.items()},
        "cold_generate_seconds": cold_start(),
    }
    write_json(output / "figures.json", figures)


def respelled(engine: Engine, text: str) -> str:
    """A text, encoded and decoded as samples are."""
    return engine.vocabulary.decode(engine.vocabulary.encode([text])[0])


def cold_start() -> float:
    """Seconds of `generate` in a new process: imports, loading, one sentence of 24 tokens."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "diffusionbert", "generate", "--length", "24"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--before", required=True, help="the same network before diffusion training")
    parser.add_argument("--judge", required=True, help="a causal language model")
    parser.add_argument("--sentences", type=int, default=3000)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    measure(options.corpus, options.before, options.judge, options.sentences, options.output)
