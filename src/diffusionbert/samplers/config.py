"""Sampling requests (which sampler, with which settings), and samplers as text: `name:setting=value,…`.

Text is for the public boundary: the command line, JSON and keyword arguments.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any

from diffusionbert.samplers.base import Sampler, SamplerConfig
from diffusionbert.samplers.confidence import Confidence, Criterion
from diffusionbert.samplers.gibbs import Gibbs, Order
from diffusionbert.samplers.remasking import Remasking, Strategy
from diffusionbert.storage.schema import from_json, to_json

PRESETS: dict[str, Sampler] = {
    "margin": Confidence(Criterion.MARGIN),
    "entropy": Confidence(Criterion.ENTROPY),
    "remasking-rescale": Remasking(strategy=Strategy.RESCALE),
    "gibbs-left-to-right": Gibbs(Order.LEFT_TO_RIGHT),
}
"""Short names of samplers with settings other than the defaults."""


@dataclass(frozen=True)
class SamplingRequest:
    """How text is to be generated.

    Args:
        sampler: The algorithm; None is the default of the model's objective.
        config: Steps, temperature, top-k and top-p.
        block: Generate blocks of this many tokens, from left to right; None generates all at once.
    """

    sampler: Sampler | None = None
    config: SamplerConfig = SamplerConfig()
    block: int | None = None


def parse_sampler(text: str) -> Sampler:
    """Parses the text form of a sampler.

    Args:
        text: A registered name or preset, with settings that differ from the defaults, such as `remasking:eta=0.1` or
            `confidence:criterion=margin,threshold=0.3`.

    Returns:
        The sampler.

    Examples:
        >>> parse_sampler("remasking:eta=0.2")
        Remasking(eta=0.2, strategy=<Strategy.CAP: 'cap'>)
    """
    name, _, settings = text.partition(":")
    plain: dict[str, Any] = to_json(PRESETS[name]) if name in PRESETS else {"name": _registered_name(name)}
    cls: Any = Sampler.registry.get(plain["name"])
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for assignment in filter(None, settings.split(",")):
        setting, separator, value = assignment.partition("=")
        if not separator:
            raise ValueError(
                f"{text!r} must be a sampler's name or name:setting=value,setting=value; got {assignment!r}"
            )
        if setting not in known:
            what = f"settings: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"the sampler {name!r} has no setting {setting!r}; {_suggestion(setting, known)}{what}")
        plain[setting] = to_json(parse_sampler(value)) if hints[setting] is Sampler else _plain_value(value)
    sampler: Sampler = from_json(plain, Sampler, f"sampler {name!r}")
    return sampler


def format_sampler(sampler: Sampler) -> str:
    """The shortest text that `parse_sampler` turns into this sampler.

    Examples:
        >>> format_sampler(Confidence(Criterion.MARGIN, threshold=0.5))
        'margin:threshold=0.5'
    """
    candidates = {sampler.name: _defaults(type(sampler))}
    candidates |= {name: vars(preset) for name, preset in PRESETS.items() if type(preset) is type(sampler)}
    texts = []
    for name, defaults in candidates.items():
        settings = {field: value for field, value in vars(sampler).items() if value != defaults.get(field, MISSING)}
        texts.append(
            (len(settings), ":".join(filter(None, [name, ",".join(f"{k}={_text(v)}" for k, v in settings.items())])))
        )
    return min(texts)[1]


def _registered_name(name: str) -> str:
    try:
        return Sampler.registry.name_of(Sampler.registry.get(name))
    except ValueError:
        known = sorted({*Sampler.registry.names(), *PRESETS})
        if name in known:  # an entry point that fails to load says why
            raise
        raise ValueError(f"unknown sampler {name!r}; {_suggestion(name, known)}known: {', '.join(known)}") from None


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _plain_value(text: str) -> Any:
    """A setting's value, parsed as JSON: a number, true, false or null (or none); anything else is a string."""
    try:
        return json.loads("null" if text == "none" else text)
    except json.JSONDecodeError:
        return text


def _defaults(cls: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}


def _text(value: Any) -> str:
    if isinstance(value, Sampler):
        return format_sampler(value)
    if isinstance(value, Enum):
        return str(value.value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
