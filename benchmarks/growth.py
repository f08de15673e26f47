"""How the time and memory of a training step grow with length, batch, vocabulary and parameters.

    python benchmarks/growth.py docs/growth.json docs/growth.png             # on a GPU: BERT, width 384, and around it
    python benchmarks/growth.py growth.json growth.png --device cpu --small  # on a CPU, in a minute

Each quantity is doubled while the others stay. A slope is that of a straight line through the points in logarithms, by
least squares: 1 is proportional, 2 quadratic. Uncompiled unless `--compile`, which compiles once per network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.optim import wait_for
from diffusionbert.training.run import make_accelerator
from diffusionbert.workflows.bench import BUNDLED, Work, our_step

START = replace(BUNDLED, layers=6, sequences=64, length=128, ema=None)
SMALL = replace(START, layers=2, width=64, heads=2, vocabulary=1000, sequences=4, length=16)


def sizes(start: Work) -> Iterator[tuple[str, int, Work]]:
    """What is doubled, its value, and the work."""
    for factor in (1, 2, 4, 8):
        yield "length", factor * start.length, replace(start, length=factor * start.length)
        yield "batch", factor * start.sequences, replace(start, sequences=factor * start.sequences)
        yield "vocabulary", factor * start.vocabulary, replace(start, vocabulary=factor * start.vocabulary)
        layers = factor * start.layers
        yield "parameters", 12 * layers * start.width**2, replace(start, layers=layers)


def measured(work: Work, settings: TrainingConfig, cpu: bool) -> tuple[float, float | None]:
    """The median milliseconds of a step, and its peak memory in GiB on a GPU."""
    accelerator = make_accelerator(settings, None, cpu=cpu)
    with tempfile.TemporaryDirectory() as folder:
        step, _ = our_step(work, settings, Path(folder), accelerator)
        times = []
        for number in range(13):
            wait_for(accelerator.device)
            started = time.perf_counter()
            step()
            wait_for(accelerator.device)
            if number >= 5:
                times.append(1e3 * (time.perf_counter() - started))
            elif number == 0 and not cpu:
                torch.cuda.reset_peak_memory_stats()
    memory = None if cpu else torch.cuda.max_memory_allocated() / 2**30
    return statistics.median(times), memory


def slope(rows: list[dict]) -> float:
    """Of a straight line through the logarithms."""
    values, times = np.log([row["value"] for row in rows]), np.log([row["milliseconds"] for row in rows])
    return float(np.polyfit(values, times, 1)[0])


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["quantity"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3), sharey=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        some = [row for row in rows if row["quantity"] == name]
        values = [row["value"] for row in some]
        axis.loglog(values, [row["milliseconds"] for row in some], "o-")
        axis.set_xticks(values, [f"{value:,}" for value in values], fontsize=7)
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
    settings = TrainingConfig(precision="no" if cpu else "bf16", compile=options.compile)
    rows = []
    for quantity, value, work in sizes(SMALL if options.small else START):
        milliseconds, memory = measured(work, settings, cpu)
        rows.append({"quantity": quantity, "value": value, "milliseconds": milliseconds, "memory_gib": memory})
        print(f"{quantity:12} {value:10,} {milliseconds:9.2f} ms", flush=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
