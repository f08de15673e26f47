"""`bench`: measures how fast this machine trains, generates and scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from diffusionbert.cli.common import Flag, OptionalPath, OptionalText, option, print_json, require_device
from diffusionbert.reporting import progress_line


@dataclass(frozen=True)
class Bench:
    """Measure the speed of training, generation and scoring on this machine, against references.

    Rows: train-base, train-spindle, train-paper-batch, train-bundled, train-modernbert, train-packed (on a CPU, only
    the last three, at a small size); on a GPU, sample-32, sample-32-eager, sample-256, sample-1, sample-forwards,
    sample-ancestral, sample-spindle; on a CPU, sample-cpu-1, sample-cpu-32, sample-cpu-100, the same with -bounded
    (fewer calls at a bounded error), sample-cpu-1-entropy and sample-cpu-32-entropy (after a prompt, against exact),
    sample-cpu-32-float32, score-cpu, score-cpu-int8. On a GPU, training and most sampling are compiled, which takes
    about a minute per row.

    Example: diffusionbert bench --only train-bundled train-modernbert
    """

    only: Annotated[tuple[str, ...], option("[ROW ...]")] = ()
    """The rows to measure. Default: all."""
    device: OptionalText = None
    """The device: cpu, cuda, cuda:1, … Default: a GPU if there is one."""
    rounds: int = 5
    """The number of turns of each program and its reference; the median is reported."""
    eager: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Do not compile; on a CPU, nothing is compiled anyway."""
    output: OptionalPath = None
    """A JSON file for the results, updated after every row."""
    json: Flag = False
    """Print one JSON object, and nothing else, on standard output."""

    def run(self) -> None:
        from diffusionbert.storage.files import require_writable, write_json
        from diffusionbert.storage.schema import to_json
        from diffusionbert.workflows.bench import BenchResult, bench

        require_device(self.device)
        if self.output is not None:
            require_writable(self.output.parent)

        def write(result: BenchResult) -> None:
            if self.output is not None:
                write_json(self.output, to_json(result))

        with progress_line(None) as show:
            result = bench(
                self.only,
                device=self.device,
                rounds=self.rounds,
                compile=False if self.eager else None,
                progress=lambda row, done, _: show(done, row),
                on_row=write,
            )
        print_json(to_json(result)) if self.json else print(result.table())
