"""Measures training steps of the core: tokens per second and memory, by schedule and time conditioning.

    python benchmarks/training_step.py                                          # a tiny BERT on this machine
    python benchmarks/training_step.py --device cuda --size base --batch 256    # BERT-base in bfloat16

Tokens are positions of the batch, without padding. Random parameters; the vocabulary is BERT's 30,522.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import BertConfig, BertForMaskedLM

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.rng import Noise
from diffusionbert.diffusion.schedules import (
    Linear,
    Mean,
    NoiseSchedule,
    Spindle,
    TokenInformation,
    uniform_grid,
)
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import (
    LayerwiseTime,
    PrefixTime,
    SinusoidalTime,
    TimeAgnostic,
    TimeConditioning,
)
from diffusionbert.objectives.base import TrainingModule
from diffusionbert.objectives.discrete_time import DiscreteTime

VOCABULARY, MASK = 30_522, 103
SIZES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}


def conditioning(name: str, backbone: BertForMaskedLM) -> TimeConditioning:
    if name == "prefix":
        return PrefixTime(backbone, num_steps=2048)
    if name == "layer-wise":
        return LayerwiseTime(backbone, SinusoidalTime(backbone.config.hidden_size))
    return TimeAgnostic()


def build(size: str, schedule: NoiseSchedule, time_conditioning: str) -> TrainingModule:
    counts = (1e9 / torch.arange(1, VOCABULARY + 1)).long()  # Zipf's law
    allowed = torch.arange(VOCABULARY) > 998
    process = Absorbing(schedule, MASK, TokenInformation.from_counts(counts, allowed=allowed))
    backbone = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SIZES[size]))
    grid = uniform_grid(2048)
    network = Denoiser(backbone, conditioning(time_conditioning, backbone), allowed)
    return TrainingModule(network, DiscreteTime(process, grid))


def measure(module: TrainingModule, batch: Batch, device: torch.device, steps: int) -> tuple[float, float]:
    """Tokens per second and peak memory in GiB."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps + 3):
        if step == 3:
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = module(batch, Noise(0, step), batch.num_tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not bool(torch.isfinite(loss)):
        raise RuntimeError(f"the loss became {float(loss)}")
    elapsed = time.perf_counter() - started  # isfinite has waited for the device
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return steps * batch.tokens.numel() / elapsed, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    tokens = torch.randint(999, VOCABULARY, (options.batch, options.length))
    batch = Noise(0).stratify(Batch.of(tokens, torch.ones_like(tokens, dtype=torch.bool))).to(device)
    print(f"{options.size} BERT, batch {options.batch} × {options.length}, {device}, torch {torch.__version__}")
    print(f"{'schedule':24} {'time':12} {'tokens/s':>10} {'GiB':>6}")
    for name, schedule in (
        ("linear", Linear()),
        ("spindle, corpus mean", Spindle(0.3)),
        ("spindle, sentence mean", Spindle(0.3, Mean.SENTENCE, floor=0.05)),
    ):
        for time_conditioning in ("agnostic", "prefix", "layer-wise"):
            module = build(options.size, schedule, time_conditioning).to(device).train()
            speed, memory = measure(module, batch, device, options.steps)
            print(f"{name:24} {time_conditioning:12} {speed:10,.0f} {memory:6.1f}", flush=True)


if __name__ == "__main__":
    main()
