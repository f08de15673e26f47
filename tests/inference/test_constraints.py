"""Rules that hold in every outcome: enumerated on small rows, counted in samples of a real network."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from backbones import CLS, MASK, NUM_SPECIAL, NUM_TOKENIZER_IDS, SEP, VOCAB_SIZE, backbone_of, tokenizer_allowed
from drawing import Drawing, drawing
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear, Spindle, TokenInformation
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.uniform import Uniform
from diffusionbert.inference.constraints import Constrained, _Room, place_words
from diffusionbert.networks.base import Network
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.samplers.ancestral import Ancestral

HIDDEN = 4  # words 0 to 3, of which 3 is in no rule


class Constant(nn.Module):
    """Believes in the same at every place and in every row, whatever stands there."""

    def __init__(self, log_f: Tensor):
        super().__init__()
        self.log_f = log_f

    def forward(self, tokens: Tensor, attend: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        return self.log_f[: tokens.shape[1]].expand(len(tokens), -1, -1)[targets]


def random_belief(length: int, num_words: int, vocabulary: int, seed: int = 0) -> Constant:
    logits = torch.randn(length, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[:, num_words:] = -torch.inf
    return Constant(logits.log_softmax(-1))


def answer(network: nn.Module, tokens: list[int], targets: list[bool]) -> Tensor:
    row, positions = torch.tensor([tokens]), torch.tensor([targets])
    return network(row, torch.ones_like(positions), torch.ones(1), positions)


def contains(row: list[int] | tuple[int, ...], word: tuple[int, ...] | list[int]) -> bool:
    return any(list(row[i : i + len(word)]) == list(word) for i in range(len(row) - len(word) + 1))


# Forbidden sequences

RULES = [[(0, 1)], [(1, 1)], [(0, 1, 0)], [(2,)], [(0, 1), (1, 2)], [(0, 0), (2,), (0, 1, 1)]]


def states(rules: list[tuple[int, ...]]) -> list[list[int]]:
    """All rows of four places, of words and hidden ones, that break no rule so far."""
    rows = map(list, itertools.product(range(5), repeat=4))
    return [row for row in rows if not any(contains(row, rule) for rule in rules)]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_no_outcome_of_one_step_completes_a_forbidden_sequence(rules):
    """Every state, every set of asked places, every combination of what may be written there.

    An asked place may also be left as it is: samplers write some of the places they ask about, or hide them.
    """
    network, rows = Constrained(random_belief(4, 4, 5), forbidden=rules), torch.tensor(states(rules))
    for pattern in itertools.product([False, True], repeat=4):
        targets = torch.tensor(pattern).expand_as(rows)
        possible = nn.functional.one_hot(rows, 5).bool()
        possible[targets] |= network(rows, torch.ones_like(targets), torch.ones(len(rows)), targets) > -torch.inf
        assert bool(possible[targets][:, 3].all())  # in no rule
        for rule in rules:
            for start in range(5 - len(rule)):
                pieces = torch.stack([possible[:, start + offset, piece] for offset, piece in enumerate(rule)])
                assert not bool(pieces.all(dim=0).any()), (pattern, rule)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_what_is_written_alone_loses_only_what_would_break_a_rule(rules):
    plain, rows = random_belief(4, 4, 5), states(rules)
    network = Constrained(plain, forbidden=rules)
    for position in range(4):
        here = [row for row in rows if row[position] == HIDDEN]
        lost = [
            [any(contains([*row[:position], v, *row[position + 1 :]], rule) for rule in rules) for v in range(5)]
            for row in here
        ]
        assert any(map(any, lost))
        tokens = torch.tensor(here)
        targets = (torch.arange(4) == position).expand_as(tokens)
        arguments = (tokens, torch.ones_like(targets), torch.ones(len(tokens)), targets)
        # The answer is the network's own, given that no rule is broken.
        expected = plain(*arguments).masked_fill(torch.tensor(lost), -torch.inf).log_softmax(-1)
        torch.testing.assert_close(network(*arguments), expected)


def test_a_window_loses_the_piece_that_is_believed_in_least():
    belief = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]]).log()
    network = Constrained(Constant(belief), forbidden=[(0, 2)])
    got = answer(network, [HIDDEN] * 3, [True] * 3)
    lost = belief.clone()
    lost[1, 2] = -torch.inf  # of (0 at place 0, 2 at place 1): 0.6 against 0.1
    lost[1, 0] = -torch.inf  # of (0 at place 1, 2 at place 2): 0.2 against 0.7
    torch.testing.assert_close(got, lost.log_softmax(-1))
    targets, before = torch.ones(1, 3, dtype=torch.bool), belief.clone()
    assert torch.equal(network.forbid(torch.full((1, 3), HIDDEN), targets, belief), lost)
    assert torch.equal(belief, before)  # an answer may be somebody else's
    # A hidden place that nobody asks about stays hidden, so that nothing can be completed yet.
    torch.testing.assert_close(answer(network, [HIDDEN] * 3, [True, False, True]), belief[[0, 2]])
    # One loss serves two rules.
    both = Constrained(Constant(belief), forbidden=[(0, 2), (0, 2, 1)])
    torch.testing.assert_close(answer(both, [HIDDEN] * 3, [True] * 3), lost.log_softmax(-1))


def test_an_asked_word_that_stands_may_stay_so_the_rule_acts_elsewhere():
    belief = torch.tensor([[0.01, 0.99], [0.5, 0.5]]).log()
    network = Constrained(Constant(belief), forbidden=[(0, 1)])
    got = answer(network, [0, HIDDEN], [True, True])  # 0 at place 0 is believed in least, but stands already
    torch.testing.assert_close(got, torch.stack([belief[0], torch.tensor([0.0, -torch.inf])]))
    # Where all stands already, rewriting mends it: at the only asked place, or at one of them.
    assert answer(network, [0, 1], [False, True]).tolist() == [[0.0, -torch.inf]]
    assert answer(network, [0, 1], [True, True])[0, 0] == -torch.inf


@pytest.fixture(scope="module")
def bert() -> Denoiser:
    return Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()


def blank_rows(lengths: list[int]) -> Batch:
    """Rows [CLS] … [SEP] of these many hidden places, padded."""
    position, count = torch.arange(max(lengths) + 2), torch.tensor(lengths)[:, None]
    editable = (position > 0) & (position <= count)
    tokens = torch.where(editable, MASK, 0)
    tokens[:, 0] = CLS
    tokens[position == count + 1] = SEP
    return Batch.of(tokens, editable, attend=position <= count + 1)


def last_tokens(sampler: Drawing, network: Network, canvas: Batch, seed: int = 0) -> Tensor:
    *_, last = sampler.sample(network, canvas, seed)
    return last.tokens


def sequences(tokens: Tensor, length: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(window) for row in tokens.unfold(1, length, 1).tolist() for window in row)


def common_sequences(tokens: Tensor) -> list[tuple[int, ...]]:
    """The commonest words of three, two and one pieces, none of which is forbidden by another one."""
    found: list[tuple[int, ...]] = []
    for length in (2, 3, 1):
        for word, count in sequences(tokens, length).most_common():
            if sum(len(other) == length for other in found) == 4:
                break
            if min(word) >= NUM_SPECIAL and not any(contains(word, other) or contains(other, word) for other in found):
                assert count > 5
                found.append(word)
    return found


WRITABLE = nn.functional.pad(tokenizer_allowed(), (0, VOCAB_SIZE - NUM_TOKENIZER_IDS))
PROCESSES = [
    Absorbing(Linear(), MASK),
    Absorbing(Spindle(0.3), MASK, TokenInformation.from_counts(torch.arange(VOCAB_SIZE) ** 2, allowed=WRITABLE)),
    Uniform(Linear(), WRITABLE),
]


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_forbidden_words_never_appear_in_thousands_of_samples(bert, process, num_steps):
    """The commonest sequences of one, two and three pieces that the network writes unless they are forbidden."""
    sampler = drawing(Ancestral(), process, steps=num_steps)
    canvas = blank_rows([9] * 800 + [4] * 300)
    before = last_tokens(sampler, bert, canvas)
    forbidden = common_sequences(before)
    after = last_tokens(sampler, Constrained(bert, forbidden=forbidden), canvas)
    assert not any(sequences(after, len(word))[word] for word in forbidden)
    assert bool(WRITABLE[after[canvas.editable]].all())
    assert torch.equal(after[~canvas.editable], canvas.tokens[~canvas.editable])


def test_frozen_words_count_as_part_of_a_sequence(bert):
    canvas = blank_rows([3] * 400)
    canvas.tokens[:, 2] = 7
    canvas.editable[:, 2] = False
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=1)
    before = last_tokens(sampler, bert, canvas)
    left, right = (int(before[:, position].mode().values) for position in (1, 3))
    rules = [(left, 7), (7, right)]
    assert bool((before[:, 1] == left).any() and (before[:, 3] == right).any())
    after = last_tokens(sampler, Constrained(bert, forbidden=rules), canvas)
    assert not bool((after[:, 1] == left).any() or (after[:, 3] == right).any())
    assert right == left or bool((after[:, 1] == right).any())  # elsewhere they may stand


def test_a_constrained_batch_equals_its_rows_one_by_one(bert):
    network = Constrained(bert, forbidden=[(7, 8), (9,), (10, 11, 12)], included=[(13, 14)], continuation=CONTINUATION)
    canvas = replace(blank_rows([9, 3, 6, 1]), example=torch.tensor([4, 0, 9, 2]))
    canvas.tokens[0, 2:4], canvas.editable[0, 2:4] = torch.tensor([13, 14]), False
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=3)
    together = last_tokens(sampler, network, canvas, seed=5)
    for row in range(4):
        alone = canvas.select(torch.tensor([row]))
        assert torch.equal(last_tokens(sampler, network, alone, seed=5)[0], together[row, : alone.tokens.shape[1]])


def test_a_network_without_rules_is_itself(bert):
    canvas = blank_rows([5, 3])
    t = torch.ones(2, dtype=torch.float64)
    free = Constrained(bert)(canvas.tokens, canvas.attend, t, canvas.editable)
    torch.testing.assert_close(free, bert(canvas.tokens, canvas.attend, t, canvas.editable))
    unmet = Constrained(bert, forbidden=[(7,) * 20], included=[(8,) * 20], continuation=CONTINUATION)
    torch.testing.assert_close(unmet(canvas.tokens, canvas.attend, t, canvas.editable), free)  # longer than any row
    assert isinstance(unmet, Network)
    assert list(unmet.state_dict()) == [f"network.{name}" for name in bert.state_dict()]


def test_what_cannot_be_is_refused():
    plain = random_belief(2, 2, 3)
    with pytest.raises(ValueError, match="every word is forbidden at place 1 of row 0: forbid fewer words"):
        answer(Constrained(plain, forbidden=[(0,), (1,)]), [0, 2], [False, True])
    with pytest.raises(ValueError, match="a rule names id 3, but the network knows 3"):
        answer(Constrained(plain, forbidden=[(3,)]), [0, 2], [False, True])
    for word in ((), (1, -1)):
        with pytest.raises(ValueError, match="is no word: give the ids of its pieces"):
            Constrained(plain, forbidden=[(0,), word])
    with pytest.raises(ValueError, match=r"word \[0, 1, 0\] must be included, but \[1, 0\] in it is forbidden"):
        Constrained(plain, forbidden=[(1, 1), (1, 0)], included=[(0, 1, 0)])
    # Of byte-level pieces, the first of a sentence looks like a continuation: it may stand there, but not be placed.
    continued = Constrained(plain, included=[(1,)], continuation=torch.tensor([False, True]))
    assert answer(continued, [1, 2], [False, True]).tolist() == [[0.0, -torch.inf, -torch.inf]]
    with pytest.raises(ValueError, match=r"word \[1\] begins with a piece that continues another word"):
        place_words(continued, Batch.of(torch.full((1, 2), 2), torch.ones(1, 2, dtype=torch.bool)), 2, seed=0)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_what_is_given_may_contain_what_is_forbidden_and_is_not_written_again(bert, num_steps):
    """Also a sequence that begins in what is given: (7, 8) stands there, and behind 8 (8, 9) is not completed."""
    canvas = blank_rows([6] * 400)
    canvas.tokens[:, 2:4], canvas.editable[:, 2:4] = torch.tensor([7, 8]), False
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=num_steps)
    right = int(last_tokens(sampler, bert, canvas)[:, 4].mode().values)
    rules = [(7,), (7, 8), (8, right)]
    after = last_tokens(sampler, Constrained(bert, forbidden=rules), canvas)
    assert bool((after[:, 2:4] == torch.tensor([7, 8])).all())
    assert not bool((after[canvas.editable] == 7).any())
    assert not bool((after[:, 4] == right).any())
    assert bool((after[canvas.editable] == right).any())  # elsewhere it may stand


def test_words_are_placed_beside_what_is_given_and_forbidden():
    """(0, 1) stands on the left and right of the only free place, and 2 may stand there, 1 may not."""
    tokens, free = torch.tensor([[0, 1, 3, 0, 1]]), torch.tensor([[False, False, True, False, False]])
    canvas, belief = Batch.of(tokens, free), random_belief(5, 3, 4)
    placed = place_words(Constrained(belief, forbidden=[(0, 1)], included=[(2,)]), canvas, 3, seed=0)
    assert placed.tokens.tolist() == [[0, 1, 2, 0, 1]]
    for crossing in ((1, 2), (2, 0)):  # a part of it is given, on the left or on the right
        with pytest.raises(ValueError, match="do not fit the 1 free places"):
            place_words(Constrained(belief, forbidden=[(0, 1), crossing], included=[(2,)]), canvas, 3, seed=0)


# Included words

CONTINUATION = torch.arange(NUM_TOKENIZER_IDS) >= 40


def test_no_piece_continues_an_included_word():
    plain = random_belief(5, 4, 5)
    network = Constrained(plain, included=[(0, 1), (2,)], continuation=torch.tensor([False, True, False, True]))
    masked = 4
    tokens = [0, 1, masked, masked, masked]
    expected = answer(plain, tokens, [False, False, True, True, True])
    expected[0, [1, 3]] = -torch.inf
    got = answer(network, tokens, [False, False, True, True, True])
    torch.testing.assert_close(got, expected.log_softmax(-1))
    # A part of the word, a word that is itself being written, or no word at all before the place: no rule.
    for before, targets in (([0, 0], False), ([masked, 1], False), ([0, 1], True)):
        positions = [False, targets, True, True, True]
        row = [*before, masked, masked, masked]
        torch.testing.assert_close(answer(network, row, positions), answer(plain, row, positions))
    # At the very end of a row there is no place behind the word.
    torch.testing.assert_close(answer(network, [4, 2], [True, False]), answer(plain, [4, 2], [True, False]))


WORDS = [(20,), (21, 41), (22, 42, 43)]
FORBIDDEN = [(20, 21, 41), (43, 20), (5,), (6, 7)]


def stands_whole(row: list[int], word: tuple[int, ...]) -> bool:
    """Whether a word stands in a row and the next piece does not continue it."""
    ends = [i + len(word) for i in range(len(row) - len(word) + 1) if tuple(row[i : i + len(word)]) == word]
    return any(end == len(row) or not (40 <= row[end] < NUM_TOKENIZER_IDS) for end in ends)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_every_included_word_is_there_in_the_end_and_whole(bert, num_steps):
    """Rows from the tightest, six pieces in six places, to roomy ones, over many seeds."""
    network = Constrained(bert, forbidden=FORBIDDEN, included=WORDS, continuation=CONTINUATION)
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=num_steps)
    canvas = blank_rows([6] * 40 + [7] * 40 + [8] * 20 + [16] * 40)
    placed = place_words(network, canvas, MASK, seed=num_steps)
    assert torch.equal(canvas.editable.sum(1) - placed.editable.sum(1), torch.full((140,), 6))
    assert bool((placed.tokens[placed.editable] == MASK).all())
    assert torch.equal(placed.tokens[~canvas.editable], canvas.tokens[~canvas.editable])
    tokens = last_tokens(sampler, network, placed)
    assert torch.equal(tokens[~placed.editable], placed.tokens[~placed.editable])
    for row in tokens.tolist():
        assert all(stands_whole(row, word) for word in WORDS)
        assert not any(contains(row, rule) for rule in FORBIDDEN)
    orders = {tuple(sorted(WORDS, key=lambda word: row.index(word[0]))) for row in tokens[:40].tolist()}
    assert len(orders) > 1  # the tight rows, too, differ


def test_samples_glue_unless_they_are_told_not_to(bert):
    """The rule is needed: without it the network continues some of the words."""
    placed = place_words(Constrained(bert, included=WORDS), blank_rows([10] * 200), MASK, seed=0)
    tokens = last_tokens(drawing(Ancestral(), Absorbing(Linear(), MASK), steps=2), bert, placed)
    assert not all(stands_whole(row, word) for row in tokens.tolist() for word in WORDS)


def test_a_start_is_drawn_from_the_belief_in_the_word_there():
    """Chi-square against softmax of the summed log-probabilities, over the starts that are free and do not glue.

    What is forbidden elsewhere, and what an editable place shows, plays no part.
    """
    belief = random_belief(8, 4, 5, seed=3)
    tokens = torch.tensor([4, 4, 4, 4, 1, 4, 4, 3]).expand(4000, -1)
    editable = tokens == 4
    network = Constrained(
        belief, included=[(2, 0)], forbidden=[(0, 3), (2, 2)], continuation=torch.tensor([False, False, False, True])
    )
    canvas = Batch.of(torch.where(editable, torch.tensor([0, 1, 2, 3, 0, 0, 2, 0]), tokens), editable)
    placed = place_words(network, canvas, 4, seed=1)
    starts = (editable & ~placed.editable).int().argmax(dim=1)
    assert bool((placed.tokens.gather(1, starts[:, None] + torch.arange(2)) == torch.tensor([2, 0])).all())
    assert bool((placed.tokens[placed.editable] == 4).all())
    scores = belief.log_f[:-1, 2] + belief.log_f[1:, 0]
    counts = torch.bincount(starts, minlength=3)
    assert len(counts) == 3  # 3 and 4 are not free, and at 5 the word would be continued by the 3 behind it
    assert stats.chisquare(counts.numpy(), (scores[:3].softmax(0) * 4000).numpy()).pvalue > 0.01


def test_two_words_draw_their_places_independently():
    """The first takes place 0 or 1, the second, alike everywhere, one of the two that are left."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [1e-12, 0.5]], dtype=torch.float64)
    network = Constrained(Constant(nn.functional.pad(p.log(), (0, 1), value=-torch.inf)), included=[(0,), (1,)])
    canvas = Batch.of(torch.full((3000, 3), 2), torch.ones(3000, 3, dtype=torch.bool))
    tokens = place_words(network, canvas, 2, seed=0).tokens
    outcomes = [
        int((tokens == torch.tensor(row)).all(dim=1).sum()) for row in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 0, 1])
    ]
    assert stats.chisquare(outcomes, [750] * 4).pvalue > 0.01


def test_the_second_word_is_placed_by_what_the_network_thinks_then():
    """A network that believes in 1 only right behind a visible 0: the second word follows the first."""

    class Follows(nn.Module):
        def forward(self, tokens: Tensor, attend: Tensor, t: Tensor, targets: Tensor) -> Tensor:
            assert bool((t == 1).all())
            behind = nn.functional.pad(tokens[:, :-1] == 0, (1, 0))
            p = torch.where(behind[..., None], torch.tensor([0.01, 0.98, 0.01]), torch.tensor([0.5, 0.0, 0.5]))
            return nn.functional.pad(p.log(), (0, 1), value=-torch.inf)[targets]

    canvas = Batch.of(torch.full((50, 6), 3), torch.ones(50, 6, dtype=torch.bool))
    for row in place_words(Constrained(Follows(), included=[(0, 0), (1,)]), canvas, 3, seed=2).tokens.tolist():
        # With (0, 0) at the end there is no place behind it, and any will do.
        assert contains(row, (0, 0, 1)) or (row[-2:] == [0, 0] and 1 in row)


def test_placing_a_batch_equals_placing_its_rows(bert):
    network = Constrained(bert, included=WORDS, continuation=CONTINUATION)
    canvas = replace(blank_rows([9, 6, 12]), example=torch.tensor([5, 1, 8]))
    together = place_words(network, canvas, MASK, seed=4)
    for row in range(3):
        alone = place_words(network, canvas.select(torch.tensor([row])), MASK, seed=4)
        assert torch.equal(alone.tokens[0], together.tokens[row, : alone.tokens.shape[1]])
        assert torch.equal(alone.editable[0], together.editable[row, : alone.tokens.shape[1]])
    assert not torch.equal(place_words(network, canvas, MASK, seed=5).tokens, together.tokens)
    assert not torch.equal(
        place_words(network, replace(canvas, example=canvas.example + 1), MASK, 4).tokens, together.tokens
    )


def test_words_that_do_not_fit_are_refused(bert):
    network = Constrained(bert, included=WORDS, continuation=CONTINUATION)
    message = "3 words of together 6 pieces do not fit the 5 free places of row 1: give fewer words or a longer text"
    with pytest.raises(ValueError, match=message):
        place_words(network, blank_rows([6, 5]), MASK, seed=0)
    split = blank_rows([7])
    split.tokens[0, 3], split.editable[0, 3] = 9, False  # runs of 2 and 4: the word of 3 leaves 1 there
    placed = place_words(network, split, MASK, seed=0).tokens[0].tolist()
    assert placed[1:3] == [21, 41]
    split.tokens[0, 5], split.editable[0, 5] = 9, False  # runs of 2, 1 and 2
    with pytest.raises(ValueError, match="3 words of together 6 pieces do not fit the 5 free places of row 0"):
        place_words(network, split, MASK, seed=0)


@settings(max_examples=150, deadline=None)
@given(
    row=some.lists(some.sampled_from([None, None, None, 0, 1, 2]), min_size=1, max_size=7),
    words=some.lists(some.lists(some.integers(0, 1), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3),
    rules=some.lists(some.lists(some.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=2),
)
def test_the_search_for_room_is_exact(row, words, rules):
    """Against all ways to put the words one by one; words of 0 and 1, of which 2 is a continuation.

    Rules that the row breaks already are broken by nobody as long as no word has a part in it.
    """
    rules = [rule for rule in rules if not any(contains(word, rule) for word in words)]
    given = [token is not None for token in row]

    def broken(row: list[int | None], rule: tuple[int, ...]) -> bool:
        size = len(rule)
        return any(
            tuple(row[start : start + size]) == rule and not all(given[start : start + size])
            for start in range(len(row) - size + 1)
        )

    network = Constrained(random_belief(1, 3, 4), forbidden=rules, included=words, continuation=torch.arange(3) == 2)

    def fits(row: list[int | None], rest: list[tuple[int, ...]]) -> bool:
        if not rest:
            return not any(broken(row, rule) for rule in rules)
        size = len(rest[0])
        return any(
            fits([*row[:start], *rest[0], *row[start + size :]], rest[1:])
            for start in range(len(row) - size + 1)
            if row[start : start + size] == [None] * size and row[start + size : start + size + 1] != [2]
        )

    assert _Room(network).has(tuple(row), words) == fits(row, words)


@pytest.mark.parametrize("forbidden", [[], [(90, 91)]], ids=["no rules", "a rule about other words"])
def test_words_that_cannot_fit_are_refused_at_once(forbidden):
    """A search through all subsets of the words would take hours."""
    network = Constrained(nn.Identity(), forbidden=forbidden)
    start = time.perf_counter()
    assert not _Room(network).has((None,) * 20, [(word,) for word in range(22)])
    assert not _Room(network).has((None, None, None, 99) * 20, [(word, word) for word in range(30)])
    assert _Room(network).has((None, None, None, 99) * 20, [(word, word) for word in range(20)])
    assert time.perf_counter() - start < 5


def test_the_search_for_room_is_fast_when_there_is_none():
    """Six words in a hundred places, each free place alone: the search remembers what it has tried."""
    row = (None, None, 9) * 40
    words = [(0, 1)] * 3 + [(2,), (3,), (4,), (0, 1, 2)]
    assert not _Room(Constrained(random_belief(1, 9, 10), included=words)).has(row, words)
