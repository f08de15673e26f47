"""Training in stages: a model exported in half precision and small files, and a run that goes on from it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from shared import encoding_cache
from tiny_models import config_of, corpus, model_of, run_of
from transformers import AutoModelForMaskedLM

from diffusionbert.cli.main import main
from diffusionbert.model import load
from diffusionbert.networks.loading import Pretrained
from diffusionbert.recipes import started_from
from diffusionbert.recipes import train as train_recipe
from diffusionbert.storage.weights import WeightFormat, save_weights
from diffusionbert.training.run import stored_config, train

LIMIT = 8000


def validations(run: Path) -> list[float]:
    events = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [event["nats_per_token"] for event in events if event["event"] == "validation"]


@pytest.fixture(scope="module")
def first_stage(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("stages") / "first"
    size = ["--layers=1", "--width=32", "--heads=2", "--vocabulary=512", "--max-length=24", "--batch-tokens=512"]
    schedule = ["--steps=12", "--warmup=2", "--decay=constant_with_warmup", "--learning-rate=5e-3"]
    form = ["--export-precision=fp16", f"--shard-size={LIMIT // 1000}KB"]
    cache = f"--cache={encoding_cache()}"
    main(["train", f"--data={corpus()}", f"--output={output}", "--time=layers", cache, *size, *schedule, *form])
    return output


def test_files_are_no_larger_than_asked(first_stage):
    files = sorted((first_stage / "model").glob("model-*.safetensors"))
    assert len(files) > 3
    for file in files:
        with safe_open(file, "pt") as stored:
            assert file.stat().st_size <= LIMIT or len(stored.keys()) == 1
        assert {value.dtype for value in load_file(file).values()} == {torch.float16}
    index = json.loads((first_stage / "model" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    beside = load_file(first_stage / "model" / "beside.safetensors")
    assert {value.dtype for value in beside.values()} == {torch.float16}


def test_transformers_and_load_open_the_shards_in_float32(first_stage):
    theirs = AutoModelForMaskedLM.from_pretrained(first_stage / "model")
    ours = load(first_stage, device="cpu").backbone
    for name, value in theirs.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, ours.state_dict()[name])


def test_the_next_stage_begins_where_the_last_one_ended(first_stage, tmp_path):
    config, cache = f"--config={first_stage / 'run.json'}", f"--cache={encoding_cache()}"
    decay = ["--steps=4", "--warmup=1", "--decay=wsd", "--export-precision=fp32"]
    main(["train", config, f"--start={first_stage}", f"--output={tmp_path / 'second'}", cache, *decay])
    before, after = validations(first_stage), validations(tmp_path / "second")
    assert after[0] == pytest.approx(min(before[1:]), abs=2e-3)
    assert abs(before[0] - after[0]) > 0.1
    second = stored_config(tmp_path / "second")
    assert second.backbone == Pretrained(str(first_stage / "model"))
    assert second.objective == stored_config(first_stage).objective
    chosen = second.training
    assert (chosen.learning_rate, chosen.warmup, chosen.decay, chosen.steps) == (5e-3, 1, "wsd", 4)
    counts = [load_file(run / "model" / "token_counts.safetensors") for run in (first_stage, tmp_path / "second")]
    assert all(torch.equal(value, counts[1][name]) for name, value in counts[0].items())


def test_a_configuration_takes_a_start_from_python(tmp_path):
    run, config = run_of("linear"), config_of("linear", steps=1)
    made = train_recipe(config=config, start=run, output=tmp_path / "run", cache=encoding_cache())
    assert made.config.backbone == started_from(config, str(run)).backbone


def test_a_run_that_is_over_is_exported_anew(tmp_path):
    train(config_of("linear", steps=2), tmp_path, cache=encoding_cache())
    before = load_file(tmp_path / "model" / "model.safetensors")
    resume = ["train", "--resume", f"--output={tmp_path}", f"--cache={encoding_cache()}"]
    main([*resume, "--export-precision=bf16", "--shard-size=1GB"])
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(value.bfloat16(), after[name]) for name, value in before.items())


@pytest.mark.parametrize("kind", ["linear", "vectors"])
def test_a_model_is_saved_in_half_precision(kind, tmp_path):
    model = model_of(kind)
    halved = load(model.save_pretrained(tmp_path / "half", precision="fp16", shard_size="4KB"), device="cpu")
    for mine, theirs in zip(model.engine.module().parameters(), halved.engine.module().parameters(), strict=True):
        assert torch.equal(mine.half().float(), theirs)


@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=12),
    limit=st.integers(1, 2000),
    name=st.text('ab.é"\\', max_size=30),
)
def test_shards_hold_every_tensor_once_within_the_limit(sizes, limit, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"{name}{number}": torch.full((size,), number) for number, size in enumerate(sizes)}
    save_weights(tensors, folder, limit)
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored = load_file(file)
        assert file.stat().st_size <= limit or len(stored) == 1
        assert not found.keys() & stored.keys()
        found |= stored
    assert found.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[key]) for key, value in found.items())


@pytest.mark.parametrize(("text", "size"), [("15MB", 15_000_000), ("1.5 kb", 1500), ("7B", 7), ("2GB", 2 * 10**9)])
def test_a_size_is_read(text, size):
    assert WeightFormat(shard_size=text).max_bytes == size


@pytest.mark.parametrize("text", ["", "15", "MB", "-1MB", "0MB", "15MiB", "1e3KB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="must be a size such as 500KB, 15MB or 2GB, got"):
        WeightFormat(shard_size=text)


def test_what_does_not_fit_half_precision_is_refused():
    with pytest.raises(ValueError, match="a has values beyond the range of fp16; export in bf16 or fp32"):
        WeightFormat("fp16").convert({"a": torch.tensor([1e5])})
    kept = WeightFormat("fp16").convert({"a": torch.tensor([-math.inf]), "b": torch.tensor([1])})
    assert (kept["a"].dtype, kept["b"].dtype) == (torch.float16, torch.int64)
