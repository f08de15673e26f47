"""Adaptation: a trained model becomes one for the user's own text, with no setting to choose.

A part of the text is held out. A few timed steps say how many fit into the time budget; the learning rate is low, and
the checkpoint with the lowest held-out bound is kept. Then the weights are moved back towards the start,

    w = w_start + share · (w_adapted - w_start)

(Wortsman et al. 2022, WiSE-FT), until the bound on generic text, which are samples of the start, has risen by no more
than `FORGETTING`. Both bounds are estimated before and after with the same noise. Training is that of `training.run`.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from diffusionbert.data.canvas import Sentences
from diffusionbert.data.dataset import Encoded
from diffusionbert.diffusion.shapes import Batch
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.inference.score import estimate_sequences
from diffusionbert.likelihood.estimate import EstimationBudget, SequenceDataset
from diffusionbert.likelihood.intervals import paired_difference
from diffusionbert.likelihood.scores import Estimate
from diffusionbert.model import Model
from diffusionbert.networks.loading import Pretrained
from diffusionbert.networks.lora import write_adapter
from diffusionbert.reporting import logger, require_type
from diffusionbert.storage.files import require_output, require_writable, write_json
from diffusionbert.storage.schema import to_json
from diffusionbert.storage.weights import WeightFormat
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.checkpoint import weights_to_export
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.model_folder import BUNDLED
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
from diffusionbert.workflows.generic_text import generic_texts

T = TypeVar("T")

MINUTES = 5.0
LEARNING_RATE = 3e-4
LORA_RATE, LORA_RANK = 2e-3, 16
FORGETTING = 0.05
"""The most nats per token that generic text may cost more than before."""
TRIALS = 4
"""How often the share is lowered at most."""
MAX_EPOCHS = 8
VALIDATIONS = 4
HELD_OUT = 200
"""The most held-out sentences that are scored."""
BUDGET = EstimationBudget(precision=None, max_draws=4, strata=2)
_TEXT, _REPORT = "text.txt", "adapt.json"


@dataclass(frozen=True)
class Change:
    """Nats per token before and after, on the same sentences and with the same noise."""

    before: float
    after: float
    difference: float
    """After minus before: below 0, the model has improved."""
    low: float
    """Of the 95 % interval of the difference."""
    high: float
    num_sentences: int

    @classmethod
    def of(cls, before: Estimate, after: Estimate) -> Change:
        nats = after.scores.nats.numpy(), before.scores.nats.numpy()
        tokens = after.scores.tokens.double().numpy()
        found = paired_difference(nats, (tokens, tokens))
        return cls(before.nats_per_token, after.nats_per_token, found.value, found.low, found.high, len(tokens))

    def __str__(self) -> str:
        return (
            f"{self.before:.3f} → {self.after:.3f} nats per token, {self.difference:+.3f} "
            f"[{self.low:+.3f}, {self.high:+.3f}], {self.num_sentences} sentences"
        )


@dataclass(frozen=True)
class AdaptReport:
    """What was done, and what came of it."""

    start: str
    model: str
    """The folder of the adapted model."""
    data: str
    num_sentences: int
    """Trained on, the held-out ones not counted."""
    domain: Change
    """On the held-out sentences."""
    generic: Change
    """On samples of the start, other ones than those that chose the share."""
    share: float
    """How far the weights are from those of the start (0) to those that were trained (1)."""
    steps: int
    best_step: int
    batch_tokens: int
    learning_rate: float
    precision: str
    tokens_per_second: float | None
    """Of training, as measured; None if the run was resumed."""
    seconds: float
    samples_before: tuple[str, ...]
    samples_after: tuple[str, ...]
    seed: int

    @property
    def is_better(self) -> bool:
        """Whether the bound on held-out text has fallen, beyond chance."""
        return self.domain.high < 0

    def table(self) -> str:
        """What a user reads: bounds and samples before and after, and the next command."""
        lines = [
            f"held-out text: {self.domain}",
            f"generic text:  {self.generic} (samples of the start)",
            f"step {self.best_step} of {self.steps}, {self.share:.0%} of the way from the start; "
            f"{self.num_sentences:,} sentences, {timedelta(seconds=round(self.seconds))}",
        ]
        for title, texts in (("before", self.samples_before), ("after", self.samples_after)):
            lines += [f"{title}:", *(f"  {text}" for text in texts)]
        if not self.is_better:
            lines.append(
                "no gain beyond chance on held-out text: give more text, or more time (--minutes); the model is kept "
                "all the same"
            )
        lines.append(f"next: diffusionbert generate --model {self.model}")
        return "\n".join(lines)


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
    lora: bool = False,
    merge: bool = False,
    learning_rate: float | None = None,
    samples: int = 3,
    resume: bool = False,
    seed: int = 0,
    cache: str | Path | None = None,
) -> Adapted:
    """Fine-tunes a model on text of your own; batch, steps and learning rate are chosen for this machine.

    Args:
        texts: A text file (also compressed), a folder or glob, as for `train`; or texts, one sentence each. Only
            `resume` needs none.
        model: What to start from: a run directory, a model folder or a Hub name; None is the bundled model.
        output: The run directory; None is a new one, adapted-NAME in the current folder.
        minutes: About how long it may take, measuring included.
        lora: Trains a low-rank adapter (extra `lora`) in place of the weights; the model folder then holds the adapter
            alone, and needs the model to start from.
        merge: With `lora`, adds the adapter to the weights, so that the folder is an ordinary model.
        learning_rate: The peak; None is `LEARNING_RATE`, and `LORA_RATE` with `lora`.
        samples: How many texts are generated before and after.
        resume: Continues the adaptation in `output`, which was stopped.
        seed: Of batches, noise and samples.
        cache: Where encoded corpora and generic text are kept; None is the user's cache folder.

    Returns:
        The adapted model and a report with bounds and samples before and after.

    Example:
        >>> import diffusionbert
        >>> adapted = diffusionbert.adapt("films.txt")  # doctest: +SKIP
        >>> print(adapted.report.table())  # doctest: +SKIP
        >>> adapted.model.generate(num_return_sequences=3)  # doctest: +SKIP
    """
    clock = _Clock(minutes)
    if samples < 0:
        raise ValueError(f"`samples` must be 0 or more, got {samples}")
    if merge and not lora:
        raise ValueError("`merge` is for `lora`: without it there is nothing to merge; leave it out")
    start = load_engine(model)
    _require_adaptable(start)
    folder = _output(texts, output, resume=resume)
    stores = default_cache() if cache is None else Path(cache)
    config = (
        stored_config(folder)
        if resume
        else _first_config(start, _corpus(texts, folder), seed, LORA_RANK if lora else None)
    )
    seed = config.training.seed
    prepared = prepare(config.data, stores)
    held_out = _First(prepared.validation, min(HELD_OUT, len(prepared.validation)))
    logger.info(f"{start.name}: {start.num_parameters / 1e6:.1f}M parameters; {prepared.sequences.report.summary()}")
    generic = _generic(start, stores, seed)
    speed = 0.0
    if not resume:
        config, speed = _measured(config, start, prepared, clock)
    low = low_precision(config.training)
    before, bound_seconds = clock.timed(lambda: _bounds(start, (held_out, *generic), low))
    texts_before = _samples(start, samples, seed)
    if not resume:
        more = 3 * bound_seconds  # validations, and both bounds again
        config = _with_steps(config, prepared, speed, max(clock.left - more, clock.seconds / 2))
        if learning_rate is not None:
            config = replace(config, training=replace(config.training, learning_rate=learning_rate))
        logger.info(_announcement(config.training, speed, more))
    run = train(None if resume else config, folder, cache=stores, resume=resume)
    if run.is_stopped:
        raise KeyboardInterrupt
    adapted = load_engine(folder)
    share = _restrained(start, adapted, generic[0], before[1], low) if run.state.best_step else 1.0
    after = _bounds(adapted, (held_out, *generic), low)
    if config.training.lora is not None and not merge and run.state.best_step:
        _write_adapter(start, RunFolder(folder), share)
    elif share < 1:
        _replace_model(adapted, RunFolder(folder))
    report = AdaptReport(
        start=start.name,
        model=str(folder),
        data=config.data.corpus,
        num_sentences=len(prepared.sequences),
        domain=Change.of(before[0], after[0]),
        generic=Change.of(before[2], after[2]),
        share=share if run.state.best_step else 0.0,
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
    write_json(folder / _REPORT, to_json(report))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # several times the size of the model
    return Adapted(Model(adapted), report)


# ---- text -----------------------------------------------------------------------------------------------------------


def _output(texts: str | Path | Iterable[str] | None, output: str | Path | None, *, resume: bool) -> Path:
    """The run directory: the given one, or a new one named after the text."""
    if output is None and resume:
        raise ValueError("`resume` needs the `output` of the adaptation that was stopped")
    if texts is None and not resume:
        raise ValueError("there is no text to adapt to; give a text file, or - for standard input")
    if output is not None:
        require_output(output)
        folder = Path(output)
    else:
        stem = Path(texts).name.split(".")[0] if isinstance(texts, str | Path) else ""
        name = f"adapted-{stem or 'text'}"
        names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
        folder = next(path for path in map(Path, names) if not path.exists())
    if not resume:
        RunFolder(folder).require_free()
    require_writable(folder)
    return folder


def _corpus(texts: str | Path | Iterable[str] | None, folder: Path) -> str:
    """A corpus as `train` takes it; given texts are written into the run directory."""
    if isinstance(texts, str | Path):
        return str(texts)
    folder.mkdir(parents=True, exist_ok=True)
    file, has_text = folder / _TEXT, False
    with file.open("w", encoding="utf-8", errors="replace") as stream:
        for text in texts or ():
            require_type("each text", text, str, "a string")
            line = " ".join(text.split())
            has_text |= bool(line)
            stream.write(f"{line}\n" if line else "")
    if not has_text:
        file.unlink()
        raise ValueError("there is no text to adapt to; give a file or a list of sentences")
    return str(file)


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
    """Two sets of generic text: by the first the share is chosen, on the second the report is made."""
    texts = generic_texts(engine, cache, seed=seed)
    halves = texts[0::2], texts[1::2]
    if min(map(len, halves)) < 2:
        raise ValueError("the model to start from generates no text that it can read again; give a trained model")
    first, second = (Sentences(engine.vocabulary, tuple(half)) for half in halves)
    return first, second


def _samples(engine: Engine, number: int, seed: int) -> tuple[str, ...]:
    return tuple(Model(engine).generate(num_return_sequences=number, seed=seed)) if number else ()


# ---- settings -------------------------------------------------------------------------------------------------------


def _require_adaptable(engine: Engine) -> None:
    engine.require_single_texts("adapt to")
    if not engine.config.objective.scoring_quantities(engine.config.time).available:
        raise ValueError(
            f"adaptation is steered by a likelihood, which the objective {engine.config.objective} does not have; use "
            "train --start"
        )


def _first_config(start: Engine, corpus: str, seed: int, rank: int | None) -> RunConfig:
    """The start's own network, objective and reading of text; how long to train is measured later."""
    own = start.config.data
    data = DataConfig(
        corpus,
        vocabulary=str(start.folder),
        lower=own.lower,
        detokenize=own.detokenize,
        max_length=start.max_positions,
    )
    training = TrainingConfig(
        learning_rate=LEARNING_RATE if rank is None else LORA_RATE,
        lora=rank,
        weight_decay=0.0,
        seed=seed,
        validation_sentences=100,
        validation_draws=2,
        patience=2,
    )
    return replace(start.config, data=with_held_out(data), backbone=Pretrained(str(start.folder)), training=training)


def _batch_tokens(training: TrainingConfig) -> int:
    assert isinstance(training.batching, TokenBudget)
    return training.batching.tokens


def _measured(config: RunConfig, start: Engine, prepared: PreparedData, clock: _Clock) -> tuple[RunConfig, float]:
    """The precision and the batch that suit this machine, and its tokens per second."""
    training = config.training
    is_gpu = make_accelerator(training, None).device.type == "cuda"
    module = start.module(config.objective.build(start.statistics))
    found = {}
    for precision in ("bf16",) if is_gpu else ("no", "bf16"):
        settings = replace(training, precision=precision)
        with suppress(RuntimeError):  # some processors have no kernels for bfloat16
            found[precision] = measure(module, prepared.sequences, settings, start.device, _SMALL_BATCH)
    module.eval()
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
_MANY_STEPS = 500


def _with_steps(config: RunConfig, prepared: PreparedData, speed: float, seconds: float) -> RunConfig:
    """As many steps as fit into the time, but no more than `MAX_EPOCHS`."""
    training = config.training
    batch = _batch_tokens(training)
    affordable = int(0.9 * speed * max(0.0, seconds) / batch)  # the optimizer and checkpoints take time, too
    useful = math.ceil(MAX_EPOCHS * int(prepared.sequences.lengths.sum()) / batch)
    steps = max(2 * VALIDATIONS, min(affordable, useful))
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
    """What is left of the time budget."""

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
        """What the work returns, and its seconds."""
        began = self.elapsed
        done = work()
        return done, self.elapsed - began


# ---- bounds and weights ---------------------------------------------------------------------------------------------


def _bounds(engine: Engine, texts: Iterable[SequenceDataset], low: torch.dtype | None) -> list[Estimate]:
    return [estimate_sequences(engine, one, BUDGET, autocast=low) for one in texts]


def _restrained(
    start: Engine, adapted: Engine, generic: SequenceDataset, before: Estimate, low: torch.dtype | None
) -> float:
    """Moves the adapted weights back towards the start until generic text costs little more; returns the share."""
    own = {name: weight.detach().clone() for name, weight in adapted.module().named_parameters()}
    first = {name: weight.detach() for name, weight in start.module().named_parameters()}
    share = 1.0
    for _ in range(TRIALS):
        [found] = _bounds(adapted, [generic], low)
        rise = found.nats_per_token - before.nats_per_token
        if rise <= FORGETTING:
            break
        # About quadratic near the start, where the bound on its own samples is lowest; a little less, to be safe.
        share = round(share * min(0.95, max(0.4, math.sqrt(0.9 * FORGETTING / rise))), 2)
        with torch.no_grad():
            for name, weight in adapted.module().named_parameters():
                weight.copy_(torch.lerp(first[name], own[name], share))
    return share


def _replace_model(engine: Engine, run: RunFolder) -> None:
    """Writes the model's present weights in place of those that training exported."""
    unfinished = run.path / "model.adapted"
    shutil.rmtree(unfinished, ignore_errors=True)
    engine.save(unfinished, WeightFormat())
    shutil.rmtree(run.model)
    unfinished.rename(run.model)


def _write_adapter(start: Engine, run: RunFolder, share: float) -> None:
    """Leaves of the exported model the adapter alone."""
    best = run.read_pointer("best")
    assert best is not None
    prefix = "network.backbone."
    weights = {name.removeprefix(prefix): weight for name, weight in weights_to_export(best).items()}
    base = "bundled" if start.folder == BUNDLED else str(start.folder.absolute())
    write_adapter(run.model, weights, base, share)
    card = run.model / "README.md"
    is_opened = "is a LoRA adapter, and opens with diffusionbert, or with PEFT on the model that it starts from"
    card.write_text(re.sub(r"opens with `Auto\w+`", is_opened, card.read_text(encoding="utf-8")), encoding="utf-8")
