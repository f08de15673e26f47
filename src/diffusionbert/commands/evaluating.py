"""`evaluate`: a model on held-out text: likelihood, BLEU, diversity, judges, speed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diffusionbert.commands.common import WithModel, print_json
from diffusionbert.commands.writing import Generate

if TYPE_CHECKING:
    from diffusionbert.assessment.assessing import Plan, ProgressCallback
    from diffusionbert.assessment.material import Material
    from diffusionbert.model import Model


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
        from diffusionbert.assessment.assessing import assess
        from diffusionbert.assessment.judges import featuriser, load_judge, require_mauve
        from diffusionbert.assessment.report import require_free
        from diffusionbert.checkpoints import require_writable

        if self.data is None:
            raise ValueError("--data is missing; give a test corpus: a text file, lm1b:FOLDER, hf:NAME, or pydoc")
        plan = self.plan()
        output = self._output()
        if output is not None:
            require_writable(output)
            if not self.overwrite:
                require_free(output)
        if self.mauve:
            require_mauve()
        model = self.loaded()
        plan = self._fitted(plan, model)
        plan.require(model)
        material = self._material(model)
        judge = load_judge(self.judge, model.device) if self.judge else None
        features = featuriser(judge, model.device) if self.mauve else None
        with _progress_bars() as progress:
            found = assess(model, material, plan, judge, features, progress)
        if output is not None:
            found.save(output)
        if self.json:
            print_json(found.to_json())
            return
        print(found.table())
        if output is not None:
            print(f"written to {output}")

    def plan(self) -> Plan:
        """What to measure."""
        from diffusionbert.assessment.assessing import PAPER_LENGTH, Plan
        from diffusionbert.likelihood.evaluation import Effort

        length = str(PAPER_LENGTH) if self.length is None else self.length
        writing = Generate(sampler=self.sampler, steps=self.steps, top_k=self.top_k, length=length)
        precision = _share(self.precision)
        if self.max_draws < 2:
            raise ValueError(f"--max-draws must be at least 2, given {self.max_draws}: one draw gives no variance")
        effort = Effort(precision, self.max_draws, strata=min(16, self.max_draws // 2), seed=self.seed)
        return Plan(
            writing.sampling(),
            self.samples,
            writing.task().length,
            effort,
            self.modelled_length,
            self.conventions,
            self.seed,
        )

    def _fitted(self, plan: Plan, model: Model) -> Plan:
        """The default length, cut to the model's maximum."""
        if self.length is None and isinstance(plan.length, int):
            return replace(plan, length=min(plan.length, model.max_length))
        return plan

    def _output(self) -> Path | None:
        from diffusionbert.checkpoints import RunFolder

        if self.output is not None or self.model is None:
            return self.output
        run = RunFolder(Path(self.model))
        return run.path / "evaluation" if run.config.exists() else None

    def _material(self, model: Model) -> Material:
        from diffusionbert.assessment.material import Trained, gather, held_out
        from diffusionbert.text.cleaning import Cleaning
        from diffusionbert.text.corpus import parse_corpus
        from diffusionbert.text.sources import Split

        assert self.data is not None
        data = model.experiment.data
        trained = Trained(data, model.training_text)
        cleaning = Cleaning(data.lower and not self.cased, data.detokenise or self.detokenise)
        fields = [self.field] if self.field else []
        if self.split is None:
            corpus = held_out(self.data, trained, cleaning, fields)
        else:
            corpus = parse_corpus(self.data, Split(self.split), fields=fields, cleaning=cleaning)
        found = gather(corpus, self.data, model.vocabulary, model.max_length, self.sentences, trained)
        for note in found.provenance.notes:  # before hours of work, and also if only JSON is printed
            print(f"note: {note}", file=sys.stderr)
        return found


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
