"""The sections of docs/results.md that say how it was done: settings in words, costs, hashes, commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checks import FEWEST
from kept import NotRun, Results
from wording import broken, grid, several

from diffusionbert.batches import TokenBudget
from diffusionbert.experiments import Diffusion, Experiment, NewBert, NewDecoder, VectorDiffusion
from diffusionbert.paper.systems import SYSTEMS, Start
from diffusionbert.paper.targets import MAIN

PRETRAINING_DATA = "text/wiki.train-*.txt.xz"
"""On which the larger network is pretrained."""


def said(values: Mapping[str, object]) -> str:
    """What the systems have, and which of them have something else: 0.0004 (`decoder`: 0.0008)."""
    counted = sorted(set(values.values()), key=lambda value: (-list(values.values()).count(value), str(value)))
    others = [f"{', '.join(f'`{name}`' for name in values if values[name] == other)}: {other}" for other in counted[1:]]
    return f"{counted[0]}" + (f" ({'; '.join(others)})" if others else "")


def what_was_run(results: Results, _: Path) -> str:
    """Networks, training, noise, text and evaluation, from the settings that were kept."""
    trained, settings = results.experiments("seed0"), results.settings()
    if not trained:
        raise NotRun("seed0")
    parts = [_network(trained), _training(results, trained), _text(trained, settings), _evaluation(results)]
    folders = [f"`{folder}` ({several(len(results.experiments(folder)), 'system')})" for folder in results.folders]
    parts.append(f"**At hand.** {', '.join(folders)}.")
    absent = results.absent()
    parts.append(f"**Not run yet.** {', '.join(absent)}." if absent else "")
    return "## What was run\n\n" + "\n".join(f"- {part}" for part in parts if part)


def _network(trained: Mapping[str, Experiment]) -> str:
    new = {name: one.network for name, one in trained.items() if isinstance(one.network, NewBert | NewDecoder)}
    sizes = {
        name: f"{network.layers} layers, width {network.width}, {network.heads} heads, dropout {network.dropout}"
        for name, network in new.items()
    }
    starts = {Start.MASKED: "a masked language model", Start.DECODER: "a decoder"}
    kinds = [words for start, words in starts.items() if any(SYSTEMS[name].start is start for name in trained)]
    size = f"From scratch: {said(sizes)}. " if sizes else ""
    start = (
        f"Pretrained rows start from {' and '.join(kinds)} of that size, which `diffusionbert pretrain --preset "
        "wiki-small` made on Wikipedia ([bundled_model.md](bundled_model.md)); all rows have its vocabulary."
    )
    return f"**Networks.** {size}{start if kinds else ''}".rstrip()


def _training(results: Results, trained: Mapping[str, Experiment]) -> str:
    every = {name: one.training for name, one in trained.items()}
    seen = sorted(results.tokens(name, "seed0") for name in trained)
    tokens = " to ".join(dict.fromkeys(f"{number / 1e6:.1f}M" for number in (seen[0], seen[-1])))
    batch = {
        name: f"{one.batching.tokens:,} tokens" if isinstance(one.batching, TokenBudget) else str(one.batching)
        for name, one in every.items()
    }
    grids = {name: one.objective.num_steps for name, one in trained.items() if isinstance(one.objective, Diffusion)}
    vectors = {
        name: one.objective.num_steps for name, one in trained.items() if isinstance(one.objective, VectorDiffusion)
    }
    hybrid = [
        f"`{name}`" for name, one in trained.items() if isinstance(one.objective, Diffusion) and one.objective.hybrid
    ]
    eager = [f"`{name}`" for name, one in every.items() if not one.compile]
    rates = said({name: f"{one.learning_rate:g}" for name, one in every.items()})
    return (
        f"**Training.** {said({name: f'{one.steps:,}' for name, one in every.items()})} steps of at most "
        f"{said(batch)}, {tokens} tokens in all; AdamW, learning rate {rates}, warm-up "
        f"{said({name: one.warmup for name, one in every.items()})} steps, decay "
        f"{said({name: one.decay for name, one in every.items()})}, averaged weights "
        f"{said({name: one.averaging for name, one in every.items()})}, "
        f"{said({name: one.precision for name, one in every.items()})}. "
        + (f"T = {said(grids)}" if grids else "")
        + (f"; Diffusion-LM: {said(vectors)}" if vectors else "")
        + "."
        + (f" {', '.join(hybrid)} have D3PM's auxiliary term in their loss, as in its paper." if hybrid else "")
        + (f" Not compiled, which changes the speed alone: {', '.join(eager)}." if eager else "")
    )


def _text(trained: Mapping[str, Experiment], settings: Mapping[str, object]) -> str:
    data = next(iter(trained.values())).data
    names = {"trained": "data", "validated": "validation", "tested": "test", "tested out of domain": "other_test"}
    words = ", ".join(f"{verb} on `{settings[name]}`" for verb, name in names.items() if settings[name])
    case = "lower-cased, " if data.lower else ""
    return f"**Text.** {words[0].upper()}{words[1:]}; {case}single sentences of at most {data.max_length} tokens."


def _evaluation(results: Results) -> str:
    rows = [row.key for row in MAIN if results.has(row.key) and results.evaluation(row.key).scores]
    if not rows:
        return ""
    report = results.evaluation(rows[0]).report
    card, sampling = next(iter(report["likelihoods"].values())), report["sampling"]
    return (
        f"**Evaluation.** {card['num_sentences']:,} sentences of the test text ({card['num_tokens']:,} tokens, special "
        f"tokens not counted, length {card['protocol']['length']}), {card['protocol']['num_draws']} draws a sentence "
        f"where something is drawn, {card['protocol']['arithmetic']}; {sampling['number']:,} samples of "
        f"{sampling['length']} tokens for BLEU-4 against {report['data']['num_in_corpus']:,} sentences, as many again "
        f"for self-BLEU ({_writers(results)}). {report['speed']['device']}."
    )


def _writers(results: Results) -> str:
    """Which rows have such samples: not all were asked with every seed."""
    found = ["all rows of seed 0"]
    for seed in results.seeds[1:]:
        known = [row.key for row in MAIN if results.has(row.key, seed)]
        wrote = [key for key in known if len(results.evaluation(key, seed).bleu4.values) >= FEWEST]
        listed = f"all {len(known)}" if wrote == known else ", ".join(f"`{key}`" for key in wrote) or "none"
        found.append(f"{listed} of {seed.replace('seed', 'seed ')}")
    return "; ".join(found)


# ---- costs ----------------------------------------------------------------------------------------------------------


def costs(results: Results, _: Path) -> str:
    """What each row took, and what its weights are."""
    stages = "pretrain", "train", "evaluate", "other text"
    lines, shares, workers = [], dict[str, list[float]](), set[int]()
    for folder in results.folders:
        for key, laps in results.seconds(folder).items():
            cells = [f"{laps[stage]:.0f}" if stage in laps else "–" for stage in stages]
            minutes = sum(laps.get(stage, 0.0) for stage in stages) / laps["workers"] / 60
            shares[folder] = [*shares.get(folder, []), minutes]
            workers.add(int(laps["workers"]))
            lines.append((f"`{folder}/{key}`", *cells, f"{minutes:.2f}", _weights(results, key, folder)))
    if not lines:
        return "## Costs and hashes\n\nNot run yet."
    each = ", ".join(
        f"{sum(own):.1f} for the {several(len(own), 'row')} of `{folder}`" for folder, own in shares.items()
    )
    header = (
        "row",
        "pretraining, s",
        "training, s",
        "evaluation, s",
        "other text, s",
        "GPU minutes",
        "weights, sha256",
    )
    return (
        f"## Costs and hashes\n\nSeconds are wall seconds while {' or '.join(map(str, sorted(workers)))} rows ran side "
        "by side on one chip, so a row alone is faster; its share, seconds ÷ rows, is given as GPU minutes, which is "
        "too little where fewer ran towards the end. Rows were run in instalments, while the program was written. "
        "Together: "
        f"{each}; {sum(map(sum, shares.values())):.1f} GPU minutes, without what ran alone (step times, "
        "tables 1 and 3) and without the pretraining of what was given. Hashes of weights are shortened here, and "
        "whole in each `evaluation.json`.\n\n<details><summary>Every row</summary>\n\n"
        f"{grid(header, lines)}\n\n</details>\n\n{_hashes(results)}"
    )


def _weights(results: Results, key: str, folder: str) -> str:
    if not results.has(key, folder):
        return "–"
    return f"`{results.evaluation(key, folder).report['weights']['sha256'][:12]}`"


def _hashes(results: Results) -> str:
    found = {}
    for folder in results.folders:
        for key in results.keys(folder):
            data = results.evaluation(key, folder).report["data"]
            found[data["corpus"], data["corpus_sha256"]] = data["num_in_corpus"]
    tested = [f"- `{corpus}`, {number:,} sentences: `{digest}`" for (corpus, digest), number in sorted(found.items())]
    given = [f"- `{name}`: `{digest}`" for name, digest in results.given().items()]
    lines = ["SHA-256 of the texts that were tested, as they were read:", "", *tested]
    return "\n".join([*lines, "", "and of the files that the experiment was given:", "", *given] if given else lines)


def commands(results: Results, _: Path) -> str:
    """What to type to get all this again."""
    settings = results.settings()
    names = "data", "validation", "test", "other_test", "masked", "decoder"
    options = [f"--{name.replace('_', '-')} {_quoted(str(settings[name]))}" for name in names if settings[name]]
    workers = max((int(laps["workers"]) for laps in results.seconds("seed0").values()), default=1)
    own = f"--preset {settings['preset']} {' '.join(options)}"
    larger = f" --pretraining-data {_quoted(PRETRAINING_DATA)}"
    return (
        "## The commands\n\n```\n"
        + "\n".join(
            broken(
                f"python benchmarks/experiment.py rows --output experiment --workers {workers} {own}{larger}",
                f"python benchmarks/experiment.py alone --output experiment {own}",
                "python benchmarks/results keep experiment",
                f"python benchmarks/results hash {_given(settings)}",
                "python benchmarks/results report",
            )
        )
        + "\n```\n\n[bundled_model.md](bundled_model.md) has the commands that pretrained what was given.\n\nOne "
        "table or figure of one seed, by itself:\n\n```\n"
        + "\n".join(broken(f"diffusionbert reproduce table2 --output experiment/seed0 {own}"))
        + "\n```"
    )


def _given(settings: Mapping[str, Any]) -> str:
    texts = [str(settings[name]) for name in ("data", "validation", "test", "other_test") if settings[name]]
    starts = [f"{settings[name]}/*.safetensors" for name in ("masked", "decoder") if settings[name]]
    return " ".join([*texts, PRETRAINING_DATA, *starts])


def _quoted(text: str) -> str:
    return f"'{text}'" if "*" in text else text
