"""A training module with the sampler that is tested beside it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from diffusionbert.method import Objective, Sampler, State, TrainingModule
from diffusionbert.shapes import Batch


class Sampled(TrainingModule):
    """Network, objective and sampler."""

    def __init__(self, network: nn.Module, objective: Objective, sampler: Sampler):
        super().__init__(network, objective)
        self.sampler = sampler

    def sample(self, canvas: Batch, seed: int) -> Iterator[State]:
        return self.sampler.sample(self.network, canvas, seed)
