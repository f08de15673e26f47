"""What is committed of an experiment: logs and scores without weights, restored as they were."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from diffusionbert.storage.files import load_tensors, read_json
from diffusionbert.training.model_folder import BUNDLED

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "results"
sys.path.append(str(ROOT / "benchmarks"))  # scripts, not a package
from experiment import keep, restore  # noqa: E402


def test_committed_results_are_small():
    assert sum(path.stat().st_size for path in KEPT.rglob("*") if path.is_file()) < 20e6


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
        (run / name).write_text(f'{{"vocabulary": "{BUNDLED}"}}')
    keep(tmp_path / "experiment", tmp_path / "kept")
    found = {str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert found == {"seed0/trained/d3pm/run.json", "seed0/trained/d3pm/log.jsonl"}
    kept = read_json(tmp_path / "kept" / "seed0" / "trained" / "d3pm" / "run.json")
    assert kept == {"vocabulary": "src/diffusionbert/bundled"}  # not where the package is on this machine


def test_a_network_that_was_trained_again_is_kept_next_to_the_first(tmp_path):
    source, target = tmp_path / "experiment", tmp_path / "kept"
    run, record = source / "starts" / "runs" / "masked", source / "starts" / "seconds" / "masked.json"
    for folder in (run, record.parent):
        folder.mkdir(parents=True)
    for weights in ("first", "second", "second", "first"):
        record.unlink(missing_ok=True)
        (run / "log.jsonl").write_text(f"unfinished {weights}")
        keep(source, target)  # until it is finished, this is kept only where nothing else is
        (run / "log.jsonl").write_text(weights)
        record.write_text(f'{{"weights": "{weights}"}}')
        keep(source, target)
    assert len([*(target / "starts" / "trained").iterdir()]) == 2
    kept = {path.name: read_json(path)["weights"] for path in (target / "starts" / "seconds").iterdir()}
    logs = {path.parent.name: path.read_text() for path in (target / "starts").rglob("log.jsonl")}
    assert kept == {"masked.json": "first", "masked-again.json": "second"}
    assert logs == {"masked": "first", "masked-again": "second"}
