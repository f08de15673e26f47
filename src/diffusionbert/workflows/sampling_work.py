"""Generation and scoring workloads for `bench`: ours, decoders with a key-value cache, and bare forward passes.

On a GPU, networks are newly initialized at BERT-base's size; on a CPU, the bundled model is used. A decoder is a new
GPT-2 of the same size, sampled by transformers. Speed does not depend on the values of the parameters, except for
scores, which are estimated until they are precise: these use the bundled model on texts it generated itself.

FLOPs are 2 per parameter and position read; the vocabulary's matrix counts once per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import BertTokenizer, PreTrainedModel

from diffusionbert.data.tokenizer import SPECIAL, Vocabulary
from diffusionbert.diffusion.schedules import Linear, NoiseSchedule
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.generate import generate
from diffusionbert.inference.score import ScoreSettings, score
from diffusionbert.inference.tasks import Task
from diffusionbert.networks.loading import NewBert, NewDecoder
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.samplers.base import SamplerConfig
from diffusionbert.samplers.config import SamplingRequest, parse_sampler
from diffusionbert.training.config import DataConfig, RunConfig
from diffusionbert.training.model_folder import ModelMetadata, token_statistics
from diffusionbert.workflows.timing import Amount, Machine, Program, Work, num_multiplied
from diffusionbert.workflows.training_work import zipf_counts

MAX_POSITIONS = 128


@dataclass(frozen=True)
class Texts:
    """The number of texts, their length in tokens, and the model."""

    sequences: int
    length: int = 64
    size: NewBert | None = NewBert(12, 768, 12, 0.0)
    """The size of a new network; None is the bundled model, on a CPU."""
    vocabulary: int = 30_522
    dtype: torch.dtype | None = None
    """The dtype of our model; None is the default, which on a CPU generates in int8 where that pays off."""

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.length

    @property
    def device(self) -> str:
        """The kind of device to generate them on."""
        return "cpu" if self.size is None else "cuda"

    def describe(self) -> str:
        dtype = "" if self.dtype is None else f", {str(self.dtype).removeprefix('torch.')}"
        return f"{self.sequences} × {self.length}{dtype}"

    def engine(self, machine: Machine, schedule: NoiseSchedule | None = None, *, compile: bool = False) -> Engine:
        """The model, compiled only on a GPU."""
        if self.size is None:
            return load_engine(device=machine.device, dtype=self.dtype)
        words = [*SPECIAL, *(f"w{number}" for number in range(self.vocabulary - len(SPECIAL)))]
        vocabulary = Vocabulary(BertTokenizer(vocab={word: number for number, word in enumerate(words)}))
        statistics = token_statistics(vocabulary, zipf_counts(vocabulary.size) * vocabulary.allowed)
        objective = DiscreteTimeConfig(schedule or Linear(), num_steps=2048)
        config = RunConfig(DataConfig("random", max_length=MAX_POSITIONS), self.size, objective=objective)
        metadata, compile = ModelMetadata(config, vocabulary, statistics), compile and machine.is_gpu
        return Engine(metadata, Path("random"), "random", machine.device, compile=compile)

    def decoder(self, machine: Machine) -> PreTrainedModel:
        """A decoder of the same size."""
        size, vocabulary = self.size, self.vocabulary
        if size is None:
            config = load_engine(device="cpu").network.backbone.config
            size = NewBert(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, 0.0)
            vocabulary = config.vocab_size
        made: Any = NewDecoder(size.layers, size.width, size.heads, 0.0).build(
            vocabulary, MAX_POSITIONS, 0, causal=True
        )
        moved: PreTrainedModel = made.to(machine.device, torch.bfloat16 if machine.is_gpu else None).eval()
        return moved


@dataclass(frozen=True)
class TextWork(Work):
    """Work on texts, on the kind of device they are for."""

    texts: Texts

    def on(self, device: str) -> Work | None:
        return self if device == self.texts.device else None


@dataclass(frozen=True)
class OurSampling(TextWork):
    """Generates texts with `generate`, from request to strings."""

    sampler: str = "exact"
    schedule: NoiseSchedule = field(default_factory=Linear)
    top_k: int | None = None
    top_p: float | None = None
    steps: int = 128
    compile: bool = False
    prompt: str = ""
    """A text to continue; the length is then that of the continuation."""

    def describe(self) -> str:
        kept = "" if self.top_k is None else f", top-k {self.top_k}"
        kept += "" if self.top_p is None else f", top-p {self.top_p}"
        name = "" if self.texts.size is None else f", {self.schedule}"
        how = (", compiled" if self.compile else "") + (", after a prompt" if self.prompt else "")
        return f"{self.texts.describe()}{name}, {self.sampler}{kept}, {self.steps} steps{how}"

    def program(self, machine: Machine) -> Program:
        texts = self.texts
        engine = texts.engine(machine, self.schedule, compile=self.compile and machine.compile)
        request = SamplingRequest(parse_sampler(self.sampler), SamplerConfig(self.steps, 1.0, self.top_k, self.top_p))
        seed = 0

        def step() -> Amount:
            nonlocal seed
            seed += 1
            task = Task(texts.sequences, prompt=self.prompt, max_new_tokens=texts.length, seed=seed)
            num_positions = sum(text.calls * (text.length + 2) for text in generate(engine, task, request))
            flops = _flops(engine.network.backbone, num_positions, texts.num_tokens)
            return Amount(texts.num_tokens, flops)

        return Program(step, _bytes(engine.network.backbone), warm_ups=3)


@dataclass(frozen=True)
class Forwards(TextWork):
    """Bare forward passes of the same network, compiled, with all logits; as many as an exact sample needs at most."""

    number: int

    def describe(self) -> str:
        return f"{self.texts.describe()}, {self.number} forward passes with all logits"

    def program(self, machine: Machine) -> Program:
        texts = self.texts
        backbone: Any = texts.engine(machine).network.backbone
        backbone.to(torch.bfloat16 if machine.is_gpu else None)
        tokens = torch.full((texts.sequences, texts.length + 2), 9, device=machine.device)
        seen = torch.ones_like(tokens)
        model = torch.compile(backbone, mode="reduce-overhead") if machine.compile else backbone

        @torch.no_grad()
        def step() -> Amount:
            for _ in range(self.number):
                model(input_ids=tokens, attention_mask=seen)
            return Amount(texts.num_tokens, self.number * _flops(backbone, tokens.numel(), tokens.numel()))

        return Program(step, _bytes(backbone), warm_ups=3)


@dataclass(frozen=True)
class DecoderSampling(TextWork):
    """Generates as many tokens with a decoder and a key-value cache, using transformers' `generate`."""

    def describe(self) -> str:
        return f"{self.texts.describe()}, GPT-2 with a cache"

    def program(self, machine: Machine) -> Program:
        texts = self.texts
        model: Any = texts.decoder(machine)
        begin = torch.ones(texts.sequences, 1, dtype=torch.long, device=machine.device)
        given = {"attention_mask": torch.ones_like(begin), "max_new_tokens": texts.length, "pad_token_id": 0}

        @torch.no_grad()
        def step() -> Amount:
            model.generate(begin, do_sample=True, top_k=0, use_cache=True, **given)
            return Amount(texts.num_tokens, _flops(model, texts.num_tokens, texts.num_tokens))

        return Program(step, _bytes(model), warm_ups=3)


@dataclass(frozen=True)
class OurScoring(TextWork):
    """Scores texts of the bundled model, each until it is precise."""

    def describe(self) -> str:
        return f"{self.texts.describe()} or so, the bound of each to ±25 %"

    def program(self, machine: Machine) -> Program:
        engine, texts = self.texts.engine(machine), self.texts
        task = Task(texts.sequences, (texts.length // 2, texts.length * 3 // 2))
        few = SamplingRequest(parse_sampler("exact"), SamplerConfig(8))
        lines = [text.text for text in generate(engine, task, few)]
        num_tokens = sum(len(tokens) - 2 for tokens in engine.vocabulary.encode(lines))

        def step() -> Amount:
            found = [one for one in score(engine, lines, ScoreSettings()) if one is not None]
            read = sum(one.num_draws * (one.num_tokens + 2) for one in found)
            # Half of the tokens are masked on average.
            num_masked = sum(one.num_draws * one.num_tokens // 2 for one in found)
            return Amount(num_tokens, _flops(engine.network.backbone, read, num_masked))

        return Program(step)


@dataclass(frozen=True)
class DecoderScoring(TextWork):
    """Computes the exact NLL of as many tokens with one forward pass of a decoder over each text."""

    def describe(self) -> str:
        return f"{self.texts.sequences} texts, NLL of a GPT-2"

    def program(self, machine: Machine) -> Program:
        texts = self.texts
        model: Any = texts.decoder(machine)
        tokens = torch.randint(1, model.config.vocab_size, (texts.sequences, texts.length + 1), device=machine.device)

        @torch.no_grad()
        def step() -> Amount:
            for part in torch.split(tokens, 16):
                model(input_ids=part, labels=part)
            return Amount(texts.num_tokens, _flops(model, tokens.numel(), tokens.numel()))

        return Program(step)


def _flops(backbone: PreTrainedModel, num_positions: int, num_predicted: int) -> float:
    head: int = backbone.config.vocab_size * backbone.config.hidden_size
    return 2.0 * (num_positions * num_multiplied(backbone) + num_predicted * head)


def _bytes(backbone: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in backbone.parameters())


BASE = Texts(32)
CPU = replace(BASE, length=24, size=None)
PROMPT = "the king was born in"
