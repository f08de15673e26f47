"""Measures the machine before a run: how many tokens fit at once, how many a second, and so how long it will take."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.optim import Optimizer

from diffusionbert.diffusion.rng import Noise
from diffusionbert.likelihood.estimate import Rows
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.ema import EMA
from diffusionbert.training.optim import low_precision, new_optimiser


@dataclass(frozen=True)
class Measurement:
    """What one device does with micro-batches of one size."""

    micro_tokens: int
    tokens_per_second: float
    is_whole: bool
    """Whether a process's whole share of a batch was fastest at once."""


def measure(
    method: TrainingModule, rows: Rows, settings: TrainingConfig, device: torch.device, share: int
) -> Measurement:
    """Doubles the micro-batch until it does not fit, gains no more speed, or is a process's whole share of a batch."""
    method = method.to(device).train()
    optimiser = new_optimiser(method, replace(settings, weight_decay=0.0), device)  # which leaves weights as they are
    ema = EMA(method, settings.ema) if settings.ema else None  # they take room, too
    best: Measurement | None = None
    for micro_tokens in [*itertools.takewhile(lambda size: size < share, (1024 * 2**n for n in range(30))), share]:
        try:
            speed = _speed(method, optimiser, rows, micro_tokens, low_precision(settings), device)
        except torch.OutOfMemoryError:
            break
        if best is not None and speed < 1.05 * best.tokens_per_second:
            break
        best = Measurement(micro_tokens, speed, is_whole=micro_tokens == share)
    method.zero_grad(set_to_none=True)
    del ema
    gc.collect()
    if best is None:
        raise ValueError(f"not even {min(1024, share)} tokens fit on {device}; take a smaller network")
    return best


def proposed(
    settings: TrainingConfig, measurement: Measurement, tokens_per_step: int, processes: int
) -> tuple[TrainingConfig, float]:
    """The settings with the micro-batch that fits, and the seconds that the run will take with them."""
    seconds = settings.steps * tokens_per_step / (measurement.tokens_per_second * processes)
    return replace(settings, micro_tokens=None if measurement.is_whole else measurement.micro_tokens), seconds


def _speed(
    method: TrainingModule,
    optimiser: Optimizer,
    rows: Rows,
    micro_tokens: int,
    low: torch.dtype | None,
    device: torch.device,
) -> float:
    """PositionMask a second of forward and backward, after one to warm up."""
    lengths = np.asarray(rows.lengths)
    typical = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")
    indices = np.resize(typical, max(1, micro_tokens // max(1, int(np.median(lengths)))))
    batch = Noise(0).stratify(rows.batch(indices.tolist())).to(device)
    for step in range(3):
        if step == 1:
            _wait(device)
            started = time.perf_counter()
        with torch.autocast(device.type, low, enabled=low is not None):
            method(batch, Noise(0, step), batch.num_tokens).backward()
        method.zero_grad(set_to_none=False)  # gradients stay allocated, as they will be in training
        if step == 0:
            optimiser.step()  # and so does its state
    _wait(device)
    return 2 * batch.tokens.numel() / (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
