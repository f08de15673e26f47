r"""Measures judge perplexity against entropy and network calls over samplers: generating, continuing and rewriting.

    python benchmarks/sampling_frontier.py docs/bundled_model/frontier.json docs/bundled_model/frontier.png \
        --judge JUDGE --corpus wiki.valid.txt plain.valid.txt --others FIRST_EDITION
    python benchmarks/sampling_frontier.py docs/adapting/frontier.json docs/adapting/frontier.png \
        --judge JUDGE --corpus news.valid.txt --model adapted-news --name adapted \
        --tasks generate temperature steps "20 tokens" --others src/diffusionbert/bundled

Each setting has fifty texts (forty if everyday prompts are continued by 12 tokens; 120 if the beginnings of sentences
of the corpora are continued by 30), with the same seeds, lengths, prompts and masks for all. Entropy is that of
the words of all texts; it grows with length, so models are compared on texts of 20 tokens. Every row is written when it
is done, with its first ten texts, unless they contain parts of the corpus; existing rows are kept. The corpora are
rewritten, and also judged as they are, which shows where real text lies. A row is on the frontier of its task if no
other has a lower perplexity and a higher entropy; generating from nothing is one task, whatever is varied.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import diffusionbert
from diffusionbert.evaluation.judges import load_judge
from diffusionbert.evaluation.metrics import distinct_n, token_entropy
from diffusionbert.samplers import SamplerConfig
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
    "remasking, η 0.02": {"sampler": "remasking:eta=0.02"},
    "remasking, η 0.1": {"sampler": "remasking:eta=0.1"},
    "Gibbs, 64 calls": {"sampler": "gibbs", "steps": 64},
}
FEW, MANY = (0.9, 0.7, 0.5, 0.3), (1.0, 0.95, 0.8, 0.6, 0.4)
"""Values of top-p for every sampler, and more for the exact one."""
WARPERS: dict[str, dict[str, Any]] = {
    "top-k 30": {"top_k": 30, "top_p": 1},
    **{f"temperature {value}": {"temperature": value, "top_p": 1} for value in (0.8, 0.6)},
    **{f"top-p {value}": {"top_p": value} for value in sorted((*FEW, *MANY), reverse=True)},
}
CHOSEN = 0.5
"""The default top-p."""
REWRITING = ("exact", "by entropy", "by entropy, ε 0.1")
CONTINUING = ("exact", "by entropy", "left to right")
NUM_BEGINNINGS = 120
"""The number of sentences of the corpora whose first four words are continued by 30 tokens."""
STEPS: dict[str, dict[str, Any]] = {f"exact, {steps} steps": {"steps": steps} for steps in (4, 8, 16, 32, 64, 128)}
TEMPERATURES: dict[str, dict[str, Any]] = {
    f"exact, temperature {value}": {"temperature": value} for value in (1.0, 0.8, 0.6)
}
TASKS = ("generate", "continue", "continue by 30", "rewrite", "20 tokens", "temperature", "steps")
FROM_NOTHING = ("generate", "temperature", "steps")
"""One task with different settings: lengths and seed are the same."""


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
        elif task == "continue by 30":
            yield from ((own, task, name, warper) for name in CONTINUING for warper in few)
        elif task == "steps":
            yield from ((own, task, name, warper) for name in STEPS for warper in few)
        elif task == "temperature":
            yield from ((own, task, name, warper) for name in TEMPERATURES for warper in ("top-p 1.0", *few))
        else:
            yield from ((model, task, "exact", f"top-p {p}") for model in (own, *others) for p in (1.0, *FEW))


def settings_of(sampler: str, warper: str) -> dict[str, Any]:
    """What a row's texts depend on besides the model and the task; defaults may be missing."""
    return (STEPS | TEMPERATURES | SAMPLERS)[sampler] | WARPERS[warper]


def equal_row(key: tuple[str, str, str, str], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A row with the same texts, because tasks that generate from nothing share settings."""
    model, task, sampler, warper = key
    if task not in FROM_NOTHING:
        return None
    default = {"sampler": "exact", "steps": SamplerConfig().steps, "temperature": SamplerConfig().temperature}
    others = (row for row in rows if row["model"] == model and row["task"] in FROM_NOTHING)
    wanted = default | settings_of(sampler, warper)
    return next((row for row in others if default | settings_of(row["sampler"], row["warper"]) == wanted), None)


def texts_of(
    model: diffusionbert.Model,
    task: str,
    settings: dict[str, Any],
    corpus: list[str],
    beginnings: list[str],
    number: int,
) -> list[str]:
    match task:
        case "generate" | "temperature" | "steps":
            return model.generate(num_return_sequences=number, seed=0, **settings)
        case "20 tokens":
            return model.generate(num_return_sequences=number, length=20, seed=0, **settings)
        case "continue by 30":
            return continued(model, beginnings, 30, settings)
        case "continue":
            lines = PROMPTS.read_text(encoding="utf-8").splitlines()
            prompts = [line for line in lines if line and not line.startswith("#") and "[MASK]" not in line]
            return continued(model, prompts, 12, settings)
        case _:
            settings = {name: value for name, value in settings.items() if name != "block"}
            return model.rewrite(corpus, seed=0, **settings)


def continued(model: diffusionbert.Model, prompts: list[str], num_tokens: int, settings: dict[str, Any]) -> list[str]:
    """One text per prompt, each with a seed of its own: with the same one, all would be unmasked in the same order."""
    return [
        text
        for seed, prompt in enumerate(prompts)
        for text in model.generate(prompt, max_new_tokens=num_tokens, seed=seed, **settings)
    ]


def shown(task: str, texts: list[str]) -> list[str]:
    """The texts to store: none that contain parts of the corpus."""
    return [] if task in ("real", "rewrite", "continue by 30") else texts[:10]


def has_flaw(text: str) -> bool:
    """Whether a word is immediately repeated, or quotation marks or brackets do not match."""
    words = text.lower().split()
    counts = Counter(text)
    repeats = any(one == other for one, other in pairwise(words))
    return repeats or counts['"'] % 2 == 1 or counts["("] != counts[")"]


def is_on_frontier(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether no other row of its model and task has a lower perplexity and a higher entropy of all words."""
    tasks = FROM_NOTHING if row["task"] in FROM_NOTHING else (row["task"],)
    same = [one for one in rows if one["model"] == row["model"] and one["task"] in tasks]
    return not any(
        one["perplexity"] < row["perplexity"] and one["entropy_of_all_words"] > row["entropy_of_all_words"]
        for one in same
    )


def at_entropy(entropy: float, entropies: Sequence[float], *columns: Sequence[float]) -> list[float] | None:
    """Columns of figures at an entropy between those measured, interpolated in logs; None if it is outside."""
    order = np.argsort(entropies)
    x = np.array(entropies)[order]
    if not x[0] <= entropy <= x[-1]:
        return None
    return [float(np.exp(np.interp(entropy, x, np.log(np.array(column)[order])))) for column in columns]


def line_of(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:8} {row['task']:9} {row['sampler']:20} {row['warper']:15} {row['calls']:5.1f} calls "
        f"{row['perplexity']:7.1f} {row['entropy']:.3f} {row['distinct_2']:.2f} {row['flawed']:.2f}"
    )


def abscissa(row: dict[str, Any], own: str) -> tuple[str, float] | None:
    """The name of the x-axis and a row's position in the lower panel of its task; None if it is not shown there."""
    if row["task"] == "20 tokens":  # this compares models, which need the same number of calls
        return "top-p", float(row["warper"].removeprefix("top-p ")) + (0 if row["model"] == own else 0.01)
    if row["warper"] != f"top-p {CHOSEN}":
        return None
    if row["task"] == "temperature":
        return f"temperature, top-p {CHOSEN}", TEMPERATURES[row["sampler"]]["temperature"]
    return f"network calls per text, top-p {CHOSEN}", row["calls"]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws a column per task: perplexity against entropy, with a line per sampler over top-p; below it, the cost."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    own = next(row["model"] for row in rows if row["model"] != "real")
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    figure, axes = plt.subplots(2, len(tasks), figsize=(4.2 * len(tasks), 7.6), layout="constrained", squeeze=False)
    for (above, below), task in zip(axes.T, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        names = list({"steps": STEPS, "temperature": TEMPERATURES}.get(task, SAMPLERS))
        for model, name in dict.fromkeys((row["model"], row["sampler"]) for row in of_task):
            some = [row for row in of_task if (row["model"], row["sampler"]) == (model, name)]
            color = plt.get_cmap("tab20").colors[2 * names.index(name) % 19]
            style: dict[str, Any] = {"color": color, "mfc": color if model == own else "white"}
            line = sorted(
                (row for row in some if "top-p" in row["warper"]), key=lambda row: row["entropy_of_all_words"]
            )
            x, y = ([row[key] for row in line] for key in ("entropy_of_all_words", "perplexity"))
            above.plot(x, y, "o-", label=name if model == own else f"{name}, {model}", **style)
            for row in line:
                if found := abscissa(row, own):
                    low, high = row["ci95"]
                    errors = [[row["perplexity"] - low], [high - row["perplexity"]]]
                    below.errorbar(found[1], row["perplexity"], errors, fmt="o", capsize=3, **style)
                    below.set_xlabel(found[0])
            others = [row for row in some if row not in line]
            if others:
                x, y = ([row[key] for row in others] for key in ("entropy_of_all_words", "perplexity"))
                above.plot(x, y, "x", color=color, label=f"{name}, top-k or temperature")
        for row in rows:
            if row["task"] == "real" and task in FROM_NOTHING:
                above.plot(row["entropy_of_all_words"], row["perplexity"], "k*", label="real text")
        above.set(title=task, xlabel="entropy of the words of all texts (nats)")
        above.legend(fontsize=6, loc="upper left")
        if "calls" in below.get_xlabel():
            calls = [4, 8, 16, 32, 64, 128]
            below.set_xscale("log", base=2)
            below.set_xticks(calls, map(str, calls))
        for axis in (above, below):
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.3)
        num_labels = len(above.get_legend_handles_labels()[0])
        low, high = above.get_ylim()
        above.set_ylim(low, high * (high / low) ** (0.025 * num_labels))  # room for the legend
    for axis in axes[:, 0]:
        axis.set_ylabel("judge perplexity")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--corpus", nargs="+", type=Path, required=True)
    parser.add_argument("--model", default=None)
    parser.add_argument("--name", default="bundled", help="the name of the model in the file")
    parser.add_argument("--others", nargs="*", default=[])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS[:5])
    parser.add_argument("--number", type=int, default=50, help="texts per row")
    options = parser.parse_args()
    per_corpus = options.number // len(options.corpus)
    lines = [path.read_text(encoding="utf-8").splitlines() for path in options.corpus]
    corpus = [line for some in lines for line in some[:per_corpus]]
    beginnings = [
        " ".join(line.split()[:4])
        for some in lines
        for line in [line for line in some[per_corpus:] if len(line.split()) > 7][: NUM_BEGINNINGS // len(lines)]
    ]
    rows = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    done = {(row["model"], row["task"], row["sampler"], row["warper"]) for row in rows}
    folders = {Path(other).name: other for other in options.others}
    judge, models = load_judge(options.judge, torch.device("cpu")), dict[str, diffusionbert.Model]()
    for key in planned(options.name, list(folders), options.tasks):
        if key in done:
            continue
        name, task, sampler, warper = key
        named = dict(zip(("model", "task", "sampler", "warper"), key, strict=True))
        if equal := equal_row(key, rows):
            rows.append(equal | named)
            write_json(options.json, rows)
            continue
        texts, num_sequences = corpus, 0
        if name != "real":
            if name not in models:
                models[name] = diffusionbert.load(folders.get(name, options.model))
            counted = CountedSequences(models[name])
            texts = texts_of(models[name], task, settings_of(sampler, warper), corpus, beginnings, options.number)
            num_sequences = counted.stop()
        judged = judge.read(texts).judged()
        row: dict[str, Any] = named | {
            "calls": num_sequences / len(texts),
            "perplexity": judged.perplexity,
            "ci95": judged.ci95,
            "entropy": judged.entropy,
        }
        row |= {"entropy_of_all_words": token_entropy(texts).pooled, "distinct_2": distinct_n(texts, 2)}
        row |= {"flawed": sum(map(has_flaw, texts)) / len(texts), "texts": shown(task, texts)}
        rows.append(row)
        write_json(options.json, rows)
        print(line_of(row), flush=True)
    print("on the frontier:")
    for row in sorted(rows, key=lambda row: (row["task"], row["perplexity"])):
        if is_on_frontier(row, rows):
            print(line_of(row))
    draw(rows, options.picture)


class CountedSequences:
    """Counts the sequences that a model's network reads until it is stopped."""

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
