"""A custom noise schedule: trained, exported, loaded again, sampled, evaluated and compared.

A schedule is a frozen dataclass with `survival` and `masking_density`, registered by name. The name also works on the
command line: `diffusionbert train --plugin custom_schedule --schedule quadratic:bend=0.5 …`.

    python examples/custom_schedule.py --steps 40
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import diffusionbert as db
from diffusionbert.diffusion.schedules import NoiseSchedule
from diffusionbert.diffusion.shapes import Values


@db.register("quadratic")
@dataclass(frozen=True)
class Quadratic(NoiseSchedule):
    """ᾱ_t = (1 - t)(1 + bt), -1 ≤ b ≤ 1: with b > 0, tokens are masked later than under the linear schedule."""

    bend: float = 0.5

    def survival(self, t: Values, relative_information: Values) -> Values:
        return (1 - t) * (1 + self.bend * t) + torch.zeros_like(relative_information)

    def masking_density(self, t: Values, relative_information: Values) -> Values:
        return 1 - self.bend + 2 * self.bend * t + torch.zeros_like(relative_information)


def main(steps: int, folder: Path) -> None:
    results = []
    for schedule in ("linear", "quadratic:bend=0.5"):
        output = folder / schedule.partition(":")[0]
        run = db.train("pydoc", output, schedule=schedule, steps=steps, cache=folder / "cache")
        model = db.load(run.path)
        print(f"{model.engine.config.objective}: {model.generate(length=12, steps=16, seed=0)[0]}")
        results.append(db.evaluate(model, "pydoc", sentences=32, samples=16, length=12, steps=16, max_draws=8))
    print(db.compare(results, names=["linear", "quadratic"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args().steps, Path(folder))
