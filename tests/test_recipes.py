"""Presets, starts and the settings that a start needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from shared import encoding_cache
from tiny_models import corpus, run_of

from diffusionbert.cli.main import main
from diffusionbert.cli.train import Train, TrainingOptions, configure
from diffusionbert.networks.loading import Pretrained
from diffusionbert.recipes import FINE_TUNING_RATE, PRESETS, SYSTEMS, recipe, train
from diffusionbert.reproduce import Request
from diffusionbert.reproduce.reproduction import SCALES
from diffusionbert.training.model_folder import BUNDLED
from diffusionbert.training.run import stored_config


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_from_a_diffusion_model_has_a_low_learning_rate(name):
    """The rate of a run from scratch would undo what the start has learned."""
    before, after = PRESETS[name]("pydoc").training, recipe("pydoc", name, start="bundled").training
    assert after.learning_rate == min(before.learning_rate, FINE_TUNING_RATE)
    assert after.warmup >= max(before.warmup, before.steps // 10)
    assert replace(after, learning_rate=before.learning_rate, warmup=before.warmup) == before


@pytest.mark.parametrize(("name", "rate"), [("tiny", FINE_TUNING_RATE), ("small", 5e-4), ("wiki-small", 5e-4)])
def test_a_run_from_a_masked_language_model_has_the_rate_of_a_preset_that_is_meant_for_one(name, rate):
    assert recipe("pydoc", name, start=str(run_of("masking"))).training.learning_rate == rate
    assert recipe("pydoc", name, start=str(run_of("linear"))).training.learning_rate == FINE_TUNING_RATE


def test_a_learning_rate_that_is_given_is_used(tmp_path):
    given = configure(
        Train(tmp_path, "pydoc", start="bundled", training=TrainingOptions(learning_rate=3e-3, warmup=7))
    ).training
    assert (given.learning_rate, given.warmup) == (3e-3, 7)


@pytest.mark.slow
def test_bundled_means_the_bundled_model_in_any_directory(tmp_path, monkeypatch):
    (tmp_path / "bundled").mkdir()  # whatever the current folder holds
    monkeypatch.chdir(tmp_path)
    config = recipe("pydoc", start="bundled")
    assert config.backbone == Pretrained(str(BUNDLED))
    assert config.data.vocabulary == str(BUNDLED)
    Path("few.txt").write_text("the king saw the sea .\nthe queen saw the river .\n", encoding="utf-8")
    main(["train", f"--data={corpus()}", "--start=bundled", "--steps=1", "--batch-tokens=64", "--output=run",
          f"--cache={encoding_cache()}", "--max-length=24", "--save-every=1", "--validation=few.txt"])  # fmt: skip
    assert stored_config(tmp_path / "run").training.learning_rate == FINE_TUNING_RATE


def test_preset_and_scale_names_are_distinct_and_complete():
    assert set(get_args(get_type_hints(Request)["scale"])) == set(SCALES)
    assert not set(SCALES) & set(PRESETS)
    [presets, _] = get_args(get_type_hints(Train)["preset"])
    assert set(get_args(presets)) == set(PRESETS)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: recipe("pydoc", "huge"), "unknown preset 'huge'; known: tiny, "),
    (lambda: recipe("pydoc", system_name="gan"), "unknown system 'gan'; known: diffusionbert-lte, "),
    (lambda: recipe("pydoc", system_name="d3pm", start="x"), "d3pm starts from random parameters, got the start 'x'"),
])  # fmt: skip
def test_unknown_names_and_useless_starts_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", [name for name, one in SYSTEMS.items() if one.objective.is_causal])
def test_a_causal_system_has_a_causal_backbone(name):
    start = None if name == "decoder" else "some/model"
    assert (
        recipe("pydoc", system_name=name, start=start).backbone.as_causal()
        == recipe("pydoc", system_name=name, start=start).backbone
    )


def test_what_a_system_has_not_or_needs_is_said_before_training(tmp_path: Path):
    with pytest.raises(ValueError, match="has no schedule; leave out `schedule`"):
        train("pydoc", tmp_path / "run", system="sundae", schedule="cosine")
    with pytest.raises(ValueError, match=r"DiffuSeq needs pairs, but .* has none; give a .tsv file"):
        train(corpus(), tmp_path / "run", system="diffuseq")
    assert not (tmp_path / "run").exists()
