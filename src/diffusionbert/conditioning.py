"""How the time t reaches a backbone: not at all, as a prefix, or in every layer (DiffusionBERT, section 3.3).

    time-agnostic (TAD)   nothing is added; the number of `[MASK]` tells the time
    prefix (PTE)          [CLS] e(t) x_1 x_2 …    one trained vector between `[CLS]` and the sentence
    layer-wise (LTE)      h_i ← h_i + W_i e(t)    before every layer i

A conditioning holds the parameters of e and W alone. It is handed the backbone, any Hugging Face
`*ForMaskedLM`, whenever it acts, and leaves it as it found it. This module knows nothing of noise, of heads or
of what the network predicts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffusionbert.shapes import Places, RowTimes, Tokens

Inputs = dict[str, Tensor]
"""Keyword arguments of a backbone's forward."""


class TimeConditioning(nn.Module, ABC):
    """How t reaches a backbone; a `Denoiser` calls it inside its own forward."""

    num_prefix: ClassVar[int]
    """The number of places inserted after place 0, `[CLS]`, of each row."""

    @abstractmethod
    def applied(
        self, backbone: PreTrainedModel, tokens: Tokens, attend: Places, t: RowTimes
    ) -> AbstractContextManager[Inputs]:
        """Gives the backbone's inputs; while the context is open, the backbone is told the time."""


@final
class TimeAgnostic(TimeConditioning):
    """Tells the backbone nothing (TAD), so that it equals the bare model."""

    num_prefix = 0

    @contextmanager
    def applied(self, backbone: PreTrainedModel, tokens: Tokens, attend: Places, t: RowTimes) -> Iterator[Inputs]:
        """Gives the tokens as they are."""
        yield _plain(tokens, attend)


@final
class PrefixTime(TimeConditioning):
    """Inserts one trained vector between `[CLS]` and the sentence (PTE).

    The vectors start as small as the backbone's own embeddings once did.
    """

    num_prefix = 1

    def __init__(self, backbone: PreTrainedModel, num_steps: int) -> None:
        super().__init__()
        words = backbone.get_input_embeddings()
        assert isinstance(words, nn.Embedding)
        # As wide as a word: in ELECTRA and ALBERT that is narrower than a layer.
        self.embedding = LearnedTime(num_steps, words.embedding_dim)
        nn.init.normal_(self.embedding.table.weight, std=backbone.config.initializer_range)

    @contextmanager
    def applied(self, backbone: PreTrainedModel, tokens: Tokens, attend: Places, t: RowTimes) -> Iterator[Inputs]:
        """Gives word vectors with the time's among them."""
        words = backbone.get_input_embeddings()(tokens)
        time = self.embedding(t)[:, None].to(words.dtype)
        seen = attend.new_ones(len(attend), 1)
        yield {"inputs_embeds": after_first(words, time), "attention_mask": after_first(attend, seen).long()}


@final
class LayerwiseTime(TimeConditioning):
    """Adds a projection of the time's features to the hidden states that enter each layer (LTE).

    The projections start at zero, so that a pretrained network starts unchanged.
    """

    num_prefix = 0

    def __init__(self, backbone: PreTrainedModel, features: SinusoidalTime | LearnedTime) -> None:
        super().__init__()
        # The name and not the layers: as a submodule they would appear in the state dict a second time, and
        # wrappers (sharding, activation checkpoints) may take their places in the list later on.
        self._layers_name = _name_of_layers(backbone)
        self.features = features
        self.projections = nn.ModuleList(
            nn.Linear(features.width, backbone.config.hidden_size) for _ in range(backbone.config.num_hidden_layers)
        )
        for parameter in self.projections.parameters():
            nn.init.zeros_(parameter)

    @contextmanager
    def applied(self, backbone: PreTrainedModel, tokens: Tokens, attend: Places, t: RowTimes) -> Iterator[Inputs]:
        """Gives the tokens as they are, and adds the time to what enters each layer."""
        features = self.features(t)
        calls = {str(i): partial(_timed, project(features)[:, None]) for i, project in enumerate(self.projections)}
        with rerouted(backbone.base_model.get_submodule(self._layers_name), calls):
            yield _plain(tokens, attend)


@final
class SinusoidalTime(nn.Module):
    """Features of a continuous time: sines and cosines of t through a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(
                f"the width of sinusoidal time is {width}, but half of it are sines, half cosines: give an even one"
            )
        self.width = width
        self.mix = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: RowTimes) -> Tensor:
        """Gives features [B, width]."""
        # From one radian over the whole process to one radian a step, if there are a thousand.
        frequencies = torch.logspace(0, 3, self.width // 2, dtype=t.dtype, device=t.device)
        angles = t[:, None] * frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        features: Tensor = self.mix(waves.to(next(self.parameters()).dtype))
        return features


@final
class LearnedTime(nn.Module):
    """Features of a discrete time: one trained row for each of the steps 0, 1, …, `num_steps`."""

    def __init__(self, num_steps: int, width: int) -> None:
        super().__init__()
        if num_steps < 1:
            raise ValueError(f"a table of times needs at least 1 step: given {num_steps}, give the T you train with")
        self.num_steps = num_steps
        self.width = width
        self.table = nn.Embedding(num_steps + 1, width)

    def forward(self, t: RowTimes) -> Tensor:
        """Gives features [B, width]: the row of the step nearest to t."""
        features: Tensor = self.table((t * self.num_steps).round().long())
        return features


def after_first(rows: Tensor, inserted: Tensor) -> Tensor:
    """Inserts columns [B, n, …] after the first column of rows [B, L, …]."""
    return torch.cat([rows[:, :1], inserted, rows[:, 1:]], dim=1)


def _plain(tokens: Tokens, attend: Places) -> Inputs:
    # Numbers, not booleans: DeBERTa's convolution subtracts the mask from one.
    return {"input_ids": tokens, "attention_mask": attend.long()}


def _name_of_layers(backbone: PreTrainedModel) -> str:
    """Finds the list of a base model's layers: as long as the network is deep, and inside no other list."""
    depth: int = backbone.config.num_hidden_layers
    modules = backbone.base_model.named_modules()
    lists: dict[str, nn.ModuleList] = {name: list_ for name, list_ in modules if isinstance(list_, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = [name for name in outermost if len(lists[name]) == depth]
    if len(found) != 1:
        raise ValueError(
            f"{type(backbone).__name__} has no list of {depth} layers that each run once (ALBERT runs the same "
            "layer at every depth), so time cannot be added layer by layer; use PrefixTime or TimeAgnostic"
        )
    return found[0]


def _timed(vector: Tensor, layer: nn.Module, hidden: Tensor, *others: Any, **options: Any) -> Any:
    """Adds a vector [B, 1, D] to the hidden states [B, L, D] that enter a layer.

    The sum is made before the layer is called. So a layer under gradient checkpointing, which is called again
    in backward, when other forwards may have come between, is given the same hidden states again.
    """
    return layer(hidden + vector.to(hidden.dtype), *others, **options)


@contextmanager
def rerouted(parent: nn.Module, calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Lets `calls[name](child, …)` answer for `child(…)`, for some children, while the context is open.

    Hooks would do the same in eager mode. But `torch.compile` does not guard on hooks, and would run what it
    compiled for a backbone without them.
    """
    children = {name: parent.get_submodule(name) for name in calls}
    if any(isinstance(child, _StandIn) for child in children.values()):
        raise RuntimeError("two forwards run on one backbone at once: let them take turns, or copy the network")
    try:
        for name, child in children.items():
            setattr(parent, name, _StandIn(child, calls[name]))
        yield
    finally:
        for name, child in children.items():
            setattr(parent, name, child)


@final
class _StandIn(nn.Module):
    """Takes a module's place; whatever else it is asked for, it takes from the module."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # such as the kind of attention that ModernBERT reads off its layers
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Calls the function with the module."""
        return self.call(self.module, *inputs, **options)
