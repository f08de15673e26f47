"""A minute of training: a tiny model on Python's own documentation, from scratch, and the text it then generates.

This needs no corpus download and no GPU: `pydoc_data.topics` comes with every Python. A model this small, trained on a
thousand sentences for a minute, learns which words occur near each other in that text, and little more.

    python examples/train_tiny.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

import diffusionbert as db
from diffusionbert.cli.common import show_generation
from diffusionbert.diffusion.schedules import Spindle
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig


def main(steps: int) -> None:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        db.train("pydoc", run, objective=DiscreteTimeConfig(Spindle(0.3)), steps=steps, cache=Path(folder) / "cache")
        model = db.load(run)
        for seed in (0, 1, 2):
            show_generation(model.stream(length=16, seed=seed), console, num_lines=5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="training steps")
    main(parser.parse_args().steps)
