"""What diffusion knows of a vocabulary and a corpus: ids and counts, no strings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from diffusionbert.diffusion.schedules import TokenInformation
from diffusionbert.diffusion.shapes import TokenSet


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """The special ids, the allowed tokens, and how often each token occurs in the training corpus."""

    mask_id: int
    pad_id: int
    allowed: TokenSet
    """Ids that a sequence may contain at editable positions."""
    never_sampled: tuple[int, ...]
    """Allowed ids that samplers never generate: `[UNK]`."""
    counts: Tensor
    """How often each id occurs at editable positions of the training corpus."""
    exponents: Tensor | None = None
    """The learned exponent of each id, of a model that learned its schedule."""

    @property
    def information(self) -> TokenInformation:
        """h(v) of every id."""
        return TokenInformation.from_counts(self.counts, allowed=self.allowed)

    def padded(self, vocab_size: int) -> TokenStatistics:
        """The same for a network that has more ids than the tokenizer; the additional ones are not allowed."""
        more = vocab_size - len(self.allowed)
        if more < 0:
            raise ValueError(
                f"the tokenizer has {len(self.allowed)} ids, the network only {vocab_size}; use the tokenizer that the "
                "network was trained with"
            )
        return replace(
            self, allowed=functional.pad(self.allowed, (0, more)), counts=functional.pad(self.counts, (0, more))
        )
