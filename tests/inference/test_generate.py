"""Generation: prompts, lengths, constraints, rewriting and sources, for every kind of model and every sampler."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from drawing import requested
from tiny_models import (
    EXPERIMENTS,
    MAX_LENGTH,
    model_of,
    plain_bert,
    plain_roberta,
    toy_sentences,
    trained,
)
from torch import Tensor, nn

from diffusionbert.data.canvas import batch_of
from diffusionbert.inference import engine as engine_module
from diffusionbert.inference import generate as generate_module
from diffusionbert.inference import tasks
from diffusionbert.inference.generate import generate, generate_one, stream
from diffusionbert.inference.infill import fill
from diffusionbert.inference.tasks import Task
from diffusionbert.model import Model, load
from diffusionbert.samplers import SamplingRequest
from diffusionbert.samplers.base import sample

SENTENCE = "the old king saw the city of paris today ."
SPECIAL = re.compile(r"\[(MASK|UNK|PAD|CLS|SEP)\]|<(mask|unk|pad|s|/s)>")
FEW = requested(steps=6)


@pytest.fixture(scope="module")
def model() -> Model:
    return trained()


def texts(model: Model, task: Task, request: SamplingRequest = FEW) -> list[str]:
    return [generated.text for generated in generate(model.engine, task, request)]


def has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


NEEDS_MASKS = {
    *("confidence", "margin", "entropy", "mask-predict", "remasking", "remasking-rescale", "gibbs"),
    "gibbs-left-to-right",
}


OTHER_METHODS = {"refinement", "left-to-right", "gaussian-ancestral"}
"""Samplers of models that do not generate from `[MASK]`."""


MASKED_SAMPLERS = [None, "exact", "ancestral", "renoising", *sorted(NEEDS_MASKS)]


OWN_SAMPLERS = {"unrolled": "refinement", "vectors": "gaussian-ancestral", "decoder": "left-to-right"}
"""Of models that do not generate from `[MASK]`."""


REJECTED = {
    "uniform": NEEDS_MASKS,
    "uniform-layers": NEEDS_MASKS,
    "spindle-sentence": {"remasking", "remasking-rescale"},
    "spindle-paper": {"remasking", "remasking-rescale"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*EXPERIMENTS} - {*OWN_SAMPLERS}))
def test_every_model_generates_with_every_sampler_or_rejects_it(kind):
    model = model_of(kind)
    tasks = [Task(2, length=7, prompt="the king", include=("river",), forbid=("queen",)), Task(2, rewrite=SENTENCE)]
    for number, sampler in enumerate([*MASKED_SAMPLERS, *sorted(OTHER_METHODS), "exact"]):
        task = tasks[number % 2]  # alternately; `exact` gets both
        request = requested(sampler, steps=4, top_k=20)
        if sampler in REJECTED.get(kind, set()) | OTHER_METHODS:
            with pytest.raises(ValueError, match=r"MASK|sentence|is for a model"):
                texts(model, task, request)
            continue
        generated = list(generate(model.engine, task, request))
        assert [each.length for each in generated] == [10 if task.rewrite else 7] * 2
        assert all(each.steps == 4 and 0 < each.calls <= 4 for each in generated)
        assert not any(SPECIAL.search(each.text) for each in generated)
        for each in generated:
            assert all(has_word(each.text, word) for word in task.include), each
            assert not any(has_word(each.text, word) for word in task.forbid), each
            assert each.text.startswith(task.prompt), each


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "own"), OWN_SAMPLERS.items())
def test_models_without_masks_generate_with_their_own_sampler_only(kind, own):
    model = model_of(kind)
    task = Task(3, length=7, prompt="the king", seed=4)
    usual = texts(model, task, requested(steps=4, top_k=20))
    assert usual == texts(model, task, requested(own, steps=4, top_k=20))
    assert all(text.startswith("the king") and not SPECIAL.search(text) for text in usual)
    assert usual != texts(model, replace(task, seed=5), requested(steps=4, top_k=20))
    others = {*MASKED_SAMPLERS, *OTHER_METHODS} - {None, "exact", own} - ({"ancestral"} if kind == "vectors" else set())
    for sampler in others:
        with pytest.raises(ValueError, match=r"the sampler '.*' (needs|is for) a .*, which this is not; leave it out"):
            texts(model, task, requested(sampler, steps=4))
    with pytest.raises(ValueError, match="'blocks' needs a model whose noise is"):
        texts(model, task, requested(steps=4, block=2))
    with pytest.raises(ValueError, match="rewrite"):
        texts(model, Task(2, rewrite=SENTENCE), requested(steps=4))


@pytest.mark.parametrize("kind", ["vectors", "decoder"])
def test_include_and_forbid_need_a_masked_model(kind):
    for task in (Task(1, length=7, include=("river",)), Task(1, length=7, forbid=("queen",))):
        with pytest.raises(ValueError, match="`include` and `forbid` need a masked language model"):
            texts(model_of(kind), task, requested(steps=4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "spindle", "layers", "spindle-layers", "masking"])
def test_the_network_is_called_as_rarely_as_the_model_allows(kind):
    [generated] = generate(model_of(kind).engine, Task(length=9), requested(steps=100))
    assert generated.calls <= (100 if kind == "spindle-layers" else 9)
    assert generated.calls > (9 if kind == "spindle-layers" else 3)


class Recording(nn.Module):
    """A network that records the times it is called with."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network, self.times = network, []
        self.allowed, self.max_length = network.allowed, network.max_length

    def forward(self, tokens: Tensor, attention_mask: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        self.times += t.tolist()
        return self.network(tokens, attention_mask, t, targets)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", MASKED_SAMPLERS)
def test_sampling_starts_at_the_time_of_the_masked_fraction(sampler, monkeypatch):
    model = model_of("layers")
    recording = Recording(model.engine.network)
    monkeypatch.setattr(model.engine, "network", recording)
    texts(model, Task(2, rewrite=SENTENCE, strength=0.3), requested(sampler, steps=10))
    assert max(recording.times) <= 0.3 + 1e-6
    recording.times.clear()
    texts(model, Task(2, length=10), requested(sampler, steps=10))
    assert max(recording.times) > 0.6


def test_lengths_are_fixed_or_drawn_from_a_range_or_the_corpus(model):
    assert [each.length for each in generate(model.engine, Task(3, length=5), FEW)] == [5, 5, 5]
    ranged = {each.length for each in generate(model.engine, Task(60, length=(4, 7)), requested(steps=1))}
    assert ranged == {4, 5, 6, 7}
    known = {len(sentence.split()) for sentence in toy_sentences(400)}
    drawn = {each.length for each in generate(model.engine, Task(60), requested(steps=1))}
    assert drawn <= known
    assert len(drawn) > 2


def test_drawn_lengths_exceed_the_prompt(model):
    prompt = "my brother saw the city of"
    for task in (Task(30, prompt=prompt), Task(30, length=(2, 8), prompt=prompt)):
        assert all(each.length > 6 for each in generate(model.engine, task, requested(steps=1)))


def test_a_prompt_is_kept_character_by_character(model):
    for prompt in (
        "The OLD  king",
        "It's 🙂, e.g. a U.S. king",
        "[CLS] said [SEP]",
        "the king's",
        "the king -",
        "it '",
    ):
        for text in texts(model, Task(4, length=22, prompt=prompt)):
            assert text.startswith(prompt)


def test_no_word_piece_continues_the_prompt():
    """At a high temperature a barely trained model would continue it to `kingdom` or worse."""
    for text in texts(model_of("linear"), Task(64, length=6, prompt="the king"), requested(temperature=3.0)):
        assert has_word(text[: len("the king") + 1], "king"), text


def test_after_a_prompt_the_most_certain_position_comes_first(model):
    def given(request: SamplingRequest, **task) -> list[str]:
        return texts(model, Task(4, length=12, **task), request)

    for task in ({"prompt": "the king"}, {"suffix": "today ."}):
        assert given(requested(steps=128), **task) == given(requested("entropy", steps=128), **task)
        assert given(requested(steps=128), **task) != given(requested("exact", steps=128), **task)
        # With fewer steps than positions, several would be unmasked at once as if they were independent.
        assert given(requested(steps=4), **task) == given(requested("exact", steps=4), **task)
    assert given(requested(steps=128)) == given(requested("exact", steps=128))
    asked = model.stream("the king", length=12, seed=0), model.stream("the king", length=12, sampler="entropy", seed=0)
    assert [state.text for state in asked[0]] == [state.text for state in asked[1]]


@pytest.mark.parametrize("kind", ["spindle", "layers", "uniform", "decoder", "unrolled"])
def test_where_another_order_would_change_the_model_its_own_sampler_continues(kind):
    engine = model_of(kind).engine
    assert engine.default_sampler(10_000, continues=True) == engine.config.objective.default_sampler()


def test_a_space_after_a_prompt_is_not_doubled(model):
    for text in texts(model, Task(4, length=6, prompt="the king ")):
        assert text.startswith("the king ")
        assert "  " not in text


@pytest.mark.slow
@pytest.mark.parametrize("sampler", MASKED_SAMPLERS)
def test_given_tokens_never_change(model, sampler):
    prompted = list(stream(model.engine, Task(length=9, prompt="the old king"), requested(sampler, steps=7)))
    assert {state.pieces[:3] for state in prompted} == {("the", "old", "king")}
    regenerated = list(stream(model.engine, Task(rewrite=SENTENCE, strength=0.3), requested(sampler, steps=7)))
    frozen = [position for position, piece in enumerate(regenerated[0].pieces) if piece is not None]
    assert len(frozen) == 7
    for state in regenerated:
        assert [state.pieces[position] for position in frozen] == [SENTENCE.split()[position] for position in frozen]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", MASKED_SAMPLERS)
def test_included_words_occur_and_forbidden_words_do_not(model, sampler):
    task = Task(12, length=12, include=("river", "city of paris", "kingdom"), forbid=("the", "queen", "white castle"))
    for text in texts(model, task, requested(sampler, steps=5, temperature=2.0)):
        assert all(has_word(text, word) for word in task.include), text
        assert not any(has_word(text, word) for word in task.forbid), text


@pytest.mark.slow
def test_a_word_is_forbidden_in_every_tokenization():
    """At a high temperature, a barely trained model also generates `k` `##ing`, and `##a` as the first token."""
    forbidden = ("king", "river", "the", "art", "an", "a")
    for seed in range(3):
        task = Task(64, length=12, forbid=forbidden, seed=seed)
        for text in texts(model_of("linear"), task, requested(steps=8, temperature=3.0)):
            assert not any(has_word(text, word) for word in forbidden), text


def test_has_word_ignores_words_inside_the_given_text():
    given = len("the king")
    assert tasks.has_word("the king saw", "King")
    assert not tasks.has_word("the king saw", "king", given)
    assert not tasks.has_word("the king saw", "kin")
    assert tasks.has_word("the king saw", "king saw", given)
    assert tasks.has_word("the king saw the king .", "the king", given)
    assert tasks.has_word("a a a", "a a", before=3)  # once given, and once more across its end


def test_a_stream_starts_over_where_a_text_is_generated_again(model, monkeypatch):
    task, tries = Task(length=6, forbid=("king",), seed=0), []
    monkeypatch.setattr(Task, "has_forbidden", lambda self, text: len(tries.append(text) or tries) < 3)
    states = list(stream(model.engine, task, FEW))
    assert [state.time for state in states].count(1.0) == 3
    tries.clear()
    assert texts(model, task) == [states[-1].text]
    monkeypatch.setattr(Task, "has_forbidden", lambda self, text: True)
    for generated in (lambda: texts(model, task), lambda: list(stream(model.engine, task, FEW))):
        with pytest.raises(ValueError, match="no text without king in 20 attempts; forbid fewer words"):
            generated()


def test_one_of_several_texts_is_generated_alone(model):
    long = " ".join([SENTENCE] * 6)
    for task in (Task(3, rewrite=long, seed=1), Task(3, prompt="the king", length=8)):
        assert generate_one(model.engine, task, FEW, 2) == list(generate(model.engine, task, FEW))[2]


def test_rewriting_masks_forbidden_words(model):
    for seed in range(6):
        *_, last = stream(model.engine, Task(rewrite=SENTENCE, strength=0.1, forbid=("paris",), seed=seed), FEW)
        same = [new == old for new, old in zip(last.pieces, SENTENCE.split(), strict=True)]
        assert not same[SENTENCE.split().index("paris")]
        assert sum(same) >= 8  # that word and one more were masked


def test_rewriting_masks_forbidden_words_at_every_position():
    """Where a space is part of a token, the first word of a text is another token."""
    model = load(plain_roberta())
    for seed in range(4):
        task = Task(
            2, rewrite="king saw a king .", strength=0.1, forbid=("king", "antidisestablishment" * 3), seed=seed
        )
        assert not any(has_word(text, "king") for text in texts(model, task))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", MASKED_SAMPLERS)
def test_the_same_seed_gives_the_same_text(model, sampler):
    request = requested(sampler, steps=8)
    first, again, other = (texts(model, Task(4, length=9, seed=seed), request) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len(set(first)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", MASKED_SAMPLERS)
def test_texts_do_not_depend_on_the_batch(model, sampler, monkeypatch):
    request = requested(sampler, steps=8)
    five = texts(model, Task(5, length=9, include=("river",), forbid=("king",)), request)
    assert texts(model, Task(3, length=9, include=("river",), forbid=("king",)), request) == five[:3]
    monkeypatch.setattr(engine_module, "SEQUENCES_AT_ONCE", {"cpu": 2})
    assert texts(model, Task(5, length=9, include=("river",), forbid=("king",)), request) == five


def test_batches_shrink_with_length_and_vocabulary(model, monkeypatch):
    assert model.engine.sequences_at_once(20) == engine_module.SEQUENCES_AT_ONCE["cpu"]
    num_tokens = len(model.engine.statistics.allowed)
    monkeypatch.setattr(engine_module, "LOGITS_AT_ONCE", 60 * num_tokens)
    assert [model.engine.sequences_at_once(positions) for positions in (5, 20, 100)] == [12, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["exact", "ancestral", "remasking", "renoising"])
def test_a_low_temperature_does_not_delay_unmasking(model, sampler):
    """The failure of the original release: the temperature also sharpened "stay masked"."""
    fractions: dict[float, list[float]] = {0.75: [], 0.5: [], 0.25: []}
    for seed in range(5):
        states = list(stream(model.engine, Task(length=20, seed=seed), requested(sampler, steps=16, temperature=0.1)))
        for time, found in fractions.items():
            *_, latest = (state for state in states if state.time >= time - 1e-9)
            found.append(latest.pieces.count(None) / 20)
    for time, found in fractions.items():
        assert abs(sum(found) / len(found) - time) < 0.15, (time, found)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", MASKED_SAMPLERS)
def test_blocks_generate_more_than_the_model_reads(model, sampler):
    generated = list(
        generate(model.engine, Task(2, length=50, prompt="the king"), requested(sampler, steps=4, block=6))
    )
    assert [each.length for each in generated] == [50, 50]
    assert all(each.text.startswith("the king") and not SPECIAL.search(each.text) for each in generated)
    assert all(each.calls <= 8 * 4 for each in generated)


@pytest.mark.parametrize("number", [2, 9, 12, 17, 30])
def test_a_block_never_continues_the_last_word_of_a_prompt_however_long_it_is(model, number):
    """The network is sure of a continuation token; the windows of blocks move with the text."""
    engine, request = model.engine, requested(steps=2, block=4)
    continuation = engine.vocabulary.continuation.nonzero()[0, 0]
    plan = generate_module.TaskPlan(engine, Task(prompt="river " * number, length=number + 30), request)

    class Sure(torch.nn.Module):
        def forward(self, tokens, attention_mask, t, targets):
            log_f = torch.full((int(targets.sum()), len(engine.statistics.allowed)), -20.0)
            log_f[:, continuation] = -1e-6
            return log_f

    constrained = plan._network
    constrained.network = Sure()
    run = plan.run(plan.canvas, 0)
    *_, last = sample(run.sampler, run.context, run.network, run.canvas, 0)
    generated = last.tokens[0, plan.text.end :]
    assert int(generated[0]) != int(continuation)
    assert (generated[1:-1] == continuation).all()  # all others may continue a word


def test_top_k_limits_the_tokens(model):
    assert texts(model, Task(4, length=9), requested(top_k=None)) != texts(model, Task(4, length=9), requested(top_k=1))
    greedy = requested("margin", steps=9, top_k=1)
    assert len(set(texts(model, Task(4, length=9), greedy))) == 1  # nothing is random


def test_stream_yields_every_state_from_all_masked_to_none(model):
    states = list(model.stream(length=8, steps=16, seed=1))
    assert (states[0].time, states[-1].time) == (1.0, 0.0)
    assert states[0].pieces == (None,) * 8
    assert states[0].text == " ".join(["[MASK]"] * 8)
    masked = [state.pieces.count(None) for state in states]
    assert masked == sorted(masked, reverse=True)
    assert masked[-1] == 0
    assert [state.calls for state in states] == list(range(len(states)))
    assert states[-1].text == model.generate(length=8, steps=16, seed=1)[0]
    assert all(state.text.count("[MASK]") == state.pieces.count(None) for state in states)
    for before, after in itertools.pairwise(states):
        kept = zip(before.pieces, after.pieces, strict=True)
        assert all(old in (None, new) for old, new in kept)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"number": 0}, "must be between 1 and 100000"),
        ({"number": -1}, "must be between 1 and 100000"),
        ({"number": 10**9}, "must be between 1 and 100000"),
        ({"include": ("king",), "forbid": ("King",)}, "king"),
        ({"include": ("king", "")}, "must not be empty, got ''"),
        ({"forbid": (" ",)}, "must not be empty, got ' '"),
        ({"rewrite": SENTENCE, "length": 4}, "a rewritten text keeps its own length"),
        ({"rewrite": SENTENCE, "prompt": "the"}, "a rewritten text keeps its own length"),
    ],
    ids=str,
)
def test_a_contradictory_task_is_rejected(task, message):
    with pytest.raises(ValueError, match=message):
        Task(**task)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"length": 0}, "`length` must be >= 1 token, got 0"),
        ({"length": MAX_LENGTH - 1}, f"{MAX_LENGTH - 1}.*block"),
        ({"length": (0, 3)}, "0-3"),
        ({"length": (5, 3)}, "5-3"),
        ({"length": (2, 3), "prompt": "the old king saw"}, "prompt"),
        ({"length": 3, "prompt": "the old king saw"}, "`length` must be >= 5 with a prompt of 4 tokens"),
        (
            {"prompt": "king " * 40},
            r"^the prompt '(king ){8}' has 40 tokens, which leaves nothing to generate: this model reads at most 22; "
            r"shorten it, or use `block=22`$",
        ),
        ({"prompt": "the [MASK]", "length": 5}, r"^a prompt must not contain \[MASK\], got 'the \[MASK\]'; use `fill`"),
        ({"rewrite": "the [BLANK] king"}, r"^a text to rewrite must not contain \[BLANK\], got"),
        ({"rewrite": "🙂 🍕"}, "^nothing to rewrite in '🙂 🍕'; the vocabulary knows none of its characters$"),
        ({"include": ("a", "an", "river", "sea"), "length": 3}, "4 words"),
        ({"include": ("🙂",), "length": 5}, "🙂"),
        ({"forbid": ("🙂",), "length": 5}, "🙂"),
        ({"include": ("old king",), "forbid": ("king",), "length": 5}, "'king'"),
        ({"rewrite": "", "length": None}, "nothing to rewrite"),
        ({"rewrite": SENTENCE, "strength": 0.0}, "strength"),
        ({"source": "the king"}, "not trained on pairs"),
        ({"prompt": "caf\udce9", "length": 5}, "UTF-8"),
    ],
    ids=str,
)
def test_impossible_tasks_are_rejected(model, task, message):
    with pytest.raises(ValueError, match=message):
        texts(model, Task(**task))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        ("spindle", None),
        ("uniform", None),
        ("layers", None),
        ("linear", "renoising"),
    ],
)
def test_rewritings_do_not_depend_on_the_batch(kind, sampler, monkeypatch):
    task = Task(32, rewrite=SENTENCE, strength=0.4, forbid=("paris", "king"), seed=3)
    other = model_of(kind)
    together = texts(other, task, requested(sampler, steps=6))
    monkeypatch.setattr(engine_module, "SEQUENCES_AT_ONCE", {"cpu": 1})
    assert texts(other, task, requested(sampler, steps=6)) == together


def test_an_impossible_length_is_rejected_before_memory_is_allocated(model, monkeypatch):
    created = []

    def recording(vocabulary, sequences):
        created.extend(map(len, sequences))
        return batch_of(vocabulary, sequences)

    monkeypatch.setattr(generate_module, "batch_of", recording)
    for length in (100_001, (1, 10**12)):
        with pytest.raises(ValueError, match=r"too many tokens, got .*, at most 100,000; ask for fewer"):
            Task(60, length)
    for task in (Task(60, 99_999), Task(60, (1, 100_000))):
        with pytest.raises(
            ValueError, match="tokens, but this model reads at most 22; ask for fewer, or use `block=22`"
        ):
            texts(model, task)
    assert not created


def test_the_suggested_block_generates_the_text(model):
    """The remedies of both messages."""
    for task in (Task(prompt="king " * 40), Task(length=50)):
        with pytest.raises(ValueError, match="or use `block=22`"):
            texts(model, task)
        [text] = texts(model, task, requested(steps=2, block=22))
        assert text.startswith(task.prompt)
        assert len(text) > len(task.prompt)
    with pytest.raises(ValueError, match=r"ask for fewer$"):
        texts(model, Task(length=50, include=("river",)))


@pytest.mark.parametrize("kind", ["decoder", "vectors", "uniform", "unrolled"])
def test_blocks_are_suggested_only_to_models_that_have_them(kind):
    other = model_of(kind)
    with pytest.raises(ValueError, match=r"23 tokens, but this model reads at most 22; ask for fewer$"):
        texts(other, Task(length=23))
    for block in (0, 4):
        with pytest.raises(ValueError, match="block"):
            texts(other, Task(length=5), requested(block=block))


def test_a_model_without_a_length_histogram_has_a_default_length():
    generated = list(generate(load(plain_bert()).engine, Task(2), FEW))
    assert [each.length for each in generated] == [24, 24]


def test_a_model_of_pairs_generates_from_a_source():
    model, task = model_of("pairs"), Task(2, source="the king saw a river today .")
    assert model.engine.paired
    generated = list(generate(model.engine, task, FEW))
    assert all(1 <= each.length <= 9 and not SPECIAL.search(each.text) for each in generated)
    prompted = texts(model, replace(task, prompt="Nobody", length=5))
    assert all(text.startswith("Nobody") for text in prompted)
    with pytest.raises(ValueError, match="pairs"):
        texts(model, Task(1, length=5))


def test_the_answer_depends_on_the_source():
    """The source is more than a prompt of the right length."""
    model = model_of("pairs")
    one, other = (
        texts(model, Task(8, source=source, length=6), requested(steps=6))
        for source in ("the king saw a river today .", "nobody painted the sea again .")
    )
    assert one != other


@pytest.mark.slow
def test_special_and_unknown_ids_are_never_generated():
    """Even if the network prefers [UNK], [MASK], [SEP] and an id that its tokenizer does not have."""
    model = load(plain_bert())
    tokenizer = model.engine.vocabulary.tokenizer
    preferred = [
        tokenizer.unk_token_id,
        tokenizer.mask_token_id,
        tokenizer.sep_token_id,
        model.engine.vocabulary.size + 1,
    ]
    with torch.no_grad():
        model.engine.network.backbone.cls.predictions.bias[preferred] += 50
    for sampler in MASKED_SAMPLERS:
        assert not any(map(SPECIAL.search, texts(model, Task(3, length=6), requested(sampler, steps=6))))
    for each in fill(model.engine, "The king [MASK] a [BLANK] .", 10, max_blank_tokens=2):
        assert not SPECIAL.search(each.text)
