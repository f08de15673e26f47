"""Comparison: what is comparable is ranked and tested, and the rest has a warning; one table in four formats."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import made_up
import numpy as np
import pytest
import torch
import tyro
from rich.console import Console

from diffusionbert.cli.compare import Compare
from diffusionbert.evaluation.compare import compare, independent_difference
from diffusionbert.evaluation.judges import Judged, Judgment, Mauve
from diffusionbert.evaluation.metrics import PerSample
from diffusionbert.evaluation.result import AnswerMetrics, EvaluationResult, Speed, TextMetrics, Weights
from diffusionbert.evaluation.tables import (
    Cell,
    Column,
    Direction,
    Table,
    below,
    best_of,
    to_latex,
    to_markdown,
    to_terminal,
)
from diffusionbert.likelihood.scores import Estimate, Length, PointEstimate, Protocol, Scores, Unit, paired_bootstrap
from diffusionbert.networks.loading import Pretrained
from diffusionbert.objectives.base import Estimator, Likelihood, LikelihoodDefinition, TimeGrid
from diffusionbert.storage.schema import Component
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.log import ModelDescription

SENTENCES = 60
WORDS = torch.arange(SENTENCES) % 9 + 4
CHANCE = np.random.default_rng(0)
NATS = torch.from_numpy(CHANCE.gamma(8.0, 0.6, SENTENCES)) * WORDS
NOISE = torch.from_numpy(CHANCE.normal(size=SENTENCES))


def scores(kind=Likelihood.BOUND, nats=NATS, tokens=WORDS + 1, example=None) -> Scores:
    count = len(nats)
    example = torch.arange(count) if example is None else example
    draw_variance = torch.full((count,), 0.0 if kind is Likelihood.EXACT else 0.01, dtype=torch.float64)
    return Scores(kind, example, nats, draw_variance, 2, tokens, WORDS[example], 5 * WORDS[example])


CONTINUOUS_TIME = LikelihoodDefinition(time=TimeGrid(), estimator=Estimator.STRATIFIED_TIMES)


def steps(number: int) -> LikelihoodDefinition:
    return replace(CONTINUOUS_TIME, time=TimeGrid(number))


def estimate(found: Scores, definition: LikelihoodDefinition = CONTINUOUS_TIME, **protocol) -> Estimate:
    return Estimate(found, found.rates(), None, Protocol(definition, **{"num_draws": 4, "strata": 2, **protocol}))


def per_sample(mean: float, seed: int = 0) -> PerSample:
    values = np.random.default_rng(seed).normal(mean, 0.02, 40)
    return PerSample(values - values.mean() + mean)


class Systems:
    """Writes evaluations as `evaluate` does."""

    def __init__(self, folder: Path):
        self.folder = folder

    def add(self, name: str, likelihoods: dict[str, Estimate] | None = None, **changes) -> Path:
        bleu, self_bleu = changes.pop("bleu", 0.3), changes.pop("self_bleu", 0.2)
        base = made_up.result()
        sampling = replace(base.generation.sampling, **changes.pop("sampling", {}))
        sampling = replace(sampling, length=changes.pop("length", 64))
        calls, device = changes.pop("calls", 20.0), changes.pop("device", "cpu")
        speed = Speed(changes.pop("seconds", 0.5), 100.0, calls, device, 32)
        text = sha256(changes.pop("text", "a corpus").encode()).hexdigest()
        weights = Weights("0" * 64, changes.pop("weights", {}))
        found = made_up.result(
            name,
            {"continuous": estimate(scores())} if likelihoods is None else likelihoods,
            weights=weights,
            data=replace(base.data, corpus_sha256=text, num_sentences=SENTENCES),
            sampling=sampling,
            speed=speed,
            bleu4=per_sample(bleu),
            self_bleu4=per_sample(self_bleu, 1),
            real=made_up.metrics(changes.pop("real_bleu", 0.4), 0.1),
            judge=changes.pop("judge", None),
            mauve=changes.pop("mauve", None),
            notes=changes.pop("notes", ()),
        )
        own = TextMetrics.of(["a b"] * 40, found.bleu4, found.self_bleu4)
        found = replace(
            found, generation=replace(found.generation, samples=replace(own, distinct=(0.5, 0.9, None, None)))
        )
        assert not changes
        found.save(self.folder / name / "evaluation")
        return self.folder / name


@pytest.fixture
def systems(tmp_path) -> Systems:
    return Systems(tmp_path)


def column(table: Table, key: str) -> dict[str, Cell]:
    [index] = [index for index, one in enumerate(table.columns) if one.key == key]
    return {name: row[index] for name, row in zip(table.names, table.cells, strict=True)}


def marks(cells: dict[str, Cell]) -> dict[str, str]:
    return {name: "b" if cell.best else "" for name, cell in cells.items() if cell.value is not None}


BOUND = "perplexity_per_token.bound.continuous"

# ---- old figures ----------------------------------------------------------------------------------------------------


def test_an_evaluation_of_older_weights_gives_a_warning(systems):
    run = systems.add("run", weights={"model.safetensors": sha256(b"then").hexdigest()})
    other = systems.add("no-run")
    for name, contents in (("experiment.json", b"{}"), ("model/model.safetensors", b"then")):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(contents)
    assert not compare([run, other]).warnings
    (run / "model" / "model.safetensors").write_bytes(b"now")
    for folder in (run, run / "evaluation"):
        [warning] = compare([folder, other]).warnings
        assert warning.startswith("run was evaluated with other weights")


# ---- kinds ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def four_kinds(systems) -> list[Path]:
    exact = LikelihoodDefinition("nll", estimator=Estimator.LEFT_TO_RIGHT)
    pseudo = LikelihoodDefinition("pseudo-likelihood", estimator=Estimator.LEAVE_ONE_OUT)
    grid = estimate(scores(nats=1.1 * NATS), steps(128))
    return [
        systems.add("decoder", {"own": estimate(scores(Likelihood.EXACT, 0.9 * NATS), exact)}),
        systems.add("diffusion", {"continuous": estimate(scores()), "grid": grid}),
        systems.add("mouth", {"own": estimate(scores(Likelihood.PSEUDO, 0.5 * NATS), pseudo)}),
        systems.add("sundae", {}, notes=("Sundae has no likelihood",)),
        systems.add("other", {"continuous": estimate(scores(nats=NATS + 1))}),
    ]


def test_each_kind_and_quantity_has_its_own_column(four_kinds):
    table = compare(four_kinds)
    titles = {one.key: one.title for one in table.columns if one.key.startswith("perplexity")}
    assert titles == {
        "perplexity_per_token.exact.own": "perplexity per token (exact, left to right)",
        "perplexity_per_token.bound.continuous": "perplexity per token (bound, strict, continuous time)",
        "perplexity_per_token.bound.grid": "perplexity per token (bound, strict, 128 steps)",
        "perplexity_per_token.pseudo.own": "perplexity per token (pseudo, each token given all others)",
    }
    having = {key: [name for name, cell in column(table, key).items() if cell.value is not None] for key in titles}
    assert list(having.values()) == [["decoder"], ["diffusion", "other"], ["diffusion"], ["mouth"]]
    assert marks(column(table, BOUND)) == {"diffusion": "b", "other": ""}
    assert marks(column(table, "perplexity_per_token.pseudo.own")) == {"mouth": ""}  # low, but alone in its kind
    [(mark, _)] = [note for note in table.footnotes if note[1] == "Sundae has no likelihood"]
    assert column(table, BOUND)["sundae"].notes == (mark,)
    assert column(table, BOUND)["decoder"].notes == ()
    assert not table.warnings


def test_a_causal_model_is_compared_with_a_masked_one_from_left_to_right(systems):
    exact = LikelihoodDefinition("nll", estimator=Estimator.LEFT_TO_RIGHT)
    causal, masked = (estimate(scores(Likelihood.EXACT, nats), exact) for nats in (NATS, NATS + 1))
    folders = [systems.add("causal", {"exact": causal}), systems.add("masked", {"left-to-right": masked})]
    table = compare(folders)
    assert marks(column(table, "perplexity_per_token.exact.left-to-right")) == {"causal": "b", "masked": ""}
    assert [apart.system for apart in table.differences if "exact" in apart.column.key] == ["masked"]
    assert [one.key for one in compare(folders[:1]).columns if "exact" in one.key] == [
        "perplexity_per_token.exact.exact"
    ]


def test_numbers_and_intervals_are_those_of_the_evaluations(four_kinds):
    table = compare(four_kinds, Unit.BYTE)
    result = EvaluationResult.load(four_kinds[1])
    cell = column(table, "bits_per_byte.bound.grid")["diffusion"]
    expected = result.likelihoods["grid"].rates.bits_per_byte
    assert (cell.value, cell.interval) == (expected.value, expected.ci95)
    bleu = column(table, "bleu4")["diffusion"]
    expected = result.generation.samples.bleu4
    assert (bleu.value, bleu.interval) == (expected.value, expected.ci95)


def test_real_sentences_are_the_last_row_and_not_ranked(four_kinds):
    table = compare(four_kinds)
    assert table.names[-1] == "real sentences"
    real = column(table, "bleu4")["real sentences"]
    assert real.value == pytest.approx(0.4)
    assert not real.best  # though it is higher than all
    assert column(table, "calls_per_sample")["real sentences"] == Cell()


def test_differing_figures_of_real_sentences_are_not_shown(systems):
    table = compare([systems.add("one"), systems.add("two", real_bleu=0.45)])
    assert column(table, "bleu4")["real sentences"] == Cell()
    assert column(table, "distinct_2")["real sentences"] == Cell(0.9)


# ---- significance ---------------------------------------------------------------------------------------------------


def test_what_does_not_differ_from_the_best_is_bold_and_differences_are_tested_in_pairs(systems):
    """Sentences differ far more than systems do: only pairs show the difference."""
    nats = {"far": NATS + 0.3 + 0.1 * NOISE, "best": NATS, "near": NATS + 0.01 + 2 * NOISE, "farther": NATS + 9}
    nats["near"] = nats["near"] - nats["near"].mean() + NATS.mean() + 0.05
    folders = [systems.add(name, {"continuous": estimate(scores(nats=own))}) for name, own in nats.items()]
    cells = column(compare(folders), BOUND)
    assert marks(cells) == {"far": "", "best": "b", "near": "b", "farther": ""}
    low, high = cells["best"].interval
    assert low < cells["far"].value < high  # intervals overlap by far
    for name, own in nats.items():
        p_value = paired_bootstrap(scores(nats=NATS), scores(nats=own)).p_value
        assert (p_value < 0.05) is not cells[name].best or name == "best"


def test_systems_with_equal_rounded_values_have_equal_marks(systems):
    """Each sentence costs a little more: surely worse, and by nothing that shows."""
    nats = {"one": NATS, "two": NATS + 1e-6, "three": NATS + 1}
    assert paired_bootstrap(scores(), scores(nats=nats["two"])).p_value < 0.05
    folders = [systems.add(name, {"continuous": estimate(scores(nats=own))}) for name, own in nats.items()]
    assert marks(column(compare(folders), BOUND)) == {"one": "b", "two": "b", "three": ""}


def test_sentences_are_paired_by_number_in_any_order(systems):
    order = torch.randperm(SENTENCES, generator=torch.Generator().manual_seed(0))
    shuffled = scores(nats=(NATS + 0.3)[order], tokens=(WORDS + 1)[order], example=order)
    folders = [systems.add("one"), systems.add("two", {"continuous": estimate(shuffled)})]
    table = compare(folders)
    assert marks(column(table, BOUND)) == {"one": "b", "two": ""}
    assert not table.warnings


def test_systems_are_compared_on_their_common_sentences(systems):
    few = torch.arange(0, SENTENCES - 10)
    shorter = scores(nats=NATS[few] + 0.3, tokens=(WORDS + 1)[few], example=few)
    folders = [systems.add("all"), systems.add("few", {"continuous": estimate(shorter)})]
    table = compare(folders)
    rates = scores().select(few).rates()[Unit.TOKEN]
    cell = column(table, BOUND)["all"]
    assert cell.value == pytest.approx(rates.perplexity)
    assert cell.interval == pytest.approx((math.exp(rates.low), math.exp(rates.high)))
    assert marks(column(table, BOUND)) == {"all": "b", "few": ""}
    assert any("50 sentences that all systems scored, of 60" in text for _, text in table.footnotes)


def test_no_common_sentences_is_an_error(systems):
    parts = [torch.arange(0, 30), torch.arange(30, 60)]
    folders = [
        systems.add(f"{index}", {"own": estimate(scores(nats=NATS[part], tokens=WORDS[part], example=part))})
        for index, part in enumerate(parts)
    ]
    with pytest.raises(ValueError, match="0 sentences in common"):
        compare(folders)


def test_an_impossible_sentence_is_infinite_and_never_the_best(systems):
    impossible = NATS.clone()
    impossible[3] = math.inf
    folders = [systems.add("finite"), systems.add("infinite", {"continuous": estimate(scores(nats=impossible))})]
    table = compare(folders)
    cells = column(table, BOUND)
    assert cells["infinite"].value == math.inf
    assert marks(cells) == {"finite": "b", "infinite": ""}
    plain = table.to_json()["systems"][1]["cells"][BOUND]
    assert (plain["value"], plain["infinite"], plain["ci95"][1]) == (None, True, None)
    assert "∞" in to_markdown(table)
    assert r"$\infty$" in to_latex(table)


def test_differences_from_the_best_have_interval_and_p_value(systems):
    folders = [
        systems.add("best", bleu=0.3),
        systems.add("worse", {"continuous": estimate(scores(nats=NATS + 0.3 + 0.1 * NOISE))}, bleu=0.35),
        systems.add("none", {}, notes=("no likelihood",)),
    ]
    table = compare(folders)
    likelihood, *bleu = [apart for apart in table.differences if apart.column.key != "self_bleu4"]
    expected = paired_bootstrap(scores(), scores(nats=NATS + 0.3 + 0.1 * NOISE))
    assert (likelihood.column.key, likelihood.system, likelihood.reference) == (BOUND, "worse", "best")
    assert (likelihood.value, likelihood.p_value) == (-expected.value, expected.p_value)
    assert likelihood.ci95 == (-expected.high, -expected.low)
    assert 0 < likelihood.ci95[0] < likelihood.value < likelihood.ci95[1]
    assert [(apart.system, apart.reference) for apart in bleu] == [("best", "worse"), ("none", "worse")]
    assert all(apart.value == pytest.approx(-0.05) for apart in bleu)
    [plain, *_] = json.loads(json.dumps(table.to_json(), allow_nan=False))["differences"]
    assert plain == {
        "column": BOUND,
        "unit": "nats per token",
        "system": "worse",
        "reference": "best",
        "value": likelihood.value,
        "ci95": list(likelihood.ci95),
        "p_value": likelihood.p_value,
        "seeds": [1, 1],
        "noise": "shared",
    }
    heading, line, *_ = below(table)
    assert heading.startswith("differences")
    assert f"worse - best = {likelihood.value:+.4f} nats per token" in line
    assert "perplexity, p = 0.001" in line
    assert line.endswith("1 seed, shared noise")
    for text in (to_markdown(table), to_latex(table)):
        assert f"{likelihood.value:+.4f} nats per token" in text


def test_results_are_compared_without_folders(systems):
    folders = [systems.add("one"), systems.add("two", bleu=0.5)]
    results = [EvaluationResult.load(folder) for folder in folders]
    assert compare(results).to_json() == compare(folders).to_json()
    assert compare([results[0], folders[1]]).names[:2] == ("one", "two")
    assert compare(results, names=["a", "b"]).names[:2] == ("a", "b")
    with pytest.raises(ValueError, match="two systems are called 'one'; give `names`"):
        compare([results[0], results[0]])


def test_quantities_never_share_a_column(systems):
    """A plugin may call two quantities by one name and kind."""
    other = estimate(scores(), replace(CONTINUOUS_TIME, quantity="mine"))
    table = compare([systems.add("one"), systems.add("two", {"continuous": other})])
    assert [one.key for one in table.columns if one.key.startswith(BOUND)] == [f"{BOUND}.mine", f"{BOUND}.strict"]
    assert not any("nats" in apart.column.difference_unit for apart in table.differences)


def test_results_without_samples_compare_by_likelihood(systems):
    found = EvaluationResult.load(systems.add("one"))
    bare = replace(found, name="two", generation=None, bleu4=PerSample(np.zeros(0)), samples=(), more_samples=())
    table = compare([found, bare])
    assert column(table, BOUND)["two"].value == column(table, BOUND)["one"].value
    assert column(table, "bleu4")["two"] == Cell()
    assert not table.warnings


def test_bleu_is_ranked_and_samples_are_not_paired(systems):
    folders = [
        systems.add("high", bleu=0.35, self_bleu=0.25),
        systems.add("low", bleu=0.30, self_bleu=0.20),
        systems.add("nearly", bleu=0.349, self_bleu=0.249),
    ]
    table = compare(folders)
    assert marks(column(table, "bleu4")) == {"high": "b", "low": "", "nearly": "b", "real sentences": ""}
    assert marks(column(table, "self_bleu4")) == {"high": "", "low": "b", "nearly": "", "real sentences": ""}
    assert marks(column(table, "distinct_2"))["high"] == ""  # neither much nor little is good


def test_the_independent_test_keeps_its_level():
    chance = np.random.default_rng(1)
    found = [
        independent_difference(PerSample(chance.normal(size=30)), PerSample(chance.normal(size=50))).p_value
        for _ in range(100)
    ]
    assert 0 <= np.mean(np.array(found) < 0.05) <= 0.13
    assert 0.35 < np.mean(found) < 0.65
    far, back = (
        independent_difference(first, second)
        for first, second in ((per_sample(0.5), per_sample(0.1)), (per_sample(0.1), per_sample(0.5)))
    )
    assert far.p_value == back.p_value == pytest.approx(2 / 2001)
    assert far.value == pytest.approx(-0.4)
    assert far.low < far.value < far.high < 0 < back.low


# ---- seeds, noise, references ---------------------------------------------------------------------------------------


def trained(systems: Systems, name: str, seed: int, nats, **changes) -> EvaluationResult:
    """A result that says what was trained."""
    found = EvaluationResult.load(systems.add(name, {"grid": estimate(scores(nats=nats), steps(64))}))
    model = ModelDescription(
        Component("discrete-time", {"schedule": "spindle:strength=0.3", "num_steps": 64, "hybrid": 0.01}),
        Component("spindle", {"strength": 0.3}),
        64,
        time_conditioning="layers",
        start="pretrained",
        parameters=1000,
        seed=seed,
        training_steps=20,
        tokens_seen=600,
        pretraining_tokens=400,
        epochs=1.5,
        optimizer="adamw",
        learning_rate=0.001,
    )
    return replace(found, model=replace(model, **changes))


GRID_BOUND = "perplexity_per_token.bound.grid"


def test_a_table_says_what_was_trained_and_for_how_long(systems):
    table = compare([trained(systems, "one", 0, NATS), trained(systems, "two", 0, NATS + 1, pretraining_tokens=None)])
    texts = {"objective": "discrete-time:hybrid=0.01", "schedule": "spindle (λ = 0.3, corpus mean)", "time": "LTE"}
    for key, text in (texts | {"start": "pretrained", "optimizer": "adamw, 0.001"}).items():
        assert column(table, key)["one"].text == text
    numbers = {"diffusion_steps": 64, "parameters": 1000, "training_steps": 20, "tokens_seen": 600, "epochs": 1.5}
    for key, number in (numbers | {"total_tokens": 1000}).items():
        assert column(table, key)["one"].value == number
    assert column(table, "total_tokens")["two"] == Cell()  # an unknown start
    assert not {"objective", "parameters"} & {one.key for one in compare([systems.add("plain")]).columns}


def test_what_has_no_time_is_not_called_time_agnostic(systems):
    causal = trained(systems, "causal", 0, NATS, schedule=None, time_conditioning="none")
    table = compare([causal, trained(systems, "masked", 0, NATS, time_conditioning="none")])
    found = column(table, "time")
    assert (found["causal"].text, found["masked"].text) == (None, "TAD")


@pytest.mark.parametrize("deviation", [0.2, 0.0])
def test_seeds_are_merged_and_their_spread_widens_the_interval(systems, deviation):
    results = [
        trained(systems, f"{start}-{seed}", seed, NATS + (worse + deviation * (seed - 1)) * WORDS, start=start)
        for seed in range(3)
        for start, worse in (("pretrained", 0.0), ("scratch", 0.2))
    ]
    table = compare(results, merge_seeds=True)
    assert table.names[:2] == ("pretrained-0 (3 seeds)", "scratch-0 (3 seeds)")
    assert column(table, "seeds")["scratch-0 (3 seeds)"].value == 3
    [apart] = [one for one in table.differences if one.column.key == GRID_BOUND]
    assert apart.seeds == (3, 3)
    assert apart.value == pytest.approx(float((0.2 * WORDS).sum() / (WORDS + 1).sum()))
    is_significant = apart.p_value < 0.05
    assert is_significant is (deviation == 0)
    assert (apart.ci95[0] > 0) is is_significant
    assert any(cell.best for cell in column(table, GRID_BOUND).values()) is is_significant


def of_answers(exact: float, candidates: int = 1, judge: str = "judge_a") -> dict:
    """Figures of generated text."""
    found = PointEstimate(exact, (exact - 0.1, exact + 0.1))
    judged = Judged(100 * exact, (100 * exact - 5, 100 * exact + 5), 3.0, 500, 0, 0)
    return {
        "answers": AnswerMetrics(40, candidates, False, found, found, 0.0),
        "judge": Judgment(judge, "each text alone", judged, judged),
        "speed": Speed(exact, 100.0, 100 * exact, "cpu", 32),
    }


def with_figures(result: EvaluationResult, **figures) -> EvaluationResult:
    return replace(result, generation=replace(result.generation, **figures))


def test_all_figures_of_merged_seeds_are_means_and_intervals_include_the_spread(systems):
    runs = [with_figures(trained(systems, f"run{seed}", seed, NATS), **of_answers(0.2 + 0.4 * seed)) for seed in (0, 1)]
    table = compare(runs, merge_seeds=True)
    merged = "run0 (2 seeds)"
    for key, value in (("exact_match", 0.4), ("judge.judge_a", 40.0), ("calls_per_sample", 40.0)):
        assert column(table, key)[merged].value == pytest.approx(value)
    low, high = column(table, "exact_match")[merged].interval
    assert low < 0.2 < 0.6 < high  # two runs: the spread is wide
    assert compare([runs[0]]).names[0] == "run0"


@pytest.mark.parametrize(
    ("figures", "protocol"),
    [
        (of_answers(0.2, candidates=3), {}),
        (of_answers(0.2, judge="judge_b"), {}),
        ({}, {"length": Length.MODELED}),
        ({}, {"source_given": True}),
    ],
)
def test_runs_measured_otherwise_are_not_merged(systems, figures, protocol):
    usual, other = (with_figures(trained(systems, f"run{seed}", seed, NATS), **of_answers(0.2)) for seed in (0, 1))
    summary = other.likelihoods["grid"]
    summary = replace(summary, protocol=replace(summary.protocol, **protocol))
    table = compare([usual, replace(with_figures(other, **figures), likelihoods={"grid": summary})], merge_seeds=True)
    assert any("no runs were merged" in warning for warning in table.warnings)


def test_runs_on_other_texts_or_with_other_tokens_are_not_merged(systems):
    usual, other_tokens = trained(systems, "one", 0, NATS), trained(systems, "two", 1, NATS)
    other_text = replace(trained(systems, "three", 2, NATS), data=replace(usual.data, corpus_sha256="3" * 64))
    short = trained(systems, "four", 3, NATS)
    short = replace(other_text, model=short.model, scores={"grid": other_text.scores["grid"].select(torch.arange(9))})
    other_tokens = replace(other_tokens, scores={"grid": scores(tokens=WORDS + 2)})
    for other in (other_text, short, other_tokens):
        table = compare([usual, other], names=["one", "other"], merge_seeds=True)
        assert set(table.names) >= {"one", "other"}
        assert any("no runs were merged" in warning for warning in table.warnings)
    assert not any("merged" in warning for warning in compare([usual, other_text], names=["one", "other"]).warnings)


@pytest.mark.parametrize(
    ("changes", "is_merged"),
    [
        ({}, True),
        ({"warmup": 7}, False),
        ({"corpus": "more.txt"}, False),
        ({"corpus": "elsewhere/some.txt", "hash": "0a"}, True),
        ({"hash": "0b"}, False),
        ({"name_or_path": "runs/seed1"}, True),
    ],
)
def test_runs_with_other_settings_are_not_merged(systems, changes, is_merged):
    for seed, changed in enumerate(({}, changes)):
        folder = systems.folder / f"run{seed}"
        trained(systems, folder.name, seed, NATS).save(folder / "evaluation")
        config = RunConfig(
            DataConfig(changed.get("corpus", "some.txt"), vocabulary=f"runs/seed{seed}"),
            Pretrained(changed.get("name_or_path", "runs/seed0")),
            training=TrainingConfig(warmup=changed.get("warmup", 100), seed=seed),
        )
        (folder / "run.json").write_text(json.dumps(config.to_json()))
        if "hash" in changes:
            (folder / "start").mkdir()
            hashes = {"training": changed.get("hash", "0a"), "validation": "1c"}
            (folder / "start/data.json").write_text(json.dumps(hashes))
    table = compare([systems.folder / "run0", systems.folder / "run1"], merge_seeds=True)
    assert any("no runs were merged" in warning for warning in table.warnings) is not is_merged
    assert ("run0 (2 seeds)" in table.names) is is_merged


def test_one_seed_given_twice_is_refused(systems):
    results = [trained(systems, name, 1, NATS) for name in ("one", "two")]
    with pytest.raises(ValueError, match="seed of another run of its kind"):
        compare(results, merge_seeds=True)


def test_shared_noise_is_told_from_independent_noise(systems):
    other = replace(CONTINUOUS_TIME, estimator=Estimator.ORDER_AGNOSTIC)
    likelihoods = {
        "one": estimate(scores()),
        "two": estimate(scores(nats=NATS + 1)),
        "other-seed": estimate(scores(nats=NATS + 2), seed=1),
        "other-draws": estimate(scores(nats=NATS + 3), num_draws=8),
        "other-estimator": estimate(scores(nats=NATS + 4), other),
    }
    table = compare([systems.add(name, {"continuous": one}) for name, one in likelihoods.items()])
    noise = {apart.system: apart.noise for apart in table.differences if apart.column.key == BOUND}
    assert noise == {"two": "shared", **dict.fromkeys(("other-seed", "other-draws", "other-estimator"), "independent")}
    assert any("--shared-noise" in text for _, text in table.footnotes)


def test_noise_is_not_shared_across_vocabularies(systems):
    other = estimate(scores(nats=NATS + 1, tokens=WORDS + 3))
    same = estimate(scores(nats=NATS + 2))
    table = compare(
        [
            systems.add(name, {"continuous": one})
            for name, one in (("one", estimate(scores())), ("two", other), ("three", same))
        ]
    )
    noise = {apart.system: apart.noise for apart in table.differences if "continuous" in apart.column.key}
    assert noise == {"two": "independent", "three": "shared"}


def test_noise_is_shared_only_if_all_merged_runs_share_it(systems):
    def noise(draws: int) -> str:
        last = trained(systems, "last", 1, NATS + 2, start="scratch")
        own = estimate(scores(nats=NATS + 2), steps(64), num_draws=draws)
        results = [
            *(trained(systems, f"first-{seed}", seed, NATS) for seed in range(2)),
            trained(systems, "scratch", 0, NATS + 1, start="scratch"),
            replace(last, likelihoods={"grid": own.summary()}),
        ]
        found = compare(results, names=["a", "b", "c", "d"], merge_seeds=True).differences
        return next(apart.noise for apart in found if apart.column.key == GRID_BOUND)

    assert noise(4) == "shared"
    assert noise(8) == "independent"


def test_differences_are_from_the_reference_if_one_is_given(systems):
    folders = [
        systems.add(name, {"continuous": estimate(scores(nats=NATS + shift))})
        for name, shift in (("best", 0), ("baseline", 1), ("worst", 2))
    ]
    table = compare(folders, reference="baseline")
    found = {apart.system: apart.value for apart in table.differences if apart.column.key == BOUND}
    assert found.keys() == {"best", "worst"}
    assert found["best"] < 0 < found["worst"]
    assert marks(column(table, BOUND)) == {"best": "b", "baseline": "", "worst": ""}
    with pytest.raises(ValueError, match="`reference` must be one of best, baseline, worst, got 'none'"):
        compare(folders, reference="none")


def test_one_quantity_is_shown_alone(four_kinds):
    keys = [one.key for one in compare(four_kinds, quantity="grid").columns if one.key.startswith("perplexity")]
    assert keys == [GRID_BOUND]
    with pytest.raises(ValueError, match="`quantity` must be one of own, continuous, grid, got 'none'"):
        compare(four_kinds, quantity="none")


# ---- what does not compare ------------------------------------------------------------------------------------------


def test_different_texts_are_shown_but_not_ranked(systems):
    worse = {"continuous": estimate(scores(nats=NATS + 1))}
    table = compare(
        [systems.add("one"), systems.add("two", worse, text="another", calls=15.0, bleu=0.5, self_bleu=0.5)]
    )
    for key in ("perplexity_per_word.bound.continuous", "bleu4", "self_bleu4"):
        assert set(marks(column(table, key)).values()) == {""}
    assert marks(column(table, "calls_per_sample")) == {"one": "", "two": ""}  # nothing is drawn, nothing is tested
    warnings = " ".join(table.warnings)
    assert "text differs: test.txt, split all, sha256" in warnings
    assert "BLEU-4 is not ranked: the texts differ" in warnings
    assert not any(text.startswith("text:") for _, text in table.footnotes)
    assert "texts differ, so likelihoods are given per word" in [text for _, text in table.footnotes]
    by_token = compare([systems.folder / "one", systems.folder / "two"], Unit.TOKEN)
    assert not any("vocabularies" in text for text in (*by_token.warnings, *(text for _, text in by_token.footnotes)))


def test_different_vocabularies_are_compared_per_word_or_byte(systems):
    coarse = estimate(scores(nats=NATS + 0.3, tokens=WORDS + 3))
    folders = [systems.add("fine"), systems.add("coarse", {"continuous": coarse})]
    table = compare(folders)
    word = "perplexity_per_word.bound.continuous"
    assert marks(column(table, word)) == {"fine": "b", "coarse": ""}
    assert any("vocabularies differ, so likelihoods are given per word" in text for _, text in table.footnotes)
    assert marks(column(compare(folders, Unit.BYTE), "bits_per_byte.bound.continuous")) == {"fine": "b", "coarse": ""}
    by_token = compare(folders, Unit.TOKEN)
    assert marks(column(by_token, BOUND)) == {"fine": "", "coarse": ""}
    assert column(by_token, BOUND)["coarse"].value < column(by_token, BOUND)["fine"].value  # as it misleadingly looks
    assert any("vocabularies differ (compare by --unit word or byte)" in warning for warning in by_token.warnings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ({"length": Length.MODELED}, "length is given for some"),
        ({"special_tokens": True}, "special tokens are counted for some"),
        ({"packed": True}, "some use packed text"),
        ({"source_given": True}, "some are conditional on a source"),
        ({"definition": steps(512)}, "the numbers of time steps differ"),
    ],
)
def test_different_protocols_are_not_ranked(systems, card, reason):
    usual = {"definition": steps(128)}
    folders = [
        systems.add("one", {"grid": estimate(scores(), **usual)}),
        systems.add("two", {"grid": estimate(scores(nats=NATS + 1), **usual | card)}),
    ]
    table = compare(folders)
    assert set(marks(column(table, "perplexity_per_token.bound.grid")).values()) == {""}
    assert any(reason in warning for warning in table.warnings)
    assert not any("BLEU" in warning for warning in table.warnings)  # they say nothing of samples


def test_the_continuous_limit_is_one_quantity_however_it_is_estimated(systems):
    other = estimate(scores(nats=NATS + 1), replace(CONTINUOUS_TIME, estimator=Estimator.ORDER_AGNOSTIC))
    table = compare([systems.add("one"), systems.add("two", {"continuous": other})])
    assert marks(column(table, BOUND)) == {"one": "b", "two": ""}
    assert not table.warnings


def test_different_sampling_settings_give_a_warning(systems):
    table = compare([systems.add("one"), systems.add("two", sampling={"steps": 64, "top_k": None}, bleu=0.5)])
    assert "sampling steps differs: 128 (one), 64 (two)" in table.warnings
    assert "top-k differs: 30 (one), off (two)" in table.warnings
    assert marks(column(table, "bleu4"))["two"] == "b"  # such settings are what people compare


def test_different_lengths_and_machines_are_not_ranked(systems):
    table = compare(
        [systems.add("one"), systems.add("two", length=24, device="cuda", seconds=0.1, bleu=0.5, self_bleu=0.5)]
    )
    for key in ("bleu4", "self_bleu4", "seconds_per_sample"):
        assert set(marks(column(table, key)).values()) == {""}
    assert any("seconds per sample is not ranked: the machines differ" in warning for warning in table.warnings)
    assert any("samples differs: 40 of length 64 (one), 40 of length 24 (two)" in warning for warning in table.warnings)


def test_common_settings_are_stated_once(systems):
    table = compare([systems.add("one"), systems.add("two", {}, notes=("none",))])
    protocol = table.footnotes[-1][1]
    for words in (
        *("60 sentences", "text: test.txt, split all, sha256", "length: given", "special tokens: not counted"),
        *("single sentences", "samples: 40 of length 64", "top-k: 30", "top-p: off", "sampling steps: 128", "95 %"),
    ):
        assert words in protocol
    assert not table.warnings


def test_judges_are_shown_with_entropy_and_not_ranked(systems):
    judged = Judged(30.0, (28.0, 33.0), 3.4, 500, 0, 0)
    judged = {"judge": Judgment("judge_a", "each text alone", judged, replace(judged, perplexity=20.0))}
    folders = [
        systems.add("one", mauve=Mauve(0.8, 0.8, "gpt2", 4, 40, 40), **judged),
        systems.add("two", mauve=Mauve(0.9, 0.9, "gpt2", 4, 40, 40), **judged),
        systems.add("three"),
    ]
    table = compare(folders)
    assert marks(column(table, "judge.judge_a")) == {"one": "", "two": "", "real sentences": ""}
    assert column(table, "judge.judge_a")["one"].interval == (28.0, 33.0)
    assert column(table, "judge.judge_a")["real sentences"].value == 20.0
    assert column(table, "judge_entropy.judge_a")["one"].value == 3.4
    assert marks(column(table, "mauve")) == {"one": "", "two": ""}  # it has no interval
    keys = [one.key for one in table.columns]
    assert keys.index("judge_entropy.judge_a") == keys.index("judge.judge_a") + 1
    other = systems.add("four", mauve=Mauve(0.95, 0.95, "judge", 4, 40, 40))
    assert set(marks(column(compare([*folders, other]), "mauve")).values()) == {""}


# ---- names and errors -----------------------------------------------------------------------------------------------


def test_names_are_the_shortest_ends_of_paths(systems, tmp_path):
    first, second = systems.add("a/run"), systems.add("b/run")
    assert compare([first, second]).names[:2] == ("a/run", "b/run")
    assert compare([first / "evaluation"]).names[0] == "run"
    with pytest.raises(ValueError, match="twice"):
        compare([first, first / "evaluation"])


def test_a_run_without_an_evaluation_names_the_command_to_run(systems, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json").write_text("{}")
    message = re.escape(f"diffusionbert evaluate --model {tmp_path / 'run'} --data")
    with pytest.raises(ValueError, match=message) as caught:
        compare([systems.add("one"), tmp_path / "run"])
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no folder"):
        compare([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([])


# ---- the table ------------------------------------------------------------------------------------------------------

HOSTILE = Table(
    (Column("x", "100% of A&B_c|d", Direction.LOWER, 1), Column("y", "plain", Direction.HIGHER, 2)),
    ("sys|tem_{1}", "two\nlines*"),
    (
        (Cell(1234.56, (1000.0, math.inf), best=True, notes=("a",)), Cell(notes=("a",))),
        (Cell(2.0, None), Cell(text="a_b")),
    ),
    (("a", "50% | of_it"), ("", "all agree")),
    ("careful with $x & y",),
)


def test_large_numbers_are_shown_in_scientific_notation():
    table = Table((Column("x", "x", Direction.LOWER, 1),), ("a", "b"), ((Cell(9.125e15),), (Cell(999_999.0),)))
    assert [line.split("|")[2].strip() for line in to_markdown(table).splitlines()[2:4]] == ["9.1e+15", "999,999.0"]


def test_markdown_escapes_names():
    lines = to_markdown(HOSTILE).splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[:4]]
    assert [len(row) for row in cells] == [3, 3, 3, 3]
    assert cells[2][1].strip() == "**1,234.6**<sup>a</sup> [1,000.0, ∞]"
    assert cells[3][1].strip() == "2.0"
    assert cells[3][2].strip() == r"a\_b"
    assert cells[2][2].strip() == "–<sup>a</sup>"
    assert cells[0][1].strip() == r"100% of A&B\_c\|d ↓"
    assert cells[0][2].strip() == "plain ↑"
    assert r"<sup>a</sup>50% \| of\_it" in lines[5]
    assert lines[-1].strip() == "**Warning:** careful with $x & y"


def test_latex_escapes_and_balances():
    latex = to_latex(HOSTILE)
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert [len(re.split(r"(?<!\\)&", row)) for row in rows] == [3, 3, 3]
    assert r"100\% of A\&B\_c\textbar{}d $\downarrow$" in rows[0]
    assert r"\textbf{1,234.6}$^{\mathrm{a}}$ {\scriptsize [1,000.0, $\infty$]}" in rows[1]
    assert r"a\_b" in rows[2]
    assert rows[1].split("&")[2].strip() == r"--$^{\mathrm{a}}$ \\"
    assert r"sys\textbar{}tem\_\{1\}" in rows[1]
    assert r"careful with \$x \& y" in latex
    bare = re.sub(r"\\[{}]", "", latex)
    assert bare.count("{") == bare.count("}")
    assert len(re.findall(r"(?<!\\)\$", latex)) % 2 == 0
    assert not re.findall(r"(?<!\\)%", "\n".join(latex.splitlines()[1:]))


@pytest.mark.slow
def test_json_contains_everything(four_kinds):
    plain = compare(four_kinds).to_json()
    again = json.loads(json.dumps(plain, allow_nan=False))
    assert again == plain
    [diffusion] = [system for system in plain["systems"] if system["name"] == "diffusion"]
    cell = diffusion["cells"][BOUND]
    assert cell["best"] is True
    assert cell["ci95"][0] < cell["value"] < cell["ci95"][1]
    [other] = [system for system in plain["systems"] if system["name"] == "other"]
    assert other["cells"][BOUND]["best"] is False
    assert diffusion["provenance"]["weights_sha256"] == "0" * 64
    assert {one["key"]: one["better"] for one in plain["columns"]}["bleu4"] == "higher"


def test_a_terminal_shows_styles_and_a_file_marks():
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system="standard")
    console.print(to_terminal(HOSTILE, styled=True))
    shown = console.file.getvalue()
    assert "\x1b[1m1,234.6\x1b[0ma" in shown
    assert "[1,000.0, ∞]" in shown
    assert "two lines*" in shown
    plain = Console(file=io.StringIO(), width=200)
    plain.print(to_terminal(HOSTILE, styled=False))
    assert "1,234.6*a" in plain.file.getvalue()


def test_the_best_is_the_best_finite_number():
    def best(values, better):
        return best_of([Cell(value) for value in values], Column("x", "x", better, 2))

    assert best([2.0, 1.0, 3.0, None], Direction.LOWER) == 1
    assert best([2.0, 1.0, 3.0], Direction.HIGHER) == 2
    assert best([2.0, None], Direction.LOWER) is None  # alone
    assert best([2.0, 1.0], Direction.NEITHER) is None
    assert best([2.0, math.inf], Direction.LOWER) == 0
    assert best([math.inf, math.inf], Direction.LOWER) is None


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> None:
    tyro.cli(Compare, args=[str(argument) for argument in arguments]).run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "sign"),
    [("table", "*"), ("markdown", "|---|---:|"), ("latex", r"\begin{tabular}{l"), ("json", '"systems"')],
)
def test_the_command_prints_and_writes_every_format(four_kinds, tmp_path, capsys, form, sign):
    run(*four_kinds, f"--format={form}", f"--output={tmp_path / 'table'}")
    assert capsys.readouterr().out == ""
    written = (tmp_path / "table").read_text(encoding="utf-8")
    run(*four_kinds, f"--format={form}")
    shown = capsys.readouterr().out
    assert shown == written
    assert sign in written


def test_a_printed_table_is_readable(four_kinds, capsys):
    run(*four_kinds)
    shown = str(compare(four_kinds))
    assert capsys.readouterr().out == f"{shown}\n"
    lines = shown.splitlines()
    assert lines[0].split()[: len(four_kinds)] == [folder.name for folder in four_kinds]
    for heading in ("perplexity per token (", "BLEU-4 ↑", "seconds per sample ↓", "calls per sample ↓"):
        assert any(line.startswith(heading) for line in lines)
    assert "Cell(" not in shown


def test_an_exact_likelihood_mentions_no_draws(four_kinds):
    decoder, diffusion = (EvaluationResult.load(folder).table() for folder in four_kinds[:2])
    assert "nothing drawn, float32" in decoder
    assert "4 draws per sentence in 2 strata, seed 0, float32" in diffusion
    assert "draws per sentence" not in decoder


def test_a_printed_result_is_its_table(four_kinds):
    result = EvaluationResult.load(four_kinds[0])
    assert str(result) == result.table()
    assert "seconds per sample" in str(result)
    assert "samples=" not in repr(result).replace("samples=TextMetrics", "")


def test_the_command_takes_a_unit_and_json(four_kinds, capsys):
    run(*four_kinds, "--unit=byte", "--json")
    keys = [one["key"] for one in json.loads(capsys.readouterr().out)["columns"]]
    assert "bits_per_byte.bound.continuous" in keys
    assert not any(key.startswith("perplexity_per_token") for key in keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "nothing to compare"), (["--json", "--format=latex", "x"], "contradict"), (["/nowhere"], "no folder")],
)
def test_wrong_use_gives_a_one_line_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def test_an_unwritable_output_gives_a_one_line_error(four_kinds, tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        run(*four_kinds, f"--output={tmp_path / 'no' / 'folder'}")
