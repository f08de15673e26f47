"""The bundled model generates, fills blanks and scores; `make demo` runs this."""

from __future__ import annotations

from rich.console import Console

import diffusionbert
from diffusionbert.cli.common import colored, show_generation


def main() -> None:
    console = Console(highlight=False)

    def title(text: str) -> None:
        console.print(f"\n{text}", style="bold")

    model = diffusionbert.load()

    title("Three sentences, generated from nothing but masks")
    for seed in (1, 2, 3):
        show_generation(model.stream(length=18, seed=seed), console, num_lines=5)

    title("Blanks, filled jointly: the [MASK] of the [MASK] was born in [MASK] .")
    for filled in model.fill("the [MASK] of the [MASK] was born in [MASK] .", num_alternatives=3):
        console.print(f"{filled.nats:6.2f} nats  {filled.text}")

    title("A blank of unknown length: paris is [BLANK] of france .")
    for filled in model.fill("paris is [BLANK] of france .", num_alternatives=3, max_blank_tokens=3):
        console.print(f"{filled.nats:6.2f} nats  {filled.text}")

    title("Around two words that must occur: castle, dragon")
    for text in model.generate(num_return_sequences=2, length=16, include=["castle", "dragon"], seed=0):
        console.print(f"    {text}")

    title("A sentence and its words shuffled, scored")
    texts = ["the capital of france is paris .", "paris the is france capital of ."]
    for score in model.score(texts, tokens=True):
        console.print(colored(score.tokens or ()))
        low, high = score.ci95
        console.print(f"    {score.nats:.1f} nats [{low:.1f}, {high:.1f}], {score.quantity}", markup=False)


if __name__ == "__main__":
    main()
