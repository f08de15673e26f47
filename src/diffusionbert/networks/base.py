"""The contract of a network over tokens, and functions that all networks share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from diffusionbert.diffusion.shapes import PositionMask, TargetIndices, TargetLogProbs, Times, Tokens, TokenSet

# Not cuDNN's: it takes a tenth of a second to plan for each new shape, and nearly every batch has its own shape.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@runtime_checkable
class Network(Protocol):
    """A network over tokens, as objectives and samplers call it."""

    def __call__(self, tokens: Tokens, attend: PositionMask, t: Times, targets: PositionMask) -> TargetLogProbs:
        """Returns log f(v | x_t) at the N target positions: a distribution over allowed tokens, −∞ at all others."""


@runtime_checkable
class HasBackbone(Protocol):
    """A network of this package: a Hugging Face model, and perhaps some parameters beside it.

    For type checkers only: since Python 3.12 `isinstance` with a protocol does not see a module's own modules.
    """

    backbone: PreTrainedModel

    @property
    def allowed(self) -> TokenSet:
        """The allowed tokens, over all ids of the backbone."""

    @property
    def max_length(self) -> int:
        """The number of positions a sequence may have."""


def distribution(logits: Tensor, allowed: TokenSet) -> TargetLogProbs:
    """Returns log-probabilities over the allowed tokens, in float32 or better; overwrites the logits.

    Logits are most of the memory traffic of a step: they are neither copied to another precision nor masked in the
    backward pass, where a softmax gives tokens of probability 0 no gradient anyway.
    """
    with torch.no_grad():
        logits.masked_fill_(~allowed, -torch.inf)
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def padded_allowed(allowed: TokenSet, vocab_size: int) -> Tensor:
    """Extends the allowed tokens to all ids of a backbone; ids beyond the tokenizer's are padding, never allowed."""
    if not allowed.any():
        raise ValueError("`allowed` must mark at least one token, got none; mark the ids that are not special")
    if len(allowed) > vocab_size:
        raise ValueError(
            f"the allowed tokens go up to id {len(allowed) - 1}, but the network has {vocab_size} ids: "
            "use the tokenizer it was trained with, or resize its embeddings"
        )
    padded = allowed.new_zeros(vocab_size)
    padded[: len(allowed)] = allowed
    return padded


def num_reserved_positions(backbone: PreTrainedModel) -> int:
    """Counts the positions that RoBERTa and its relatives reserve for padding: up to their padding index, inclusive."""
    for name, module in backbone.base_model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def require_length(length: int, max_length: int) -> None:
    """Refuses sequences that are longer than a network can read."""
    if length > max_length:
        raise ValueError(
            f"sequences have {length} positions, but this network reads at most {max_length}: "
            "cut or split the texts, or use a backbone with more positions"
        )


def attention_kernels() -> AbstractContextManager[None]:
    """Chooses the attention kernels for the calls inside."""
    if torch.compiler.is_compiling():
        return sdpa_kernel(_KERNELS)
    return _shared_kernels


@final
class _SharedKernels(AbstractContextManager[None]):
    """The choice of kernels, shared by overlapping calls.

    It is a setting of the whole process. If each thread set and restored it by itself, one would restore it while
    another runs, and that one would restore what the first had set. So the first call sets it, the last restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_calls = 0
        self._choice: AbstractContextManager[None]

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_calls:
                self._choice = sdpa_kernel(_KERNELS)
                self._choice.__enter__()
            self._num_calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._num_calls -= 1
            if not self._num_calls:
                self._choice.__exit__(None, None, None)


_shared_kernels = _SharedKernels()


# ---- heads ----------------------------------------------------------------------------------------------------------
#
# Logits of a Hugging Face language model at chosen positions alone.
#
# The head of a language model multiplies every hidden state by the whole vocabulary, and most positions are not
# targets. So the base model runs by itself, the target positions are selected, and the modules of the head follow, as
# the model's own forward applies them. Which modules these are is written down for the classes below, and for these
# classes only: the forward of any other class, a user's own subclass among them, may do more with its logits (scale or
# cap them). It runs as a whole, and logits are selected from its output.


Head = Callable[[PreTrainedModel, Tensor], Tensor]
"""Turns hidden states [1, N, D] into logits [1, N, V]."""


def head_of(backbone: PreTrainedModel) -> Head | None:
    """Returns the head of a model whose forward ends with it, or None."""
    kind = type(backbone)
    return HEADS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def logits_at(
    positions: TargetIndices, backbone: PreTrainedModel, head: Head | None, call: Callable[[Any], Any]
) -> Tensor:
    """Returns logits [N, V] at positions that are numbered through all sequences; `call` runs a model on its inputs."""
    if head is None:
        return _select(call(backbone).logits, positions)
    return head(backbone, _select(call(backbone.base_model).last_hidden_state, positions)[None]).squeeze(0)


def _select(values: Tensor, positions: TargetIndices) -> Tensor:
    return values.flatten(0, 1).index_select(0, positions)


def _modules(names: tuple[str, ...], backbone: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Applies modules of the model one after another."""
    for name in names:
        hidden = getattr(backbone, name)(hidden)
    return hidden


def _deberta(backbone: Any, hidden: Tensor) -> Tensor:
    if backbone.legacy:
        return _modules(("cls",), backbone, hidden)
    logits: Tensor = backbone.lm_predictions(hidden, backbone.get_input_embeddings())
    return logits


_CLS = partial(_modules, ("cls",))
_LM_HEAD = partial(_modules, ("lm_head",))
_GENERATOR = partial(_modules, ("generator_predictions", "generator_lm_head"))

HEADS: dict[str, Head] = {
    "AlbertForMaskedLM": partial(_modules, ("predictions",)),
    "BertForMaskedLM": _CLS,
    "CamembertForMaskedLM": _LM_HEAD,
    "ConvBertForMaskedLM": _GENERATOR,
    "DebertaForMaskedLM": _deberta,
    "DebertaV2ForMaskedLM": _deberta,
    "DistilBertForMaskedLM": partial(
        _modules, ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector")
    ),
    "ElectraForMaskedLM": _GENERATOR,
    "ErnieForMaskedLM": _CLS,
    "EuroBertForMaskedLM": _LM_HEAD,
    "MegatronBertForMaskedLM": _CLS,
    "ModernBertForMaskedLM": partial(_modules, ("head", "decoder")),
    "MPNetForMaskedLM": _LM_HEAD,
    "NomicBertForMaskedLM": _CLS,
    "RemBertForMaskedLM": _CLS,
    "RobertaForMaskedLM": _LM_HEAD,
    "RobertaPreLayerNormForMaskedLM": _LM_HEAD,
    "RoFormerForMaskedLM": _CLS,
    "XLMRobertaForMaskedLM": _LM_HEAD,
    "XLMRobertaXLForMaskedLM": _LM_HEAD,
    # Decoders. Not among them: Gemma 2 and 3 cap their logits, Cohere and Granite scale them.
    "BloomForCausalLM": _LM_HEAD,
    "GemmaForCausalLM": _LM_HEAD,
    "GPT2LMHeadModel": _LM_HEAD,
    "GPTNeoForCausalLM": _LM_HEAD,
    "GPTNeoXForCausalLM": _LM_HEAD,
    "LlamaForCausalLM": _LM_HEAD,
    "MistralForCausalLM": _LM_HEAD,
    "Olmo2ForCausalLM": _LM_HEAD,
    "OPTForCausalLM": _LM_HEAD,
    "PhiForCausalLM": _LM_HEAD,
    "Phi3ForCausalLM": _LM_HEAD,
    "Qwen2ForCausalLM": _LM_HEAD,
    "Qwen3ForCausalLM": _LM_HEAD,
    "SmolLM3ForCausalLM": _LM_HEAD,
}
"""For each class of transformers, the end of its forward."""
