"""`rewrite`: masks a fraction of a text's tokens and generates them again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro

from diffusionbert.cli.common import Capitalize, GeneratingModel, GenerationOptions, OptionalInt, Words, option
from diffusionbert.cli.lines import Answer, Row, SavedState, TextOptions, run_lines


@dataclass(frozen=True)
class Rewrite:
    """Rewrite texts: mask a random fraction of the tokens and generate them again; the rest stays as it is.

    Example: diffusionbert rewrite "the king was born in london ." --strength 0.4 -n 3
    """

    texts: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[TEXT ...]")] = ()
    """Texts in quotes."""
    strength: float = 0.4
    """The fraction of tokens to mask, in (0, 1]."""
    num_return_sequences: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """The number of rewritten texts per text."""
    forbid: Words = ()
    """Words to replace wherever they occur; they are not generated, either."""
    capitalize: Capitalize = True
    """Leave generated text in lower case.
    By default, an uncased model's text gets capitals at sentence starts, in "I" and, as far as learned, in names."""
    seed: OptionalInt = None
    """The random seed; the same seed gives the same texts. Default: a random one."""
    sampling: tyro.conf.OmitArgPrefixes[GenerationOptions] = field(default_factory=GenerationOptions)
    input_output: tyro.conf.OmitArgPrefixes[TextOptions] = field(default_factory=TextOptions)
    model: tyro.conf.OmitArgPrefixes[GeneratingModel] = field(default_factory=GeneratingModel)

    def run(self) -> None:
        """Prints one rewritten text per line."""
        state = SavedState()
        run_lines(
            self.input_output,
            self.texts,
            lambda: self._load(state),
            what="texts to rewrite",
            columns=["text", "length", "steps", "calls", "seed", "kept"],
            show=lambda row: str(row["text"]),
            settings={
                **self.model.recorded,
                "sampling": asdict(self.sampling),
                "strength": self.strength,
                "number": self.num_return_sequences,
                "forbid": self.forbid,
                "capitalize": self.capitalize,
                "seed": self.seed,
            },
            state=state,
        )

    def _load(self, state: SavedState) -> Answer:
        from diffusionbert.inference.generate import generate_together
        from diffusionbert.inference.tasks import Task

        request = self.sampling.request()
        number, engine = self.num_return_sequences, self.model.loaded(compile=self.model.compile).engine

        def task(text: str) -> Task:
            return Task(
                number,
                rewrite=text,
                strength=self.strength,
                forbid=self.forbid,
                seed=state.seed(self.seed),
                capitalize=self.capitalize,
            )

        def answer(texts: list[str]) -> list[list[Row]]:
            return [list(map(asdict, found)) for found in generate_together(engine, list(map(task, texts)), request)]

        return answer
