"""How to write, as data: which algorithm, how many steps, which words; and the sampler that does it.

Names an algorithm and its knobs. `sampler` is where they become a concrete `Sampler`, as `building.build` is for
methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real

from diffusionbert.categorical import Shaping
from diffusionbert.errors import require_kind
from diffusionbert.method import Sampler
from diffusionbert.networks import Network
from diffusionbert.processes import Absorbing, Process
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.samplers.confidence import ConfidenceOrder, Criterion
from diffusionbert.samplers.first_hitting import FirstHitting
from diffusionbert.samplers.gibbs import Gibbs, Order
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.samplers.remasking import Remasking, Strategy
from diffusionbert.samplers.renoising import Renoising
from diffusionbert.samplers.skip_exact import SkipExact
from diffusionbert.schedules import uniform_grid

MOST_STEPS = 1_000_000


class Algorithm(Enum):
    """Ways from noise to text."""

    OWN = "own"
    """The way that belongs to the model's method."""
    EXACT = "exact"
    """The model's own distribution with as few calls of the network as can be: first-hitting, skip-exact or ancestral,
    whichever is right for the schedule and the network."""
    ANCESTRAL = "ancestral"
    """One reverse step after another, one call a step."""
    CONFIDENCE = "confidence"
    """The likeliest words first; quick, and apt to repeat itself where nothing is given."""
    MARGIN = "margin"
    """Places first where one word is far ahead of the next."""
    ENTROPY = "entropy"
    """Places first where the least is in doubt."""
    MASK_PREDICT = "mask-predict"
    """All words at once, then the least confident ones again."""
    REMASKING = "remasking"
    """Written words may be hidden and corrected again, the schedule's law kept (ReMDM, capped)."""
    REMASKING_RESCALE = "remasking-rescale"
    """The same by a share of the most that the law allows (ReMDM, rescaled)."""
    RENOISING = "renoising"
    """Each step guesses the whole text and hides some of it anew, as the paper's text describes."""
    GIBBS = "gibbs"
    """One place at a time in random order, and then one after another again; steps are calls (BERT-Mouth)."""
    GIBBS_LEFT_TO_RIGHT = "gibbs-left-to-right"
    """The same, from left to right."""
    REFINING = "refining"
    """All words at once, again and again, from random ones (SUNDAE)."""
    LEFT_TO_RIGHT = "left-to-right"
    """One token after another (decoders)."""


_GIBBS = {Algorithm.GIBBS: Order.RANDOM, Algorithm.GIBBS_LEFT_TO_RIGHT: Order.LEFT_TO_RIGHT}
REMASKING = {Algorithm.REMASKING: Strategy.CAP, Algorithm.REMASKING_RESCALE: Strategy.RESCALE}
"""The algorithms that hide written words again, and how."""
_OTHERS = {Algorithm.REFINING: "trained by SUNDAE", Algorithm.LEFT_TO_RIGHT: "that is a decoder"}
_BY_CONFIDENCE = {
    Algorithm.CONFIDENCE: Criterion.PROBABILITY,
    Algorithm.MARGIN: Criterion.MARGIN,
    Algorithm.ENTROPY: Criterion.ENTROPY,
}


@dataclass(frozen=True)
class Sampling:
    """An algorithm and its knobs."""

    algorithm: Algorithm = Algorithm.OWN
    steps: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    threshold: float | None = None
    """By confidence alone: write all places that reach it at once."""
    remasking: float = 0.1
    """By remasking alone: the highest probability, in one step, that a written word is hidden again; where it is
    rescaled, the share of the highest that the schedule's law allows."""
    block: int | None = None
    """Write so many places at a time, from left to right."""

    def __post_init__(self) -> None:
        require_kind("steps", self.steps, Integral, "a whole number")
        require_kind("temperature", self.temperature, Real, "a number")
        require_kind("top_k", self.top_k, (Integral, type(None)), "a whole number or None")
        require_kind("top_p", self.top_p, (Real, type(None)), "a number or None")
        if not 1 <= self.steps <= MOST_STEPS:
            raise ValueError(f"writing takes 1 to {MOST_STEPS} steps, given {self.steps}; 128 is usual")
        if self.threshold is not None and self.algorithm not in _BY_CONFIDENCE:
            known = ", ".join(algorithm.value for algorithm in _BY_CONFIDENCE)
            raise ValueError(f"a threshold is for sampling by confidence ({known}), not for {self.algorithm.value}")
        if not 0 <= self.remasking <= 1:
            raise ValueError(f"remasking must lie in [0, 1], given {self.remasking}; 0 hides no written word again")
        self.shaping()  # refuses temperatures, top-k and top-p that make no sense

    def shaping(self, forbidden: tuple[int, ...] = ()) -> Shaping:
        """What is done to the distribution over words."""
        return Shaping(self.temperature, self.top_k, self.top_p, forbidden)

    def sampler(
        self,
        process: Process,
        *,
        forbidden: tuple[int, ...] = (),
        time_agnostic: bool,
        end: float = 1.0,
        window: int | None = None,
    ) -> Sampler[Network]:
        """The sampler; it starts at the time `end`, and a network that reads at most `window` places sees no more."""
        inner = self._inner(process, self.shaping(forbidden), time_agnostic, end)
        if self.block is None:
            return inner
        return Blocks(inner, self.block, _absorbing(process, "writing in blocks (--block)").mask_id, window)

    def _inner(self, process: Process, shaping: Shaping, time_agnostic: bool, end: float) -> Sampler[Network]:
        if self.algorithm in _OTHERS:
            whose = _OTHERS[self.algorithm]
            raise ValueError(f"{self.algorithm.value!r} is for a model {whose}, which this is not; leave it out")
        grid = uniform_grid(self.steps, end)
        by_law = self.algorithm in (Algorithm.OWN, Algorithm.EXACT)
        if by_law and isinstance(process, Absorbing):
            if not process.schedule.by_token:
                return FirstHitting(process, grid, shaping)
            if time_agnostic:
                return SkipExact(process, grid, shaping)
        if by_law or self.algorithm is Algorithm.ANCESTRAL:
            return Ancestral(process, grid, shaping)
        if self.algorithm is Algorithm.RENOISING:
            return Renoising(process, grid, shaping)
        absorbing = _absorbing(process, f"the sampler {self.algorithm.value!r}")
        if self.algorithm in _GIBBS:
            return Gibbs(absorbing.mask_id, self.steps, _GIBBS[self.algorithm], shaping, end)
        if self.algorithm in REMASKING:
            return Remasking(absorbing, grid, self.remasking, REMASKING[self.algorithm], shaping)
        if self.algorithm is Algorithm.MASK_PREDICT:
            return MaskPredict(absorbing, self.steps, shaping, end)
        return ConfidenceOrder(absorbing, self.steps, _BY_CONFIDENCE[self.algorithm], self.threshold, shaping, end)


def _absorbing(process: Process, what: str) -> Absorbing:
    if not isinstance(process, Absorbing):
        raise ValueError(f"{what} needs a model whose noise is [MASK], which this one's is not; leave it out")
    return process
