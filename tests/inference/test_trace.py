"""States with step maps: they are those of `generate`, and say where each token came from."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny_models import model_of, trained

from diffusionbert.data.text import EditedText
from diffusionbert.inference.generate import generate
from diffusionbert.inference.tasks import Task, has_word
from diffusionbert.inference.trace import aligned, positions_in, trace, trace_task, traceable_canvas
from diffusionbert.model import sampling_request


def requested(sampler: str | None = None, steps: int = 16):
    return sampling_request(sampler, steps, 1.0, 30, None, None)


@pytest.mark.parametrize("kind", ["linear", "spindle", "layers", "uniform", "decoder", "vectors", "unrolled"])
def test_the_last_state_is_the_generated_text(kind):
    engine, task = model_of(kind).engine, Task(2, prompt="The king", max_new_tokens=5, seed=3, capitalize=True)
    expected = [one.text for one in generate(engine, task, requested())]
    found = [[*trace_task(engine, task, requested(), number)][-1] for number in range(2)]
    assert [state.text for state in found] == expected
    assert all(state.is_final for state in found)


@pytest.mark.parametrize("sampler", ["exact", "ancestral", "confidence", "remasking:eta=0.3"])
def test_a_step_map_says_which_step_unmasked_a_token_and_how_probable_it_was(sampler):
    engine = trained().engine
    task = Task(prompt="the king", max_new_tokens=6, seed=1)
    states = [*trace_task(engine, task, requested(sampler), num_alternatives=3)]
    for before, after in pairwise(states):
        for old, new in zip(before.traced, after.traced, strict=True):
            if new.id != old.id and new.id is not None:
                assert new.step == after.step
                assert 0 < new.probability <= 1
                best = [one.probability for one in new.alternatives]
                assert len(best) == 3
                assert best == sorted(best, reverse=True)
                assert best[0] >= new.probability - 1e-6
            elif new.id is not None:
                assert new == old
    first, last = states[0], states[-1]
    assert first.text == "the king" + " [MASK]" * 6
    assert [one.is_given for one in last.traced] == [True] * 2 + [False] * 6
    assert [last.text[slice(*one.span)] for one in last.tokens] == [one.text.removeprefix("##") for one in last.traced]


def test_the_probability_is_the_networks():
    engine = trained().engine
    sequence = traceable_canvas(engine, [*engine.vocabulary.own(["the king saw"])[0], None], requested())
    *_, last = trace(sequence, 1)
    canvas = sequence.run.canvas
    t = canvas.fraction_of(canvas.editable)
    with torch.no_grad():
        log_f = sequence.run.network(canvas.tokens, canvas.attention_mask, t, canvas.editable)
    assert last.traced[-1].probability == pytest.approx(float(log_f[0, last.traced[-1].id].exp()))


def test_a_canvas_keeps_what_is_given_and_masks_a_fraction_of_what_is_free():
    engine = trained().engine
    text = "The  King saw a river ."
    tokens = engine.vocabulary.own([text])[0]
    masked = [None if index == 2 else token for index, token in enumerate(tokens)]
    *_, last = trace(traceable_canvas(engine, masked, requested(), text=text, seed=1))
    assert last.text.startswith("The  King ")
    assert last.text.endswith(" a river .")
    again = [*trace(traceable_canvas(engine, masked, requested(), text=text, seed=1))]
    assert again[-1].text == last.text
    free = [index > 3 for index in range(len(tokens))]
    sequence = traceable_canvas(engine, tokens, requested(), free=free, strength=0.5, seed=1)
    editable = sequence.run.canvas.editable[0, list(sequence.text.own)].tolist()
    assert sum(editable) == round(0.5 * sum(free))
    assert not any(editable[:4])
    *_, other = trace(traceable_canvas(engine, [None] * 5, requested(), seed=1))
    assert len(other.traced) == 5
    assert "[MASK]" not in other.text


@pytest.mark.parametrize(
    ("tokens", "text", "message"),
    [
        ([0, None], None, "token ids must be those of the tokenizer"),
        ([-1, None], None, "token ids must be"),
        ([10**6, None], None, "token ids must be"),
        ([40], None, "nothing to generate"),
        ([None] * 40, None, "the canvas has 40 tokens"),
        ([None] * 3, "the king", "must be those of its `text`"),
        ([None, None], "the [MASK]", "must not contain"),
    ],
)
def test_a_wrong_canvas_is_refused(tokens, text, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        traceable_canvas(trained().engine, tokens, requested(), text=text)


def test_positions_in_spans_are_those_of_whole_words():
    text = EditedText.of(trained().engine.vocabulary, "the king saw a river .")
    assert positions_in(text, [(5, 6)]) == [False, True] + [False] * 4
    assert positions_in(text, [(0, 3), (9, 13)]) == [True, False, True, False, False, False]


def test_tokens_are_aligned_with_their_text():
    assert aligned(["cafe", "##s", None, "."], "Cafés [MASK].") == [(0, 4), (4, 5), (6, 12), (12, 13)]
    assert aligned(["�", "a"], "é a") == [(0, 0), (2, 3)]


@pytest.mark.parametrize("kind", ["linear", "spindle", "layers"])
@pytest.mark.parametrize(
    ("prompt", "suffix"), [("The king ", "river ."), ("The king", " a river."), ("", "river"), ("x", "")]
)
def test_text_is_generated_between_a_prompt_and_a_suffix(kind, prompt, suffix):
    engine = model_of(kind).engine
    task = Task(2, prompt=prompt, suffix=suffix, max_new_tokens=3, seed=0)
    for one in generate(engine, task, requested()):
        assert one.text.startswith(prompt)
        assert one.text.endswith(suffix)
        middle = one.text[len(prompt) : len(one.text) - len(suffix)]
        assert middle.strip()
        if prompt == "The king":
            assert middle[0] == " " or not middle[0].isalnum()


def test_a_suffix_conditions_what_is_generated():
    engine = trained().engine
    found = [
        [*trace_task(engine, Task(prompt="the king", suffix=suffix, max_new_tokens=1), requested(), 0, 5)][-1].traced[2]
        for suffix in (" a river .", " today .")
    ]
    assert found[0].alternatives != found[1].alternatives


def test_a_given_text_may_contain_forbidden_words_and_the_generated_part_may_not():
    engine = trained().engine
    task = Task(prompt="the king", suffix=" the river .", max_new_tokens=2, forbid=("river", "king"), seed=0)
    [found] = generate(engine, task, requested())
    *_, state = trace_task(engine, task, requested())
    assert (state.text, state.attempt) == (found.text, 0)
    given = {"before": len("the king"), "after": len(" the river .")}
    assert not has_word("the king a the river .", "river", **given)
    assert has_word("the king a river the river .", "river", **given)
    assert has_word("the king sat river .", "sat river", before=8, after=6)  # it reaches into what is given


def test_a_suffix_needs_a_model_on_masks():
    for kind, message in (("decoder", "does not generate from"), ("vectors", "does not generate from")):
        with pytest.raises(ValueError, match=message):
            next(generate(model_of(kind).engine, Task(prompt="a", suffix="b", max_new_tokens=2), requested()))
    with pytest.raises(ValueError, match="goes only with a prompt"):
        Task(rewrite="a", suffix="b")


def test_random_numbers_do_not_depend_on_the_trace():
    engine = trained().engine
    torch.manual_seed(1)
    task = Task(prompt="the king", max_new_tokens=5, seed=3)
    assert [*trace_task(engine, task, requested())][-1].text == [*trace_task(engine, task, requested(), 0, 5)][-1].text
