"""The experiment's script: its jobs, how one is run, what is kept of them, tables and paired statistics."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shared import encoding_cache
from tiny_models import corpus
from tiny_scale import SMALLER_THAN_SMOKE, STEPS

from diffusionbert.inference.engine import load_engine
from diffusionbert.reproduce import Request
from diffusionbert.reproduce.reproduction import SCALES
from diffusionbert.reproduce.targets import BY_STEPS, MAIN, TRADED_OFF, Row
from diffusionbert.storage.files import load_tensors, read_json, save_tensors
from diffusionbert.training.run import stored_config

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "results"
sys.path.append(str(ROOT / "benchmarks"))  # scripts, not a package
import experiment  # noqa: E402
from experiment import Job, jobs, keep, restore, tables  # noqa: E402

# ---- jobs -----------------------------------------------------------------------------------------------------------


def test_jobs_are_unique_and_come_after_those_they_need():
    names = [job.name for job in jobs()]
    assert len(set(names)) == len(names)
    for job in jobs():
        assert job.needs is None or names.index(job.needs) < names.index(job.name)
    assert {f"seed0/{row.key}" for row in MAIN} < set(names)
    for seed in ("seed1", "seed2"):
        assert {f"{seed}/{name}" for name in experiment.CLAIMED} < set(names)


def test_systems_of_table_3_and_figure_3_are_trained_with_every_seed():
    assert {*BY_STEPS, *TRADED_OFF} < set(experiment.CLAIMED)


@pytest.fixture
def request_(monkeypatch) -> Request:
    monkeypatch.setenv("DIFFUSIONBERT_CACHE", str(encoding_cache()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(SCALES, "smoke", SMALLER_THAN_SMOKE)
    monkeypatch.setitem(SCALES, "34m", replace(SMALLER_THAN_SMOKE, samples=3))
    return Request(data=str(corpus()), other_test=str(corpus()))


@pytest.mark.slow
def test_a_job_with_other_settings_is_trained_with_them(request_, tmp_path):
    job = Job("faster", Row("d3pm-tad"), training=(("learning_rate", 0.5),), objective=(("num_steps", 5),))
    experiment.do(job, tmp_path, request_, workers=2)
    trained = stored_config(tmp_path / "faster" / "runs" / "d3pm-tad")
    assert (trained.training.learning_rate, trained.objective.num_steps) == (0.5, 5)
    assert read_json(job.record(tmp_path))["workers"] == 2
    report = read_json(tmp_path / "faster" / "evaluations" / "d3pm-tad" / "evaluation.json")
    assert report["generation"]["sampling"]["number"] == 2  # no samples for BLEU


@pytest.mark.slow
def test_a_larger_network_is_pretrained_first_and_has_the_vocabulary_of_the_others(request_, tmp_path):
    experiment.do(Job("seed0", Row("d3pm-tad")), tmp_path, request_, workers=1)
    masked = str(tmp_path / "seed0" / "pretrained" / "masked")
    request = replace(request_, masked=masked, pretraining_data=str(corpus()))
    for name in ("diffusionbert", "decoder"):
        experiment.do(Job("larger", Row(name), steps=STEPS + 1, scale="34m"), tmp_path, request, workers=1)
    runs = tmp_path / "larger" / "runs"
    assert stored_config(runs / "diffusionbert").training.steps == STEPS + 1
    assert (tmp_path / "larger" / "pretrained" / "masked").is_dir()
    owner = load_engine(tmp_path / "seed0" / "runs" / "d3pm-tad", "cpu").vocabulary.fingerprint
    assert {load_engine(runs / name, "cpu").vocabulary.fingerprint for name in ("diffusionbert", "decoder")} == {owner}


def test_missing_networks_to_start_from_are_an_error(request_, tmp_path):
    with pytest.raises(SystemExit, match="--masked and --decoder"):
        experiment.run(tmp_path / "new", request_)
    assert not (tmp_path / "new").exists()


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_committed_results_are_small():
    assert sum(path.stat().st_size for path in KEPT.rglob("*") if path.is_file()) < 6e6


def test_keeping_a_restored_evaluation_gives_the_committed_one(tmp_path):
    source = tmp_path / "experiment" / "seed0" / "evaluations" / "diffusionbert"
    committed = KEPT / "seed0" / "evaluations" / "diffusionbert"
    restore(committed, KEPT / "sentences", source)
    keep(tmp_path / "experiment", tmp_path / "kept")
    kept = tmp_path / "kept" / "seed0" / "evaluations" / "diffusionbert"
    assert read_json(kept / "evaluation.json") == read_json(committed / "evaluation.json")
    before, after = (load_tensors(path / "scores.safetensors") for path in (committed, kept))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    [sentences] = (tmp_path / "kept" / "sentences").iterdir()
    assert (KEPT / "sentences" / sentences.name).read_bytes() == sentences.read_bytes()


def test_logs_are_kept_without_weights(tmp_path):
    run = tmp_path / "experiment" / "seed0" / "runs" / "d3pm"
    (run / "model").mkdir(parents=True)
    for name in ("run.json", "log.jsonl", "model/model.safetensors"):
        (run / name).write_text("{}")
    keep(tmp_path / "experiment", tmp_path / "kept")
    found = {str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert found == {"seed0/trained/d3pm/run.json", "seed0/trained/d3pm/log.jsonl"}


# ---- tables ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def some(tmp_path) -> Path:
    """Three evaluations of the committed ones, and one over other settings."""
    shutil.copytree(KEPT / "sentences", tmp_path / "some" / "sentences")
    for name in ("seed2/{}/diffusionbert", "seed2/{}/d3pm", "seed2/{}/decoder", "seed1/{}/diffusionbert-8-steps"):
        path = name.format("evaluations")
        shutil.copytree(KEPT / path, tmp_path / "some" / path)
    return tmp_path / "some"


def test_tables_have_every_row_and_sampler_settings_have_their_own(some, tmp_path):
    tables(some, tmp_path / "tables")
    assert {path.name for path in (tmp_path / "tables").glob("*.md")} == {"seed2.md", "seed1-settings.md", "paired.md"}
    rows = (tmp_path / "tables" / "seed2.md").read_text(encoding="utf-8").splitlines()
    assert [row.split(" | ")[0] for row in rows[2:5]] == ["| d3pm", "| decoder", "| diffusionbert"]


@pytest.mark.slow
def test_paired_differences_agree_with_the_reports(some, tmp_path):
    tables(some, tmp_path / "tables", ("diffusionbert:d3pm", "diffusionbert:decoder", "diffusionbert:not-run"))
    found = read_json(tmp_path / "tables" / "paired.json")
    nats = {
        name: read_json(some / "seed2" / "evaluations" / name / "evaluation.json")["likelihoods"]
        for name in ("diffusionbert", "d3pm", "decoder")
    }
    assert [(one["second"], one["quantity"], one["kind"]) for one in found] == [
        ("d3pm", "continuous", "bound"),
        ("d3pm", "grid", "bound"),
        ("decoder", "continuous - exact", "bound - exact"),
    ]
    for one, quantities in zip(found, (["continuous"] * 2, ["grid"] * 2, ["continuous", "exact"]), strict=True):
        values = [
            nats[one[at]][name]["nats_per_token"] for at, name in zip(("first", "second"), quantities, strict=True)
        ]
        assert one["value"] == pytest.approx(values[0] - values[1], abs=1e-5)
        assert one["low"] < one["value"] < one["high"]
        assert one["perplexity_ratio"] == pytest.approx(math.exp(one["value"]))
        assert one["p_value"] < 0.01
        assert one["sentences"] == 2000
    assert "definition" in found[2]["protocols_differ_in"]
    lines = (tmp_path / "tables" / "paired.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 + len(found)
    assert len({line.count("|") for line in lines}) == 1


def test_rows_with_different_sentences_are_not_paired(some, tmp_path):
    path = restore(some / "seed2" / "evaluations" / "d3pm", some / "sentences", tmp_path / "d3pm")
    tensors = load_tensors(path / "scores.safetensors")
    save_tensors(tensors | {"example": tensors["example"] + 1}, path / "scores.safetensors")
    other = restore(some / "seed2" / "evaluations" / "decoder", some / "sentences", tmp_path / "decoder")
    with pytest.raises(ValueError, match="d3pm and decoder have different sentences"):
        experiment.differences_of("seed2", path, other)
