"""Logits of a Hugging Face language model at chosen positions alone.

The head of a language model multiplies every hidden state by the whole vocabulary, and most positions are not targets.
So the base model runs by itself, the target positions are selected, and the modules of the head follow, as the model's
own forward applies them. Which modules these are is written down for the classes below, and for these classes only: the
forward of any other class, a user's own subclass among them, may do more with its logits (scale or cap them). It runs
as a whole, and logits are selected from its output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from diffusionbert.diffusion.shapes import TargetIndices

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
