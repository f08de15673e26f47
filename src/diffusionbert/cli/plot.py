"""`plot`: the validations of runs during training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Plot:
    """Draw the validations of runs while they were trained.

    Example: diffusionbert plot runs/a runs/b --output curves.png
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    output: Path = Path("curves.png")
    """A .png, .svg or .pdf file."""

    def run(self) -> None:
        """Says where the picture is."""
        from diffusionbert.evaluation.compare import shortest_names
        from diffusionbert.reproduce.figures import convergence
        from diffusionbert.reproduce.targets import curve
        from diffusionbert.storage.files import require_writable

        if not self.runs:
            raise ValueError("there is no run to be drawn; give run folders")
        require_writable(self.output.parent)
        names = shortest_names([run.resolve() for run in self.runs])
        convergence([curve(run, name) for run, name in zip(self.runs, names, strict=True)], self.output)
        print(f"written: {self.output}")
