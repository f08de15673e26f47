"""Several evaluation results in one table, without comparing what is not comparable.

A likelihood column holds one kind (exact, bound or pseudo), one quantity and one name (continuous, grid, …). Systems
are compared on the sentences that all of them scored, by a paired bootstrap over sentences (Efron 1979; see
`intervals`); samples are not paired, so BLEU is resampled for each system by itself. Where vocabularies differ,
likelihoods are given per word. A column whose numbers were obtained under different protocols is shown but not ranked,
and a warning says why. This module depends on evaluation results, not on models.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch

from diffusionbert.evaluation.metrics import PerSample
from diffusionbert.evaluation.result import EvaluationResult, TextMetrics, Weights, locate
from diffusionbert.evaluation.tables import (
    SIGNIFICANT,
    Cell,
    Column,
    Direction,
    SystemDifference,
    Table,
    length_text,
    ranked,
)
from diffusionbert.likelihood.intervals import Difference, percentile_interval, resampled_sums
from diffusionbert.likelihood.scores import (
    Length,
    LikelihoodRates,
    LikelihoodSummary,
    PointEstimate,
    Scores,
    Unit,
    paired_bootstrap,
)
from diffusionbert.objectives.base import Likelihood
from diffusionbert.training.run_folder import RunFolder

LEVEL = 0.05
"""Below this p-value a difference is called significant."""
_RATES = {
    Unit.TOKEN: ("perplexity_per_token", 2),
    Unit.WORD: ("perplexity_per_word", 1),
    Unit.BYTE: ("bits_per_byte", 3),
}
"""The field of `LikelihoodRates` that is shown for each unit, and its digits."""
_SIGNIFICANCE = (
    f"differs from the best, p < {LEVEL:.2f}: likelihoods by paired bootstrap over sentences, BLEU by bootstrap over "
    "the samples of each system; not corrected for the number of comparisons"
)


class _Quantity(NamedTuple):
    """What a likelihood column holds."""

    kind: Likelihood
    name: str
    quantity: str


@final
@dataclass(frozen=True, eq=False)
class _System:
    """One result under a name that no other has."""

    name: str
    result: EvaluationResult
    scores: dict[str, Scores]
    """On the sentences that all systems scored, if they scored the same corpus."""
    folder: Path | None

    @property
    def likelihoods(self) -> dict[_Quantity, LikelihoodSummary]:
        found = self.result.likelihoods.items()
        return {_Quantity(one.kind, name, one.protocol.definition.quantity): one for name, one in found}


def compare(
    results: Sequence[EvaluationResult | str | Path], unit: Unit | None = None, names: Sequence[str] | None = None
) -> Table:
    """Compares evaluation results in one table.

    Args:
        results: Results, or folders that `evaluate` wrote (a run folder will do).
        unit: The unit of likelihoods; by default tokens if all vocabularies agree, else words.
        names: Names of the systems; by default those of folders, and of models for results.

    Returns:
        The table, with the differences from the best of each ranked column.

    Example:
        >>> print(compare(["runs/one", "runs/two"]))  # doctest: +SKIP
    """
    systems = _systems(results, names)
    is_same_text = len({system.result.data.corpus_sha256 for system in systems}) == 1
    systems = _on_common_sentences(systems) if is_same_text else systems
    scored = _first_scores(systems)
    has_same_tokens = len(scored) < 2 or (
        is_same_text and all(torch.equal(first.tokens, second.tokens) for first, second in pairwise(scored))
    )
    table = _Columns(systems, is_same_text, has_same_tokens, unit or (Unit.TOKEN if has_same_tokens else Unit.WORD))
    table.add_likelihoods()
    table.add_texts()
    table.add_costs()
    return table.finished(unit)


def _systems(results: Sequence[EvaluationResult | str | Path], names: Sequence[str] | None) -> list[_System]:
    if not results:
        raise ValueError("there is nothing to compare; give run folders that were evaluated")
    folders = [None if isinstance(one, EvaluationResult) else _folder(Path(one)) for one in results]
    loaded = [one if isinstance(one, EvaluationResult) else EvaluationResult.load(one) for one in results]
    if names is None:
        # An `evaluation` folder is called by what it is in.
        paths = [folder.parent if folder.name == "evaluation" else folder for folder in folders if folder is not None]
        by_path = iter(shortest_names(paths))
        names = [one.name if folder is None else next(by_path) for one, folder in zip(loaded, folders, strict=True)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two systems are called {twice!r}; give `names`")
    return [_System(name, one, one.scores, folder) for name, one, folder in zip(names, loaded, folders, strict=True)]


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; give run folders, or folders that evaluate wrote")
    if RunFolder(folder).config.exists() and not (folder / "evaluation").exists():
        raise ValueError(
            f"the run {str(folder)!r} has not been evaluated; run: diffusionbert evaluate --model {folder} --data …"
        )
    return locate(folder).resolve()


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Names of paths: as many of their last parts as tell them apart."""
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"{str(twice)!r} was given twice; give each once")
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _on_common_sentences(systems: list[_System]) -> list[_System]:
    """The systems on the sentences that all of them scored."""
    every = [set(scores.example.tolist()) for scores in _first_scores(systems)]
    common = torch.tensor(sorted(set.intersection(*every)) if every else [], dtype=torch.long)
    if every and len(common) < 2:
        raise ValueError(f"these systems have {len(common)} sentences in common; evaluate them on the same ones")

    def at_common(scores: Scores) -> Scores:
        order = scores.example.argsort()
        return scores.select(order[torch.searchsorted(scores.example[order], common)])

    return [
        replace(system, scores={name: at_common(scores) for name, scores in system.scores.items()})
        for system in systems
    ]


def _first_scores(systems: Sequence[_System]) -> list[Scores]:
    return [next(iter(system.scores.values())) for system in systems if system.scores]


Test = Callable[[_System, _System], Difference | None]
"""The difference between two systems, the second minus the first; None if it is undefined."""
Figures = Sequence[PointEstimate | float | None]
"""A figure of each system; None where it was not measured."""


@final
class _Columns:
    """A table under construction."""

    def __init__(self, systems: list[_System], is_same_text: bool, has_same_tokens: bool, unit: Unit):
        self.systems, self.is_same_text, self.has_same_tokens, self.unit = systems, is_same_text, has_same_tokens, unit
        self.generations = [system.result.generation for system in systems]
        self.columns: list[Column] = []
        self.cells: list[tuple[Cell, ...]] = []
        self.real: list[Cell] = []
        self.differences: list[SystemDifference] = []
        self.footnotes: list[tuple[str, str]] = []
        self.warnings: list[str] = []

    # ---- likelihoods ------------------------------------------------------------------------------------------------

    def add_likelihoods(self) -> None:
        """One column for each kind, quantity and name."""
        without = {
            system.name: (self._note("; ".join(system.result.notes) or "no likelihood"),)
            for system in self.systems
            if not system.scores
        }
        kinds, (key, digits) = list(Likelihood), _RATES[self.unit]
        found = sorted(
            {quantity for system in self.systems for quantity in system.likelihoods},
            key=lambda one: (kinds.index(one.kind), one.name, one.quantity),
        )
        for quantity in found:
            is_several = sum(one[:2] == quantity[:2] for one in found) > 1
            summaries = [system.likelihoods[quantity] for system in self.systems if quantity in system.likelihoods]
            column = Column(
                f"{key}.{quantity.kind.value}.{quantity.name}{f'.{quantity.quantity}' if is_several else ''}",
                f"{key.replace('_', ' ')} ({_title(quantity, summaries)})",
                Direction.LOWER,
                digits,
                f"nats per {self.unit.value}",
            )
            cells = [
                self._likelihood(system, quantity)
                if quantity in system.likelihoods
                else Cell(notes=without.get(system.name, ()))
                for system in self.systems
            ]
            self._add(column, cells, list(self._obstacles(summaries)), partial(self._paired, quantity.name))

    def _obstacles(self, summaries: list[LikelihoodSummary]) -> Iterator[str]:
        """Why the numbers of a likelihood column are not comparable."""
        if not self.is_same_text:
            yield "the texts differ"
        if self.unit is Unit.TOKEN and not self.has_same_tokens:
            yield "the vocabularies differ (compare by --unit word or byte)"
        protocols = [summary.protocol for summary in summaries]
        for values, reason in (
            ({each.definition.time for each in protocols}, "the numbers of time steps differ"),
            ({each.length for each in protocols}, "length is given for some and modeled for others"),
            ({each.source_given for each in protocols}, "some are conditional on a source"),
            ({each.special_tokens for each in protocols}, "special tokens are counted for some"),
            ({each.packed for each in protocols}, "some use packed text"),
        ):
            if len(values) > 1:
                yield reason

    def _likelihood(self, system: _System, quantity: _Quantity) -> Cell:
        summary, common = system.likelihoods[quantity], system.scores[quantity.name]
        is_part = len(common) < summary.num_sentences  # others did not score all sentences that this one did
        rates = LikelihoodRates.of(common.rates()) if is_part else summary.rates
        return _cell(getattr(rates, _RATES[self.unit][0]))

    def _paired(self, name: str, best: _System, other: _System) -> Difference | None:
        first, second = best.scores[name], other.scores[name]
        if first.num_infinite or second.num_infinite:
            return None
        found = paired_bootstrap(first, second, self.unit)
        return Difference(-found.value, -found.high, -found.low, found.p_value)

    # ---- samples ----------------------------------------------------------------------------------------------------

    def add_texts(self) -> None:
        """BLEU and diversity, and what judges say."""
        found, neither = self.generations, Direction.NEITHER
        own, real = [one and one.samples for one in found], [one and one.real for one in found]
        obstacles = [] if self.is_same_text else ["the texts differ"]
        if len({(one.sampling.number, one.sampling.length) for one in found if one is not None}) > 1:
            obstacles.append("samples are of different number or length")
        figures: dict[Column, Callable[[TextMetrics], PointEstimate | float | None]] = {
            Column("bleu4", "BLEU-4", Direction.HIGHER, 3, "BLEU-4"): lambda texts: texts.bleu4,
            Column("self_bleu4", "self-BLEU-4", Direction.LOWER, 3, "self-BLEU-4"): lambda texts: texts.self_bleu4,
            # Neither high nor low is good in what follows: it is to be compared with real sentences.
            Column("distinct_2", "distinct-2", neither, 3): lambda texts: texts.distinct[1],
            Column("token_entropy", "word entropy", neither, 2): lambda texts: texts.entropy_per_text,
        }
        for column, figure in figures.items():
            of_own, of_real = ([one and figure(one) for one in texts] for texts in (own, real))
            self._add_figures(column, of_own, of_real, obstacles, partial(_unpaired, column.key))
        judgments = [one and one.judge for one in found]
        for name in sorted({one.name for one in judgments if one is not None}):
            judged = [one if one is not None and one.name == name else None for one in judgments]
            # Dull text has a low perplexity, so it is shown with its entropy and not ranked.
            self._add_figures(
                Column(f"judge.{name}", f"perplexity under {name}", neither, 1),
                [one and PointEstimate(one.samples.perplexity, one.samples.ci95) for one in judged],
                [one and one.real.perplexity for one in judged],
            )
            self._add_figures(
                Column(f"judge_entropy.{name}", f"entropy under {name}", neither, 2),
                [one and one.samples.entropy for one in judged],
                [one and one.real.entropy for one in judged],
            )
        mauve = [one and one.mauve for one in found]
        features = {one.features for one in mauve if one is not None}
        if features:
            more = [] if len(features) == 1 else ["the features differ"]
            column = Column("mauve", "MAUVE", Direction.HIGHER, 3)
            self._add_figures(column, [one and one.value for one in mauve], obstacles=[*obstacles, *more])

    def add_costs(self) -> None:
        """The cost of a sample."""
        speeds = [one and one.speed for one in self.generations]
        is_one_machine = len({(one.device, one.batch) for one in speeds if one is not None}) <= 1
        self._add_figures(
            Column("seconds_per_sample", "seconds per sample", Direction.LOWER, 3),
            [one and one.seconds_per_sample for one in speeds],
            obstacles=[] if is_one_machine else ["the machines differ"],
        )
        calls = Column("calls_per_sample", "calls per sample", Direction.LOWER, 1)
        self._add_figures(calls, [one and one.calls_per_sample for one in speeds])

    # ---- all --------------------------------------------------------------------------------------------------------

    def _add_figures(
        self, column: Column, own: Figures, real: Figures = (), obstacles: Sequence[str] = (), test: Test | None = None
    ) -> None:
        """Adds a figure of generated text, and that of real sentences if all systems agree on it."""
        self._add(column, [_cell(one) for one in own], obstacles, test)
        agreed = {_cell(one).value for one in real} - {None}  # another vocabulary decodes real sentences differently
        self.real[-1] = Cell(agreed.pop()) if len(agreed) == 1 else Cell()

    def _add(self, column: Column, cells: list[Cell], obstacles: Sequence[str], test: Test | None) -> None:
        """Ranks a column, unless an obstacle forbids it."""
        num_values = sum(cell.value is not None for cell in cells)
        if obstacles and num_values > 1 and column.better is not Direction.NEITHER:
            self.warnings.append(f"{column.title} is not ranked: {' and '.join(obstacles)}")
        elif num_values > 1:
            cells = ranked(cells, column)
            cells = cells if test is None else self._tested(column, cells, test)
        self.columns.append(column)
        self.cells.append(tuple(cells))
        self.real.append(Cell())

    def _tested(self, column: Column, cells: list[Cell], test: Test) -> list[Cell]:
        """Compares every system with the best."""
        best = next((system for system, cell in zip(self.systems, cells, strict=True) if cell.best), None)
        if best is None:
            return cells
        tested = []
        for system, cell in zip(self.systems, cells, strict=True):
            apart = None if cell.value is None or cell.best else test(best, system)
            if apart is not None:
                interval = apart.low, apart.high
                self.differences.append(
                    SystemDifference(column, system.name, best.name, apart.value, interval, apart.p_value)
                )
            tested.append(replace(cell, significant=apart is not None and apart.p_value < LEVEL))
        return tested

    def _note(self, text: str) -> str:
        """The mark of a footnote, a new one unless the text has one already."""
        number = len(self.footnotes)
        new = string.ascii_lowercase[number % 26] * (1 + number // 26)
        mark = next((mark for mark, known in self.footnotes if known == text), new)
        if mark == new:
            self.footnotes.append((mark, text))
        return mark

    def finished(self, requested: Unit | None) -> Table:
        """The table, with what all systems have in common below it, and warnings of what they do not."""
        if any(cell.significant for column in self.cells for cell in column):
            self.footnotes.append((SIGNIFICANT, _SIGNIFICANCE))
        if requested is None and not self.has_same_tokens:
            self.footnotes.append(("", f"vocabularies differ, so likelihoods are given per {self.unit.value}"))
        shared, different = _protocol(self.systems)
        scored = [len(scores) for system in self.systems for scores in system.result.scores.values()]
        if scored and self.is_same_text:
            num_common = len(_first_scores(self.systems)[0])
            left = f" that all systems scored, of {max(scored):,}" if num_common < max(scored) else ""
            shared.insert(0, f"{num_common:,} sentences{left}")
        self.footnotes.append(("", f"{'; '.join(shared)}; intervals 95 %"))
        names, rows = [system.name for system in self.systems], [*zip(*self.cells, strict=True)]
        if any(cell.value is not None for cell in self.real):
            names.append("real sentences")
            rows.append(tuple(self.real))
        warnings = *different, *self.warnings, *_stale(self.systems)
        return Table(
            tuple(self.columns), tuple(names), tuple(rows), tuple(self.footnotes), warnings, tuple(self.differences)
        )


def _cell(found: PointEstimate | float | None) -> Cell:
    return Cell(found.value, found.ci95) if isinstance(found, PointEstimate) else Cell(found)


def _title(quantity: _Quantity, summaries: list[LikelihoodSummary]) -> str:
    times = {summary.protocol.definition.time for summary in summaries}
    if times == {None}:
        return f"{quantity.kind.value}, {summaries[0].protocol.definition.estimator.value}"
    time = str(times.pop()) if len(times) == 1 else "different time grids"
    return f"{quantity.kind.value}, {quantity.quantity}, {time}"


def _unpaired(name: str, best: _System, other: _System) -> Difference:
    return independent_difference(getattr(best.result, name), getattr(other.result, name))


def independent_difference(first: PerSample, second: PerSample) -> Difference:
    """The difference of two means over samples, second minus first, which are resampled independently.

    p is twice the smaller fraction of resampled differences on either side of 0, one added so that it is never 0.
    """
    means = [resampled_sums([one.values], seed)[0] / len(one.values) for seed, one in enumerate((first, second))]
    differences = means[1] - means[0]
    tail = 1 + min(int(np.sum(differences <= 0)), int(np.sum(differences >= 0)))
    low, high = percentile_interval(differences)
    return Difference(second.mean - first.mean, low, high, min(1.0, 2 * tail / (len(differences) + 1)))


def _stale(systems: Sequence[_System]) -> list[str]:
    """Warnings of runs that were trained further after their evaluation."""
    return [
        f"{system.name} was evaluated with other weights than its run has now; evaluate it again (--overwrite)"
        for system in systems
        if system.folder is not None
        and (run := RunFolder(system.folder.parent)).config.exists()
        and run.model.exists()
        and Weights.of(run.model).files != system.result.weights.files
    ]


def _protocol(systems: Sequence[_System]) -> tuple[list[str], list[str]]:
    """What all systems agree on, and warnings of what they do not; settings that a system lacks are not compared."""
    settings = {system.name: _settings(system.result) for system in systems}
    shared, different = [], []
    for name in dict.fromkeys(name for own in settings.values() for name in own):
        having: dict[str, list[str]] = {}  # the systems of each value
        for system, own in settings.items():
            if name in own:
                having.setdefault(own[name], []).append(system)
        if len(having) == 1:
            shared.append(f"{name}: {next(iter(having))}")
        else:
            each = (
                f"{value} ({', '.join(own) if len(own) <= 3 else f'{len(own)} systems'})"
                for value, own in having.items()
            )
            different.append(f"{name} differs: {', '.join(each)}")
    return shared, different


def _settings(result: EvaluationResult) -> dict[str, str]:
    """What must agree for numbers to be taken at face value, as a footnote shows it."""
    data, own, found = result.data, result.primary, result.generation
    shown = {"text": f"{data.corpus}, split {data.split.value}, sha256 {data.corpus_sha256[:12]}"}
    if own is not None:
        shown |= {
            "length": "given" if own.protocol.length is Length.GIVEN else "modeled",
            "special tokens": "counted" if own.protocol.special_tokens else "not counted",
            "sequences": "packed text" if own.protocol.packed else "single sentences",
            "arithmetic": own.protocol.arithmetic,
        }
    if found is not None:
        shown |= {
            "samples": f"{found.sampling.number:,} of length {length_text(found.sampling.length)}",
            "sampler": str(found.sampling.sampler),
            "sampling steps": str(found.sampling.steps),
            "temperature": str(found.sampling.temperature),
            "top-k": str(found.sampling.top_k or "off"),
            "top-p": str(found.sampling.top_p or "off"),
            "machine": f"{found.speed.device}, {found.speed.batch} samples at a time",
        }
    return shown
