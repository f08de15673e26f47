"""Li et al. 2022, "Diffusion-LM improves controllable text generation", sections 4.1 and 4.2: words as vectors.

    x0 = E(w)      x̂0 = f(x_t, t)      p(w | x) ∝ exp(x·E(w) + b_w)

E is a learned table of word vectors [V, D] of unit variance, and f a Hugging Face encoder between two projections. As
in the original, one table serves for embedding and for rounding. Vectors come in and vectors go out: this module knows
nothing of noise, of losses or of which places are frozen. Those keep their clean vectors E(w) in x_t, and that alone
makes DiffuSeq (Gong et al. 2022) a setting: its source sentence is a part of the row that is not editable.
"""

from __future__ import annotations

from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffusionbert.conditioning import SinusoidalTime
from diffusionbert.networks.base import (
    attention_kernels,
    distribution,
    num_reserved_positions,
    padded_writable,
    require_length,
)
from diffusionbert.shapes import AskedLogProbs, AskedTokens, AskedVectors, Places, RowTimes, Tokens, TokenSet, Vectors


@runtime_checkable
class VectorNetwork(Protocol):
    """What every objective and sampler on word vectors asks."""

    @property
    def writable(self) -> TokenSet:
        """Ids that may be written."""

    def embed(self, tokens: Tokens) -> Vectors:
        """E(w): the clean vector of each token."""

    def __call__(self, x_t: Vectors, attend: Places, t: RowTimes) -> Vectors:
        """x̂0: the clean vectors that these noisy ones are believed to come from."""

    def log_words(self, x: Vectors, asked: Places) -> AskedLogProbs:
        """log p(w | x) at the N asked places: a distribution over writable tokens, −∞ at all others."""

    def nearest(self, x: Vectors, asked: Places, forbidden: tuple[int, ...] = ()) -> AskedTokens:
        """The writable word, not forbidden, whose vector is nearest, for each of the N asked places."""

    def likely(self, x: Vectors, precision: RowTimes, asked: Places) -> AskedVectors:
        """The mean of E(w) given x = E(w) + noise of that precision, all writable words alike, at N asked places."""


def clamp_to_words(network: VectorNetwork, x: Vectors, places: Places, forbidden: tuple[int, ...] = ()) -> Vectors:
    """The clamping trick: at the marked places, the nearest word's vector in the place of each vector."""
    words = torch.zeros_like(places, dtype=torch.long).masked_scatter(places, network.nearest(x, places, forbidden))
    return torch.where(places[..., None], network.embed(words), x)


@final
class EmbeddingDenoiser(nn.Module):
    """An encoder that guesses clean word vectors from noisy ones, and the table of these vectors.

    The encoder is that of any `*ForMaskedLM`, with its own positions, norms and layers; t is added to what enters it.
    Of the backbone, the head and the word vectors are not used, and frozen. A table of the same width as the backbone's
    word vectors starts from these, scaled to unit variance, and the projection into the encoder undoes the scaling, so
    that clean vectors start as what a pretrained encoder knows. Any other table starts from random vectors.

    All that touches the table is computed in float32 or better, also under autocast: in half precision the noise of
    clean vectors would drown.
    """

    _writable: Tensor

    def __init__(self, backbone: PreTrainedModel, writable: TokenSet, width: int | None = 128) -> None:
        """`width` is that of a word's vector; None takes the backbone's."""
        super().__init__()
        words = backbone.get_input_embeddings()
        assert isinstance(words, nn.Embedding)
        width = words.embedding_dim if width is None else width
        if width < 1:
            raise ValueError(f"word vectors need a width of at least 1, given {width}; Diffusion-LM takes 128")
        self.backbone = backbone
        num_words, inner, hidden = backbone.config.vocab_size, words.embedding_dim, backbone.config.hidden_size
        # Not persistent: it belongs to the vocabulary, and is no weight.
        self.register_buffer("_writable", padded_writable(writable, num_words), persistent=False)
        self.table = nn.Parameter(torch.randn(num_words, width))
        self.bias = nn.Parameter(torch.zeros(num_words))
        self.time = SinusoidalTime(inner)
        self.up = nn.Linear(width, inner)
        self.down = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, width))
        _freeze_unused(backbone, words)
        for parameter in self.time.mix[-1].parameters():
            nn.init.zeros_(parameter)  # what enters a pretrained encoder starts unchanged
        if width == inner:
            _start_from(words.weight.detach(), self.table, self.up)
        self._num_positions = backbone.config.max_position_embeddings - num_reserved_positions(backbone)

    @property
    def writable(self) -> TokenSet:
        """Ids that may be written."""
        return self._writable  # a buffer itself is not seen by `isinstance` with a protocol since Python 3.12

    @property
    def max_length(self) -> int:
        """The number of places a row may have."""
        return int(self._num_positions)

    @property
    def width(self) -> int:
        """The number of axes of a word vector."""
        return self.table.shape[1]

    def embed(self, tokens: Tokens) -> Vectors:
        """The table's rows, in float32 or better."""
        return _full(nn.functional.embedding(tokens, self.table))

    def forward(self, x_t: Vectors, attend: Places, t: RowTimes) -> Vectors:
        """Gives x̂0 at every place, in float32 or better."""
        require_length(x_t.shape[1], self.max_length)
        inputs = self.up(x_t.to(self.table.dtype)) + self.time(t)[:, None]
        with attention_kernels():
            # Numbers, not booleans: DeBERTa's convolution subtracts the mask from one.
            output = self.backbone.base_model(inputs_embeds=inputs, attention_mask=attend.long(), return_dict=True)
        with torch.autocast(x_t.device.type, enabled=False):
            guess: Tensor = self.down(output.last_hidden_state.to(self.table.dtype))
        return _full(guess)

    def log_words(self, x: Vectors, asked: Places) -> AskedLogProbs:
        """x·E(w) + b_w, normalised over the writable words."""
        return distribution(self._products(x[asked], self.bias), self.writable)

    @torch.no_grad()
    def nearest(self, x: Vectors, asked: Places, forbidden: tuple[int, ...] = ()) -> AskedTokens:
        """The largest x·E(w) - ‖E(w)‖²/2, which is the least distance."""
        allowed = self.writable.clone()
        allowed[list(forbidden)] = False
        if not bool(allowed.any()):
            raise ValueError(f"all writable words are among the {len(forbidden)} forbidden ones: leave some")
        offset = _full(self.table).square().sum(dim=1) / -2
        return self._products(x[asked], offset).masked_fill(~allowed, -torch.inf).argmax(dim=-1)

    @torch.no_grad()
    def likely(self, x: Vectors, precision: RowTimes, asked: Places) -> AskedVectors:
        """Weighs words by exp(-precision·‖x - E(w)‖²/2)."""
        table = _full(self.table)
        scale = precision[:, None].expand(asked.shape)[asked][:, None]
        logits = scale.to(table.dtype) * self._products(x[asked], table.square().sum(dim=1) / -2)
        with torch.autocast(x.device.type, enabled=False):
            return distribution(logits, self.writable).exp().to(table.dtype) @ table

    def _products(self, x: Tensor, offset: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, _full(self.table).dtype)
            return x.to(dtype) @ self.table.to(dtype).T + offset.to(dtype)


def _full(values: Tensor) -> Tensor:
    """The same in float32, unless it is better still."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _freeze_unused(backbone: PreTrainedModel, words: nn.Embedding) -> None:
    """Freezes what gets no gradient, since engines that exchange gradients wait for all they were promised."""
    used = {id(parameter) for parameter in backbone.base_model.parameters()} - {id(words.weight)}
    for parameter in backbone.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def _start_from(words: Tensor, table: Tensor, up: nn.Linear) -> None:
    """Copies word vectors into the table, with mean 0 and variance 1, and lets `up` give them back."""
    deviation, mean = torch.std_mean(words)
    with torch.no_grad():
        table.copy_((words - mean) / deviation)
        up.weight.copy_(torch.eye(up.in_features) * deviation)
        up.bias.fill_(float(mean))
