"""Low-rank adaptation (LoRA, Hu et al. 2021): W + α/r · B A, where only the factors A and B are trained.

For training, PEFT adds the factors to a network. They are stored in PEFT's format: adapter_config.json, which names the
base model, and adapter_model.safetensors. Opening such a folder does not need PEFT: the product is added to the weights
of the base model.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from diffusionbert.storage.files import load_tensors, read_json, save_tensors, write_json
from diffusionbert.storage.reader import FLOATS, TensorRule, stored_tensors
from diffusionbert.storage.schema import from_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _NAME = "base_model.model.", "default"
_A, _B, _BASE = "lora_A", "lora_B", "base_layer"
_HARMLESS = {
    *("peft_type", "peft_version", "base_model_name_or_path", "revision", "task_type", "inference_mode", "r"),
    *("lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "auto_mapping", "loftq_config", "megatron_core", "qalora_group_size"),
}
"""PEFT settings that do not change what stored factors mean: where they are, how they were trained."""


def add_lora(backbone: PreTrainedModel, rank: int) -> None:
    """Adds factors to all linear layers except the head, in place; everything else is frozen."""
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        raise ValueError("LoRA needs the package peft: pip install 'diffusionbert[lora]'") from None
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", bias="none")
    peft.inject_adapter_in_model(settings, backbone, adapter_name=_NAME)


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an ordinary network, with any factors merged in."""
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
    """Writes only the factors, in PEFT's format.

    Args:
        folder: A model folder. Its weights are removed, since the base model has them.
        weights: The backbone's weights, including the factors.
        base: The base model: "bundled", a folder or a Hub name.
        share: What the product is multiplied by.
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
    """The base model of a folder's factors."""
    base = _config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{str(folder / CONFIG)!r} does not name its base model; export it again")
    return str(Path(str(files("diffusionbert"))) / "bundled") if base == "bundled" else base


def apply_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Adds the product of a folder's factors to the weights of the base model, in place."""
    file = folder / WEIGHTS
    rank, alpha = _rank_and_alpha(folder)
    parameters = dict(model.named_parameters())
    weights = {name: parameters.get(_trained(name)) for name in stored_tensors(file)}
    rules = {
        name: TensorRule((rank, weight.shape[-1]) if f".{_A}." in name else (weight.shape[0], rank), FLOATS)
        for name, weight in weights.items()
        if weight is not None and weight.ndim == 2
    }
    partners = {name.replace(f".{_A}.", f".{_B}.") for name in rules} | {
        name.replace(f".{_B}.", f".{_A}.") for name in rules
    }
    if odd := sorted((weights.keys() | partners) - rules.keys()):
        raise ValueError(f"{str(file)!r} does not fit its base model at {odd[0]}; restore that model")
    if not rules:
        raise ValueError(f"{str(file)!r} holds no factors; export it again")
    factors = load_tensors(file, rules)
    with torch.no_grad():
        for name, first in factors.items():
            weight = weights[name]
            if weight is None or f".{_A}." not in name:
                continue
            weight.add_(factors[name.replace(f".{_A}.", f".{_B}.")].float() @ first.float(), alpha=alpha / rank)
            if not weight.isfinite().all():
                raise ValueError(f"{str(file)!r} makes {_trained(name)} infinite; export it again")


def _trained(name: str) -> str:
    """The name of the weight that a factor belongs to."""
    return name.removeprefix(_PREFIX).replace(f".{_A}.", ".").replace(f".{_B}.", ".")


def _rank_and_alpha(folder: Path) -> tuple[int, float]:
    """Reads r and α; refuses adapters that are anything other than W + α/r · B A."""
    config, file = _config(folder), folder / CONFIG
    rank = from_json(config.get("r"), int, f"{file}: r")
    alpha = from_json(config.get("lora_alpha"), float, f"{file}: lora_alpha")
    if rank < 1 or not abs(alpha) < torch.finfo(torch.float32).max:
        raise ValueError(f"{str(file)!r} must have a rank r of 1 or more and a finite lora_alpha; export it again")
    others = {name: value for name, value in config.items() if name not in _HARMLESS}
    if others.get("init_lora_weights") in (True, "gaussian", "orthogonal", "eva"):  # others also change W
        del others["init_lora_weights"]
    if on := [name for name, value in others.items() if value not in (None, False, "none", {}, [])]:
        raise ValueError(
            f"{str(file)!r} has the setting {on[0][:40]!r}, which is not supported: merge the adapter into its model "
            "with PEFT (merge_and_unload, then save_pretrained)"
        )
    return rank, alpha


def _config(folder: Path) -> dict[str, Any]:
    plain = read_json(folder / CONFIG)
    if not isinstance(plain, dict) or plain.get("peft_type") != "LORA":
        raise ValueError(f"{str(folder / CONFIG)!r} does not describe a LoRA adapter; export it again")
    return plain
