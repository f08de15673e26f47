"""`plot`: draws the validation curves of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from diffusionbert.cli.common import option


@dataclass(frozen=True)
class Plot:
    """Plot the validation curves of runs.

    Example: diffusionbert plot runs/a runs/b --output curves.png
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], option("RUN [RUN ...]")]
    """Run directories."""
    output: Path = Path("curves.png")
    """The image file: .png, .svg or .pdf."""

    def run(self) -> None:
        from diffusionbert.evaluation.compare import shortest_names
        from diffusionbert.reproduce.figures import convergence
        from diffusionbert.reproduce.targets import curve
        from diffusionbert.storage.files import require_writable

        if not self.runs:
            raise ValueError("no run given; give run directories")
        require_writable(self.output.parent)
        names = shortest_names([run.resolve() for run in self.runs])
        convergence([curve(run, name) for run, name in zip(self.runs, names, strict=True)], self.output)
        print(f"written: {self.output}")
