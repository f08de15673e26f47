"""Fills the blanks and continues the prompts of everyday.txt, unselected, with the defaults.

    python benchmarks/everyday.py docs/bundled_model/everyday.txt [--model MODEL]

Writes one answer per line, preceded by the mark "?". A reader replaces every mark with "+" (sensible) or "-". When run
again, it keeps the marks of unchanged answers and prints how many are sensible.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import diffusionbert

QUESTIONS = Path(__file__).parent / "everyday.txt"


def answers(model: diffusionbert.Model) -> list[str]:
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    questions = [line for line in lines if line and not line.startswith("#")]
    blanks = [line for line in questions if "[MASK]" in line]
    prompts = [line for line in questions if "[MASK]" not in line]
    return model.fill(blanks) + model.generate(prompts, max_new_tokens=12, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=None)
    options = parser.parse_args()
    earlier = options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    marks = {line[2:]: line[0] for line in earlier}
    found = answers(diffusionbert.load(options.model))
    options.output.write_text("".join(f"{marks.get(text, '?')} {text}\n" for text in found), encoding="utf-8")
    judged = [marks.get(text, "?") for text in found]
    print(f"{judged.count('+')} of {len(judged)} sensible, {judged.count('?')} not judged yet")


if __name__ == "__main__":
    main()
