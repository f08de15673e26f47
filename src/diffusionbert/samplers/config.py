"""`SamplerConfig`: the settings that all samplers share.

What only one sampler knows is a field of that sampler's own dataclass, for example `Remasking(eta=0.1)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Final

from diffusionbert.diffusion.categorical import LogitsWarper
from diffusionbert.reporting import require_type

MAX_STEPS: Final = 1_000_000


@dataclass(frozen=True)
class SamplerConfig:
    """The number of steps and the logits warper.

    Args:
        steps: The number of steps of the time grid, or of rounds where a sampler has no time grid.
        temperature: Divides the log-probabilities of p(x0 | x_t).
        top_k: Keeps the k most probable tokens; None keeps all.
        top_p: Keeps the smallest set of tokens whose probability reaches this value; None keeps all.
    """

    steps: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        require_type("steps", self.steps, Integral, "a whole number")
        require_type("temperature", self.temperature, Real, "a number")
        require_type("top_k", self.top_k, (Integral, type(None)), "a whole number or None")
        require_type("top_p", self.top_p, (Real, type(None)), "a number or None")
        if not 1 <= self.steps <= MAX_STEPS:
            raise ValueError(f"steps must be between 1 and {MAX_STEPS}, got {self.steps}; 128 is usual")
        self.warper()  # rejects an invalid temperature, top-k or top-p

    def warper(self, forbidden: tuple[int, ...] = ()) -> LogitsWarper:
        """The logits warper; `forbidden` tokens get probability 0."""
        return LogitsWarper(self.temperature, self.top_k, self.top_p, forbidden)

    @property
    def is_plain(self) -> bool:
        """Whether the distribution p(x0 | x_t) is used as it is."""
        return self.warper() == LogitsWarper()
