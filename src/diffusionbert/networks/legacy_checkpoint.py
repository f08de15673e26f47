"""Opens checkpoints of the original release (He et al. 2022): `.th` files with the weights of a BERT.

Such a file is a dictionary written by torch.save, with the weights under `model` beside the state of an optimiser that
is not needed. Only tensors and plain containers are unpickled (`weights_only`), so that code in a file never runs. The
size of the network is read from the shapes of its weights; the vocabulary is that of `bert-base-uncased`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedModel

from diffusionbert.reporting import reason_of

logger = logging.getLogger(__name__)


def load_legacy_checkpoint(path: Path) -> PreTrainedModel:
    """Opens a checkpoint of the original release as a masked language model."""
    weights = _weights(path)
    config = _config(weights, path)
    model: PreTrainedModel = AutoModelForMaskedLM.from_config(config)  # type: ignore[no-untyped-call]
    fit = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    missing = sorted(set(fit.missing_keys) - tied)
    if missing:
        raise ValueError(
            f"{str(path)!r} lacks {len(missing)} weights of a BERT, {missing[0]!r} first: use a complete checkpoint"
        )
    unknown = [name for name in fit.unexpected_keys if not name.endswith("position_ids")]
    if unknown:
        logger.warning("%s: ignored %d weights that a BERT does not have: %s", path, len(unknown), ", ".join(unknown))
    return model


def _weights(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file, without the name prefixes that wrappers add."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"no file {str(path)!r}: give the .th file of an original checkpoint") from None
    except Exception as error:  # a pickle can fail in any way
        raise ValueError(
            f"{str(path)!r} is not a checkpoint of plain tensors ({reason_of(error)[:200]}) and was not opened: "
            "give the .th file of an original checkpoint"
        ) from None
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{str(path)!r} holds no weights: expected a dictionary with the weights under 'model'")
    return {re.sub(r"^(module\.)+", "", name): value for name, value in content.items() if isinstance(value, Tensor)}


def _config(weights: Mapping[str, Tensor], path: Path) -> BertConfig:
    """Reads the size of a BERT from its weights; attention heads are 64 wide, as in every published BERT."""
    try:
        vocabulary, width = weights["bert.embeddings.word_embeddings.weight"].shape
        layers = 1 + max(int(m[1]) for m in (re.match(r"bert\.encoder\.layer\.(\d+)\.", name) for name in weights) if m)
        return BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // 64),
            intermediate_size=weights["bert.encoder.layer.0.intermediate.dense.weight"].shape[0],
            max_position_embeddings=weights["bert.embeddings.position_embeddings.weight"].shape[0],
        )
    except (KeyError, ValueError):
        raise ValueError(f"{str(path)!r} holds no BERT: the original release trains BertForMaskedLM only") from None
