"""`fill`: fills the blanks of texts jointly."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro

from diffusionbert.cli.common import Capitalize, ModelOptions, OptionalFloat, OptionalInt, Words, option
from diffusionbert.cli.lines import Answer, Row, TextOptions, run_lines


@dataclass(frozen=True)
class Fill:
    """Fill the blanks of texts: [MASK] is one token, [BLANK] any number of them.

    Example: diffusionbert fill "paris is [BLANK] of france ." --num-alternatives 3
    """

    texts: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[TEXT ...]")] = ()
    """Texts in quotes."""
    num_alternatives: int = 1
    """The number of fillings per text, best first.
    Several are printed with their nats, given the context and, without a [BLANK], the lengths."""
    max_blank_tokens: int = 4
    """The maximum number of tokens per [BLANK]."""
    forbid: Words = ()
    """Words that must not be generated; the text around the blanks may contain them."""
    temperature: float = 1.0
    """The temperature of the random part of the search."""
    top_k: OptionalInt = None
    """Search only the k most probable tokens of each position. Default: all."""
    top_p: OptionalFloat = None
    """Search only the most probable tokens that together reach this probability. Default: all."""
    capitalize: Capitalize = True
    """Leave generated text in lower case.
    By default, an uncased model's text gets capitals at sentence starts, in "I" and, as far as learned, in names."""
    seed: int = 0
    """The seed of the random part of the search."""
    input_output: tyro.conf.OmitArgPrefixes[TextOptions] = field(default_factory=TextOptions)
    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    def run(self) -> None:
        """Prints one filling per line."""
        settings = {
            "num_alternatives": self.num_alternatives,
            "max_blank_tokens": self.max_blank_tokens,
            "forbid": self.forbid,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "capitalize": self.capitalize,
        }
        run_lines(
            self.input_output,
            self.texts,
            lambda: self._load(settings),
            what="texts with [MASK] or [BLANK]",
            columns=["text", "fillings", "nats", "conditional_on"],
            show=self._show,
            settings={**self.model.recorded, **settings},
        )

    def _load(self, settings: Row) -> Answer:
        from diffusionbert.inference.infill import fill_together

        engine = self.model.loaded().engine
        return lambda texts: [list(map(asdict, found)) for found in fill_together(engine, texts, **settings)]

    def _show(self, row: Row) -> str:
        return str(row["text"]) if self.num_alternatives == 1 else f"{row['nats']:7.2f} nats  {row['text']}"
