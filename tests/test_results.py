"""The page of results is what the kept files say, what is missing is named, and nothing of a machine is kept."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import tyro
from made_up import evaluate, train  # first: it says where the scripts are

import budgets  # isort: skip
import kept  # isort: skip
import page  # isort: skip
import recipes  # isort: skip
import sections  # isort: skip
from kept import NotRun, Results  # isort: skip

from diffusionbert import figures
from diffusionbert.checkpoints import load_tensors, write_json
from diffusionbert.cli import Command
from diffusionbert.method import Likelihood
from diffusionbert.paper.targets import MAIN
from diffusionbert.training.log import TrainEvent, ValidationEvent, append

PAGE = Path(__file__).parent.parent / "docs" / "results.md"
KEPT = PAGE.with_suffix("")


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_kept_files_say(monkeypatch, tmp_path):
    for name in ("convergence", "scaling", "speed", "survival_curves", "quality_diversity"):
        monkeypatch.setattr(figures, name, lambda *_, **__: None)  # they have their own tests, and take long
    text = PAGE.read_text(encoding="utf-8")
    between = text.partition(page.BEGIN)[2].partition(page.END)[0]
    assert between.strip() == page.body(KEPT, tmp_path).strip(), "run: python benchmarks/results report"
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", between):
        assert (PAGE.parent / picture).stat().st_size > 10_000, picture


def test_every_command_of_the_page_is_understood():
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    own = [shlex.split(line)[1:] for line in lines if line.startswith("diffusionbert ")]
    assert len(own) >= 2
    for command in own:
        tyro.cli(Command, args=command)


def test_what_is_kept_is_small_and_names_no_machine():
    files = [path for path in KEPT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6e6
    for path in files:
        if path.suffix in (".json", ".jsonl"):
            kept.require_relative(path)


def test_what_is_missing_is_named(tmp_path):
    kept.unpack(KEPT, tmp_path)
    for path in tmp_path.glob("*/evaluations/*"):
        if path.name not in ("d3pm", "diffusionbert"):
            shutil.rmtree(path)
    shown = sections.main_table(Results(tmp_path), tmp_path)
    assert "`d3pm-tad`" in shown.partition("Not run yet:")[2].partition("\n")[0]
    assert "D3PM, from scratch, linear, TAD" not in shown
    nothing = sections.main_table(Results(tmp_path / "empty"), tmp_path)
    assert all(f"`{row.key}`" in nothing for row in MAIN)


@pytest.mark.parametrize(("nats", "verdict"), [(5.0, "**met**"), (4.2, "**not met**")])
def test_how_far_ahead_is_measured_against_the_best_row_of_each_training(tmp_path, nats, verdict):
    train(tmp_path, "seed0/diffusionbert", [6.0, 4.0])
    train(tmp_path, "steps20/diffusionbert", [6.0, 5.0, 4.0])
    for key, value in (("diffusionbert", 4.0), ("d3pm", 6.0), ("d3pm-spindle", nats)):
        evaluate(tmp_path, f"seed0/{key}", value)
    evaluate(tmp_path, "steps20/diffusionbert", 4.0)
    evaluate(tmp_path, "steps20/d3pm", 4.1)
    shown = sections.ratio(Results(tmp_path), tmp_path)
    assert verdict in shown
    assert "in 20 steps: not met" in shown
    [ratio] = re.findall(r"\| `d3pm-spindle` \(of 2\) \| .*? \| ([\d.]+) \[", shown)
    assert float(ratio) == pytest.approx(math.exp(4.0 - nats), rel=0.02)


def test_a_bound_below_an_exact_value_stands_out(tmp_path):
    for place, nats, way in (
        *(("seed0/diffusionbert", 4.0, "grid"), ("seed0/decoder", 3.5, "exact")),
        *(("steps20/diffusionbert", 4.0, "grid"), ("steps20/decoder", 4.5, "exact")),
    ):
        train(tmp_path, place, [6.0, 4.0] if place.startswith("seed0") else [6.0, 5.0, 4.0])
        evaluate(tmp_path, place, nats, way)
    results = Results(tmp_path)
    known = {system: budgets._points(results, system) for system in ("diffusionbert", "decoder")}
    [line] = [line for line in budgets._against_decoders(results, known).splitlines() if "` : `" in line]
    short, long = line.split(" | ")[1:]
    assert not short.startswith("**")
    assert long.startswith("**0.6")


# ---- keeping --------------------------------------------------------------------------------------------------------


def experiment(root: Path) -> Path:
    evaluate(root, "seed0/d3pm", 5.0)
    evaluate(root, "seed0/other", 5.0)
    train(root, "seed0/d3pm", [9.0, 5.0])
    write_json(root / "seed0" / "settings.json", {"data": "text/news.train-*.txt", "seed": 0})
    (root / "seed0" / "seconds").mkdir()
    write_json(root / "seed0" / "seconds" / "d3pm.json", {"workers": 3, "train": 60.0})
    return root


def test_what_was_kept_is_read_again(tmp_path):
    source = experiment(tmp_path / "experiment")
    kept.pack(source, tmp_path / "kept")
    kept.unpack(tmp_path / "kept", tmp_path / "again")
    before, after = Results(source), Results(tmp_path / "again")
    first, second = before.scores("d3pm", "grid"), after.scores("d3pm", "grid")
    assert torch.equal(first.example, second.example)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.allclose(first.nats, second.nats, rtol=1e-6)
    assert first.kind is second.kind
    assert after.tokens("d3pm", "seed0") == before.tokens("d3pm", "seed0") == 1000
    assert after.seconds("seed0") == {"d3pm": {"workers": 3, "train": 60.0}}
    assert len(after.evaluation("d3pm").bleu4.values) == 200
    stored = tmp_path / "kept" / "seed0" / "evaluations"
    assert len((stored / "d3pm" / "samples.txt").read_text().splitlines()) == kept.NUM_SAMPLES
    assert not (stored / "other" / "samples.txt").exists()  # no row of the main table
    assert set(load_tensors(stored / "d3pm" / "scores.safetensors")) == {"nats.grid", "bleu4", "self_bleu4"}
    assert len(list((tmp_path / "kept" / "sentences").iterdir())) == 1


def test_what_a_second_call_does_not_bring_stays(tmp_path):
    kept.pack(experiment(tmp_path / "experiment"), tmp_path / "kept")
    evaluate(tmp_path / "more", "seed0/d3pm-tad", 5.0)
    train(tmp_path / "more", "seed0/d3pm", [9.0, 4.0])
    (tmp_path / "more" / "seed0" / "seconds").mkdir()
    write_json(tmp_path / "more" / "seed0" / "seconds" / "d3pm.json", {"workers": 1, "train": 1.0})  # it was found done
    kept.pack(tmp_path / "more", tmp_path / "kept")
    kept.unpack(tmp_path / "kept", tmp_path / "again")
    assert Results(tmp_path / "again").keys("seed0") == ["d3pm", "d3pm-tad", "other"]
    assert Results(tmp_path / "again").seconds("seed0") == {"d3pm": {"workers": 3, "train": 60.0}}


def test_runs_that_did_not_end_are_not_kept(tmp_path):
    source = experiment(tmp_path / "experiment")
    train(source, "seed0/d3pm-tad", [9.0, 5.0])
    log = source / "seed0" / "runs" / "d3pm-tad" / "log.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:-1]) + "\n")
    kept.pack(source, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept" / "seed0" / "trained").iterdir()] == ["d3pm"]


@pytest.mark.parametrize(
    "words",
    ["/srv/data/news.txt", "1 skipped (first at /srv/data/news.txt:3)", "~/data/news.txt", "text=/srv/news/x"],
)
def test_places_on_a_machine_are_refused_before_anything_is_kept(tmp_path, words):
    source = experiment(tmp_path / "experiment")
    write_json(source / "seed0" / "evaluations" / "other" / "evaluation.json", {"data": {"report": words}})
    with pytest.raises(ValueError, match="relative paths"):
        kept.pack(source, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "words", ["text/news.train-*.txt.xz", "experiment/seed0/runs", "and/or", "https://a.org/b/c", "1/2"]
)
def test_other_strokes_are_no_places(tmp_path, words):
    write_json(tmp_path / "settings.json", {"data": words})
    kept.require_relative(tmp_path / "settings.json")


def test_other_settings_are_not_mixed_in(tmp_path):
    source = experiment(tmp_path / "experiment")
    kept.pack(source, tmp_path / "kept")
    write_json(source / "seed0" / "settings.json", {"data": "text/other.txt", "seed": 0})
    with pytest.raises(ValueError, match="other settings"):
        kept.pack(source, tmp_path / "kept")


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_tokens_of_pretraining_are_the_last_that_its_log_counts(tmp_path):
    [*_, last] = [
        json.loads(line)
        for line in (budgets.PRETRAINING / "decoder.jsonl").read_text().splitlines()
        if "tokens" in line
    ]
    found = budgets.pretraining(Results(tmp_path), "decoder-pretrained")
    assert found.tokens == last["tokens"] > 1e8
    assert 60 < found.seconds < 600
    assert budgets.pretraining(Results(tmp_path), "decoder") == budgets.Pretraining(0, 0.0)


def test_a_network_that_was_pretrained_on_the_way_has_its_own_log(tmp_path):
    train(tmp_path / "experiment", "larger/diffusionbert", [6.0, 4.0])
    log = tmp_path / "experiment" / "larger" / "pretrained" / "masked" / "log.jsonl"
    log.parent.mkdir(parents=True)
    append(log, ValidationEvent(0, 5.0, Likelihood.NONE, 0.1, loss_per_token=3.0))
    append(log, TrainEvent(2, 8.0, 2.0, tokens_seen=30))
    kept.pack(tmp_path / "experiment", tmp_path / "kept")
    kept.unpack(tmp_path / "kept", tmp_path / "again")
    results = Results(tmp_path / "again")
    assert budgets.pretraining(results, "diffusionbert", "larger") == budgets.Pretraining(30, 3.0)
    assert budgets.pretraining(results, "diffusionbert").tokens > 1e8  # that which was given


def test_between_budgets_nats_are_interpolated():
    assert budgets._interpolated(1.25, [1.0, 2.0, 4.0], [6.0, 4.0, 3.0]) == pytest.approx(5.5)
    assert budgets._interpolated(3.0, [1.0, 2.0, 4.0], [6.0, 4.0, 3.0]) == pytest.approx(3.5)
    assert budgets._interpolated(5.0, [1.0, 2.0, 4.0], [6.0, 4.0, 3.0]) is None
    assert budgets._interpolated(0.0, [1.0, 2.0, 4.0], [6.0, 4.0, 3.0]) is None


def test_steps_are_timed_by_the_network_of_the_same_kind(tmp_path):
    train(tmp_path, "alone/decoder", [5.0, 4.0])
    assert budgets.seconds_a_step(Results(tmp_path), "decoder-pretrained") == pytest.approx([100 / 50] * 3)
    with pytest.raises(NotRun):
        budgets.seconds_a_step(Results(tmp_path), "d3pm")


def test_files_are_noted_by_their_names(tmp_path):
    (tmp_path / "masked").mkdir()
    (tmp_path / "masked" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "news.txt").write_bytes(b"")
    kept.note_hashes([tmp_path / "news.txt", tmp_path / "masked" / "model.safetensors"], tmp_path / "kept")
    kept.unpack(tmp_path / "kept", tmp_path / "again")
    given = Results(tmp_path / "again").given()
    assert list(given) == ["masked/model.safetensors", "news.txt"]
    assert given["news.txt"] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of nothing
    with pytest.raises(ValueError, match="is no file"):
        kept.note_hashes([tmp_path / "nowhere.txt"], tmp_path / "kept")


def test_a_folder_that_is_no_experiment_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="no folder with runs"):
            kept.pack(folder, tmp_path / "kept")


def test_every_line_of_a_run_that_was_timed_is_kept(tmp_path):
    for folder in ("alone", "seed0"):
        train(tmp_path / "experiment", f"{folder}/decoder", [5.0, 4.0, 3.0, 2.0])
    kept.pack(tmp_path / "experiment", tmp_path / "kept")
    lines = {
        folder: (tmp_path / "kept" / folder / "trained" / "decoder" / "log.jsonl").read_text().count('"loss"')
        for folder in ("alone", "seed0")
    }
    assert lines == {"alone": 10, "seed0": 2}


def test_the_best_recipe_is_set_against_a_decoder_of_its_size(tmp_path):
    for place, nats, way in (
        ("seed0/diffusionbert", 4.0, "continuous"),
        ("seed0/diffusionbert-bell", 3.9, "continuous"),
        ("faster/diffusionbert-bell", 3.8, "continuous"),
        ("seed0/decoder", 3.5, "exact"),
        ("unaveraged/decoder", 3.4, "exact"),
        ("unaveraged/diffusionbert-bell", 3.85, "continuous"),
        ("larger/diffusionbert-bell", 3.2, "continuous"),
        ("larger/decoder", 3.3, "exact"),
    ):
        train(tmp_path, place, [6.0, 4.0])
        evaluate(tmp_path, place, nats, way)
    for folder in ("seed0", "faster", "unaveraged", "larger"):
        write_json(tmp_path / folder / "settings.json", {"preset": "medium" if folder == "larger" else "small"})
    shown = recipes.recipes(Results(tmp_path), tmp_path)
    assert "`seed0/genmd4`" in shown.partition("Not run yet:")[2]
    [change] = [line for line in shown.splitlines() if "against `seed0/diffusionbert`" in line]
    assert "| −9." in change  # exp(3.9 - 4.0)
    *_, small, larger = [line.split(" | ") for line in shown.splitlines() if re.search(r"\d\](\*\*)? \|$", line)]
    assert small[2:4] == ["`faster/diffusionbert-bell`", "`unaveraged/decoder`"]
    assert float(small[-1].split()[0]) == pytest.approx(math.exp(0.4), rel=0.02)
    assert re.search(r"table 2: .*`decoder` .* against .*, −(9|10)\.", shown)  # exp(3.4 - 3.5)
    assert "width 512" in larger[0]
    assert float(larger[-1].lstrip("*").split()[0]) == pytest.approx(math.exp(-0.1), rel=0.02)
