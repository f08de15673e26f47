"""Li et al. 2022, "Diffusion-LM improves controllable text generation", sections 4.1 and 4.2: tokens as vectors.

    x0 = E(w)      x̂0 = f(x_t, t)      p(w | x) ∝ exp(x·E(w) + b_w)

E is a learned table of word vectors [V, D] of unit variance, used for embedding and for rounding; f is a Hugging Face
encoder between two projections. A network that predicts tokens adds its output to what x_t itself says of a token
(Gulrajani & Hashimoto 2023, "Likelihood-based diffusion language models"):

    p(w | x_t) ∝ exp(f(x_t, t)·E(w) + b_w)·q(x_t | w)      x̂0 = Σ_w p(w | x_t)·E(w)

This module knows nothing about losses or which positions are editable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.shapes import (
    PositionMask,
    TargetLogProbs,
    TargetTokens,
    TargetVectors,
    Times,
    Tokens,
    TokenSet,
    Vectors,
)
from diffusionbert.networks.base import attention_kernels, distribution, max_positions, padded_allowed, require_length
from diffusionbert.networks.time_conditioning import SinusoidalTime


@runtime_checkable
class VectorNetwork(Protocol):
    """A network over word vectors, as objectives and samplers call it."""

    @property
    def allowed(self) -> TokenSet:
        """The allowed tokens."""

    def embed(self, tokens: Tokens) -> Vectors:
        """Returns E(w): the clean vector of each token."""

    def __call__(self, x_t: Vectors, attention_mask: PositionMask, t: Times) -> Vectors:
        """Returns x̂0: the predicted clean vectors."""

    def log_words(self, x: Vectors, targets: PositionMask) -> TargetLogProbs:
        """Returns log p(w | x) at the N target positions: a distribution over allowed tokens, −∞ at all others."""

    def nearest(self, x: Vectors, targets: PositionMask, forbidden: tuple[int, ...] = ()) -> TargetTokens:
        """Returns the nearest token that is allowed and not forbidden, at each of the N target positions."""

    def likely(self, x: Vectors, precision: Times, targets: PositionMask) -> TargetVectors:
        """Returns the mean of E(w) given x = E(w) + noise of this precision, for uniform w, at the N targets."""


def clamp_to_words(
    network: VectorNetwork, x: Vectors, positions: PositionMask, forbidden: tuple[int, ...] = ()
) -> Vectors:
    """The clamping trick: replaces the vectors at these positions with the nearest word vectors."""
    words = torch.zeros_like(positions, dtype=torch.long).masked_scatter(
        positions, network.nearest(x, positions, forbidden)
    )
    return torch.where(positions[..., None], network.embed(words), x)


class EmbeddingDenoiser(nn.Module):
    """An encoder that predicts clean word vectors from noisy ones, and the table of these vectors.

    The encoder is that of any `*ForMaskedLM`, with its own positions, norms and layers; an embedding of t is added to
    its input. The backbone's head and token embeddings are unused and frozen. A table of the same width as these
    embeddings is initialized from them, scaled to unit variance, and the projection into the encoder undoes the
    scaling, so that a pretrained encoder starts with its usual inputs. Any other table is initialized randomly.

    Everything that involves the table is computed in float32 or better, even under autocast: in half precision,
    rounding would drown the small noise of nearly clean vectors.

    A network that predicts tokens starts with f = 0: with the posterior of each token given its own vector alone.
    """

    _allowed: Tensor

    def __init__(
        self,
        backbone: PreTrainedModel,
        allowed: TokenSet,
        width: int | None = 128,
        process: Gaussian | None = None,
    ) -> None:
        """Makes a network with a new table.

        Args:
            backbone: The masked language model whose encoder is used.
            allowed: The allowed tokens.
            width: The width of a word vector; None takes that of the backbone's token embeddings.
            process: The process that adds the noise, for a network that predicts tokens; None predicts vectors.
        """
        super().__init__()
        words = backbone.get_input_embeddings()
        assert isinstance(words, nn.Embedding)
        width = words.embedding_dim if width is None else width
        if width < 1:
            raise ValueError(f"`width` of word vectors must be at least 1, got {width}; Diffusion-LM uses 128")
        self.backbone = backbone
        num_words, inner, hidden = backbone.config.vocab_size, words.embedding_dim, backbone.config.hidden_size
        self.register_buffer("_allowed", padded_allowed(allowed, num_words), persistent=False)
        self.table = nn.Parameter(torch.randn(num_words, width))
        self.bias = nn.Parameter(torch.zeros(num_words))
        self.time = SinusoidalTime(inner)
        self.up = nn.Linear(width, inner)
        last = nn.Linear(hidden, width)
        self.down = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), last)
        self.process = process
        _freeze_unused(backbone, words)
        # The input of a pretrained encoder starts unchanged.
        for parameter in (*self.time.mix[-1].parameters(), *(() if process is None else last.parameters())):
            nn.init.zeros_(parameter)
        if width == inner:
            _start_from(words.weight.detach(), self.table, self.up)
        self.max_length = max_positions(backbone)

    @property
    def allowed(self) -> TokenSet:
        return self._allowed  # since Python 3.12, `isinstance` with a protocol does not see a buffer

    @property
    def width(self) -> int:
        return self.table.shape[1]

    def compile_training(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compiles the encoder, for any shapes."""
        self.backbone.base_model.compile(dynamic=True, backend=backend)

    def embed(self, tokens: Tokens) -> Vectors:
        return _full(nn.functional.embedding(tokens, self.table))

    def forward(self, x_t: Vectors, attention_mask: PositionMask, t: Times) -> Vectors:
        require_length(x_t.shape[1], self.max_length)
        inputs = self.up(x_t.to(self.table.dtype)) + self.time(t)[:, None]
        with attention_kernels():
            # Numbers, not booleans: DeBERTa's convolution subtracts the mask from one.
            output = self.backbone.base_model(
                inputs_embeds=inputs, attention_mask=attention_mask.long(), return_dict=True
            )
        with torch.autocast(x_t.device.type, enabled=False):
            guess: Tensor = _full(self.down(output.last_hidden_state.to(self.table.dtype)))
            if self.process is None:
                return guess
            means = self.log_posterior(x_t, t, attention_mask, guess).exp().to(guess.dtype) @ _full(self.table)
            return torch.zeros_like(guess).masked_scatter(attention_mask[..., None], means)

    def log_posterior(
        self, x_t: Vectors, t: Times, targets: PositionMask, guess: Vectors | None = None
    ) -> TargetLogProbs:
        """Normalizes log q(x_t | w) + guess·E(w) + b_w over the allowed tokens, at the N target positions."""
        assert self.process is not None
        inputs = self.process.evidence(x_t, t)[targets]
        precision = self.process.signal_to_noise(t)[:, None].expand(targets.shape)[targets].to(inputs.dtype)
        offset = self.bias - precision[:, None] * _full(self.table).square().sum(dim=1) / 2
        return distribution(self._products(inputs if guess is None else inputs + guess[targets], offset), self.allowed)

    def log_words(self, x: Vectors, targets: PositionMask) -> TargetLogProbs:
        """Normalizes x·E(w) + b_w over the allowed tokens, or gives the posterior if tokens are predicted."""
        if self.process is None:
            return distribution(self._products(x[targets], self.bias), self.allowed)
        return self.log_posterior(x, x.new_zeros(len(x), dtype=torch.float64), targets)

    @torch.no_grad()
    def nearest(self, x: Vectors, targets: PositionMask, forbidden: tuple[int, ...] = ()) -> TargetTokens:
        """Maximizes x·E(w) - ‖E(w)‖²/2, which minimizes the distance."""
        allowed = self.allowed.clone()
        allowed[list(forbidden)] = False
        if not bool(allowed.any()):
            raise ValueError(f"all allowed tokens are among the {len(forbidden)} forbidden ones: forbid fewer")
        offset = _full(self.table).square().sum(dim=1) / -2
        return self._products(x[targets], offset).masked_fill(~allowed, -torch.inf).argmax(dim=-1)

    @torch.no_grad()
    def likely(self, x: Vectors, precision: Times, targets: PositionMask) -> TargetVectors:
        """Weights tokens by exp(-precision·‖x - E(w)‖²/2)."""
        table = _full(self.table)
        scale = precision[:, None].expand(targets.shape)[targets][:, None]
        logits = scale.to(table.dtype) * self._products(x[targets], table.square().sum(dim=1) / -2)
        with torch.autocast(x.device.type, enabled=False):
            return distribution(logits, self.allowed).exp().to(table.dtype) @ table

    def _products(self, x: Tensor, offset: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, _full(self.table).dtype)
            return x.to(dtype) @ self.table.to(dtype).T + offset.to(dtype)


def _full(values: Tensor) -> Tensor:
    """Converts to float32, unless the precision is higher already."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _freeze_unused(backbone: PreTrainedModel, words: nn.Embedding) -> None:
    """Freezes what gets no gradient: distributed engines wait for the gradients of all trainable parameters."""
    used = {id(parameter) for parameter in backbone.base_model.parameters()} - {id(words.weight)}
    for parameter in backbone.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def _start_from(words: Tensor, table: Tensor, up: nn.Linear) -> None:
    """Copies embeddings into the table, with mean 0 and variance 1, and sets `up` to undo the scaling."""
    deviation, mean = torch.std_mean(words)
    with torch.no_grad():
        table.copy_((words - mean) / deviation)
        up.weight.copy_(torch.eye(up.in_features) * deviation)
        up.bias.fill_(float(mean))
