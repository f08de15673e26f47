"""Training on several processes: copied (DDP) or sharded (FSDP) parameters, and each process's share of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from diffusionbert.diffusion.shapes import Batch
from diffusionbert.training.batches import parts
from diffusionbert.training.optim import blocks_of


def distributed(module: nn.Module, accelerator: Accelerator, *, sharded: bool) -> nn.Module:
    """The module as it is called in training; the module itself if there is one process."""
    if accelerator.num_processes == 1:
        return module
    if sharded:
        for block in blocks_of(module):
            fully_shard(block)
        # The root, too, is sharded again after each forward: EMA and checkpoints expect shards.
        fully_shard(module, reshard_after_forward=True)
        for method in ("nats", "loss"):  # parameters are gathered only in forward methods
            register_fsdp_forward_method(module, method)
        return module
    devices = [accelerator.device] if accelerator.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=devices)


@contextmanager
def gradient_sync(module: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Exchanges gradients between processes only if enabled, which it should be in the last micro-batch."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
    else:
        yield


def micro_batches(batch: Batch, num_processes: int, process: int, micro_tokens: int | None) -> list[Batch]:
    """The share of one process in a global batch, in parts of at most `micro_tokens` tokens."""
    num_sequences, length = batch.tokens.shape
    sequences_at_once = max(1, (micro_tokens or batch.tokens.numel()) // max(1, length))
    count = max(1, math.ceil(num_sequences / (num_processes * sequences_at_once)))
    shares = parts(np.arange(num_sequences), num_processes * count)
    # A process without sequences must still exchange gradients: it gets one with nothing editable.
    idle = without_targets(batch.select(torch.tensor([0])))
    return [batch.select(torch.from_numpy(share)) if len(share) else idle for share in shares[process::num_processes]]


def without_targets(batch: Batch) -> Batch:
    """The batch without editable positions, so that its loss and gradients are 0."""
    return replace(batch, editable=torch.zeros_like(batch.editable))
