"""`reproduce`: makes the paper's tables and figures."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import tyro

from diffusionbert.cli.common import Flag, OptionalPath, OptionalText, print_json, require_device
from diffusionbert.parallel import current
from diffusionbert.reproduce import Request


@dataclass(frozen=True, kw_only=True)
class Reproduce(Request):
    """Reproduce a table or figure of the paper: train and evaluate whatever is missing, then write it.

    Example: diffusionbert reproduce table2 --scale smoke --output reproduction
    """

    target: tyro.conf.Positional[Literal["table1", "table2", "table3", "figure2", "figure3", "figure4", "all"]]
    """table1: a sentence denoised by three systems. table2: main results. table3: steps, seconds, perplexity.
    figure2: spindle curves. figure3: quality and diversity. figure4: validation curves."""
    output: Path = Path("reproduction")
    """The directory for runs, evaluations, tables and figures.
    A second call continues there and skips finished work."""
    device: OptionalText = None
    """The device of evaluations: cpu, cuda, … Default: a GPU if there is one."""
    cache: OptionalPath = None
    """The directory for encoded corpora. Default: the user's cache directory."""
    json: Flag = False
    """Print the paths of the written files as JSON, and nothing else, on standard output."""

    def run(self) -> None:
        from diffusionbert.reproduce.figures import require_matplotlib
        from diffusionbert.reproduce.reproduction import Reproduction
        from diffusionbert.reproduce.targets import TARGETS
        from diffusionbert.training.run import default_cache

        require_device(self.device)
        request = Request(**{field.name: getattr(self, field.name) for field in fields(Request)})
        reproduction = Reproduction(self.output, request, self.cache or default_cache(), self.device)
        chosen = list(TARGETS) if self.target == "all" else [self.target]
        if any(name.startswith("figure") for name in chosen):
            require_matplotlib()  # fail now rather than after training
        written = {name: TARGETS[name](reproduction) for name in chosen}
        if not current().is_main:
            return
        if self.json:
            print_json({name: [str(path) for path in paths] for name, paths in written.items()})
            return
        for paths in written.values():
            for table in (path for path in paths if path.suffix == ".md"):
                print(table.read_text(encoding="utf-8"))
            print(f"written: {', '.join(map(str, paths))}")
