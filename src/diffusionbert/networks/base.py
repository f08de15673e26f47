"""The contract of a network over tokens, and functions that all networks share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from diffusionbert.diffusion.shapes import (
    Batch,
    PerPosition,
    PerTarget,
    PositionMask,
    TargetIndices,
    TargetLogProbs,
    Targets,
    TargetTokens,
    Times,
    Tokens,
    TokenSet,
)
from diffusionbert.diffusion.tokens import VALUES_IN_CACHE, DensePrediction, Prediction

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Not cuDNN attention: it spends a tenth of a second planning each new shape, and nearly every batch has its own shape.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@runtime_checkable
class Network(Protocol):
    """A network over tokens, as objectives and samplers call it."""

    def __call__(self, tokens: Tokens, attention_mask: PositionMask, t: Times, targets: PositionMask) -> TargetLogProbs:
        """Returns log f(v | x_t) at the N target positions: a distribution over allowed tokens, −∞ at all others."""


@runtime_checkable
class AnswersAt(Protocol):
    """A network that takes target positions as indices; finding them in a mask would wait for the GPU."""

    def log_probs_at(
        self, tokens: Tokens, attention_mask: PositionMask | None, t: Times, positions: TargetIndices
    ) -> TargetLogProbs:
        """Same as calling it; `positions` index the flattened batch, and no attention mask means no padding."""


@runtime_checkable
class PredictsInParts(Protocol):
    """A network whose log-probabilities need not exist all at once."""

    def predict(self, x_t: Batch, t: Times, targets: Targets) -> Prediction:
        """The distribution at the target positions."""


@runtime_checkable
class HasBackbone(Protocol):
    """A network of this package: a Hugging Face model, perhaps with some extra parameters.

    For type checkers only: since Python 3.12, `isinstance` with a protocol does not see submodules.
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
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if torch.compiler.is_compiling():
        return logits.masked_fill(~allowed, -torch.inf).log_softmax(dim=-1, dtype=dtype)  # in one kernel
    with torch.no_grad():
        if logits.is_cuda:
            logits.masked_fill_(~allowed, -torch.inf)
        else:  # a seventh of the time of `masked_fill_` with a mask that all positions share
            logits.clamp_(max=logits.new_full(allowed.shape, torch.inf).masked_fill_(~allowed, -torch.inf))
    if torch.is_grad_enabled() or logits.is_cuda or logits.dtype != dtype:
        return logits.log_softmax(dim=-1, dtype=dtype)
    for part in torch.split(logits, max(1, VALUES_IN_CACHE // len(allowed))):
        part.copy_(part.log_softmax(dim=-1))
    return logits


def copy_sharing_parameters(network: ModuleT) -> ModuleT:
    """The same network with the same parameters and buffers, not copied."""
    return deepcopy(network, {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())})


def unsplit_modules(module: nn.Module) -> list[nn.Module]:
    """The parts of Hugging Face models that are never split, as transformers names them: layers, perhaps embeddings."""
    models = [model for model in module.modules() if isinstance(model, PreTrainedModel)]
    names = {name for model in models for name in model._no_split_modules or ()}
    return [part for part in module.modules() if type(part).__name__ in names]


def padded_allowed(allowed: TokenSet, vocab_size: int) -> Tensor:
    """Extends the allowed tokens to all ids of a backbone; ids beyond the tokenizer's are padding, never allowed."""
    if not allowed.any():
        raise ValueError("`allowed` must mark at least one token, got none; mark the ids that are not special")
    if len(allowed) > vocab_size:
        raise ValueError(
            f"the allowed tokens go up to id {len(allowed) - 1}, but the network has {vocab_size} ids: "
            "use the tokenizer it was trained with, or resize its embeddings"
        )
    return functional.pad(allowed, (0, vocab_size - len(allowed)))


def max_positions(backbone: PreTrainedModel) -> int:
    """The number of positions of an encoder; RoBERTa-like models reserve those up to their padding index."""
    size = int(backbone.config.max_position_embeddings)
    for name, module in backbone.base_model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return size if module.padding_idx is None else size - module.padding_idx - 1
    return size


def require_length(length: int, max_length: int) -> None:
    """Refuses sequences longer than a network can read."""
    if length > max_length:
        raise ValueError(
            f"sequences have {length} positions, but this network reads at most {max_length}: "
            "cut or split the texts, or use a backbone with more positions"
        )


def attention_kernels() -> AbstractContextManager[None]:
    """A context in which attention uses our choice of kernels."""
    return sdpa_kernel(_KERNELS) if torch.compiler.is_compiling() else _shared_kernels


class _SharedKernels(AbstractContextManager[None]):
    """The choice of kernels, which is process-wide: of overlapping calls, the first sets it, the last restores it."""

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

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_calls -= 1
            if not self._num_calls:
                self._choice.__exit__(None, None, None)


_shared_kernels = _SharedKernels()


# ---- heads ----------------------------------------------------------------------------------------------------------
#
# The head of a language model multiplies every hidden state by the whole vocabulary, but most positions are not
# targets. So the base model runs by itself, and the head's modules are applied to the target positions alone. The
# forward of a class that is not listed below may do more with its logits (scale or cap them), so it runs as a whole.

Head = Callable[[PreTrainedModel, Tensor], Tensor]  # turns hidden states [1, N, D] into logits [1, N, V]


def head_of(backbone: PreTrainedModel) -> Head | None:
    """Returns the head of a model whose forward ends with it, or None. Call before sharding, which renames classes."""
    kind = type(backbone)
    return HEADS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


class TargetHead:
    """Turns hidden states at target positions into log-probabilities over the allowed tokens."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        self._head = head_of(backbone)
        self._reduce: Callable[..., list[Tensor]] = _reduced
        self._values_at_once = VALUES_AT_ONCE

    def hidden_at(self, positions: TargetIndices, backbone: PreTrainedModel, call: Callable[[Any], Any]) -> Tensor:
        """The hidden states [N, D], or logits [N, V] if the head cannot be run separately; `call` runs a model."""
        with attention_kernels():
            found = call(backbone).logits if self._head is None else call(backbone.base_model).last_hidden_state
            chosen: Tensor = found.flatten(0, 1).index_select(0, positions)
        return chosen

    def log_probs(self, backbone: PreTrainedModel, hidden: Tensor, allowed: TokenSet) -> TargetLogProbs:
        """The log-probabilities [N, V] at positions with these hidden states."""
        # `distribution` overwrites logits; hidden states must stay intact.
        logits = hidden.clone() if self._head is None else self._head(backbone, hidden[None]).squeeze(0)
        return distribution(logits, allowed)

    def prediction(self, backbone: PreTrainedModel, hidden: Tensor, allowed: TokenSet) -> Prediction:
        """The same, computed only when and as far as needed."""
        if self._reduce is _reduced and len(hidden) * len(allowed) <= self._values_at_once:
            return DensePrediction(self.log_probs(backbone, hidden, allowed))  # serves any number of reductions
        log_probs = partial(self.log_probs, backbone)
        return HeadPrediction(hidden, allowed, log_probs, self._reduce, self._values_at_once)

    def compile(self, backend: str | Callable[..., Any]) -> None:
        """Fuses the head with the reductions of a loss, so that log-probabilities are never stored."""
        self._reduce = torch.compile(_reduced, dynamic=True, backend=backend)
        self._values_at_once = COMPILED_VALUES_AT_ONCE


VALUES_AT_ONCE = 2**27
"""How many log-probabilities a loss computes at once: a gigabyte or two, including what gradients need."""
COMPILED_VALUES_AT_ONCE = 2**30
"""The same for compiled reductions, which store nothing but logits in half precision: two gigabytes."""


class HeadPrediction(Prediction):
    """The distribution at targets, given their hidden states; computed in parts, and again in the backward pass."""

    def __init__(
        self,
        hidden: Tensor,
        allowed: TokenSet,
        log_probs: Callable[[Tensor, TokenSet], TargetLogProbs],
        reduce: Callable[..., list[Tensor]],
        values_at_once: int,
    ) -> None:
        self._hidden, self._allowed, self._log_probs, self._reduce = hidden, allowed, log_probs, reduce
        self._values_at_once = values_at_once
        self.vocab_size = len(allowed)

    def log_probs(self, tokens: TargetTokens, log_weights: Sequence[Tensor], sequences: TargetIndices) -> list[Tensor]:
        # Cast once, not for each target, and stacked: torch.compile fails when the length of a list changes.
        dtype = torch.promote_types(self._hidden.dtype, torch.float32)
        weights = torch.stack([table.to(dtype) for table in log_weights]) if log_weights else None
        return self._in_parts(partial(self._reduce, self._log_probs, self._allowed, weights), tokens, sequences)

    def dense(self) -> TargetLogProbs:
        return self._log_probs(self._hidden, self._allowed)

    @torch.no_grad()
    def mean(self, values: Tensor) -> PerTarget:
        def expected(hidden: Tensor) -> list[Tensor]:
            log_f = self._log_probs(hidden, self._allowed)
            return [(log_f.exp() @ values.to(log_f.dtype)).double()]

        return self._in_parts(expected, values_at_once=min(VALUES_AT_ONCE, self._values_at_once))[0]

    def _in_parts(
        self, function: Callable[..., list[Tensor]], *inputs: Tensor, values_at_once: int | None = None
    ) -> list[Tensor]:
        """Applies a function of N rows in parts, so that only one part's values are stored at a time."""
        at_once = max(1, (values_at_once or self._values_at_once) // self.vocab_size)
        if len(self._hidden) <= at_once:
            return function(self._hidden, *inputs)
        parts = [
            checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
            if torch.is_grad_enabled()
            else function(*part)
            for part in zip(*(torch.split(rows, at_once) for rows in (self._hidden, *inputs)), strict=True)
        ]
        return [torch.cat(values) for values in zip(*parts, strict=True)]


def _reduced(
    log_probs: Callable[[Tensor, TokenSet], TargetLogProbs],
    allowed: TokenSet,
    log_weights: Tensor | None,
    hidden: Tensor,
    tokens: TargetTokens,
    sequences: TargetIndices,
) -> list[Tensor]:
    weights = [] if log_weights is None else list(log_weights)
    return DensePrediction(log_probs(hidden, allowed)).log_probs(tokens, weights, sequences)


def predict(network: Network, x_t: Batch, t: Times, targets: Targets) -> Prediction:
    """The network's distribution at target positions: in parts if the network supports it, else dense."""
    if isinstance(network, PredictsInParts):
        return network.predict(x_t, t, targets)
    return DensePrediction(network(x_t.tokens, x_t.attention_mask, t, targets.mask))


def nats_at(network: Network, x_t: Batch, t: Times, targets: PositionMask, x0: Tokens) -> PerPosition:
    """-log f(x0 | x_t) at each target position, in nats; 0 elsewhere."""
    chosen = Targets.of(targets, fixed=x_t.has_fixed_targets)
    return chosen.scatter(-predict(network, x_t, t, chosen).log_prob(chosen.take(x0)))


def _modules(names: tuple[str, ...], backbone: PreTrainedModel, hidden: Tensor) -> Tensor:
    for name in names:
        hidden = getattr(backbone, name)(hidden)
    return hidden


def _deberta(backbone: Any, hidden: Tensor) -> Tensor:
    if backbone.legacy:
        return _modules(("cls",), backbone, hidden)
    logits: Tensor = backbone.lm_predictions(hidden, backbone.get_input_embeddings())
    return logits


_MODULES = {
    "predictions": "AlbertForMaskedLM",
    "cls": "BertForMaskedLM ErnieForMaskedLM MegatronBertForMaskedLM NomicBertForMaskedLM RemBertForMaskedLM "
    "RoFormerForMaskedLM",
    "generator_predictions generator_lm_head": "ConvBertForMaskedLM ElectraForMaskedLM",
    "vocab_transform activation vocab_layer_norm vocab_projector": "DistilBertForMaskedLM",
    "head decoder": "ModernBertForMaskedLM",
    "lm_head decoder": "ModernBertDecoderForCausalLM",
    # Gemma 2 and 3, which cap their logits, and Cohere and Granite, which scale them, must not be here.
    "lm_head": "CamembertForMaskedLM EuroBertForMaskedLM MPNetForMaskedLM RobertaForMaskedLM "
    "RobertaPreLayerNormForMaskedLM XLMRobertaForMaskedLM XLMRobertaXLForMaskedLM BloomForCausalLM GemmaForCausalLM "
    "GPT2LMHeadModel GPTNeoForCausalLM GPTNeoXForCausalLM LlamaForCausalLM MistralForCausalLM Olmo2ForCausalLM "
    "OPTForCausalLM PhiForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM SmolLM3ForCausalLM",
}
HEADS: dict[str, Head] = {
    **{name: partial(_modules, tuple(parts.split())) for parts, names in _MODULES.items() for name in names.split()},
    "DebertaForMaskedLM": _deberta,
    "DebertaV2ForMaskedLM": _deberta,
}
"""For each transformers class, the head that its forward ends with."""
