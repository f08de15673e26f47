"""The configuration of an objective: everything about it that the rest of the package asks for.

A configuration is a registered frozen dataclass in the file of its objective, for example `DiscreteTimeConfig` beside
`DiscreteTime`. It makes the objective, the forward process and the network; it knows its default sampler and by which
quantities text can be scored. Training, inference and evaluation use this contract and no concrete objective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import TokenSet
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.config import TimeEmbedding
from diffusionbert.networks.masked import Denoiser
from diffusionbert.objectives.base import LikelihoodDefinition, Objective
from diffusionbert.registry import Registry, describe
from diffusionbert.samplers.base import Sampler
from diffusionbert.samplers.exact import Exact

GRID, CONTINUOUS, EXACT, VECTORS, PSEUDO = "grid", "continuous", "exact", "vectors", "pseudo"
"""The names of scoring quantities: the T-step bound, the continuous-time bound, the exact NLL, the bound on vectors and
the pseudo-likelihood."""


@dataclass(frozen=True, eq=False)
class ScoringQuantity:
    """A quantity by which a model's text can be scored."""

    name: str
    """One of the names above; quantities of different names never share a column."""
    definition: LikelihoodDefinition
    """Its time grid, schedule and estimator."""
    build: Callable[[TokenStatistics], Objective[Any]]
    """Makes the objective whose `nats` estimates it."""


@dataclass(frozen=True, eq=False)
class ScoringQuantities:
    """All quantities by which a model's text can be scored, its own first."""

    available: tuple[ScoringQuantity, ...]
    notes: tuple[str, ...] = ()
    """Why others do not exist."""

    def named(self, name: str) -> ScoringQuantity | None:
        """The quantity of a name, if the model has it."""
        return next((quantity for quantity in self.available if quantity.name == name), None)

    @property
    def primary(self) -> ScoringQuantity:
        """The model's own quantity; raises ValueError if it has none."""
        if not self.available:
            raise ValueError(self.notes[0])
        return self.available[0]


class ObjectiveConfig(ABC):
    """The configuration of an objective; the defaults suit a masked language model under absorbing noise.

    An objective of your own is a registered frozen dataclass with `build` and `scoring_quantities`; override what else
    differs.
    """

    registry: ClassVar[Registry[ObjectiveConfig]] = Registry(
        "objective", "diffusionbert.objectives", "diffusionbert.objectives"
    )

    is_pretraining: ClassVar[bool] = False
    """Whether models trained by this are starting points for diffusion rather than diffusion models."""
    is_causal: ClassVar[bool] = False
    """Whether the backbone is a causal language model."""
    takes_time: ClassVar[bool] = False
    """Whether the network may be time-conditioned."""
    has_word_vectors: ClassVar[bool] = False
    """Whether the network has word vectors beside its backbone."""
    learns_exponents: ClassVar[bool] = False
    """Whether the objective learns an exponent for each token."""
    sampler_aliases: ClassVar[tuple[type[Sampler], ...]] = ()
    """Samplers for diffusion on tokens that mean the default sampler where there is no such diffusion."""

    @abstractmethod
    def build(self, statistics: TokenStatistics) -> Objective[Any]:
        """Makes the objective; the statistics are padded to the network's vocabulary."""

    @abstractmethod
    def scoring_quantities(self, time: TimeEmbedding) -> ScoringQuantities:
        """The quantities by which text can be scored with a network trained by this objective."""

    def process(self, statistics: TokenStatistics) -> Process | Gaussian | None:
        """Makes the forward process that samplers reverse; None if the model has none."""
        return Absorbing(Linear(), statistics.mask_id)

    def make_network(self, backbone: PreTrainedModel, time: TimeEmbedding, allowed: TokenSet) -> nn.Module:
        """Puts a backbone into the network to be trained, which has the attributes of `networks.HasBackbone`."""
        return Denoiser(backbone, time.conditioning(backbone, self.num_steps or 128), allowed)

    def default_sampler(self) -> Sampler:
        """The sampler that is used if none is asked for."""
        return Exact()

    def choose_sampler(self, requested: Sampler | None) -> Sampler:
        """The requested sampler, or the default."""
        return self.default_sampler() if requested is None or isinstance(requested, self.sampler_aliases) else requested

    @property
    def num_steps(self) -> int | None:
        """T, the number of steps of the time grid; None if there is no time grid."""
        return None

    def with_steps(self, num_steps: int) -> ObjectiveConfig:
        """The same with another T; the same itself if there is no time grid."""
        return self

    @property
    def generates_on_masks(self) -> bool:
        """Whether generation starts from `[MASK]`: the model then fills blanks, and takes any sampler for masks."""
        return True

    @property
    def schedule_label(self) -> str:
        """What a table says of the noise schedule; "–" if there is none."""
        return "–"

    def time_label(self, time: TimeEmbedding) -> str:
        """What a table says of how the time reaches the network; "–" if there is no time."""
        return time.abbreviation if self.takes_time else "–"

    def require_time(self, time: TimeEmbedding) -> None:
        """Raises ValueError if the network cannot be conditioned on the time like this."""
        if time is not TimeEmbedding.NONE and not self.takes_time:
            raise ValueError(
                f"the objective {self.registry.name_of(self)} is time-agnostic, got time {time.value!r}; leave out "
                "--time"
            )

    def __str__(self) -> str:
        """The name and the settings."""
        return describe(self)


def require_num_steps(num_steps: int) -> None:
    """Raises ValueError unless a time grid has a step."""
    if num_steps < 1:
        raise ValueError(f"`num_steps` must be 1 or more (--diffusion-steps), got {num_steps}")


NO_LIKELIHOOD = "this method has no likelihood, nor a bound on one: judge it by its samples"
