"""How loose the bound of a diffusion model is: mixtures of random orders, whose likelihoods are exact.

    python benchmarks/random_orders.py docs/results/second/random_orders.json TEXT...

Diffusion generates in a random order σ, so its likelihood is p(x) = E p(x | σ), and its bound averages outside the
logarithm: E[-log p(x | σ)]. A mixture of K orders lies between the two (`diffusionbert/likelihood/orders.py`). The nats
of each text in each of 64 orders are computed once; their mean estimates the bound, and the figure for K orders is the
mean over the 64 / K groups of K orders. Left to right and lowest entropy first are computed beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from released_spindle import compared

from diffusionbert.evaluation.dataset import open_evaluation_set
from diffusionbert.evaluation.result import Weights
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.score import encode_texts
from diffusionbert.likelihood.estimate import count_words
from diffusionbert.likelihood.intervals import Numbers
from diffusionbert.likelihood.orders import Order, order_nats, random_orders_nats
from diffusionbert.storage.files import write_json
from diffusionbert.training.model_folder import BUNDLED


def measure(
    output: tyro.conf.Positional[Path],
    texts: tyro.conf.Positional[tuple[Path, ...]],
    model: str = str(BUNDLED),
    sentences: int = 60,
    orders: int = 64,
) -> None:
    """Score texts in random and in fixed orders, and write the figures.

    Args:
        output: The JSON file to write.
        texts: Text files, one sentence per line.
        model: A run directory or model folder: time-agnostic, trained with the linear schedule.
        sentences: The number of sentences of each text.
        orders: The number of random orders, a power of 2.
    """
    if orders < 1 or orders.bit_count() != 1:
        raise SystemExit(f"--orders must be a power of 2, got {orders}")
    engine, rows = load_engine(model, dtype=torch.int8), list[dict[str, Any]]()  # 0.4 of the time on a CPU
    for text in texts:
        chosen = open_evaluation_set(engine, str(text), sentences=sentences).scored
        words = np.array([count_words(one) for one in chosen], dtype=np.float64)
        found = compared(dict(_nats(engine, chosen, orders)), words, "bound")
        rows.append({"text": text.name.partition(".txt")[0], "by": "model", "quantities": found})
        weights = Weights.of(engine.folder).sha256
        write_json(output, {"sentences": sentences, "number": orders, "weights": weights, "rows": rows})
        shown = (f"{key} {own['perplexity']:.1f} ({own['change']:+.1%})" for key, own in found.items())
        print(f"{rows[-1]['text']}: {', '.join(shown)}", flush=True)


def _nats(engine: Engine, texts: Sequence[str], orders: int) -> Iterator[tuple[str, Numbers]]:
    """The nats of each text: the bound, mixtures of K random orders, and fixed orders."""
    network, mask_id = engine.masked_network, engine.vocabulary.mask_id
    assert network is not None
    sequences = encode_texts(engine, texts)
    batches = [sequences.batch([index]) for index in range(len(texts))]
    drawn = np.empty((len(texts), orders))
    for index, x0 in enumerate(batches):
        drawn[index] = [float(nats.sum()) for nats in random_orders_nats(network, x0, mask_id, orders)]
        print(f"{index + 1} of {len(texts)} sentences", end="\r", flush=True)
    yield "bound", drawn.mean(axis=1)
    for number in [2**power for power in range(1, orders.bit_length())]:
        groups = drawn.reshape(len(texts), -1, number)
        mixed = math.log(number) - np.logaddexp.reduce(-groups, axis=2)
        yield f"random-{number}", mixed.mean(axis=1)
    for order in (Order.LEFT_TO_RIGHT, Order.ENTROPY):
        yield order.value, np.array([float(order_nats(network, x0, mask_id, order).sum()) for x0 in batches])


if __name__ == "__main__":
    tyro.cli(measure, description=__doc__)
