"""`score`: the likelihood of texts under a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from diffusionbert.cli.common import Flag, ModelOptions, OptionalText, colored, option, printable
from diffusionbert.cli.lines import Answer, Row, TextOptions, Totals, run_lines

if TYPE_CHECKING:
    from rich.text import Text

    from diffusionbert.inference.score import ScoreSettings, ScoreSums

OptionalOrder = Annotated[
    Literal["left-to-right", "confidence", "entropy"] | None, option("{left-to-right,confidence,entropy}")
]
COLUMNS = [
    *("nats", "ci95", "nats_per_token", "perplexity_per_token", "perplexity_per_word", "bits_per_byte", "kind"),
    *("quantity", "conditional_on", "num_tokens", "num_words", "num_bytes", "num_draws", "num_unknown"),
    *("precision_reached", "standard_error", "difference"),
]


@dataclass(frozen=True)
class Score:
    """Score texts: nats, perplexities and bits per byte, with the kind of likelihood and an interval.

    Example: diffusionbert score "the capital of france is paris ." "paris the is france capital of ."
    """

    texts: Annotated[tyro.conf.Positional[tuple[str, ...]], option("[TEXT ...]")] = ()
    """Texts in quotes."""
    tokens: Flag = False
    """Show the nats of each token, which add up to the score."""
    precision: float = 0.25
    """Draw for each text until the 95 % interval of its perplexity per token is this narrow, relative to it."""
    max_draws: int = 4096
    """The most sequences that the network computes for one text; a text that needs more is marked."""
    steps: OptionalText = None
    """Which bound: a number T for the T-step bound, or continuous. Default: continuous, for all models that have it."""
    order: OptionalOrder = None
    """The exact likelihood of generating the text in this order, without draws, in place of a bound."""
    paired: Flag = False
    """Compare the texts given as arguments: they share their noise, and each is shown with its difference to the first,
    which has an interval of its own."""
    overlong: Annotated[Literal["window", "skip", "error"], option("{window,skip,error}")] = "window"
    """Texts that are longer than the model reads: score them in overlapping windows, skip and count them, or refuse
    them. Default: window."""
    seed: int = 0
    """The seed of the draws."""
    input_output: tyro.conf.OmitArgPrefixes[TextOptions] = field(default_factory=TextOptions)
    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    def run(self) -> None:
        """Prints the texts with their scores, and the total of several."""
        from diffusionbert.inference.score import ScoreSums

        if self.paired and self.input_output.file is not None:
            raise ValueError("--paired compares texts that are given together; give them as arguments, without --file")
        totals = Totals()
        sums = ScoreSums(totals.values)

        def load() -> Answer:
            from diffusionbert.inference.score import score

            settings, engine = self.settings(), self.model.loaded().engine

            def answer(texts: list[str]) -> list[list[Row]]:
                scores = score(engine, texts, settings)
                for one in scores:
                    sums.add(one)
                return [[] if one is None else [one.to_json()] for one in scores]

            return answer

        run_lines(
            self.input_output,
            self.texts,
            load,
            what="texts",
            columns=COLUMNS + (["tokens"] if self.tokens else []),
            show=lambda row: _shown(row, is_line=self.input_output.file is not None),
            settings={
                "model": self.model.model,
                "precision": self.precision,
                "max_draws": self.max_draws,
                "steps": self.steps,
                "order": self.order,
                "overlong": self.overlong,
                "tokens": self.tokens,
                "seed": self.seed,
            },
            totals=totals,
            summary=None if len(self.texts) == 1 else lambda: _total(sums),
        )

    def settings(self) -> ScoreSettings:
        """Which number, and how precise."""
        from diffusionbert.inference.score import ScoreSettings
        from diffusionbert.likelihood.orders import Order
        from diffusionbert.likelihood.sentence import SentenceBudget

        steps = int(self.steps) if self.steps is not None and self.steps.isdecimal() else self.steps
        order = None if self.order is None else Order.named(self.order)
        budget = SentenceBudget(self.precision, self.max_draws, self.seed)
        return ScoreSettings(budget, steps, order, self.paired, self.overlong, self.tokens)


def _total(sums: ScoreSums) -> tuple[str, Row]:
    """The sum of all scores, as a line and as a row."""
    if not sums.numbers.get("num_texts"):
        return "no text was scored", {"total": None}
    total = sums.total()
    low, high = total.ci95
    line = (
        f"{total.num_texts} text{'s' * (total.num_texts > 1)}, {total.num_tokens} tokens: "
        f"{total.nats:.1f} nats [{low:.1f}, {high:.1f}], "
        f"perplexity {total.perplexity_per_token:.4g} per token, {total.bits_per_byte:.3f} bits per byte "
        f"({total.kind.value}, {total.quantity}, given {total.conditional_on})"
    )
    for count, what in ((total.num_skipped, "too long and skipped"), (total.num_imprecise, "less precise than asked")):
        line += f"; {count} {what}" if count else ""
    return line, {"total": total.to_json()}


def _shown(row: Row, *, is_line: bool) -> str | Text:
    """A score on one line for a file, else with all that belongs to it."""
    from rich.text import Text

    row = {name: math.inf if value is None and "perplexity" in name else value for name, value in row.items()}
    (low, high), tokens = row["ci95"], row.get("tokens")
    if is_line:
        text = row["text"] if tokens is None else " ".join(f"{token}({nats:.2f})" for token, nats in tokens)
        return f"{row['nats']:8.2f} [{low:.2f}, {high:.2f}]  {row['perplexity_per_token']:8.4g}  {text}"
    text = Text(printable(row["text"])) if tokens is None else colored([(printable(one), nats) for one, nats in tokens])
    details = (
        f"\n    {row['nats']:.1f} nats [{low:.1f}, {high:.1f}], "
        f"perplexity {row['perplexity_per_token']:.4g} per token, {row['perplexity_per_word']:.4g} per word, "
        f"{row['bits_per_byte']:.2f} bits per byte ({row['kind']}, {row['quantity']}, "
        f"given {row['conditional_on']}, {row['num_draws']} draws)"
    )
    if row["num_unknown"]:
        details += f"; {row['num_unknown']} unknown tokens"
    if not row["precision_reached"]:
        details += f"; the precision was not reached in {row['num_draws']} draws"
    if (difference := row.get("difference")) is not None:
        low, high = difference["ci95"]
        details += f"\n    {difference['nats']:+.1f} nats [{low:+.1f}, {high:+.1f}] against the first text"
    return text.append(details, "dim")
