"""Time conditioning: how the time t reaches a backbone (DiffusionBERT, section 3.3).

    time-agnostic (TAD)   nothing is added; the fraction of `[MASK]` tokens implies the time
    prefix (PTE)          [CLS] e(t) x_1 x_2 …    one trained vector between `[CLS]` and the text
    layer-wise (LTE)      h_i ← h_i + W_i e(t)    before every layer i

The layer-wise vectors W_i e(t) travel through the encoder as an argument of its call. When a network is made, `prepare`
replaces the class of each layer with a subclass that accepts a vector; parameters keep their names. A call passes the
vectors of all layers as `output_attentions`, the one argument that every transformers encoder hands on to its layers;
the object is falsy, so all other code reads "no attentions". Without such an object, layers run unchanged. So nothing
about a call is stored, threads may share a network, and the backbone stays an ordinary model.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from diffusionbert.diffusion.shapes import PositionMask, Times, Tokens


class TimeEmbedding(Enum):
    """How the time reaches the network (DiffusionBERT, section 3.3)."""

    NONE = "none"  # time-agnostic decoding (TAD)
    PREFIX = "prefix"  # a learned embedding between `[CLS]` and the sequence (PTE)
    LAYERS = "layers"  # a sinusoidal embedding added in every layer (LTE)
    LAYERS_RANDOM = "layers-random"  # the same, with randomly initialized projections, as in the paper
    LAYERS_LEARNED = "layers-learned"  # a learned embedding of each timestep added in every layer

    @property
    def abbreviation(self) -> str:
        """The name in the paper's tables."""
        own = {"none": "TAD", "prefix": "PTE", "layers": "LTE"}
        return (own | {"layers-random": "LTE (random)", "layers-learned": "LTE (learned)"})[self.value]

    def conditioning(self, backbone: PreTrainedModel, num_steps: int) -> TimeConditioning:
        """Makes the module that conditions a backbone on time; learned tables have `num_steps` timesteps."""
        match self:
            case TimeEmbedding.NONE:
                return TimeAgnostic()
            case TimeEmbedding.PREFIX:
                return PrefixTime(backbone, num_steps)
            case TimeEmbedding.LAYERS:
                return LayerwiseTime(backbone, SinusoidalTime(backbone.config.hidden_size))
            case TimeEmbedding.LAYERS_RANDOM:
                return LayerwiseTime(backbone, SinusoidalTime(backbone.config.hidden_size), zero=False)
            case TimeEmbedding.LAYERS_LEARNED:
                return LayerwiseTime(backbone, LearnedTime(num_steps, backbone.config.hidden_size))


class TimeConditioning(nn.Module, ABC):
    """Calls an encoder at a time t."""

    num_prefix_positions: ClassVar[int] = 0
    """The number of positions inserted after position 0, `[CLS]`, of each sequence."""

    def prepare(self, backbone: PreTrainedModel) -> None:
        """Prepares a backbone for calls with a time; called once, when a network is made around it."""

    @abstractmethod
    def forward(
        self, encoder: PreTrainedModel, tokens: Tokens, attention_mask: PositionMask | None, t: Times
    ) -> ModelOutput:
        """Returns the encoder's output; its sequences are longer by `num_prefix_positions` positions."""


class TimeAgnostic(TimeConditioning):
    """Ignores t (TAD): the output is that of the bare model."""

    def forward(
        self, encoder: PreTrainedModel, tokens: Tokens, attention_mask: PositionMask | None, t: Times
    ) -> ModelOutput:
        return _call(encoder, attention_mask, input_ids=tokens)


class PrefixTime(TimeConditioning):
    """Inserts one trained vector between `[CLS]` and the text (PTE).

    The vectors are initialized with the scale of the backbone's own embeddings.
    """

    num_prefix_positions = 1

    def __init__(self, backbone: PreTrainedModel, num_steps: int) -> None:
        super().__init__()
        words = backbone.get_input_embeddings()
        assert isinstance(words, nn.Embedding)
        # The width of a token embedding: in ELECTRA and ALBERT it is smaller than the hidden size.
        self.embedding = LearnedTime(num_steps, words.embedding_dim)
        nn.init.normal_(self.embedding.table.weight, std=backbone.config.initializer_range)

    def forward(
        self, encoder: PreTrainedModel, tokens: Tokens, attention_mask: PositionMask | None, t: Times
    ) -> ModelOutput:
        words = encoder.get_input_embeddings()(tokens)
        time = self.embedding(t)[:, None].to(words.dtype)
        if attention_mask is not None:
            attention_mask = after_first(attention_mask, attention_mask.new_ones(len(attention_mask), 1))
        return _call(encoder, attention_mask, inputs_embeds=after_first(words, time))


class LayerwiseTime(TimeConditioning):
    """Adds a projection of the time features to the hidden states that enter each layer (LTE).

    The projections start at zero, so that a pretrained network starts unchanged, or, with `zero=False`, at random.
    """

    def __init__(self, backbone: PreTrainedModel, features: SinusoidalTime | LearnedTime, *, zero: bool = True) -> None:
        super().__init__()
        self.features = features
        self.projections = nn.ModuleList(
            nn.Linear(features.width, backbone.config.hidden_size) for _ in _layers_of(backbone)
        )
        for parameter in self.projections.parameters() if zero else ():
            nn.init.zeros_(parameter)

    def prepare(self, backbone: PreTrainedModel) -> None:
        """Lets each layer i take its vector W_i e(t) from the arguments of a call; other calls stay unchanged."""
        for index, layer in enumerate(_layers_of(backbone)):
            _accept_time(layer, index)

    def forward(
        self, encoder: PreTrainedModel, tokens: Tokens, attention_mask: PositionMask | None, t: Times
    ) -> ModelOutput:
        features = self.features(t)
        vectors = _LayerVectors([project(features)[:, None] for project in self.projections])
        output = _call(encoder, attention_mask, input_ids=tokens, output_attentions=vectors)
        if vectors.num_taken != len(self.projections):
            raise ValueError(
                f"the layers of {type(encoder).__name__} took {vectors.num_taken} of {len(self.projections)} time "
                "vectors, because it was not prepared or does not pass `output_attentions` on: make a network "
                "around it, or use PrefixTime or TimeAgnostic"
            )
        return output


class SinusoidalTime(nn.Module):
    """Features of a continuous time: sines and cosines of t, mixed by a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(
                f"the width of sinusoidal time features must be even and >= 2, got {width}; half of them are sines and "
                "half cosines"
            )
        self.width = width
        self.mix = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Times) -> Tensor:
        """Returns features [B, width]."""
        # From one radian over the whole process to one radian per step of a thousand.
        frequencies = torch.logspace(0, 3, self.width // 2, dtype=t.dtype, device=t.device)
        angles = t[:, None] * frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        features: Tensor = self.mix(waves.to(next(self.parameters()).dtype))
        return features


class LearnedTime(nn.Module):
    """Features of a discrete time: one trained vector for each of the steps 0, 1, …, `num_steps`."""

    def __init__(self, num_steps: int, width: int) -> None:
        super().__init__()
        if num_steps < 1:
            raise ValueError(f"`num_steps` of learned times must be >= 1, got {num_steps}; give the T of training")
        self.num_steps = num_steps
        self.width = width
        self.table = nn.Embedding(num_steps + 1, width)

    def forward(self, t: Times) -> Tensor:
        """Returns features [B, width]: the vector of the step nearest to t."""
        features: Tensor = self.table((t * self.num_steps).round().long())
        return features


def after_first(sequences: Tensor, inserted: Tensor) -> Tensor:
    """Inserts positions [B, n, …] after the first position of sequences [B, L, …]."""
    return torch.cat([sequences[:, :1], inserted, sequences[:, 1:]], dim=1)


def without_prefix(sequences: Tensor, num_prefix_positions: int) -> Tensor:
    """Removes the positions that `after_first` inserted."""
    if not num_prefix_positions:
        return sequences
    return torch.cat([sequences[:, :1], sequences[:, 1 + num_prefix_positions :]], dim=1)


def _call(encoder: PreTrainedModel, attention_mask: PositionMask | None, **inputs: Any) -> ModelOutput:
    # Numbers, not booleans: DeBERTa's convolution subtracts the mask from one.
    mask = None if attention_mask is None else attention_mask.long()
    output: ModelOutput = encoder(**inputs, attention_mask=mask, return_dict=True)
    return output


def _layers_of(backbone: PreTrainedModel) -> nn.ModuleList:
    """Finds a base model's list of layers: as many as the network is deep, and not nested in another list."""
    depth: int = backbone.config.num_hidden_layers
    modules = backbone.base_model.named_modules()
    lists: dict[str, nn.ModuleList] = {name: list_ for name, list_ in modules if isinstance(list_, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = [lists[name] for name in outermost if len(lists[name]) == depth]
    if len(found) != 1:
        raise ValueError(
            f"{type(backbone).__name__} has no list of {depth} layers that each run once (ALBERT runs the same "
            "layer at every depth), so time cannot be added layer by layer; use PrefixTime or TimeAgnostic"
        )
    return found[0]


class _LayerVectors:
    """The vectors W_i e(t) [B, 1, D] of one call, passed to the layers as `output_attentions`.

    No other argument would do: DeBERTa and MPNet do not pass unknown keywords on to their layers.
    """

    def __init__(self, vectors: list[Tensor]) -> None:
        self._vectors = vectors
        self.num_taken = 0

    def __bool__(self) -> bool:
        return False

    def take(self, layer: int) -> Tensor:
        self.num_taken += 1
        return self._vectors[layer]


class _TimedLayer(nn.Module):
    """A mixin in front of a layer's class: adds the time vector of a call, if there is one, to its hidden states.

    It adds the vector before gradient checkpointing and compilation of the layer start. A forward pre-hook would run
    inside them: reentrant checkpointing passes no gradient to keyword arguments, and every layer's index would need its
    own compilation.
    """

    _time_index: int
    _untimed_class: ClassVar[type[nn.Module]]

    def __call__(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        vectors = options.get("output_attentions")
        if isinstance(vectors, _LayerVectors):
            del options["output_attentions"]
            hidden_states = hidden_states + vectors.take(self._time_index).to(hidden_states.dtype)
        return super().__call__(hidden_states, *inputs, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so a pickle can only name the class it was made from.
        reduced: Any = super().__reduce_ex__(protocol)
        return (_empty_layer, (self._untimed_class,), *reduced[2:])


@functools.cache
def _timed_class(layer_class: Any) -> type[_TimedLayer]:
    # Keeps the name: compiling and sharding find layers by it (`_no_split_modules`).
    names = {"__module__": layer_class.__module__, "__qualname__": layer_class.__qualname__}
    return type(layer_class.__name__, (_TimedLayer, layer_class), {**names, "_untimed_class": layer_class})


def _accept_time(layer: nn.Module, index: int) -> None:
    """Lets a layer take its time vector; its parameters and all other calls stay unchanged."""
    own_class: Any = type(layer)
    if not issubclass(own_class, _TimedLayer):
        layer.__class__ = _timed_class(own_class)
    layer._time_index = index  # type: ignore[assignment]


def _empty_layer(layer_class: Any) -> _TimedLayer:
    timed = _timed_class(layer_class)
    return timed.__new__(timed)
