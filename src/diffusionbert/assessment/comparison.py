"""Several evaluations side by side, without comparing what does not compare.

A likelihood's column holds one kind, exact, bound or pseudo, and one way, continuous or over a grid. Systems are
compared on the sentences that all of them read, by a paired bootstrap over those (Efron 1979; see `intervals`); samples
are not pairs, so that BLEU of two systems is resampled on either side. Where vocabularies differ, a token is no unit.
A column whose numbers came about in different ways is shown, but not ranked, and a warning says why.

Knows what `evaluate` leaves in a folder, and nothing of models.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from diffusionbert.assessment.report import Evaluation, hashes_in, read_evaluation
from diffusionbert.assessment.tables import SIGNIFICANT, Cell, Column, Direction, Table, ranked
from diffusionbert.checkpoints import RunFolder
from diffusionbert.likelihood.intervals import resampled_sums
from diffusionbert.likelihood.scores import Scores, Unit, paired_bootstrap, rates_to_json
from diffusionbert.method import Likelihood
from diffusionbert.metrics import PerSample
from diffusionbert.objectives.base import CONTINUOUS

LEVEL = 0.05
"""Below this probability a difference is called significant."""
_FIGURES = {
    Unit.TOKEN: ("perplexity_per_token", "perplexity a token", 2),
    Unit.WORD: ("perplexity_per_word", "perplexity a word", 1),
    Unit.BYTE: ("bits_per_byte", "bits a byte", 3),
}
"""Of a likelihood by unit: its name in a report, its title, its digits."""


@final
@dataclass(frozen=True, eq=False)
class System:
    """One evaluation, by a name that no other has."""

    name: str
    evaluation: Evaluation
    scores: dict[str, Scores]
    """On the sentences that all systems read, where they read the same corpus."""

    @property
    def report(self) -> dict[str, Any]:
        """`evaluation.json`."""
        return self.evaluation.report

    def likelihood(self, way: tuple[Likelihood, str]) -> Scores | None:
        """The nats of one kind and way."""
        scores = self.scores.get(way[1])
        return scores if scores is not None and scores.kind is way[0] else None


def compare(folders: Sequence[Path], unit: Unit | None = None, names: Sequence[str] | None = None) -> Table:
    """Reads evaluations and puts them into one table; without a unit, tokens where they are the same, else words.

    Without names, systems are called by their folders.
    """
    systems = _systems(folders, names)
    scored = [system for system in systems if system.scores]
    is_same_text = len({system.report["data"]["corpus_sha256"] for system in systems}) == 1
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


def _systems(folders: Sequence[Path], names: Sequence[str] | None) -> list[System]:
    if not folders:
        raise ValueError("there is nothing to compare; give run folders that were evaluated")
    evaluations = [_read(folder) for folder in folders]
    systems = [System(name, one, one.scores) for name, one in zip(names or _names(folders), evaluations, strict=True)]
    if len({system.report["data"]["corpus_sha256"] for system in systems}) > 1:
        return systems
    every = [set(scores.example.tolist()) for scores in _any_scores(systems)]
    common = torch.tensor(sorted(set.intersection(*every)) if every else [], dtype=torch.long)
    if every and len(common) < 2:
        raise ValueError(f"these systems have {len(common)} sentences in common; evaluate them on the same ones")
    return [
        replace(system, scores={name: _at(scores, common) for name, scores in system.scores.items()})
        for system in systems
    ]


def _read(folder: Path) -> Evaluation:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; give run folders, or folders that evaluate wrote")
    if RunFolder(folder).config.exists() and not (folder / "evaluation").exists():
        raise ValueError(
            f"the run {str(folder)!r} was not evaluated yet; do so: diffusionbert evaluate --model {folder} --data …"
        )
    return read_evaluation(folder)


def _stale(systems: Sequence[System]) -> list[str]:
    """Warnings of runs that went on after they had been evaluated."""
    return [
        f"{system.name} was evaluated with other weights than its run holds now; evaluate it anew (--overwrite)"
        for system in systems
        if (run := RunFolder(system.evaluation.folder.resolve().parent)).config.exists()
        and run.model.exists()
        and hashes_in(run.model) != system.report["weights"]["files"]
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """What systems are called; an `evaluation` folder is called by what it is in."""
    paths = [
        folder.resolve().parent if folder.resolve().name == "evaluation" else folder.resolve() for folder in folders
    ]
    return telling_names(paths)


def telling_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
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
    return scores.rows(order[torch.searchsorted(scores.example[order], examples)])


def _any_scores(systems: Sequence[System]) -> list[Scores]:
    return [next(iter(system.scores.values())) for system in systems if system.scores]


Test = Callable[[System, System], float]
"""The probability that chance alone sets two systems apart."""
Figure = Callable[[dict[str, Any]], float | None]
"""A number of a report."""


@final
class _Columns:
    """A table as it grows."""

    def __init__(self, systems: list[System], is_same_text: bool, has_same_tokens: bool, unit: Unit):
        self.systems, self.is_same_text, self.has_same_tokens, self.unit = systems, is_same_text, has_same_tokens, unit
        self.columns: list[Column] = []
        self.cells: list[tuple[Cell, ...]] = []
        self.footnotes: list[tuple[str, str]] = []
        self.warnings: list[str] = []

    # ---- likelihoods ------------------------------------------------------------------------------------------------

    def add_likelihoods(self) -> None:
        """One column for each kind and way."""
        ways = {(scores.kind, name) for system in self.systems for name, scores in system.scores.items()}
        kinds = list(Likelihood)
        without = {
            system.name: (self._note("; ".join(system.report["notes"]) or "no likelihood"),)
            for system in self.systems
            if not system.scores
        }
        figure, title, digits = _FIGURES[self.unit]
        for kind, name in sorted(ways, key=lambda way: (kinds.index(way[0]), way[1])):
            steps = self._steps(kind, name)
            called = f"{kind.value}, {min(steps) if len(steps) == 1 else name}"
            column = Column(f"{figure}.{kind.value}.{name}", f"{title} ({called})", Direction.LOWER, digits)
            cells = tuple(
                Cell(notes=without.get(system.name, ()))
                if system.likelihood((kind, name)) is None
                else self._likelihood(system, name, figure)
                for system in self.systems
            )
            self._add(column, cells, list(self._obstacles(kind, name)), partial(self._paired, (kind, name)))

    def _cards(self, kind: Likelihood, name: str) -> list[dict[str, Any]]:
        having = [system for system in self.systems if system.likelihood((kind, name)) is not None]
        return [system.report["likelihoods"][name]["protocol"] for system in having]

    def _steps(self, kind: Likelihood, name: str) -> set[str]:
        """The continuous limit is one quantity however it is estimated; grids and other ways have their own steps."""
        return {CONTINUOUS if name == CONTINUOUS else card["steps"].split(",")[0] for card in self._cards(kind, name)}

    def _obstacles(self, kind: Likelihood, name: str) -> Iterator[str]:
        """Why the numbers of a likelihood's column do not compare."""
        if not self.is_same_text:
            yield "the texts differ"
        if self.unit is Unit.TOKEN and not self.has_same_tokens:
            yield "the vocabularies differ (compare by --unit word or byte)"
        if len(self._steps(kind, name)) > 1:
            yield "the steps differ"
        for key, words in (
            ("length", "length is given to some and paid for by others"),
            ("special_tokens", "special tokens are counted for some"),
            ("packed", "some read packed text"),
        ):
            if len({card[key] for card in self._cards(kind, name)}) > 1:
                yield words

    def _likelihood(self, system: System, name: str, figure: str) -> Cell:
        plain = system.report["likelihoods"][name]
        if len(system.scores[name]) < len(system.evaluation.scores[name]):  # others did not read all that this one did
            plain = rates_to_json(system.scores[name].rates())
        value, low, high = (math.inf if end is None else end for end in (plain[figure], *plain["ci95"][figure]))
        return Cell(value, (low, high))

    def _paired(self, way: tuple[Likelihood, str], best: System, other: System) -> float:
        first, second = best.likelihood(way), other.likelihood(way)
        assert first is not None
        assert second is not None
        if first.num_infinite or second.num_infinite:
            return math.nan
        return paired_bootstrap(first, second, self.unit).p_value

    # ---- samples ----------------------------------------------------------------------------------------------------

    def add_texts(self) -> None:
        """BLEU and diversity, and what judges say."""
        samples = [system.report["sampling"] for system in self.systems]
        obstacles = [] if self.is_same_text else ["the texts differ"]
        if len({(plain["number"], str(plain["length"])) for plain in samples}) > 1:
            obstacles.append("samples are of different number or length")
        for key, title, better in (
            ("bleu4", "BLEU-4", Direction.HIGHER),
            ("self_bleu4", "self-BLEU-4", Direction.LOWER),
        ):
            cells = tuple(Cell(system.report[key], tuple(system.report["ci95"][key])) for system in self.systems)
            self._add(Column(key, title, better, 3), cells, obstacles, partial(_independent, key))
        # Neither much nor little is good of what follows: it is to be held against real sentences.
        for column, figure in (
            (Column("distinct_2", "distinct-2", Direction.NEITHER, 3), lambda report: report["distinct_2"]),
            (
                Column("token_entropy", "word entropy", Direction.NEITHER, 2),
                lambda report: report["token_entropy"]["per_sample"],
            ),
        ):
            self._add(column, self._figures(figure))
        self._add_judges(obstacles)

    def _add_judges(self, obstacles: list[str]) -> None:
        reports = [system.report for system in self.systems]
        for judge in sorted({report["judge"]["name"] for report in reports if report["judge"]}):
            readings = [
                report["judge"]["samples"] if report["judge"] and report["judge"]["name"] == judge else None
                for report in reports
            ]
            # Dull text has a low one, so it stands beside entropy and is not ranked.
            cells = tuple(
                Cell() if own is None else Cell(own["perplexity"], (own["ci95"][0], own["ci95"][1])) for own in readings
            )
            self._add(Column(f"judge.{judge}", f"perplexity to {judge}", Direction.NEITHER, 1), cells)
            cells = tuple(Cell() if own is None else Cell(own["entropy"]) for own in readings)
            self._add(Column(f"judge_entropy.{judge}", f"entropy to {judge}", Direction.NEITHER, 2), cells)
        features = {report["mauve"]["features"] for report in reports if report["mauve"]}
        if features:
            cells = self._figures(lambda report: report["mauve"]["value"] if report["mauve"] else None)
            more = [] if len(features) == 1 else ["the features differ"]
            self._add(Column("mauve", "MAUVE", Direction.HIGHER, 3), cells, [*obstacles, *more])

    def add_costs(self) -> None:
        """What a sample costs."""
        machines = {(system.report["speed"]["device"], system.report["speed"]["batch"]) for system in self.systems}
        obstacles = [] if len(machines) == 1 else ["the machines differ"]
        seconds = self._figures(lambda report: report["speed"]["seconds_per_sample"])
        self._add(Column("seconds_per_sample", "seconds a sample", Direction.LOWER, 3), seconds, obstacles)
        calls = self._figures(lambda report: report["speed"]["calls_per_sample"])
        self._add(Column("calls_per_sample", "calls a sample", Direction.LOWER, 1), calls)

    # ---- all --------------------------------------------------------------------------------------------------------

    def _figures(self, figure: Figure) -> tuple[Cell, ...]:
        return tuple(Cell(figure(system.report)) for system in self.systems)

    def _add(
        self, column: Column, cells: tuple[Cell, ...], obstacles: Sequence[str] = (), test: Test | None = None
    ) -> None:
        """Ranks a column, unless something stands against it."""
        num_values = sum(cell.value is not None for cell in cells)
        if obstacles and num_values > 1 and column.better is not Direction.NEITHER:
            self.warnings.append(f"{column.title} is not ranked: {' and '.join(obstacles)}")
        elif num_values > 1:
            cells = ranked(cells, column)
            cells = cells if test is None else self._tested(cells, test)
        self.columns.append(column)
        self.cells.append(cells)

    def _tested(self, cells: tuple[Cell, ...], test: Test) -> tuple[Cell, ...]:
        best = next((system for system, cell in zip(self.systems, cells, strict=True) if cell.best), None)
        return tuple(
            replace(cell, significant=test(best, system) < LEVEL)
            if best is not None and cell.value is not None and not cell.best
            else cell
            for system, cell in zip(self.systems, cells, strict=True)
        )

    def _note(self, text: str) -> str:
        """The mark of a footnote, a new one unless it has been said before."""
        for mark, said in self.footnotes:
            if said == text:
                return mark
        number = len(self.footnotes)
        mark = string.ascii_lowercase[number % 26] * (1 + number // 26)
        self.footnotes.append((mark, text))
        return mark

    def finished(self, asked: Unit | None) -> Table:
        """The table, with what all have in common below it and warnings of what they have not."""
        if any(cell.significant for column in self.cells for cell in column):
            self.footnotes.append((SIGNIFICANT, _SIGNIFICANCE))
        if asked is None and not self.has_same_tokens:
            self.footnotes.append(("", f"vocabularies differ, so likelihoods are given a {self.unit.value}"))
        shared, different = _protocol(self.systems)
        read = [len(scores) for system in self.systems for scores in system.evaluation.scores.values()]
        if read and self.is_same_text:
            num_common = len(_any_scores(self.systems)[0])
            left = f", which all systems read, of {max(read):,}" if num_common < max(read) else ""
            shared.insert(0, f"{num_common:,} sentences{left}")
        self.footnotes.append(("", f"{'; '.join(shared)}; intervals 95 %"))
        rows, names = [*zip(*self.cells, strict=True)], [system.name for system in self.systems]
        real = _agreed([_real(system.report) for system in self.systems])
        if real:
            rows.append(tuple(Cell(real.get(column.key)) for column in self.columns))
            names.append("real sentences")
        return Table(
            tuple(self.columns), tuple(names), tuple(rows), tuple(self.footnotes), (*different, *self.warnings)
        )


_SIGNIFICANCE = (
    f"differs from the best, p < {LEVEL:.2f}: likelihoods by paired bootstrap over sentences, BLEU by bootstrap over "
    "the samples of either system; not corrected for the number of comparisons"
)


def _independent(key: str, best: System, other: System) -> float:
    return independent_p_value(getattr(best.evaluation, key), getattr(other.evaluation, key))


def independent_p_value(first: PerSample, second: PerSample) -> float:
    """How often chance alone would set the means of two sets of samples so far apart.

    Twice the smaller share of resampled differences on either side of 0, one added so that it is never 0.
    """
    means = [resampled_sums([one.values], seed)[0] / len(one.values) for seed, one in enumerate((first, second))]
    differences = means[0] - means[1]
    tail = 1 + min(int(np.sum(differences <= 0)), int(np.sum(differences >= 0)))
    return min(1.0, 2 * tail / (len(differences) + 1))


def _real(report: dict[str, Any]) -> dict[str, float]:
    """What real sentences have, by the keys of columns."""
    real, judge = report["real"], report["judge"]
    figures = {key: real[key] for key in ("bleu4", "self_bleu4", "distinct_2")}
    figures["token_entropy"] = real["token_entropy"]["per_sample"]
    if judge:
        figures[f"judge.{judge['name']}"] = judge["real"]["perplexity"]
        figures[f"judge_entropy.{judge['name']}"] = judge["real"]["entropy"]
    return figures


def _agreed(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Those figures of which all who have them say the same; another vocabulary reads sentences otherwise."""
    said: dict[str, set[float]] = {}
    for own in figures:
        for key, value in own.items():
            said.setdefault(key, set()).add(value)
    return {key: values.pop() for key, values in said.items() if len(values) == 1}


def _protocol(systems: Sequence[System]) -> tuple[list[str], list[str]]:
    """What all agree on, and warnings of what they do not; a system without a likelihood has no say on its card."""
    cards = {system.name: _card(system.report) for system in systems}
    shared, different = [], []
    for name in dict.fromkeys(name for card in cards.values() for name in card):
        said = {system: card[name] for system, card in cards.items() if name in card}
        if len(set(said.values())) == 1:
            shared.append(f"{name}: {next(iter(said.values()))}")
        else:
            different.append(f"{name} differs: {_grouped(said)}")
    return shared, different


def _grouped(said: dict[str, str]) -> str:
    """Who says what; where many say the same, how many."""
    by_words: dict[str, list[str]] = {}
    for system, words in said.items():
        by_words.setdefault(words, []).append(system)
    return ", ".join(
        f"{words} ({', '.join(systems) if len(systems) <= 3 else f'{len(systems)} systems'})"
        for words, systems in by_words.items()
    )


def _card(report: dict[str, Any]) -> dict[str, str]:
    """What must agree for numbers to be taken at face value, in words."""
    data, sampling, speed = report["data"], report["sampling"], report["speed"]
    card = {"text": f"{data['corpus']}, split {data['split']}, sha256 {data['corpus_sha256'][:12]}"}
    if report["likelihoods"]:
        protocol = next(iter(report["likelihoods"].values()))["protocol"]
        card |= {
            "length": protocol["length"],
            "special tokens": "counted" if protocol["special_tokens"] else "not counted",
            "rows": "packed text" if protocol["packed"] else "single sentences",
            "arithmetic": protocol["arithmetic"],
        }
    return card | {
        "samples": f"{sampling['number']:,} of length {sampling['length']}",
        "sampler": sampling["algorithm"],
        "sampling steps": str(sampling["steps"]),
        "temperature": str(sampling["temperature"]),
        "top-k": str(sampling["top_k"] or "off"),
        "top-p": str(sampling["top_p"] or "off"),
        "machine": f"{speed['device']}, {speed['batch']} samples at a time",
    }
