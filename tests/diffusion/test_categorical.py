"""Drawing and shaping categorical distributions."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from diffusionbert.diffusion.categorical import LogitsWarper, draw, log_prob_of
from diffusionbert.diffusion.rng import Noise, Purpose

LOG_P = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05]).log()[None]


def test_draws_have_the_right_frequencies():
    log_p = LOG_P.expand(20000, -1)
    drawn = draw(log_p, Noise(0).uniform(torch.arange(20000), Purpose.SAMPLE))
    counts = torch.bincount(drawn, minlength=5).double()
    assert counts[2] == 0
    expected = LOG_P[0].double().exp() * 20000
    possible = expected > 0
    scale = counts.sum() / expected.sum()  # float32 probabilities do not quite sum to 1
    assert stats.chisquare(counts[possible].numpy(), (expected * scale)[possible].numpy()).pvalue > 0.01


def test_draws_at_the_edges_hit_possible_tokens():
    uniform = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(LOG_P.expand(2, -1), uniform).tolist() == [0, 4]
    trailing = torch.tensor([[0.0, 1.0, 0.0]]).log()
    assert draw(trailing.expand(2, -1), uniform).tolist() == [1, 1]


def test_rare_words_keep_their_share_in_a_large_vocabulary():
    """A float32 distribution function over 30,000 words would round the last ones away."""
    log_p = torch.full((1, 30_000), 1 / 30_000).log()
    thresholds = (torch.arange(30_000, dtype=torch.float64) + 0.5) / 30_000
    assert torch.equal(draw(log_p.expand(30_000, -1)[::1000], thresholds[::1000]), torch.arange(30_000)[::1000])


def test_draws_tell_words_apart_that_float32_sums_cannot():
    """Ten words of probability 1e-9 at the end of the list: a float32 distribution function is flat there."""
    log_p = torch.cat(
        [torch.tensor([1 - 1e-8], dtype=torch.float64), torch.full((10,), 1e-9, dtype=torch.float64)]
    ).log()
    thresholds = 1 - 1e-8 + (torch.arange(10, dtype=torch.float64) + 0.5) * 1e-9
    assert torch.equal(draw(log_p.expand(10, -1), thresholds), torch.arange(1, 11))


@pytest.mark.parametrize("log_p", [[-torch.inf, -torch.inf], [torch.nan, 0.0]], ids=str)
def test_a_place_without_possible_words_is_an_error(log_p):
    with pytest.raises(ValueError, match="no possible word"):
        draw(torch.tensor([log_p]), torch.tensor([0.5], dtype=torch.float64))


def test_log_prob_of_looks_up_one_token_a_row():
    assert float(log_prob_of(LOG_P, torch.tensor([3])).exp()) == pytest.approx(0.2)


def test_shaping_is_the_identity_by_default():
    torch.testing.assert_close(LogitsWarper()(LOG_P), LOG_P)


@pytest.mark.parametrize(
    ("warper", "expected"),
    [
        (LogitsWarper(temperature=0.5), [0.25, 0.0625, 0, 0.04, 0.0025]),
        (LogitsWarper(top_k=2), [0.5, 0.25, 0, 0, 0]),
        (LogitsWarper(top_k=1), [1, 0, 0, 0, 0]),
        (LogitsWarper(top_k=99), [0.5, 0.25, 0, 0.2, 0.05]),
        (LogitsWarper(top_p=0.49), [1, 0, 0, 0, 0]),
        (LogitsWarper(top_p=0.51), [0.5, 0.25, 0, 0, 0]),
        (LogitsWarper(top_p=1.0), [0.5, 0.25, 0, 0.2, 0.05]),
        (LogitsWarper(forbidden=(0, 3)), [0, 0.25, 0, 0, 0.05]),
        (LogitsWarper(temperature=0.5, top_k=3, top_p=0.8, forbidden=(1,)), [0.25, 0, 0, 0, 0]),
    ],
)
def test_shaping(warper, expected):
    weights = torch.tensor(expected)
    torch.testing.assert_close(warper(LOG_P)[0].exp(), weights / weights.sum(), atol=1e-6, rtol=1e-5)


def test_top_k_keeps_exactly_k_of_equal_words():
    assert int((LogitsWarper(top_k=3)(torch.zeros(1, 8)) > -torch.inf).sum()) == 3


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": float("inf")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"given|leave|use"):
        LogitsWarper(**settings)
