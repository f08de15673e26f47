"""`evaluate`: a model on held-out text: likelihood, BLEU, diversity, judges, speed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diffusionbert.cli.common import WithModel, print_json, require_device
from diffusionbert.cli.generate import parse_length

if TYPE_CHECKING:
    from diffusionbert.reporting import Progress as ProgressCallback


@dataclass(frozen=True)
class Evaluate(WithModel):
    """Evaluate a model on a corpus: likelihood, BLEU, diversity, judges, speed, each with protocol and interval.

    Example: diffusionbert evaluate --model runs/tiny --data test.txt --samples 100
    """

    data: str | None = None
    """A corpus as for train: its test split; of the model's own training text what was held out; else all of it."""
    split: Literal["validation", "test", "all"] | None = None
    """Another split of it."""
    field: str | None = None
    """The field of JSON lines that holds the text."""
    cased: bool = False
    """Keep upper case; else as the model was trained."""
    detokenise: bool = False
    """Undo tokenised text such as LM1B's, also if the model's training did not."""
    sentences: int | None = None
    """Number of sentences to score, always the same ones; all by default. BLEU is against all in any case."""
    samples: int = 1000
    """Number of samples for BLEU and everything else; as many again are generated for self-BLEU."""
    length: str | None = None
    """Tokens of a sample: a number, a range such as 10-30, or corpus, which draws lengths from the training text;
    by default 64, as in the paper, or the model's maximum."""
    steps: int = 128
    """Steps from noise to text."""
    top_k: int | None = 30
    """Sample from this many likeliest tokens; 0 for all."""
    sampler: str | None = None
    """As for generate."""
    precision: str = "0.5%"
    """Draw until the half-width of the 95 % interval of the perplexity is this share of it: 0.5% or 0.005."""
    max_draws: int = 256
    """The maximum number of draws per sentence."""
    judge: str | None = None
    """A causal language model (folder, .gguf file or Hub name) for generative perplexity."""
    mauve: bool = False
    """Compare samples with real sentences by MAUVE, on features of GPT-2 or, if that is not available, the judge."""
    conventions: bool = False
    """Report the likelihood in every convention of the LM1B literature."""
    modelled_length: bool = False
    """Add -log p(length) to each sentence's nats; by default the length is given."""
    seed: int = 0
    output: Path | None = None
    """Folder for evaluation.json, scores.safetensors and samples.txt; by default a run folder's evaluation/."""
    overwrite: bool = False
    """Replace an existing evaluation."""

    def run(self) -> None:
        """Evaluates, and prints a table or JSON."""
        from diffusionbert.model import evaluate

        if self.data is None:
            raise ValueError("--data is missing; give a test corpus: a text file, lm1b:FOLDER, hf:NAME, or pydoc")
        output, length = self._output(), None if self.length is None else parse_length(self.length) or "corpus"
        require_device(self.device)
        with _progress_bars() as progress:
            result = evaluate(
                self.model,
                self.data,
                split=self.split,
                field=self.field,
                cased=self.cased,
                detokenise=self.detokenise,
                sentences=self.sentences,
                samples=self.samples,
                length=length,
                steps=self.steps,
                sampler=self.sampler,
                top_k=self.top_k or None,
                precision=_share(self.precision),
                max_draws=self.max_draws,
                judge=self.judge,
                mauve=self.mauve,
                conventions=self.conventions,
                modelled_length=self.modelled_length,
                seed=self.seed,
                output=output,
                overwrite=self.overwrite,
                device=self.device,
                progress=progress,
            )
        if self.json:
            print_json(result.to_json())
            return
        print(result.table())
        if output is not None:
            print(f"written to {output}")

    def _output(self) -> Path | None:
        from diffusionbert.training.run_folder import RunFolder

        if self.output is not None or self.model is None:
            return self.output
        run = RunFolder(Path(self.model))
        return run.path / "evaluation" if run.config.exists() else None


def _share(given: str) -> float:
    """0.5% or 0.005."""
    number, percent = given.removesuffix("%"), given.endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError:
        raise ValueError(f"--precision must be a share such as 0.5% or 0.005, got {given!r}") from None


@contextmanager
def _progress_bars() -> Iterator[ProgressCallback]:
    """A bar for each kind of work, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

    console = Console(stderr=True)
    columns = *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():  # work that stopped early is done, too
                    progress.remove_task(task)
                tasks.clear()
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield update
