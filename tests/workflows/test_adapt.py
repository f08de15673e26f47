"""Adaptation: from a text to a better model for it that has not forgotten the rest."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shared import encoding_cache, shared
from tiny_models import run_of, toy_sentences

import diffusionbert
from diffusionbert.cli.main import main
from diffusionbert.data.files import Format, items_of
from diffusionbert.inference.engine import load_engine
from diffusionbert.networks.loading import load_masked_lm
from diffusionbert.networks.lora import add_lora, is_adapter, merged, write_adapter
from diffusionbert.storage.files import read_json
from diffusionbert.training.optim import Measurement
from diffusionbert.training.run import stored_config
from diffusionbert.training.trainer import Trainer
from diffusionbert.workflows import adapt as workflow
from diffusionbert.workflows import generic_text
from diffusionbert.workflows.adapt import Adapted, adapt
from diffusionbert.workflows.own_text import folder_for, own_corpus, sentences_that_fit, texts_of

DOMAIN = [f"the sea saw {text}" for text in toy_sentences(60, seed=3)]
"""Sentences that the start has not seen the like of."""


@pytest.fixture(scope="module")
def start() -> Path:
    """A run that has learned the toy English a little."""
    return run_of("linear", steps=60)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch) -> None:
    monkeypatch.setattr(workflow, "generic_texts", _few_texts)
    monkeypatch.setattr(workflow, "measure", lambda *_: Measurement(1024, 1e6))  # a clock may choose either precision


def _few_texts(engine, cache, *, seed):
    return generic_text.generic_texts(engine, cache, number=16, seed=seed)


@pytest.fixture(scope="module")
def adapted(start) -> Adapted:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow, "generic_texts", _few_texts)
        folder = shared("adapted", lambda output: None)
        return adapt(DOMAIN, start, folder, learning_rate=1e-2, samples=2, cache=encoding_cache())


@pytest.mark.slow
def test_the_bound_on_held_out_text_falls_and_that_on_generic_text_is_kept(adapted):
    report = adapted.report
    assert report.domain.difference < -0.1
    assert report.domain.low < report.domain.difference < report.domain.high < 0
    assert report.is_better
    assert report.domain.after - report.domain.before == pytest.approx(report.domain.difference)
    assert report.generic.difference < 0.5
    assert len(report.samples_before) == len(report.samples_after) == 2
    assert 0 < report.best_step <= report.steps


@pytest.mark.slow
def test_an_adapted_folder_is_an_ordinary_run(adapted, start):
    folder = Path(adapted.report.model)
    assert not (folder / "checkpoints").exists()
    model = diffusionbert.load(folder)
    for own, other in zip(model.backbone.parameters(), adapted.model.backbone.parameters(), strict=True):
        assert torch.equal(own, other)
    assert model.engine.vocabulary.fingerprint == load_engine(start).vocabulary.fingerprint
    assert stored_config(folder).objective == load_engine(start).config.objective
    assert read_json(folder / "adapt.json")["steps"] == adapted.report.steps
    # The record is about the weights in the folder, not about those before they were moved back.
    assert read_json(folder / "model" / "diffusionbert.json")["validation"] == {
        "step": adapted.report.best_step,
        "likelihood": "bound",
        "nats_per_token": adapted.report.domain.after,
        "loss_per_token": None,
    }
    card = (folder / "model" / "README.md").read_text(encoding="utf-8")
    assert f"| held-out text | {adapted.report.domain} " in card
    assert "validation text" not in card


@pytest.mark.slow
def test_the_table_has_bounds_samples_and_the_next_command(adapted):
    shown = adapted.report.table()
    assert f"next: diffusionbert generate --model {adapted.report.model}" in shown
    for text in (*adapted.report.samples_before, *adapted.report.samples_after, "held-out text:", "generic text:"):
        assert text in shown


@pytest.mark.slow
def test_an_adaptation_that_never_gains_says_so(start, tmp_path, monkeypatch):
    monkeypatch.setattr(workflow, "MAX_EPOCHS", 1)
    report = adapt(DOMAIN, start, tmp_path / "run", learning_rate=10.0, samples=0, cache=encoding_cache()).report
    assert (report.best_step, report.share) == (0, 0)
    assert report.domain.before == report.domain.after
    assert "the model is still the start" in report.table()
    assert "lower --learning-rate than 10" in report.table()


def test_weights_move_back_until_little_is_forgotten(start, monkeypatch):
    """Compared with all shares on a line: the share that is found forgets no more than is allowed."""
    first, other = load_engine(start), load_engine(start)
    with torch.no_grad():
        for weight in other.network.backbone.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    trained = [weight.clone() for weight in other.network.backbone.parameters()]
    generic, _ = workflow._generic(first, encoding_cache(), 0)
    [before] = workflow._bounds(first, [generic], None)
    [far] = workflow._bounds(other, [generic], None)
    allowed = (far.nats_per_token - before.nats_per_token) / 4
    assert allowed > 0
    monkeypatch.setattr(workflow, "FORGETTING", allowed)
    share = workflow._restrained(first, other, generic, before, None)
    assert 0 < share < 1
    [after] = workflow._bounds(other, [generic], None)
    assert after.nats_per_token <= before.nats_per_token + allowed
    for own, begun, ended in zip(
        other.network.backbone.parameters(), first.network.backbone.parameters(), trained, strict=True
    ):
        torch.testing.assert_close(own, torch.lerp(begun, ended, share))


def test_generic_text_is_drawn_once(start, tmp_path, monkeypatch):
    engine = load_engine(start)
    texts = generic_text.generic_texts(engine, tmp_path, number=4)
    assert texts
    monkeypatch.setattr(generic_text, "_drawn", lambda *_: pytest.fail("drawn again"))
    assert generic_text.generic_texts(engine, tmp_path, number=4) == texts


@pytest.mark.slow
def test_a_stopped_adaptation_resumes_to_the_same_weights(start, tmp_path, monkeypatch):
    options = {"learning_rate": 1e-2, "samples": 0, "cache": encoding_cache()}
    monkeypatch.setattr(workflow, "MAX_EPOCHS", 1)
    whole = adapt(DOMAIN, start, tmp_path / "whole", **options)
    validate = Trainer._validate

    def stop(self):
        validate(self)
        self.is_signaled = self.state.step > 0

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_validate", stop)
        with pytest.raises(KeyboardInterrupt):
            adapt(DOMAIN, start, tmp_path / "parts", **options)
    with pytest.raises(ValueError, match=r"started from .*; leave out `model`"):
        adapt(None, run_of("linear"), tmp_path / "parts", resume=True)
    resumed = adapt(None, None, tmp_path / "parts", resume=True, samples=0, cache=encoding_cache())
    assert resumed.report.domain == whole.report.domain
    assert resumed.report.steps == whole.report.steps
    for own, other in zip(resumed.model.backbone.parameters(), whole.model.backbone.parameters(), strict=True):
        assert torch.equal(own, other)
    with pytest.raises(ValueError, match="is complete; to adapt it further"):
        adapt(None, None, tmp_path / "parts", resume=True)


@pytest.mark.slow
def test_the_command_reads_standard_input_and_names_its_folder(start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workflow, "MAX_EPOCHS", 1)
    text = "".join(f"{line}\n" for line in DOMAIN)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    main(["adapt", "-", f"--model={start}", "--samples=1", "--json", f"--cache={encoding_cache()}"])
    plain = json.loads(capsys.readouterr().out)
    assert plain["model"] == "adapted-text"
    assert (tmp_path / "adapted-text" / "model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("free", "has_peft"), [(10**9, True), (20, True), (20, False)])
def test_an_adapter_is_chosen_where_the_weights_would_not_fit(start, monkeypatch, caplog, free, has_peft):
    engine = load_engine(start)
    memory = SimpleNamespace(available=free * engine.num_parameters)
    monkeypatch.setattr(workflow.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(workflow, "find_spec", lambda name: has_peft or None)
    with caplog.at_level("INFO", logger="diffusionbert"):
        assert workflow._suits_adapter(engine) is (free == 20 and has_peft)
    assert ("so an adapter is trained instead" in caplog.text) is (free == 20 and has_peft)
    assert ("pip install 'diffusionbert[lora]'" in caplog.text) is not has_peft


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_opens_like_a_model(start, tmp_path, merge):
    pytest.importorskip("peft")
    options = {"learning_rate": 3e-2, "samples": 0, "cache": encoding_cache()}
    adapted = adapt(DOMAIN, start, tmp_path / "run", lora=True, merge=merge, **options)
    assert adapted.report.domain.difference < 0
    folder = tmp_path / "run" / "model"
    assert (folder / "model.safetensors").exists() is merge
    assert (folder / "adapter_model.safetensors").exists() is not merge
    for own, other in zip(diffusionbert.load(tmp_path / "run").backbone.parameters(),
                          adapted.model.backbone.parameters(), strict=True):  # fmt: skip
        torch.testing.assert_close(own, other)


def test_the_product_of_factors_is_added_to_the_weights(start, tmp_path):
    """As PEFT computes it: merged for export, and from a folder with the factors alone."""
    peft = pytest.importorskip("peft")
    backbone = load_engine(start).network.backbone
    tokens = torch.tensor([[2, 20, 4, 30, 3]])
    add_lora(backbone, 2)
    assert {name for name, one in backbone.named_parameters() if one.requires_grad} == {
        name for name, _ in backbone.named_parameters() if "lora_" in name
    }
    with torch.no_grad():
        for name, weight in backbone.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3)
    expected = backbone.eval()(tokens).logits
    weights = dict(backbone.named_parameters())
    plain = load_engine(start).network.backbone
    plain.load_state_dict(merged(weights), strict=False)
    torch.testing.assert_close(plain.eval()(tokens).logits, expected)

    folder = tmp_path / "adapter"
    shutil.copytree(start / "model", folder)
    write_adapter(folder, {name: weight.detach() for name, weight in weights.items()}, str(start / "model"))
    assert is_adapter(folder)
    torch.testing.assert_close(load_masked_lm(folder).eval()(tokens).logits, expected)
    opened = peft.PeftModel.from_pretrained(load_engine(start).network.backbone, folder).eval()
    torch.testing.assert_close(opened(tokens).logits, expected)


@pytest.mark.parametrize(("change", "message"), [
    ({"r": 3}, "must hold"),
    ({"lora_alpha": None}, "lora_alpha must be a number"),
    ({"peft_type": "IA3"}, "does not describe a LoRA adapter"),
    ({"base_model_name_or_path": ""}, "does not name its base model"),
])  # fmt: skip
def test_damaged_adapters_are_refused(start, tmp_path, change, message):
    folder = tmp_path / "adapter"
    shutil.copytree(start / "model", folder)
    name, weight = next(
        (name.removesuffix(".weight"), one)
        for name, one in load_engine(start).network.backbone.named_parameters()
        if name.endswith("query.weight")
    )
    factors = {"lora_A": torch.ones(2, weight.shape[1]), "lora_B": torch.ones(weight.shape[0], 2)}
    named = {f"{name}.{kind}.default.weight": factor for kind, factor in factors.items()}
    write_adapter(folder, named, str(start / "model"))
    opened = dict(load_masked_lm(folder).named_parameters())[f"{name}.weight"]
    torch.testing.assert_close(opened, weight + 2)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_masked_lm(folder)


# ---- text -----------------------------------------------------------------------------------------------------------

SENTENCES = ["The king saw the sea.", 'He said: "No!"', "It was at 3 p.m. in may.", "The end"]


def test_paragraphs_become_sentences_and_few_long_lines_stay(start, tmp_path):
    vocabulary, file = load_engine(start).vocabulary, tmp_path / "book.txt"
    longest = 2 + max(len(tokens) for tokens in vocabulary.own(SENTENCES))
    file.write_text(3 * (" ".join(SENTENCES) + "\r\n") + SENTENCES[0] + "\n", encoding="utf-8")
    corpus = own_corpus(file, tmp_path / "run", vocabulary, longest)
    assert Path(corpus).read_text(encoding="utf-8").splitlines() == [*(3 * SENTENCES), SENTENCES[0]]
    file.write_text(" ".join(SENTENCES) + "\n" + 100 * f"{SENTENCES[0]}\n", encoding="utf-8")
    assert own_corpus(file, tmp_path / "run", vocabulary, longest) == str(file)  # training skips and counts it


def test_what_has_no_ends_of_sentences_is_cut_between_words(start):
    vocabulary = load_engine(start).vocabulary
    words = ["king", "sea", "river"] * 50
    lines = list(sentences_that_fit("\t".join(words), vocabulary, 16))
    assert " ".join(lines).split() == words
    assert min(len(tokens) for tokens in vocabulary.encode(lines)) > 4
    assert max(len(tokens) for tokens in vocabulary.encode(lines)) <= 16
    assert list(sentences_that_fit(" \r\n", vocabulary, 16)) == []


@pytest.mark.parametrize(("texts", "name"), [
    ("films.txt.gz", "adapted-films"), ("my films/", "adapted-my-films"), ("corpus/*.txt", "adapted-text"),
    (["a text"], "adapted-text"), ("x/my-films.2020.txt", "adapted-my-films"),
])  # fmt: skip
def test_a_new_folder_has_the_name_of_the_text(texts, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folder_for(texts) == Path(name)
    Path(name).mkdir()
    assert folder_for(texts) == Path(f"{name}-2")


def test_of_a_large_text_lines_are_drawn(start, tmp_path):
    vocabulary, file = load_engine(start).vocabulary, tmp_path / "large.txt"
    lines = [f"the king saw {number:04} ." for number in range(1000)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    corpus = own_corpus(file, tmp_path / "run", vocabulary, 64, most=100)
    found = Path(corpus).read_text(encoding="utf-8").splitlines()
    assert len(found) == len(set(found) & set(lines)) == 100
    assert 300 < sum(lines.index(line) for line in found) / 100 < 700  # of all parts: three standard errors are 87
    assert own_corpus(file, tmp_path / "run", vocabulary, 64, most=2000) == str(file)
    assert own_corpus(file, tmp_path / "run", vocabulary, 64) == str(file)


def test_a_text_is_never_written_over(start, tmp_path):
    vocabulary, file = load_engine(start).vocabulary, tmp_path / "text.txt"
    file.write_text(50 * (" ".join(SENTENCES) + "\n"), encoding="utf-8")
    before = file.read_bytes()
    for texts, most in ((file, None), (file, 10), (["a", "b"], None)):
        with pytest.raises(ValueError, match=r"text.txt' exists, where the text would be written; give another folder"):
            own_corpus(texts, tmp_path, vocabulary, 16 if most is None else 64, most=most)
    assert file.read_bytes() == before


def test_lines_that_cannot_be_used_are_counted(start, tmp_path, caplog, monkeypatch):
    vocabulary, file = load_engine(start).vocabulary, tmp_path / "mixed.txt"
    lines = [" ".join(SENTENCES), " ".join(SENTENCES).replace("!", "\xe9")] * 20
    content = b"".join(line.encode("latin-1") + b"\n" for line in lines)
    file.write_bytes(content)
    said = "your text: 20 kept; 20 skipped: 20 not UTF-8 (first at"
    with caplog.at_level("WARNING", "diffusionbert"):
        own_corpus(file, tmp_path / "run", vocabulary, 16)
        assert [one.startswith(said) for one in caplog.messages] == [True]
        caplog.clear()
        assert list(texts_of(items_of(io.BytesIO(content), Format(), "standard input"))) == [f"{lines[0]}\n"] * 20
    assert caplog.messages == [f"{said} standard input:2)"]


def test_a_few_sentences_are_refused(start, tmp_path):
    vocabulary, file = load_engine(start).vocabulary, tmp_path / "few.txt"
    file.write_text("a\nb\n\n", encoding="utf-8")
    for texts, what in ((file, "few.txt' has .*: 2"), (["a", " ", "b"], "the text has .*: 2"), (["a. B."], ": 1")):
        with pytest.raises(ValueError, match=f"{what}; give at least 10"):
            own_corpus(texts, tmp_path / "run", vocabulary, 64)
    assert not (tmp_path / "run").exists()


def test_pairs_are_refused(start, tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("a source\ta target\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has pairs of source and target: use train"):
        adapt(file, start, tmp_path / "run")


@pytest.mark.parametrize(("options", "message"), [
    ({"texts": "x.txt", "lora": False, "merge": True}, "`merge` is for `lora`"),
    ({"texts": "x.txt", "minutes": 0.0}, "`minutes` must be greater than 0"),
    ({"texts": "x.txt", "samples": -1}, "`samples` must be between 0 and"),
    ({"texts": None}, "there is no text to adapt to"),
    ({"texts": []}, "there is no text to adapt to"),
    ({"texts": None, "resume": True}, "`resume` needs the `output`"),
    ({"texts": "x.txt", "model": "unrolled"}, "adaptation is guided by a likelihood"),
    ({"texts": "x.txt", "model": "pairs"}, "trained on pairs"),
])  # fmt: skip
def test_wrong_use_is_refused_in_one_line(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options["model"] = run_of(options.get("model", "linear"))
    with pytest.raises(ValueError, match=message):
        adapt(**options, cache=encoding_cache())
