"""Opens checkpoints of the original release (He et al. 2022): `.th` files of a BERT's weights.

They hold a dictionary with the weights under `model`, beside an optimiser's state that we do not need, and were
made by torch.save. Only tensors and plain containers are unpickled (`weights_only`): code in a file never runs.
The size of the network is read off the weights; the vocabulary is that of `bert-base-uncased`.
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

from diffusionbert.errors import reason_of

logger = logging.getLogger(__name__)


def load_original(path: Path) -> PreTrainedModel:
    """Makes a masked language model of an original checkpoint."""
    weights = _weights(path)
    config = _config(weights, path)
    model: PreTrainedModel = AutoModelForMaskedLM.from_config(config)  # type: ignore[no-untyped-call]
    fit = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    missing = sorted(set(fit.missing_keys) - tied)
    if missing:
        raise ValueError(f"{str(path)!r} lacks {len(missing)} weights of a BERT, {missing[0]!r} first; is it complete?")
    unknown = [name for name in fit.unexpected_keys if not name.endswith("position_ids")]
    if unknown:
        logger.warning(
            "%s: left out %d weights that a BERT has no place for: %s", path, len(unknown), ", ".join(unknown)
        )
    return model


def _weights(path: Path) -> dict[str, Tensor]:
    """The tensors of the file, without the prefixes that wrappers add."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}; give the .th file of an original checkpoint") from None
    except Exception as error:  # a pickle can fail in any way
        raise ValueError(
            f"{str(path)!r} is no checkpoint of plain tensors ({reason_of(error)[:200]}); it is not opened"
        ) from None
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{str(path)!r} holds no weights; expected a dictionary with the weights under 'model'")
    return {re.sub(r"^(module\.)+", "", name): value for name, value in content.items() if isinstance(value, Tensor)}


def _config(weights: Mapping[str, Tensor], path: Path) -> BertConfig:
    """The size of a BERT, read off its weights; heads are 64 wide, as in every published BERT."""
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
        raise ValueError(f"{str(path)!r} holds no BERT; the original release trains BertForMaskedLM only") from None
