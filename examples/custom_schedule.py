"""A noise schedule of your own: registered by name, trained, opened again and sampled.

ᾱ_t = 1 - t^p masks few tokens early for p > 1. A registered name is all that JSON and the command line need: `train
--schedule power-of-time:power=2` finds it if the module is imported or announced as an entry point of the group
`diffusionbert.schedules`.

    python examples/custom_schedule.py
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import diffusionbert
from diffusionbert.diffusion.schedules import NoiseSchedule
from diffusionbert.diffusion.shapes import Values
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.recipes import tiny
from diffusionbert.registry import register
from diffusionbert.training.run import train


@register("power-of-time")
@dataclass(frozen=True)
class PowerOfTime(NoiseSchedule):
    """ᾱ_t = 1 - t^p, the same for all tokens."""

    power: float = 2.0

    def survival(self, t: Values, relative_information: Values) -> Values:
        """1 - t^p."""
        return 1 - t**self.power + torch.zeros_like(relative_information)

    def decay(self, t: Values, relative_information: Values) -> Values:
        """p·t^(p-1)."""
        return self.power * t ** (self.power - 1) + torch.zeros_like(relative_information)


def main(steps: int = 800) -> None:
    """Trains, opens the run again and generates."""
    config = replace(tiny("pydoc"), objective=DiscreteTimeConfig(PowerOfTime(), num_steps=128))
    config = replace(config, training=replace(config.training, steps=steps))
    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run", cache=Path(folder) / "cache")
        for validation in run.history:
            print(validation)
        model = diffusionbert.load(run.path)
        print(model.engine.config.objective)
        print(*model.generate(num_return_sequences=2, length=16), sep="\n")


if __name__ == "__main__":
    main()
