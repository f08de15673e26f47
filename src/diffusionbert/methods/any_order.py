"""Hoogeboom et al. 2022, "Autoregressive diffusion models" (OA-ARDM), eq. 7; Uria et al. 2014.

    nats(x0) = Σ_{k=1..n} E_{k of n places hidden} [ 1/k · Σ_{hidden i} -log f(x0_i | visible) ]

One token is written at a time, in random order. For a time-agnostic network this equals the continuous-time
bound of every schedule that treats all tokens alike, and it has less variance, because the number of hidden
places is given and not drawn. A network that wants a time is told k/n.
"""

from __future__ import annotations

from dataclasses import replace

from diffusionbert.categorical import nats_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise
from diffusionbert.shapes import Batch, PerPlace, RowValues, Tokens


class AnyOrder(Objective[Network]):
    """The bound over all orders of writing, one of them and one of its steps drawn for each row."""

    def __init__(self, mask_id: int):
        super().__init__()
        self.mask_id = mask_id

    @property
    def likelihood(self) -> Likelihood:
        """A bound: orders are averaged outside the logarithm."""
        return Likelihood.BOUND

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """n/k times the cross-entropy of k hidden places, k and the places drawn."""
        return self.nats(network, x0, noise).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """n/k times the cross-entropy of k hidden places, k and the places drawn."""
        length = x0.editable.sum(dim=1)
        num_hidden = 1 + (noise.position(x0) * length).long()
        hidden = noise.chosen(x0, num_hidden)
        x_t = replace(x0, tokens=x0.tokens.masked_fill(hidden, self.mask_id))
        return length[:, None] * self.next_nats(network, x0.tokens, x_t)

    def next_nats(self, network: Network, x0: Tokens, x_t: Batch) -> PerPlace:
        """The nats to write the next token at each of the k hidden places of x_t, over k."""
        asked = x_t.editable & (x_t.tokens == self.mask_id)
        log_f = network(x_t.tokens, x_t.attend, x_t.share_of(asked), asked)
        num_hidden = asked.sum(dim=1, keepdim=True)
        return nats_of(log_f, x0, asked) / num_hidden.clamp(min=1)
