"""Radford et al. 2019, "Language models are unsupervised multitask learners" (GPT-2), eq. 1; Vaswani et al. 2017.

    nats(x0) = Σ_{editable i} -log p(x0_i | x0_1 … x0_{i-1})

All terms come from one pass of a decoder, so this is -log p(x0) itself: no noise, no bound, no draws.

The length is given, as for all methods here, but in another way. Masked models see how many places are to be written.
A decoder does not: nothing tells it how far the end is. But it is not charged for the end either. Its words are
normalised over writable ids, among which no end of text is, so the probabilities of all sentences of one length sum
to 1. What is frozen, such as a prompt or a source, is read where it stands and costs nothing; what is frozen behind an
editable place is not seen there.

GPT-2's training differs: documents are joined by `<|endoftext|>` and cut into blocks of 1024 tokens, so words are seen
across their borders, and the end of a text is predicted like a word and paid for.

This module knows nothing of how a network keeps to what stands before.
"""

from __future__ import annotations

from typing import final

from diffusionbert.categorical import nats_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks.causal import CausalNetwork
from diffusionbert.noise import Noise
from diffusionbert.shapes import Batch, PerPlace, RowValues


@final
class Autoregressive(Objective[CausalNetwork]):
    """The cross-entropy of each word after those before it."""

    @property
    def likelihood(self) -> Likelihood:
        """Exact: the chain rule, all of it."""
        return Likelihood.EXACT

    def loss(self, network: CausalNetwork, x0: Batch, noise: Noise) -> RowValues:
        """The nats themselves."""
        return self.nats(network, x0, noise).sum(dim=1)

    def nats(self, network: CausalNetwork, x0: Batch, noise: Noise) -> PerPlace:
        """-log p of each editable word after those before it, whatever the noise."""
        log_p = network(x0.tokens, x0.attend, x0.editable)
        return nats_of(log_p, x0.tokens, x0.editable)
