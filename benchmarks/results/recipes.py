"""Beyond the paper: which recipe has the lowest bound, step by step, and how far a decoder of its size is ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from budgets import pretraining
from checks import known as judged
from checks import lower
from kept import Results, nats_of
from plan import LONG, VARIATIONS
from verdicts import against_exact, difference
from wording import figure, grid, kind, missing, primary, share

from diffusionbert.assessment.report import Evaluation
from diffusionbert.experiments import NewBert
from diffusionbert.likelihood.scores import Scores
from diffusionbert.paper.reproduction import SCALES

WAY = "continuous"
"""All recipes have this bound: a learned schedule knows no grid."""


DECODER, UNAVERAGED = "decoder", "unaveraged"


@final
@dataclass(frozen=True)
class Recipe:
    """A run, and the one that it is set against."""

    words: str
    system: str
    folder: str = "seed0"
    against: str | None = None

    @property
    def place(self) -> str:
        """Unique."""
        return f"{self.folder}/{self.system}"


BELL, LONGER_BELL = "seed0/diffusionbert-bell", f"steps{LONG}/diffusionbert-bell"
RECIPES = (
    Recipe("the paper's: every time alike", "diffusionbert"),
    Recipe("times from a bell", "diffusionbert-bell", against="seed0/diffusionbert"),
    Recipe("times from a bell, weights not averaged", "diffusionbert-bell", UNAVERAGED, BELL),
    Recipe("times from a bell, a higher learning rate", "diffusionbert-bell", "faster", BELL),
    Recipe("a schedule learned for each word", "genmd4", against=BELL),
    Recipe("times from a bell, longer", "diffusionbert-bell", f"steps{LONG}", BELL),
    Recipe("learned schedule, longer", "genmd4", f"steps{LONG}", LONGER_BELL),
    Recipe("times from a bell, longer, larger", "diffusionbert-bell", "larger", LONGER_BELL),
)


def recipes(results: Results, _: Path) -> str:
    """The whole section."""
    known = [recipe for recipe in RECIPES if results.has(recipe.system, recipe.folder)]
    absent = [f"`{recipe.place}`" for recipe in RECIPES if recipe not in known]
    heading = "## Beyond the paper: the best recipe"
    if not known:
        return heading + missing((), absent)
    lines = [
        (
            recipe.words,
            f"`{recipe.place}`",
            _size(results, recipe.folder),
            *_length(results, recipe.system, recipe.folder),
            f"{_pretrained_on(results, recipe) / 1e6:.0f}M",
            figure(_found(results, recipe), WAY),
            _change(results, recipe),
        )
        for recipe in known
    ]
    header = (
        *("recipe", "row", "network", "training steps", "tokens", "in pretraining"),
        *("perplexity a token (bound, continuous)", "change"),
    )
    less = [recipe for recipe in known if _pretrained_on(results, recipe) < _pretrained_on(results, known[0])]
    warning = "".join(
        f" `{recipe.place}` says little of size: its network was pretrained on "
        f"{_pretrained_on(results, recipe) / _pretrained_on(results, known[0]):.0%} of the others' tokens."
        for recipe in less
    )
    return (
        f"{heading}\n\nWhat was tried, on the text and at the batch of the tables above, from pretrained weights; seed "
        "0. Changes are against the row that is named, sentences resampled in pairs. The best was chosen on the very "
        f"sentences that judge it.{warning}\n\n{grid(header, lines, left=3)}{missing((), absent)}\n\n"
        + "\n\n".join(filter(None, (_against_decoder(results, known), _averaging(results), _bell(results))))
    )


def _found(results: Results, recipe: Recipe) -> Evaluation:
    return results.evaluation(recipe.system, recipe.folder)


def _pretrained_on(results: Results, recipe: Recipe) -> int:
    return pretraining(results, recipe.system, recipe.folder).tokens


def _change(results: Results, recipe: Recipe) -> str:
    """Of perplexity, against the other recipe."""
    base = next((one for one in RECIPES if one.place == recipe.against), None)
    if base is None or not results.has(base.system, base.folder):
        return "–"
    apart = difference(*(_scores(results, one) for one in (recipe, base)))
    return f"{apart.per_cent} against `{base.place}`"


def _size(results: Results, folder: str) -> str:
    network = SCALES[results.settings(folder)["preset"]].preset("").network
    assert isinstance(network, NewBert)
    return f"{network.layers} layers, width {network.width}"


def _length(results: Results, system: str, folder: str) -> tuple[str, str]:
    steps = results.experiments(folder)[system].training.steps
    return f"{steps:,}", f"{results.tokens(system, folder) / 1e6:.0f}M"


def _against_decoder(results: Results, known: Sequence[Recipe]) -> str:
    """The lowest bound of each size and length, beside the lowest exact value of a decoder."""
    decoders = [Recipe("", DECODER, folder) for folder in dict.fromkeys(recipe.folder for recipe in known)]
    decoders = [one for one in decoders if results.has(one.system, one.folder)]
    lines = []
    for shape in dict.fromkeys(_shape(results, recipe) for recipe in known):
        own, theirs = ([one for one in some if _shape(results, one) == shape] for some in (known, decoders))
        if theirs:
            best, decoder = (min(some, key=lambda one: _nats(results, one)) for some in (own, theirs))
            apart = against_exact(_scores(results, best), _scores(results, decoder))
            cells = figure(_found(results, best), WAY), figure(_found(results, decoder)), share(apart)
            lines.append((*shape, f"`{best.place}`", f"`{decoder.place}`", *cells))
    if not lines:
        return ""
    header = (
        *("network", "training steps", "best recipe", "best decoder", "its perplexity (bound)", "decoder's (exact)"),
        "ratio, and with the length paid for",
    )
    return (
        "A decoder of the same size, from random weights, on as many tokens of this text (those of pretraining are not "
        f"counted: [below](#at-equal-steps) they are):\n\n{grid(header, lines, left=4)}"
    )


def _averaging(results: Results) -> str:
    """What averaged weights bring each system: at the end of a short training they may lag behind."""
    systems = [name for name in VARIATIONS[UNAVERAGED].systems if results.has(name, UNAVERAGED) and results.has(name)]
    found = []
    for name in systems:
        last, mean = (results.evaluation(name, folder) for folder in (UNAVERAGED, "seed0"))
        apart = difference(*(one.scores[primary(one)] for one in (last, mean)))
        found.append(f"`{name}` ({kind(last)}) {figure(last)} against {figure(mean)}, {apart.per_cent}")
    if not found:
        return ""
    return (
        "**Averaged weights** are what all tables show. Perplexity a token of the last ones, not averaged, against "
        "those of table 2: "
        f"{'; '.join(found)}."
    )


def _shape(results: Results, recipe: Recipe) -> tuple[str, str]:
    return _size(results, recipe.folder), _length(results, recipe.system, recipe.folder)[0]


def _scores(results: Results, recipe: Recipe) -> Scores:
    found = _found(results, recipe)
    return found.scores[WAY if WAY in found.scores else primary(found)]


def _nats(results: Results, recipe: Recipe) -> float:
    return nats_of(_scores(results, recipe))


def _bell(results: Results) -> str:
    """What drawing the steps of training from a bell brings, seed by seed."""
    found = judged(lower("diffusionbert-bell", "diffusionbert"), results)
    lines = "\n".join(f"- {line}" for line in found.measured)
    return (
        "A bell of times: training sees the middle of the noise more often and is not weighted back, the bundled "
        "model's recipe. That `diffusionbert-bell` has the lower bound over 512 steps: "
        f"**{found.verdict.value}**.\n\n{lines}"
    )
