"""`score`: the likelihood of texts under a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from diffusionbert.cli.common import Flag, OptionalPath, WithModel, lines_of, option, print_json, printable

if TYPE_CHECKING:
    from diffusionbert.inference.tasks import TextScore


@dataclass(frozen=True)
class Score(WithModel):
    """Score texts: nats, perplexities and bits per byte, with the kind of likelihood and an interval.

    Example: diffusionbert score "the capital of france is paris ." "paris the is france capital of ."
    """

    texts: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[TEXT ...]")] = ()
    """Texts in quotes."""
    file: OptionalPath = None
    """A file of texts, one per line, in place of arguments; - is standard input."""
    tokens: Flag = False
    """Show the nats of each token."""
    precision: float = 0.25
    """Draw for each text until the 95 % interval of its perplexity is this narrow, relative to it."""
    seed: int = 0
    """The seed of the draws."""

    def run(self) -> None:
        """Prints the texts with their scores."""
        texts = lines_of(self.texts, self.file, "texts")
        model = self.loaded()
        scores = model.score(texts, precision=self.precision, overlong="error", tokens=self.tokens, seed=self.seed)
        for score in scores:
            if self.json:
                print_json(score.to_json())
            else:
                _show(score)


def _show(score: TextScore) -> None:
    from rich.console import Console
    from rich.text import Text

    from diffusionbert.cli.common import coloured

    low, high = score.ci95
    console = Console(highlight=False)
    pieces = None if score.tokens is None else [(printable(token), nats) for token, nats in score.tokens]
    line = Text(printable(score.text)) if pieces is None else coloured(pieces)
    console.print(line, soft_wrap=True)
    console.print(
        f"    {score.nats:.1f} nats [{low:.1f}, {high:.1f}], perplexity {score.perplexity_per_token:.4g} per token, "
        f"{score.perplexity_per_word:.4g} per word, {score.bits_per_byte:.2f} bits per byte "
        f"({score.kind.value}, {score.quantity}, given {score.conditional_on}, {score.num_draws} draws)"
        + (f"; {score.num_unknown} unknown tokens" if score.num_unknown else "")
        + (f"; {score.message}" if score.message else ""),
        style="dim",
        soft_wrap=True,
        markup=False,
    )
