"""`audit`: tells whether the numbers of a scorer can be likelihoods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from diffusionbert.cli.common import Flag, OptionalPath, OptionalText, WithModel, option, print_json
from diffusionbert.cli.score import OptionalOrder

if TYPE_CHECKING:
    from diffusionbert.workflows.audit import Scorer

CORPUS_SENTENCES = 10_000
"""The number of sentences written by `--corpus`."""


@dataclass(frozen=True)
class Audit(WithModel):
    """Tell whether the numbers of a scorer can be likelihoods, by scoring a known set of sentences.

    Example: diffusionbert audit my_module:nats --language birthplaces
    """

    scorer: Annotated[tyro.conf.Positional[str | None], option("[SCORER]")] = None
    """A function, given as module:function, from a list of sentences to their nats (-log p each); or an example.
    Of the examples, spindle and pseudo-likelihood fail, bound and exact pass.
    Default: --command, otherwise the scores of --model."""
    command: OptionalText = None
    """A command, in quotes, that reads sentences, one per line, and prints the nats of each, one per line."""
    order: OptionalOrder = None
    """Audit the exact likelihood of --model in this order instead of its bound."""
    language: str = "birthplaces"
    """The sentences: birthplaces needs no training; paper, skewed and twins are for models trained on them.
    Or a file with one sentence per line, followed by a tab and its probability unless all are equal.
    Examples have their own language."""
    log_probabilities: Flag = False
    """The scorer returns log-probabilities, which are below 0, instead of nats."""
    tolerance: float = 1e-3
    """The tolerance for rounding, in nats; the noise that a scorer reports or shows is added to it."""
    corpus: OptionalPath = None
    """Write 10,000 sentences of the language to this file, for training, and audit nothing."""
    seed: int = 0
    """The seed of --corpus and of the draws of --model."""

    def run(self) -> None:
        """Prints the report; the verdict does not change the exit code."""
        from diffusionbert.workflows.audit import audit, find_language

        if self.scorer is not None and self.command is not None:
            raise ValueError("a scorer and --command are given; give one of them")
        if self.order is not None and (self.scorer is not None or self.command is not None):
            raise ValueError("--order belongs to --model; leave it out")
        if self.corpus is not None:
            texts = find_language(self.language).sample(CORPUS_SENTENCES, self.seed)
            try:
                self.corpus.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
            except OSError as error:
                raise ValueError(
                    f"{str(self.corpus)!r} cannot be written ({error.strerror}); give another file"
                ) from None
            print(f"{len(texts)} sentences of {self.language} in {self.corpus}")
            return
        language = find_language(self.language)
        report = audit(
            self._scorer() if self.scorer is None else self.scorer,
            language,
            log_probabilities=self.log_probabilities,
            tolerance=self.tolerance,
        )
        if self.json:
            print_json(report.to_json())
        else:
            print(report)

    def _scorer(self) -> Scorer:
        from diffusionbert.workflows.audit import command_scorer

        if self.command is not None:
            scorer = command_scorer(self.command)
            name = self.command
        else:
            model = self.loaded()

            def scorer(texts: list[str]) -> list[object]:
                return list(model.score(texts, order=self.order, precision=0.5, max_draws=512, seed=self.seed))

            name = f"score of {model.name}" + (f", {self.order}" if self.order else "")
        scorer.__qualname__ = name
        return scorer
