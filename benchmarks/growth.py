"""Measures how the time and memory of a training step grow with length, batch, vocabulary and parameters.

    python benchmarks/growth.py docs/growth.json docs/growth.png             # on a GPU: BERT, width 384, and around it
    python benchmarks/growth.py growth.json growth.png --device cpu --small  # on a CPU, in a minute

Each quantity is doubled while the others stay fixed. A slope is that of a least-squares line through the points on
log-log axes: 1 is proportional, 2 quadratic. Nothing is compiled unless `--compile` is given, which compiles once per
network.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from diffusionbert.workflows.timing import Machine, Stopwatch
from diffusionbert.workflows.training_work import BUNDLED, OurTraining, TrainingSize

START = replace(BUNDLED, layers=6, sequences=512, length=128, ema=None)  # keeps a GPU busy
SMALL = replace(START, layers=2, width=64, heads=2, vocabulary=1000, sequences=4, length=16)


def sizes(start: TrainingSize) -> Iterator[tuple[str, int, TrainingSize]]:
    """The quantity that is doubled, its value, and the size."""
    for factor in (1, 2, 4, 8):
        yield "length", factor * start.length, replace(start, length=factor * start.length)
        yield "batch", factor * start.sequences, replace(start, sequences=factor * start.sequences)
        yield "vocabulary", factor * start.vocabulary, replace(start, vocabulary=factor * start.vocabulary)
        layers = factor * start.layers
        yield "parameters", 12 * layers * start.width**2, replace(start, layers=layers)


@cache  # all lines share the start
def measured(size: TrainingSize, cpu: bool, compile: bool) -> tuple[float, float | None]:
    """The median milliseconds of a step, and its peak memory in GiB on a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        watch = Stopwatch(OurTraining(size), Machine(torch.device("cpu" if cpu else "cuda"), compile, Path(folder)))
        watch.steps = max(1, watch.steps // 3)
        for _ in range(3):
            watch.take_turn()
    speed = watch.speed(1.0)
    return speed.milliseconds_per_step, speed.memory_gib


def slope(rows: list[dict]) -> float:
    """The slope of a straight line through the logarithms."""
    values, times = np.log([row["value"] for row in rows]), np.log([row["milliseconds"] for row in rows])
    return float(np.polyfit(values, times, 1)[0])


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["quantity"] for row in rows))
    times = [row["milliseconds"] for row in rows]
    ticks = [tick for tick in (10.0**k * digit for k in range(-1, 5) for digit in (1, 2, 5)) if min(times) / 2 < tick]
    ticks = [tick for tick in ticks if tick < 2 * max(times)]
    figure, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3), sharey=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        some = [row for row in rows if row["quantity"] == name]
        values = [row["value"] for row in some]
        axis.loglog(values, [row["milliseconds"] for row in some], "o-")
        axis.set_xticks(values, [f"{value / 1e6:.0f}M" if value >= 1e6 else f"{value:,}" for value in values])
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set(title=f"{name}: slope {slope(some):.2f}", xlabel=name)
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("milliseconds per step")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    rows = []
    for quantity, value, size in sizes(SMALL if options.small else START):
        milliseconds, memory = measured(size, cpu, options.compile)
        rows.append({"quantity": quantity, "value": value, "milliseconds": milliseconds, "memory_gib": memory})
        print(f"{quantity:12} {value:10,} {milliseconds:9.2f} ms", flush=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
