r"""Measures the quality of generated text against its CPU time, for samplers of the bundled model and a causal network.

    python benchmarks/quality_against_time.py docs/performance/quality.json docs/performance/quality.png \
        --judge JUDGE --causal TWIN

Each row has 64 texts of 24 tokens, generated in batches of 32 with top-p 0.9, 0.7, 0.5 or 0.3. Quality is the judge's
perplexity at equal entropy of all words, between the values of top-p: a sampler that is less varied is not better. Time
is the CPU time of one thread, so that other programs hardly matter. Rows are written when they are done, and kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from sampling_frontier import FEW, SAMPLERS, at_entropy

import diffusionbert
from diffusionbert.evaluation.judges import load_judge
from diffusionbert.evaluation.metrics import token_entropy
from diffusionbert.storage.files import write_json

CAUSAL = "causal network"
CHOSEN: dict[str, dict[str, Any]] = {
    **{name: SAMPLERS[name] for name in SAMPLERS if not name.startswith(("remasking", "Gibbs", "blocks"))},
    "exact, 4 steps": {"sampler": "exact", "steps": 4},
    "bounded, ε 3": {"sampler": "entropy-bounded:epsilon=3"},
    CAUSAL: {},
}
BATCH, BATCHES, LENGTH = 32, 2, 24


def measured(model: diffusionbert.Model, judge: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The judge's perplexity, the entropy of all words and the CPU seconds per text."""
    model.generate(num_return_sequences=2, length=LENGTH, seed=0, **settings)  # what is compiled or packed once
    started = time.process_time()
    texts = [
        text
        for seed in range(BATCHES)
        for text in model.generate(num_return_sequences=BATCH, length=LENGTH, seed=seed, **settings)
    ]
    seconds = (time.process_time() - started) / len(texts)
    judged = judge.read(texts).judged()
    figures = {"perplexity": judged.perplexity, "ci95": judged.ci95, "entropy": token_entropy(texts).pooled}
    return {"seconds": seconds, **figures, "texts": texts[:5]}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws quality against time, at the entropy of the exact sampler with top-p 0.5."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    entropy = next(row["entropy"] for row in rows if (row["sampler"], row["top_p"]) == ("exact", 0.5))
    figure, axis = plt.subplots(figsize=(7.2, 4), layout="constrained")
    colors = plt.get_cmap("tab20").colors
    for number, name in enumerate(CHOSEN):
        own = [row for row in rows if row["sampler"] == name]
        columns = zip(*((row["seconds"], row["perplexity"], *row["ci95"]) for row in own), strict=True)
        if own and (found := at_entropy(entropy, [row["entropy"] for row in own], *columns)):
            seconds, value, low, high = found
            style = {"color": "black", "fmt": "s"} if name == CAUSAL else {"color": colors[number], "fmt": "o"}
            axis.errorbar(1000 * seconds, value, [[value - low], [high - value]], capsize=3, label=name, **style)
            print(f"{name:20} {1000 * seconds:7.1f} ms  {value:6.1f} [{low:.1f}, {high:.1f}]")
    axis.set(xscale="log", yscale="log", xlabel="CPU time per text of 24 tokens, milliseconds")
    axis.set_ylabel(f"judge perplexity at an entropy of {entropy:.2f} nats")
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(LogLocator(subs=(1, 2, 5)))
        one.set_major_formatter(StrMethodFormatter("{x:g}"))
        one.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--causal", required=True, help="a causal network of the same size")
    options = parser.parse_args()
    torch.set_num_threads(1)  # two would spin while they wait for each other, which is CPU time, too
    rows = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    done = {(row["sampler"], row["top_p"]) for row in rows}
    judge = load_judge(options.judge, torch.device("cpu"))
    masked, causal = diffusionbert.load(), diffusionbert.load(options.causal)
    for name, settings in CHOSEN.items():
        for top_p in FEW:
            if (name, top_p) not in done:
                found = measured(causal if name == CAUSAL else masked, judge, {**settings, "top_p": top_p})
                rows.append({"sampler": name, "top_p": top_p, **found})
                write_json(options.json, rows)
                print(name, top_p, {key: value for key, value in found.items() if key != "texts"}, flush=True)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
