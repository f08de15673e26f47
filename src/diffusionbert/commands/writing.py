"""`generate` and `fill`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from diffusionbert.commands.common import WithModel, lines_of, print_json, printable

if TYPE_CHECKING:
    from diffusionbert.samplers import SamplingRequest
    from diffusionbert.tasks import Task


@dataclass(frozen=True)
class Generate(WithModel):
    """Write texts: from nothing, after a prompt, around words, or anew from a sentence.

    Example: diffusionbert generate -n 4 --length 24
    """

    number: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """How many texts."""
    length: str = "corpus"
    """Tokens of a text: a number, a range such as 10-30, or corpus, which draws lengths as the training text has."""
    steps: int = 128
    """Steps from noise to text; more are slower only where the network must be asked more often."""
    sampler: str | None = None
    """NAME or NAME:knob=value,… such as confidence:threshold=0.9 or remasking:eta=0.2. Names: exact (the model's own
    distribution, fewest calls), ancestral, confidence, margin, entropy, mask-predict, remasking, remasking-rescale,
    renoising, gibbs, gibbs-left-to-right; refinement and left-to-right are for SUNDAE and decoders. If it is left out,
    the default of the model's objective."""
    temperature: float = 1.0
    top_k: int | None = 30
    """Choose among so many likeliest words; 0 is all."""
    top_p: float | None = None
    """Choose among the likeliest words that together reach this probability."""
    block: int | None = None
    """Write so many tokens at a time, from left to right: for texts longer than the model reads at once."""
    prompt: str = ""
    """How the text begins."""
    include: tuple[str, ...] = ()
    """Words that must occur, wherever."""
    forbid: tuple[str, ...] = ()
    """Words that must not be written, nor words that begin with their pieces; a prompt may have them, and from a
    sentence given by --from they are taken out."""
    rewrite: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """A sentence of which a share is hidden and written anew."""
    strength: float | None = None
    """That share; 0.4 if it is not said."""
    source: str | None = None
    """For models trained on pairs: the text to be answered."""
    candidates: int = 1
    """With a source: draw so many answers, and give the one that agrees most with the others (minimum Bayes risk)."""
    watch: bool = False
    """Show the first text being written, in place on a terminal."""
    seed: int = 0

    def run(self) -> None:
        """Prints one text a line."""
        task, sampling = self.task(), self.sampling()
        if self.strength is not None and self.rewrite is None:
            raise ValueError(f"--strength {self.strength} is the share that --from hides; give a sentence by --from")
        if self.candidates < 1 or (self.candidates > 1 and self.source is None):
            raise ValueError(f"--candidates {self.candidates} is for --source; at least 1, and 1 without a source")
        if self.watch and (self.json or self.number > 1 or self.source is not None):
            raise ValueError("--watch shows one text being written; leave out --json, -n and --source")
        model = self.loaded()
        if self.watch:
            from rich.console import Console

            from diffusionbert.terminal import show_writing

            show_writing(model.watch(task, sampling), Console(highlight=False))
            return
        written = (
            model.answer(task, sampling, self.candidates) if self.source is not None else model.write(task, sampling)
        )
        for text in written:
            if self.json:
                print_json(asdict(text))
            else:
                print(printable(text.text), flush=True)

    def task(self) -> Task:
        """What is to be written."""
        from diffusionbert.tasks import Task

        return Task(
            self.number,
            _length(self.length),
            self.prompt,
            self.source,
            self.include,
            self.forbid,
            self.rewrite,
            0.4 if self.strength is None else self.strength,
            self.seed,
        )

    def sampling(self) -> SamplingRequest:
        """How it is generated."""
        from diffusionbert.samplers import SamplerConfig, SamplingRequest, parse_sampler

        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"--top-k must be at least 1, got {self.top_k}; 0 keeps all tokens")
        sampler = None if self.sampler is None else parse_sampler(self.sampler)
        config = SamplerConfig(self.steps, self.temperature, self.top_k or None, self.top_p)
        return SamplingRequest(sampler, config, self.block)


@dataclass(frozen=True)
class Fill(WithModel):
    """Fill the blanks of texts: [MASK] is one token, [BLANK] any number of them.

    Example: diffusionbert fill "paris is [BLANK] of france ." --alternatives 3
    """

    texts: tyro.conf.Positional[tuple[str, ...]] = ()
    """Texts in quotes."""
    file: Path | None = None
    """Or a file of them, one a line; - is the standard input."""
    alternatives: int = 1
    """Show so many whole fillings, best first."""
    longest: int = 4
    """The most tokens that a [BLANK] may have."""
    forbid: tuple[str, ...] = ()
    """Words that must not be written; the text around the blanks may have them."""
    seed: int = 0

    def run(self) -> None:
        """Prints one filling a line; the texts of a file are filled one after another."""
        texts = lines_of(self.texts, self.file, "texts with [MASK] or [BLANK]")
        model = self.loaded()
        for text in texts:
            for filled in model.fillings(
                text, self.alternatives, seed=self.seed, forbid=self.forbid, longest=self.longest
            ):
                if self.json:
                    print_json(asdict(filled))
                elif self.alternatives > 1:
                    print(f"{filled.nats:7.2f}  {printable(filled.text)}", flush=True)
                else:
                    print(printable(filled.text), flush=True)


def _length(given: str) -> int | tuple[int, int] | None:
    if given == "corpus":
        return None
    if re.fullmatch(r"\d{1,6}", given):
        return int(given)
    if match := re.fullmatch(r"(\d{1,6})-(\d{1,6})", given):
        return int(match[1]), int(match[2])
    raise ValueError(f"--length {given!r} is no length; give a number (24), a range (10-30), or corpus")
