"""`score`: computes the likelihood of texts under a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from diffusionbert.cli.common import Flag, ModelOptions, OptionalText, colored, option
from diffusionbert.cli.lines import Answer, Row, SavedState, TextOptions, run_lines
from diffusionbert.reporting import printable

if TYPE_CHECKING:
    from rich.text import Text

    from diffusionbert.inference.score import ScoreSums

OptionalOrder = Annotated[str | None, option("{left-to-right,confidence,entropy,random-K}")]
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
    """Draw for each text until the 95 % interval of its perplexity per token is this narrow, as a fraction of it."""
    max_draws: int = 4096
    """The most sequences to evaluate for a text, or for a window of a long one; one round is always evaluated.
    A text that needs more is marked with an asterisk."""
    steps: OptionalText = None
    """The bound: a number T for the T-step bound, or continuous. Default: continuous if the model has it."""
    order: OptionalOrder = None
    """Compute the exact likelihood of generating the text in this order, without draws, instead of a bound.
    With random-16, it is generated in one of 16 random orders, chosen at random. More orders give fewer nats on
    average, nearer to those of the diffusion itself, and take longer."""
    paired: Flag = False
    """Compare the texts given as arguments, using the same noise for all.
    Each is shown with its difference to the first, which has an interval of its own."""
    overlong: Annotated[Literal["window", "skip", "error"], option("{window,skip,error}")] = "window"
    """What to do with texts longer than the model can read: score them in windows, skip and count them, or refuse them.
    Default: window."""
    source: OptionalText = None
    """The source of all texts, for models trained on pairs.
    Default: each text is source and target, separated by a tab."""
    seed: int = 0
    """The seed of the draws."""
    input_output: tyro.conf.OmitArgPrefixes[TextOptions] = field(default_factory=TextOptions)
    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    def run(self) -> None:
        """Prints the texts with their scores, and the total of several."""
        from diffusionbert.inference.score import ScoreSums

        if self.paired and self.input_output.file is not None:
            raise ValueError("--paired compares texts given as arguments; leave out --file")
        state = SavedState()
        sums = ScoreSums(state.values)
        options: dict[str, Any] = {
            "precision": self.precision,
            "max_draws": self.max_draws,
            "steps": int(self.steps) if self.steps is not None and self.steps.isdecimal() else self.steps,
            "order": self.order,
            "paired": self.paired,
            "overlong": self.overlong,
            "tokens": self.tokens,
            "seed": self.seed,
        }
        if self.source is not None:
            options["source"] = self.source

        def load() -> Answer:
            model = self.model.loaded()

            def answer(texts: list[str]) -> list[list[Any]]:
                if not model.engine.paired or self.source is not None:
                    return [[one] for one in model.score(texts, **options)]
                pairs = [_pair(text) for text in texts]
                sources, targets = ([pair[column] for pair in pairs] for column in (0, 1))
                return [[one] for one in model.score(targets, source=sources, **options)]

            return answer

        run_lines(
            self.input_output,
            self.texts,
            load,
            what="texts",
            columns=COLUMNS + (["tokens"] if self.tokens else []),
            show=lambda row: _shown(row, self.texts[0] if self.texts else None),
            settings={**self.model.recorded, **options},
            state=state,
            plain=lambda score: score.to_json(),
            count=sums.add,
            summary=None if len(self.texts) == 1 else lambda: _total(sums),
        )


def _pair(text: str) -> tuple[str, str]:
    """Source and target of a line."""
    source, *targets = text.split("\t")
    if len(targets) != 1:
        raise ValueError(
            f"this model was trained on pairs: a text is source, tab, target, and {text!r:.40} has {len(targets)} "
            "tabs; give `source` for all texts, or both columns"
        )
    return source, targets[0]


def _total(sums: ScoreSums) -> tuple[str, Row]:
    """The total of all scores, as a line and as a row."""
    if not sums.numbers.get("num_texts"):
        return "no text was scored", {"total": None}
    total = sums.total()
    row = total.to_json()
    line = (
        f"{total.num_texts} text{'s' * (total.num_texts > 1)}, {total.num_tokens} tokens: {_nats(row, 1)}, "
        f"perplexity {total.perplexity_per_token:.4g} per token, {total.bits_per_byte:.3f} bits per byte "
        f"({_named(row)})"
    )
    counts = {
        "too long and skipped": total.num_skipped,
        "less precise than requested (*)": total.num_imprecise,
        "unknown tokens": total.num_unknown,
    }
    return line + "".join(f"; {count} {what}" for what, count in counts.items() if count), {"total": row}


def _nats(row: Row, digits: int) -> str:
    """The nats of a text or total, with an interval if anything was drawn."""
    low, high = row["ci95"]
    interval = "" if row["kind"] == "exact" else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{row['nats']:.{digits}f} nats{interval}"


def _named(row: Row) -> str:
    """A description of the number: the quantity, its kind if the name does not say it, and what is given."""
    kind = "" if row["kind"] in row["quantity"] else f"{row['kind']}, "
    return f"{kind}{row['quantity']}, given {row['conditional_on']}"


def _shown(row: Row, first: str | None) -> str | Text:
    """A score, on one line for a file and otherwise with all details; `first` is the first of the texts."""
    from rich.text import Text

    row = {name: math.inf if value is None and "perplexity" in name else value for name, value in row.items()}
    tokens = row.get("tokens")
    if first is None:
        text = row["text"] if tokens is None else " ".join(f"{token}({nats:.2f})" for token, nats in tokens)
        mark = "" if row["precision_reached"] else "*"
        return f"{_nats(row, 2)}{mark}, perplexity {row['perplexity_per_token']:.4g}  {text}"
    text = Text(printable(row["text"])) if tokens is None else colored([(printable(one), nats) for one, nats in tokens])
    draws = "" if row["kind"] == "exact" else f", {row['num_draws']} draws"
    details = (
        f"\n    {_nats(row, 1)}, "
        f"perplexity {row['perplexity_per_token']:.4g} per token, {row['perplexity_per_word']:.4g} per word, "
        f"{row['bits_per_byte']:.2f} bits per byte ({_named(row)}{draws})"
    )
    if row["num_unknown"]:
        details += f"; {row['num_unknown']} unknown tokens"
    if not row["precision_reached"]:
        details += f"; the precision was not reached in {row['num_draws']} draws"
    if (difference := row.get("difference")) is not None and row["text"] != first:
        low, high = difference["ci95"]
        interval = "" if row["kind"] == "exact" else f" [{low:+.1f}, {high:+.1f}]"
        details += f"\n    {difference['nats']:+.1f} nats{interval} against the first text"
    return text.append(details, "dim")
