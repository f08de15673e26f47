"""Words and numbers of docs/results.md: tables of Markdown, perplexities with their intervals, what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kept import nats_of
from verdicts import AgainstExact, Interval

from diffusionbert.assessment.report import EvaluationResult


def missing(names: Iterable[str], more: Iterable[str] = ()) -> str:
    """A line that says what is to come, if anything is."""
    listed = ", ".join([*(f"`{name}`" for name in names), *more])
    return f"\n\nNot run yet: {listed}." if listed else ""


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table of Markdown, whose first columns are words."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * left}{'---:|' * (len(header) - left)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def several(count: int, noun: str) -> str:
    """One row, two rows."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number(value: float) -> str:
    """A perplexity."""
    return f"{value:.1f}" if value < 1e5 else f"{value:.1e}" if math.isfinite(value) else "∞"


def primary(found: EvaluationResult) -> str:
    """The way by which a row is shown where there is room for one: over its grid of steps, if it has one."""
    return "grid" if "grid" in found.scores else next(iter(found.scores))


def kind(found: EvaluationResult) -> str:
    """Of its likelihood by that way."""
    return found.scores[primary(found)].kind.value


def nats(found: EvaluationResult) -> float:
    """A token, by that way."""
    return nats_of(found.scores[primary(found)])


def figure(found: EvaluationResult, way: str | None = None) -> str:
    """Its perplexity by that way or another, with its interval."""
    measured = found.likelihoods[way or primary(found)].rates.perplexity_per_token
    assert measured.ci95 is not None
    low, high = measured.ci95
    return f"{number(measured.value)} [{number(low)}, {number(high)}]"


def times(apart: Interval) -> str:
    """A difference of nats as a ratio of perplexities, with its interval."""
    value, low, high = (f"{math.exp(end):.3f}" for end in (apart.value, apart.low, apart.high))
    return f"{value} [{low}, {high}]"


def share(found: AgainstExact) -> str:
    """A bound as a share of an exact perplexity, then with the length paid for; bold if that proves it better."""
    words = f"{times(found.given)}, {times(found.charged)}"
    return f"**{words}**" if found.proves else words


def broken(*commands: str) -> Iterable[str]:
    """Commands, broken where they get long."""
    for command in commands:
        line = ""
        # An option stays with its value.
        for word in command.replace(" --", "\n--").split("\n") if " --" in command else command.split():
            if len(line) + len(word) > 105:
                yield f"{line} \\"
                line = "   "
            line = f"{line} {word}" if line else word
        yield line
