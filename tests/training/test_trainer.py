"""The trainer's promises, in one process: when it stops, what it keeps, what it exports, how it fails."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_worker import MASK, MadeUpRows, method

import diffusionbert.training.checkpoint as saving
import diffusionbert.training.measure as recipe
import diffusionbert.training.optim as optimising
import diffusionbert.training.trainer as training
from diffusionbert.diffusion.rng import Noise
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.objectives.continuous_time import ContinuousTime
from diffusionbert.objectives.masked_lm import MaskedLM
from diffusionbert.objectives.order_agnostic import OrderAgnostic
from diffusionbert.training.batches import FixedSequences, TokenBudget
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.ema import EMA
from diffusionbert.training.optim import learning_rate
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.state import Score, TrainState, score_of
from diffusionbert.training.tensors import weights_of
from diffusionbert.training.trainer import Trainer

QUICK = TrainingConfig(
    steps=8,
    batching=FixedSequences(16),
    learning_rate=1e-2,
    warmup=2,
    log_every=1,
    validate_every=4,
    validation_sentences=16,
    validation_draws=1,
    save_every=2,
    keep=2,
)


def trainer_of(folder: Path, settings: TrainingConfig = QUICK, dropout: float = 0.1) -> Trainer:
    run = RunFolder(folder)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    return Trainer(
        method(dropout),
        MadeUpRows(100, seed=1),
        MadeUpRows(40, seed=2),
        settings,
        run,
        export=lambda weights, folder: save_file(weights, folder / "weights.safetensors"),
        accelerator=Accelerator(cpu=True),
    )


def resumed(folder: Path, settings: TrainingConfig = QUICK) -> Trainer:
    trainer = trainer_of(folder, settings)
    trainer.resume()
    return trainer


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def timeless(events: list[dict]) -> list[dict]:
    return [{k: v for k, v in event.items() if k not in ("time", "tokens_per_second")} for event in events]


def checkpoint(folder: Path, name: str) -> Path:
    path = RunFolder(folder).named(name)
    assert path is not None
    return path


def equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def assert_same_end(folder: Path, other: Path) -> None:
    assert checkpoint(folder, "last").name == checkpoint(other, "last").name
    for file in sorted(checkpoint(other, "last").glob("*.safetensors")):
        assert equal(load_file(checkpoint(folder, "last") / file.name), load_file(file)), file.name
    assert timeless(log(folder)) == timeless(log(other))


def scores(trainer: Trainer, *values: float) -> None:
    """Makes validations find these figures, one after another."""
    left = iter(values)
    trainer.validate = lambda: Score(next(left), 0.1, Likelihood.BOUND)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("straight")
    trainer_of(folder).train()
    return folder


# ---- when it stops, and what it exports -------------------------------------------------------------------------


def test_patience_ends_the_run_after_so_many_validations_without_a_better_one(tmp_path):
    trainer = trainer_of(tmp_path, replace(QUICK, steps=100, validate_every=2, patience=2))
    scores(trainer, 5.0, 4.0, 4.5, 3.0, 3.5, 3.0, 1.0)
    state = trainer.train()
    # At steps 0, 2, 4, 6, 8, 10: 3.0 again is no better than 3.0.
    assert (state.step, state.best, state.best_step, state.validations_since_best) == (10, 3.0, 6, 2)
    assert checkpoint(tmp_path, "best").name == "step-00000006"
    assert checkpoint(tmp_path, "last").name == "step-00000010"
    exported = load_file(tmp_path / "model" / "weights.safetensors")
    assert equal(exported, load_file(checkpoint(tmp_path, "best") / "weights.safetensors"))
    assert not equal(exported, load_file(checkpoint(tmp_path, "last") / "weights.safetensors"))


def test_an_ended_run_stays_ended_when_resumed(tmp_path):
    settings = replace(QUICK, steps=100, validate_every=2, patience=1)
    trainer = trainer_of(tmp_path, settings)
    scores(trainer, 5.0, 4.0, 4.5)
    assert trainer.train().step == 4
    assert resumed(tmp_path, settings).train().step == 4


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_best_weights_are_exported_as_they_were_validated(tmp_path, ema):
    """With averaging, those are the averaged ones: the exported model has the figure that the log shows."""
    settings = replace(QUICK, ema=ema, learning_rate=0.3, steps=12)
    trainer = trainer_of(tmp_path, settings)
    true_validate, seen = trainer.validate, {}

    def validate() -> Score:
        score = true_validate()
        seen[trainer.state.step] = score.nats_per_token - 10 * (trainer.state.step == 4)
        return replace(score, nats_per_token=seen[trainer.state.step])

    trainer.validate = validate
    state = trainer.train()
    assert state.best_step == 4
    assert state.best == min(seen.values()) == seen[4]
    exported = load_file(tmp_path / "model" / "weights.safetensors")
    kind = "weights" if ema is None else "averages"
    assert equal(exported, load_file(checkpoint(tmp_path, "best") / f"{kind}.safetensors"))
    assert equal(exported, load_file(checkpoint(tmp_path, "best") / "weights.safetensors")) == (ema is None)
    fresh = trainer_of(tmp_path / "fresh", QUICK)
    with torch.no_grad():
        for name, parameter in fresh.method.named_parameters():
            parameter.copy_(exported[name])
    assert fresh.validate().nats_per_token == pytest.approx(seen[4] + 10, abs=1e-6)


def test_validation_changes_neither_weights_nor_what_follows(tmp_path, straight):
    trainer = trainer_of(tmp_path)
    before = weights_of(trainer.method)
    assert trainer.validate() == trainer.validate()
    assert equal(weights_of(trainer.method), before)
    assert trainer.method.training
    trainer.train()
    assert_same_end(tmp_path, straight)


def test_any_number_is_better_than_none(tmp_path):
    trainer = trainer_of(tmp_path)
    scores(trainer, math.nan, 3.0, 4.0)
    assert trainer.train().best_step == 4
    assert checkpoint(tmp_path, "best").name == "step-00000004"


def test_what_is_kept(tmp_path):
    trainer = trainer_of(tmp_path, replace(QUICK, steps=8, validate_every=2, keep=2))
    scores(trainer, 5.0, 1.0, 2.0, 3.0, 4.0)
    trainer.train()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000006", "step-00000008"]


def test_nothing_in_a_run_folder_is_a_pickle(tmp_path):
    trainer_of(tmp_path, replace(QUICK, ema=0.9)).train()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        start = path.read_bytes()[:9]
        assert path.suffix in (".json", ".jsonl", ".safetensors"), path
        assert not start.startswith((b"\x80", b"PK", b"\x1f\x8b")), path  # pickle, zip (torch.save), gzip
        if path.suffix == ".safetensors":
            header = int.from_bytes(start[:8], "little")
            assert start[8:9] == b"{"
            assert isinstance(json.loads(path.read_bytes()[8 : 8 + header]), dict)
        else:
            text = path.read_text()
            assert all(
                isinstance(json.loads(part), dict) for part in (text.splitlines() if "jsonl" in path.name else [text])
            )


def stopped(trainer: Trainer, at: int) -> None:
    """Makes a polite kill come in a step."""
    taken = trainer._step

    def step(indices):
        if trainer.state.step == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken(indices)

    trainer._step = step


@pytest.mark.parametrize(("precision", "expected"), [("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_what_is_measured_is_what_will_be_trained(monkeypatch, precision, expected):
    """In its precision, with averaged weights in memory, and the optimiser's state after a step to warm up."""
    measured, made, seen, alive = method(0.1), [], [], weakref.WeakSet()

    def new_optimiser(*arguments):
        made.append(optimising.new_optimiser(*arguments))
        return made[-1]

    def look(*_):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        seen.append((dtype, len(made[-1].state), len(alive)))

    def averaged(*arguments):
        ema = EMA(*arguments)
        alive.add(ema)
        return ema

    monkeypatch.setattr(recipe, "EMA", averaged)
    monkeypatch.setattr(recipe, "new_optimiser", new_optimiser)
    measured.register_forward_pre_hook(look)
    before = weights_of(measured)
    settings = replace(QUICK, precision=precision, ema=0.9)
    recipe.measure(measured, MadeUpRows(40, seed=1), settings, torch.device("cpu"), 64)
    count = sum(parameter.requires_grad for parameter in measured.parameters())
    assert seen == [(expected, 0, 1), (expected, count, 1), (expected, count, 1)]
    assert equal(weights_of(measured), before)


def scaled(trainer: Trainer) -> Trainer:
    """Gives it a scale of the loss, as half precision has one on a GPU, that soon grows."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    trainer.stepper = trainer.accelerator.prepare_optimizer(trainer.optimiser)
    return trainer


def test_the_scale_of_the_loss_goes_on_where_it_was(tmp_path):
    scaled(trainer_of(tmp_path / "straight")).train()
    trainer = scaled(trainer_of(tmp_path / "stopped"))
    stopped(trainer, at=5)
    trainer.train()
    state = trainer.accelerator.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (8.0, 2)
    again = scaled(trainer_of(tmp_path / "stopped"))
    again.resume()
    assert again.accelerator.scaler.state_dict() == state
    again.train()
    assert again.accelerator.scaler.state_dict()["scale"] == 16.0
    assert_same_end(tmp_path / "stopped", tmp_path / "straight")


@pytest.mark.parametrize("before", [True, False])
def test_a_run_goes_on_in_another_precision(tmp_path, before):
    """From half to full precision there is a scale too many, the other way round none."""
    trainer = scaled(trainer_of(tmp_path)) if before else trainer_of(tmp_path)
    stopped(trainer, at=5)
    trainer.train()
    again = trainer_of(tmp_path) if before else scaled(trainer_of(tmp_path))
    again.resume()
    assert again.train().step == QUICK.steps


@pytest.mark.parametrize("ema", [None, 0.9])
def test_stopped_before_the_first_validation_the_model_is_what_was_trained(tmp_path, ema):
    settings = replace(QUICK, ema=ema)
    trainer_of(tmp_path / "straight", settings).train()
    trainer = trainer_of(tmp_path / "stopped", settings)
    stopped(trainer, at=3)
    state = trainer.train()
    assert (state.step, state.best_step, state.is_validated) == (3, 0, False)
    kind = "weights" if ema is None else "averages"
    exported = load_file(tmp_path / "stopped" / "model" / "weights.safetensors")
    first, last = (load_file(RunFolder(tmp_path / "stopped").checkpoint(at) / f"{kind}.safetensors") for at in (0, 3))
    assert equal(exported, last)
    assert not equal(exported, first)
    assert resumed(tmp_path / "stopped", settings).train().is_validated
    assert_same_end(tmp_path / "stopped", tmp_path / "straight")


def test_a_start_that_training_made_worse_is_still_the_best(tmp_path):
    trainer = trainer_of(tmp_path)
    scores(trainer, 1.0, 2.0, 3.0)
    stopped(trainer, at=5)
    assert trainer.train().is_validated
    exported = load_file(tmp_path / "model" / "weights.safetensors")
    assert equal(exported, load_file(RunFolder(tmp_path).checkpoint(0) / "weights.safetensors"))


# ---- how it fails -----------------------------------------------------------------------------------------------


def poisoned(trainer: Trainer, at: int) -> None:
    """Makes the loss of one step NaN."""
    inner, taken = trainer.wrapped, trainer._step

    def step(indices):
        is_bad = trainer.state.step == at
        trainer.wrapped = (lambda *arguments: inner(*arguments) * math.nan) if is_bad else inner
        return taken(indices)

    trainer._step = step


def all_finite(path: Path) -> bool:
    return all(
        bool(tensor.isfinite().all()) for file in path.glob("*.safetensors") for tensor in load_file(file).values()
    )


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_a_good_checkpoint(tmp_path, straight):
    trainer = trainer_of(tmp_path)
    poisoned(trainer, at=5)
    with pytest.raises(
        FloatingPointError, match=r"^the loss is nan at step 6; the last checkpoint is good: "
    ) as caught:
        trainer.train()
    assert "\n" not in str(caught.value)
    assert checkpoint(tmp_path, "last").name == "step-00000004"
    assert all_finite(checkpoint(tmp_path, "last"))
    assert not (tmp_path / "model").exists()
    resumed(tmp_path).train()  # a cosmic ray: the second time there is none
    assert_same_end(tmp_path, straight)


@pytest.mark.parametrize("changes", [{"log_every": 3}, {"log_every": 100}], ids=str)
def test_weights_that_are_no_numbers_are_never_saved(tmp_path, changes):
    trainer = trainer_of(tmp_path, replace(QUICK, validate_every=100, **changes))
    poisoned(trainer, at=3)
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert all_finite(checkpoint(tmp_path, "last"))


def test_an_infinite_gradient_is_noticed_before_it_is_saved(tmp_path):
    trainer = trainer_of(tmp_path)
    taken = trainer._step

    def step(indices):
        first = next(trainer.method.parameters())
        size = math.inf if trainer.state.step == 3 else 1.0
        handle = first.register_hook(lambda gradient: gradient * size)
        try:
            return taken(indices)
        finally:
            handle.remove()

    trainer._step = step
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert all_finite(checkpoint(tmp_path, "last"))


@pytest.mark.parametrize(("at", "file"), [(4, "weights.safetensors"), (6, "optimiser.safetensors")])
def test_a_full_disk_loses_nothing(tmp_path, straight, monkeypatch, at, file):
    trainer, saved = trainer_of(tmp_path), saving.save_tensors

    def save(tensors, path):
        if trainer.state.step == at and path.name == file:
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        saved(tensors, path)

    monkeypatch.setattr(saving, "save_tensors", save)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    monkeypatch.undo()
    assert checkpoint(tmp_path, "last").name == f"step-{at - 2:08d}"
    assert not [*tmp_path.rglob("*.unfinished"), *tmp_path.rglob("*.replaced")]
    resumed(tmp_path).train()
    assert_same_end(tmp_path, straight)


def test_a_disk_that_fills_up_while_the_model_is_exported_leaves_the_old_model(tmp_path):
    trainer_of(tmp_path).train()
    model = load_file(tmp_path / "model" / "weights.safetensors")

    def export(weights, folder):
        (folder / "weights.safetensors").write_bytes(b"half a file")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer = resumed(tmp_path)
    trainer.export = export
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert equal(load_file(tmp_path / "model" / "weights.safetensors"), model)
    assert not list(tmp_path.rglob("*.unfinished"))


def test_a_kill_between_the_two_names_of_a_checkpoint_loses_neither(tmp_path, monkeypatch):
    settings = replace(QUICK, validate_every=2)
    trainer = trainer_of(tmp_path, settings)
    scores(trainer, 5.0, 4.0, 1.0)
    name = RunFolder.name

    def killed(self, which, path):
        if which == "best" and path.name == "step-00000004":
            raise KeyboardInterrupt
        name(self, which, path)

    monkeypatch.setattr(RunFolder, "name", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    trainer = resumed(tmp_path, settings)
    scores(trainer, *([1.0] * (trainer.state.step < 4)), 2.0, 3.0)
    assert trainer.train().best_step == 4
    assert checkpoint(tmp_path, "best").name == "step-00000004"


def damage_optimiser(path: Path) -> None:
    (path / "optimiser.safetensors").write_bytes(b"half a file")


def damage_standing(path: Path) -> None:
    (path / "standing.json").write_text('{"step": 8}')


DAMAGES = {"optimiser": damage_optimiser, "standing": damage_standing, "gone": shutil.rmtree}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_done_without(tmp_path, capsys, kind):
    """It goes on from the newest whole one, says so, and ends as if nothing had happened."""
    settings = replace(QUICK, validate_every=2)
    for name in ("straight", "damaged"):
        trainer = trainer_of(tmp_path / name, settings)
        scores(trainer, 5.0, 4.0, 3.0, 2.0, 1.0)
        trainer.train()
    path = checkpoint(tmp_path / "damaged", "last")
    DAMAGES[kind](path)
    capsys.readouterr()
    trainer = resumed(tmp_path / "damaged", settings)
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("goes on from step-00000006: ")
    assert str(path) in said
    assert trainer.state.step == 6
    assert checkpoint(tmp_path / "damaged", "best").name == "step-00000006"  # as it was then
    scores(trainer, 1.0)
    trainer.train()
    assert_same_end(tmp_path / "damaged", tmp_path / "straight")


@pytest.mark.parametrize("pointer", ["{", "{}", "[]", '{"checkpoint": 3}', None])
def test_a_damaged_name_of_the_last_checkpoint_is_done_without(tmp_path, straight, pointer):
    interrupted(tmp_path, at=7)
    if pointer is None:
        (tmp_path / "last.json").unlink()
    else:
        (tmp_path / "last.json").write_text(pointer)
    trainer = resumed(tmp_path)
    assert trainer.state.step == 6
    trainer.train()
    assert_same_end(tmp_path, straight)


def test_where_no_checkpoint_is_whole_one_line_says_so(tmp_path):
    trainer_of(tmp_path).train()
    for path in (tmp_path / "checkpoints").iterdir():
        damage_optimiser(path)
    with pytest.raises(
        ValueError, match=r"no checkpoint of .* is whole: .*step-00000008/optimiser.safetensors"
    ) as caught:
        resumed(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_best_checkpoint_that_is_gone_is_found_anew(tmp_path):
    settings = replace(QUICK, validate_every=2)
    trainer = trainer_of(tmp_path, settings)
    scores(trainer, 5.0, 1.0, 2.0, 3.0, 4.0)
    trainer.train()
    assert checkpoint(tmp_path, "best").name == "step-00000002"
    shutil.rmtree(checkpoint(tmp_path, "best"))
    trainer = resumed(tmp_path, replace(settings, steps=10))
    scores(trainer, 4.0, 3.5)
    state = trainer.train()
    assert (state.best, state.best_step) == (3.5, 10)
    assert checkpoint(tmp_path, "best").name == "step-00000010"


def test_a_run_without_a_checkpoint_is_not_resumed(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint to resume from; start it without --resume"):
        resumed(tmp_path)


# ---- how it resumes ---------------------------------------------------------------------------------------------


def interrupted(folder: Path, at: int, settings: TrainingConfig = QUICK) -> None:
    """Ends a run as a kill would, before a step."""
    trainer = trainer_of(folder, settings)
    taken = trainer._step

    def step(indices):
        if trainer.state.step == at:
            raise KeyboardInterrupt
        return taken(indices)

    trainer._step = step
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_a_line_cut_in_half_by_a_kill_is_dropped(tmp_path, straight):
    interrupted(tmp_path, at=5)
    whole = (tmp_path / "log.jsonl").read_text()
    kept = "".join(line + "\n" for line in whole.splitlines() if json.loads(line)["step"] <= 4)
    assert kept != whole
    for tail in ('{"step": 4, "time": 17', '{"st', "\0\0\0\0", "7", "null", ""):
        (tmp_path / "log.jsonl").write_text(whole + tail)
        trainer = resumed(tmp_path)
        assert (tmp_path / "log.jsonl").read_text() == kept
    trainer.train()
    assert_same_end(tmp_path, straight)


def test_a_lost_log_does_not_keep_a_run_from_resuming(tmp_path, straight):
    interrupted(tmp_path, at=5)
    (tmp_path / "log.jsonl").unlink()
    assert resumed(tmp_path).train().step == 8
    start, *rest = timeless(log(tmp_path))
    assert (start["event"], start["step"]) == ("run", 4)
    assert rest == [event for event in timeless(log(straight)) if event["step"] > 4]


def test_resuming_a_finished_run_changes_nothing(tmp_path, straight):
    trainer_of(tmp_path).train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    state = resumed(tmp_path).train()
    assert state.step == 8
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert_same_end(tmp_path, straight)


def test_a_finished_run_goes_on_for_more_steps(tmp_path):
    """Under a schedule that does not look at the end, as if it had been asked for them at once."""
    settings = replace(QUICK, decay="constant_with_warmup")
    trainer_of(tmp_path / "long", replace(settings, steps=12)).train()
    trainer_of(tmp_path / "short", settings).train()
    assert resumed(tmp_path / "short", replace(settings, steps=12)).train().step == 12
    assert_same_end(tmp_path / "short", tmp_path / "long")


def test_a_run_cut_short_ends_at_once(tmp_path):
    interrupted(tmp_path, at=7)
    assert resumed(tmp_path, replace(QUICK, steps=5)).train().step == 6
    assert (tmp_path / "model" / "weights.safetensors").exists()


def test_resuming_with_averages_needs_averages(tmp_path):
    interrupted(tmp_path, at=5)
    with pytest.raises(ValueError, match=r"was trained without averaged weights, .*; leave out --ema"):
        resumed(tmp_path, replace(QUICK, ema=0.9))


def test_averages_that_are_lost_are_no_reason_to_go_on_without(tmp_path):
    interrupted(tmp_path, at=7, settings=replace(QUICK, ema=0.9))
    (checkpoint(tmp_path, "last") / "averages.safetensors").unlink()
    assert resumed(tmp_path, replace(QUICK, ema=0.9)).state.step == 4


def test_another_networks_checkpoint_is_refused(tmp_path):
    interrupted(tmp_path, at=5)
    trainer = trainer_of(tmp_path)
    trainer.method.network.conditioning.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 missing, 0 unknown"):
        trainer.resume()


def test_a_standing_survives_json():
    state = replace(TrainState(), step=3, best=1.5, best_step=2, validations_since_best=1)
    plain = json.loads(json.dumps(asdict(state)))
    assert TrainState.from_json(plain) == state


# ---- learning rates ---------------------------------------------------------------------------------------------


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
    "constant_with_warmup": lambda left: 1.0,
}


@pytest.mark.parametrize("decay", [*SHAPES, "inverse_sqrt"])
def test_learning_rates_rise_from_almost_nothing_and_then_decay(decay):
    settings = TrainingConfig(steps=100, warmup=20, learning_rate=0.5, decay=decay)
    rates = [learning_rate(settings)(step) for step in range(100)]
    # The k-th step of the warm-up has k / 20 of the rate: the first is no wasted step at 0.
    torch.testing.assert_close(rates[:20], [0.5 * (step + 1) / 20 for step in range(20)])
    for step in range(20, 100):
        left = 1 - (step + 1 - 20) / 80
        factor = math.sqrt(20 / (step + 1)) if decay == "inverse_sqrt" else SHAPES[decay](left)
        assert rates[step] == pytest.approx(0.5 * factor, abs=0.01)  # a cosine's largest step
    assert max(rates) == 0.5
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_the_papers_warm_up_starts_at_almost_nothing():
    assert learning_rate(TrainingConfig(steps=1_900_000, warmup=10_000, learning_rate=3e-6))(0) < 1e-8


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_no_step_is_wasted(decay):
    assert learning_rate(TrainingConfig(steps=10, warmup=0, decay=decay))(9) > 0


def test_the_optimiser_gets_the_rate_that_is_logged(tmp_path, straight):
    trainer = trainer_of(tmp_path)
    taken, used = trainer._step, []

    def step(indices):
        result = taken(indices)
        used.append({group["lr"] for group in trainer.optimiser.param_groups})
        return result

    trainer._step = step
    trainer.train()
    logged = [{event["learning_rate"]} for event in log(tmp_path) if "loss" in event]
    assert used == logged
    assert logged[0] == {1e-2 / 2}


# ---- parts of a batch -------------------------------------------------------------------------------------------


def processes(trainer: Trainer, count: int, index: int) -> None:
    trainer.accelerator = SimpleNamespace(num_processes=count, process_index=index, device=torch.device("cpu"))


def test_every_row_is_in_one_part_and_the_others_are_inert(tmp_path):
    trainer = trainer_of(tmp_path)
    batch = Noise(0).stratify(trainer.rows.batch(list(range(10, 15))))
    found, tokens = [], 0
    for index in range(8):
        processes(trainer, 8, index)
        parts = trainer._micro_batches(batch)
        assert len(parts) == 1
        (part,) = parts
        tokens += int(part.num_tokens)
        if index < 5:
            found += part.example.tolist()
        else:
            assert int(part.num_tokens) == 0
            assert len(part.tokens) == 1
            assert bool(part.attend.any())
    assert sorted(found) == list(range(10, 15))
    assert tokens == int(batch.num_tokens)


def test_every_process_has_equally_many_parts(tmp_path):
    """Or an exchange of gradients would wait for ever."""
    for rows, limit, count in ((5, 20, 3), (16, 1, 2), (7, None, 4)):
        trainer = trainer_of(tmp_path, replace(QUICK, micro_tokens=limit))
        batch = Noise(0).stratify(trainer.rows.batch(list(range(rows))))
        lengths, found = set(), []
        for index in range(count):
            processes(trainer, count, index)
            parts = trainer._micro_batches(batch)
            lengths.add(len(parts))
            found += [name for part in parts if part.num_tokens for name in part.example.tolist()]
        assert len(lengths) == 1
        assert sorted(found) == list(range(rows))


@pytest.mark.parametrize("rows", [3, 5, 16])
def test_no_part_is_larger_than_it_may_be(tmp_path, rows):
    trainer = trainer_of(tmp_path)
    batch = trainer.rows.batch(list(range(rows)))
    longest = batch.tokens.shape[1]
    for limit in range(longest, longest * rows):
        trainer.settings = replace(QUICK, micro_tokens=limit)
        assert max(part.tokens.numel() for part in trainer._micro_batches(batch)) <= limit


OBJECTIVES = {
    "discrete": lambda tested: tested.objective,
    "continuous": lambda tested: ContinuousTime(tested.objective.process),
    "any order": lambda tested: OrderAgnostic(MASK),
    "masked": lambda tested: MaskedLM(MASK, torch.arange(30) > MASK, rate=0.5),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_inert_part_adds_nothing_but_takes_part(tmp_path, name):
    """A process without rows: its loss is 0, its gradients are zeros, and every parameter has one."""
    whole = method(dropout=0.0)
    tested = TrainingModule(whole.network, OBJECTIVES[name](whole))
    batch = Noise(0).stratify(MadeUpRows(3, seed=1).batch([0, 1, 2]))
    loss = tested(training._inert(batch), Noise(0), 10.0)
    assert float(loss.detach()) == 0
    loss.backward()
    for label, parameter in tested.named_parameters():
        assert parameter.grad is not None, label
        assert not bool(parameter.grad.any()), label


def test_parts_reach_the_same_weights(tmp_path):
    """Accumulated over parts, some of them empty, a batch moves the weights as it does at once."""
    ends = []
    for limit in (None, 40, 8):
        trainer = trainer_of(tmp_path / str(limit), replace(QUICK, micro_tokens=limit, steps=2), dropout=0.0)
        trainer.train()
        ends.append(weights_of(trainer.method))
    for other in ends[1:]:
        for name, tensor in ends[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-4, rtol=1e-3)


def test_rows_fewer_than_a_batch_are_trained_on_again_and_again(tmp_path):
    trainer = trainer_of(tmp_path, replace(QUICK, batching=TokenBudget(10_000), steps=3))
    assert trainer.train().position.epoch == 2


# ---- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("learning_rate", 0.0),
        ("warmup", -1),
        ("clip", 0.0),
        ("precision", "fp8"),
        ("decay", "polynomial"),
        ("log_every", 0),
        ("validate_every", 0),
        ("validation_sentences", 1),
        ("validation_draws", 0),
        ("save_every", 0),
        ("keep", 0),
        ("learning_rate", math.nan),
        ("seed", -1),
    ],
)
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(
        ValueError, match=f"`{name}` of training must be (one of|greater|[012] or more).*, got {value!r}"
    ):
        TrainingConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("patience", 0), ("micro_tokens", -5), ("micro_tokens", 0), ("ema", 0.0), ("weight_decay", -1.0)],
)
def test_more_impossible_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` of training must be .*, got {value!r}"):
        TrainingConfig(**{name: value})


def test_a_loss_is_scored_with_the_error_of_a_ratio():
    """Against the spread of many bootstrap samples."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(3, 40, 400)
    nats = tokens * generator.normal(4.0, 1.0, 400)
    score = score_of(torch.from_numpy(nats), torch.from_numpy(tokens).double(), Likelihood.BOUND)
    assert score.nats_per_token == pytest.approx(nats.sum() / tokens.sum())
    samples = generator.integers(0, 400, (4000, 400))
    spread = (nats[samples].sum(axis=1) / tokens[samples].sum(axis=1)).std()
    assert score.standard_error == pytest.approx(spread, rel=0.1)
