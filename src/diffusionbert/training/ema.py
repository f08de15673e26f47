"""Averaged weights (EMA), also of sharded parameters: each process averages the shard it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from diffusionbert.training.tensors import like


class EMA:
    """A running mean of a module's parameters: average ← decay · average + (1 - decay) · weight.

    Early on the decay is smaller, (1 + n) / (10 + n), so that the random start is soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"the decay of averaged weights must lie in (0, 1), given {decay}; try 0.9999")
        self.decay = decay
        self.num_updates = 0
        self.ema = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Takes in the weights after a step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        weights = dict(module.named_parameters())
        ema = [self.ema[name] for name in weights]
        # All tensors in one launch; torch's rule is ours: average ← average + (1 - decay) · (weight - average).
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        update(ema, list(weights.values()), torch.tensor(self.num_updates))

    @contextmanager
    def in_place_of(self, module: nn.Module) -> Iterator[None]:
        """Lets the module have the averaged weights while the context is open."""
        own = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        self._put(module, self.ema)
        try:
            yield
        finally:
            self._put(module, own)

    def restore(self, ema: Mapping[str, Tensor], num_updates: int) -> None:
        """Goes on from saved averages."""
        self.num_updates = num_updates
        for name, average in self.ema.items():
            average.copy_(like(ema[name], average))

    @torch.no_grad()
    def _put(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
