"""Beyond the paper: what more training buys, at equal steps, at equal time, and with pretraining counted.

Bounds and exact values are of different kinds; they stand in one table, each with its kind, and in separate panels.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import final

from kept import NotRun, Results, exp
from plan import SCALED
from wording import figure, grid, kind, missing, nats, number, primary

from diffusionbert import figures
from diffusionbert.assessment.report import Evaluation
from diffusionbert.checkpoints import RunFolder
from diffusionbert.experiments import NextWord, Time
from diffusionbert.paper.systems import SYSTEMS, Start
from diffusionbert.paper.targets import Row, title

PRETRAINING = Path(__file__).parents[2] / "docs" / "bundled_model"
LOGS = {Start.MASKED: "pretraining.jsonl", Start.DECODER: "decoder.jsonl"}
"""Of the networks that pretrained systems start from."""


@final
@dataclass(frozen=True)
class Point:
    """A system trained for so many steps."""

    steps: int
    tokens: int
    found: Evaluation

    @property
    def standard_error(self) -> float:
        """Of nats a token, over sentences and draws."""
        plain = self.found.report["likelihoods"][primary(self.found)]
        return float(plain["standard_error_nats_per_token"]["total"])


def beyond(results: Results, pictures: Path) -> str:
    """The whole section."""
    heading = "## Beyond the paper: what more training buys"
    points = {system: _points(results, system) for system in SCALED}
    known = {system: found for system, found in points.items() if found}
    if not known:
        return f"{heading}{missing(SCALED)}"
    absent = [
        f"`{system}` in {steps:,} steps"
        for steps, folder in results.budgets.items()
        for system in SCALED
        if not results.has(system, folder)
    ]
    if len(results.budgets) < 2:
        absent.append("other budgets than the first")
    parts = [heading, _at_equal_steps(results, known) + missing((), absent), _at_equal_time(results, known)]
    if len(results.budgets) > 1:
        parts.append(_pictures(results, known, pictures))
    return "\n\n".join(part for part in parts if part)


def _points(results: Results, system: str) -> list[Point]:
    return [
        Point(steps, results.tokens(system, folder), results.evaluation(system, folder))
        for steps, folder in results.budgets.items()
        if results.has(system, folder)
    ]


def _name(results: Results, system: str) -> str:
    folder = next(folder for folder in results.budgets.values() if results.has(system, folder))
    return title(Row(system), results.experiments(folder)[system])


def pretraining_tokens(system: str) -> int:
    """Those that its start was trained on before."""
    log = LOGS.get(SYSTEMS[system].start)
    if log is None:
        return 0
    events = map(json.loads, (PRETRAINING / log).read_text(encoding="utf-8").splitlines())
    return max(int(event["tokens"]) for event in events if "tokens" in event)


def _at_equal_steps(results: Results, known: dict[str, list[Point]]) -> str:
    budgets = list(results.budgets)
    lines = []
    for system, points in known.items():
        by_steps = {point.steps: point for point in points}
        cells = [figure(by_steps[steps].found) if steps in by_steps else "–" for steps in budgets]
        before = pretraining_tokens(system)
        tokens = [f"{count / 1e6:,.0f}M" for count in (points[-1].tokens, before, points[-1].tokens + before)]
        lines.append((_name(results, system), kind(points[0].found), *cells, *tokens))
    header = "system", "kind", *(f"{steps:,} steps" for steps in budgets), "tokens at the end", "in pretraining", "both"
    return (
        "### At equal steps\n\nPerplexity a token, seed 0; each budget is a run of its own, with its own warm-up and "
        f"decay.\n\n{grid(header, lines, left=2)}"
    )


def seconds_a_step(results: Results, system: str) -> float:
    """Alone on the chip, by the run of the same kind of network that was timed; the first lines of a log warm up."""
    objective, time = SYSTEMS[system].objective, SYSTEMS[system].time
    timed = "decoder" if isinstance(objective, NextWord) else "d3pm" if time is Time.LAYERS else "diffusionbert"
    events = [event for event in RunFolder(results.run(timed, "alone")).events() if "tokens_per_second" in event]
    tokens = events[-1]["tokens"] / events[-1]["step"]
    return float(tokens / median(event["tokens_per_second"] for event in events[1:] or events))


def _at_equal_time(results: Results, known: dict[str, list[Point]]) -> str:
    heading = "### At equal time"
    try:
        step = {system: seconds_a_step(results, system) for system in known}
    except NotRun:
        return f"{heading}\n\nNot run yet: `alone`, which times the steps."
    full = next((steps for steps, folder in results.budgets.items() if folder == "seed0"), min(results.budgets))
    time = full * step.get("diffusionbert", next(iter(step.values())))
    lines = []
    for system, points in known.items():
        xs = [math.log(point.steps * step[system]) for point in points]
        value = _interpolated(math.log(time), xs, [nats(point.found) for point in points])
        cells = (
            f"{1000 * step[system]:.1f}",
            f"{time / step[system]:,.0f}",
            "–" if value is None else number(exp(value)),
        )
        lines.append((_name(results, system), kind(points[0].found), *cells))
    header = "system", "kind", "milliseconds a step", f"steps in {time:.0f} s", "perplexity a token"
    return (
        f"{heading}\n\nSteps were timed with nothing else on the chip. In the time that {full:,} steps of "
        "DiffusionBERT take; between budgets, nats are interpolated over the logarithm of time.\n\n"
        + grid(header, lines, left=2)
    )


def _interpolated(x: float, xs: list[float], ys: list[float]) -> float | None:
    """None outside of what was measured, but for a hundredth."""
    if not xs[0] - 0.01 <= x <= xs[-1] + 0.01:
        return None
    for low, high, left, right in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if x <= high:
            return left + (right - left) * (x - low) / (high - low)
    return ys[-1]


def _pictures(results: Results, known: dict[str, list[Point]], pictures: Path) -> str:
    for name, is_counted in (("scaling.png", False), ("scaling-with-pretraining.png", True)):
        curves = [
            figures.Curve(
                _name(results, system),
                [point.tokens + is_counted * pretraining_tokens(system) for point in points],
                [nats(point.found) for point in points],
                kind(points[0].found),
                [point.standard_error for point in points],
            )
            for system, points in known.items()
        ]
        words = "training tokens, pretraining counted" if is_counted else "training tokens"
        figures.scaling(curves, pictures / name, x=words)
    return (
        "### Tokens\n\nNats a token against the tokens of training, both axes logarithmic; bounds and exact values "
        "have panels of their own. First the tokens of this training alone, then with those of pretraining.\n\n"
        "![tokens](results/scaling.png)\n\n![tokens, with pretraining](results/scaling-with-pretraining.png)"
    )
