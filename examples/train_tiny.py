"""A minute of training: a tiny model on Python's own documentation, from scratch, and what it then writes.

No corpus to download and no GPU: the texts of `pydoc_data.topics` come with every Python. A model this small, trained
on a thousand sentences for a minute, learns which words stand near each other in that text, and no more.

    python examples/train_tiny.py
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import diffusionbert
from diffusionbert.methods.discrete import DiscreteTimeConfig
from diffusionbert.recipes import tiny
from diffusionbert.schedules import Spindle
from diffusionbert.terminal import show_writing
from diffusionbert.training.run import train


def main() -> None:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(replace(tiny("pydoc"), objective=DiscreteTimeConfig(Spindle(0.3))), run, cache=Path(folder) / "cache")
        model = diffusionbert.load(run)
        for seed in (0, 1, 2):
            show_writing(model.stream(length=16, seed=seed), console, num_lines=5)


if __name__ == "__main__":
    main()
