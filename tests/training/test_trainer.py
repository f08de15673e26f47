"""The trainer in one process: when it stops, what it keeps and exports, how it fails and resumes."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from shared import shared
from torch import Tensor
from training_worker import MadeUpSequences, training_module

import diffusionbert.training.checkpoint as checkpoint_module
from diffusionbert.objectives.base import Likelihood
from diffusionbert.storage.schema import from_json, to_json
from diffusionbert.training import optim
from diffusionbert.training.batches import FixedSequences, TokenBudget
from diffusionbert.training.checkpoint import Checkpoint, TrainState, weights_of
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.log import ValidationResult
from diffusionbert.training.optim import EMA, learning_rate, measure, new_optimizer
from diffusionbert.training.run_folder import RunFolder
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
        training_module(dropout),
        MadeUpSequences(100, seed=1),
        MadeUpSequences(40, seed=2),
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
    path = RunFolder(folder).read_pointer(name)
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
    """Replaces validations by these results."""
    left = iter(values)
    trainer.validate = lambda: ValidationResult(next(left), 0.1, Likelihood.BOUND)


@pytest.fixture(scope="module")
def straight() -> Path:
    """An undisturbed run."""
    return shared("trainer-straight", lambda output: trainer_of(output).train())


# ---- when it stops, and what it exports -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_run_ends_when_patience_is_exhausted(tmp_path):
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


def test_a_run_that_ended_early_trains_no_further_when_resumed(tmp_path):
    settings = replace(QUICK, steps=100, validate_every=2, patience=1)
    trainer = trainer_of(tmp_path, settings)
    scores(trainer, 5.0, 4.0, 4.5)
    assert trainer.train().step == 4
    assert resumed(tmp_path, settings).train().step == 4


@pytest.mark.parametrize(("ema", "is_said"), [(None, False), (0.5, False), (0.9999, True)])
def test_a_decay_that_is_never_reached_is_said(tmp_path, ema, is_said, caplog):
    trainer = trainer_of(tmp_path, replace(QUICK, ema=ema, steps=12))
    with caplog.at_level("INFO", logger="diffusionbert"):
        trainer._check_ema()
    assert ("would act from step 89,990 on; in 12 steps it reaches 0.5909" in caplog.text) is is_said


@pytest.mark.slow
@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_best_weights_are_exported_as_they_were_validated(tmp_path, ema):
    """With EMA, its averages are exported: the model has the validation that the log shows."""
    settings = replace(QUICK, ema=ema, learning_rate=0.3, steps=12)
    trainer = trainer_of(tmp_path, settings)
    true_validate, seen = trainer.validate, {}

    def validate() -> ValidationResult:
        score = true_validate()
        seen[trainer.state.step] = score.nats_per_token - 10 * (trainer.state.step == 4)
        return replace(score, nats_per_token=seen[trainer.state.step])

    trainer.validate = validate
    state = trainer.train()
    assert state.best_step == 4
    assert state.best == min(seen.values()) == seen[4]
    exported = load_file(tmp_path / "model" / "weights.safetensors")
    kind = "weights" if ema is None else "ema"
    assert equal(exported, load_file(checkpoint(tmp_path, "best") / f"{kind}.safetensors"))
    assert equal(exported, load_file(checkpoint(tmp_path, "best") / "weights.safetensors")) == (ema is None)
    fresh = trainer_of(tmp_path / "fresh", QUICK)
    with torch.no_grad():
        for name, parameter in fresh.module.named_parameters():
            parameter.copy_(exported[name])
    assert fresh.validate().nats_per_token == pytest.approx(seen[4] + 10, abs=1e-6)


@pytest.mark.slow
def test_validation_changes_neither_the_parameters_nor_later_steps(tmp_path, straight):
    trainer = trainer_of(tmp_path)
    before = weights_of(trainer.module)
    assert trainer.validate() == trainer.validate()
    assert equal(weights_of(trainer.module), before)
    assert trainer.module.training
    trainer.train()
    assert_same_end(tmp_path, straight)


@pytest.mark.slow
def test_any_validation_is_better_than_nan(tmp_path):
    trainer = trainer_of(tmp_path)
    scores(trainer, math.nan, 3.0, 4.0)
    assert trainer.train().best_step == 4
    assert checkpoint(tmp_path, "best").name == "step-00000004"


def test_the_latest_and_the_best_checkpoints_are_kept(tmp_path):
    trainer = trainer_of(tmp_path, replace(QUICK, steps=8, validate_every=2, keep=2))
    scores(trainer, 5.0, 1.0, 2.0, 3.0, 4.0)
    trainer.train()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000006", "step-00000008"]


@pytest.mark.slow
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
    """Sends SIGTERM in a step."""
    taken = trainer.step

    def step(batch):
        if trainer.state.step == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return taken(batch)

    trainer.step = step


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "expected"), [("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_measuring_uses_the_precision_ema_and_optimizer_of_training(monkeypatch, precision, expected):
    measured, made, seen, alive = training_module(0.1), [], [], weakref.WeakSet()

    def new(*arguments):
        made.append(new_optimizer(*arguments))
        return made[-1]

    def look(*_):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        seen.append((dtype, len(made[-1].state), len(alive)))

    def averaged(*arguments):
        ema = EMA(*arguments)
        alive.add(ema)
        return ema

    monkeypatch.setattr(optim, "EMA", averaged)
    monkeypatch.setattr(optim, "new_optimizer", new)
    measured.register_forward_pre_hook(look)
    before = weights_of(measured)
    settings = replace(QUICK, precision=precision, ema=0.9)
    measure(measured, MadeUpSequences(40, seed=1), settings, torch.device("cpu"), 64)
    count = sum(parameter.requires_grad for parameter in measured.parameters())
    assert seen == [(expected, 0, 1), (expected, count, 1), (expected, count, 1)]
    assert equal(weights_of(measured), before)


def scaled(trainer: Trainer) -> Trainer:
    """Adds a loss scale that grows soon, as half precision has one on a GPU."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    trainer.step.optimizer = trainer.accelerator.prepare_optimizer(trainer.optimizer)
    return trainer


@pytest.mark.slow
def test_the_loss_scale_is_resumed(tmp_path):
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


@pytest.mark.slow
def test_a_run_with_muon_resumes_exactly(tmp_path):
    settings = replace(QUICK, optimizer="muon", ema=0.9)
    trainer_of(tmp_path / "straight", settings).train()
    trainer = trainer_of(tmp_path / "stopped", settings)
    stopped(trainer, at=5)
    trainer.train()
    kinds = {
        name.rpartition("/")[2]
        for name in load_file(checkpoint(tmp_path / "stopped", "last") / "optimizer.safetensors")
    }
    assert kinds == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    resumed(tmp_path / "stopped", settings).train()
    assert_same_end(tmp_path / "stopped", tmp_path / "straight")
    validations = [event["nats_per_token"] for event in log(tmp_path / "stopped") if event["event"] == "validation"]
    assert validations[-1] < validations[0]


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_run_is_resumed_in_another_precision(tmp_path, before):
    trainer = scaled(trainer_of(tmp_path)) if before else trainer_of(tmp_path)
    stopped(trainer, at=5)
    trainer.train()
    again = trainer_of(tmp_path) if before else scaled(trainer_of(tmp_path))
    again.resume()
    assert again.train().step == QUICK.steps


@pytest.mark.slow
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_stopped_before_its_first_validation_exports_the_last_parameters(tmp_path, ema):
    settings = replace(QUICK, ema=ema)
    trainer_of(tmp_path / "straight", settings).train()
    trainer = trainer_of(tmp_path / "stopped", settings)
    stopped(trainer, at=3)
    state = trainer.train()
    assert (state.step, state.best_step, state.is_validated) == (3, 0, False)
    kind = "weights" if ema is None else "ema"
    exported = load_file(tmp_path / "stopped" / "model" / "weights.safetensors")
    first, last = (load_file(RunFolder(tmp_path / "stopped").checkpoint(at) / f"{kind}.safetensors") for at in (0, 3))
    assert equal(exported, last)
    assert not equal(exported, first)
    assert resumed(tmp_path / "stopped", settings).train().is_validated
    assert_same_end(tmp_path / "stopped", tmp_path / "straight")


def test_the_initial_parameters_are_exported_if_training_made_them_worse(tmp_path):
    trainer = trainer_of(tmp_path)
    scores(trainer, 1.0, 2.0, 3.0)
    stopped(trainer, at=5)
    assert trainer.train().is_validated
    exported = load_file(tmp_path / "model" / "weights.safetensors")
    assert equal(exported, load_file(RunFolder(tmp_path).checkpoint(0) / "weights.safetensors"))


# ---- how it fails -----------------------------------------------------------------------------------------------


class NaNLoss(torch.nn.Module):
    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs) * math.nan


def poisoned(trainer: Trainer, at: int) -> None:
    """Makes the loss of one step NaN."""
    taken = trainer.step
    inner = taken.wrapped

    def step(batch):
        is_bad = trainer.state.step == at
        taken.wrapped = NaNLoss(inner) if is_bad else inner
        return taken(batch)

    trainer.step = step


def all_finite(path: Path) -> bool:
    return all(
        bool(tensor.isfinite().all()) for file in path.glob("*.safetensors") for tensor in load_file(file).values()
    )


@pytest.mark.slow
def test_a_nan_loss_ends_the_run_and_leaves_a_good_checkpoint(tmp_path, straight):
    trainer = trainer_of(tmp_path)
    poisoned(trainer, at=5)
    with pytest.raises(
        FloatingPointError, match=r"^the loss is nan at step 6, but the last checkpoint is good: "
    ) as caught:
        trainer.train()
    assert "\n" not in str(caught.value)
    assert checkpoint(tmp_path, "last").name == "step-00000004"
    assert all_finite(checkpoint(tmp_path, "last"))
    assert not (tmp_path / "model").exists()
    resumed(tmp_path).train()  # the loss is finite this time
    assert_same_end(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"log_every": 3}, {"log_every": 100}], ids=str)
def test_nan_parameters_are_never_saved(tmp_path, changes):
    trainer = trainer_of(tmp_path, replace(QUICK, validate_every=100, **changes))
    poisoned(trainer, at=3)
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert all_finite(checkpoint(tmp_path, "last"))


def test_an_infinite_gradient_is_detected_before_a_checkpoint_is_written(tmp_path):
    trainer = trainer_of(tmp_path)
    taken = trainer.step

    def step(batch):
        first = next(trainer.module.parameters())
        size = math.inf if trainer.state.step == 3 else 1.0
        handle = first.register_hook(lambda gradient: gradient * size)
        try:
            return taken(batch)
        finally:
            handle.remove()

    trainer.step = step
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert all_finite(checkpoint(tmp_path, "last"))


@pytest.mark.slow
@pytest.mark.parametrize(("at", "file"), [(4, "weights.safetensors"), (6, "optimizer.safetensors")])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, straight, monkeypatch, at, file):
    trainer, saved = trainer_of(tmp_path), checkpoint_module.save_tensors

    def save(tensors, path):
        if trainer.state.step == at and path.name == file:
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        saved(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_tensors", save)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    monkeypatch.undo()
    assert checkpoint(tmp_path, "last").name == f"step-{at - 2:08d}"
    assert not [*tmp_path.rglob("*.unfinished"), *tmp_path.rglob("*.replaced")]
    resumed(tmp_path).train()
    assert_same_end(tmp_path, straight)


@pytest.mark.slow
def test_a_disk_that_is_full_during_export_leaves_the_old_model(tmp_path):
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


@pytest.mark.slow
def test_a_kill_between_writing_the_two_pointers_loses_neither(tmp_path, monkeypatch):
    settings = replace(QUICK, validate_every=2)
    trainer = trainer_of(tmp_path, settings)
    scores(trainer, 5.0, 4.0, 1.0)
    write_pointer = RunFolder.write_pointer

    def killed(self, which, path):
        if which == "best" and path.name == "step-00000004":
            raise KeyboardInterrupt
        write_pointer(self, which, path)

    monkeypatch.setattr(RunFolder, "write_pointer", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    trainer = resumed(tmp_path, settings)
    scores(trainer, *([1.0] * (trainer.state.step < 4)), 2.0, 3.0)
    assert trainer.train().best_step == 4
    assert checkpoint(tmp_path, "best").name == "step-00000004"


def damage_optimizer(path: Path) -> None:
    (path / "optimizer.safetensors").write_bytes(b"half a file")


def damage_state(path: Path) -> None:
    (path / "state.json").write_text('{"state": {"step": "8"}}')


def damage_format(path: Path) -> None:
    plain = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(plain | {"format": 99}))


DAMAGES = {"optimizer": damage_optimizer, "state": damage_state, "format": damage_format, "missing": shutil.rmtree}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_run_with_a_damaged_checkpoint_resumes_from_the_newest_complete_one(tmp_path, caplog, kind):
    """It warns in one line, and its end is that of an undisturbed run."""
    settings = replace(QUICK, validate_every=2)
    for name in ("straight", "damaged"):
        trainer = trainer_of(tmp_path / name, settings)
        scores(trainer, 5.0, 4.0, 3.0, 2.0, 1.0)
        trainer.train()
    path = checkpoint(tmp_path / "damaged", "last")
    DAMAGES[kind](path)
    caplog.clear()
    trainer = resumed(tmp_path / "damaged", settings)
    [message] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith("resuming from step-00000006: ")
    assert str(path) in message
    assert "\n" not in message
    assert trainer.state.step == 6
    assert checkpoint(tmp_path / "damaged", "best").name == "step-00000006"  # as it was then
    scores(trainer, 1.0)
    trainer.train()
    assert_same_end(tmp_path / "damaged", tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("pointer", ["{", "{}", "[]", '{"checkpoint": 3}', None])
def test_a_damaged_pointer_resumes_the_newest_checkpoint(tmp_path, straight, pointer):
    interrupted(tmp_path, at=7)
    if pointer is None:
        (tmp_path / "last.json").unlink()
    else:
        (tmp_path / "last.json").write_text(pointer)
    trainer = resumed(tmp_path)
    assert trainer.state.step == 6
    trainer.train()
    assert_same_end(tmp_path, straight)


@pytest.mark.slow
def test_a_run_without_a_complete_checkpoint_is_refused_in_one_line(tmp_path):
    trainer_of(tmp_path).train()
    for path in (tmp_path / "checkpoints").iterdir():
        damage_optimizer(path)
    with pytest.raises(
        ValueError, match=r"no checkpoint of .* is complete: .*step-00000008/optimizer.safetensors"
    ) as caught:
        resumed(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_trains_in_any_thread(tmp_path):
    """Signals can be caught in the main thread alone."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(trainer_of(tmp_path, replace(QUICK, steps=1)).train).result().step == 1


@pytest.mark.slow
def test_a_finished_run_without_its_best_checkpoint_keeps_its_model(tmp_path):
    settings = replace(QUICK, validate_every=2)
    trainer = trainer_of(tmp_path, settings)
    scores(trainer, 5.0, 1.0, 2.0, 3.0, 4.0)
    trainer.train()
    before, rows = (tmp_path / "model" / "weights.safetensors").read_bytes(), log(tmp_path)
    shutil.rmtree(checkpoint(tmp_path, "best"))
    trainer = resumed(tmp_path, settings)
    scores(trainer)
    state = trainer.train()
    assert (state.best, state.best_step) == (1.0, 2)
    assert (tmp_path / "model" / "weights.safetensors").read_bytes() == before
    assert log(tmp_path) == rows


@pytest.mark.slow
def test_a_finished_run_without_its_newest_and_best_checkpoint_exports_the_same_model(tmp_path):
    """The state before it names a best checkpoint that was removed when a better one came."""
    settings = replace(QUICK, validate_every=4, save_every=1, keep=2)
    trainer = trainer_of(tmp_path, settings)
    scores(trainer, 3.0, 2.0, 1.0)
    trainer.train()
    before, rows = (tmp_path / "model" / "weights.safetensors").read_bytes(), log(tmp_path)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000007", "step-00000008"]
    shutil.rmtree(checkpoint(tmp_path, "best"))
    trainer = resumed(tmp_path, settings)
    assert trainer.state.step == 7
    scores(trainer, 1.0)
    assert trainer.train().best_step == 8
    assert (tmp_path / "model" / "weights.safetensors").read_bytes() == before
    assert timeless(log(tmp_path)) == timeless(rows)


@pytest.mark.slow
def test_other_settings_may_not_find_the_best_checkpoint_again(tmp_path):
    settings = replace(QUICK, validate_every=4, save_every=1, keep=2)
    trainer = trainer_of(tmp_path, settings)
    scores(trainer, 3.0, 2.0, 1.0)
    trainer.train()
    shutil.rmtree(checkpoint(tmp_path, "best"))
    trainer = resumed(tmp_path, settings)
    scores(trainer, 2.5, 2.5)  # worse than that of step 4, whose checkpoint is gone, so that the last is validated
    state = trainer.train()
    assert (state.best, state.best_step) == (2.5, 8)
    exported = load_file(tmp_path / "model" / "weights.safetensors")
    assert equal(exported, load_file(checkpoint(tmp_path, "last") / "weights.safetensors"))


@pytest.mark.slow
def test_a_missing_best_checkpoint_is_replaced_by_the_next_best(tmp_path):
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
    with pytest.raises(ValueError, match="has no checkpoint to resume from; train in another --output"):
        resumed(tmp_path)


# ---- how it resumes ---------------------------------------------------------------------------------------------


def interrupted(folder: Path, at: int, settings: TrainingConfig = QUICK) -> None:
    """Ends a run before a step, without a checkpoint."""
    trainer = trainer_of(folder, settings)
    taken = trainer.step

    def step(batch):
        if trainer.state.step == at:
            raise KeyboardInterrupt
        return taken(batch)

    trainer.step = step
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


@pytest.mark.slow
def test_an_incomplete_line_of_the_log_is_removed(tmp_path, straight):
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


@pytest.mark.slow
def test_a_run_without_its_log_is_resumed(tmp_path, straight):
    interrupted(tmp_path, at=5)
    (tmp_path / "log.jsonl").unlink()
    assert resumed(tmp_path).train().step == 8
    start, *rest = timeless(log(tmp_path))
    assert (start["event"], start["step"]) == ("run", 4)
    assert rest == [event for event in timeless(log(straight)) if event["step"] > 4]


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(tmp_path, straight):
    trainer_of(tmp_path).train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    state = resumed(tmp_path).train()
    assert state.step == 8
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert_same_end(tmp_path, straight)


@pytest.mark.slow
def test_a_finished_run_is_resumed_for_more_steps(tmp_path):
    """With a schedule that does not depend on the last step, as if it had had more steps at once."""
    settings = replace(QUICK, decay="constant_with_warmup")
    trainer_of(tmp_path / "long", replace(settings, steps=12)).train()
    trainer_of(tmp_path / "short", settings).train()
    assert resumed(tmp_path / "short", replace(settings, steps=12)).train().step == 12
    assert_same_end(tmp_path / "short", tmp_path / "long")


def test_a_run_past_its_new_last_step_ends_at_once(tmp_path):
    interrupted(tmp_path, at=7)
    assert resumed(tmp_path, replace(QUICK, steps=5)).train().step == 6
    assert (tmp_path / "model" / "weights.safetensors").exists()


def test_resuming_with_ema_needs_a_checkpoint_with_ema(tmp_path):
    interrupted(tmp_path, at=5)
    with pytest.raises(ValueError, match=r"was trained without EMA, .*; leave out --ema"):
        resumed(tmp_path, replace(QUICK, ema=0.9))


@pytest.mark.slow
def test_a_checkpoint_that_lost_its_ema_is_not_resumed(tmp_path):
    interrupted(tmp_path, at=7, settings=replace(QUICK, ema=0.9))
    (checkpoint(tmp_path, "last") / "ema.safetensors").unlink()
    assert resumed(tmp_path, replace(QUICK, ema=0.9)).state.step == 4


def test_the_checkpoint_of_another_network_is_refused(tmp_path):
    interrupted(tmp_path, at=5)
    trainer = trainer_of(tmp_path)
    trainer.module.network.conditioning.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 missing, 0 unknown"):
        trainer.resume()


@pytest.mark.parametrize("best", [1.5, math.inf, None])
def test_the_state_survives_json(best):
    state = replace(TrainState(), step=3, best=best, best_step=2, validations_since_best=1)
    plain = json.loads(json.dumps(to_json(state)))
    assert from_json(plain, TrainState) == state


def as_earlier_version(path: Path) -> None:
    """Renames and rewrites the files of a checkpoint as the version before state.json wrote them."""
    plain = json.loads((path / "state.json").read_text())
    scale = plain["loss_scale"]
    if scale is not None:
        scale["_growth_tracker"] = scale.pop("growth_tracker")
    earlier = plain["state"] | {"num_averaged": plain["num_ema_updates"], "scaler": scale}
    (path / "standing.json").write_text(json.dumps(earlier))
    (path / "state.json").unlink()
    (path / "ema.safetensors").rename(path / "averages.safetensors")


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_resumed(tmp_path):
    settings = replace(QUICK, ema=0.9)
    scaled(trainer_of(tmp_path / "straight", settings)).train()
    trainer = scaled(trainer_of(tmp_path / "earlier", settings))
    stopped(trainer, at=5)
    trainer.train()
    for path in (tmp_path / "earlier" / "checkpoints").iterdir():
        as_earlier_version(path)
    again = scaled(trainer_of(tmp_path / "earlier", settings))
    again.resume()
    assert again.accelerator.scaler.state_dict() == trainer.accelerator.scaler.state_dict()
    assert again.ema.num_updates == 5
    again.train()
    assert_same_end(tmp_path / "earlier", tmp_path / "straight")


@pytest.mark.parametrize("earlier", ["[]", "{}", '{"step": 8}', '{"step": 8, "num_averaged": 0, "scaler": 3}'])
def test_a_damaged_state_of_an_earlier_version_is_named_in_one_line(tmp_path, earlier):
    (tmp_path / "standing.json").write_text(earlier)
    with pytest.raises(ValueError, match=r"^'.*standing.json' is damaged \(standing.json.*\); restore it$"):
        Checkpoint.read(tmp_path)


# ---- learning rates ---------------------------------------------------------------------------------------------


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
    "constant_with_warmup": lambda left: 1.0,
}


@pytest.mark.parametrize("decay", [*SHAPES, "inverse_sqrt"])
def test_learning_rates_warm_up_and_then_decay(decay):
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


def test_wsd_warms_up_stays_and_decays():
    settings = TrainingConfig(steps=20, warmup=4, learning_rate=0.5, decay="wsd", decay_fraction=0.2)
    factors = [learning_rate(settings)(step) / 0.5 for step in range(22)]
    expected = [0.25, 0.5, 0.75, *[1.0] * 13, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]  # the last four of twenty steps decay
    torch.testing.assert_close(factors, expected)


@pytest.mark.parametrize("steps", [1, 7, 100])
def test_wsd_that_only_decays_is_linear(steps):
    always, linear = (
        learning_rate(TrainingConfig(steps=steps, warmup=0, decay=decay, decay_fraction=1.0))
        for decay in ("wsd", "linear")
    )
    torch.testing.assert_close([always(step) for step in range(steps)], [linear(step) for step in range(steps)])


def test_wsd_that_decays_before_it_is_warm_stays_below_the_peak():
    settings = TrainingConfig(steps=10, warmup=8, learning_rate=1.0, decay="wsd", decay_fraction=0.5)
    rates = [learning_rate(settings)(step) for step in range(10)]
    torch.testing.assert_close(
        rates, [step / 8 if step / 8 < (11 - step) / 6 else (11 - step) / 6 for step in range(1, 11)]
    )


def test_the_warm_up_of_the_paper_starts_close_to_0():
    assert learning_rate(TrainingConfig(steps=1_900_000, warmup=10_000, learning_rate=3e-6))(0) < 1e-8


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
def test_the_last_step_has_a_learning_rate_above_0(decay):
    assert learning_rate(TrainingConfig(steps=10, warmup=0, decay=decay))(9) > 0


@pytest.mark.slow
def test_the_logged_learning_rate_is_that_of_the_optimizer(tmp_path, straight):
    trainer = trainer_of(tmp_path)
    taken, used = trainer.step, []

    def step(batch):
        result = taken(batch)
        used.append({group["lr"] for group in trainer.optimizer.param_groups})
        return result

    trainer.step = step
    trainer.train()
    logged = [{event["learning_rate"]} for event in log(tmp_path) if "loss" in event]
    assert used == logged
    assert logged[0] == {1e-2 / 2}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_weight_decay_of_matrices_changes_linearly(tmp_path, optimizer):
    trainer = trainer_of(tmp_path, replace(QUICK, optimizer=optimizer, weight_decay=0.0, weight_decay_end=0.7))
    for step in range(QUICK.steps):
        trainer.step._set_rates(step)
        for group in trainer.optimizer.param_groups:
            is_matrix = group["params"][0].ndim > 1
            assert group["weight_decay"] == (pytest.approx(0.1 * step) if is_matrix else 0.0)


def test_a_run_whose_weight_decay_changes_is_resumed_exactly(tmp_path):
    settings = replace(QUICK, weight_decay=2.0, weight_decay_end=0.0)
    trainer_of(tmp_path / "straight", settings).train()
    trainer_of(tmp_path / "constant", replace(settings, weight_decay_end=None)).train()
    interrupted = trainer_of(tmp_path / "resumed", settings)
    taken = interrupted.step

    def step(batch):
        interrupted.is_signaled = batch.step == 2
        return taken(batch)

    interrupted.step = step
    assert interrupted.train().step == 3
    resumed(tmp_path / "resumed", settings).train()
    names = "straight", "resumed", "constant"
    straight, again, constant = (load_file(checkpoint(tmp_path / n, "last") / "weights.safetensors") for n in names)
    assert equal(straight, again)
    assert not equal(straight, constant)


# ---- accumulation -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_accumulation_reaches_the_same_parameters(tmp_path):
    ends = []
    for limit in (None, 40, 8):
        trainer = trainer_of(tmp_path / str(limit), replace(QUICK, micro_tokens=limit, steps=2), dropout=0.0)
        trainer.train()
        ends.append(weights_of(trainer.module))
    for other in ends[1:]:
        for name, tensor in ends[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-4, rtol=1e-3)


def test_a_corpus_smaller_than_a_batch_is_repeated(tmp_path):
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
        ("optimizer", "sgd"),
        ("decay_fraction", 0.0),
        ("decay_fraction", 1.5),
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
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(
        ValueError, match=f"`{name}` of training must be (one of|greater|[012] or more).*, got {value!r}"
    ):
        TrainingConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("patience", 0), ("micro_tokens", -5), ("micro_tokens", 0), ("ema", 0.0), ("weight_decay", -1.0)],
)
def test_optional_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` of training must be .*, got {value!r}"):
        TrainingConfig(**{name: value})


def test_the_standard_error_of_a_validation_is_that_of_a_ratio():
    """Against the spread of many bootstrap samples."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(3, 40, 400)
    nats = tokens * generator.normal(4.0, 1.0, 400)
    score = ValidationResult.of(torch.from_numpy(nats), torch.from_numpy(tokens).double(), Likelihood.BOUND)
    assert score.nats_per_token == pytest.approx(nats.sum() / tokens.sum())
    samples = generator.integers(0, 400, (4000, 400))
    spread = (nats[samples].sum(axis=1) / tokens[samples].sum(axis=1)).std()
    assert score.standard_error == pytest.approx(spread, rel=0.1)
