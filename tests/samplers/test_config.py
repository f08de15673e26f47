"""Sampler settings: names become samplers, `exact` picks the right algorithm, and invalid settings are rejected."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from drawing import drawing
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.schedules import Cosine, Linear, Mean, Spindle, TokenInformation
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.samplers import (
    Sampler,
    SamplerConfig,
    SamplingContext,
    format_sampler,
    parse_sampler,
)
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.samplers.confidence import Confidence, Criterion
from diffusionbert.samplers.config import PRESETS
from diffusionbert.samplers.entropy_bounded import EntropyBounded, UnmaskingOrder
from diffusionbert.samplers.exact import Exact, SkipExact
from diffusionbert.samplers.first_hitting import FirstHitting
from diffusionbert.samplers.gaussian import GaussianAncestral
from diffusionbert.samplers.gibbs import Gibbs, Order
from diffusionbert.samplers.left_to_right import LeftToRight
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.samplers.refinement import Refinement
from diffusionbert.samplers.remasking import Remasking, Renoising, Strategy
from diffusionbert.storage.schema import from_json, to_json

MASK = 4
INFORMATION = TokenInformation.from_counts(torch.arange(10.0))
LINEAR, COSINE = Absorbing(Linear(), MASK), Absorbing(Cosine(), MASK)
SPINDLE = Absorbing(Spindle(0.3, Mean.CORPUS), MASK, INFORMATION)
UNIFORM = Uniform(Linear(), torch.arange(10) > MASK)
GAUSSIAN = Gaussian(Cosine())

NAMES: dict[str, Sampler] = {
    "exact": Exact(),
    "ancestral": Ancestral(),
    "first-hitting": FirstHitting(),
    "skip-exact": SkipExact(),
    "confidence": Confidence(Criterion.PROBABILITY),
    "margin": Confidence(Criterion.MARGIN),
    "entropy": Confidence(Criterion.ENTROPY),
    "mask-predict": MaskPredict(),
    "remasking": Remasking(0.1, Strategy.CAP),
    "remasking-rescale": Remasking(0.1, Strategy.RESCALE),
    "renoising": Renoising(),
    "gibbs": Gibbs(Order.RANDOM),
    "gibbs-left-to-right": Gibbs(Order.LEFT_TO_RIGHT),
    "refinement": Refinement(1.0),
    "left-to-right": LeftToRight(),
    "gaussian-ancestral": GaussianAncestral(None),
    "blocks": Blocks(32, Exact()),
    "entropy-bounded": EntropyBounded(0.1, UnmaskingOrder.RANDOM),
}
SETTINGS: dict[str, Sampler] = {
    "remasking:eta=0.2": Remasking(0.2),
    "remasking:eta=1,strategy=rescale": Remasking(1.0, Strategy.RESCALE),
    "remasking-rescale:eta=0.7": Remasking(0.7, Strategy.RESCALE),
    "confidence:criterion=margin": Confidence(Criterion.MARGIN),
    "margin:threshold=0.5": Confidence(Criterion.MARGIN, 0.5),
    "entropy:threshold=-1e-2": Confidence(Criterion.ENTROPY, -0.01),
    "confidence:threshold=none": Confidence(),
    "gibbs:order=left-to-right": Gibbs(Order.LEFT_TO_RIGHT),
    "refining:update_fraction=0.3": Refinement(0.3),
    "gaussian-ancestral:clamped=true": GaussianAncestral(True),
    "entropy-bounded:epsilon=0.3,order=entropy": EntropyBounded(0.3, UnmaskingOrder.ENTROPY),
    "blocks:size=8,inner=margin": Blocks(8, Confidence(Criterion.MARGIN)),
}


# ---- names ----------------------------------------------------------------------------------------------------------


def test_every_registered_sampler_has_an_entry_here():
    ours = {name for name in Sampler.registry.names() if Sampler.registry.get(name).__module__.startswith("diffusion")}
    assert ours | {*PRESETS} == {*NAMES}


@pytest.mark.parametrize(("text", "sampler"), {**NAMES, **SETTINGS}.items(), ids=[*NAMES, *SETTINGS])
def test_text_becomes_a_sampler_and_back(text, sampler):
    assert parse_sampler(text) == sampler
    assert parse_sampler(format_sampler(sampler)) == sampler
    if text in NAMES:
        assert format_sampler(sampler) == text


@pytest.mark.parametrize("sampler", {**NAMES, **SETTINGS}.values(), ids=str)
def test_a_sampler_survives_json(sampler):
    assert from_json(to_json(sampler), Sampler) == sampler


@pytest.mark.parametrize("sampler", NAMES.values(), ids=str)
def test_a_sampler_is_a_frozen_dataclass(sampler):
    assert is_dataclass(sampler)
    assert hash(sampler) == hash(
        type(sampler)(**{field.name: getattr(sampler, field.name) for field in fields(sampler)})
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "telepathy",
            "unknown sampler 'telepathy'; known: ancestral, blocks, confidence, entropy, entropy-bounded, exact",
        ),
        ("", "unknown sampler ''"),
        ("remaskin", "did you mean 'remasking'"),
        ("margn", "did you mean 'margin'"),
        ("remasking:eat=0.1", "'remasking' has no setting 'eat'; did you mean 'eta'.*settings: eta, strategy"),
        ("ancestral:eta=0.1", "'ancestral' has no setting 'eta'; it has none"),
        ("remasking:0.1", "must be a sampler's name or name:setting=value,setting=value; got '0.1'"),
        ("remasking:eta=much", "eta must be a number, got 'much'"),
        ("remasking:eta=5", "eta must be between 0 and 1, got 5.0; 0 never remasks"),
        ("remasking:strategy=best", "strategy must be one of 'cap', 'rescale', got 'best'"),
        ("confidence:threshold=5", "threshold must be between 0.0 and 1.0"),
        ("refinement:update_fraction=0", "update_fraction must be above 0"),
        ("blocks:size=0", "at least 1 position"),
    ],
)
def test_errors_are_one_line_that_says_what_there_is(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_sampler(text)
    assert "\n" not in str(error.value)


# ---- contexts -------------------------------------------------------------------------------------------------------


def context_of(process: Process | Gaussian | None, **settings: Any) -> SamplingContext:
    return SamplingContext(mask_id=MASK, process=process, **settings)


@pytest.mark.parametrize(
    ("process", "time_agnostic", "kind"),
    [
        (LINEAR, True, FirstHitting),
        (LINEAR, False, FirstHitting),
        (COSINE, False, FirstHitting),
        (SPINDLE, True, SkipExact),
        (SPINDLE, False, Ancestral),  # only one call per step is exact
        (UNIFORM, True, Ancestral),
    ],
)
def test_exact_takes_the_fewest_calls_that_are_right(process, time_agnostic, kind):
    assert type(Exact().resolve(context_of(process, time_agnostic=time_agnostic))) is kind


ON_MASKS = [
    "confidence", "margin", "entropy", "mask-predict", "remasking", "remasking-rescale", "gibbs", "gibbs-left-to-right",
    "first-hitting", "skip-exact", "blocks",
]  # fmt: skip
ON_TOKENS = ["exact", "ancestral", "renoising"]
OTHERS = {"refinement": "SUNDAE", "left-to-right": "decoder", "gaussian-ancestral": "Gaussian"}


@pytest.mark.parametrize("process", [UNIFORM, GAUSSIAN, None], ids=["uniform", "gaussian", "none"])
@pytest.mark.parametrize("name", ON_MASKS)
def test_samplers_of_masks_reject_other_noise(name, process):
    with pytest.raises(ValueError, match=r"\[MASK\].*leave it out"):
        NAMES[name].resolve(context_of(process))


@pytest.mark.parametrize("process", [GAUSSIAN, None], ids=["gaussian", "none"])
@pytest.mark.parametrize("name", ON_TOKENS)
def test_samplers_of_tokens_reject_other_models(name, process):
    assert NAMES[name].resolve(context_of(UNIFORM))
    with pytest.raises(ValueError, match=f"{name!r} needs a diffusion model on tokens.*leave it out"):
        NAMES[name].resolve(context_of(process))


@pytest.mark.parametrize(("name", "whose"), OTHERS.items())
def test_samplers_of_one_kind_of_model_reject_all_others(name, whose):
    contexts = {
        "SUNDAE": context_of(None, allowed_tokens=torch.arange(10) > MASK),
        "decoder": context_of(None, allowed_tokens=torch.arange(10) > MASK, causal=True),
        "Gaussian": context_of(GAUSSIAN),
        "masks": context_of(LINEAR, allowed_tokens=torch.arange(10) > MASK),
    }
    for kind, context in contexts.items():
        if kind == whose:
            assert NAMES[name].resolve(context) == NAMES[name]
        else:
            with pytest.raises(ValueError, match=f"{name!r} is for a model .*{whose}.*leave it out"):
                NAMES[name].resolve(context)


def test_blocks_resolve_their_inner_sampler_and_must_fit_the_network():
    assert Blocks(8, Exact()).resolve(context_of(LINEAR, max_length=10)) == Blocks(8, FirstHitting())
    with pytest.raises(ValueError, match=r"a block of 9 positions does not fit a window of 10.*use at most 8"):
        Blocks(9, Exact()).resolve(context_of(LINEAR, max_length=10))


def test_settings_reach_the_context():
    context = context_of(LINEAR, config=SamplerConfig(4, 0.5, 3, 0.9), forbidden=(7,), start_time=0.8)
    assert context.warper == LogitsWarper(0.5, 3, 0.9, (7,))
    assert context.exclusion == LogitsWarper(forbidden=(7,))
    assert context.grid.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize("start_time", [0.0, -1.0, 1.5, math.nan])
def test_a_start_time_must_be_a_time(start_time):
    with pytest.raises(ValueError, match="start_time must be above 0 and at most 1"):
        drawing(Confidence(), LINEAR, end=start_time)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "`steps` must be between 1 and 1000000, got 0; 128 is usual"),
        ({"steps": -1}, "steps"),
        ({"steps": 10**10}, "steps"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -3}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": 0}, "`top_k` must be >= 1, or None for all tokens, got 0"),
    ],
    ids=str,
)
def test_invalid_settings_are_rejected_when_they_are_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplerConfig(**wrong)


@pytest.mark.parametrize("wrong", [{"steps": "8"}, {"steps": 2.5}, {"temperature": "hot"}, {"top_k": 1.5}], ids=str)
def test_values_of_the_wrong_type_are_rejected(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        SamplerConfig(**wrong)


# ---- samplers from outside ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unregistered(Sampler):
    """Has no name."""

    def start(self, context, canvas, seed):
        raise NotImplementedError

    def query(self, state):
        raise NotImplementedError

    def update(self, state, answer):
        raise NotImplementedError


def test_a_sampler_without_a_name_cannot_be_written_down():
    with pytest.raises(ValueError, match="not a registered sampler"):
        format_sampler(Unregistered())


# ---- the logits warper ----------------------------------------------------------------------------------------------


@given(
    st.floats(1e-300, 1e300),
    st.none() | st.integers(1, 12),
    st.none() | st.floats(0.01, 1.0),
    st.lists(st.floats(-200, 20), min_size=8, max_size=8),
)
@settings(deadline=None, max_examples=60)
def test_warping_gives_a_distribution_at_every_temperature(temperature, top_k, top_p, logits):
    """Also at temperatures beyond what float32 holds: there the most probable token, or all alike."""
    log_p = torch.tensor([logits, [0.0] * 8]).masked_fill(torch.arange(8) == 2, -torch.inf).log_softmax(-1)
    warped = LogitsWarper(temperature, top_k, top_p, forbidden=(5,))(log_p)
    assert torch.allclose(warped.exp().sum(-1), torch.ones(2), atol=1e-4)
    assert bool((warped[:, [2, 5]] == -torch.inf).all())
    if temperature <= 1:  # beyond, differences may be lost
        allowed = log_p.index_fill(-1, torch.tensor([5]), -torch.inf)
        best = allowed.gather(-1, warped.argmax(-1, keepdim=True))
        assert torch.allclose(best, allowed.amax(-1, keepdim=True), atol=1e-4)


def test_a_tiny_temperature_takes_the_most_probable_token_and_a_huge_one_any():
    log_p = torch.tensor([[0.1, 0.2, 0.7]]).log()
    assert LogitsWarper(1e-40)(log_p).exp().tolist() == [[0, 0, 1]]
    assert torch.allclose(LogitsWarper(1e40)(log_p).exp(), torch.full((1, 3), 1 / 3))
