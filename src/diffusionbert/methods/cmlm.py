"""Ghazvininejad et al. 2019, "Mask-Predict", section 2.2: conditional masked language modelling (CMLM).

    k ~ uniform on 1 … n,  k of the n places hidden,  every set of them alike
    loss(x0) = 2n/(n + 1) · Σ_{hidden i} -log f(x0_i | visible)

As in the paper every hidden place counts the same, whatever k: it sums over the hidden places and divides by how many
there are in the batch, (n + 1)/2 of a row on average; here by that average, so that parts of a batch add up and a
uniform network pays log V for each of n tokens. From the bound over all orders of writing (Hoogeboom et al. 2022, the
objective `AnyOrder`) it differs by the weight alone, 2n/(n + 1) instead of n/k, and so says more of nearly empty
sentences and less of nearly full ones.

The authors' own code never hides all places of a longer row (its k ends at n - 1), though decoding begins there, and
smooths labels; here it is as the paper says, without smoothing.

The paper claims no likelihood. With c_k a hidden word's mean cost when k are hidden, this is Σ_k 2k/(n + 1)·c_k and the
bound Σ_k c_k. Averaged over a language the best network's c_k do not fall with k, so that there this lies above the
bound (and so above the entropy); but of a single sentence it may lie below -log p(x0), were the network perfect. So it
is none, and `AnyOrder` of the same network is the figure to compare. Sampling is not in this module; nor is the paper's
predicted length, since lengths are given.
"""

from __future__ import annotations

from diffusionbert.categorical import nats_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise
from diffusionbert.shapes import Batch, PerPlace, RowValues


class ConditionalMaskedLM(Objective[Network]):
    """Cross-entropy at a uniformly drawn number of hidden places, each counting alike; t is the share k/n."""

    def __init__(self, mask_id: int):
        super().__init__()
        self.mask_id = mask_id

    @property
    def likelihood(self) -> Likelihood:
        """Pseudo: the weights are not those of any way of writing a sentence."""
        return Likelihood.PSEUDO

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """2n/(n + 1) times the cross-entropy of k hidden places, k and the places drawn."""
        return self.nats(network, x0, noise).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """2n/(n + 1) times the cross-entropy of k hidden places, k and the places drawn."""
        length = x0.editable.sum(dim=1)
        num_hidden = 1 + (noise.position(x0) * length).long()
        hidden = noise.chosen(x0, num_hidden)
        log_f = network(x0.tokens.masked_fill(hidden, self.mask_id), x0.attend, x0.share_of(hidden), hidden)
        weight = 2 * length.double() / (length + 1)
        return weight[:, None] * nats_of(log_f, x0.tokens, hidden)
