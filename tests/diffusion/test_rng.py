"""Random numbers: agreement with the published generator, uniformity, and what a number depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats

from diffusionbert.diffusion.rng import Noise, Purpose, philox
from diffusionbert.diffusion.shapes import Batch


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # The known-answer tests of Random123.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_the_published_vectors(counter, key, expected):
    words = philox(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_numbers_are_uniform_and_uncorrelated():
    numbers = Noise(7, step=3).uniform(torch.arange(500), Purpose.CORRUPT, 20)
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) > 0
    assert float(numbers.max()) < 1
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 0.01
    neighbors = torch.stack([numbers[:-1].flatten(), numbers[1:].flatten(), numbers[:-1].roll(1, dims=1).flatten()])
    correlations = torch.corrcoef(neighbors) - torch.eye(3, dtype=torch.float64)
    assert float(correlations.abs().max()) < 0.03  # 1/√9980 = 0.01


def test_normal_numbers_follow_the_normal_distribution():
    numbers = Noise(7).normal(torch.arange(500), Purpose.GAUSS, 5, 4)
    assert stats.kstest(numbers.flatten().numpy(), "norm").pvalue > 0.01


def test_a_number_depends_only_on_seed_step_purpose_and_example():
    examples = torch.tensor([5, 2**40 + 5, 2**31])
    base = Noise(1, step=2).uniform(examples, Purpose.SAMPLE, 6)
    assert torch.equal(base[1], Noise(1, step=2).uniform(examples[1:2], Purpose.SAMPLE, 6)[0])  # not on the batch
    assert torch.equal(base[:, :4], Noise(1, step=2).uniform(examples, Purpose.SAMPLE, 4))  # not on the padding
    others = [
        Noise(2, step=2).uniform(examples, Purpose.SAMPLE, 6),
        Noise(1 + 2**32, step=2).uniform(examples, Purpose.SAMPLE, 6),
        Noise(1, step=3).uniform(examples, Purpose.SAMPLE, 6),
        Noise(1, step=2).uniform(examples, Purpose.CORRUPT, 6),
        Noise(1, step=2).uniform(examples + 1, Purpose.SAMPLE, 6),
    ]
    everything = torch.cat([base, *others])
    assert len(everything.unique()) == everything.numel()


def test_a_stratified_number_lies_in_its_stratum():
    edges = torch.linspace(0, 1, 101, dtype=torch.float64)
    strata = torch.stack([edges[:-1], edges[1:]], dim=1)
    tokens = torch.zeros(100, 1, dtype=torch.long)
    numbers = Noise(0).stratified_uniform(replace(Batch.of(tokens, tokens == 0), strata=strata))
    assert bool(((numbers > strata[:, 0]) & (numbers < strata[:, 1])).all())


@pytest.mark.slow
def test_strata_tile_the_interval_and_shift_with_the_step():
    tokens = torch.zeros(10, 1, dtype=torch.long)
    batch = Batch.of(tokens, tokens == 0)
    drawn = torch.stack([(noise := Noise(3, step)).stratified_uniform(noise.stratify(batch)) for step in range(400)])
    shifted = [Noise(3, step).stratify(batch).strata[:, 0] % 1 for step in range(5)]
    for low in shifted:
        torch.testing.assert_close(low.sort().values.diff(), torch.full((9,), 0.1, dtype=torch.float64))
    assert len({round(float(low[0]), 6) for low in shifted}) == 5
    # Over the steps, each sequence draws from the whole interval.
    for sequence in drawn.T:
        assert stats.kstest(sequence.numpy(), "uniform").pvalue > 0.001


def test_every_position_of_every_sequence_has_its_own_number():
    tokens = torch.zeros(3, 5, dtype=torch.long)
    batch = replace(Batch.of(tokens, tokens == 0), example=torch.tensor([4, 0, 9]))
    numbers = Noise(2, step=1).per_position(batch, Purpose.SAMPLE)
    assert torch.equal(numbers, Noise(2, step=1).uniform(batch.example, Purpose.SAMPLE, 5))
    assert len(numbers.unique()) == 15
