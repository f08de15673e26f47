"""Compare samplers at an equal number of steps: quality, diversity and network calls in one table.

    python examples/compare_samplers.py                        # the bundled model
    python examples/compare_samplers.py runs/mine test.txt     # BLEU against your own sentences

Read BLEU-4 (higher: more like the text) together with self-BLEU (lower: more diverse): samplers trade one for the
other. `exact` samples the model's distribution, and so does `ancestral`, with more calls under the spindle; the
confidence, margin and entropy samplers do not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import diffusionbert as db

SAMPLERS = ("exact", "ancestral", "confidence", "entropy", "remasking:eta=0.1")


def main(
    name: str | Path | None = None,
    data: str | Path = "pydoc",
    *,
    samplers: tuple[str, ...] = SAMPLERS,
    steps: int = 16,
    samples: int = 64,
    length: int = 16,
) -> None:
    model = db.load(None if name == "bundled" else name)
    results = [
        db.evaluate(
            model, data, sampler=sampler, steps=steps, samples=samples, length=length, sentences=32, max_draws=8
        )
        for sampler in samplers
    ]
    print(db.compare(results, names=samplers))


if __name__ == "__main__":
    main(*sys.argv[1:3])
