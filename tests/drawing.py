"""A sampler together with its context, for tests that only want to draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backbones import MASK
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.samplers import (
    Sampler,
    SamplerConfig,
    SamplingContext,
    SamplingRequest,
    State,
    parse_sampler,
    sample,
)


@dataclass(frozen=True)
class Drawing:
    sampler: Sampler
    context: SamplingContext

    def sample(self, network: Any, canvas: Batch, seed: int) -> Iterator[State]:
        return sample(self.sampler, self.context, network, canvas, seed)


def drawing(
    sampler: Sampler,
    process: Process | Gaussian | None = None,
    *,
    steps: int = 128,
    end: float = 1.0,
    grid: Tensor | None = None,
    warper: LogitsWarper | None = None,
    mask_id: int | None = None,
    time_agnostic: bool = True,
    **context: Any,
) -> Drawing:
    """A sampler over so many steps up to `end`, or over a time grid, with a logits warper."""
    warper = warper or LogitsWarper()
    if mask_id is None:
        mask_id = process.mask_id if isinstance(process, Absorbing) else MASK
    context = SamplingContext(
        process=process,
        mask_id=mask_id,
        config=SamplerConfig(steps, warper.temperature, warper.top_k, warper.top_p),
        forbidden=warper.forbidden,
        start_time=end,
        time_grid=grid,
        time_agnostic=time_agnostic,
        **context,
    )
    return Drawing(sampler.resolve(context), context)


def requested(name: str | None = None, *, block: int | None = None, **config: Any) -> SamplingRequest:
    """A request by the sampler's name, None for the default, and the settings that all samplers share."""
    return SamplingRequest(None if name is None else parse_sampler(name), SamplerConfig(**config), block)
