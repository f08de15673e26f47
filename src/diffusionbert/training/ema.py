"""An exponential moving average (EMA) of parameters; each process averages its own shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from diffusionbert.training.tensors import distributed_like


class EMA:
    """average ← decay · average + (1 - decay) · parameter.

    In update n the decay is at most (1 + n) / (10 + n), so that the initial parameters are soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float):
        if not 0 < decay < 1:
            raise ValueError(f"the decay of the EMA must be between 0 and 1, got {decay}; 0.9999 is usual")
        self.decay = decay
        self.num_updates = 0
        self.averages = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Averages the parameters after a step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        parameters = dict(module.named_parameters())
        averages = [self.averages[name] for name in parameters]
        # All tensors in one launch: average ← average + (1 - decay) · (parameter - average).
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        update(averages, list(parameters.values()), torch.tensor(self.num_updates))

    @contextmanager
    def applied_to(self, module: nn.Module) -> Iterator[None]:
        """Replaces the parameters of the module by their averages while the context is open."""
        own = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        _copy(self.averages, module)
        try:
            yield
        finally:
            _copy(own, module)

    def restore(self, averages: Mapping[str, Tensor], num_updates: int) -> None:
        """Continues from saved averages."""
        self.num_updates = num_updates
        for name, average in self.averages.items():
            average.copy_(distributed_like(averages[name], average))


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(values[name])
