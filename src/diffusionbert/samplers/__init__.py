"""Samplers, one algorithm per file; `base` has the contract and the loop, `config` turns names into samplers."""

from diffusionbert.samplers.base import (
    Query,
    Sampler,
    SamplerConfig,
    SamplingContext,
    State,
    concatenate_queries,
    last_state,
    sample,
    split_answer,
)
from diffusionbert.samplers.config import SamplingRequest, format_sampler, parse_sampler

__all__ = [
    "Query",
    "Sampler",
    "SamplerConfig",
    "SamplingContext",
    "SamplingRequest",
    "State",
    "concatenate_queries",
    "format_sampler",
    "last_state",
    "parse_sampler",
    "sample",
    "split_answer",
]
