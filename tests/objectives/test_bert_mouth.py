"""BERT-Mouth: the pseudo-log-likelihood, which is no bound; generation position by position, and Gibbs sweeps."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from backbones import (
    MASK,
    NUM_TOKENIZER_IDS,
    Spy,
    backbone_of,
    mixed_canvas,
    repeated_words,
    sentences,
    timed_bert,
    tokenizer_allowed,
)
from drawing import Drawing, drawing
from languages import TWINS, Bayes, Language, Table, exact_nats
from scipy import stats
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.objectives.masked_lm import BertMouth, MaskedLM
from diffusionbert.objectives.order_agnostic import OrderAgnostic
from diffusionbert.samplers import State
from diffusionbert.samplers.gibbs import Gibbs, Order

THREE = Language.random(2, 3, seed=3)
POSITIVE = Language(2, 3, [0.25, 0.05, 0.1, 0.1, 0.04, 0.16, 0.06, 0.24])


def mouth(language: Language) -> BertMouth:
    return BertMouth(MaskedLM(language.mask_id, language.allowed), language.mask_id)


def in_slice(batch: Batch, number: int, of: int) -> Batch:
    edges = torch.tensor([number / of, (number + 1) / of], dtype=torch.float64)
    return replace(batch, strata=edges.expand(len(batch.tokens), 2))


@torch.no_grad()
def mean_over_slices(objective: BertMouth, network: nn.Module, batch: Batch, of: int) -> Tensor:
    draws = [objective.nats(network, in_slice(batch, number, of), Noise(number)) for number in range(of)]
    return torch.stack(draws).mean(dim=0)


@torch.no_grad()
def conditionals(network: nn.Module, language: Language) -> Tensor:
    """-log f(x_i | all others) of every sentence and position."""
    batch = language.batch()
    costs = []
    for position in range(language.length):
        targets = torch.zeros_like(batch.editable)
        targets[:, position] = True
        tokens = batch.tokens.masked_fill(targets, language.mask_id)
        t = torch.full((len(tokens),), 1 / language.length, dtype=torch.float64)
        log_f = network(tokens, batch.attention_mask, t, targets)
        costs.append(-log_f.gather(1, batch.tokens[:, position : position + 1]).squeeze(1))
    return torch.stack(costs, dim=1)


# The pseudo-log-likelihood.


def test_as_many_strata_as_tokens_give_the_exact_sum_position_by_position():
    network = Table(THREE, scale=2.0)
    nats = mean_over_slices(mouth(THREE), network, THREE.batch(), 3)
    torch.testing.assert_close(nats, conditionals(network, THREE))


def test_a_draw_queries_one_editable_position_and_weights_it_by_their_number():
    """`[CLS]`, a prompt and padding are visible, but never targets and not counted."""
    batch = sentences(backbone_of("bert"), (9, 6, 3, 2))
    batch = replace(batch, tokens=batch.tokens.masked_fill(batch.tokens == MASK, 20))
    batch.editable[0, 2] = False
    seen = {}

    def network(tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        seen.update(tokens=tokens, t=t, targets=targets)
        return torch.zeros(int(targets.sum()), NUM_TOKENIZER_IDS).log_softmax(dim=-1)

    nats = BertMouth(MaskedLM(MASK, tokenizer_allowed()), MASK).nats(network, batch, Noise(0))
    length = batch.editable.sum(dim=1)
    assert length.tolist() == [6, 4, 1, 0]
    assert seen["targets"].sum(dim=1).tolist() == [1, 1, 1, 0]
    assert not bool((seen["targets"] & ~batch.editable).any())
    assert torch.equal(seen["tokens"], batch.tokens.masked_fill(seen["targets"], MASK))
    torch.testing.assert_close(seen["t"][:3], 1 / length[:3].double())
    torch.testing.assert_close(nats.sum(dim=1), length.double() * math.log(NUM_TOKENIZER_IDS), rtol=1e-6, atol=0)


def test_pseudo_likelihoods_lie_below_the_entropy_and_sum_above_1_but_the_bound_does_not():
    network = Bayes(TWINS, Absorbing(Linear(), TWINS.mask_id))
    pseudo = mean_over_slices(mouth(TWINS), network, TWINS.batch(), 2).sum(dim=1)
    bound = exact_nats(OrderAgnostic(TWINS.mask_id), network, TWINS.batch())
    assert float(TWINS.probabilities @ pseudo) < 0.5 * TWINS.entropy
    assert float((-pseudo).exp().sum()) > 1.8
    assert float(TWINS.probabilities @ bound) == pytest.approx(TWINS.entropy)
    assert float((-bound).exp().sum()) == pytest.approx(1)


def test_its_kind_is_pseudo():
    assert mouth(TWINS).likelihood is Likelihood.PSEUDO


# The contract.


def method() -> TrainingModule:
    network = Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()
    return TrainingModule(network, BertMouth(MaskedLM(MASK, tokenizer_allowed()), MASK))


def test_the_loss_is_that_of_the_training_objective():
    tested, whole = method(), repeated_words()
    expected = MaskedLM(MASK, tokenizer_allowed()).loss(tested.network, whole, Noise(3, 4))
    assert torch.equal(tested.objective.loss(tested.network, whole, Noise(3, 4)), expected)


# Sampling.


def gibbs(iterations: int, order: Order = Order.RANDOM, mask_id: int = MASK, **settings: Any) -> Drawing:
    return drawing(Gibbs(order), Absorbing(Linear(), mask_id), steps=iterations, **settings)


@pytest.fixture(scope="module")
def bert() -> Denoiser:
    return timed_bert()


@pytest.fixture
def canvas(bert) -> Batch:
    return mixed_canvas(bert.backbone)


parametrize_order = pytest.mark.parametrize("order", Order)
parametrize_iterations = pytest.mark.parametrize("iterations", [1, 4, 20])


@parametrize_order
@parametrize_iterations
def test_frozen_positions_stay_and_all_others_get_allowed_tokens(order, iterations, bert, canvas):
    states = list(gibbs(iterations, order).sample(bert, canvas, seed=0))
    assert len(states) == iterations + 1
    assert bool((states[0].tokens[canvas.editable] == MASK).all())
    assert bool(tokenizer_allowed()[states[-1].tokens[canvas.editable]].all())
    masked = torch.stack([(state.tokens == MASK) & canvas.editable for state in states]).sum(dim=2)
    length = canvas.editable.sum(dim=1)
    for number, state in enumerate(states):
        assert torch.equal(state.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
        assert state.calls.tolist() == [0, *[number] * 4]
        torch.testing.assert_close(state.time, masked[number].double() / length.clamp(min=1))
        # As even as can be, and never a row behind.
        rounds = length.clamp(min=1, max=iterations)
        assert torch.equal(masked[number], length - length * rounds.clamp(max=number) // rounds)


@parametrize_order
@parametrize_iterations
def test_masked_positions_are_queried_at_the_time_of_their_fraction(order, iterations, bert, canvas):
    spy = Spy(bert)
    list(gibbs(iterations, order).sample(spy, canvas, seed=0))
    assert [len(tokens) for tokens, *_ in spy.questions] == [4] * iterations
    for tokens, _, t, targets in spy.questions:
        editable = canvas.editable[1:, : tokens.shape[1]]
        assert bool(targets.any(dim=1).all())
        assert bool((tokens[targets] == MASK).all())
        torch.testing.assert_close(t, ((tokens == MASK) & editable).sum(dim=1) / editable.sum(dim=1).double())


def history(states: list[State], row: int, length: int) -> list[tuple[list[int], float, int]]:
    return [(state.tokens[row, :length].tolist(), float(state.time[row]), int(state.calls[row])) for state in states]


@pytest.mark.slow
@parametrize_order
@parametrize_iterations
def test_a_batch_equals_its_sequences_one_by_one(order, iterations, bert, canvas):
    sampler = gibbs(iterations, order)
    together = list(sampler.sample(bert, canvas, seed=3))
    for row in range(1, 5):
        alone = canvas.select(torch.tensor([row]))
        length = alone.tokens.shape[1]
        assert history(together, row, length) == history(list(sampler.sample(bert, alone, seed=3)), 0, length)


@pytest.mark.slow
@parametrize_order
def test_the_same_seed_gives_the_same_text_and_another_seed_another_text(order, bert, canvas):
    sampler = gibbs(12, order)
    first, again, other = (list(sampler.sample(bert, canvas, seed))[-1].tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not bool((first == other).all(dim=1)[1:].any())


@parametrize_order
def test_the_tokens_at_editable_positions_do_not_matter_and_forbidden_ones_are_not_sampled(order, bert, canvas):
    sampler = gibbs(12, order, warper=LogitsWarper(0.8, top_k=10, top_p=0.9, forbidden=(*range(7), *range(9, 50))))
    other = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, 30))
    first, again = (list(sampler.sample(bert, batch, seed=0))[-1].tokens for batch in (canvas, other))
    assert torch.equal(first, again)
    assert set(first[canvas.editable].tolist()) <= {7, 8}


@parametrize_order
def test_a_canvas_without_editable_positions_is_returned_without_a_call(order, bert, canvas):
    frozen = replace(canvas, editable=torch.zeros_like(canvas.editable))
    spy = Spy(bert)
    (only,) = gibbs(3, order).sample(spy, frozen, seed=0)
    assert torch.equal(only.tokens, canvas.tokens)
    assert only.calls.tolist() == only.time.tolist() == [0] * 5
    assert not spy.questions


def queried_positions(sampler: Drawing, lengths: list[int], seed: int = 0) -> list[list[list[int]]]:
    """The queried positions of each iteration and sequence, counted from `[CLS]` = 0."""
    language = Language(2, max(lengths) + 1, torch.full((2 ** (max(lengths) + 1),), 0.5 ** (max(lengths) + 1)))
    position = torch.arange(max(lengths) + 1)
    editable = (position > 0) & (position <= torch.tensor(lengths)[:, None])
    spy = Spy(Table(language, scale=0.0))
    batch = Batch.of(torch.zeros_like(editable, dtype=torch.long), editable)
    list(sampler.sample(spy, batch, seed))
    return [[row.nonzero()[:, 0].tolist() for row in targets] for *_, targets in spy.questions]


def test_left_to_right_sweeps_through_each_sequence_repeatedly():
    targets = queried_positions(gibbs(7, Order.LEFT_TO_RIGHT, mask_id=2), [3, 2])
    assert [row for row, _ in targets] == [[1], [2], [3], [1], [2], [3], [1]]
    assert [row for _, row in targets] == [[1], [2], [1], [2], [1], [2], [1]]


def test_with_few_iterations_positions_are_split_evenly():
    assert queried_positions(gibbs(2, Order.LEFT_TO_RIGHT, mask_id=2), [5, 2]) == [[[1, 2], [1]], [[3, 4, 5], [2]]]
    assert queried_positions(gibbs(1, Order.LEFT_TO_RIGHT, mask_id=2), [5, 2]) == [[[1, 2, 3, 4, 5], [1, 2]]]


def test_random_positions_are_equally_likely_in_the_first_pass_and_in_each_sweep():
    targets = queried_positions(gibbs(5, mask_id=2), [3] * 3000)
    chosen = torch.tensor(targets).squeeze(2)  # iterations × rows
    assert {tuple(sorted(order)) for order in chosen[:3].T.tolist()} == {(1, 2, 3)}
    orders = [tuple(order) for order in chosen[:3].T.tolist()]
    assert chi_square_p([orders.count(order) for order in itertools.permutations((1, 2, 3))], [1 / 6] * 6) > 1e-4
    # What comes later is independent of what came before: pairs of positions, in any two of the last three iterations.
    for first, second in ((2, 3), (2, 4), (3, 4)):
        pairs = list(zip(chosen[first].tolist(), chosen[second].tolist(), strict=True))
        counts = [pairs.count(pair) for pair in itertools.product((1, 2, 3), repeat=2)]
        assert chi_square_p(counts, [1 / 9] * 9) > 1e-4


# The law of what is written.


def chi_square_p(counts: list[int] | Tensor, probabilities: list[float] | Tensor) -> float:
    observed, expected = (torch.as_tensor(values, dtype=torch.float64) for values in (counts, probabilities))
    return float(stats.chisquare(observed, expected * observed.sum()).pvalue)


def frequencies(sampler: Drawing, network: nn.Module, language: Language, rows: int, seed: int = 0) -> Tensor:
    canvas = language.batch(torch.full((rows, language.length), language.mask_id))
    *_, last = sampler.sample(network, canvas, seed)
    powers = language.num_words ** torch.arange(language.length - 1, -1, -1)
    return torch.bincount((last.tokens * powers).sum(dim=1), minlength=len(language.sentences))


@torch.no_grad()
def law(network: nn.Module, language: Language, plans: list[tuple[tuple[int, ...], ...]]) -> Tensor:
    """The mean over plans of the product of conditionals; a plan lists the positions sampled together."""
    total = torch.zeros(len(language.sentences), dtype=torch.float64)
    for plan in plans:
        tokens = torch.full_like(language.sentences, language.mask_id)
        log_p = torch.zeros(len(tokens), dtype=torch.float64)
        for positions in plan:
            targets = torch.zeros_like(tokens, dtype=torch.bool)
            targets[:, list(positions)] = True
            t = torch.zeros(len(tokens), dtype=torch.float64)
            log_f = network(tokens, torch.ones_like(targets), t, targets)
            log_p += log_f.gather(1, language.sentences[targets][:, None]).view(len(tokens), -1).sum(dim=1)
            tokens = torch.where(targets, language.sentences, tokens)
        total += log_p.exp() / len(plans)
    return total


RANDOM_PLANS = {
    3: list(itertools.permutations(((0,), (1,), (2,)))),
    2: [((0,), (1, 2)), ((1,), (0, 2)), ((2,), (0, 1))],
    1: [((0, 1, 2),)],
}
LEFT_PLANS = {3: [((0,), (1,), (2,))], 2: [((0,), (1, 2))], 1: [((0, 1, 2),)]}
PLANS = {Order.RANDOM: RANDOM_PLANS, Order.LEFT_TO_RIGHT: LEFT_PLANS}


@parametrize_order
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_the_first_pass_samples_the_mean_over_orders_of_the_product_of_conditionals(order, iterations):
    network = Table(THREE, scale=2.0)
    expected = law(network, THREE, PLANS[order][iterations])
    other = law(network, THREE, PLANS[Order.LEFT_TO_RIGHT if order is Order.RANDOM else Order.RANDOM][3])
    counts = frequencies(gibbs(iterations, order, mask_id=THREE.mask_id), network, THREE, 20_000)
    assert chi_square_p(counts, expected) > 1e-4
    assert chi_square_p(counts, other) < 1e-9


class OnlyConditionals(nn.Module):
    """The true conditional of one masked token; uniform if more are masked."""

    def __init__(self, language: Language):
        super().__init__()
        self.mask_id, self.true = language.mask_id, Bayes(language, Absorbing(Linear(), language.mask_id))
        self.blank = Table(language, scale=0.0)

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        assert len(t.unique()) == 1
        network = self.true if bool(((tokens == self.mask_id).sum(dim=1) == 1).all()) else self.blank
        return network(tokens, attention_mask, t, targets)


@pytest.mark.slow
@parametrize_order
def test_sweeps_with_the_true_conditionals_converge_to_the_language(order):
    network = OnlyConditionals(POSITIVE)
    few, many = (frequencies(gibbs(n, order, mask_id=2), network, POSITIVE, 5000) for n in (3, 63))
    assert chi_square_p(few, POSITIVE.probabilities) < 1e-9
    assert chi_square_p(many, POSITIVE.probabilities) > 1e-4


def test_one_sweep_from_left_to_right_is_the_chain_of_its_kernels():
    """After the first pass and one resampling of the first position, against the exact distribution."""
    network = Table(THREE, scale=2.0)
    before = law(network, THREE, LEFT_PLANS[3]).view(2, 2, 2)
    first = (-conditionals(network, THREE)[:, 0]).exp().view(2, 2, 2)  # f(a | b, c)
    expected = (before.sum(dim=0, keepdim=True) * first).flatten()
    counts = frequencies(gibbs(4, Order.LEFT_TO_RIGHT, mask_id=2), network, THREE, 20_000)
    assert chi_square_p(counts, expected) > 1e-4
    assert chi_square_p(counts, before.flatten()) < 1e-9
