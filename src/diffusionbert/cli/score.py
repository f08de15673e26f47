"""`score`: how much sentences surprise a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from diffusionbert.cli.common import WithModel, lines_of, print_json, printable

if TYPE_CHECKING:
    from diffusionbert.inference.tasks import TextScore


@dataclass(frozen=True)
class Score(WithModel):
    """Score sentences: nats, perplexities and bits per byte, each with what it is and how sure it is.

    Example: diffusionbert score "the capital of france is paris ." "paris the is france capital of ."
    """

    texts: tyro.conf.Positional[tuple[str, ...]] = ()
    """Sentences in quotes."""
    file: Path | None = None
    """Or a file of them, one a line; - is the standard input."""
    tokens: bool = False
    """Show what each token costs."""
    precision: float = 0.05
    """Draw until the 95 % interval of the perplexity is this narrow, relative to it, or 256 draws are made."""
    seed: int = 0

    def run(self) -> None:
        """Prints one sentence a line."""
        from diffusionbert.inference.score import token_nats

        texts = lines_of(self.texts, self.file, "sentences")
        model = self.loaded()
        scores = model.score(texts, precision=self.precision, seed=self.seed)
        for score in scores:
            surprise = token_nats(model.engine, score.text, seed=self.seed) if self.tokens else None
            if self.json:
                print_json(score.to_json() | ({} if surprise is None else {"tokens": surprise}))
            else:
                _show(score, surprise)


def _show(score: TextScore, surprise: list[tuple[str, float]] | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from diffusionbert.cli.common import coloured

    low, high = score.ci95
    console = Console(highlight=False)
    pieces = None if surprise is None else [(printable(piece), nats) for piece, nats in surprise]
    line = Text(printable(score.text)) if pieces is None else coloured(pieces)
    console.print(line, soft_wrap=True)
    console.print(
        f"    {score.nats:.1f} nats [{low:.1f}, {high:.1f}], perplexity {score.perplexity_per_token:.4g} a token, "
        f"{score.perplexity_per_word:.4g} a word, {score.bits_per_byte:.2f} bits a byte "
        f"({score.likelihood.value}, {score.protocol.definition}, {score.protocol.num_draws} draws)"
        + (f"; {score.num_unknown} unknown to the vocabulary" if score.num_unknown else ""),
        style="dim",
        soft_wrap=True,
        markup=False,
    )
