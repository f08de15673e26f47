"""SUNDAE: the loss against enumeration, its noise, and the distribution of refined samples."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from backbones import (
    CLS,
    MASK,
    NUM_SPECIAL,
    NUM_TOKENIZER_IDS,
    Spy,
    backbone_of,
    mixed_canvas,
    repeated_words,
    tokenizer_allowed,
)
from drawing import Drawing, drawing
from languages import Language, Table
from scipy import stats
from torch import Tensor, nn

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.objectives import sundae
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.objectives.sundae import Sundae
from diffusionbert.samplers import State
from diffusionbert.samplers.refinement import Refinement

PAIRS = Language.random(2, 2, seed=3)
TRIPLES = Language.random(2, 3, seed=4)


def at_fraction(batch: Batch, fraction: float) -> Batch:
    """The same with a given fraction of replaced tokens."""
    return replace(batch, strata=torch.full((len(batch.tokens), 2), fraction, dtype=torch.float64))


# The loss.


def transition(network: nn.Module, language: Language, positions: tuple[int, ...] | None = None) -> Tensor:
    """From every sentence to every other: selected positions are drawn independently from the network."""
    log_f = all_answers(network, language)
    at = range(language.length) if positions is None else positions
    stay = language.sentences[:, None] == language.sentences[None]
    chance = torch.ones(len(language.sentences), len(language.sentences), dtype=torch.float64)
    for position in range(language.length):
        to = log_f[:, position][:, language.sentences[:, position]].exp()
        chance = chance * (to if position in at else stay[..., position].double())
    return chance


@torch.no_grad()
def all_answers(network: nn.Module, language: Language) -> Tensor:
    batch = language.batch()
    t = torch.ones(len(batch.tokens), dtype=torch.float64)
    return network(batch.tokens, batch.attention_mask, t, batch.editable).view(*batch.tokens.shape, -1)


def expected_loss(network: nn.Module, language: Language, fraction: float, unrolls: int) -> Tensor:
    """For each sentence the mean over all corruptions and all predictions of the network."""
    same = (language.sentences[:, None] == language.sentences[None]).double()
    state = (fraction / language.num_words + (1 - fraction) * same).prod(dim=2)  # clean × corrupted
    log_f = all_answers(network, language)
    clean = language.sentences[None].expand(len(same), -1, -1)  # seen × clean × position
    cost = -log_f.transpose(1, 2).gather(1, clean).sum(dim=2)
    total = torch.zeros(len(same), dtype=torch.float64)
    for _ in range(unrolls):
        total += (state * cost.T).sum(dim=1)
        state = state @ transition(network, language)
    return total / unrolls


@pytest.mark.parametrize("unrolls", [1, 2, 3])
@pytest.mark.parametrize("fraction", [0.25, 0.8])
def test_the_loss_is_the_mean_over_noise_and_own_predictions(unrolls, fraction):
    network = Table(TRIPLES, scale=2.0)
    copies = 3000
    batch = at_fraction(TRIPLES.batch(TRIPLES.sentences.repeat(copies, 1)), fraction)
    with torch.no_grad():
        losses = Sundae(TRIPLES.allowed, unrolls).loss(network, batch, Noise(0)).view(copies, -1)
    error = losses.std(dim=0) / math.sqrt(copies)
    distance = (losses.mean(dim=0) - expected_loss(network, TRIPLES, fraction, unrolls)).abs() / error
    assert bool((distance < 4).all())
    if unrolls > 1:  # the test can tell unrolls apart
        assert not bool(((losses.mean(dim=0) - expected_loss(network, TRIPLES, fraction, 1)).abs() / error < 4).all())


class Seen(nn.Module):
    """Gives all tokens the same probability, and records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        self.questions.append((tokens, attention_mask, t, targets))
        log_f = torch.zeros(int(targets.sum()), NUM_TOKENIZER_IDS, dtype=torch.float64)
        return log_f.masked_fill(~tokenizer_allowed(), -torch.inf).log_softmax(dim=-1)


def texts(rows: int = 2000) -> Batch:
    """`[CLS] prompt tokens …`, a third of the sequences padded."""
    tokens = torch.randint(NUM_SPECIAL, NUM_TOKENIZER_IDS, (rows, 20), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(tokens, dtype=torch.bool)
    attention_mask[::3, 12:] = False
    tokens[:, 0], tokens[~attention_mask] = CLS, 0
    editable = attention_mask.clone()
    editable[:, :3] = False
    return Batch.of(tokens, editable, attention_mask)


@pytest.mark.parametrize("fraction", [0.1, 0.7])
def test_a_fraction_of_tokens_is_replaced_by_uniform_ones(fraction):
    batch, network = at_fraction(texts(), fraction), Seen()
    Sundae(tokenizer_allowed()).loss(network, batch, Noise(0))
    tokens, attention_mask, t, targets = network.questions[0]
    assert torch.equal(targets, batch.editable)
    assert torch.equal(attention_mask, batch.attention_mask)
    assert bool((t == 1).all())
    assert torch.equal(tokens[~batch.editable], batch.tokens[~batch.editable])
    changed = (tokens != batch.tokens)[batch.editable]
    num_words = NUM_TOKENIZER_IDS - NUM_SPECIAL
    expected = fraction * (1 - 1 / num_words)
    error = math.sqrt(expected * (1 - expected) / len(changed))
    assert float(changed.double().mean()) == pytest.approx(expected, abs=4 * error)
    counts = torch.bincount(tokens[batch.editable][changed] - NUM_SPECIAL, minlength=num_words)
    assert len(counts) == num_words
    assert stats.chisquare(counts).pvalue > 1e-4


def test_the_fraction_is_uniform_between_0_and_1_per_sequence():
    batch, network = texts(), Seen()
    Sundae(tokenizer_allowed(), 1).loss(network, batch, Noise(0))
    tokens = network.questions[0][0]
    fraction = ((tokens != batch.tokens) & batch.editable).sum(dim=1) / batch.editable.sum(dim=1)
    assert float(fraction.mean()) == pytest.approx(0.5, abs=0.03)
    # Were words replaced each on its own with probability 1/2, hardly a row would be this near to the ends.
    assert float((fraction < 0.15).double().mean()) > 0.1
    assert float((fraction > 0.85).double().mean()) > 0.1


def test_each_unroll_draws_all_tokens_and_costs_all():
    batch, network = texts(500), Seen()
    losses = Sundae(tokenizer_allowed(), 3).loss(network, batch, Noise(0))
    assert len(network.questions) == 3
    first, second, third = (tokens[batch.editable] for tokens, *_ in network.questions)
    for a, b in ((first, second), (second, third), (first, third)):
        assert float((a == b).double().mean()) == pytest.approx(1 / 42, abs=0.01)
    for tokens, *_ in network.questions:
        assert torch.equal(tokens[~batch.editable], batch.tokens[~batch.editable])
        assert bool(tokenizer_allowed()[tokens[batch.editable]].all())
    torch.testing.assert_close(losses, batch.editable.sum(dim=1) * math.log(42.0), check_dtype=False)


def test_draws_in_pieces_give_the_same_tokens(monkeypatch):
    network, batch = Table(PAIRS), PAIRS.batch()
    whole = Sundae(PAIRS.allowed).loss(network, batch, Noise(0))
    monkeypatch.setattr(sundae, "_POSITIONS_AT_ONCE", 3)
    assert torch.equal(Sundae(PAIRS.allowed).loss(network, batch, Noise(0)), whole)


def test_sequences_without_editable_positions_have_no_cost():
    batch = texts(3)
    batch.editable[1] = False
    assert (Sundae(tokenizer_allowed()).loss(Seen(), batch, Noise(0)) > 0).tolist() == [True, False, True]
    batch.editable[:] = False
    assert Sundae(tokenizer_allowed()).loss(Seen(), batch, Noise(0)).tolist() == [0, 0, 0]


def test_its_likelihood_is_none_and_nats_raise():
    objective = Sundae(tokenizer_allowed())
    assert objective.likelihood is Likelihood.NONE
    with pytest.raises(ValueError, match=r"no likelihood, nor a bound on one: .* judge it by its samples"):
        objective.nats(Seen(), texts(2), Noise(0))


@pytest.mark.parametrize("unrolls", [0, -1])
def test_fewer_than_one_unroll_is_refused(unrolls):
    with pytest.raises(ValueError, match=f"must be 1 or more, got {unrolls}; the paper's number is 2"):
        Sundae(tokenizer_allowed(), unrolls)


# The contract.


def method(unrolls: int = 2) -> TrainingModule:
    network = Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()
    return TrainingModule(network, Sundae(tokenizer_allowed(), unrolls))


@pytest.mark.parametrize("unrolls", [2, 3])
def test_noise_belongs_to_the_example(unrolls):
    """However much a sequence is padded."""
    tested, whole = method(unrolls), repeated_words()
    losses = tested.objective.loss(tested.network, whole, Noise(5, 9))
    for part in (torch.tensor([9, 0, 3]), torch.tensor([1, 2, 11])):
        alone = tested.objective.loss(tested.network, whole.select(part), Noise(5, 9))
        torch.testing.assert_close(alone, losses[part], atol=1e-4, rtol=1e-5)
    assert not torch.allclose(tested.objective.loss(tested.network, whole, Noise(5, 10)), losses)


# Writing.


@pytest.fixture(scope="module")
def bert() -> Denoiser:
    return Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()


@pytest.fixture
def canvas(bert) -> Batch:
    return mixed_canvas(bert.backbone)


def refinement(steps: int, fraction: float = 1.0, allowed: Tensor | None = None, **settings: Any) -> Drawing:
    allowed = tokenizer_allowed() if allowed is None else allowed
    return drawing(Refinement(fraction), None, steps=steps, allowed_tokens=allowed, **settings)


SAMPLERS = {
    "all": refinement(4),
    "a fraction": refinement(4, 0.3, warper=LogitsWarper(0.8)),
    "one step": refinement(1, 0.01),
    "most probable": refinement(12, warper=LogitsWarper(top_k=1)),
    "most probable, a fraction": refinement(6, 0.5, warper=LogitsWarper(top_k=1)),
}
parametrize_samplers = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


@parametrize_samplers
def test_states_go_from_random_tokens_to_text_and_keep_frozen_positions(sampler, bert, canvas):
    states = list(sampler.sample(bert, canvas, seed=0))
    for state in states:
        assert torch.equal(state.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
        assert bool(tokenizer_allowed()[state.tokens[canvas.editable]].all())
    times = torch.stack([state.time for state in states])
    assert times[0].tolist() == [0, 1, 1, 1, 1]
    assert times[-1].tolist() == [0] * 5
    assert bool((times.diff(dim=0) <= 0).all())
    assert not bool((states[0].tokens == canvas.tokens)[canvas.editable].all())


@parametrize_samplers
def test_calls_count_the_queries_per_sequence_and_the_time_is_always_1(sampler, bert, canvas):
    spy = Spy(bert)
    states = sampler.sample(spy, canvas, seed=0)
    assert next(states).calls.tolist() == [0] * 5
    for number, state in enumerate(states, 1):
        assert int(state.calls.sum()) == sum(len(tokens) for tokens, *_ in spy.questions)
        assert state.calls[0] == 0
        assert state.time.dtype == torch.float64
        if sampler.context.config.top_k is None or sampler.sampler.update_fraction < 1:
            assert state.calls.tolist() == [0, *[number] * 4]
            torch.testing.assert_close(
                state.time[1:], torch.full((4,), 1 - number / sampler.context.config.steps).double(), atol=1e-7, rtol=0
            )
    for _, _, t, targets in spy.questions:
        assert bool((t == 1).all())
        assert bool(targets.any(dim=1).all())


def history(states: list[State], row: int, length: int) -> list[tuple[list[int], float, int]]:
    """The states of one sequence without repetitions: a batch continues until its last sequence is finished."""
    events = [(state.tokens[row, :length].tolist(), float(state.time[row]), int(state.calls[row])) for state in states]
    return [event for event, _ in itertools.groupby(events)]


@pytest.mark.slow
@parametrize_samplers
def test_a_batch_equals_its_sequences_one_by_one(sampler, bert, canvas):
    together = list(sampler.sample(bert, canvas, seed=3))
    for row in range(5):
        alone = canvas.select(torch.tensor([row]))
        length = alone.tokens.shape[1]
        assert history(together, row, length) == history(list(sampler.sample(bert, alone, seed=3)), 0, length)


@pytest.mark.slow
@parametrize_samplers
def test_the_same_seed_gives_the_same_text_and_another_seed_another_text(sampler, bert, canvas):
    first, again, other = (list(sampler.sample(bert, canvas, seed))[-1].tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("update", [0.1, 1.0])
def test_the_tokens_at_editable_positions_do_not_matter_and_forbidden_ones_are_not_sampled(update, bert, canvas):
    warper = LogitsWarper(0.8, top_k=10, top_p=0.9, forbidden=(*range(7), *range(9, 50)))
    sampler = refinement(2, update, warper=warper)
    other = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, MASK))
    first, again = (list(sampler.sample(bert, batch, seed=0))[-1].tokens for batch in (canvas, other))
    assert torch.equal(first, again)
    assert set(first[canvas.editable].tolist()) <= {7, 8}


def test_a_canvas_without_editable_positions_is_returned_without_a_call(bert, canvas):
    frozen = replace(canvas, editable=torch.zeros_like(canvas.editable))
    spy = Spy(bert)
    (only,) = refinement(3).sample(spy, frozen, seed=0)
    assert torch.equal(only.tokens, canvas.tokens)
    assert only.calls.tolist() == only.time.tolist() == [0] * 5
    assert not spy.questions


def test_a_step_after_the_first_queries_a_fraction_of_each_sequence_rounded_up(bert, canvas):
    spy = Spy(bert)
    list(refinement(4, 0.3).sample(spy, canvas, seed=0))
    targets = [question[3].sum(dim=1).tolist() for question in spy.questions]
    assert targets == [[5, 9, 2, 6], *[[2, 3, 1, 2]] * 3]
    positions = [question[3].nonzero().tolist() for question in spy.questions]
    assert positions[1] != positions[2] != positions[3]


# The law of what is written.


def frequencies(tokens: Tensor, language: Language) -> Tensor:
    powers = language.num_words ** torch.arange(language.length - 1, -1, -1)
    return torch.bincount((tokens * powers).sum(dim=1), minlength=len(language.sentences)).double()


FRACTIONS = {1.0: [(0, 1, 2)], 0.5: [(0, 1), (0, 2), (1, 2)], 0.2: [(0,), (1,), (2,)]}


@pytest.mark.parametrize("update", FRACTIONS)
def test_samples_follow_the_chain_after_every_step(update):
    network, rows = Table(TRIPLES, scale=2.0), 20_000
    canvas = TRIPLES.batch(torch.zeros(rows, 3, dtype=torch.long))
    law = torch.full((8,), 1 / 8, dtype=torch.float64)
    for number, state in enumerate(refinement(4, update, TRIPLES.allowed).sample(network, canvas, seed=1)):
        assert stats.chisquare(frequencies(state.tokens, TRIPLES), law * rows).pvalue > 1e-4
        positions = [(0, 1, 2)] if number == 0 else FRACTIONS[update]
        law = law @ torch.stack([transition(network, TRIPLES, chosen) for chosen in positions]).mean(dim=0)
    assert number == 4


def likeliest_texts(network: nn.Module, canvas: Batch, start: Tensor, steps: int) -> list[Tensor]:
    tokens, texts = start, [start]
    for _ in range(steps):
        t = torch.ones(len(tokens), dtype=torch.float64)
        log_f = network(tokens, canvas.attention_mask, t, canvas.editable)
        tokens = tokens.masked_scatter(canvas.editable, log_f.argmax(dim=-1))
        texts.append(tokens)
    return texts


@pytest.mark.parametrize(("seed", "cycles"), [(24, False), (4, True)])
def test_sequences_that_cannot_change_any_more_stop_early(seed, cycles):
    """A sequence is queried until a prediction repeats it; one that cycles takes all steps."""
    network, canvas = Table(TRIPLES, scale=2.0, seed=seed), TRIPLES.batch()
    states = list(refinement(9, allowed=TRIPLES.allowed, warper=LogitsWarper(top_k=1)).sample(network, canvas, seed=0))
    texts = likeliest_texts(network, canvas, states[0].tokens, 9)
    expected = []
    for row in range(8):
        changes = [not torch.equal(a[row], b[row]) for a, b in itertools.pairwise(texts)]
        expected.append(9 if all(changes) else changes.index(False) + 1)
    assert (max(expected) == 9) is cycles
    assert len(set(expected)) > 3
    assert states[-1].calls.tolist() == expected
    assert len(states) == 1 + max(expected)
    for number, state in enumerate(states):
        assert torch.equal(state.tokens, texts[number])
    assert torch.equal(states[-1].tokens, texts[-1])


@pytest.mark.slow
def test_a_fraction_of_positions_is_rounded_up_without_rounding_errors():
    """Seven tenths of ten positions are seven, although 0.7 · 10 is slightly more in floating point."""
    number = torch.arange(1, 200)
    x = Batch.of(torch.zeros(199, 199, dtype=torch.long), torch.arange(199) < number[:, None])
    for percent in range(1, 101):
        chosen = Refinement(percent / 100)._fraction(x, seed=0, number=2).sum(dim=1)
        assert torch.equal(chosen, -(-percent * number // 100))


@pytest.mark.parametrize("update", [0.0, -0.1, 1.1, math.nan])
def test_fractions_out_of_range_are_refused(update):
    with pytest.raises(ValueError, match=rf"update_fraction must be above 0 and at most 1, got {update}"):
        Refinement(update)
