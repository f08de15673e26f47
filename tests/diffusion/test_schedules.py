"""Survival curves: valid for every schedule, strength and frequency table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionbert.diffusion.schedules import (
    Cosine,
    Linear,
    Mean,
    Power,
    Spindle,
    Sqrt,
    TokenInformation,
    uniform_grid,
)

TIMES = uniform_grid(400)[:, None]

counts = st.lists(st.integers(0, 10**9), min_size=2, max_size=12)
smoothings = st.floats(1e-3, 1e3)
strengths = st.floats(0, 5)
floors = st.floats(0, 1)
schedules = st.one_of(
    st.just(Linear()),
    st.just(Cosine()),
    st.just(Sqrt()),
    st.just(Power()),
    st.builds(Spindle, strengths, st.sampled_from(Mean), floors),
)


def relative_information(frequencies: list[int], smoothing: float) -> torch.Tensor:
    information = TokenInformation.from_counts(torch.tensor(frequencies), smoothing)
    return information.values / information.mean


@settings(deadline=None)
@given(schedules, counts, smoothings)
def test_survival_starts_at_one_ends_at_zero_and_never_rises(schedule, frequencies, smoothing):
    curve = schedule.survival(TIMES, relative_information(frequencies, smoothing))
    assert curve.shape == (401, len(frequencies))
    assert bool((curve[0] == 1).all())
    assert bool((curve[-1] == 0).all())
    assert float(curve.diff(dim=0).max()) <= 1e-12
    assert bool(((curve >= 0) & (curve <= 1)).all())


@settings(deadline=None)
@given(st.builds(Spindle, strengths), counts, smoothings)
def test_the_clamped_spindle_is_the_running_minimum_cut_to_the_unit_interval(schedule, frequencies, smoothing):
    relative = relative_information(frequencies, smoothing)
    printed = schedule.unclamped(TIMES, relative)
    torch.testing.assert_close(
        schedule.survival(TIMES, relative), printed.cummin(dim=0).values.clamp(0, 1), atol=1e-12, rtol=0
    )


def test_the_printed_spindle_leaves_the_unit_interval():
    """Which is why there is a clamp: a common word (a quarter of the mean information) at λ = 0.3."""
    printed = Spindle(0.3).unclamped(TIMES, torch.tensor([0.25, 20.0], dtype=torch.float64))
    assert float(printed[:, 0].max()) > 1.1
    assert float(Spindle(2.0).unclamped(TIMES, torch.tensor([20.0], dtype=torch.float64)).min()) < -0.1


@settings(deadline=None)
@given(counts, smoothings, floors)
def test_strength_zero_is_linear(frequencies, smoothing, floor):
    relative = relative_information(frequencies, smoothing)
    for verb in ("survival", "masking_density"):
        spindle = getattr(Spindle(0.0, floor=floor), verb)(TIMES[1:-1], relative)
        linear = getattr(Linear(), verb)(TIMES[1:-1], relative)
        torch.testing.assert_close(spindle, linear, atol=1e-12, rtol=0)


@settings(deadline=None)
@given(counts, st.lists(st.integers(0, 1000), min_size=1, max_size=9), strengths)
def test_information_is_lost_uniformly_by_the_printed_sentence_mean(frequencies, sentence, strength):
    """He et al. 2022, eq. 8, holds exactly as long as nothing is clamped."""
    information = TokenInformation.from_counts(torch.tensor(frequencies)).values
    own = information[torch.tensor(sentence) % len(information)]
    survival = Spindle(strength).unclamped(TIMES, own / own.mean())
    torch.testing.assert_close(
        (survival * own).sum(dim=1), (1 - TIMES[:, 0]) * own.sum(), atol=1e-9 * float(own.sum()), rtol=1e-9
    )


@settings(deadline=None)
@given(schedules, counts, smoothings)
def test_masking_density_is_the_slope_of_survival(schedule, frequencies, smoothing):
    relative = relative_information(frequencies, smoothing)
    middle = TIMES[:-1] + 0.5 / 400
    width = 1e-6
    below, above = schedule.survival(middle - width, relative), schedule.survival(middle + width, relative)
    slope = (below - above) / (2 * width)
    density = schedule.masking_density(middle, relative)
    # A difference across the kink where the clamp begins or ends is the slope of neither side.
    one_sided = [
        (schedule.survival(middle + a * width, relative) - schedule.survival(middle + b * width, relative)) / width
        for a, b in ((-1, 0), (0, 1))
    ]
    smooth = (one_sided[0] - one_sided[1]).abs() < 1e-3 * (1 + slope.abs())
    assert float(smooth.double().mean()) > 0.95
    torch.testing.assert_close(density[smooth], slope[smooth], atol=1e-4, rtol=1e-3)
    assert bool((density >= 0).all())


def test_information_is_the_negative_logarithm_of_smoothed_frequency():
    information = TokenInformation.from_counts(torch.tensor([6, 2, 0, 99]), 1.0, torch.tensor([1, 1, 1, 0]).bool())
    expected = -torch.log(torch.tensor([7, 3, 1]).double() / 11)
    torch.testing.assert_close(information.values[:3], expected)
    mean = float((torch.tensor([7, 3, 1]).double() / 11 * expected).sum())
    assert information.mean == pytest.approx(mean)
    assert float(information.values[3]) == pytest.approx(mean)  # never written: neutral


def test_a_token_that_is_nearly_everything_still_carries_information():
    information = TokenInformation.from_counts(torch.tensor([10**12, 0]))
    assert 0 < float(information.values[0]) < 1e-11


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenInformation.from_counts(torch.tensor([1, 2]), smoothing=0.0),
        lambda: TokenInformation.from_counts(torch.tensor([1, -2])),
        lambda: TokenInformation.from_counts(torch.tensor([1])),
        lambda: TokenInformation.from_counts(torch.tensor([10**17, 0]), smoothing=1e-6),
        lambda: Spindle(-0.1),
        lambda: Spindle(float("inf")),
        lambda: Spindle(0.3, floor=1.5),
        lambda: uniform_grid(0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"needs|must|smoothing|at least"):
        make()


def test_the_spindle_hides_rare_words_first():
    rare_and_common = relative_information([1, 1000], 1.0)
    curve = Spindle(0.3).survival(TIMES[1:-1], rare_and_common)
    assert bool((curve[:, 0] < curve[:, 1]).all())
