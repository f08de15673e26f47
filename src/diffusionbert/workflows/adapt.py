"""Adaptation: fine-tunes a trained model on the user's own text, with no settings to choose.

Part of the text is held out. A few timed steps tell how many fit into the time budget; the learning rate is low, and
the checkpoint with the lowest held-out bound is kept. Then the weights are moved back toward the start,

    w = w_start + share · (w_adapted - w_start)

(Wortsman et al. 2022, WiSE-FT), until the bound on generic text (samples of the start) has risen by no more than
`FORGETTING`. Both bounds are estimated before and after with the same noise. The training itself is in `training.run`.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TypeVar

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from diffusionbert.data.canvas import Sentences
from diffusionbert.data.dataset import Encoded
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.score import estimate_sequences
from diffusionbert.inference.tasks import MAX_TEXTS
from diffusionbert.likelihood.estimate import EstimationBudget, SequenceDataset
from diffusionbert.likelihood.scores import Estimate
from diffusionbert.model import Model
from diffusionbert.networks.loading import Pretrained
from diffusionbert.networks.lora import write_adapter
from diffusionbert.objectives.base import Likelihood
from diffusionbert.reporting import logger, progress_line
from diffusionbert.storage.files import read_json, require_output, require_writable, write_json
from diffusionbert.storage.schema import to_json
from diffusionbert.storage.weights import WeightFormat
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.checkpoint import weights_to_export
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.model_folder import BUNDLED, ValidationRecord
from diffusionbert.training.optim import low_precision, measure
from diffusionbert.training.run import (
    PreparedData,
    default_cache,
    make_accelerator,
    prepare,
    stored_config,
    train,
    with_held_out,
)
from diffusionbert.training.run_folder import RunFolder
from diffusionbert.workflows.adapt_report import AdaptReport, Change
from diffusionbert.workflows.generic_text import generic_texts
from diffusionbert.workflows.own_text import folder_for, own_corpus

T = TypeVar("T")

MINUTES = 5.0
LEARNING_RATE = 3e-4
LORA_RATE, LORA_RANK = 2e-3, 16
FORGETTING = 0.05
"""The largest increase allowed in the bound on generic text, in nats per token."""
TRIALS = 4
"""How many times the share may be lowered."""
MAX_EPOCHS = 8
VALIDATIONS, PATIENCE = 6, 3
"""How many times the held-out bound is estimated, and after how many without a gain training stops; not before half of
the steps, since the first ones often lead away from the start."""
LINES_PER_MINUTE = 40_000
"""The most lines of text used per minute on a CPU, which trains on less than a tenth of them; encoding more would take
longer than training."""
HELD_OUT = 200
"""The most held-out sentences to score."""
BUDGET = EstimationBudget(precision=None, max_draws=4, strata=2)
_REPORT = "adapt.json"


@dataclass(frozen=True, eq=False)
class Adapted:
    """The adapted model and the report on it."""

    model: Model
    report: AdaptReport


def adapt(
    texts: str | Path | Iterable[str] | None = None,
    model: str | Path | None = None,
    output: str | Path | None = None,
    *,
    minutes: float = MINUTES,
    lora: bool | None = None,
    merge: bool = False,
    learning_rate: float | None = None,
    samples: int = 3,
    resume: bool = False,
    seed: int = 0,
    cache: str | Path | None = None,
) -> Adapted:
    """Fine-tunes a model on your own text; the batch size and number of steps are chosen for this machine.

    Args:
        texts: A text file (may be compressed), a folder or a glob, as for `train`; or texts, one sentence each.
            Paragraphs longer than the model can read are split into sentences. Omit it only with `resume`.
        model: The model to start from: a run directory, a model folder or a Hub name; None is the bundled model. With
            `resume`, the one that the adaptation started from.
        output: The run directory; None creates adapted-NAME in the current folder.
        minutes: About how long it may take, including measurements.
        lora: Train a low-rank adapter (extra `lora`) instead of the weights. The model folder then holds only the
            adapter, and needs the model it started from. None does so if training the weights would take more than half
            of the free memory.
        merge: If an adapter is trained, add the adapter to the weights, so that the folder is an ordinary model.
        learning_rate: The peak learning rate; None is `LEARNING_RATE`, or `LORA_RATE` with `lora`.
        samples: How many texts to generate before and after.
        resume: Continue the stopped adaptation in `output`.
        seed: The seed of batches, noise and samples.
        cache: The folder for encoded corpora and generic text; None is the user's cache folder.

    Returns:
        The adapted model, and a report with bounds and samples before and after.

    Examples:
        >>> import diffusionbert
        >>> adapted = diffusionbert.adapt("films.txt")  # doctest: +SKIP
        >>> print(adapted.report.table())  # doctest: +SKIP
        >>> adapted.model.generate(num_return_sequences=3)  # doctest: +SKIP
    """
    clock = _Clock(minutes)
    if not 0 <= samples <= MAX_TEXTS:
        raise ValueError(f"`samples` must be between 0 and {MAX_TEXTS}, got {samples}")
    # Raises before any work if they are invalid.
    TrainingConfig(learning_rate=LEARNING_RATE if learning_rate is None else learning_rate, seed=seed)
    if merge and lora is False and not resume:
        raise ValueError("`merge` is for `lora`: without it there is nothing to merge; leave it out")
    stores = default_cache() if cache is None else Path(cache)
    if resume:
        folder, config, start = _stopped(output, model)
    else:
        start = load_engine(model)
        _require_adaptable(start)
        folder = _new_folder(texts, output)
        most = int(LINES_PER_MINUTE * max(1.0, minutes)) if start.device.type == "cpu" else None
        corpus = own_corpus(texts, folder, start.vocabulary, start.max_positions, most=most, seed=seed)
        config = _first_config(start, corpus, seed, _suits_adapter(start) if lora is None else lora, learning_rate)
    seed = config.training.seed
    prepared = prepare(config.data, stores)
    held_out = _First(prepared.validation, min(HELD_OUT, len(prepared.validation)))
    found = replace(prepared.sequences.report, elsewhere=0).summary()
    logger.info(f"{start.name}: {start.num_parameters / 1e6:.1f}M parameters")
    logger.info(f"your text: {found}; {len(prepared.validation):,} held out")
    generic = _generic(start, stores, seed)
    speed = 0.0
    if not resume:
        config, speed = _measured(config, start, prepared, clock)
    low = low_precision(config.training)
    before, bound_seconds = clock.timed(lambda: _bounds(start, (held_out, *generic), low))
    texts_before = _samples(start, samples, seed)
    if not resume:
        more = 3 * bound_seconds  # for validation, and for both bounds again
        config = _with_steps(config, prepared, speed, max(clock.left - more, clock.seconds / 2))
        logger.info(_announcement(config.training, speed, more))
    run = (
        train(None, folder, cache=stores, resume=True)
        if resume
        else train(config, folder, cache=stores, prepared=prepared)
    )
    if run.is_stopped:
        logger.info(f"continue with: diffusionbert adapt --resume --output {quote(str(folder))}")
        raise KeyboardInterrupt
    adapted = load_engine(folder)
    domain, _, kept = before
    share = 0.0
    if run.state.best_step:  # otherwise the model is still the start
        share = _restrained(start, adapted, generic[0], before[1], low)
        domain, kept = _bounds(adapted, (held_out, generic[1]), low)
        if config.training.lora is not None and not merge:
            _write_adapter(start, RunFolder(folder), share)
        elif share < 1:
            _replace_model(adapted, RunFolder(folder))
    report = AdaptReport(
        start=start.name,
        model=str(folder),
        data=config.data.corpus,
        num_sentences=len(prepared.sequences),
        domain=Change.of(before[0], domain),
        generic=Change.of(before[2], kept),
        share=share,
        steps=run.state.step,
        best_step=run.state.best_step,
        batch_tokens=_batch_tokens(config.training),
        learning_rate=config.training.learning_rate,
        precision=config.training.precision,
        tokens_per_second=speed or None,
        seconds=clock.elapsed,
        samples_before=texts_before,
        samples_after=_samples(adapted, samples, seed),
        seed=seed,
    )
    if share:
        _correct_record(RunFolder(folder), report, before[0].kind)
    write_json(folder / _REPORT, to_json(report))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # several times the size of the model
    return Adapted(Model(adapted), report)


# ---- text -----------------------------------------------------------------------------------------------------------


def _new_folder(texts: str | Path | Iterable[str] | None, output: str | Path | None) -> Path:
    """The run directory: the given one, or a new one named after the text."""
    if output is not None:
        require_output(output)
    folder = folder_for(texts) if output is None else Path(output)
    RunFolder(folder).require_free()
    require_writable(folder)
    return folder


def _stopped(output: str | Path | None, model: str | Path | None) -> tuple[Path, RunConfig, Engine]:
    """The directory, configuration and start of a stopped adaptation."""
    if output is None:
        raise ValueError("`resume` needs the `output` of the stopped adaptation")
    folder = Path(output)
    config = stored_config(folder)
    if (folder / _REPORT).exists():
        raise ValueError(f"the adaptation in {str(folder)!r} is complete; to adapt it further, give it as `model`")
    name = config.backbone.pretrained
    start = load_engine(None if name == str(BUNDLED) else name)
    if model is not None and load_engine(model).folder != start.folder:
        raise ValueError(f"the adaptation in {str(folder)!r} started from {start.name!r}; leave out `model`")
    return folder, config, start


@dataclass(frozen=True, eq=False)
class _First:
    """The first sequences of a dataset."""

    sequences: Encoded
    number: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.sequences.lengths[: self.number]

    def batch(self, indices: Sequence[int]) -> Batch:
        return self.sequences.batch(indices)


def _generic(engine: Engine, cache: Path, seed: int) -> tuple[Sentences, Sentences]:
    """Two sets of generic text: one to choose the share, one to report on."""
    texts = generic_texts(engine, cache, seed=seed)
    halves = texts[0::2], texts[1::2]
    if min(map(len, halves)) < 2:
        raise ValueError("the model to start from generates no text that it can read back; give a trained model")
    first, second = (Sentences(engine.vocabulary, tuple(half)) for half in halves)
    return first, second


def _samples(engine: Engine, number: int, seed: int) -> tuple[str, ...]:
    return tuple(Model(engine).generate(num_return_sequences=number, seed=seed)) if number else ()


# ---- settings -------------------------------------------------------------------------------------------------------


def _require_adaptable(engine: Engine) -> None:
    engine.require_single_texts("adapt to")
    if not engine.config.objective.scoring_quantities(engine.config.time).available:
        raise ValueError(
            f"adaptation is guided by a likelihood, which the objective {engine.config.objective} does not have; use "
            "train --start"
        )


def _suits_adapter(start: Engine) -> bool:
    """Whether gradients and moments of all weights would take more than half of the free memory."""
    is_gpu = start.device.type == "cuda"
    free = torch.cuda.mem_get_info(start.device)[0] if is_gpu else psutil.virtual_memory().available
    needed = 12 * start.num_parameters
    if needed <= free / 2:
        return False
    memory = f"training all weights would take {needed / 1e9:.1f} of {free / 1e9:.1f} GB of free memory"
    if find_spec("peft") is None:
        logger.warning(f"{memory}; an adapter takes less: pip install 'diffusionbert[lora]'")
        return False
    logger.info(f"{memory}, so an adapter is trained instead")
    return True


def _first_config(start: Engine, corpus: str, seed: int, lora: bool, learning_rate: float | None) -> RunConfig:
    """The start's own network, objective and text settings; the number of steps is determined later."""
    own = start.config.data
    data = DataConfig(
        corpus,
        vocabulary=str(start.folder),
        lower=own.lower,
        detokenize=own.detokenize,
        max_length=start.max_positions,
    )
    training = TrainingConfig(
        learning_rate=(LORA_RATE if lora else LEARNING_RATE) if learning_rate is None else learning_rate,
        lora=LORA_RANK if lora else None,
        weight_decay=0.0,
        seed=seed,
        validation_sentences=100,
        validation_draws=2,
        patience=PATIENCE,
    )
    return replace(start.config, data=with_held_out(data), backbone=Pretrained(str(start.folder)), training=training)


def _batch_tokens(training: TrainingConfig) -> int:
    assert isinstance(training.batching, TokenBudget)
    return training.batching.tokens


def _measured(config: RunConfig, start: Engine, prepared: PreparedData, clock: _Clock) -> tuple[RunConfig, float]:
    """The configuration with the precision and batch size that suit this machine, and its tokens per second."""
    training = config.training
    is_gpu = make_accelerator(training, None).device.type == "cuda"
    module = start.module(config.objective.build(start.statistics))
    found, fault = {}, RuntimeError("no precision can be used")
    for precision in ("bf16",) if is_gpu else ("no", "bf16"):
        settings = replace(training, precision=precision)
        try:
            found[precision] = measure(module, prepared.sequences, settings, start.device, _SMALL_BATCH)
        except RuntimeError as error:  # some processors have no kernels for bfloat16
            fault = error
    module.eval()
    if not found:
        raise fault
    precision, best = max(found.items(), key=lambda one: one[1].tokens_per_second)
    total, epoch = best.tokens_per_second * clock.left, int(prepared.sequences.lengths.sum())
    tokens = 2 ** round(math.log2(max(1.0, total / _MANY_STEPS)))
    tokens = max(min(tokens, _LARGE_BATCH, epoch // 8), min(_SMALL_BATCH, epoch // 4), start.max_positions)
    training = replace(training, precision=precision, batching=TokenBudget(tokens), micro_tokens=best.micro_tokens)
    logger.info(
        f"{start.device}: {best.tokens_per_second:,.0f} tokens/s in {'bf16' if precision == 'bf16' else 'fp32'}"
    )
    return replace(config, training=training), best.tokens_per_second


_SMALL_BATCH, _LARGE_BATCH = 1024, 16_384  # tokens
_FEWEST_STEPS, _MANY_STEPS = 8, 500


def _with_steps(config: RunConfig, prepared: PreparedData, speed: float, seconds: float) -> RunConfig:
    """The configuration with as many steps as fit into the time, but at most `MAX_EPOCHS`."""
    training = config.training
    batch = _batch_tokens(training)
    affordable = int(0.9 * speed * max(0.0, seconds) / batch)  # the optimizer and checkpoints take time, too
    useful = math.ceil(MAX_EPOCHS * int(prepared.sequences.lengths.sum()) / batch)
    steps = max(_FEWEST_STEPS, min(affordable, useful))
    every = math.ceil(steps / VALIDATIONS)
    training = replace(
        training, steps=steps, warmup=max(1, steps // 10), validate_every=every, save_every=every, log_every=1
    )
    return replace(config, training=training)


def _announcement(training: TrainingConfig, speed: float, more: float) -> str:
    batch = _batch_tokens(training)
    done = datetime.now() + timedelta(seconds=1.1 * training.steps * batch / speed + more)
    return (
        f"{training.steps:,} steps of {batch:,} tokens, learning rate {training.learning_rate:g}; done at about "
        f"{done:%H:%M}"
    )


class _Clock:
    """The remaining time budget."""

    def __init__(self, minutes: float):
        if not 0 < minutes < math.inf:
            raise ValueError(f"`minutes` must be greater than 0, got {minutes}; 5 is usual")
        self.seconds, self.started = 60 * minutes, time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.elapsed)

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """The result of the work, and the seconds it took."""
        began = self.elapsed
        done = work()
        return done, self.elapsed - began


# ---- bounds and weights ---------------------------------------------------------------------------------------------


def _bounds(engine: Engine, texts: Iterable[SequenceDataset], low: torch.dtype | None) -> list[Estimate]:
    sets, done = list(texts), 0
    with progress_line(BUDGET.max_rounds * sum(len(one.lengths) for one in sets)) as show:

        def advance(number: int) -> None:
            nonlocal done
            done += number
            show(done, "bounds on held-out and generic text")

        return [
            estimate_sequences(engine, one, BUDGET, autocast=low, batch_tokens=_SMALL_BATCH, advance=advance)
            for one in sets
        ]


def _restrained(
    start: Engine, adapted: Engine, generic: SequenceDataset, before: Estimate, low: torch.dtype | None
) -> float:
    """Moves the adapted weights back toward the start until generic text costs little more; returns the share."""
    own = {name: weight.detach().clone() for name, weight in adapted.module().named_parameters()}
    first = {name: weight.detach() for name, weight in start.module().named_parameters()}
    share = 1.0
    for _ in range(TRIALS):
        [found] = _bounds(adapted, [generic], low)
        rise = found.nats_per_token - before.nats_per_token
        if rise <= FORGETTING:
            break
        # The rise is about quadratic near the start, where the bound on its own samples is lowest. Aim a little lower.
        share = round(share * min(0.95, max(0.4, math.sqrt(0.9 * FORGETTING / rise))), 2)
        with torch.no_grad():
            for name, weight in adapted.module().named_parameters():
                weight.copy_(torch.lerp(first[name], own[name], share))
    return share


def _replace_model(engine: Engine, run: RunFolder) -> None:
    """Replaces the weights that training exported with the model's current ones."""
    unfinished = run.path / "model.adapted"
    shutil.rmtree(unfinished, ignore_errors=True)
    engine.save(unfinished, WeightFormat())
    shutil.rmtree(run.model)
    unfinished.rename(run.model)


def _write_adapter(start: Engine, run: RunFolder, share: float) -> None:
    """Replaces the exported model with the adapter alone."""
    best = run.read_pointer("best")
    assert best is not None
    prefix = "network.backbone."
    weights = {name.removeprefix(prefix): weight for name, weight in weights_to_export(best).items()}
    base = "bundled" if start.folder == BUNDLED else str(start.folder.absolute())
    write_adapter(run.model, weights, base, share)
    card = run.model / "README.md"
    is_opened = "is a LoRA adapter, and opens with diffusionbert, or with PEFT on the model it was trained from"
    card.write_text(re.sub(r"opens with `Auto\w+`", is_opened, card.read_text(encoding="utf-8")), encoding="utf-8")


def _correct_record(run: RunFolder, report: AdaptReport, kind: Likelihood) -> None:
    """Writes the bound of the final weights into the model folder; training recorded that before moving back."""
    file, card = run.model / "diffusionbert.json", run.model / "README.md"
    validation = ValidationRecord(report.best_step, kind, report.domain.after)
    write_json(file, {**read_json(file), "validation": to_json(validation)})
    row = f"| held-out text | {report.domain} (before → after adaptation), kind: {kind.value} |"
    text = re.sub(r"^\| validation text \|.*$", lambda _: row, card.read_text(encoding="utf-8"), flags=re.MULTILINE)
    card.write_text(text, encoding="utf-8")
