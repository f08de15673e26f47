"""`adapt`: fine-tunes a model on the user's own text, with no settings to choose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import tyro

from diffusionbert.cli.common import Flag, OptionalFloat, OptionalPath, OptionalText, option, print_json
from diffusionbert.parallel import launch


@dataclass(frozen=True)
class Adapt:
    """Fine-tune a model on your own text in a few minutes; batch size and steps are chosen for this machine.

    Part of the text is held out. The bounds on it and on generic text (samples of the starting model) are shown before
    and after, with samples.

    Example: diffusionbert adapt my.txt
    """

    text: Annotated[str | None, tyro.conf.Positional, option("TEXT")] = None
    """A text file (or .gz, .xz, .zst), a folder or a glob, with one sentence or paragraph per line; - reads stdin."""
    model: OptionalText = None
    """The model to start from: a run directory, a model folder or a Hub name. Default: the bundled model."""
    output: OptionalPath = None
    """A new run directory. Default: adapted-NAME in the current folder."""
    minutes: float = 5.0
    """About how long it may take, in minutes."""
    lora: Flag = False
    """Train a low-rank adapter instead of the weights (pip install 'diffusionbert[lora]').
    The folder then holds only the adapter, and needs the model it started from.
    Default: only if training the weights would take more than half of the free memory."""
    no_lora: Flag = False
    """Train the weights, however much memory that takes."""
    merge: Flag = False
    """If an adapter is trained, add it to the weights, so that the folder is an ordinary model."""
    learning_rate: OptionalFloat = None
    """The peak learning rate. Default: a rate that suits the kind of adaptation."""
    samples: int = 3
    """The number of texts to generate before and after."""
    resume: Flag = False
    """Continue the stopped adaptation in --output; the text and --model are then not needed."""
    seed: int = 0
    """The seed of batches, noise and samples."""
    cache: OptionalPath = None
    """The directory for encoded text and generic text. Default: the user's cache directory."""
    json: Flag = False
    """Print one JSON object, and nothing else, on standard output."""

    def run(self) -> None:
        from diffusionbert.cli.lines import standard_input
        from diffusionbert.data.files import Format, items_of
        from diffusionbert.storage.schema import to_json
        from diffusionbert.workflows.adapt import adapt
        from diffusionbert.workflows.own_text import texts_of

        if self.lora and self.no_lora:
            raise ValueError("--lora and --no-lora exclude each other; leave one out, or both to let adapt choose")
        texts: str | Iterable[str] | None = self.text
        if self.text == "-":
            texts = texts_of(items_of(standard_input(), Format(), "standard input"))
        if launch().number > 1:
            raise ValueError("adapt runs in one process; use train --start to train in several")
        adapted = adapt(
            texts,
            self.model,
            self.output,
            minutes=self.minutes,
            lora=True if self.lora else False if self.no_lora else None,
            merge=self.merge,
            learning_rate=self.learning_rate,
            samples=self.samples,
            resume=self.resume,
            seed=self.seed,
            cache=self.cache,
        )
        print_json(to_json(adapted.report)) if self.json else print(adapted.report.table())
