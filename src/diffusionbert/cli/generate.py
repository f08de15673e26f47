"""`generate`: texts from nothing, after a prompt, around words, or in answer to a source."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from diffusionbert.cli.common import SamplerOptions, WithModel, print_json, printable

if TYPE_CHECKING:
    from diffusionbert.inference.tasks import Task


@dataclass(frozen=True)
class Generate(SamplerOptions, WithModel):
    """Generate texts: from nothing, after a prompt, or around words that must occur.

    Example: diffusionbert generate "once upon a time" -n 4 --max-new-tokens 20
    """

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    """How texts begin; each prompt gets -n texts. None starts from nothing."""
    num_return_sequences: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Texts per prompt."""
    length: str = "corpus"
    """Tokens of a text, prompt included: a number, a range such as 10-30, or corpus, which draws lengths from the
    training corpus."""
    max_new_tokens: int | None = None
    """Tokens after the prompt, in place of --length."""
    block: int | None = None
    """Generate blocks of so many tokens from left to right, for texts longer than the model reads at once."""
    include: tuple[str, ...] = ()
    """Words that must occur."""
    forbid: tuple[str, ...] = ()
    """Words that must not be generated; a prompt may contain them."""
    source: str | None = None
    """The text to answer, for models trained on pairs."""
    num_candidates: int = 1
    """With --source: generate so many answers and print the one that agrees most with the others (minimum Bayes
    risk)."""
    watch: bool = False
    """Show one text being generated, in place on a terminal."""
    seed: int | None = None
    """The same seed gives the same texts; by default a fresh one."""

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
