"""CMLM: its weights against enumeration and against those of the bound, why it is no bound, and mask-predict."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from backbones import MASK, NUM_TOKENIZER_IDS, backbone_of, repeated_words, sentences, tokenizer_allowed
from languages import Bayes, Language, Table
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.objectives.base import Likelihood, Objective, TrainingModule
from diffusionbert.objectives.masked_lm import CMLM
from diffusionbert.objectives.order_agnostic import OrderAgnostic

THREE = Language.random(2, 3, seed=3)
TWINS = Language(2, 2, [0.48, 0.02, 0.02, 0.48])


@dataclass(frozen=True)
class Chosen(Noise):
    """Noise with given draws: the number in (0, 1), and the order in which positions are masked."""

    position: float = 0.5
    order: tuple[int, ...] = ()

    def stratified_uniform(self, batch: Batch) -> Tensor:
        return torch.full((len(batch.tokens),), self.position, dtype=torch.float64)

    def uniform(self, example: Tensor, purpose: Purpose, *shape: int) -> Tensor:
        assert purpose is Purpose.ORDER
        return torch.tensor(self.order).double().expand(len(example), -1) / 8


@torch.no_grad()
def expected_nats(objective: Objective, network: nn.Module, language: Language) -> Tensor:
    """The mean over all numbers of masked positions and all orders, position by position."""
    length = language.length
    orders = list(itertools.permutations(range(length)))
    total = torch.zeros(language.sentences.shape, dtype=torch.float64)
    for number, order in itertools.product(range(length), orders):
        noise = Chosen(0, position=(number + 0.5) / length, order=order)
        total += objective.nats(network, language.batch(), noise) / length / len(orders)
    return total


@torch.no_grad()
def costs_by_number(network: nn.Module, language: Language) -> Tensor:
    """c_k, the mean cost of a masked token if k are masked: sentences × 1 … n, from the definition."""
    batch, by_number = language.batch(), []
    for number in range(1, language.length + 1):
        sets = list(itertools.combinations(range(language.length), number))
        cost = torch.zeros(len(batch.tokens), dtype=torch.float64)
        for positions in sets:
            targets = torch.zeros_like(batch.editable)
            targets[:, list(positions)] = True
            t = torch.full((len(cost),), number / language.length, dtype=torch.float64)
            log_f = network(batch.tokens.masked_fill(targets, language.mask_id), batch.attention_mask, t, targets)
            cost -= log_f.gather(1, batch.tokens[targets][:, None]).view(len(cost), number).mean(dim=1) / len(sets)
        by_number.append(cost)
    return torch.stack(by_number, dim=1)


def test_the_expected_loss_is_the_size_weighted_mean_of_costs():
    """Σ_k 2k/(n + 1)·c_k, for any network."""
    network = Table(THREE, scale=2.0)
    nats = expected_nats(CMLM(THREE.mask_id), network, THREE).sum(dim=1)
    weights = 2 * torch.arange(1, 4).double() / 4
    torch.testing.assert_close(nats, costs_by_number(network, THREE) @ weights)


def test_the_loss_differs_from_the_bound_by_the_weight_alone():
    network, batch = Table(THREE, scale=2.0), THREE.batch(THREE.sentences.repeat(20, 1))
    seen = []

    def counting(tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        seen.append((tokens, targets, t))
        return network(tokens, attention_mask, t, targets)

    bound = OrderAgnostic(THREE.mask_id).nats(counting, batch, Noise(4))
    nats = CMLM(THREE.mask_id).nats(counting, batch, Noise(4))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    num_masked = seen[0][1].sum(dim=1, keepdim=True)
    assert num_masked.unique().tolist() == [1, 2, 3]
    torch.testing.assert_close(nats, bound * 2 * num_masked / 4)


def test_masked_tokens_have_equal_weights_and_a_uniform_network_costs_log_v_per_token():
    """For sequences of every length; frozen tokens and padding do not count."""
    batch = sentences(backbone_of("bert"), (9, 6, 3, 2))
    batch = replace(batch, tokens=batch.tokens.masked_fill(batch.tokens == MASK, 20))
    batch.editable[0, 2] = False
    length = batch.editable.sum(dim=1)
    assert length.tolist() == [6, 4, 1, 0]
    told = []

    def uniform(tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        assert not bool((targets & ~batch.editable).any())
        assert torch.equal(tokens, batch.tokens.masked_fill(targets, MASK))
        torch.testing.assert_close(t * length, targets.sum(dim=1).double())
        told.append(targets)
        return torch.zeros(int(targets.sum()), NUM_TOKENIZER_IDS, dtype=torch.float64).log_softmax(dim=-1)

    draws = []
    for number in range(12):  # twelve slices hold 1 … 6, 1 … 4 and 1 the same number of times each
        edges = torch.tensor([number / 12, (number + 1) / 12], dtype=torch.float64)
        sliced = replace(batch, strata=edges.expand(4, 2))
        nats = CMLM(MASK).nats(uniform, sliced, Noise(number))
        paid = nats[0][told[-1][0]]
        torch.testing.assert_close(paid, torch.full_like(paid, 12 / 7 * math.log(NUM_TOKENIZER_IDS)))
        draws.append(nats.sum(dim=1))
    expected = length * math.log(NUM_TOKENIZER_IDS)
    torch.testing.assert_close(torch.stack(draws).mean(dim=0), expected, check_dtype=False)


@pytest.mark.parametrize("language", [THREE, TWINS], ids=["three", "twins"])
def test_over_a_language_the_loss_lies_above_the_bound_of_the_best_network(language):
    network = Bayes(language, Absorbing(Linear(), language.mask_id))
    nats, bound = (
        float(language.probabilities @ expected_nats(objective, network, language).sum(dim=1))
        for objective in (CMLM(language.mask_id), OrderAgnostic(language.mask_id))
    )
    assert bound == pytest.approx(language.entropy)
    assert nats > bound + 0.01


def test_the_loss_of_a_single_sentence_is_no_bound():
    """Even for the best network, the loss of a rare sentence lies below its NLL."""
    network = Bayes(TWINS, Absorbing(Linear(), TWINS.mask_id))
    nats = expected_nats(CMLM(TWINS.mask_id), network, TWINS).sum(dim=1)
    surplus = nats + TWINS.probabilities.log()
    assert (surplus < -0.5).tolist() == [False, True, True, False]
    assert CMLM(TWINS.mask_id).likelihood is Likelihood.PSEUDO


# The contract.


def method() -> TrainingModule:
    network = Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()
    return TrainingModule(network, CMLM(MASK))


def test_the_loss_is_the_nats():
    tested, whole = method(), repeated_words()
    nats = tested.nats(whole, Noise(1, 2)).sum(dim=1)
    assert torch.equal(tested.objective.loss(tested.network, whole, Noise(1, 2)), nats)
