"""Deltas of a text that forms: they never take back what they gave, and concatenate to the whole."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import bundled, plain_roberta, trained

from diffusionbert.inference.tasks import Task
from diffusionbert.inference.trace import TracedState, TracedToken, traceable
from diffusionbert.model import load, sampling_request
from diffusionbert.serve.answers import Deltas, Prompt, completed

REQUEST = sampling_request(None, 8, 1.0, 30, None, None)


def forming(engine, prompt: Prompt, ids: list[int], chance: random.Random):
    """The states of a text whose tokens appear in a random order."""
    sequence = traceable(engine, prompt.task, REQUEST)
    given = [token != engine.vocabulary.mask_id for token in sequence.text.tokens]
    before, mask_id = given.index(False) - sequence.text.own[0], engine.vocabulary.mask_id
    now = list(sequence.text.tokens)
    order = [*range(len(ids))]
    chance.shuffle(order)
    for step in range(len(ids) + 1):
        for index in order[step - 1 : step] if step else []:
            now[sequence.text.own[before + index]] = ids[index]
        traced = tuple(
            TracedToken(None if now[position] == mask_id else now[position], None, given[position])
            for position in sequence.text.own
        )
        yield TracedState(sequence, step, 0.0, step, torch.tensor(now), traced, False)
    yield TracedState(
        sequence, step, 0.0, step, torch.tensor(now), traced, True
    )  # a sampler may end with an empty step


@pytest.mark.parametrize("kind", ["trained", "bundled", "roberta"])
@pytest.mark.parametrize("stop", [(), ("a",), (" th", "ing")])
def test_deltas_only_grow_and_end_as_the_whole_text(kind, stop):
    engine = {"trained": trained, "bundled": bundled, "roberta": lambda: load(plain_roberta(), device="cpu")}[
        kind
    ]().engine
    vocabulary, chance = engine.vocabulary, random.Random(0)
    # Punctuation, quotation marks and numbers are where white space depends on what follows.
    marks = [
        token for mark in ('"', "'", ".", ",", "(", ")", "$", "5", "-", "i", "s") for token in vocabulary.own([mark])[0]
    ]
    others = vocabulary.allowed.nonzero()[:, 0].tolist()
    others.remove(vocabulary.unk_id) if vocabulary.unk_id in others else None
    for number in range(25):
        ids = [chance.choice(marks if chance.random() < 0.4 else others) for _ in range(8)]
        task = Task(
            prompt=chance.choice(["", "the king", 'he said "', "the "]),
            suffix=chance.choice(["", "", " river .", "ing a thing"]),
            max_new_tokens=8,
            capitalize=True,
        )
        prompt = Prompt(task, 0, stop)
        deltas, given = Deltas(vocabulary, prompt), ""
        for state in forming(engine, prompt, ids, chance):
            text = deltas.update(state).text
            assert text.startswith(given), (number, ids)
            given = text
        whole = completed(prompt, state.text)
        first = min((whole.find(one) for one in stop if one in whole), default=len(whole))
        assert given == whole[:first]
        assert deltas.is_stopped == (first < len(whole))


def test_nothing_is_final_with_forbidden_words_or_a_sampler_that_masks_again():
    engine, chance = trained().engine, random.Random(0)
    ids = engine.vocabulary.own(["saw a river today ."])[0]
    prompt = Prompt(Task(prompt="the king", max_new_tokens=len(ids), forbid=("queen",)), 0, ())
    deltas = Deltas(engine.vocabulary, prompt)
    *states, last = forming(engine, prompt, ids, chance)
    assert all(not deltas.update(state).text for state in states)
    assert deltas.update(last).text == " saw a river today."
