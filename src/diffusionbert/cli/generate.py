"""`generate`: unconditional, prompted, constrained and sequence-to-sequence generation."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from diffusionbert.cli.common import (
    Flag,
    OptionalInt,
    OptionalText,
    SamplerOptions,
    WithModel,
    Words,
    option,
    print_json,
    printable,
)

if TYPE_CHECKING:
    from diffusionbert.inference.tasks import Task


@dataclass(frozen=True)
class Generate(SamplerOptions, WithModel):
    """Generate texts, unconditionally or after a prompt, with words that must or must not occur.

    Example: diffusionbert generate "once upon a time" -n 4 --max-new-tokens 20
    """

    prompts: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[PROMPT ...]")] = ()
    """Prompts in quotes, each of which gets -n texts. Default: no prompt."""
    num_return_sequences: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """The number of texts per prompt."""
    length: str = "corpus"
    """The number of tokens of a text, prompt included: a number, a range such as 10-30, or corpus, which draws it from
    the lengths of the training corpus."""
    max_new_tokens: OptionalInt = None
    """The number of tokens after the prompt, in place of --length."""
    block: OptionalInt = None
    """Generate blocks of this many tokens from left to right, for texts longer than the model reads. Default: all
    tokens at once."""
    include: Words = ()
    """Words that must occur."""
    forbid: Words = ()
    """Words that must not be generated; a prompt may contain them."""
    source: OptionalText = None
    """The source text, for models trained on pairs."""
    num_candidates: int = 1
    """With --source: generate this many candidates per text and print the one that agrees most with the others
    (minimum Bayes risk)."""
    watch: Flag = False
    """Show every state of one text while it is generated; on a terminal in place."""
    capitalise: bool = True
    """Capitalise generated text where English does it for certain (the start of a sentence, "I"), if the model is
    uncased."""
    seed: OptionalInt = None
    """The same seed gives the same texts. Default: a random one."""

    def run(self) -> None:
        """Prints one text per line."""
        from diffusionbert.model import generate_agreed

        tasks, request = self.tasks(), self.request(self.block)
        if self.watch and (self.json or self.num_return_sequences > 1 or len(tasks) > 1 or self.num_candidates > 1):
            raise ValueError("--watch shows one text; leave out --json, -n, --num-candidates and all prompts but one")
        model = self.loaded()
        if self.watch:
            from rich.console import Console

            from diffusionbert.cli.common import show_generation
            from diffusionbert.inference.generate import stream

            show_generation(stream(model.engine, tasks[0], request), Console(highlight=False))
            return
        for task in tasks:
            for generated in generate_agreed(model.engine, task, request, self.num_candidates):
                if self.json:
                    print_json({"prompt": task.prompt or None, **asdict(generated)})
                else:
                    print(printable(generated.text), flush=True)

    def tasks(self) -> list[Task]:
        """One task per prompt."""
        from diffusionbert.inference.tasks import Task
        from diffusionbert.model import fresh_seed

        seed = fresh_seed() if self.seed is None else self.seed
        return [
            Task(
                self.num_return_sequences,
                parse_length(self.length),
                prompt,
                self.source,
                self.include,
                self.forbid,
                seed=seed,
                max_new_tokens=self.max_new_tokens,
                capitalise=self.capitalise,
            )
            for prompt in self.prompts or ("",)
        ]


def parse_length(text: str) -> int | tuple[int, int] | None:
    """A number, a range, or None for corpus."""
    if text == "corpus":
        return None
    if re.fullmatch(r"\d{1,6}", text):
        return int(text)
    if match := re.fullmatch(r"(\d{1,6})-(\d{1,6})", text):
        return int(match[1]), int(match[2])
    raise ValueError(f"--length must be a number (24), a range (10-30) or corpus, got {text!r}")
