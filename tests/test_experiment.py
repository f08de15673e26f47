"""The experiment of docs/results.md: what it consists of, and how one of its jobs is done."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import chain
from statistics import mean

import made_up  # noqa: F401 - first: it says where the scripts are
import pytest
from test_reproduction import SMALLER_THAN_TINY, STEPS
from tiny_models import corpus, folder

import experiment  # isort: skip
import plan  # isort: skip
from plan import Job, Variation, jobs  # isort: skip

from diffusionbert.checkpoints import read_json
from diffusionbert.model import load
from diffusionbert.paper.reproduction import SCALES
from diffusionbert.paper.request import Request
from diffusionbert.paper.targets import BY_STEPS, MAIN, TRADED_OFF, Row
from diffusionbert.training.run import prepare, stored_config


def test_every_row_is_there_once_and_what_it_needs_comes_before():
    names = [job.name for job in jobs()]
    assert len(set(names)) == len(names)
    for job in jobs():
        assert job.needs is None or names.index(job.needs) < names.index(job.name)
    assert {f"seed0/{row.key}" for row in MAIN} < set(names)
    for seed in ("seed1", "seed2"):
        assert {f"{seed}/{name}" for name in plan.CLAIMED} < set(names)


def test_what_is_looked_at_is_among_the_rows_of_its_seed():
    assert {*BY_STEPS, *TRADED_OFF} < set(plan.CLAIMED)


@pytest.fixture
def request_(monkeypatch) -> Request:
    monkeypatch.setenv("DIFFUSIONBERT_CACHE", str(folder() / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(SCALES, "smoke", SMALLER_THAN_TINY)
    monkeypatch.setitem(SCALES, "34m", replace(SMALLER_THAN_TINY, samples=3))
    experiment._opened.cache_clear()
    return Request(data=str(corpus()), other_test=str(corpus()))


def test_a_job_with_other_settings_is_trained_by_them(request_, tmp_path):
    variation = Variation(("d3pm-tad",), (("learning_rate", 0.5),), (("num_steps", 5),))
    job = Job("unaveraged", Row("d3pm-tad"), variation=variation)
    experiment._do(job, tmp_path, request_, workers=2)
    trained = stored_config(tmp_path / "unaveraged" / "runs" / "d3pm-tad")
    assert (trained.training.learning_rate, trained.objective.num_steps) == (0.5, 5)
    laps = read_json(job.seconds(tmp_path))
    assert laps["workers"] == 2
    assert {"train", "evaluate"} < set(laps)
    report = read_json(tmp_path / "unaveraged" / "evaluations" / "d3pm-tad" / "evaluation.json")
    assert report["sampling"]["number"] == 2  # it is not asked for BLEU


def test_a_larger_network_is_pretrained_first_and_has_the_vocabulary_of_the_others(request_, tmp_path):
    small = Job("seed0", Row("d3pm-tad"))
    experiment._do(small, tmp_path, request_, workers=1)
    masked = str(tmp_path / "seed0" / "pretrained" / "masked")
    request = replace(request_, masked=masked, pretraining_data=str(corpus()))
    for name in ("diffusionbert", "decoder"):
        experiment._do(Job("larger", Row(name), steps=STEPS + 1, is_larger=True), tmp_path, request, workers=1)
    runs = tmp_path / "larger" / "runs"
    assert stored_config(runs / "diffusionbert").training.steps == STEPS + 1
    assert "pretrain" in read_json(tmp_path / "larger" / "seconds" / "diffusionbert.json")
    owner = load(tmp_path / "seed0" / "runs" / "d3pm-tad", "cpu").vocabulary.fingerprint
    assert {load(runs / name, "cpu").vocabulary.fingerprint for name in ("diffusionbert", "decoder")} == {owner}


def test_what_word_frequencies_alone_need_is_what_counting_says(request_, tmp_path):
    reproduction = experiment._opened(tmp_path / "seed1", request_)
    experiment._frequencies(reproduction, tmp_path / "alone")
    text = prepare(replace(reproduction.planned("d3pm").data, validation=request_.data), reproduction.cache)
    trained, tested = (
        [token for token in chain.from_iterable(map(rows.row, range(len(rows)))) if not rows.special[token]]
        for rows in (text.rows, text.validation)
    )
    counts, num_words = Counter(trained), int(text.statistics.allowed.sum())
    nats = mean(math.log((len(trained) + num_words) / (counts[token] + 1)) for token in tested)
    found = read_json(tmp_path / "alone" / plan.FREQUENCIES)
    assert found["tokens"] == len(tested)
    assert found["nats_per_token"] == pytest.approx(nats)
