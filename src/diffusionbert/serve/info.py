"""The server's description of its model."""

from __future__ import annotations

from dataclasses import asdict, fields

from diffusionbert import __version__
from diffusionbert.data.text import BLANK, MASK
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.score import scoring_quantity
from diffusionbert.samplers.base import Sampler, SamplerConfig
from diffusionbert.samplers.config import PRESETS, SamplingRequest, format_sampler, parse_sampler
from diffusionbert.serve import schema
from diffusionbert.serve.answers import sampling_of
from diffusionbert.serve.server import Server


def card_of(server: Server) -> schema.ModelCard:
    return schema.ModelCard(id=server.name, created=server.created, owned_by="diffusionbert")


def info_of(server: Server) -> schema.Info:
    engine, limits = server.model.engine, server.limits
    objective = engine.config.objective
    masks, single = objective.generates_on_masks, not engine.paired
    can = {
        "generate": single,
        "infill": single and masks,
        "fill": single and masks,
        "rewrite": single and engine.process is not None,
        "canvas": single and masks,
        "score": single and _quantity(engine) is not None,
        "choose": single and masks and engine.masked_network is not None,
        "embed": engine.masked_network is not None,
    }
    ordered = ["left-to-right", "confidence", "entropy"] if can["choose"] else []
    return schema.Info(
        version=__version__,
        model=server.name,
        objective=objective.registry.name_of(objective),
        num_parameters=engine.num_parameters,
        uncased=engine.vocabulary.lowers,
        mask=MASK,
        blank=BLANK,
        tasks=[name for name, able in can.items() if able],  # type: ignore[misc]
        orders=ordered,
        quantity=_quantity(engine),
        samplers=_samplers(engine),
        defaults=schema.SamplingDefaults(
            sampler=format_sampler(objective.choose_sampler(None)),
            sampler_after_prompt=format_sampler(engine.default_sampler(SamplerConfig().steps, continues=True)),
            **asdict(sampling_of(schema.Sampling.model_validate({})).config),
        ),
        limits=schema.LimitCard(
            body_bytes=limits.body_bytes,
            characters=limits.characters,
            tokens=engine.max_length,
            texts=limits.texts,
            steps=limits.steps,
            alternatives=limits.alternatives,
            draws=limits.draws,
        ),
        authorization=server.settings.api_key is not None,
    )


def _quantity(engine: Engine) -> str | None:
    try:
        return scoring_quantity(engine, None).description
    except ValueError:
        return None


def _samplers(engine: Engine) -> list[schema.SamplerCard]:
    """The samplers that suit the model, with their settings that are numbers, names or switches."""
    cards = []
    for name in sorted({*Sampler.registry.names(), *PRESETS}):
        try:
            sampler = parse_sampler(name)
            engine.sampler(SamplingRequest(sampler))
        except (ValueError, TypeError):
            continue
        settings = [
            schema.SamplerSetting(name=one.name, default=getattr(value, "value", value))
            for one in fields(sampler)  # type: ignore[arg-type]
            if not isinstance(value := getattr(sampler, one.name), Sampler)
        ]
        about = str(type(sampler).__doc__).strip().split("\n", maxsplit=1)[0]
        cards.append(schema.SamplerCard(name=name, description=about, settings=settings))
    return cards
