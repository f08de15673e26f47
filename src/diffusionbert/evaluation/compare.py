"""Compares several evaluation results in one table, and only numbers that are comparable.

A likelihood column holds one kind (exact, bound or pseudo), one quantity and one name (continuous, grid, …). Systems
are compared on the sentences that all of them scored, by a paired bootstrap over sentences (Efron 1979; see
`intervals`); samples are not paired, so BLEU is resampled separately for each system. If vocabularies differ,
likelihoods are given per word. A column whose numbers were obtained under different protocols is shown but not ranked,
and a warning says why. Training runs that differ only in their seed can be merged into one system, whose differences
then include the spread over seeds. This module depends on evaluation results, not on models.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch

from diffusionbert.diffusion.schedules import NoiseSchedule
from diffusionbert.evaluation.judges import Judged
from diffusionbert.evaluation.metrics import PerSample
from diffusionbert.evaluation.result import (
    EvaluationResult,
    Generation,
    TextMetrics,
    Weights,
    locate,
    mean_with_interval,
)
from diffusionbert.evaluation.tables import (
    BEST,
    Cell,
    Column,
    Direction,
    SystemDifference,
    Table,
    best_of,
    length_text,
)
from diffusionbert.likelihood.intervals import Difference, percentile_interval, resampled_sums, with_seeds
from diffusionbert.likelihood.orders import Order
from diffusionbert.likelihood.scores import (
    Length,
    LikelihoodRates,
    LikelihoodSummary,
    PointEstimate,
    Scores,
    Unit,
    paired_bootstrap,
)
from diffusionbert.networks.loading import NewBert
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import EXACT, Estimator, Likelihood
from diffusionbert.storage.files import read_json
from diffusionbert.storage.schema import Component, from_json, from_text
from diffusionbert.training.config import RunConfig
from diffusionbert.training.log import ModelDescription
from diffusionbert.training.run_folder import RunFolder

LEVEL = 0.05
"""A difference is called significant if its p-value is below this."""
_RATES = {
    Unit.TOKEN: ("perplexity_per_token", 2),
    Unit.WORD: ("perplexity_per_word", 1),
    Unit.BYTE: ("bits_per_byte", 3),
}
"""The field of `LikelihoodRates` shown for each unit, and its number of digits."""
_BEST = (
    f"the best, and every system that does not differ from it with p < {LEVEL:.2f}; no mark where nothing differs. "
    "Likelihoods by paired bootstrap over sentences, BLEU by bootstrap over each system's samples; p-values are not "
    "corrected for multiple comparisons"
)
_SEEDS = (
    "with a single training seed per system, differences say nothing about other seeds; with two or more seeds for "
    "both systems, intervals and p-values include the spread over seeds"
)
_NOISE = (
    "where noise is not shared, intervals include the noise of both systems' draws; evaluate with --shared-noise for "
    "narrower ones"
)
_UNMERGED = (
    "no runs were merged: merged ones differ only in their training seed, and are evaluated on the same text with the "
    "same settings and seed"
)


class _Quantity(NamedTuple):
    """What a likelihood column holds."""

    kind: Likelihood
    name: str
    quantity: str


@final
@dataclass(frozen=True, eq=False)
class _System:
    """One result, or several merged ones, under a unique name."""

    name: str
    result: EvaluationResult
    scores: dict[str, Scores]
    """Scores on the sentences that all systems scored, if on the same corpus; means over merged training runs."""
    folders: tuple[Path, ...]
    trainings: tuple[_System, ...] = ()
    """The training runs of a merged system."""
    provenance: tuple[dict[str, object], ...] = ()
    """Hashes of the code, data and weights of each training run."""

    @property
    def num_seeds(self) -> int:
        return max(1, len(self.trainings))

    @property
    def likelihoods(self) -> dict[_Quantity, LikelihoodSummary]:
        found = self.result.likelihoods.items()
        return {_Quantity(one.kind, name, one.protocol.definition.quantity): one for name, one in found}


def compare(
    results: Sequence[EvaluationResult | str | Path],
    unit: Unit | None = None,
    names: Sequence[str] | None = None,
    *,
    reference: str | None = None,
    quantity: str | None = None,
    merge_seeds: bool = False,
) -> Table:
    """Compares evaluation results in one table.

    Args:
        results: Results, or folders written by `evaluate` (a run directory works, too).
        unit: The unit of likelihoods; by default tokens if all vocabularies agree, otherwise words.
        names: Names of the systems; by default the names of the folders, or of the models for results.
        reference: The name of the system to compare the others with; by default the best of each column.
        quantity: The name of the only likelihood to show (grid, continuous, exact, …).
        merge_seeds: Merge training runs that differ only in their seed into one system.

    Returns:
        The table, with the differences in each ranked column.

    Examples:
        >>> print(compare(["runs/one", "runs/two"]))  # doctest: +SKIP
    """
    systems = _in_orders(_systems(results, names))
    is_same_text = len({system.result.data.corpus_sha256 for system in systems}) == 1
    systems = _on_common_sentences(systems) if is_same_text else systems
    systems = _merged(systems) if merge_seeds else systems
    if reference is not None and reference not in (known := [system.name for system in systems]):
        raise ValueError(f"`reference` must be one of {', '.join(known)}, got {reference!r:.80}")
    scored = _first_scores(systems)
    has_same_tokens = len(scored) < 2 or (
        is_same_text and all(torch.equal(first.tokens, second.tokens) for first, second in pairwise(scored))
    )
    chosen = unit or (Unit.TOKEN if has_same_tokens else Unit.WORD)
    table = _Columns(systems, is_same_text, has_same_tokens, chosen, reference)
    if merge_seeds and all(system.num_seeds == 1 for system in systems):
        table.warnings.append(_UNMERGED)
    table.add_descriptions()
    table.add_likelihoods(quantity)
    if any(table.generations):
        table.add_texts()
        table.add_costs()
    return table.finished(unit)


def _systems(results: Sequence[EvaluationResult | str | Path], names: Sequence[str] | None) -> list[_System]:
    if not results:
        raise ValueError("there is nothing to compare; give run folders that were evaluated")
    folders = [None if isinstance(one, EvaluationResult) else _folder(Path(one)) for one in results]
    loaded = [one if isinstance(one, EvaluationResult) else EvaluationResult.load(one) for one in results]
    if names is None:
        # An `evaluation` folder takes the name of its parent.
        paths = [folder.parent if folder.name == "evaluation" else folder for folder in folders if folder is not None]
        by_path = iter(shortest_names(paths))
        names = [one.name if folder is None else next(by_path) for one, folder in zip(loaded, folders, strict=True)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two systems are called {twice!r}; give `names`")
    return [
        _System(name, one, one.scores, () if folder is None else (folder,), provenance=(_provenance(one),))
        for name, one, folder in zip(names, loaded, folders, strict=True)
    ]


def _in_orders(systems: list[_System]) -> list[_System]:
    """The systems; if a masked model is scored from left to right, a causal one's likelihood has the same name."""
    name = Order.LEFT_TO_RIGHT.value
    if not any(name in system.scores for system in systems):
        return systems

    def renamed(by_name: dict[str, Any]) -> dict[str, Any]:
        return {name if key == EXACT else key: one for key, one in by_name.items()}

    return [
        replace(
            system,
            result=replace(system.result, likelihoods=renamed(system.result.likelihoods)),
            scores=renamed(system.scores),
        )
        for system in systems
    ]


def _provenance(result: EvaluationResult) -> dict[str, object]:
    """The code, text, weights and seeds behind a result."""
    return {
        "code": asdict(result.code),
        "data_sha256": result.data.sha256,
        "weights_sha256": result.weights.sha256,
        "training_seed": result.model.seed,
        "evaluation_seed": result.seed,
    }


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; give run folders, or folders that evaluate wrote")
    if RunFolder(folder).config.exists() and not (folder / "evaluation").exists():
        raise ValueError(
            f"the run {str(folder)!r} has not been evaluated; run: diffusionbert evaluate --model {folder} --data …"
        )
    return locate(folder).resolve()


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """Names for paths: as many of their last parts as it takes to tell them apart."""
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"{str(twice)!r} was given twice; give each once")
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _on_common_sentences(systems: list[_System]) -> list[_System]:
    """The systems, restricted to the sentences that all of them scored."""
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


def _merged(systems: list[_System]) -> list[_System]:
    """The systems, with training runs that differ only in their seed merged into one."""
    groups: dict[object, list[_System]] = {}
    for number, system in enumerate(systems):
        result = system.result
        # The step with the best validation loss, and thus the tokens up to it, may differ between seeds.
        same = replace(result.model, seed=None, tokens_seen=None, epochs=None)
        sampling = result.generation and result.generation.sampling
        text = (
            result.data.corpus_sha256,
            [(name, one.example.tolist(), one.tokens.tolist()) for name, one in system.scores.items()],
        )
        key = number if result.model.seed is None else repr((same, sampling, result.seed, text, _measured(result)))
        groups.setdefault(key, []).append(system)
    apart = [one for group in groups.values() for one in _of_equal_settings(group)]
    return [group[0] if len(group) == 1 else _as_one(group) for group in apart]


def _measured(result: EvaluationResult) -> object:
    """What was measured, and how: what must agree for two training runs to be averaged."""
    protocols = {name: one.protocol for name, one in result.likelihoods.items()}
    found, answers = result.generation, result.generation and result.generation.answers
    return (
        {
            name: (one.definition, one.length, one.source_given, one.special_tokens, one.packed)
            for name, one in protocols.items()
        },
        answers and (answers.number, answers.num_candidates, answers.length_given),
        found and found.judge and found.judge.name,
        found and found.mauve and found.mauve.features,
    )


def _of_equal_settings(group: list[_System]) -> list[list[_System]]:
    """A group of systems, divided by what their run directories say about training, if all of them are known."""
    settings = [_run_settings(system) for system in group]
    if None in settings:
        return [group]
    return [
        [system for system, own in zip(group, settings, strict=True) if own == each] for each in dict.fromkeys(settings)
    ]


def _run_settings(system: _System) -> str | None:
    """What a run directory says about training, except the seed and the start, which may differ between seeds, too."""
    if not system.folders or not (run := RunFolder(system.folders[0].parent)).config.exists():
        return None
    with suppress(ValueError):  # damaged, or of a plugin that is not installed
        config = RunConfig.from_json(read_json(run.config), run.config.name)
        data = config.data
        if run.fingerprints.exists():  # the same text may lie elsewhere
            hashes = from_json(read_json(run.fingerprints), dict[str, str], run.fingerprints.name)
            data = replace(data, corpus=hashes.get("training", ""), validation=hashes.get("validation"))
        if config.backbone.pretrained is not None:
            data, config = replace(data, vocabulary="of the start"), replace(config, backbone=NewBert())
        return repr(replace(config, training=replace(config.training, seed=0, micro_tokens=None), data=data))
    return None


def _as_one(group: list[_System]) -> _System:
    """One system from several training runs: the mean nats of each sentence, and all samples."""
    seeds = [system.result.model.seed for system in group]
    if len({*seeds}) < len(seeds):
        twice = next(system.name for system in group if seeds.count(system.result.model.seed) > 1)
        raise ValueError(f"{twice!r} was trained with the seed of another run of its kind; give each seed once")
    first, number = group[0], len(group)
    scores = {}
    for name, one in first.scores.items():
        every = [system.scores[name] for system in group]
        nats = torch.stack([each.nats for each in every]).mean(dim=0)
        variance = torch.stack([each.draw_variance for each in every]).mean(dim=0)  # shared noise does not average out
        scores[name] = replace(one, nats=nats, draw_variance=variance)
    bleu, self_bleu = (
        PerSample(np.concatenate([getattr(system.result, name).values for system in group]))
        for name in ("bleu4", "self_bleu4")
    )
    seen, epochs = (
        None if None in values else sum(values) / number
        for values in ([getattr(system.result.model, name) for system in group] for name in ("tokens_seen", "epochs"))
    )
    model = replace(first.result.model, seed=None, tokens_seen=None if seen is None else round(seen), epochs=epochs)
    result = replace(first.result, model=model, bleu4=bleu, self_bleu4=self_bleu)
    if result.generation is not None:
        generation: Generation = _mean([system.result.generation for system in group])
        own = replace(generation.samples, bleu4=mean_with_interval(bleu), self_bleu4=mean_with_interval(self_bleu))
        result = replace(result, generation=replace(generation, samples=own))
    folders = tuple(folder for system in group for folder in system.folders)
    provenance = tuple(one for system in group for one in system.provenance)
    name = f"{first.name} ({number} seeds)"
    return _System(name, result, scores, folders, tuple(group), provenance)


def _mean(values: list[Any]) -> Any:
    """The mean over training runs of all figures that are not counts; intervals include the spread over runs."""
    first = values[0]
    if isinstance(first, PointEstimate):
        low, high = _mean([one.ci95 for one in values])
        numbers = np.array([one.value for one in values])
        found = with_seeds(Difference(float(numbers.mean()), low, high, math.nan), numbers)
        return PointEstimate(found.value, (found.low, found.high))
    if isinstance(first, Judged):
        found = _mean([PointEstimate(one.perplexity, one.ci95) for one in values])
        return replace(first, perplexity=found.value, ci95=found.ci95, entropy=_mean([one.entropy for one in values]))
    if isinstance(first, tuple):
        return tuple(_mean(list(each)) for each in zip(*values, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{one.name: _mean([getattr(own, one.name) for own in values]) for one in fields(first)})
    return sum(values) / len(values) if all(isinstance(value, float) for value in values) else first


def _first_scores(systems: Sequence[_System]) -> list[Scores]:
    return [next(iter(system.scores.values())) for system in systems if system.scores]


Test = Callable[[_System, _System], tuple[Difference, str] | None]
"""The difference between two systems, second minus first, and whether they share their noise; None if undefined."""
Figures = Sequence[PointEstimate | float | None]
"""One figure per system; None if it was not measured."""


@final
class _Columns:
    """A table under construction."""

    def __init__(
        self, systems: list[_System], is_same_text: bool, has_same_tokens: bool, unit: Unit, reference: str | None
    ):
        self.systems, self.is_same_text, self.has_same_tokens, self.unit = systems, is_same_text, has_same_tokens, unit
        self.reference = next((system for system in systems if system.name == reference), None)
        self.generations = [system.result.generation for system in systems]
        self.columns: list[Column] = []
        self.cells: list[tuple[Cell, ...]] = []
        self.real: list[Cell] = []
        self.differences: list[SystemDifference] = []
        self.footnotes: list[tuple[str, str]] = []
        self.warnings: list[str] = []

    # ---- what was trained -------------------------------------------------------------------------------------------

    def add_descriptions(self) -> None:
        """What each model is and how it was trained, if its result says so."""
        models = [system.result.model for system in self.systems]
        texts: dict[str, Callable[[ModelDescription], str | None]] = {
            "objective": lambda model: _objective_label(model.objective),
            "schedule": lambda model: _schedule_label(model.schedule),
            "time": _time_label,
            "start": lambda model: model.start,
            "backbone": lambda model: model.backbone,
            "optimizer": lambda model: (
                None if model.learning_rate is None else f"{model.optimizer}, {model.learning_rate:g}"
            ),
        }
        numbers: dict[Column, Callable[[ModelDescription], float | None]] = {
            Column("diffusion_steps", "T", Direction.NEITHER, 0): lambda model: model.diffusion_steps,
            Column("parameters", "parameters", Direction.NEITHER, 0): lambda model: model.parameters,
            Column("training_steps", "training steps", Direction.NEITHER, 0): lambda model: model.training_steps,
            Column("tokens_seen", "tokens", Direction.NEITHER, 0): lambda model: model.tokens_seen,
            Column("total_tokens", "tokens, pretraining included", Direction.NEITHER, 0): _total_tokens,
            Column("epochs", "epochs", Direction.NEITHER, 2): lambda model: model.epochs,
        }
        for title, text in texts.items():
            column = Column(title, title, Direction.NEITHER, 0)
            self._describe(column, [Cell(text=text(model)) for model in models])
        for column, number in numbers.items():
            found = [number(model) for model in models]
            self._describe(column, [Cell(None if one is None else float(one)) for one in found])
        if any(system.num_seeds > 1 for system in self.systems):
            column = Column("seeds", "seeds", Direction.NEITHER, 0)
            self._describe(column, [Cell(float(system.num_seeds)) for system in self.systems])

    def _describe(self, column: Column, cells: list[Cell]) -> None:
        if any(cell.value is not None or cell.text is not None for cell in cells):
            self._add(column, cells, (), None)

    # ---- likelihoods ------------------------------------------------------------------------------------------------

    def add_likelihoods(self, chosen: str | None) -> None:
        """Adds one column for each kind, quantity and name."""
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
        if chosen is not None and chosen not in (known := {quantity.name: None for quantity in found}):
            raise ValueError(f"`quantity` must be one of {', '.join(known) or 'none'}, got {chosen!r:.40}")
        found = [quantity for quantity in found if chosen in (None, quantity.name)]
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
        elif self.unit is Unit.TOKEN and not self.has_same_tokens:
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
        # The stored rates do not apply if only some of the sentences are compared, or if the scores are means.
        is_other = len(common) < summary.num_sentences or system.num_seeds > 1
        rates = LikelihoodRates.of(common.rates()) if is_other else summary.rates
        return _cell(getattr(rates, _RATES[self.unit][0]))

    def _paired(self, name: str, best: _System, other: _System) -> tuple[Difference, str] | None:
        first, second = best.scores[name], other.scores[name]
        if first.num_infinite or second.num_infinite:
            return None
        found = paired_bootstrap(first, second, self.unit)
        if min(best.num_seeds, other.num_seeds) > 1:
            rates = (
                np.array([own.scores[name].nats_per(self.unit) for own in system.trainings]) for system in (best, other)
            )
            found = with_seeds(found, *rates)
        return Difference(-found.value, -found.high, -found.low, found.p_value), _noise(name, best, other)

    # ---- samples ----------------------------------------------------------------------------------------------------

    def add_texts(self) -> None:
        """Adds BLEU, diversity and the judges' figures."""
        found, neither = self.generations, Direction.NEITHER
        own, real = [one and one.samples for one in found], [one and one.real for one in found]
        obstacles = [] if self.is_same_text else ["the texts differ"]
        if len({(one.sampling.number, one.sampling.length) for one in found if one is not None}) > 1:
            obstacles.append("samples are of different number or length")
        self._add_answers(obstacles)
        figures: dict[Column, Callable[[TextMetrics], PointEstimate | float | None]] = {
            Column("bleu4", "BLEU-4", Direction.HIGHER, 3, "BLEU-4"): lambda texts: texts.bleu4,
            Column("self_bleu4", "self-BLEU-4", Direction.LOWER, 3, "self-BLEU-4"): lambda texts: texts.self_bleu4,
            # Of the following, neither high nor low is good: compare them with real sentences.
            Column("distinct_2", "distinct-2", neither, 3): lambda texts: texts.distinct[1],
            Column("token_entropy", "word entropy", neither, 2): lambda texts: texts.entropy_per_text,
        }
        for column, figure in figures.items():
            of_own, of_real = ([one and figure(one) for one in texts] for texts in (own, real))
            self._add_figures(column, of_own, of_real, obstacles, partial(_unpaired, column.key))
        judgments = [one and one.judge for one in found]
        for name in sorted({one.name for one in judgments if one is not None}):
            judged = [one if one is not None and one.name == name else None for one in judgments]
            # Dull text has a low perplexity, too, so it is shown with the entropy and not ranked.
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

    def _add_answers(self, obstacles: list[str]) -> None:
        """Adds BLEU against each answer's own target and exact matches, for models trained on pairs."""
        answers = [one and one.answers for one in self.generations]
        known = [one for one in answers if one is not None]
        if not known:
            return
        more = [*obstacles]
        if len({one.length_given for one in known}) > 1:
            more.append("some answers were given the length of their target")
        self._add_figures(
            Column("answer_bleu4", "BLEU-4, own target", Direction.HIGHER, 3),
            [one and one.bleu4 for one in answers],
            obstacles=more,
        )
        matches = Column("exact_match", "exact match", Direction.HIGHER, 3)
        self._add_figures(matches, [one and one.exact_match for one in answers], obstacles=more)

    def add_costs(self) -> None:
        """Adds the cost per sample."""
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
        """Adds a figure of generated text, and the figure of real sentences if all systems agree on it."""
        self._add(column, [_cell(one) for one in own], obstacles, test)
        agreed = {_cell(one).value for one in real} - {None}  # another vocabulary decodes real sentences differently
        self.real[-1] = Cell(agreed.pop()) if len(agreed) == 1 else Cell()

    def _add(self, column: Column, cells: list[Cell], obstacles: Sequence[str], test: Test | None) -> None:
        """Adds a column and tests its systems against each other, unless an obstacle prevents it."""
        num_values = sum(cell.value is not None for cell in cells)
        if obstacles and num_values > 1 and column.better is not Direction.NEITHER:
            self.warnings.append(f"{column.title} is not ranked: {' and '.join(obstacles)}")
        elif test is not None:
            cells = self._tested(column, cells, test)
        self.columns.append(column)
        self.cells.append(tuple(cells))
        self.real.append(Cell())

    def _tested(self, column: Column, cells: list[Cell], test: Test) -> list[Cell]:
        """Compares every system with the best one and with the reference; marks the best if it differs from any."""
        index = best_of(cells, column)
        if index is None:
            return cells
        best = self.systems[index]
        reference = self.reference or best
        if cells[self.systems.index(reference)].value is None:
            reference = best
        shown = [None if cell.value is None else round(cell.value, column.digits) for cell in cells]
        are_best = [system is best for system in self.systems]
        for number, (system, cell) in enumerate(zip(self.systems, cells, strict=True)):
            if cell.value is None or system is best:
                continue
            apart = test(best, system)
            is_different = apart is None or apart[0].p_value < LEVEL
            are_best[number] = not is_different or shown[number] == shown[index]
            if reference is best:
                self._note_difference(column, system, best, apart)
        if reference is not best:
            for system, cell in zip(self.systems, cells, strict=True):
                if cell.value is not None and system is not reference:
                    self._note_difference(column, system, reference, test(reference, system))
        if all(is_best or cell.value is None for is_best, cell in zip(are_best, cells, strict=True)):
            return cells
        return [replace(cell, best=is_best) for is_best, cell in zip(are_best, cells, strict=True)]

    def _note_difference(
        self, column: Column, system: _System, reference: _System, apart: tuple[Difference, str] | None
    ) -> None:
        if apart is None:
            return
        difference, noise = apart
        self.differences.append(
            SystemDifference(
                column,
                system.name,
                reference.name,
                difference.value,
                (difference.low, difference.high),
                difference.p_value,
                (system.num_seeds, reference.num_seeds),
                noise,
            )
        )

    def _note(self, text: str) -> str:
        """The mark of a footnote; a new one unless the text already has one."""
        number = len(self.footnotes)
        new = string.ascii_lowercase[number % 26] * (1 + number // 26)
        mark = next((mark for mark, known in self.footnotes if known == text), new)
        if mark == new:
            self.footnotes.append((mark, text))
        return mark

    def finished(self, requested: Unit | None) -> Table:
        """The table, with the settings that all systems share as footnotes and the differing ones as warnings."""
        if any(cell.best for column in self.cells for cell in column):
            self.footnotes.append((BEST, _BEST))
        if any(min(apart.seeds) < 2 for apart in self.differences):
            self.footnotes.append(("", _SEEDS))
        paired = [apart.noise for apart in self.differences if apart.column.difference_unit.startswith("nats")]
        if {"independent", "unknown"} & {*paired}:
            self.footnotes.append(("", _NOISE))
        if requested is None and not self.has_same_tokens:
            what = "vocabularies" if self.is_same_text else "texts"
            self.footnotes.append(("", f"{what} differ, so likelihoods are given per {self.unit.value}"))
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
        provenance = tuple(
            system.provenance[0] if system.num_seeds == 1 else {"trainings": list(system.provenance)}
            for system in self.systems
        )
        return Table(
            tuple(self.columns),
            tuple(names),
            tuple(rows),
            tuple(self.footnotes),
            warnings,
            tuple(self.differences),
            provenance,
        )


def _cell(found: PointEstimate | float | None) -> Cell:
    return Cell(found.value, found.ci95) if isinstance(found, PointEstimate) else Cell(found)


def _title(quantity: _Quantity, summaries: list[LikelihoodSummary]) -> str:
    times = {summary.protocol.definition.time for summary in summaries}
    if times == {None}:
        return f"{quantity.kind.value}, {summaries[0].protocol.definition.estimator.value}"
    time = str(times.pop()) if len(times) == 1 else "different time grids"
    return f"{quantity.kind.value}, {quantity.quantity}, {time}"


def _objective_label(objective: Component | None) -> str | None:
    """The objective's name, and its settings that no other column shows."""
    if objective is None:
        return None
    shown = {key: value for key, value in objective.settings.items() if key not in ("schedule", "num_steps")}
    return str(Component(objective.name, {key: value for key, value in shown.items() if value not in (None, False)}))


def _schedule_label(schedule: Component | None) -> str | None:
    """The schedule as tables show it; the raw record if its class is not installed."""
    if schedule is None:
        return None
    try:
        return str(from_text(str(schedule), NoiseSchedule, "schedule"))  # type: ignore[type-abstract]
    except ValueError:
        return str(schedule)


def _time_label(model: ModelDescription) -> str | None:
    recorded = model.time_conditioning
    if recorded is None or (model.schedule is None and recorded == TimeEmbedding.NONE.value):
        return None  # without a schedule there is no time to condition on
    known = {one.value: one.abbreviation for one in TimeEmbedding}
    return known.get(recorded, recorded)


def _total_tokens(model: ModelDescription) -> float | None:
    """The tokens seen in training and in all earlier training."""
    if model.tokens_seen is None or model.pretraining_tokens is None:
        return None
    return float(model.tokens_seen + model.pretraining_tokens)


def shared_noise(*summaries: LikelihoodSummary) -> str:
    """Whether likelihoods of the same sentences were all estimated from the same noise.

    Returns `shared`, `independent`, `none` if nothing was drawn, or `unknown` for results of earlier versions.
    """
    if all(one.kind is Likelihood.EXACT for one in summaries):
        return "none"
    cards = [one.protocol for one in summaries]
    if any(one.definition.estimator is Estimator.UNSPECIFIED for one in cards):
        return "unknown"
    keys = {(one.definition.estimator, one.definition.time, one.num_draws, one.strata, one.seed) for one in cards}
    return "shared" if len(keys) == 1 else "independent"


def _noise(name: str, best: _System, other: _System) -> str:
    """Whether all runs of two systems share the noise of a likelihood, in the words of `shared_noise`."""
    runs = [run for system in (best, other) for run in system.trainings or (system,)]
    found = shared_noise(*(run.result.likelihoods[name] for run in runs))
    # The noise of a sentence follows from its tokens, which are others in another vocabulary.
    has_same_tokens = torch.equal(best.scores[name].tokens, other.scores[name].tokens)
    return found if has_same_tokens or found != "shared" else "independent"


def _unpaired(name: str, best: _System, other: _System) -> tuple[Difference, str]:
    found = independent_difference(getattr(best.result, name), getattr(other.result, name))
    return found, "independent"


def independent_difference(first: PerSample, second: PerSample) -> Difference:
    """The difference of two means over samples, second minus first, resampled independently.

    p is twice the smaller fraction of resampled differences on either side of 0; one is added so that it is never 0.
    """
    means = [resampled_sums([one.values], seed)[0] / len(one.values) for seed, one in enumerate((first, second))]
    differences = means[1] - means[0]
    tail = 1 + min(int(np.sum(differences <= 0)), int(np.sum(differences >= 0)))
    low, high = percentile_interval(differences)
    return Difference(second.mean - first.mean, low, high, min(1.0, 2 * tail / (len(differences) + 1)))


def _stale(systems: Sequence[_System]) -> list[str]:
    """Warnings about runs that were trained further after their evaluation."""
    return [
        f"{system.name} was evaluated with other weights than its run directory has now; evaluate again (--overwrite)"
        for system in systems
        if len(system.folders) == 1
        and (run := RunFolder(system.folders[0].parent)).config.exists()
        and run.model.exists()
        and Weights.of(run.model).files != system.result.weights.files
    ]


def _protocol(systems: Sequence[_System]) -> tuple[list[str], list[str]]:
    """The settings that all systems share, and warnings about the others; settings that a system lacks do not count."""
    settings = {system.name: _settings(system.result) for system in systems}
    shared, different = [], []
    for name in dict.fromkeys(name for own in settings.values() for name in own):
        having: dict[str, list[str]] = {}  # systems by value
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
    """The settings that must agree for numbers to be comparable, as a footnote shows them."""
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
