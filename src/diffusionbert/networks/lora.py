"""Low-rank adaptation (Hu et al. 2021): W + α/r · B A, of which A and B alone are trained.

PEFT puts the factors into a network for training. What is stored is PEFT's format: adapter_config.json, which names
the model to start from, and adapter_model.safetensors. To open such a folder PEFT is not needed: the product is added
to the weights of that model.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from diffusionbert.storage.files import load_tensors, read_json, save_tensors, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _NAME = "base_model.model.", "default"
_A, _B, _BASE = "lora_A", "lora_B", "base_layer"


def add_lora(backbone: PreTrainedModel, rank: int) -> None:
    """Puts factors beside all linear layers but the head, in place; everything else is frozen."""
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        raise ValueError("LoRA needs the package peft: pip install 'diffusionbert[lora]'") from None
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", bias="none")
    peft.inject_adapter_in_model(settings, backbone, adapter_name=_NAME)


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a network with factors as those of an ordinary one; others stay as they are."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if f".{_A}." in name or f".{_B}." in name:
            continue
        plain = name.replace(f".{_BASE}.", ".")
        factor = name.replace(f".{_BASE}.weight", f".{_A}.{_NAME}.weight")
        if factor != name and factor in weights:
            weight = weight + weights[factor.replace(_A, _B)] @ weights[factor]
        found[plain] = weight
    return found


def write_adapter(folder: Path, weights: Mapping[str, Tensor], base: str, share: float = 1.0) -> None:
    """Writes the factors alone, in PEFT's format.

    Args:
        folder: A model folder, whose weights are removed: the model to start from has them.
        weights: Those of the backbone, with factors.
        base: The model to start from: "bundled", a folder or a Hub name.
        share: A factor of the product.
    """
    factors = {
        _PREFIX + name.replace(f".{_NAME}.", "."): weight.contiguous()
        for name, weight in weights.items()
        if f".{_A}." in name or f".{_B}." in name
    }
    rank = next(weight.shape[0] for name, weight in factors.items() if f".{_A}." in name)
    layers = sorted({name.removeprefix(_PREFIX).split(f".{_A}.")[0] for name in factors if f".{_A}." in name})
    save_tensors(factors, folder / WEIGHTS)
    write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "base_model_name_or_path": base,
            "r": rank,
            "lora_alpha": rank * share,
            "target_modules": layers,
            "bias": "none",
            "inference_mode": True,
        },
    )
    for file in [*folder.glob("model*.safetensors"), *folder.glob("model*.safetensors.index.json")]:
        file.unlink()


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds factors and no weights of its own."""
    return (folder / CONFIG).is_file() and not any(folder.glob("model*.safetensors*"))


def base_of(folder: Path) -> str:
    """The model that the factors of a folder belong to."""
    base = _config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{str(folder / CONFIG)!r} does not name the model to start from; export it again")
    return str(Path(str(files("diffusionbert"))) / "bundled") if base == "bundled" else base


def apply_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Adds the product of a folder's factors to the weights of the model to start from, in place."""
    config, factors = _config(folder), load_tensors(folder / WEIGHTS)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{str(folder / CONFIG)!r} must have numbers r and lora_alpha; export it again")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, first in factors.items():
            if f".{_A}." not in name:
                continue
            weight = parameters.get(name.removeprefix(_PREFIX).replace(f".{_A}.", "."))
            second = factors.get(name.replace(_A, _B))
            shapes = None if weight is None else [(rank, weight.shape[-1]), (weight.shape[0], rank)]
            if weight is None or second is None or [first.shape, second.shape] != shapes:
                raise ValueError(
                    f"{str(folder / WEIGHTS)!r} does not fit the model to start from at {name}; restore that model"
                )
            if not (first.isfinite().all() and second.isfinite().all()):
                raise ValueError(f"{str(folder / WEIGHTS)!r} has values in {name} that are not finite; export it again")
            weight.add_(second.float() @ first.float(), alpha=alpha / rank)


def _config(folder: Path) -> dict[str, Any]:
    plain = read_json(folder / CONFIG)
    if not isinstance(plain, dict) or plain.get("peft_type") != "LORA":
        raise ValueError(f"{str(folder / CONFIG)!r} does not describe a LoRA adapter; export it again")
    return plain
