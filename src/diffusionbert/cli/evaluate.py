"""`evaluate`: measures likelihood, BLEU, diversity, judges' perplexity and speed of a model on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from diffusionbert.cli.common import (
    Flag,
    OptionalInt,
    OptionalPath,
    OptionalText,
    SamplerOptions,
    WithModel,
    option,
    print_json,
    require_device,
)
from diffusionbert.cli.generate import parse_length
from diffusionbert.reporting import progress_line

if TYPE_CHECKING:
    from diffusionbert.reporting import Progress as ProgressCallback


@dataclass(frozen=True)
class Evaluate(SamplerOptions, WithModel):
    """Evaluate a model on a corpus: likelihood, BLEU, diversity, judges and speed, with protocol and intervals.

    Example: diffusionbert evaluate --model runs/tiny --data test.txt --samples 100
    """

    data: OptionalText = None
    """The corpus, as for train. Required."""
    compile: Flag = False
    """Compile the network for generation on a GPU: it starts some seconds later, and then runs faster."""
    split: Annotated[Literal["validation", "test", "all"] | None, option("{validation,test,all}")] = None
    """The split of the corpus.
    Default: test if there is one; the held-out part if this is the training corpus; otherwise all."""
    field: OptionalText = None
    """The field of JSON lines that holds the text, or the source of a pair."""
    target_field: OptionalText = None
    """The field of JSON lines that holds the target of a pair."""
    cased: Flag = False
    """Keep upper case even if the model was trained on lower-cased text."""
    detokenize: Flag = False
    """Undo the tokenization of text such as LM1B's even if the model's training did not."""
    sentences: OptionalInt = None
    """The number of sentences to score, always the same ones; BLEU uses all sentences in any case. Default: all."""
    samples: int = 1000
    """The number of samples for BLEU and all other metrics; as many again are generated for self-BLEU.
    With 0, only likelihoods are computed."""
    length: OptionalText = None
    """The number of tokens per sample: a number, a range such as 10-30, or corpus (lengths of the training corpus).
    For pairs: corpus (lengths seen with similar sources) or target (those of the targets).
    Default: 64, as in the paper, or the model's maximum if that is less; corpus for pairs."""
    block: OptionalInt = None
    """Generate blocks of this many tokens from left to right, for samples longer than the model can read."""
    num_candidates: int = 1
    """For pairs: generate this many answers to each source, and use the one that agrees most with the others."""
    precision: str = "0.5%"
    """Draw until the half-width of the perplexity's 95 % interval is this fraction of the perplexity: 0.5% or 0.005."""
    max_draws: int = 256
    """The maximum number of draws per sentence."""
    quantity: OptionalText = None
    """The only likelihood to compute: grid, continuous, exact, pseudo, …
    An order of unmasking (left-to-right, confidence, entropy, random-K) gives the exact likelihood in that order.
    Default: all that the model has."""
    shared_noise: Flag = False
    """Use the same noise for every model, with --max-draws draws per sentence, for narrower intervals in compare."""
    judge: OptionalText = None
    """A causal language model (folder, .gguf file or Hub name) for generative perplexity."""
    mauve: Flag = False
    """Compare samples with real sentences by MAUVE, using features of GPT-2 or, if that is not available, the judge."""
    conventions: Flag = False
    """Report the likelihood in every convention of the LM1B literature."""
    modeled_length: Flag = False
    """Add -log p(length) to the nats of each sentence."""
    seed: int = 0
    """The seed of draws and samples."""
    output: OptionalPath = None
    """The directory for evaluation.json, scores.safetensors and samples.txt.
    Default: evaluation/ in the run directory if --model is one."""
    overwrite: Flag = False
    """Replace an existing evaluation."""

    def run(self) -> None:
        """Evaluates, and prints a table or JSON."""
        from diffusionbert.model import evaluate

        if self.data is None:
            raise ValueError("--data is missing; give a test corpus: a text file, lm1b:FOLDER, hf:NAME, or pydoc")
        output, length = self._output(), self._length()
        request = self.request(self.block)
        require_device(self.device)
        with _progress_bars() as progress:
            chosen = self.dtype is not None or self.compile
            result = evaluate(
                self.loaded(compile=self.compile) if chosen else self.model,
                self.data,
                split=self.split,
                field=self.field,
                target_field=self.target_field,
                cased=self.cased,
                detokenize=self.detokenize,
                sentences=self.sentences,
                samples=self.samples,
                length=length,
                steps=self.steps,
                sampler=self.sampler,
                temperature=self.temperature,
                top_k=request.config.top_k,
                top_p=self.top_p,
                block=self.block,
                num_candidates=self.num_candidates,
                precision=_fraction(self.precision),
                max_draws=self.max_draws,
                quantity=self.quantity,
                shared_noise=self.shared_noise,
                judge=self.judge,
                mauve=self.mauve,
                conventions=self.conventions,
                modeled_length=self.modeled_length,
                seed=self.seed,
                output=output,
                overwrite=self.overwrite,
                device=self.device,
                progress=progress,
            )
        if self.json:
            print_json(result.to_json())
            return
        print(result.table())
        if output is not None:
            print(f"written to {output}")

    def _length(self) -> int | tuple[int, int] | str | None:
        if self.length is None or self.length == "target":
            return self.length
        length = parse_length(self.length)
        return "corpus" if length is None else length

    def _output(self) -> Path | None:
        from diffusionbert.training.run_folder import RunFolder

        if self.output is not None or self.model is None:
            return self.output
        run = RunFolder(Path(self.model))
        return run.path / "evaluation" if run.config.exists() else None


def _fraction(given: str) -> float:
    """Parses 0.5% or 0.005."""
    number, percent = given.removesuffix("%"), given.endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError:
        raise ValueError(f"--precision must be a fraction such as 0.5% or 0.005, got {given!r}") from None


@contextmanager
def _progress_bars() -> Iterator[ProgressCallback]:
    """A bar for each kind of work, on a terminal only."""
    with ExitStack() as stack:
        bars: dict[str, Callable[[int, str], None]] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in bars:
                stack.close()  # closes the bar of earlier work, which may have stopped early
                bars.clear()
                bars[what] = stack.enter_context(progress_line(total))
            bars[what](done, what)

        yield update
