"""Measures a device before a run: which micro-batch fits, its tokens per second, and how long the run will take."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.optim import Optimizer

from diffusionbert.diffusion.rng import Noise
from diffusionbert.likelihood.estimate import SequenceDataset
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.training.config import TrainingConfig
from diffusionbert.training.ema import EMA
from diffusionbert.training.optim import low_precision, new_optimiser


@dataclass(frozen=True)
class Measurement:
    """The speed of one device at one size of micro-batches."""

    micro_tokens: int
    tokens_per_second: float
    is_full_share: bool
    """Whether a process is fastest without accumulation, with its full share of a batch in one micro-batch."""


def measure(
    module: TrainingModule, sequences: SequenceDataset, settings: TrainingConfig, device: torch.device, share: int
) -> Measurement:
    """Doubles the micro-batch until it does not fit, is no longer faster, or is the full share of a process."""
    module = module.to(device).train()
    optimiser = new_optimiser(module, replace(settings, weight_decay=0.0), device)  # which keeps parameters as they are
    ema = EMA(module, settings.ema) if settings.ema else None  # it takes memory, too
    best: Measurement | None = None
    for micro_tokens in [*itertools.takewhile(lambda size: size < share, (1024 * 2**n for n in range(30))), share]:
        try:
            speed = _speed(module, optimiser, sequences, micro_tokens, low_precision(settings), device)
        except torch.OutOfMemoryError:
            break
        if best is not None and speed < 1.05 * best.tokens_per_second:
            break
        best = Measurement(micro_tokens, speed, is_full_share=micro_tokens == share)
    module.zero_grad(set_to_none=True)
    del ema
    gc.collect()
    if best is None:
        raise ValueError(f"a batch of {min(1024, share)} tokens does not fit on {device}; use a smaller network")
    return best


def proposed(
    settings: TrainingConfig, measurement: Measurement, tokens_per_step: int, processes: int
) -> tuple[TrainingConfig, float]:
    """The settings with the measured micro-batch, and the seconds that the run will take with them."""
    seconds = settings.steps * tokens_per_step / (measurement.tokens_per_second * processes)
    return replace(settings, micro_tokens=None if measurement.is_full_share else measurement.micro_tokens), seconds


def _speed(
    module: TrainingModule,
    optimiser: Optimizer,
    sequences: SequenceDataset,
    micro_tokens: int,
    low: torch.dtype | None,
    device: torch.device,
) -> float:
    """Positions per second of forward and backward passes, after one to warm up."""
    lengths = np.asarray(sequences.lengths)
    typical = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")
    indices = np.resize(typical, max(1, micro_tokens // max(1, int(np.median(lengths)))))
    batch = Noise(0).stratify(sequences.batch(indices.tolist())).to(device)
    for step in range(3):
        if step == 1:
            _wait(device)
            started = time.perf_counter()
        with torch.autocast(device.type, low, enabled=low is not None):
            module(batch, Noise(0, step), batch.num_tokens).backward()
        module.zero_grad(set_to_none=False)  # gradients stay allocated, as they will be in training
        if step == 0:
            optimiser.step()  # and so does its state
    _wait(device)
    return 2 * batch.tokens.numel() / (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
