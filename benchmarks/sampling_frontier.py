r"""Judge perplexity against entropy over samplers and their settings, for generating, continuing and rewriting.

    python benchmarks/sampling_frontier.py docs/bundled_model/frontier.json docs/bundled_model/frontier.png \
        --judge JUDGE --corpus wiki.valid.txt plain.valid.txt --others FIRST_EDITION

Fifty texts per setting, with one seed and the same lengths, prompts and masks for all. Entropy grows with length,
so models are compared on texts of 20 tokens. Every row is written when it is done, with its texts, and rows that are
there already are kept. The corpora are rewritten and judged as they are, which says where real text lies.
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
PLAIN: dict[str, Any] = {"top_k": None}
SETTINGS: dict[str, dict[str, Any]] = {
    "top-k 30": {"top_k": 30},
    **{f"temperature {value}": {**PLAIN, "temperature": value} for value in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)},
    **{f"top-p {value}": {**PLAIN, "top_p": value} for value in (0.95, 0.9, 0.8, 0.7, 0.5)},
    **{f"margin {value}": {**PLAIN, "temperature": value, "sampler": "margin"} for value in (1.0, 0.9, 0.8, 0.7, 0.6)},
    "temperature 0.7, blocks of 1": {**PLAIN, "temperature": 0.7, "block": 1},
    "temperature 0.7, entropy-bounded 1": {**PLAIN, "temperature": 0.7, "sampler": "entropy-bounded:epsilon=1"},
    "temperature 0.7, remasking 0.1": {**PLAIN, "temperature": 0.7, "sampler": "remasking:eta=0.1", "steps": 64},
}
TASKS = ("generate", "continue", "rewrite", "20 tokens")


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
            return model.rewrite(corpus, seed=0, **settings)


def has_flaw(text: str) -> bool:
    """Whether a word is repeated at once, or quotation marks or brackets do not match."""
    words = text.lower().split()
    counts = Counter(text)
    repeats = any(one == other for one, other in pairwise(words))
    return repeats or counts['"'] % 2 == 1 or counts["("] != counts[")"]


def planned(others: list[str]) -> Iterator[tuple[str, str, str]]:
    """The model, task and settings of each row."""
    simple = [name for name in SETTINGS if "," not in name]
    yield from (("bundled", "continue", name) for name in SETTINGS)
    yield from (("bundled", "generate", name) for name in SETTINGS)
    yield from (("bundled", "rewrite", name) for name in simple)
    yield from ((model, "20 tokens", name) for model in ("bundled", *others) for name in (*simple[:7:2], "top-p 0.5"))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TASKS), figsize=(4.2 * len(TASKS), 4), layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        for kind, marker in (
            ("temperature", "o-"),
            ("top-p", "s-"),
            ("margin", "v-"),
            ("top-k", "D"),
            ("temperature 0.7,", "^"),
        ):
            for model in dict.fromkeys(row["model"] for row in rows):
                some = [
                    row
                    for row in rows
                    if (row["model"], row["task"]) == (model, task)
                    and row["settings"].startswith(kind)
                    and ("," in row["settings"]) == ("," in kind)
                ]
                if some:
                    label = kind.replace(" 0.7,", " 0.7 and more") + ("" if model == "bundled" else f", {model}")
                    style = {} if model == "bundled" else {"mfc": "white"}
                    x, y = [row["entropy"] for row in some], [row["perplexity"] for row in some]
                    axis.plot(x, y, marker if "," not in kind else marker[0], label=label, **style)
                    for row in some:
                        axis.annotate(row["settings"].split()[-1], (row["entropy"], row["perplexity"]), fontsize=6)
        for row in rows:
            if row["task"] == "real" and task in ("generate", "rewrite"):
                axis.plot(row["entropy"], row["perplexity"], "k*")
        axis.set(title=task, xlabel="entropy of a text's tokens (nats)", yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("judge perplexity")
    axes[0].legend(fontsize=6)
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
    done = {(row["model"], row["task"], row["settings"]) for row in rows}
    folders = {Path(other).name: other for other in options.others}
    judge, name, model = None, None, None
    for key in [("real", "real", "real"), *planned(list(folders))]:
        if key in done:
            continue
        if key[0] not in (name, "real"):
            name, model = key[0], diffusionbert.load(options.model if key[0] == "bundled" else folders[key[0]])
        texts = corpus if key[0] == "real" else texts_of(model, key[1], SETTINGS[key[2]], corpus)
        judge = judge or load_judge(options.judge, torch.device("cpu"))
        judged = judge.read(texts).judged()
        row = dict(zip(("model", "task", "settings"), key, strict=True))
        row |= {"perplexity": judged.perplexity, "ci95": judged.ci95, "entropy": judged.entropy}
        row |= {"entropy_of_all_words": token_entropy(texts).pooled, "distinct_2": distinct_n(texts, 2)}
        rows.append(row | {"flawed": sum(map(has_flaw, texts)) / len(texts), "texts": texts})
        write_json(options.json, rows)
        print(
            f"{key[0]:10} {key[1]:9} {key[2]:36} {judged.perplexity:7.1f} {judged.entropy:.3f} {row['distinct_2']:.2f}"
        )
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
