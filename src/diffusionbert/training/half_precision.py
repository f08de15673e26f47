"""Training in half precision throughout, with parameters that stay in float32.

Autocast casts each matrix where it is used and keeps what passes between layers (norms, residuals) in float32, which is
most of the memory traffic of a step. Here the network computes with bfloat16 copies of its parameters, all cast once
per step. Its losses are float32 as before; gradients are added to those of the float32 parameters, which the optimizer,
the EMA and checkpoints know alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from diffusionbert.networks.base import head_of
from diffusionbert.networks.causal import CausalModel
from diffusionbert.networks.masked import Denoiser
from diffusionbert.objectives.base import TrainingModule


def suits(module: TrainingModule) -> bool:
    """Whether its network is a backbone that is trained as a whole; time embeddings beside it stay in float32.

    And of a class that is known here: some others cannot compute in half precision without autocast, such as FNet.
    """
    network = module.network
    is_known = isinstance(network, CausalModel | Denoiser) and head_of(network.backbone) is not None
    return is_known and all(parameter.requires_grad for parameter in network.parameters())


class HalfPrecision:
    """Copies of a backbone's parameters in half precision, and where they take their place.

    Args:
        module: A module that `suits`, on its device.
        dtype: The type of the copies.
    """

    def __init__(self, module: TrainingModule, dtype: torch.dtype = torch.bfloat16) -> None:
        backbone: Any = module.network.backbone
        self._parameters: list[nn.Parameter] = list(backbone.parameters())
        self._copies = [nn.Parameter(parameter.detach().to(dtype)) for parameter in self._parameters]
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._uses = [  # of tied parameters there are several
            (part._parameters, name, numbers[id(parameter)])
            for part in backbone.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Casts the parameters, after they have changed."""
        torch._foreach_copy_([*self._copies], [*self._parameters])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Lets the backbone compute with the copies; also backward passes, which may compute parts of it again."""
        try:
            self._use(self._copies)
            yield
        finally:
            self._use(self._parameters)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Adds the gradients of the copies to those of the parameters."""
        pairs = zip(self._parameters, self._copies, strict=True)
        found = [(parameter, copy.grad) for parameter, copy in pairs if copy.grad is not None]
        gradients = [torch.empty_like(parameter) for parameter, _ in found]
        torch._foreach_copy_(gradients, [gradient for _, gradient in found])
        for (parameter, _), gradient in zip(found, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for copy in self._copies:
            copy.grad = None

    def _use(self, parameters: list[nn.Parameter]) -> None:
        for owner, name, number in self._uses:
            owner[name] = parameters[number]
