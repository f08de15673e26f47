"""The report on an adaptation: bounds and samples before and after, and the chosen settings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from shlex import quote

from diffusionbert.likelihood.intervals import paired_difference
from diffusionbert.likelihood.scores import Estimate


@dataclass(frozen=True)
class Change:
    """Nats per token before and after, on the same sentences and with the same noise."""

    before: float
    after: float
    difference: float
    """After minus before; negative if the model has improved."""
    low: float
    """The lower end of the 95 % interval of the difference."""
    high: float
    num_sentences: int

    @classmethod
    def of(cls, before: Estimate, after: Estimate) -> Change:
        nats = after.scores.nats.numpy(), before.scores.nats.numpy()
        tokens = after.scores.tokens.double().numpy()
        found = paired_difference(nats, (tokens, tokens))
        return cls(before.nats_per_token, after.nats_per_token, found.value, found.low, found.high, len(tokens))

    def __str__(self) -> str:
        return (
            f"{self.before:.3f} → {self.after:.3f} nats per token, {self.difference:+.3f} "
            f"[{self.low:+.3f}, {self.high:+.3f}], {self.num_sentences} sentences"
        )


@dataclass(frozen=True)
class AdaptReport:
    """What an adaptation did, and its results."""

    start: str
    model: str
    """The folder of the adapted model."""
    data: str
    num_sentences: int
    """The number of training sentences, without the held-out ones."""
    domain: Change
    """The change on held-out sentences."""
    generic: Change
    """The change on samples of the start, other than those used to choose the share."""
    share: float
    """The position of the weights between the start (0) and the trained weights (1)."""
    steps: int
    best_step: int
    batch_tokens: int
    learning_rate: float
    precision: str
    tokens_per_second: float | None
    """The measured training speed; None if the run was resumed."""
    seconds: float
    samples_before: tuple[str, ...]
    samples_after: tuple[str, ...]
    seed: int

    @property
    def is_better(self) -> bool:
        """Whether the bound on held-out text has fallen significantly."""
        return self.domain.high < 0

    def table(self) -> str:
        """The report for the user: bounds and samples before and after, and the next command."""
        lines = [
            f"held-out text: {self.domain}",
            f"generic text:  {self.generic} (samples of the start)",
            f"step {self.best_step} of {self.steps}, {self.share:.0%} of the way from the start; "
            f"trained on {self.num_sentences:,} sentences, {timedelta(seconds=round(self.seconds))} in all",
        ]
        for title, texts in (("before", self.samples_before), ("after", self.samples_after)):
            lines += [f"{title}:", *(f"  {text}" for text in texts)]
        if not self.best_step:
            lines.append(
                "the model is still the start, except for the lengths of texts, since training did not improve it: "
                f"give more text, or a lower --learning-rate than {self.learning_rate:g}"
            )
        elif not self.is_better:
            lines.append(
                "no significant gain on held-out text: give more text, or more time (--minutes); the model is kept "
                "anyway"
            )
        lines.append(f"next: diffusionbert generate --model {quote(self.model)}")
        return "\n".join(lines)
