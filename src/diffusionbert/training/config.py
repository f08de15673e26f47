"""The configuration of a run: data, backbone, time embedding, objective and training, as typed JSON.

Run directories and model folders store it, and `train --config` reads it. Objectives, schedules and backbones are
stored by their registered names (`storage.schema`); anything that is not registered is refused before training, because
it could not be opened again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.base import HasBackbone
from diffusionbert.networks.loading import BackboneConfig, NewBert
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import ObjectiveConfig, TrainingModule
from diffusionbert.storage.schema import from_json, to_json
from diffusionbert.storage.weights import EXPORT_PRECISIONS, WeightFormat
from diffusionbert.training.batches import FixedSequences, TokenBudget

FORMAT = 1
"""The version of the JSON format of a run's configuration."""
PRECISIONS = "no", "bf16", "fp16"
OPTIMIZERS = "adamw", "muon"
DECAYS = "linear", "cosine", "inverse_sqrt", "constant_with_warmup", "wsd"


@dataclass(frozen=True)
class DataConfig:
    """What to read, and how to turn it into tokens."""

    corpus: str
    """A file, folder or glob; `pydoc`; `lm1b:FOLDER`; `hf:NAME`."""
    validation: str | None = None
    """A corpus to validate on; None holds out a fraction of the training corpus."""
    held_out: float | None = None
    """That fraction, for a corpus of files; None lets a new run choose it, and is 0.01 in runs of earlier versions."""
    vocabulary: str | int = 8000
    """A tokenizer's folder or name, or the size of a WordPiece vocabulary to train on the corpus."""
    lower: bool = True
    detokenize: bool = False
    field: str | None = None
    """The field of JSON lines or of a dataset that holds the text."""
    target_field: str | None = None
    """For pairs in JSON lines: the field of the target."""
    max_length: int = 128

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"`max_length` must be 1 or more, got {self.max_length}; 128 is usual")
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise ValueError(f"`held_out` must be between 0 and 1, got {self.held_out}; 0.1 is usual for little text")

    @property
    def fields(self) -> list[str]:
        """The given fields: of the text, or of source and target."""
        return [field for field in (self.field, self.target_field) if field]


@dataclass(frozen=True)
class TrainingConfig:
    """Optimization, validation and checkpoints."""

    steps: int = 1000
    batching: TokenBudget | FixedSequences = TokenBudget(4096)
    micro_tokens: int | None = None
    """The most tokens at once on one device; larger batches are accumulated."""
    optimizer: str = "adamw"
    """`adamw`, or `muon` for the matrices of layers with AdamW for everything else."""
    learning_rate: float = 1e-3
    warmup: int = 100
    decay: str = "linear"
    """As in transformers: linear, cosine, inverse_sqrt, constant_with_warmup; or wsd: warmup, stable, decay."""
    decay_fraction: float = 0.2
    """With `wsd`: the last fraction of the steps, in which the learning rate decays linearly to 0."""
    weight_decay: float = 0.01
    weight_decay_end: float | None = None
    """The weight decay of the last step, approached linearly from `weight_decay`; None keeps it constant."""
    lora: int | None = None
    """The rank of a low-rank adaptation to train instead of the weights (extra `lora`); None trains the weights."""
    clip: float = 1.0
    ema: float | None = None
    """The decay, such as 0.9999, of an exponential moving average of the parameters to validate and export."""
    precision: str = "no"
    """`no`, `bf16` or `fp16`."""
    compile: bool = False
    cuda_graphs: bool = True
    """Capture the steps of small batches on one GPU as CUDA graphs."""
    packing: bool = False
    """Pack sequences into rows without padding, if the network supports it; batches then have mixed lengths."""
    seed: int = 0
    log_every: int = 10
    validate_every: int = 200
    validation_sentences: int = 512
    validation_draws: int = 4
    patience: int | None = None
    """Stop after this many validations without improvement."""
    save_every: int = 200
    keep: int = 2
    """How many of the latest checkpoints to keep."""
    trackers: tuple[str, ...] = ()
    """Trackers of Accelerate: tensorboard, wandb, trackio."""
    export_precision: str = "fp32"
    """How the model's weights are stored: `fp32`, `fp16`, `bf16`, or `int8` for matrices."""
    shard_size: str | None = None
    """The maximum size of a weight file, such as `15MB`; None stores all weights in one file."""
    sharded: bool = False
    """Shard parameters, gradients and optimizer over processes (torch's fully_shard) instead of copying them."""

    def __post_init__(self) -> None:
        least = {"warmup": 0, "weight_decay": 0, "seed": 0, "validation_sentences": 2}
        least |= dict.fromkeys(("steps", "log_every", "validate_every", "validation_draws", "save_every", "keep"), 1)
        least |= {} if self.weight_decay_end is None else {"weight_decay_end": 0}
        least |= {name: 1 for name in ("micro_tokens", "patience", "lora") if getattr(self, name) is not None}
        rules = {}
        for name, number in least.items():
            value = getattr(self, name)
            rules[name] = number <= value < 1 << 63, f"{number} or more" if not value >= number else "less than 2⁶³"
        rules |= {
            "learning_rate": (0 < self.learning_rate < math.inf, "greater than 0"),
            "clip": (self.clip > 0, "greater than 0"),
            "ema": (self.ema is None or 0 < self.ema < 1, "between 0 and 1, such as 0.9999"),
            "precision": (self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
            "decay_fraction": (0 < self.decay_fraction <= 1, "greater than 0 and at most 1"),
            "optimizer": (self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
            "decay": (self.decay in DECAYS, f"one of {', '.join(DECAYS)}"),
            "export_precision": (self.export_precision in EXPORT_PRECISIONS, f"one of {', '.join(EXPORT_PRECISIONS)}"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"`{name}` of training must be {rule}, got {getattr(self, name)!r}")
        _ = self.weight_format  # refuses an invalid shard size

    @property
    def weight_format(self) -> WeightFormat:
        """How the exported model's weights are stored."""
        return WeightFormat(None if self.export_precision == "fp32" else self.export_precision, self.shard_size)


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    data: DataConfig
    backbone: BackboneConfig = NewBert()
    time: TimeEmbedding = TimeEmbedding.NONE
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig.registry.get("discrete-time")())
    training: TrainingConfig = TrainingConfig()

    def make_network(self, statistics: TokenStatistics, backbone: PreTrainedModel | None = None) -> nn.Module:
        """Makes the network; new parameters come from torch's global generator.

        Args:
            statistics: The token statistics.
            backbone: Used instead of the configured one.
        """
        self.objective.require_time(self.time)
        if backbone is None:
            positions = self.data.max_length + 1  # one for a prefix
            size, is_causal = len(statistics.allowed), self.objective.is_causal
            backbone = self.backbone.build(size, positions, statistics.pad_id, causal=is_causal)
        return self.objective.make_network(backbone, self.time, statistics.padded(backbone.config.vocab_size))

    def make_module(self, statistics: TokenStatistics, backbone: PreTrainedModel | None = None) -> TrainingModule:
        """Makes the network and its objective, as training wraps them."""
        network = self.make_network(statistics, backbone)
        backed = cast("HasBackbone", network)
        if backed.max_length < self.data.max_length:
            raise ValueError(
                f"`max_length` must be at most {backed.max_length} for this network, got {self.data.max_length}; set "
                f"--max-length {backed.max_length} or less"
            )
        return TrainingModule(network, self.objective.build(statistics.padded(len(backed.allowed))))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; raises ValueError if a part is not registered."""
        return {"format": FORMAT, **to_json(self)}

    @classmethod
    def from_json(cls, plain: Any, where: str = "configuration") -> RunConfig:
        """Reads what `to_json` returned, including in earlier versions.

        Args:
            plain: What `json.loads` returned.
            where: What the value is called in error messages, for example a file name.
        """
        if isinstance(plain, dict) and "kind" in plain:
            return from_json(upgraded(plain, where), cls, where)
        found = plain.get("format") if isinstance(plain, dict) else plain
        if not isinstance(plain, dict) or found != FORMAT:
            raise ValueError(f"{where} must be a run's configuration of format {FORMAT}, got format {found!r:.40}")
        return from_json(_respelled({name: value for name, value in plain.items() if name != "format"}), cls, where)


# ---- earlier versions -----------------------------------------------------------------------------------------------
#
# Configurations of version 0.1.0.dev0, before registered names: `{"kind": "Experiment", …}` becomes today's JSON.


_NAMES = {
    **{name: name.lower() for name in ("Linear", "Cosine", "Sqrt", "Power", "Spindle", "Bell", "Pretrained")},
    "Even": "uniform",
    "NewBert": "bert",
    "NewDecoder": "gpt2",
    "Diffusion": "discrete-time",
    "ContinuousDiffusion": "continuous-time",
    "LearnedDiffusion": "learned-schedule",
    "AnyOrderWriting": "order-agnostic",
    "Masking": "masked-lm",
    "MouthMasking": "bert-mouth",
    "MaskPredicting": "cmlm",
    "StepUnrolling": "sundae",
    "VectorDiffusion": "gaussian",
    "NextWord": "autoregressive",
}
"""Registered names by kind."""
_PLAIN = {"Experiment", "Data", "Training", "TokenBudget", "FixedRows"}
"""Kinds without a registered name."""
_FIELDS = {
    ("Experiment", "network"): "backbone",
    ("Data", "detokenise"): "detokenize",
    ("Training", "averaging"): "ema",
    ("Pretrained", "name"): "name_or_path",
    ("FixedRows", "rows"): "sequences",
    ("Diffusion", "proposal"): "time_sampling",
    ("ContinuousDiffusion", "proposal"): "time_sampling",
}


def upgraded(plain: Any, where: str) -> Any:
    """Converts to today's format, without its version number; raises ValueError for an unknown kind."""
    if not isinstance(plain, dict) or "kind" not in plain:
        return plain
    kind = plain["kind"]
    if kind not in _PLAIN and kind not in _NAMES:
        raise ValueError(f"{where}: unknown kind {kind!r:.40}")
    name = {"name": _NAMES[kind]} if kind in _NAMES else {}
    rest = {key: value for key, value in plain.items() if key != "kind"}
    return name | {_FIELDS.get((kind, key), key): upgraded(value, f"{where}.{key}") for key, value in rest.items()}


def _respelled(plain: dict[str, Any]) -> dict[str, Any]:
    """Renames the field `detokenise`, which the data of a format 1 configuration may still have."""
    data = plain.get("data")
    if not isinstance(data, dict) or "detokenise" not in data:
        return plain
    return plain | {"data": {"detokenize" if name == "detokenise" else name: value for name, value in data.items()}}
