"""Exact likelihoods in a deterministic order: probabilities, from states alone, in the promised number of calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from languages import Bayes, Language, Table
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.likelihood.orders import Order, order_nats

LANGUAGE = Language.random(3, 4, seed=5)
every_order = pytest.mark.parametrize("order", Order)


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


def test_unknown_orders_are_refused():
    with pytest.raises(ValueError, match="left-to-right, confidence, entropy, got 'random'"):
        Order.named("random")
