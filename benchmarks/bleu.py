"""Compares BLEU-4 with NLTK's at the paper's size of 1,000 samples: seconds, and the largest difference. Needs nltk.

    python benchmarks/bleu.py            # NLTK on 20 samples, its time extrapolated
    python benchmarks/bleu.py --full     # NLTK on all samples: takes minutes

Sentences are synthetic. Ours is timed from strings to scores, NLTK's on sentences already split into words.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
from nltk.translate.bleu_score import sentence_bleu

from diffusionbert.evaluation.metrics import bleu4, self_bleu4


def zipf(number: int, seed: int, words: int = 30_000) -> list[str]:
    """Sentences of words with frequencies 1 / rank and normally distributed lengths around 25."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, words + 1)
    lengths = generator.normal(25, 8, number).round().clip(1).astype(int)
    drawn = generator.choice(words, int(lengths.sum()), p=weights / weights.sum())
    return [" ".join(map(str, sentence)) for sentence in np.split(drawn, np.cumsum(lengths)[:-1])]


def compare(name: str, samples: list[str], references: list[str] | None, subset: int) -> None:
    """Prints both times, their ratio and the largest difference; self-BLEU without references."""
    started = time.perf_counter()
    scores = self_bleu4(samples) if references is None else bleu4(samples, references)
    ours = time.perf_counter() - started
    split = [sentence.split() for sentence in (samples if references is None else references)]
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NLTK warns about every zero
        expected = [
            sentence_bleu(split if references else split[:at] + split[at + 1 :], sample.split())
            for at, sample in enumerate(samples[:subset])
        ]
    theirs = (time.perf_counter() - started) * len(samples) / subset
    difference = np.abs(scores.values[:subset] - expected).max()
    print(f"{name}, {len(samples):,} samples: ours {ours:.3f} s, NLTK {theirs:,.1f} s ({theirs / ours:,.0f} times)")
    print(f"  largest difference over {subset} samples: {difference:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="score all samples with NLTK")
    subset = 1000 if parser.parse_args().full else 20
    compare("BLEU-4", zipf(1000, seed=0), zipf(10_000, seed=1), subset)
    compare("self-BLEU-4", zipf(1000, seed=0), None, subset)
