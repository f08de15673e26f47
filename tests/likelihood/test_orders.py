"""Exact likelihoods in given orders: probabilities, from states alone, in the promised number of calls."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from languages import Bayes, Language, Table
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.likelihood.orders import AnyOrder, Order, RandomOrders, order_named, order_nats, random_orders_nats

LANGUAGE = Language.random(3, 4, seed=5)
ORDERS: tuple[AnyOrder, ...] = (*Order, RandomOrders(1), RandomOrders(5))
every_order = pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.value)


class Counting(nn.Module):
    """Counts the calls of a network and the sequences in them."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network, self.sizes = network, []

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        self.sizes.append(len(tokens))
        return self.network(tokens, attention_mask, t, targets)


@every_order
@pytest.mark.parametrize("num_steps", [0, 4], ids=["time-agnostic", "time-conditioned"])
@pytest.mark.parametrize("seed", range(3))
def test_all_sentences_together_have_probability_one(order, num_steps, seed):
    network = Table(LANGUAGE, num_steps, scale=2.0, seed=seed)
    nats = order_nats(network, LANGUAGE.batch(), LANGUAGE.mask_id, order).sum(dim=1)
    assert float(nats.neg().exp().sum()) == pytest.approx(1, abs=1e-9)


@every_order
def test_given_a_part_of_the_sentence_the_rest_has_probability_one(order):
    network, batch = Table(LANGUAGE, scale=2.0, seed=7), LANGUAGE.batch()
    given = batch.select((batch.tokens[:, 1] == 2).nonzero()[:, 0])
    given = replace(given, editable=torch.tensor([True, False, True, True]).expand_as(given.editable))
    nats = order_nats(network, given, LANGUAGE.mask_id, order)
    assert not nats[:, 1].any()
    assert float(nats.sum(dim=1).neg().exp().sum()) == pytest.approx(1, abs=1e-9)


@every_order
def test_the_best_network_gives_the_probabilities_of_the_language(order):
    network = Bayes(LANGUAGE, Absorbing(Linear(), LANGUAGE.mask_id, LANGUAGE.information()))
    nats = order_nats(network, LANGUAGE.batch(), LANGUAGE.mask_id, order).sum(dim=1)
    torch.testing.assert_close(nats.neg().exp(), LANGUAGE.probabilities)


def test_orders_follow_their_rule():
    """Against the definition, one sentence and one state at a time."""
    network, sentence = Table(LANGUAGE, scale=2.0, seed=3), LANGUAGE.sentences[[40]]
    everywhere = torch.ones_like(sentence, dtype=torch.bool)
    for order in (Order.CONFIDENCE, Order.ENTROPY):
        state, expected = torch.full_like(sentence, LANGUAGE.mask_id), torch.zeros(4).double()
        while (state == LANGUAGE.mask_id).any():
            log_f = network(state, everywhere, torch.ones(1).double(), everywhere)
            gain = log_f.amax(-1) if order is Order.CONFIDENCE else torch.xlogy(log_f.exp(), log_f.exp()).sum(-1)
            position = int(gain.masked_fill(state[0] != LANGUAGE.mask_id, -torch.inf).argmax())
            expected[position] = -log_f[position, sentence[0, position]].detach()
            state[0, position] = sentence[0, position]
        found = order_nats(network, LANGUAGE.batch(sentence), LANGUAGE.mask_id, order)[0]
        torch.testing.assert_close(found, expected)


def test_left_to_right_takes_one_call_and_adaptive_orders_share_their_calls():
    network = Counting(Table(LANGUAGE, seed=1))
    batch = LANGUAGE.batch(LANGUAGE.sentences[:6])
    order_nats(network, batch, LANGUAGE.mask_id, Order.LEFT_TO_RIGHT)
    assert network.sizes == [24]
    network.sizes.clear()
    order_nats(network, batch, LANGUAGE.mask_id, Order.ENTROPY)
    assert network.sizes == [6] * 4


@every_order
def test_padding_and_company_do_not_matter(order):
    class Own(nn.Module):
        """Depends on the attended tokens alone."""

        def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
            context = (tokens * attention_mask * torch.arange(1, tokens.shape[1] + 1)).sum(dim=1, keepdim=True)
            logits = torch.sin(context + torch.arange(tokens.shape[1]))[..., None] * torch.arange(9.0)
            return logits.double().log_softmax(dim=-1)[targets]

    tokens = torch.tensor([[1, 2, 3, 4, 5], [4, 4, 0, 0, 0], [7, 1, 2, 0, 0]])
    attention_mask = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    batch = Batch.of(tokens, attention_mask, attention_mask)
    together = order_nats(Own(), batch, 9, order)
    for index in range(3):
        [alone] = order_nats(Own(), batch.select(torch.tensor([index])), 9, order)
        torch.testing.assert_close(together[index, : len(alone)], alone)
        assert not together[index, len(alone) :].any()
    few_at_once = order_nats(Own(), batch, 9, order, positions_at_once=5)
    torch.testing.assert_close(few_at_once, together)


def in_each_order(network: nn.Module, sentence: Tensor) -> dict[tuple[int, ...], float]:
    """The nats of a sentence in every order of its positions, one state at a time."""
    everywhere, found = torch.ones_like(sentence, dtype=torch.bool), {}
    for order in permutations(range(sentence.shape[1])):
        state, found[order] = torch.full_like(sentence, LANGUAGE.mask_id), 0.0
        for position in order:
            log_f = network(state, everywhere, torch.ones(1).double(), everywhere)
            found[order] -= float(log_f[position, sentence[0, position]].detach())
            state[0, position] = sentence[0, position]
    return found


def test_random_orders_are_a_mixture_of_distinct_orders():
    """Against the definition, for one and many orders; with many, all occur about equally often."""
    network, batch = Table(LANGUAGE, scale=2.0, seed=3), LANGUAGE.batch(LANGUAGE.sentences[[40]])
    known = in_each_order(network, batch.tokens)
    before, counts = torch.zeros(0).double(), dict.fromkeys(known, 0)
    for number in (*range(1, 8), 1200):
        nats = order_nats(network, batch, LANGUAGE.mask_id, RandomOrders(number)).sum()
        if number < 8:  # exp(-nats) · K is a sum over orders, so the last one follows from the one before
            last = -math.log(math.exp(-nats) * number - float(before.sum()))
            before = torch.cat([before, torch.tensor([math.exp(-last)]).double()])
            [order] = [order for order, own in known.items() if own == pytest.approx(last, abs=1e-6)]
            counts[order] += 1
        else:
            diffusion = -math.log(sum(math.exp(-own) for own in known.values()) / len(known))
            assert float(nats) == pytest.approx(diffusion, abs=0.05)
            assert diffusion < sum(known.values()) / len(known) - 0.2  # the bound averages outside the logarithm
    assert sum(one > 0 for one in counts.values()) >= 4


def test_random_orders_depend_on_the_number_of_tokens_alone():
    """Not on where they are, on what stands between them, on the padding or on the example."""

    def states(editable: list[int], example: int) -> list[list[int]]:
        """Which of the editable positions are masked when each of them is generated, by position."""
        flags = torch.tensor([editable]).bool()
        batch = Batch.of(torch.arange(len(editable))[None], flags, torch.ones_like(flags))
        found = []

        def network(tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
            found.extend((tokens == 9)[:, flags[0]].int().tolist())
            return torch.zeros(len(tokens), 9).double().log_softmax(dim=-1)

        order_nats(network, replace(batch, example=torch.tensor([example])), 9, RandomOrders(3))
        return found

    expected = states([1, 1, 1, 1], 0)
    assert len({str(state) for state in expected}) > 5
    for other in ([0, 0, 1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0]):
        assert states(other, 17) == expected


def test_tokens_share_the_nats_of_a_mixture():
    """The mean over orders by their probabilities given the text; what is missing is spread evenly."""
    network, batch = Table(LANGUAGE, scale=2.0, seed=3), LANGUAGE.batch(LANGUAGE.sentences[[40]])
    own = torch.cat([*random_orders_nats(network, batch, LANGUAGE.mask_id, 5)])
    weights = (-own.sum(dim=1)).softmax(dim=0)
    mixed = -math.log(float((-own.sum(dim=1)).exp().mean()))
    mean = weights @ own
    found = order_nats(network, batch, LANGUAGE.mask_id, RandomOrders(5))[0]
    torch.testing.assert_close(found, mean + (mixed - mean.sum()) / 4)
    assert mixed > float(mean.sum())


@every_order
def test_without_editable_positions_there_are_no_nats_and_no_calls(order):
    everywhere = torch.ones(2, 4).bool()
    batch = Batch.of(torch.ones(2, 4).long(), ~everywhere, everywhere)
    network = Counting(Table(LANGUAGE))
    assert not order_nats(network, batch, LANGUAGE.mask_id, order).any()
    assert not network.sizes


def test_unlikely_orders_do_not_make_a_text_impossible():
    class Certain(nn.Module):
        """Knows a token if its left neighbor is unmasked, and excludes it otherwise."""

        def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
            known = torch.roll(tokens, 1, dims=1) != 9
            known[:, 0] = True
            other = torch.full((*tokens.shape, 9), -torch.inf).double()
            other[..., 5] = torch.where(known, 0.0, -torch.inf)
            other[..., 6] = torch.where(known, -torch.inf, 0.0)
            return other[targets]

    batch = Batch.of(torch.full((1, 3), 5), torch.ones(1, 3).bool(), torch.ones(1, 3).bool())
    nats = order_nats(Certain(), batch, 9, RandomOrders(64))
    assert 1 < float(nats.sum()) < 3  # one of the six orders generates it
    one = next(
        number for number in range(1, 64) if order_nats(Certain(), batch, 9, RandomOrders(number)).isfinite().all()
    )
    assert one > 1
    impossible = order_nats(Certain(), batch, 9, RandomOrders(one - 1))
    assert impossible.sum() == torch.inf
    assert impossible[0, 0] == 0  # the first token needs no neighbor: where it is impossible can still be seen


def test_orders_have_names():
    assert [order_named(order.value) for order in ORDERS] == [*ORDERS]
    for name in ("random", "random-", "random-x", "random--1", "random-1.5"):
        with pytest.raises(ValueError, match="left-to-right, confidence, entropy or random-K, such as random-16, got"):
            order_named(name)
    for name in ("random-0", "random-4097", "random-999999999"):
        with pytest.raises(ValueError, match="the number of random orders must be 1 to 4096, got"):
            order_named(name)
