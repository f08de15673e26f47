"""Samplers that skip network calls: their distribution on enumerable languages, and the number of calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from backbones import CLS, MASK, NUM_SPECIAL, NUM_TOKENIZER_IDS, SEP, VOCAB_SIZE, backbone_of, tokenizer_allowed
from drawing import Drawing, drawing
from languages import Language, Table, exact_log_likelihood
from scipy import stats
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Purpose
from diffusionbert.diffusion.schedules import (
    Cosine,
    Linear,
    Mean,
    NoiseSchedule,
    Spindle,
    TokenInformation,
    uniform_grid,
)
from diffusionbert.diffusion.shapes import Batch, sequence_index
from diffusionbert.diffusion.tokens import LogitsWarper, draw_unchecked
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import LayerwiseTime, SinusoidalTime, TimeAgnostic
from diffusionbert.samplers import State
from diffusionbert.samplers.ancestral import GridSampler, GridState, after_step
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.samplers.exact import SkipExact, jumps
from diffusionbert.samplers.first_hitting import FirstHitting
from diffusionbert.samplers.lookahead import PAIRS
from diffusionbert.samplers.thinning import AT_ONCE, ThinningState, plan_candidates

LANGUAGE = Language.random(3, 3, seed=6)
CLAMPED, SENTENCE = Spindle(0.8), Spindle(0.6, Mean.SENTENCE, floor=0.05)
GRIDS = {
    "6 steps": uniform_grid(6),
    "uneven": torch.tensor([0.0, 0.1, 0.15, 0.7, 1.0], dtype=torch.float64),
    "6 steps to 0.5": uniform_grid(6, end=0.5),
    "uneven to 0.8": torch.tensor([0.0, 0.02, 0.3, 0.4, 0.8], dtype=torch.float64),
}
SHAPINGS = {
    "temperature": LogitsWarper(temperature=0.6),
    "top-k": LogitsWarper(top_k=2),
    "top-p": LogitsWarper(top_p=0.8),
    "forbidden": LogitsWarper(forbidden=(1,)),
    "all": LogitsWarper(temperature=1.5, top_k=2, top_p=0.95, forbidden=(0,)),
}


def process_of(schedule: NoiseSchedule, language: Language = LANGUAGE, **settings: bool) -> Absorbing:
    return Absorbing(schedule, language.mask_id, language.information(), **settings)


def exact_shaped(process: Absorbing, network: nn.Module, warper: LogitsWarper | None, grid: Tensor) -> Tensor:
    """The probability of every sentence, by the reverse chain with a logits warper over all states."""
    states = LANGUAGE.states
    batch = LANGUAGE.batch(states)
    mass = (states == process.mask_id).all(dim=1).double()
    targets = process.targets(batch)
    for s, t in reversed(list(itertools.pairwise(grid))):
        rows = len(states)
        log_f = network(states, batch.attention_mask, t.expand(rows), targets)
        steps = nn.functional.one_hot(states, LANGUAGE.vocabulary).double()
        steps[targets] = process.reverse(batch, log_f, s.expand(rows), t.expand(rows), warper).exp()
        mass = mass @ torch.stack([steps[:, position, states[:, position]] for position in range(3)]).prod(dim=0)
    index = {tuple(state.tolist()): i for i, state in enumerate(states)}
    return mass[[index[tuple(sentence.tolist())] for sentence in LANGUAGE.sentences]]


def require_agreement(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square; impossible cells must be empty, and rare cells are pooled."""
    counts, probabilities = counts.double(), probabilities.detach()
    expected = probabilities / probabilities.sum() * counts.sum()
    assert int(counts[expected < 1e-9].sum()) == 0
    rare = expected < 8
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    kept = expected > 0
    assert stats.chisquare(counts[kept].numpy(), expected[kept].numpy()).pvalue > 0.01


def sentence_counts(sampler: Drawing, network: nn.Module, rows: int = 20000, seed: int = 5) -> Tensor:
    canvas = LANGUAGE.batch(torch.full((rows, 3), LANGUAGE.mask_id))
    *_, last = sampler.sample(network, canvas, seed)
    return torch.bincount(last.tokens @ torch.tensor([9, 3, 1]), minlength=27)


# ---- the distribution of texts ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=str)
def test_first_hitting_follows_the_exact_distribution(schedule, grid):
    """For a time-conditioned network: each sequence is given its own time."""
    process, network = process_of(schedule), Table(LANGUAGE, num_steps=6, seed=2)
    expected = exact_log_likelihood(process, network, LANGUAGE, grid).exp()
    require_agreement(sentence_counts(drawing(FirstHitting(), process, grid=grid), network), expected)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("schedule", [Linear(), CLAMPED, SENTENCE], ids=str)
def test_skipping_follows_the_exact_distribution(schedule, grid):
    process, network = process_of(schedule), Table(LANGUAGE, seed=2)
    sampler = drawing(SkipExact(), process, grid=grid)
    assert jumps(sampler.context)
    expected = exact_log_likelihood(process, network, LANGUAGE, grid).exp()
    require_agreement(sentence_counts(sampler, network), expected)


@pytest.mark.slow
@pytest.mark.parametrize("warper", SHAPINGS.values(), ids=SHAPINGS)
@pytest.mark.parametrize("schedule", [Linear(), Cosine()], ids=str)
def test_warped_first_hitting_follows_the_exact_distribution(schedule, warper):
    process, network, grid = process_of(schedule), Table(LANGUAGE, num_steps=6, seed=2), GRIDS["uneven"]
    expected = exact_shaped(process, network, warper, grid)
    require_agreement(sentence_counts(drawing(FirstHitting(), process, grid=grid, warper=warper), network), expected)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [GRIDS["6 steps"], GRIDS["uneven to 0.8"]], ids=["6 steps", "uneven to 0.8"])
@pytest.mark.parametrize("warper", SHAPINGS.values(), ids=SHAPINGS)
@pytest.mark.parametrize("schedule", [Linear(), CLAMPED, SENTENCE], ids=str)
def test_warped_skipping_follows_the_exact_distribution(schedule, warper, grid):
    process, network = process_of(schedule), Table(LANGUAGE, seed=2)
    sampler = drawing(SkipExact(), process, grid=grid, warper=warper)
    assert jumps(sampler.context) == (not schedule.by_token or warper is SHAPINGS["forbidden"])
    require_agreement(sentence_counts(sampler, network), exact_shaped(process, network, warper, grid))


@pytest.mark.slow
@pytest.mark.parametrize("warper", [None, SHAPINGS["top-k"]], ids=["unshaped", "top-k"])
@pytest.mark.parametrize("schedule", [CLAMPED, SENTENCE], ids=str)
def test_skipping_without_reweighting_follows_the_exact_distribution(schedule, warper):
    """The sums do not telescope then, so it looks ahead."""
    process, network, grid = process_of(schedule, reweighted=False), Table(LANGUAGE, seed=2), GRIDS["uneven"]
    sampler = drawing(SkipExact(), process, grid=grid, warper=warper)
    assert not jumps(sampler.context)
    require_agreement(sentence_counts(sampler, network), exact_shaped(process, network, warper, grid))


# ---- the distribution of times ---------------------------------------------------------------------------------------

PAIR = Language.random(3, 2, seed=1)


def first_event_law(process: Absorbing, log_f: Tensor, grid: Tensor, warper: LogitsWarper | None) -> Tensor:
    """P(this one of two positions is unmasked alone, in this interval, as this token) [interval, position, token]."""
    masked = torch.full((1, 2), PAIR.mask_id)
    batch, law, reached = PAIR.batch(masked), torch.zeros(len(grid) - 1, 2, 3, dtype=torch.float64), 1.0
    for k in reversed(range(len(grid) - 1)):
        p = process.reverse(batch, log_f, grid[k : k + 1], grid[k + 1 : k + 2], warper).exp()
        for position in (0, 1):
            law[k, position] = reached * p[position, :3] * p[1 - position, PAIR.mask_id]
        reached *= float(p[:, PAIR.mask_id].prod())
    return law


TIMED = [
    *((FirstHitting, schedule, None) for schedule in (Linear(), Cosine())),
    *((SkipExact, schedule, None) for schedule in (Linear(), CLAMPED, SENTENCE)),
    *((SkipExact, schedule, LogitsWarper(temperature=0.7)) for schedule in (CLAMPED, SENTENCE)),
]


@pytest.mark.slow
@pytest.mark.parametrize("grid", [uniform_grid(8), GRIDS["uneven to 0.8"]], ids=["8 steps", "uneven to 0.8"])
@pytest.mark.parametrize(("kind", "schedule", "warper"), TIMED, ids=str)
def test_the_first_unmasking_has_the_right_time_position_and_token(kind, schedule, warper, grid):
    """The joint distribution of interval, position and token; a state's time is the lower end of the interval."""
    process, network, rows = process_of(schedule, PAIR), Table(PAIR, seed=4), 20000
    canvas = PAIR.batch(torch.full((rows, 2), PAIR.mask_id))
    counts = torch.zeros(len(grid) - 1, 2, 3)
    before = torch.zeros(rows, dtype=torch.long)
    for state in drawing(kind(), process, grid=grid, warper=warper).sample(network, canvas, seed=9):
        written = state.tokens != PAIR.mask_id
        new = (before == 0) & (written.sum(dim=1) == 1)
        index = torch.searchsorted(grid, state.time[new])
        word = state.tokens[new][written[new]]
        counts.index_put_((index, written[new].long().argmax(dim=1), word), torch.ones(len(word)), accumulate=True)
        before = written.sum(dim=1)
    ones = torch.ones(1, 2, dtype=torch.bool)
    log_f = network(torch.full((1, 2), PAIR.mask_id), ones, grid[-1:], ones).detach()
    law = first_event_law(process, log_f, grid, warper).flatten()
    together = rows - counts.sum()  # both in one interval
    require_agreement(torch.cat([counts.flatten(), together[None]]), torch.cat([law, 1 - law.sum()[None]]))


# ---- methods of the process ------------------------------------------------------------------------------------------


def large_process(strength: float, floor: float) -> tuple[Absorbing, Tensor]:
    """A process on 3,000 tokens with Zipf's frequencies, and their H̃."""
    counts = 1e7 / torch.arange(1, 3001, dtype=torch.float64)
    information = TokenInformation.from_counts(counts)
    return Absorbing(Spindle(strength, floor=floor), 0, information), 1 - information.mean / information.values


@pytest.mark.parametrize("t", [1.0, 0.7, 0.2, 1 / 2048, 1e-6, 1e-8])
@pytest.mark.parametrize("floor", [0.0, 0.05])
def test_token_and_unmasking_probability_give_the_telescoped_sums(floor, t):
    """Σ_v p(v | x_t, t)·(1 - r_{s|t}(v)) = G_s/G_t, G summed without 1 - ᾱ, which cancels where t is small."""
    process, informativeness = large_process(0.5, floor)
    generator = torch.Generator().manual_seed(3)
    log_f = (4 * torch.randn(2, 3000, generator=generator, dtype=torch.float64)).log_softmax(dim=-1)

    def masked(time: float) -> Tensor:
        curve = (time + 0.5 * math.sin(math.pi * min(time, 1 - time)) * informativeness).clamp(0, 1)
        return (1 - floor) * curve + floor * time

    center = torch.full((1,), process.corpus_mean, dtype=torch.float64)
    rows, words = torch.zeros(2, dtype=torch.long), torch.arange(3000)
    at_t = torch.tensor([t], dtype=torch.float64)
    log_p = process.log_p0(log_f, rows, at_t, center)
    dense = log_f.exp() * masked(t)
    tolerance = 1e-12 + 1e-15 / t
    torch.testing.assert_close(log_p.exp(), dense / dense.sum(dim=1, keepdim=True), rtol=1e3 * tolerance, atol=1e-14)
    for s in (0.0, 0.01 * t, 0.5 * t, 0.99 * t):
        at_s = torch.tensor([s], dtype=torch.float64)
        unmask_probability = process.unmask_probability_of(
            words, at_s.expand(3000), at_t.expand(3000), center.expand(3000)
        )
        sums = [(log_f.exp() * masked(time)).sum(dim=1) for time in (s, t)]
        torch.testing.assert_close(
            log_p.exp() @ (1 - unmask_probability), sums[0] / sums[1], rtol=0, atol=1e2 * tolerance
        )
        possible = unmask_probability[masked(t) > 1e-15]
        fastest = process.max_unmask_probability(at_s, at_t, center)
        torch.testing.assert_close(fastest, possible.max()[None], rtol=0, atol=1e2 * tolerance)


def test_the_fastest_unmasking_leaves_out_tokens_that_cannot_be_masked():
    """Otherwise it would be 1 wherever the clamp acts, and nothing would be skipped."""
    process, informativeness = large_process(0.5, 0.0)
    s, t = (torch.tensor([time], dtype=torch.float64) for time in (0.3, 0.305))
    center = torch.full((1,), process.corpus_mean, dtype=torch.float64)
    assert bool((process.schedule.survival(t, 1 / (1 - informativeness)) == 1).any())
    assert float(process.max_unmask_probability(s, t, center)) < 0.5


def test_without_reweighting_the_fastest_unmasking_is_at_once():
    process, _ = large_process(0.5, 0.0)
    process.reweighted = False
    s, t, center = (torch.tensor([x], dtype=torch.float64) for x in (0.3, 0.305, process.corpus_mean))
    assert float(process.max_unmask_probability(s, t, center)) == 1


# ---- queries of the network ------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Records the number of sequences, the target positions and the times of its queries."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network, self.rows, self.times, self.positions = network, [], [], []

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        assert bool(targets.any(dim=1).all())  # no sequence without a target
        assert bool((tokens[targets] == MASK).all())
        self.rows.append(len(tokens))
        self.times += t.tolist()
        self.positions += targets.sum(dim=1).tolist()
        return self.network(tokens, attention_mask, t, targets)


def tiny_bert(time_aware: bool = False) -> Denoiser:
    backbone = backbone_of("bert")
    conditioning = LayerwiseTime(backbone, SinusoidalTime(16)) if time_aware else TimeAgnostic()
    return Denoiser(backbone, conditioning, tokenizer_allowed()).eval()


def canvas_of(rows: int, length: int = 9) -> Batch:
    """`[CLS] … [SEP]` of lengths 3, 4, …, padded; every fifth without an editable position, some with a prompt."""
    position, lengths = torch.arange(length), 3 + torch.arange(rows)[:, None] % (length - 2)
    tokens = torch.full((rows, length), 11)
    tokens[:, 0], tokens[position == lengths - 1], tokens[position >= lengths] = CLS, SEP, 0
    editable = (position > 0) & (position < lengths - 1)
    editable[4::5] = False
    editable[2::3, 2] = False
    return Batch.of(tokens, editable, attention_mask=position < lengths)


INFORMATION = TokenInformation.from_counts(
    torch.cat([torch.zeros(NUM_SPECIAL), 1e4 / torch.arange(1, VOCAB_SIZE - NUM_SPECIAL + 1) ** 1.5]),
    allowed=nn.functional.pad(tokenizer_allowed(), (0, VOCAB_SIZE - NUM_TOKENIZER_IDS)),
)


def of(sampler: FirstHitting | SkipExact, schedule: NoiseSchedule, grid: Tensor, **warper: Any) -> Drawing:
    return drawing(sampler, Absorbing(schedule, MASK, INFORMATION), grid=grid, warper=LogitsWarper(**warper))


KINDS = {
    "first hitting": lambda grid, **cut: of(FirstHitting(), Linear(), grid, **cut),
    "jumps": lambda grid, **cut: of(SkipExact(), Spindle(0.3), grid, **cut),
    "jumps, sentence": lambda grid, **cut: of(SkipExact(), SENTENCE, grid, **cut),
    "rounds": lambda grid, **cut: of(SkipExact(), Spindle(0.3), grid, **{"top_k": 12, **cut}),
    "rounds, sentence": lambda grid, **cut: of(SkipExact(), SENTENCE, grid, **{"temperature": 0.9, **cut}),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def test_the_kinds_are_what_they_are_called():
    assert [jumps(KINDS[name](uniform_grid(2)).context) for name in list(KINDS)[1:]] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64])
@every_kind
def test_a_sequence_takes_at_most_one_call_per_editable_position(make, rows):
    canvas, network = canvas_of(rows), Watched(tiny_bert())
    *_, last = make(uniform_grid(512)).sample(network, canvas, seed=1)
    positions = canvas.editable.sum(dim=1)
    assert bool((last.calls <= positions).all())
    assert bool((last.calls[positions == 0] == 0).all())
    assert bool((last.calls[positions > 0] >= 1).all())
    assert sum(network.rows) == int(last.calls.sum())
    assert not bool((last.tokens == MASK).any())
    assert bool(tokenizer_allowed()[last.tokens[canvas.editable]].all())


@pytest.mark.parametrize("name", ["first hitting", "jumps", "jumps, sentence"])
def test_a_million_steps_cost_no_more_than_eight(name):
    canvas, network = canvas_of(16), Watched(tiny_bert())
    states = list(KINDS[name](uniform_grid(1_000_000)).sample(network, canvas, seed=1))
    positions = canvas.editable.sum(dim=1)
    assert torch.equal(states[-1].calls, positions)  # no two positions in one of so many intervals
    assert len(states) == len(network.rows) + 1 == int(positions.max()) + 1


@every_kind
def test_a_single_step_is_a_single_call(make):
    canvas, network = canvas_of(16), Watched(tiny_bert())
    states = list(make(uniform_grid(1)).sample(network, canvas, seed=1))
    assert torch.equal(states[-1].calls, canvas.editable.any(dim=1).long())
    assert network.rows == [int(canvas.editable.any(dim=1).sum())]
    assert len(states) == 2


@every_kind
def test_a_canvas_without_editable_positions_is_returned_without_a_call(make):
    canvas, network = replace(canvas_of(6), editable=torch.zeros(6, 9, dtype=torch.bool)), Watched(tiny_bert())
    states = list(make(uniform_grid(4)).sample(network, canvas, seed=0))
    assert torch.equal(states[-1].tokens, canvas.tokens)
    assert states[-1].calls.tolist() == states[-1].time.tolist() == [0] * 6
    assert not network.rows


def test_first_hitting_gives_each_sequence_its_own_time_and_queries_only_what_is_due():
    canvas, network, grid = canvas_of(40), Watched(tiny_bert(time_aware=True)), uniform_grid(10, end=0.6)
    states = list(drawing(FirstHitting(), Absorbing(Linear(), MASK), grid=grid).sample(network, canvas, seed=2))
    told = iter(network.times)
    for before, after in itertools.pairwise(states):
        for row in (after.calls > before.calls).nonzero()[:, 0].tolist():
            t = next(told)
            assert t in grid[1:].tolist()
            assert t <= float(before.time[row])
            if float(after.time[row]):
                assert float(after.time[row]) == float(grid[grid < t].max())
    assert next(told, None) is None
    assert sum(network.positions) == int(canvas.editable.sum())  # every position once
    assert len(set(network.times)) == 10


# ---- looking ahead --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk(GridSampler):
    """Every step of the time grid for every masked position, by the equation: what looking ahead must be equal to."""

    def update(self, state: GridState, answer: Tensor) -> GridState:
        process, x, (s, t), targets = state.process, state.x, state.interval, state.targets
        if answer is None:
            return after_step(state, x.tokens)
        center, sequences = process.guessed_center(x, answer), sequence_index(targets)
        log_p = process.log_p0(answer, sequences, t, center, state.context.warper)
        drawn, _ = draw_unchecked(log_p, state.noise.per_position(x, Purpose.SAMPLE)[targets])
        r = process.unmask_probability_of(drawn, *(values[sequences] for values in (s, t, center)))
        unmasked = state.noise.per_position(x, Purpose.UNMASK)[targets] < r
        return after_step(state, x.tokens.masked_scatter(targets, torch.where(unmasked, drawn, process.mask_id)))


def history(states: list[State], row: int) -> list[tuple[list[int], float]]:
    """The texts of a sequence and when each of them appeared; the time of the last one does not matter."""
    texts = [(state.tokens[row].tolist(), float(state.time[row])) for state in states]
    first = [next(group) for _, group in itertools.groupby(texts, key=lambda text: text[0])]
    return [*first[:-1], (first[-1][0], 0.0)]


LOOKING_AHEAD = {
    "corpus": (Spindle(0.3), {}),
    "corpus, clamped": (CLAMPED, {}),
    "sentence": (SENTENCE, {}),
    "corpus, not reweighted": (CLAMPED, {"reweighted": False}),
    "sentence, not reweighted": (SENTENCE, {"reweighted": False}),
}
WARPERS = {
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "forbidden": (11, 12)},
}
by_schedule = pytest.mark.parametrize(("schedule", "settings"), LOOKING_AHEAD.values(), ids=LOOKING_AHEAD)


def require_same_states(
    process: Absorbing, canvas: Batch, warper: dict[str, Any], seed: int, network: Any = None, **grid: Any
) -> list[State]:
    network = network or tiny_bert().double()
    looking, walking = (
        list(drawing(kind, process, warper=LogitsWarper(**warper), **grid).sample(network, canvas, seed))
        for kind in (SkipExact(), Walk())
    )
    assert torch.equal(looking[-1].tokens, walking[-1].tokens)
    assert len(looking) <= len(walking) + 1  # a GPU reports a round later that all is finished
    for row in range(len(canvas.tokens)):
        assert history(looking, row) == history(walking, row)
        assert int(looking[-1].calls[row]) == len(history(walking, row)) - 1
    return looking


@pytest.mark.parametrize("warper", WARPERS.values(), ids=WARPERS)
@by_schedule
def test_looking_ahead_gives_the_texts_of_walking_over_the_time_grid(schedule, settings, warper):
    """Token for token, after as many calls as there are changes: with prompts, of all lengths, to different ends."""
    process = Absorbing(schedule, MASK, INFORMATION, **settings)
    for seed, steps in ((0, 12), (1, 60)):
        require_same_states(process, canvas_of(10), warper, seed, steps=steps)


@pytest.mark.parametrize("window", [(0.01, 1), (0.5, 2), (100, 1), (100, 1000)], ids=str)
@by_schedule
def test_texts_do_not_depend_on_how_far_is_looked_ahead(schedule, settings, window, monkeypatch):
    for name, value in zip(("UNMASKINGS", "PAIRS"), window, strict=True):
        monkeypatch.setattr(f"diffusionbert.samplers.lookahead.{name}", value)
    process = Absorbing(schedule, MASK, INFORMATION, **settings)
    for grid in (GRIDS["uneven to 0.8"], uniform_grid(40)):
        require_same_states(process, canvas_of(10), {"top_k": 8}, 2, grid=grid)


@by_schedule
def test_blocks_that_look_ahead_are_those_that_walk(schedule, settings):
    """Sequences have different numbers of blocks, which finish at different times."""
    process, network, canvas = Absorbing(schedule, MASK, INFORMATION, **settings), tiny_bert().double(), canvas_of(10)
    looking, walking = (
        list(drawing(Blocks(3, kind), process, warper=LogitsWarper(top_k=8), steps=30).sample(network, canvas, 0))
        for kind in (SkipExact(), Walk())
    )
    assert torch.equal(looking[-1].tokens, walking[-1].tokens)
    assert len(looking) < len(walking)


@pytest.mark.parametrize("schedule", [Spindle(0.3), SENTENCE], ids=str)
def test_a_round_takes_most_sequences_to_their_next_unmasking_and_evaluates_few_pairs(schedule, monkeypatch):
    tokens, rows = torch.full((16, 24), MASK), []
    canvas, network = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool)), Watched(tiny_bert())
    evaluate = Absorbing.log_p0
    monkeypatch.setattr(
        Absorbing, "log_p0", lambda self, log_f, *rest: rows.append(len(log_f)) or evaluate(self, log_f, *rest)
    )
    states = list(of(SkipExact(), schedule, uniform_grid(256), top_k=12).sample(network, canvas, seed=0))
    most = int(states[-1].calls.max())
    assert most <= len(network.rows) <= len(states) - 1 <= 2 * most
    assert max(rows) <= 16 * (PAIRS + 24)
    assert sum(rows) <= 2 * PAIRS * sum(network.rows)


# ---- thinning -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["at once", "a round later"])
def as_on_a_gpu(request, monkeypatch):
    """Evaluates candidates as on a GPU, which reports what is finished at once here, or a round later as there."""
    monkeypatch.setattr("diffusionbert.samplers.exact._is_waited_for", lambda canvas: True)
    monkeypatch.setattr("diffusionbert.samplers.thinning._reports_later", lambda tokens: request.param)


CORPUS = [name for name in LOOKING_AHEAD if name.startswith("corpus")]


@pytest.mark.parametrize("warper", WARPERS.values(), ids=WARPERS)
@pytest.mark.parametrize("name", CORPUS)
def test_thinning_gives_the_texts_of_walking_over_the_time_grid(name, warper, as_on_a_gpu):
    """Token for token, after as many answers as there are changes."""
    schedule, settings = LOOKING_AHEAD[name]
    process = Absorbing(schedule, MASK, INFORMATION, **settings)
    for seed, steps in ((0, 12), (1, 60)):
        states = require_same_states(process, canvas_of(10), warper, seed, steps=steps)
        assert isinstance(states[0], ThinningState)


@pytest.mark.parametrize(
    "amounts", [(1, 2**27), (4, 2**27), (1000, 1), (1000, 40 * VOCAB_SIZE), (1000, 2**27)], ids=str
)
@pytest.mark.parametrize("name", CORPUS)
def test_texts_do_not_depend_on_how_many_candidates_a_round_evaluates(name, amounts, as_on_a_gpu, monkeypatch):
    for constant, value in zip(("AT_ONCE", "VALUES"), amounts, strict=True):
        monkeypatch.setattr(f"diffusionbert.samplers.thinning.{constant}", value)
    schedule, settings = LOOKING_AHEAD[name]
    process, network = Absorbing(schedule, MASK, INFORMATION, **settings), tiny_bert().double()
    for grid in (GRIDS["uneven to 0.8"], uniform_grid(40)):
        looking, walking = (
            list(drawing(kind, process, warper=LogitsWarper(top_k=8), grid=grid).sample(network, canvas_of(10), 2))
            for kind in (SkipExact(), Walk())
        )
        assert all(history(looking, row) == history(walking, row) for row in range(10))


def test_candidates_are_the_same_however_many_numbers_are_drawn_at_once(monkeypatch):
    sampler, canvas = of(SkipExact(), CLAMPED, uniform_grid(40), top_k=3), canvas_of(10)
    process = sampler.context.absorbing(sampler.sampler)
    monkeypatch.setattr("diffusionbert.samplers.thinning.NUMBERS", 3 * canvas.tokens.numel())
    parts = plan_candidates(sampler.context, process, canvas, 3)
    monkeypatch.undo()
    whole = plan_candidates(sampler.context, process, canvas, 3)
    assert parts is not None
    assert whole is not None
    assert all(torch.equal(getattr(parts, name), value) for name, value in vars(whole).items())
    step, is_padding = whole.step, whole.step == 40
    assert bool(((step.diff(dim=1) <= 0) | is_padding[:, 1:]).all())
    assert bool((is_padding.diff(dim=1).sum(dim=1) <= 1).all())


@pytest.mark.parametrize(
    ("schedule", "settings", "steps", "length"),
    [(SENTENCE, {}, 9, 9), (CLAMPED, {}, 1_000_000, 9), (CLAMPED, {"reweighted": False}, 9000, 9)],
    ids=["guessed mean", "too many weights", "too many candidates"],
)
def test_candidates_that_are_not_known_or_too_many_are_not_planned(schedule, settings, steps, length, as_on_a_gpu):
    process = Absorbing(schedule, MASK, INFORMATION, **settings)
    sampler = drawing(SkipExact(), process, steps=steps, warper=LogitsWarper(top_k=3))
    assert plan_candidates(sampler.context, process, canvas_of(4, length), 0) is None


def test_a_round_evaluates_a_fixed_number_of_candidates_and_most_sequences_go_on(as_on_a_gpu):
    """Only at masked positions; finished sequences are not sent, once it is known, and leave no budget unused."""
    tokens, network, asked = torch.full((16, 24), MASK), tiny_bert(), []

    class Counting:
        def log_probs_at(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, positions: Tensor) -> Tensor:
            asked.append((len(tokens), len(positions), bool((tokens.flatten()[positions] == MASK).all())))
            return network.log_probs_at(tokens, attention_mask, t, positions)

        __call__ = log_probs_at

    canvas = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))
    states = list(of(SkipExact(), Spindle(0.3), uniform_grid(256), top_k=12).sample(Counting(), canvas, seed=0))
    most = int(states[-1].calls.max())
    assert most <= len(asked) == len(states) - 1 <= 2 * most
    assert all(number == max(24, AT_ONCE * rows) for rows, number, _ in asked)
    assert all(is_masked for *_, is_masked in asked[:-1])
    assert sum(rows for rows, *_ in asked) <= 2 * int(states[-1].calls.sum())
    assert asked[-1][0] < 16


@pytest.mark.slow
@pytest.mark.parametrize("warper", SHAPINGS.values(), ids=SHAPINGS)
@pytest.mark.parametrize("reweighted", [True, False])
def test_thinning_follows_the_exact_distribution(warper, reweighted, as_on_a_gpu):
    process, network = process_of(CLAMPED, reweighted=reweighted), Table(LANGUAGE, seed=2)
    sampler, grid = drawing(SkipExact(), process, grid=GRIDS["uneven to 0.8"], warper=warper), GRIDS["uneven to 0.8"]
    require_agreement(sentence_counts(sampler, network), exact_shaped(process, network, warper, grid))


def test_pairs_that_are_not_reached_need_no_token():
    """Without a token that can be masked any more, a step cannot draw one; a sequence may be unmasked before it."""
    process = Absorbing(CLAMPED, MASK, INFORMATION)
    common = int(INFORMATION.values.argmin())
    forbidden = tuple(token for token in range(VOCAB_SIZE) if token != common)
    relative = INFORMATION.values[common] / INFORMATION.mean
    grid = uniform_grid(64)
    assert bool((CLAMPED.survival(grid[1:20], relative) == 1).all())
    require_same_states(process, canvas_of(10), {"forbidden": forbidden, "top_k": 1}, 0, grid=grid)


# ---- states -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("end", [1.0, 0.4])
@every_kind
def test_states_go_from_noise_to_text_and_keep_what_is_frozen(make, end):
    canvas, grid = canvas_of(20), uniform_grid(12, end)
    states = list(make(grid).sample(tiny_bert(), canvas, seed=0))
    assert torch.equal(states[0].tokens, canvas.tokens.masked_fill(canvas.editable, MASK))
    assert torch.equal(states[0].time, canvas.editable.any(dim=1) * grid[-1])
    for before, after in itertools.pairwise(states):
        written = before.tokens != MASK
        assert torch.equal(after.tokens[written], before.tokens[written])  # frozen positions, too
        assert bool((after.time <= before.time).all())
        assert bool((after.calls - before.calls <= 1).all())
        unfinished = (after.tokens == MASK).any(dim=1)
        assert torch.equal(unfinished, after.time > 0)
        assert bool(torch.isin(after.time, grid).all())
    assert not bool((states[-1].tokens == MASK).any())
    assert bool((states[-1].time == 0).all())


@pytest.mark.parametrize("name", ["first hitting", "jumps", "jumps, sentence"])
def test_an_update_unmasks_something_in_each_unfinished_sequence(name):
    states = list(KINDS[name](uniform_grid(50)).sample(tiny_bert(), canvas_of(20), seed=0))
    for before, after in itertools.pairwise(states):
        changed = (after.tokens != before.tokens).any(dim=1)
        assert torch.equal(changed, (before.tokens == MASK).any(dim=1))


@pytest.mark.slow
@every_kind
def test_a_batch_equals_its_sequences_one_by_one(make):
    """In float64, so that rounding does not change a draw; sequences are cut to their length."""
    network, canvas, sampler = tiny_bert().double(), canvas_of(12), make(uniform_grid(20))
    together = list(sampler.sample(network, canvas, seed=3))
    for row in range(12):
        alone = list(sampler.sample(network, canvas.select(torch.tensor([row])), seed=3))
        length = alone[0].tokens.shape[1]
        for i, state in enumerate(together):
            own = alone[min(i, len(alone) - 1)]
            assert torch.equal(state.tokens[row, :length], own.tokens[0])
            assert state.time[row] == own.time[0]
            assert state.calls[row] == own.calls[0]


@pytest.mark.slow
@every_kind
def test_the_same_seed_gives_the_same_text_and_another_seed_another_text(make):
    sampler, network, canvas = make(uniform_grid(9)), tiny_bert(), canvas_of(8)
    first, again, other = (list(sampler.sample(network, canvas, seed))[-1].tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@every_kind
def test_forbidden_tokens_are_never_generated(make):
    canvas, allowed = canvas_of(30), {7, 8}
    forbidden = tuple(token for token in range(VOCAB_SIZE) if token not in allowed)
    *_, last = make(uniform_grid(6), forbidden=forbidden).sample(tiny_bert(), canvas, seed=0)
    assert set(last.tokens[canvas.editable].tolist()) == allowed


@pytest.mark.parametrize("name", ["rounds", "rounds, sentence"])
def test_low_temperature_still_unmasks_throughout_the_steps(name):
    tokens = torch.full((64, 16), MASK)
    canvas = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))
    states = KINDS[name](uniform_grid(8), temperature=0.1).sample(tiny_bert(), canvas, seed=0)
    unmasked = torch.zeros(8)  # in each step; a finished sequence is at 0
    for before, after in itertools.pairwise(states):
        number = ((before.tokens == MASK) & (after.tokens != MASK)).sum(dim=1).float() / tokens.numel()
        unmasked.index_add_(0, (8 * after.time).round().long(), number)
    assert float(unmasked.min()) > 0.03
    assert float(unmasked.max()) < 0.3


def test_low_temperature_does_not_touch_the_times_of_first_hitting():
    """Nor do the tokens: the intervals are the same for every warper."""
    tokens = torch.full((64, 16), MASK)
    canvas = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))
    told = []
    for temperature in (0.1, 1.0):
        network = Watched(tiny_bert())
        list(KINDS["first hitting"](uniform_grid(8), temperature=temperature).sample(network, canvas, seed=0))
        told.append((network.times, network.positions))
    assert told[0] == told[1]
    fraction = (
        torch.zeros(9).index_add(0, (torch.tensor(told[0][0]) * 8).long(), torch.tensor(told[0][1]).float()) / 1024
    )
    assert float(fraction[1:].min()) > 0.08
    assert float(fraction[1:].max()) < 0.17


# ---- side effects and errors ----------------------------------------------------------------------------------------


@every_kind
def test_sampling_records_no_gradients_and_needs_no_context_manager(make):
    network, recorded = tiny_bert(), []
    network.register_forward_hook(lambda _, inputs, log_f: recorded.append(log_f.requires_grad))
    states = make(uniform_grid(3)).sample(network, canvas_of(4), seed=0)
    assert isinstance(states, Iterator)
    for state in states:
        assert torch.is_grad_enabled()  # a suspended sampler must not switch gradients off for its caller
        assert isinstance(state, State)
        assert state.time.dtype == torch.float64
    assert recorded
    assert not any(recorded)


@pytest.mark.slow
@every_kind
def test_all_tensors_are_made_on_the_device_of_the_canvas(make):
    """Tensors without an explicit device would be on `meta`, and could not be combined with those of the canvas."""
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE).masked_fill(
        ~nn.functional.pad(tokenizer_allowed(), (0, VOCAB_SIZE - NUM_TOKENIZER_IDS)), -torch.inf
    )

    def network(tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        return table[tokens.sum(dim=1) % VOCAB_SIZE].log_softmax(dim=-1)[sequence_index(targets)]

    canvas, sampler = canvas_of(6), make(uniform_grid(20))
    with torch.device("meta"):
        *_, last = sampler.sample(network, canvas, seed=0)
    assert not bool((last.tokens == MASK).any())


@pytest.mark.parametrize("schedule", [Spindle(0.3), SENTENCE], ids=str)
def test_first_hitting_rejects_token_dependent_schedules_and_says_what_to_use(schedule):
    with pytest.raises(ValueError, match="skip-exact"):
        drawing(FirstHitting(), Absorbing(schedule, MASK, INFORMATION))


@pytest.mark.parametrize("grid", [[0.3, 1.0], [0.0, 1.1], [1.0, 0.5, 0.0]], ids=str)
@every_kind
def test_a_time_grid_that_does_not_rise_from_0_is_rejected(make, grid):
    with pytest.raises(ValueError, match="rise from 0"):
        make(torch.tensor(grid, dtype=torch.float64))


def test_skipping_rejects_a_time_conditioned_network():
    with pytest.raises(ValueError, match="time-conditioned; use 'ancestral'"):
        drawing(SkipExact(), Absorbing(Spindle(0.3), MASK, INFORMATION), time_agnostic=False)


def test_information_of_another_vocabulary_is_rejected():
    process = Absorbing(Spindle(0.3), MASK, TokenInformation.from_counts(torch.ones(VOCAB_SIZE + 3)))
    with pytest.raises(ValueError, match="count tokens over the network's whole vocabulary"):
        list(drawing(SkipExact(), process, steps=3).sample(tiny_bert(), canvas_of(2), seed=0))


def test_a_time_grid_so_short_that_rounding_masks_nothing_still_ends_in_text():
    grid = torch.tensor([0.0, 1e-12, 1e-10], dtype=torch.float64)
    sampler = drawing(FirstHitting(), Absorbing(Cosine(), MASK), grid=grid)
    *_, last = sampler.sample(tiny_bert(), canvas_of(6), seed=0)
    assert not bool((last.tokens == MASK).any())
