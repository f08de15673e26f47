"""Infilling: exact results on enumerable languages, and invariants on a real network."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from backbones import MASK, NUM_SPECIAL, NUM_TOKENIZER_IDS, VOCAB_SIZE, backbone_of, sentences, tokenizer_allowed
from languages import Bayes, Language, Table
from scipy import stats
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.inference.constraints import Constrained
from diffusionbert.inference.filling import Gap, TokenFilling, _Gaps, _Search, fill_gaps
from diffusionbert.inference.filling_nats import BatchedNetwork, SearchBudget, filling_nats
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic

LANGUAGE = Language.random(3, 4, seed=1)
"""81 sentences of four tokens."""
EVERYTHING = SearchBudget(beams=100)


def given(canvas: Batch, row: int) -> list[Gap]:
    """A request whose blanks have known lengths."""
    alone = canvas.select(torch.tensor([row]))
    return [Gap(alone, torch.zeros_like(alone.editable), torch.zeros(1, dtype=torch.float64))]


def fill(network: nn.Module, canvas: Batch, *arguments, **options) -> list[list[TokenFilling]]:
    """Fills the editable positions of each sequence."""
    return fill_gaps(network, [given(canvas, row) for row in range(len(canvas.tokens))], *arguments, **options)


def bayes(language: Language) -> Bayes:
    """The network whose output is the language's own conditionals, so that all unmasking orders agree."""
    return Bayes(language, Absorbing(Linear(), language.mask_id))


def conditional(language: Language, tokens: Tensor, positions: list[int]) -> dict[tuple[int, ...], float]:
    """p(sentence | the tokens at all other positions), by enumeration."""
    others = [position for position in range(language.length) if position not in positions]
    agrees = (language.sentences[:, others] == tokens[others]).all(dim=1)
    total = language.probabilities[agrees].sum()
    found = zip(language.sentences[agrees].tolist(), (language.probabilities[agrees] / total).tolist(), strict=True)
    return {tuple(sentence): probability for sentence, probability in found}


def at(positions: list[int], like: Tensor) -> Tensor:
    marked = torch.zeros_like(like, dtype=torch.bool)
    marked[:, positions] = True
    return marked


def all_orders(network: nn.Module, x0: Tensor, positions: list[int], mask_id: int) -> Tensor:
    """The mean of the chain rule over all n! orders, by enumeration; the time is the masked fraction."""
    total = torch.zeros(len(x0), dtype=torch.float64)
    orders = list(itertools.permutations(positions))
    for order in orders:
        tokens = x0.clone()
        tokens[:, positions] = mask_id
        for position in order:
            t = (tokens == mask_id).double().mean(dim=1)
            log_f = network(tokens, torch.ones_like(tokens, dtype=torch.bool), t, at([position], tokens))
            total -= log_f.gather(1, x0[:, position, None])[:, 0] / len(orders)
            tokens[:, position] = x0[:, position]
    return total


# Nats of a filling


@pytest.mark.parametrize(
    "budget", [SearchBudget(), SearchBudget(exact_up_to=0, orders=1)], ids=["all subsets", "one order"]
)
@pytest.mark.parametrize("positions", [[2], [0, 3], [0, 1, 3], [0, 1, 2, 3]], ids=str)
def test_nats_equal_the_conditional_nll_if_all_orders_agree(positions, budget):
    """-log p(filling | context) of all 81 sentences; drawn orders have no variance then."""
    x0 = Batch.of(LANGUAGE.sentences, at(positions, LANGUAGE.sentences))
    exact = [
        -math.log(conditional(LANGUAGE, sentence, positions)[tuple(sentence.tolist())])
        for sentence in LANGUAGE.sentences
    ]
    nats = filling_nats(bayes(LANGUAGE), x0, LANGUAGE.mask_id, budget=budget)
    torch.testing.assert_close(nats, torch.tensor(exact, dtype=torch.float64))


@pytest.mark.parametrize("num_steps", [0, 4], ids=["time-agnostic", "time-conditioned"])
@pytest.mark.parametrize("positions", [[1], [0, 2], [0, 2, 3], [0, 1, 2, 3]], ids=str)
def test_nats_are_the_mean_over_all_orders(positions, num_steps):
    """On a network whose orders disagree; its time is the masked fraction."""
    network = Table(LANGUAGE, num_steps=num_steps, scale=2.0)
    x0 = Batch.of(LANGUAGE.sentences, at(positions, LANGUAGE.sentences))
    expected = all_orders(network, LANGUAGE.sentences, positions, LANGUAGE.mask_id).detach()
    budget = SearchBudget(tokens_per_call=28, exact_up_to=len(positions))
    torch.testing.assert_close(filling_nats(network, x0, LANGUAGE.mask_id, budget=budget), expected)


def test_sequences_of_a_batch_may_have_different_numbers_of_blanks():
    network = Table(LANGUAGE, scale=2.0)
    tokens = LANGUAGE.sentences[[5, 44, 61, 70]]
    editable = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 1]]).bool()
    nats = filling_nats(network, Batch.of(tokens, editable), LANGUAGE.mask_id)
    for row in range(4):
        positions = editable[row].nonzero()[:, 0].tolist()
        expected = all_orders(network, tokens[row : row + 1], positions, LANGUAGE.mask_id)[0].detach()
        torch.testing.assert_close(nats[row], expected if positions else torch.zeros((), dtype=torch.float64))


def test_drawn_orders_are_unbiased_and_shared_by_all_fillings_of_a_sequence():
    network = Table(LANGUAGE, num_steps=4, scale=2.0)
    sentence = LANGUAGE.sentences[50:51]
    expected = float(all_orders(network, sentence, [0, 1, 2, 3], LANGUAGE.mask_id).detach())
    rows = Batch.of(sentence.expand(2000, -1), torch.ones(2000, 4, dtype=torch.bool))
    budget = SearchBudget(exact_up_to=3, orders=2)
    nats = filling_nats(network, rows, LANGUAGE.mask_id, seed=3, budget=budget)
    error = float(nats.std()) / 2000**0.5
    assert 0.001 < error < 0.1
    assert abs(float(nats.mean()) - expected) < 4 * error
    # The same key gives the same orders; another seed gives others.
    same = replace(rows, example=torch.full((2000,), 7))
    assert float(filling_nats(network, same, LANGUAGE.mask_id, seed=3, budget=budget).std()) < 1e-12
    other = filling_nats(network, rows.select(torch.arange(20)), LANGUAGE.mask_id, seed=4, budget=budget)
    assert not bool(torch.isclose(other, nats[:20]).any())
    torch.testing.assert_close(
        filling_nats(network, rows.select(torch.arange(5, 9)), LANGUAGE.mask_id, seed=3, budget=budget), nats[5:9]
    )


def test_more_orders_reduce_the_variance_and_keep_the_mean():
    network = Table(LANGUAGE, scale=2.0)
    rows = Batch.of(LANGUAGE.sentences[50:51].expand(400, -1), torch.ones(400, 4, dtype=torch.bool))
    few, many = (
        filling_nats(network, rows, LANGUAGE.mask_id, budget=SearchBudget(exact_up_to=0, orders=orders))
        for orders in (1, 16)
    )
    assert 2.5 < float(few.std() / many.std()) < 6.5  # about √16 = 4
    assert abs(float(few.mean() - many.mean())) < 4 * float(few.std()) / 400**0.5


class Recorder(nn.Module):
    """Records its times and counts its sequences; tokens 0 to 6 of ten are equally likely."""

    def __init__(self) -> None:
        super().__init__()
        self.times: set[float] = set()
        self.rows = 0

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        self.times |= {round(time, 6) for time in t.tolist()}
        self.rows += len(tokens)
        log_f = torch.full((10,), -math.log(7), dtype=torch.float64)
        log_f[7:] = -torch.inf
        return log_f.expand(int(targets.sum()), -1)


def test_the_time_is_the_masked_fraction_of_tokens():
    """Special tokens and padding do not count; a `[MASK]` that is not editable counts as masked."""
    tokens = torch.tensor([[8, 1, 2, 9, 3, 8, 7, 7]])  # 7 is padding, 8 special, 9 the mask
    special = torch.arange(10) >= 7
    attention_mask, editable = tokens != 7, torch.tensor([[0, 1, 1, 0, 0, 0, 0, 0]]).bool()
    x0 = Batch.of(tokens, editable, attention_mask)
    for known, num_tokens in ((special, 4), (None, 6)):
        network = Recorder()
        filling_nats(network, x0, 9, special=known)
        assert network.times == {round(num_masked / num_tokens, 6) for num_masked in (2, 3)}
        network = Recorder()
        fill(network, x0, 9, 1, seed=0, special=known)
        assert network.times == {round(num_masked / num_tokens, 6) for num_masked in (2, 3)}


def test_no_query_is_made_twice():
    """One query ranks all fillings of one blank; two blanks need one, and one per distinct token at either blank."""
    for positions, fillings in (([2], [4, 5, 6]), ([2, 3], [(4, 5), (4, 6), (6, 5)])):
        tokens = torch.zeros(3, 6, dtype=torch.long)
        tokens[:, positions] = torch.tensor(fillings).view(3, -1)
        network = Recorder()
        nats = filling_nats(network, Batch.of(tokens, at(positions, tokens)), 9)
        assert network.rows == (1 if len(positions) == 1 else 1 + 2 + 2)
        torch.testing.assert_close(nats, torch.full((3,), len(positions) * math.log(7), dtype=torch.float64))


# Filling


def ranking(language: Language, tokens: Tensor, positions: list[int]) -> list[tuple[tuple[int, ...], float]]:
    found = conditional(language, tokens, positions)
    return sorted(((sentence, -math.log(p)) for sentence, p in found.items()), key=lambda pair: pair[1])


def same_ranking(fillings: list[TokenFilling], expected: list[tuple[tuple[int, ...], float]]) -> bool:
    return [tuple(filling.tokens.tolist()) for filling in fillings] == [sentence for sentence, _ in expected] and (
        [filling.nats for filling in fillings] == pytest.approx([nats for _, nats in expected])
    )


@pytest.mark.parametrize("positions", [[1], [0, 2], [1, 2, 3], [0, 1, 2, 3]], ids=str)
def test_fillings_are_ranked_by_their_true_probability(positions):
    tokens = LANGUAGE.sentences[[0, 40, 77]]
    canvas = Batch.of(tokens, at(positions, tokens))
    found = fill(bayes(LANGUAGE), canvas, LANGUAGE.mask_id, 100, 0, budget=EVERYTHING)
    for row, fillings in zip(tokens, found, strict=True):
        expected = ranking(LANGUAGE, row, positions)
        assert len(fillings) == 3 ** len(positions)  # fewer than 100 exist
        assert same_ranking(fillings, expected)
    in_pairs = fill(bayes(LANGUAGE), canvas, LANGUAGE.mask_id, 100, 0, budget=replace(EVERYTHING, steps=1))
    for fillings, expected in zip(in_pairs, found, strict=True):
        assert same_ranking(fillings, [(tuple(filling.tokens.tolist()), filling.nats) for filling in expected])
    few = fill(bayes(LANGUAGE), canvas, LANGUAGE.mask_id, 2, 0, budget=EVERYTHING)
    assert all(same_ranking(two, ranking(LANGUAGE, row, positions)[:2]) for two, row in zip(few, tokens, strict=True))


# By marginals, (0, 0) is best: 0.56 and 0.44. A greedy search takes 0 first and then 1 or 2. Jointly, (1, 0) is best.
MISLEADING = Language(3, 2, [0.02, 0.28, 0.26, 0.42, 0.005, 0.005, 0.0, 0.005, 0.005])


def test_the_best_filling_is_the_joint_one_where_marginals_mislead():
    canvas = MISLEADING.batch(torch.full((1, 2), MISLEADING.mask_id))
    network = bayes(MISLEADING)
    log_f = network(canvas.tokens, canvas.attention_mask, torch.ones(1), canvas.editable)
    assert log_f.argmax(dim=1).tolist() == [0, 0]  # of joint probability 0.02
    (found,) = fill(network, canvas, MISLEADING.mask_id, 9, seed=0)
    assert [tuple(filling.tokens.tolist()) for filling in found[:4]] == [(1, 0), (0, 1), (0, 2), (0, 0)]
    assert [math.exp(-filling.nats) for filling in found[:4]] == pytest.approx([0.42, 0.28, 0.26, 0.02])
    assert len(found) == 8  # (2, 0) is impossible
    # A single beam is greedy and misses it; random draws find it.
    (greedy,) = fill(network, canvas, MISLEADING.mask_id, 1, seed=0, budget=SearchBudget(beams=1, draws=0))
    assert greedy[0].tokens.tolist() == [0, 1]
    (drawn,) = fill(network, canvas, MISLEADING.mask_id, 1, seed=0, budget=SearchBudget(beams=1, draws=30))
    assert drawn[0].tokens.tolist() == [1, 0]


def greedy_filling(network: nn.Module, canvas: Batch, mask_id: int) -> Tensor:
    """Fills the most confident position with its most likely token until nothing is masked, one sequence at a time."""
    tokens = canvas.tokens.masked_fill(canvas.editable, mask_id)
    for row in range(len(tokens)):
        while bool((masked := canvas.editable[row] & (tokens[row] == mask_id)).any()):
            targets = torch.zeros_like(canvas.editable)
            targets[row] = masked
            t = (tokens == mask_id).double().mean(dim=1)
            log_f = network(tokens, canvas.attention_mask, t, targets)
            best = int(log_f.max(dim=1).values.argmax())
            tokens[row, masked.nonzero()[best, 0]] = log_f[best].argmax()
    return tokens


@pytest.mark.parametrize("seed", range(3))
def test_the_best_filling_is_never_worse_than_the_greedy_one(seed):
    """On networks whose orders disagree strongly."""
    network = Table(LANGUAGE, scale=3.0, seed=seed)
    canvas = Batch.of(LANGUAGE.sentences[:81:7], at([0, 2, 3], LANGUAGE.sentences[:81:7]))
    for budget in (SearchBudget(beams=2, draws=0), SearchBudget(beams=2, draws=0, exact_up_to=0, orders=1)):
        best = fill(network, canvas, LANGUAGE.mask_id, 1, seed, budget=budget)
        greedy = replace(canvas, tokens=greedy_filling(network, canvas, LANGUAGE.mask_id))
        limit = filling_nats(network, greedy, LANGUAGE.mask_id, seed, budget=budget).tolist()
        assert all(found.nats <= nats + 1e-9 for (found,), nats in zip(best, limit, strict=True))


def test_the_greedy_filling_is_a_candidate_where_the_beam_search_drops_it():
    """After 0 (0.42) three tokens are possible, each determining the last; after 1 (0.40) only two, which do not.

    So two beams continue with 1, to sentences of probability 0.05 each, while greedy search finds one of 0.14.
    """
    sentences = {(0, word, word): 0.14 for word in range(3)}
    sentences |= {(1, second, third): 0.05 for second in (3, 4) for third in range(4)}
    sentences |= {(2, second, third): 0.18 / 25 for second in range(5) for third in range(5)}
    language = Language(5, 3, [sentences.get(words, 0.0) for words in itertools.product(range(5), repeat=3)])
    canvas = language.batch(torch.full((1, 3), language.mask_id))
    (found,) = fill(bayes(language), canvas, language.mask_id, 2, seed=0, budget=SearchBudget(beams=2, draws=0))
    assert [math.exp(-filling.nats) for filling in found] == pytest.approx([0.14, 0.05])


def test_the_beam_search_follows_the_joint_probability():
    """With one beam per token, the best fillings of two blanks are found."""
    for row in range(0, 81, 16):
        tokens = LANGUAGE.sentences[row : row + 1]
        canvas = Batch.of(tokens, at([1, 3], tokens))
        (found,) = fill(bayes(LANGUAGE), canvas, LANGUAGE.mask_id, 3, 0, budget=SearchBudget(beams=3, draws=0))
        assert same_ranking(found, ranking(LANGUAGE, tokens[0], [1, 3])[:3])


def test_there_are_at_least_as_many_beams_as_alternatives():
    tokens = LANGUAGE.sentences[:1]
    canvas = Batch.of(tokens, at([0, 1, 2], tokens))
    (found,) = fill(bayes(LANGUAGE), canvas, LANGUAGE.mask_id, 27, 0, budget=SearchBudget(beams=1, draws=0))
    assert len(found) == 27


def test_random_draws_are_independent_across_positions():
    """With two equally likely tokens at three positions, all eight fillings are equally likely."""
    uniform = Language(2, 3, torch.full((8,), 1 / 8))
    canvas = uniform.batch(torch.full((1, 3), 2))
    network = BatchedNetwork(bayes(uniform), 2, None, 1000)
    gaps, budget = _Gaps.of([given(canvas, 0)], 2), SearchBudget(draws=80)
    found = _Search(network, [], LogitsWarper(), None, budget, alternatives=1, seed=0, gaps=gaps).candidates()
    drawn = found.tokens[found.kind > 0]
    assert drawn.shape == (80, 3)
    assert found.nats.tolist() == pytest.approx([3 * math.log(2)] * len(found.nats))
    counts = torch.bincount(drawn @ torch.tensor([4, 2, 1]), minlength=8)
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_confidence_ignores_forbidden_tokens():
    """The forbidden 2 is the most likely token at the first position; of the others, it is 0 at the second."""
    sentences = {(2, 0): 0.70, (2, 1): 0.12, (0, 1): 0.10, (1, 0): 0.08}
    language = Language(3, 2, [sentences.get(words, 0.0) for words in itertools.product(range(3), repeat=2)])
    canvas, budget = language.batch(torch.full((1, 2), 3)), SearchBudget(beams=1, draws=0)
    (greedy,) = fill(bayes(language), canvas, 3, 1, 0, LogitsWarper(forbidden=(2,)), budget=budget)
    assert greedy[0].tokens.tolist() == [1, 0]


def test_no_filling_contains_a_forbidden_word_if_two_positions_are_filled_at_once():
    """The last two of four blanks; they may be neighbors."""
    canvas, counter = LANGUAGE.batch(torch.full((1, 4), 3)), Counter(bayes(LANGUAGE))
    network = Constrained(counter, forbidden=[(0, 1), (1, 2, 0)])
    (found,) = fill(network, canvas, 3, 100, 0, budget=replace(EVERYTHING, steps=1))
    expected = [
        (sentence, nats)
        for sentence, nats in ranking(LANGUAGE, LANGUAGE.sentences[0], [0, 1, 2, 3])
        if "01" not in (text := "".join(map(str, sentence))) and "120" not in text
    ]
    assert same_ranking(found, expected)
    assert counter.calls == 4  # two positions one by one, two at once, the ranking


def test_no_filling_contains_a_forbidden_word():
    tokens = LANGUAGE.sentences[40:41]
    canvas = Batch.of(tokens, at([0, 1, 2], tokens))
    (free,) = fill(bayes(LANGUAGE), canvas, LANGUAGE.mask_id, 100, 0, budget=EVERYTHING)
    assert len(free) == 27
    (shaped,) = fill(bayes(LANGUAGE), canvas, LANGUAGE.mask_id, 100, 0, LogitsWarper(forbidden=(2,)), budget=EVERYTHING)
    remaining = [filling for filling in free if 2 not in filling.tokens[:3].tolist()]
    assert same_ranking(shaped, [(tuple(filling.tokens.tolist()), filling.nats) for filling in remaining])
    # A rule about two tokens excludes no other filling, because positions are filled one at a time.
    network = Constrained(bayes(LANGUAGE), forbidden=[(0, 1), (1, 2, 0)])
    (ruled,) = fill(network, canvas, LANGUAGE.mask_id, 100, 0, budget=EVERYTHING)
    kept = [filling for filling in free if "01" not in word(filling) and "120" not in word(filling)]
    assert 5 < len(kept) < 25
    assert same_ranking(ruled, [(tuple(filling.tokens.tolist()), filling.nats) for filling in kept])
    # Nested constraints all hold.
    twice = Constrained(Constrained(bayes(LANGUAGE), forbidden=[(1, 2, 0)]), forbidden=[(0, 1)])
    (both,) = fill(twice, canvas, LANGUAGE.mask_id, 100, 0, budget=EVERYTHING)
    assert same_ranking(both, [(tuple(filling.tokens.tolist()), filling.nats) for filling in kept])


def word(filling: TokenFilling) -> str:
    return "".join(map(str, filling.tokens.tolist()))


def test_top_k_limits_the_tokens_of_each_position():
    tokens = LANGUAGE.sentences[40:41]
    (found,) = fill(bayes(LANGUAGE), Batch.of(tokens, at([2], tokens)), LANGUAGE.mask_id, 9, 0, LogitsWarper(top_k=2))
    assert same_ranking(found, ranking(LANGUAGE, tokens[0], [2])[:2])


@pytest.fixture(scope="module")
def bert() -> Denoiser:
    return Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()


def blanks_of(bert: Denoiser) -> Batch:
    """Sequences of 9, 6 and 4 positions with 4, 2 and 1 masked ones, at odd positions."""
    batch = sentences(bert.backbone)
    return replace(batch, editable=batch.editable & (batch.tokens == MASK), example=torch.tensor([3, 11, 6]))


SPECIAL = torch.arange(NUM_TOKENIZER_IDS) < NUM_SPECIAL


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", [SearchBudget(), SearchBudget(exact_up_to=0, beams=4, tokens_per_call=40)], ids=["exact", "drawn"]
)
def test_a_batch_gives_the_same_fillings_as_its_sequences_one_by_one(bert, budget):
    canvas = blanks_of(bert)
    together = fill(bert, canvas, MASK, 4, seed=2, special=SPECIAL, budget=budget)
    for row, fillings in enumerate(together):
        alone = canvas.select(torch.tensor([row]))
        (found,) = fill(bert, alone, MASK, 4, seed=2, special=SPECIAL, budget=budget)
        assert len(found) == 4
        assert same_ranking(fillings, [(tuple(filling.tokens.tolist()), filling.nats) for filling in found])
        tokens = torch.stack([filling.tokens for filling in fillings])
        assert torch.equal(tokens[:, ~alone.editable[0]], alone.tokens[:, ~alone.editable[0]].expand(4, -1))
        assert bool(tokenizer_allowed()[tokens[:, alone.editable[0]]].all())
        assert len(tokens.unique(dim=0)) == 4
        assert [filling.nats for filling in fillings] == sorted(filling.nats for filling in fillings)
        nats = filling_nats(bert, replace(alone.select(torch.zeros(4).long()), tokens=tokens), MASK, 2, budget=budget)
        assert nats.tolist() == pytest.approx([filling.nats for filling in fillings], rel=1e-5)


def test_tokens_at_editable_positions_do_not_matter(bert):
    canvas = blanks_of(bert)
    other = replace(canvas, tokens=canvas.tokens.masked_fill(canvas.editable, 9))
    first, second = (fill(bert, given, MASK, 2, seed=0) for given in (canvas, other))
    assert [[word(f) for f in row] for row in first] == [[word(f) for f in row] for row in second]


def test_constraints_hold_on_a_real_network(bert):
    canvas = blanks_of(bert)
    best = [row[0].tokens.tolist() for row in fill(bert, canvas, MASK, 1, seed=0)]
    rules = [tuple(best[0][1:3]), (best[1][1],), tuple(best[2][0:3])]
    found = fill(Constrained(bert, forbidden=rules), canvas, MASK, 5, seed=0)
    for fillings, rule in zip(found, rules, strict=True):
        rows = [filling.tokens.tolist() for filling in fillings]
        assert len(rows) == 5
        assert not any(tuple(row[i : i + len(rule)]) == rule for row in rows for i in range(len(row)))


@pytest.mark.slow
def test_random_draws_depend_on_seed_and_temperature(bert):
    canvas, budget = blanks_of(bert), SearchBudget(beams=1, draws=20, ranked=100)

    def texts(seed: int, alternatives: int = 1, temperature: float = 1.0) -> list[list[str]]:
        warper = LogitsWarper(temperature=temperature)
        return [list(map(word, row)) for row in fill(bert, canvas, MASK, alternatives, seed, warper, budget=budget)]

    assert texts(0, 15) == texts(0, 15)
    assert texts(0, 15) != texts(1, 15)
    # At a temperature near 0, all draws equal the greedy filling, whatever the seed.
    assert (
        texts(0, temperature=0.001)
        == texts(1, temperature=0.001)
        == [
            ["".join(map(str, row[attention_mask].tolist()))]
            for row, attention_mask in zip(greedy_filling(bert, canvas, MASK), canvas.attention_mask, strict=True)
        ]
    )


def test_impossible_requests_are_rejected(bert):
    canvas = blanks_of(bert)
    with pytest.raises(ValueError, match="`alternatives` must be >= 1, got 0"):
        fill(bert, canvas, MASK, 0, seed=0)
    with pytest.raises(ValueError, match=r"must be >= 1, got .*beams=0"):
        SearchBudget(beams=0)
    with pytest.raises(ValueError, match=r"`draws` and `exact_up_to` must be >= 0, got .*draws=-1"):
        SearchBudget(draws=-1)


def test_a_request_without_any_allowed_filling_gets_none(bert):
    everything = LogitsWarper(forbidden=tuple(range(VOCAB_SIZE)))
    assert fill(bert, blanks_of(bert), MASK, 1, seed=0, warper=everything) == [[], [], []]
    # Alone among others: two tokens are not enough for a word of three different ones.
    network = Constrained(bayes(LANGUAGE), forbidden=[(0, 0), (0, 1), (0, 2)])
    tokens = torch.tensor([[0, 3, 1, 1], [1, 3, 1, 1]])
    blocked, free = fill(network, Batch.of(tokens, tokens == 3), 3, 5, seed=0)
    assert not blocked
    assert sorted(filling.tokens.tolist()[1] for filling in free) == [1, 2]


def test_dead_ends_are_dropped():
    """Two tokens, neither of which may follow itself, before a frozen 0: some partial fillings cannot be completed."""
    uniform = Language(2, 3, torch.full((8,), 1 / 8))
    tokens = torch.tensor([[2, 2, 0]])
    network = Constrained(bayes(uniform), forbidden=[(0, 0), (1, 1)])
    (found,) = fill(network, Batch.of(tokens, at([0, 1], tokens)), 2, 5, seed=0)
    assert [filling.tokens.tolist() for filling in found] == [[0, 1, 0]]


# Blanks of unknown length

FRACTIONS = {2: 0.2, 3: 0.45, 4: 0.35}
LANGUAGES = {length: Language.random(3, length, seed=length) for length in FRACTIONS}


class ByLength(nn.Module):
    """The exact network of each length, chosen by the number of positions without padding."""

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        answers = []
        for row, length in enumerate(attention_mask.sum(dim=1).tolist()):
            part = slice(row, row + 1), slice(0, length)
            answers.append(
                bayes(LANGUAGES[length])(tokens[part], attention_mask[part], t[row : row + 1], targets[part])
            )
        return torch.cat(answers)


def gap(context: Tensor, length: int) -> Gap:
    """Context tokens with `length` masked positions after the first."""
    masked = torch.full((len(context), length), 3)
    tokens = torch.cat([context[:, :1], masked, context[:, 1:]], dim=1)
    canvas = Batch.of(tokens, tokens == 3)
    fraction = FRACTIONS.get(tokens.shape[1], 1.0)
    return Gap(canvas, ~canvas.editable, torch.full((len(tokens),), -math.log(fraction), dtype=torch.float64))


@pytest.mark.parametrize("budget", [EVERYTHING, replace(EVERYTHING, exact_up_to=0, orders=1)], ids=["exact", "drawn"])
def test_lengths_are_ranked_by_the_posterior(budget):
    """A mixture of lengths 2, 3 and 4: sentences "a … b" with zero, one or two tokens between, by joint probability."""
    context = torch.tensor([[0, 2], [1, 1]])
    requests = [[gap(row[None], length) for length in (0, 1, 2)] for row in context]
    found = fill_gaps(ByLength(), requests, 3, 100, seed=0, budget=budget)
    for row, fillings in zip(context.tolist(), found, strict=True):
        joint = {
            tuple(sentence): -math.log(FRACTIONS[length] * p)
            for length, language in LANGUAGES.items()
            for sentence, p in zip(language.sentences.tolist(), language.probabilities.tolist(), strict=True)
            if (sentence[0], sentence[-1]) == tuple(row)
        }
        assert len(fillings) == 1 + 3 + 9
        total = sum(math.exp(-nats) for nats in joint.values())
        posterior = {sentence: nats + math.log(total) for sentence, nats in joint.items()}
        assert same_ranking(fillings, sorted(posterior.items(), key=lambda pair: pair[1]))
        assert sum(math.exp(-filling.nats) for filling in fillings) == pytest.approx(1)
        for filling in fillings:
            assert filling.gap == len(filling.tokens) - 2
            of_length = [math.exp(-nats) for sentence, nats in posterior.items() if len(sentence) == filling.gap + 2]
            assert filling.length_nats == pytest.approx(-math.log(sum(of_length)))


@pytest.mark.parametrize(
    ("context", "fair", "by_sum", "by_mean"), [([0, 0], "0010", "020", "0010"), ([0, 2], "002", "002", "0102")]
)
def test_neither_sum_nor_mean_of_the_nats_of_fillings_ranks_lengths(context, fair, by_sum, by_mean):
    """The sum prefers one token where two are more likely, the mean two where one is."""
    gaps = [gap(torch.tensor([context]), length) for length in (1, 2)]
    best = fill_gaps(ByLength(), [gaps], 3, 1, seed=0, budget=EVERYTHING)[0][0]
    own = [found for [found] in fill_gaps(ByLength(), [[one] for one in gaps], 3, 1, 0, budget=EVERYTHING)]
    assert word(best) == fair
    assert word(min(own, key=lambda filling: filling.nats)) == by_sum
    assert word(min(own, key=lambda filling: filling.nats / (len(filling.tokens) - 2))) == by_mean


class ContextOnly(nn.Module):
    """A network whose output depends on the sum of the unmasked tokens only; its conditionals are inconsistent."""

    def __init__(self, num_words: int):
        super().__init__()
        self.num_words = num_words
        self.logits = 2 * torch.randn(500, num_words, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        unmasked_sum = (tokens * (tokens != self.num_words)).sum(dim=1)
        log_f = nn.functional.pad(self.logits[unmasked_sum].log_softmax(-1), (0, 1), value=-torch.inf)
        return log_f[:, None].expand(-1, tokens.shape[1], -1)[targets]


def test_all_lengths_are_scored_with_the_same_orders():
    """For a network that ignores the length, all lengths are equally likely, although its orders disagree."""
    network, context = ContextOnly(6), torch.tensor([[1, 5, 2, 4, 3, 5, 0]])

    def of_length(length: int) -> Gap:
        tokens = torch.cat([context[:, :2], torch.full((1, length), 6), context[:, 2:]], dim=1)
        return Gap(Batch.of(tokens, tokens == 6), tokens != 6, torch.full((1,), 2.5).double())

    for seed in range(3):
        (found,) = fill_gaps(network, [[of_length(length) for length in (0, 1, 3)]], 6, 9, seed)
        assert {filling.gap for filling in found} == {0, 1, 2}
        assert [filling.length_nats for filling in found] == pytest.approx([math.log(3)] * 9)


def test_given_and_candidate_lengths_have_comparable_nats():
    """A length among others costs -log p(length | context) more than the same length given."""
    gaps = [gap(torch.tensor([[0, 2]]), length) for length in (1, 2)]
    both, one, two = fill_gaps(ByLength(), [gaps, gaps[:1], gaps[1:]], 3, 100, seed=0, budget=EVERYTHING)
    alone = {word(filling): filling.nats for filling in one + two}
    assert len(both) == len(alone) == 12
    for filling in both:
        assert filling.nats - filling.length_nats == pytest.approx(alone[word(filling)])
    assert all(filling.length_nats == 0 for filling in one + two)
    fractions = {filling.gap: math.exp(-filling.length_nats) for filling in both}
    assert sum(fractions.values()) == pytest.approx(1)


@pytest.mark.parametrize("budget", [EVERYTHING, replace(EVERYTHING, exact_up_to=0, orders=1)], ids=["exact", "drawn"])
def test_no_more_probability_than_one_is_given_to_all_fillings_of_all_lengths(budget):
    """Also if orders disagree: Σ exp(-nats) ≤ 1."""
    network = ContextOnly(3)
    tokens = [torch.tensor([[1, *[3] * length, 0, 2]]) for length in (0, 1, 2, 3)]
    gaps = [Gap(Batch.of(row, row == 3), row != 3, torch.tensor([0.1 * row.shape[1]]).double()) for row in tokens]
    (found,) = fill_gaps(network, [gaps], 3, 100, seed=0, budget=budget)
    assert len(found) == 1 + 3 + 9 + 27
    assert 0.5 < sum(math.exp(-filling.nats) for filling in found) <= 1 + 1e-9


# Many requests at once


class Counter(nn.Module):
    """Counts calls and sequences of a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.calls, self.sequences = network, 0, 0

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.sequences += len(tokens)
        return self.network(tokens, attention_mask, t, targets)


def requests_of(bert: Denoiser) -> list[list[Gap]]:
    """Eight sentences with special tokens: blanks of known and of unknown lengths."""
    batch = sentences(bert.backbone, lengths=(9, 8, 7, 10, 6, 9, 8, 10))
    requests = []
    for row in range(8):
        words = batch.tokens[row, batch.editable[row]].clamp(min=NUM_SPECIAL).tolist()
        texts = [[2, *words[:2], *[MASK] * length, *words[2 + row % 2 :], 3] for length in (1, 2, 3)[: 1 + row % 3]]
        if row % 3 == 0:
            texts = [[2, *words[:1], MASK, *words[2:4], *[MASK] * (row // 3 + 1), 3]]
        tokens = [torch.tensor([text]) for text in texts]
        known = torch.tensor([0.3]).double()
        requests.append([Gap(Batch.of(one, one == MASK), one >= NUM_SPECIAL, known * one.shape[1]) for one in tokens])
    return requests


@pytest.mark.slow
def test_fillings_do_not_depend_on_the_other_requests(bert):
    network, requests = bert.double(), requests_of(bert)
    try:
        together = fill_gaps(network, requests, MASK, 3, seed=1, special=SPECIAL)
        backwards = fill_gaps(network, requests[::-1], MASK, 3, seed=1, special=SPECIAL)[::-1]
        small = SearchBudget(tokens_per_call=30)
        in_small_batches = fill_gaps(network, requests, MASK, 3, seed=1, special=SPECIAL, budget=small)
        alone = [fill_gaps(network, [request], MASK, 3, seed=1, special=SPECIAL)[0] for request in requests]
    finally:
        bert.float()
    assert all(len(found) == 3 for found in alone)
    for others in (together, backwards, in_small_batches):
        for found, expected in zip(others, alone, strict=True):
            assert [word(filling) for filling in found] == [word(filling) for filling in expected]
            assert [filling.gap for filling in found] == [filling.gap for filling in expected]
            assert [filling.nats for filling in found] == pytest.approx(
                [filling.nats for filling in expected], abs=1e-6, rel=0
            )


@pytest.mark.slow
def test_requests_share_forward_passes(bert):
    requests, counter = requests_of(bert), Counter(bert)
    fill_gaps(counter, requests, MASK, 1, seed=1)
    together = (counter.calls, counter.sequences)
    most = max(int(gap.canvas.editable.sum()) for request in requests for gap in request)
    assert together[0] <= most + 2  # the contexts, one call per step, the ranking
    counter = Counter(bert)
    for request in requests:
        fill_gaps(counter, [request], MASK, 1, seed=1)
    assert counter.sequences >= together[1]  # equal states of two requests are computed once
    assert counter.calls > 3 * together[0]


def blank_request(num_context: int, lengths: range) -> list[Gap]:
    """One blank in the middle of a sentence."""
    words = [index % 16 for index in range(num_context)]
    tokens = [torch.tensor([[*words[:5], *[16] * length, *words[5:]]]) for length in lengths]
    return [Gap(Batch.of(one, one == 16), one != 16, torch.zeros(1).double()) for one in tokens]


@pytest.mark.parametrize(
    ("gaps", "calls", "sequences"),
    [(blank_request(10, range(1, 5)), 45, 927), (blank_request(1, range(30, 31)), 140, 4157)],
    ids=["one blank of up to four tokens", "thirty masks"],
)
def test_a_search_costs_at_most_a_fifth_of_the_former_one(gaps, calls, sequences):
    """Which searched lengths, beams, greedy filling and draws one after the other, and ranked all they found."""
    counter = Counter(ContextOnly(16))
    assert len(fill_gaps(counter, [gaps], 16, 1, seed=0)[0]) == 1
    assert counter.calls <= calls / 5
    assert counter.sequences <= sequences / 5


# Word boundaries


@pytest.mark.parametrize("alternatives", [1, 9])
def test_word_boundaries_restrict_the_fillings_but_not_their_nats(alternatives):
    """Token 2 continues a word: not allowed at the first blank, required at the second."""
    tokens = torch.tensor([[3, 1, 3, 0]])
    canvas = Batch.of(tokens, tokens == 3)
    free = Gap(canvas, tokens != 3, torch.zeros(1).double())
    bound = replace(free, word_starts=at([0], tokens), word_continuations=at([2], tokens))
    one, other = fill_gaps(
        bayes(LANGUAGE), [[free], [bound]], 3, alternatives, 0, continuation=torch.tensor([False, False, True])
    )
    assert same_ranking(one, ranking(LANGUAGE, tokens[0].clamp(max=2), [0, 2])[:alternatives])
    expected = [
        (sentence, nats)
        for sentence, nats in ranking(LANGUAGE, tokens[0].clamp(max=2), [0, 2])
        if sentence[0] != 2 and sentence[2] == 2
    ]
    assert same_ranking(other, expected[:alternatives])


def test_inconsistent_gaps_are_rejected():
    context = torch.tensor([[0, 2]])
    assert fill_gaps(ByLength(), [], 3, 1, seed=0) == []
    with pytest.raises(ValueError, match="a request must not be empty; give one gap per candidate length"):
        fill_gaps(ByLength(), [[gap(context, 1)], []], 3, 1, seed=0)
    with pytest.raises(ValueError, match="a gap must have one sequence; give each sentence as a request of its own"):
        fill_gaps(ByLength(), [[gap(context.expand(2, -1), 1)]], 3, 1, seed=0)
    with pytest.raises(ValueError, match="all gaps must be in the same sentence; give the same context tokens"):
        fill_gaps(ByLength(), [[gap(context, 1), gap(context.flip(1), 1)]], 3, 1, seed=0)
    both = gap(context, 1)
    with pytest.raises(ValueError, match="a position must not be both context and editable; mark only unmasked tokens"):
        fill_gaps(ByLength(), [[replace(both, context=torch.ones_like(both.context))]], 3, 1, seed=0)
