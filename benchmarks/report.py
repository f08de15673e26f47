"""Makes the tables and figures of docs/results.md from what `experiment.py` kept; needs neither models nor corpora.

    python benchmarks/report.py docs/results docs/results/tables --page docs/results.md     the first edition's
    python benchmarks/report.py docs/results/second docs/results/tables/second              the second edition's

Missing rows are left out. docs/results.md is written by hand; a test checks that every number in its prose occurs in
these tables. `claims.py` has the claims and the rule for their verdicts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import tyro
from claims import SEEDS, Claim, Kept, claim_rows, claims_markdown, difference

from diffusionbert.evaluation.compare import compare
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.networks.loading import NewNetwork
from diffusionbert.recipes import SYSTEMS
from diffusionbert.reproduce import figures
from diffusionbert.reproduce.targets import write_table
from diffusionbert.storage.files import read_json, write_json
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import RunConfig
from diffusionbert.training.log import TrainEvent, ValidationEvent, events_of

Folder = tyro.conf.Positional[Path]


def report(source: Folder, output: Folder, page: Path | None = None) -> None:
    """Write the tables and figures that have rows, and put the tables into the page, between their marks."""
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        kept = Kept(source, Path(scratch))
        _claims(kept, output)
        _setup(kept, output)
        _rates(kept, output)
        _main_table(kept, output)
        _group_tables(kept, output)
        _budgets(kept, output)
        _curve(kept, output)
        _frontier(kept, output)
        _costs(source, output)
    if page is not None:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), output), encoding="utf-8")


def with_tables(page: str, tables: Path) -> str:
    """A page with the tables NAME.md between `<!-- NAME -->` and `<!-- end of NAME -->`."""

    def filled(found: re.Match[str]) -> str:
        table = tables / f"{found[1]}.md"
        inner = table.read_text(encoding="utf-8") if table.exists() else ""
        return f"<!-- {found[1]} -->\n{inner}<!-- end of {found[1]} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end of \1 -->", filled, page, flags=re.DOTALL)


def _write(path: Path, heading: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> None:
    """Writes a Markdown table whose first columns are text and the others numbers; nothing if there are no rows."""
    if lines := [f"| {' | '.join(map(str, row))} |\n" for row in rows]:
        rule = "|" + "---|" * texts + "---:|" * (len(heading) - texts)
        path.write_text(f"| {' | '.join(heading)} |\n{rule}\n{''.join(lines)}", encoding="utf-8")


# ---- tables ---------------------------------------------------------------------------------------------------------


def _claims(kept: Kept, output: Path) -> None:
    """Table 1, and the forest plot of the effects that are also in the paper."""
    rows = list(claim_rows(kept))
    write_json(output / "claims.json", rows)
    (output / "claims.md").write_text(claims_markdown(rows), encoding="utf-8")
    title, effects = "", []
    for row in rows:
        is_variant = str(row["claim"]).startswith("– ")
        title = title if is_variant else str(row["claim"])
        if row["paper"] is None or "too little" in row["verdict"]:
            continue
        name = f"{title} {row['claim']}" if is_variant else title
        low, high = row["interval"]
        effects.append(figures.Effect(name, 100 * row["change"], (100 * low, 100 * high), 100 * row["paper"]))
    if effects:
        figures.forest(effects, output / "forest.png")


def _setup(kept: Kept, output: Path) -> None:
    """How the rows were trained and evaluated, from their own records."""
    rows = []
    for path in sorted(kept.source.glob(f"{SEEDS[0]}/trained/*/")):
        file = next((path / name for name in ("run.json", "experiment.json") if (path / name).exists()), None)
        if file is None:
            continue
        config = RunConfig.from_json(read_json(file), str(file))
        training, network = config.training, config.backbone
        tokens = events_of(path / "log.jsonl", TrainEvent)[-1].tokens_seen
        batch = training.batching.tokens if isinstance(training.batching, TokenBudget) else "–"
        rows.append(
            (
                f"`{path.name}`",
                f"{network.layers} × {network.width}" if isinstance(network, NewNetwork) else "of its start",
                f"{training.steps:,} × {batch:,}",
                training.optimizer,
                f"{training.learning_rate:g}",
                config.objective.num_steps or "–",
                training.ema or "–",
                "–" if tokens is None else f"{tokens / 1e6:.1f}M",
            )
        )
    heading = "row", "layers × width", "steps × tokens", "optimizer", "learning rate", "T", "EMA", "tokens seen"
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


BUDGETS = {"steps600": 600, "seed0": 2000, "steps6000": 6000, "steps16000": 16_000}
"""Training steps of folders of the first edition."""
BUDGETED = "diffusionbert", "diffusionbert-bell", "genmd4", "d3pm", "d3pm-spindle", "decoder", "decoder-pretrained"


def _budgets(kept: Kept, output: Path) -> None:
    """Perplexities over training budgets, and the ratio of DiffusionBERT to D3PM at each."""
    budgets = {folder: steps for folder, steps in BUDGETS.items() if any(kept.has(folder, one) for one in BUDGETED)}
    if len(budgets) < 2:
        return
    rows = []
    for name in BUDGETED:
        cells, kinds = [], set()
        for folder in budgets:
            if not kept.has(folder, name):
                cells.append("–")
                continue
            result = kept.result(folder, name)
            own = result.likelihoods.get("grid") or result.primary
            assert own is not None
            kinds.add(own.kind.value)
            rate = own.rates.perplexity_per_token
            cells.append(f"{rate.value:.1f} [{rate.ci95[0]:.1f}, {rate.ci95[1]:.1f}]")
        rows.append((f"`{name}`", ", ".join(sorted(kinds)), *cells))
    for name in ("d3pm", "d3pm-spindle"):
        cells = []
        for folder in budgets:
            found = difference(kept, Claim("", "", "diffusionbert", name, groups=(folder,)))
            low, high = (0.0, 0.0) if found is None else found.interval
            cells.append("–" if found is None else f"{1 + found.change:.2f} [{1 + low:.2f}, {1 + high:.2f}]")
        rows.append((f"`diffusionbert` : `{name}`", "ratio", *cells))
    heading = "system", "kind", *(f"{steps:,} steps" for steps in budgets.values())
    _write(output / "budgets.md", heading, rows, texts=2)


def _main_table(kept: Kept, output: Path) -> None:
    """The main rows; training runs that differ only in their seed are merged."""
    found = [(seed, name) for seed in SEEDS for name in kept.names(seed) if _is_main(name)]
    results = [kept.result(seed, name) for seed, name in found]
    has_descriptions = any(one.model.seed is not None for one in results)
    if not has_descriptions:  # the first edition does not say what differs between rows, so one seed is used
        found = [(seed, name) for seed, name in found if seed == "seed0"]
        results = results[: len(found)]
    if results:
        names = [name if seed == "seed0" else f"{name} ({seed})" for seed, name in found]
        write_table(output / "main", compare(results, names=names, merge_seeds=has_descriptions))
    _compared(kept, "seed0", [name for name in kept.names("seed0") if _is_other_text(name)], output / "lm1b")


GROUPS = "spindle", "orders", "peers", "bert", "noise", "diffusion-lm", "curve", "frontier"
"""Groups of rows with tables of their own."""


def _group_tables(kept: Kept, output: Path) -> None:
    for group in GROUPS:
        names = kept.names(group)
        _compared(kept, group, [name for name in names if not _is_other_text(name)], output / group)
        _compared(kept, group, [name for name in names if _is_other_text(name)], output / f"{group}-lm1b")


def _compared(kept: Kept, group: str, names: list[str], stem: Path) -> None:
    if names:
        write_table(stem, compare([kept.result(group, name) for name in names], names=names))


def _is_other_text(name: str) -> bool:
    return name.endswith(("-other-text", "-lm1b"))


def _is_main(name: str) -> bool:
    return not _is_other_text(name) and not name.endswith("-steps") and "=" not in name


def _costs(source: Path, output: Path) -> None:
    """GPU minutes and hashes of every row."""
    rows = []
    for path in sorted(source.glob("*/seconds/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        minutes, tokens = record["seconds"] / record["workers"] / 60, record.get("tokens")
        hashes = (f"`{str(record.get(name) or '–')[:12]}`" for name in ("code", "data", "weights"))
        millions = "–" if tokens is None else f"{tokens / 1e6:.1f}M"
        rows.append((f"`{path.parts[-3]}/{path.stem}`", *hashes, f"{minutes:.2f}", millions))
    _write(output / "costs.md", ("row", "code", "data", "weights", "GPU minutes", "tokens"), rows, texts=4)


# ---- figures --------------------------------------------------------------------------------------------------------

CURVES = {
    "D3PM": "d3pm",
    "DiffusionBERT, masking on another text": "other-text",
    "DiffusionBERT, masking on the same text": "same-text",
    "Transformer decoder": "causal",
}
"""The systems of the curve, and the beginning of their rows' names."""


def _curve(kept: Kept, output: Path) -> None:
    """Figure 1: nats against total tokens."""
    curves = []
    for title, prefix in CURVES.items():
        names = [name for name in kept.names("curve") if re.fullmatch(rf"{prefix}-[\d.]+", name)]
        points = sorted(point for name in names if (point := _point(kept.result("curve", name))) is not None)
        if points:
            tokens, nats, intervals, kinds = zip(*points, strict=True)
            curves.append(figures.TokenCurve(title, tokens, nats, kinds[0], intervals))
    if curves:
        write_json(output / "curve-points.json", [asdict(one) for one in curves])
        figures.token_curves(curves, output / "curve.png")


def _point(result: EvaluationResult) -> tuple[int, float, tuple[float, float], str] | None:
    own, model = result.likelihoods.get("grid", result.primary), result.model
    if own is None or model.tokens_seen is None or model.pretraining_tokens is None:
        return None
    rate = own.rates.nats_per_token
    return model.tokens_seen + model.pretraining_tokens, rate.value, rate.ci95, own.kind.value


def _frontier(kept: Kept, output: Path) -> None:
    """Figure 3: quality against diversity, by a judge and by BLEU, over steps and over temperatures."""
    points: dict[tuple[str, str], list[tuple[float, EvaluationResult]]] = {}
    for name in kept.names("frontier"):
        found = re.fullmatch(r"(.+)-(?:(\d+)-steps|T=([\d.]+))", name)
        if found is not None:
            title = SYSTEMS[found[1]].title + (", spindle" if "spindle" in found[1] else "")
            varied = "steps" if found[2] else "temperatures"
            points.setdefault((varied, title), []).append((float(found[2] or found[3]), kept.result("frontier", name)))
    judged, compared, real = [], [], None
    for (varied, title), own in sorted(points.items()):
        values, results = zip(*sorted(own, key=lambda point: point[0]), strict=True)
        settings, texts = [f"{value:g}" for value in values], [one.generation for one in results]
        judgments = [one.judge.samples for one in texts]
        entropies = [one.samples.entropy_per_text for one in texts]
        intervals = [one.ci95 for one in judgments]
        judged.append(
            figures.Frontier(title, entropies, [one.perplexity for one in judgments], intervals, settings, varied)
        )
        if varied == "temperatures":
            bleu, self_bleu = ([getattr(one, name).mean for one in results] for name in ("bleu4", "self_bleu4"))
            compared.append(figures.Tradeoff(title, self_bleu, bleu, settings))
        real = texts[0]
    if real is not None:
        others, judgment = real.real, real.judge.real
        star = figures.Frontier("real sentences", [others.entropy_per_text], [judgment.perplexity])
        write_json(output / "frontier-points.json", [asdict(one) for one in (*judged, star)])
        figures.frontiers(judged, star, output / "frontier.png")
        figures.quality_diversity(
            compared,
            figures.Tradeoff(star.name, [others.self_bleu4.value], [others.bleu4.value]),
            output / "tradeoffs.png",
        )


if __name__ == "__main__":
    tyro.cli(report, description=__doc__)
