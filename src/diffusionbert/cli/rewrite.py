"""`rewrite`: masks a share of a text's tokens and generates them again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import tyro

from diffusionbert.cli.common import (
    OptionalInt,
    OptionalPath,
    SamplerOptions,
    WithModel,
    Words,
    lines_of,
    option,
    print_json,
    printable,
)


@dataclass(frozen=True)
class Rewrite(SamplerOptions, WithModel):
    """Rewrite texts: mask a share of the tokens, drawn at random, and generate them again.

    Example: diffusionbert rewrite "the king was born in london ." --strength 0.4 -n 3
    """

    texts: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[TEXT ...]")] = ()
    """Texts in quotes."""
    file: OptionalPath = None
    """A file of texts, one per line, in place of arguments; - is standard input."""
    strength: float = 0.4
    """The share of tokens to mask, in (0, 1]."""
    num_return_sequences: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """The number of rewritten texts per text."""
    forbid: Words = ()
    """Words to replace wherever they occur; they are not generated."""
    capitalise: bool = True
    """Capitalise generated text where English does it for certain (the start of a sentence, "I"), if the model is
    uncased."""
    seed: OptionalInt = None
    """The same seed gives the same texts. Default: a random one."""

    def run(self) -> None:
        """Prints one rewritten text per line."""
        from diffusionbert.inference.generate import generate
        from diffusionbert.inference.tasks import Task
        from diffusionbert.model import fresh_seed

        texts, request = lines_of(self.texts, self.file, "texts to rewrite"), self.request()
        seed = fresh_seed() if self.seed is None else self.seed
        task = Task(
            self.num_return_sequences, strength=self.strength, forbid=self.forbid, seed=seed, capitalise=self.capitalise
        )
        tasks = [replace(task, rewrite=text) for text in texts]
        model = self.loaded()
        for task in tasks:
            for one in generate(model.engine, task, request):
                if self.json:
                    print_json({"input": task.rewrite, **asdict(one)})
                else:
                    print(printable(one.text), flush=True)
