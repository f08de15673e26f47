"""Prints the sampler figures of docs/mathematics.md: the time of exact samplers, the error of inexact ones.

python benchmarks/samplers.py          # about a minute on one thread
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from languages import Bayes, Language
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear, Spindle, TokenInformation
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic
from diffusionbert.samplers import (
    Sampler,
    SamplerConfig,
    SamplingContext,
    State,
    last_state,
    parse_sampler,
    sample,
)
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.exact import SkipExact
from diffusionbert.samplers.first_hitting import FirstHitting

VOCABULARY, POSITIONS, SEQUENCES, STEPS = 16_000, 24, 8, 512
LANGUAGE = Language.random(3, 3, seed=0)
SAMPLES, FEW_STEPS = 100_000, 8


def timings() -> Table:
    """Seconds on one thread, with a network of random parameters."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    mask = VOCABULARY - 1
    allowed = torch.arange(VOCABULARY) != mask
    network = Denoiser(BertForMaskedLM(config), TimeAgnostic(), allowed).eval()
    tokens = torch.full((SEQUENCES, POSITIONS), mask)
    canvas = Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))
    information = TokenInformation.from_counts((1e9 / torch.arange(1, VOCABULARY + 1)).long(), allowed=allowed)
    table = Table(title=f"{POSITIONS} positions, {SEQUENCES} sequences, {STEPS} steps, V = {VOCABULARY:,}, one thread")
    for column in ("schedule", "sampler", "seconds", "calls per sequence"):
        table.add_column(column)
    for schedule, faster in ((Linear(), FirstHitting), (Spindle(0.3), SkipExact)):
        process = Absorbing(schedule, mask, information)
        for kind in (Ancestral, faster):
            begin = time.perf_counter()
            last = last_state(drawn(kind(), process, STEPS, network, canvas))
            seconds = time.perf_counter() - begin
            table.add_row(type(schedule).__name__, kind.__name__, f"{seconds:.2f}", f"{last.calls.double().mean():.1f}")
    return table


def distances() -> Table:
    """Total variation between samples and the language, with the Bayes-optimal network."""
    process = Absorbing(Linear(), LANGUAGE.mask_id, LANGUAGE.information())
    samplers = {
        "ancestral": "ancestral",
        "renoising": "renoising",
        "remasking, cap 0.3": "remasking:eta=0.3",
        "margin, one position at a time": "margin",
        "confidence, by probability": "confidence",
        "mask-predict": "mask-predict",
    }
    network = Bayes(LANGUAGE, process)
    canvas = LANGUAGE.batch(torch.full((SAMPLES, LANGUAGE.length), LANGUAGE.mask_id))
    table = Table(title=f"A random language: V = {LANGUAGE.num_words}, L = {LANGUAGE.length}; {FEW_STEPS} steps")
    for column in ("sampler", "total variation"):
        table.add_column(column)
    for name, sampler in samplers.items():
        last = last_state(drawn(parse_sampler(sampler), process, FEW_STEPS, network, canvas))
        table.add_row(name, f"{total_variation(last.tokens):.3f}")
    exact = torch.multinomial(LANGUAGE.probabilities, SAMPLES, True, generator=torch.Generator().manual_seed(0))
    table.add_row("as many sentences of the language", f"{total_variation(LANGUAGE.sentences[exact]):.3f}")
    return table


def drawn(sampler: Sampler, process: Absorbing, steps: int, network: Any, canvas: Batch) -> Iterator[State]:
    """The states of a sampler with a time-agnostic network."""
    config = SamplerConfig(steps)
    context = SamplingContext(mask_id=process.mask_id, process=process, config=config, time_agnostic=True)
    return sample(sampler, context, network, canvas, seed=0)


def total_variation(tokens: Tensor) -> float:
    """Half the sum of absolute differences of probabilities."""
    powers = LANGUAGE.num_words ** torch.arange(LANGUAGE.length - 1, -1, -1)
    found = torch.bincount(tokens @ powers, minlength=len(LANGUAGE.sentences)).double() / len(tokens)
    return float((found - LANGUAGE.probabilities).abs().sum() / 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    console = Console()
    console.print(distances())
    console.print(timings())
