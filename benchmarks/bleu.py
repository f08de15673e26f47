"""Measures BLEU-4 against NLTK's: seconds, ratio and largest difference, at the paper's size of 1,000 samples.

    python benchmarks/bleu.py                                                   # synthetic sentences
    python benchmarks/bleu.py --samples samples.txt --references test.txt       # one sentence a line
    python benchmarks/bleu.py --full                                            # NLTK on all samples: takes minutes

Ours is timed from strings to scores, reading the references included, and scores all samples. NLTK is timed on a few
of them, already split into words, and its time for all is extrapolated in proportion, unless --full. Needs nltk.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from diffusionbert.metrics import bleu4, self_bleu4

try:
    import nltk
    from nltk.translate.bleu_score import sentence_bleu
except ImportError:
    sys.exit("NLTK is what this compares with, and it is not here: pip install nltk")


def zipf(number: int, seed: int, words: int = 30_000) -> list[str]:
    """Sentences of words with frequencies 1 / rank, of normal lengths around 25."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, words + 1)
    lengths = generator.normal(25, 8, number).round().clip(1).astype(int)
    drawn = generator.choice(words, int(lengths.sum()), p=weights / weights.sum())
    return [" ".join(map(str, sentence)) for sentence in np.split(drawn, np.cumsum(lengths)[:-1])]


def read(path: Path, number: int) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        sentences = [line.strip().lower() for line in islice(lines, number)]
    if not sentences:
        sys.exit(f"{path} is empty; give a file with one sentence a line")
    return sentences


def nltk_scores(samples: Sequence[str], references: Sequence[Sequence[str]], itself: bool, count: int) -> list[float]:
    """NLTK's scores of the first `count` samples, against the references or, for self-BLEU, all but itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of every unsmoothed zero
        return [
            sentence_bleu([*references[:place], *references[place + 1 :]] if itself else references, sample.split())
            for place, sample in enumerate(samples[:count])
        ]


def compare(name: str, samples: list[str], references: list[str] | None, subset: int) -> None:
    """Prints both times, their ratio and the largest difference; without references, of self-BLEU."""
    started = time.perf_counter()
    scores = self_bleu4(samples) if references is None else bleu4(samples, references)
    ours = time.perf_counter() - started
    split = [sentence.split() for sentence in (samples if references is None else references)]
    started = time.perf_counter()
    expected = nltk_scores(samples, split, references is None, subset)
    theirs = (time.perf_counter() - started) * len(samples) / subset
    difference = np.abs(scores.values[:subset] - expected).max()
    whole = subset == len(samples)
    measured = "measured" if whole else f"extrapolated from {subset} samples"
    margin = 1.96 * scores.values.std(ddof=1) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan
    against = len(samples) - 1 if references is None else len(references)
    print(f"{name}: {scores.mean:.4f} ± {margin:.4f}, {len(samples):,} samples, each against {against:,} references")
    print(
        f"  ours {ours:.3f} s, NLTK {nltk.__version__} {theirs:,.1f} s ({measured}): {theirs / ours:,.0f} times faster"
    )
    print(f"  largest difference over {subset} samples: {difference:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=Path, help="a file with one sentence a line, lower-cased here; else synthetic"
    )
    parser.add_argument("--references", type=Path, help="the same, for the references")
    parser.add_argument("--num-samples", type=int, default=1_000, help="at most so many samples")
    parser.add_argument("--num-references", type=int, default=10_000, help="at most so many references")
    parser.add_argument("--subset", type=int, default=20, help="samples that NLTK scores")
    parser.add_argument("--full", action="store_true", help="NLTK scores all samples")
    options = parser.parse_args()
    if min(options.num_samples, options.num_references, options.subset) < 1:
        parser.error("--num-samples, --num-references and --subset must be at least 1")
    samples = read(options.samples, options.num_samples) if options.samples else zipf(options.num_samples, seed=0)
    references = (
        read(options.references, options.num_references) if options.references else zipf(options.num_references, seed=1)
    )
    subset = len(samples) if options.full else min(options.subset, len(samples))
    compare("BLEU-4", samples, references, subset)
    if len(samples) > 1:
        compare("self-BLEU-4", samples, None, subset)


if __name__ == "__main__":
    main()
