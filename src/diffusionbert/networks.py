"""Denoisers: log f(v | x_t) from any Hugging Face `*ForMaskedLM`.

`Network` is the one contract that objectives and samplers use; `Denoiser` meets it with a masked language
model that is told the time by a `TimeConditioning`; `load_masked_lm` opens such a model from a folder or the
Hub. Token ids come in and log-probabilities go out: this module knows nothing of strings, noise or losses.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from diffusionbert.conditioning import TimeConditioning, after_first, rerouted
from diffusionbert.shapes import AskedLogProbs, Batch, Places, RowTimes, Tokens, TokenSet

logger = logging.getLogger(__name__)

# Not cuDNN's: it makes a plan for each new shape, a tenth of a second long, and nearly every batch has its own shape.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@runtime_checkable
class Network(Protocol):
    """What every objective and sampler asks: which words may stand at these places, at this time?"""

    def __call__(self, tokens: Tokens, attend: Places, t: RowTimes, asked: Places) -> AskedLogProbs:
        """Gives log f(v | x_t) at the N asked places: a distribution over writable tokens, −∞ at all others."""


def ask(network: Network, x_t: Batch, t: RowTimes, asked: Places) -> AskedLogProbs:
    """Asks about marked places; rows without any are not sent."""
    rows = asked.any(dim=1).nonzero()[:, 0]
    sent = x_t.rows(rows)
    return network(sent.tokens, sent.attend, t[rows], asked[rows, : sent.tokens.shape[1]])


@final
class Denoiser(nn.Module):
    """A masked language model that is told the time and answers at asked places only.

    `writable` marks the ids that may be written. Where the model's vocabulary is larger than the tokenizer's,
    the rows beyond are padding and never written.

    One call at a time: a forward takes the backbone's encoder in hand while it runs, so threads take turns.
    """

    writable: TokenSet

    def __init__(self, backbone: PreTrainedModel, conditioning: TimeConditioning, writable: TokenSet) -> None:
        super().__init__()
        self.backbone = backbone
        self.conditioning = conditioning
        # Not persistent: it belongs to the vocabulary, and is no weight.
        self.register_buffer("writable", _padded(writable, backbone.config.vocab_size), persistent=False)
        self._num_positions = backbone.config.max_position_embeddings - _num_reserved_positions(backbone)

    @property
    def max_length(self) -> int:
        """The number of places a row may have."""
        return int(self._num_positions - self.conditioning.num_prefix)

    def forward(self, tokens: Tokens, attend: Places, t: RowTimes, asked: Places) -> AskedLogProbs:
        """Gives log f(v | x_t) at the asked places, in float32 or better."""
        if tokens.shape[1] > self.max_length:
            raise ValueError(
                f"rows have {tokens.shape[1]} places, but this network reads at most {self.max_length}: "
                "cut or split the sentences, or take a backbone with more positions"
            )
        prefix = asked.new_zeros(len(asked), self.conditioning.num_prefix)
        keep = partial(_at_places, after_first(asked, prefix).flatten().nonzero().squeeze(1))
        with (
            sdpa_kernel(_ATTENTION),
            self.conditioning.applied(self.backbone, tokens, attend, t) as inputs,
            rerouted(self.backbone, {self.backbone.base_model_prefix: keep}),
        ):
            logits: Tensor = self.backbone(**inputs, return_dict=True).logits.squeeze(0)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.masked_fill_(~self.writable, -torch.inf).log_softmax(dim=-1)


def load_masked_lm(name_or_folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Opens a masked language model from a folder (`config.json`, `model.safetensors`) or by its Hub name.

    An encoder without a head gets a new one, and a warning says so; an encoder that lacks weights is refused.
    Weights are safetensors alone, because a pickle can run code, and become `dtype` whatever the file holds.
    """
    model: PreTrainedModel
    is_download = not Path(name_or_folder).is_dir()
    with quiet(bars=is_download and sys.stderr.isatty()):
        config = _masked_lm_config(name_or_folder)
        try:
            model, report = AutoModelForMaskedLM.from_pretrained(
                str(name_or_folder),
                config=config,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # we refuse them below, with their names
                output_loading_info=True,
            )
        except Exception as error:  # whatever the library stumbles over, the user gets one line
            raise _unreadable(name_or_folder, error) from error
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
            "%s has no masked-language-model head; it gets a new one, to be trained: %s",
            name_or_folder,
            ", ".join(missing),
        )
    return model


def _masked_lm_config(name_or_folder: str | Path) -> PreTrainedConfig:
    """Reads what kind of model it is, and refuses all but masked language models."""
    if isinstance(name_or_folder, Path) and not name_or_folder.is_dir():
        raise ValueError(f"no folder {str(name_or_folder)!r}: give a model's folder, or its Hub name as a string")
    config: PreTrainedConfig
    try:
        config = AutoConfig.from_pretrained(str(name_or_folder), trust_remote_code=False)
    except Exception as error:  # as above
        raise _unreadable(name_or_folder, error) from error
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or config.is_encoder_decoder:
        raise ValueError(
            f"{str(name_or_folder)!r} is of the kind {config.model_type!r}, which is no masked language model: "
            "use a BERT-like encoder (bert, roberta, electra, distilbert, modernbert, deberta-v2, …)"
        )
    return config


def _unreadable(name_or_folder: str | Path, error: Exception) -> ValueError:
    if any(Path(name_or_folder).glob("pytorch_model*.bin")):
        return ValueError(
            f"{str(name_or_folder)!r} holds its weights as pickles, which can run code and are never loaded: "
            "convert them to model.safetensors where you trust them (from_pretrained, then save_pretrained)"
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(
        f"no masked language model at {str(name_or_folder)!r}: expected a folder with config.json and "
        f"model.safetensors, or a name on the Hub and a connection to it ({reason})"
    )


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Keeps away transformers' table of missing weights, which we say in one line, and its progress bars."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    if not bars:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _at_places(places: Tensor, encoder: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Lets the head see the vectors of N places only: [B, L, D] becomes [1, N, D]."""
    output = encoder(*inputs, **options)
    output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, places)[None]
    return output


def _padded(writable: TokenSet, vocab_size: int) -> Tensor:
    if not writable.any():
        raise ValueError("no token may be written: mark at least one id that is not special")
    if len(writable) > vocab_size:
        raise ValueError(
            f"the writable tokens go up to id {len(writable) - 1}, but the network knows {vocab_size} ids: "
            "use the tokenizer it was trained with, or resize its embeddings"
        )
    padded = writable.new_zeros(vocab_size)
    padded[: len(writable)] = writable
    return padded


def _num_reserved_positions(backbone: PreTrainedModel) -> int:
    """Counts the positions that RoBERTa's kin keep for padding: up to and with their padding index."""
    for name, module in backbone.base_model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0
