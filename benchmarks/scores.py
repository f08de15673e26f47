"""Measures how reproducibly `score` ranks sentences (two seeds) and how often its intervals cover (many seeds).

python benchmarks/scores.py news.test.txt --sentences 200 --seeds 45        # a minute on a GPU, an hour on a CPU

Prints Spearman's correlation of nats per token between two seeds, the work of the network, and the fraction of 95 %
intervals that contain the mean over all seeds, which is taken as the truth.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import diffusionbert
from diffusionbert.inference.score import ScoreSettings, score
from diffusionbert.inference.tasks import TextScore
from diffusionbert.likelihood.sentence import SentenceBudget

ENGINE = diffusionbert.load().engine
SHAPES: list[tuple[int, int]] = []
ENGINE.network.register_forward_pre_hook(lambda _, inputs: SHAPES.append(tuple(inputs[0].shape)))  # type: ignore[attr-defined]


def scored(texts: list[str], precision: float, seed: int) -> list[TextScore]:
    found = score(ENGINE, texts, ScoreSettings(SentenceBudget(precision=precision, seed=seed)))
    return [one for one in found if one is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--precision", type=float, default=SentenceBudget.precision)
    options = parser.parse_args()
    lines = [line for line in options.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    runs = [scored(lines[: options.sentences], options.precision, seed) for seed in range(options.seeds)]
    per_token = [np.argsort(np.argsort([one.nats_per_token for one in run])) for run in runs[:2]]
    print(f"Spearman between two seeds: {np.corrcoef(*per_token)[0, 1]:.4f}")
    sequences, positions = sum(size for size, _ in SHAPES), sum(size * length for size, length in SHAPES)
    per_run = (number / len(runs) for number in (len(SHAPES), sequences, positions))
    print("per seed: {:.0f} calls, {:.0f} sequences, {:.0f} positions".format(*per_run))
    nats = np.array([[one.nats for one in run] for run in runs])
    low, high = (np.array([[one.ci95[end] for one in run] for run in runs]) for end in (0, 1))
    covered = ((low <= nats.mean(axis=0)) & (nats.mean(axis=0) <= high)).mean(axis=0)
    error = 1.96 * covered.std() / len(covered) ** 0.5
    print(f"coverage of 95 % intervals: {covered.mean():.4f} ± {error:.4f}; lowest end {low.min():.2f}")


if __name__ == "__main__":
    main()
