"""The settings of a training run, as data; what is trained on what is an `Experiment`."""

from __future__ import annotations

from dataclasses import dataclass

from diffusionbert.batches import Batching, TokenBudget


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
        rules = {
            "steps": self.steps >= 1,
            "learning_rate": self.learning_rate > 0,
            "warmup": self.warmup >= 0,
            "clip": self.clip > 0,
            "weight_decay": self.weight_decay >= 0,
            "micro_tokens": self.micro_tokens is None or self.micro_tokens >= 1,
            "averaging": self.averaging is None or 0 < self.averaging < 1,
            "patience": self.patience is None or self.patience >= 1,
            "precision": self.precision in ("no", "bf16", "fp16"),
            "decay": self.decay in ("linear", "cosine", "inverse_sqrt", "constant_with_warmup"),
            "log_every": self.log_every >= 1,
            "validate_every": self.validate_every >= 1,
            "validation_sentences": self.validation_sentences >= 2,
            "validation_draws": self.validation_draws >= 1,
            "save_every": self.save_every >= 1,
            "keep": self.keep >= 1,
            "seed": self.seed >= 0,
        }
        broken = [name for name, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"training cannot have {broken[0]} = {getattr(self, broken[0])!r}; see --help")
