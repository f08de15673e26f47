"""`pretrain`: trains a masked language model or a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffusionbert.cli.common import Flag
from diffusionbert.cli.train import Run

if TYPE_CHECKING:
    from diffusionbert.training.config import RunConfig


@dataclass(frozen=True)
class Pretrain(Run):
    """Pretrain a masked language model or a decoder.

    Example: diffusionbert pretrain --data corpus.txt.gz --output runs/masked
    """

    decoder: Flag = False
    """Pretrain a causal language model of the same size instead."""

    def base(self, data: str) -> RunConfig:
        """The pretraining configuration of the preset."""
        from diffusionbert.recipes import pretraining

        return pretraining(self.preset or "tiny", data, decoder=self.decoder)
