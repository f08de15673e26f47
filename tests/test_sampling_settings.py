"""How to write, as data: every name becomes the right algorithm, and what makes no sense is refused at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionbert.categorical import Shaping
from diffusionbert.processes import Absorbing, Uniform
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.samplers.confidence import ConfidenceOrder, Criterion
from diffusionbert.samplers.first_hitting import FirstHitting
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.samplers.remasking import Remasking, Strategy
from diffusionbert.samplers.renoising import Renoising
from diffusionbert.samplers.skip_exact import SkipExact
from diffusionbert.sampling import Algorithm, Sampling
from diffusionbert.schedules import Cosine, Linear, Mean, Spindle, TokenInformation

MASK = 4
INFORMATION = TokenInformation.from_counts(torch.arange(10.0))
LINEAR, COSINE = Absorbing(Linear(), MASK), Absorbing(Cosine(), MASK)
SPINDLE = Absorbing(Spindle(0.3, Mean.CORPUS), MASK, INFORMATION)
UNIFORM = Uniform(Linear(), torch.arange(10) > MASK)
ABSORBING_ONLY = [
    Algorithm.CONFIDENCE,
    Algorithm.MARGIN,
    Algorithm.ENTROPY,
    Algorithm.MASK_PREDICT,
    Algorithm.REMASKING,
    Algorithm.REMASKING_RESCALE,
]


@pytest.mark.parametrize(
    ("process", "time_agnostic", "kind"),
    [
        (LINEAR, True, FirstHitting),
        (LINEAR, False, FirstHitting),
        (COSINE, False, FirstHitting),
        (SPINDLE, True, SkipExact),
        (SPINDLE, False, Ancestral),  # only one call a step is exact
        (UNIFORM, True, Ancestral),
    ],
)
def test_exact_takes_the_fewest_calls_that_are_right(process, time_agnostic, kind):
    assert type(Sampling().sampler(process, time_agnostic=time_agnostic)) is kind


@pytest.mark.parametrize("process", [LINEAR, COSINE, SPINDLE], ids=["linear", "cosine", "spindle"])
@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        (Algorithm.ANCESTRAL, Ancestral),
        (Algorithm.CONFIDENCE, ConfidenceOrder),
        (Algorithm.MARGIN, ConfidenceOrder),
        (Algorithm.ENTROPY, ConfidenceOrder),
        (Algorithm.MASK_PREDICT, MaskPredict),
        (Algorithm.REMASKING, Remasking),
        (Algorithm.REMASKING_RESCALE, Remasking),
        (Algorithm.RENOISING, Renoising),
    ],
)
def test_a_name_becomes_its_algorithm(process, algorithm, kind):
    assert type(Sampling(algorithm).sampler(process, time_agnostic=True)) is kind


def test_both_strategies_of_remasking_have_a_name():
    for algorithm, strategy in ((Algorithm.REMASKING, Strategy.CAP), (Algorithm.REMASKING_RESCALE, Strategy.RESCALE)):
        sampler = Sampling(algorithm, remasking=0.7).sampler(LINEAR, time_agnostic=True)
        assert isinstance(sampler, Remasking)
        assert (sampler.strategy, sampler.eta) == (strategy, 0.7)


@pytest.mark.parametrize(
    ("algorithm", "criterion"),
    [
        (Algorithm.CONFIDENCE, Criterion.PROBABILITY),
        (Algorithm.MARGIN, Criterion.MARGIN),
        (Algorithm.ENTROPY, Criterion.ENTROPY),
    ],
)
def test_the_three_kinds_of_confidence_are_told_apart(algorithm, criterion):
    sampler = Sampling(algorithm, steps=7, threshold=0.0).sampler(LINEAR, time_agnostic=True, end=0.5)
    assert isinstance(sampler, ConfidenceOrder)
    assert (sampler.criterion, sampler.num_steps, sampler.threshold, sampler.time.end) == (criterion, 7, 0.0, 0.5)


def test_knobs_reach_the_sampler():
    sampling = Sampling(Algorithm.ANCESTRAL, steps=4, temperature=0.5, top_k=3, top_p=0.9)
    sampler = sampling.sampler(LINEAR, forbidden=(7,), time_agnostic=True, end=0.8)
    assert isinstance(sampler, Ancestral)
    assert sampler.shaping == Shaping(0.5, 3, 0.9, (7,))
    assert sampler.times == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_blocks_go_around_any_algorithm():
    sampler = Sampling(Algorithm.MARGIN, block=3).sampler(LINEAR, time_agnostic=True, window=9)
    assert isinstance(sampler, Blocks)
    assert (sampler.size, sampler.mask_id, sampler.window) == (3, MASK, 9)
    assert isinstance(sampler.inner, ConfidenceOrder)


@pytest.mark.parametrize("algorithm", ABSORBING_ONLY)
def test_what_needs_masks_refuses_other_noise(algorithm):
    with pytest.raises(ValueError, match=rf"'{algorithm.value}'.*\[MASK\].*leave it out"):
        Sampling(algorithm).sampler(UNIFORM, time_agnostic=True)


def test_blocks_refuse_other_noise():
    with pytest.raises(ValueError, match=r"block.*\[MASK\]"):
        Sampling(block=4).sampler(UNIFORM, time_agnostic=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "step"),
        ({"steps": -1}, "step"),
        ({"steps": 10**10}, "step"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -3}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": 0}, "`top_k` must be >= 1, got 0; None keeps all tokens"),
        ({"remasking": 1.5}, r"remasking must lie in \[0, 1\], given 1.5"),
        ({"remasking": -0.1}, "remasking must .* given -0.1"),
        ({"remasking": math.nan}, "remasking must"),
        ({"threshold": 0.5}, "confidence"),
        ({"threshold": 0.5, "algorithm": Algorithm.MASK_PREDICT}, "confidence"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_when_they_are_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(Algorithm.CONFIDENCE, threshold=5.0), "threshold"),
        (Sampling(Algorithm.ENTROPY, threshold=0.1), "threshold"),
        (Sampling(block=0), "block"),
        (Sampling(block=-4), "block"),
        (Sampling(block=8), "window"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(sampling, message):
    with pytest.raises(ValueError, match=message):
        sampling.sampler(LINEAR, time_agnostic=True, window=9)


@given(
    st.floats(1e-300, 1e300),
    st.none() | st.integers(1, 12),
    st.none() | st.floats(0.01, 1.0),
    st.lists(st.floats(-200, 20), min_size=8, max_size=8),
)
@settings(deadline=None, max_examples=60)
def test_shaping_gives_a_distribution_at_every_temperature(temperature, top_k, top_p, logits):
    """Also at temperatures beyond what float32 holds: there the likeliest word, or all alike."""
    log_p = torch.tensor([logits, [0.0] * 8]).masked_fill(torch.arange(8) == 2, -torch.inf).log_softmax(-1)
    shaped = Shaping(temperature, top_k, top_p, forbidden=(5,))(log_p)
    assert torch.allclose(shaped.exp().sum(-1), torch.ones(2), atol=1e-4)
    assert bool((shaped[:, [2, 5]] == -torch.inf).all())
    if temperature <= 1:  # beyond, differences may be lost
        allowed = log_p.index_fill(-1, torch.tensor([5]), -torch.inf)
        best = allowed.gather(-1, shaped.argmax(-1, keepdim=True))
        assert torch.allclose(best, allowed.amax(-1, keepdim=True), atol=1e-4)


def test_a_tiny_temperature_takes_the_likeliest_word_and_a_huge_one_any():
    log_p = torch.tensor([[0.1, 0.2, 0.7]]).log()
    assert Shaping(1e-40)(log_p).exp().tolist() == [[0, 0, 1]]
    assert torch.allclose(Shaping(1e40)(log_p).exp(), torch.full((1, 3), 1 / 3))
