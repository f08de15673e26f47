"""The contract of objectives, and the module that training wraps: a network with its objective.

Training and estimation know this contract but no concrete objective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Linear, NoiseSchedule, require_grid
from diffusionbert.diffusion.shapes import (
    Batch,
    Grid,
    PerPosition,
    PerSequence,
    Targets,
    Times,
    Tokens,
    Values,
    exact_bits,
    from_bits,
)
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.registry import Registry, describe
from diffusionbert.samplers.base import Sampler
from diffusionbert.samplers.exact import Exact
from diffusionbert.storage.schema import Component

NetworkT = TypeVar("NetworkT")  # the network that an objective calls; for diffusion on tokens, a `networks.Network`


class Likelihood(Enum):
    """The kind of quantity that `Objective.nats` estimates. Kinds never share a column."""

    EXACT = "exact"  # -log p(x0) itself
    BOUND = "bound"  # at least -log p(x0), in expectation over the noise; Σ exp(-nats) over all sequences is at most 1
    PSEUDO = "pseudo"  # in nats, but not from a distribution over sequences; may lie below the entropy
    NONE = "none"  # there is no likelihood; `nats` raises ValueError


class Estimator(Enum):
    """How the nats of a sentence are computed."""

    STRATIFIED_TIMES = "stratified times"  # times drawn from equal strata of (0, 1)
    ORDER_AGNOSTIC = "order-agnostic"
    """Draws the number of masked tokens, stratified: the same continuous-time bound with less variance."""
    LEFT_TO_RIGHT = "left to right"
    LEAVE_ONE_OUT = "each token given all others"
    CONFIDENCE = "most confident position first"
    ENTROPY = "position of lowest entropy first"
    RANDOM_ORDERS = "random orders"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True)
class TimeGrid:
    """The time steps that a bound is summed over."""

    steps: int | None = None  # T; None in continuous time

    def __str__(self) -> str:
        return "continuous time" if self.steps is None else f"{self.steps} steps"


@dataclass(frozen=True)
class LikelihoodDefinition:
    """What exactly a likelihood is; numbers with different definitions never share a column."""

    quantity: str = "strict"
    """`strict` (a bound on -log p), `paper` (the paper's, for the spindle), `nll` or `pseudo-likelihood`."""
    time: TimeGrid | None = None  # None where no diffusion time is involved
    estimator: Estimator = Estimator.UNSPECIFIED
    schedule: Component | None = None  # None where the number does not depend on it
    num_orders: int | None = None  # of random orders

    def __str__(self) -> str:
        quantity = f"{self.quantity} quantity" if self.quantity not in ("strict", "nll", "pseudo-likelihood") else None
        is_usual = self.time is not None and self.estimator in (Estimator.STRATIFIED_TIMES, Estimator.UNSPECIFIED)
        number = "" if self.num_orders is None else f"{self.num_orders} "
        estimator = None if is_usual else f"{number}{self.estimator.value}"
        return ", ".join(str(part) for part in (self.time, estimator, self.schedule, quantity) if part is not None)


STRATA = 16
"""The number of equal strata of (0, 1) in a round of draws, unless an objective has better ones."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Sequences corrupted at drawn times, and where to query the network."""

    x_t: Batch
    targets: Targets
    s: Times
    t: Times
    weight: PerSequence

    @classmethod
    def of(cls, process: Process, x_t: Batch, s: Times, t: Times, weight: PerSequence | None = None) -> Draw:
        """A draw of x_t, with the targets of the process; its weight is 1 unless given."""
        targets = Targets.of(process.targets(x_t), fixed=x_t.has_fixed_targets)
        return cls(x_t, targets, s, t, torch.ones_like(t) if weight is None else weight)

    @classmethod
    def antithetic(cls, process: Process, draw: Callable[[Noise], Draw], noise: Noise) -> Draw:
        """Two draws per sequence, each with half the weight: one from the noise u, one from its mirror image 1 - u.

        Each is distributed like a single draw, so the loss stays unbiased. Under the linear schedule the masks are
        complementary: at 1 - t the second masks exactly what the first leaves unmasked, and each token is a target
        once. On a time grid the two masks overlap by the tokens of one step.
        """
        both = draw(noise), draw(noise.mirrored())
        s, t, weight = (torch.cat([getattr(one, name) for one in both]) for name in ("s", "t", "weight"))
        return cls.of(process, both[0].x_t.followed_by(both[1].x_t), s, t, weight / 2)

    def clean(self, x0: Batch) -> Tokens:
        """The tokens of x0, once per draw."""
        return x0.tokens.repeat(len(self.t) // len(x0.tokens), 1)

    @staticmethod
    def summed(nats: Values, x0: Batch) -> PerSequence:
        """The sums over positions, and over the draws for the same sequence."""
        return nats.sum(dim=1).view(-1, len(x0.tokens)).sum(dim=0)


class Round(NamedTuple):
    """One round of draws for each of B sequences."""

    parts: Values
    """[B, S, L]: S independent parts, whose sum is an unbiased estimate of the nats per position. Parts with the same
    index are identically distributed in all rounds, so each part has its own variance."""
    num_sequences: tuple[int, ...]
    """How many sequences the network computed for each of the B."""


class Objective(nn.Module, Generic[NetworkT], ABC):
    """How a network is trained and scored. All randomness comes from `noise`, keyed by `x0.example`."""

    likelihood: Likelihood  # the kind of quantity that `nats` estimates
    is_capturable: bool = False
    """Whether a CUDA graph can capture a step: if a batch has fixed targets, the shapes in `loss` depend only on those
    of the batch, and nothing waits for the GPU."""

    @abstractmethod
    def nats(self, network: NetworkT, x0: Batch, noise: Noise) -> PerPosition:
        """One draw of an unbiased estimate of the nats per position; the nats of a sequence are their sum."""

    def loss(self, network: NetworkT, x0: Batch, noise: Noise) -> PerSequence:
        """What training minimizes: one draw of the loss per sequence, summed over its tokens.

        By default `loss_of` what `draw` draws, or the nats if it draws nothing.
        """
        drawn = self.draw(x0, noise)
        return self.nats(network, x0, noise).sum(dim=1) if drawn is None else self.loss_of(network, x0, drawn)

    @property
    def draws_ahead(self) -> bool:
        """Whether `draw` and `loss_of` may be called in place of `loss`: not if `loss` is overridden."""
        return type(self).loss is Objective.loss

    def draw(self, x0: Batch, noise: Noise) -> Draw | None:
        """Draws what `loss_of` needs before it calls the network; None if nothing can be drawn ahead.

        On a GPU, the number of masked positions is known only once they are drawn, and reading it means waiting. When
        they are drawn ahead of the network, on a separate stream, that does not wait for the previous step.
        """
        return None

    def loss_of(self, network: NetworkT, x0: Batch, drawn: Draw) -> PerSequence:
        """The loss, given what `draw` has drawn."""
        raise NotImplementedError

    def compile_training(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compiles what is worth compiling in `loss` besides the network; by default nothing."""

    def draw_round(self, network: NetworkT, x0: Batch, noise: Noise) -> Round:
        """Draws a round: by default, one draw in each of `STRATA` strata, or just one if `nats` is exact.

        Args:
            network: The network.
            x0: The sequences.
            noise: Its step is the number of the round.
        """
        strata = 1 if self.likelihood is Likelihood.EXACT else STRATA
        size, device = len(x0.tokens), x0.tokens.device
        stratum = torch.arange(strata, device=device).repeat(size)
        edges = torch.stack([stratum, stratum + 1], dim=1).double() / strata
        many = replace(x0.select(torch.arange(size, device=device).repeat_interleave(strata)), strata=edges)
        drawn = self.nats(network, many, replace(noise, step=noise.step * strata + stratum))
        return Round(drawn.double().view(size, strata, -1) / strata, (strata,) * size)


class GridObjective(Objective[NetworkT]):
    """An objective over a time grid that rises from 0 to 1."""

    _grid: Tensor

    def __init__(self, grid: Grid):
        super().__init__()
        require_grid(grid)
        self.register_buffer("_grid", exact_bits(grid), persistent=False)

    @property
    def grid(self) -> Grid:
        return from_bits(self._grid)


class TrainingModule(nn.Module):
    """A network with its objective: what training wraps, so that parameters are used only in the root's forward."""

    def __init__(self, network: nn.Module, objective: Objective[Any]):
        super().__init__()
        self.network = network
        self.objective = objective

    def forward(self, x0: Batch, noise: Noise, num_tokens: Tensor | float, drawn: Draw | None = None) -> Tensor:
        """The loss of one part of a global batch of `num_tokens` editable tokens.

        The losses of the parts add up to the loss of the whole, however it is split over steps and processes.
        (An engine that averages gradients over W processes needs `num_tokens / W`.)
        """
        if drawn is None:
            return self.objective.loss(self.network, x0, noise).sum() / num_tokens
        return self.objective.loss_of(self.network, x0, drawn).sum() / num_tokens

    def loss(self, x0: Batch, noise: Noise) -> PerSequence:
        return self.objective.loss(self.network, x0, noise)

    def nats(self, x0: Batch, noise: Noise) -> PerPosition:
        return self.objective.nats(self.network, x0, noise)


# ---- configuration --------------------------------------------------------------------------------------------------


GRID, CONTINUOUS, EXACT, VECTORS, PSEUDO = "grid", "continuous", "exact", "vectors", "pseudo"
"""The names of scoring quantities: the T-step bound, the continuous-time bound, the exact NLL, the bound on vectors and
the pseudo-likelihood."""


@dataclass(frozen=True, eq=False)
class ScoringQuantity:
    """A quantity for scoring text with a model."""

    name: str  # one of the names above; quantities of different names never share a column
    definition: LikelihoodDefinition
    build: Callable[[TokenStatistics], Objective[Any]]  # makes the objective whose `nats` estimates it

    @property
    def description(self) -> str:
        """The name for readers."""
        steps = self.definition.time and self.definition.time.steps
        names = {
            CONTINUOUS: "continuous-time bound",
            GRID: f"{steps}-step bound",
            VECTORS: f"{steps}-step bound on vectors",
            EXACT: "negative log-likelihood",
            PSEUDO: "pseudo-log-likelihood",
        }
        if self.name == GRID and self.definition.quantity != "strict":  # such as the paper's; it is not a bound
            return f"{steps}-step {self.definition.quantity} quantity"
        return names.get(self.name, self.name)


@dataclass(frozen=True, eq=False)
class ScoringQuantities:
    """All quantities for scoring text with a model, its own first."""

    available: tuple[ScoringQuantity, ...]
    notes: tuple[str, ...] = ()  # why others do not exist

    def named(self, name: str) -> ScoringQuantity | None:
        return next((quantity for quantity in self.available if quantity.name == name), None)

    @property
    def primary(self) -> ScoringQuantity:
        """The model's own quantity; raises ValueError if it has none."""
        if not self.available:
            raise ValueError(self.notes[0])
        return self.available[0]


class ObjectiveConfig(ABC):
    """What the package needs from an objective; the defaults suit a masked language model under absorbing noise.

    To add your own, register a frozen dataclass with `build` and `scoring_quantities`, and override what else differs.
    """

    registry: ClassVar[Registry[ObjectiveConfig]] = Registry(
        "objective", "diffusionbert.objectives", "diffusionbert.objectives"
    )

    is_pretraining: ClassVar[bool] = False
    """Whether models trained this way are starting points for diffusion rather than diffusion models."""
    is_causal: ClassVar[bool] = False
    """Whether the backbone is a causal language model."""
    takes_time: ClassVar[bool] = False
    """Whether the network may be time-conditioned."""
    has_word_vectors: ClassVar[bool] = False
    """Whether the network has word vectors of its own, besides its backbone."""
    learns_exponents: ClassVar[bool] = False
    """Whether the objective learns an exponent for each token."""
    generates_on_masks = True
    """Whether generation starts from `[MASK]`: the model then fills blanks, and takes any sampler for masks."""
    sampler_aliases: ClassVar[tuple[type[Sampler], ...]] = ()
    """Samplers for diffusion on tokens that stand for the default sampler of a model without such diffusion."""

    @abstractmethod
    def build(self, statistics: TokenStatistics) -> Objective[Any]:
        """Makes the objective; the statistics are padded to the network's vocabulary."""

    @abstractmethod
    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        """The quantities for scoring text with a network trained by this objective."""

    def process(self, statistics: TokenStatistics) -> Process | Gaussian | None:
        """Makes the forward process that samplers reverse; None if the model has none."""
        return Absorbing(Linear(), statistics.mask_id)

    def make_network(self, backbone: PreTrainedModel, time: TimeEmbedding, statistics: TokenStatistics) -> nn.Module:
        """Wraps a backbone in the network to train, which has the attributes of `networks.HasBackbone`."""
        return Denoiser(backbone, time.conditioning(backbone, self.num_steps or 128), statistics.allowed)

    def default_sampler(self) -> Sampler:
        return Exact()

    def choose_sampler(self, requested: Sampler | None) -> Sampler:
        return self.default_sampler() if requested is None or isinstance(requested, self.sampler_aliases) else requested

    @property
    def num_steps(self) -> int | None:
        """T, the number of steps of the time grid; None if there is no time grid."""
        return None

    @property
    def schedule(self) -> NoiseSchedule | None:
        """The noise schedule; None if it is not a setting."""
        return None

    @property
    def quantity(self) -> Enum | None:
        """The quantity that is trained; None if there is only one."""
        return None

    def with_steps(self, num_steps: int) -> ObjectiveConfig:
        """The same configuration with another T; unchanged if there is no time grid."""
        changed: Any = self
        return self if self.num_steps is None else replace(changed, num_steps=num_steps)

    @property
    def schedule_label(self) -> str:
        """The noise schedule as shown in tables; "–" if there is none."""
        return "–" if self.schedule is None else str(self.schedule)

    def time_label(self, time: TimeEmbedding) -> str:
        """How the time reaches the network, as shown in tables; "–" if there is no time."""
        return time.abbreviation if self.takes_time else "–"

    def require_time(self, time: TimeEmbedding) -> None:
        """Raises ValueError if the network cannot be conditioned on time in this way."""
        if time is not TimeEmbedding.NONE and not self.takes_time:
            raise ValueError(
                f"the objective {self.registry.name_of(self)} is time-agnostic, got time {time.value!r}; leave out "
                "--time"
            )

    def __str__(self) -> str:
        return describe(self)


def require_num_steps(num_steps: int) -> None:
    """Raises ValueError unless a time grid has at least one step."""
    if num_steps < 1:
        raise ValueError(f"`num_steps` must be 1 or more (--diffusion-steps), got {num_steps}")


NO_LIKELIHOOD = "this method has no likelihood, nor a bound on one: judge it by its samples"
