"""Damaged and hostile folders, files and arguments: refused in one line, with exit code 2, memory and time bounded."""

from __future__ import annotations

import base64
import bz2
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
from safetensors.torch import load_file, save_file
from shared import encoding_cache
from tiny_models import corpus, plain_bert, plain_roberta, run_of
from transformers import AlbertConfig, AlbertForMaskedLM

from diffusionbert.data.corpus import parse_source
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.storage.files import require_output
from diffusionbert.storage.limits import Limit
from diffusionbert.storage.reader import stored_tensors
from diffusionbert.storage.weights import quantized

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


def embeddings(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    name = "bert.embeddings.word_embeddings.weight"
    return lambda folder: edit_tensors(
        folder / "model.safetensors", lambda tensors: tensors.update({name: change(tensors[name])})
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


def _unsigned(folder: Path) -> None:
    """Stores as int8, but with another type."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stored = quantized(tensors)
    stored.update({name: value.view(torch.uint8) for name, value in stored.items() if value.dtype == torch.int8})
    save_file(stored, folder / "model-int8.safetensors", {"format": "pt"})


def _index(name: str) -> Damage:
    """Names another file for all weights than those beside the index."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        weights = dict.fromkeys(stored_tensors(folder / "part.safetensors"), name)
        index = {"metadata": {}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def _nested(key: str, depth: int, rule: dict) -> dict:
    return {"type": "Sequence", key: [_nested(key, depth - 1, rule)]} if depth else rule


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
        "special tokens do not fit",
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
    "int8 as uint8": (_unsigned, "as U8, which needs a scale"),
    "int32 weights": (queries(lambda weight: weight.to(torch.int32)), "as I32"),
    "float8 weights": (queries(lambda weight: weight.to(torch.float8_e4m3fn)), "as F8_E4M3"),
    "weights that are NaN": (queries(lambda weight: weight * torch.nan), "not finite"),
    "a huge header": (
        lambda folder: (folder / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
        "damaged",
    ),
    "a chunk size as text": (config(chunk_size_feed_forward="a"), "cannot compute"),
    "heads below 0": (config(num_attention_heads=-2), "cannot compute"),
    "no epsilon": (config(layer_norm_eps=float("nan")), "cannot compute"),
    "weights that overflow": (embeddings(lambda weight: torch.full_like(weight, 3e38)), "cannot compute"),
    "a property as a setting": (config(use_return_dict=False), "use_return_dict"),
    "a decoder in place of an encoder": (config(is_decoder=True), "is_decoder"),
    "foreign quantization": (config(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "10⁸ repeats of a block": (config(block_repeats=[10**8, 1]), Limit.LAYERS.variable),
    "layers of a config inside": (config(text_config={"num_hidden_layers": 10**8}), Limit.LAYERS.variable),
    "10⁵ settings": (config(**{f"setting_{number}": 0 for number in range(10**5)}), "more than 50,000 settings"),
    "weights in another folder": (_index("../model/part.safetensors"), "not a file next to it"),
    "weights that are no safetensors": (_index("part.bin"), "not a file next to it"),
    "an adapter beside the weights": (
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "weights and an adapter_config.json",
    ),
    **{f"a pipe as {name}": (_piped(name), "is a pipe") for name in ("config.json", "model.safetensors")},
    "a pipe as diffusionbert.json": (_piped("diffusionbert.json"), "is a pipe"),
    "a pipe as tokenizer.json": (_piped("tokenizer.json"), "is a pipe"),
}


def _rules(name: str, key: str, rule: dict) -> Damage:
    return tokenizer(lambda plain: plain.update({name: {"type": "Sequence", key: [rule] * 60}}))


def _precompiled(table: bytes) -> Damage:
    rule = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    return tokenizer(lambda plain: plain.update(normalizer=rule))


NOTHING = {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
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
    "400 rules in each other": (
        tokenizer(lambda plain: plain.update(normalizer=_nested("normalizers", 400, {"type": "Lowercase"}))),
        Limit.GROWTH.variable,
    ),
    "no padding in the config": (config(pad_token_id=None), "cannot compute"),
    "60 normalizers to bytes": (_rules("normalizer", "normalizers", {"type": "ByteLevel"}), Limit.GROWTH.variable),
    "60 splits to bytes": (_rules("pre_tokenizer", "pretokenizers", BYTES), Limit.GROWTH.variable),
    "a damaged table": (_precompiled(b""), "damaged precompiled_charsmap"),
    "a table that claims 4 GiB": (_precompiled(b"\xff" * 4 + b"\0" * 2000), "damaged precompiled_charsmap"),
    "a table that grows": (_precompiled((4).to_bytes(4, "little") + b"\0" * 4 + b"a" * 5000), Limit.GROWTH.variable),
    "a second text": (
        tokenizer(lambda plain: plain["post_processor"].update(single=plain["post_processor"]["pair"])),
        "cannot encode",
    ),
    "nothing replaced": (tokenizer(lambda plain: plain.update(normalizer=NOTHING)), "cannot encode"),
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


BESIDE: dict[str, tuple[str, Damage, str]] = {
    "10⁹ numbers per word": ("vectors", described("config", "objective", "width", value=10**9), "values, but"),
    "10¹² steps": ("layers-learned", described("config", "objective", "num_steps", value=10**12), "values, but"),
    "long targets": (
        "pairs",
        statistics("source_lengths", lambda table: torch.tensor([[2**62, 2**62, 1]])),
        Limit.POSITIONS.variable,
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_beside_the_backbone_is_not_larger_than_its_file(name, tmp_path):
    kind, damage, message = BESIDE[name]
    shutil.copytree(run_of(kind) / "model", tmp_path / "model")
    damage(tmp_path / "model")
    refused(used(tmp_path / "model"), message)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(name, tmp_path):
    damage, message = TOKENIZERS[name]
    shutil.copytree(plain_roberta(), tmp_path / "model")
    damage(tmp_path / "model")
    refused(used(tmp_path / "model"), message)


def test_pieces_are_never_drawn_at_random(tmp_path):
    """A tokenizer may say so, for training."""
    shutil.copytree(plain_roberta(), tmp_path / "model")
    tokenizer(lambda plain: plain["model"].update(dropout=0.9))(tmp_path / "model")
    text = ["the white castle after the long war on monday morning"]
    assert Vocabulary.load(tmp_path / "model").encode(text) == Vocabulary.load(plain_roberta()).encode(text)


def test_a_decoder_that_strips_more_than_a_piece_is_refused(tmp_path):
    shutil.copytree(plain_roberta(), tmp_path / "model")
    strip = {"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}
    tokenizer(lambda plain: plain.update(decoder=strip))(tmp_path / "model")
    refused(attempt(["fill", "the [MASK] .", f"--model={tmp_path / 'model'}", "--device=cpu"]), "cannot decode")


def test_a_tokenizer_needs_no_decoder(tmp_path):
    shutil.copytree(plain_roberta(), tmp_path / "model")
    tokenizer(lambda plain: plain.update(decoder=None))(tmp_path / "model")
    assert attempt(["fill", "the [MASK] .", f"--model={tmp_path / 'model'}", "--device=cpu"]).kind == "fine"


def test_a_regular_expression_that_backtracks_without_end_is_an_error_of_the_text(tmp_path):
    """In one line: what Rust says about its panic is not shown."""
    shutil.copytree(plain_roberta(), tmp_path / "model")
    split = {"type": "Split", "pattern": {"Regex": r"^(\w+\s?)*\d$"}, "behavior": "Isolated", "invert": False}
    tokenizer(lambda plain: plain.update(pre_tokenizer=split))(tmp_path / "model")
    outcome = used(tmp_path / "model", "aaaa " * 9)
    refused(outcome, "the tokenizer cannot encode this text")


def test_a_config_says_what_is_computed_and_not_how(tmp_path):
    """It could name kernels on the Hub, which are code, or weights that were not checked."""
    shutil.copytree(run_of("linear") / "model", tmp_path / "model")
    (tmp_path / "model" / "other.safetensors").write_bytes(b"damaged")
    config(
        attn_implementation="kernels-community/flash-attn",
        _attn_implementation="flex_attention",
        experts_implementation="x",
        transformers_weights="other.safetensors",
        auto_map={"AutoModelForMaskedLM": "evil.Model"},
    )(tmp_path / "model")
    model = [f"--model={tmp_path / 'model'}", "--device=cpu"]
    assert attempt(["score", "the king .", *model]) == attempt(["score", "the king .", f"--model={run_of('linear')}"])


def test_parts_without_end_are_refused_whatever_they_are_called(tmp_path):
    """ALBERT has groups of layers, and layers in each group."""
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    AlbertForMaskedLM(AlbertConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path)
    Vocabulary.load(plain_bert()).save(tmp_path)
    config(inner_group_num=10**8)(tmp_path)
    refused(used(tmp_path), "many more parts")


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
    "bz2": (lambda: bz2.compress(b"\0" * (1 << 25)) * 4, Limit.EXPANSION.variable),
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
    "a long name": (["score", f"--file={'x' * 10**5}"], "File name too long"),
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


NETWORKS: dict[str, tuple[str, str]] = {
    "layers": ("--layers=1000000000", Limit.LAYERS.variable),
    "width": ("--width=1000000000", "cannot be made|this machine has"),
    "vocabulary": (f"--vocabulary={10**12}", Limit.TOKENS.variable),
    "length": (f"--max-length={10**30}", Limit.POSITIONS.variable),
    "seed": (f"--seed={10**30}", "must be less than 2⁶³"),
    "steps": (f"--steps={10**30}", "must be less than 2⁶³"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_beyond_all_memory_is_refused_before_it_is_made(name, tmp_path):
    option, message = NETWORKS[name]
    refused(attempt([*_train(corpus(), tmp_path), option]), message)


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


def test_a_run_that_claims_another_network_is_refused_before_it_is_made(tmp_path):
    shutil.copytree(run_of("linear"), tmp_path / "run")
    config(max_position_embeddings=10**8)(tmp_path / "run" / "start")
    resume = ["train", "--resume", f"--output={tmp_path / 'run'}", f"--cache={encoding_cache()}", "--verbosity=error"]
    refused(attempt(resume), "config.json describes")


def test_a_finished_run_without_its_newest_checkpoint_exports_the_same_model(tmp_path):
    shutil.copytree(run_of("linear"), tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert json.loads((tmp_path / "run" / "last.json").read_text())["checkpoint"] == newest.name
    shutil.rmtree(newest)
    before = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    resume = ["train", "--resume", f"--output={tmp_path / 'run'}", f"--cache={encoding_cache()}", "--verbosity=warning"]
    assert attempt(resume).kind == "fine"
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == before
