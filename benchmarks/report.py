r"""Makes the tables and figures of docs/results.md from what `experiment.py` kept; needs neither models nor corpora.

    python benchmarks/report.py docs/results/second docs/results/tables --small docs/results/small \
        --pages docs/results.md docs/results/details.md

Missing rows are left out. The pages are written by hand; a test checks that every number in their prose occurs in these
tables. `claims.py` has the claims and the rule for their verdicts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tyro
from claims import (
    CLAIMS,
    CURVE,
    SEEDS,
    Claim,
    Found,
    Kept,
    claim_rows,
    claims_markdown,
    difference,
    percent,
    unigram_nats,
)
from sampling_frontier import at_entropy
from second_edition_rows import ORDERS, SIZES

from diffusionbert.evaluation.compare import compare
from diffusionbert.evaluation.conventions import ConventionScale
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.likelihood.scores import LikelihoodSummary, Unit
from diffusionbert.networks.loading import NewNetwork
from diffusionbert.objectives.gaussian import GaussianConfig
from diffusionbert.recipes import SYSTEMS
from diffusionbert.reproduce import figures
from diffusionbert.reproduce.targets import write_table
from diffusionbert.storage.files import read_json, write_json
from diffusionbert.storage.schema import Component
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import RunConfig
from diffusionbert.training.log import TrainEvent, ValidationEvent, events_of

Folder = tyro.conf.Positional[Path]


def report(source: Folder, output: Folder, small: Path | None = None, pages: tuple[Path, ...] = ()) -> None:
    """Write the tables and figures that have rows, and put the tables into the pages, between their marks.

    Args:
        source: What was kept of the rows at full size.
        output: The folder for tables and figures.
        small: What was kept of the rows at small size; their tables are written to output/small.
        pages: Where to put tables.
    """
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        kept = Kept(source, Path(scratch))
        _claims(kept, output)
        _setup(kept, output)
        _rates(kept, output)
        _main_table(kept, output)
        _group_tables(kept, output)
        for group in ROWS:
            _rows(kept, output, group)
        _orders(kept, output)
        _spindle(kept, output)
        _measured(source, output, "released_spindle", RELEASED)
        _measured(source, output, "random_orders", RANDOM_ORDERS)
        _diffusion_lm(kept, output)
        _conventions(kept, output)
        for group in ("curve", "curve-plain"):
            _curve_table(kept, output, group)
            _curve_table(kept, output, group, "-lm1b")
            _curve(kept, output, group)
        _equal_compute(kept, output)
        _repeats(kept, output)
        _frontier(kept, output)
        _costs(source, output)
        if small is not None:
            _small(Kept(small, Path(scratch) / "small"), kept, output / "small")
    for page in pages:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), output), encoding="utf-8")


def with_tables(page: str, tables: Path) -> str:
    """A page with the tables NAME.md that exist between `<!-- NAME -->` and `<!-- end of NAME -->`."""

    def filled(found: re.Match[str]) -> str:
        table = tables / f"{found[1]}.md"
        if not table.exists():
            return found[0]
        return f"<!-- {found[1]} -->\n{table.read_text(encoding='utf-8')}<!-- end of {found[1]} -->"

    return re.sub(r"<!-- ([\w/-]+) -->\n.*?<!-- end of \1 -->", filled, page, flags=re.DOTALL)


def _write(path: Path, heading: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> None:
    """Writes a Markdown table whose first columns are text and the others numbers; nothing if there are no rows."""
    if lines := [f"| {' | '.join(map(str, row))} |\n" for row in rows]:
        rule = "|" + "---|" * texts + "---:|" * (len(heading) - texts)
        path.write_text(f"| {' | '.join(heading)} |\n{rule}\n{''.join(lines)}", encoding="utf-8")


# ---- tables ---------------------------------------------------------------------------------------------------------


def _claims(kept: Kept, output: Path) -> None:
    """Table 1, and the forest plot of the effects that are also in the paper."""
    rows = list(claim_rows(kept))
    if not rows:
        return
    write_json(output / "claims.json", rows)
    (output / "claims.md").write_text(claims_markdown(rows), encoding="utf-8")
    effects = []
    for number, row in enumerate(rows, start=1):
        if row["paper"] is None or row.get("kinds") != ("bound", "bound") or "too little" in row["verdict"]:
            continue
        low, high = row["interval"]
        name, change, interval = f"{number}. {row['claim']}", 100 * row["change"], (100 * low, 100 * high)
        effects.append(figures.Effect(name, change, interval, 100 * row["paper"]))
    if effects:
        figures.forest(effects, output / "forest.png")


def _millions(number: int | None) -> str:
    return "–" if number is None else f"{number / 1e6:.1f}M"


def _setup(kept: Kept, output: Path) -> None:
    """How the rows were trained and evaluated, from their own records."""
    rows = []
    for path in sorted(kept.source.glob(f"{SEEDS[0]}/trained/*/")):
        config = RunConfig.from_json(read_json(path / "run.json"), str(path))
        training, network = config.training, config.backbone
        tokens = events_of(path / "log.jsonl", TrainEvent)[-1].tokens_seen
        batch = training.batching.tokens if isinstance(training.batching, TokenBudget) else "–"
        if not kept.has(SEEDS[0], path.name):
            continue
        model = kept.result(SEEDS[0], path.name).model
        rows.append(
            (
                f"`{path.name}`",
                f"{network.layers} × {network.width}" if isinstance(network, NewNetwork) else "of its start",
                _millions(model.parameters),
                f"{training.steps:,} × {batch:,}",
                training.optimizer,
                f"{training.learning_rate:g}",
                config.objective.num_steps or "–",
                training.ema or "–",
                _millions(tokens),
                "–" if model.epochs is None else f"{model.epochs:.2f}",
            )
        )
    heading = (
        "row",
        "layers × width",
        "parameters",
        "steps × tokens",
        "optimizer",
        "learning rate",
        "T",
        "EMA",
        "tokens seen",
        "epochs",
    )
    _write(output / "setup.md", heading, rows)


def _rates(kept: Kept, output: Path) -> None:
    """The learning rate search: the last validation of each, the best in bold."""
    found: dict[str, dict[float, float]] = {}
    for path in sorted(kept.source.glob("*rates/trained/*/log.jsonl")):
        system, _, rate = path.parent.name.rpartition("-")
        nats = events_of(path, ValidationEvent)[-1].nats_per_token
        found.setdefault(f"`{path.parts[-4]}/{system}`", {})[float(rate)] = float("nan") if nats is None else nats
    rates = sorted({rate for own in found.values() for rate in own})
    rows = []
    for name, own in found.items():
        cells = [f"{own[rate]:.3f}" if rate in own else "–" for rate in rates]
        best = rates.index(min(own, key=lambda rate: own[rate]))
        rows.append([name, *(f"**{cell}**" if at == best else cell for at, cell in enumerate(cells))])
    _write(output / "rates.md", ["validation, nats per token", *(f"{rate:g}" for rate in rates)], rows)


# ---- short tables, for the page -------------------------------------------------------------------------------------


def _perplexity(result: EvaluationResult, *quantities: str) -> str:
    """The perplexity per word by the first of these quantities that was estimated; by default its main one."""
    estimated = (result.likelihoods[name] for name in quantities if name in result.likelihoods)
    own = next(estimated, None) if quantities else _main_likelihood(result)
    if own is None:
        return "–"
    rate = own.rates.perplexity_per_word
    assert rate is not None
    return f"{rate.value:.1f} [{rate.ci95[0]:.1f}, {rate.ci95[1]:.1f}]"


def _main_likelihood(result: EvaluationResult) -> LikelihoodSummary | None:
    """The T-step bound, or whatever the system has instead; None if it has no likelihood."""
    return result.likelihoods.get("grid", result.primary)


ROWS = {"seed0": "rows", "diffusion-lm": "rows-diffusion-lm", "peers": "rows-peers", "bert": "rows-bert"}
"""Groups with a short table of their rows, and its name."""


def _rows(kept: Kept, output: Path, group: str) -> None:
    """The rows of a group by perplexity, such as table 2; those without a likelihood come last."""
    rows = []
    for name in kept.names(group):
        result = kept.result(group, name)
        own, model = _main_likelihood(result), result.model
        if _is_other_text(name):
            continue
        bleu = [f"{one.mean:.3f}" if len(one.values) else "–" for one in (result.bleu4, result.self_bleu4)]
        tokens = [_millions(number) for number in (model.tokens_seen, model.pretraining_tokens or 0)]
        is_paper = own is not None and own.protocol.definition.quantity == "paper"
        kind = "none" if own is None else "pseudo (the paper's quantity)" if is_paper else own.kind.value
        rate = None if own is None else own.rates.perplexity_per_word
        value = np.inf if rate is None else rate.value
        rows.append((kind, value, (f"`{name}`", kind, _perplexity(result), *bleu, *tokens)))
    heading = "row", "kind", "perplexity per word", "BLEU-4", "self-BLEU-4", "tokens", "pretraining"
    _write(output / f"{ROWS[group]}.md", heading, [row for *_, row in sorted(rows)], texts=2)


def _orders(kept: Kept, output: Path) -> None:
    """The bound next to exact likelihoods in orders of unmasking, and what its looseness can explain."""
    rows, titles = [], ("left to right", "most confident first", "lowest entropy first", "4 random", "16 random")
    first = f"-{ORDERS[0]}"  # all rows with orders have this one
    for group in ("orders", "orders1"):
        for name in sorted(one.removesuffix(first) for one in kept.names(group) if one.endswith(first)):
            exact = {order: (group, f"{name}-{order}") for order in ORDERS}
            cells = [_perplexity(kept.result(*at), order) if kept.has(*at) else "–" for order, at in exact.items()]
            shown = f"`{name}`" if group == "orders" else f"`{name}`, seed 1"
            rows.append((shown, _perplexity(kept.result(group, name), "continuous"), *cells))
    used = [at for at in range(len(titles)) if any(row[2 + at] != "–" for row in rows)]
    shortened = [(*row[:2], *(row[2 + at] for at in used)) for row in rows]
    _write(output / "orders.md", ("row", "bound", *(titles[at] for at in used)), shortened)


SPINDLE = {"lambda-0": "diffusionbert", "lambda-0-bell": "diffusionbert-bell", "lambda-0.3": "diffusionbert-spindle"}
"""Main rows among the rows on the spindle's strength."""
QUANTITIES = {
    "strict": "bound, T = 512, 64 draws",
    "paper": "the paper's quantity, T = 512",
    "released": "the released code's, T = 512",
}
"""What is summed over the steps of the grid, and the headings of its columns."""


def _spindle(kept: Kept, output: Path) -> None:
    """The spindle's strength, and each quantity on models that were trained on either."""
    rows = []
    for name in [name for name in kept.names("spindle") if not _is_other_text(name)]:
        result, main = kept.result("spindle", name), SPINDLE.get(name)
        steps = kept.result("seed0", main) if main is not None and kept.has("seed0", main) else result
        shown = dict.fromkeys(QUANTITIES, "–")
        if "grid" in steps.likelihoods:
            shown[steps.likelihoods["grid"].protocol.definition.quantity] = _perplexity(steps, "grid")
        rows.append((f"`{name}`", _perplexity(result, "continuous"), *shown.values()))
    heading = "row", "bound, continuous time, 512 draws", *QUANTITIES.values()
    _write(output / "spindle.md", heading, rows)


def _measured(source: Path, output: Path, name: str, columns: dict[str, str]) -> None:
    """Perplexities by several quantities, and their changes from the bound, as NAME.py measured them."""
    path = source / f"{name}.json"
    found, rows = read_json(path) if path.exists() else {"rows": ()}, []
    shows_predictors = len({row["by"] for row in found["rows"]}) > 1
    for row in found["rows"]:
        cells = [row["quantities"].get(quantity) for quantity in columns]
        shown = ["–" if own is None else f"{own['perplexity']:.1f}{_change(own)}" for own in cells]
        rows.append((f"`{row['text']}`", *([row["by"]] if shows_predictors else []), *shown))
    predictors = ["predicted by"] if shows_predictors else []
    heading = f"perplexity per word, {found.get('sentences')} sentences", *predictors, *columns.values()
    _write(output / f"{name.replace('_', '-')}.md", heading, rows, texts=1 + shows_predictors)


def _change(own: dict[str, Any]) -> str:
    """The change from the bound with its interval, if it is not the bound itself."""
    low, high = own["ci95"]
    return f", {percent(own['change'])} [{percent(low)}, {percent(high)}]" if low < high else ""


RELEASED = {
    "linear": "bound",
    "paper": "the paper's quantity",
    "own_posterior": "released masking, its own unmasking",
    "released": "as released",
}
"""Quantities of `released_spindle.py`, and the headings of their columns."""
RANDOM_ORDERS = {
    "bound": "bound",
    "random-4": "one of 4 orders",
    "random-16": "one of 16",
    "random-64": "one of 64",
    "left-to-right": "left to right",
    "entropy": "lowest entropy first",
}
"""Orders of `random_orders.py`, and the headings of their columns."""


def _small(kept: Kept, full: Kept, output: Path) -> None:
    """The tables of the small size, at which there are several training runs."""
    output.mkdir(parents=True, exist_ok=True)
    _setup(kept, output)
    _rates(kept, output)
    _training_runs(kept, full, output)
    _curve_table(kept, output, "curve")
    _curve_runs(kept, output)
    _diffusion_lm(kept, output)
    _costs(kept.source, output, "minutes of two cores")


def _training_runs(kept: Kept, full: Kept, output: Path) -> None:
    """The effects in each training run and over all, next to those at full size; the curve has a table of its own."""
    rows, parent = [], ""
    for claim in CLAIMS:
        parent = parent if claim.text.startswith("–") else claim.text
        found = None if claim.groups == CURVE else difference(kept, claim)
        if found is None:
            continue
        runs = (difference(kept, replace(claim, groups=(group,))) for group in claim.groups)
        each = ", ".join(percent(run.change) for run in runs if run is not None)
        larger = difference(full, claim)
        at_full_size = "–" if larger is None else _with_interval(larger)
        cells = percent(claim.paper), at_full_size, _with_interval(found), each
        name = claim.text if claim.text == parent else f"{parent.rstrip(' †‡')} {claim.text}"
        rows.append((name.rstrip(" †‡"), *cells))
    sizes = "full size, one run", "small size, mean over runs", "small size, each run"
    heading = "claim", "paper", *sizes
    _write(output / "runs.md", heading, rows)


def _curve_runs(kept: Kept, output: Path) -> None:
    """Perplexities per word in each training run, at the lengths of the curve that were run again."""
    systems, rows = {title: prefix for title, prefix in CURVES.items() if prefix != "causal"}, []
    for share in _shares(kept, "curve1"):
        names = [f"{prefix}-{share:g}" for prefix in systems.values()]
        runs = [[kept.result(group, name) for group in CURVE if kept.has(group, name)] for name in names]
        points = [[point for result in own if (point := _point(result)) is not None] for own in runs]
        total = np.median([tokens for own in points for tokens, *_ in own])
        cells = (", ".join(f"{np.exp(nats):.1f}" for _, nats, *_ in own) or "–" for own in points)
        rows.append((f"{total / 1e6:.1f}M", *cells))
    heading = "perplexity per word, each run", *systems
    _write(output / "curve-runs.md", heading, rows, texts=0)


def _with_interval(found: Found) -> str:
    return f"{percent(found.change)} [{', '.join(map(percent, found.interval))}]"


def _diffusion_lm(kept: Kept, output: Path) -> None:
    """Diffusion-LM against token frequencies: validations during training, and the bound of the best of these."""
    rows, unigram = [], unigram_nats(kept)
    for path in sorted(kept.source.glob("diffusion-lm/trained/*/")):
        config = RunConfig.from_json(read_json(path / "run.json"), str(path)).objective
        assert isinstance(config, GaussianConfig)
        found = [one.nats_per_token for one in events_of(path / "log.jsonl", ValidationEvent)]
        middle = found[len(found) // 2]
        shown = ["–" if nats is None else f"{nats:.3f}" for nats in (found[0], middle, found[-1])]
        tokens = events_of(path / "log.jsonl", TrainEvent)[-1].tokens_seen
        own = kept.result("diffusion-lm", path.name).primary if kept.has("diffusion-lm", path.name) else None
        rate = None if own is None else own.rates.nats_per_token
        test = "–" if rate is None else f"{rate.value:.3f} [{rate.ci95[0]:.3f}, {rate.ci95[1]:.3f}]"
        predicts, width = "tokens" if config.predicts_tokens else "vectors", config.width or "of the network"
        cells = predicts, width, Component.of(config.schedule).name, _millions(tokens), *shown, test
        rows.append((f"`{path.name}`", *cells))
    if rows and unigram is not None:
        rows.append(("token frequencies", *["–"] * 7, f"{unigram:.3f}"))
    heading = "row", "predicts", "width", "schedule", "tokens", "before training", "halfway", "end", "test"
    _write(output / "diffusion-lm.md", heading, rows, texts=2)


def _curve_table(kept: Kept, output: Path, group: str, text: str = "") -> None:
    """Perplexities over total tokens, and the ratio of DiffusionBERT to D3PM at each, on news or another text."""
    rows = []
    for share in _shares(kept, group):
        found = {prefix: (_curve_group(group, prefix), f"{prefix}-{share:g}{text}") for prefix in CURVES.values()}
        results = {prefix: kept.result(*at) for prefix, at in found.items() if kept.has(*at)}
        tokens = [point[0] for result in results.values() if (point := _point(result)) is not None]
        ratios = [_ratio(kept, group, prefix, share, text) for prefix in PRETRAINED]
        shown = ["–" if own is None else f"{own[0]:.2f} [{own[1]:.2f}, {own[2]:.2f}]" for own in ratios]
        cells = [_perplexity(results[prefix]) if prefix in results else "–" for prefix in CURVES.values()]
        if tokens:
            rows.append((f"{np.median(tokens) / 1e6:.1f}M", *cells, *shown))
    heading = "total tokens", *CURVES, "another text : D3PM", "same text : D3PM"
    _write(output / f"{group}{text}.md", heading, rows, texts=0)


def _shares(kept: Kept, group: str) -> list[float]:
    """The lengths of the curve, as fractions of the usual number of tokens."""
    return sorted({float(name.rpartition("-")[2]) for name in kept.names(group) if not _is_other_text(name)})


def _ratio(kept: Kept, group: str, prefix: str, share: float, text: str = "") -> tuple[float, float, float] | None:
    """The perplexity relative to D3PM's at the same total number of tokens, over all seeds, with its interval."""
    names = f"{prefix}-{share:g}{text}", f"d3pm-{share:g}{text}"
    found = difference(kept, Claim("", "", *names, groups=(group, f"{group}1")))
    return None if found is None else (1 + found.change, 1 + found.interval[0], 1 + found.interval[1])


def _equal_compute(kept: Kept, output: Path) -> None:
    """Perplexities relative to D3PM's at the same compute instead of the same tokens.

    A token of masking takes less compute than one of diffusion, since there are fewer outputs. D3PM's nats in between
    are interpolated over the logarithm of tokens.
    """
    results = {
        (prefix, share): kept.result("curve", f"{prefix}-{share:g}")
        for share in _shares(kept, "curve")
        for prefix in CURVES.values()
        if kept.has("curve", f"{prefix}-{share:g}")
    }
    points = {at: point for at, result in results.items() if (point := _point(result)) is not None}
    own = sorted((tokens, nats) for (prefix, _), (tokens, nats, *_) in points.items() if prefix == "d3pm")
    rows = []
    for share in sorted({share for _, share in points}):
        cells = []
        for prefix in PRETRAINED:
            point, result = points.get((prefix, share)), results.get((prefix, share))
            tokens = None if point is None or result is None else _diffusion_tokens(result)
            if point is None or tokens is None or not own or tokens < own[0][0]:
                cells.append("–")
                continue
            reference = np.interp(np.log(tokens), np.log([at for at, _ in own]), [nats for _, nats in own])
            cells.append(f"{np.exp(point[1] - reference):.2f}")
        if set(cells) != {"–"}:
            total = np.median([tokens for (_, at), (tokens, *_) in points.items() if at == share])
            rows.append((f"{total / 1e6:.1f}M", *cells))
    _write(output / "compute.md", ("total tokens", "another text : D3PM", "same text : D3PM"), rows, texts=0)


def _diffusion_tokens(result: EvaluationResult) -> float | None:
    """How many tokens of diffusion take as much compute as all of its training, with outputs at targets only."""
    model = result.model
    if model.tokens_seen is None or model.pretraining_tokens is None or model.parameters is None:
        return None
    outputs = VOCABULARY * SIZES["full"].width / model.parameters
    masking, diffusion = (1 - outputs + share * outputs for share in (0.15, 0.5))
    return model.tokens_seen + model.pretraining_tokens * masking / diffusion


VOCABULARY = 16_000
"""The number of tokens of the bundled tokenizer."""


def _repeats(kept: Kept, output: Path) -> None:
    """Networks that were trained twice with the same seed, on different machines: their last validations."""
    rows = []
    for again in sorted(kept.source.glob("*/trained/*-again")):
        original = again.with_name(re.sub("(-again)+$", "", again.name))
        logs = [path / "log.jsonl" for path in (original, again)]
        first, second = (events_of(log, ValidationEvent)[-1].nats_per_token for log in logs)
        if first is not None and second is not None:
            name = f"`{again.parts[-3]}/{original.name}`"
            rows.append((name, f"{first:.3f}", f"{second:.3f}", f"{second - first:+.3f}".replace("-", "−")))
    _write(output / "repeats.md", ("validation, nats per token", "first", "again", "difference"), rows)


def _conventions(kept: Kept, output: Path) -> None:
    """The main rows on LM1B's held-out part, in the conventions of the literature."""
    rows, names = [], list[str]()
    for name in kept.names("seed0"):
        result = kept.result("seed0", name) if name.endswith("-lm1b") else None
        if result is not None and result.conventions:
            names = names or [
                f"{'bits ' if one.meaning.scale is ConventionScale.BITS else ''}{one.meaning.name}"
                for one in result.conventions
            ]
            digits = [3 if one.meaning.scale is ConventionScale.BITS else 1 for one in result.conventions]
            cells = [
                "–" if one.value is None else f"{one.value.value:.{number}f}"
                for one, number in zip(result.conventions, digits, strict=True)
            ]
            rows.append((f"`{name.removesuffix('-lm1b')}`", result.conventions[0].kind.value, *cells))
    _write(output / "conventions.md", ("row", "kind", *names), rows, texts=2)


# ---- all figures of all rows ----------------------------------------------------------------------------------------


def _main_table(kept: Kept, output: Path) -> None:
    """The main rows; training runs that differ only in their seed are merged."""
    found = [(seed, name) for seed in SEEDS for name in kept.names(seed) if not _is_other_text(name)]
    results = [kept.result(seed, name) for seed, name in found]
    if results:
        names = [name if seed == "seed0" else f"{name} ({seed})" for seed, name in found]
        has_seeds = len({seed for seed, _ in found}) > 1
        write_table(output / "main", compare(results, names=names, merge_seeds=has_seeds, unit=Unit.WORD))
    _compared(kept, "seed0", [name for name in kept.names("seed0") if _is_other_text(name)], output / "lm1b")


GROUPS = "spindle", "orders", "peers", "bert", "noise", "diffusion-lm", "curve", "curve-plain", "frontier"
"""Groups of rows with tables of their own."""


def _group_tables(kept: Kept, output: Path) -> None:
    for group in GROUPS:
        names = kept.names(group)
        _compared(kept, group, [name for name in names if not _is_other_text(name)], output / f"all-{group}")
        _compared(kept, group, [name for name in names if _is_other_text(name)], output / f"all-{group}-lm1b")


def _compared(kept: Kept, group: str, names: list[str], stem: Path) -> None:
    if names:
        write_table(stem, compare([kept.result(group, name) for name in names], names=names, unit=Unit.WORD))


def _is_other_text(name: str) -> bool:
    return name.endswith("-lm1b")


def _costs(source: Path, output: Path, minutes_of: str = "GPU minutes") -> None:
    """Minutes of its machine, the commit of the code, and hashes of every row."""
    commits = read_json(source / "commits.json") if (source / "commits.json").exists() else {}
    rows = []
    for path in sorted(source.glob("*/seconds/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        seconds = record.get("gpu_seconds", record["seconds"] / record["workers"])
        minutes, tokens = seconds / 60, record.get("tokens")
        names = (commits.get(record["code"]), *map(record.get, ("code", "data", "start", "weights")))
        hashes = (f"`{str(name or '–')[:12]}`" for name in names)
        rows.append((f"`{path.parts[-3]}/{path.stem}`", *hashes, f"{minutes:.2f}", _millions(tokens)))
    heading = "row", "commit", "code", "data", "start", "weights", minutes_of, "tokens"
    _write(output / "costs.md", heading, rows, texts=6)


# ---- figures --------------------------------------------------------------------------------------------------------

CURVES = {
    "D3PM": "d3pm",
    "DiffusionBERT, masking on another text": "other-text",
    "DiffusionBERT, masking on the same text": "same-text",
    "Transformer decoder": "causal",
}
"""The systems of the curve, and the beginning of their rows' names."""
PRETRAINED = "other-text", "same-text"
"""Those that are compared with D3PM."""


def _curve_group(group: str, prefix: str) -> str:
    """The group of a system's rows: a causal network has no hybrid term."""
    return "curve" if prefix == "causal" else group


def _curve(kept: Kept, output: Path, group: str) -> None:
    """Figure 1: nats against total tokens."""
    curves = []
    for title, prefix in CURVES.items():
        own = _curve_group(group, prefix)
        names = [name for name in kept.names(own) if re.fullmatch(rf"{prefix}-[\d.]+", name)]
        points = sorted(point for name in names if (point := _point(kept.result(own, name))) is not None)
        if points:
            tokens, nats, intervals, kinds = zip(*points, strict=True)
            curves.append(figures.TokenCurve(title, tokens, nats, kinds[0], intervals))
    if curves:
        write_json(output / f"{group}-points.json", [asdict(one) for one in curves])
        titles = {prefix: title for title, prefix in CURVES.items()}
        ratios = [_ratios(kept, group, prefix, titles[prefix]) for prefix in PRETRAINED]
        figures.token_curves(curves, output / f"{group}.png", [one for one in ratios if one.tokens], titles["d3pm"])


def _ratios(kept: Kept, group: str, prefix: str, title: str) -> figures.TokenRatio:
    """The ratios of a system's perplexities to D3PM's, over total tokens."""
    found = []
    for share in _shares(kept, group):
        ratio = _ratio(kept, group, prefix, share)
        point = None if ratio is None else _point(kept.result(group, f"{prefix}-{share:g}"))
        if ratio is not None and point is not None:
            found.append((point[0], ratio[0], ratio[1:]))
    tokens, ratios, intervals = zip(*found, strict=True) if found else ((), (), ())
    return figures.TokenRatio(title, tokens, ratios, intervals)


def _point(result: EvaluationResult) -> tuple[int, float, tuple[float, float], str] | None:
    own, model = _main_likelihood(result), result.model
    if own is None or model.tokens_seen is None or model.pretraining_tokens is None:
        return None
    rate = own.rates.nats_per_word
    assert rate is not None
    return model.tokens_seen + model.pretraining_tokens, rate.value, rate.ci95, own.kind.value


def _frontier(kept: Kept, output: Path) -> None:
    """Figure 3: quality against diversity, by a judge and by BLEU, over steps and over temperatures."""
    if not _sampled(kept, "frontier"):
        return
    judged, real = _judged(kept, "frontier")
    write_json(output / "frontier-points.json", [asdict(one) for one in (*judged, real)])
    for varied in ("steps", "temperatures"):
        if own := [one for one in judged if one.varied == varied]:
            figures.frontiers(own, real, output / f"frontier-{varied}.png")
    compared = []
    for title, varied, own in _sampled(kept, "frontier"):
        if varied == "temperatures":
            bleu, self_bleu = ([getattr(result, name).mean for *_, result in own] for name in ("bleu4", "self_bleu4"))
            line = figures.Tradeoff(title, self_bleu, bleu, [f"{value:g}" for value, *_ in own])
            compared.append((line, own[0][-1].generation.real))
    if compared:
        lines, others = zip(*compared, strict=True)
        star = figures.Tradeoff(real.name, [others[-1].self_bleu4.value], [others[-1].bleu4.value])
        figures.quality_diversity(lines, star, output / "tradeoffs.png")
        _at_equal_entropy(kept, output)


def _sampled(kept: Kept, group: str) -> list[tuple[str, str, list[tuple[float, str, EvaluationResult]]]]:
    """The evaluations of each system over a sampler's setting: title, what is varied, and (value, name, result)."""
    found: dict[tuple[str, str], list[tuple[float, str, EvaluationResult]]] = {}
    for name in kept.names(group):
        parts = re.fullmatch(r"(.+)-(?:(\d+)-steps|T=([\d.]+))", name)
        if parts is not None:
            title = SYSTEMS[parts[1]].title + (", spindle" if "spindle" in parts[1] else "")
            varied = "steps" if parts[2] else "temperatures"
            own = float(parts[2] or parts[3]), name, kept.result(group, name)
            found.setdefault((title, varied), []).append(own)
    return [(*key, sorted(own, key=lambda point: point[0])) for key, own in sorted(found.items())]


def _judged(
    kept: Kept, group: str, other: dict[str, Any] | None = None
) -> tuple[list[figures.Frontier], figures.Frontier]:
    """Perplexities against entropies, of all systems and of real sentences; from another judge if one is given."""
    lines, sampled = [], _sampled(kept, group)
    one = sampled[0][-1][0][-1].generation
    value = one.judge.real.perplexity if other is None else other["real"]["perplexity"]
    real = figures.Frontier("real sentences", [one.real.entropy_pooled], [value])
    for title, varied, own in sampled:
        texts = [result.generation for *_, result in own]
        found = [one.judge.samples for one in texts]
        points = [(one.perplexity, one.ci95) for one in found]
        if other is not None:
            rows = [other["rows"].get(name) for _, name, _ in own]
            if None in rows:
                continue  # not judged by it
            points = [(row["perplexity"], tuple(row["ci95"])) for row in rows]
        perplexities, intervals = zip(*points, strict=True)
        entropies = [one.samples.entropy_pooled for one in texts]
        settings = [f"{value:g}" for value, *_ in own]
        lines.append(figures.Frontier(title, entropies, perplexities, intervals, settings, varied))
    return lines, real


def _at_equal_entropy(kept: Kept, output: Path) -> None:
    """The judges' perplexities where samples are as varied as real sentences, between two temperatures; by seed."""
    columns, second = {"seed 0": _judged(kept, "frontier")}, kept.source / "frontier1" / "judged.json"
    if _sampled(kept, "frontier1"):
        columns["seed 1"] = _judged(kept, "frontier1")
    if second.exists() and "seed 1" in columns:
        other = read_json(second)
        columns[f"seed 1, {other['judge']}"] = _judged(kept, "frontier1", other)
    found: dict[str, dict[str, tuple[float, str]]] = {}
    texts = _sampled(kept, "frontier")[0][-1][0][-1].generation
    lengths = f"{texts.real.words_per_text:.0f} words instead of {texts.samples.words_per_text:.0f}"
    for column, (lines, real) in columns.items():
        value = real.perplexity[0]
        found.setdefault(f"{real.name} ({lengths})", {})[column] = value, f"{value:.0f}"
        for one in lines:
            own = at_entropy(real.entropy[0], one.entropy, one.perplexity, *zip(*one.intervals, strict=True))
            if one.varied == "temperatures" and own:
                value, low, high = own
                found.setdefault(one.name, {})[column] = value, f"{value:.0f} [{low:.0f}, {high:.0f}]"
    rows = sorted(found.items(), key=lambda item: next(iter(item[1].values()))[0])
    real = columns["seed 0"][1]
    heading = [f"judge's perplexity at an entropy of {real.entropy[0]:.2f}", *columns]
    cells = [(name, *(own.get(column, (0.0, "–"))[1] for column in columns)) for name, own in rows]
    _write(output / "judged.md", heading, cells)


if __name__ == "__main__":
    tyro.cli(report, description=__doc__)
