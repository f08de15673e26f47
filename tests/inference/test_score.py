"""Scores of texts: their kind, units and intervals, and the nats of each token."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save
from tiny_models import EXPERIMENTS, bundled, config_of, damaged, folder, model_of, plain_bert, trained
from transformers import AutoModelForMaskedLM, AutoTokenizer

from diffusionbert.inference.score import token_nats
from diffusionbert.model import Model, load
from diffusionbert.objectives.base import Likelihood
from diffusionbert.storage.schema import Component
from diffusionbert.training.run import train

SENTENCE = "the old king saw the city of paris today ."


@pytest.fixture(scope="module")
def model() -> Model:
    return trained()


KINDS = {"spindle-paper": Likelihood.PSEUDO, "decoder": Likelihood.EXACT}
"""All others have a bound."""


@pytest.mark.parametrize("kind", sorted({*EXPERIMENTS} - {"unrolled"}))
def test_every_model_states_the_kind_of_its_score(kind):
    [score] = model_of(kind).score([SENTENCE], precision=1.0)
    assert score.likelihood is KINDS.get(kind, Likelihood.BOUND)
    assert score.ci95[0] <= score.nats <= score.ci95[1]
    assert 0 < score.nats < (math.inf if kind == "vectors" else 200)  # untrained, its squares weigh a thousandfold
    by_steps = kind.startswith(("spindle", "uniform", "prefix", "layers"))
    expected = 16 if by_steps else 50 if kind == "vectors" else None
    time = score.protocol.definition.time
    assert (None if time is None else time.steps) == expected
    assert (time is None) == (kind == "decoder")
    surprise = token_nats(model_of(kind).engine, SENTENCE, draws=4)
    assert [piece for piece, _ in surprise] == SENTENCE.split()
    if kind == "decoder":  # nothing is drawn, so nothing is uncertain
        assert score.ci95[0] == pytest.approx(score.nats) == pytest.approx(score.ci95[1])
        assert sum(nats for _, nats in surprise) == pytest.approx(score.nats)


def test_a_model_without_a_likelihood_rejects_scoring():
    for ask in (lambda model: model.score([SENTENCE]), lambda model: token_nats(model.engine, SENTENCE)):
        with pytest.raises(ValueError, match=r"no likelihood.*judge it by its samples"):
            ask(model_of("unrolled"))


def test_learned_exponents_are_restored_and_matter():
    experiment = config_of("learned", steps=20)
    training = replace(experiment.training, validation_draws=64)  # or the untrained one may look better, and be kept
    train(replace(experiment, training=training), folder() / "rates", cache=folder() / "cache")
    source = folder() / "rates" / "model"
    model = load(source)
    frequencies = load_file(source / "token_counts.safetensors")
    exponents = frequencies["exponents"]
    assert exponents.shape == model.engine.network.allowed.shape
    assert float((exponents - 1).abs().max()) > 0.01  # they have moved away from the linear schedule
    objective = model.engine.scoring_objective
    assert model.engine.scoring_quantity.definition.schedule == Component("learned")
    assert torch.allclose(objective.process.learned().float(), exponents.float(), atol=1e-5)
    frequencies["exponents"] = torch.where(
        model.engine.network.allowed, 3 * torch.rand(exponents.shape) + 1, 1.0
    ).double()
    other = load(damaged(source, "other-rates", {"token_counts.safetensors": save(frequencies)}))
    ours, others = (one.score([SENTENCE], precision=0.02)[0].nats for one in (model, other))
    assert abs(ours - others) > 0.05


def test_a_sentence_of_one_token_is_scored_exactly():
    model, theirs = load(plain_bert()), AutoModelForMaskedLM.from_pretrained(plain_bert()).eval()
    tokenizer = AutoTokenizer.from_pretrained(plain_bert())
    inputs = tokenizer("[MASK]", return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**inputs).logits[0, 1].masked_fill(~model.engine.network.allowed, -torch.inf)
    expected = -float(logits.log_softmax(-1)[tokenizer.convert_tokens_to_ids("river")])
    [score] = model.score(["river"])
    assert score.nats == pytest.approx(expected, abs=1e-4)
    assert score.ci95 == pytest.approx((expected, expected), abs=1e-4)


def test_units_are_tokens_words_and_bytes(model):
    text = "the kingdom of 東京 ."
    [score] = model.score([text], precision=0.5)
    num_tokens = len(model.engine.vocabulary.encode([text])[0]) - 2
    assert score.perplexity_per_token == pytest.approx(math.exp(score.nats / num_tokens))
    assert score.perplexity_per_word == pytest.approx(math.exp(score.nats / 5))
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / len(text.encode()))
    assert score.to_json().keys() >= {
        *("text", "nats", "perplexity_per_token", "perplexity_per_word", "bits_per_byte", "ci95"),
        *("likelihood", "protocol"),
    }
    assert json.loads(json.dumps(score.to_json()))["likelihood"] == "bound"


def test_word_order_changes_the_score(model):
    shuffled = "paris king the city old saw of today the ."
    for scorer, real, other in (
        (model, SENTENCE, shuffled),
        (bundled(), "the capital of france is paris .", "paris the is france capital of ."),
    ):
        first, second = scorer.score([real, other], precision=0.3)
        assert first.ci95[1] < second.ci95[0]
        assert first.perplexity_per_token < second.perplexity_per_token
        assert (first.text, second.text) == (real, other)


def test_token_nats_sum_to_the_score(model):
    [score] = model.score([SENTENCE], precision=0.02)
    surprise = token_nats(model.engine, SENTENCE, draws=256)
    assert [piece for piece, _ in surprise] == SENTENCE.split()
    margin = score.ci95[1] - score.ci95[0]
    assert sum(nats for _, nats in surprise) == pytest.approx(score.nats, abs=2 * margin)


def test_scores_have_the_order_of_the_texts(model):
    sentences = [SENTENCE, "nobody", "a queen met the sea in winter .", "the king ."]
    together = model.score(sentences, precision=0.2)
    assert [score.text for score in together] == sentences
    assert together[1].nats < together[0].nats
    alone = [model.score([sentence], precision=0.2)[0] for sentence in sentences]
    for one, other in zip(together, alone, strict=True):
        assert one.nats == pytest.approx(other.nats, abs=3 + 0.1 * other.nats)


def test_a_score_is_reproducible(model):
    first, again, other = (model.score([SENTENCE], precision=0.2, seed=seed)[0].nats for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    "text", ["🙂", "🙂🙂 👨‍👩‍👧", "Ünïcödé — „Anführung“", "日本語の文", "\u200bking\ufeff", "a" * 5000]
)
def test_any_text_has_a_finite_score(model, text):
    [score] = model.score([text], precision=1.0)
    assert math.isfinite(score.nats)
    assert score.text == text


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ([], "list"),
        ([""], "text 1 has no tokens"),
        (["the king .", " \t"], "text 2 has no tokens"),
        (["the king .", "king " * 30, "a"], r"text 2 .*30 tokens.*22"),
        (["caf\udce9"], "UTF-8"),
    ],
    ids=str,
)
def test_texts_that_cannot_be_scored_are_rejected(model, sentences, message):
    with pytest.raises(ValueError, match=message):
        model.score(sentences)


@pytest.mark.parametrize("precision", [0.0, -1.0, math.nan])
def test_a_precision_must_be_above_zero(model, precision):
    with pytest.raises(ValueError, match="precision"):
        model.score([SENTENCE], precision=precision)
