"""Score a text file, one sentence per line: bits per byte of the whole, and its most surprising sentences.

    python examples/score_corpus.py test.txt            # the bundled model
    python examples/score_corpus.py test.txt runs/mine

Bits per byte are comparable between models with different vocabularies; nats per token are not. A bound is at least
-log p.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import diffusionbert as db
from diffusionbert.inference.score import total_score


def main(text: str | Path, name: str | Path | None = None, *, num_sentences: int = 64, num_shown: int = 3) -> None:
    lines = [line.strip() for line in Path(text).read_text(encoding="utf-8").splitlines()]
    scores = db.load(name).score([line for line in lines if line][:num_sentences])
    total = total_score(scores)
    low, high = (nats / total.num_bytes / math.log(2) for nats in total.ci95)
    print(
        f"{total.num_texts} sentences: {total.bits_per_byte:.3f} [{low:.3f}, {high:.3f}] bits per byte "
        f"({total.kind.value}, {total.quantity}; the interval is over draws, not over sentences)"
    )
    for title, ascending in (("least", False), ("most", True)):
        print(f"{title} probable, by perplexity per token:")
        ranked = sorted(scores, key=lambda score: score.perplexity_per_token, reverse=not ascending)
        for score in ranked[:num_shown]:
            print(f"  {score.perplexity_per_token:8.1f}  {score.text[:100]}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
