"""Fill blanks: one token or several, ranked, with words that must not occur, and with token probabilities.

    python examples/infill.py                       # the bundled model
    python examples/infill.py bert-base-uncased     # any masked LM; infilling needs no training

All blanks of a text are filled jointly: the best filling is the one with the highest joint probability.
"""

from __future__ import annotations

import sys
from pathlib import Path

import diffusionbert as db

TEXT = "the [MASK] of the [MASK] was born in [MASK] ."


def main(name: str | Path | None = None, text: str = TEXT, blank: str = "paris is [BLANK] of france .") -> None:
    model = db.load(name)
    print(model.fill(text))
    print("ranked, by -log p(fillings | context) in nats:")
    for filling in model.fill(text, num_alternatives=3):
        print(f"  {filling.nats:6.2f}  {', '.join(filling.fillings)}")
    print("a blank of unknown length:")
    for filling in model.fill(blank, num_alternatives=3, max_blank_tokens=3):
        print(f"  {filling.nats:6.2f}  {filling.text}")
    best = model.fill(text, num_alternatives=1)[0].fillings[0]
    print(f"without {best!r}: {model.fill(text, forbid=[best])}")
    for number, tokens in enumerate(model.probabilities(text, top_k=3), start=1):
        print(f"blank {number}: " + ", ".join(f"{token.token} {token.probability:.2f}" for token in tokens))


if __name__ == "__main__":
    main(*sys.argv[1:2])
