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

from kept import Results, exp
from plan import LONG, LONGEST, SCALED, SHORT
from verdicts import against_exact, length_costs
from wording import figure, grid, kind, missing, nats, number, primary, share

from diffusionbert import figures
from diffusionbert.assessment.report import Evaluation
from diffusionbert.checkpoints import RunFolder
from diffusionbert.experiments import LearnedDiffusion, NextWord, Time
from diffusionbert.paper.systems import SYSTEMS, Start
from diffusionbert.paper.targets import Row, title

PRETRAINING = Path(__file__).parents[2] / "docs" / "bundled_model"
LOGS = {Start.MASKED: "pretraining.jsonl", Start.DECODER: "decoder.jsonl"}
"""Of the networks that pretrained systems were given to start from."""


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
    planned = {f"steps{steps}" for steps in (SHORT, LONG, LONGEST)}
    parts = [
        heading,
        _at_equal_steps(results, known) + missing((), results.absent(*planned)),
        _at_equal_time(results, known),
    ]
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


@final
@dataclass(frozen=True)
class Pretraining:
    """What a start had seen before, and for how long."""

    tokens: int = 0
    seconds: float = 0.0


def pretraining(results: Results, system: str, folder: str = "seed0") -> Pretraining:
    """That of the network it starts from, by its log: of the experiment, if it was made there."""
    start = SYSTEMS[system].start
    if start not in LOGS:
        return Pretraining()
    own = results.root / folder / "pretrained" / start.value / "log.jsonl"
    log = own if own.exists() else PRETRAINING / LOGS[start]
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    tokens = max(int(event["tokens"]) for event in events if "tokens" in event)
    return Pretraining(tokens, events[-1]["time"] - events[0]["time"])


def _at_equal_steps(results: Results, known: dict[str, list[Point]]) -> str:
    budgets = list(results.budgets)
    lines = []
    for system, points in known.items():
        by_steps = {point.steps: point for point in points}
        cells = [figure(by_steps[steps].found) if steps in by_steps else "–" for steps in budgets]
        before = pretraining(results, system).tokens
        tokens = [f"{count / 1e6:,.0f}M" for count in (points[-1].tokens, before, points[-1].tokens + before)]
        lines.append((_name(results, system), kind(points[0].found), *cells, *tokens))
    header = "system", "kind", *(f"{steps:,} steps" for steps in budgets), "tokens at the end", "in pretraining", "both"
    masked, decoder = (pretraining(results, system) for system in ("diffusionbert", "decoder-pretrained"))
    return (
        "### At equal steps\n\nPerplexity a token, seed 0; each budget is a run of its own, with its own warm-up and "
        f"decay. Pretraining was not equal: {masked.tokens / 1e6:.0f}M tokens in {masked.seconds / 60:.1f} minutes for "
        f"the masked network, {decoder.tokens / 1e6:.0f}M in {decoder.seconds / 60:.1f} for the decoder.\n\n"
        f"{grid(header, lines, left=2)}{_against_decoders(results, known)}"
    )


def _against_decoders(results: Results, known: dict[str, list[Point]]) -> str:
    """The ratio of each bound to each exact value, budget by budget."""
    exact = {system: points for system, points in known.items() if kind(points[0].found) == "exact"}
    budgets = sorted({point.steps for system, points in known.items() if system not in exact for point in points})
    lines = []
    for system in (system for system in known if system not in exact):
        for decoder, theirs in exact.items():
            rivals = {point.steps: point.found.scores["exact"] for point in theirs}
            found = {
                point.steps: against_exact(point.found.scores[primary(point.found)], rivals[point.steps])
                for point in known[system]
                if point.steps in rivals
            }
            cells = [share(found[steps]) if steps in found else "–" for steps in budgets]
            lines.append((f"`{system}` : `{decoder}`", *cells))
    if not lines:
        return ""
    header = "bound : exact", *(f"{steps:,} steps" for steps in budgets)
    some = next(iter(exact.values()))[0].found.scores["exact"]
    return (
        "\n\nRatios of perplexities, sentences resampled in pairs: first as they are, then with the length paid for. "
        "Masked systems are told how long a sentence is; decoders are not, nor do they pay for its end. To tell the "
        f"length costs {float(length_costs(some.tokens).mean()):.1f} nats a sentence, by how many of the others are as "
        "long. If even so a bound lies below an exact value (**bold**), the system is better on this text. One above "
        "proves nothing, but the further above, the less likely it is that the bound alone is loose."
        f"\n\n{grid(header, lines)}"
    )


def _timed_as(system: str) -> str:
    """The system whose steps were timed: that with the same kind of network and time, and as many passes a step."""
    objective, time = SYSTEMS[system].objective, SYSTEMS[system].time
    if isinstance(objective, NextWord):
        return "decoder"
    if isinstance(objective, LearnedDiffusion):
        return "genmd4"
    return "d3pm" if time is Time.LAYERS else "diffusionbert"


def tokens_a_second(results: Results, system: str, folder: str) -> list[float]:
    """Of the windows of a log, without the first, which warms up."""
    events = [event for event in RunFolder(results.run(system, folder)).events() if "tokens_per_second" in event]
    return [float(event["tokens_per_second"]) for event in events[1:] or events]


def seconds_a_step(results: Results, system: str) -> list[float]:
    """Alone on the chip, window by window, by the run of the same kind of network that was timed."""
    timed = _timed_as(system)
    windows = tokens_a_second(results, timed, "alone")
    tokens = results.tokens(timed, "alone") / results.experiments("alone")[timed].training.steps
    return sorted(tokens / one for one in windows)


def _at_equal_time(results: Results, known: dict[str, list[Point]]) -> str:
    heading = "### At equal time"
    timed = {system: points for system, points in known.items() if _is_timed(results, system)}
    if "diffusionbert" not in timed:
        return f"{heading}\n\nNot run yet: `alone`, which times the steps."
    windows = {system: seconds_a_step(results, system) for system in timed}
    step = {system: median(found) for system, found in windows.items()}
    budgets = {point.steps: point.steps * step["diffusionbert"] for point in timed["diffusionbert"]}
    lines = []
    for system, points in timed.items():
        cells = [_reached(points, step[system], time) for time in budgets.values()]
        spread = f"{1000 * step[system]:.1f} ({1000 * windows[system][0]:.1f} to {1000 * windows[system][-1]:.1f})"
        lines.append((_name(results, system), kind(points[0].found), spread, *cells))
    header = (
        *("system", "kind", "ms a step, alone"),
        *(f"perplexity a token in {time:.0f} s" for time in budgets.values()),
    )
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(map(_timed_as, timed)))
    return (
        f"{heading}\n\nIn the times that {', '.join(f'{steps:,}' for steps in budgets)} steps of DiffusionBERT take, "
        "without pretraining, compilation and validation. Steps were timed with nothing else on the chip, by short "
        f"runs of {names}, which stand for others of the same network: the median of their windows, and the range, "
        "which is wide, so that times are rough. Between budgets, nats are interpolated over the logarithm of time; "
        f"nothing is said beyond them.\n\n{grid(header, lines, left=2)}"
        + missing(system for system in known if system not in timed)
        + _with_pretraining(results, timed, step)
    )


def _is_timed(results: Results, system: str) -> bool:
    return _timed_as(system) in results.experiments("alone")


def _with_pretraining(results: Results, timed: dict[str, list[Point]], step: dict[str, float]) -> str:
    """What a decoder from scratch reaches in the time that pretraining takes, too."""
    if "decoder" not in timed:
        return ""
    [own] = [point for point in timed["diffusionbert"] if results.budgets[point.steps] == "seed0"]
    time = pretraining(results, "diffusionbert").seconds + own.steps * step["diffusionbert"]
    steps, longest = time / step["decoder"], timed["decoder"][-1]
    value = _interpolated(math.log(time), *_over_time(timed["decoder"], step["decoder"]))
    if value is not None:
        reached = f"there its perplexity is {number(exp(value))} (exact)"
    else:
        words = "more than were run here, but already" if steps > longest.steps else "fewer than were run here:"
        reached = f"{words} after {longest.steps:,} its perplexity is {number(exp(nats(longest.found)))} (exact)"
    return (
        f"\n\nWith pretraining counted, the {own.steps:,} steps of DiffusionBERT take {time / 60:.1f} minutes: as long "
        f"as {steps:,.0f} steps of a decoder from scratch. {reached[0].upper()}{reached[1:]}, and DiffusionBERT's "
        f"{number(exp(nats(own.found)))} (bound)."
    )


def _over_time(points: list[Point], step: float) -> tuple[list[float], list[float]]:
    """Logarithms of seconds, and nats."""
    return [math.log(point.steps * step) for point in points], [nats(point.found) for point in points]


def _reached(points: list[Point], step: float, time: float) -> str:
    """A perplexity; outside of what was measured, none."""
    xs, ys = _over_time(points, step)
    value = _interpolated(math.log(time), xs, ys)
    if value is not None:
        return number(exp(value))
    return "too short" if math.log(time) < xs[0] else "too long"


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
                [point.tokens + is_counted * pretraining(results, system).tokens for point in points],
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
