"""The training loop, on Accelerate: any `TrainingModule`, any sequences, one device or several, exact resumption.

A step trains on one *global* batch, which is split over processes and micro-batches. Noise is keyed by example and
step, and losses are divided by the tokens of the global batch, so the split only changes the speed. A step depends on
the settings, its number, the position in the batch plan, the parameters and the optimizer; torch's generator, which
dropout draws from, is seeded in every step. A checkpoint holds all of these, so resuming is exact.

Any objective will do, as long as the network has a Hugging Face backbone. Sequences come from anything with `lengths`
and `batch`.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from diffusionbert.likelihood.estimate import SequenceDataset, draws_at_once, round_nats
from diffusionbert.networks.base import HasBackbone
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.reporting import logger, progress_line
from diffusionbert.storage.files import atomic_folder
from diffusionbert.storage.schema import Component
from diffusionbert.training.batches import BatchPlan
from diffusionbert.training.checkpoint import Checkpoint, TrainState, newest_complete, weights_to_export
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.log import (
    Event,
    ModelDescription,
    RunEvent,
    TrainEvent,
    ValidationEvent,
    ValidationResult,
    append,
    events_of,
    remove_after,
    row,
)
from diffusionbert.training.optim import EMA, distributed, fitting_ema, low_precision, new_optimizer
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.step import StepBatch, TrainingStep, compile_module, packs, prepared_batches


class Trainer:
    """Trains a module, and writes log, checkpoints and model to a run directory.

    Args:
        module: The network with its objective.
        sequences: What to train on.
        validation: The sequences to validate on.
        settings: Optimization, validation and checkpoints.
        run: The run directory.
        export: Writes parameters as a model folder; called only on the main process.
        accelerator: The devices and processes.
        description: What the log says about the model.
    """

    def __init__(
        self,
        module: TrainingModule,
        sequences: SequenceDataset,
        validation: SequenceDataset,
        settings: TrainingConfig,
        run: RunFolder,
        export: Callable[[dict[str, Tensor], Path], None],
        accelerator: Accelerator,
        description: ModelDescription | None = None,
    ):
        self.settings, self.run, self.export, self.accelerator = settings, run, export, accelerator
        self.description = description or ModelDescription()
        self.sequences, self.validation = sequences, validation
        self.module = module.to(accelerator.device).train()
        self.packed = packs(self.module, settings)
        lengths = np.asarray(sequences.lengths)
        self.plan = BatchPlan(lengths, settings.batching, settings.seed, packed=self.packed)
        if settings.compile:
            compile_module(self.module, sharded=settings.sharded and accelerator.num_processes > 1)
        wrapped = distributed(self.module, accelerator, sharded=settings.sharded)
        self.optimizer = new_optimizer(self.module, settings, accelerator.device)
        self.ema = EMA(self.module, settings.ema) if settings.ema else None
        stepper = accelerator.prepare_optimizer(self.optimizer)
        self.step = TrainingStep(self.module, wrapped, stepper, self.ema, settings, accelerator)
        self.learning_rate = self.step.learning_rate
        self.state = TrainState()
        self.is_signaled = self.is_stopping = self._has_trained = False

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def train(self) -> TrainState:
        """Trains to the last step, or until a signal stops it or patience runs out."""
        settings = self.settings
        if settings.trackers:
            self.accelerator.init_trackers("diffusionbert")
        is_main = self.accelerator.is_main_process
        with (
            self._stop_on_signals(),
            progress_line(settings.steps, visible=is_main, done=self.state.step) as show,
            closing(self.steps()) as steps,
        ):
            if not self.run.log.exists():
                self._log(self._run_event())
                self._check_ema()
            if self.state.best is None:
                self._validate()
                self.save()
            losses: list[Tensor] = []
            num_tokens, started = 0, time.perf_counter()
            while not self.is_over:
                loss, norm, tokens = next(steps)
                step = self.state.step
                losses.append(loss)
                num_tokens += tokens
                if step % settings.log_every == 0:
                    speed = num_tokens / (time.perf_counter() - started)
                    show(step, self._log_training(losses, norm, speed))
                    losses, num_tokens, started = [], 0, time.perf_counter()
                self._agree_to_stop()
                is_validated = step % settings.validate_every == 0 or step == settings.steps
                if is_validated:
                    self._validate()
                if is_validated or step % settings.save_every == 0 or self.is_stopping:
                    self.save()
        if self.is_stopped:
            self._inform(f"stopped at step {self.state.step}; --resume continues from there")
        elif self.state.step and self.state.best_step == 0:
            self._warn_of_no_gain()
        self._export_best()
        return self.state

    def _check_ema(self) -> None:
        """Reports if the configured decay is never reached."""
        ema, steps = self.settings.ema, self.settings.steps
        if ema is not None and EMA.step_reached(ema) > steps:
            self._inform(
                f"the EMA's decay of {ema:g} would act from step {EMA.step_reached(ema):,} on; in {steps:,} steps it "
                f"reaches {EMA.decay_at(steps, ema):.4g}; --ema {fitting_ema(steps):g} suits this run"
            )

    def batches(self) -> Iterator[StepBatch]:
        """The batches of the following steps, endlessly."""
        network = cast("HasBackbone", self.module.network)
        return prepared_batches(
            self.sequences,
            self.plan,
            self.settings,
            self.accelerator,
            start=(self.state.step, self.state.position),
            max_length=network.max_length,
            pad_id=getattr(network.backbone.config, "pad_token_id", None) or 0,
            packed=self.packed,
        )

    def steps(self) -> Generator[tuple[Tensor, Tensor, int]]:
        """Trains step by step, endlessly; yields the loss per token, the gradient norm and the number of tokens."""
        for batch in self.batches():
            loss, norm = self.step(batch)
            tokens = self.state.tokens + batch.num_tokens
            self.state = replace(self.state, step=batch.step + 1, position=batch.position, tokens=tokens)
            self._has_trained = True
            yield loss, norm, batch.num_tokens

    @property
    def is_over(self) -> bool:
        """Whether there is no further step to train."""
        return self.is_stopping or self._is_finished

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped the run before its end."""
        return self.is_stopping and not self._is_finished

    @property
    def _is_finished(self) -> bool:
        """Whether the run reached its last step, or ran out of patience."""
        patience = self.settings.patience
        is_out_of_patience = patience is not None and self.state.validations_since_best >= patience
        return self.state.step >= self.settings.steps or is_out_of_patience

    def _agree_to_stop(self) -> None:
        """Stops all processes at the same step, though a signal may reach only one; they agree when they log."""
        if self.accelerator.num_processes == 1:
            self.is_stopping = self.is_signaled
        elif self.state.step % self.settings.log_every == 0:
            votes = torch.tensor(float(self.is_signaled), device=self.accelerator.device)
            self.is_stopping = float(self.accelerator.reduce(votes, reduction="sum")) > 0

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """Lets SIGINT and SIGTERM stop the run with a checkpoint; a second signal ends the process at once.

        Python delivers signals only to its main thread, so they do not stop a run in another one.
        """

        def stop(number: int, _: Any) -> None:
            self.is_signaled = True
            signal.signal(number, before[signal.Signals(number)])

        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- validation -------------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        """Validates, logs the result, and records if it is the best so far."""
        result = self.validate()
        state, nats = self.state, result.nats_per_token
        if state.best is None or math.isnan(state.best) or nats < state.best:
            self.state = replace(
                state, best=nats, best_step=state.step, best_tokens=state.tokens, validations_since_best=0
            )
        else:
            self.state = replace(state, validations_since_best=state.validations_since_best + 1)
        self._log(result.event(state.step, time.time()))
        self._inform(f"step {state.step}: {result.summary()}")

    @torch.no_grad()
    def validate(self) -> ValidationResult:
        """Estimates nats (or loss, if there is no likelihood) per token of the validation sequences, with the EMA."""
        settings, accelerator = self.settings, self.accelerator
        count = min(len(self.validation.lengths), settings.validation_sentences)
        lengths = np.asarray(self.validation.lengths[:count])
        by_length = np.argsort(lengths, kind="stable")
        chunks = [by_length[start : start + 32] for start in range(0, count, 32)]
        nats = torch.zeros(count, dtype=torch.float64, device=accelerator.device)
        tokens = torch.zeros_like(nats)
        low = low_precision(settings)
        draw = partial(round_nats, self.module, number=0, strata=settings.validation_draws, seed=0, autocast=low)
        with self._evaluating():
            # With sharded parameters, all processes must call the network equally often: for as many chunks, each in as
            # many pieces.
            for first in range(0, len(chunks), accelerator.num_processes):
                shares = chunks[first : first + accelerator.num_processes]
                at_once = draws_at_once(max(len(share) * int(lengths[share].max()) for share in shares))
                has_share = accelerator.process_index < len(shares)
                share = shares[accelerator.process_index if has_share else 0]
                batch = self.validation.batch(share.tolist()).to(accelerator.device)
                estimate = draw(batch, at_once=at_once)
                if has_share:
                    nats[share] = estimate
                    tokens[share] = batch.editable.sum(dim=1).double()
        nats, tokens = (accelerator.reduce(value, reduction="sum") for value in (nats, tokens))
        return ValidationResult.of(nats, tokens, self.module.objective.likelihood)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Without dropout, uncompiled, and with the EMA of the parameters if there is one."""
        self.module.eval()
        try:
            # Without gradients, the network would be compiled a second time.
            with (
                torch.compiler.set_stance("force_eager"),
                self.ema.applied_to(self.module) if self.ema else nullcontext(),
            ):
                yield
        finally:
            self.module.train()

    # ---- checkpoints and model --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint; earlier ones are removed only once it is complete."""
        checkpoint = Checkpoint.of(self.module, self.optimizer, self.ema, self.accelerator.scaler, self.state)
        path = self.run.checkpoint(self.state.step)
        if self.accelerator.is_main_process:
            checkpoint.write(path)
            self.run.write_pointer("last", path)
            if self.state.best_step == self.state.step:
                self.run.write_pointer("best", path)
            self.run.remove_old_checkpoints(self.settings.keep)
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Restores the last checkpoint or, if that is damaged, the newest complete one."""
        path, checkpoint, damage = newest_complete(self.run)
        checkpoint.restore(self.module, self.optimizer, self.ema, self.accelerator.scaler)
        self.state = state = checkpoint.header.state
        best = self.run.checkpoint(state.best_step)
        # A better one that is lost, along with all later steps, is trained again; a finished run keeps its model.
        is_needed = not (self.run.has_better_than(path) or (self._is_finished and self.run.model.is_dir()))
        if not best.is_dir() and is_needed:
            self.state = replace(state, best=None)  # the restored parameters are validated again
        if self.accelerator.is_main_process:
            if damage is not None:
                logger.warning(f"resuming from {path.name}: {damage}")
            self.run.write_pointer("last", path)
            if best.is_dir():  # the run may have been killed between writing the two pointers
                self.run.write_pointer("best", best)
            self.run.remove_old_checkpoints(self.settings.keep)
            remove_after(self.run.log, self.state.step)

    def _export_best(self) -> None:
        """Exports the model: the best parameters, or the last ones if no trained parameters were validated."""
        best = self.run.checkpoint(self.state.best_step if self.state.is_validated else self.state.step)
        if not best.is_dir() and not self._has_trained:
            self._inform(f"the checkpoint of the best step, {self.state.best_step}, is gone; the model stays as it was")
        else:
            if not best.is_dir():  # it should have been trained again, but other settings led elsewhere
                self.state = replace(self.state, best=None)
                self._validate()
                self.save()
                best = self.run.checkpoint(self.state.step)
            if self.accelerator.is_main_process:
                with atomic_folder(self.run.model) as folder:
                    self.export(weights_to_export(best), folder)
        self.accelerator.wait_for_everyone()

    def _warn_of_no_gain(self) -> None:
        """Warns that the exported model is the start, and says what to try."""
        if not self.accelerator.is_main_process:
            return
        found = [event.nats_per_token or event.loss_per_token for event in events_of(self.run.log, ValidationEvent)]
        later = min((value for value in found[1:] if value is not None), default=math.nan)
        logger.warning(
            f"no validation was better than that of the start ({self.state.best:.3f} per token, later {later:.3f} at "
            f"best), so the exported model is the start: train with a lower --learning-rate than "
            f"{self.settings.learning_rate:g}, on more text or for longer"
        )

    # ---- log --------------------------------------------------------------------------------------------------------

    def _log_training(self, losses: list[Tensor], norm: Tensor, speed: float) -> str:
        """Logs the mean loss since the last such row; returns a text for the progress bar."""
        mean = torch.stack(losses).mean()
        loss = float(self.accelerator.reduce(mean, reduction="mean"))
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {self.state.step}, but the last checkpoint is good: "
                "resume with a lower learning rate or in bf16"
            )
        self._log(
            TrainEvent(
                self.state.step,
                time.time(),
                loss,
                self.learning_rate(self.state.step - 1),
                float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm),
                speed,
                self.state.position.epoch,
                self.state.tokens,
            )
        )
        best = f", best validation {self.state.best:.3f}" if self.state.best is not None else ""
        return f"loss {loss:.3f}{best}, {speed:,.0f} tokens/s"

    def _run_event(self) -> RunEvent:
        names = "objective", "schedule", "diffusion_steps", "time_conditioning", "backbone", "start", "parameters"
        about = {name: getattr(self.description, name) for name in names}
        about = {name: str(value) if isinstance(value, Component) else value for name, value in about.items()}
        kind = self.module.objective.likelihood
        quantity = {Likelihood.EXACT: "nll", Likelihood.BOUND: "strict"}.get(kind, self.description.quantity)
        return RunEvent(self.state.step, time.time(), kind=kind, quantity=quantity, seed=self.settings.seed, **about)

    def _log(self, event: Event) -> None:
        if self.accelerator.is_main_process:
            append(self.run.log, event)
        if self.settings.trackers:
            numbers = {
                f"{event.event}/{name}": value
                for name, value in row(event).items()
                if isinstance(value, int | float) and name not in ("step", "time")
            }
            self.accelerator.log(numbers, step=self.state.step)

    def _inform(self, message: str) -> None:
        if self.accelerator.is_main_process:
            logger.info(message)
