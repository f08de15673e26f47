"""Parameters and optimiser state as plain tensors: gathered from processes that hold shards, and dealt out again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; if it is sharded, every process must ask for it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def like(full: Tensor, pattern: Tensor) -> Tensor:
    """Deals a full tensor out as another one is dealt out."""
    if isinstance(pattern, DTensor):
        return distribute_tensor(full.to(pattern.device), pattern.device_mesh, pattern.placements)
    return full.to(pattern.device)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, each once even if tied."""
    return {_plain(name): whole(parameter) for name, parameter in module.named_parameters()}


def set_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts weights back; names must agree exactly."""
    parameters = {_plain(name): parameter for name, parameter in module.named_parameters()}
    _require_same_names(parameters, weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(like(weights[name], parameter))


def optimiser_state(optimiser: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """The optimiser's tensors, by parameter name and kind."""
    found = {}
    for name, parameter in module.named_parameters():
        for kind, value in optimiser.state[parameter].items():
            found[f"{_plain(name)}/{kind}"] = whole(value if isinstance(value, Tensor) else torch.tensor(value))
    return found


def set_optimiser_state(optimiser: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts the optimiser's tensors back."""
    for name, parameter in module.named_parameters():
        mine = {key.rpartition("/")[2]: value for key, value in state.items() if key.rpartition("/")[0] == _plain(name)}
        for kind, value in mine.items():
            # Counters are single numbers: on the parameter's device if the optimiser is fused, else on the CPU.
            is_fused = optimiser.defaults.get("fused") or optimiser.defaults.get("capturable")
            counter = value.to(parameter.device) if is_fused else value
            optimiser.state[parameter][kind] = like(value, parameter) if value.shape else counter


def _plain(name: str) -> str:
    """A parameter's name without what wrappers (DDP, torch.compile) add to it."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _require_same_names(mine: Iterable[str], given: Iterable[str]) -> None:
    missing, unknown = sorted(set(mine) - set(given)), sorted(set(given) - set(mine))
    if missing or unknown:
        raise ValueError(
            f"these weights do not fit the network: {len(missing)} missing, {len(unknown)} unknown, first "
            f"{(missing + unknown)[0]!r}; were they saved with other settings?"
        )
