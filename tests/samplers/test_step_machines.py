"""Samplers driven by hand: many states with one forward pass, resumed states, and nothing stored per call."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from backbones import (
    CLS,
    MASK,
    NUM_SPECIAL,
    NUM_TOKENIZER_IDS,
    SEP,
    VOCAB_SIZE,
    backbone_of,
    timed_bert,
    tokenizer_allowed,
)
from drawing import Drawing, drawing
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Cosine, Linear, Mean, Spindle, TokenInformation
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper, draw
from diffusionbert.inference.constraints import Constrained, unwrapped
from diffusionbert.networks.base import Network
from diffusionbert.networks.causal import CausalModel
from diffusionbert.networks.embedding import EmbeddingDenoiser
from diffusionbert.networks.loading import NewDecoder
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.registry import register
from diffusionbert.samplers import (
    Query,
    Sampler,
    SamplingContext,
    State,
    concatenate_queries,
    last_state,
    parse_sampler,
    sample,
    split_answer,
)
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.samplers.gaussian import GaussianAncestral
from diffusionbert.samplers.left_to_right import LeftToRight
from diffusionbert.samplers.refinement import Refinement

ALLOWED = nn.functional.pad(tokenizer_allowed(), (0, VOCAB_SIZE - NUM_TOKENIZER_IDS))
INFORMATION = TokenInformation.from_counts(torch.arange(float(VOCAB_SIZE)).square() * ALLOWED, allowed=ALLOWED)
LINEAR = Absorbing(Linear(), MASK)
SPINDLE = Absorbing(Spindle(0.4), MASK, INFORMATION)
SENTENCE = Absorbing(Spindle(0.4, Mean.SENTENCE, floor=0.05), MASK, INFORMATION)


def canvas_of(length: int, rows: int = 2, name: int = 0) -> Batch:
    """`[CLS] … [SEP]` with a frozen token in the middle; the last sequence is shorter."""
    tokens = torch.full((rows, length), MASK)
    position, end = torch.arange(length), torch.full((rows, 1), length - 1)
    end[-1] -= 2
    tokens[:, 0], tokens[:, 3] = CLS, 20
    tokens[position == end], tokens[position > end] = SEP, 0
    editable = (position > 0) & (position < end) & (position != 3)
    batch = Batch.of(tokens, editable, attention_mask=position <= end)
    return replace(batch, example=torch.arange(rows) + name)


class Deterministic(nn.Module):
    """A network whose answer depends on tokens, time and position, and not on padding."""

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        key = (tokens * attention_mask * (1 + torch.arange(tokens.shape[1]))).sum(dim=1)
        sequence, position = targets.nonzero().unbind(dim=1)
        token = torch.arange(VOCAB_SIZE)
        phase = 0.7 * key[sequence] + 3 * t[sequence] + 1.3 * position
        logits = 2 * torch.sin(phase[:, None] * (1 + token % 7) + token)
        return logits.masked_fill(~ALLOWED, -torch.inf).log_softmax(dim=-1)


NETWORKS = {
    "deterministic": Deterministic,
    "time-agnostic BERT": lambda: Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval(),
    "time-conditioned BERT": timed_bert,
}
parametrize_networks = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


@dataclass
class Request:
    """A state that someone waits for."""

    drawing: Drawing
    canvas: Batch
    seed: int
    joins_at: int
    """The round in which it joins the others."""
    state: State | None = None

    def start(self) -> None:
        self.state = self.drawing.sampler.start(self.drawing.context, self.canvas, self.seed)


def requests() -> list[Request]:
    warper = LogitsWarper(0.9, top_k=12, forbidden=(9,))
    made = [
        drawing(parse_sampler("exact"), LINEAR, steps=20),
        drawing(parse_sampler("exact"), SPINDLE, steps=12),
        drawing(parse_sampler("exact"), SPINDLE, steps=12, warper=warper),
        drawing(parse_sampler("ancestral"), SENTENCE, steps=6, end=0.7),
        drawing(parse_sampler("margin:threshold=0.6"), LINEAR, steps=5, warper=warper),
        drawing(parse_sampler("mask-predict"), LINEAR, steps=4),
        drawing(parse_sampler("remasking:eta=0.3"), SPINDLE, steps=7),
        drawing(parse_sampler("renoising"), LINEAR, steps=5),
        drawing(parse_sampler("gibbs"), LINEAR, steps=11),
        drawing(parse_sampler("gibbs-left-to-right"), LINEAR, steps=4, end=0.5),
        drawing(Refinement(0.5), None, steps=4, allowed_tokens=ALLOWED),
        drawing(Blocks(3, parse_sampler("exact")), LINEAR, steps=8, max_length=9),
    ]
    return [
        Request(each, canvas_of(8 + number % 5, 1 + number % 3, name=10 * number), seed=number, joins_at=2 * number % 7)
        for number, each in enumerate(made)
    ]


@torch.no_grad()
def serve(network: Network, waiting: list[Request]) -> int:
    """Advances all states together, with at most one network call per round; returns the number of calls."""
    number = calls = 0
    while any(request.state is None or not request.state.done for request in waiting):
        for request in waiting:
            if request.state is None and request.joins_at <= number:
                request.start()
        active = [request for request in waiting if request.state is not None and not request.state.done]
        targets = [(request, request.drawing.sampler.query(request.state)) for request in active]
        queries = [query for _, query in targets if query is not None]
        answers = iter(())
        if queries:
            answers, calls = iter(split_answer(concatenate_queries(queries).run(network), queries)), calls + 1
        for request, query in targets:
            answer = None if query is None else next(answers)
            request.state = request.drawing.sampler.update(request.state, answer)
        number += 1
    return calls


@pytest.mark.slow
@parametrize_networks
def test_states_advanced_together_give_the_tokens_they_give_alone(make):
    network, waiting = make(), requests()
    calls = serve(network, waiting)
    total = 0
    for request in waiting:
        assert request.state is not None
        alone = last_state(request.drawing.sample(network, request.canvas, request.seed))
        assert torch.equal(request.state.tokens, alone.tokens), request.drawing.sampler
        assert torch.equal(request.state.calls, alone.calls)
        assert torch.equal(request.state.time, alone.time)
        total += int(alone.calls.max())
    assert calls < total / 3


def test_queries_of_one_sampler_are_padded_and_answers_split():
    short, long = (
        Query.of(x, x.constant_times(t), x.editable) for x, t in ((canvas_of(6), 0.5), (canvas_of(9, 3), 1.0))
    )
    assert short is not None
    assert long is not None
    joined = concatenate_queries([short, long])
    assert joined.tokens.shape == joined.attention_mask.shape == joined.targets.shape == (5, 9)
    assert joined.t.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert not bool(joined.attention_mask[:2, 6:].any() | joined.targets[:2, 6:].any())
    parts = split_answer(joined.run(Deterministic()), [short, long])
    for query, part in zip((short, long), parts, strict=True):
        torch.testing.assert_close(part, query.run(Deterministic()), rtol=0, atol=0)


def test_an_answer_is_copied_only_where_positions_repeat_or_are_out_of_order():
    canvas = canvas_of(6)
    query = Query.of(canvas, canvas.constant_times(0.5), canvas.editable)
    assert query is not None
    assert query.is_in_order
    answer = query.run(Deterministic())
    for order in ([1, 0, 2], [0, 0, 1]):
        other = replace(query, positions=query.positions[order])
        assert not other.is_in_order
        assert torch.equal(other.run(Deterministic()), answer[order])


def test_a_query_leaves_out_sequences_without_targets():
    canvas = canvas_of(9, 3)
    targets = canvas.editable.clone()
    targets[:2] = False
    query = Query.of(canvas, canvas.constant_times(1.0), targets)
    assert query is not None
    assert query.tokens.tolist() == canvas.tokens[2:, :7].tolist()  # cut to its length
    assert Query.of(canvas, canvas.constant_times(1.0), torch.zeros_like(targets)) is None


# ---- per-request constraints after a shared forward pass -------------------------------------------------------------


def test_constraints_apply_to_an_answer_as_around_a_network():
    network = Deterministic()
    rules = Constrained(Constrained(network, forbidden=[(7,), (8, 11)]), forbidden=[(30, 31)], included=[(20,)])
    assert unwrapped(rules)[0] is network
    canvas = canvas_of(9)
    query = Query.of(canvas, canvas.constant_times(0.5), canvas.editable)
    assert query is not None
    shared = query.run(network)
    constrained = rules.constrain(query.tokens, query.targets, shared)
    assert torch.equal(constrained, query.run(rules))
    torch.testing.assert_close(constrained.exp().sum(dim=-1), torch.ones(len(shared), dtype=torch.float64))
    assert bool((constrained[:, 7] == -torch.inf).all())
    assert torch.equal(shared, query.run(network))  # others see it unchanged


# ---- nothing is stored --------------------------------------------------------------------------------------------


def kinds() -> dict[str, tuple[Drawing, Any, Batch]]:
    """A sampler of each kind of network."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = CausalModel(
            NewDecoder(2, 32, 2, 0.0).build(VOCAB_SIZE, 30, 0, causal=True), tokenizer_allowed()
        ).eval()
        vectors = EmbeddingDenoiser(backbone_of("bert"), tokenizer_allowed(), 8).eval()
    on_tokens = {
        f"{number} {request.drawing.sampler.name}": (request.drawing, Deterministic(), request.canvas)
        for number, request in enumerate(requests())
    }
    gaussian = drawing(GaussianAncestral(), Gaussian(Cosine()), steps=5, word_vectors=vectors)
    return {
        **on_tokens,
        "decoder": (drawing(LeftToRight(), causal=True), decoder, canvas_of(9, 3)),
        "gaussian": (gaussian, vectors, canvas_of(9, 3)),
    }


KINDS = kinds()
parametrize_kinds = pytest.mark.parametrize(("made", "network", "canvas"), KINDS.values(), ids=KINDS)


def attributes(value: Any) -> dict[str, Any]:
    """All attributes, those of submodules included; tensors as their values."""
    found = {}
    for name, module in value.named_modules() if isinstance(value, nn.Module) else [("", value)]:
        for key, held in vars(module).items():
            if isinstance(held, Tensor):
                held = held.tolist()
            found[f"{name}.{key}"] = repr(held)
    return found


@pytest.mark.slow
@parametrize_kinds
def test_nothing_is_stored_on_sampler_or_network(made, network, canvas):
    before = attributes(made.sampler), attributes(network), copy.deepcopy(dict(network.state_dict()))
    list(made.sample(network, canvas, seed=1))
    assert (attributes(made.sampler), attributes(network)) == before[:2]
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[2][name])


@pytest.mark.slow
@parametrize_kinds
def test_closing_midway_leaves_everything_usable(made, network, canvas):
    whole = list(made.sample(network, canvas, seed=3))
    states = made.sample(network, canvas, seed=3)
    next(states)
    if len(whole) > 1:
        next(states)
    states.close()
    del states
    gc.collect()
    assert torch.is_grad_enabled()
    again = list(made.sample(network, canvas, seed=3))
    assert [state.tokens.tolist() for state in again] == [state.tokens.tolist() for state in whole]


@pytest.mark.slow
@parametrize_kinds
@torch.no_grad()
def test_every_state_can_be_resumed_and_stays_as_it_is(made, network, canvas):
    """From any state, also twice and after others have gone on: a decoder's cache, too, never changes."""
    states = list(made.sample(network, canvas, seed=2))
    for number, state in enumerate(states[:-1]):
        assert not state.done
        for _ in range(2):
            query = made.sampler.query(state)
            following = made.sampler.update(state, None if query is None else query.run(network))
            assert torch.equal(following.tokens, states[number + 1].tokens)
            assert torch.equal(following.calls, states[number + 1].calls)
    assert states[-1].done


@pytest.mark.slow
@parametrize_kinds
def test_two_iterators_may_be_read_in_turn(made, network, canvas):
    first, second = (list(made.sample(network, canvas, seed)) for seed in (5, 6))
    one, other = (made.sample(network, canvas, seed) for seed in (5, 6))
    for number in range(max(len(first), len(second))):
        for states, alone in ((one, first), (other, second)):
            if number < len(alone):
                assert torch.equal(next(states).tokens, alone[number].tokens)


# ---- a sampler from outside the package -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class TwoStepState(State):
    even: bool


@register("two-steps-of-the-tests")
@dataclass(frozen=True)
class TwoSteps(Sampler):
    """Unmasks the even positions, then the odd ones."""

    even_first: bool = True
    offset: int = 0

    def resolve(self, context: SamplingContext) -> TwoSteps:
        context.absorbing(self)
        return self

    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> TwoStepState:
        assert isinstance(context.process, Process)
        x = context.process.prior(canvas, Noise(seed))
        time = canvas.fraction_of(canvas.editable)
        return TwoStepState.begin(context, canvas, seed, x.tokens, time, done=False, even=self.even_first)

    def _due(self, state: TwoStepState) -> Tensor:
        position = torch.arange(state.tokens.shape[1])
        return state.canvas.editable & ((position % 2 == 0) == state.even)

    def query(self, state: TwoStepState) -> Query | None:
        return Query.of(state.x, state.time, self._due(state))

    def update(self, state: TwoStepState, answer: Tensor | None) -> TwoStepState:
        due, tokens = self._due(state), state.tokens
        if answer is not None:
            uniform = Noise(state.seed, self.offset).per_position(state.x, Purpose.SAMPLE)
            tokens = tokens.masked_scatter(due, draw(state.context.warper(answer), uniform[due]))
        masked = state.canvas.editable & (tokens == MASK)
        return replace(
            state,
            tokens=tokens,
            time=state.canvas.fraction_of(masked),
            calls=state.calls + due.any(dim=1),
            done=state.even != self.even_first,
            even=not state.even,
        )


def test_a_sampler_from_outside_works_by_name_like_ours():
    sampler = parse_sampler("two-steps-of-the-tests:even_first=false,offset=3")
    assert sampler == TwoSteps(False, 3)
    canvas = canvas_of(9, 3)
    for made in (
        drawing(sampler, LINEAR, warper=LogitsWarper(forbidden=(9,))),
        drawing(Blocks(4, sampler), LINEAR, max_length=8),
    ):
        end = last_state(sample(made.sampler, made.context, Deterministic(), canvas, 0))
        assert bool((end.tokens[canvas.editable] >= NUM_SPECIAL).all())
        assert torch.equal(end.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
        assert end.time.tolist() == [0] * 3
    waiting = [*requests()[:3], Request(drawing(sampler, LINEAR), canvas, seed=1, joins_at=1)]
    serve(Deterministic(), waiting)
    alone = last_state(waiting[-1].drawing.sample(Deterministic(), canvas, 1))
    assert waiting[-1].state is not None
    assert torch.equal(waiting[-1].state.tokens, alone.tokens)
