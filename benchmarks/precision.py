"""Measures what bfloat16 and int8 cost and save on a CPU, with the bundled model.

    python benchmarks/precision.py docs/performance/precision.json --corpus wiki.valid.txt plain.valid.txt

In 300 sentences of each corpus, half of the tokens are masked, the same ones for all types. The script reports nats per
masked token, the divergence from float32 per masked position, and the seconds of a call, the best of several turns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import diffusionbert
from diffusionbert.data.canvas import batch_of
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.diffusion.tokens import nats_of
from diffusionbert.storage.files import write_json

NUM_SENTENCES, AT_ONCE, ROUNDS, LENGTH = 300, 25, 8, 26
SIZES = (1, 8, 32)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def masked_log_probs(model: diffusionbert.Model, x0: Batch) -> tuple[Any, Any]:
    """log f at masked positions, and their nats."""
    is_word = model.engine.vocabulary.allowed[x0.tokens]
    masked = is_word & (Noise(0).per_position(x0, Purpose.CORRUPT) < 0.5)
    tokens = x0.tokens.masked_fill(masked, model.tokenizer.mask_token_id)
    log_f = model.engine.network(tokens, x0.attention_mask, torch.full((len(tokens),), 0.5).double(), masked)
    return log_f.double(), nats_of(log_f, x0.tokens, masked)[masked]


def costs(models: dict[str, diffusionbert.Model], texts: list[str]) -> dict[str, dict[str, float]]:
    vocabulary, found = models["float32"].engine.vocabulary, {name: [0.0, 0.0] for name in models}
    num_masked = 0
    for start in range(0, len(texts), AT_ONCE):
        x0 = batch_of(vocabulary, vocabulary.encode(texts[start : start + AT_ONCE]))
        expected, _ = masked_log_probs(models["float32"], x0)
        num_masked += len(expected)
        for name, model in models.items():
            log_f, nats = masked_log_probs(model, x0)
            divergence = torch.where(expected.isinf(), 0.0, expected.exp() * (expected - log_f))
            found[name] = [found[name][0] + float(nats.sum()), found[name][1] + float(divergence.sum())]
    return {
        name: {"nats_per_token": nats / num_masked, "divergence": divergence / num_masked}
        for name, (nats, divergence) in found.items()
    }


def seconds(models: dict[str, diffusionbert.Model]) -> dict[str, dict[int, float]]:
    """The seconds of a call with one target position per sequence, measured in turns."""
    best = {name: dict.fromkeys(SIZES, float("inf")) for name in models}
    for size in SIZES:
        tokens = torch.full((size, LENGTH), models["float32"].tokenizer.mask_token_id)
        query = tokens, None, torch.ones(size).double(), torch.arange(size) * LENGTH + 1
        for _ in range(ROUNDS):
            for name, model in models.items():
                started = time.perf_counter()
                model.engine.network.log_probs_at(*query)  # type: ignore[attr-defined]
                best[name][size] = min(best[name][size], time.perf_counter() - started)
    return best


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("--corpus", nargs="+", type=Path, required=True)
    options = parser.parse_args()
    models = {name: diffusionbert.load(device="cpu", dtype=dtype) for name, dtype in TYPES.items()}
    figures: dict[str, Any] = {"seconds_per_call": seconds(models), "threads": torch.get_num_threads()}
    for path in options.corpus:
        texts = path.read_text(encoding="utf-8").lower().splitlines()[:NUM_SENTENCES]
        figures[path.name] = costs(models, texts)
    write_json(options.json, figures)
    print(options.json.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
