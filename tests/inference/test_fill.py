"""Infilling: joint fillings and their nats, blanks of unknown length, token probabilities."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from tiny_models import EXPERIMENTS, bundled, model_of, plain_bert, plain_roberta, trained
from transformers import AutoModelForMaskedLM, AutoTokenizer

from diffusionbert.inference.infill import fill, fill_together
from diffusionbert.model import Model, load


@pytest.fixture(scope="module")
def model() -> Model:
    return trained()


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_every_model_fills_or_rejects_blanks(kind):
    model = model_of(kind)
    if kind.startswith("uniform") or kind in ("unrolled", "vectors", "decoder"):
        with pytest.raises(ValueError, match=r"does not generate from \[MASK\], so it cannot fill blanks"):
            model.fill("the [MASK] saw .")
        return
    found = fill(model.engine, "the [MASK] saw [BLANK] .", 3, max_blank_tokens=2)
    assert len(found) == 3
    assert [each.nats for each in found] == sorted(each.nats for each in found)
    assert all(len(each.fillings) == 2 and math.isfinite(each.nats) for each in found)


def test_one_blank_matches_transformers():
    """On a plain masked language model, without training: the same numbers as from transformers itself."""
    model, theirs = load(plain_bert()), AutoModelForMaskedLM.from_pretrained(plain_bert()).eval()
    tokenizer = AutoTokenizer.from_pretrained(plain_bert())
    inputs = tokenizer("The king [MASK] a river .", return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**inputs).logits[0, inputs["input_ids"][0] == tokenizer.mask_token_id][0]
    vocabulary, allowed = model.engine.vocabulary, model.engine.network.allowed
    log_p = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    found = fill(model.engine, "The king [MASK] a river .", 4)
    may_begin = allowed & ~torch.nn.functional.pad(vocabulary.continuation | vocabulary.forbidden, (0, 5))
    best = log_p.masked_fill(~may_begin, -torch.inf).topk(4)
    assert [each.nats for each in found] == pytest.approx((-best.values).tolist(), abs=1e-4)
    assert [each.fillings[0] for each in found] == vocabulary.spelled(best.indices.tolist())


@pytest.mark.slow
@pytest.mark.parametrize(("path", "mask"), [(plain_bert, "[MASK]"), (plain_roberta, "<mask>")])
def test_two_blanks_cost_the_mean_of_both_orders(path, mask):
    model = load(path())
    text = "the [MASK] saw a [MASK] ."
    row = model.tokenizer(text.replace("[MASK]", mask))["input_ids"]
    positions = [position for position, token in enumerate(row) if token == model.engine.vocabulary.mask_id]

    def nats(wanted: tuple[int, ...], position: int, shown: tuple[int, ...] = ()) -> float:
        """Of one blank, while the others are shown or not."""
        tokens = torch.tensor([row])
        for other in shown:
            tokens[0, positions[other]] = wanted[other]
        targets = torch.zeros_like(tokens, dtype=torch.bool)
        targets[0, positions[position]] = True
        with torch.no_grad():
            log_f = model.engine.network(tokens, torch.ones_like(targets), torch.ones(1).double(), targets)
        return -float(log_f[0, wanted[position]])

    num_checked = 0
    for each in fill(model.engine, text, 100):
        [again] = model.engine.vocabulary.encode([each.text])
        if len(again) == len(row):  # the words that were written are those that are read
            num_checked += 1
            wanted = tuple(again[position] for position in positions)
            one = nats(wanted, 0) + nats(wanted, 1, shown=(0,))
            other = nats(wanted, 1) + nats(wanted, 0, shown=(1,))
            assert each.nats == pytest.approx((one + other) / 2, abs=1e-4)
    assert num_checked > 3


def test_blanks_are_filled_jointly_and_ranked(model):
    found = fill(model.engine, "the [MASK] king saw the city of [MASK] today .", 3)
    assert found[0].fillings[1] == "paris"
    assert found[0].text == f"the {found[0].fillings[0]} king saw the city of paris today ."
    assert [each.nats for each in found] == sorted(each.nats for each in found)
    assert len({each.text for each in found}) == 3
    assert model.fill("the [MASK] king saw the city of [MASK] today .") == found[0].text


@pytest.mark.parametrize(
    ("text", "blanks"),
    [
        ("[MASK] [MASK] saw a river .", 2),
        ("the king saw a [MASK][MASK]", 2),
        ("[MASK]", 1),
        ("[BLANK] [BLANK]", 2),
        ("[MASK] [BLANK] .", 2),
        ("The KING saw [MASK] 🙂 , e.g. [MASK]!", 2),
    ],
)
def test_each_blank_has_a_filling(model, text, blanks):
    for each in fill(model.engine, text, 3, max_blank_tokens=2):
        assert len(each.fillings) == blanks
        assert all(each.fillings)
        given = [part.strip() for part in re.split(r"\[MASK\]|\[BLANK\]", text)]
        assert re.fullmatch(r"\s*.+?\s*".join(map(re.escape, given)), each.text), each.text


def test_a_blank_of_unknown_length_gets_the_best_length(model):
    text = "the old king saw [BLANK] today ."
    found = fill(model.engine, text, 12, max_blank_tokens=4)
    assert all(1 <= len(each.fillings[0].split()) <= 4 for each in found)
    assert len(found[0].fillings[0].split()) > 1  # the toy English sees nothing in one word
    assert all(len(each.fillings[0].split()) == 1 for each in fill(model.engine, text, 3, max_blank_tokens=1))


def test_forbidden_words_are_never_filled_in(model):
    text = "the old [MASK] saw the city of [MASK] today ."
    assert "paris" in fill(model.engine, text, 1)[0].fillings
    for each in fill(model.engine, text, 20, forbid=["paris", "king"]):
        assert not {"paris", "king"} & set(each.fillings)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("no blank .", {}, "nothing to fill"),
        ("", {}, "nothing to fill"),
        ("the [MASK] [SEP] .", {}, "special tokens"),
        ("the [MASK] .", {"num_alternatives": 0}, "num_alternatives"),
        ("the [BLANK] .", {"max_blank_tokens": 0}, "max_blank_tokens"),
        ("the [BLANK] .", {"max_blank_tokens": 23}, "must be <= 22, the most tokens that this model reads, got 23"),
        ("caf\udce9 [MASK]", {}, "UTF-8"),
    ],
)
def test_texts_that_cannot_be_filled_are_rejected(model, text, options, message):
    with pytest.raises(ValueError, match=message):
        fill(model.engine, text, **options)


def test_a_blank_may_use_all_remaining_positions(model):
    assert len(fill(model.engine, "king " * 10 + "[BLANK] [MASK] [BLANK]", 1, max_blank_tokens=5)) == 1


def test_the_bundled_model_knows_a_capital():
    [best, *_] = fill(bundled().engine, "paris is the capital of [MASK] .", 3)
    assert best.fillings == ("france",)


# ---- the user's text ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["thank you for your [MASK] .", "press the tab [MASK]", "the art [BLANK] was closed ."]
)
def test_a_blank_after_a_space_begins_a_word(text):
    before, after = re.split(r"\[\w+\]", text)
    for each in fill(bundled().engine, text, 20, max_blank_tokens=2):
        assert each.text.startswith(before)
        assert each.text.endswith(after)
        assert each.text == before + each.text[len(before) : len(each.text) - len(after)] + after
        assert not each.fillings[0].startswith("##")
    for token in bundled().probabilities(text, top_k=20)[0]:
        assert not token.token.startswith("##")


def test_a_blank_that_touches_a_letter_continues_its_word():
    vocabulary = bundled().engine.vocabulary
    for each in fill(bundled().engine, "it was un[MASK]able .", 10):
        assert re.fullmatch(r"it was un\w+able \.", each.text)
    assert all(token.token.startswith("##") for token in bundled().probabilities("it was un[MASK]able .")[0])
    assert vocabulary.own(["unable"])[0]


def test_the_probability_of_a_token_is_that_of_its_filling(model):
    text = "the old king saw the city of [MASK] today ."
    [tokens] = model.probabilities(text, top_k=3)
    found = fill(model.engine, text, 3)
    assert [token.token for token in tokens] == [each.fillings[0] for each in found]
    assert [-math.log(token.probability) for token in tokens] == pytest.approx([each.nats for each in found], abs=1e-4)


@pytest.mark.slow
def test_fillings_are_capitalized_and_given_text_is_not():
    text = "[MASK] is the capital of france , and [MASK] is a city ."
    [plain] = fill(bundled().engine, text)
    [capital] = fill(bundled().engine, text, capitalize=True)
    assert capital.text[0] == plain.text[0].upper()
    assert capital.text.lower() == plain.text
    assert " is the capital of france , and " in capital.text
    assert bundled().fill(text) == capital.text
    assert bundled().fill(text, capitalize=False) == plain.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "king " * 30 + "[MASK] saw a [BLANK]" + " river" * 30,
        "[MASK] " * 23,
        "the king saw [MASK] . " * 8,
        "The  KING 🙂\n" * 20 + "saw [BLANK] today .",
    ],
)
def test_a_text_longer_than_the_model_is_filled_in_windows(model, text):
    found = fill(model.engine, text, 3, max_blank_tokens=2)
    assert 1 <= len(found) <= 3
    assert [each.nats for each in found] == sorted(each.nats for each in found)
    parts = re.split(r"\[MASK\]|\[BLANK\]", text)
    for each in found:
        assert "[" not in each.text
        assert re.fullmatch(r".+?".join(map(re.escape, parts)), each.text, re.DOTALL)
    assert [fill(model.engine, text, 1, max_blank_tokens=2)[0].text] == model.fill(
        [text], max_blank_tokens=2, capitalize=False
    )
    assert len(model.probabilities(text)) == len(parts) - 1


def test_texts_are_filled_alike_alone_and_together(model):
    texts = ["the [MASK] saw [BLANK] .", "king " * 30 + "[MASK]", "[MASK] met her sister again ."]
    together = fill_together(model.engine, texts, 2, max_blank_tokens=2)
    alone = [fill(model.engine, text, 2, max_blank_tokens=2) for text in texts]
    for one, other in zip(itertools.chain(*together), itertools.chain(*alone), strict=True):
        assert replace(one, nats=0.0) == replace(other, nats=0.0)
        assert one.nats == pytest.approx(other.nats, abs=1e-5)  # the lengths of a batch change the rounding


def test_the_search_is_restricted_to_the_most_probable_tokens(model):
    text = "the [MASK] saw a [MASK] ."
    assert len(fill(model.engine, text, 5)) == 5
    [only] = fill(model.engine, text, 5, top_k=1)
    assert only.text == fill(model.engine, text, 5, top_p=1e-9)[0].text
    assert fill(model.engine, text, 5, top_k=0) == fill(model.engine, text, 5)
    for wrong in ({"top_k": -1}, {"top_p": 2.0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fill(model.engine, text, **wrong)


def test_a_blank_of_one_token_costs_its_length_beside_what_a_mask_costs(model):
    """Both are nats of the filling given the context; the length is given for one of them."""
    [mask] = fill(model.engine, "the king saw [MASK] city .")
    [blank] = fill(model.engine, "the king saw [BLANK] city .", max_blank_tokens=1)
    assert (blank.text, blank.nats) == (mask.text, pytest.approx(mask.nats))
    assert (mask.conditional_on, blank.conditional_on) == ("context, lengths", "context")
    longer = fill(model.engine, "the king saw [BLANK] city .", 20, max_blank_tokens=2)
    [same] = [one for one in longer if one.text == mask.text]
    assert 0 < same.nats - mask.nats < 10
    assert sum(math.exp(-one.nats) for one in longer) <= 1


def test_probabilities_are_those_at_the_time_at_which_blanks_are_filled():
    """t is the fraction of masked tokens, which a time-conditioned network depends on."""
    model, text = model_of("layers", steps=40), "the old king saw the city of [MASK] today ."
    [best, *_] = model.probabilities(text)[0]
    [filled, *_] = model.fill(text, num_alternatives=1)
    assert (filled.fillings[0], math.exp(-filled.nats)) == (
        best.token,
        pytest.approx(best.probability, rel=1e-3),
    )  # tokens that are never sampled have a part


def test_a_wrong_number_of_probabilities_is_refused():
    with pytest.raises(ValueError, match="`top_k` must be >= 1, got -1"):
        trained().probabilities("a [MASK] .", -1)
