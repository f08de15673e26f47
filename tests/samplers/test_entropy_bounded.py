"""Entropy-bounded sampling: its bound by brute force, its distribution on enumerable languages, its rounds."""

from __future__ import annotations

import itertools

import pytest
import torch
from drawing import drawing
from languages import Bayes, Language
from scipy import stats
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.samplers import last_state, parse_sampler
from diffusionbert.samplers.entropy_bounded import EntropyBounded, UnmaskingOrder

LANGUAGE = Language(3, 3, (4 * torch.randn(27, generator=torch.Generator().manual_seed(1)).double()).softmax(dim=0))
PROCESS = Absorbing(Linear(), LANGUAGE.mask_id)
parametrize_orders = pytest.mark.parametrize("order", UnmaskingOrder, ids=lambda order: order.value)


def total_correlation(state: Tensor, positions: list[int]) -> tuple[float, float]:
    """Σ H(x_i) - H(x_U) of masked positions given a state, and Σ H(x_i) - max H(x_i); by enumeration."""
    known = (state != LANGUAGE.mask_id).nonzero()[:, 0]
    p = LANGUAGE.probabilities * (LANGUAGE.sentences[:, known] == state[known]).all(dim=1)
    p = p / p.sum()

    def entropy(axes: list[int]) -> float:
        masses: dict[tuple[int, ...], float] = {}
        for sentence, mass in zip(LANGUAGE.sentences.tolist(), p.tolist(), strict=True):
            key = tuple(sentence[axis] for axis in axes)
            masses[key] = masses.get(key, 0.0) + mass
        values = torch.tensor(list(masses.values()), dtype=torch.float64)
        return float(torch.special.entr(values).sum())

    own = [entropy([position]) for position in positions]
    return sum(own) - entropy(positions), sum(own) - max(own)


@parametrize_orders
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 0.8])
def test_a_round_loses_at_most_epsilon(order, epsilon):
    """From every state, the positions that are unmasked together depend on each other by at most ε nats."""
    network, sampler = Bayes(LANGUAGE, PROCESS), drawing(EntropyBounded(epsilon, order), PROCESS)
    sizes = []
    for tokens in LANGUAGE.states:
        if bool((tokens == LANGUAGE.mask_id).any()):
            canvas = Batch.of(tokens[None], (tokens == LANGUAGE.mask_id)[None])
            _, state, *_ = sampler.sample(network, canvas, seed=1)
            unmasked = (state.tokens[0] != tokens).nonzero()[:, 0].tolist()
            lost, bound = total_correlation(tokens, unmasked)
            assert -1e-12 <= lost <= bound + 1e-12 <= epsilon + 2e-12
            sizes.append(len(unmasked))
    assert min(sizes) == 1
    assert (max(sizes) > 1) == (epsilon > 0)


@parametrize_orders
def test_epsilon_0_samples_the_language(order):
    network, rows = Bayes(LANGUAGE, PROCESS), 20_000
    canvas = LANGUAGE.batch(torch.full((rows, 3), LANGUAGE.mask_id))
    last = last_state(drawing(EntropyBounded(0.0, order), PROCESS).sample(network, canvas, seed=2))
    counts = torch.bincount(last.tokens @ torch.tensor([9, 3, 1]), minlength=27)
    assert stats.chisquare(counts.numpy(), (LANGUAGE.probabilities * rows).numpy()).pvalue > 0.01
    assert bool((last.calls == 3).all())


@parametrize_orders
def test_the_text_is_within_the_sum_of_the_rounds(order):
    """KL(language ‖ samples) ≤ rounds·ε, hence by Pinsker's inequality a total variation of at most √(rounds·ε/2)."""
    epsilon, rows = 0.1, 20_000
    canvas = LANGUAGE.batch(torch.full((rows, 3), LANGUAGE.mask_id))
    last = last_state(drawing(EntropyBounded(epsilon, order), PROCESS).sample(Bayes(LANGUAGE, PROCESS), canvas, seed=3))
    frequencies = torch.bincount(last.tokens @ torch.tensor([9, 3, 1]), minlength=27).double() / rows
    variation = float((frequencies - LANGUAGE.probabilities).abs().sum()) / 2
    num_rounds = float(last.calls.double().mean())
    assert variation < (num_rounds * epsilon / 2) ** 0.5
    assert num_rounds < 3


class Certain(torch.nn.Module):
    """Every position has one token for certain."""

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        log_p = torch.full((int(targets.sum()), 6), -torch.inf, dtype=torch.float64)
        log_p[:, 2] = 0
        return log_p


@parametrize_orders
def test_certain_positions_come_for_free(order):
    canvas = Batch.of(torch.full((2, 7), 5), torch.ones(2, 7, dtype=torch.bool))
    last = last_state(drawing(EntropyBounded(0.0, order), Absorbing(Linear(), 5)).sample(Certain(), canvas, seed=0))
    assert last.calls.tolist() == [1, 1]
    assert bool((last.tokens == 2).all())


@parametrize_orders
def test_greater_epsilons_and_lower_temperatures_take_fewer_rounds(order):
    canvas = LANGUAGE.batch(torch.full((500, 3), LANGUAGE.mask_id))

    def calls(epsilon: float, warper: LogitsWarper | None = None) -> float:
        sampler = drawing(EntropyBounded(epsilon, order), PROCESS, warper=warper)
        return float(last_state(sampler.sample(Bayes(LANGUAGE, PROCESS), canvas, seed=0)).calls.double().mean())

    means = [calls(epsilon) for epsilon in (0.0, 0.3, 0.6, 5.0)]
    assert all(before >= after for before, after in itertools.pairwise(means))
    assert means[0] == 3
    assert means[-1] == 1
    assert means[1] < means[0]
    assert calls(0.3, LogitsWarper(0.5)) <= means[1]
    assert calls(0.0, LogitsWarper(top_k=1)) == 1


def test_steps_limit_the_rounds():
    canvas = LANGUAGE.batch(torch.full((5, 3), LANGUAGE.mask_id))
    sampler = drawing(EntropyBounded(0.0), PROCESS, steps=2)
    assert last_state(sampler.sample(Bayes(LANGUAGE, PROCESS), canvas, seed=0)).calls.tolist() == [2] * 5


def test_it_is_named_on_the_command_line():
    assert parse_sampler("entropy-bounded:epsilon=0.3,order=entropy") == EntropyBounded(0.3, UnmaskingOrder.ENTROPY)
    with pytest.raises(ValueError, match="epsilon must be >= 0 nats, got -1"):
        parse_sampler("entropy-bounded:epsilon=-1.0")
