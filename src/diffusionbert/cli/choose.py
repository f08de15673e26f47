"""`choose`: tells which of several options best fills a blank or continues a text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import tyro

from diffusionbert.cli.common import ModelOptions, option
from diffusionbert.cli.lines import Answer, Row, TextOptions, run_lines


@dataclass(frozen=True)
class Choose:
    """Choose among options for a [BLANK] or for the continuation of a text, by exact, normalized probabilities.

    Example: diffusionbert choose "the capital of france is [BLANK] ." paris "new york" berlin
    """

    text_and_options: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[TEXT OPTION OPTION ...]")] = ()
    """A text with one [BLANK] (without one, the text is continued) and two or more options.
    With --file, each line has them separated by tabs, and the best option of each line is printed."""
    order: Annotated[str, option("{left-to-right,confidence,entropy,random-K}")] = "left-to-right"
    """The order in which an option's tokens are generated. Default: left-to-right."""
    prior: Annotated[Literal["uniform", "context"], option("{uniform,context}")] = "uniform"
    """The prior over the options' lengths in tokens: uniform, or context, p(length) · p(surrounding text | length).
    Default: uniform."""
    input_output: tyro.conf.OmitArgPrefixes[TextOptions] = field(default_factory=TextOptions)
    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    def run(self) -> None:
        """Prints the options of a text, most probable first."""
        run_lines(
            self.input_output,
            ["\t".join(self.text_and_options)] if self.text_and_options else [],
            self._load,
            what="a text and two or more options",
            columns=[
                *("option", "probability", "nats", "length_nats", "num_tokens", "num_unknown", "order", "prior"),
                "conditional_on",
            ],
            show=_shown,
            settings={**self.model.recorded, "order": self.order, "prior": self.prior},
        )

    def _load(self) -> Answer:
        from diffusionbert.inference.choose import choose
        from diffusionbert.likelihood.orders import order_named

        engine = self.model.loaded().engine
        is_best_only = self.input_output.file is not None and self.input_output.chosen_format == "text"

        def answer(lines: list[str]) -> list[list[Row]]:
            given = [self.text_and_options] if self.text_and_options else [_parts(line) for line in lines]
            texts, options = [text for text, *_ in given], [options for _, *options in given]
            choices = choose(engine, texts, options, order=order_named(self.order), prior=self.prior)
            found = []
            for choice in choices:
                shared = {"order": choice.order, "prior": choice.prior, "conditional_on": choice.conditional_on}
                ranked = sorted(choice.options, key=lambda one: -one.probability)
                found.append([asdict(one) | shared for one in (ranked[:1] if is_best_only else ranked)])
            return found

        return answer


def _parts(line: str) -> list[str]:
    """The text and the options of a line."""
    if "\t" not in line:
        raise ValueError(f"no tab in {line[:40]!r}; give a text and two or more options, separated by tabs")
    return line.split("\t")


def _shown(row: Row) -> str:
    """An option with its probability; instead of 0, an upper limit is shown."""
    probability = f"{row['probability']:.4f}" if row["probability"] >= 5e-5 else "<.0001"
    unknown = f"  ({row['num_unknown']} unknown tokens)" if row["num_unknown"] else ""
    return f"{probability}  {row['option']}{unknown}"
