"""The public surface in Python: `load`, `Model` and what can be asked of a model."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save
from tiny_models import (
    MAX_LENGTH,
    bundled,
    corpus,
    damaged,
    model_of,
    plain_bert,
    plain_roberta,
    run_of,
    trained,
    trained_run,
)
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import diffusionbert
from diffusionbert import reporting
from diffusionbert.inference.tasks import Filling, TokenProbability
from diffusionbert.model import Model, load
from diffusionbert.samplers.confidence import Confidence, Criterion
from diffusionbert.samplers.remasking import Remasking
from diffusionbert.storage.hub import HubOptions
from diffusionbert.training import model_folder
from diffusionbert.training.model_folder import BUNDLED

SENTENCE = "the old king saw the city of paris today ."
SENTENCES = [SENTENCE, "nobody", "a queen met the sea in winter .", "the king .", "my brother saw a river again ."]


@pytest.fixture(scope="module")
def model() -> Model:
    return trained()


def nats(model: Model, text: str = SENTENCE) -> float:
    return model.score(text, precision=1.0).nats


# ---- loading --------------------------------------------------------------------------------------------------------


def test_the_bundled_model_is_small():
    model = bundled()
    assert model.name == "bundled"
    assert model.num_parameters <= 40_000_000
    assert sum(len(zlib.compress(file.read_bytes(), 1)) for file in BUNDLED.iterdir()) <= 40_000_000  # in the wheel
    assert model.engine.length_histogram is not None
    assert model.max_length == 126
    assert model.engine.training_text is not None  # so that `evaluate` can tell whether it knows a text
    assert not list(BUNDLED.glob("*.bin"))


def test_transformers_opens_the_bundled_model_once_it_is_saved(tmp_path):
    text = "the [MASK] of france is [MASK] ."
    model = bundled()
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    inputs = tokenizer(text, return_tensors="pt")
    assert inputs["input_ids"].tolist() == [model.tokenizer(text)["input_ids"]]
    targets = inputs["input_ids"] == tokenizer.mask_token_id
    with torch.no_grad():
        logits = theirs(**inputs).logits[targets]
        ours = model.engine.network(inputs["input_ids"], torch.ones_like(targets), torch.ones(1).double(), targets)
    allowed = model.engine.network.allowed
    assert torch.allclose(logits[:, allowed].log_softmax(-1), ours[:, allowed], atol=1e-4)


OFFLINE = """
import socket

def reject(*_):
    raise AssertionError("a connection was opened")

socket.socket.connect = socket.getaddrinfo = reject
import diffusionbert
assert diffusionbert.load().generate(length=3, steps=2)[0]
"""


@pytest.mark.slow
def test_the_bundled_model_needs_no_connection_and_the_library_is_silent():
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=online, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_run_directory_and_its_model_folder_are_one_model(model):
    again = load(str(trained_run() / "model"))
    assert again.generate(length=6, seed=0) == model.generate(length=6, seed=0)
    assert again.max_length == model.max_length == MAX_LENGTH - 2


def test_the_maximum_length_of_a_plain_model_follows_from_its_positions():
    assert load(plain_bert()).max_length == 30
    assert load(plain_roberta()).max_length == 30  # two positions belong to the padding


def test_a_run_directory_without_a_model_is_rejected(tmp_path):
    unfinished = tmp_path / "unfinished"
    shutil.copytree(trained_run(), unfinished, ignore=shutil.ignore_patterns("model"))
    with pytest.raises(ValueError, match="is a run without a model yet"):
        load(unfinished)


@pytest.mark.parametrize("name", ["no/such-model", "no such name", "nothing", "x" * 300, "a/b/c/d"])
def test_an_unknown_name_is_rejected(name):
    with pytest.raises(ValueError, match="no model at"):
        load(name)


def test_a_file_is_not_a_model(tmp_path):
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
def test_a_damaged_folder_is_named_in_one_line(change):
    path = damaged(trained_run() / "model", "damaged", change)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load(path).generate(length=3)
    assert "\n" not in str(caught.value)


def test_a_time_conditioned_network_needs_its_time_embeddings():
    path = damaged(run_of("layers") / "model", "timeless", {"beside.safetensors": None})
    with pytest.raises(ValueError, match="beside"):
        load(path)


def test_missing_word_vectors_and_exponents_are_rejected():
    """Random ones in their place would be another model."""
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


def test_time_embeddings_are_restored_from_the_folder():
    source = run_of("layers") / "model"
    weights = load_file(source / "beside.safetensors")
    other = save({name: tensor + 0.5 for name, tensor in weights.items()})
    others = nats(load(damaged(source, "other-times", {"beside.safetensors": other})))
    assert abs(nats(model_of("layers")) - others) > 1e-3


def test_a_model_folder_distinguishes_loss_and_nats():
    unrolled, decoder = (
        json.loads((run_of(kind) / "model" / "diffusionbert.json").read_text())["validation"]
        for kind in ("unrolled", "decoder")
    )
    assert unrolled.keys() == decoder.keys() == {"step", "likelihood", "nats_per_token", "loss_per_token"}
    assert unrolled["nats_per_token"] is None
    assert unrolled["loss_per_token"] > 0
    assert decoder["loss_per_token"] is None
    assert decoder["nats_per_token"] > 0
    assert (unrolled["likelihood"], decoder["likelihood"]) == ("none", "exact")


# ---- what a model is ------------------------------------------------------------------------------------------------


def test_load_passes_the_options_of_the_hub(monkeypatch):
    given: list[HubOptions] = []

    def locate(kind: str, name: str, others: str, **options):
        given.append(HubOptions(**options))
        return plain_bert()

    monkeypatch.setattr(model_folder, "locate", locate)
    load("some/model", revision="v1", token="secret", local_files_only=True)
    assert given[0] == {"revision": "v1", "token": "secret", "local_files_only": True}


def test_the_parts_of_a_model_are_those_of_transformers(model):
    assert isinstance(model.backbone, PreTrainedModel)
    assert isinstance(model.tokenizer, PreTrainedTokenizerBase)
    ids = model.tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    assert model.backbone(input_ids=ids).logits.shape == (*ids.shape, model.backbone.config.vocab_size)
    assert model.device == torch.device("cpu")


def test_a_model_shows_its_name_objective_size_and_device():
    assert re.fullmatch(r"Model\('bundled', discrete-time, \d\d\.\dM parameters, cpu\)", repr(bundled()))


def test_to_moves_the_parameters_and_returns_the_model():
    model = load(trained_run())
    before = nats(model)
    assert model.to(dtype=torch.bfloat16) is model
    assert {parameter.dtype for parameter in model.backbone.parameters()} == {torch.bfloat16}
    assert nats(model) == pytest.approx(before, rel=0.1)
    assert model.to("cpu", torch.float32).device == torch.device("cpu")
    assert {parameter.dtype for parameter in load(trained_run(), dtype="bfloat16").backbone.parameters()} == {
        torch.bfloat16
    }


def test_embeddings_are_the_mean_of_the_last_layer(model):
    found = model.embed(SENTENCES)
    assert found.shape == (len(SENTENCES), model.backbone.config.hidden_size)
    for text, vector in zip(SENTENCES, found, strict=True):
        inputs = model.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = model.backbone(**inputs, output_hidden_states=True).hidden_states[-1]
        assert torch.allclose(vector, states[0, 1:-1].mean(dim=0), atol=1e-5)
    assert torch.equal(model.embed(SENTENCE)[0], model.embed([SENTENCE])[0])
    with pytest.raises(ValueError, match="embeddings need a masked language model"):
        model_of("decoder").embed(SENTENCE)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "layers", "learned", "vectors", "decoder", "mouth", "mask-predict"])
def test_a_saved_model_has_identical_scores(kind, tmp_path):
    saved = model_of(kind).save_pretrained(tmp_path / "saved")
    again = Model.from_pretrained(saved)
    assert again.name == str(saved)
    assert again.engine.statistics.exponents is None or kind == "learned"
    assert nats(again) == nats(model_of(kind))
    assert again.generate(length=6, steps=6, seed=0) == model_of(kind).generate(length=6, steps=6, seed=0)
    assert nats(load(again.save_pretrained(str(tmp_path / "twice")))) == nats(again)
    assert not list(saved.glob("*.bin"))


@pytest.mark.parametrize("path", [plain_bert, plain_roberta])
def test_a_plain_model_is_saved_as_it_was(path, tmp_path):
    model = load(path())
    assert nats(load(model.save_pretrained(tmp_path / "saved")), "the king .") == nats(model, "the king .")


def test_transformers_opens_a_saved_model(model, tmp_path):
    saved = model.save_pretrained(tmp_path)  # it exists, but is empty
    theirs = AutoModelForMaskedLM.from_pretrained(saved).eval()
    inputs = AutoTokenizer.from_pretrained(saved)("the [MASK] king .", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(theirs(**inputs).logits, model.backbone(**inputs).logits)


def test_saving_keeps_changes_of_the_backbone(tmp_path):
    model = load(trained_run())
    before = nats(model)
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.mul_(0.9)
    changed = nats(model)
    assert changed != before
    assert nats(load(model.save_pretrained(tmp_path / "changed"))) == changed


def test_saving_never_overwrites(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="exists and is not an empty directory; choose another"):
            model.save_pretrained(target)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


class FakeHub:
    """Stands for `HfApi`; keeps what is uploaded."""

    uploaded: ClassVar[dict[str, set[str]]] = {}

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        assert private
        assert exist_ok
        return f"https://hub/{name}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.uploaded[repo_id] = {file.name for file in folder_path.iterdir()}


def test_push_to_hub_uploads_the_model_folder(model, monkeypatch):
    monkeypatch.setattr(model_folder, "HfApi", FakeHub)
    assert model.push_to_hub("me/mine") == "https://hub/me/mine"
    assert {"model.safetensors", "config.json", "diffusionbert.json", "tokenizer.json"} <= FakeHub.uploaded["me/mine"]


# ---- generating -----------------------------------------------------------------------------------------------------


def test_generate_returns_a_flat_list(model):
    assert len(model.generate()) == 1
    texts = model.generate(["the king", "nobody"], num_return_sequences=3, length=7, seed=0)
    assert [text.split()[0] for text in texts] == ["the"] * 3 + ["nobody"] * 3
    assert texts[:3] == model.generate("the king", num_return_sequences=3, length=7, seed=0)
    assert texts[3:] == model.generate(["nobody"], num_return_sequences=3, length=7, seed=0)


@pytest.mark.slow
def test_no_seed_gives_fresh_texts(model):
    assert len({model.generate(length=12)[0] for _ in range(4)}) > 1
    assert len({model.rewrite(SENTENCE, 0.9) for _ in range(4)}) > 1
    assert len({tuple(state.text for state in model.stream(length=12)) for _ in range(4)}) > 1
    assert model.generate(length=12, seed=3) == model.generate(length=12, seed=3) != model.generate(length=12, seed=4)
    assert model.rewrite(SENTENCE, 0.9, seed=3) == model.rewrite(SENTENCE, 0.9, seed=3)


def test_length_counts_the_prompt_and_max_new_tokens_does_not(model):
    whole = model.generate("the old king", length=8, seed=0)
    assert whole == model.generate("the old king", max_new_tokens=5, seed=0)
    assert len(model.tokenizer.tokenize(whole[0])) == 8
    with pytest.raises(ValueError, match="at most one of `max_new_tokens` and `length`"):
        model.generate(length=8, max_new_tokens=5)
    with pytest.raises(ValueError, match="`max_new_tokens` must be >= 1"):
        model.generate(max_new_tokens=0)
    lengths = {len(model.tokenizer.tokenize(text)) for text in model.generate(num_return_sequences=20, length=(5, 6))}
    assert lengths == {5, 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "sampler"),
    [
        ("remasking:eta=0.4", Remasking(eta=0.4)),
        ("margin", Confidence(Criterion.MARGIN)),
        ("confidence:threshold=0.3", Confidence(threshold=0.3)),
    ],
)
def test_a_sampler_is_a_string_or_an_object(model, text, sampler):
    settings = {"num_return_sequences": 3, "length": 9, "steps": 6, "seed": 1}
    assert model.generate(sampler=text, **settings) == model.generate(sampler=sampler, **settings)
    assert model.generate(sampler=text, **settings) != model.generate(**settings)


def test_constraints_and_blocks_reach_the_sampler(model):
    for text in model.generate(num_return_sequences=6, length=9, include=["river"], forbid=["the"], seed=0):
        assert re.search(r"\briver\b", text)
        assert not re.search(r"\bthe\b", text)
    [long] = model.generate(length=60, block=10, steps=8, seed=0)
    assert len(model.tokenizer.tokenize(long)) == 60


def test_a_string_is_rejected_as_a_list_of_words(model):
    """Python would iterate over its letters."""
    for wrong in ({"include": "river"}, {"forbid": "river"}):
        with pytest.raises(ValueError, match=r"\['river'\]"):
            model.generate(length=6, **wrong)
    with pytest.raises(ValueError, match=r"\['river'\]"):
        model.fill("the [MASK] .", forbid="river")
    with pytest.raises(ValueError, match=r"\['river'\]"):
        model.rewrite(SENTENCE, forbid="river")


def test_the_answer_is_the_candidate_that_agrees_most_with_the_others():
    model, settings = model_of("pairs"), {"source": "the king saw a river today .", "length": 4, "steps": 6, "seed": 0}
    candidates = model.generate(num_return_sequences=10, **settings)
    answers = model.generate(num_return_sequences=2, num_candidates=5, **settings)
    assert answers[0] in candidates[:5]
    assert answers[1] in candidates[5:]
    assert model.generate(num_candidates=5, **settings) == answers[:1]


@pytest.mark.parametrize("num_candidates", [0, -1, 3])
def test_candidates_need_a_source(model, num_candidates):
    with pytest.raises(
        ValueError, match=f"`num_candidates` must be >= 1, and 1 without a `source`, got {num_candidates}"
    ):
        model.generate(length=5, num_candidates=num_candidates)


def test_rewrite_keeps_the_other_tokens(model):
    rewritten = model.rewrite(SENTENCE, strength=0.3, seed=0)
    same = [new == old for new, old in zip(rewritten.replace(".", " .").split(), SENTENCE.split(), strict=True)]
    assert sum(same) >= 7
    assert model.rewrite([SENTENCE, "the king ."], strength=0.3, seed=0)[0] == rewritten
    assert model.rewrite(SENTENCE, strength=0.3, num_return_sequences=3, seed=0)[0] == rewritten
    assert len(model.rewrite([SENTENCE, "the king ."], num_return_sequences=3)) == 6
    assert len(model.rewrite(SENTENCE, num_return_sequences=1)) == 1
    assert "paris" not in model.rewrite(SENTENCE, 0.1, forbid=["paris"])


def test_stream_ends_with_the_generated_text(model):
    states = list(model.stream("the old king", length=9, seed=2))
    assert [states[-1].text] == model.generate("the old king", length=9, seed=2)
    assert (states[0].time, states[-1].time) == (1.0, 0.0)
    assert states[0].pieces == ("the", "old", "king", *[None] * 6)


# ---- filling --------------------------------------------------------------------------------------------------------


def test_fill_returns_what_it_is_given(model):
    text, other = "the old king saw the city of [MASK] today .", "the [MASK] saw a river ."
    best = model.fill(text)
    assert best == SENTENCE
    assert model.fill([text, other]) == [best, model.fill(other)]
    ranked = model.fill(text, num_alternatives=3)
    assert all(isinstance(filling, Filling) for filling in ranked)
    assert [len(ranked), ranked[0].text] == [3, best]
    again = model.fill([other, text], num_alternatives=3)[1]
    assert [(one.text, one.fillings) for one in again] == [(one.text, one.fillings) for one in ranked]
    assert [one.nats for one in again] == pytest.approx([one.nats for one in ranked], abs=1e-5)
    assert len(model.fill(text, num_alternatives=1)) == 1
    assert model.fill([]) == []


def test_probabilities_are_those_of_the_network(model):
    text = "the old [MASK] saw the city of [MASK] today ."
    inputs = model.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model.backbone(**inputs).logits[inputs["input_ids"] == model.tokenizer.mask_token_id]
    logits = logits.masked_fill(~model.engine.network.allowed, -torch.inf)
    logits[:, model.tokenizer.unk_token_id] = -torch.inf
    found = model.probabilities(text, top_k=4)
    assert [len(tokens) for tokens in found] == [4, 4]
    for tokens, expected in zip(found, logits.softmax(-1), strict=True):
        assert [token.probability for token in tokens] == sorted((token.probability for token in tokens), reverse=True)
        for token in tokens:
            assert isinstance(token, TokenProbability)
            assert token.probability == pytest.approx(float(expected[token.id]), abs=1e-5)
            assert model.tokenizer.convert_ids_to_tokens(token.id) == token.token


# ---- scoring --------------------------------------------------------------------------------------------------------


def test_a_score_does_not_depend_on_the_order_of_the_texts(model):
    def found(texts: list[str]) -> dict[str, float]:
        return {score.text: score.nats for score in model.score(texts, precision=1.0)}

    expected = found(SENTENCES)
    for shift in range(1, len(SENTENCES)):
        assert found(SENTENCES[shift:] + SENTENCES[:shift]) == expected
    assert found(SENTENCES[::-1]) == expected


def test_identical_texts_have_identical_scores(model):
    first, _, again = model.score([SENTENCE, "nobody", SENTENCE], precision=0.3)
    assert first == again
    assert [model.score(SENTENCE)] == model.score([SENTENCE])


@pytest.mark.slow
def test_threads_get_what_they_get_one_after_another():
    model = model_of("layers")

    def work(seed: int) -> list[object]:
        return [
            model.generate(num_return_sequences=2, length=9, steps=8, include=["river"], seed=seed),
            model.fill("the [MASK] saw the [BLANK] .", num_alternatives=2, max_blank_tokens=2, seed=seed),
            model.score(SENTENCES[: seed + 1], precision=0.5, seed=seed),
            model.rewrite(SENTENCE, 0.5, steps=8, seed=seed),
        ]

    expected = [work(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            assert list(pool.map(work, range(4))) == expected


# ---- the package ----------------------------------------------------------------------------------------------------


def test_the_package_lists_its_public_names():
    names = {"Model", "SamplerConfig", "adapt", "audit", "compare", "evaluate", "load", "register", "train"}
    names |= {"set_verbosity"}
    assert set(dir(diffusionbert)) == names | {"__version__"}
    assert all(getattr(diffusionbert, name) is not None for name in names)
    assert (diffusionbert.load, diffusionbert.Model) == (load, Model)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = diffusionbert.nothing_of_the_kind


def test_set_verbosity_chooses_the_messages(monkeypatch):
    monkeypatch.setattr(reporting.logger, "handlers", [])
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    for level, expected in (("warning", 1), ("info", 2), ("debug", 3), ("error", 0), (logging.INFO, 2)):
        said.seek(0)
        said.truncate()
        diffusionbert.set_verbosity(level)
        reporting.logger.debug("a detail")
        reporting.logger.info("a note\nof two lines")
        reporting.logger.warning("take care")
        assert len(said.getvalue().splitlines()) == expected
    assert said.getvalue().splitlines() == ["a note of two lines", "warning: take care"]
    with pytest.raises(ValueError, match="`level` must be one of debug, info, warning, error, got 'loud'"):
        diffusionbert.set_verbosity("loud")


def test_evaluate_takes_a_model_or_a_folder(tmp_path):
    settings = {"sentences": 4, "samples": 4, "length": 6, "steps": 4, "max_draws": 4}
    result = diffusionbert.evaluate(model_of("linear"), corpus(), **settings, output=tmp_path / "evaluation")
    assert result.to_json()["model"]
    assert "perplexity" in result.table()
    assert (tmp_path / "evaluation" / "evaluation.json").exists()
    again = diffusionbert.evaluate(run_of("linear"), corpus(), **settings)
    assert again.to_json()["likelihoods"] == result.to_json()["likelihoods"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": None}, "`data` is missing"),
        ({"max_draws": 1}, "`max_draws` must be >= 2, got 1"),
        ({"length": "long"}, "`length` must be a number, a range"),
        ({"sampler": "nonsense"}, "unknown sampler 'nonsense'"),
    ],
)
def test_wrong_settings_of_evaluate_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        diffusionbert.evaluate(model_of("linear"), **({"data": corpus()} | settings))


# ---- wrong types ----------------------------------------------------------------------------------------------------

LENGTH = r"TypeError: `?length`? must be a whole number, a pair .*, got"
SEED = r"TypeError: seed must be a whole number, got"
WRONG_TYPES = {
    'model.generate(length="8")': rf"{LENGTH} '8' \(str\)",
    "model.generate(length=8.0)": rf"{LENGTH} 8.0 \(float\)",
    "model.generate(length=(1, 2, 3))": rf"{LENGTH} \(1, 2, 3\) \(tuple\)",
    'model.generate(max_new_tokens="8")': r"TypeError: max_new_tokens must be a whole number or None, got '8' \(str\)",
    'model.generate(num_return_sequences="3")': r"TypeError: num_return_sequences must be a whole .*, got '3' \(str\)",
    "model.generate(3)": r"TypeError: prompt must be a text or a list of texts, got 3 \(int\)",
    "model.generate([3])": r"TypeError: `?prompt`? must be a text, got 3 \(int\)",
    "model.generate(seed=1.5)": rf"{SEED} 1.5 \(float\)",
    "model.generate(include=3)": r"TypeError: .*include.* must be a list.*, got 3 \(int\)",
    "model.generate(forbid=[3])": r"TypeError: .*forbid.* must be .*, got 3 \(int\)",
    'model.generate(steps="4")': r"TypeError: steps must be a whole number, got '4' \(str\)",
    'model.generate(top_k="all")': r"TypeError: top_k must be a whole number or None, got 'all' \(str\)",
    "model.generate(top_k=-1)": r"ValueError: `top_k` must be >= 1, or 0 for all tokens, got -1",
    'next(model.stream(seed="0"))': rf"{SEED} '0' \(str\)",
    "model.rewrite(3)": r"TypeError: text must be a text or a list of texts, got 3 \(int\)",
    "model.fill(None)": r"TypeError: text must be a text or a list of texts, got None \(NoneType\)",
    "model.fill([None])": r"TypeError: text must be a string, got None \(NoneType\)",
    'model.fill("a [MASK] .", seed=0.5)': rf"{SEED} 0.5 \(float\)",
    "model.score(3)": r"TypeError: texts must be a text or a list of texts, got 3 \(int\)",
    "model.score([3])": r"TypeError: each text must be a string, got 3 \(int\)",
    "model.score([])": r"ValueError: texts must be a list of one or more texts, got \[\]",
    'model.score(["the king ."], seed=0.5)': rf"{SEED} 0.5 \(float\)",
    "diffusionbert.load(3)": r"TypeError: a model must be a folder or a Hub name, got 3 \(int\)",
    'diffusionbert.load("")': r"ValueError: the name of the model is empty; give a folder or a Hub name, or None .*",
}
SCRIPT = """
import sys, numpy, diffusionbert

model = diffusionbert.load(sys.argv[1])
for call in sys.argv[2:]:
    try:
        eval(call)
        print("accepted")
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
two, three, four, five = map(numpy.int64, (2, 3, 4, 5))
few = model.generate(num_return_sequences=two, length=five, seed=three, steps=four)
assert few == model.generate(num_return_sequences=2, length=5, seed=3, steps=4)
for seed in (numpy.uint8(3), numpy.int32(3)):
    assert few == model.generate(num_return_sequences=2, length=5, seed=seed, steps=4)
    assert model.score("the king .", seed=seed).nats == model.score("the king .", seed=3).nats
scores = model.score(text for text in ["the king .", "nobody ."])
assert [score.text for score in scores] == ["the king .", "nobody ."]
"""


@pytest.mark.slow
def test_wrong_types_are_rejected_in_one_line():
    """In a process of its own, because the tests check types by themselves."""
    command = [sys.executable, "-c", SCRIPT, str(run_of("linear")), *WRONG_TYPES]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line, (call, pattern) in zip(done.stdout.splitlines(), WRONG_TYPES.items(), strict=True):
        assert re.fullmatch(pattern, line), call


def test_a_model_in_int8_scores_about_the_same_and_keeps_its_parameters(model):
    made = load(str(model.engine.folder), device="cpu", dtype=torch.int8)
    assert len(made.generate(length=6, seed=0)) == 1
    assert nats(made) == pytest.approx(nats(model), rel=0.02)
    assert nats(made) != nats(model)
    own = model.backbone.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in made.backbone.state_dict().items())


def test_int8_computes_in_integers_after_half_precision_too(model):
    made = load(str(model.engine.folder), device="cpu", dtype=torch.float16)
    before = nats(made)
    made.to(dtype=torch.int8)
    assert made.engine.network.backbone.dtype is torch.float32
    assert nats(made) != before


def test_a_model_can_leave_int8_and_a_refused_type_changes_nothing(model):
    made = load(str(model.engine.folder), device="cpu", dtype=torch.int8)
    made.to(dtype="float32")
    assert nats(made) == nats(model)
    with pytest.raises(ValueError, match="int8 is for CPUs, and the device is 'cuda'"):
        made.to("cuda", torch.int8)
    made.to("cpu")
    assert nats(made) == nats(model)
    assert made.engine._dtype is torch.float32


def test_text_is_generated_in_int8_where_that_pays_unless_a_type_was_chosen(model, monkeypatch):
    monkeypatch.setattr("diffusionbert.inference.engine.pays", lambda backbone: True)
    folder = str(model.engine.folder)
    default, chosen, made = (load(folder, device="cpu", dtype=own) for own in (None, torch.float32, torch.int8))
    assert chosen.engine.sampling_network is chosen.engine.network
    assert default.engine.sampling_network is default.engine.sampling_network is not default.engine.network
    texts = [one.generate(length=8, num_return_sequences=32, seed=0) for one in (default, chosen, made)]
    assert texts[0] == texts[2] != texts[1]
    assert nats(default) == nats(chosen)
    with torch.no_grad():  # changed parameters are noticed
        for parameter in default.backbone.parameters():
            parameter.zero_()
    assert default.generate(length=8, num_return_sequences=32, seed=0) != texts[0]


def test_compilation_is_for_gpus(model):
    with pytest.raises(ValueError, match="`compile` is for GPUs, and the device is 'cpu'; leave it out"):
        load(str(model.engine.folder), device="cpu", compile=True)


def test_an_unknown_dtype_is_refused_in_one_line(model):
    with pytest.raises(
        ValueError, match="`dtype` must be one of float32, bfloat16, float16, float64, int8, got 'fp32'"
    ):
        model.to(dtype="fp32")
