"""Linear layers in 8-bit integers on a CPU: the weights rounded once, the inputs of each call as they come.

    y_i = s_i·w_o·Σ_k round(x_ik / s_i)·round(W_ok / w_o) + b_o,    s_i = max_k |x_ik| / 127,   w_o = max_k |W_ok| / 127

Each position i has its own scale and sums of integers are exact, so a result does not depend on its company in a
batch, to the last bit. Parameters stay as they are, for saving and training; with gradients, and on other devices,
layers compute with them.

oneDNN packs the weights once. Where torch does not have its kernels, or they are not exact, `torch._int_mm` gives the
same numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from diffusionbert.networks.base import copy_sharing_parameters
from diffusionbert.networks.masked import Denoiser

MIN_WIDTH: Final = 256
"""Of narrower networks, rounding the inputs takes longer than integers save."""
DOT_PRODUCTS: Final = ("avx512_vnni", "avx_vnni", "amx_int8")
"""CPU features that multiply and add 8-bit integers in one instruction."""


class _Int8Linear(nn.Linear):
    """A linear layer that computes in integers; made of a plain one by `use_int8`."""

    integers: _Packed | _Unpacked
    scale: Tensor
    _source: tuple[Tensor, int]  # the rounded weights and their version; kept, so that no others get their address

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or torch.is_grad_enabled() or input.dtype != torch.float32:
            return functional.linear(input, self.weight, self.bias)
        rounded_from, version = self._source
        if rounded_from.data_ptr() != self.weight.data_ptr() or version != self.weight._version:
            self.update()  # the weights have been changed, moved or replaced
        rounded, scale = _rounded(input.reshape(-1, input.shape[-1]))
        found = self.integers.products(rounded).mul_(scale).mul_(self.scale)
        if self.bias is not None:
            found.add_(self.bias)
        return found.view(*input.shape[:-1], self.out_features)

    @torch.no_grad()
    def update(self) -> None:
        """Rounds the weights."""
        rounded, scale = _rounded(self.weight.float())
        self.integers = (_Packed if _can_pack() else _Unpacked)(rounded)
        self.register_buffer("scale", scale.squeeze(1), persistent=False)
        self._source = self.weight.detach(), self.weight._version


class _Unpacked:
    """Rounded weights [O, K]."""

    def __init__(self, rounded: Tensor) -> None:
        self._rounded = rounded.t()

    def products(self, rows: Tensor) -> Tensor:
        """Σ_k x_k·W_ok for rows of 8-bit integers, which may be overwritten, in float32."""
        return torch._int_mm(rows, self._rounded).float()


class _Packed:
    """The same, in the order that oneDNN's kernels want.

    Kernels for AMX are fast, and exact, for signed integers; the others for those from 0 to 255.
    """

    def __init__(self, rounded: Tensor) -> None:
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._one, self._zero = torch.ones(len(rounded)), torch.zeros(len(rounded), dtype=torch.int64)
        self._is_signed = bool(_capabilities().get("amx_int8"))

    def __deepcopy__(self, memo: object) -> _Packed:
        return self  # torch cannot copy packed weights, and nothing changes them

    def products(self, rows: Tensor) -> Tensor:
        """As `_Unpacked`."""
        rows, zero = (rows, 0) if self._is_signed else (rows.view(torch.uint8).bitwise_xor_(128), 128)  # x + 128
        call: Any = torch.ops.onednn.qlinear_pointwise.default
        found: Tensor = call(
            rows, 1.0, zero, self._packed, self._one, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found


@cache
def _can_pack() -> bool:
    """Whether oneDNN's kernels are there and exact: sums may overflow, or be rounded before 128·ΣW is subtracted."""
    rows, rounded = (torch.full((number, 2048), 127, dtype=torch.int8) for number in (3, 32))
    rows[1], rows[2, ::2], rows[2, 0], rounded[::2] = -127, -127, -126, -127
    try:
        found = _Packed(rounded).products(rows.clone())
    except (AttributeError, RuntimeError):
        return False
    return has_dot_products() and torch.equal(found, _Unpacked(rounded).products(rows))


def pays(backbone: PreTrainedModel) -> bool:
    """Whether a network is faster in integers on this CPU."""
    return int(getattr(backbone.config, "hidden_size", 0)) >= MIN_WIDTH and has_dot_products()


def has_dot_products() -> bool:
    """Whether this CPU multiplies and adds 8-bit integers in one instruction."""
    return any(map(_capabilities().get, DOT_PRODUCTS))


def _capabilities() -> dict[str, Any]:
    """What this CPU has; older versions of torch do not say."""
    return dict(getattr(torch.cpu, "get_capabilities", dict)())


def int8_copy(network: Denoiser) -> Denoiser:
    """The same network with the same parameters, not copied, that computes in integers."""
    made = copy_sharing_parameters(network)
    use_int8(made.backbone)
    return made


def use_int8(module: nn.Module) -> None:
    """Lets all linear layers of a module compute in integers."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            changed: Any = layer
            changed.__class__ = _Int8Linear
            changed.update()


def leave_int8(module: nn.Module) -> None:
    """Lets all linear layers of a module compute with their parameters again."""
    for layer in module.modules():
        if isinstance(layer, _Int8Linear):
            changed: Any = layer
            del changed.integers, changed.scale, changed._source
            changed.__class__ = nn.Linear


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as 8-bit integers, and its scale [N, 1]."""
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * 127).div_(127)
    return (rows / scale).round_().to(torch.int8), scale
