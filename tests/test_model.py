"""The model in Python: whatever it was trained by, it writes, fills and scores, and keeps what it was given."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from drawing import requested
from safetensors.torch import load_file, save
from tiny_models import (
    EXPERIMENTS,
    MAX_LENGTH,
    bundled,
    config_of,
    damaged,
    folder,
    model_of,
    plain_bert,
    plain_roberta,
    run_of,
    toy_sentences,
    trained,
    trained_run,
)
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, AutoTokenizer

import diffusionbert
from diffusionbert import model as model_module
from diffusionbert.data.canvas import blank
from diffusionbert.inference import tasks
from diffusionbert.inference.tasks import Task
from diffusionbert.model import Model, load
from diffusionbert.objectives.base import Likelihood
from diffusionbert.samplers import SamplingRequest
from diffusionbert.storage.component import Component
from diffusionbert.training.model_folder import BUNDLED
from diffusionbert.training.run import train

SENTENCE = "the old king saw the city of paris today ."
SPECIAL = re.compile(r"\[(MASK|UNK|PAD|CLS|SEP)\]|<(mask|unk|pad|s|/s)>")
FEW = requested(steps=6)


@pytest.fixture(scope="module")
def model() -> Model:
    return trained()


def texts(model: Model, task: Task, sampling: SamplingRequest = FEW) -> list[str]:
    return [written.text for written in model.write(task, sampling)]


def has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


# ---- opening --------------------------------------------------------------------------------------------------------


def test_the_bundled_model_opens_everywhere_and_is_small():
    model = bundled()
    assert model.name == "bundled"
    assert sum(parameter.numel() for parameter in model.network.parameters()) <= 20_000_000
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) <= 40_000_000
    assert model.length_histogram is not None
    assert model.max_length == 126
    assert model.training_text is not None  # so that `evaluate` can tell whether it knows a text
    assert not list(BUNDLED.glob("*.bin"))


def test_transformers_opens_the_bundled_folder_and_says_the_same():
    text = "the [MASK] of france is [MASK] ."
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    theirs = AutoModelForMaskedLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    inputs = tokenizer(text, return_tensors="pt")
    model = bundled()
    assert inputs["input_ids"].tolist() == model.vocabulary.encode([text], marked=True)
    targets = inputs["input_ids"] == tokenizer.mask_token_id
    with torch.no_grad():
        logits = theirs(**inputs).logits[targets]
        ours = model.network(inputs["input_ids"], torch.ones_like(targets), torch.ones(1).double(), targets)
    allowed = model.network.allowed
    assert torch.allclose(logits[:, allowed].log_softmax(-1), ours[:, allowed], atol=1e-4)


OFFLINE = """
import socket

def refused(*_):
    raise AssertionError("the network was asked")

socket.socket.connect = socket.getaddrinfo = refused
import diffusionbert
print(diffusionbert.load().generate(1, length=3, steps=2)[0])
"""


def test_the_bundled_model_never_asks_the_network():
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=online, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_run_and_its_model_folder_are_the_same_model(model):
    again = load(str(trained_run() / "model"))
    assert again.generate(2, length=6) == model.generate(2, length=6)
    assert again.max_length == model.max_length == MAX_LENGTH - 2


def test_what_is_public_is_opened_on_demand():
    assert diffusionbert.load is load
    assert diffusionbert.Model is Model
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = diffusionbert.nothing_of_the_kind


def test_a_plain_model_reads_what_its_positions_allow():
    assert load(plain_bert()).max_length == 30
    assert load(plain_roberta()).max_length == 30  # two positions belong to the padding


def test_a_run_without_a_model_is_told_so():
    unfinished = folder() / "unfinished"
    shutil.copytree(trained_run(), unfinished, ignore=shutil.ignore_patterns("model"))
    with pytest.raises(ValueError, match="is a run without a model yet"):
        load(unfinished)


@pytest.mark.parametrize("name", ["no/such-model", "no such name", "nothing", "x" * 300, "a/b/c/d"])
def test_a_name_that_leads_nowhere_is_refused(name):
    with pytest.raises(ValueError, match="no model at"):
        load(name)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("the king")
    with pytest.raises(ValueError, match=r"no model at .*notes\.txt"):
        load(tmp_path / "notes.txt")


COUNTS = {"counts": torch.ones(5, dtype=torch.long), "length_histogram": torch.ones(3, dtype=torch.long)}


@pytest.mark.parametrize(
    "change",
    [
        {"diffusionbert.json": b"{"},
        {"diffusionbert.json": b"\xff\xfe"},
        {"diffusionbert.json": b"[]"},
        {"diffusionbert.json": b"{}"},
        {"diffusionbert.json": b'{"experiment": null}'},
        {"diffusionbert.json": b'{"experiment": {"kind": "Linear"}}'},
        {"diffusionbert.json": b'{"experiment": {"kind": "Experiment"}}'},
        {"token_counts.safetensors": None},
        {"token_counts.safetensors": b"not tensors"},
        {"token_counts.safetensors": save({"other": torch.ones(3)})},
        {"token_counts.safetensors": save(COUNTS)},
        {"model.safetensors": None},
        {"model.safetensors": b""},
        {"model.safetensors": None, "pytorch_model.bin": b"a pickle"},
        {"config.json": None},
        {"config.json": b"{"},
        {"config.json": b'{"model_type": "gpt2"}'},
        {"tokenizer.json": None, "tokenizer_config.json": None},
        {"tokenizer.json": b"{"},
    ],
    ids=lambda change: " ".join(f"{name}={content!r:.40}" for name, content in change.items()),
)
def test_a_damaged_folder_is_refused_by_name(change):
    path = damaged(trained_run() / "model", "damaged", change)
    with pytest.raises(ValueError, match=r".") as caught:
        load(path).generate(1, length=3)
    assert "\n" not in str(caught.value)


def test_a_network_that_wants_the_time_does_not_open_without_its_embeddings():
    path = damaged(run_of("layers") / "model", "timeless", {"beside.safetensors": None})
    with pytest.raises(ValueError, match="beside"):
        load(path)


def test_word_vectors_and_learned_rates_must_be_there_and_fit():
    """Random ones in their place would be another model, and nobody would be told."""
    path = damaged(run_of("vectors") / "model", "wordless", {"beside.safetensors": None})
    with pytest.raises(ValueError, match=r"word vectors.*beside.safetensors is missing"):
        load(path)
    source = run_of("learned") / "model"
    frequencies = load_file(source / "token_counts.safetensors")
    exponents = frequencies.pop("exponents")
    for name, change in (
        ("rateless", {}),
        ("too-few-rates", {"exponents": exponents[:-1]}),
        ("too-few-counts", {"exponents": exponents, "counts": frequencies["counts"][:-1]}),
    ):
        path = damaged(source, name, {"token_counts.safetensors": save(frequencies | change)})
        with pytest.raises(ValueError, match=r"token_counts\.safetensors") as caught:
            load(path)
        assert "\n" not in str(caught.value)


def test_the_time_embeddings_are_those_of_the_folder():
    source = run_of("layers") / "model"
    weights = load_file(source / "beside.safetensors")
    other = save({name: tensor + 0.5 for name, tensor in weights.items()})
    ours, same, others = (
        load(damaged(source, name, change)).score([SENTENCE], precision=1.0)[0].nats
        for name, change in (
            ("as-it-was", {}),
            ("untouched", {}),
            ("other-times", {"beside.safetensors": other}),
        )
    )
    assert ours == same == model_of("layers").score([SENTENCE], precision=1.0)[0].nats
    assert abs(ours - others) > 1e-3


# ---- every kind of model --------------------------------------------------------------------------------------------

NEEDS_MASKS = {
    *("confidence", "margin", "entropy", "mask-predict", "remasking", "remasking-rescale", "gibbs"),
    "gibbs-left-to-right",
}
OTHER_METHODS = {"refinement", "left-to-right", "gaussian-ancestral"}
"""Samplers of models that are not masked; the first test below checks that others reject them."""
OF_MASKS = [None, "exact", "ancestral", "renoising", *sorted(NEEDS_MASKS)]
OWN_WAYS = {"unrolled": "refinement", "vectors": "gaussian-ancestral", "decoder": "left-to-right"}
"""Of models whose blank is not `[MASK]`."""
REFUSED = {
    "uniform": NEEDS_MASKS,
    "uniform-layers": NEEDS_MASKS,
    "spindle-sentence": {"remasking", "remasking-rescale"},
    "spindle-paper": {"remasking", "remasking-rescale"},
}


@pytest.mark.parametrize("kind", sorted({*EXPERIMENTS} - {*OWN_WAYS}))
def test_every_kind_of_model_writes_with_every_sampler_or_says_why_not(kind):
    model = model_of(kind)
    tasks = [Task(2, length=7, prompt="the king", include=("river",), forbid=("queen",)), Task(2, rewrite=SENTENCE)]
    for number, algorithm in enumerate([*OF_MASKS, *sorted(OTHER_METHODS), "exact"]):
        task = tasks[number % 2]  # in turn; both for the usual one
        sampling = requested(algorithm, steps=4, top_k=20)
        if algorithm in REFUSED.get(kind, set()) | OTHER_METHODS:
            with pytest.raises(ValueError, match=r"MASK|sentence|is for a model"):
                texts(model, task, sampling)
            continue
        written = list(model.write(task, sampling))
        assert [each.length for each in written] == [10 if task.rewrite else 7] * 2
        assert all(each.steps == 4 and 0 < each.calls <= 4 for each in written)
        assert not any(SPECIAL.search(each.text) for each in written)
        for each in written:
            assert all(has_word(each.text, word) for word in task.include), each
            assert not any(has_word(each.text, word) for word in task.forbid), each
            assert each.text.startswith(task.prompt), each


@pytest.mark.parametrize(("kind", "own"), OWN_WAYS.items())
def test_other_methods_write_in_their_own_way_alone(kind, own):
    model = model_of(kind)
    task = Task(3, length=7, prompt="the king", seed=4)
    usual = texts(model, task, requested(steps=4, top_k=20))
    assert usual == texts(model, task, requested(own, steps=4, top_k=20))
    assert all(text.startswith("the king") and not SPECIAL.search(text) for text in usual)
    assert usual != texts(model, replace(task, seed=5), requested(steps=4, top_k=20))
    others = {*OF_MASKS, *OTHER_METHODS} - {None, "exact", own} - ({"ancestral"} if kind == "vectors" else set())
    for algorithm in others:
        with pytest.raises(ValueError, match=r"the sampler '.*' (needs|is for) a .*, which this is not; leave it out"):
            texts(model, task, requested(algorithm, steps=4))
    with pytest.raises(ValueError, match="'blocks' needs a model whose noise is"):
        texts(model, task, requested(steps=4, block=2))
    with pytest.raises(ValueError, match="rewrite"):
        texts(model, Task(2, rewrite=SENTENCE), requested(steps=4))


@pytest.mark.parametrize("kind", ["vectors", "decoder"])
def test_words_are_constrained_by_masked_models_alone(kind):
    for task in (Task(1, length=7, include=("river",)), Task(1, length=7, forbid=("queen",))):
        with pytest.raises(ValueError, match="included and forbidden"):
            texts(model_of(kind), task, requested(steps=4))


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_every_kind_of_model_fills_or_says_why_not(kind):
    model = model_of(kind)
    if kind.startswith("uniform") or kind in OWN_WAYS:
        with pytest.raises(ValueError, match=r"write on \[MASK\]"):
            model.fill("the [MASK] saw .")
        return
    found = model.fillings("the [MASK] saw [BLANK] .", 3, longest=2)
    assert len(found) == 3
    assert [each.nats for each in found] == sorted(each.nats for each in found)
    assert all(len(each.fillings) == 2 and math.isfinite(each.nats) for each in found)


KINDS = {"spindle-paper": Likelihood.PSEUDO, "decoder": Likelihood.EXACT}
"""All others have a bound."""


@pytest.mark.parametrize("kind", sorted({*EXPERIMENTS} - {"unrolled"}))
def test_every_kind_of_model_scores_and_says_what_the_number_is(kind):
    [score] = model_of(kind).score([SENTENCE], precision=1.0)
    assert score.likelihood is KINDS.get(kind, Likelihood.BOUND)
    assert score.ci95[0] <= score.nats <= score.ci95[1]
    assert 0 < score.nats < (math.inf if kind == "vectors" else 200)  # untrained, its squares weigh a thousandfold
    by_steps = kind.startswith(("spindle", "uniform", "prefix", "layers"))
    expected = 16 if by_steps else 50 if kind == "vectors" else None
    time = score.protocol.definition.time
    assert (None if time is None else time.steps) == expected
    assert (time is None) == (kind == "decoder")
    surprise = model_of(kind).surprise(SENTENCE, draws=4)
    assert [piece for piece, _ in surprise] == SENTENCE.split()
    if kind == "decoder":  # nothing is drawn, so nothing is uncertain
        assert score.ci95[0] == pytest.approx(score.nats) == pytest.approx(score.ci95[1])
        assert sum(nats for _, nats in surprise) == pytest.approx(score.nats)


def test_a_model_folder_does_not_call_a_loss_nats():
    unrolled, decoder = (
        json.loads((run_of(kind) / "model" / "diffusionbert.json").read_text())["validation"]
        for kind in ("unrolled", "decoder")
    )
    assert unrolled.keys() == {"loss_per_token", "step", "likelihood"}
    assert decoder.keys() == {"nats_per_token", "step", "likelihood"}
    assert (unrolled["likelihood"], decoder["likelihood"]) == ("none", "exact")


def test_a_model_without_a_likelihood_says_so():
    for ask in (lambda model: model.score([SENTENCE]), lambda model: model.surprise(SENTENCE)):
        with pytest.raises(ValueError, match=r"no likelihood.*judge it by its samples"):
            ask(model_of("unrolled"))


@pytest.mark.parametrize("kind", ["vectors", "decoder", "learned", "mouth", "mask-predict", "layers"])
def test_a_saved_model_is_the_model_that_was_trained(kind):
    """Its folder, copied elsewhere, scores and writes the same; so does a model saved again with other weights."""
    copied = damaged(run_of(kind) / "model", f"{kind}-copied", {})
    ours, again = model_of(kind), load(copied)
    assert again.score([SENTENCE], precision=1.0)[0].nats == ours.score([SENTENCE], precision=1.0)[0].nats
    assert again.generate(2, length=6, steps=6) == ours.generate(2, length=6, steps=6)
    assert again.statistics.exponents is None or kind == "learned"


def test_learned_rates_come_back_and_matter():
    experiment = config_of("learned", steps=20)
    training = replace(experiment.training, validation_draws=64)  # or the untrained one may look better, and be kept
    train(replace(experiment, training=training), folder() / "rates", cache=folder() / "cache")
    source = folder() / "rates" / "model"
    model = load(source)
    frequencies = load_file(source / "token_counts.safetensors")
    exponents = frequencies["exponents"]
    assert exponents.shape == model.network.allowed.shape
    assert float((exponents - 1).abs().max()) > 0.01  # they have moved away from the linear schedule
    objective, definition = model._scored_by
    assert definition.schedule == Component("learned")
    assert torch.allclose(objective.process.learned().float(), exponents.float(), atol=1e-5)
    frequencies["exponents"] = torch.where(model.network.allowed, 3 * torch.rand(exponents.shape) + 1, 1.0).double()
    other = load(damaged(source, "other-rates", {"token_counts.safetensors": save(frequencies)}))
    ours, others = (one.score([SENTENCE], precision=0.02)[0].nats for one in (model, other))
    assert abs(ours - others) > 0.05


@pytest.mark.parametrize("kind", ["linear", "spindle", "layers", "spindle-layers", "masking"])
def test_a_model_calls_its_network_as_rarely_as_its_kind_allows(kind):
    [written] = model_of(kind).write(Task(length=9), requested(steps=100))
    assert written.calls <= (100 if kind == "spindle-layers" else 9)
    assert written.calls > (9 if kind == "spindle-layers" else 3)


class Listening(nn.Module):
    """A network that keeps the times it is told."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network, self.times = network, []
        self.allowed, self.max_length = network.allowed, network.max_length

    def forward(self, tokens: Tensor, attend: Tensor, t: Tensor, targets: Tensor) -> Tensor:
        self.times += t.tolist()
        return self.network(tokens, attend, t, targets)


@pytest.mark.parametrize("algorithm", OF_MASKS)
def test_a_network_is_told_how_much_is_hidden_at_the_start(algorithm, monkeypatch):
    model = model_of("layers")
    listening = Listening(model.network)
    monkeypatch.setattr(model, "network", listening)
    texts(model, Task(2, rewrite=SENTENCE, strength=0.3), requested(algorithm, steps=10))
    assert max(listening.times) <= 0.3 + 1e-6
    listening.times.clear()
    texts(model, Task(2, length=10), requested(algorithm, steps=10))
    assert max(listening.times) > 0.6


# ---- generating -----------------------------------------------------------------------------------------------------


def test_a_length_is_kept_a_range_is_drawn_from_and_the_corpus_knows_its_own(model):
    assert [each.length for each in model.write(Task(3, length=5), FEW)] == [5, 5, 5]
    ranged = {each.length for each in model.write(Task(60, length=(4, 7)), requested(steps=1))}
    assert ranged == {4, 5, 6, 7}
    known = {len(sentence.split()) for sentence in toy_sentences(400)}
    drawn = {each.length for each in model.write(Task(60), requested(steps=1))}
    assert drawn <= known
    assert len(drawn) > 2


def test_lengths_leave_room_for_the_prompt(model):
    prompt = "my brother saw the city of"
    for task in (Task(30, prompt=prompt), Task(30, length=(2, 8), prompt=prompt)):
        assert all(each.length > 6 for each in model.write(task, requested(steps=1)))


def test_a_prompt_is_kept_letter_by_letter(model):
    for prompt in (
        "The OLD  king",
        "It's 🙂, e.g. a U.S. king",
        "[MASK] said [SEP]",
        "the king's",
        "the king -",
        "it '",
    ):
        for text in texts(model, Task(4, length=22, prompt=prompt)):
            assert text.startswith(prompt)


def test_the_last_word_of_a_prompt_is_whole():
    """A hot, hardly trained model would make `kingdom` or worse of it."""
    for text in texts(model_of("linear"), Task(64, length=6, prompt="the king"), requested(temperature=3.0)):
        assert has_word(text[: len("the king") + 1], "king"), text


def test_a_space_after_a_prompt_is_not_doubled(model):
    for text in texts(model, Task(4, length=6, prompt="the king ")):
        assert text.startswith("the king ")
        assert "  " not in text


@pytest.mark.parametrize("algorithm", OF_MASKS)
def test_what_is_given_stays_in_every_state(model, algorithm):
    prompted = list(model.watch(Task(length=9, prompt="the old king"), requested(algorithm, steps=7)))
    assert {moment.pieces[:3] for moment in prompted} == {("the", "old", "king")}
    rewritten = list(model.watch(Task(rewrite=SENTENCE, strength=0.3), requested(algorithm, steps=7)))
    frozen = [position for position, piece in enumerate(rewritten[0].pieces) if piece is not None]
    assert len(frozen) == 7
    for moment in rewritten:
        assert [moment.pieces[position] for position in frozen] == [SENTENCE.split()[position] for position in frozen]


@pytest.mark.parametrize("algorithm", OF_MASKS)
def test_constraints_are_met_exactly(model, algorithm):
    task = Task(12, length=12, include=("river", "city of paris", "kingdom"), forbid=("the", "queen", "white castle"))
    for text in texts(model, task, requested(algorithm, steps=5, temperature=2.0)):
        assert all(has_word(text, word) for word in task.include), text
        assert not any(has_word(text, word) for word in task.forbid), text


def test_a_word_is_forbidden_however_it_could_be_spelled():
    """A hot, hardly trained model writes `k` `##ing` and `##a` first: still no forbidden word is to be read."""
    forbidden = ("king", "river", "the", "art", "an", "a")
    for seed in range(3):
        task = Task(64, length=12, forbid=forbidden, seed=seed)
        for text in texts(model_of("linear"), task, requested(steps=8, temperature=3.0)):
            assert not any(has_word(text, word) for word in forbidden), text


def test_a_word_is_written_where_not_all_of_it_is_given():
    given = len("the king")
    assert tasks.has_word("the king saw", "King")
    assert not tasks.has_word("the king saw", "king", given)
    assert not tasks.has_word("the king saw", "kin")
    assert tasks.has_word("the king saw", "king saw", given)
    assert tasks.has_word("the king saw the king .", "the king", given)
    assert tasks.has_word("a a a", "a a", given=3)  # once given, and once more across its end


def test_rewriting_without_a_word_hides_it(model):
    for seed in range(6):
        *_, last = model.watch(Task(rewrite=SENTENCE, strength=0.1, forbid=("paris",), seed=seed), FEW)
        same = [new == old for new, old in zip(last.pieces, SENTENCE.split(), strict=True)]
        assert not same[SENTENCE.split().index("paris")]
        assert sum(same) >= 8  # that word and one more were hidden


def test_rewriting_without_a_word_hides_it_wherever_it_stands():
    """Where a space is part of a piece, a sentence's first word is another piece; one too long for it is in none."""
    model = load(plain_roberta())
    for seed in range(4):
        task = Task(
            2, rewrite="king saw a king .", strength=0.1, forbid=("king", "antidisestablishment" * 3), seed=seed
        )
        assert not any(has_word(text, "king") for text in texts(model, task))


@pytest.mark.parametrize("algorithm", OF_MASKS)
def test_the_same_seed_gives_the_same_text(model, algorithm):
    sampling = requested(algorithm, steps=8)
    first, again, other = (texts(model, Task(4, length=9, seed=seed), sampling) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len(set(first)) > 1


@pytest.mark.parametrize("algorithm", OF_MASKS)
def test_a_batch_is_its_rows(model, algorithm, monkeypatch):
    sampling = requested(algorithm, steps=8)
    five = texts(model, Task(5, length=9, include=("river",), forbid=("king",)), sampling)
    assert texts(model, Task(3, length=9, include=("river",), forbid=("king",)), sampling) == five[:3]
    monkeypatch.setattr(model_module, "SEQUENCES_AT_ONCE", {"cpu": 2})
    assert texts(model, Task(5, length=9, include=("river",), forbid=("king",)), sampling) == five


def test_fewer_rows_are_written_at_once_the_longer_they_are_and_the_more_words_there_are(model, monkeypatch):
    assert model.sequences_at_once(20) == model_module.SEQUENCES_AT_ONCE["cpu"]
    words = len(model.statistics.allowed)
    monkeypatch.setattr(model_module, "WEIGHED_AT_ONCE", 60 * words)
    assert [model.sequences_at_once(positions) for positions in (5, 20, 100)] == [12, 3, 1]


@pytest.mark.parametrize("algorithm", ["exact", "ancestral", "remasking", "renoising"])
def test_at_a_low_temperature_words_are_revealed_throughout(model, algorithm):
    """The original's failure: everything in the last step, because the temperature sharpened "stay masked", too."""
    shares: dict[float, list[float]] = {0.75: [], 0.5: [], 0.25: []}
    for seed in range(5):
        states = list(model.watch(Task(length=20, seed=seed), requested(algorithm, steps=16, temperature=0.1)))
        for time, found in shares.items():
            *_, latest = (state for state in states if state.time >= time - 1e-9)
            found.append(latest.pieces.count(None) / 20)
    for time, found in shares.items():
        assert abs(sum(found) / len(found) - time) < 0.15, (time, found)


@pytest.mark.parametrize("algorithm", OF_MASKS)
def test_blocks_write_more_than_the_model_reads(model, algorithm):
    written = list(model.write(Task(2, length=50, prompt="the king"), requested(algorithm, steps=4, block=6)))
    assert [each.length for each in written] == [50, 50]
    assert all(each.text.startswith("the king") and not SPECIAL.search(each.text) for each in written)
    assert all(each.calls <= 8 * 4 for each in written)


def test_all_words_or_a_few(model):
    assert texts(model, Task(4, length=9), requested(top_k=None)) != texts(model, Task(4, length=9), requested(top_k=1))
    greedy = requested("margin", steps=9, top_k=1)
    assert len(set(texts(model, Task(4, length=9), greedy))) == 1  # nothing is left to chance


def test_stream_yields_every_state_from_all_hidden_to_none(model):
    moments = list(model.stream(length=8, steps=16, seed=1))
    assert (moments[0].time, moments[-1].time) == (1.0, 0.0)
    assert moments[0].pieces == (None,) * 8
    assert moments[0].text == ""
    masked = [moment.pieces.count(None) for moment in moments]
    assert masked == sorted(masked, reverse=True)
    assert masked[-1] == 0
    assert [moment.calls for moment in moments] == list(range(len(moments)))
    assert moments[-1].text == model.generate(1, length=8, steps=16, seed=1)[0]
    for before, after in itertools.pairwise(moments):
        kept = zip(before.pieces, after.pieces, strict=True)
        assert all(old in (None, new) for old, new in kept)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"number": 0}, "`number` must be between 1 and 100000, got 0"),
        ({"number": -1}, "`number` must be between 1 and 100000, got -1"),
        ({"number": 10**9}, "`number` must be between 1 and 100000, got 1000000000"),
        ({"include": ("king",), "forbid": ("King",)}, "king"),
        ({"include": ("king", "")}, "must not be empty, got ''"),
        ({"forbid": (" ",)}, "must not be empty, got ' '"),
        ({"rewrite": SENTENCE, "length": 4}, "rewritten"),
        ({"rewrite": SENTENCE, "prompt": "the"}, "rewritten"),
    ],
    ids=str,
)
def test_a_contradictory_task_is_refused_when_it_is_made(task, message):
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
        ({"prompt": "king " * 40}, "`length` must be >= 41 with a prompt of 40 tokens"),
        ({"include": ("a", "an", "river", "sea"), "length": 3}, "4 words"),
        ({"include": ("🙂",), "length": 5}, "🙂"),
        ({"forbid": ("🙂",), "length": 5}, "🙂"),
        ({"include": ("old king",), "forbid": ("king",), "length": 5}, "'king'"),
        ({"rewrite": "", "length": None}, "nothing to rewrite"),
        ({"rewrite": SENTENCE, "strength": 0.0}, "strength"),
        ({"rewrite": "king " * 40}, "more than the 22"),
        ({"source": "the king"}, "not trained on pairs"),
        ({"prompt": "caf\udce9", "length": 5}, "UTF-8"),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_refused(model, task, message):
    with pytest.raises(ValueError, match=message):
        texts(model, Task(**task))


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("spindle", None),
        ("uniform", None),
        ("layers", None),
        ("linear", "renoising"),
    ],
)
def test_a_rewriting_without_a_word_does_not_depend_on_its_neighbours(kind, algorithm, monkeypatch):
    task = Task(32, rewrite=SENTENCE, strength=0.4, forbid=("paris", "king"), seed=3)
    other = model_of(kind)
    together = texts(other, task, requested(algorithm, steps=6))
    monkeypatch.setattr(model_module, "SEQUENCES_AT_ONCE", {"cpu": 1})
    assert texts(other, task, requested(algorithm, steps=6)) == together


def test_a_length_that_cannot_be_is_refused_before_its_rows_are_made(model, monkeypatch):
    made = []

    def noting(vocabulary, lengths, *rest):
        made.extend(lengths)
        return blank(vocabulary, lengths, *rest)

    monkeypatch.setattr(model_module, "blank", noting)
    for task in (Task(60, 999_999), Task(60, (1, 10**12))):
        with pytest.raises(ValueError, match="more than the 22"):
            texts(model, task)
    assert max(made) == 1


@pytest.mark.parametrize("kind", ["decoder", "vectors", "uniform", "unrolled"])
def test_blocks_are_offered_only_where_there_are_any(kind):
    other = model_of(kind)
    with pytest.raises(ValueError, match=r"more than the 22 that this model reads; ask for less$"):
        texts(other, Task(length=23))
    for block in (0, 4):
        with pytest.raises(ValueError, match="block"):
            texts(other, Task(length=5), requested(block=block))


def test_a_string_is_not_a_list_of_words(model):
    """Python would take its letters."""
    for wrong in ({"include": "river"}, {"forbid": "river"}):
        with pytest.raises(ValueError, match=r"\['river'\]"):
            model.generate(1, length=6, **wrong)
    with pytest.raises(ValueError, match="river"):
        model.fillings("the [MASK] .", forbid="river")
    with pytest.raises(ValueError, match="list"):
        model.score(SENTENCE)


def test_a_model_without_a_histogram_still_has_a_usual_length():
    written = list(load(plain_bert()).write(Task(2), FEW))
    assert [each.length for each in written] == [24, 24]


# ---- answering ------------------------------------------------------------------------------------------------------


def test_a_model_of_pairs_answers_a_source():
    model, task = model_of("pairs"), Task(2, source="the king saw a river today .")
    assert model.paired
    written = list(model.write(task, FEW))
    assert all(1 <= each.length <= 9 and not SPECIAL.search(each.text) for each in written)
    prompted = texts(model, replace(task, prompt="Nobody", length=5))
    assert all(text.startswith("Nobody") for text in prompted)
    with pytest.raises(ValueError, match="pairs"):
        texts(model, Task(1, length=5))


def test_the_answer_is_the_candidate_that_agrees_most_with_the_others():
    model, task = model_of("pairs"), Task(2, source="the king saw a river today .", length=4)
    candidates = texts(model, replace(task, number=10))
    answers = [written.text for written in model.answer(task, FEW, 5)]
    assert answers[0] in candidates[:5]
    assert answers[1] in candidates[5:]
    [alone] = model.answer(replace(task, number=1), FEW, 5)
    assert alone.text == answers[0]


def test_the_source_is_read():
    """Another source, another answer: it is not only a prompt of the right length."""
    model = model_of("pairs")
    one, other = (
        texts(model, Task(8, source=source, length=6), requested(steps=6))
        for source in ("the king saw a river today .", "nobody painted the sea again .")
    )
    assert one != other


# ---- filling --------------------------------------------------------------------------------------------------------


def test_one_blank_is_what_the_network_says():
    """On a plain masked language model, without training: the same numbers as from transformers itself."""
    model, theirs = load(plain_bert()), AutoModelForMaskedLM.from_pretrained(plain_bert()).eval()
    tokenizer = AutoTokenizer.from_pretrained(plain_bert())
    inputs = tokenizer("The king [MASK] a river .", return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**inputs).logits[0, inputs["input_ids"][0] == tokenizer.mask_token_id][0]
    log_p = logits[model.network.allowed].log_softmax(-1)
    found = model.fillings("The king [MASK] a river .", 4)
    best = log_p.masked_fill(model.network.allowed.nonzero()[:, 0] == model.vocabulary.unk_id, -torch.inf).topk(4)
    assert [each.nats for each in found] == pytest.approx((-best.values).tolist(), abs=1e-4)
    spelled = model.vocabulary.spelled(model.network.allowed.nonzero()[best.indices, 0].tolist())
    assert [each.fillings[0] for each in found] == [piece.removeprefix("##") for piece in spelled]


def test_what_is_no_word_is_never_written():
    """A network that believes in nothing but [UNK], [MASK] and [SEP], and in ids that its tokenizer does not have."""
    model = load(plain_bert())
    tokenizer = model.vocabulary.tokenizer
    loved = [tokenizer.unk_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id, model.vocabulary.size + 1]
    with torch.no_grad():
        model.network.backbone.cls.predictions.bias[loved] += 50
    for algorithm in OF_MASKS:
        assert not any(map(SPECIAL.search, texts(model, Task(3, length=6), requested(algorithm, steps=6))))
    for each in model.fillings("The king [MASK] a [BLANK] .", 10, longest=2):
        assert not SPECIAL.search(each.text)


@pytest.mark.parametrize(("path", "mask"), [(plain_bert, "[MASK]"), (plain_roberta, "<mask>")])
def test_two_blanks_cost_the_mean_of_both_orders(path, mask):
    model = load(path())
    text = "the [MASK] saw a [MASK] ."
    [row] = model.vocabulary.encode([text.replace("[MASK]", mask)], marked=True)
    positions = [position for position, token in enumerate(row) if token == model.vocabulary.mask_id]

    def nats(wanted: tuple[int, ...], position: int, shown: tuple[int, ...] = ()) -> float:
        """Of one blank, while the others are shown or not."""
        tokens = torch.tensor([row])
        for other in shown:
            tokens[0, positions[other]] = wanted[other]
        targets = torch.zeros_like(tokens, dtype=torch.bool)
        targets[0, positions[position]] = True
        with torch.no_grad():
            log_f = model.network(tokens, torch.ones_like(targets), torch.ones(1).double(), targets)
        return -float(log_f[0, wanted[position]])

    num_checked = 0
    for each in model.fillings(text, 20):
        [again] = model.vocabulary.encode([each.text])
        if len(again) == len(row):  # the words that were written are those that are read
            num_checked += 1
            wanted = tuple(again[position] for position in positions)
            one = nats(wanted, 0) + nats(wanted, 1, shown=(0,))
            other = nats(wanted, 1) + nats(wanted, 0, shown=(1,))
            assert each.nats == pytest.approx((one + other) / 2, abs=1e-4)
    assert num_checked > 3


def test_blanks_are_filled_jointly_and_ranked(model):
    found = model.fillings("the [MASK] king saw the city of [MASK] today .", 3)
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
def test_each_blank_has_its_own_filling(model, text, blanks):
    for each in model.fillings(text, 3, longest=2):
        assert len(each.fillings) == blanks
        assert all(each.fillings)
        given = [part.strip() for part in re.split(r"\[MASK\]|\[BLANK\]", text)]
        assert re.fullmatch(r"\s*.+?\s*".join(map(re.escape, given)), each.text), each.text


def test_a_gap_is_given_the_length_that_suits(model):
    text = "the old king saw [BLANK] today ."
    found = model.fillings(text, 12, longest=4)
    assert all(1 <= len(each.fillings[0].split()) <= 4 for each in found)
    assert len(found[0].fillings[0].split()) > 1  # the toy English sees nothing in one word
    assert all(len(each.fillings[0].split()) == 1 for each in model.fillings(text, 3, longest=1))


def test_forbidden_words_fill_no_blank(model):
    text = "the old [MASK] saw the city of [MASK] today ."
    assert "paris" in model.fillings(text, 1)[0].fillings
    for each in model.fillings(text, 20, forbid=["paris", "king"]):
        assert not {"paris", "king"} & set(each.fillings)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("no blank .", {}, "nothing to fill"),
        ("", {}, "nothing to fill"),
        ("the [MASK] [SEP] .", {}, "special tokens"),
        ("[MASK] " * 23, {}, "23.*more than the 22"),
        ("king " * 20 + "[BLANK]", {}, "longest is 4, too large by 2"),
        ("king " * 22 + "[BLANK]", {}, "23 tokens, more than the 22.*shorten it"),
        ("the [MASK] .", {"alternatives": 0}, "alternatives"),
        ("the [BLANK] .", {"longest": 0}, "longest"),
        ("the [BLANK] .", {"longest": 21}, "too large by 1.*room for 20"),
        ("caf\udce9 [MASK]", {}, "UTF-8"),
    ],
)
def test_what_cannot_be_filled_is_refused(model, text, options, message):
    with pytest.raises(ValueError, match=message):
        model.fillings(text, **options)


def test_a_blank_may_be_as_long_as_there_is_room(model):
    assert len(model.fillings("king " * 10 + "[BLANK] [MASK] [BLANK]", 1, longest=5)) == 1


def test_the_bundled_model_knows_a_capital():
    [best, *_] = bundled().fillings("paris is the capital of [MASK] .", 3)
    assert best.fillings == ("france",)


# ---- values of another kind --------------------------------------------------------------------------------------

KINDS_OF_VALUES = """
import sys
import diffusionbert

def said(ask):
    try:
        ask()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was accepted")

model = diffusionbert.load(sys.argv[1])
for ask in (
    lambda: model.generate(length="8"),
    lambda: model.generate(length=8.0),
    lambda: model.generate(length=(1, 2, 3)),
    lambda: model.generate("3"),
    lambda: model.generate(prompt=None),
    lambda: model.generate(seed=1.5),
    lambda: model.generate(include=3),
    lambda: model.generate(forbid=[3]),
    lambda: model.generate(steps="4"),
    lambda: model.generate(top_k="all"),
    lambda: model.generate(top_k=0),
    lambda: next(model.stream(seed="0")),
    lambda: model.rewrite(3),
    lambda: model.fill(["a [MASK] ."]),
    lambda: model.fill(None),
    lambda: model.fill("a [MASK] .", seed=0.5),
    lambda: model.score(3),
    lambda: model.score([3]),
    lambda: model.score("the king ."),
    lambda: model.score(["the king ."], seed=0.5),
    lambda: diffusionbert.load(3),
    lambda: diffusionbert.load(""),
):
    print(said(ask))
import numpy
few = model.generate(numpy.int64(2), length=numpy.int64(5), seed=numpy.int64(3), steps=numpy.int64(4))
assert few == model.generate(2, length=5, seed=3, steps=4)
scores = model.score(text for text in ["the king .", "nobody ."])
assert [score.text for score in scores] == ["the king .", "nobody ."]
"""


def test_values_of_another_kind_are_refused_in_one_line_or_taken_for_what_they_mean():
    """In a process of its own: here the types are checked by the tests themselves, which nobody else has."""
    command = [sys.executable, "-c", KINDS_OF_VALUES, str(run_of("linear"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    whole = "a whole number, given"
    assert done.stdout.splitlines() == [
        "TypeError: length must be a whole number, a pair (10, 30), or None, given '8' (str)",
        "TypeError: length must be a whole number, a pair (10, 30), or None, given 8.0 (float)",
        "TypeError: length must be a whole number, a pair (10, 30), or None, given (1, 2, 3) (tuple)",
        f"TypeError: number must be {whole} '3' (str)",
        "TypeError: prompt must be a text, given None (NoneType)",
        f"TypeError: seed must be {whole} 1.5 (float)",
        "TypeError: words to include or forbid must be a list, given 3 (int)",
        "TypeError: a word to include or forbid must be a text, given 3 (int)",
        f"TypeError: steps must be {whole} '4' (str)",
        "TypeError: top_k must be a whole number or None, given 'all' (str)",
        "ValueError: `top_k` must be >= 1, got 0; None keeps all tokens",
        "TypeError: seed must be a whole number, given '0' (str)",
        "TypeError: rewrite must be a text or None, given 3 (int)",
        "TypeError: what is filled must be a text; fill several one by one, given ['a [MASK] .'] (list)",
        "TypeError: what is filled must be a text; fill several one by one, given None (NoneType)",
        f"TypeError: seed must be {whole} 0.5 (float)",
        "TypeError: what is scored must be a list of sentences, given 3 (int)",
        "TypeError: a sentence must be a text, given 3 (int)",
        "ValueError: a list of one or more sentences is expected, given 'the king .'",
        f"TypeError: seed must be {whole} 0.5 (float)",
        "TypeError: a model must be a folder or a name on the Hub, given 3 (int)",
        "ValueError: the name of the model is empty; give a folder or a Hub name, or none for the model inside",
    ]


# ---- scoring --------------------------------------------------------------------------------------------------------


def test_a_sentence_of_one_token_is_scored_exactly():
    model, theirs = load(plain_bert()), AutoModelForMaskedLM.from_pretrained(plain_bert()).eval()
    tokenizer = AutoTokenizer.from_pretrained(plain_bert())
    inputs = tokenizer("[MASK]", return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**inputs).logits[0, 1].masked_fill(~model.network.allowed, -torch.inf)
    expected = -float(logits.log_softmax(-1)[tokenizer.convert_tokens_to_ids("river")])
    [score] = model.score(["river"])
    assert score.nats == pytest.approx(expected, abs=1e-4)
    assert score.ci95 == pytest.approx((expected, expected), abs=1e-4)


def test_units_are_tokens_words_and_bytes(model):
    text = "the kingdom of 東京 ."
    [score] = model.score([text], precision=0.5)
    num_tokens = len(model.vocabulary.encode([text])[0]) - 2
    assert score.perplexity_per_token == pytest.approx(math.exp(score.nats / num_tokens))
    assert score.perplexity_per_word == pytest.approx(math.exp(score.nats / 5))
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / len(text.encode()))
    assert score.to_json().keys() >= {
        *("text", "nats", "perplexity_per_token", "perplexity_per_word", "bits_per_byte", "ci95"),
        *("likelihood", "protocol"),
    }
    assert json.loads(json.dumps(score.to_json()))["likelihood"] == "bound"


def test_order_matters_to_a_score(model):
    shuffled = "paris king the city old saw of today the ."
    for scorer, real, other in (
        (model, SENTENCE, shuffled),
        (bundled(), "the capital of france is paris .", "paris the is france capital of ."),
    ):
        first, second = scorer.score([real, other], precision=0.3)
        assert first.ci95[1] < second.ci95[0]
        assert first.perplexity_per_token < second.perplexity_per_token
        assert (first.text, second.text) == (real, other)


def test_what_tokens_cost_is_what_the_sentence_costs(model):
    [score] = model.score([SENTENCE], precision=0.02)
    surprise = model.surprise(SENTENCE, draws=256)
    assert [piece for piece, _ in surprise] == SENTENCE.split()
    margin = score.ci95[1] - score.ci95[0]
    assert sum(nats for _, nats in surprise) == pytest.approx(score.nats, abs=2 * margin)


def test_scores_come_in_the_order_of_the_sentences(model):
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
def test_any_text_with_characters_has_a_finite_score(model, text):
    [score] = model.score([text], precision=1.0)
    assert math.isfinite(score.nats)
    assert score.text == text


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ([], "list"),
        ([""], "sentence 1 has no words"),
        (["the king .", " \t"], "sentence 2 has no words"),
        (["the king .", "king " * 30, "a"], r"sentence 2 .*30 tokens.*22"),
        (["caf\udce9"], "UTF-8"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused(model, sentences, message):
    with pytest.raises(ValueError, match=message):
        model.score(sentences)


@pytest.mark.parametrize("precision", [0.0, -1.0, math.nan])
def test_a_precision_must_be_above_zero(model, precision):
    with pytest.raises(ValueError, match="precision"):
        model.score([SENTENCE], precision=precision)
