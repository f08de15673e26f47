"""The rows of the second edition: unique, in order, fair; trained, resumed and evaluated at tiny size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import second_edition
from experiment import keep
from report import report
from second_edition import RATES, SIZES, Row, Work, rows, searches
from tiny_models import toy_sentences

from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import Estimator
from diffusionbert.recipes import SYSTEMS
from diffusionbert.storage.files import read_json
from diffusionbert.training.run import stored_config

ROWS = {row.key: row for row in rows()}


def test_rows_are_unique_and_come_after_those_they_need():
    keys = [row.key for row in rows()]
    assert len({*keys}) == len(keys)
    for row in rows():
        assert all(keys.index(needed) < keys.index(row.key) for needed in row.needs)
        assert row.system in {*SYSTEMS, "masked", "causal"}
        names = [one.name for one in row.evaluations]
        assert len({*names}) == len(names)


def test_every_kind_of_network_has_a_search_of_equal_size():
    kinds = {row.kind for row in rows() if row.rate is None and row.uses is None}
    assert {kind: sorted(row.rate for row in searches() if row.kind == kind) for kind in kinds} == dict.fromkeys(
        kinds, sorted(RATES)
    )
    assert len({row.tokens(SIZES["full"]) for row in searches()}) == 1


def test_rows_differ_in_what_they_compare_alone():
    """LTE and the hybrid term both ways, and the same noise for all."""
    for first, second in (("diffusionbert-lte", "diffusionbert-lte-random"), ("diffusionbert", "diffusionbert-hybrid")):
        one, other = ROWS[f"seed0/{first}"], ROWS[f"seed0/{second}"]
        assert replace(other, name=one.name, time=None, objective=()) == one
    for seed in range(3):
        assert {one.seed for row in second_edition.main_rows(seed) for one in row.evaluations} == {0}
    starts = [row for row in rows() if row.group == "starts"]
    assert len({row.tokens(SIZES["full"]) for row in starts}) == 1


def test_the_curve_counts_pretraining_and_spans_a_factor_of_30():
    size = SIZES["full"]

    def total(row: Row) -> int:
        return row.tokens(size) + (0 if row.start is None else total(ROWS[row.start]))

    points = {}
    for row in rows():
        if row.group == "curve" and row.evaluations:
            points.setdefault(row.name.rpartition("-")[0], []).append(total(row))
    assert points.keys() == {"d3pm", "causal", "other-text", "same-text"}
    [tokens] = {tuple(own) for own in points.values()}
    assert tokens[-1] >= 30 * tokens[0]


def test_the_plan_stays_within_its_budget(capsys):
    second_edition.plan()
    printed = capsys.readouterr().out
    assert all(row.key in printed for row in rows())
    assert sum(row.seconds(SIZES["full"]) for row in rows()) < 90 * 60


# ---- tiny -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Work:
    folder = tmp_path_factory.mktemp("second")
    (folder / "text").mkdir()
    for seed, name in enumerate(
        ("news.train-0", "news.train-1", "news.valid", "news.test", "wiki.train-0", "wiki.valid")
    ):
        (folder / "text" / f"{name}.txt").write_text("\n".join(toy_sentences(60, seed=seed)) + "\n", encoding="utf-8")
    return Work(folder / "output", folder / "text", SIZES["tiny"])


def do(work: Work, *keys: str) -> None:
    """Does rows after those they need."""
    for key in keys:
        if not work.record(ROWS[key]).exists():
            do(work, *ROWS[key].needs)
            evaluations = tuple(one for one in ROWS[key].evaluations if one.text == "news.test" and not one.judged)
            work.do(replace(ROWS[key], evaluations=evaluations), 1)


@pytest.mark.slow
def test_rows_are_trained_from_their_start_and_evaluated_with_shared_noise(work, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    do(work, "seed0/diffusionbert", "seed0/diffusionbert-lte-random", "spindle/lambda-0.1", "spindle/genmd4")
    do(work, "orders/diffusionbert")
    config = stored_config(work.run_folder("seed0/diffusionbert-lte-random"))
    assert config.time is TimeEmbedding.LAYERS_RANDOM
    assert str(work.run_folder("starts/masked-wiki-modern")) in str(config.backbone.pretrained)
    found = {
        key: EvaluationResult.load(work.evaluation(ROWS[key], ROWS[key].evaluations[0]))
        for key in ("seed0/diffusionbert", "seed0/diffusionbert-lte-random", "spindle/lambda-0.1", "spindle/genmd4")
    }
    protocols = [one.likelihoods["continuous"].protocol for one in found.values()]
    assert len({(one.definition.estimator, one.seed, one.num_draws) for one in protocols}) == 1
    assert protocols[0].definition.estimator is Estimator.STRATIFIED_TIMES
    start, size = work.run_folder("starts/masked-wiki-modern"), found["seed0/diffusionbert"].model
    seen = read_json(start / "model" / "diffusionbert.json")["tokens_seen"]
    assert (size.pretraining_tokens, size.start, size.backbone) == (seen, "pretrained", "modernbert")
    orders = [work.evaluation(ROWS["orders/diffusionbert"], one) for one in ROWS["orders/diffusionbert"].evaluations]
    assert [[*EvaluationResult.load(folder).likelihoods] for folder in orders] == [
        ["grid", "continuous"],
        ["left-to-right"],
        ["confidence"],
        ["entropy"],
    ]


@pytest.mark.slow
def test_the_best_rate_of_the_search_is_used_and_done_rows_are_not_repeated(work, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    do(work, "seed0/diffusionbert")
    row = ROWS["seed0/diffusionbert"]
    last = {}
    for other in searches():
        if other.kind == row.kind:
            lines = (work.run_folder(other.key) / "log.jsonl").read_text().splitlines()
            last[other.rate] = float(lines[-1].partition('"nats_per_token": ')[2].partition(",")[0])
    assert stored_config(work.run_folder(row.key)).training.learning_rate == min(last, key=last.get)
    monkeypatch.setattr(second_edition, "train", None)
    monkeypatch.setattr(second_edition, "evaluate", None)
    work.do(replace(row, evaluations=row.evaluations[:1]), 1)


@pytest.mark.slow
def test_tables_and_figures_are_made_of_what_is_kept(work, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    do(work, "seed0/diffusionbert", "seed0/diffusionbert-pte", "curve/d3pm-0.25", "starts/causal-wiki-modern")
    row = ROWS["frontier/diffusionbert"]
    work.do(replace(row, evaluations=row.evaluations[:2]), 1)
    keep(work.output, tmp_path / "kept")
    report(tmp_path / "kept", tmp_path / "tables")
    written = {path.name for path in (tmp_path / "tables").iterdir()}
    assert {"claims.md", "main.md", "curve.png", "frontier.png", "costs.md", "setup.md"} <= written
    [curve] = read_json(tmp_path / "tables" / "curve.json")
    assert (curve["name"], len(curve["tokens"])) == ("D3PM", 1)
    main = (tmp_path / "tables" / "main.md").read_text(encoding="utf-8")
    for heading in ("schedule", "time", "start", "parameters", "tokens, pretraining included", "epochs"):
        assert f"| {heading} |" in main
    [claim] = [one for one in read_json(tmp_path / "tables" / "claims.json") if one["claim"].endswith("TAD beats PTE")]
    assert claim["noise"] == "shared"


def test_what_failed_is_told_and_what_needs_it_is_not_started(work, monkeypatch, tmp_path, capsys):
    class Ended:
        returncode = 1

        def poll(self) -> int:
            return 1

    started = []

    def begin(work: Work, row: Row, *_: object) -> Ended:
        started.append(row.key)
        return Ended()

    monkeypatch.setattr(second_edition, "_begin", begin)
    second_edition.run(tmp_path, work.text, only=("starts", "rates"), size="tiny")
    # Networks from random parameters need no start.
    assert {ROWS[key].start for key in started} == {None}
    printed = capsys.readouterr().out
    assert "starts/masked-wiki-modern: not finished, see its log" in printed
    assert "rates/modern-diffusionbert-0.001" in printed.partition("not started: ")[2]
