"""Lexical constraints: enumerated over all outcomes of short sequences, and counted in samples of a real network."""

from __future__ import annotations

import itertools
import re
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

MASK_ID = 4  # tokens are 0 to 3; no rule contains 3


class Constant(nn.Module):
    """A network whose output depends on the position only."""

    def __init__(self, log_f: Tensor):
        super().__init__()
        self.log_f = log_f

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        return self.log_f[: tokens.shape[1]].expand(len(tokens), -1, -1)[targets]


def random_network(length: int, num_words: int, vocabulary: int, seed: int = 0) -> Constant:
    logits = torch.randn(length, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[:, num_words:] = -torch.inf
    return Constant(logits.log_softmax(-1))


def output(network: nn.Module, tokens: list[int], targets: list[bool]) -> Tensor:
    row, positions = torch.tensor([tokens]), torch.tensor([targets])
    return network(row, torch.ones_like(positions), torch.ones(1), positions)


def contains(row: list[int] | tuple[int, ...], word: tuple[int, ...] | list[int]) -> bool:
    return any(list(row[i : i + len(word)]) == list(word) for i in range(len(row) - len(word) + 1))


# Forbidden words

RULES = [[(0, 1)], [(1, 1)], [(0, 1, 0)], [(2,)], [(0, 1), (1, 2)], [(0, 0), (2,), (0, 1, 1)]]


def states(rules: list[tuple[int, ...]]) -> list[list[int]]:
    """All sequences of four tokens, masked ones included, that break no rule."""
    rows = map(list, itertools.product(range(5), repeat=4))
    return [row for row in rows if not any(contains(row, rule) for rule in rules)]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_no_outcome_of_one_step_completes_a_forbidden_word(rules):
    """Every state, every set of target positions, every combination of tokens with a positive probability there.

    A target may also keep its token: samplers may generate only some of the targets.
    """
    network, rows = Constrained(random_network(4, 4, 5), forbidden=rules), torch.tensor(states(rules))
    for pattern in itertools.product([False, True], repeat=4):
        targets = torch.tensor(pattern).expand_as(rows)
        possible = nn.functional.one_hot(rows, 5).bool()
        possible[targets] |= network(rows, torch.ones_like(targets), torch.ones(len(rows)), targets) > -torch.inf
        assert bool(possible[targets][:, 3].all())  # in no rule
        for rule in rules:
            for start in range(5 - len(rule)):
                matches = torch.stack([possible[:, start + offset, token] for offset, token in enumerate(rule)])
                assert not bool(matches.all(dim=0).any()), (pattern, rule)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_single_target_loses_only_tokens_that_would_break_a_rule(rules):
    plain, rows = random_network(4, 4, 5), states(rules)
    network = Constrained(plain, forbidden=rules)
    for position in range(4):
        here = [row for row in rows if row[position] == MASK_ID]
        forbidden = [
            [any(contains([*row[:position], v, *row[position + 1 :]], rule) for rule in rules) for v in range(5)]
            for row in here
        ]
        assert any(map(any, forbidden))
        tokens = torch.tensor(here)
        targets = (torch.arange(4) == position).expand_as(tokens)
        arguments = (tokens, torch.ones_like(targets), torch.ones(len(tokens)), targets)
        # The output is the network's own, conditioned on no rule being broken.
        expected = plain(*arguments).masked_fill(torch.tensor(forbidden), -torch.inf).log_softmax(-1)
        torch.testing.assert_close(network(*arguments), expected)


def test_the_least_likely_token_of_a_window_is_forbidden():
    log_f = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]]).log()
    network = Constrained(Constant(log_f), forbidden=[(0, 2)])
    got = output(network, [MASK_ID] * 3, [True] * 3)
    expected = log_f.clone()
    expected[1, 2] = -torch.inf  # of (0 at position 0, 2 at position 1): 0.6 against 0.1
    expected[1, 0] = -torch.inf  # of (0 at position 1, 2 at position 2): 0.2 against 0.7
    torch.testing.assert_close(got, expected.log_softmax(-1))
    targets, before = torch.ones(1, 3, dtype=torch.bool), log_f.clone()
    assert torch.equal(network.forbid(torch.full((1, 3), MASK_ID), targets, log_f), expected)
    assert torch.equal(log_f, before)  # the input is not modified
    # A masked position that is not a target stays masked, so no word can be completed yet.
    torch.testing.assert_close(output(network, [MASK_ID] * 3, [True, False, True]), log_f[[0, 2]])
    # Forbidding one token can serve two rules.
    both = Constrained(Constant(log_f), forbidden=[(0, 2), (0, 2, 1)])
    torch.testing.assert_close(output(both, [MASK_ID] * 3, [True] * 3), expected.log_softmax(-1))


def test_rules_for_positions_hold_in_every_sequence():
    """Tokens 2 and 3 continue a word; position 1 begins one, position 2 continues one."""
    log_f = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(6, 4)
    rules = {"word_starts": torch.arange(3) == 1, "word_continuations": torch.arange(3) == 2}
    network = Constrained(Constant(log_f[:3]), continuation=torch.tensor([False, False, True, True]), **rules)
    got = output(network, [MASK_ID] * 3, [True] * 3).exp()
    expected = torch.tensor([[0.4, 0.3, 0.2, 0.1], [4 / 7, 3 / 7, 0, 0], [0, 0, 2 / 3, 1 / 3]])
    torch.testing.assert_close(got, expected)
    # A query may hold several sequences, which are shorter than the rules or padded.
    for length in (2, 5):
        tokens = torch.full((2, length), MASK_ID)
        found = network.forbid(tokens, torch.ones_like(tokens, dtype=torch.bool), log_f[:1].expand(2 * length, 4))
        banned = (found == -torch.inf).view(2, length, 4).tolist()
        plain, start, inside = [False] * 4, [False, False, True, True], [True, True, False, False]
        assert banned == [[plain, start, inside, plain, plain][:length]] * 2
    with pytest.raises(ValueError, match="all tokens are forbidden at position 2"):
        output(
            Constrained(Constant(log_f[:3]), word_continuations=rules["word_continuations"]), [MASK_ID] * 3, [True] * 3
        )


def test_positions_without_a_rule_have_the_networks_own_answer():
    """Only the positions of a rule are normalized again, and without one nothing is copied."""
    log_f = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).log_softmax(dim=-1)
    network = Constrained(
        Constant(log_f), continuation=torch.tensor([False, False, True, True]), word_starts=torch.arange(3) == 1
    )
    tokens, everywhere = torch.full((1, 3), MASK_ID), torch.ones(1, 3, dtype=torch.bool)
    found = network.constrain(tokens, everywhere, log_f)
    assert torch.equal(found[[0, 2]], log_f[[0, 2]])
    torch.testing.assert_close(found[1], torch.cat([log_f[1, :2].log_softmax(0), torch.full((2,), -torch.inf)]))
    free = log_f[[0, 2]]
    assert network.constrain(tokens, torch.tensor([[True, False, True]]), free) is free


def test_a_target_may_keep_its_token_so_the_rule_acts_elsewhere():
    log_f = torch.tensor([[0.01, 0.99], [0.5, 0.5]]).log()
    network = Constrained(Constant(log_f), forbidden=[(0, 1)])
    got = output(network, [0, MASK_ID], [True, True])  # 0 is least likely at position 0, but is already there
    torch.testing.assert_close(got, torch.stack([log_f[0], torch.tensor([0.0, -torch.inf])]))
    # A forbidden word that is already complete is removed at a target: the only one, or one of two.
    assert output(network, [0, 1], [False, True]).tolist() == [[0.0, -torch.inf]]
    assert output(network, [0, 1], [True, True])[0, 0] == -torch.inf


@pytest.fixture(scope="module")
def bert() -> Denoiser:
    return Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()


def blank_rows(lengths: list[int]) -> Batch:
    """Sequences [CLS] … [SEP] with these numbers of masked positions, padded."""
    position, count = torch.arange(max(lengths) + 2), torch.tensor(lengths)[:, None]
    editable = (position > 0) & (position <= count)
    tokens = torch.where(editable, MASK, 0)
    tokens[:, 0] = CLS
    tokens[position == count + 1] = SEP
    return Batch.of(tokens, editable, attention_mask=position <= count + 1)


def last_tokens(sampler: Drawing, network: Network, canvas: Batch, seed: int = 0) -> Tensor:
    *_, last = sampler.sample(network, canvas, seed)
    return last.tokens


def sequences(tokens: Tensor, length: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(window) for row in tokens.unfold(1, length, 1).tolist() for window in row)


def common_sequences(tokens: Tensor) -> list[tuple[int, ...]]:
    """The most frequent words of one, two and three tokens, none of which contains another one."""
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


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_forbidden_words_never_appear_in_thousands_of_samples(bert, process, num_steps):
    """The forbidden words are the most frequent ones, of one, two and three tokens, in unconstrained samples."""
    sampler = drawing(Ancestral(), process, steps=num_steps)
    canvas = blank_rows([9] * 800 + [4] * 300)
    before = last_tokens(sampler, bert, canvas)
    forbidden = common_sequences(before)
    after = last_tokens(sampler, Constrained(bert, forbidden=forbidden), canvas)
    assert not any(sequences(after, len(word))[word] for word in forbidden)
    assert bool(WRITABLE[after[canvas.editable]].all())
    assert torch.equal(after[~canvas.editable], canvas.tokens[~canvas.editable])


def test_frozen_tokens_can_be_part_of_a_forbidden_word(bert):
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
    assert right == left or bool((after[:, 1] == right).any())  # allowed elsewhere


def test_a_constrained_batch_gives_the_same_result_as_its_sequences_one_by_one(bert):
    network = Constrained(bert, forbidden=[(7, 8), (9,), (10, 11, 12)], included=[(13, 14)], continuation=CONTINUATION)
    canvas = replace(blank_rows([9, 3, 6, 1]), example=torch.tensor([4, 0, 9, 2]))
    canvas.tokens[0, 2:4], canvas.editable[0, 2:4] = torch.tensor([13, 14]), False
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=3)
    together = last_tokens(sampler, network, canvas, seed=5)
    for row in range(4):
        alone = canvas.select(torch.tensor([row]))
        assert torch.equal(last_tokens(sampler, network, alone, seed=5)[0], together[row, : alone.tokens.shape[1]])


def test_a_network_without_rules_is_unchanged(bert):
    canvas = blank_rows([5, 3])
    t = torch.ones(2, dtype=torch.float64)
    free = Constrained(bert)(canvas.tokens, canvas.attention_mask, t, canvas.editable)
    torch.testing.assert_close(free, bert(canvas.tokens, canvas.attention_mask, t, canvas.editable))
    unmet = Constrained(bert, forbidden=[(7,) * 20], included=[(8,) * 20], continuation=CONTINUATION)
    torch.testing.assert_close(
        unmet(canvas.tokens, canvas.attention_mask, t, canvas.editable), free
    )  # longer than the batch
    assert isinstance(unmet, Network)
    assert list(unmet.state_dict()) == [f"network.{name}" for name in bert.state_dict()]


def test_rules_that_cannot_be_satisfied_are_rejected():
    plain = random_network(2, 2, 3)
    with pytest.raises(ValueError, match="all tokens are forbidden at position 1 of sequence 0; forbid fewer words"):
        output(Constrained(plain, forbidden=[(0,), (1,)]), [0, 2], [False, True])
    with pytest.raises(ValueError, match="must be < 3, the network's vocabulary size, got 3; use the network's own"):
        output(Constrained(plain, forbidden=[(3,)]), [0, 2], [False, True])
    for word in ((), (1, -1)):
        message = re.escape(f"a word must be one or more token ids >= 0, got {list(word)}; use")
        with pytest.raises(ValueError, match=message):
            Constrained(plain, forbidden=[(0,), word])
    with pytest.raises(ValueError, match=r"\[0, 1, 0\] must be included, but it contains the forbidden \[1, 0\]; drop"):
        Constrained(plain, forbidden=[(1, 1), (1, 0)], included=[(0, 1, 0)])
    # With byte-level tokens, the first of a text looks like a continuation: it can be given, but not be placed.
    continued = Constrained(plain, included=[(1,)], continuation=torch.tensor([False, True]))
    assert output(continued, [1, 2], [False, True]).tolist() == [[0.0, -torch.inf, -torch.inf]]
    with pytest.raises(ValueError, match=r"word \[1\] begins with a continuation token; give whole words"):
        place_words(continued, Batch.of(torch.full((1, 2), 2), torch.ones(1, 2, dtype=torch.bool)), 2, seed=0)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_given_text_may_contain_forbidden_words_that_are_not_generated_again(bert, num_steps):
    """Nor is a word completed that begins in the given text: (7, 8) is given, and (8, right) is not completed."""
    canvas = blank_rows([6] * 400)
    canvas.tokens[:, 2:4], canvas.editable[:, 2:4] = torch.tensor([7, 8]), False
    sampler = drawing(Ancestral(), Absorbing(Linear(), MASK), steps=num_steps)
    right = int(last_tokens(sampler, bert, canvas)[:, 4].mode().values)
    rules = [(7,), (7, 8), (8, right)]
    after = last_tokens(sampler, Constrained(bert, forbidden=rules), canvas)
    assert bool((after[:, 2:4] == torch.tensor([7, 8])).all())
    assert not bool((after[canvas.editable] == 7).any())
    assert not bool((after[:, 4] == right).any())
    assert bool((after[canvas.editable] == right).any())  # allowed elsewhere


def test_words_are_placed_next_to_given_forbidden_words():
    """The forbidden (0, 1) is given on both sides of the only free position, where 2 is allowed."""
    tokens, free = torch.tensor([[0, 1, 3, 0, 1]]), torch.tensor([[False, False, True, False, False]])
    canvas, network = Batch.of(tokens, free), random_network(5, 3, 4)
    placed = place_words(Constrained(network, forbidden=[(0, 1)], included=[(2,)]), canvas, 3, seed=0)
    assert placed.tokens.tolist() == [[0, 1, 2, 0, 1]]
    for crossing in ((1, 2), (2, 0)):  # a part of it is given, on the left or on the right
        with pytest.raises(ValueError, match="do not fit the 1 free positions"):
            place_words(Constrained(network, forbidden=[(0, 1), crossing], included=[(2,)]), canvas, 3, seed=0)


# Included words

CONTINUATION = torch.arange(NUM_TOKENIZER_IDS) >= 40


def test_no_token_continues_an_included_word():
    plain = random_network(5, 4, 5)
    network = Constrained(plain, included=[(0, 1), (2,)], continuation=torch.tensor([False, True, False, True]))
    tokens = [0, 1, MASK_ID, MASK_ID, MASK_ID]
    expected = output(plain, tokens, [False, False, True, True, True])
    expected[0, [1, 3]] = -torch.inf
    got = output(network, tokens, [False, False, True, True, True])
    torch.testing.assert_close(got, expected.log_softmax(-1))
    # No rule applies after a part of the word, or after a word that is itself a target.
    for before, targets in (([0, 0], False), ([MASK_ID, 1], False), ([0, 1], True)):
        positions = [False, targets, True, True, True]
        row = [*before, MASK_ID, MASK_ID, MASK_ID]
        torch.testing.assert_close(output(network, row, positions), output(plain, row, positions))
    # At the end of a sequence there is no position after the word.
    torch.testing.assert_close(output(network, [4, 2], [True, False]), output(plain, [4, 2], [True, False]))


WORDS = [(20,), (21, 41), (22, 42, 43)]
FORBIDDEN = [(20, 21, 41), (43, 20), (5,), (6, 7)]


def occurs_whole(row: list[int], word: tuple[int, ...]) -> bool:
    """Whether a word occurs in a sequence without a continuation token after it."""
    ends = [i + len(word) for i in range(len(row) - len(word) + 1) if tuple(row[i : i + len(word)]) == word]
    return any(end == len(row) or not (40 <= row[end] < NUM_TOKENIZER_IDS) for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3])
def test_every_included_word_occurs_whole_in_the_samples(bert, num_steps):
    """From the tightest case, six tokens in six positions, to sequences with much room, over many sequences."""
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
        assert all(occurs_whole(row, word) for word in WORDS)
        assert not any(contains(row, rule) for rule in FORBIDDEN)
    orders = {tuple(sorted(WORDS, key=lambda word: row.index(word[0]))) for row in tokens[:40].tolist()}
    assert len(orders) > 1  # even the tightest sequences differ


def test_without_the_continuation_rule_the_network_continues_words(bert):
    placed = place_words(Constrained(bert, included=WORDS), blank_rows([10] * 200), MASK, seed=0)
    tokens = last_tokens(drawing(Ancestral(), Absorbing(Linear(), MASK), steps=2), bert, placed)
    assert not all(occurs_whole(row, word) for row in tokens.tolist() for word in WORDS)


@pytest.mark.slow
def test_starts_are_drawn_from_the_probability_of_the_word():
    """Chi-square against the softmax of the summed log-probabilities, over the starts that fit.

    Rules about other words and the tokens at editable positions have no influence.
    """
    plain = random_network(8, 4, 5, seed=3)
    tokens = torch.tensor([4, 4, 4, 4, 1, 4, 4, 3]).expand(4000, -1)
    editable = tokens == 4
    network = Constrained(
        plain, included=[(2, 0)], forbidden=[(0, 3), (2, 2)], continuation=torch.tensor([False, False, False, True])
    )
    canvas = Batch.of(torch.where(editable, torch.tensor([0, 1, 2, 3, 0, 0, 2, 0]), tokens), editable)
    placed = place_words(network, canvas, 4, seed=1)
    starts = (editable & ~placed.editable).int().argmax(dim=1)
    assert bool((placed.tokens.gather(1, starts[:, None] + torch.arange(2)) == torch.tensor([2, 0])).all())
    assert bool((placed.tokens[placed.editable] == 4).all())
    scores = plain.log_f[:-1, 2] + plain.log_f[1:, 0]
    counts = torch.bincount(starts, minlength=3)
    assert len(counts) == 3  # 3 and 4 are not free, and at 5 the continuation token 3 would follow
    assert stats.chisquare(counts.numpy(), (scores[:3].softmax(0) * 4000).numpy()).pvalue > 0.01


@pytest.mark.slow
def test_two_words_draw_their_positions_independently():
    """The first word takes position 0 or 1; the second, equally likely everywhere, one of the other two."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [1e-12, 0.5]], dtype=torch.float64)
    network = Constrained(Constant(nn.functional.pad(p.log(), (0, 1), value=-torch.inf)), included=[(0,), (1,)])
    canvas = Batch.of(torch.full((3000, 3), 2), torch.ones(3000, 3, dtype=torch.bool))
    tokens = place_words(network, canvas, 2, seed=0).tokens
    outcomes = [
        int((tokens == torch.tensor(row)).all(dim=1).sum()) for row in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 0, 1])
    ]
    assert stats.chisquare(outcomes, [750] * 4).pvalue > 0.01


def test_the_network_is_called_again_before_the_second_word_is_placed():
    """A network that gives 1 a high probability only right after an unmasked 0: the second word follows the first."""

    class Follows(nn.Module):
        def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
            assert bool((t == 1).all())
            after_zero = nn.functional.pad(tokens[:, :-1] == 0, (1, 0))
            p = torch.where(after_zero[..., None], torch.tensor([0.01, 0.98, 0.01]), torch.tensor([0.5, 0.0, 0.5]))
            return nn.functional.pad(p.log(), (0, 1), value=-torch.inf)[targets]

    canvas = Batch.of(torch.full((50, 6), 3), torch.ones(50, 6, dtype=torch.bool))
    for row in place_words(Constrained(Follows(), included=[(0, 0), (1,)]), canvas, 3, seed=2).tokens.tolist():
        # With (0, 0) at the end there is no position after it, and the second word may be anywhere.
        assert contains(row, (0, 0, 1)) or (row[-2:] == [0, 0] and 1 in row)


def test_placing_words_in_a_batch_equals_placing_them_in_each_sequence(bert):
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


def test_words_that_do_not_fit_are_rejected(bert):
    network = Constrained(bert, included=WORDS, continuation=CONTINUATION)
    message = "3 words of 6 tokens in total do not fit the 5 free positions of sequence 1; give fewer words or a longer"
    with pytest.raises(ValueError, match=message):
        place_words(network, blank_rows([6, 5]), MASK, seed=0)
    split = blank_rows([7])
    split.tokens[0, 3], split.editable[0, 3] = 9, False  # runs of 2 and 4: the word of 3 leaves 1 there
    placed = place_words(network, split, MASK, seed=0).tokens[0].tolist()
    assert placed[1:3] == [21, 41]
    split.tokens[0, 5], split.editable[0, 5] = 9, False  # runs of 2, 1 and 2
    with pytest.raises(ValueError, match="3 words of 6 tokens in total do not fit the 5 free positions of sequence 0"):
        place_words(network, split, MASK, seed=0)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    row=some.lists(some.sampled_from([None, None, None, 0, 1, 2]), min_size=1, max_size=7),
    words=some.lists(some.lists(some.integers(0, 1), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3),
    rules=some.lists(some.lists(some.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=2),
)
def test_the_search_for_room_is_exact(row, words, rules):
    """Against all ways to place the words one by one; words consist of 0 and 1, and 2 is a continuation token.

    Matches of a rule within the given tokens alone do not count.
    """
    rules = [rule for rule in rules if not any(contains(word, rule) for word in words)]
    given = [token is not None for token in row]

    def broken(row: list[int | None], rule: tuple[int, ...]) -> bool:
        size = len(rule)
        return any(
            tuple(row[start : start + size]) == rule and not all(given[start : start + size])
            for start in range(len(row) - size + 1)
        )

    network = Constrained(random_network(1, 3, 4), forbidden=rules, included=words, continuation=torch.arange(3) == 2)

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


@pytest.fixture
def placements(monkeypatch) -> list[tuple]:
    """The placements that the search for room tries; it fails before an exponential search takes hours."""
    tried: list[tuple] = []
    fits = _Room.fits

    def counting(room: _Room, *placement) -> bool:
        tried.append(placement)
        assert len(tried) < 20_000
        return fits(room, *placement)

    monkeypatch.setattr(_Room, "fits", counting)
    return tried


@pytest.mark.parametrize("forbidden", [[], [(90, 91)]], ids=["no rules", "a rule about other words"])
def test_the_search_for_room_does_not_enumerate_subsets_of_words(forbidden, placements):
    """Words that no rule names differ only in length, so a state is a position and a number of remaining words."""
    network, runs = Constrained(nn.Identity(), forbidden=forbidden), (None, None, None, 99) * 20
    assert not _Room(network).has((None,) * 20, [(word,) for word in range(22)])
    assert not _Room(network).has(runs, [(word, word) for word in range(30)])
    assert _Room(network).has(runs, [(word, word) for word in range(20)])
    placements.clear()
    assert not _Room(network).has(runs, [(word, word) for word in range(21)])  # with 2^21 subsets
    assert len(placements) <= len(runs) * 21 * 3  # a rule also reads the token before: given, free or of a word


def test_the_search_for_room_visits_each_state_once(placements):
    """The word of three tokens fits nowhere, wherever the other six are placed among the 80 free positions."""
    row = (None, None, 9) * 40
    words = [(0, 1)] * 3 + [(2,), (3,), (4,), (0, 1, 2)]
    assert not _Room(Constrained(random_network(1, 9, 10), included=words)).has(row, words)
    # 0 to 3 words of two tokens and 0 to 3 of one token remain besides it; at most three lengths are tried per state.
    assert len(placements) <= len(row) * 4 * 4 * 3
