"""What is drawn: named points as plain numbers, refused here if they could not be drawn. Knows nothing of pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

KINDS = {
    "exact": "exact: −log p itself",
    "bound": "bound: at least −log p",
    "pseudo": "pseudo: of no distribution over sentences",
    "none": "",
}
"""Of a likelihood, by the names of `method.Likelihood`; `none` is for what is no likelihood, such as BLEU."""

Numbers = Sequence[float | int]
"""Any sequence of numbers; kept as a tuple of floats."""


@final
@dataclass(frozen=True)
class Curve:
    """A figure of one system against what it cost."""

    name: str
    xs: Numbers
    ys: Numbers
    kind: str
    """One of `KINDS`."""
    errors: Numbers | None = None
    """Standard errors of the ys."""
    notes: Sequence[str] | None = None
    """A label for each point, such as its number of steps."""

    def __post_init__(self) -> None:
        _keep(self, "xs", "ys", "errors")
        _require_points(self.name, xs=self.xs, ys=self.ys)
        _require_one_each(self.name, len(self.xs), errors=self.errors, notes=self.notes)
        _require_errors(self.name, self.errors)
        if self.kind not in KINDS:
            raise ValueError(f"{self.name!r} is of the kind {self.kind!r}; kinds are {', '.join(KINDS)}")


@final
@dataclass(frozen=True)
class Tradeoff:
    """Quality and diversity of one system's samples as a knob is turned."""

    name: str
    self_bleu: Numbers
    bleu: Numbers
    knobs: Sequence[str] | None = None
    """What the knob said at each point, such as T=0.7 or k=30."""
    self_bleu_errors: Numbers | None = None
    bleu_errors: Numbers | None = None
    """Standard errors."""

    def __post_init__(self) -> None:
        _keep(self, "self_bleu", "bleu", "self_bleu_errors", "bleu_errors")
        _require_points(self.name, self_bleu=self.self_bleu, bleu=self.bleu)
        errors = {"self_bleu_errors": self.self_bleu_errors, "bleu_errors": self.bleu_errors}
        _require_one_each(self.name, len(self.bleu), knobs=self.knobs, **errors)
        for values in errors.values():
            _require_errors(self.name, values)


@final
@dataclass(frozen=True)
class Survival:
    """The probability that a word is still visible, over the fraction of time t/T."""

    word: str
    times: Numbers
    survival: Numbers

    def __post_init__(self) -> None:
        _keep(self, "times", "survival")
        _require_points(self.word, times=self.times, survival=self.survival)
        for name, values in (("times", self.times), ("survival", self.survival)):
            if min(values) < 0 or max(values) > 1:
                raise ValueError(f"{name} of {self.word!r} reach from {min(values)} to {max(values)}; give 0 to 1")


def require_some(series: Sequence[object]) -> None:
    """Refuses an empty picture."""
    if not series:
        raise ValueError("nothing to draw: give at least one line")


def require_positive(name: str, **columns: Numbers) -> None:
    """Refuses what a logarithmic axis cannot show."""
    for column, values in columns.items():
        if min(values) <= 0:
            raise ValueError(
                f"{column} of {name!r} hold {min(values)}, but the axis is logarithmic; leave out what is not above 0"
            )


def _keep(data: object, *names: str) -> None:
    """Makes tuples of floats of fields, whatever kind of sequence was given."""
    for name in names:
        values = getattr(data, name)
        object.__setattr__(data, name, values if values is None else tuple(map(float, values)))


def _require_points(name: str, **columns: Numbers) -> None:
    if not name.strip():
        raise ValueError(f"a line is called {name!r}; give it a name")
    (first, xs), (second, ys) = columns.items()
    if len(xs) != len(ys) or not len(xs):
        raise ValueError(
            f"{name!r} has {len(xs)} {first} and {len(ys)} {second}; give as many of each, and at least one"
        )
    for column, values in columns.items():
        bad = [value for value in values if not math.isfinite(value)]
        if bad:
            raise ValueError(f"{column} of {name!r} hold {bad[0]}, which cannot be drawn; leave such points out")


def _require_one_each(name: str, number: int, **columns: Sequence[object] | None) -> None:
    for column, values in columns.items():
        if values is not None and len(values) != number:
            raise ValueError(f"{name!r} has {number} points and {len(values)} {column}; give one for each, or None")


def _require_errors(name: str, errors: Numbers | None) -> None:
    bad = [error for error in errors or () if not (math.isfinite(error) and error >= 0)]
    if bad:
        raise ValueError(f"a standard error of {name!r} is {bad[0]}; it must be finite and not negative")
