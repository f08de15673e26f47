"""Training workloads for `bench`: a step of our trainer, and a hand-written step that does the same.

Tokens are counted without padding. FLOPs are 6 per parameter and token; the vocabulary's matrix counts at masked
positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from diffusionbert.diffusion.schedules import Linear, NoiseSchedule
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.networks.loading import NewBert, NewModernBert
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.training.batches import FixedSequences
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.run import make_accelerator
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.training.trainer import Trainer
from diffusionbert.workflows.timing import Amount, Machine, Program, Work, num_multiplied

PAD, CLS, SEP, MASK = range(4)
NUM_SPECIAL = 5
WARM_UPS = 5
"""Steps until compilation, allocation and graph capture are done."""


@dataclass(frozen=True)
class TrainingSize:
    """The size of a training step."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    dropout: float = 0.1
    vocabulary: int = 30_522
    sequences: int = 256
    length: int = 128
    schedule: NoiseSchedule = field(default_factory=Linear)
    ema: float | None = None
    hybrid: float = 0.0
    is_modern: bool = False
    """Whether the network is a ModernBERT instead of a BERT."""

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.length

    def backbone(self) -> PreTrainedModel:
        """A new network."""
        family = NewModernBert if self.is_modern else NewBert
        size = family(self.layers, self.width, self.heads, self.dropout)
        return size.build(self.vocabulary, self.length + 1, PAD, causal=False)

    def describe(self) -> str:
        name = "ModernBERT" if self.is_modern else "BERT"
        return f"{name} {self.layers}×{self.width}, {self.sequences} × {self.length}, {self.schedule}"

    def on(self, device: str) -> TrainingSize | None:
        """A size for this kind of device, small enough for two cores on a CPU; None if it is for GPUs only."""
        if device == "cuda":
            return self
        return None if self.width > BUNDLED.width else replace(self, sequences=16, length=64)

    def program(self, step: Callable[[], object], backbone: PreTrainedModel) -> Program:
        """A program of this size, from its step and the network it trains."""
        # Half of the positions are masked on average.
        flops = 6 * self.num_tokens * (num_multiplied(backbone) + self.vocabulary * self.width / 2)
        num_parameters = sum(parameter.numel() for parameter in backbone.parameters())
        kept = (12 if self.ema is None else 16) * num_parameters  # parameters, two moments, EMA

        def counted() -> Amount:
            step()
            return Amount(self.num_tokens, flops)

        return Program(counted, kept, WARM_UPS)


BASE, BUNDLED = TrainingSize(), TrainingSize(7, 384, 6, 0.0, 16_000, sequences=512, ema=0.999)  # as in the presets


def _settings(machine: Machine) -> TrainingConfig:
    return TrainingConfig(learning_rate=1e-5, precision="bf16" if machine.is_gpu else "no", compile=machine.compile)


@dataclass(frozen=True)
class TrainingWork(Work):
    """A training step of a given size."""

    size: TrainingSize

    def describe(self) -> str:
        return self.size.describe()

    def on(self, device: str) -> Work | None:
        size = self.size.on(device)
        return None if size is None else replace(self, size=size)


@dataclass(frozen=True)
class OurTraining(TrainingWork):
    """A step of our trainer."""

    def program(self, machine: Machine) -> Program:
        size, settings = self.size, _settings(machine)
        counts = zipf_counts(size.vocabulary)
        statistics = TokenStatistics(MASK, PAD, torch.arange(size.vocabulary) >= NUM_SPECIAL, (), counts)
        objective = DiscreteTimeConfig(size.schedule, num_steps=2048, hybrid=size.hybrid)
        config = RunConfig(DataConfig("random", max_length=size.length), objective=objective)
        backbone = size.backbone()
        module = config.make_module(statistics, backbone)
        settings = replace(settings, batching=FixedSequences(size.sequences), ema=size.ema)
        data, folder = RandomSequences(size), RunFolder(machine.folder)
        accelerator = make_accelerator(settings, None, cpu=not machine.is_gpu)
        trainer = Trainer(module, data, data, settings, folder, lambda weights, path: None, accelerator)
        steps = trainer.steps()
        return size.program(lambda: next(steps), backbone)


@dataclass(frozen=True)
class HandWrittenTraining(TrainingWork):
    """A hand-written step: encoder and cross-entropy at masked positions, compiled together; AdamW, clipping, EMA."""

    def program(self, machine: Machine) -> Program:
        size, settings, device = self.size, _settings(machine), machine.device
        model: Any = size.backbone()
        model.to(device).train()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=device.type == "cuda")
        averages = [parameter.detach().clone() for parameter in parameters]
        tokens = torch.from_numpy(RandomSequences(size, size.sequences).tokens).to(device)
        seen = torch.ones_like(tokens)

        def loss(masked: Tensor, positions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            hidden = model.base_model(input_ids=masked, attention_mask=seen).last_hidden_state
            hidden = hidden.flatten(0, 1).index_select(0, positions)[None]
            logits = model.decoder(model.head(hidden)) if size.is_modern else model.cls(hidden)
            nats = functional.cross_entropy(logits[0].float(), labels, reduction="none")
            return (weights * nats).sum() / tokens.numel()

        compiled: Any = torch.compile(loss, dynamic=True) if settings.compile else loss
        low = torch.bfloat16 if settings.precision == "bf16" else None

        def step() -> None:
            times = torch.rand(len(tokens), 1, device=device)
            mask = torch.rand(tokens.shape, device=device) < times
            positions = mask.flatten().nonzero().squeeze(1)
            weights = (1 / times).expand(tokens.shape).flatten()[positions]
            labels = tokens.flatten()[positions]
            with torch.autocast(device.type, low, enabled=low is not None):
                value = compiled(tokens.masked_fill(mask, MASK), positions, labels, weights)
            value.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if size.ema is not None:
                torch._foreach_lerp_(averages, parameters, 1 - size.ema)

        return size.program(step, model)


class RandomSequences:
    """A dataset of sequences of one length, with random tokens between `[CLS]` and `[SEP]`."""

    def __init__(self, size: TrainingSize, count: int = 4096):
        generator = np.random.default_rng(0)
        self.tokens = generator.integers(NUM_SPECIAL, size.vocabulary, (count, size.length))
        self.tokens[:, 0], self.tokens[:, -1] = CLS, SEP
        self.lengths = np.full(count, size.length)

    def batch(self, indices: Sequence[int]) -> Batch:
        tokens = torch.from_numpy(self.tokens[np.asarray(indices)])
        return replace(Batch.of(tokens, tokens >= NUM_SPECIAL), example=torch.tensor(indices))


def zipf_counts(num_tokens: int) -> Tensor:
    """The number of occurrences of each token under Zipf's law."""
    return (1e9 / torch.arange(1, num_tokens + 1)).long()
