"""Ancestral sampling: its distribution on enumerable languages, and its invariants on real networks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from backbones import MASK, backbone_of, sentences, tokenizer_allowed
from drawing import drawing
from languages import Bayes, Language, Table, exact_log_likelihood
from scipy import stats

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.schedules import Cosine, Linear, Mean, Power, Spindle, TokenInformation, uniform_grid
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import LayerwiseTime, SinusoidalTime, TimeAgnostic
from diffusionbert.samplers import last_state
from diffusionbert.samplers.ancestral import Ancestral, GridSampler, after_step, draw_step
from diffusionbert.samplers.exact import SkipExact
from diffusionbert.samplers.first_hitting import FirstHitting

LANGUAGE = Language.random(3, 2, seed=6)
UNEVEN = torch.tensor([0.0, 0.1, 0.15, 0.7, 1.0], dtype=torch.float64)


def processes() -> list[Process]:
    schedules = (Linear(), Cosine(), Spindle(0.4), Spindle(0.4, Mean.SENTENCE, floor=0.05))
    absorbing = [Absorbing(schedule, LANGUAGE.mask_id, LANGUAGE.information()) for schedule in schedules]
    return [*absorbing, Uniform(Linear(), LANGUAGE.allowed)]


@pytest.mark.slow
@pytest.mark.parametrize("grid", [uniform_grid(6), UNEVEN], ids=["6 steps", "uneven"])
@pytest.mark.parametrize("process", processes(), ids=str)
def test_ancestral_samples_follow_the_exact_distribution(process, grid):
    """Chi-square over all nine sentences, against the exact reverse chain, for a time-conditioned network."""
    network = Table(LANGUAGE, num_steps=6, seed=2)
    probabilities = exact_log_likelihood(process, network, LANGUAGE, grid).exp().detach()
    rows = 20000
    canvas = LANGUAGE.batch(torch.full((rows, 2), LANGUAGE.mask_id))
    *_, last = drawing(Ancestral(), process, grid=grid).sample(network, canvas, seed=11)
    counts = torch.bincount(last.tokens @ torch.tensor([3, 1]), minlength=9)
    assert stats.chisquare(counts.numpy(), (probabilities / probabilities.sum() * rows).numpy()).pvalue > 0.01


@pytest.mark.slow
def test_ancestral_samples_of_the_best_network_are_nearly_the_language():
    """Samples follow the chain of 200 steps, which with the Bayes denoiser is close to the language itself."""
    process, rows = Absorbing(Spindle(0.3), LANGUAGE.mask_id, LANGUAGE.information()), 24000
    network, canvas = Bayes(LANGUAGE, process), LANGUAGE.batch(torch.full((rows, 2), LANGUAGE.mask_id))
    probabilities = exact_log_likelihood(process, network, LANGUAGE, uniform_grid(200)).exp()
    assert float((probabilities - LANGUAGE.probabilities).abs().sum() / 2) < 0.001
    expected = probabilities / probabilities.sum() * rows
    assert float(expected.min()) > 5  # as a chi-square needs it; in the language the rarest sentence would be 2
    *_, last = drawing(Ancestral(), process, steps=200).sample(network, canvas, seed=1)
    counts = torch.bincount(last.tokens @ torch.tensor([3, 1]), minlength=9)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("process", processes(), ids=str)
def test_a_batch_equals_its_sequences_one_by_one(process):
    network = Table(LANGUAGE, seed=2)
    canvas = LANGUAGE.batch(torch.full((6, 2), LANGUAGE.mask_id))
    together = [state.tokens for state in drawing(Ancestral(), process, grid=UNEVEN).sample(network, canvas, seed=3)]
    for row in range(6):
        alone = canvas.select(torch.tensor([row]))
        one_by_one = [
            state.tokens for state in drawing(Ancestral(), process, grid=UNEVEN).sample(network, alone, seed=3)
        ]
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, one_by_one, strict=True))


@pytest.fixture
def bert() -> Denoiser:
    backbone = backbone_of("bert")
    return Denoiser(backbone, LayerwiseTime(backbone, SinusoidalTime(16)), tokenizer_allowed()).eval()


def test_states_go_from_noise_to_text_and_keep_what_is_frozen(bert):
    batch = sentences(bert.backbone)
    frozen = batch.editable.clone()
    frozen[0, 3] = False  # a token of a prompt
    canvas = replace(batch, editable=frozen)
    process = Absorbing(Linear(), MASK)
    states = list(drawing(Ancestral(), process, steps=7).sample(bert, canvas, seed=0))
    assert [float(state.time[0]) for state in states] == pytest.approx([i / 7 for i in range(7, -1, -1)])
    assert bool((states[0].tokens[canvas.editable] == MASK).all())
    assert not bool((states[-1].tokens[canvas.editable] == MASK).any())
    for before, after in itertools.pairwise(states):
        assert torch.equal(after.tokens[~canvas.editable], batch.tokens[~canvas.editable])
        written = before.tokens != MASK
        assert torch.equal(after.tokens[written], before.tokens[written])  # absorbing noise: unmasked tokens stay
        assert bool((after.calls - before.calls <= 1).all())
    words = states[-1].tokens[canvas.editable]
    assert bool(tokenizer_allowed()[words].all())


def test_the_same_seed_gives_the_same_text_and_another_seed_another_text(bert):
    canvas = sentences(bert.backbone)
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=5, warper=LogitsWarper(top_k=20, temperature=0.9))
    first, again, other = (list(sampler.sample(bert, canvas, seed))[-1].tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_forbidden_tokens_are_never_generated(bert):
    canvas = sentences(bert.backbone)
    allowed = (7, 8)
    forbidden = tuple(token for token in range(50) if token not in allowed)
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=5, warper=LogitsWarper(forbidden=forbidden))
    *_, last = sampler.sample(bert, canvas, seed=0)
    assert set(last.tokens[canvas.editable].tolist()) <= set(allowed)


def test_low_temperature_still_unmasks_throughout_the_steps():
    """The original sharpens the distribution that contains "stay masked", and unmasks all in the last step."""
    backbone = backbone_of("bert")
    network = Denoiser(backbone, TimeAgnostic(), tokenizer_allowed()).eval()
    tokens = torch.full((64, 16), MASK)
    canvas = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=8, warper=LogitsWarper(temperature=0.1))
    masked = [int((state.tokens == MASK).sum()) for state in sampler.sample(network, canvas, seed=0)]
    unmasked = torch.tensor(masked).diff().neg().double() / tokens.numel()
    assert float(unmasked.min()) > 0.08  # 1/8 each, give or take
    assert float(unmasked.max()) < 0.17


def test_a_canvas_without_editable_positions_is_returned_without_a_call(bert):
    batch = sentences(bert.backbone)
    canvas = replace(batch, editable=torch.zeros_like(batch.editable))
    calls = []
    bert.register_forward_hook(lambda *_: calls.append(1))
    *_, last = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=3).sample(bert, canvas, seed=0)
    assert torch.equal(last.tokens, batch.tokens)
    assert last.calls.tolist() == [0, 0, 0]
    assert not calls


@pytest.mark.parametrize("process", processes(), ids=str)
def test_a_batch_may_be_empty(process):
    *_, last = drawing(Ancestral(), process, steps=3).sample(None, LANGUAGE.batch(torch.zeros(0, 2).long()), seed=0)
    assert last.tokens.shape == (0, 2)


@pytest.mark.parametrize("grid", [[0.3, 1.0], [0.0, 1.1], [1.0, 0.5, 0.0]], ids=str)
def test_a_time_grid_that_does_not_rise_from_0_to_1_is_rejected(grid):
    with pytest.raises(ValueError, match="rise from 0 to 1"):
        drawing(Ancestral(), Absorbing(Linear(), MASK), grid=torch.tensor(grid))


def test_sampling_records_no_gradients_and_needs_no_context_manager(bert):
    states = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=3).sample(bert, sentences(bert.backbone), seed=0)
    next(states)
    assert torch.is_grad_enabled()  # a suspended sampler must not switch gradients off for its caller
    assert all(not state.tokens.requires_grad for state in states)


def test_sampling_starts_at_the_start_time(bert):
    told = []
    bert.register_forward_pre_hook(lambda _, inputs: told.append(float(inputs[2][0])))
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=4, end=0.5)
    states = list(sampler.sample(bert, sentences(bert.backbone), seed=0))
    assert [float(state.time[0]) for state in states] == [0.5, 0.375, 0.25, 0.125, 0.0]
    assert told == [0.5, 0.375, 0.25, 0.125]
    assert not bool((states[-1].tokens == MASK).any())


@pytest.mark.parametrize("sampler", [Ancestral(), FirstHitting(), SkipExact()], ids=lambda sampler: sampler.name)
@pytest.mark.parametrize(("schedule", "end"), [(Linear(), 1e-17), (Cosine(), 1e-9)], ids=str)
def test_nothing_stays_masked_from_a_start_so_early_that_survival_rounds_to_1(schedule, end, sampler):
    network = Table(LANGUAGE, seed=2)
    canvas = LANGUAGE.batch(torch.full((50, 2), LANGUAGE.mask_id))
    process = Absorbing(schedule, LANGUAGE.mask_id)
    *_, last = drawing(sampler, process, steps=3, end=end).sample(network, canvas, seed=0)
    assert not bool((last.tokens == LANGUAGE.mask_id).any())


@pytest.mark.parametrize("sampler", [Ancestral(), SkipExact()], ids=lambda sampler: sampler.name)
def test_where_rounding_leaves_no_token_that_can_be_masked_that_is_said(sampler):
    """Under a token-dependent schedule there is no distribution to draw from; no `[MASK]` is returned as text."""
    exponents = TokenInformation(torch.full((4,), 5.0, dtype=torch.float64), mean=1.0)
    process, network = Absorbing(Power(), LANGUAGE.mask_id, exponents), Table(LANGUAGE, seed=2)
    canvas = LANGUAGE.batch(torch.full((50, 2), LANGUAGE.mask_id))
    states = drawing(sampler, process, steps=3, end=1e-4, warper=LogitsWarper(top_k=2)).sample(network, canvas, seed=0)
    with pytest.raises(ValueError, match="no token has a positive probability"):
        list(states)


@dataclass(frozen=True)
class Everywhere(GridSampler):
    """Ancestral sampling that asks about every masked position."""

    def update(self, state, answer):
        return after_step(state, draw_step(state, answer, state.interval[0]).tokens)


@pytest.mark.parametrize("mask_id", [0, 2, 5])
@pytest.mark.parametrize(
    "schedule", [Linear(), Cosine(), Spindle(0.4), Spindle(0.4, Mean.SENTENCE, floor=0.05)], ids=str
)
def test_positions_that_stay_masked_need_no_network(schedule, mask_id):
    """The same tokens as by asking about every masked position, wherever `[MASK]` is among the tokens."""

    class Network(torch.nn.Module):
        def forward(self, tokens, attention_mask, t, targets):
            sequence, position = targets.nonzero().unbind(dim=1)
            phase = (tokens.sum(dim=1)[sequence] + 3 * t[sequence] + position)[:, None]
            logits = 2 * torch.sin(phase * (1 + torch.arange(6)))
            logits[:, mask_id] = -torch.inf
            return logits.log_softmax(dim=-1)

    information = TokenInformation.from_counts(torch.tensor([1.0, 9.0, 4.0, 2.0, 7.0, 3.0]))
    process = Absorbing(schedule, mask_id, information if schedule.by_token else None)
    canvas = Batch.of(torch.full((300, 5), mask_id), torch.ones(300, 5, dtype=torch.bool))
    lasts = [
        last_state(drawing(sampler, process, steps=40, warper=warper, time_agnostic=False).sample(Network(), canvas, 3))
        for warper in (None, LogitsWarper(0.8, top_k=3))
        for sampler in (Ancestral(), Everywhere())
    ]
    for few, all_ in (lasts[:2], lasts[2:]):
        assert torch.equal(few.tokens, all_.tokens)
        if not (schedule.by_token and schedule.mean is Mean.SENTENCE):
            assert float(few.calls.double().mean()) < 0.7 * float(all_.calls.double().mean())
