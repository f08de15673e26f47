"""What a step needs besides its loss: optimizer, learning rate, precision, EMA, DDP or FSDP, and micro-batch sizes."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel, get_scheduler

from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.likelihood.estimate import SequenceDataset
from diffusionbert.networks.base import unsplit_modules
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.training.config import TrainingConfig


def new_optimizer(module: nn.Module, settings: TrainingConfig, device: torch.device) -> Optimizer:
    """AdamW, fused on a GPU, or Muon with AdamW; biases and norms are not decayed."""
    is_gpu, is_muon = device.type == "cuda", settings.optimizer == "muon"
    matrices = layer_matrices(module) if is_muon else []
    in_layers = {id(matrix) for matrix in matrices}
    others = [weight for weight in module.parameters() if id(weight) not in in_layers]
    groups = [
        {"params": [weight for weight in others if weight.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in others if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    if is_muon:
        return MuonWithAdamW(
            _muon(matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay),
            torch.optim.AdamW(groups, lr=settings.learning_rate, fused=is_gpu),
        )
    # A captured step reads the learning rate from a tensor.
    rate = torch.tensor(settings.learning_rate, device=device) if is_gpu else settings.learning_rate
    return torch.optim.AdamW(groups, lr=rate, fused=is_gpu, capturable=is_gpu)


class MuonWithAdamW(Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of layers and AdamW for everything else, as one optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025), so that both share one learning rate.
    """

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        self._muon, self._adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {"fused": adamw.defaults["fused"]})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step with each; both use the groups and states of this optimizer, which loading may replace."""
        count = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        self._muon.state = self._adamw.state = self.state
        weight = self.param_groups[0]["params"][0]
        if weight.is_cuda and not isinstance(weight, DTensor):
            muon_step(self._muon)
        else:
            self._muon.step()
        self._adamw.step()


@torch.no_grad()
def muon_step(optimizer: Optimizer) -> None:
    """A step of torch's Muon that orthogonalizes all matrices of a shape at once: some 50 launches, not thousands."""
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        gradients, states = [weight.grad for weight in weights], [optimizer.state[weight] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
        moments = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, moments, group["momentum"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for shape in {weight.shape for weight in weights}:
            chosen = [number for number, weight in enumerate(weights) if weight.shape == shape]
            stacked = torch.stack([updates[number] for number in chosen])
            steps = _orthogonalized(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
            rate = group["lr"] * 0.2 * math.sqrt(max(shape))  # the size of AdamW's updates
            torch._foreach_add_([weights[number] for number in chosen], steps.to(stacked).unbind(), alpha=-rate)


def _orthogonalized(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float) -> Tensor:
    """Newton-Schulz iterations toward the nearest orthogonal matrices, in bfloat16, as torch does for a single one."""
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    x = x / x.flatten(1).norm(dim=1).clamp(min=epsilon)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def layer_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The matrices in the layers of a Hugging Face model, without embeddings, its head or anything around it."""
    models = [model.base_model for model in module.modules() if isinstance(model, PreTrainedModel)]
    lists = [list_ for model in models for list_ in model.modules() if isinstance(list_, nn.ModuleList)]
    parts = [part for list_ in lists for part in list_.modules() if not isinstance(part, nn.Embedding)]
    matrices = [weight for part in parts for weight in part.parameters(recurse=False) if weight.ndim == 2]
    return list({id(matrix): matrix for matrix in matrices}.values())


def _muon(matrices: list[nn.Parameter], **settings: float) -> Optimizer:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise ValueError(
            f"the optimizer muon needs torch 2.9 or newer, got {torch.__version__}; pip install -U torch, or use adamw"
        )
    if not matrices:
        raise ValueError("the optimizer muon is for the matrices of layers, and this network has none; use adamw")
    made: Optimizer = muon(matrices, adjust_lr_fn="match_rms_adamw", **settings)
    return made


def learning_rate(settings: TrainingConfig) -> Callable[[int], float]:
    """The learning rate at a step, by one of transformers' schedules or WSD; there is no state to save."""
    if settings.decay == "wsd":
        return lambda step: settings.learning_rate * _wsd(step + 1, settings)
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(
        settings.decay, stand_in, num_warmup_steps=settings.warmup, num_training_steps=settings.steps + 1
    )
    factor = schedule.lr_lambdas[0]
    return lambda step: settings.learning_rate * float(factor(step + 1))


def _wsd(step: int, settings: TrainingConfig) -> float:
    """Warmup, stable, decay: the factor rises linearly to 1, stays there, and reaches 0 one step after the last."""
    num_decaying = max(1, round(settings.decay_fraction * settings.steps))
    risen, left = step / max(1, settings.warmup), (settings.steps + 1 - step) / (num_decaying + 1)
    return max(0.0, min(risen, 1.0, left))


def weight_decay(settings: TrainingConfig) -> Callable[[int], float]:
    """The weight decay at a step: constant, or linear from the first step to the last; there is no state to save.

    Optimizers multiply it by the learning rate, so it follows that schedule in any case.
    """
    first, last = settings.weight_decay, settings.weight_decay_end
    if last is None:
        return lambda step: first
    return lambda step: first + (last - first) * min(1.0, step / max(1, settings.steps - 1))


def low_precision(settings: TrainingConfig) -> torch.dtype | None:
    """The dtype of most of the computation; None if all of it is in full precision."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision)


def fitting_ema(steps: int) -> float:
    """An EMA decay that suits a run: it averages over the last twentieth, and takes effect after 45 % of the steps.

    The learning rate falls to 0 at the end, so a longer average lags behind: over a ninth of the run (as with 0.9995 in
    2,000 steps), its perplexity was worse than that of the last parameters by 0.4 % for a pretrained network and by 4 %
    from scratch (docs/results/unaveraged).
    """
    return max(0.5, round(1 - 20 / steps, 5))


class EMA:
    """average ← decay · average + (1 - decay) · parameter; each process averages its own shards.

    In update n, the decay is at most (1 + n) / (10 + n), so that the initial parameters are soon forgotten: until the
    configured decay is reached, the average covers about the last ninth of the steps so far.
    """

    @staticmethod
    def step_reached(decay: float) -> int:
        """The first update with the configured decay."""
        return max(1, math.ceil((10 * decay - 1) / (1 - decay) - 1e-6))

    @staticmethod
    def decay_at(step: int, decay: float) -> float:
        """The decay in an update."""
        return min(decay, (1 + step) / (10 + step))

    def __init__(self, module: nn.Module, decay: float):
        self.decay = decay
        self.num_updates = 0
        self.parameters = list(module.parameters())
        self.averages = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average after a step."""
        self.num_updates += 1
        decay = self.decay_at(self.num_updates, self.decay)
        # All tensors in one launch: average ← average + (1 - decay) · (parameter - average).
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        update(list(self.averages.values()), self.parameters, torch.tensor(self.num_updates))

    @contextmanager
    def applied_to(self, module: nn.Module) -> Iterator[None]:
        """Replaces the parameters of the module with their averages while the context is open."""
        own = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        _copy(self.averages, module)
        try:
            yield
        finally:
            _copy(own, module)

    def restore(self, averages: Mapping[str, Tensor], num_updates: int) -> None:
        """Continues from saved averages."""
        self.num_updates = num_updates
        for name, average in self.averages.items():
            average.copy_(distributed_like(averages[name], average))


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(values[name])


# ---- several processes ----------------------------------------------------------------------------------------------


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The parts of a Hugging Face model that are never split, except those that share weights with others."""
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    blocks = unsplit_modules(module)
    return [block for block in blocks if all(uses[id(parameter)] == 1 for parameter in block.parameters())]


def distributed(module: nn.Module, accelerator: Accelerator, *, sharded: bool) -> nn.Module:
    """The module as training calls it: with replicated (DDP) or sharded (FSDP) parameters on several processes."""
    if accelerator.num_processes == 1:
        return module
    if not sharded:
        devices = [accelerator.device] if accelerator.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices)
    for block in blocks_of(module):
        fully_shard(block)
    # The root is resharded after each forward, too: EMA and checkpoints expect shards.
    fully_shard(module, reshard_after_forward=True)
    for method in ("nats", "loss"):  # parameters are gathered only in forward methods
        register_fsdp_forward_method(module, method)
    return module


@contextmanager
def gradient_sync(module: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Exchanges gradients between processes only if enabled, as it should be for the last micro-batch."""
    if isinstance(module, DistributedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
    yield


def full_copy(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; if it is sharded, all processes must call this."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def distributed_like(full: Tensor, pattern: Tensor) -> Tensor:
    """Moves a full tensor to the device of another, and shards it in the same way."""
    if isinstance(pattern, DTensor):
        return distribute_tensor(full.to(pattern.device), pattern.device_mesh, pattern.placements)
    return full.to(pattern.device)


# ---- the size of micro-batches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """The speed of one device at one micro-batch size."""

    micro_tokens: int
    tokens_per_second: float


def measure(
    module: TrainingModule,
    sequences: SequenceDataset,
    settings: TrainingConfig,
    device: torch.device,
    share: int,
    *,
    packed: bool = False,
) -> Measurement:
    """Doubles the micro-batch until it no longer fits or gets faster, or reaches `share`, all that a process gets."""
    module = module.to(device).train()
    optimizer = new_optimizer(module, replace(settings, weight_decay=0.0), device)  # leaves parameters as they are
    ema = EMA(module, settings.ema) if settings.ema else None  # it takes memory, too
    best: Measurement | None = None
    for micro_tokens in [*itertools.takewhile(lambda size: size < share, (1024 * 2**n for n in range(30))), share]:
        try:
            batch = _typical_batch(sequences, micro_tokens, packed=packed)
            speed = _speed(module, optimizer, batch, low_precision(settings), device)
        except torch.OutOfMemoryError:
            break
        if best is not None and speed < 1.05 * best.tokens_per_second:
            break
        best = Measurement(micro_tokens, speed)
    module.zero_grad(set_to_none=True)
    del ema
    gc.collect()
    if best is None:
        raise ValueError(f"a batch of {min(1024, share)} tokens does not fit on {device}; use a smaller network")
    return best


def _typical_batch(sequences: SequenceDataset, micro_tokens: int, *, packed: bool) -> Batch:
    """A batch of so many positions: sequences of the median length or, if packed, of all lengths, as in training."""
    lengths = np.asarray(sequences.lengths)
    if packed:
        count = micro_tokens * len(lengths) // int(lengths.sum())
        indices = np.random.default_rng(0).integers(len(lengths), size=max(1, count))
    else:
        typical = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")
        indices = np.resize(typical, max(1, micro_tokens // max(1, int(np.median(lengths)))))
    batch = Noise(0).stratify(sequences.batch(indices.tolist()))
    return batch.packed() if packed else batch


def _speed(
    module: TrainingModule, optimizer: Optimizer, batch: Batch, low: torch.dtype | None, device: torch.device
) -> float:
    """Positions per second of forward and backward passes, after one to warm up; padding counts unless packed."""
    num_positions = batch.tokens.numel() if batch.packing is None else int(batch.attention_mask.sum())
    batch = batch.to(device)
    for step in range(3):
        if step == 1:
            wait_for(device)
            started = time.perf_counter()
        with torch.autocast(device.type, low, enabled=low is not None):
            module(batch, Noise(0, step), batch.num_tokens).backward()
        module.zero_grad(set_to_none=False)  # gradients stay allocated, as they will be in training
        if step == 0:
            optimizer.step()  # and so does its state
    wait_for(device)
    return 2 * num_positions / (time.perf_counter() - started)


def wait_for(device: torch.device) -> None:
    """Waits until a GPU has finished its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
