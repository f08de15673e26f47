"""The paper's experiment from beginning to end, as small as can be: trained once, then found again."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from shared import encoding_cache
from tiny_models import corpus, run_of, toy_sentences
from tiny_scale import SMALLER_THAN_SMOKE, STEPS

from diffusionbert.cli.main import main
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.inference.score import score
from diffusionbert.networks.loading import NewModernBert, NewModernBertDecoder
from diffusionbert.recipes import SYSTEMS, Start
from diffusionbert.reproduce import Request, figures
from diffusionbert.reproduce import reproduction as reproduction_module
from diffusionbert.reproduce.reproduction import SCALES, Reproduction, is_finished
from diffusionbert.reproduce.targets import MAIN, TARGETS
from diffusionbert.storage.files import write_json
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.step import TrainingStep
from diffusionbert.training.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("reproduction")]  # or every worker would train all systems


@pytest.fixture(scope="module", autouse=True)
def _a_smaller_scale():
    """Replaces the scale smoke by one of a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "smoke", SMALLER_THAN_SMOKE)
        yield


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """The one folder into which all targets are reproduced."""
    return tmp_path_factory.mktemp("reproduction") / "output"


def requested(output: Path, **changes: object) -> Reproduction:
    return Reproduction(output, Request(data=str(corpus()), **changes), encoding_cache(), "cpu")


@pytest.fixture(scope="module")
def done(output) -> dict[str, list[Path]]:
    """What all targets have written."""
    reproduction = requested(output)
    return {name: make(reproduction) for name, make in TARGETS.items()}


@pytest.fixture
def nothing_is_done(monkeypatch):
    """Training, loading or evaluating a model would fail."""

    def refuse(*_, **__):
        raise AssertionError("this was done before")

    for name in ("train", "evaluate", "load_engine"):
        monkeypatch.setattr(reproduction_module, name, refuse)


def rows_of(table: Path) -> dict[str, list[str]]:
    """The cells of the first Markdown table, by the first of each row."""
    first, _, _ = table.read_text(encoding="utf-8").partition("\n\n")
    lines = [line for line in first.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in cells if len(row) > 1}


# ---- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_table2_has_every_system_and_keeps_kinds_apart(done, output):
    rows = rows_of(output / "table2.md")
    header = rows["system"]
    assert len(rows) == 2 + len(MAIN)  # with the header and real sentences
    kinds = [next((kind for kind in ("exact", "bound", "pseudo") if f"({kind}," in cell), "") for cell in header]
    assert {"exact", "bound", "pseudo"} < set(kinds)
    for name, cells in rows.items():
        if not name.startswith(("system", "real")):
            found = {kind for kind, cell in zip(kinds, cells, strict=True) if kind and "[" in cell}
            assert found == expected_kinds(name), name
    assert rows["Transformer decoder, from scratch"][kinds.index("exact")] != "–"
    titles = list(rows)
    assert "BERT-Mouth, pretrained, left to right" in titles
    assert "DiffusionBERT, pretrained, spindle (λ = 0.3, sentence mean), paper, TAD" in titles
    assert (output / "table2.tex").read_text(encoding="utf-8").count(r"\\") > len(MAIN)
    assert "D3PM" in json.dumps(json.loads((output / "table2.json").read_text(encoding="utf-8")))


def expected_kinds(title: str) -> set[str]:
    if title.startswith("SUNDAE"):
        return set()
    if title.startswith(("GPT", "Transformer decoder")):
        return {"exact"}
    if title.startswith("BERT-Mouth"):
        return {"bound", "pseudo"}
    return {"pseudo"} if "paper" in title else {"bound"}


def test_every_interval_contains_its_figure(done, output):
    pattern = re.compile(r"([\d,.]+)(?:</u>|\*\*)?(?:<sup>†</sup>)? \[([\d,.]+), ([\d,.]+)\]")
    found = pattern.findall((output / "table2.md").read_text(encoding="utf-8"))
    assert len(found) > 2 * len(MAIN)
    for middle, low, high in found:
        value, least, most = (float(number.replace(",", "")) for number in (middle, low, high))
        assert least <= value <= most


@pytest.mark.slow
def test_a_missing_likelihood_has_a_footnote(done, output):
    text = (output / "table2.md").read_text(encoding="utf-8")
    assert "has no likelihood, nor a bound on one: judge it by its samples" in text


def test_table3_counts_steps_and_calls(done, output):
    rows = rows_of(output / "table3.md")
    calls = {name: cells[-1].strip("*").removeprefix("<u>").removesuffix("</u>") for name, cells in rows.items()}
    assert float(calls["DiffusionBERT, linear, 2 steps"]) <= 2
    assert float(calls["BERT-Mouth, 48 steps"]) == 48
    assert float(calls["GPT, 6 steps"]) == 6
    assert float(calls["Diffusion-LM, cosine, 4 steps"]) == 4
    assert any("(bound, strict, different time grids)" in cell for cell in rows["system"])  # T is that of sampling
    assert "not ranked: the numbers of time steps differ" in (output / "table3.md").read_text(encoding="utf-8")


def test_table1_shows_a_sentence_denoised(done, output):
    text = (output / "table1.md").read_text(encoding="utf-8")
    for name in ("bert-mouth", "d3pm", "diffusionbert-spindle"):
        assert SYSTEMS[name].title in text
    assert "MASK" in text


# ---- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["figure2", "figure3", "figure4"])
def test_a_figure_is_an_image_and_its_numbers(done, output, name):
    picture, numbers = done[name]
    assert (picture, numbers) == (output / f"{name}.png", output / f"{name}.json")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000
    assert len(json.loads(numbers.read_text(encoding="utf-8"))) >= 4


def test_curves_of_figure2_fall_from_1_to_0(done, output):
    for curve in json.loads((output / "figure2.json").read_text(encoding="utf-8")):
        *_, survival = (value for value in curve.values() if isinstance(value, list))
        assert survival[0] == pytest.approx(1)
        assert survival[-1] == pytest.approx(0, abs=1e-9)
        assert survival == sorted(survival, reverse=True)


def test_figure4_has_all_validations(done, output):
    curves = json.loads((output / "figure4.json").read_text(encoding="utf-8"))
    assert [curve["name"] for curve in curves][:2] == ["D3PM, from scratch, LTE", "D3PM, from scratch, TAD"]
    assert {(curve["schedule"], curve["quantity"]) for curve in curves} == {
        ("linear", "strict"),
        ("spindle (λ = 0.3, corpus mean)", "strict"),
    }
    assert all(curve["num_steps"] > 0 for curve in curves)
    assert all([0, 2, 3] in curve.values() for curve in curves)


# ---- once is enough -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_done")
def test_a_second_call_trains_and_evaluates_nothing(done, output):
    table = (output / "table2.md").read_text(encoding="utf-8")
    assert TARGETS["table2"](requested(output)) == done["table2"]
    assert (output / "table2.md").read_text(encoding="utf-8") == table
    for name in ("table1", "table3", "figure2", "figure3", "figure4"):
        assert TARGETS[name](requested(output)) == done[name]


def test_different_settings_for_the_same_folder_are_refused(done, output, capsys):
    with pytest.raises(ValueError, match=r"with seed 0, got 1; give the same settings, or choose another --output"):
        requested(output, seed=1)
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "table2", f"--output={output}", f"--data={corpus()}", "--steps=7"])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_stopped_training_ends_the_command(tmp_path, monkeypatch):
    """No table may be made from a training that was stopped by a signal."""

    def stopped(config, path, cache, resume=False):
        RunFolder(path).checkpoints.mkdir(parents=True)
        write_json(RunFolder(path).config, config.to_json())
        RunFolder(path).log.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "valid', encoding="utf-8")

    monkeypatch.setattr(reproduction_module, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        requested(tmp_path).run("mdlm")
    assert not (tmp_path / "runs").exists()  # the masked network was to come first


def test_wrong_settings_write_no_files(tmp_path):
    with pytest.raises(ValueError, match="steps"):
        requested(tmp_path / "new", steps=0)
    assert not (tmp_path / "new").exists()


def test_settings_of_a_call_that_failed_before_training_are_replaced(tmp_path, capsys):
    """After a misspelled file name, the corrected call may use the same folder."""
    output, cache = tmp_path / "new", encoding_cache()
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "figure4", "--data=nofile.txt", f"--output={output}", f"--cache={cache}"])
    assert caught.value.code == 2
    assert "nofile.txt" in capsys.readouterr().err
    requested(output)
    assert json.loads((output / "settings.json").read_text())["data"] == str(corpus())
    (output / "runs").mkdir()  # something began
    with pytest.raises(ValueError, match="contains a reproduction with data"):
        Reproduction(output, Request(data="another.txt"), cache, "cpu")


@pytest.mark.parametrize("command", [["reproduce", "figure2"], ["plot", "RUN"]], ids=" ".join)
def test_an_unwritable_output_is_refused_before_work(tmp_path, capsys, command):
    (tmp_path / "file").write_text("mine")
    words = [str(run_of("linear")) if word == "RUN" else word for word in command]
    capsys.readouterr()  # what a fixture said while it trained
    with pytest.raises(SystemExit) as caught:
        main([*words, f"--output={tmp_path / 'file' / 'x.png'}"])
    assert caught.value.code == 2
    [said] = capsys.readouterr().err.strip().splitlines()
    assert "is not writable" in said
    assert said.endswith("(Not a directory); choose another --output")


def log_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in RunFolder(run).log.read_text(encoding="utf-8").splitlines()]


def validations(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["nats_per_token"]) for line in log_of(run) if line["event"] == "validation"]


class KilledError(Exception):
    """Simulates a machine failure."""


def kill(*_, **__):
    raise KilledError


@pytest.mark.slow
def test_a_killed_run_is_resumed(done, output, tmp_path, monkeypatch):
    """Killed in its last step, after a checkpoint, and again before its model is written."""
    again = requested(tmp_path / "again", masked=str(output / "pretrained" / "masked"))
    run, whole = again.output / "runs" / "mdlm", output / "runs" / "mdlm"
    step = TrainingStep.__call__
    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", lambda self, batch: kill() if batch.step == 2 else step(self, batch))
        with pytest.raises(KilledError):
            again.run("mdlm")
    assert not is_finished(run)
    assert RunFolder(run).read_pointer("last") == RunFolder(run).checkpoint(2)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_export_best", kill)
        with pytest.raises(KilledError):
            again.run("mdlm")
    assert not RunFolder(run).model.exists()
    engine = again.engine("mdlm")
    assert validations(run) == validations(whole)
    sentence = ["the old king saw a river today ."]
    engines = engine, requested(output).engine("mdlm")
    ours, theirs = (score(one, sentence)[0].nats for one in engines)
    assert ours == theirs


def test_a_given_network_is_not_pretrained_again(done, output, tmp_path):
    other = requested(tmp_path / "other", masked=str(output / "pretrained" / "masked"))
    assert other.start(Start.MASKED) == str(output / "pretrained" / "masked")
    assert not (tmp_path / "other" / "pretrained").exists()


def test_without_a_test_text_the_validation_text_is_evaluated(tmp_path):
    validation = tmp_path / "validation.txt"
    validation.write_text("\n".join(toy_sentences(20, seed=7)))
    reproduction = requested(tmp_path / "own", validation=str(validation), masked=str(run_of("masking")))
    found = reproduction.evaluation("mdlm", "mdlm", scored=False, samples=2)
    assert found.data.corpus == str(validation)
    assert not [note for note in found.notes if "trained on" in note]
    assert requested(tmp_path / "test", validation="a", test="b").test == "b"
    assert requested(tmp_path / "neither").test == str(corpus())


def test_all_systems_have_one_vocabulary_and_the_same_number_of_steps(done, output):
    reproduction = requested(output)
    names = {row.system for row in MAIN}
    experiments = {name: reproduction.config(name) for name in names}
    assert {experiment.training.steps for experiment in experiments.values()} == {STEPS}
    tokenizers = {(Path(one.data.vocabulary) / "tokenizer.json").read_bytes() for one in experiments.values()}
    assert len(tokenizers) == 1
    assert names == {*SYSTEMS} - {"diffuseq"}


def test_a_new_decoder_may_have_a_higher_learning_rate(done, output, monkeypatch):
    monkeypatch.setitem(SCALES, "smoke", replace(SMALLER_THAN_SMOKE, decoder_rate_factor=3.0))
    names = "mdlm", "mdlm-pretrained", "decoder", "decoder-pretrained"
    rates = [requested(output).planned(name).training.learning_rate for name in names]
    assert rates == pytest.approx([1e-3, 1e-3, 3e-3, 1e-3])


# ---- from the command line ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_done")
def test_the_command_prints_the_table_and_its_path(done, output, capsys):
    options = ["--scale", "smoke", f"--data={corpus()}", f"--output={output}", f"--cache={encoding_cache()}"]
    main(["reproduce", "table2", *options])
    said = capsys.readouterr().out
    assert "| SUNDAE, from scratch |" in said
    assert f"written: {output / 'table2.md'}" in said
    main(["reproduce", "table3", *options, "--json"])
    assert json.loads(capsys.readouterr().out) == {"table3": [str(path) for path in done["table3"]]}


def test_plot_draws_runs_and_refuses_other_folders(tmp_path, capsys):
    picture = tmp_path / "curves.png"
    main(["plot", str(run_of("linear")), str(run_of("decoder")), f"--output={picture}"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "empty").mkdir()
    for runs in ([tmp_path / "empty"], [tmp_path / "nowhere"], [corpus()], [], [run_of("unrolled")]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["plot", *map(str, runs), f"--output={tmp_path / 'none.png'}"])
        assert caught.value.code == 2, runs
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1, said
        assert not (tmp_path / "none.png").exists()


def test_curves_are_named_by_the_shortest_distinct_paths(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(figures, "convergence", lambda curves, path: called.extend(one.name for one in curves))
    for parent in ("a", "b"):
        shutil.copytree(run_of("linear"), tmp_path / parent / "x")
    main(["plot", str(tmp_path / "a" / "x"), str(tmp_path / "b" / "x"), "--output=none.png"])
    main(["plot", str(run_of("linear")), str(run_of("decoder")), "--output=none.png"])
    assert called == ["a/x", "b/x", run_of("linear").name, run_of("decoder").name]
    monkeypatch.undo()
    monkeypatch.chdir(run_of("linear"))
    main(["plot", ".", f"--output={tmp_path / 'here.png'}"])
    assert (tmp_path / "here.png").exists()


def test_a_missing_device_is_refused_before_training(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "figure2", "--device=nowhere", f"--output={tmp_path / 'none'}"])
    assert caught.value.code == 2
    assert "--device nowhere is not available" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_decoder_is_pretrained_with_the_vocabulary_of_the_masked_network(tmp_path):
    reproduction = requested(tmp_path)
    decoder = reproduction._pretraining(Start.DECODER).data.vocabulary
    assert (
        decoder == reproduction.planned("decoder").data.vocabulary == str(tmp_path / "pretrained" / "masked" / "model")
    )


def test_every_system_can_have_the_modern_backbone(tmp_path, monkeypatch):
    monkeypatch.setitem(SCALES, "smoke", replace(SMALLER_THAN_SMOKE, decoder_rate_factor=3.0))
    reproduction = requested(tmp_path, backbone="modern", vocabulary=str(run_of("masking")))
    masked, causal = NewModernBert(1, 32, 2, 0.0), NewModernBertDecoder(1, 32, 2, 0.0)
    assert reproduction._pretraining(Start.MASKED).backbone == masked
    assert reproduction._pretraining(Start.DECODER).backbone == causal
    for name, system in SYSTEMS.items():
        if system.start is Start.SCRATCH:
            planned = reproduction.planned(name)
            assert planned.backbone == (causal if name == "decoder" else masked)
            assert planned.training.learning_rate == 1e-3  # the same layers for all


def test_settings_of_earlier_versions_have_the_defaults_of_later_ones(tmp_path):
    requested(tmp_path)
    (tmp_path / "runs").mkdir()
    settings = json.loads((tmp_path / "settings.json").read_text())
    del settings["backbone"]
    write_json(tmp_path / "settings.json", settings)
    requested(tmp_path)
    with pytest.raises(ValueError, match="contains a reproduction with backbone 'bert', got 'modern'"):
        requested(tmp_path, backbone="modern")


def test_the_evaluation_seed_of_earlier_versions_was_that_of_training(tmp_path):
    requested(tmp_path, seed=1)
    (tmp_path / "runs").mkdir()
    settings = json.loads((tmp_path / "settings.json").read_text())
    del settings["evaluation_seed"]
    write_json(tmp_path / "settings.json", settings)
    with pytest.raises(ValueError, match="contains a reproduction with evaluation_seed 1, got 0"):
        requested(tmp_path, seed=1)
    requested(tmp_path, seed=1, evaluation_seed=1)


def test_all_systems_of_a_table_share_their_noise_and_one_evaluation_seed(done, output):
    results = [EvaluationResult.load(output / "evaluations" / row.key) for row in MAIN]
    protocols = [one.likelihoods["grid"].protocol for one in results if "grid" in one.likelihoods]
    assert len(protocols) > 5
    assert len({(one.definition.estimator, one.num_draws, one.seed) for one in protocols}) == 1


def test_a_vocabulary_together_with_a_network_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give --vocabulary, or --masked and --decoder"):
        requested(tmp_path / "new", vocabulary="a", masked="b")
    assert not (tmp_path / "new").exists()
