"""Training workloads for `bench`: a step of our trainer, and a hand-written step that does the same.

Sequences have one length, or mixed lengths as in text. Tokens are counted without padding. FLOPs are 6 per parameter
and token; the vocabulary's matrix counts at masked positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from diffusionbert.data.corpus import Report
from diffusionbert.data.dataset import Encoded
from diffusionbert.diffusion.schedules import Linear, NoiseSchedule
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import TokenStatistics
from diffusionbert.likelihood.estimate import SequenceDataset
from diffusionbert.networks.loading import NewBert, NewModernBert, NewNetwork
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.training.batches import FixedSequences, TokenBudget
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.model_folder import backbone_of
from diffusionbert.training.optim import layer_matrices
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
        flops = self.num_tokens * _flops_per_token(backbone)
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
        size = self.size
        settings = replace(_settings(machine), batching=FixedSequences(size.sequences), ema=size.ema)
        objective = DiscreteTimeConfig(size.schedule, num_steps=2048, hybrid=size.hybrid)
        data = DataConfig("random", vocabulary=size.vocabulary, max_length=size.length)
        backbone = size.backbone()
        config = RunConfig(data, objective=objective, training=settings)
        steps = _trainer(config, RandomSequences(size), machine, backbone).steps()
        return size.program(lambda: next(steps), backbone)


@dataclass(frozen=True)
class PresetTraining(Work):
    """A step of our trainer as a preset has it, on sequences of mixed lengths."""

    config: RunConfig
    """A new network, and batches of a number of positions."""

    def describe(self) -> str:
        network, training = self.config.backbone, self.config.training
        assert isinstance(network, NewNetwork)
        assert isinstance(training.batching, TokenBudget)
        how = "packed" if training.packing else "padded"
        return f"{network.label} {network.layers}×{network.width}, {training.batching.tokens:,} positions, {how}"

    def on(self, device: str) -> Work:
        training = self.config.training
        few = training if device == "cuda" else replace(training, batching=TokenBudget(1024))
        return replace(self, config=replace(self.config, training=few))

    def program(self, machine: Machine) -> Program:
        precision = self.config.training.precision if machine.is_gpu else "no"
        settings = replace(self.config.training, precision=precision, compile=machine.compile)
        config = replace(self.config, training=settings)
        trainer = _trainer(config, mixed_sequences(config.data), machine)
        batches, backbone = trainer.batches(), backbone_of(trainer.module)
        flops = _flops_per_token(backbone)

        def step() -> Amount:
            batch = next(batches)
            trainer.step(batch)
            num_special = 2 * sum(len(part.tokens) for part in batch.micro_batches)  # [CLS] and [SEP]
            num_tokens = batch.num_tokens + num_special
            return Amount(num_tokens, num_tokens * flops)

        num_parameters = sum(parameter.numel() for parameter in backbone.parameters())
        kept = (3 if settings.ema is None else 4) * num_parameters
        if settings.optimizer == "muon":  # it has one moment
            kept -= sum(matrix.numel() for matrix in layer_matrices(backbone))
        return Program(step, 4 * kept, WARM_UPS)


def _trainer(
    config: RunConfig, sequences: SequenceDataset, machine: Machine, backbone: PreTrainedModel | None = None
) -> Trainer:
    size, settings = int(config.data.vocabulary), config.training
    statistics = TokenStatistics(MASK, PAD, torch.arange(size) >= NUM_SPECIAL, (), zipf_counts(size))
    module = config.make_module(statistics, backbone)
    accelerator = make_accelerator(settings, None, cpu=not machine.is_gpu)
    folder = RunFolder(machine.folder)
    return Trainer(module, sequences, sequences, settings, folder, lambda weights, path: None, accelerator)


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


def _flops_per_token(backbone: PreTrainedModel) -> float:
    # Half of the positions are masked on average.
    head: int = backbone.config.vocab_size * backbone.config.hidden_size
    return 6 * (num_multiplied(backbone) + head / 2)


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


def mixed_sequences(data: DataConfig, count: int = 250_000) -> Encoded:
    """An encoded corpus of random tokens between `[CLS]` and `[SEP]`, with lengths as in text: 23 tokens on average."""
    size, generator = int(data.vocabulary), np.random.default_rng(0)
    lengths = generator.lognormal(3.03, 0.5, count).astype(np.int64).clip(3, data.max_length)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = generator.integers(NUM_SPECIAL, size, offsets[-1], np.uint16)
    tokens[offsets[:-1]], tokens[offsets[1:] - 1] = CLS, SEP
    counts = torch.from_numpy(np.bincount(tokens, minlength=size))
    histogram = torch.from_numpy(np.bincount(lengths - 2, minlength=data.max_length + 1))
    special = torch.arange(size) < NUM_SPECIAL
    return Encoded(Path("random"), tokens, offsets, special, PAD, counts, histogram, Report(count), "random")


def zipf_counts(num_tokens: int) -> Tensor:
    """The number of occurrences of each token under Zipf's law."""
    return (1e9 / torch.arange(1, num_tokens + 1)).long()
