"""`doctor`: finds out what is wrong with generated text, the likely cause, and which option fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import tyro

from diffusionbert.cli.common import (
    GenerationOptions,
    OptionalInt,
    OptionalPath,
    OptionalText,
    WithModel,
    print_json,
)
from diffusionbert.cli.generate import parse_length
from diffusionbert.cli.lines import read_lines

if TYPE_CHECKING:
    from diffusionbert.evaluation.doctor import Diagnosis
    from diffusionbert.evaluation.symptoms import Case, Symptoms
    from diffusionbert.inference.engine import Engine

CORPUS_SENTENCES = 1000
"""The number of corpus sentences to read, enough to estimate frequencies and lengths."""


@dataclass(frozen=True)
class Doctor(GenerationOptions, WithModel):
    """Check samples and the model: what is wrong, the likely cause, and which option fixes it.

    Example: diffusionbert doctor --model runs/tiny --data corpus.txt --num-return-sequences 32
    """

    samples: OptionalPath = None
    """A file of samples, one per line; - is standard input. Default: the model generates them."""
    data: OptionalText = None
    """A corpus that the samples should resemble, as for train. Default: the statistics stored with the model."""
    field: OptionalText = None
    """The field of JSON lines that holds the text."""
    num_return_sequences: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 64
    """The number of samples to generate."""
    length: str = "corpus"
    """Tokens per sample: a number, a range such as 10-30, or corpus, which draws lengths from the training corpus."""
    block: OptionalInt = None
    """Generate blocks of this many tokens from left to right."""
    seed: int = 0
    """The seed of the samples."""

    def run(self) -> None:
        """Prints measurements and findings; findings do not change the exit code."""
        from diffusionbert.evaluation.doctor import diagnose
        from diffusionbert.storage.schema import to_json

        model = self.loaded()
        diagnosis = diagnose(self._case(model.engine, self._corpus(model.engine)))
        if self.json:
            print_json({"model": model.name, "healthy": not diagnosis.findings, **to_json(diagnosis)})
        else:
            _show(diagnosis, model.name if self.samples is None else self.samples.name)

    def _case(self, model: Engine, corpus: list[str]) -> Case:
        from diffusionbert.evaluation.symptoms import examine
        from diffusionbert.inference.tasks import Task
        from diffusionbert.reporting import progress_line

        task = Task(self.num_return_sequences, parse_length(self.length), seed=self.seed)
        sampling = self.request(self.block)
        samples = [] if self.samples is None else read_lines(self.samples, "samples")
        with progress_line(self.num_return_sequences, visible=not samples) as show:
            return examine(model, task, sampling, samples, corpus, lambda done: show(done, "samples"))

    def _corpus(self, model: Engine) -> list[str]:
        from diffusionbert.data.corpus import Cleaning, parse_corpus

        if self.data is None:
            return []
        trained = model.config.data
        cleaning = Cleaning(lower=trained.lower, detokenize=trained.detokenize)
        corpus = parse_corpus(self.data, fields=[self.field] if self.field else [], cleaning=cleaning)
        return list(islice(corpus, CORPUS_SENTENCES))


def _show(diagnosis: Diagnosis, name: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(_figures(diagnosis.symptoms, name))
    if diagnosis.symptoms.unmask_histogram is not None:
        fractions = " ".join(f"{fraction:.0%}".rjust(4) for fraction in diagnosis.symptoms.unmask_histogram)
        console.print(f"unmasked in each tenth of the steps: {fractions}", soft_wrap=True)
    if not diagnosis.findings:
        console.print("no problems found")
    for number, finding in enumerate(diagnosis.findings, start=1):
        console.print(Text.assemble((f"{number}. {finding.code}", "bold"), f" ({finding.severity.value})"))
        for label, text in (("what", finding.what), ("why", finding.why), ("try", finding.remedy)):
            console.print(f"   {label:4} {text}", soft_wrap=True, markup=False)
    if diagnosis.limits:
        console.print("limits of this model, from its card; `diffusionbert adapt` fits it to your text:")
    for limit in diagnosis.limits:
        console.print(f"   - {limit}", soft_wrap=True, markup=False)


def _figures(symptoms: Symptoms, name: str) -> object:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", name, "corpus"):
        table.add_column(title, justify="left" if not title else "right")
    scored = "" if symptoms.network_texts is None else f" ({symptoms.network_texts})"
    rows: list[tuple[str, float | None, float | None, str]] = [
        ("samples", symptoms.samples, None, ".0f"),
        ("tokens per sample", symptoms.mean_length, symptoms.reference_length, ".1f"),
        ("samples of at most one token", symptoms.one_token_fraction, symptoms.reference_one_token_fraction, ".1%"),
        ("entropy, nats", symptoms.entropy, symptoms.reference_entropy, ".2f"),
        ("distinct bigrams", symptoms.distinct_2, symptoms.reference_distinct_2, ".1%"),
        ("100 most frequent tokens", symptoms.frequent_fraction, symptoms.reference_frequent_fraction, ".1%"),
        ("unknown tokens", symptoms.unknown_fraction, symptoms.reference_unknown_fraction, ".1%"),
        ("repeated 4-grams", symptoms.repetition, None, ".1%"),
        ("duplicates", symptoms.duplicates, None, ".1%"),
        ("special tokens", symptoms.special_tokens, None, ".0f"),
        (f"network, nats per token{scored}", symptoms.network_nats, None, ".2f"),
        ("unigram model, nats per token", symptoms.unigram_nats, None, ".2f"),
    ]
    for title, own, other, style in rows:
        table.add_row(title, *("" if value is None else format(value, style) for value in (own, other)))
    return table
