"""Wang & Cho 2019, "BERT has a mouth, and it must speak", section 2: masked language modelling as a generator.

    nats(x0) = Σ_{i=1..n} -log f(x0_i | all other words)          the pseudo-log-likelihood (Besag 1975), n calls in all

Each word is asked with all others in sight, so a sentence is paid for as if every word were known but one. This belongs
to no distribution over sentences: the n conditionals of a network need not fit together into one joint, and where they
do, their product is not that joint. The authors first took it for the potential of a Markov random field and have
taken that back ("BERT has a mouth and must speak, but it is not an MRF", a note of Cho's, 28 May 2019). It may lie
below the entropy, and Σ exp(-nats) over all sentences may exceed 1. The figure of the same network that can be set
beside other models' is the bound over all orders of writing (Hoogeboom et al. 2022, the objective `AnyOrder`).

The training is whatever objective is handed in; the paper's is that of BERT itself. This module does not know it.
"""

from __future__ import annotations

from diffusionbert.categorical import nats_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise
from diffusionbert.shapes import Batch, PerPlace, RowValues


class BertMouth(Objective[Network]):
    """Learns as the training says, and is scored by its pseudo-log-likelihood.

    A network that wants a time is told the share that is hidden, 1/n.
    """

    def __init__(self, training: Objective[Network], mask_id: int):
        super().__init__()
        self.training_objective = training
        self.mask_id = mask_id

    @property
    def likelihood(self) -> Likelihood:
        """Pseudo: every word is paid for with all others in sight."""
        return Likelihood.PSEUDO

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """That of the training."""
        return self.training_objective.loss(network, x0, noise)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """n times the cross-entropy of the one place that is hidden; n even strata ask each place once."""
        length = x0.editable.sum(dim=1)
        index = (noise.position(x0) * length).long()
        asked = x0.editable & (x0.editable.cumsum(dim=1) == 1 + index[:, None])
        log_f = network(x0.tokens.masked_fill(asked, self.mask_id), x0.attend, x0.share_of(asked), asked)
        return length[:, None] * nats_of(log_f, x0.tokens, asked)
