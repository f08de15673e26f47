"""What axes say: their labels, and few, round and short ticks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS = [1, 2, 2.5, 5, 10]
"""What even ticks may differ by, times a power of ten."""


def say(axes: Axes, x: str, y: str) -> None:
    """Labels both axes, once all is drawn."""
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y, parse_math=False)
    for axis in (axes.xaxis, axes.yaxis):
        (_log_ticks if axis.get_scale() == "log" else _ticks)(axis)


def _ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

    axis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    is_large = max(map(abs, axis.get_view_interval())) >= 1000
    # Below a thousand all ticks of an axis have as many decimals.
    axis.set_major_formatter(FuncFormatter(short) if is_large else ScalarFormatter(useOffset=False))


def _log_ticks(axis: Any) -> None:
    """Round numbers: powers of ten over decades, closer ones where a scale spans less."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    # Kept as it is: around a single value, matplotlib would choose another stretch for these ticks, and show none.
    axis.axes.set(**{f"{axis.axis_name}lim": (low, high)})
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [
        *([digit * 10.0**decade for decade in decades for digit in digits] for digits in ((1,), (1, 3), (1, 2, 5))),
        list(MaxNLocator(6, steps=_STEPS).tick_values(low, high)),
    ]
    inside = [[tick for tick in ticks if low <= tick <= high] for ticks in candidates]
    axis.set_major_locator(FixedLocator(next((ticks for ticks in inside if len(ticks) >= 3), inside[-1])))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(short))


def short(value: float, _: object = None) -> str:
    """A number as a tick says it: 0.05, 2.5, 500, 20k, 1.5M, 3B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")
