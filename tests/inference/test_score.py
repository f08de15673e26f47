"""Scores of texts: their kind, units and intervals, and the nats of each token."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save
from shared import encoding_cache, shared
from tiny_models import (
    EXPERIMENTS,
    bundled,
    config_of,
    damaged,
    model_of,
    plain_bert,
    toy_sentences,
    trained,
)
from transformers import AutoModelForMaskedLM, AutoTokenizer

from diffusionbert.inference.score import ScoreSums, total_score
from diffusionbert.likelihood.sentence import Difference
from diffusionbert.model import Model, load
from diffusionbert.objectives.base import Likelihood, TimeGrid
from diffusionbert.storage.schema import Component
from diffusionbert.training.run import train

SENTENCE = "the old king saw the city of paris today ."


@pytest.fixture(scope="module")
def model() -> Model:
    return trained()


KINDS = {"spindle-paper": Likelihood.PSEUDO, "decoder": Likelihood.EXACT}
"""All others have a bound."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*EXPERIMENTS} - {"unrolled"}))
def test_every_model_states_which_number_its_score_is(kind):
    [score] = model_of(kind).score([SENTENCE], precision=1.0, max_draws=64, tokens=True)
    assert score.kind is KINDS.get(kind, Likelihood.BOUND)
    assert 0 <= score.ci95[0] <= score.nats <= score.ci95[1]
    assert 0 < score.nats < (math.inf if kind == "vectors" else 200)  # untrained, its squares weigh a thousandfold
    assert score.quantity == {
        "spindle-paper": "16-step paper quantity",
        "uniform": "16-step bound",
        "uniform-layers": "16-step bound",
        "vectors": "50-step bound on vectors",
        "decoder": "negative log-likelihood",
    }.get(kind, "continuous-time bound")  # the same for all that have it
    assert score.conditional_on == "length"
    assert score.tokens is not None
    assert [piece for piece, _ in score.tokens] == SENTENCE.split()
    assert math.fsum(nats for _, nats in score.tokens) == score.nats
    if kind == "decoder":  # nothing is drawn, so nothing is uncertain
        assert score.ci95 == (score.nats, score.nats)
        assert score.precision_reached


@pytest.mark.parametrize("kind", ["linear", "spindle", "layers", "vectors", "uniform"])
def test_the_number_of_steps_can_be_chosen(kind):
    [score] = model_of(kind).score([SENTENCE], steps=4, precision=1.0, max_draws=32)
    assert score.quantity.startswith("4-step bound")
    assert score.protocol.definition.time == TimeGrid(4)


def test_fewer_steps_have_a_looser_bound():
    few, many, limit = (trained().score(SENTENCE, steps=steps) for steps in (1, 64, "continuous"))
    assert few.ci95[0] > many.ci95[1]
    assert few.ci95[0] == pytest.approx(few.ci95[1])  # one step masks everything: there is nothing to draw
    assert limit.ci95[0] < many.nats < limit.ci95[1] + 1


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("cosine", {"steps": 4}, "no bound for `steps` 4; leave it out for what there is: continuous-time bound"),
        ("uniform", {"steps": "continuous"}, "16-step bound"),
        ("linear", {"steps": "many"}, '`steps` must be a whole number >= 1, or "continuous"'),
        ("linear", {"steps": 0}, "whole number >= 1"),
        ("linear", {"steps": 4, "order": "entropy"}, "at most one of `order` and `steps`"),
        ("linear", {"order": "random"}, "left-to-right, confidence, entropy"),
        ("decoder", {"order": "entropy"}, "from left to right"),
        ("uniform", {"order": "entropy"}, "does not generate from"),
        ("linear", {"overlong": "cut"}, "window, skip, error"),
        ("linear", {"max_draws": 0}, "max_draws"),
    ],
    ids=str,
)
def test_settings_that_a_model_does_not_have_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        model_of(kind).score([SENTENCE], **settings)


def test_a_model_without_a_likelihood_rejects_scoring():
    with pytest.raises(ValueError, match=r"no likelihood.*judge it by its samples"):
        model_of("unrolled").score([SENTENCE])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["left-to-right", "confidence", "entropy"])
@pytest.mark.parametrize("kind", ["linear", "layers"])
def test_an_order_gives_an_exact_score(kind, order):
    model = model_of(kind)
    together = model.score([SENTENCE, "nobody", "the king ."], order=order, tokens=True)
    for score in together:
        assert score.kind is Likelihood.EXACT
        assert score.quantity == f"exact likelihood, {order}"
        assert score.ci95 == (score.nats, score.nats)
        assert math.fsum(nats for _, nats in score.tokens) == score.nats
        alone = model.score(score.text, order=order, seed=5)
        assert alone.nats == pytest.approx(score.nats, abs=1e-4)


def test_left_to_right_is_the_order_of_a_decoder():
    own, ordered = (model_of("decoder").score(SENTENCE, order=order) for order in (None, "left-to-right"))
    assert own.nats == ordered.nats


@pytest.mark.slow
def test_learned_exponents_are_restored_and_matter():
    experiment = config_of("learned", steps=20)
    training = replace(experiment.training, validation_draws=64)  # or the untrained one may look better, and be kept
    config = replace(experiment, training=training)
    source = shared("rates", lambda output: train(config, output, cache=encoding_cache())) / "model"
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
    assert abs(ours - others) > 0.01


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
    assert (score.num_tokens, score.num_words, score.num_bytes) == (num_tokens, 5, len(text.encode()))
    assert score.nats_per_token == pytest.approx(score.nats / num_tokens)
    assert score.perplexity_per_token == pytest.approx(math.exp(score.nats / num_tokens))
    assert score.perplexity_per_word == pytest.approx(math.exp(score.nats / 5))
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / len(text.encode()))
    plain = json.loads(json.dumps(score.to_json()))
    assert plain.keys() == {*vars(score)}
    assert (plain["kind"], plain["quantity"], plain["conditional_on"]) == ("bound", "continuous-time bound", "length")


@pytest.mark.slow
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


def test_scores_have_the_order_of_the_texts_and_do_not_depend_on_their_company(model):
    """To the last bit."""
    sentences = [SENTENCE, "nobody", "a queen met the sea in winter .", "the king .", SENTENCE]
    together = model.score(sentences, tokens=True)
    assert [score.text for score in together] == sentences
    assert together[1].nats < together[0].nats
    assert together[0] == together[4]
    assert [model.score([sentence], tokens=True)[0] for sentence in sentences] == together
    assert model.score(sentences[::-1], tokens=True) == together[::-1]


@pytest.mark.slow
def test_threads_get_the_scores_that_they_get_one_after_another(model):
    sentences = toy_sentences(16, seed=7)
    expected = [model.score(sentence, precision=0.3) for sentence in sentences]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda sentence: model.score(sentence, precision=0.3), sentences)) == expected


def test_a_score_is_reproducible(model):
    first, again, other = (model.score([SENTENCE], precision=0.2, seed=seed)[0].nats for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.slow
def test_every_text_is_as_precise_as_asked(model):
    for precision in (0.5, 0.1):
        for score in model.score(toy_sentences(6, seed=3), precision=precision):
            half_width = (score.ci95[1] - score.nats) / score.num_tokens
            assert half_width <= math.log1p(precision)
            assert score.precision_reached


def test_a_precision_that_is_not_reached_is_said(model):
    [score] = model.score([SENTENCE], precision=1e-6, max_draws=100)
    assert not score.precision_reached
    assert 50 < score.num_draws <= 100
    assert score.ci95[0] >= 0


def test_compared_texts_have_differences_with_intervals_of_their_own(model):
    texts = ["the old king saw the city of paris today .", "the old king saw the city of paris again ."]
    first, second = model.score(texts, paired=True, precision=0.1)
    assert first.difference == Difference(0.0, (0.0, 0.0))
    assert second.difference.nats == pytest.approx(second.nats - first.nats)
    assert second.difference.ci95[0] < second.difference.nats < second.difference.ci95[1]
    assert (second.difference.ci95[1] - second.difference.nats) / 10 <= math.log1p(0.1)
    alone = model.score(texts, precision=0.1)
    assert alone[0].difference is None
    assert second.num_draws <= alone[1].num_draws  # and the shared masks cost no precision
    assert first.num_draws == second.num_draws


def test_compared_exact_scores_have_exact_differences(model):
    first, second = model.score([SENTENCE, "the king ."], paired=True, order="left-to-right")
    assert first.difference == Difference(0.0, (0.0, 0.0))
    assert second.difference.nats == pytest.approx(second.nats - first.nats)
    assert second.difference.ci95 == (second.difference.nats,) * 2


def test_sums_go_on_from_stored_numbers(model):
    scores = model.score([*toy_sentences(3, seed=3), SENTENCE], precision=1.0)
    sums = ScoreSums()
    for one in scores[:2]:
        sums.add(one)
    stored = ScoreSums(json.loads(json.dumps(sums.numbers)))
    assert stored.total() == sums.total()  # also if nothing is left to add
    for one in scores[2:]:
        stored.add(one)
    assert stored.total() == total_score(scores)
    with pytest.raises(ValueError, match="one or more scores, got none"):
        ScoreSums().total()


def test_a_text_gives_a_score_and_a_list_a_list(model):
    score = model.score(SENTENCE, precision=1.0)
    assert [score] == model.score([SENTENCE], precision=1.0)
    assert "protocol" not in repr(score)  # it fills a screen
    assert model.score("king " * 40, overlong="skip") is None


def test_a_total_has_an_interval_of_its_own(model):
    scores = model.score([*toy_sentences(8, seed=3), SENTENCE, SENTENCE])
    total = total_score([*scores, None])
    assert total.nats == pytest.approx(sum(score.nats for score in scores))
    assert total.num_tokens == sum(score.num_tokens for score in scores)
    assert (total.num_texts, total.num_skipped, total.num_imprecise) == (10, 1, 0)
    assert total.perplexity_per_token == pytest.approx(math.exp(total.nats / total.num_tokens))
    assert total.quantity == "continuous-time bound"
    relative = (total.ci95[1] - total.nats) / total.num_tokens
    assert relative < max((score.ci95[1] - score.nats) / score.num_tokens for score in scores)
    assert total_score(scores[:1]).ci95 == scores[0].ci95
    twice = total_score(scores[-2:])  # the same draws: errors do not cancel
    assert twice.ci95[1] - twice.nats == pytest.approx(2 * (scores[-1].ci95[1] - scores[-1].nats))
    assert json.loads(json.dumps(total.to_json()))["kind"] == "bound"
    compared = model.score([*toy_sentences(3, seed=3)], paired=True)  # shared draws: errors may not cancel either
    together = total_score(compared)
    assert together.ci95[1] - together.nats >= 0.999 * sum(one.ci95[1] - one.nats for one in compared)
    with pytest.raises(ValueError, match="one quantity"):
        total_score([*scores, *model.score([SENTENCE], order="entropy")])


def test_long_texts_are_scored_in_windows_skipped_or_refused(model):
    text = " ".join(sentence.removesuffix(" .") for sentence in toy_sentences(8, seed=2))
    assert len(model.engine.vocabulary.own([text])[0]) > 2 * model.max_length
    short, long = model.score([SENTENCE, text], tokens=True)
    assert short == model.score(SENTENCE, tokens=True)
    assert long.num_tokens == len(model.engine.vocabulary.own([text])[0]) == len(long.tokens)
    assert math.fsum(nats for _, nats in long.tokens) == long.nats
    assert long.conditional_on == f"length; each window on up to {model.max_length // 2} tokens before it"
    assert short.nats_per_token == pytest.approx(long.nats_per_token, rel=0.7)
    exact = model.score(text, order="left-to-right", tokens=True)
    window = model.engine.vocabulary.decode(model.engine.vocabulary.own([text])[0][: model.max_length])
    first = model.score(window, order="left-to-right", tokens=True)
    assert exact.tokens[: model.max_length] == first.tokens
    skipped = model.score([text, SENTENCE], overlong="skip")
    assert skipped[0] is None
    assert skipped[1].nats == short.nats
    with pytest.raises(ValueError, match=r"text 2 .*this model reads at most 22; split it"):
        model.score([SENTENCE, text], overlong="error")


@pytest.mark.parametrize("mark", ["[MASK]", "[BLANK]"])
def test_a_text_with_a_blank_has_no_score(model, mark):
    with pytest.raises(ValueError, match=rf"a scored text must not contain \{mark}, got 'the "):
        model.score(["the king .", f"the {mark} ."])


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
