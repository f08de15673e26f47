"""The contract of objectives, and the module that training wraps: a network with its objective.

Training and estimation use this contract and no concrete objective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from diffusionbert.noise import Noise
from diffusionbert.shapes import Batch, PerPlace, RowCounts, RowTimes, RowValues, Tokens

NetworkT = TypeVar("NetworkT")
"""The network that an objective or a sampler calls; for diffusion on tokens, a `networks.Network`."""


class Likelihood(Enum):
    """What kind of quantity `Objective.nats` estimates. Kinds never share a column."""

    EXACT = "exact"
    """-log p(x0) itself."""
    BOUND = "bound"
    """At least -log p(x0), in expectation over the noise; Σ exp(-nats) over all sequences is at most 1."""
    PSEUDO = "pseudo"
    """In nats, but not of a distribution over sequences; may lie below the entropy."""
    NONE = "none"
    """There is no likelihood; asking for it is an error."""


class Objective(nn.Module, Generic[NetworkT], ABC):
    """How a network is trained and scored. All randomness comes from `noise`, keyed by `x0.example`."""

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """The kind of quantity that `nats` estimates."""

    @abstractmethod
    def loss(self, network: NetworkT, x0: Batch, noise: Noise) -> RowValues:
        """What training minimises: one draw of the loss per sequence, summed over its tokens."""

    @abstractmethod
    def nats(self, network: NetworkT, x0: Batch, noise: Noise) -> PerPlace:
        """One draw of an unbiased estimate of the nats per position; the nats of a sequence are their sum."""


@dataclass(frozen=True, eq=False)
class State:
    """What a sampler has written so far."""

    tokens: Tokens
    time: RowTimes
    """Where each row is on its way from 1, or where it began, to 0; rows may be at different times."""
    calls: RowCounts
    """How often the network was asked about each row up to here."""


class Sampler(nn.Module, Generic[NetworkT], ABC):
    """How a network writes. Draws of a row depend on the seed and on `canvas.example`, not on other rows."""

    @abstractmethod
    def sample(self, network: NetworkT, canvas: Batch, seed: int) -> Iterator[State]:
        """Yields every state from noise to text; places that are not editable never change."""


class TrainingModule(nn.Module):
    """A network with its objective: what training wraps, so that parameters are used inside the root's forward only."""

    def __init__(self, network: nn.Module, objective: Objective[Any]):
        super().__init__()
        self.network = network
        self.objective = objective

    def forward(self, x0: Batch, noise: Noise, num_tokens: Tensor | float) -> Tensor:
        """The loss of a part of a global batch of `num_tokens` editable tokens.

        The losses of the parts add up to the loss of the whole, however it is split over steps and processes.
        (An engine that averages gradients over W processes needs `num_tokens / W`.)
        """
        return self.loss(x0, noise).sum() / num_tokens

    def loss(self, x0: Batch, noise: Noise) -> RowValues:
        """One draw of the loss per sequence."""
        return self.objective.loss(self.network, x0, noise)

    def nats(self, x0: Batch, noise: Noise) -> PerPlace:
        """One estimate of the nats per position."""
        return self.objective.nats(self.network, x0, noise)
