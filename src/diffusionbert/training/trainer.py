"""The training loop, on Accelerate: any `TrainingModule` on any rows, on one device or many, never losing a run.

A step takes one *global* batch, whose rows are dealt out to processes and micro-batches. Noise is keyed by example
and step and losses are divided by the tokens of the global batch, so the split changes nothing but speed. All that
a step depends on is the settings, the step's number, the position in the plan of batches, the weights with their
optimiser; dropout draws from torch's generator, which is seeded anew from the step. A checkpoint holds these, and
resuming is exact.

Knows the contract of `method.py` and no concrete method; rows come from anything with `lengths` and `batch`.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.likelihood.estimate import Rows, draws_at_once, round_nats
from diffusionbert.objectives.base import Likelihood, TrainingModule
from diffusionbert.storage.files import atomic_folder
from diffusionbert.training.batches import BatchPlan, Indices, parts
from diffusionbert.training.checkpoint import Saved, newest_whole, weights_to_use
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.description import ModelDescription
from diffusionbert.training.ema import EMA
from diffusionbert.training.log import Event, RunEvent, TrainEvent, append, forget_after, row
from diffusionbert.training.optim import blocks_of, learning_rate, low_precision, new_optimiser
from diffusionbert.training.progress import ProgressLine
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.state import Score, TrainState, Window, score_of


class Trainer:
    """Trains a method and keeps a run folder."""

    def __init__(
        self,
        method: TrainingModule,
        rows: Rows,
        validation: Rows,
        settings: TrainingConfig,
        run: RunFolder,
        export: Callable[[dict[str, Tensor], Path], None],
        accelerator: Accelerator,
        settle: Callable[[], None] = lambda: None,
        description: ModelDescription | None = None,
    ):
        """`export` writes a method's weights as a model to use, `settle` notes that steps were trained by these
        settings; both are called on the main process alone. `description` is what the log says of the model.
        """
        self.settings, self.run, self.export, self.accelerator = settings, run, export, accelerator
        self.settle, self.description = settle, description or ModelDescription()
        self.rows, self.validation = rows, validation
        self.plan = BatchPlan(np.asarray(rows.lengths), settings.batching, settings.seed)
        self.method = method.to(accelerator.device).train()
        if settings.compile:
            for block in blocks_of(self.method):  # one compilation serves all layers; shapes change with each batch
                block.compile(dynamic=True)
        self.wrapped = self._distributed()
        self.optimiser = new_optimiser(self.method, settings, accelerator.device)
        self.stepper = accelerator.prepare_optimizer(self.optimiser)
        self.learning_rate = learning_rate(settings)
        self.ema = EMA(self.method, settings.ema) if settings.ema else None
        self.state = TrainState()
        self.began_at = 0
        self.signalled = self.stopping = False

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def train(self) -> TrainState:
        """Goes on from where the run stands to its end, or until it is told to stop."""
        settings = self.settings
        if settings.trackers:
            self.accelerator.init_trackers("diffusionbert")
        with self._listening(), self._progress() as line:
            if not self.run.log.exists():
                self._log(self._run_event())
            if self.state.best is None:
                self._validate(line)
                self.save()
            window = Window()
            for position, indices in self.plan.following(self.state.position):
                if self.is_over:
                    break
                loss, norm, tokens = self._step(indices)
                step = self.state.step + 1
                self.state = replace(self.state, step=step, position=position, tokens=self.state.tokens + tokens)
                window.add(loss, tokens)
                if step % settings.log_every == 0:
                    self._log_window(window, norm, line)
                    window = Window()
                self._agree_to_stop()
                validated = step % settings.validate_every == 0 or step == settings.steps
                if validated:
                    self._validate(line)
                if validated or step % settings.save_every == 0 or self.stopping:
                    self.save()
            if self.is_stopped:
                line.say(f"stopped at step {self.state.step}; --resume goes on from there")
        self._export_best()
        return self.state

    def _progress(self) -> ProgressLine:
        return ProgressLine(self.settings.steps, self.accelerator.is_main_process, self.state.step)

    @property
    def is_over(self) -> bool:
        """Whether no step is to be trained now."""
        return self.stopping or self._is_done

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to stop before its end."""
        return self.stopping and not self._is_done

    @property
    def _is_done(self) -> bool:
        """Whether it came to its last step, or lost its patience."""
        patience = self.settings.patience
        is_patient = patience is None or self.state.validations_since_best < patience
        return self.state.step >= self.settings.steps or not is_patient

    def _agree_to_stop(self) -> None:
        """A signal may reach one process alone, but all must stop at the same step; asking costs a little time."""
        if self.accelerator.num_processes == 1:
            self.stopping = self.signalled
        elif self.state.step % self.settings.log_every == 0:
            votes = torch.tensor(float(self.signalled), device=self.accelerator.device)
            self.stopping = float(self.accelerator.reduce(votes, reduction="sum")) > 0

    def _step(self, indices: Indices) -> tuple[Tensor, Tensor, int]:
        """One update on one global batch: the mean loss of a token, the gradient's norm, the number of tokens."""
        accelerator, settings = self.accelerator, self.settings
        noise = Noise(settings.seed, self.state.step)
        whole_batch = noise.stratify(self.rows.batch(indices.tolist()))
        num_tokens = int(whole_batch.num_tokens)
        micro_batches = self._micro_batches(whole_batch)
        torch.manual_seed(_dropout_seed(settings.seed, self.state.step, accelerator.process_index))
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate(self.state.step)
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for index, batch in enumerate(micro_batches):
            with self._synchronised(index == len(micro_batches) - 1), accelerator.autocast():
                # Gradients are averaged over processes, but parts of a batch are to be added up.
                loss = self.wrapped(batch, noise, num_tokens / accelerator.num_processes)
            accelerator.backward(loss)
            total += loss.detach()
        self.accelerator.unscale_gradients(self.stepper)
        norm = nn.utils.clip_grad_norm_(self.method.parameters(), settings.clip)
        self.stepper.step()
        self.stepper.zero_grad()
        if self.ema:
            self.ema.update(self.method)
        return total, norm, num_tokens

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """This process's share of a global batch, in parts that fit the device."""
        processes = self.accelerator.num_processes
        num_sequences, length = batch.tokens.shape
        sequences_at_once = max(1, (self.settings.micro_tokens or batch.tokens.numel()) // max(1, length))
        count = max(1, math.ceil(num_sequences / (processes * sequences_at_once)))
        shares = parts(np.arange(num_sequences), processes * count)
        mine = shares[self.accelerator.process_index :: processes]
        device = self.accelerator.device
        # A process without rows must still take part in the exchange of gradients: one row, nothing editable.
        return [
            batch.select(torch.from_numpy(rows)).to(device)
            if len(rows)
            else _inert(batch.select(torch.tensor([0]))).to(device)
            for rows in mine
        ]

    @contextmanager
    def _synchronised(self, is_last: bool) -> Iterator[None]:
        """Exchanges gradients after the last micro-batch alone."""
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(is_last)
            yield
        elif isinstance(self.wrapped, DistributedDataParallel) and not is_last:
            with self.wrapped.no_sync():
                yield
        else:
            yield

    def _distributed(self) -> nn.Module:
        """The method as several processes train it: copied (DDP) or sharded (FSDP)."""
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            return self.method
        if self.settings.sharded:
            for block in blocks_of(self.method):
                fully_shard(block)
            # The root, too, goes back to shards after each forward: averages and checkpoints expect shards.
            fully_shard(self.method, reshard_after_forward=True)
            for verb in ("nats", "loss"):  # sharded weights are gathered in forwards alone
                register_fsdp_forward_method(self.method, verb)
            return self.method
        devices = [accelerator.device] if accelerator.device.type == "cuda" else None
        return DistributedDataParallel(self.method, device_ids=devices)

    # ---- validation -------------------------------------------------------------------------------------------------

    def _validate(self, line: ProgressLine) -> None:
        """Scores the held-out sentences, notes the figure, and remembers whether it is the best."""
        score = self.validate()
        best = self.state.best
        is_better = best is None or math.isnan(best) or score.nats_per_token < best
        if is_better:
            self.state = replace(
                self.state,
                best=score.nats_per_token,
                best_step=self.state.step,
                best_tokens=self.state.tokens,
                validations_since_best=0,
            )
        else:
            self.state = replace(self.state, validations_since_best=self.state.validations_since_best + 1)
        self._log(score.event(self.state.step, time.time()))
        line.say(f"step {self.state.step}: {score.summary()}")

    @torch.no_grad()
    def validate(self) -> Score:
        """The method's nats on the held-out sentences (or its loss, if it has no likelihood), with averaged weights if
        there are any.
        """
        settings, accelerator = self.settings, self.accelerator
        count = min(len(self.validation.lengths), settings.validation_sentences)
        lengths = np.asarray(self.validation.lengths[:count])
        by_length = np.argsort(lengths, kind="stable")
        chunks = [by_length[start : start + 32] for start in range(0, count, 32)]
        nats = torch.zeros(count, dtype=torch.float64, device=accelerator.device)
        tokens = torch.zeros_like(nats)
        low = low_precision(settings)
        draw = partial(round_nats, self.method, number=0, strata=settings.validation_draws, seed=0, autocast=low)
        with self._evaluating():
            # Under sharding all processes must call the network equally often: for as many chunks, in as many pieces.
            for first in range(0, len(chunks), accelerator.num_processes):
                dealt = chunks[first : first + accelerator.num_processes]
                at_once = draws_at_once(max(len(rows) * int(lengths[rows].max()) for rows in dealt))
                is_mine = accelerator.process_index < len(dealt)
                rows = dealt[accelerator.process_index if is_mine else 0]
                batch = self.validation.batch(rows.tolist()).to(accelerator.device)
                estimate = draw(batch, at_once=at_once)
                if is_mine:
                    nats[rows] = estimate
                    tokens[rows] = batch.editable.sum(dim=1).double()
        nats, tokens = (accelerator.reduce(value, reduction="sum") for value in (nats, tokens))
        return score_of(nats, tokens, self.method.objective.likelihood)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Without dropout, and with averaged weights if there are any."""
        self.method.eval()
        try:
            if self.ema:
                with self.ema.in_place_of(self.method):
                    yield
            else:
                yield
        finally:
            self.method.train()

    # ---- what is kept -----------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint; the previous one stays until this one is complete."""
        saved = Saved.of(self.method, self.optimiser, self.ema, self.accelerator.scaler, self.state)
        path = self.run.checkpoint(self.state.step)
        if self.accelerator.is_main_process:
            saved.write(path)
            if self.state.step > self.began_at:
                self.settle()
            self._name(path)
            self.run.tidy(self.settings.keep)
        self.accelerator.wait_for_everyone()

    def _name(self, checkpoint: Path) -> None:
        self.run.name("last", checkpoint)
        if self.state.best_step == self.state.step:
            self.run.name("best", checkpoint)

    def resume(self) -> None:
        """Goes back to the last checkpoint; if that is damaged, to the newest one that is not."""
        path, saved, damage = newest_whole(self.run)
        saved.put_back(self.method, self.optimiser, self.ema, self.accelerator.scaler)
        best = self.run.checkpoint(saved.state.best_step)
        # Without its weights the best figure is of no use: what stands here is validated, and is the best for now.
        self.state = saved.state if best.is_dir() else replace(saved.state, best=None)
        self.began_at = self.state.step
        if self.accelerator.is_main_process:
            if damage is not None:
                print(f"goes on from {path.name}: {damage}", file=sys.stderr)
            self.run.name("last", path)
            if best.is_dir():  # a kill may have come between the two names
                self.run.name("best", best)
            forget_after(self.run.log, self.state.step)

    def _export_best(self) -> None:
        """Writes the model: the best weights, or the last ones if none that were trained have been validated."""
        path = (self.run.named("best") if self.state.is_validated else None) or self.run.named("last")
        if path is not None and self.accelerator.is_main_process:
            with atomic_folder(self.run.model) as folder:
                self.export(weights_to_use(path), folder)
        self.accelerator.wait_for_everyone()

    # ---- what is said -----------------------------------------------------------------------------------------------

    def _log_window(self, window: Window, norm: Tensor, line: ProgressLine) -> None:
        loss = float(self.accelerator.reduce(window.loss, reduction="mean"))
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {self.state.step}; the last checkpoint is good: "
                "resume with a lower learning rate or in bf16"
            )
        rate = self.learning_rate(self.state.step - 1)
        self._log(
            TrainEvent(
                self.state.step,
                time.time(),
                loss,
                rate,
                float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm),
                window.speed,
                self.state.position.epoch,
                self.state.tokens,
            )
        )
        best = f", best validation {self.state.best:.3f}" if self.state.best is not None else ""
        line.update(self.state.step, f"loss {loss:.3f}{best}, {window.speed:,.0f} tokens/s")

    def _run_event(self) -> RunEvent:
        about, kind = self.description, self.method.objective.likelihood
        quantity = {Likelihood.EXACT: "nll", Likelihood.BOUND: "strict"}.get(kind, about.quantity)
        return RunEvent(
            self.state.step,
            time.time(),
            kind=kind,
            quantity=quantity,
            objective=None if about.objective is None else str(about.objective),
            schedule=None if about.schedule is None else str(about.schedule),
            diffusion_steps=about.diffusion_steps,
            time_conditioning=about.time_conditioning,
            backbone=about.backbone,
            start=about.start,
            parameters=about.parameters,
            seed=self.settings.seed,
        )

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

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Turns Ctrl-C and a polite kill into a checkpoint and an orderly end; a second one ends at once."""

        def note(number: int, _: Any) -> None:
            self.signalled = True
            signal.signal(number, before[signal.Signals(number)])

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _dropout_seed(seed: int, step: int, process: int) -> int:
    return ((seed * 1_000_003 + step) * 65_536 + process) % 2**63


def _inert(batch: Batch) -> Batch:
    return replace(batch, editable=torch.zeros_like(batch.editable))
