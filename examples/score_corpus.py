"""Score a text file, one sentence per line: bits per byte of the whole, and its most surprising sentences.

    python examples/score_corpus.py test.txt            # the bundled model
    python examples/score_corpus.py test.txt runs/mine

Bits per byte compare models of different vocabularies; nats per token do not. A bound is at least -log p.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import diffusionbert as db


def main(text: str | Path, name: str | Path | None = None, *, num_sentences: int = 64, num_shown: int = 3) -> None:
    lines = [line.strip() for line in Path(text).read_text(encoding="utf-8").splitlines()]
    scores = db.load(name).score([line for line in lines if line][:num_sentences])
    nats, num_bytes = sum(score.nats for score in scores), sum(len(score.text.encode()) for score in scores)
    error = math.sqrt(sum(((high - low) / 2) ** 2 for low, high in (score.ci95 for score in scores)))
    print(
        f"{len(scores)} sentences: {nats / num_bytes / math.log(2):.3f} ± {error / num_bytes / math.log(2):.3f} bits "
        f"per byte ({scores[0].likelihood.value}; the interval is over draws, not over sentences)"
    )
    for title, ascending in (("least", False), ("most", True)):
        print(f"{title} probable, by perplexity per token:")
        ranked = sorted(scores, key=lambda score: score.perplexity_per_token, reverse=not ascending)
        for score in ranked[:num_shown]:
            print(f"  {score.perplexity_per_token:8.1f}  {score.text[:100]}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
