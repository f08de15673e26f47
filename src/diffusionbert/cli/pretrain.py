"""`pretrain`: trains a masked language model or a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from diffusionbert.cli.train import Run


@dataclass(frozen=True)
class Pretrain(Run):
    """Pretrain a masked language model or a decoder.

    Example: diffusionbert pretrain --data corpus.txt.gz --output runs/masked
    """

    decoder: bool = False
    """Pretrain a causal language model of the same size instead."""
