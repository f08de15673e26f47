"""Audits a scorer: can its numbers be likelihoods? Two inequalities over an explicit list of sentences decide.

    Σ exp(-nats) ≤ 1        distinct sentences have a total probability of at most 1
    Σ p·nats ≥ Σ -p·log p   no code beats the entropy of a distribution p over them (Gibbs)

Both hold for exact likelihoods and for valid bounds (nats ≥ -log p), whatever the model and its training. A scorer that
violates one of them belongs to no distribution over sentences. A scorer that satisfies both is not proven correct: its
model may find all of these sentences so improbable that no error could show.

If scores are conditional on the length, as ours are, the sum runs over the sentences of one length in tokens, the
largest such sum is reported, and the entropy is that of a sentence given its length. Estimated scores have a standard
error, which widens the tolerance by 1.96 standard errors of every sentence at once, as if all erred in the same
direction.
"""

from __future__ import annotations

import inspect
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear, Mean, Spindle, uniform_grid
from diffusionbert.likelihood.languages import PAPER, SKEWED, TWINS, Bayes, Language, exact_nats
from diffusionbert.likelihood.orders import Order, order_nats
from diffusionbert.objectives.discrete_time import DiscreteTime, Quantity
from diffusionbert.objectives.order_agnostic import masked_nats
from diffusionbert.reporting import fault_of, require_type
from diffusionbert.storage.limits import read_text
from diffusionbert.storage.schema import to_json

Scorer = Callable[[list[str]], Sequence[Any]]
"""Returns the nats of sentences, -log p each: numbers, or objects with `nats` and optionally `standard_error`, as
`Model.score` returns them."""
Floats = NDArray[np.float64]

TOLERANCE = 1e-3
"""The tolerance in nats, for the rounding of float32 networks."""
ERRORS = 1.96
"""The number of standard errors by which a score may be off."""
WEAK = 0.5
"""If the total is below this, numbers that are not likelihoods may easily pass."""
RECHECKED = 8
"""The number of sentences scored a second time, in another order."""


# ---- languages ------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class SentenceSet:
    """Distinct sentences with their probabilities, which add up to 1."""

    name: str
    texts: tuple[str, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.texts) < 2 or len(set(self.texts)) < len(self.texts):
            known = f"{len(set(self.texts))} distinct ones of {len(self.texts)}"
            raise ValueError(f"an audit needs two or more sentences, all distinct, got {known}; remove duplicates")
        total = math.fsum(self.probabilities)
        if min(self.probabilities) < 0 or not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"the probabilities of {self.name!r} must be >= 0 and add up to 1, not to {total:.6g}")

    @classmethod
    def of(cls, name: str, language: Language) -> SentenceSet:
        """All sentences of an enumerable language."""
        return cls(name, language.texts, tuple(language.probabilities.tolist()))

    @classmethod
    def read(cls, path: Path) -> SentenceSet:
        """Reads a file of one sentence per line, each with its probability after a tab; with none, all are equal."""
        lines = [line for line in read_text(path).splitlines() if line.strip()]
        columns = [line.rpartition("\t") for line in lines]
        if any(tab for _, tab, _ in columns):
            return cls(path.name, tuple(text for text, _, _ in columns), tuple(_number(p) for _, _, p in columns))
        return cls(path.name, tuple(lines), (1 / max(1, len(lines)),) * len(lines))

    @property
    def entropy(self) -> float:
        """The entropy in nats."""
        return math.fsum(-one * math.log(one) for one in self.probabilities if one)

    def sample(self, number: int, seed: int = 0) -> list[str]:
        """Sentences drawn from it, to train a model on."""
        drawn = np.random.default_rng(seed).choice(len(self.texts), size=number, p=np.array(self.probabilities))
        return [self.texts[index] for index in drawn]


_PLACES = (
    "New York City, New York",
    "Los Angeles, California",
    "San Francisco, California",
    "San Diego, California",
    "Oakland, California",
    "Las Vegas, Nevada",
    "Salt Lake City, Utah",
    "Phoenix, Arizona",
    "Denver, Colorado",
    "Dallas, Texas",
    "Houston, Texas",
    "San Antonio, Texas",
    "Austin, Texas",
    "Fort Worth, Texas",
    "New Orleans, Louisiana",
    "Miami, Florida",
    "Atlanta, Georgia",
    "Charlotte, North Carolina",
    "Charleston, South Carolina",
    "Nashville, Tennessee",
    "Memphis, Tennessee",
    "Louisville, Kentucky",
    "Birmingham, Alabama",
    "Kansas City, Missouri",
    "Chicago, Illinois",
    "Detroit, Michigan",
    "Cleveland, Ohio",
    "Cincinnati, Ohio",
    "Indianapolis, Indiana",
    "Milwaukee, Wisconsin",
    "Minneapolis, Minnesota",
    "Pittsburgh, Pennsylvania",
    "Philadelphia, Pennsylvania",
    "Baltimore, Maryland",
    "Brooklyn, New York",
    "Hartford, Connecticut",
    "Providence, Rhode Island",
    "Boston, Massachusetts",
    "Portland, Oregon",
    "Seattle, Washington",
    "Honolulu, Hawaii",
    "Toronto, Ontario",
    "Montreal, Quebec",
    "Vancouver, British Columbia",
    "Halifax, Nova Scotia",
    "Sydney, New South Wales",
    "Buenos Aires, Argentina",
    "Rio de Janeiro, Brazil",
    "Havana, Cuba",
    "London, England",
    "Edinburgh, Scotland",
    "Dublin, Ireland",
    "Paris, France",
    "Berlin, Germany",
    "Vienna, Austria",
    "Rome, Italy",
    "Madrid, Spain",
    "Athens, Greece",
    "Moscow, Russia",
    "Warsaw, Poland",
    "Tokyo, Japan",
    "Seoul, South Korea",
    "Cairo, Egypt",
    "Cape Town, South Africa",
)


def birthplaces() -> SentenceSet:
    """Sentences such as "He was born in Paris, France.", all equally probable.

    Each token of such a sentence is easy to guess from all the others, but nothing tells which sentence it is. A score
    that conditions each token on all others therefore exceeds the limits here for any model of encyclopedic English,
    without training on these sentences.
    """
    texts = tuple(f"{one} was born in {place}." for place in _PLACES for one in ("He", "She"))
    return SentenceSet("birthplaces", texts, (1 / len(texts),) * len(texts))


LANGUAGES: dict[str, Callable[[], SentenceSet]] = {
    "birthplaces": birthplaces,
    "paper": lambda: SentenceSet.of("paper", PAPER),
    "skewed": lambda: SentenceSet.of("skewed", SKEWED),
    "twins": lambda: SentenceSet.of("twins", TWINS),
}
"""The built-in languages by name; all except birthplaces have the two words a and b, and are for models trained on
them."""


def find_language(name: str | Path | SentenceSet) -> SentenceSet:
    """A language by name or from a file; raises ValueError if neither exists."""
    if isinstance(name, SentenceSet):
        return name
    if str(name) in LANGUAGES:
        return LANGUAGES[str(name)]()
    if not Path(name).exists():
        known = ", ".join(LANGUAGES)
        raise ValueError(f"`language` must be one of {known}, or a file of sentences, got {str(name)!r:.40}")
    return SentenceSet.read(Path(name))


# ---- the audit ------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """The verdict of an audit; `meaning` explains it."""

    CONSISTENT = "can be a likelihood"
    UNDECIDED = "undecided"
    REFUTED = "cannot be a likelihood"

    @property
    def meaning(self) -> str:
        return {
            Verdict.CONSISTENT: "nothing here contradicts an exact likelihood or a valid bound; this is not a proof, "
            "since other sentences might",
            Verdict.UNDECIDED: "a limit is exceeded, but within the error of the scores: score with more draws",
            Verdict.REFUTED: "no distribution over sentences has these probabilities or higher ones, so they are "
            "neither likelihoods nor bounds, and the exponential of their mean is not a perplexity",
        }[self]


@final
@dataclass(frozen=True)
class AuditReport:
    """Both sums with their limits, and the verdict."""

    scorer: str
    language: str
    num_sentences: int
    total: float
    """Σ exp(-nats); the largest sum over one length if scores are conditional on the length."""
    total_margin: float
    """How far log(total) may exceed 0 because of rounding and noise alone, in nats."""
    expected_nats: float
    """Σ p·nats"""
    entropy: float
    """The lower limit of `expected_nats`, in nats."""
    expected_margin: float
    """How far `expected_nats` may fall below it because of rounding and noise alone, in nats."""
    given_length: bool
    verdict: Verdict
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, with the meaning of its verdict."""
        plain: dict[str, Any] = to_json(self)
        return plain | {"meaning": self.verdict.meaning}

    def __str__(self) -> str:
        given = ", given their length" if self.given_length else ""
        lines = [
            f"{self.scorer} on {self.num_sentences} sentences of {self.language!r}{given}",
            _line("Σ exp(-nats)", self.total, "at most", 1.0, self.total_margin),
            _line("expected nats", self.expected_nats, "at least", self.entropy, self.expected_margin),
            f"verdict: {self.verdict.value} ({self.verdict.meaning})",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _line(name: str, value: float, must_be: str, limit: float, margin: float) -> str:
    is_kept = value <= limit if must_be == "at most" else value >= limit
    found = "kept" if is_kept else "exceeded" if must_be == "at most" else "undercut"
    return f"  {name:<14} {value:>10.4g}   must be {must_be:<8} {limit:<7.4g} {found}; margin {margin:.2g} nats"


def audit(
    scorer: Scorer | str,
    language: str | Path | SentenceSet = "birthplaces",
    *,
    log_probabilities: bool = False,
    tolerance: float = TOLERANCE,
) -> AuditReport:
    """Tells whether the numbers of a scorer can be likelihoods, or bounds on them.

    Args:
        scorer: A function from a list of sentences to their nats (−log p each), such as `model.score`; the name of one,
            "module:function"; or one of the examples: spindle, pseudo-likelihood, bound, exact.
        language: The sentences: "birthplaces" needs no training; "paper", "skewed" and "twins" are for models trained
            on them; or a file of sentences. An example has its own language.
        log_probabilities: Whether the scorer returns log-probabilities, below 0, instead of nats.
        tolerance: The tolerance for rounding, in nats.

    Returns:
        The report, which can be printed.

    Examples:
        >>> import diffusionbert
        >>> diffusionbert.audit("spindle").verdict.value
        'cannot be a likelihood'
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"`tolerance` must be 0 or more nats, got {tolerance}")
    if isinstance(scorer, str) and scorer in EXAMPLES:
        example = EXAMPLES[scorer]
        return _audited(example.scorer, f"example {scorer!r}", example.sentences, 1.0, tolerance)
    function = named_scorer(scorer) if isinstance(scorer, str) else scorer
    require_type("a scorer", function, Callable, "a function, or module:function")  # type: ignore[arg-type]
    name = scorer if isinstance(scorer, str) else getattr(scorer, "__qualname__", type(scorer).__name__)
    return _audited(function, name, find_language(language), -1.0 if log_probabilities else 1.0, tolerance)


def _audited(scorer: Scorer, name: str, sentences: SentenceSet, sign: float, tolerance: float) -> AuditReport:
    found = _scores(scorer, list(sentences.texts), sign)
    probabilities = np.array(sentences.probabilities)
    total, total_margin, entropy = 0.0, 0.0, 0.0
    for length in np.unique(found.lengths):
        same = found.lengths == length
        some, margin = _total(found.nats[same], found.errors[same])
        if some >= total:
            total, total_margin = some, margin
        share = probabilities[same].sum()
        entropy += math.fsum(-one * math.log(one / share) for one in probabilities[same].tolist() if one)
    weighed = probabilities > 0  # 0 · ∞ is 0 here
    expected = float((probabilities[weighed] * found.nats[weighed]).sum())
    expected_margin = ERRORS * float((probabilities[weighed] * found.errors[weighed]).sum())
    excess = [(math.log(total) if total else -math.inf, total_margin), (entropy - expected, expected_margin)]
    is_refuted = any(over > margin + tolerance for over, margin in excess)
    is_doubtful = any(over > tolerance for over, _ in excess)
    verdict = Verdict.REFUTED if is_refuted else Verdict.UNDECIDED if is_doubtful else Verdict.CONSISTENT
    return AuditReport(
        name,
        sentences.name,
        len(sentences.texts),
        total,
        total_margin + tolerance,
        expected,
        entropy,
        expected_margin + tolerance,
        found.given_length,
        verdict,
        (*found.notes, *_power_notes(verdict, total)),
    )


def _total(nats: Floats, errors: Floats) -> tuple[float, float]:
    """Σ exp(-nats), and how much too large its logarithm may be; noise also biases a mean of exponentials upward."""
    with np.errstate(over="ignore"):
        terms = np.exp(-nats)
    total = float(terms.sum())
    if not 0 < total < math.inf:
        return total, 0.0
    weights = terms / total
    return total, float((weights * (ERRORS * errors + errors**2 / 2)).sum())


def _power_notes(verdict: Verdict, total: float) -> list[str]:
    if verdict is not Verdict.CONSISTENT or total >= WEAK:
        return []
    return [
        f"the sentences have a total probability of only {total:.2g}, so this says little: use sentences that the "
        "scorer's model finds probable, or train it on the language (`audit --corpus`)"
    ]


@final
@dataclass(frozen=True, eq=False)
class _Scores:
    """A scorer's numbers for sentences."""

    nats: Floats
    errors: Floats
    """The standard errors."""
    lengths: NDArray[np.int64]
    """The lengths in tokens if scores are conditional on them; otherwise 0."""
    given_length: bool
    notes: tuple[str, ...]


def _scores(scorer: Scorer, texts: list[str], sign: float) -> _Scores:
    found = _called(scorer, texts)
    nats = np.array([sign * _nats(one) for one in found])
    errors = np.array([_number(getattr(one, "standard_error", 0.0)) for one in found])
    errors = np.where(np.isfinite(nats), errors, 0.0)
    if not ((errors >= 0) & (errors < np.inf)).all():
        raise ValueError("the scorer returned standard errors that are negative or not finite; fix it first")
    if np.isnan(nats).any():
        raise ValueError(f"the scorer returned NaN for {texts[int(np.isnan(nats).argmax())]!r:.40}; fix it first")
    if (nats < 0).all():
        raise ValueError(
            "all numbers of the scorer are below 0, but nats are -log p; give `log_probabilities` if that is what they "
            "are"
            if sign > 0
            else "all log-probabilities of the scorer are above 0; leave out `log_probabilities` if they are nats"
        )
    notes = []
    some = texts[:RECHECKED]
    again = np.array([sign * _nats(one) for one in _called(scorer, some[::-1])])[::-1]
    with np.errstate(invalid="ignore"):
        change = np.nan_to_num(np.abs(again - nats[:RECHECKED]), nan=0.0)
    if change.max() > 1e-4 * max(1.0, float(np.abs(again).max())) and not errors.any():
        # Two scores differ by √2 standard deviations.
        errors = np.full(len(texts), float(np.sqrt((change**2).mean() / 2)))
        notes.append(
            f"a sentence's nats changed by up to {change.max():.2g} when scored again among other sentences: "
            f"treated as noise with standard error {errors[0]:.2g}"
        )
    num_equal = len(nats) - len(np.unique(nats))
    if num_equal > len(nats) // 2:
        notes.append(
            f"{num_equal} of {len(nats)} sentences have the same nats as others: a scorer that cannot tell sentences "
            "apart (unknown words, letter case) counts one several times"
        )
    given = [str(getattr(one, "conditional_on", "")).startswith("length") for one in found]
    lengths = np.array([int(getattr(one, "num_tokens", 0)) if all(given) else 0 for one in found], np.int64)
    return _Scores(nats, errors, lengths, all(given), tuple(notes))


def _called(scorer: Scorer, texts: list[str]) -> list[Any]:
    try:
        found = list(scorer(texts))
    except (ValueError, OSError, RuntimeError, MemoryError):  # ours: already one line
        raise
    except Exception as error:
        raise ValueError(f"the scorer failed ({fault_of(error)}); fix it first") from error
    if len(found) != len(texts):
        raise ValueError(f"the scorer must return one number per sentence, got {len(found)} for {len(texts)} sentences")
    return found


def _nats(score: Any) -> float:
    return _number(getattr(score, "nats", score))


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"a number is expected, got {value!r:.40}; return nats, one per sentence") from None


# ---- scorers --------------------------------------------------------------------------------------------------------


def named_scorer(name: str) -> Scorer:
    """The function "module:function"; modules in the current folder are found, too."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        known = ", ".join(EXAMPLES)
        raise ValueError(f"a scorer is module:function, or an example ({known}), got {name!r:.40}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), function)
    except (Exception, SystemExit) as error:
        raise ValueError(f"the scorer {name!r:.60} cannot be imported ({fault_of(error)})") from error
    if not callable(found) or inspect.isclass(found):
        raise ValueError(f"{name!r:.60} is not a function; give one that maps a list of sentences to their nats")
    return found  # type: ignore[no-any-return]


_LONGEST_NUMBER = 100
"""The most bytes of a printed number."""


def command_scorer(command: str) -> Scorer:
    """A command that reads sentences, one per line, and prints the nats of each, one per line."""
    words = shlex.split(command)
    if not words:
        raise ValueError("`command` is empty; give one that reads sentences, one per line, and prints their nats")

    def scorer(texts: list[str]) -> list[float]:
        most = _LONGEST_NUMBER * (len(texts) + 1)
        with TemporaryFile() as given, TemporaryFile() as said:
            given.write("".join(f"{text}\n" for text in texts).encode())
            given.seek(0)
            try:
                process = subprocess.Popen(words, stdin=given, stdout=subprocess.PIPE, stderr=said)
            except OSError as error:
                raise ValueError(f"{words[0]!r:.40} cannot be run ({error.strerror}); check `command`") from None
            with process:
                printed = process.stdout.read(most) if process.stdout else b""
                if len(printed) == most:
                    process.kill()
                    raise ValueError(f"{command!r:.60} prints more than a number for each sentence; check `command`")
            said.seek(0)
            last = (said.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        if process.returncode:
            raise ValueError(f"{command!r:.60} failed with exit code {process.returncode} ({last:.120})")
        return [_number(line) for line in printed.decode(errors="replace").splitlines() if line.strip()]

    return scorer


# ---- examples -------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Example:
    """A scorer for one language with the optimal network for it, so that only its quantity is judged."""

    meaning: str
    name: str
    """The name of its language."""
    language: Language
    nats: Callable[[Tensor], Tensor]
    """Computes the nats of each sentence from its tokens."""

    @cached_property
    def sentences(self) -> SentenceSet:
        return SentenceSet.of(self.name, self.language)

    def scorer(self, texts: list[str]) -> list[float]:
        """The nats of some of its sentences."""
        with torch.no_grad():
            found: list[float] = self.nats(self.language.encode(texts).tokens).tolist()
        return found


def _of_process(language: Language, schedule: Spindle | Linear, quantity: Quantity) -> Callable[[Tensor], Tensor]:
    process = Absorbing(schedule, language.mask_id, language.information(), reweighted=False)
    objective = DiscreteTime(process, uniform_grid(16), quantity)
    return lambda tokens: exact_nats(objective, Bayes(language, process), language.batch(tokens))


def _perfect(language: Language) -> nn.Module:
    """The network that knows the distribution of each token given any set of others."""
    return Bayes(language, Absorbing(Linear(), language.mask_id))


def _pseudo(tokens: Tensor) -> Tensor:
    batch, network = TWINS.batch(tokens), _perfect(TWINS)
    total = torch.zeros(len(tokens), dtype=torch.float64)
    for position in range(tokens.shape[1]):
        target = torch.zeros_like(batch.editable)
        target[:, position] = True
        total += masked_nats(network, batch, target, TWINS.mask_id).sum(dim=1)
    return total


def _left_to_right(tokens: Tensor) -> Tensor:
    return order_nats(_perfect(TWINS), TWINS.batch(tokens), TWINS.mask_id, Order.LEFT_TO_RIGHT).sum(dim=1)


EXAMPLES = {
    "spindle": Example(
        "the paper's quantity for the spindle (He et al. 2022): T = 16, λ = 0.3, sentence mean, a 5 % linear floor",
        "paper",
        PAPER,
        _of_process(PAPER, Spindle(0.3, Mean.SENTENCE, floor=0.05), Quantity.PAPER),
    ),
    "pseudo-likelihood": Example("each token given all others (BERT-Mouth)", "twins", TWINS, _pseudo),
    "bound": Example(
        "the strict bound under the same spindle",
        "paper",
        PAPER,
        _of_process(PAPER, Spindle(0.3, Mean.SENTENCE, floor=0.05), Quantity.STRICT),
    ),
    "exact": Example("the exact likelihood, left to right", "twins", TWINS, _left_to_right),
}
"""Two that fail and two that pass, all with perfect networks."""
