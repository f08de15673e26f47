"""The interface of a forward process on tokens and of its reverse step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import nn

from diffusionbert.noise import Noise
from diffusionbert.schedules import NoiseSchedule
from diffusionbert.shapes import AskedLogProbs, Batch, PerAsked, Places, RowTimes, Tokens

Shape = Callable[[AskedLogProbs], AskedLogProbs]


class Process(nn.Module, ABC):
    """A forward process q(x_t | x0) and, given a network's log f(v | x_t), the reverse step p(x_s | x_t)."""

    schedule: NoiseSchedule

    @abstractmethod
    def prior(self, x0: Batch, noise: Noise) -> Batch:
        """Draws x at t = 1: noise at every editable position."""

    @abstractmethod
    def corrupt(self, x0: Batch, t: RowTimes, noise: Noise) -> Batch:
        """Draws x_t from q(x_t | x0)."""

    @abstractmethod
    def asked(self, x_t: Batch) -> Places:
        """The N target positions, at which the network is queried."""

    @abstractmethod
    def reverse(
        self, x_t: Batch, log_f: AskedLogProbs, s: RowTimes, t: RowTimes, shape: Shape | None = None
    ) -> AskedLogProbs:
        """log p(x_s | x_t) at the target positions; `shape`, a logits warper, is applied to p(x0 | x_t)."""

    @abstractmethod
    def divergence(self, x0: Tokens, x_t: Batch, log_f: AskedLogProbs, s: RowTimes, t: RowTimes) -> PerAsked:
        """KL(q(x_s | x_t, x0) ‖ p(x_s | x_t)) at each target position, in nats (float64)."""

    @abstractmethod
    def require_finite_divergence(self) -> None:
        """Raises ValueError if the divergence can be infinite although the network gives every token a probability."""

    @abstractmethod
    def log_clean(self, x0: Tokens, x_t: Batch, log_f: AskedLogProbs, t: RowTimes) -> PerAsked:
        """log p(x0 | x_t, t) at each target position (float64)."""
