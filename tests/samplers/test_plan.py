"""Queries planned ahead equal those found step by step, and the loop over them asks nothing of the tensors."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from backbones import MASK, VOCAB_SIZE, Spy, backbone_of, mixed_canvas, tokenizer_allowed
from drawing import drawing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.schedules import Linear, Mean, Spindle, TokenInformation
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.base import Query
from diffusionbert.samplers.exact import SkipExact
from diffusionbert.samplers.first_hitting import FirstHitting, _intervals
from diffusionbert.samplers.plan import plan_calls
from diffusionbert.samplers.thinning import AT_ONCE

LINEAR = Absorbing(Linear(), MASK)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 7))
def test_a_planned_query_is_the_one_that_is_found_in_the_tokens(seed, num_sequences, length):
    generator = torch.Generator().manual_seed(seed)
    shape = num_sequences, length
    tokens = torch.randint(0, 99, shape, generator=generator)
    lengths = torch.randint(1, length + 1, (num_sequences, 1), generator=generator)
    seen = torch.arange(length) < lengths
    raw = torch.randint(-1, 4, shape, generator=generator).masked_fill(~seen, -1)
    number = torch.bucketize(raw, raw[raw >= 0].unique()).masked_fill(raw < 0, -1)  # without gaps
    t = torch.rand(num_sequences, generator=generator, dtype=torch.float64)
    plan = plan_calls(number, seen, torch.device("cpu"))
    assert len(plan) == int(number.max()) + 1
    for index, call in enumerate(plan):
        expected = Query.of(Batch.of(tokens, seen, seen), t, number == index)
        planned = call.query(tokens, seen, t)
        assert expected is not None
        for name in ("tokens", "attention_mask", "t", "positions", "targets"):
            assert torch.equal(getattr(planned, name), getattr(expected, name))
        assert planned.is_padded == (not bool(planned.attention_mask.all()))
        assert torch.equal(call.where, (number == index).flatten().nonzero()[:, 0])


@pytest.fixture
def network() -> Denoiser:
    return Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()


def test_planned_calls_are_those_of_walking_from_interval_to_interval(network):
    """The simple way: with each call, every unfinished sequence unmasks what is due in its latest interval."""
    canvas, spy = mixed_canvas(network.backbone), Spy(network)
    sampler = drawing(FirstHitting(), LINEAR, steps=9)
    grid = sampler.context.grid
    interval = _intervals(LINEAR, grid, Noise(5).per_position(canvas, Purpose.UNMASK))
    masked = canvas.editable.clone()
    states = sampler.sample(spy, canvas, seed=5)
    next(states)
    for state in states:
        latest = torch.where(masked, interval, -1).amax(dim=1)
        due = masked & (interval == latest[:, None])
        called = due.any(dim=1)
        tokens, _, t, targets = spy.questions[-1]
        assert torch.equal(targets, due[called][:, : tokens.shape[1]])
        assert torch.equal(t, grid[latest + 1][called])
        masked &= ~due
        assert torch.equal(state.time, torch.where(masked.any(dim=1), grid[latest], 0.0))
    assert not bool(masked.any())


class Waits(TorchDispatchMode):
    """Counts operations for which the CPU waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = str(function).split(".")[1]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero"):
            self.counts[name] += 1
        return function(*arguments, **(options or {}))


def test_the_loop_waits_for_nothing_but_the_check_that_a_gpu_makes_once(network):
    canvas = mixed_canvas(network.backbone)
    canvas = canvas.select(canvas.attention_mask.all(dim=1).nonzero()[:, 0])  # transformers looks for padding itself
    sampler = drawing(FirstHitting(), LINEAR, steps=9)
    states = sampler.sample(network, canvas, seed=0)
    next(states)
    with Waits() as waits:
        number = len(list(states))
    assert number > 2
    assert waits.counts == {"_local_scalar_dense": number}


def test_ancestral_sampling_waits_for_nothing_either(network):
    canvas = mixed_canvas(network.backbone)
    canvas = canvas.select(canvas.attention_mask.all(dim=1).nonzero()[:, 0])
    states = drawing(Ancestral(), LINEAR, steps=9).sample(network, canvas, seed=0)
    calls = next(states).calls
    with Waits() as waits:
        *_, last = states
    assert 0 < int((last.calls - calls).max()) <= 9
    assert set(waits.counts) == {"_local_scalar_dense"}  # the check that a GPU makes once
    assert waits.counts["_local_scalar_dense"] <= 10


def test_planned_steps_are_the_same_however_many_are_looked_at_at_once(network, monkeypatch):
    canvas, sampler = mixed_canvas(network.backbone), drawing(Ancestral(), LINEAR, steps=9)
    expected = [state.tokens for state in sampler.sample(network, canvas, seed=3)]
    monkeypatch.setattr("diffusionbert.samplers.ancestral.NUMBERS_AT_ONCE", 4 * canvas.tokens.numel())
    assert all(map(torch.equal, expected, (state.tokens for state in sampler.sample(network, canvas, seed=3))))


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_where_rounding_decides_the_draw_itself_does(network, monkeypatch, bound):
    """However much is left to it: then positions are asked about in more steps, and texts are the same."""
    canvas, sampler = mixed_canvas(network.backbone), drawing(Ancestral(), LINEAR, steps=9)
    expected = [state.tokens for state in sampler.sample(network, canvas, seed=3)]
    monkeypatch.setattr("diffusionbert.diffusion.absorbing._ROUNDING", bound)
    found = list(sampler.sample(network, canvas, seed=3))
    assert all(map(torch.equal, expected, (state.tokens for state in found)))
    assert int(found[-1].calls.max()) >= 8


@pytest.mark.parametrize(
    ("schedule", "num_waits"), [(Spindle(0.3), 1), (Spindle(0.3, Mean.SENTENCE, 0.05), 2)], ids=str
)
def test_a_round_of_the_spindle_with_a_warper_waits_once_or_twice_on_a_gpu(network, schedule, num_waits):
    """All else that looks for positions is on the CPU; the answer to "is it possible" is asked for on a CPU only."""
    information = TokenInformation.from_counts(torch.arange(1.0, VOCAB_SIZE + 1))
    sampler = drawing(SkipExact(), Absorbing(schedule, MASK, information), steps=9, warper=LogitsWarper(top_k=5))
    canvas, copied = mixed_canvas(network.backbone), []
    original = torch.Tensor.cpu
    try:
        torch.Tensor.cpu = lambda self: copied.append(tuple(self.shape)) or original(self)  # type: ignore[method-assign]
        states = sampler.sample(network, canvas, seed=0)
        next(states)
        copied.clear()
        number = len(list(states))
    finally:
        torch.Tensor.cpu = original  # type: ignore[method-assign]
    assert number > 2
    assert len(copied) == num_waits * number


def test_thinning_waits_for_nothing_but_the_report_of_the_round_before(network, monkeypatch):
    monkeypatch.setattr("diffusionbert.samplers.exact._is_waited_for", lambda canvas: True)
    monkeypatch.setattr("diffusionbert.samplers.thinning._reports_later", lambda tokens: True)
    information = TokenInformation.from_counts(torch.arange(1.0, VOCAB_SIZE + 1))
    sampler = drawing(SkipExact(), Absorbing(Spindle(0.3), MASK, information), steps=9, warper=LogitsWarper(top_k=5))
    canvas = mixed_canvas(network.backbone)
    canvas = canvas.select(canvas.attention_mask.all(dim=1).nonzero()[:, 0])
    states = sampler.sample(network, canvas, seed=0)
    next(states)
    with Waits() as waits:
        number = len(list(states))
    assert number > 2
    # The report is read on the CPU: whether a sequence is left, and how many; whether tokens could be drawn, once.
    assert set(waits.counts) <= {"_local_scalar_dense", "nonzero"}
    assert waits.counts["_local_scalar_dense"] <= 3 * number + 1 + 4 * waits.counts["nonzero"]
    assert waits.counts["nonzero"] <= len(canvas.tokens)


class Operations(TorchDispatchMode):
    """Counts the operations for which a GPU launches kernels, and those that make a value for each token and target."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.num_values, self.num, self.num_large = num_values, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        self.num += not function.is_view
        values = arguments[0] if "topk" in str(function) else made  # it reads them all
        self.num_large += isinstance(values, Tensor) and values.numel() >= self.num_values
        return made


def test_a_round_of_thinning_launches_few_kernels(monkeypatch):
    """Launching them is what takes the time on a GPU: three times as many as a call of first-hitting, not more."""
    monkeypatch.setattr("diffusionbert.samplers.exact._is_waited_for", lambda canvas: True)
    monkeypatch.setattr("diffusionbert.samplers.thinning._reports_later", lambda tokens: True)
    information = TokenInformation.from_counts(torch.arange(1.0, VOCAB_SIZE + 1))
    warper = LogitsWarper(top_k=5, forbidden=(VOCAB_SIZE - 1,))
    sampler = drawing(SkipExact(), Absorbing(Spindle(0.3), MASK, information), steps=99, warper=warper)
    tokens = torch.full((4, 12), MASK)
    log_f = information.values.neg().masked_fill(torch.arange(VOCAB_SIZE) == MASK, -torch.inf).log_softmax(dim=-1)
    answer = log_f.repeat(4 * AT_ONCE, 1)

    class Fixed:
        def log_probs_at(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, positions: Tensor) -> Tensor:
            return answer

        __call__ = log_probs_at

    states = sampler.sample(Fixed(), Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool)), seed=0)
    next(states)
    next(states)  # the first round makes tables
    with Operations(answer.numel()) as operations:
        for _ in range(5):
            next(states)
    assert operations.num <= 5 * 63
    assert operations.num_large <= 5 * 3  # weights, their sum with the answer, top-k


def test_targets_may_repeat_whether_a_network_takes_indices_or_a_mask(network):
    canvas, positions = mixed_canvas(network.backbone), torch.tensor([3, 1, 3, 2])
    query = Query(canvas.tokens, canvas.attention_mask, canvas.constant_times(0.5), positions)
    by_index = query.run(network)
    by_mask = query.run(lambda *arguments: network(*arguments))
    assert torch.allclose(by_index, by_mask)
    assert torch.equal(by_index[0], by_index[2])
    assert not torch.equal(by_index[0], by_index[1])
