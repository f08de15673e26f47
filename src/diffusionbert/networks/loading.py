"""Opens Hugging Face models from a folder or by their names on the Hub: safetensors alone, one-line errors."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from diffusionbert.errors import reason_of
from diffusionbert.hub import absent, located, quiet

logger = logging.getLogger(__name__)
FILES = "a folder with config.json and model.safetensors"
"""What a model is opened from, in words."""


@dataclass(frozen=True)
class _Kind:
    """A family of models: what it is called, and how transformers opens it."""

    words: str
    auto: Any
    examples: str

    def holds(self, config: PreTrainedConfig) -> bool:
        """Whether a model is of this family; a BERT could be run as a decoder, but was not trained as one."""
        if config.is_encoder_decoder:
            return False
        is_masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
        return is_masked if self is _MASKED else type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not is_masked


_MASKED = _Kind(
    "masked language model",
    AutoModelForMaskedLM,
    "a BERT-like encoder (bert, roberta, electra, distilbert, modernbert, deberta-v2, …)",
)
_CAUSAL = _Kind("causal language model", AutoModelForCausalLM, "a decoder (gpt2, opt, llama, qwen2, …)")


def load_masked_lm(name_or_folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Opens a masked language model from a folder (`config.json`, `model.safetensors`) or by its Hub name.

    An encoder without a head gets a new one, and a warning says so; an encoder that lacks weights is refused.
    Weights are safetensors alone, because a pickle can run code, and become `dtype` whatever the file holds.
    """
    return _load(_MASKED, name_or_folder, dtype)


def load_causal_lm(name_or_folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Opens a causal language model, such as GPT-2, in the same way."""
    return _load(_CAUSAL, name_or_folder, dtype)


def new_lm(folder: Path) -> PreTrainedModel:
    """Makes the language model that a folder's config.json describes, with random weights."""
    kind = _CAUSAL if is_causal(folder) else _MASKED
    model: PreTrainedModel = kind.auto.from_config(_config(kind, folder, folder), dtype=torch.float32)
    return model


def is_causal(folder: Path) -> bool:
    """Whether a folder holds a causal language model."""
    return _CAUSAL.holds(_read_config(_CAUSAL, folder, folder))


def _load(kind: _Kind, name_or_folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel
    folder = _folder(kind, name_or_folder)
    with quiet():
        config = _config(kind, name_or_folder, folder)
        try:
            model, report = kind.auto.from_pretrained(
                str(folder),
                config=config,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # we refuse them below, with their names
                output_loading_info=True,
            )
        except Exception as error:  # whatever the library stumbles over, the user gets one line
            raise _unreadable(kind, name_or_folder, folder, error) from error
    missing = sorted(report["missing_keys"])
    random = [key for key in missing if key.startswith(f"{model.base_model_prefix}.")]
    random += sorted(key for key, *_ in report["mismatched_keys"])
    if random:
        raise ValueError(
            f"{str(name_or_folder)!r} is no complete {type(model).__name__}: {len(random)} weights are absent or of "
            f"another shape, {random[0]} first; use a whole checkpoint whose config.json fits its weights"
        )
    if missing:
        logger.warning(
            "%s has no %s head; it gets a new one, to be trained: %s",
            name_or_folder,
            kind.words.replace(" ", "-"),
            ", ".join(missing),
        )
    return model


def _folder(kind: _Kind, name_or_folder: str | Path) -> Path:
    """Where the model's files are, brought here if need be."""
    if isinstance(name_or_folder, Path) and not name_or_folder.is_dir():
        raise ValueError(f"no folder {str(name_or_folder)!r}: give a model's folder, or its Hub name as a string")
    return located(kind.words, name_or_folder, FILES)


def _config(kind: _Kind, name_or_folder: str | Path, folder: Path) -> PreTrainedConfig:
    """Reads what kind of model it is, and refuses all others."""
    config = _read_config(kind, name_or_folder, folder)
    if not kind.holds(config):
        raise ValueError(
            f"{str(name_or_folder)!r} is of the kind {config.model_type!r}, which is no {kind.words}: "
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
        return ValueError(f"{str(damaged)!r} is damaged ({reason_of(error)}): copy it anew, all of it")
    if any(folder.glob("pytorch_model*.bin")):
        return ValueError(
            f"{str(name_or_folder)!r} holds its weights as pickles, which can run code and are never loaded: "
            "convert them to model.safetensors where you trust them (from_pretrained, then save_pretrained)"
        )
    return _absent(kind, name_or_folder, error)


def _absent(kind: _Kind, name_or_folder: str | Path, error: Exception) -> ValueError:
    return absent(kind.words, name_or_folder, FILES, error)


def _is_damaged(weights: Path) -> bool:
    """Whether a file is cut short, or never held tensors."""
    try:
        with safe_open(weights, "pt"):
            return False
    except SafetensorError:
        return True
