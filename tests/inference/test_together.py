"""Several texts at once: shared forward passes, threads, and calls that are stopped half-way."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch
from drawing import requested
from tiny_models import model_of, trained

from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.inference import generate as generate_module
from diffusionbert.inference.generate import generate, generate_together
from diffusionbert.inference.tasks import Task, has_word
from diffusionbert.model import Model

SENTENCE = "The old King saw the city  of paris 🙂 today."
TASKS = [
    Task(2, length=9, prompt="The King", seed=1),
    Task(3, length=(4, 12), include=("river",), forbid=("the",), seed=2),
    Task(3, rewrite=SENTENCE, strength=0.4, forbid=("paris",), seed=3),
    Task(2, rewrite="nobody praised the artists, i say .", strength=0.6, seed=4, capitalize=True),
    Task(2, rewrite=f"{SENTENCE} " * 4, strength=0.3, seed=5),  # longer than the model reads
    Task(1, seed=5),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return trained()


def counted(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences of each forward pass from now on."""
    sizes: list[int] = []
    own = model.engine.network.forward

    def forward(tokens, *rest, **options):
        sizes.append(len(tokens))
        return own(tokens, *rest, **options)

    monkeypatch.setattr(model.engine.network, "forward", forward)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "spindle", "layers", "uniform", "decoder", "vectors", "unrolled"])
def test_tasks_have_the_same_texts_alone_and_together(kind):
    model = trained() if kind == "linear" else model_of(kind)
    masked = model.engine.config.objective.generates_on_masks
    tasks = TASKS if masked else [Task(2, length=9, prompt="The King", seed=1), Task(3, length=(4, 12), seed=2)]
    request = requested(steps=6)
    together = generate_together(model.engine, tasks, request)
    assert together == [list(generate(model.engine, task, request)) for task in tasks]
    assert generate_together(model.engine, [], request) == []


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["confidence", "ancestral", "mask-predict", "remasking", "gibbs"])
def test_every_sampler_shares_forward_passes(model, sampler):
    request = requested(sampler, steps=5)
    together = generate_together(model.engine, TASKS, request)
    assert together == [list(generate(model.engine, task, request)) for task in TASKS]


def test_texts_share_forward_passes(model, monkeypatch):
    sizes = counted(model, monkeypatch)
    texts = ["the king saw a river today .", "nobody met her sister .", "my brother painted the sea in winter ."]
    rewritten = model.rewrite(texts, 0.5, seed=0)
    together = len(sizes)
    assert max(sizes) == 3
    alone = [model.rewrite(text, 0.5, seed=0) for text in texts]
    assert rewritten == alone
    assert together < (len(sizes) - together) / 2
    sizes.clear()
    assert model.generate(["the king", "nobody"], length=8, seed=0)[1:] == model.generate("nobody", length=8, seed=0)
    assert max(sizes) == 2


def test_a_prompt_is_encoded_once(model, monkeypatch):
    calls = []
    own = Vocabulary.encode_spans

    def encode_spans(self, text, source=None):
        calls.append(text)
        return own(self, text, source)

    monkeypatch.setattr(Vocabulary, "encode_spans", encode_spans)
    monkeypatch.setattr(Vocabulary, "encode", lambda *_, **__: pytest.fail("encoded again"))
    texts = [one.text for one in generate(model.engine, Task(40, 9, "The old King", seed=0), requested(steps=3))]
    assert len(texts) == 40
    assert calls == ["The old King"]


def test_a_long_text_is_rewritten_in_windows_that_cover_it(model, monkeypatch):
    text = "The old  king saw 🍕 the city\nof paris today . " * 5
    plan = generate_module.TaskPlan(model.engine, Task(3, rewrite=text, strength=0.5), requested(steps=4))
    own, most = plan.text.own, model.engine.max_positions
    assert len(own) > 2 * most
    generated = torch.cat([window.generated for window in plan.windows])
    assert generated.tolist() == list(own)  # each position in one window, from left to right
    for window in plan.windows:
        assert len(window.positions) == most
        inside = window.positions[1:-1]
        assert inside.tolist() == list(range(int(inside[0]), int(inside[0]) + most - 2))
        before, after = int(window.generated[0] - inside[0]), int(inside[-1] - window.generated[-1])
        assert abs(before - after) <= 1 or inside[0] == own[0] or inside[-1] == own[-1]

    seen = []
    own_of = generate_module._Window.of

    def of(self, canvas, tokens, mask_id):
        shown = own_of(self, canvas, tokens, mask_id)
        editable = canvas.editable[:, self.positions]
        is_later = self.positions > self.generated[-1]
        masked = shown.tokens == mask_id
        assert bool((masked == editable & (self.is_generated | is_later)).all())  # earlier ones are generated
        seen.append(self.generated)
        return shown

    monkeypatch.setattr(generate_module._Window, "of", of)
    found = [one.text for one in generate(model.engine, plan.task, plan.request)]
    assert len(seen) == len(plan.windows)
    assert len(set(found)) == 3
    for one in found:
        assert "[MASK]" not in one
        assert re.findall(r"[🍕\n]|  ", one) == re.findall(r"[🍕\n]|  ", text)
        kept = sum(now == before for now, before in zip(one.split(), text.split(), strict=False))
        assert kept >= len(text.split()) // 4
    assert not any(has_word(one, "king") for one in model.rewrite([text, SENTENCE], 0.3, forbid=["king"]))
    assert (
        plan.windows != [None] == generate_module.TaskPlan(model.engine, Task(rewrite=SENTENCE), plan.request).windows
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uniform", "layers", "spindle"])
def test_long_texts_are_rewritten_by_other_models(kind):
    text = f"{SENTENCE} " * 4
    one, two = model_of(kind).rewrite(text, 0.5, num_return_sequences=2, steps=6, seed=0)
    assert one == model_of(kind).rewrite(text, 0.5, steps=6, seed=0) != two
    assert "[MASK]" not in one


@pytest.mark.slow
@pytest.mark.parametrize("text", ["Die Straße in München ist schön 🍕 .", "The  KING\tsaw\nParis…", SENTENCE])
def test_kept_text_is_copied(model, text):
    """Case, umlauts, emoji and white space of kept text, whatever else is generated."""
    for strength in (0.2, 0.6, 1.0):
        for one in generate(model.engine, Task(4, rewrite=text, strength=strength), requested(steps=4)):
            assert "[UNK]" not in one.text
            assert re.findall(r"[🍕🙂\n\t]|  ", one.text) == re.findall(r"[🍕🙂\n\t]|  ", text)
            assert all(part in one.text for part in one.kept)
    changed = [
        one.text.split() for one in generate(model.engine, Task(4, rewrite=text, strength=0.2), requested(steps=4))
    ]
    for words in changed:
        assert sum(word in words for word in text.split()) >= len(text.split()) // 2


def test_unknown_characters_are_kept_and_said(model, caplog):
    [one] = generate(model.engine, Task(rewrite="the 🍕 king saw 我 .", strength=1.0), requested(steps=4))
    assert one.kept == ("🍕", "我")
    assert "🍕" in one.text
    assert "kept unchanged, because the vocabulary does not know it: '🍕', '我'" in caplog.text


def test_generated_text_is_capitalized_unless_told_otherwise(model):
    usual, plain = (model.generate(length=9, num_return_sequences=4, seed=0, capitalize=flag) for flag in (True, False))
    assert plain == [text.lower() for text in usual] != usual
    assert all(text[0].isupper() for text in usual if text[0].isalpha())
    [*_, last] = model.stream(length=9, seed=0)
    assert last.text == usual[0]
    [raw] = generate(model.engine, Task(length=9, seed=0), requested(steps=128, top_p=0.5))
    assert raw.text == plain[0]


@pytest.mark.slow
def test_eight_threads_get_what_one_gets():
    model = model_of("layers")

    def work(seed: int) -> list[object]:
        return [
            model.generate(["the king", "Nobody"], length=9, steps=6, include=["river"], seed=seed),
            model.rewrite([SENTENCE, "the king ."], 0.5, steps=6, seed=seed),
            model.fill(["the [MASK] saw [BLANK] .", "[MASK] met"], max_blank_tokens=2, seed=seed),
            [state.text for state in model.stream("the", length=6, steps=4, seed=seed)],
        ]

    expected = [work(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit])
def test_a_stopped_call_leaves_the_model_usable(model, monkeypatch, stop):
    def work() -> list[object]:
        return [
            model.generate("the king", length=9, seed=0),
            model.rewrite(SENTENCE, seed=0),
            model.fill("the [MASK] ."),
        ]

    expected = work()
    states = model.stream(length=12, seed=0)
    assert len(list(islice(states, 3))) == 3
    states.close()
    texts = generate(model.engine, Task(70, 5), requested(steps=2))
    next(texts)
    texts.close()
    own, calls = model.engine.network.forward, []

    def forward(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise stop
        return own(*arguments, **options)

    for call in (
        lambda: model.generate(length=12),
        lambda: model.rewrite(SENTENCE, 0.9),
        lambda: model.fill("[MASK] [MASK]"),
    ):
        calls.clear()
        with monkeypatch.context() as context:
            context.setattr(model.engine.network, "forward", forward)
            with pytest.raises(stop):
                call()
    assert work() == expected
