"""The tables and figures of He et al. 2022, each from the folders of a `Reproduction`.

    table1    the denoising of one sentence by three systems
    table2    main results: every system, its likelihood by kind, BLEU-4 and self-BLEU
    table3    steps, seconds, perplexity
    figure2   the spindle's survival curves of a sentence
    figure3   quality against diversity, over temperature or top-k
    figure4   validation during training

A target requests the runs and evaluations it needs and turns them into files: tables as Markdown, LaTeX and JSON,
figures as PNG with their numbers as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusionbert.diffusion.schedules import Mean, NoiseSchedule, Spindle
from diffusionbert.evaluation.compare import compare
from diffusionbert.evaluation.metrics import PerSample
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.evaluation.tables import Table, as_json, to_latex, to_markdown
from diffusionbert.inference.engine import Engine
from diffusionbert.inference.generate import stream
from diffusionbert.inference.tasks import StreamState, Task
from diffusionbert.recipes import SYSTEMS, Start
from diffusionbert.reproduce import denoising, figures
from diffusionbert.reproduce.reproduction import Reproduction
from diffusionbert.samplers import Sampler, SamplerConfig, SamplingRequest
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.gibbs import Gibbs, Order
from diffusionbert.storage.files import read_json, write_json
from diffusionbert.storage.schema import from_text
from diffusionbert.training.config import RunConfig
from diffusionbert.training.log import RunEvent, ValidationEvent, events_of
from diffusionbert.training.run_folder import RunFolder

SENTENCE = "bella is sitting over there ."
"""The sentence of the paper's figure 2."""


@dataclass(frozen=True)
class Row:
    """A system and how it is sampled."""

    system: str
    sampling: SamplingRequest | None = None
    note: str = ""
    """What distinguishes it from other rows of the same system."""

    @property
    def key(self) -> str:
        """The name of its folder."""
        return self.system + (f"-{self.note.replace(' ', '-')}" if self.note else "")


MAIN: tuple[Row, ...] = (
    *(Row(name) for name in ("d3pm", "d3pm-tad", "d3pm-spindle", "d3pm-spindle-paper")),
    *(Row(name) for name in ("d3pm-uniform", "multinomial")),
    *(Row(name) for name in ("diffusion-lm", "diffusion-lm-sqrt", "diffusion-lm-bert", "bert-mouth")),
    Row("bert-mouth", SamplingRequest(Gibbs(Order.LEFT_TO_RIGHT), SamplerConfig(64, top_k=30)), "left to right"),
    *(Row(name) for name in ("diffusionbert-lte", "diffusionbert-pte", "diffusionbert", "diffusionbert-spindle")),
    *(Row(name) for name in ("diffusionbert-spindle-sentence", "diffusionbert-spindle-paper", "diffusionbert-bell")),
    *(Row(name) for name in ("genmd4", "mdlm", "mdlm-pretrained", "oa-ardm", "cmlm", "sundae")),
    *(Row(name) for name in ("decoder", "decoder-pretrained")),
)
"""The rows of table 2. DiffuSeq is missing: it needs pairs."""


def table2(reproduction: Reproduction) -> list[Path]:
    """Main results."""
    results, names = [], []
    for row in MAIN:
        results.append(reproduction.evaluation(row.key, row.system, row.sampling))
        names.append(title(row, reproduction.config(row.system)))
    paths = write_table(reproduction.output / "table2", compare(results, names=names))
    if reproduction.request.other_test is None:
        return paths
    rows = [row for row in MAIN if not row.note]
    results = [reproduction.other_evaluation(row.system) for row in rows]
    names = [title(row, reproduction.config(row.system)) for row in rows]
    return paths + write_table(reproduction.output / "table2-other-text", compare(results, names=names))


def title(row: Row, config: RunConfig) -> str:
    """Method, start, schedule and time, as the columns of the paper's table."""
    system = SYSTEMS[row.system]
    start = "from scratch" if system.start is Start.SCRATCH else "pretrained"
    words = (
        system.title,
        start,
        config.objective.schedule_label,
        config.objective.time_label(config.time),
        row.note,
    )
    return ", ".join(word for word in words if word and word != "–")


BY_STEPS = ("diffusionbert", "diffusionbert-spindle", "diffusion-lm", "bert-mouth", "decoder-pretrained")
"""The systems of table 3."""
TRADED_OFF = ("diffusionbert", "d3pm", "decoder", "decoder-pretrained")
"""The systems of figure 3."""
CONVERGING = ("d3pm", "d3pm-tad", "d3pm-spindle", "diffusionbert-lte", "diffusionbert-pte", "diffusionbert")
"""The systems of figure 4."""


def short_title(system: str, config: RunConfig) -> str:
    """Method and schedule, as in the paper's table 3."""
    schedule = config.objective.schedule_label
    return SYSTEMS[system].title + ("" if schedule == "–" else f", {schedule}")


def table3(reproduction: Reproduction) -> list[Path]:
    """Steps, seconds, perplexity; T of the bound is the number of sampling steps."""
    results, names = [], []
    for system in BY_STEPS:
        for steps in _step_counts(reproduction, system):
            sampling = _with(reproduction.sampling(system), steps=steps)
            found = reproduction.evaluation(
                f"{system}-{steps}-steps", system, sampling, steps=steps, samples=reproduction.scale.timed_samples
            )
            results.append(found)
            names.append(f"{short_title(system, reproduction.config(system))}, {steps} steps")
    return write_table(reproduction.output / "table3", compare(results, names=names))


def _step_counts(reproduction: Reproduction, system: str) -> tuple[int, ...]:
    """Multiples of the length for BERT-Mouth and the decoder, which generate one token per call."""
    match system:
        case "diffusion-lm":
            return (reproduction.scale.vector_steps, 8 * reproduction.scale.vector_steps)
        case "bert-mouth":
            return (reproduction.scale.length, 8 * reproduction.scale.length)
        case "decoder-pretrained":
            return (reproduction.scale.length,)
        case _:
            return reproduction.scale.step_counts


def table1(reproduction: Reproduction) -> list[Path]:
    """One sentence generated by three systems in 32 steps."""
    numbers = reproduction.output / "table1.json"
    if not numbers.exists():
        write_json(numbers, denoising.to_json(denoising.denoising_table(_trajectories(reproduction))))
    rows = denoising.from_json(read_json(numbers))
    stem = reproduction.output / "table1"
    return [*_write_texts(stem, {".md": denoising.to_markdown(rows), ".tex": denoising.to_latex(rows)}), numbers]


def _trajectories(reproduction: Reproduction) -> dict[str, tuple[StreamState, ...]]:
    found = {}
    samplers: dict[str, Sampler] = {
        "bert-mouth": Gibbs(),
        "d3pm": Ancestral(),
        "diffusionbert-spindle": Ancestral(),
    }
    for system, sampler in samplers.items():
        task = Task(length=10, seed=reproduction.request.seed)
        sampling = SamplingRequest(sampler, SamplerConfig(32, top_k=30))
        found[SYSTEMS[system].title] = tuple(stream(reproduction.engine(system), task, sampling))
    return found


def figure2(reproduction: Reproduction) -> list[Path]:
    """The survival of each token of a sentence over time."""
    numbers = survival(reproduction)
    picture = numbers.with_suffix(".png")
    figures.survival_curves([figures.Survival(**curve) for curve in read_json(numbers)], picture)
    return [picture, numbers]


def survival(reproduction: Reproduction) -> Path:
    """The numbers of figure 2."""
    numbers = reproduction.output / "figure2.json"
    if not numbers.exists():
        write_json(numbers, [asdict(curve) for curve in _survival(reproduction.engine("diffusionbert-spindle"))])
    return numbers


def _survival(engine: Engine) -> list[figures.Survival]:
    """The paper's curves, with the sentence mean."""
    information = engine.statistics.information
    [own] = engine.vocabulary.own([SENTENCE])
    relative = information.values[own] / information.values[own].mean()
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    survival = Spindle(0.3, Mean.SENTENCE).survival(t[:, None], relative[None])
    words = engine.vocabulary.spelled(own)
    return [
        figures.Survival(word, tuple(t.tolist()), tuple(survival[:, position].tolist()))
        for position, word in enumerate(words)
    ]


def figure3(reproduction: Reproduction) -> list[Path]:
    """Quality against diversity: temperature for decoders, top-k for all others, as in the paper."""
    picture = reproduction.output / "figure3.png"
    series = draw_tradeoffs({system: tradeoff(reproduction, system) for system in TRADED_OFF}, picture)
    return [picture, _numbers(picture, [asdict(one) for one in series])]


def tradeoff(reproduction: Reproduction, system: str) -> dict[str, EvaluationResult]:
    """A system's samples at each setting of figure 3, without likelihoods."""
    settings = _knobs(reproduction.sampling(system), by_temperature=system.startswith("decoder"))
    return {
        label: reproduction.evaluation(f"{system}-{label}", system, sampling, scored=False)
        for label, sampling in settings
    }


def draw_tradeoffs(points: Mapping[str, Mapping[str, EvaluationResult]], picture: Path) -> list[figures.Tradeoff]:
    """Figure 3 from each system's samples at each setting."""
    series = []
    for system, found in points.items():
        start = ", pretrained" if SYSTEMS[system].start is not Start.SCRATCH else ""
        series.append(_tradeoff(SYSTEMS[system].title + start, found))
    anyone = next(iter(next(iter(points.values())).values()))
    figures.quality_diversity(series, picture, real=_real(anyone))
    return series


def _knobs(own: SamplingRequest, *, by_temperature: bool) -> list[tuple[str, SamplingRequest]]:
    if by_temperature:
        return [(f"T={value}", _with(own, temperature=value, top_k=None)) for value in (0.6, 0.7, 0.8, 0.9, 1.0)]
    return [(f"k={value}", _with(own, top_k=value)) for value in (5, 10, 30, 100, 300)]


def _with(request: SamplingRequest, **changes: Any) -> SamplingRequest:
    return replace(request, config=replace(request.config, **changes))


def _tradeoff(name: str, points: Mapping[str, EvaluationResult]) -> figures.Tradeoff:
    return figures.Tradeoff(
        name,
        tuple(found.self_bleu4.mean for found in points.values()),
        tuple(found.bleu4.mean for found in points.values()),
        tuple(points),
        tuple(_standard_error(found.self_bleu4) for found in points.values()),
        tuple(_standard_error(found.bleu4) for found in points.values()),
    )


def _standard_error(values: PerSample) -> float:
    return float(np.std(values.values, ddof=1) / np.sqrt(len(values.values)))


def _real(found: EvaluationResult) -> figures.Tradeoff:
    assert found.generation is not None
    real = found.generation.real
    return figures.Tradeoff("real sentences", (real.self_bleu4.value,), (real.bleu4.value,))


def figure4(reproduction: Reproduction) -> list[Path]:
    """Validation during training: pretrained against scratch."""
    runs = {name: reproduction.run(name) for name in CONVERGING}
    curves = [curve(run, _system_and_time(name, reproduction.config(name))) for name, run in runs.items()]
    path = reproduction.output / "figure4.png"
    figures.convergence(curves, path)
    return [path, _numbers(path, [asdict(one) for one in curves])]


def _system_and_time(system: str, config: RunConfig) -> str:
    """Method, start and time conditioning; the schedule is part of a curve's own label."""
    start = "from scratch" if SYSTEMS[system].start is Start.SCRATCH else "pretrained"
    return ", ".join(
        word for word in (SYSTEMS[system].title, start, config.objective.time_label(config.time)) if word != "–"
    )


def curve(run: Path, name: str) -> figures.Curve:
    """The validations of a run, with the schedule, the quantity and T of its objective."""
    folder = RunFolder(run)
    if not folder.log.is_file():
        raise ValueError(f"{str(run)!r} is not a run: it has no {folder.log.name}; give a run folder")
    found = [event for event in events_of(folder.log, ValidationEvent) if event.nats_per_token is not None]
    if not found:
        raise ValueError(f"the run {str(run)!r} has no validated likelihood to plot; give another run")
    described = next(iter(events_of(folder.log, RunEvent)), None)
    return figures.Curve(
        name,
        tuple(float(event.step) for event in found),
        tuple(event.nats_per_token for event in found if event.nats_per_token is not None),
        found[0].kind.value,
        tuple(event.standard_error for event in found),
        None if described is None else described.diffusion_steps,
        None if described is None or described.schedule is None else _schedule_label(described.schedule),
        None if described is None else described.quantity,
    )


def _schedule_label(recorded: str) -> str:
    """A schedule as tables show it, from its record in a log; the record itself if its class is not installed."""
    try:
        return str(from_text(recorded, NoiseSchedule, "schedule"))  # type: ignore[type-abstract]
    except ValueError:
        return recorded


def write_table(stem: Path, table: Table) -> list[Path]:
    """Writes a table as Markdown, LaTeX and JSON."""
    return _write_texts(stem, {".md": to_markdown(table), ".tex": to_latex(table), ".json": as_json(table)})


def _write_texts(stem: Path, texts: dict[str, str]) -> list[Path]:
    paths = []
    for suffix, text in texts.items():
        path = stem.with_suffix(suffix)
        path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
        paths.append(path)
    return paths


def _numbers(picture: Path, numbers: list[dict[str, Any]]) -> Path:
    path = picture.with_suffix(".json")
    write_json(path, numbers)
    return path


TARGETS: dict[str, Callable[[Reproduction], list[Path]]] = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "figure2": figure2,
    "figure3": figure3,
    "figure4": figure4,
}
