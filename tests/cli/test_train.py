"""`train` as people type it: what a folder may hold, what may be given with --resume, which options are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from shared import shared

from diffusionbert.cli.main import main, parse_arguments
from diffusionbert.cli.train import configure
from diffusionbert.networks.loading import NewModernBert, NewModernBertDecoder
from diffusionbert.training.config import DataConfig, RunConfig
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.step import TrainingStep

BEGUN = ["--width=16", "--layers=1", "--vocabulary=512"]
"""The network and vocabulary of the runs here."""


def last_of(run: Path) -> str:
    path = RunFolder(run).read_pointer("last")
    assert path is not None
    return path.name


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def made_up_text() -> Path:
    """A made-up text."""
    return shared("made-up-text", _write_text) / "text.txt"


def _write_text(output: Path) -> None:
    words = np.random.default_rng(0).choice(
        ["a", "few", "words", "that", "are", "written", "again", "and", "again"], (200, 9)
    )
    (output / "text.txt").write_text("".join(" ".join(row) + "\n" for row in words))


@pytest.fixture(scope="module")
def short_run(made_up_text) -> Path:
    """Two steps on the text, by the command itself: the run and its cache."""
    return shared("short-run", lambda output: command(output, "--steps=2", f"--data={made_up_text}", *BEGUN))


def command(folder: Path, *options: str) -> None:
    main(["train", f"--output={folder / 'run'}", f"--cache={folder / 'cache'}", *options])


@pytest.mark.slow
def test_a_resumed_run_takes_other_settings(finished):
    """The error on a loss that is no number says: resume with a lower learning rate."""
    command(finished, "--resume", "--steps=3", "--learning-rate=1e-5")
    assert last_of(finished / "run") == "step-00000003"
    stored = json.loads((finished / "run" / "run.json").read_text())["training"]
    assert (stored["steps"], stored["learning_rate"]) == (3, 1e-5)


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused in one line of its own, exit code 2."""

    def refused(*options: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["train", *options])
        assert caught.value.code == 2
        [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("diffusionbert: ")]
        return said

    return refused


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def finished(short_run, tmp_path) -> Path:
    """A copy of the finished run, that a test may spoil."""
    shutil.copytree(short_run / "run", tmp_path / "run")
    shutil.copytree(short_run / "cache", tmp_path / "cache")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers=5"], "has layers 1, not 5"),
        (["--data=nofile.txt"], "not nofile.txt, which cannot change"),
        (["--preset=paper"], "has vocabulary 512, not bert-base-uncased"),
        (["--schedule=spindle"], "has schedule linear, not spindle (λ = 0.3, corpus mean)"),
        (["--time=layers"], "has time "),
        (["--max-length=9"], "has max_length 64, not 9"),
        (["--cased"], "has lower True, not False"),
        (["--system=decoder", *BEGUN], "has backbone bert ("),
        (["--start=nosuch"], "not nosuch"),
        (["--system=bogus"], "unknown system 'bogus'"),
        (["--optimizer=muon"], "trained with the optimizer adamw, whose state muon cannot use"),
        (["--steps=1"], "which the run has reached, got 1"),
    ],
    ids=str,
)
def test_what_a_resumed_run_cannot_change_is_refused(finished, refused, options, message):
    before = files(finished / "run")
    said = refused(f"--output={finished / 'run'}", f"--cache={finished / 'cache'}", "--resume", *options)
    assert message in said
    assert files(finished / "run") == before


@pytest.mark.slow
def test_the_line_that_began_a_run_resumes_it(made_up_text, finished):
    """As a scheduler has it, which adds --resume to the same line."""
    line = [f"--data={made_up_text}", *BEGUN]
    for steps, options in ((5, line), (6, [*line, "--schedule=linear", "--time=none"]), (7, ["--layers=1"])):
        command(finished, "--resume", f"--steps={steps}", *options)
        assert last_of(finished / "run") == f"step-{steps:08d}"


def spoiled(text: str) -> str:
    """The same with other words, of which a vocabulary of the same size can be made."""
    return text.replace("written", "spoken").replace("few", "thousand")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["training", "validation"])
def test_a_run_goes_on_with_the_text_it_began_with_alone(made_up_text, tmp_path, refused, split):
    """Trained anew on another text, a vocabulary has as many tokens, and the old weights would fit it."""
    texts = {"training": tmp_path / "text.txt", "validation": tmp_path / "held_out.txt"}
    for path in texts.values():
        shutil.copy(made_up_text, path)
    line = f"--data={texts['training']}", f"--validation={texts['validation']}"
    command(tmp_path, *line, *BEGUN, "--steps=1")
    resumed = f"--output={tmp_path / 'run'}", f"--cache={tmp_path / 'cache'}", "--resume", "--steps=2"
    changed = texts[split]
    before, kept = files(tmp_path / "run"), changed.read_text()
    changed.write_text(spoiled(kept))
    said = refused(*resumed)
    assert f"the {split} text {str(changed)!r} has changed since the run was started; restore it" in said
    assert files(tmp_path / "run") == before
    changed.write_text(kept)
    command(tmp_path, *resumed[2:])
    assert last_of(tmp_path / "run") == "step-00000002"


def test_a_run_that_kept_nothing_of_its_beginning_goes_on(finished):
    """As older ones, which did not keep it."""
    shutil.rmtree(finished / "run" / "start")
    command(finished, "--resume", "--steps=9")
    assert last_of(finished / "run") == "step-00000009"


def test_settings_by_which_nothing_is_trained_are_not_saved(finished):
    before = files(finished / "run")
    command(finished, "--resume", "--batch-tokens=2048", "--learning-rate=7")
    assert files(finished / "run") == before


@pytest.mark.parametrize(
    "name",
    ["model/notes.txt", "log.jsonl", "checkpoints/mine", "start/mine", "beginning/mine", "last.json", "best.json"],
)
def test_a_folder_that_is_no_run_is_never_written_over(made_up_text, tmp_path, refused, name):
    mine = tmp_path / "folder" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    said = refused(f"--output={tmp_path / 'folder'}", f"--data={made_up_text}", "--steps=1")
    assert "is not a run, but holds" in said
    assert repr(name.split("/")[0]) in said
    assert files(tmp_path / "folder") == {name: b"mine"}


def test_a_folder_with_other_things_is_free(made_up_text, short_run, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # of a run that was killed at once
    (tmp_path / "run" / "notes.txt").write_text("mine")
    shutil.copytree(short_run / "cache", tmp_path / "cache")
    command(tmp_path, f"--data={made_up_text}", "--steps=1", *BEGUN)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(finished):
    run = finished / "run"
    for name in ("checkpoints", "model"):
        shutil.rmtree(run / name)
    for name in ("last", "best"):
        (run / f"{name}.json").unlink()
    command(finished, "--resume")
    assert (run / "model").is_dir()
    assert [event["step"] for event in log(run) if event["event"] == "validation"] == [0, log(run)[-1]["step"]]


@pytest.mark.parametrize(
    "text", ['{"a": 1}', "[]", '{"kind": "Experiment"}', '{"kind": "Data", "corpus": "x"}', '{"format": 1}']
)
def test_an_experiment_that_is_none_is_named(finished, refused, text):
    (finished / "run" / "run.json").write_text(text)
    said = refused(f"--output={finished / 'run'}", "--resume")
    assert f"{str(finished / 'run' / 'run.json')!r} does not describe a run (" in said
    assert said.endswith("restore it, or choose another --output")
    assert len(said) < 300 + len(str(finished))


def test_a_file_is_no_run_folder(made_up_text, tmp_path, refused, monkeypatch):
    monkeypatch.setattr("diffusionbert.training.run.prepare", None)  # the text is not read first
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "inside"):
        said = refused(f"--output={output}", f"--data={made_up_text}", "--steps=1")
        assert said.endswith("(Not a directory); choose another --output")
        assert f"{str(output)!r} is not writable" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-tokens=0"], "--batch-tokens) must be >= 1, got 0"),
        (["--batch-sequences=0"], "--batch-sequences) must be >= 1, got 0"),
        (["--layers=0"], "--layers of a network must be 1 or more, got 0"),
        (["--heads=3"], "divides the width"),
        (["--compile", "--no-compile"], "--compile and --no-compile exclude each other"),
        (["--packing", "--no-packing"], "--packing and --no-packing exclude each other"),
        (["--decay-fraction=0.1"], "--decay-fraction is for --decay wsd, got --decay linear; leave it out"),
        (["--decay=wsd", "--decay-fraction=2"], "--decay-fraction of training must be greater than 0 and at most 1"),
        (["--dropout=1.5"], "--dropout must lie in [0, 1), got 1.5"),
        (["--hybrid=-1"], "--hybrid, the weight of the auxiliary cross-entropy, must be 0 or more, got -1.0"),
        (["--diffusion-steps=0"], "must be 1 or more (--diffusion-steps), got 0"),
        (["--warmup=-1"], "--warmup of training must be 0 or more, got -1"),
        (["--ema=2"], "--ema of training must be between 0 and 1, such as 0.9999, got 2.0"),
        (["--seed=-3"], "--seed of training must be 0 or more, got -3"),
        (
            ["--objective=continuous-time", "--diffusion-steps=7"],
            "--diffusion-steps 7 is not for the objective continuous",
        ),
        (["--objective=continuous-time", "--hybrid=0.5"], "--hybrid 0.5 is not for the objective continuous-time"),
        (["--objective=continuous-time", "--quantity=paper"], "--quantity paper is not for the objective continuous"),
        (["--objective=order-agnostic", "--schedule=cosine"], "--schedule cosine is not for the objective order-ag"),
        (["--objective=order-agnostic", "--noise=uniform"], "--noise uniform is not for the objective order-agnostic"),
        (["--objective=order-agnostic", "--time-sampling=bell"], "--time-sampling bell is not for the objective order"),
        (
            ["--objective=order-agnostc"],
            "--objective: unknown objective 'order-agnostc'; did you mean 'order-agnostic'?",
        ),
        (["--schedule=cosine:strength=0.9"], "--schedule: Cosine has no field 'strength'; it has none"),
        (["--schedule=spindle:strength"], "--schedule must be name or name:field=value,field=value"),
        (["--time-sampling=bell:depth=2"], "--time-sampling: `depth` of a bell must lie in [0, 1), got 2.0"),
    ],
    ids=" ".join,
)
def test_options_that_would_do_nothing_or_harm_are_refused(made_up_text, tmp_path, refused, options, message):
    said = refused(f"--output={tmp_path / 'run'}", f"--data={made_up_text}", *options)
    assert message in said
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_half_precision_needs_a_gpu(made_up_text, tmp_path, refused):
    said = refused(f"--output={tmp_path / 'run'}", f"--data={made_up_text}", "--mixed-precision=fp16")
    assert said.endswith("mixed precision fp16 needs a GPU, and none was found; use bf16 or no")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_stopped_before_its_first_validation_leaves_a_model_to_write_with(
    made_up_text, short_run, tmp_path, capsys, monkeypatch, refused
):
    shutil.copytree(short_run / "cache", tmp_path / "cache")
    taken = TrainingStep.__call__

    def step(self, batch):
        if batch.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return taken(self, batch)

    monkeypatch.setattr(TrainingStep, "__call__", step)
    monkeypatch.setattr("diffusionbert.training.model_folder.push_model", None)  # not yet
    with pytest.raises(SystemExit) as caught:
        command(tmp_path, f"--data={made_up_text}", *BEGUN, "--steps=9", "--push=me/mine")
    assert caught.value.code == 130
    said = capsys.readouterr()
    assert "stopped at step 3; --resume continues from there" in said.err
    assert said.out.strip().endswith(f"step 3, not validated yet; current parameters in {tmp_path / 'run' / 'model'}")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| training | 3 of 9 steps" in card
    assert "not validated" in card
    about = json.loads((tmp_path / "run" / "model" / "diffusionbert.json").read_text())
    assert about["validation"] == {"step": 3, "likelihood": "bound", "nats_per_token": None, "loss_per_token": None}
    main(["generate", "--model", str(tmp_path / "run"), "--length", "5"])
    assert capsys.readouterr().out.strip()
    assert "--steps must be more than 3, which the run has reached, got 3" in refused(
        f"--output={tmp_path / 'run'}", f"--cache={tmp_path / 'cache'}", "--resume", "--steps=3"
    )


def test_a_run_that_is_told_to_stop_in_its_last_step_has_come_to_its_end(
    made_up_text, short_run, tmp_path, capsys, monkeypatch
):
    shutil.copytree(short_run / "cache", tmp_path / "cache")
    taken = TrainingStep.__call__

    def step(self, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return taken(self, batch)

    monkeypatch.setattr(TrainingStep, "__call__", step)
    command(tmp_path, f"--data={made_up_text}", *BEGUN, "--steps=1")
    said = capsys.readouterr()
    assert "stopped" not in said.err
    assert "step 1, best validation" in said.out


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
@pytest.mark.filterwarnings("ignore:`log_with")
def test_a_tracker_that_is_not_installed_is_named_at_once(made_up_text, tmp_path, capsys, tracker):
    if find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    with pytest.raises(SystemExit) as caught:
        command(tmp_path, f"--data={made_up_text}", "--steps=1", "--layers=1", "--width=16",
                "--vocabulary=512", "--trackers", tracker)  # fmt: skip
    assert caught.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("diffusionbert: ")]
    assert len(said) == 1
    assert tracker in said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "network"),
    [
        (["train"], NewModernBert(2, 64, 4, 0.1)),
        (["train", "--system=d3pm"], NewModernBert(2, 64, 4, 0.1)),
        (["train", "--system=decoder"], NewModernBertDecoder(2, 64, 4, 0.1)),
        (["pretrain"], NewModernBert(2, 64, 4, 0.1)),
        (["pretrain", "--decoder"], NewModernBertDecoder(2, 64, 4, 0.1)),
    ],
    ids=str,
)
def test_the_family_of_a_new_network_is_chosen(command, network):
    options = "--output=run", "--data=pydoc", "--backbone=modern", "--width=64"
    assert configure(parse_arguments([*command, *options])).backbone == network


def test_a_pretrained_network_has_its_own_family(refused, tmp_path):
    said = refused(f"--output={tmp_path / 'run'}", "--data=pydoc", "--start=bundled", "--backbone=modern")
    assert "--backbone, --layers, --width, --heads and --dropout are for new networks; leave them out" in said


@pytest.mark.parametrize("command", ["train", "pretrain"])
@pytest.mark.parametrize("setting", ["compile", "packing"])
def test_a_setting_of_the_preset_can_be_turned_off(command, setting):
    common = command, "--output=run", "--data=pydoc", "--preset=bundled"
    preset, changed = (configure(parse_arguments([*common, *more])).training for more in ((), (f"--no-{setting}",)))
    assert getattr(preset, setting)
    assert changed == replace(preset, **{setting: False})


def test_a_configuration_with_another_text_holds_out_a_fraction_of_its_own(tmp_path):
    config = RunConfig(DataConfig("big.txt", held_out=0.01))
    (tmp_path / "run.json").write_text(json.dumps(config.to_json()))
    for options, expected in (([], 0.01), (["--data=small.txt"], None), (["--data=small.txt", "--held-out=0.2"], 0.2)):
        line = ["train", f"--config={tmp_path / 'run.json'}", f"--output={tmp_path / 'new'}", *options]
        assert configure(parse_arguments(line)).data.held_out == expected
