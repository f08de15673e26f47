"""Which backbone a run trains, and how the time reaches it: the configuration of networks.

`bert` and `gpt2` are new networks with random parameters, `pretrained` opens a folder or a Hub name, and `provided`
stands for a `PreTrainedModel` that was given as an object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedModel

from diffusionbert.networks.causal import make_room, new_decoder
from diffusionbert.networks.legacy_checkpoint import load_legacy_checkpoint
from diffusionbert.networks.loading import load_causal_lm, load_masked_lm
from diffusionbert.networks.time_conditioning import (
    LayerwiseTime,
    LearnedTime,
    PrefixTime,
    SinusoidalTime,
    TimeAgnostic,
    TimeConditioning,
)
from diffusionbert.registry import Registry, describe, register


class TimeEmbedding(Enum):
    """How the time reaches the network (DiffusionBERT, section 3.3)."""

    NONE = "none"
    """Time-agnostic decoding (TAD)."""
    PREFIX = "prefix"
    """A learned embedding between `[CLS]` and the sequence (PTE)."""
    LAYERS = "layers"
    """A sinusoidal embedding added in every layer (LTE)."""
    LAYERS_LEARNED = "layers-learned"
    """A learned embedding of each timestep added in every layer."""

    @property
    def abbreviation(self) -> str:
        """As in the paper's tables."""
        return {"none": "TAD", "prefix": "PTE", "layers": "LTE", "layers-learned": "LTE (learned)"}[self.value]

    def conditioning(self, backbone: PreTrainedModel, num_steps: int) -> TimeConditioning:
        """Makes the parameters by which the time reaches a backbone; learned tables have `num_steps` timesteps."""
        match self:
            case TimeEmbedding.NONE:
                return TimeAgnostic()
            case TimeEmbedding.PREFIX:
                return PrefixTime(backbone, num_steps)
            case TimeEmbedding.LAYERS:
                return LayerwiseTime(backbone, SinusoidalTime(backbone.config.hidden_size))
            case TimeEmbedding.LAYERS_LEARNED:
                return LayerwiseTime(backbone, LearnedTime(num_steps, backbone.config.hidden_size))


class BackboneConfig(ABC):
    """Where a run's backbone comes from."""

    registry: ClassVar[Registry[BackboneConfig]] = Registry(
        "backbone", "diffusionbert.backbones", "diffusionbert.networks.config"
    )

    @abstractmethod
    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        """Makes the backbone.

        Args:
            vocab_size: The number of ids of the tokenizer.
            max_positions: The positions of a new network; a pretrained one has its own.
            pad_id: The padding id.
            causal: Whether the objective needs a causal language model; else a masked one.
        """

    @property
    def pretrained(self) -> str | None:
        """The folder or Hub name that the parameters come from; None if they are new."""
        return None

    def as_causal(self) -> BackboneConfig:
        """The causal language model of the same size."""
        return self

    def __str__(self) -> str:
        """The name and the settings."""
        return describe(self)


@register("bert")
@dataclass(frozen=True)
class NewBert(BackboneConfig):
    """A BERT with random parameters."""

    layers: int = 2
    width: int = 128
    heads: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        _require_sizes(self)

    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        """A `BertForMaskedLM`."""
        if causal:
            raise ValueError("this objective needs a causal language model, got a new BERT; use NewDecoder()")
        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=max_positions,
            pad_token_id=pad_id,
        )
        backbone: PreTrainedModel = AutoModelForMaskedLM.from_config(config)  # type: ignore[no-untyped-call]
        return backbone

    def as_causal(self) -> BackboneConfig:
        """A GPT-2 of the same size."""
        return NewDecoder(self.layers, self.width, self.heads, self.dropout)


@register("gpt2")
@dataclass(frozen=True)
class NewDecoder(BackboneConfig):
    """A GPT-2 with random parameters."""

    layers: int = 2
    width: int = 128
    heads: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        _require_sizes(self)

    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        """A `GPT2LMHeadModel`."""
        if not causal:
            raise ValueError(
                "this objective needs a masked language model, got a new GPT-2; use the objective autoregressive "
                "(--system decoder) with it"
            )
        return new_decoder(vocab_size, self.layers, self.width, self.heads, self.dropout, max_positions, pad_id)


@register("pretrained")
@dataclass(frozen=True)
class Pretrained(BackboneConfig):
    """A masked language model (a causal one for a causal objective) from a folder or the Hub, or an original `.th`."""

    name_or_path: str

    @property
    def pretrained(self) -> str | None:
        """The folder or name."""
        return self.name_or_path

    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        """Opens it; a causal one gets embeddings for ids that its tokenizer was given later."""
        if causal:
            return make_room(load_causal_lm(self.name_or_path), vocab_size)
        path = self.name_or_path
        return load_legacy_checkpoint(Path(path)) if path.endswith(".th") else load_masked_lm(path)


@register("provided")
@dataclass(frozen=True)
class Provided(BackboneConfig):
    """A `PreTrainedModel` that was given to `train` as an object."""

    architecture: str
    """The name of its class."""

    def build(self, vocab_size: int, max_positions: int, pad_id: int, *, causal: bool) -> PreTrainedModel:
        """Refuses: only the caller has it."""
        raise ValueError(f"the backbone {self.architecture} was given as an object; give it again as `backbone=…`")


def _require_sizes(config: NewBert | NewDecoder) -> None:
    """Refuses a network that cannot exist, or could not learn."""
    for name in ("layers", "width", "heads"):
        if getattr(config, name) < 1:
            raise ValueError(f"`{name}` of a network must be 1 or more, got {getattr(config, name)}")
    if config.width % config.heads:
        raise ValueError(
            f"`width` must be a multiple of `heads`, got width {config.width} and {config.heads} heads; give a number "
            "of heads that divides the width"
        )
    if not 0 <= config.dropout < 1:
        raise ValueError(f"`dropout` must lie in [0, 1), got {config.dropout}")
