"""The contract of objectives, and the module that training wraps: a network with its objective.

Training and estimation use this contract and no concrete objective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch, PerPosition, PerSequence
from diffusionbert.storage.component import Component

NetworkT = TypeVar("NetworkT")
"""The network that an objective calls; for diffusion on tokens, a `networks.Network`."""


class Likelihood(Enum):
    """What kind of quantity `Objective.nats` estimates. Kinds never share a column."""

    EXACT = "exact"
    """-log p(x0) itself."""
    BOUND = "bound"
    """At least -log p(x0), in expectation over the noise; Σ exp(-nats) over all sequences is at most 1."""
    PSEUDO = "pseudo"
    """In nats, but not of a distribution over sequences; may lie below the entropy."""
    NONE = "none"
    """There is no likelihood; `nats` raises ValueError."""


class Estimator(Enum):
    """How the nats of a sentence are computed."""

    STRATIFIED_TIMES = "stratified times"
    """Times drawn from equal strata of (0, 1)."""
    ORDER_AGNOSTIC = "order-agnostic"
    """Numbers of masked tokens drawn, stratified: the same continuous-time bound with less variance."""
    LEFT_TO_RIGHT = "left to right"
    LEAVE_ONE_OUT = "each token given all others"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True)
class TimeGrid:
    """The time steps that a bound is summed over."""

    steps: int | None = None
    """T; None in continuous time."""

    def __str__(self) -> str:
        return "continuous time" if self.steps is None else f"{self.steps} steps"


@dataclass(frozen=True)
class LikelihoodDefinition:
    """Which number a likelihood is; numbers of different definitions never share a column."""

    quantity: str = "strict"
    """`strict` (a bound on -log p), `paper` (the spindle's published quantity), `nll` or `pseudo-likelihood`."""
    time: TimeGrid | None = None
    """None where no diffusion time is involved."""
    estimator: Estimator = Estimator.UNSPECIFIED
    schedule: Component | None = None
    """None where the number does not depend on it."""

    def __str__(self) -> str:
        quantity = f"{self.quantity} quantity" if self.quantity not in ("strict", "nll", "pseudo-likelihood") else None
        is_usual = self.time is not None and self.estimator in (Estimator.STRATIFIED_TIMES, Estimator.UNSPECIFIED)
        estimator = None if is_usual else self.estimator.value
        return ", ".join(str(part) for part in (self.time, estimator, self.schedule, quantity) if part is not None)


class Objective(nn.Module, Generic[NetworkT], ABC):
    """How a network is trained and scored. All randomness comes from `noise`, keyed by `x0.example`."""

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """The kind of quantity that `nats` estimates."""

    @abstractmethod
    def loss(self, network: NetworkT, x0: Batch, noise: Noise) -> PerSequence:
        """What training minimises: one draw of the loss per sequence, summed over its tokens."""

    @abstractmethod
    def nats(self, network: NetworkT, x0: Batch, noise: Noise) -> PerPosition:
        """One draw of an unbiased estimate of the nats per position; the nats of a sequence are their sum."""


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

    def loss(self, x0: Batch, noise: Noise) -> PerSequence:
        """One draw of the loss per sequence."""
        return self.objective.loss(self.network, x0, noise)

    def nats(self, x0: Batch, noise: Noise) -> PerPosition:
        """One estimate of the nats per position."""
        return self.objective.nats(self.network, x0, noise)
