"""Evaluations of format 1 still open, with every figure; results and logs are read without the classes they name."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import made_up
import numpy as np
import pytest
import torch

from diffusionbert.data.sources import Split
from diffusionbert.diffusion.schedules import Linear, Mean, Spindle
from diffusionbert.evaluation.compare import compare
from diffusionbert.evaluation.metrics import PerSample
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.likelihood.scores import Estimate, Interval, Length, LikelihoodRates, Limit, Protocol, Scores
from diffusionbert.objectives.base import Estimator, Likelihood, LikelihoodDefinition, TimeGrid
from diffusionbert.storage.files import code_version, load_tensors, save_tensors
from diffusionbert.storage.schema import Component

OLD = Path(__file__).parent.parent / "data_files" / "evaluation_format_1"
"""The bundled model on 24 sentences, as version 0.1.0.dev0 wrote it."""
KEPT = Path(__file__).parents[2] / "docs" / "results"


def test_an_evaluation_of_format_1_opens_with_every_figure():
    plain = json.loads((OLD / "evaluation.json").read_text())
    found = EvaluationResult.load(OLD)
    assert list(found.likelihoods) == list(plain["likelihoods"]) == ["continuous", "grid"]
    for name, summary in found.likelihoods.items():
        old = plain["likelihoods"][name]
        for rate in ("nats_per_sentence", "nats_per_token", "nats_per_word", "perplexity_per_token", "bits_per_byte"):
            measured = getattr(summary.rates, rate)
            assert (measured.value, list(measured.ci95)) == (old[rate], old["ci95"][rate])
        assert summary.rates == LikelihoodRates.of(found.scores[name].rates(seed=3))
        assert (summary.num_sentences, summary.num_tokens) == (old["num_sentences"], old["num_tokens"])
        assert summary.standard_error.total == old["standard_error_nats_per_token"]["total"]
    continuous, grid = found.likelihoods.values()
    assert (continuous.kind, continuous.limited_by) == (Likelihood.BOUND, Limit.SENTENCES)
    assert continuous.protocol.definition == LikelihoodDefinition("strict", TimeGrid(), Estimator.ORDER_AGNOSTIC)
    assert grid.protocol.definition == LikelihoodDefinition("strict", TimeGrid(512), schedule=Component("linear"))
    assert (grid.protocol.length, grid.protocol.interval) == (Length.GIVEN, Interval.SENTENCES_AND_DRAWS)
    assert (grid.protocol.num_draws, grid.protocol.strata, found.seed) == (48, 16, 3)
    own, sampling = found.generation.samples, found.generation.sampling
    assert (own.bleu4.value, list(own.bleu4.ci95)) == (plain["bleu4"], plain["ci95"]["bleu4"])
    assert own.bleu4.value == found.bleu4.mean
    assert list(own.distinct) == [plain[f"distinct_{n}"] for n in range(1, 5)]
    assert found.generation.real.self_bleu4.value == plain["real"]["self_bleu4"]
    assert (sampling.sampler, sampling.steps, sampling.top_k, sampling.number) == (Component("exact"), 128, 30, 8)
    assert (len(found.samples), len(found.more_samples)) == (8, 8)
    assert (found.data.split, found.data.corpus_sha256) == (Split.VALIDATION, plain["data"]["corpus_sha256"])
    assert [row.value.value for row in found.conventions] == [row["value"] for row in plain["conventions"]]
    assert found.notes == tuple(plain["notes"])
    assert found.model.objective is None  # it was not recorded
    assert "perplexity per token" in found.table()


def test_an_evaluation_of_format_1_is_saved_in_the_new_one_and_compares(tmp_path):
    found = EvaluationResult.load(OLD)
    found.save(tmp_path / "new")
    again = EvaluationResult.load(tmp_path / "new")
    assert again.to_json() == found.to_json()
    assert torch.equal(again.scores["grid"].nats, found.scores["grid"].nats)
    assert compare([OLD, tmp_path / "new"]).warnings == ()


@pytest.mark.parametrize("key", ["data", "likelihoods", "sampling", "real", "conventions"])
def test_a_damaged_evaluation_of_format_1_gives_a_one_line_error(tmp_path, key):
    for path in OLD.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    plain = json.loads((OLD / "evaluation.json").read_text())
    del plain[key]
    (tmp_path / "evaluation.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=f"is damaged .*{key}") as caught:
        EvaluationResult.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not KEPT.exists(), reason="the results are not in this checkout")
@pytest.mark.parametrize(
    ("key", "name", "definition"),
    [
        ("decoder", "exact", LikelihoodDefinition("nll", estimator=Estimator.LEFT_TO_RIGHT)),
        ("diffusion-lm", "vectors", LikelihoodDefinition(time=TimeGrid(2000), schedule=Component("cosine"))),
        (
            "diffusionbert-spindle-paper",
            "grid",
            LikelihoodDefinition(
                "paper",
                TimeGrid(512),
                schedule=Component("spindle", {"strength": 0.3, "mean": "sentence", "floor": 0.0}),
            ),
        ),
        ("genmd4", "continuous", LikelihoodDefinition(time=TimeGrid(), schedule=Component("learned"))),
        (
            "bert-mouth",
            "pseudo",
            LikelihoodDefinition("pseudo-likelihood", estimator=Estimator.LEAVE_ONE_OUT),
        ),
    ],
)
def test_likelihood_definitions_of_format_1_are_parsed(tmp_path, key, name, definition):
    kept = KEPT / "seed0" / "evaluations" / key
    plain = (kept / "evaluation.json").read_text()
    (tmp_path / "evaluation.json").write_text(plain)
    shared = json.loads(plain)["sentences"]
    tensors = load_tensors(kept / "scores.safetensors") | load_tensors(KEPT / "sentences" / f"{shared}.safetensors")
    nats = {one.removeprefix("nats."): values for one, values in tensors.items() if one.startswith("nats.")}
    variances = {f"draw_variance.{one}": torch.full_like(values, torch.nan) for one, values in nats.items()}
    wide = {torch.float32: torch.float64, torch.int32: torch.int64}
    tensors = {one: values.to(wide.get(values.dtype, values.dtype)) for one, values in (tensors | variances).items()}
    save_tensors(tensors, tmp_path / "scores.safetensors")
    (tmp_path / "samples.txt").touch()
    assert EvaluationResult.load(tmp_path).likelihoods[name].protocol.definition == definition


# ---- records --------------------------------------------------------------------------------------------------------


def test_components_are_recorded_by_name_and_settings():
    assert Component.of(Linear()) == Component("linear")
    assert str(Component.of(Linear())) == "linear"
    spindle = Component.of(Spindle(0.3, Mean.CORPUS, 0.0))
    assert spindle == Component("spindle", {"strength": 0.3, "mean": "corpus", "floor": 0.0})
    assert str(spindle) == "spindle:strength=0.3,mean=corpus,floor=0.0"

    @dataclass(frozen=True)
    class MyObjective:
        schedule: Spindle
        steps: int

    assert Component.of(MyObjective(Spindle(0.1), 5)).settings["schedule"].startswith("spindle:strength=0.1")
    assert Component.of(MyObjective(Spindle(0.1), 5)).name == "my-objective"


def test_a_result_opens_without_the_parts_it_names(tmp_path):
    """An evaluation of somebody's own schedule and sampler is read where neither is installed."""
    found = made_up.result()
    plain = found.to_json()
    plain["generation"]["sampling"]["sampler"] = {"name": "nobody-has-this", "settings": {"eta": 0.5, "on": True}}
    found.save(tmp_path)
    (tmp_path / "evaluation.json").write_text(json.dumps(plain))
    sampler = EvaluationResult.load(tmp_path).generation.sampling.sampler
    assert sampler == Component("nobody-has-this", {"eta": 0.5, "on": True})


@pytest.mark.parametrize(("sentences", "samples"), [(12, 40), (9, 0)])
def test_scores_of_another_evaluation_give_a_one_line_error(tmp_path, sentences, samples):
    def saved(name: str, sentences: int, samples: int) -> Path:
        nats, tokens = torch.arange(sentences).double(), torch.full((sentences,), 7)
        scores = Scores(Likelihood.BOUND, torch.arange(sentences), nats, torch.zeros_like(nats), 2, tokens)
        definition = LikelihoodDefinition(time=TimeGrid(), estimator=Estimator.STRATIFIED_TIMES)
        estimate = Estimate(scores, scores.rates(), None, Protocol(definition, num_draws=2))
        values = PerSample(np.full(samples, 0.3))
        made_up.result(name, {"continuous": estimate}, bleu4=values, self_bleu4=values).save(tmp_path / name)
        return tmp_path / name

    usual, other = saved("usual", 9, 40), saved("other", sentences, samples)
    EvaluationResult.load(usual)
    shutil.copy(other / "scores.safetensors", usual)
    with pytest.raises(ValueError, match="of different evaluations") as caught:
        EvaluationResult.load(usual)
    assert "\n" not in str(caught.value)


def test_an_interrupted_overwrite_leaves_no_report_of_other_scores(tmp_path, monkeypatch):
    found = made_up.result()
    found.save(tmp_path)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("diffusionbert.evaluation.result.write_bytes", stopped)
    with pytest.raises(KeyboardInterrupt):
        found.save(tmp_path)
    with pytest.raises(ValueError, match="contains no evaluation"):
        EvaluationResult.load(tmp_path)


def test_a_result_without_samples_is_saved_and_loaded(tmp_path):
    found = made_up.result(generation=None, samples=(), more_samples=())
    found.save(tmp_path)
    again = EvaluationResult.load(tmp_path)
    assert again.generation is None
    assert again.samples == ()
    assert again.table().startswith("made up")


def test_the_code_version_has_version_and_commit():
    found = code_version()
    assert found.version
    assert found.commit is None or len(found.commit.removesuffix("-dirty")) == 40
    assert found.sha256 is not None
    assert len(found.sha256) == 64
