"""Measures how well `choose` finds a true word or ending among distractors, and how calibrated its probabilities are.

python benchmarks/choose.py wiki.valid.txt --cases 100        # minutes on a CPU

Cases are made from held-out sentences, one per line. "word" blanks one word of letters inside a sentence, with four
words from the same position of other sentences as distractors; "ending" blanks the last five words, with the endings of
four others. For each order of generation and prior over lengths, and for each mask on its own, the script reports
log-loss in nats (chance: log 5 = 1.61), accuracy, and the expected calibration error over ten bins of the best option's
probability, with 95 % bootstrap intervals over cases. The cases are paired, so differences of log-loss have narrower
intervals.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import diffusionbert
from diffusionbert.inference import choose as choosing
from diffusionbert.inference.choose import PRIORS, choose
from diffusionbert.inference.engine import Engine
from diffusionbert.likelihood.intervals import percentile_interval
from diffusionbert.likelihood.orders import Order

NUM_OPTIONS, RESAMPLES, BINS = 5, 2000, 10


@dataclass(frozen=True)
class Case:
    """A text with a blank; the first option is the true one."""

    text: str
    options: tuple[str, ...]


def cases(sentences: list[str], kind: str, number: int, seed: int) -> list[Case]:
    """Cases from sentences of 10 to 40 words; distractors come from other sentences."""
    rng = np.random.default_rng(seed)
    usable = [words for words in map(str.split, sentences) if 10 <= len(words) <= 40]
    order = rng.permutation(len(usable)).tolist()
    spans = [_span(usable[index], kind, rng) for index in order]
    found = []
    for words, span in zip((usable[index] for index in order), spans, strict=True):
        truth = " ".join(words[span])
        others = {" ".join(usable[other][_span(usable[other], kind, rng)]) for other in rng.choice(len(usable), 12)}
        options = (truth, *sorted(others - {truth})[: NUM_OPTIONS - 1])
        if len(options) == NUM_OPTIONS and truth:
            text = " ".join([*words[: span.start], "[BLANK]", *words[span.stop :]])
            found.append(Case(text, options))
        if len(found) == number:
            break
    return found


def _span(words: list[str], kind: str, rng: np.random.Generator) -> slice:
    """The words to blank; an empty span if there are none."""
    if kind == "ending":
        return slice(len(words) - 5, len(words))
    plain = [index for index in range(1, len(words) - 1) if words[index].isalpha()]
    start = int(rng.choice(plain)) if plain else 0
    return slice(start, start + bool(plain))


@torch.no_grad()
def on_their_own(engine: Engine, case: Case) -> list[float]:
    """The probabilities if each mask is scored on its own: Σ -log f(token | all of the option masked)."""
    rows = choosing._fitted(engine, case.text, case.options)
    batch, _ = choosing._batch(engine, rows)
    masked = batch.tokens.masked_fill(batch.editable, engine.vocabulary.mask_id)
    network = engine.masked_network
    assert network is not None
    log_f = network(masked, batch.attention_mask, batch.fraction_of(batch.editable), batch.editable)
    nats = torch.zeros(len(rows), dtype=torch.float64, device=log_f.device)
    own = log_f.gather(1, batch.tokens[batch.editable][:, None])[:, 0].double()
    nats.index_add_(0, batch.editable.nonzero()[:, 0], own)
    return [float(one) for one in nats.softmax(dim=0)]


def figures(probabilities: np.ndarray, rng: np.random.Generator) -> list[str]:
    """Log-loss, accuracy and calibration error of [cases, options], whose first option is true, with intervals."""
    resamples = rng.integers(len(probabilities), size=(RESAMPLES, len(probabilities)))
    loss, correct = -np.log(probabilities[:, 0].clip(1e-30)), probabilities.argmax(axis=1) == 0
    confidence = probabilities.max(axis=1)
    shown = []
    for value, values in (
        (loss.mean(), loss[resamples].mean(axis=1)),
        (correct.mean(), correct[resamples].mean(axis=1)),
        (_calibration(confidence, correct), np.array([_calibration(confidence[i], correct[i]) for i in resamples])),
    ):
        low, high = percentile_interval(values)
        shown.append(f"{value:.3f} [{low:.3f}, {high:.3f}]")
    return shown


def _calibration(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Σ over bins of their fraction times |mean confidence - accuracy|."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=confidence - correct, minlength=BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", default=["word", "ending"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    engine = diffusionbert.load(arguments.model).engine
    sentences = arguments.file.read_text(encoding="utf-8").splitlines()
    for kind in arguments.kinds:
        made = cases(sentences, kind, arguments.cases, arguments.seed)
        found = {("each mask on its own", "–"): np.array([on_their_own(engine, case) for case in made])}
        texts, options = [case.text for case in made], [case.options for case in made]
        for order, prior in itertools.product(Order, PRIORS):
            choices = choose(engine, texts, options, order=order, prior=prior)
            values = [[option.probability for option in choice.options] for choice in choices]
            found[order.value, prior] = np.array(values)
        table = Table(title=f"{kind}: {len(made)} cases of {NUM_OPTIONS} options")
        for column in ("order", "prior over lengths", "log-loss", "accuracy", "calibration error"):
            table.add_column(column)
        for names, probabilities in found.items():
            table.add_row(*names, *figures(probabilities, np.random.default_rng(0)))
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
