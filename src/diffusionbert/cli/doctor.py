"""`doctor`: what is wrong with what a model writes, why, and which flag mends it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from diffusionbert.cli.common import WithModel, lines_of, print_json
from diffusionbert.cli.generate import Generate

if TYPE_CHECKING:
    from diffusionbert.evaluation.doctor import Diagnosis
    from diffusionbert.evaluation.symptoms import Case, Symptoms
    from diffusionbert.model import Model

CORPUS_SENTENCES = 1000
"""So many of a corpus are read: enough to know its frequencies and lengths."""


@dataclass(frozen=True)
class Doctor(WithModel):
    """Look at samples and at the model: say what is wrong, why, and which flag mends it.

    Example: diffusionbert doctor --model runs/tiny --data corpus.txt --number 32
    """

    samples: Path | None = None
    """A file of samples, one a line; - is the standard input. Else the model writes some, by the settings below."""
    data: str | None = None
    """A corpus that samples should resemble, as for train; else what the model knows of its training corpus."""
    field: str | None = None
    """The field of JSON lines that holds the text."""
    number: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 64
    """How many samples the model writes."""
    length: str = "corpus"
    """Tokens of a sample: a number, a range such as 10-30, or corpus, which draws lengths as the training text has."""
    steps: int = 128
    sampler: str | None = None
    """As for generate, like all that follow: give the flags whose samples you wonder about."""
    temperature: float = 1.0
    top_k: int | None = 30
    top_p: float | None = None
    block: int | None = None
    seed: int = 0

    def run(self) -> None:
        """Prints what was seen and what was found; findings are information, and no failure."""
        from diffusionbert.evaluation.doctor import diagnose

        model = self.loaded()
        diagnosis = diagnose(self._case(model, self._corpus(model)))
        if self.json:
            print_json({"model": model.name, **diagnosis.to_json()})
        else:
            _show(diagnosis, model.name if self.samples is None else self.samples.name)

    def _case(self, model: Model, corpus: list[str]) -> Case:
        from diffusionbert.evaluation.symptoms import examine
        from diffusionbert.training.progress import ProgressLine

        writing = Generate(
            number=self.number,
            length=self.length,
            steps=self.steps,
            sampler=self.sampler,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            block=self.block,
            seed=self.seed,
        )
        task, sampling = writing.task(), writing.sampling()
        samples = [] if self.samples is None else lines_of((), self.samples, "samples")
        with ProgressLine(self.number, unmasked=not samples and sys.stderr.isatty()) as line:
            written = iter(range(1, self.number + 1))
            return examine(model, task, sampling, samples, corpus, lambda: line.update(next(written), "samples"))

    def _corpus(self, model: Model) -> list[str]:
        from diffusionbert.data.cleaning import Cleaning
        from diffusionbert.data.corpus import parse_corpus

        if self.data is None:
            return []
        trained = model.config.data
        cleaning = Cleaning(lower=trained.lower, detokenise=trained.detokenise)
        corpus = parse_corpus(self.data, fields=[self.field] if self.field else [], cleaning=cleaning)
        return list(islice(corpus, CORPUS_SENTENCES))


def _show(diagnosis: Diagnosis, name: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(_figures(diagnosis.symptoms, name))
    if diagnosis.symptoms.unmask_histogram is not None:
        shares = " ".join(f"{share:.0%}".rjust(4) for share in diagnosis.symptoms.unmask_histogram)
        console.print(f"written in each tenth of the way: {shares}", soft_wrap=True)
    if not diagnosis.findings:
        console.print("nothing found")
    for number, finding in enumerate(diagnosis.findings, start=1):
        title = Text(f"{number}. {finding.code}", style="bold").append(
            f" ({finding.severity.name.lower()})", "not bold"
        )
        console.print(title)
        for label, words in (("what", finding.what), ("why", finding.why), ("try", finding.remedy)):
            console.print(f"   {label:4} {words}", soft_wrap=True, markup=False)


def _figures(symptoms: Symptoms, name: str) -> object:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", name, "corpus"):
        table.add_column(title, justify="left" if not title else "right")
    scored = "" if symptoms.network_texts is None else f" ({symptoms.network_texts})"
    rows: list[tuple[str, float | None, float | None, str]] = [
        ("samples", symptoms.samples, None, ".0f"),
        ("tokens a sample", symptoms.mean_length, symptoms.reference_length, ".1f"),
        ("samples of one token", symptoms.one_token_share, symptoms.reference_one_token_share, ".1%"),
        ("entropy, nats", symptoms.entropy, symptoms.reference_entropy, ".2f"),
        ("distinct pairs of tokens", symptoms.distinct_2, symptoms.reference_distinct_2, ".1%"),
        ("commonest 100 tokens", symptoms.frequent_share, symptoms.reference_frequent_share, ".1%"),
        ("unknown tokens", symptoms.unknown_share, symptoms.reference_unknown_share, ".1%"),
        ("repeated 4-grams", symptoms.repetition, None, ".1%"),
        ("duplicates", symptoms.duplicates, None, ".1%"),
        ("special tokens", symptoms.special_tokens, None, ".0f"),
        (f"network, nats a token{scored}", symptoms.network_nats, None, ".2f"),
        ("frequencies alone", symptoms.unigram_nats, None, ".2f"),
    ]
    for title, own, other, style in rows:
        table.add_row(title, *("" if value is None else format(value, style) for value in (own, other)))
    return table
