r"""Judge perplexity against entropy and network calls over samplers, for generating, continuing and rewriting.

    python benchmarks/sampling_frontier.py docs/bundled_model/frontier.json docs/bundled_model/frontier.png \
        --judge JUDGE --corpus wiki.valid.txt plain.valid.txt --others FIRST_EDITION

Fifty texts per setting (forty where prompts are continued), with one seed and the same lengths, prompts and masks for
all. Entropy grows with length, so models are compared on texts of 20 tokens. Every row is written when it is done, with
its texts, and rows that are there already are kept. The corpora are rewritten and judged as they are, which says where
real text lies.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import diffusionbert
from diffusionbert.evaluation.judges import load_judge
from diffusionbert.evaluation.metrics import distinct_n, token_entropy
from diffusionbert.storage.files import write_json

NUM_TEXTS = 50
PROMPTS = Path(__file__).parent / "everyday.txt"
BOUNDED = "entropy-bounded:epsilon="
SAMPLERS: dict[str, dict[str, Any]] = {
    "exact": {"sampler": "exact"},
    "exact, 16 steps": {"sampler": "exact", "steps": 16},
    "exact, 8 steps": {"sampler": "exact", "steps": 8},
    "bounded, ε 0.1": {"sampler": f"{BOUNDED}0.1"},
    "bounded, ε 1": {"sampler": f"{BOUNDED}1"},
    "by entropy": {"sampler": "entropy"},
    "by entropy, ε 0.1": {"sampler": f"{BOUNDED}0.1,order=entropy"},
    "by entropy, ε 1": {"sampler": f"{BOUNDED}1,order=entropy"},
    "left to right": {"block": 1, "sampler": "exact"},
    "blocks of 4": {"block": 4, "sampler": "exact"},
}
FEW, MANY = (0.9, 0.7, 0.5), (1.0, 0.95, 0.8, 0.6, 0.4)
"""Values of top-p: of every sampler, and more of the exact one."""
WARPERS: dict[str, dict[str, Any]] = {
    "top-k 30": {"top_k": 30, "top_p": 1},
    **{f"temperature {value}": {"temperature": value, "top_p": 1} for value in (0.8, 0.6)},
    **{f"top-p {value}": {"top_p": value} for value in sorted((*FEW, *MANY), reverse=True)},
}
TASKS = ("generate", "continue", "rewrite", "20 tokens")


def planned(others: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """The model, task, sampler and warper of each row."""
    yield "real", "real", "real", "real"
    few = [f"top-p {value}" for value in FEW]
    yield from (
        ("bundled", "rewrite", name, warper) for name in ("exact", "by entropy", "by entropy, ε 0.1") for warper in few
    )
    yield from ((model, "20 tokens", "exact", f"top-p {p}") for model in ("bundled", *others) for p in (1.0, *FEW))
    for task in ("continue", "generate"):
        yield from (("bundled", task, name, warper) for name in SAMPLERS for warper in few)
        yield from (("bundled", task, "exact", warper) for warper in WARPERS if warper not in few)


def texts_of(model: diffusionbert.Model, task: str, settings: dict[str, Any], corpus: list[str]) -> list[str]:
    match task:
        case "generate":
            return model.generate(num_return_sequences=NUM_TEXTS, seed=0, **settings)
        case "20 tokens":
            return model.generate(num_return_sequences=NUM_TEXTS, length=20, seed=0, **settings)
        case "continue":
            lines = PROMPTS.read_text(encoding="utf-8").splitlines()
            prompts = [line for line in lines if line and not line.startswith("#") and "[MASK]" not in line]
            return model.generate(prompts, max_new_tokens=12, seed=0, **settings)
        case _:
            settings = {name: value for name, value in settings.items() if name != "block"}
            return model.rewrite(corpus, seed=0, **settings)


def has_flaw(text: str) -> bool:
    """Whether a word is repeated at once, or quotation marks or brackets do not match."""
    words = text.lower().split()
    counts = Counter(text)
    repeats = any(one == other for one, other in pairwise(words))
    return repeats or counts['"'] % 2 == 1 or counts["("] != counts[")"]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel per task, a line per sampler over top-p; numbers are calls per text."""
    import matplotlib.pyplot as plt

    colors = {name: f"C{number}" for number, name in enumerate(SAMPLERS)}
    figure, axes = plt.subplots(1, len(TASKS), figsize=(4.2 * len(TASKS), 4.4), layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            for name, color in colors.items():
                some = [row for row in rows if (row["model"], row["task"], row["sampler"]) == (model, task, name)]
                line = sorted((row for row in some if "top-p" in row["warper"]), key=lambda row: row["entropy"])
                if line:
                    label = name if model == "bundled" else f"{name}, {model}"
                    style = {"mfc": color if model == "bundled" else "white", "color": color, "label": label}
                    axis.plot([row["entropy"] for row in line], [row["perplexity"] for row in line], "o-", **style)
                    axis.annotate(
                        f"{line[0]['calls']:.0f}", (line[0]["entropy"], line[0]["perplexity"]), fontsize=7, color=color
                    )
                for row in some:
                    if row not in line:
                        axis.plot(row["entropy"], row["perplexity"], "x", color=color)
        for row in rows:
            if row["task"] == "real" and task in ("generate", "rewrite"):
                axis.plot(row["entropy"], row["perplexity"], "k*", label="real text")
        axis.set(title=task, xlabel="entropy of a text's tokens (nats)", yscale="log")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=6)
    axes[0].set_ylabel("judge perplexity")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--corpus", nargs="+", type=Path, required=True)
    parser.add_argument("--model", default=None)
    parser.add_argument("--others", nargs="*", default=[])
    options = parser.parse_args()
    per_corpus = NUM_TEXTS // len(options.corpus)
    corpus = [line for path in options.corpus for line in path.read_text(encoding="utf-8").splitlines()[:per_corpus]]
    rows = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    done = {(row["model"], row["task"], row["sampler"], row["warper"]) for row in rows}
    folders = {Path(other).name: other for other in options.others}
    judge, models = load_judge(options.judge, torch.device("cpu")), dict[str, diffusionbert.Model]()
    for key in planned(list(folders)):
        if key in done:
            continue
        name, task, sampler, warper = key
        texts, num_sequences = corpus, 0
        if name != "real":
            if name not in models:
                models[name] = diffusionbert.load(options.model if name == "bundled" else folders[name])
            counted = CountedSequences(models[name])
            texts = texts_of(models[name], task, SAMPLERS[sampler] | WARPERS[warper], corpus)
            num_sequences = counted.stop()
        judged = judge.read(texts).judged()
        row: dict[str, Any] = dict(zip(("model", "task", "sampler", "warper"), key, strict=True))
        row |= {"calls": num_sequences / len(texts)}
        row |= {"perplexity": judged.perplexity, "ci95": judged.ci95, "entropy": judged.entropy}
        row |= {"entropy_of_all_words": token_entropy(texts).pooled, "distinct_2": distinct_n(texts, 2)}
        row |= {"flawed": sum(map(has_flaw, texts)) / len(texts), "texts": texts}
        rows.append(row)
        write_json(options.json, rows)
        print(
            f"{name:8} {task:9} {sampler:20} {warper:15} {row['calls']:5.1f} calls {judged.perplexity:7.1f} "
            f"{judged.entropy:.3f} {row['distinct_2']:.2f} {row['flawed']:.2f}",
            flush=True,
        )
    draw(rows, options.picture)


class CountedSequences:
    """Counts the sequences that a model's network reads, until it is stopped."""

    def __init__(self, model: diffusionbert.Model) -> None:
        self._number = 0
        self._hook = model.engine.sampling_network.backbone.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self._number += len(output)

    def stop(self) -> int:
        self._hook.remove()
        return self._number


if __name__ == "__main__":
    main()
