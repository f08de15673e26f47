"""Several evaluation results in one table, without comparing what is not comparable.

A likelihood column holds one kind (exact, bound or pseudo), one quantity and one name (continuous, grid, …). Systems
are compared on the sentences that all of them scored, by a paired bootstrap over sentences (Efron 1979; see
`intervals`); samples are not paired, so BLEU is resampled for each system by itself. Where vocabularies differ,
likelihoods are given per word. A column whose numbers were obtained under different protocols is shown but not ranked,
and a warning says why.

This module depends on evaluation results, not on models.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np
import torch

from diffusionbert.evaluation.metrics import PerSample
from diffusionbert.evaluation.result import EvaluationResult, Generation, hashes_in, locate
from diffusionbert.evaluation.result_table import length_text
from diffusionbert.evaluation.tables import (
    SIGNIFICANT,
    Cell,
    Column,
    Direction,
    SystemDifference,
    Table,
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
from diffusionbert.objectives.base import Likelihood, TimeGrid
from diffusionbert.training.run_folder import RunFolder

LEVEL = 0.05
"""Below this p-value a difference is called significant."""


@final
@dataclass(frozen=True)
class _Rate:
    """How a table shows likelihoods per unit."""

    key: str
    """A field of `LikelihoodRates`."""
    title: str
    digits: int

    def of(self, rates: LikelihoodRates) -> PointEstimate | None:
        found: PointEstimate | None = getattr(rates, self.key)
        return found


_RATES = {
    Unit.TOKEN: _Rate("perplexity_per_token", "perplexity per token", 2),
    Unit.WORD: _Rate("perplexity_per_word", "perplexity per word", 1),
    Unit.BYTE: _Rate("bits_per_byte", "bits per byte", 3),
}


@final
@dataclass(frozen=True)
class _Quantity:
    """What a likelihood column holds."""

    kind: Likelihood
    quantity: str
    name: str

    @property
    def order(self) -> tuple[int, str, str]:
        return list(Likelihood).index(self.kind), self.name, self.quantity


@final
@dataclass(frozen=True, eq=False)
class System:
    """One result under a name that no other has."""

    name: str
    result: EvaluationResult
    scores: dict[str, Scores]
    """On the sentences that all systems scored, if they scored the same corpus."""
    folder: Path | None = None

    @property
    def generation(self) -> Generation | None:
        """What was measured on generated text."""
        return self.result.generation

    def quantities(self) -> list[_Quantity]:
        """The likelihoods of the system."""
        return [
            _Quantity(summary.kind, summary.protocol.definition.quantity, name)
            for name, summary in self.result.likelihoods.items()
        ]

    def summary(self, quantity: _Quantity) -> LikelihoodSummary | None:
        """One likelihood; None if the system does not have it."""
        return self.result.likelihoods[quantity.name] if quantity in self.quantities() else None


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
    systems = _common(_systems(results, names))
    scored = [system for system in systems if system.scores]
    is_same_text = _is_same_text(systems)
    has_same_tokens = is_same_text and all(
        torch.equal(first.tokens, second.tokens) for first, second in pairwise(_any_scores(scored))
    )
    chosen = unit or (Unit.TOKEN if has_same_tokens or len(scored) < 2 else Unit.WORD)
    table = _Columns(systems, is_same_text, has_same_tokens or len(scored) < 2, chosen)
    table.add_likelihoods()
    table.add_texts()
    table.add_costs()
    table.warnings += _stale(systems)
    return table.finished(unit)


def _systems(results: Sequence[EvaluationResult | str | Path], names: Sequence[str] | None) -> list[System]:
    if not results:
        raise ValueError("there is nothing to compare; give run folders that were evaluated")
    found: list[tuple[EvaluationResult, Path | None]] = []
    for one in results:
        folder = None if isinstance(one, EvaluationResult) else _folder(Path(one))
        found.append((one if isinstance(one, EvaluationResult) else EvaluationResult.load(one), folder))
    if names is None:
        by_path = iter(shortest_names([_named_path(folder) for _, folder in found if folder is not None]))
        names = [one.name if folder is None else next(by_path) for one, folder in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two systems are called {twice!r}; give `names`")
    return [System(name, one, one.scores, folder) for name, (one, folder) in zip(names, found, strict=True)]


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; give run folders, or folders that evaluate wrote")
    if RunFolder(folder).config.exists() and not (folder / "evaluation").exists():
        raise ValueError(
            f"the run {str(folder)!r} has not been evaluated; run: diffusionbert evaluate --model {folder} --data …"
        )
    return locate(folder).resolve()


def _named_path(folder: Path) -> Path:
    """The path by which a system is called; an `evaluation` folder is called by what it is in."""
    return folder.parent if folder.name == "evaluation" else folder


def _is_same_text(systems: Sequence[System]) -> bool:
    return len({system.result.data.corpus_sha256 for system in systems}) == 1


def _common(systems: list[System]) -> list[System]:
    """The systems on the sentences that all of them scored."""
    if not _is_same_text(systems):
        return systems
    every = [set(scores.example.tolist()) for scores in _any_scores(systems)]
    common = torch.tensor(sorted(set.intersection(*every)) if every else [], dtype=torch.long)
    if every and len(common) < 2:
        raise ValueError(f"these systems have {len(common)} sentences in common; evaluate them on the same ones")
    return [
        replace(system, scores={name: _at(scores, common) for name, scores in system.scores.items()})
        for system in systems
    ]


def _stale(systems: Sequence[System]) -> list[str]:
    """Warnings of runs that were trained further after their evaluation."""
    return [
        f"{system.name} was evaluated with other weights than its run has now; evaluate it again (--overwrite)"
        for system in systems
        if system.folder is not None
        and (run := RunFolder(system.folder.parent)).config.exists()
        and run.model.exists()
        and hashes_in(run.model) != system.result.weights.files
    ]


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Names of paths: as many of their last parts as tell them apart."""
    if not paths:
        return []
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"{str(twice)!r} was given twice; give each once")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _at(scores: Scores, examples: torch.Tensor) -> Scores:
    order = scores.example.argsort()
    return scores.select(order[torch.searchsorted(scores.example[order], examples)])


def _any_scores(systems: Sequence[System]) -> list[Scores]:
    return [next(iter(system.scores.values())) for system in systems if system.scores]


Test = Callable[[System, System], Difference | None]
"""The difference between two systems, the second minus the first; None if it is undefined."""
Get = Callable[[Generation], float | None]
"""A figure of generated text."""


@final
class _Columns:
    """A table under construction."""

    def __init__(self, systems: list[System], is_same_text: bool, has_same_tokens: bool, unit: Unit):
        self.systems, self.is_same_text, self.has_same_tokens, self.unit = systems, is_same_text, has_same_tokens, unit
        self.columns: list[Column] = []
        self.cells: list[tuple[Cell, ...]] = []
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
        found = sorted({each for system in self.systems for each in system.quantities()}, key=lambda each: each.order)
        names = [(each.kind, each.name) for each in found]
        shown = _RATES[self.unit]
        for quantity in found:
            several = f".{quantity.quantity}" if names.count((quantity.kind, quantity.name)) > 1 else ""
            column = Column(
                f"{shown.key}.{quantity.kind.value}.{quantity.name}{several}",
                f"{shown.title} ({self._title(quantity)})",
                Direction.LOWER,
                shown.digits,
                f"nats per {self.unit.value}",
            )
            cells = tuple(self._likelihood(system, quantity, without) for system in self.systems)
            self._add(column, cells, list(self._obstacles(quantity)), partial(self._paired, quantity))

    def _summaries(self, quantity: _Quantity) -> list[LikelihoodSummary]:
        found = [system.summary(quantity) for system in self.systems]
        return [summary for summary in found if summary is not None]

    def _times(self, quantity: _Quantity) -> set[TimeGrid | None]:
        return {summary.protocol.definition.time for summary in self._summaries(quantity)}

    def _title(self, quantity: _Quantity) -> str:
        times = self._times(quantity)
        if times == {None}:
            estimator = self._summaries(quantity)[0].protocol.definition.estimator
            return f"{quantity.kind.value}, {estimator.value}"
        time = str(next(iter(times))) if len(times) == 1 else "different time grids"
        return f"{quantity.kind.value}, {quantity.quantity}, {time}"

    def _obstacles(self, quantity: _Quantity) -> Iterator[str]:
        """Why the numbers of a likelihood column are not comparable."""
        if not self.is_same_text:
            yield "the texts differ"
        if self.unit is Unit.TOKEN and not self.has_same_tokens:
            yield "the vocabularies differ (compare by --unit word or byte)"
        if len(self._times(quantity)) > 1:
            yield "the numbers of time steps differ"
        protocols = [summary.protocol for summary in self._summaries(quantity)]
        for values, reason in (
            ({each.length for each in protocols}, "length is given for some and modelled for others"),
            ({each.source_given for each in protocols}, "some are conditional on a source"),
            ({each.special_tokens for each in protocols}, "special tokens are counted for some"),
            ({each.packed for each in protocols}, "some use packed text"),
        ):
            if len(values) > 1:
                yield reason

    def _likelihood(self, system: System, quantity: _Quantity, without: Mapping[str, tuple[str, ...]]) -> Cell:
        summary = system.summary(quantity)
        if summary is None:
            return Cell(notes=without.get(system.name, ()))
        rates, common = summary.rates, system.scores[quantity.name]
        if len(common) < summary.num_sentences:  # others did not score all sentences that this one did
            rates = LikelihoodRates.of(common.rates())
        found = _RATES[self.unit].of(rates)
        return Cell() if found is None else Cell(found.value, found.ci95)

    def _paired(self, quantity: _Quantity, best: System, other: System) -> Difference | None:
        first, second = best.scores[quantity.name], other.scores[quantity.name]
        if first.num_infinite or second.num_infinite:
            return None
        found = paired_bootstrap(first, second, self.unit)
        return Difference(-found.value, -found.high, -found.low, found.p_value)

    # ---- samples ----------------------------------------------------------------------------------------------------

    def add_texts(self) -> None:
        """BLEU and diversity, and what judges say."""
        known = [system.generation.sampling for system in self.systems if system.generation is not None]
        obstacles = [] if self.is_same_text else ["the texts differ"]
        if len({(sampling.number, sampling.length) for sampling in known}) > 1:
            obstacles.append("samples are of different number or length")
        bleu, self_bleu = (
            Column("bleu4", "BLEU-4", Direction.HIGHER, 3, "BLEU-4"),
            Column("self_bleu4", "self-BLEU-4", Direction.LOWER, 3, "self-BLEU-4"),
        )
        cells = self._measured(lambda found: found.samples.bleu4)
        self._add(
            bleu, cells, obstacles, lambda best, other: independent_difference(best.result.bleu4, other.result.bleu4)
        )
        cells = self._measured(lambda found: found.samples.self_bleu4)
        self._add(
            self_bleu,
            cells,
            obstacles,
            lambda best, other: independent_difference(best.result.self_bleu4, other.result.self_bleu4),
        )
        # Neither high nor low is good in what follows: it is to be compared with real sentences.
        self._add_figure("distinct_2", "distinct-2", 3, lambda found: found.samples.distinct[1])
        self._add_figure("token_entropy", "word entropy", 2, lambda found: found.samples.entropy_per_text)
        self._add_judges(obstacles)

    def _add_judges(self, obstacles: list[str]) -> None:
        known = [system.generation for system in self.systems if system.generation is not None]
        for judge in sorted({found.judge.name for found in known if found.judge is not None}):
            judged = [
                found.judge.samples
                if (found := system.generation) is not None and found.judge is not None and found.judge.name == judge
                else None
                for system in self.systems
            ]
            # Dull text has a low perplexity, so it is shown with its entropy and not ranked.
            cells = tuple(Cell() if own is None else Cell(own.perplexity, own.ci95) for own in judged)
            self._add(Column(f"judge.{judge}", f"perplexity under {judge}", Direction.NEITHER, 1), cells)
            cells = tuple(Cell() if own is None else Cell(own.entropy) for own in judged)
            self._add(Column(f"judge_entropy.{judge}", f"entropy under {judge}", Direction.NEITHER, 2), cells)
        features = {found.mauve.features for found in known if found.mauve is not None}
        if features:
            cells = self._figures(lambda found: None if found.mauve is None else found.mauve.value)
            more = [] if len(features) == 1 else ["the features differ"]
            self._add(Column("mauve", "MAUVE", Direction.HIGHER, 3), cells, [*obstacles, *more])

    def add_costs(self) -> None:
        """The cost of a sample."""
        known = [system.generation.speed for system in self.systems if system.generation is not None]
        obstacles = [] if len({(speed.device, speed.batch) for speed in known}) <= 1 else ["the machines differ"]
        seconds = self._figures(lambda found: found.speed.seconds_per_sample)
        self._add(Column("seconds_per_sample", "seconds per sample", Direction.LOWER, 3), seconds, obstacles)
        calls = self._figures(lambda found: found.speed.calls_per_sample)
        self._add(Column("calls_per_sample", "calls per sample", Direction.LOWER, 1), calls)

    # ---- all --------------------------------------------------------------------------------------------------------

    def _figures(self, get: Get) -> tuple[Cell, ...]:
        return tuple(Cell() if system.generation is None else Cell(get(system.generation)) for system in self.systems)

    def _measured(self, get: Callable[[Generation], PointEstimate]) -> tuple[Cell, ...]:
        found = [None if system.generation is None else get(system.generation) for system in self.systems]
        return tuple(Cell() if one is None else Cell(one.value, one.ci95) for one in found)

    def _add_figure(self, key: str, title: str, digits: int, get: Get) -> None:
        self._add(Column(key, title, Direction.NEITHER, digits), self._figures(get))

    def _add(
        self, column: Column, cells: tuple[Cell, ...], obstacles: Sequence[str] = (), test: Test | None = None
    ) -> None:
        """Ranks a column, unless an obstacle forbids it."""
        num_values = sum(cell.value is not None for cell in cells)
        if obstacles and num_values > 1 and column.better is not Direction.NEITHER:
            self.warnings.append(f"{column.title} is not ranked: {' and '.join(obstacles)}")
        elif num_values > 1:
            cells = ranked(cells, column)
            cells = cells if test is None else self._tested(column, cells, test)
        self.columns.append(column)
        self.cells.append(cells)

    def _tested(self, column: Column, cells: tuple[Cell, ...], test: Test) -> tuple[Cell, ...]:
        """Compares every system with the best."""
        best = next((system for system, cell in zip(self.systems, cells, strict=True) if cell.best), None)
        tested = []
        for system, cell in zip(self.systems, cells, strict=True):
            apart = test(best, system) if best is not None and cell.value is not None and not cell.best else None
            if best is not None and apart is not None:
                interval = apart.low, apart.high
                self.differences.append(
                    SystemDifference(column, system.name, best.name, apart.value, interval, apart.p_value)
                )
            tested.append(replace(cell, significant=apart is not None and apart.p_value < LEVEL))
        return tuple(tested)

    def _note(self, text: str) -> str:
        """The mark of a footnote, a new one unless the text has one already."""
        for mark, said in self.footnotes:
            if said == text:
                return mark
        number = len(self.footnotes)
        mark = string.ascii_lowercase[number % 26] * (1 + number // 26)
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
            num_common = len(_any_scores(self.systems)[0])
            left = f" that all systems scored, of {max(scored):,}" if num_common < max(scored) else ""
            shared.insert(0, f"{num_common:,} sentences{left}")
        self.footnotes.append(("", f"{'; '.join(shared)}; intervals 95 %"))
        rows, names = [*zip(*self.cells, strict=True)], [system.name for system in self.systems]
        real = _agreed([_real(system.generation) for system in self.systems if system.generation is not None])
        if real:
            rows.append(tuple(Cell(real.get(column.key)) for column in self.columns))
            names.append("real sentences")
        return Table(
            tuple(self.columns),
            tuple(names),
            tuple(rows),
            tuple(self.footnotes),
            (*different, *self.warnings),
            tuple(self.differences),
        )


_SIGNIFICANCE = (
    f"differs from the best, p < {LEVEL:.2f}: likelihoods by paired bootstrap over sentences, BLEU by bootstrap over "
    "the samples of each system; not corrected for the number of comparisons"
)


def independent_difference(first: PerSample, second: PerSample) -> Difference:
    """The difference of two means over samples, second minus first, which are resampled independently.

    p is twice the smaller share of resampled differences on either side of 0, one added so that it is never 0.
    """
    means = [resampled_sums([one.values], seed)[0] / len(one.values) for seed, one in enumerate((first, second))]
    differences = means[1] - means[0]
    tail = 1 + min(int(np.sum(differences <= 0)), int(np.sum(differences >= 0)))
    low, high = percentile_interval(differences)
    return Difference(second.mean - first.mean, low, high, min(1.0, 2 * tail / (len(differences) + 1)))


def _real(found: Generation) -> dict[str, float]:
    """The figures of real sentences, by the keys of columns."""
    real = found.real
    figures = {"bleu4": real.bleu4.value, "self_bleu4": real.self_bleu4.value, "token_entropy": real.entropy_per_text}
    if real.distinct[1] is not None:
        figures["distinct_2"] = real.distinct[1]
    if found.judge is not None:
        figures[f"judge.{found.judge.name}"] = found.judge.real.perplexity
        figures[f"judge_entropy.{found.judge.name}"] = found.judge.real.entropy
    return figures


def _agreed(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The figures on which all systems agree; another vocabulary decodes real sentences differently."""
    found: dict[str, set[float]] = {}
    for own in figures:
        for key, value in own.items():
            found.setdefault(key, set()).add(value)
    return {key: values.pop() for key, values in found.items() if len(values) == 1}


def _protocol(systems: Sequence[System]) -> tuple[list[str], list[str]]:
    """What all systems agree on, and warnings of what they do not; settings that a system lacks are not compared."""
    settings = {system.name: _settings(system.result) for system in systems}
    shared, different = [], []
    for name in dict.fromkeys(name for own in settings.values() for name in own):
        values = {system: own[name] for system, own in settings.items() if name in own}
        if len(set(values.values())) == 1:
            shared.append(f"{name}: {next(iter(values.values()))}")
        else:
            different.append(f"{name} differs: {_grouped(values)}")
    return shared, different


def _grouped(values: dict[str, str]) -> str:
    """The values and their systems; where many share one, how many."""
    by_value: dict[str, list[str]] = {}
    for system, value in values.items():
        by_value.setdefault(value, []).append(system)
    return ", ".join(
        f"{value} ({', '.join(systems) if len(systems) <= 3 else f'{len(systems)} systems'})"
        for value, systems in by_value.items()
    )


def _settings(result: EvaluationResult) -> dict[str, str]:
    """What must agree for numbers to be taken at face value, as a footnote shows it."""
    data, own, found = result.data, result.primary, result.generation
    shown = {"text": f"{data.corpus}, split {data.split.value}, sha256 {data.corpus_sha256[:12]}"}
    if own is not None:
        protocol = own.protocol
        shown |= {
            "length": "given" if protocol.length is Length.GIVEN else "modelled",
            "special tokens": "counted" if protocol.special_tokens else "not counted",
            "sequences": "packed text" if protocol.packed else "single sentences",
            "arithmetic": protocol.arithmetic,
        }
    if found is None:
        return shown
    sampling, speed = found.sampling, found.speed
    return shown | {
        "samples": f"{sampling.number:,} of length {length_text(sampling.length)}",
        "sampler": str(sampling.sampler),
        "sampling steps": str(sampling.steps),
        "temperature": str(sampling.temperature),
        "top-k": str(sampling.top_k or "off"),
        "top-p": str(sampling.top_p or "off"),
        "machine": f"{speed.device}, {speed.batch} samples at a time",
    }
