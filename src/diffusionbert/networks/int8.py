"""Linear layers in 8-bit integers on a CPU: the weights rounded once, the inputs of each call as they come.

    y_i = s_i·w_o·Σ_k round(x_ik / s_i)·round(W_ok / w_o) + b_o,    s_i = max_k |x_ik| / 127,   w_o = max_k |W_ok| / 127

Each position i has its own scale and sums of integers are exact, so a result does not depend on its company in a
batch, to the last bit. Parameters stay as they are, for saving and training; with gradients, and on other devices,
layers compute with them.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from diffusionbert.networks.masked import Denoiser

MIN_WIDTH: Final = 256
"""Of narrower networks, rounding the inputs takes longer than integers save."""
DOT_PRODUCTS: Final = ("avx512_vnni", "avx_vnni", "amx_int8")
"""CPU features that multiply and add 8-bit integers in one instruction."""


class _Int8Linear(nn.Linear):
    """A linear layer that computes in integers; made of a plain one by `use_int8`."""

    rounded: Tensor
    scale: Tensor
    _rounded_version: int

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or torch.is_grad_enabled() or input.dtype != torch.float32:
            return functional.linear(input, self.weight, self.bias)
        if self.weight._version != self._rounded_version:  # the weights have been changed
            self.update()
        rows = input.reshape(-1, input.shape[-1])
        rounded, scale = _rounded(rows)
        found = torch._int_mm(rounded, self.rounded.t()).float().mul_(scale).mul_(self.scale)
        if self.bias is not None:
            found.add_(self.bias)
        return found.view(*input.shape[:-1], self.out_features)

    @torch.no_grad()
    def update(self) -> None:
        """Rounds the weights."""
        rounded, scale = _rounded(self.weight.float())
        self.register_buffer("rounded", rounded, persistent=False)
        self.register_buffer("scale", scale.squeeze(1), persistent=False)
        self._rounded_version = self.weight._version


def pays(backbone: PreTrainedModel) -> bool:
    """Whether a network is faster in integers on this CPU."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch do not say
    return int(getattr(backbone.config, "hidden_size", 0)) >= MIN_WIDTH and any(map(capabilities.get, DOT_PRODUCTS))


def int8_copy(network: Denoiser) -> Denoiser:
    """The same network with the same parameters, not copied, that computes in integers."""
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    made = deepcopy(network, shared)
    use_int8(made.backbone)
    return made


def use_int8(module: nn.Module) -> None:
    """Lets all linear layers of a module compute in integers."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            changed: Any = layer
            changed.__class__ = _Int8Linear
            changed.update()


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as 8-bit integers, and its scale [N, 1]."""
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * 127).div_(127)
    return (rows / scale).round_().to(torch.int8), scale
