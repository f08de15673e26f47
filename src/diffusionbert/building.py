"""Makes the sampler of a request for a loaded model."""

from __future__ import annotations

import dataclasses
from typing import Any

from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.method import Sampler
from diffusionbert.networks.config import TimeEmbedding
from diffusionbert.objectives.base import ObjectiveConfig
from diffusionbert.processes import Gaussian, Process
from diffusionbert.samplers.gaussian import GaussianAncestral
from diffusionbert.samplers.left_to_right import LeftToRight
from diffusionbert.samplers.refining import Refining
from diffusionbert.sampling import Algorithm, Sampling
from diffusionbert.schedules import uniform_grid


def build_sampler(
    objective: ObjectiveConfig,
    time: TimeEmbedding,
    process: Process | Gaussian | None,
    statistics: TokenStatistics,
    sampling: Sampling,
    end: float = 1.0,
    window: int | None = None,
) -> Sampler[Any]:
    """Makes the sampler; the statistics are padded to the network's vocabulary, and the process is made of them."""
    default, sampling = objective.default_sampler(), resolved(sampling, objective)
    never = statistics.never_sampled
    if isinstance(process, Process):
        agnostic = time is TimeEmbedding.NONE
        return sampling.sampler(process, forbidden=never, time_agnostic=agnostic, end=end, window=window)
    is_exact = sampling.algorithm is Algorithm.EXACT and objective.has_distribution
    if not (sampling.algorithm is default or is_exact) or sampling.block is not None:
        what = "in blocks" if sampling.block is not None else f"by {sampling.algorithm.value!r}"
        raise ValueError(f"this model writes by {default.value!r} and not {what}; leave it out")
    if end < 1:
        raise ValueError("this model does not write on [MASK], so it rewrites no text; use another model")
    shaping = sampling.shaping(never)
    if isinstance(process, Gaussian):
        clamped = getattr(objective, "clamped", None)
        return GaussianAncestral(process, uniform_grid(sampling.steps), shaping, clamped=clamped)
    if default is Algorithm.REFINING:
        return Refining(statistics.allowed, sampling.steps, shaping)
    return LeftToRight(statistics.mask_id, shaping)


def resolved(sampling: Sampling, objective: ObjectiveConfig) -> Sampling:
    """The same with the objective's default sampler where none is asked for."""
    if sampling.algorithm is not Algorithm.OWN:
        return sampling
    return dataclasses.replace(sampling, algorithm=objective.default_sampler())
