"""Austin et al. 2021, "Structured denoising diffusion models in discrete state-spaces" (D3PM), eq. 1 and 5,
and He et al. 2022, "DiffusionBERT", which is the same objective on a pretrained network.

    nats(x0) = Σ over the grid's steps (s, t) of E_q(x_t | x0) [ KL(q(x_s | x_t, x0) ‖ p(x_s | x_t)) ]

The prior term is 0, because every schedule ends at 0. One step is drawn for each row and weighted by T.

Where the originals' code departs: DiffusionBERT draws one t for a whole batch, and its spindle tells the
reverse step the frequency of the true token (`Quantity.PAPER`). D3PM's hybrid loss adds the cross-entropy to
the divergence of the drawn step, not to the sum of all steps as its eq. 5 reads; so do we.
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from diffusionbert.categorical import log_prob_of
from diffusionbert.method import Likelihood, Objective
from diffusionbert.networks import Network
from diffusionbert.noise import Noise
from diffusionbert.processes import Absorbing, Process
from diffusionbert.proposals import Early, Even, TimeProposal
from diffusionbert.schedules import require_grid
from diffusionbert.shapes import Batch, Grid, PerPlace, RowTimes, RowValues, Tokens, exact_bits, from_bits, per_place


class Quantity(Enum):
    """What is summed over the steps."""

    STRICT = "strict"
    """The divergence: a bound on -log p(x0)."""
    PAPER = "paper"
    """r_{s|t}(x0)·cross-entropy, which the published spindle figures rest on. Under a schedule that depends on
    the token this is *not* a bound: the reverse process is told how rare the hidden word is."""


class DiscreteTime(Objective[Network]):
    """The bound over a grid of steps, for any process on tokens."""

    _grid: Tensor

    def __init__(
        self,
        process: Process,
        grid: Grid,
        quantity: Quantity = Quantity.STRICT,
        hybrid: float = 0.0,
        proposal: TimeProposal | None = None,
    ):
        """`grid` rises from 0 to 1. `hybrid` weighs D3PM's auxiliary cross-entropy, in `loss` alone, and from
        `proposal` `loss` draws its steps.
        """
        super().__init__()
        require_grid(grid)
        if quantity is Quantity.STRICT:
            process.require_finite_divergence()
        elif not isinstance(process, Absorbing):
            raise ValueError("the paper's quantity is defined for absorbing noise only; use Quantity.STRICT")
        elif process.schedule.by_token and process.reweighted:
            raise ValueError(
                "the paper's quantity trains f to be p(v | x_t, t) itself, and a reweighted process would weigh it "
                "twice; use Absorbing(…, reweighted=False)"
            )
        self.process = process
        self.quantity = quantity
        self.hybrid = hybrid
        self.proposal = proposal or Even()
        self.register_buffer("_grid", exact_bits(grid), persistent=False)

    @property
    def grid(self) -> Grid:
        """The times between which steps are made."""
        return from_bits(self._grid)

    @property
    def likelihood(self) -> Likelihood:
        """A bound, unless the paper's quantity meets a schedule that depends on the token."""
        is_bound = self.quantity is Quantity.STRICT or not self.process.schedule.by_token
        return Likelihood.BOUND if is_bound else Likelihood.PSEUDO

    def loss(self, network: Network, x0: Batch, noise: Noise) -> RowValues:
        """The bound and the hybrid term at one drawn step."""
        return self._estimate(network, x0, noise, self.proposal, self.hybrid).sum(dim=1)

    def nats(self, network: Network, x0: Batch, noise: Noise) -> PerPlace:
        """The bound at one drawn step, early ones more often: there few tokens are hidden and each counts much."""
        return self._estimate(network, x0, noise, Early(), hybrid=0.0)

    def step_nats(
        self, network: Network, x0: Tokens, x_t: Batch, s: RowTimes, t: RowTimes, hybrid: float = 0.0
    ) -> PerPlace:
        """The term of step (s, t) for a given x_t."""
        asked = self.process.asked(x_t)
        log_f = network(x_t.tokens, x_t.attend, t, asked)
        if self.quantity is Quantity.STRICT:
            nats = self.process.divergence(x0, x_t, log_f, s, t)
        else:
            assert isinstance(self.process, Absorbing)
            nats = -self.process.reveal(x0, x_t, s, t) * log_prob_of(log_f, x0[asked])
        if hybrid:
            nats = nats - hybrid * self.process.log_clean(x0, x_t, log_f, t)
        return per_place(nats, asked)

    def _estimate(self, network: Network, x0: Batch, noise: Noise, proposal: TimeProposal, hybrid: float) -> PerPlace:
        num_steps = len(self.grid) - 1
        position, weight = proposal.times(noise.position(x0))
        index = (position * num_steps).long()
        s, t = self.grid[index], self.grid[index + 1]
        x_t = self.process.corrupt(x0, t, noise)
        return (weight * num_steps)[:, None] * self.step_nats(network, x0.tokens, x_t, s, t, hybrid)
