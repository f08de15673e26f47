"""The experiment: keeps what runs on a GPU left behind, and writes docs/results.md from it.

    python benchmarks/results.py keep reproduction docs/results/seed0
    python benchmarks/results.py report

`keep` copies settings, logs, scores and some samples of a reproduction, without weights. `report` needs neither models
nor corpora: every table, picture and verdict comes from the kept files.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch

from diffusionbert import figures
from diffusionbert.assessment.comparison import compare
from diffusionbert.assessment.report import Evaluation, read_evaluation
from diffusionbert.assessment.tables import to_markdown
from diffusionbert.checkpoints import load_tensors, read_json, save_tensors, write_json
from diffusionbert.likelihood.scores import Scores, paired_bootstrap
from diffusionbert.paper.systems import SYSTEMS
from diffusionbert.paper.targets import MAIN, Row, curve, title
from diffusionbert.runs import stored_experiment

FOLDER = Path(__file__).parent.parent / "docs" / "results"
KEPT_SAMPLES = 40
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


# ---- keeping --------------------------------------------------------------------------------------------------------


def keep(source: Path, target: Path) -> None:
    """Copies what a report needs; what was kept before and is not in the source stays."""
    for run in sorted((source / "runs").iterdir()):
        for name in ("experiment.json", "log.jsonl"):
            _copy(run / name, target / "runs" / run.name / name)
    for evaluation in sorted((source / "evaluations").iterdir()):
        folder = target / "evaluations" / evaluation.name
        _copy(evaluation / "evaluation.json", folder / "evaluation.json")
        tensors = load_tensors(evaluation / "scores.safetensors")
        small = {torch.float64: torch.float32, torch.int64: torch.int32}
        save_tensors({k: v.to(small.get(v.dtype, v.dtype)) for k, v in tensors.items()}, folder / "scores.safetensors")
        lines = (evaluation / "samples.txt").read_text(encoding="utf-8").splitlines()
        (folder / "samples.txt").write_text("\n".join(lines[:KEPT_SAMPLES]) + "\n", encoding="utf-8")
    seconds = source / "seconds.json"
    if seconds.exists():
        kept = target / "seconds.json"
        before = read_json(kept) if kept.exists() else {}
        write_json(kept, before | read_json(seconds))
    for name in ("table1.json", "figure2.json"):
        if (source / name).exists():
            _copy(source / name, target / name)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


# ---- what was found -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The kept reproductions, one for each seed."""

    folders: Sequence[Path]

    def evaluation(self, key: str, seed: int = 0) -> Evaluation | None:
        """How a row did; None if it was not run."""
        folder = self.folders[seed] / "evaluations" / key
        return read_evaluation(folder) if (folder / "evaluation.json").exists() else None

    def scores(self, key: str, way: str, seed: int = 0) -> Scores | None:
        """The nats of a row by one way of scoring."""
        found = self.evaluation(key, seed)
        return None if found is None else found.scores.get(way)

    def seeds(self, key: str) -> list[int]:
        """Those with which a row was run."""
        return [seed for seed in range(len(self.folders)) if self.evaluation(key, seed) is not None]

    def rows(self) -> list[Row]:
        """The rows of the main table that were run."""
        return [row for row in MAIN if self.evaluation(row.key) is not None]

    def title(self, row: Row) -> str:
        """What a table calls a row."""
        return title(row, stored_experiment(self.folders[0] / "runs" / row.system))


def nats(scores: Scores) -> float:
    """A token."""
    return float(scores.nats.sum() / scores.tokens.sum())


# ---- claims ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What was measured, and what follows."""

    figures: str
    verdict: str


Check = Callable[[Results], Finding | None]
"""None if its rows were not run."""


def lower(better: str, worse: str, way: str) -> Check:
    """The first has fewer nats a token than the second, on the same sentences, over all seeds."""

    def check(results: Results) -> Finding | None:
        seeds = [seed for seed in results.seeds(better) if seed in results.seeds(worse)]
        pairs = [(results.scores(better, way, seed), results.scores(worse, way, seed)) for seed in seeds]
        known = [(first, second) for first, second in pairs if first is not None and second is not None]
        if not known:
            return None
        differences = [paired_bootstrap(first, second) for first, second in known]
        words = ", ".join(
            f"{first_nats:.3f} against {second_nats:.3f} (difference {found.value:+.3f} [{found.low:+.3f}, "
            f"{found.high:+.3f}])"
            for (first_nats, second_nats), found in zip(
                ((nats(first), nats(second)) for first, second in known), differences, strict=True
            )
        )
        if all(found.high < 0 for found in differences):
            verdict = "holds"
        elif all(found.low > 0 for found in differences):
            verdict = "does not hold"
        else:
            verdict = "undecided"
        return Finding(f"{better} against {worse}, {known[0][0].kind.value} ({way}), nats a token: {words}", verdict)

    return check


def all_of(*checks: Check) -> Check:
    """Every part must hold."""

    def check(results: Results) -> Finding | None:
        found = [one(results) for one in checks]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        verdicts = [one.verdict for one in known]
        verdict = "holds" if set(verdicts) == {"holds"} else "; ".join(verdicts)
        return Finding(" ".join(f"({n}) {one.figures}." for n, one in enumerate(known, start=1)), verdict)

    return check


def converges_faster(results: Results) -> Finding | None:
    """At every validation the pretrained network is below the one from scratch."""
    runs = {name: results.folders[0] / "runs" / name for name in ("diffusionbert", "d3pm-tad", "d3pm")}
    if not all((run / "log.jsonl").exists() for run in runs.values()):
        return None
    curves = {name: curve(run, name) for name, run in runs.items()}
    scratch = min((curves["d3pm"], curves["d3pm-tad"]), key=lambda one: one.ys[-1])
    pretrained = curves["diffusionbert"]
    below = all(mine < theirs for mine, theirs in zip(pretrained.ys[1:], scratch.ys[1:], strict=True))
    reached = next((x for x, y in zip(pretrained.xs, pretrained.ys, strict=True) if y < scratch.ys[-1]), None)
    words = (
        f"validation bound {', '.join(f'{y:.2f}' for y in pretrained.ys)} pretrained, "
        f"{', '.join(f'{y:.2f}' for y in scratch.ys)} from scratch ({scratch.name}) at steps "
        f"{', '.join(f'{x:.0f}' for x in pretrained.xs)}; the pretrained one is below the other's end at step {reached}"
    )
    return Finding(words, "holds" if below else "does not hold")


def spindle_gain(results: Results) -> Finding | None:
    """The strict bound and the paper's quantity, each in per cent of perplexity."""
    names = ("diffusionbert", "diffusionbert-spindle", "diffusionbert-spindle-sentence", "diffusionbert-spindle-paper")
    found = [results.scores(name, "grid") for name in names]
    if any(one is None for one in found):
        return None
    base, *others = [nats(one) for one in found if one is not None]
    labels = "corpus mean, strict", "sentence mean, strict", "by the paper's quantity"
    gains = [1 - torch.tensor(other - base).exp().item() for other in others]
    words = ", ".join(f"{label} {100 * gain:+.1f} %" for label, gain in zip(labels, gains, strict=True))
    strict = max(gains[:2])
    verdict = "holds" if strict > 0.1 else "holds only by the paper's quantity" if gains[2] > 0.1 else "does not hold"
    return Finding(f"gain in perplexity a token over linear: {words}", verdict)


def more_steps(results: Results) -> Finding | None:
    """The bound over few and many steps."""
    found = {steps: results.scores(f"diffusionbert-{steps}-steps", "grid") for steps in (2, 8, 16, 64, 128, 512)}
    if any(one is None for one in found.values()):
        return None
    by_steps = {steps: nats(one) for steps, one in found.items() if one is not None}
    ratio = torch.tensor(by_steps[512] - by_steps[128]).exp().item()
    words = ", ".join(f"{steps} steps {torch.tensor(value).exp().item():.1f}" for steps, value in by_steps.items())
    return Finding(f"perplexity a token (bound): {words}", "holds" if ratio > 0.95 else "does not hold")


def random_order(results: Results) -> Finding | None:
    """BLEU and self-BLEU of BERT-Mouth in both orders."""
    found = [results.evaluation(key) for key in ("bert-mouth", "bert-mouth-left-to-right")]
    if any(one is None for one in found):
        return None
    bleu = [one.bleu4.mean for one in found if one is not None]
    repeated = [one.self_bleu4.mean for one in found if one is not None]
    words = f"BLEU-4 {bleu[0]:.3f} against {bleu[1]:.3f}, self-BLEU {repeated[0]:.3f} against {repeated[1]:.3f}"
    better = bleu[0] > bleu[1], repeated[0] < repeated[1]
    return Finding(words, "holds" if all(better) else "does not hold" if not any(better) else "in one of two figures")


def across_kinds(first: str, first_way: str, second: str, second_way: str) -> Check:
    """Perplexities of different kinds side by side, without a test: a bound may be above what it bounds."""

    def check(results: Results) -> Finding | None:
        one, other = results.scores(first, first_way), results.scores(second, second_way)
        if one is None or other is None:
            return None
        words = (
            f"{first} {nats(one):.3f} ({one.kind.value}), {second} {nats(other):.3f} ({other.kind.value}) nats a token"
        )
        return Finding(words, f"{first} is lower" if nats(one) < nats(other) else f"{second} is lower")

    return check


CLAIMS: dict[str, Check] = {
    "Pretraining converges faster and further": converges_faster,
    "30 % of the budget suffices": across_kinds("diffusionbert-30-percent", "grid", "diffusionbert", "grid"),
    "TAD beats PTE beats LTE when pretrained": all_of(
        lower("diffusionbert", "diffusionbert-pte", "grid"), lower("diffusionbert-pte", "diffusionbert-lte", "grid")
    ),
    "TAD hurts from scratch": lower("d3pm", "d3pm-tad", "grid"),
    "The spindle gains 18–19 %": spindle_gain,
    "The spindle gains for D3PM (5.9 % in the paper's own table)": lower("d3pm-spindle", "d3pm", "grid"),
    "More steps do not help much": more_steps,
    "DiffusionBERT beats BERT-Mouth": lower("diffusionbert", "bert-mouth", "continuous"),
    "DiffusionBERT beats Diffusion-LM": across_kinds("diffusionbert", "grid", "diffusion-lm", "vectors"),
    "Random order beats left to right for BERT-Mouth": random_order,
    "Comparable with a decoder from scratch": across_kinds("diffusionbert", "continuous", "decoder", "exact"),
    "Behind a pretrained decoder": across_kinds("diffusionbert", "continuous", "decoder-pretrained", "exact"),
    "Diffusion-LM does not profit from BERT initialisation": lower("diffusion-lm", "diffusion-lm-bert", "vectors"),
}


# ---- the report -----------------------------------------------------------------------------------------------------


def report() -> None:
    """Writes the part of docs/results.md between the marks, and the pictures."""
    results = Results(sorted(FOLDER.glob("seed?")))
    parts = [main_table(results), other_text(results), seeds(results), claims(results), curves(results), costs(results)]
    page = FOLDER.parent / "results.md"
    begin, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, end = rest.partition(END)
    body = "\n\n".join(part for part in parts if part)
    page.write_text(f"{begin}{BEGIN}\n\n{body}\n\n{END}{end}", encoding="utf-8")


def main_table(results: Results) -> str:
    """Table 2, and the rows that are missing."""
    rows = results.rows()
    folders = [results.folders[0] / "evaluations" / row.key for row in rows]
    table = to_markdown(compare(folders, names=[results.title(row) for row in rows]))
    missing = [row.key for row in MAIN if row not in rows]
    note = f"\n\nNot run: {', '.join(missing)}." if missing else ""
    return f"## Main results (table 2)\n\n{table}{note}"


def other_text(results: Results) -> str:
    """The same on text of another kind."""
    rows = [row for row in results.rows() if results.evaluation(f"{row.system}-other-text") and not row.note]
    folders = [results.folders[0] / "evaluations" / f"{row.system}-other-text" for row in rows]
    lines = ["## Out of domain", "", "| system | kind | nats a token | perplexity a token |", "|---|---|---:|---:|"]
    for row, folder in zip(rows, folders, strict=True):
        for way, plain in read_json(folder / "evaluation.json")["likelihoods"].items():
            low, high = plain["ci95"]["perplexity_per_token"]
            lines.append(
                f"| {results.title(row)} | {plain['likelihood']} ({way}) | {plain['nats_per_token']:.3f} | "
                f"{_perplexity(plain['perplexity_per_token'])} [{_perplexity(low)}, {_perplexity(high)}] |"
            )
    return "\n".join(lines) if rows else ""


def _perplexity(value: float | None) -> str:
    return "∞" if value is None else f"{value:.1f}" if value < 1e6 else f"{value:.1e}"


def seeds(results: Results) -> str:
    """Rows that were run with several seeds."""
    lines = [
        "## Seeds",
        "",
        "| row | way | nats a token by seed | mean | standard deviation |",
        "|---|---|---|---:|---:|",
    ]
    for row in results.rows():
        own = results.evaluation(row.key)
        assert own is not None
        for way in own.scores:
            found = [results.scores(row.key, way, seed) for seed in results.seeds(row.key)]
            values = [nats(one) for one in found if one is not None]
            if len(values) > 1:
                cells = ", ".join(f"{value:.3f}" for value in values)
                lines.append(f"| {row.key} | {way} | {cells} | {mean(values):.3f} | {stdev(values):.3f} |")
    return "\n".join(lines) if len(lines) > 4 else ""


def claims(results: Results) -> str:
    """The paper's claims, one by one."""
    lines = ["## The paper's claims", "", "| claim | what was measured | verdict |", "|---|---|---|"]
    for words, check in CLAIMS.items():
        found = check(results) or Finding("", "not run yet")
        lines.append(f"| {words} | {found.figures} | **{found.verdict}** |")
    return "\n".join(lines)


def curves(results: Results) -> str:
    """Figure 4: validation while training, of all systems on masks that were run."""
    names = ("d3pm", "d3pm-tad", "d3pm-spindle", "diffusionbert-lte", "diffusionbert-pte", "diffusionbert")
    rows = [row for row in results.rows() if row.system in names]
    if not rows:
        return ""
    runs = [curve(results.folders[0] / "runs" / row.system, results.title(row)) for row in rows]
    figures.convergence(runs, FOLDER / "convergence.png")
    return "## While training (figure 4)\n\n![validation while training](results/convergence.png)"


def costs(results: Results) -> str:
    """What each row took, and what its weights are."""
    file = results.folders[0] / "seconds.json"
    spent = read_json(file) if file.exists() else {}
    lines = [
        "## Costs and hashes",
        "",
        "| row | training, s | evaluation, s | weights, sha256 |",
        "|---|---:|---:|---|",
    ]
    for row in results.rows():
        found = results.evaluation(row.key)
        assert found is not None
        own = spent.get(row.key, {})
        seconds = [f"{own[name]:.0f}" if name in own else "–" for name in ("train", "evaluate")]
        lines.append(f"| {row.key} | {' | '.join(seconds)} | `{found.report['weights']['sha256'][:16]}` |")
    data = next((read_json(path) for path in FOLDER.glob("seed0/evaluations/*/evaluation.json")), None)
    if data is not None:
        lines += ["", f"Test text: sha256 `{data['data']['corpus_sha256']}`. Systems: {len(SYSTEMS)} known."]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep")
    keeping.add_argument("source", type=Path)
    keeping.add_argument("target", type=Path)
    commands.add_parser("report")
    options = parser.parse_args()
    keep(options.source, options.target) if options.command == "keep" else report()
