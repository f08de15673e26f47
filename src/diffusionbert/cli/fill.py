"""`fill`: fills the blanks of texts jointly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from diffusionbert.cli.common import OptionalPath, WithModel, Words, lines_of, option, print_json, printable


@dataclass(frozen=True)
class Fill(WithModel):
    """Fill the blanks of texts: [MASK] is one token, [BLANK] any number of them.

    Example: diffusionbert fill "paris is [BLANK] of france ." --num-alternatives 3
    """

    texts: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[TEXT ...]")] = ()
    """Texts in quotes."""
    file: OptionalPath = None
    """A file of texts, one per line, in place of arguments; - is standard input."""
    num_alternatives: int = 1
    """The number of fillings per text, best first; more than one are printed with their nats."""
    max_blank_tokens: int = 4
    """The maximum number of tokens of a [BLANK]."""
    forbid: Words = ()
    """Words that must not be generated; the text around the blanks may contain them."""
    capitalise: bool = True
    """Capitalise generated text where English does it for certain (the start of a sentence, "I"), if the model is
    uncased."""
    seed: int = 0
    """The seed of the random part of the search."""

    def run(self) -> None:
        """Prints one filling per line."""
        from diffusionbert.inference.infill import fill

        texts = lines_of(self.texts, self.file, "texts with [MASK] or [BLANK]")
        model = self.loaded()
        for text in texts:
            for filling in fill(
                model.engine,
                text,
                self.num_alternatives,
                max_blank_tokens=self.max_blank_tokens,
                forbid=self.forbid,
                seed=self.seed,
                capitalise=self.capitalise,
            ):
                if self.json:
                    print_json({"input": text, **asdict(filling)})
                elif self.num_alternatives > 1:
                    print(f"{filling.nats:7.2f}  {printable(filling.text)}", flush=True)
                else:
                    print(printable(filling.text), flush=True)
