"""Denoisers: log f(v | x_t) from any Hugging Face `*ForMaskedLM` that is told the time by a `TimeConditioning`.

Token ids come in and log-probabilities go out: this module knows nothing of strings, noise or losses.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from transformers import PreTrainedModel

from diffusionbert.conditioning import TimeConditioning, after_first, rerouted
from diffusionbert.networks.base import ATTENTION, distribution, num_reserved_positions, padded_writable
from diffusionbert.shapes import AskedLogProbs, Places, RowTimes, Tokens, TokenSet


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
        self.register_buffer("writable", padded_writable(writable, backbone.config.vocab_size), persistent=False)
        self._num_positions = backbone.config.max_position_embeddings - num_reserved_positions(backbone)

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
            sdpa_kernel(ATTENTION),
            self.conditioning.applied(self.backbone, tokens, attend, t) as inputs,
            rerouted(self.backbone, {self.backbone.base_model_prefix: keep}),
        ):
            logits: Tensor = self.backbone(**inputs, return_dict=True).logits.squeeze(0)
        return distribution(logits, self.writable)


def _at_places(places: Tensor, encoder: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Lets the head see the vectors of N places only: [B, L, D] becomes [1, N, D]."""
    output = encoder(*inputs, **options)
    output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, places)[None]
    return output
