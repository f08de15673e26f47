"""The model's own distribution with the fewest network calls: first-hitting, skip-exact or ancestral sampling.

All three give texts of the same distribution over the same time grid. First-hitting needs a schedule that treats all
tokens alike, skip-exact a time-agnostic network; ancestral sampling suits every diffusion on tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.registry import register
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.base import AnyQuery, Sampler, SamplingContext, State
from diffusionbert.samplers.first_hitting import FirstHitting
from diffusionbert.samplers.skip_exact import SkipExact


@final
@register("exact")
@dataclass(frozen=True)
class Exact(Sampler):
    """Resolves to the sampler that suits the schedule and the network."""

    def resolve(self, context: SamplingContext) -> Sampler:
        """First-hitting, skip-exact or ancestral sampling."""
        process = context.tokens_process(self)
        if isinstance(process, Absorbing) and not process.schedule.by_token:
            return FirstHitting()
        if isinstance(process, Absorbing) and context.time_agnostic:
            return SkipExact()
        return Ancestral()

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> State:
        """The first state of the sampler chosen."""
        return self.resolve(context).start(context, canvas, seed)

    def query(self, state: State) -> AnyQuery | None:
        """The query of the sampler chosen."""
        return self.resolve(state.context).query(state)

    def update(self, state: State, answer: Any) -> State:
        """The next state of the sampler chosen."""
        return self.resolve(state.context).update(state, answer)
