"""The released code's spindle: our closed form against its matrices, and why its number is not a likelihood."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from claims import percent
from languages import Bayes, Language, exact_nats
from released_spindle import ReleasedProcess, Settings, by_frequencies, measure
from report import report
from tiny_models import toy_sentences, trained_run

from diffusionbert.diffusion.schedules import uniform_grid
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.inference.engine import load_engine
from diffusionbert.inference.score import encode_texts
from diffusionbert.objectives.discrete_time import DiscreteTime, Quantity
from diffusionbert.storage.files import read_json

VOCAB, MASK = 6, 5
ALLOWED = torch.arange(VOCAB) < MASK


def statistics(counts: list[int]) -> TokenStatistics:
    return TokenStatistics(len(counts) - 1, -1, torch.arange(len(counts)) < len(counts) - 1, (), torch.tensor(counts))


COUNTS = statistics([900, 300, 40, 6, 1, 0])


def sentence() -> Batch:
    tokens = torch.tensor([[0, 3, 1, 0, 4, 2]])
    return Batch.of(tokens, torch.tensor([[True] * 5 + [False]]))


@pytest.mark.parametrize("step", [1, 4])
def test_a_step_is_the_divergence_of_the_matrices_of_the_release(step):
    """By its recipe: products of matrices with β = 1/(T - t), and the survival of the true token on both sides."""
    num_steps, strength, generator = 16, 0.3, torch.Generator().manual_seed(0)
    x0, process = sentence(), ReleasedProcess(0.3, COUNTS)
    f = torch.rand(x0.tokens.shape[1], VOCAB, generator=generator, dtype=torch.float64)
    f = torch.where(ALLOWED, f, 0.0)
    f /= f.sum(dim=1, keepdim=True)
    logs = (COUNTS.counts.double() + 1).log()
    centered = (logs / logs.max())[x0.tokens[0]] - (logs / logs.max())[x0.tokens[0, :5]].mean()
    to_mask = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    to_mask[:, MASK] = 1
    for low in range(0, num_steps, step):
        # The probability of each token at `low` to be [MASK] at `low + step`, by the β of the linear schedule.
        transition = torch.eye(VOCAB, dtype=torch.float64)
        for number in range(low, low + step):
            beta = 1 / (num_steps - number)
            transition = transition @ ((1 - beta) * torch.eye(VOCAB, dtype=torch.float64) + beta * to_mask)
        s, t = (torch.tensor([number / num_steps], dtype=torch.float64) for number in (low, low + step))
        x_t = replace(x0, tokens=x0.tokens.masked_fill(x0.editable, MASK))
        ours = process.unmask_probability(x0.tokens, x_t, s, t)
        for position in range(5):
            curve = 1 - low / num_steps + strength * math.sin(math.pi * low / num_steps) * float(centered[position])
            alpha = min(max(curve, 0.0), 0.999) if low else 1.0

            def posterior(x0_probabilities, alpha=alpha, transition=transition):
                at_low = alpha * x0_probabilities
                at_low[MASK] += 1 - alpha
                joint = at_low * transition[:, MASK]
                return joint / joint.sum()

            own = posterior(torch.nn.functional.one_hot(x0.tokens[0, position], VOCAB).double())
            model = posterior(f[position].clone())
            divergence = float(torch.where(own > 0, own * (own / model).log(), 0.0).sum())
            expected = float(ours[position] * -f[position, x0.tokens[0, position]].log())
            assert divergence == pytest.approx(expected, abs=1e-12)


def test_each_token_counts_once_if_the_posterior_is_that_of_its_schedule():
    x0 = sentence()
    for process in (ReleasedProcess(0.3, COUNTS, own_posterior=True), ReleasedProcess(0.0, COUNTS)):
        weights = process.total_weights(x0, 64)
        # Without a spindle, the clip at 0.999 alone leaves a trace.
        assert torch.allclose(weights[:, :5], torch.ones(1, 5, dtype=torch.float64), atol=2e-3)
        assert weights[0, 5] == 0


def test_as_released_rare_tokens_count_less_and_frequent_ones_more():
    logs = (COUNTS.counts.double() + 1).log()
    own = (logs / logs.max())[sentence().tokens[0, :5]]
    sine_integral = 1.8519370519824662
    expected = 1 + 0.3 * sine_integral * (own - own.mean())
    weights = ReleasedProcess(0.3, COUNTS).total_weights(sentence(), 2048)[0, :5]
    assert torch.allclose(weights, expected, atol=3e-3)
    assert weights.min() < 0.75
    assert weights.max() > 1.1


def test_its_total_probability_is_above_one():
    """With the best network there is, its number is below the entropy, which no likelihood can be."""
    language = Language(2, 2, [0.90, 0.045, 0.045, 0.01])
    process = ReleasedProcess(0.3, TokenStatistics(language.mask_id, -1, language.allowed, (), language.counts(1e4)))
    objective = DiscreteTime(process, uniform_grid(64), Quantity.PAPER)
    nats = exact_nats(objective, Bayes(language, process), language.batch())
    assert float((-nats).exp().sum()) > 1.01
    assert float((language.probabilities * nats).sum()) < language.entropy - 0.01


@pytest.mark.slow
def test_a_model_is_scored_by_every_quantity(tmp_path):
    text = tmp_path / "toy.txt"
    text.write_text("\n".join(toy_sentences(40)) + "\n", encoding="utf-8")
    settings = Settings(sentences=30, draws=64, num_steps=32)
    measure(tmp_path / "released_spindle.json", (text,), str(trained_run()), settings)
    found = read_json(tmp_path / "released_spindle.json")
    rows = {row["by"]: row["quantities"] for row in found["rows"]}
    assert rows["model"].keys() == {"linear", "paper", "own_posterior", "released"}
    assert rows["model"]["linear"]["change"] == 0
    assert rows["token frequencies"]["released"]["ci95"][1] < 0
    report(tmp_path, tmp_path / "tables")
    table = (tmp_path / "tables" / "released-spindle.md").read_text(encoding="utf-8").splitlines()
    assert [line.count("|") for line in table] == [7] * 4
    bound, change = rows["model"]["linear"]["perplexity"], rows["model"]["released"]["change"]
    assert f"| `toy` | model | {bound:.1f} |" in table[3]
    assert f", {percent(change)} [" in table[3]
    engine = load_engine(str(trained_run()))
    nats, words = by_frequencies(engine, toy_sentences(5), settings)
    # Each token by its frequency: the sum of their information.
    batch = encode_texts(engine, toy_sentences(5)).batch([0])
    own = engine.statistics.information.values[batch.tokens[batch.editable]].sum()
    assert nats["linear"][0] == pytest.approx(float(own))
    assert words[0] == len(toy_sentences(5)[0].split())
