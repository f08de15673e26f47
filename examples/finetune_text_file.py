"""Fine-tune the bundled masked LM on a text file, one sentence per line, and see what changed.

    python examples/finetune_text_file.py mine.txt runs/mine

200 steps take a few minutes on two cores. The start can be any masked LM, given as a folder or a Hub name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import diffusionbert as db


def main(
    text: str | Path, output: str | Path, *, steps: int = 200, start: str = "bundled", max_length: int = 64
) -> None:
    run = db.train(text, output, start=start, steps=steps, validate_every=max(1, steps // 4), max_length=max_length)
    for validation in run.history:
        error = 1.96 * validation.standard_error
        print(f"step {validation.step}: {validation.nats_per_token:.3f} ± {error:.3f} nats per token on held-out text")
    for name, path in (("before", start), ("after", run.path)):
        model = db.load(None if path == "bundled" else path)
        print(f"{name}: {model.generate(length=16, seed=0)[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
