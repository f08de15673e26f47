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
from diffusionbert.inference.filling import Gap, SearchBudget, TokenFilling, _Search, fill, fill_gaps, filling_nats
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic

LANGUAGE = Language.random(3, 4, seed=1)
"""81 sentences of four tokens."""
EVERYTHING = SearchBudget(beams=100)


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
    budget = SearchBudget(sequences_per_call=7, exact_up_to=len(positions))
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

    def forward(self, tokens: Tensor, attend: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        self.times |= {round(time, 6) for time in t.tolist()}
        self.rows += len(tokens)
        log_f = torch.full((10,), -math.log(7), dtype=torch.float64)
        log_f[7:] = -torch.inf
        return log_f.expand(int(targets.sum()), -1)


def test_the_time_is_the_masked_fraction_of_tokens():
    """Special tokens and padding do not count; a `[MASK]` that is not editable counts as masked."""
    tokens = torch.tensor([[8, 1, 2, 9, 3, 8, 7, 7]])  # 7 is padding, 8 special, 9 the mask
    special = torch.arange(10) >= 7
    attend, editable = tokens != 7, torch.tensor([[0, 1, 1, 0, 0, 0, 0, 0]]).bool()
    x0 = Batch.of(tokens, editable, attend)
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
    few = fill(bayes(LANGUAGE), canvas, LANGUAGE.mask_id, 2, 0, budget=EVERYTHING)
    assert all(same_ranking(two, ranking(LANGUAGE, row, positions)[:2]) for two, row in zip(few, tokens, strict=True))


# By marginals, (0, 0) is best: 0.56 and 0.44. A greedy search takes 0 first and then 1 or 2. Jointly, (1, 0) is best.
MISLEADING = Language(3, 2, [0.02, 0.28, 0.26, 0.42, 0.005, 0.005, 0.0, 0.005, 0.005])


def test_the_best_filling_is_the_joint_one_where_marginals_mislead():
    canvas = MISLEADING.batch(torch.full((1, 2), MISLEADING.mask_id))
    network = bayes(MISLEADING)
    log_f = network(canvas.tokens, canvas.attend, torch.ones(1), canvas.editable)
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
            log_f = network(tokens, canvas.attend, t, targets)
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
    drawn = _Search(bayes(uniform), 2, None, LogitsWarper(), SearchBudget(draws=80)).drawn(canvas, seed=0)
    assert drawn.shape == (80, 3)
    counts = torch.bincount(drawn @ torch.tensor([4, 2, 1]), minlength=8)
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_confidence_ignores_forbidden_tokens():
    """The forbidden 2 is the most likely token at the first position; of the others, it is 0 at the second."""
    sentences = {(2, 0): 0.70, (2, 1): 0.12, (0, 1): 0.10, (1, 0): 0.08}
    language = Language(3, 2, [sentences.get(words, 0.0) for words in itertools.product(range(3), repeat=2)])
    canvas, budget = language.batch(torch.full((1, 2), 3)), SearchBudget(beams=1, draws=0)
    (greedy,) = fill(bayes(language), canvas, 3, 1, 0, LogitsWarper(forbidden=(2,)), budget=budget)
    assert greedy[0].tokens.tolist() == [1, 0]


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


@pytest.mark.parametrize(
    "budget", [SearchBudget(), SearchBudget(exact_up_to=0, beams=4, sequences_per_call=5)], ids=["exact", "drawn"]
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


def test_random_draws_depend_on_seed_and_temperature(bert):
    canvas, budget = blanks_of(bert), SearchBudget(beams=1, draws=20)

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
            ["".join(map(str, row[attend].tolist()))]
            for row, attend in zip(greedy_filling(bert, canvas, MASK), canvas.attend, strict=True)
        ]
    )


def test_impossible_requests_are_rejected(bert):
    canvas = blanks_of(bert)
    nothing = replace(canvas, editable=canvas.editable & torch.tensor([[True], [False], [True]]))
    with pytest.raises(ValueError, match="sequence 1 has nothing to fill; mark at least one position per sequence"):
        fill(bert, nothing, MASK, 1, seed=0)
    with pytest.raises(ValueError, match="`alternatives` must be >= 1, got 0"):
        fill(bert, canvas, MASK, 0, seed=0)
    with pytest.raises(ValueError, match=r"no filling of \[.{0,39} is possible; forbid fewer words"):
        fill(bert, canvas, MASK, 1, seed=0, warper=LogitsWarper(forbidden=tuple(range(VOCAB_SIZE))))
    with pytest.raises(ValueError, match=r"`beams`, `orders` and `sequences_per_call` must be >= 1.*got .*beams=0"):
        SearchBudget(beams=0)


def test_dead_ends_are_dropped():
    """Two tokens, neither of which may follow itself, before a frozen 0: some partial fillings cannot be completed."""
    uniform = Language(2, 3, torch.full((8,), 1 / 8))
    tokens = torch.tensor([[2, 2, 0]])
    network = Constrained(bayes(uniform), forbidden=[(0, 0), (1, 1)])
    (found,) = fill(network, Batch.of(tokens, at([0, 1], tokens)), 2, 5, seed=0)
    assert [filling.tokens.tolist() for filling in found] == [[0, 1, 0]]


# Blanks of unknown length

SHARES = {2: 0.2, 3: 0.45, 4: 0.35}
LANGUAGES = {length: Language.random(3, length, seed=length) for length in SHARES}


class ByLength(nn.Module):
    """The exact network of each length, chosen by the number of positions."""

    def forward(self, tokens: Tensor, attend: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        return bayes(LANGUAGES[tokens.shape[1]])(tokens, attend, t, targets)


def gap(context: Tensor, length: int) -> Gap:
    """Context tokens with `length` masked positions after the first."""
    masked = torch.full((len(context), length), 3)
    tokens = torch.cat([context[:, :1], masked, context[:, 1:]], dim=1)
    canvas = Batch.of(tokens, tokens == 3)
    share = SHARES.get(tokens.shape[1], 1.0)
    return Gap(canvas, ~canvas.editable, torch.full((len(tokens),), -math.log(share), dtype=torch.float64))


@pytest.mark.parametrize("budget", [EVERYTHING, replace(EVERYTHING, exact_up_to=0, orders=1)], ids=["exact", "drawn"])
def test_lengths_are_ranked_by_the_posterior(budget):
    """A mixture of lengths 2, 3 and 4: sentences "a … b" with zero, one or two tokens between, by joint probability."""
    context = torch.tensor([[0, 2], [1, 1]])
    found = fill_gaps(ByLength(), [gap(context, length) for length in (0, 1, 2)], 3, 100, seed=0, budget=budget)
    for row, fillings in zip(context.tolist(), found, strict=True):
        joint = {
            tuple(sentence): -math.log(SHARES[length] * p)
            for length, language in LANGUAGES.items()
            for sentence, p in zip(language.sentences.tolist(), language.probabilities.tolist(), strict=True)
            if (sentence[0], sentence[-1]) == tuple(row)
        }
        assert len(fillings) == 1 + 3 + 9
        assert same_ranking(fillings, sorted(joint.items(), key=lambda pair: pair[1]))


@pytest.mark.parametrize(
    ("context", "fair", "by_sum", "by_mean"), [([0, 0], "0010", "020", "0010"), ([0, 2], "002", "002", "0102")]
)
def test_neither_sum_nor_mean_of_the_nats_of_fillings_ranks_lengths(context, fair, by_sum, by_mean):
    """The sum prefers one token where two are more likely, the mean two where one is."""
    gaps = [gap(torch.tensor([context]), length) for length in (1, 2)]
    best = fill_gaps(ByLength(), gaps, 3, 1, seed=0, budget=EVERYTHING)[0][0]
    own = [fill(ByLength(), given.canvas, 3, 1, 0, budget=EVERYTHING)[0][0] for given in gaps]
    assert word(best) == fair
    assert word(min(own, key=lambda filling: filling.nats)) == by_sum
    assert word(min(own, key=lambda filling: filling.nats / (len(filling.tokens) - 2))) == by_mean


class ContextOnly(nn.Module):
    """A network whose output depends on the sum of the unmasked tokens only; its conditionals are inconsistent."""

    def __init__(self, num_words: int):
        super().__init__()
        self.num_words = num_words
        self.logits = 2 * torch.randn(100, num_words, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def forward(self, tokens: Tensor, attend: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        unmasked_sum = (tokens * (tokens != self.num_words)).sum(dim=1)
        log_f = nn.functional.pad(self.logits[unmasked_sum].log_softmax(-1), (0, 1), value=-torch.inf)
        return log_f[:, None].expand(-1, tokens.shape[1], -1)[targets]


def test_all_lengths_are_scored_with_the_same_orders():
    """A network that ignores the length gives all lengths the same nats, although its orders disagree."""
    network, context = ContextOnly(6), torch.tensor([[1, 5, 2, 4, 3, 5, 0]])

    def nats(length: int, seed: int) -> float:
        tokens = torch.cat([context[:, :2], torch.full((1, length), 6), context[:, 2:]], dim=1)
        given = Gap(Batch.of(tokens, tokens == 6), tokens != 6, torch.zeros(1, dtype=torch.float64))
        (found,) = fill_gaps(network, [given], 6, 1, seed, budget=SearchBudget(orders=1, exact_up_to=2))
        x0 = replace(given.canvas.select(torch.tensor([0])), tokens=found[0].tokens[None])
        own = filling_nats(network, x0, 6, seed, budget=SearchBudget(orders=1, exact_up_to=2))
        return found[0].nats - float(own)

    assert nats(1, seed=0) == pytest.approx(nats(2, seed=0))
    assert nats(1, seed=0) == pytest.approx(nats(0, seed=0))
    assert nats(1, seed=0) != pytest.approx(nats(1, seed=1))


def test_gaps_in_a_batch_with_special_tokens_and_padding(bert):
    """On a real network, a batch gives the same fillings as its sequences, and each length has some."""
    batch = sentences(bert.backbone, lengths=(8, 6))
    words = [batch.tokens[0, 1:7].clamp(min=NUM_SPECIAL).tolist(), batch.tokens[1, 1:5].clamp(min=5).tolist()]

    def given(rows: list[int], length: int) -> Gap:
        texts = [[2, *words[row][:2], *[MASK] * length, *words[row][2:], 3] for row in rows]
        width = max(map(len, texts))
        tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        canvas = replace(Batch.of(tokens, tokens == MASK, tokens != 0), example=torch.tensor(rows) + 20)
        known = torch.tensor([float(length), 0.5]).double()[rows]
        return Gap(canvas, tokens >= NUM_SPECIAL, known)

    together = fill_gaps(bert, [given([0, 1], length) for length in (0, 1, 3)], MASK, 3, seed=1, special=SPECIAL)
    for row in (0, 1):
        (alone,) = fill_gaps(bert, [given([row], length) for length in (0, 1, 3)], MASK, 3, seed=1, special=SPECIAL)
        assert sorted(len(filling.tokens) - len(words[row]) - 2 for filling in alone) == [0, 1, 1, 1, 3, 3, 3]
        for one, other in zip(together[row], alone, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.nats == pytest.approx(other.nats, rel=1e-5)


def test_inconsistent_gaps_are_rejected():
    context = torch.tensor([[0, 2]])
    with pytest.raises(ValueError, match="`gaps` must not be empty; give one gap per candidate length"):
        fill_gaps(ByLength(), [], 3, 1, seed=0)
    with pytest.raises(ValueError, match="all gaps must be in the same sentences; give the same context tokens"):
        fill_gaps(ByLength(), [gap(context, 1), gap(context.flip(1), 1)], 3, 1, seed=0)
    both = gap(context, 1)
    with pytest.raises(ValueError, match="a position must not be both context and editable; mark only unmasked tokens"):
        fill_gaps(ByLength(), [replace(both, context=torch.ones_like(both.context))], 3, 1, seed=0)
