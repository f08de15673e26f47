"""Damaged and hostile folders, files and arguments: refused in one line, with exit code 2, memory and time bounded."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zstandard
from hostile import Outcome, attempt, edit_json, edit_tensors
from shared import encoding_cache
from tiny_models import corpus, plain_roberta, run_of

from diffusionbert.data.corpus import parse_source
from diffusionbert.storage.files import require_output
from diffusionbert.storage.limits import Limit

pytestmark = pytest.mark.slow
Damage = Callable[[Path], object]


def config(**values: object) -> Damage:
    return lambda folder: edit_json(folder / "config.json", lambda plain: plain.update(values))


def described(*path: str, value: object) -> Damage:
    def change(plain):
        for key in path[:-1]:
            plain = plain[key]
        plain[path[-1]] = value

    return lambda folder: edit_json(folder / "diffusionbert.json", change)


def statistics(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    file = "token_counts.safetensors"
    return lambda folder: edit_tensors(folder / file, lambda tensors: tensors.update({name: change(tensors[name])}))


def queries(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Changes the weights of the queries."""
    return lambda folder: edit_tensors(
        folder / "model.safetensors",
        lambda tensors: tensors.update({name: change(tensors[name]) for name in [*tensors] if "query.weight" in name}),
    )


def tokenizer(change: Callable[[dict], object]) -> Damage:
    def changed(plain: dict) -> None:
        change(plain)

    return lambda folder: edit_json(folder / "tokenizer.json", changed)


def _without_mask(plain: dict) -> None:
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] != "[MASK]"]
    del plain["model"]["vocab"]["[MASK]"]


def _smaller(folder: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if "word_embeddings" in name or name.endswith("predictions.bias")]
        tensors.update({name: tensors[name][:100].contiguous() for name in names})

    config(vocab_size=100)(folder)
    edit_tensors(folder / "model.safetensors", cut)


def _piped(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def _templates(plain: dict) -> None:
    for token in plain["post_processor"]["special_tokens"].values():
        token["ids"] = [10**5]


STRENGTH = {"name": "spindle", "strength": 10**400}
MODELS: dict[str, tuple[Damage, str]] = {
    "counts are a scalar": (statistics("counts", lambda counts: torch.tensor(3)), r"must hold counts \[\d+\]"),
    "counts have two axes": (statistics("counts", lambda counts: counts[:, None].contiguous()), "must hold counts"),
    "counts are negative": (statistics("counts", lambda counts: counts - 5), "must hold finite counts"),
    "counts are NaN": (statistics("counts", lambda counts: counts * torch.nan), "must hold counts"),
    "lengths are a scalar": (statistics("length_histogram", lambda old: torch.tensor(3)), "length_histogram"),
    "lengths are floats": (statistics("length_histogram", lambda old: old + 0.5), "length_histogram"),
    "lengths are empty": (statistics("length_histogram", lambda old: old[:0]), "length_histogram"),
    "lengths are zeros": (statistics("length_histogram", lambda old: 0 * old), "length_histogram of zeros"),
    "lengths are a string": (described("length_histogram", value="abc"), "no field 'length_histogram'"),
    "the training text is 5": (described("training_text", value=5), "training_text must be a list"),
    "a strength of 10⁴⁰⁰": (described("config", "objective", "schedule", value=STRENGTH), "number of 64 bits"),
    "10³⁰ steps": (described("config", "objective", "num_steps", value=10**30), "whole number of 64 bits"),
    "a length of -5": (described("config", "data", "max_length", value=-5), "must be 1 or more"),
    "deep JSON": (lambda folder: (folder / "diffusionbert.json").write_text("[" * 10**5), "not valid JSON"),
    "an id of 10⁹": (tokenizer(lambda plain: plain["model"]["vocab"].update(zz=10**9)), Limit.TOKENS.variable),
    "an added id of 10⁹": (tokenizer(lambda plain: plain["added_tokens"][0].update(id=10**9)), Limit.TOKENS.variable),
    "no mask in the vocabulary": (tokenizer(_without_mask), "no mask token of its own"),
    "no mask token": (
        lambda folder: edit_json(folder / "tokenizer_config.json", lambda plain: plain.update(mask_token=None)),
        "has no mask_token",
    ),
    "a word as mask": (
        lambda folder: edit_json(folder / "tokenizer_config.json", lambda plain: plain.update(mask_token="king")),
        "other special tokens",
    ),
    "a network of fewer tokens": (_smaller, "the network only 100"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers 0"),
    "10⁸ layers": (config(num_hidden_layers=10**8), Limit.LAYERS.variable),
    "10⁸ labels": (config(num_labels=10**8), "too many labels"),
    "10⁸ positions": (config(max_position_embeddings=10**8), "config.json describes"),
    "10⁹ tokens": (config(vocab_size=10**9), "config.json describes"),
    "a width of 10¹²": (config(hidden_size=10**12), "overflow"),
    "heads as text": (config(num_attention_heads="two"), "num_attention_heads"),
    "a config that is no object": (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json"),
    "a damaged config": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json' is not valid JSON"),
    "int8 without a scale": (queries(lambda weight: weight.to(torch.int8)), "as I8, which needs a scale"),
    "int32 weights": (queries(lambda weight: weight.to(torch.int32)), "as I32"),
    "float8 weights": (queries(lambda weight: weight.to(torch.float8_e4m3fn)), "as F8_E4M3"),
    "weights that are NaN": (queries(lambda weight: weight * torch.nan), "not finite"),
    "a huge header": (
        lambda folder: (folder / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
        "damaged",
    ),
    **{f"a pipe as {name}": (_piped(name), "is a pipe") for name in ("config.json", "model.safetensors")},
    "a pipe as diffusionbert.json": (_piped("diffusionbert.json"), "is a pipe"),
    "a pipe as tokenizer.json": (_piped("tokenizer.json"), "is a pipe"),
}
GROWING = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
TOKENIZERS: dict[str, tuple[Damage, str]] = {
    "ids outside the vocabulary": (tokenizer(_templates), "adds the id 100000"),
    "a normalizer that grows": (
        tokenizer(lambda plain: plain.update(normalizer={"type": "Sequence", "normalizers": GROWING})),
        Limit.GROWTH.variable,
    ),
    "a decoder that grows": (
        tokenizer(lambda plain: plain.update(decoder={"type": "Sequence", "decoders": GROWING})),
        Limit.GROWTH.variable,
    ),
}


def refused(outcome: Outcome, message: str) -> None:
    assert outcome.kind == "refused", outcome
    assert message in outcome.said or re.search(message, outcome.said), outcome


def used(folder: Path, *more: str) -> Outcome:
    """Every kind of command on a model."""
    model = [f"--model={folder}", "--device=cpu"]
    return attempt(["info", *model], ["generate", "--length=3", *model], ["score", *(more or ["the king ."]), *model])


@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_model_is_refused(name, tmp_path):
    damage, message = MODELS[name]
    shutil.copytree(run_of("linear") / "model", tmp_path / "model")
    damage(tmp_path / "model")
    refused(used(tmp_path / "model"), message)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(name, tmp_path):
    damage, message = TOKENIZERS[name]
    shutil.copytree(plain_roberta(), tmp_path / "model")
    damage(tmp_path / "model")
    refused(used(tmp_path / "model"), message)


def test_a_regular_expression_that_backtracks_without_end_is_an_error_of_the_text(tmp_path):
    """In one line: what Rust says about its panic is not shown."""
    shutil.copytree(plain_roberta(), tmp_path / "model")
    split = {"type": "Split", "pattern": {"Regex": r"^(\w+\s?)*\d$"}, "behavior": "Isolated", "invert": False}
    tokenizer(lambda plain: plain.update(pre_tokenizer=split))(tmp_path / "model")
    outcome = used(tmp_path / "model", "aaaa " * 9)
    refused(outcome, "the tokenizer cannot encode this text")


# ---- checkpoints of the original release ----------------------------------------------------------------------------

NAMES = [
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.position_embeddings.weight",
    "bert.encoder.layer.0.intermediate.dense.weight",
]
LEGACY: dict[str, tuple[dict, str]] = {
    "scalars": (dict.fromkeys(NAMES, torch.tensor(1.0)), "holds no BERT"),
    "expanded views": (dict.fromkeys(NAMES, torch.zeros(1).expand(400_000, 5000)), "larger tensors than its"),
    "names that are no text": ({5: torch.zeros(3)}, "holds no BERT"),
    "layer 10⁹": (
        dict.fromkeys(NAMES, torch.zeros(8, 8)) | {"bert.encoder.layer.1000000000.x": torch.zeros(1)},
        "holds no BERT",
    ),
    "no width": (dict.fromkeys(NAMES, torch.zeros(8, 0)), "holds no BERT"),
}


@pytest.mark.parametrize("name", LEGACY)
def test_a_hostile_checkpoint_is_refused_before_its_tokenizer_is_looked_for(name, tmp_path):
    weights, message = LEGACY[name]
    torch.save({"model": weights}, tmp_path / "old.th")
    start = [f"--start={tmp_path / 'old.th'}", f"--data={corpus()}", f"--output={tmp_path / 'run'}"]
    refused(attempt(["train", *start, "--verbosity=error"]), message)


# ---- corpora and other files ----------------------------------------------------------------------------------------


def _train(data: Path | str, folder: Path) -> list[str]:
    output = [f"--output={folder / 'run'}", f"--cache={folder / 'cache'}", "--verbosity=error"]
    return ["train", "--preset=tiny", f"--data={data}", "--steps=1", *output]


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "gz": (lambda: gzip.compress(b"\0" * (1 << 24)) * 8, Limit.EXPANSION.variable),
    "xz": (lambda: lzma.compress(b"\0" * (1 << 25)) * 4, Limit.EXPANSION.variable),
    "zst": (lambda: zstandard.ZstdCompressor().compress(b"\0" * (1 << 25)) * 4, Limit.EXPANSION.variable),
    "txt": (lambda: b"\n" * 20_000, Limit.EMPTY_LINES.variable),
}


@pytest.mark.parametrize("suffix", BOMBS)
def test_a_bomb_is_refused(suffix, tmp_path, monkeypatch):
    monkeypatch.setenv(Limit.EMPTY_LINES.variable, "5000")
    content, message = BOMBS[suffix]
    file = tmp_path / f"bomb.{suffix}"
    file.write_bytes(content())
    refused(attempt(_train(file, tmp_path)), message)


def test_a_small_file_may_be_compressed_well(tmp_path):
    (tmp_path / "text.gz").write_bytes(gzip.compress(corpus().read_bytes() * 3))
    assert attempt(_train(tmp_path / "text.gz", tmp_path)).kind == "fine"


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    model = [f"--model={run_of('linear')}", "--device=cpu"]
    refused(attempt(_train(tmp_path / "pipe", tmp_path)), "is a pipe")
    refused(attempt(["score", f"--file={tmp_path / 'pipe'}", *model]), "is a pipe")
    refused(attempt(["score", "--file=/dev/zero", *model]), "is a device")


@pytest.mark.parametrize("pattern", ["/**/*.txt", "/*", "/*/x.txt"])
def test_no_glob_searches_the_whole_file_system(pattern):
    with pytest.raises(ValueError, match="searches the whole file system"):
        parse_source(pattern)


# ---- arguments ------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "length": (["generate", "--length=999999", "--block=32"], Limit.GENERATED_TOKENS.variable),
    "new tokens": (["generate", f"--max-new-tokens={10**30}"], Limit.GENERATED_TOKENS.variable),
    "steps": (["generate", f"--steps={10**30}"], Limit.STEPS.variable),
    "alternatives": (["fill", "the [MASK] .", "--num-alternatives=1000000"], Limit.ALTERNATIVES.variable),
    "blanks": (["fill", "a [BLANK] b", "--max-blank-tokens=20"], Limit.BLANK_TOKENS.variable),
    "device": (["generate", "--device=\x1b[31mred"], "is not available"),
    "file": (["score", "--file=/nowhere/\x1b[31mred"], "cannot be read"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_hostile_argument_is_refused_before_any_work(name, monkeypatch):
    command, message = ARGUMENTS[name]
    monkeypatch.setenv(Limit.BLANK_TOKENS.variable, "100")
    refused(attempt([*command, f"--model={run_of('linear')}"]), message)


def test_escape_sequences_do_not_reach_the_terminal():
    assert "\x1b" not in attempt(["info", "--model=/nowhere/\x1b]0;title\x07"]).said


def test_the_documentation_lists_all_limits():
    documented = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", documented, re.MULTILINE))
    assert {name: int(number.replace(",", "")) for name, number in rows.items() if name.isupper()} == {
        limit.name: limit.value for limit in Limit
    }


def test_a_limit_is_a_setting(monkeypatch):
    monkeypatch.setenv("DIFFUSIONBERT_MAX_ALTERNATIVES", "3")
    model = f"--model={run_of('linear')}"
    refused(attempt(["fill", "the [MASK] .", "--num-alternatives=4", model]), "at most 3")
    monkeypatch.setenv("DIFFUSIONBERT_MAX_ALTERNATIVES", "many")
    refused(attempt(["fill", "the [MASK] .", model]), "must be a whole number, got 'many'")


@pytest.mark.parametrize("command", ["train", "evaluate", "score", "compare"])
def test_an_empty_output_is_refused(command, tmp_path):
    refused(attempt([command, "--output", ""], folder=tmp_path), "--output is empty")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("output", ["", "/", Path("/"), "/tmp/.."])
def test_the_root_of_the_file_system_is_no_output(output):
    with pytest.raises(ValueError, match="would be filled with files"):
        require_output(output)


# ---- resuming -------------------------------------------------------------------------------------------------------


def test_a_run_without_checkpoints_is_neither_resumed_nor_said_to_be(tmp_path):
    shutil.copytree(run_of("linear"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    resume = ["train", "--resume", f"--output={tmp_path / 'run'}", f"--cache={encoding_cache()}", "--verbosity=error"]
    refused(attempt(resume), "train in another --output")
    refused(attempt(_train(corpus(), tmp_path)), "no checkpoint to resume from, so choose another --output")


def test_a_finished_run_without_its_newest_checkpoint_exports_the_same_model(tmp_path):
    shutil.copytree(run_of("linear"), tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert json.loads((tmp_path / "run" / "last.json").read_text())["checkpoint"] == newest.name
    shutil.rmtree(newest)
    before = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    resume = ["train", "--resume", f"--output={tmp_path / 'run'}", f"--cache={encoding_cache()}", "--verbosity=warning"]
    assert attempt(resume).kind == "fine"
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == before
