"""Networks on devices without float64, such as Apple's MPS: the network runs there, everything around it on the CPU.

Noise, schedules, token draws and sums of nats are in float64, so that they are the same everywhere. If a device has no
float64, tokens and times go to it and log-probabilities come back, which costs little when the two share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_CPU = torch.device("cpu")


def has_float64(device: torch.device) -> bool:
    """Whether a device supports float64."""
    return device.type != "mps"


def working_device(device: torch.device) -> torch.device:
    """Where to compute everything around a network on this device: there, or on the CPU if it has no float64."""
    return device if has_float64(device) else _CPU


class Remote(nn.Module):
    """A network on any device, called with CPU tensors and returning CPU tensors."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self._call(self.network, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        """The network's own methods and attributes, except `predict`, whose parts would stay on the device."""
        if name == "network" or name in self.__dict__.get("_parameters", ()):
            return super().__getattr__(name)
        if name == "predict":
            raise AttributeError(name)
        found = getattr(self.network, name)
        if isinstance(found, Tensor):
            return found.to(_CPU)
        return partial(self._call, found) if callable(found) and not isinstance(found, nn.Module) else found

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        to_network = partial(_moved, device=next(self.network.parameters()).device, doubles=torch.float32)
        named = {name: to_network(each) for name, each in options.items()}
        return _moved(_run(function, *map(to_network, arguments), **named), _CPU)


def _run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The part that runs on the device."""
    return function(*arguments, **options)


def _moved(value: Any, device: torch.device, doubles: torch.dtype = torch.float64) -> Any:
    """Moves tensors to a device, including those inside tuples and lists; float64 becomes `doubles`."""
    if isinstance(value, Tensor):
        return value.to(device, doubles if value.dtype is torch.float64 else value.dtype)
    if isinstance(value, tuple | list):
        return type(value)(_moved(each, device, doubles) for each in value)
    return value
