"""The model inside the package: measures it, and writes docs/bundled_model.md from what was measured and logged.

    python benchmarks/bundled_model.py measure --corpus wiki.valid.txt.xz --before runs/wiki-small-masked --judge JUDGE
    python benchmarks/bundled_model.py report

`measure` writes docs/bundled_model/figures.json and samples.txt; `report` needs no model and no corpus.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from diffusionbert.assessment.judges import load_judge
from diffusionbert.checkpoints import write_json
from diffusionbert.likelihood.evaluation import Effort
from diffusionbert.likelihood.scores import LikelihoodSummary, paired_bootstrap
from diffusionbert.metrics import token_entropy
from diffusionbert.model import Model, load
from diffusionbert.sampling import Sampling
from diffusionbert.storage.schema import from_json, to_json
from diffusionbert.tasks import Task
from diffusionbert.text.cleaning import Cleaning
from diffusionbert.text.corpus import parse_corpus
from diffusionbert.text.sources import Split
from diffusionbert.training.log import TrainEvent, ValidationEvent, read_log

FOLDER = Path(__file__).parent.parent / "docs" / "bundled_model"
NUM_SAMPLES = 50
SETTINGS = {"top-k 30": Sampling(top_k=30), "nothing cut": Sampling()}


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
    effort = Effort(precision=None, strata=4, max_draws=8)
    estimates = {"before": load(before).likelihood(texts, effort), "after": after.likelihood(texts, effort)}
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
    """A text as the model would write it."""
    return model.vocabulary.decode(model.vocabulary.encode([text])[0])


def cold_start() -> float:
    """Seconds of a `generate` in a new process: imports, loading, one sentence of 24 tokens."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "diffusionbert.cli", "generate", "--length", "24"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def report() -> None:
    figures, recipes, others = (
        json.loads((FOLDER / f"{name}.json").read_text()) for name in ("figures", "recipes", "other_networks")
    )
    samples = (FOLDER / "samples.txt").read_text(encoding="utf-8").splitlines()
    page = FOLDER.parent / "bundled_model.md"
    begin, _, rest = page.read_text(encoding="utf-8").partition("<!-- figures -->")
    _, _, end = rest.partition("<!-- end of figures -->")
    parts = bounds(figures), curves(), recipe_table(recipes), other_networks(others), looks(figures)
    body = "\n\n".join([*parts, sample_list(samples)])
    text = f"{begin}<!-- figures -->\n\n{body}\n\n<!-- end of figures -->{end}"
    page.write_text(text, encoding="utf-8")


def bounds(figures: dict) -> str:
    rows = []
    for name, title in (("before", "pretrained by masking alone"), ("after", "then trained by diffusion")):
        found = from_json(figures["bound"][name], LikelihoodSummary, "figures.json")
        rates = found.rates
        cells = [
            interval(measured.value, measured.ci95, digits)
            for measured, digits in (
                (rates.nats_per_token, 3),
                (rates.perplexity_per_token, 1),
                (rates.perplexity_per_word, 0),
                (rates.bits_per_byte, 3),
            )
        ]
        rows.append(f"| {title} | " + " | ".join(cells) + " |")
    protocol = found.protocol
    difference = figures["difference_nats_per_token"]
    return "\n".join(
        [
            "## The strict bound",
            "",
            "| | nats a token | perplexity a token | perplexity a word | bits a byte |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Kind: {found.kind.value}. The first {found.num_sentences:,} sentences of `{figures['corpus']}`, "
            f"lower-cased; {protocol.definition}; {protocol.num_draws} draws per sentence in {protocol.strata} strata; "
            f"special tokens not counted; length {protocol.length.value}; single sentences. {protocol.interval}. The "
            f"difference, sentence by sentence: {difference['value']:.3f} nats a token [{difference['low']:.3f}, "
            f"{difference['high']:.3f}].",
        ]
    )


def curves() -> str:
    """Plots the validation of both trainings; the table has the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3), constrained_layout=True)
    titles = {"pretraining": "masked words (no likelihood)", "training": "strict bound (512 steps), a token"}
    lines = ["## The curves", "", "![validation while training](bundled_model/curves.png)", ""]
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        events = read_log(FOLDER / f"{name}.jsonl")
        points = [event for event in events if isinstance(event, ValidationEvent)]
        steps, nats = zip(*((point.step, point.nats_per_token) for point in points), strict=True)
        start = 1 if name == "pretraining" else 0  # random weights are off the scale
        axis.plot(steps[start:], nats[start:], marker="o")
        axis.set(title=title, xlabel="step of 64k tokens", ylabel="nats")
        axis.grid(alpha=0.3)
        seconds = events[-1].time - events[0].time
        tokens = max(event.tokens_seen or 0 for event in events if isinstance(event, TrainEvent))
        lines.append(
            f"- {name}: {steps[-1]:,} steps, {tokens:,} tokens, "
            f"{seconds / 60:.1f} minutes; validation "
            + ", ".join(f"{value:.3f}" for value in nats)
            + f" nats at steps {', '.join(f'{step:,}' for step in steps)}"
        )
    figure.savefig(FOLDER / "curves.png", dpi=110)
    return "\n".join(lines)


def recipe_table(recipes: dict) -> str:
    lines = [
        "## What was tried",
        "",
        "Each for 685 steps of 64k tokens (36M tokens, about half a minute on one H200) from the same pretrained "
        "network, averaged weights (decay 0.99), learning rate 5e-4 where nothing is said. Bound on the first 3,000 "
        "sentences of `wiki.valid`, 8 draws, the same noise for all (95 % interval over sentences; recipes share their "
        "sentences, so that their differences are surer); the spindle by its own strict bound over 512 steps.",
        "",
        "| recipe | nats a token | perplexity |",
        "|---|---|---|",
    ]
    for name, run in sorted(recipes.items(), key=lambda item: item[1]["score"]["nats_per_token"]):
        score = run["score"]
        lines.append(f"| {name} | {score['nats_per_token']:.4f} ± {score['ci']:.3f} | {score['ppl']:.1f} |")
    return "\n".join(lines)


def other_networks(others: dict) -> str:
    """Two networks that later experiments start from, or that were too large to keep."""
    lines = [
        "## Two more networks on the same text",
        "",
        "Kept as logs and scores. Kinds differ: a bound and an exact likelihood are not to be ranked.",
        "",
        "| network | weights | steps | minutes | validation while training, nats a token | score, nats a token |",
        "|---|---|---|---|---|---|",
    ]
    for name, said in others.items():
        events = read_log(FOLDER / f"{name}.jsonl")
        found = [event for event in events if isinstance(event, ValidationEvent)]
        minutes, score = (events[-1].time - events[0].time) / 60, said["score"]
        lines.append(
            f"| {said['title']} | {said['weights'] / 1e6:.1f}M | {found[-1].step:,} | {minutes:.1f} | "
            f"{', '.join(format(event.nats_per_token, '.3f') for event in found)} "
            f"({found[-1].kind.value}) | {score['nats_per_token']:.3f} ± {score['ci']:.3f} ({score['likelihood']}; "
            f"{score['how']}) |"
        )
    return "\n".join([*lines, "", "```", *(said["command"] for said in others.values()), "```"])


def looks(figures: dict) -> str:
    judge = figures["judge"]
    lines = [
        "## How samples look to a judge",
        "",
        f"{NUM_SAMPLES} samples of each kind, unselected, 128 steps, lengths drawn as in the corpus, beside "
        f"{NUM_SAMPLES} real sentences in the same spelling. Judge: {judge['name']}, {judge['convention']}. A low "
        "perplexity alone means nothing (one word repeated has the lowest), so entropies stand beside it.",
        "",
        "| | judge perplexity | entropy within a text, judge's tokens | entropy of all words together |",
        "|---|---|---|---|",
    ]
    for name, found in judge["texts"].items():
        lines.append(
            f"| {name} | {interval(found['perplexity'], found['ci95'], 0)} | {found['entropy']:.2f} | "
            f"{figures['entropy'][name]:.2f} |"
        )
    seconds = figures["cold_generate_seconds"]
    lines += ["", f"A cold `diffusionbert generate --length 24` on two cores: {seconds:.1f} s, imports included."]
    return "\n".join(lines)


def sample_list(samples: list[str]) -> str:
    head = f"## {len(samples)} samples, unselected\n\n`diffusionbert generate -n {len(samples)} --seed 0`\n\n"
    return head + "\n".join(f"{number}. {text}" for number, text in enumerate(samples, 1))


def interval(value: float, ci95: list[float], digits: int) -> str:
    return f"{value:.{digits}f} [{ci95[0]:.{digits}f}, {ci95[1]:.{digits}f}]"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--corpus", required=True)
    measuring.add_argument("--before", required=True, help="the same network before diffusion training")
    measuring.add_argument("--judge", required=True, help="a causal language model")
    measuring.add_argument("--sentences", type=int, default=3000)
    commands.add_parser("report")
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.corpus, options.before, options.judge, options.sentences)
    else:
        report()
