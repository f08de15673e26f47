"""Evaluations and runs that nobody made, as small as the page of results can read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from diffusionbert.assessment.report import _CARD, _READ
from diffusionbert.checkpoints import save_tensors, write_json
from diffusionbert.experiments import Data, Experiment, to_json
from diffusionbert.training.settings import Training

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "results"), str(BENCHMARKS)]  # their scripts are no package

NUM_SENTENCES, NUM_TOKENS = 60, 20
KINDS = {"grid": "bound", "continuous": "bound", "vectors": "bound", "exact": "exact"}


def evaluate(
    root: Path, place: str, nats: float, way: str = "grid", kind: str | None = None, bleu: float = 0.3
) -> None:
    """Writes an evaluation whose sentences cost about so many nats a token; `place` is its folder and its row."""
    chance = np.random.default_rng(len(place))
    folder, key = place.split("/")
    path = root / folder / "evaluations" / key
    path.mkdir(parents=True)
    costs = NUM_TOKENS * (nats + 0.02 * chance.standard_normal(NUM_SENTENCES) + np.linspace(-1, 1, NUM_SENTENCES))
    count = torch.full((NUM_SENTENCES,), NUM_TOKENS)
    samples = bleu + 0.02 * chance.standard_normal(200)
    save_tensors(
        {
            "example": torch.arange(NUM_SENTENCES),
            **{name: count.clone() for name in ("tokens", "words", "bytes")},
            f"nats.{way}": torch.tensor(costs),
            f"draw_variance.{way}": torch.ones(NUM_SENTENCES),
            "bleu4": torch.tensor(samples),
            "self_bleu4": torch.tensor(samples[::-1] / 2),
        },
        path / "scores.safetensors",
    )
    protocol = dict.fromkeys(_CARD) | {"num_draws": 4, "strata": 2}
    card = {"likelihood": kind or KINDS[way], "protocol": protocol, "ci95": {}}
    report = {key: dict.fromkeys(inner) for key, inner in _READ.items()} | {"format": 1, "likelihoods": {way: card}}
    report["sampling"] |= {"number": 200}
    write_json(path / "evaluation.json", report)
    (path / "samples.txt").write_text("a sample .\n" * 400)


def train(root: Path, place: str, validations: list[float]) -> None:
    """Writes a finished run with validations at evenly spaced steps."""
    folder, name = place.split("/")
    path = root / folder / "runs" / name
    path.mkdir(parents=True)
    last = 10 * (len(validations) - 1)
    write_json(path / "experiment.json", to_json(Experiment(Data("text/news.txt"), training=Training(steps=last))))
    events = [
        {"step": 10 * at, "validation_nats_per_token": nats, "validation_standard_error": 0.01, "likelihood": "bound"}
        for at, nats in enumerate(validations)
    ]
    losses = [
        {"step": step, "loss": 1.0, "tokens": 100 * step, "tokens_per_second": 50.0 if step > 1 else 5.0}
        for step in range(1, last + 1, 3)
    ]
    (path / "log.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in [*losses, *events]))
