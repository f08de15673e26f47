"""Parameters and optimiser state as full CPU tensors by name: gathered from shards, and distributed to them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def full_copy(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; if it is sharded, all processes must call this."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def distributed_like(full: Tensor, pattern: Tensor) -> Tensor:
    """A full tensor on the device of another one, and sharded like it."""
    if isinstance(pattern, DTensor):
        return distribute_tensor(full.to(pattern.device), pattern.device_mesh, pattern.placements)
    return full.to(pattern.device)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters by name; tied ones occur once."""
    return {_unwrapped(name): full_copy(parameter) for name, parameter in module.named_parameters()}


def set_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Sets all parameters; names must be the same."""
    parameters = {_unwrapped(name): parameter for name, parameter in module.named_parameters()}
    _require_same_names(parameters, weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(distributed_like(weights[name], parameter))


def optimiser_state(optimiser: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the optimiser, named parameter/kind."""
    return {
        f"{_unwrapped(name)}/{kind}": full_copy(value if isinstance(value, Tensor) else torch.tensor(value))
        for name, parameter in module.named_parameters()
        for kind, value in optimiser.state[parameter].items()
    }


def set_optimiser_state(optimiser: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Sets the tensors of the optimiser."""
    parameters = {_unwrapped(name): parameter for name, parameter in module.named_parameters()}
    # Counters are single numbers: on the parameter's device if the optimiser is fused, else on the CPU.
    is_fused = optimiser.defaults.get("fused") or optimiser.defaults.get("capturable")
    for key, value in state.items():
        name, _, kind = key.rpartition("/")
        if (parameter := parameters.get(name)) is not None:
            counter = value.to(parameter.device) if is_fused else value
            optimiser.state[parameter][kind] = distributed_like(value, parameter) if value.shape else counter


def _unwrapped(name: str) -> str:
    """The name of a parameter without the prefixes of DDP and torch.compile."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _require_same_names(expected: Iterable[str], found: Iterable[str]) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"the parameters do not fit the network: {len(missing)} missing, {len(unknown)} unknown, first "
            f"{(missing + unknown)[0]!r}; use the settings they were saved with"
        )
