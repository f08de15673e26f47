"""`generate`: unconditional, prompted, constrained and sequence-to-sequence generation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import tyro

from diffusionbert.cli.common import (
    Capitalize,
    Flag,
    GeneratingModel,
    GenerationOptions,
    OptionalInt,
    OptionalText,
    Words,
    option,
    show_generation,
)
from diffusionbert.cli.lines import Answer, Row, SavedState, TextOptions, run_lines
from diffusionbert.reporting import logger

if TYPE_CHECKING:
    from diffusionbert.inference.engine import Engine
    from diffusionbert.inference.tasks import Task


@dataclass(frozen=True)
class Generate:
    """Generate texts, unconditionally or after a prompt, with words that must or must not occur.

    Example: diffusionbert generate "once upon a time" -n 4 --max-new-tokens 20
    """

    prompts: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[PROMPT ...]")] = ()
    """Prompts in quotes, with -n texts for each; for a model trained on pairs, sources. Default: none."""
    num_return_sequences: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """The number of texts per prompt."""
    length: str = "corpus"
    """The number of tokens per text, including the prompt: a number, a range such as 10-30, or corpus.
    With corpus, lengths are drawn from the training corpus."""
    max_new_tokens: OptionalInt = None
    """The number of tokens after the prompt, instead of --length."""
    block: OptionalInt = None
    """Generate blocks of this many tokens from left to right, for texts longer than the model can read.
    Default: all tokens at once."""
    include: Words = ()
    """Words that must occur; everything up to the next option is a word, so put the prompt first."""
    forbid: Words = ()
    """Words that must not be generated; a prompt may contain them."""
    source: OptionalText = None
    """The source text, for models trained on pairs; prompts are then the beginning of the answer."""
    num_candidates: int = 1
    """With a source: generate this many candidates per text.
    The one that agrees most with the others is printed (minimum Bayes risk)."""
    capitalize: Capitalize = True
    """Leave generated text in lower case.
    By default, an uncased model's text gets capitals at sentence starts, in "I" and, as far as learned, in names."""
    watch: Flag = False
    """Show every state of one text as it is generated; on a terminal, in place."""
    seed: OptionalInt = None
    """The random seed; the same seed gives the same texts. Default: a random one."""
    sampling: tyro.conf.OmitArgPrefixes[GenerationOptions] = field(default_factory=GenerationOptions)
    input_output: tyro.conf.OmitArgPrefixes[TextOptions] = field(default_factory=TextOptions)
    model: tyro.conf.OmitArgPrefixes[GeneratingModel] = field(default_factory=GeneratingModel)

    def run(self) -> None:
        """Prints one text per line."""
        texts = self.prompts or (("",) if self.input_output.file is None else ())
        if phrase := next((one for one in self.include + self.forbid if " " in one and not self.prompts), None):
            logger.warning(f"{phrase[:40]!r} is taken as a word of --include or --forbid; put a prompt before them")
        if self.watch:
            self._watch(texts)
            return
        state = SavedState()
        settings = {name: value for name, value in asdict(self).items() if name not in ("prompts", "input_output")}
        run_lines(
            self.input_output,
            texts,
            lambda: self._load(state),
            what="prompts",
            columns=["text", "length", "steps", "calls", "seed", "kept"],
            show=lambda row: str(row["text"]),
            settings=settings,
            state=state,
        )

    def _load(self, state: SavedState) -> Answer:
        from diffusionbert.inference.generate import generate_together
        from diffusionbert.model import generate_agreed

        request, task = self.sampling.request(self.block), self.task()
        engine = self.model.loaded(compile=self.model.compile).engine

        def answer(texts: list[str]) -> list[Iterable[Row]]:
            seeded = replace(task, seed=state.seed(self.seed))
            tasks = [self._given(engine, seeded, text) for text in texts]
            if len(tasks) > 1 and self.num_candidates == 1:
                return [list(map(asdict, found)) for found in generate_together(engine, tasks, request)]
            return [map(asdict, generate_agreed(engine, one, request, self.num_candidates)) for one in tasks]

        return answer

    def _watch(self, texts: tuple[str, ...]) -> None:
        from rich.console import Console

        from diffusionbert.inference.generate import stream

        has_more = self.num_return_sequences > 1 or self.num_candidates > 1 or len(texts) != 1
        if has_more or self.input_output != TextOptions():
            raise ValueError(
                "--watch shows one text; leave out -n, --num-candidates, --file, --output, --json and further prompts"
            )
        request, task = self.sampling.request(self.block), replace(self.task(), seed=SavedState().seed(self.seed))
        engine = self.model.loaded(compile=self.model.compile).engine
        show_generation(stream(engine, self._given(engine, task, texts[0]), request), Console(highlight=False))

    def task(self) -> Task:
        """The task without prompt and seed."""
        from diffusionbert.inference.tasks import Task

        return Task(
            self.num_return_sequences,
            parse_length(self.length),
            source=self.source,
            include=self.include,
            forbid=self.forbid,
            max_new_tokens=self.max_new_tokens,
            capitalize=self.capitalize,
        )

    def _given(self, engine: Engine, task: Task, text: str) -> Task:
        is_source = engine.paired and self.source is None and text
        return replace(task, source=text) if is_source else replace(task, prompt=text)


def parse_length(text: str) -> int | tuple[int, int] | None:
    """A number, a range, or None for corpus."""
    if text == "corpus":
        return None
    if re.fullmatch(r"\d{1,6}", text):
        return int(text)
    if match := re.fullmatch(r"(\d{1,6})-(\d{1,6})", text):
        return int(match[1]), int(match[2])
    raise ValueError(f"--length must be a number (24), a range (10-30) or corpus, got {text!r}")
