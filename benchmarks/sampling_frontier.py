r"""Judge perplexity against entropy and network calls over samplers, for generating, continuing and rewriting.

    python benchmarks/sampling_frontier.py docs/bundled_model/frontier.json docs/bundled_model/frontier.png \
        --judge JUDGE --corpus wiki.valid.txt plain.valid.txt --others FIRST_EDITION
    python benchmarks/sampling_frontier.py docs/adapting/frontier.json docs/adapting/frontier.png \
        --judge JUDGE --corpus films.valid.txt --model adapted-films --name adapted --tasks generate steps

Fifty texts per setting (forty where prompts are continued), with one seed and the same lengths, prompts and masks for
all. Entropy grows with length, so models are compared on texts of 20 tokens. Every row is written when it is done, with
its texts, and rows that are there already are kept. The corpora are rewritten and judged as they are, which says where
real text lies. A row is on the frontier of its task if no other has a lower perplexity and a higher entropy.
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
    "left to right": {"sampler": "exact", "block": 1},
    "blocks of 4": {"sampler": "exact", "block": 4},
}
FEW, MANY = (0.9, 0.7, 0.5), (1.0, 0.95, 0.8, 0.6, 0.4)
"""Values of top-p: of every sampler, and more of the exact one."""
WARPERS: dict[str, dict[str, Any]] = {
    "top-k 30": {"top_k": 30, "top_p": 1},
    **{f"temperature {value}": {"temperature": value, "top_p": 1} for value in (0.8, 0.6)},
    **{f"top-p {value}": {"top_p": value} for value in sorted((*FEW, *MANY), reverse=True)},
}
REWRITING = ("exact", "by entropy", "by entropy, ε 0.1")
STEPS: dict[str, dict[str, Any]] = {f"exact, {steps} steps": {"steps": steps} for steps in (4, 8, 16, 32, 64, 128)}
TASKS = ("generate", "continue", "rewrite", "20 tokens", "steps")


def planned(own: str, others: list[str], tasks: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """The model, task, sampler and warper of each row."""
    yield "real", "real", "real", "real"
    few = [f"top-p {value}" for value in FEW]
    for task in tasks:
        if task in ("continue", "generate"):
            yield from ((own, task, name, warper) for name in SAMPLERS for warper in few)
            yield from ((own, task, "exact", warper) for warper in WARPERS if warper not in few)
        elif task == "rewrite":
            yield from ((own, task, name, warper) for name in REWRITING for warper in few)
        elif task == "steps":
            yield from ((own, task, name, warper) for name in STEPS for warper in few)
        else:
            yield from ((model, task, "exact", f"top-p {p}") for model in (own, *others) for p in (1.0, *FEW))


def texts_of(
    model: diffusionbert.Model, task: str, settings: dict[str, Any], corpus: list[str], number: int
) -> list[str]:
    match task:
        case "generate" | "steps":
            return model.generate(num_return_sequences=number, seed=0, **settings)
        case "20 tokens":
            return model.generate(num_return_sequences=number, length=20, seed=0, **settings)
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


def is_on_frontier(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether no other row of its model and task has a lower perplexity and a higher entropy."""
    same = [one for one in rows if (one["model"], one["task"]) == (row["model"], row["task"])]
    return not any(one["perplexity"] < row["perplexity"] and one["entropy"] > row["entropy"] for one in same)


def line_of(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:8} {row['task']:9} {row['sampler']:20} {row['warper']:15} {row['calls']:5.1f} calls "
        f"{row['perplexity']:7.1f} {row['entropy']:.3f} {row['distinct_2']:.2f} {row['flawed']:.2f}"
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel per task, a line per sampler over top-p; numbers are calls per text."""
    import matplotlib.pyplot as plt

    own = next(row["model"] for row in rows if row["model"] != "real")
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    figure, [axes] = plt.subplots(1, len(tasks), figsize=(4.2 * len(tasks), 4.4), layout="constrained", squeeze=False)
    for axis, task in zip(axes, tasks, strict=True):
        colors = {name: f"C{number}" for number, name in enumerate(STEPS if task == "steps" else SAMPLERS)}
        for model in dict.fromkeys(row["model"] for row in rows):
            for name, color in colors.items():
                some = [row for row in rows if (row["model"], row["task"], row["sampler"]) == (model, task, name)]
                line = sorted((row for row in some if "top-p" in row["warper"]), key=lambda row: row["entropy"])
                if line:
                    label = name if model == own else f"{name}, {model}"
                    style = {"mfc": color if model == own else "white", "color": color, "label": label}
                    axis.plot([row["entropy"] for row in line], [row["perplexity"] for row in line], "o-", **style)
                    axis.annotate(
                        f"{line[0]['calls']:.0f}", (line[0]["entropy"], line[0]["perplexity"]), fontsize=7, color=color
                    )
                for row in some:
                    if row not in line:
                        axis.plot(row["entropy"], row["perplexity"], "x", color=color)
        for row in rows:
            if row["task"] == "real" and task in ("generate", "rewrite", "steps"):
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
    parser.add_argument("--name", default="bundled", help="what the model is called in the file")
    parser.add_argument("--others", nargs="*", default=[])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS[:4])
    parser.add_argument("--number", type=int, default=50, help="of texts per row")
    options = parser.parse_args()
    per_corpus = options.number // len(options.corpus)
    corpus = [line for path in options.corpus for line in path.read_text(encoding="utf-8").splitlines()[:per_corpus]]
    rows = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    done = {(row["model"], row["task"], row["sampler"], row["warper"]) for row in rows}
    folders = {Path(other).name: other for other in options.others}
    judge, models = load_judge(options.judge, torch.device("cpu")), dict[str, diffusionbert.Model]()
    for key in planned(options.name, list(folders), options.tasks):
        if key in done:
            continue
        name, task, sampler, warper = key
        texts, num_sequences = corpus, 0
        if name != "real":
            if name not in models:
                models[name] = diffusionbert.load(folders.get(name, options.model))
            counted = CountedSequences(models[name])
            settings = (STEPS | SAMPLERS)[sampler] | WARPERS[warper]
            texts = texts_of(models[name], task, settings, corpus, options.number)
            num_sequences = counted.stop()
        judged = judge.read(texts).judged()
        row: dict[str, Any] = dict(zip(("model", "task", "sampler", "warper"), key, strict=True))
        row |= {
            "calls": num_sequences / len(texts),
            "perplexity": judged.perplexity,
            "ci95": judged.ci95,
            "entropy": judged.entropy,
        }
        row |= {"entropy_of_all_words": token_entropy(texts).pooled, "distinct_2": distinct_n(texts, 2)}
        row |= {"flawed": sum(map(has_flaw, texts)) / len(texts), "texts": texts}
        rows.append(row)
        write_json(options.json, rows)
        print(line_of(row), flush=True)
    print("on the frontier:")
    for row in sorted(rows, key=lambda row: (row["task"], row["perplexity"])):
        if is_on_frontier(row, rows):
            print(line_of(row))
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
