"""Opens Hugging Face models from a folder or by their name on the Hub: safetensors only, one-line errors."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from typing_extensions import Unpack

from diffusionbert.reporting import reason_of
from diffusionbert.storage.hub import HubOptions, locate, not_found, quiet

logger = logging.getLogger(__name__)
FILES = "a folder with config.json and model.safetensors"
"""What a model is opened from, for error messages."""


@dataclass(frozen=True)
class _Kind:
    """A kind of language model: its name, and the classes of transformers that open it."""

    name: str
    auto: Any
    classes: Any
    examples: str

    def includes(self, config: PreTrainedConfig) -> bool:
        """Whether a model is of this kind; a BERT could be run as a decoder, but was not trained as one."""
        if config.is_encoder_decoder:
            return False
        is_masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
        return is_masked if self is _MASKED else type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not is_masked


_MASKED = _Kind(
    "masked language model",
    AutoModelForMaskedLM,
    MODEL_FOR_MASKED_LM_MAPPING,
    "a BERT-like encoder (bert, roberta, electra, distilbert, modernbert, deberta-v2, …)",
)
_CAUSAL = _Kind(
    "causal language model",
    AutoModelForCausalLM,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    "a decoder (gpt2, opt, llama, qwen2, …)",
)


def load_masked_lm(
    name_or_folder: str | Path, *, dtype: torch.dtype = torch.float32, **options: Unpack[HubOptions]
) -> PreTrainedModel:
    """Opens a masked language model.

    An encoder without a head gets a randomly initialised one, with a warning; an encoder with missing weights is
    refused. Only safetensors are read, because a pickle can run code.

    Args:
        name_or_folder: a folder with `config.json` and `model.safetensors`, or a name on the Hub.
        dtype: the precision of the weights, whatever that of the file is.
        options: `revision`, `token` and `local_files_only`, for a name on the Hub.
    """
    return _load(_MASKED, name_or_folder, dtype, **options)


def load_causal_lm(
    name_or_folder: str | Path, *, dtype: torch.dtype = torch.float32, **options: Unpack[HubOptions]
) -> PreTrainedModel:
    """Opens a causal language model, such as GPT-2, in the same way."""
    return _load(_CAUSAL, name_or_folder, dtype, **options)


def require_reopenable(backbone: PreTrainedModel) -> None:
    """Refuses a model that could not be opened again from its saved folder without remote code.

    A user's own class is opened if `AutoConfig.register` and `AutoModelForMaskedLM.register` (or that of
    `AutoModelForCausalLM`) were called for it in the process that opens it.
    """
    config, own = backbone.config, type(backbone)
    kind = next((kind for kind in (_MASKED, _CAUSAL) if kind.includes(config)), None)
    is_known = config.model_type in CONFIG_MAPPING and CONFIG_MAPPING[config.model_type] is type(config)
    if kind is None or not is_known:
        config_name = type(config).__name__
        raise ValueError(
            f"a saved {own.__name__} could not be opened again, since transformers does not know {config_name} "
            f"(model type {config.model_type!r}): call AutoConfig.register({config.model_type!r}, {config_name}) and "
            f"AutoModelForMaskedLM.register({config_name}, {own.__name__}) first"
        )
    opened = kind.classes[type(config)]
    if opened is not own:
        raise ValueError(
            f"a saved {own.__name__} would be opened again as a {opened.__name__}: give it a config class with a model "
            f"type of its own, and register both with AutoConfig and {kind.auto.__name__}"
        )


def new_lm(folder: Path) -> PreTrainedModel:
    """Makes the language model that a folder's config.json describes, randomly initialised."""
    kind = _CAUSAL if is_causal(folder) else _MASKED
    model: PreTrainedModel = kind.auto.from_config(_config(kind, folder, folder), dtype=torch.float32)
    return model


def is_causal(folder: Path) -> bool:
    """Whether a folder holds a causal language model."""
    return _CAUSAL.includes(_read_config(_CAUSAL, folder, folder))


def _load(
    kind: _Kind, name_or_folder: str | Path, dtype: torch.dtype, **options: Unpack[HubOptions]
) -> PreTrainedModel:
    model: PreTrainedModel
    folder = _folder(kind, name_or_folder, **options)
    with quiet():
        config = _config(kind, name_or_folder, folder)
        try:
            model, report = kind.auto.from_pretrained(
                str(folder),
                config=config,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
        except Exception as error:  # whatever fails in the library, the user gets one line
            raise _unreadable(kind, name_or_folder, folder, error) from error
    missing = sorted(report["missing_keys"])
    random = [key for key in missing if key.startswith(f"{model.base_model_prefix}.")]
    random += sorted(key for key, *_ in report["mismatched_keys"])
    if random:
        raise ValueError(
            f"{str(name_or_folder)!r} is not a complete {type(model).__name__}: {len(random)} weights are missing or "
            f"have another shape, {random[0]} first; use a complete checkpoint whose config.json fits its weights"
        )
    if missing:
        logger.warning(
            "%s has no %s head; it gets a randomly initialised one, to be trained: %s",
            name_or_folder,
            kind.name.replace(" ", "-"),
            ", ".join(missing),
        )
    return model


def _folder(kind: _Kind, name_or_folder: str | Path, **options: Unpack[HubOptions]) -> Path:
    """Returns the folder with the model's files, downloaded if need be."""
    if isinstance(name_or_folder, Path) and not name_or_folder.is_dir():
        raise ValueError(f"no folder {str(name_or_folder)!r}: give a model's folder, or its Hub name as a string")
    return locate(kind.name, name_or_folder, FILES, **options)


def _config(kind: _Kind, name_or_folder: str | Path, folder: Path) -> PreTrainedConfig:
    """Reads the config and refuses models of another kind."""
    config = _read_config(kind, name_or_folder, folder)
    if not kind.includes(config):
        raise ValueError(
            f"{str(name_or_folder)!r} has the model type {config.model_type!r}, which is not a {kind.name}: "
            f"use {kind.examples}"
        )
    return config


def _read_config(kind: _Kind, name_or_folder: str | Path, folder: Path) -> PreTrainedConfig:
    config: PreTrainedConfig
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # as above
        raise _unreadable(kind, name_or_folder, folder, error) from error
    return config


def _unreadable(kind: _Kind, name_or_folder: str | Path, folder: Path, error: Exception) -> ValueError:
    damaged = next(filter(_is_damaged, sorted(folder.glob("*.safetensors"))), None)
    if damaged is not None:
        return ValueError(f"{str(damaged)!r} is damaged ({reason_of(error)}): copy the whole file again")
    if any(folder.glob("pytorch_model*.bin")):
        return ValueError(
            f"{str(name_or_folder)!r} stores its weights as pickles, which can run code and are never loaded: "
            "convert them to model.safetensors where you trust them (from_pretrained, then save_pretrained)"
        )
    return not_found(kind.name, name_or_folder, FILES, error)


def _is_damaged(weights: Path) -> bool:
    """Whether a file is truncated, or not a safetensors file."""
    try:
        with safe_open(weights, "pt"):
            return False
    except SafetensorError:
        return True
