"""Sampling from categorical distributions, and the logits warper."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from diffusionbert.diffusion import tokens
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.tokens import LogitsWarper, draw, draw_unchecked, entropy_of, in_parts, log_prob_of

LOG_P = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05]).log()[None]


def test_draws_have_the_expected_frequencies():
    log_p = LOG_P.expand(20000, -1)
    drawn = draw(log_p, Noise(0).uniform(torch.arange(20000), Purpose.SAMPLE))
    counts = torch.bincount(drawn, minlength=5).double()
    assert counts[2] == 0
    expected = LOG_P[0].double().exp() * 20000
    possible = expected > 0
    scale = counts.sum() / expected.sum()  # float32 probabilities do not quite sum to 1
    assert stats.chisquare(counts[possible].numpy(), (expected * scale)[possible].numpy()).pvalue > 0.01


def test_draws_at_the_ends_of_the_unit_interval_have_positive_probability():
    uniform = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(LOG_P.expand(2, -1), uniform).tolist() == [0, 4]
    trailing = torch.tensor([[0.0, 1.0, 0.0]]).log()
    assert draw(trailing.expand(2, -1), uniform).tolist() == [1, 1]


def test_tokens_of_a_large_vocabulary_keep_their_probability():
    """A float32 CDF over 30,000 tokens would round the last ones away."""
    log_p = torch.full((1, 30_000), 1 / 30_000).log()
    thresholds = (torch.arange(30_000, dtype=torch.float64) + 0.5) / 30_000
    assert torch.equal(draw(log_p.expand(30_000, -1)[::1000], thresholds[::1000]), torch.arange(30_000)[::1000])


def test_tokens_too_rare_for_a_float32_cdf_are_drawn():
    """Ten tokens of probability 1e-9 at the end of the vocabulary: a float32 CDF is flat there."""
    log_p = torch.cat(
        [torch.tensor([1 - 1e-8], dtype=torch.float64), torch.full((10,), 1e-9, dtype=torch.float64)]
    ).log()
    thresholds = 1 - 1e-8 + (torch.arange(10, dtype=torch.float64) + 0.5) * 1e-9
    assert torch.equal(draw(log_p.expand(10, -1), thresholds), torch.arange(1, 11))


@pytest.mark.parametrize("log_p", [[-torch.inf, -torch.inf], [torch.nan, 0.0]], ids=str)
def test_a_position_without_possible_tokens_is_an_error(log_p):
    with pytest.raises(ValueError, match="no token has a positive probability at some position; forbid fewer tokens"):
        draw(torch.tensor([log_p]), torch.tensor([0.5], dtype=torch.float64))


def test_the_entropy_is_that_of_the_normalized_distribution():
    """Flat and peaked distributions, certain tokens and tokens of probability 0; not normalized, far from 0."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 0.1, 4.0, 1000.0])[:, None] * torch.randn(4, 2000, generator=generator)
    logits[1:, :3] = -torch.inf
    expected = torch.special.entr(logits.double().softmax(dim=-1)).sum(dim=-1)
    for log_p in (logits.log_softmax(dim=-1), logits - 200.0, logits.double()):
        found = entropy_of(log_p)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)
    assert entropy_of(torch.tensor([[0.0, -torch.inf], [-torch.inf, -5.0]])).tolist() == [0, 0]
    assert bool(entropy_of(torch.full((1, 3), -torch.inf)).isnan())


def test_parts_are_as_large_as_the_cache_allows(monkeypatch):
    log_p, uniform, sizes = torch.randn(7, 10), torch.rand(7), []

    def reduced(log_p: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(log_p.numel())
        return log_p.amax(dim=-1), log_p.sum(dim=-1) * uniform

    whole = in_parts(reduced, log_p, uniform)
    for values, expected in ((30, [30, 30, 10]), (1, [10] * 7), (70, [70])):
        monkeypatch.setattr(tokens, "VALUES_IN_CACHE", values)
        sizes.clear()
        found = in_parts(reduced, log_p, uniform)
        assert sizes == expected
        assert all(map(torch.equal, found, whole))


def test_log_prob_of_looks_up_one_token_per_position():
    assert float(log_prob_of(LOG_P, torch.tensor([3])).exp()) == pytest.approx(0.2)


def test_the_default_warper_is_the_identity():
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
def test_warped_probabilities(warper, expected):
    weights = torch.tensor(expected)
    torch.testing.assert_close(warper(LOG_P)[0].exp(), weights / weights.sum(), atol=1e-6, rtol=1e-5)


def test_top_k_keeps_exactly_k_of_equally_likely_tokens():
    assert int((LogitsWarper(top_k=3)(torch.zeros(1, 8)) > -torch.inf).sum()) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "`temperature` must be finite and > 0, got 0.0; use `top_k=1`"),
        ({"temperature": float("inf")}, "`temperature` must be finite and > 0, got inf; use `top_k=1`"),
        ({"top_k": 0}, "`top_k` must be >= 1, or None for all tokens, got 0"),
        ({"top_p": 0.0}, r"`top_p` must be in \(0, 1\], got 0.0; 1 keeps all tokens"),
        ({"top_p": 1.5}, r"`top_p` must be in \(0, 1\], got 1.5; 1 keeps all tokens"),
    ],
    ids=str,
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        LogitsWarper(**settings)


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.9, 0.999])
def test_a_nucleus_of_a_large_vocabulary_is_that_of_the_whole_order(top_p):
    """Flat distributions, whose nucleus is larger than what is looked at first, and peaked ones."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.1, 1.0, 4.0, 20.0])[:, None]
    log_p = (scale * torch.randn(4, 1000, generator=generator)).log_softmax(dim=-1)
    found = LogitsWarper(top_p=top_p)(log_p)
    for own, kept in zip(log_p, found, strict=True):
        values, order = own.double().exp().sort(descending=True)
        number = int((values.cumsum(0) - values < top_p).sum())
        assert set(kept.isfinite().nonzero()[:, 0].tolist()) == set(order[:number].tolist())


@pytest.mark.parametrize(
    "warper",
    [
        LogitsWarper(top_p=0.5),
        LogitsWarper(top_p=0.9, forbidden=(3, 5)),
        LogitsWarper(top_p=0.9, temperature=0.7),
        LogitsWarper(top_k=30, top_p=0.6, forbidden=(1,)),
        LogitsWarper(forbidden=(1,)),
    ],
)
@pytest.mark.parametrize("most_likely", [1, 7], ids=["forbidden", "allowed"])
def test_the_kept_tokens_are_the_whole_distribution(warper, most_likely):
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.1, 1.0, 4.0, 20.0])[:, None]
    logits = scale * torch.randn(4, 2000, generator=generator)
    logits[3, most_likely] = 100.0
    log_p = logits.log_softmax(dim=-1)
    expected, found = warper(log_p), warper.kept(log_p)
    dense = torch.full_like(log_p, -torch.inf).scatter_reduce(-1, found.tokens, found.log_p, "amax")
    torch.testing.assert_close(dense, expected)
    torch.testing.assert_close(found.entropy.float(), torch.special.entr(expected.exp()).sum(dim=-1))
    uniform = torch.rand(4, generator=generator).double()
    chosen = torch.tensor([True, False, True, True])
    assert torch.equal(found.draw(chosen, uniform[chosen]), draw(expected, uniform)[chosen])


@pytest.mark.parametrize(
    "warper",
    [
        LogitsWarper(),
        LogitsWarper(top_k=30),
        LogitsWarper(top_k=30, temperature=0.7, forbidden=(1, 7)),
        LogitsWarper(top_k=30, top_p=0.6),
        LogitsWarper(top_p=0.6),
        LogitsWarper(top_k=5000),
    ],
)
def test_draws_are_those_of_the_whole_warped_distribution(warper):
    """Exactly, normalized or not; also where there is nothing to draw."""
    generator = torch.Generator().manual_seed(0)
    log_p = 4 * torch.randn(500, 2000, generator=generator)
    log_p[3], log_p[4], log_p[5] = -torch.inf, torch.nan, log_p[5] - 2000
    uniform = torch.rand(500, generator=generator).double()
    tokens, is_possible = warper.draw(log_p, uniform)
    expected, expected_possible = draw_unchecked(warper(log_p), uniform)
    assert torch.equal(is_possible, expected_possible)
    assert is_possible.logical_not().nonzero()[:, 0].tolist() == [3, 4]
    assert torch.equal(tokens[is_possible], expected[is_possible])


def test_nuclei_are_sought_among_few_tokens(monkeypatch):
    """Of 20,000 tokens no more are ordered than the largest nucleus needs, and only where it is needed."""
    sizes, topk = [], torch.Tensor.topk

    def counted(values, number, **options):
        sizes.append((len(values), number))
        return topk(values, number, **options)

    monkeypatch.setattr(torch.Tensor, "topk", counted)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    logits = torch.linspace(0, -1, 20_000) * torch.tensor([[1e5], [100.0], [1e5]])
    LogitsWarper(top_p=0.9)(logits.log_softmax(dim=-1))
    assert sizes == [(3, 128), (1, 1024)]
