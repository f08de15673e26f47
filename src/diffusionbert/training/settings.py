"""The settings of a training run, as data; what is trained on what is an `Experiment`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusionbert.batches import Batching, TokenBudget

PRECISIONS = "no", "bf16", "fp16"
DECAYS = "linear", "cosine", "inverse_sqrt", "constant_with_warmup"


@dataclass(frozen=True)
class Training:
    """How long, how fast, and what is kept."""

    steps: int = 1000
    batching: Batching = TokenBudget(4096)
    micro_tokens: int | None = None
    """At most so many places at once on one device; larger batches are accumulated."""
    learning_rate: float = 1e-3
    warmup: int = 100
    decay: str = "linear"
    """As transformers names it: linear, cosine, inverse_sqrt, constant_with_warmup."""
    weight_decay: float = 0.01
    clip: float = 1.0
    averaging: float | None = None
    """The decay of averaged weights (EMA), such as 0.9999."""
    precision: str = "no"
    """`no`, `bf16` or `fp16`."""
    compile: bool = False
    seed: int = 0
    log_every: int = 10
    validate_every: int = 200
    validation_sentences: int = 512
    validation_draws: int = 4
    patience: int | None = None
    """So many validations without a better one end the run."""
    save_every: int = 200
    keep: int = 2
    """How many of the latest checkpoints stay on disk."""
    trackers: tuple[str, ...] = ()
    """Trackers of Accelerate: tensorboard, wandb, trackio."""
    sharded: bool = False
    """Shard parameters, gradients and optimiser over processes (torch's fully_shard) instead of copying them."""

    def __post_init__(self) -> None:
        some = "1 or more"
        rules = {
            "steps": (self.steps >= 1, some),
            "learning_rate": (0 < self.learning_rate < math.inf, "a number above 0"),
            "warmup": (self.warmup >= 0, "0 or more"),
            "clip": (self.clip > 0, "a number above 0"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "micro_tokens": (self.micro_tokens is None or self.micro_tokens >= 1, some),
            "averaging": (self.averaging is None or 0 < self.averaging < 1, "between 0 and 1, such as 0.9999"),
            "patience": (self.patience is None or self.patience >= 1, some),
            "precision": (self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
            "decay": (self.decay in DECAYS, f"one of {', '.join(DECAYS)}"),
            "log_every": (self.log_every >= 1, some),
            "validate_every": (self.validate_every >= 1, some),
            "validation_sentences": (self.validation_sentences >= 2, "2 or more"),
            "validation_draws": (self.validation_draws >= 1, some),
            "save_every": (self.save_every >= 1, some),
            "keep": (self.keep >= 1, some),
            "seed": (self.seed >= 0, "0 or more"),
        }
        for name, (holds, range_of) in rules.items():
            if not holds:
                raise ValueError(f"training cannot have {name} = {getattr(self, name)!r}; give {range_of}")
