"""Samplers other than the exact ones: one contract for all, and the properties of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from backbones import (
    CLS,
    MASK,
    NUM_SPECIAL,
    NUM_TOKENIZER_IDS,
    SEP,
    Spy,
    backbone_of,
    mixed_canvas,
    sentences,
    timed_bert,
    tokenizer_allowed,
)
from drawing import Drawing, drawing
from languages import Bayes, Language, Table, exact_log_likelihood, log_forward
from scipy import stats
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import (
    Cosine,
    Linear,
    Mean,
    Spindle,
    TokenInformation,
    uniform_grid,
)
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.samplers import State
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.samplers.confidence import Confidence, Criterion
from diffusionbert.samplers.entropy_bounded import EntropyBounded, UnmaskingOrder
from diffusionbert.samplers.exact import Exact
from diffusionbert.samplers.first_hitting import FirstHitting
from diffusionbert.samplers.gibbs import Gibbs, Order
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.samplers.remasking import Remasking, Renoising, Strategy

LINEAR = Absorbing(Linear(), MASK)


def by_token(mean: Mean = Mean.CORPUS, floor: float = 0.0) -> Absorbing:
    counts = torch.arange(50.0).square()
    return Absorbing(Spindle(0.4, mean, floor), MASK, TokenInformation.from_counts(counts))


Factory = Callable[[LogitsWarper | None], Drawing]
SAMPLERS: dict[str, Factory] = {
    "probability": lambda warper: drawing(Confidence(), LINEAR, steps=4, warper=warper),
    "margin": lambda warper: drawing(Confidence(Criterion.MARGIN), LINEAR, steps=30, warper=warper),
    "entropy, threshold": lambda warper: drawing(
        Confidence(Criterion.ENTROPY, -1.0), by_token(), steps=6, warper=warper, end=0.7
    ),
    "entropy-bounded": lambda warper: drawing(EntropyBounded(1.0), LINEAR, steps=30, warper=warper),
    "entropy-bounded, by entropy": lambda warper: drawing(
        EntropyBounded(2.0, UnmaskingOrder.ENTROPY), by_token(), steps=5, warper=warper, end=0.7
    ),
    "mask-predict": lambda warper: drawing(MaskPredict(), LINEAR, steps=4, warper=warper),
    "mask-predict, many rounds": lambda warper: drawing(MaskPredict(), by_token(), steps=12, warper=warper, end=0.7),
    "remasking, cap": lambda warper: drawing(Remasking(0.3), LINEAR, steps=5, warper=warper),
    "remasking, rescale": lambda warper: drawing(Remasking(0.8, Strategy.RESCALE), by_token(), steps=5, warper=warper),
    "renoising": lambda warper: drawing(Renoising(), LINEAR, steps=5, warper=warper),
    "renoising, by token": lambda warper: drawing(Renoising(), by_token(), steps=5, end=0.6, warper=warper),
    "renoising, by sentence": lambda warper: drawing(
        Renoising(), by_token(Mean.SENTENCE, floor=0.05), steps=5, warper=warper
    ),
    "gibbs": lambda warper: drawing(Gibbs(), LINEAR, steps=12, warper=warper),
    "gibbs, few calls": lambda warper: drawing(Gibbs(), LINEAR, steps=4, warper=warper, end=0.7),
    "gibbs, left to right": lambda warper: drawing(Gibbs(Order.LEFT_TO_RIGHT), LINEAR, steps=12, warper=warper),
    "blocks, gibbs": lambda warper: drawing(Blocks(3, Gibbs(Order.LEFT_TO_RIGHT)), LINEAR, steps=4, warper=warper),
    "blocks": lambda warper: drawing(Blocks(3, Renoising()), LINEAR, steps=3, warper=warper),
    "blocks, window": lambda warper: drawing(
        Blocks(3, Confidence(Criterion.MARGIN)), LINEAR, steps=2, warper=warper, max_length=7
    ),
}
parametrize_samplers = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())


@pytest.fixture(scope="module")
def bert() -> Denoiser:
    return timed_bert()


@pytest.fixture
def canvas(bert) -> Batch:
    return mixed_canvas(bert.backbone)


@pytest.mark.slow
@parametrize_samplers
def test_states_go_from_the_prior_to_text_and_keep_what_is_frozen(make, bert, canvas):
    states = list(make(None).sample(bert, canvas, seed=0))
    assert bool((states[0].tokens[canvas.editable] == MASK).all())
    assert bool(tokenizer_allowed()[states[-1].tokens[canvas.editable]].all())
    for state in states:
        assert torch.equal(state.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
        words = state.tokens[canvas.editable]
        assert bool((tokenizer_allowed()[words] | (words == MASK)).all())


EXACT: dict[str, Factory] = {
    "exact": lambda warper: drawing(Exact(), LINEAR, steps=4, warper=warper),
    "first-hitting": lambda warper: drawing(FirstHitting(), LINEAR, steps=4, warper=warper),
    "ancestral": lambda warper: drawing(Ancestral(), by_token(), steps=4, warper=warper),
    "blocks, ancestral": lambda warper: drawing(Blocks(3, Ancestral()), LINEAR, steps=3, warper=warper),
}
BY_CONFIDENCE = "probability", "margin", "entropy, threshold", "blocks, window"
KEEPING = {*EXACT, *BY_CONFIDENCE, "entropy-bounded", "entropy-bounded, by entropy"}


@pytest.mark.parametrize("name", [*SAMPLERS, *EXACT])
def test_a_sampler_that_keeps_tokens_never_changes_one(name, bert, canvas):
    made = (SAMPLERS | EXACT)[name](None)
    states = list(made.sample(bert, canvas, seed=0))
    kept = [
        bool((before.tokens[is_word] == after.tokens[is_word]).all())
        for before, after in itertools.pairwise(states)
        for is_word in [before.tokens != MASK]
    ]
    assert made.sampler.keeps_tokens(made.context) == (name in KEEPING)
    assert all(kept) or name not in KEEPING


@pytest.mark.slow
@parametrize_samplers
def test_time_falls_to_0(make, bert, canvas):
    times = torch.stack([state.time for state in make(None).sample(bert, canvas, seed=0)])
    assert times.dtype == torch.float64
    assert bool((times.diff(dim=0) <= 0).all())
    assert bool((times[0, 1:] > 0.5).all())
    assert times[-1].tolist() == [0] * 5


@pytest.mark.slow
@parametrize_samplers
def test_calls_count_the_queries_per_sequence(make, bert, canvas):
    spy = Spy(bert)
    before = 0
    for state in make(None).sample(spy, canvas, seed=0):
        assert int(state.calls.sum()) == spy.num_sequences
        assert spy.num_sequences - before <= 4
        before = spy.num_sequences
    assert state.calls[0] == 0
    assert bool((state.calls[1:] > 0).all())
    for row in range(5):
        alone = Spy(bert)
        *_, last = make(None).sample(alone, canvas.select(torch.tensor([row])), seed=0)
        assert len(alone.questions) == alone.num_sequences == int(last.calls) == int(state.calls[row])


@pytest.mark.slow
@parametrize_samplers
def test_every_query_has_targets_and_a_time_in_range(make, bert, canvas):
    spy = Spy(bert)
    list(make(None).sample(spy, canvas, seed=0))
    for tokens, attention_mask, t, targets in spy.questions:
        assert bool(targets.any(dim=1).all())
        assert bool((tokens[targets] == MASK).all())
        assert not bool((targets & ~attention_mask).any())
        assert bool(((t > 0) & (t <= 1)).all())


def history(states: list[State], row: int) -> list[tuple[list[int], float, int]]:
    """The states of one sequence, repetitions left out: a batch goes on until its last sequence is finished."""
    events = [(state.tokens[row].tolist(), float(state.time[row]), int(state.calls[row])) for state in states]
    return [event for event, _ in itertools.groupby(events)]


@pytest.mark.slow
@parametrize_samplers
def test_a_batch_equals_its_sequences_one_by_one(make, bert, canvas):
    together = list(make(None).sample(bert, canvas, seed=3))
    for row in range(5):
        alone = canvas.select(torch.tensor([row]))
        length = alone.tokens.shape[1]
        in_batch = [(tokens[:length], time, calls) for tokens, time, calls in history(together, row)]
        assert in_batch == history(list(make(None).sample(bert, alone, seed=3)), 0)


@pytest.mark.slow
@parametrize_samplers
def test_the_same_seed_gives_the_same_text_and_another_seed_another_text(make, bert, canvas):
    sampler = make(None)
    first, again, other = (list(sampler.sample(bert, canvas, seed))[-1].tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not bool((first == other).all(dim=1)[[1, 2, 4]].any())


@pytest.mark.slow
@parametrize_samplers
def test_the_tokens_at_editable_positions_do_not_matter(make, bert, canvas):
    other = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, 30))
    first, again = (list(make(None).sample(bert, batch, seed=0)) for batch in (canvas, other))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))


@pytest.mark.slow
@parametrize_samplers
def test_forbidden_tokens_are_never_generated(make, bert, canvas):
    forbidden = tuple(token for token in range(50) if token not in (7, 8))
    *_, last = make(LogitsWarper(0.8, top_k=10, top_p=0.9, forbidden=forbidden)).sample(bert, canvas, seed=0)
    assert set(last.tokens[canvas.editable].tolist()) <= {7, 8}


@pytest.mark.slow
@parametrize_samplers
def test_gradients_stay_as_the_caller_set_them(make, bert, canvas):
    states = make(None).sample(bert, canvas, seed=0)
    for _ in range(3):
        state = next(states)
        assert torch.is_grad_enabled()
        assert not state.time.requires_grad
    asked_with_gradients = []
    spy = Spy(bert)
    spy.register_forward_hook(lambda *_: asked_with_gradients.append(torch.is_grad_enabled()))
    list(make(None).sample(spy, canvas, seed=0))
    assert not any(asked_with_gradients)


@pytest.mark.slow
@parametrize_samplers
def test_yielded_states_do_not_change(make, bert, canvas):
    kept = [
        (state, state.tokens.clone(), state.time.clone(), state.calls.clone())
        for state in make(None).sample(bert, canvas, seed=0)
    ]
    for state, tokens, time, calls in kept:
        assert torch.equal(state.tokens, tokens)
        assert torch.equal(state.time, time)
        assert torch.equal(state.calls, calls)


@parametrize_samplers
def test_a_canvas_without_editable_positions_is_returned_without_a_call(make, bert, canvas):
    frozen = replace(canvas, editable=torch.zeros_like(canvas.editable))
    spy = Spy(bert)
    *_, last = make(None).sample(spy, frozen, seed=0)
    assert torch.equal(last.tokens, canvas.tokens)
    assert last.calls.tolist() == last.time.tolist() == [0] * 5
    assert not spy.questions


LOW_TEMPERATURE = {
    "remasking": drawing(Remasking(0.2), LINEAR, steps=8, warper=LogitsWarper(0.1)),
    "renoising": drawing(Renoising(), LINEAR, steps=8, warper=LogitsWarper(0.1)),
}


@pytest.mark.parametrize("sampler", LOW_TEMPERATURE.values(), ids=LOW_TEMPERATURE.keys())
def test_low_temperature_still_unmasks_throughout_the_steps(sampler):
    network = Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()
    tokens = torch.full((64, 16), MASK)
    canvas = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))
    masked = [int((state.tokens == MASK).sum()) / 1024 for state in sampler.sample(network, canvas, seed=0)]
    assert masked == pytest.approx([i / 8 for i in range(8, -1, -1)], abs=0.05)


# Networks that differ only in their confidence at each position.


class Certain(nn.Module):
    """Gives token 5 + i at position i the probability that is listed for the call and the position."""

    def __init__(self, *certainties: list[float]):
        super().__init__()
        self.certainties = certainties
        self.times: list[float] = []

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        certainty = torch.tensor(self.certainties[min(len(self.times), len(self.certainties) - 1)]).double()
        self.times.append(float(t[0]))
        p = ((1 - certainty) / (NUM_TOKENIZER_IDS - NUM_SPECIAL - 1))[:, None] * tokenizer_allowed()
        position = torch.arange(len(certainty))
        p[position, NUM_SPECIAL + position] = certainty
        return p.log().expand(len(tokens), *p.shape)[targets]


class Fixed(nn.Module):
    """Gives each position a fixed distribution, whatever the tokens."""

    def __init__(self, *distributions: dict[int, float]):
        super().__init__()
        self.p = torch.zeros(len(distributions), 50, dtype=torch.float64)
        for position, distribution in enumerate(distributions):
            self.p[position, list(distribution)] = torch.tensor(list(distribution.values()), dtype=torch.float64)

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        return self.p.log().expand(len(tokens), *self.p.shape)[targets]


def row_of(length: int) -> Batch:
    tokens = torch.full((1, length), MASK)
    return Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))


def masked_positions(states: list[State]) -> list[list[int]]:
    return [(state.tokens[0] == MASK).nonzero()[:, 0].tolist() for state in states]


MOST_PROBABLE = LogitsWarper(top_k=1)


@pytest.mark.parametrize("criterion", Criterion)
def test_the_most_confident_position_is_unmasked_first(criterion):
    network = Certain([0.5, 0.9, 0.3, 0.8, 0.6])
    sampler = drawing(Confidence(criterion), LINEAR, steps=5, warper=MOST_PROBABLE, end=0.5)
    states = list(sampler.sample(network, row_of(5), seed=0))
    assert masked_positions(states) == [[0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 2, 4], [0, 2], [2], []]
    assert states[-1].tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert [float(state.time) for state in states] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    assert network.times == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])


ORDERS = {Criterion.PROBABILITY: [2, 0, 1], Criterion.MARGIN: [2, 1, 0], Criterion.ENTROPY: [0, 2, 1]}


@pytest.mark.parametrize("criterion", Criterion)
def test_criteria_measure_what_they_say(criterion):
    network = Fixed(
        {10: 0.5, 11: 0.5},
        {10: 0.45, **dict.fromkeys(range(11, 22), 0.05)},
        {10: 0.55, **dict.fromkeys(range(11, 20), 0.05)},
    )
    states = list(
        drawing(Confidence(criterion), LINEAR, steps=3, warper=MOST_PROBABLE).sample(network, row_of(3), seed=0)
    )
    order = [set(before) - set(after) for before, after in itertools.pairwise(masked_positions(states))]
    assert order == [{position} for position in ORDERS[criterion]]


@pytest.mark.parametrize("sampler", [*map(Confidence, Criterion), MaskPredict()], ids=str)
def test_parts_do_not_change_what_is_drawn(sampler, bert, canvas, monkeypatch):
    made = drawing(sampler, LINEAR, steps=4, warper=LogitsWarper(top_p=0.9, forbidden=(6,)))

    def states() -> list[State]:
        return list(made.sample(bert, canvas, seed=0))

    whole = states()
    monkeypatch.setattr("diffusionbert.diffusion.tokens.VALUES_IN_CACHE", 1)  # one position at a time
    assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(whole, states(), strict=True))


# Token 6 is forbidden; among the others, the second position is more confident in one pair, the first in the other.
FORBIDDING = LogitsWarper(top_k=1, forbidden=(6,))
PAIRS = {
    "second": Fixed({6: 0.9, 7: 0.05, 8: 0.05}, {6: 0.1, 7: 0.6, 8: 0.3}),
    "first": Fixed({6: 0.9, 7: 0.08, 8: 0.02}, {6: 0.1, 7: 0.6, 8: 0.3}),
}


@pytest.mark.parametrize(("confident", "network"), PAIRS.items(), ids=PAIRS.keys())
@pytest.mark.parametrize("criterion", Criterion)
def test_confidence_is_measured_among_allowed_tokens(criterion, confident, network):
    states = list(drawing(Confidence(criterion), LINEAR, steps=2, warper=FORBIDDING).sample(network, row_of(2), seed=0))
    assert masked_positions(states) == [[0, 1], [0 if confident == "second" else 1], []]


@pytest.mark.parametrize(("confident", "network"), PAIRS.items(), ids=PAIRS.keys())
def test_mask_predict_ranks_among_allowed_tokens(confident, network):
    states = list(drawing(MaskPredict(), LINEAR, steps=2, warper=FORBIDDING).sample(network, row_of(2), seed=0))
    assert masked_positions(states) == [[0, 1], [0 if confident == "second" else 1], []]


RANKING: dict[str, Callable[[Absorbing], Drawing]] = {
    "confidence": lambda process: drawing(Confidence(), process, steps=2),
    "mask-predict": lambda process: drawing(MaskPredict(), process, steps=2),
}
parametrize_ranking = pytest.mark.parametrize("make", RANKING.values(), ids=RANKING.keys())


@parametrize_ranking
def test_a_rare_draw_has_low_confidence_and_is_drawn_again(make):
    """The probability is that of the drawn token, not the largest one, and each round has its own random numbers."""
    network = Fixed({6: 0.9, 7: 0.1}, {6: 0.55, 7: 0.45})
    canvas = Batch.of(torch.full((400, 2), MASK), torch.ones(400, 2, dtype=torch.bool))
    _, state, last = make(LINEAR).sample(network, canvas, seed=0)
    first = state.tokens[:, 0]
    assert bool((first == 6).any())
    assert not bool((first == 7).any())
    assert 0 < int((last.tokens[:, 0] == 7).sum()) < 15  # rare twice: one in a hundred


@parametrize_ranking
def test_the_schedule_does_not_matter_where_the_sampler_chooses_what_is_masked(make, bert, canvas):
    first, again = (list(make(process).sample(bert, canvas, seed=0)) for process in (LINEAR, by_token()))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))


def test_positions_are_spread_evenly_over_the_rounds():
    tokens = torch.full((3, 7), MASK)
    editable = torch.arange(7) < torch.tensor([7, 2, 3])[:, None]
    sampler = drawing(Confidence(), LINEAR, steps=3)
    states = list(sampler.sample(Certain([0.5] * 7), Batch.of(tokens, editable), seed=0))
    masked = [((state.tokens == MASK) & editable).sum(dim=1).tolist() for state in states]
    assert masked == [[7, 2, 3], [5, 1, 2], [3, 0, 1], [0, 0, 0]]
    assert states[-1].calls.tolist() == [3, 2, 3]


def test_a_threshold_unmasks_all_that_reach_it_and_at_least_what_is_due():
    certainty = [0.95, 0.3, 0.91, 0.92, 0.2]

    def rounds(threshold: float | None, num_steps: int) -> list[int]:
        sampler = drawing(Confidence(threshold=threshold), LINEAR, steps=num_steps, warper=MOST_PROBABLE)
        return [len(masked) for masked in masked_positions(list(sampler.sample(Certain(certainty), row_of(5), seed=0)))]

    assert rounds(None, 5) == [5, 4, 3, 2, 1, 0]
    assert rounds(0.9, 5) == [5, 2, 1, 0]
    assert rounds(0.99, 5) == [5, 4, 3, 2, 1, 0]
    assert rounds(0.99, 2) == [5, 3, 0]
    assert rounds(0.1, 5) == [5, 0]


@pytest.mark.parametrize(
    ("criterion", "threshold"),
    [
        (Criterion.PROBABILITY, 1.1),
        (Criterion.MARGIN, -0.1),
        (Criterion.ENTROPY, 0.5),
        (Criterion.ENTROPY, float("nan")),
    ],
)
def test_a_threshold_out_of_range_is_rejected(criterion, threshold):
    with pytest.raises(ValueError, match="threshold must be between"):
        Confidence(criterion, threshold)


def test_mask_predict_masks_the_least_probable_again_also_of_earlier_rounds():
    network = Certain([0.9, 0.8, 0.3, 0.2, 0.6, 0.5], [0.1, 0.1, 0.95, 0.97, 0.85, 0.99], [0.4] * 6)
    states = list(
        drawing(MaskPredict(), LINEAR, steps=3, warper=MOST_PROBABLE, end=0.6).sample(network, row_of(6), seed=0)
    )
    # After the first round 0 and 1 stay; in the second, their old 0.9 and 0.8 are compared with the others' new ones.
    assert masked_positions(states) == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [1, 4], []]
    assert network.times == pytest.approx([0.6, 0.4, 0.2])
    assert states[-1].calls.tolist() == [3]
    assert states[-1].tokens.tolist() == [[5, 6, 7, 8, 9, 10]]


def test_mask_predict_masks_whole_positions_and_ends_when_none_is_left():
    tokens = torch.full((3, 7), MASK)
    editable = torch.arange(7) < torch.tensor([7, 2, 3])[:, None]
    states = list(
        drawing(MaskPredict(), LINEAR, steps=4).sample(Certain([0.5] * 7), Batch.of(tokens, editable), seed=0)
    )
    masked = [((state.tokens == MASK) & editable).sum(dim=1).tolist() for state in states]
    assert masked == [[7, 2, 3], [5, 1, 2], [3, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert states[-1].calls.tolist() == [4, 3, 3]


# Enumerable languages.

LANGUAGE = Language.random(3, 2, seed=6)
UNEVEN = torch.tensor([0.0, 0.1, 0.3, 0.7, 1.0], dtype=torch.float64)


def processes(language: Language = LANGUAGE) -> list[Absorbing]:
    schedules = (Linear(), Cosine(), Spindle(1.0))  # so strong that common tokens cannot be masked at first
    return [Absorbing(schedule, language.mask_id, language.information()) for schedule in schedules]


parametrize_processes = pytest.mark.parametrize("process", processes(), ids=str)


def frequencies(language: Language, tokens: Tensor) -> Tensor:
    """How often each state occurs, in the order of `language.states`."""
    powers = language.vocabulary ** torch.arange(language.length - 1, -1, -1)
    return torch.bincount(tokens @ powers, minlength=len(language.states))


def agrees(counts: Tensor, mass: Tensor) -> bool:
    possible = mass > 1e-12
    assert int(counts[~possible].sum()) == 0
    expected = mass[possible] / mass[possible].sum() * counts.sum()
    return len(expected) == 1 or bool(stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-3)


@pytest.mark.parametrize("criterion", [Criterion.MARGIN, Criterion.ENTROPY])
@parametrize_processes
def test_one_position_per_round_in_order_of_confidence_is_exact(criterion, process):
    """The order depends on unmasked tokens alone, so this is a factorization, under every schedule."""
    conditionals = Bayes(LANGUAGE, Absorbing(Linear(), LANGUAGE.mask_id))
    canvas = LANGUAGE.batch(torch.full((20000, 2), LANGUAGE.mask_id))
    *_, last = drawing(Confidence(criterion), process, steps=2).sample(conditionals, canvas, seed=2)
    mass = torch.zeros(len(LANGUAGE.states), dtype=torch.float64)
    mass[(LANGUAGE.states < 3).all(dim=1)] = LANGUAGE.probabilities
    assert agrees(frequencies(LANGUAGE, last.tokens), mass)


Sigma = Callable[[Tensor, Tensor], Tensor]


def highest(alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    return ((1 - alpha_s) / alpha_t.clamp(min=1e-300)).clamp(max=1)


SIGMAS: dict[str, tuple[float, Strategy, Sigma]] = {
    "cap": (0.3, Strategy.CAP, lambda alpha_s, alpha_t: highest(alpha_s, alpha_t).clamp(max=0.3)),
    "rescale": (0.6, Strategy.RESCALE, lambda alpha_s, alpha_t: 0.6 * highest(alpha_s, alpha_t)),
    "maximum": (1.0, Strategy.CAP, highest),
}
parametrize_sigmas = pytest.mark.parametrize(("eta", "strategy", "sigma"), SIGMAS.values(), ids=SIGMAS.keys())


def transition(process: Absorbing, network: nn.Module, language: Language, s: float, t: float, sigma: Sigma) -> Tensor:
    """p(state at s | state at t), a row for each state at t, from the definition of ReMDM."""
    states, vocabulary = language.states, language.vocabulary
    relative = (process.information / process.corpus_mean).expand(vocabulary)
    times = [torch.full((1,), time, dtype=torch.float64) for time in (s, t)]
    alpha_s, alpha_t = (process.schedule.survival(time, relative) for time in times)
    again = sigma(alpha_s, alpha_t)
    batch = language.batch(states)
    everywhere = torch.ones_like(batch.editable)
    p = network(states, batch.attention_mask, times[1].expand(len(states)), everywhere).detach().exp() * (1 - alpha_t)
    p = (p / p.sum(dim=-1, keepdim=True)).view(*states.shape, vocabulary)
    fraction = (alpha_s - (1 - again) * alpha_t) / (1 - alpha_t).clamp(min=1e-300)
    written = p * fraction
    written[..., language.mask_id] = 1 - written[..., : language.num_words].sum(dim=-1)
    kept = nn.functional.one_hot(states, vocabulary) * (1 - again)[states][..., None]
    kept[..., language.mask_id] = again[states]
    step = torch.where((states == language.mask_id)[..., None], written, kept)
    return torch.stack([step[:, position, states[:, position]] for position in range(language.length)]).prod(dim=0)


def chain(
    process: Absorbing, network: nn.Module, language: Language, steps: list[tuple[float, float]], sigma: Sigma
) -> list[Tensor]:
    """The distribution over all states after each step, from everything masked."""
    mass = [(language.states == language.mask_id).all(dim=1).double()]
    for s, t in steps:
        mass.append(mass[-1] @ transition(process, network, language, s, t, sigma))
    return mass


def downwards(grid: Tensor) -> list[tuple[float, float]]:
    return list(itertools.pairwise(grid.tolist()))[::-1]


def forward_mass(process: Absorbing, language: Language, t: float) -> Tensor:
    """Σ p(x0) q(x_t | x0) for each state x_t."""
    rows, columns = len(language.sentences), len(language.states)
    x0 = language.batch(language.sentences.repeat_interleave(columns, dim=0))
    x_t, times = language.states.repeat(rows, 1), torch.full((rows * columns,), t, dtype=torch.float64)
    return language.probabilities @ log_forward(process, x0, x_t, times).exp().view(rows, columns)


def marginals(language: Language, mass: Tensor) -> Tensor:
    """The marginal distribution at each position, [L, V]."""
    return torch.einsum("n,nlv->lv", mass, nn.functional.one_hot(language.states, language.vocabulary).double())


def sampled(sampler: Drawing, network: nn.Module, language: Language, rows: int = 20000, seed: int = 5) -> list[Tensor]:
    canvas = language.batch(torch.full((rows, language.length), language.mask_id))
    return [frequencies(language, state.tokens) for state in sampler.sample(network, canvas, seed)]


@pytest.mark.slow
@parametrize_sigmas
@parametrize_processes
def test_remasking_follows_its_chain_at_every_time(process, eta, strategy, sigma):
    """Chi-square over all sixteen states after each step, for a time-conditioned network."""
    network = Table(LANGUAGE, num_steps=10, seed=2)
    expected = chain(process, network, LANGUAGE, downwards(UNEVEN), sigma)
    counts = sampled(drawing(Remasking(eta, strategy), process, grid=UNEVEN), network, LANGUAGE)
    assert all(agrees(*pair) for pair in zip(counts, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", Strategy)
@parametrize_processes
def test_remasking_with_eta_0_is_ancestral_sampling(process, strategy):
    network = Table(LANGUAGE, num_steps=10, seed=2)
    expected = torch.zeros(len(LANGUAGE.states), dtype=torch.float64)
    words = (LANGUAGE.states < 3).all(dim=1)
    expected[words] = exact_log_likelihood(process, network, LANGUAGE, UNEVEN).exp().detach()
    *_, counts = sampled(drawing(Remasking(0.0, strategy), process, grid=UNEVEN), network, LANGUAGE)
    assert agrees(counts, expected)


def test_remasking_without_reweighting_unmasks_at_once_what_cannot_be_masked():
    process = Absorbing(Spindle(1.0), LANGUAGE.mask_id, LANGUAGE.information(), reweighted=False)
    relative = process.information / process.corpus_mean
    assert bool((process.schedule.survival(UNEVEN[1:2], relative) == 1).any())
    network = Table(LANGUAGE, num_steps=10, seed=2)
    *_, counts = sampled(drawing(Remasking(0.0), process, grid=UNEVEN), network, LANGUAGE)
    expected = torch.zeros(len(LANGUAGE.states), dtype=torch.float64)
    expected[(LANGUAGE.states < 3).all(dim=1)] = exact_log_likelihood(process, network, LANGUAGE, UNEVEN).exp().detach()
    assert agrees(counts, expected)


@parametrize_sigmas
@parametrize_processes
def test_a_step_keeps_the_marginals_of_the_schedule(process, eta, strategy, sigma):
    """From Σ p(x0) q(x_t | x0), the best network leads to Σ p(x0) q(x_s | x0) at every position, up to rounding."""
    network = Bayes(LANGUAGE, process)
    for s, t in [*downwards(UNEVEN), (0.3, 0.3)]:
        step = transition(process, network, LANGUAGE, s, t, sigma)
        after = marginals(LANGUAGE, forward_mass(process, LANGUAGE, t) @ step)
        torch.testing.assert_close(after, marginals(LANGUAGE, forward_mass(process, LANGUAGE, s)))


@pytest.mark.slow
@parametrize_sigmas
@pytest.mark.parametrize("index", range(3), ids=["linear", "cosine", "spindle"])
def test_one_position_keeps_its_marginals_at_every_time(index, eta, strategy, sigma):
    language = Language(3, 1, [0.6, 0.3, 0.1])
    process = processes(language)[index]
    counts = sampled(drawing(Remasking(eta, strategy), process, grid=UNEVEN), Bayes(language, process), language)
    for count, t in zip(counts, UNEVEN.flip(0).tolist(), strict=True):
        assert agrees(count, forward_mass(process, language, t))


@pytest.mark.slow
@parametrize_processes
def test_two_positions_keep_their_marginals_in_the_limit_of_many_steps(process):
    """Tokens drawn in one step are independent, so the error falls as steps are added."""
    network, eta = Bayes(LANGUAGE, process), 0.3

    def error(num_steps: int) -> float:
        steps = downwards(uniform_grid(num_steps))
        masses = chain(process, network, LANGUAGE, steps, lambda *alphas: highest(*alphas).clamp(max=eta / num_steps))
        wanted = [forward_mass(process, LANGUAGE, t) for t in (1.0, *(s for s, _ in steps))]
        return max(float((mass - truth).abs().sum()) for mass, truth in zip(masses, wanted, strict=True))

    assert error(64) < 0.02 < error(4)
    *_, counts = sampled(drawing(Remasking(eta / 64), process, steps=64), network, LANGUAGE, rows=4000)
    assert agrees(counts, forward_mass(process, LANGUAGE, 0.0))


def test_at_the_maximum_everything_masked_is_unmasked_as_soon_as_possible():
    """Where 1 - ᾱ_s ≤ ᾱ_t; renoising unmasks only the fraction ᾱ_s."""
    canvas = LANGUAGE.batch(torch.full((500, 2), LANGUAGE.mask_id))
    network, process = Table(LANGUAGE, seed=2), Absorbing(Linear(), LANGUAGE.mask_id)
    grid = torch.tensor([0.0, 0.3, 0.6, 1.0], dtype=torch.float64)

    def still_masked(sampler: Drawing) -> int:
        _, first, second, _ = sampler.sample(network, canvas, seed=0)
        return int(((first.tokens == 3) & (second.tokens == 3)).sum())

    assert still_masked(drawing(Remasking(1.0, Strategy.RESCALE), process, grid=grid)) == 0
    assert still_masked(drawing(Renoising(), process, grid=grid)) == pytest.approx(1000 * 0.6 * 0.3, rel=0.2)


@pytest.mark.parametrize("eta", [-0.1, 1.1, float("nan")])
def test_an_eta_out_of_range_is_rejected(eta):
    with pytest.raises(ValueError, match="eta must be between 0 and 1, got"):
        Remasking(eta)


def test_remasking_rejects_a_sentence_mean():
    with pytest.raises(ValueError, match=r"use Mean\.CORPUS"):
        drawing(Remasking(0.5), by_token(Mean.SENTENCE, floor=0.05))


@pytest.mark.parametrize("grid", [[0.1, 1.0], [0.0, 1.1], [1.0, 0.5, 0.0]], ids=str)
def test_a_time_grid_that_does_not_rise_from_0_is_rejected(grid):
    with pytest.raises(ValueError, match="rise from 0 to 1"):
        drawing(Renoising(), LINEAR, grid=torch.tensor(grid))


@parametrize_processes
def test_renoising_is_remasking_with_the_complement_of_survival(process):
    """σ = 1 - ᾱ_s: renoising follows the chain of ReMDM with this σ, at every time."""
    network = Table(LANGUAGE, num_steps=10, seed=2)
    expected = chain(process, network, LANGUAGE, downwards(UNEVEN), lambda alpha_s, alpha_t: 1 - alpha_s)
    counts = sampled(drawing(Renoising(), process, grid=UNEVEN), network, LANGUAGE)
    assert all(agrees(*pair) for pair in zip(counts, expected, strict=True))


def test_the_sigma_of_renoising_lies_below_the_maximum():
    alpha_s, alpha_t = torch.rand(2, 1000, dtype=torch.float64).sort(dim=0, descending=True).values
    most, ours = highest(alpha_s, alpha_t), 1 - alpha_s
    assert bool((ours <= most).all())
    torch.testing.assert_close(ours[most < 1], (alpha_t * most)[most < 1])


def test_renoising_works_for_uniform_noise():
    """With the best network for one position, every x_s is distributed as in the forward process."""
    word = torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64)
    language = Language(3, 1, word[:3])

    class BestUnderUniform(nn.Module):
        def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
            same = nn.functional.one_hot(tokens[targets], 4).double()
            return (word * ((1 - t)[:, None] * same + t[:, None] / 3)).log().log_softmax(dim=-1)

    counts = sampled(
        drawing(Renoising(), Uniform(Linear(), language.allowed), grid=UNEVEN), BestUnderUniform(), language
    )
    for count, t in zip(counts, UNEVEN.flip(0).tolist(), strict=True):
        assert agrees(count, (1 - t) * word + t * language.allowed / 3)


# Blocks.


def test_one_block_gives_the_text_of_the_inner_sampler(bert, canvas):
    inner = drawing(Renoising(), LINEAR, steps=5)
    together = list(drawing(Blocks(20, Renoising()), LINEAR, steps=5, max_length=24).sample(bert, canvas, seed=4))
    plain = list(inner.sample(bert, canvas, seed=4))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(together, plain, strict=True))


def test_blocks_share_the_time_between_them(bert):
    batch = sentences(bert.backbone, (9, 5))  # 7 and 3 editable positions: 3 blocks and 1
    sampler = drawing(Blocks(3, Ancestral()), LINEAR, steps=2)
    times = torch.stack([state.time for state in sampler.sample(bert, batch, seed=0)], dim=1)
    assert times[0].tolist() == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    assert times[1].tolist() == pytest.approx([1, 1 / 2, 0, 0, 0, 0, 0])


class Words(nn.Module):
    """Gives all of tokens 100 to 199 the same probability."""

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        return (
            torch.full((int(targets.sum()), 200), -torch.inf).index_fill(1, torch.arange(100, 200), 0.0).log_softmax(1)
        )


def long_canvas(length: int, editable: Callable[[int], bool]) -> Batch:
    """`[CLS] 5 6 7 … [SEP]`: a frozen token is its position plus 4."""
    marked = torch.tensor([[0 < position < length - 1 and editable(position) for position in range(length)]])
    tokens = torch.arange(4, length + 4)[None].clone()
    tokens[0, 0], tokens[0, -1] = CLS, SEP
    return Batch.of(tokens.masked_fill(marked, MASK), marked)


def test_a_block_sees_the_text_before_it_and_masks_after_it():
    canvas = long_canvas(30, lambda position: position % 5 != 0)
    positions = canvas.editable[0].nonzero()[:, 0]
    spy = Spy(Words())
    *_, last = drawing(Blocks(3, Ancestral()), LINEAR, steps=3).sample(spy, canvas, seed=0)
    blocks = [set(block.tolist()) for block in positions.split(3)]
    written = []
    for tokens, *_, targets in spy.questions:
        (number,) = (i for i, block in enumerate(blocks) if set(targets[0].nonzero()[:, 0].tolist()) <= block)
        before, after = positions[: 3 * number], positions[3 * number + 3 :]
        assert torch.equal(tokens[0, before], last.tokens[0, before])
        assert bool((tokens[0, after] == MASK).all())
        assert torch.equal(tokens[~canvas.editable], canvas.tokens[~canvas.editable])
        written.append(number)
    assert sorted(set(written)) == list(range(len(blocks)))
    assert written == sorted(written)


CANVASES = {
    "every position": (long_canvas(60, lambda position: True), 4),
    "every third": (long_canvas(60, lambda position: position % 3 == 0), 4),
    "far apart": (long_canvas(60, lambda position: position in (2, 30, 31, 55, 58)), 4),
    "single": (long_canvas(60, lambda position: position == 40), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("window", [6, 7, 20, 59, 60, 100])
@pytest.mark.parametrize(("canvas", "size"), CANVASES.values(), ids=CANVASES.keys())
def test_a_window_shows_the_sequence_around_the_block_and_never_more(canvas, size, window):
    spy = Spy(Words())
    states = list(drawing(Blocks(size, Ancestral()), LINEAR, steps=1, max_length=window).sample(spy, canvas, seed=0))
    assert not bool((states[-1].tokens == MASK).any())
    assert bool((states[-1].tokens[canvas.editable] >= 100).all())
    assert torch.equal(states[-1].tokens[~canvas.editable], canvas.tokens[~canvas.editable])
    for tokens, attention_mask, _, targets in spy.questions:
        assert tokens.shape == (1, min(window, 60))
        assert bool(attention_mask.all())
        assert int(targets.sum()) <= size
        assert tokens[0, [0, -1]].tolist() == [CLS, SEP]
        assert int((tokens[0] == MASK).nonzero().min()) == int(targets[0].nonzero().min())  # all before it is unmasked
        middle = tokens[0, 1:-1]
        standing = ((middle > 4) & (middle < 100)).nonzero()[:, 0]
        assert len((middle[standing] - standing).unique()) <= 1  # frozen tokens as in the sequence: one run


def test_most_of_the_room_is_given_to_what_comes_before():
    spy = Spy(Words())
    canvas = long_canvas(90, lambda position: position in (5, 45, 87))
    list(drawing(Blocks(1, Ancestral()), LINEAR, steps=1, max_length=15).sample(spy, canvas, seed=0))
    # Thirteen positions between the ends, one of them the block: nine before it and three after, where there are any.
    assert [int(targets[0].nonzero()) for *_, targets in spy.questions] == [5, 10, 12]
    runs = [tokens[0, 1:-1].tolist() for tokens, *_ in spy.questions]
    assert [(run[0], run[-1]) for run in runs] == [(5, 17), (40, 52), (80, 92)]


@pytest.mark.slow
def test_a_window_generates_longer_sequences_than_the_network_reads(bert):
    batch = sentences(bert.backbone, (70, 40, 20))
    inner = drawing(Confidence(), LINEAR, steps=4)
    with pytest.raises(ValueError, match="reads at most"):
        list(inner.sample(bert, batch, seed=0))
    spy = Spy(bert)
    sampler = drawing(Blocks(8, Confidence()), LINEAR, steps=4, max_length=bert.max_length)
    *_, last = sampler.sample(spy, batch, seed=0)
    assert bool(tokenizer_allowed()[last.tokens[batch.editable]].all())
    assert last.calls.tolist() == [36, 20, 10]  # 9, 5 and 3 blocks; the last of each has 4, 6 and 2 positions
    for tokens, attention_mask, *_ in spy.questions:
        assert tokens.shape[1] <= 24
        ends = tokens.gather(1, attention_mask.sum(dim=1, keepdim=True) - 1)
        assert set(ends.flatten().tolist()) == {SEP}
        assert set(tokens[:, 0].tolist()) == {CLS}
    for row in range(3):
        *_, alone = sampler.sample(bert, batch.select(torch.tensor([row])), seed=0)
        assert torch.equal(alone.tokens[0], last.tokens[row, : alone.tokens.shape[1]])


def test_blocks_at_the_same_positions_of_the_window_draw_different_tokens():
    canvas = long_canvas(90, lambda position: True)
    spy = Spy(Words())
    *_, last = drawing(Blocks(8, Ancestral()), LINEAR, steps=1, max_length=20).sample(spy, canvas, seed=0)
    positions = [tuple(targets[0].nonzero()[:, 0].tolist()) for *_, targets in spy.questions]
    assert len(positions) - len(set(positions)) >= 5  # in the middle of the sequence the window moves with the block
    texts = {tuple(block.tolist()) for block in last.tokens[0, 1:-1].split(8)}
    assert len(texts) == len(positions)
    *_, next_seed = drawing(Blocks(8, Ancestral()), LINEAR, steps=1, max_length=20).sample(Words(), canvas, seed=1)
    assert not texts & {tuple(block.tolist()) for block in next_seed.tokens[0, 1:-1].split(8)}


def test_sequences_without_special_tokens_are_generated_to_their_ends():
    tokens = torch.full((2, 30), MASK)
    editable = torch.arange(30) < torch.tensor([30, 11])[:, None]
    canvas = Batch.of(tokens, editable, attention_mask=editable)
    spy = Spy(Words())
    *_, last = drawing(Blocks(5, Ancestral()), LINEAR, steps=2, max_length=8).sample(spy, canvas, seed=0)
    assert bool((last.tokens[editable] >= 100).all())
    assert max(tokens.shape[1] for tokens, *_ in spy.questions) == 8


@pytest.mark.parametrize(
    ("size", "window", "message"), [(0, None, "at least 1 position"), (4, 5, "does not fit a window of 5")]
)
def test_blocks_that_do_not_fit_are_rejected(size, window, message):
    with pytest.raises(ValueError, match=message):
        drawing(Blocks(size, Ancestral()), LINEAR, max_length=window)
