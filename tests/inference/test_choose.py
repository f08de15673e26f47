"""Choices among options: probabilities that follow from the network's own, whatever the options' lengths."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny_models import bundled, model_of, plain_roberta, toy_sentences, trained

from diffusionbert.likelihood.estimate import length_nats
from diffusionbert.model import load
from diffusionbert.objectives.base import Likelihood

TEXT = "the old king [BLANK] the city of paris today ."
OPTIONS = ["saw", "winter", "river"]


@pytest.mark.slow
def test_options_of_one_token_have_the_probabilities_of_the_mask():
    model = trained()
    choice = model.choose(TEXT, OPTIONS)
    [tokens] = model.probabilities(TEXT, top_k=model.tokenizer.vocab_size)
    expected = {token.token: token.probability for token in tokens if token.token in OPTIONS}
    total = sum(expected.values())
    for option in choice.options:
        assert option.num_tokens == 1
        assert option.probability == pytest.approx(expected[option.option] / total, rel=1e-3)
        assert math.exp(-option.nats) == pytest.approx(expected[option.option], rel=1e-3)
    assert sum(option.probability for option in choice.options) == pytest.approx(1)
    assert choice.best == "saw"
    assert choice.kind is Likelihood.EXACT


@pytest.mark.slow
@pytest.mark.parametrize("order", ["left-to-right", "confidence", "entropy"])
def test_an_option_of_several_tokens_is_scored_jointly(order):
    """Its tokens are generated one after another, given the text on both sides."""
    model = trained()
    vocabulary, network = model.engine.vocabulary, model.engine.masked_network
    text, option = "the old king saw [BLANK] today .", "the city of paris"
    [found] = [one for one in model.choose(text, [option, "paris"], order=order).options if one.option == option]
    tokens = torch.tensor(vocabulary.encode([text.replace("[BLANK]", option)]))
    state, nats = tokens.clone(), 0.0
    masked = list(range(5, 9))
    state[0, masked] = vocabulary.mask_id
    while masked:
        targets = torch.zeros_like(tokens, dtype=torch.bool).index_fill(1, torch.tensor(masked), True)
        with torch.no_grad():
            log_f = network(state, torch.ones_like(targets), torch.zeros(1).double(), targets).double()
        gain = -torch.arange(len(masked)) if order == "left-to-right" else log_f.amax(dim=1)
        gain = torch.special.entr(log_f.exp()).sum(dim=1).neg() if order == "entropy" else gain
        chosen = int(gain.argmax())
        position = masked.pop(chosen)
        nats -= float(log_f[chosen, tokens[0, position]])
        state[0, position] = tokens[0, position]
    assert found.num_tokens == 4
    assert found.nats == pytest.approx(nats, abs=1e-4)


def test_priors_over_lengths_are_normalized_and_stated():
    model = trained()
    text, options = "the old king saw [BLANK] today .", ["paris", "the city of paris", "the sea"]
    uniform, context = (model.choose(text, options, prior=prior) for prior in ("uniform", "context"))
    for choice, prior in ((uniform, "uniform"), (context, "context")):
        assert choice.prior == prior
        assert sum(math.exp(-option.length_nats) for option in choice.options) == pytest.approx(1)
        weights = [math.exp(-option.nats - option.length_nats) for option in choice.options]
        for option, weight in zip(choice.options, weights, strict=True):
            assert option.probability == pytest.approx(weight / sum(weights))
    assert [option.length_nats for option in uniform.options] == pytest.approx([math.log(3)] * 3)
    histogram = model.engine.length_histogram
    lengths = torch.tensor([5 + option.num_tokens + 1 for option in context.options])  # with the full stop
    scores = [
        length_nats(histogram, lengths)[index] + _context_nats(model, text, option.num_tokens)
        for index, option in enumerate(context.options)
    ]
    differences = [option.length_nats - context.options[0].length_nats for option in context.options]
    assert differences == pytest.approx([float(score - scores[0]) for score in scores], abs=1e-3)


def _context_nats(model, text: str, num_masks: int) -> float:
    """The context's likelihood from left to right, with masks that stay masked in between."""
    vocabulary, network = model.engine.vocabulary, model.engine.masked_network
    marked = text.replace("[BLANK]", " ".join(["[MASK]"] * num_masks))
    tokens = torch.tensor([model.tokenizer(marked)["input_ids"]])
    own = [index for index, token in enumerate(tokens[0].tolist()) if not vocabulary.special[token]]
    total = 0.0
    for number, position in enumerate(own):
        state = tokens.clone()
        state[0, own[number:]] = vocabulary.mask_id
        targets = torch.zeros_like(tokens, dtype=torch.bool).index_fill(1, torch.tensor([position]), True)
        with torch.no_grad():
            log_f = network(state, torch.ones_like(targets), torch.zeros(1).double(), targets)
        total -= float(log_f[0, tokens[0, position]])
    return total


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[BLANK]", ""])
def test_a_text_may_be_nothing_but_the_blank(text):
    """Then no context is left to weigh lengths by."""
    choice = trained().choose(text, ["the king", "paris"], prior="context")
    assert sum(option.probability for option in choice.options) == pytest.approx(1)


@pytest.mark.slow
def test_an_option_may_be_generated_in_one_of_several_random_orders():
    model, options = trained(), ["the city of paris", "paris"]
    fixed, mixed = (
        model.choose("the old king saw [BLANK] today .", options, order=order)
        for order in ("left-to-right", "random-8")
    )
    nats = [{one.option: one.nats for one in choice.options} for choice in (fixed, mixed)]
    assert nats[0]["paris"] == pytest.approx(nats[1]["paris"], abs=1e-4)  # one token has one order
    assert nats[0]["the city of paris"] != pytest.approx(nats[1]["the city of paris"], abs=1e-6)
    assert mixed.order == "random-8"


def test_a_text_without_a_blank_is_continued():
    model = trained()
    prompt, options = "the old king saw", ["the city of paris today .", "winter winter winter winter winter ."]
    assert model.choose(prompt, options).best == options[0]
    same = model.choose(f"{prompt} [BLANK]", options)
    assert same.options == model.choose(prompt, options).options == model.choose(f"{prompt} ", options).options


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "layers", "prefix", "mouth"])
def test_lists_give_what_single_texts_give(kind):
    model = model_of(kind)
    texts = [
        sentence.replace(" the ", " [BLANK] ", 1) for sentence in toy_sentences(40, seed=5) if " the " in sentence
    ][:4]
    options = [["the", "a"], ["the old", "a", "every"], ["some", "the"], ["the", "no more"]]
    together = model.choose(texts, options, order="confidence", prior="context")
    assert together == [
        model.choose(text, some, order="confidence", prior="context") for text, some in zip(texts, options, strict=True)
    ]


def test_an_option_inside_a_word_and_other_tokenizers():
    model = load(plain_roberta())
    choice = model.choose("the [BLANK]dom of the queen .", ["king", "free"])
    assert sum(option.probability for option in choice.options) == pytest.approx(1)
    for option in model.choose("the old king saw [BLANK] today .", ["the sea", "paris"]).options:
        assert option.num_tokens == len(model.engine.vocabulary.pieces(option.option))


def test_the_bundled_model_knows_a_capital():
    choice = bundled().choose("the capital of france is [BLANK] .", ["new york", "paris", "the river"])
    assert choice.best == "paris"
    assert json.loads(json.dumps(choice.to_json()))["options"][1]["option"] == "paris"


@pytest.mark.parametrize(
    ("text", "options", "settings", "message"),
    [
        (TEXT, ["saw"], {}, "two or more"),
        (TEXT, ["saw", " "], {}, r"must not be empty, got \['saw', ' '\]; leave it out"),
        (TEXT, ["saw", "sold", "saw"], {}, "must differ, got 'saw' 2 times; leave all but one out"),
        ([TEXT, TEXT], ["saw", "sold"], {}, "a list of options of its own, got 'saw'"),
        (TEXT, "saw", {}, "list"),
        ("[BLANK] and [BLANK]", OPTIONS, {}, r"one \[BLANK\]"),
        ("the [MASK] .", OPTIONS, {}, r"one \[BLANK\]"),
        (TEXT, OPTIONS, {"prior": "flat"}, "uniform, context"),
        (TEXT, OPTIONS, {"order": "random"}, "left-to-right"),
        ("king " * 30 + "[BLANK]", OPTIONS, {}, "31 tokens, but this model reads at most 22; shorten it"),
        ([TEXT, TEXT], [OPTIONS], {}, "2 texts and 1 list"),
    ],
    ids=str,
)
def test_what_cannot_be_chosen_is_refused(text, options, settings, message):
    with pytest.raises(ValueError, match=message):
        trained().choose(text, options, **settings)


@pytest.mark.slow
def test_models_that_do_not_generate_from_masks_are_refused():
    for kind in ("decoder", "uniform", "vectors"):
        with pytest.raises(ValueError, match=r"not generate from \[MASK\]"):
            model_of(kind).choose(TEXT, OPTIONS)


def test_options_that_the_model_cannot_tell_apart_or_does_not_know_are_said(caplog):
    options = trained().choose(TEXT, ["saw", "Saw", "🍕"]).options
    assert options[0].probability == options[1].probability
    assert [option.num_unknown for option in options] == [0, 0, 1]
    assert caplog.messages == ["the model reads the options 'saw' and 'Saw' alike"]
