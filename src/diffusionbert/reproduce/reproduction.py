"""Runs the paper's experiment: trains and evaluates every system, unless that has been done before.

    output/
      settings.json                what is reproduced: scale, data, seed; later calls must have the same settings
      pretrained/masked, decoder   the networks that systems start from, unless given
      runs/NAME                    the run directory of each system
      evaluations/NAME             evaluation.json, scores and samples of each evaluation of a system

A stopped run is resumed, and finished work is not repeated: a run is finished if its log has reached the last step,
even if its weights were deleted. Tables and figures are made only from these folders (`targets`). This module refers to
systems by name and does not depend on any concrete objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

from diffusionbert.evaluation.dataset import EvaluationSet, open_evaluation_set
from diffusionbert.evaluation.evaluate import Plan, evaluate
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.likelihood.estimate import EstimationBudget, fast_products
from diffusionbert.networks.loading import NewBert, of_family
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.parallel import current
from diffusionbert.recipes import PRESETS, SYSTEMS, Start, pretraining, pretraining_of, started_from, tiny
from diffusionbert.reporting import logger
from diffusionbert.reproduce import Request
from diffusionbert.samplers import SamplingRequest
from diffusionbert.storage.files import read_json, require_writable, write_json
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import RunConfig
from diffusionbert.training.log import ValidationEvent, events_of
from diffusionbert.training.optim import fitting_ema
from diffusionbert.training.run import stored_config, train
from diffusionbert.training.run_folder import RunFolder


@dataclass(frozen=True)
class Scale:
    """The size of networks, the length of training and the number of samples."""

    preset: Callable[[str], RunConfig]
    """The configuration of every system, given the training corpus."""
    pretrained: Callable[..., RunConfig]
    """The pretraining configuration of the networks to start from, given the corpus and whether it is a `decoder`."""
    sentences: int = 2000
    """The number of held-out sentences to score."""
    samples: int = 1000
    """The number of samples for BLEU; as many again are generated for self-BLEU."""
    length: int = 64
    """The number of tokens per sample."""
    max_draws: int = 32
    vector_steps: int = 250
    """The sampling steps of Diffusion-LM, which is trained with 2000."""
    step_counts: tuple[int, ...] = (2, 8, 16, 64, 128, 512)
    """The numbers of sampling steps in table 3."""
    timed_samples: int = 250
    """The number of samples for table 3, generated in one batch."""
    decoder_rate_factor: float = 2.0
    """A factor on the learning rate of a new GPT-2, which tolerates a higher one than a BERT."""


def _smoke(data: str) -> RunConfig:
    config = tiny(data)
    return replace(
        config,
        data=replace(config.data, vocabulary=1000, max_length=48),
        backbone=NewBert(layers=2, width=64, heads=2, dropout=0.0),
        objective=DiscreteTimeConfig(num_steps=64),
        training=replace(
            config.training,
            steps=200, warmup=20, validate_every=50, save_every=200, validation_sentences=32, validation_draws=8,
        ),
    )  # fmt: skip


def _smoke_pretraining(data: str, *, decoder: bool) -> RunConfig:
    config = pretraining_of(_smoke(data), decoder=decoder)
    return replace(config, training=replace(config.training, steps=150, validate_every=150, save_every=150))


def _short_training(preset: str, data: str) -> RunConfig:
    """2,000 steps of 16k tokens; docs/results.md says how long they take and why fewer are not enough.

    A randomly initialized BERT stays at the unigram entropy for hundreds of steps, however large the batches are.
    """
    config = PRESETS[preset](data)
    training = replace(
        config.training,
        steps=2000, batching=TokenBudget(16_384), learning_rate=4e-4, warmup=400,
        validate_every=250, validation_sentences=1024, validation_draws=8, save_every=2000, ema=fitting_ema(2000),
    )  # fmt: skip
    return replace(config, training=training)


SCALES: dict[str, Scale] = {
    "smoke": Scale(
        _smoke, _smoke_pretraining, sentences=48, samples=40, length=16,
        vector_steps=100, step_counts=(2, 8, 16, 64), timed_samples=40, decoder_rate_factor=1.0,
    ),
    "19m": Scale(partial(_short_training, "wiki-small"), partial(pretraining, "wiki-small")),
    "34m": Scale(partial(_short_training, "wiki-medium"), partial(pretraining, "wiki-medium")),
}  # fmt: skip


@final
class Reproduction:
    """An output folder of runs and evaluations; `cache` holds encoded corpora."""

    def __init__(self, output: Path, request: Request, cache: Path, device: str | None = None):
        if request.vocabulary and (request.masked or request.decoder):
            raise ValueError(
                f"the vocabulary {request.vocabulary!r} was given with a network that has its own; give "
                "--vocabulary, or --masked and --decoder"
            )
        self.output, self.request, self.cache, self.device = output, request, cache, device
        self.scale = SCALES[request.scale]
        # If this is the training corpus itself, its held-out part is evaluated.
        self.test = request.test or request.validation or request.data
        self._base = self._configured()
        self._engines: dict[str, Engine] = {}
        self._evaluation_sets: dict[tuple[str, str, int], EvaluationSet] = {}
        current().on_main(self._store_settings)

    def _configured(self) -> RunConfig:
        """The configuration that all systems share; warm-up and intervals scale with the number of steps."""
        config = self._with_backbone(self.scale.preset(self.request.data))
        training = replace(config.training, seed=self.request.seed)
        if self.request.steps is not None:
            fraction = self.request.steps / training.steps
            every = {name: getattr(training, name) for name in ("warmup", "validate_every", "save_every")}
            scaled = {name: max(1, round(value * fraction)) for name, value in every.items()}
            ema = None if training.ema is None else fitting_ema(self.request.steps)
            training = replace(training, steps=self.request.steps, ema=ema, **scaled)
        return replace(config, data=replace(config.data, validation=self.request.validation), training=training)

    def _with_backbone(self, config: RunConfig) -> RunConfig:
        return replace(config, backbone=of_family(config.backbone, self.request.backbone))

    def _store_settings(self) -> None:
        require_writable(self.output)
        settings, requested = self.output / "settings.json", asdict(self.request)
        # A folder with nothing but settings is left by a call that failed before training; they may be replaced.
        has_work = settings.exists() and any(path != settings for path in self.output.iterdir())
        # Settings that an earlier version did not store get their defaults.
        stored = read_json(settings) if has_work else requested
        stored = asdict(Request()) | {"evaluation_seed": stored.get("seed", 0)} | stored  # one seed used to be for both
        for name, value in requested.items():
            if stored.get(name) != value:
                raise ValueError(
                    f"{str(self.output)!r} contains a reproduction with {name} {stored.get(name)!r}, got {value!r}; "
                    "give the same settings, or choose another --output"
                )
        self.output.mkdir(parents=True, exist_ok=True)
        write_json(settings, requested)

    # ---- runs -------------------------------------------------------------------------------------------------------

    def run(self, name: str) -> Path:
        """The run directory of a system; trains it first unless it is finished."""
        return self._trained(self.output / "runs" / name, lambda: self.planned(name))

    def config(self, name: str) -> RunConfig:
        """The configuration of a system's run, once it exists."""
        return stored_config(self.output / "runs" / name)

    def start(self, kind: Start) -> str:
        """The folder or name of the network that systems start from; pretrains it first unless that is done."""
        given = self.request.masked if kind is Start.MASKED else self.request.decoder
        if given is not None:
            return given
        output = self._trained(self.output / "pretrained" / kind.value, lambda: self._pretraining(kind))
        return str(self._exported(output))

    def _pretraining(self, kind: Start) -> RunConfig:
        data = self.request.pretraining_data or self.request.data
        config = self._with_backbone(self.scale.pretrained(data, decoder=kind is Start.DECODER))
        config = replace(config, training=replace(config.training, seed=self.request.seed))
        if kind is Start.MASKED and self.request.vocabulary is None:
            return config  # all systems use its vocabulary
        return self._with_vocabulary(config)

    def _with_vocabulary(self, config: RunConfig) -> RunConfig:
        """The configuration with the common vocabulary: the requested one, or the masked network's."""
        owner = self.request.vocabulary or self.start(Start.MASKED)
        return replace(started_from(config, owner), backbone=config.backbone)

    def planned(self, name: str) -> RunConfig:
        """The configuration of a system's run; pretrains the network it starts from first, unless that is done."""
        system, base = SYSTEMS[name], self._base
        if system.start is not Start.SCRATCH:
            return system.configure(started_from(base, self.start(system.start)))
        config = system.configure(self._with_vocabulary(base))
        if config.objective.is_causal and self.request.backbone == "bert":
            rate = self.scale.decoder_rate_factor * base.training.learning_rate
            config = replace(config, training=replace(config.training, learning_rate=rate))
        return config

    def _trained(self, output: Path, make: Callable[[], RunConfig]) -> Path:
        """The run directory; trains or resumes the run unless it is finished."""
        if _agreed(lambda: is_finished(output)):
            return output
        if _agreed(RunFolder(output).config.exists):
            logger.info("%s: resumed", output)
            train(None, output, cache=self.cache, resume=True)
        else:
            config = make()
            logger.info("%s: training for %s steps", output, f"{config.training.steps:,}")
            train(config, output, cache=self.cache)
        if not _agreed(lambda: is_finished(output)):  # stopped by a signal
            logger.info("%s: stopped; run the same command to resume", output)
            raise KeyboardInterrupt
        return output

    def _exported(self, output: Path) -> Path:
        """The run directory with its model; exports the model if the run was stopped before that."""
        run = RunFolder(output)
        if _agreed(lambda: not run.model.exists() and run.read_pointer("last") is not None):
            train(None, output, cache=self.cache, resume=True)
        return output

    def engine(self, name: str) -> Engine:
        """The trained model of a system."""
        if name not in self._engines:
            self._engines = {name: load_engine(self._exported(self.run(name)), self.device)}  # one at a time
        return self._engines[name]

    # ---- evaluations ------------------------------------------------------------------------------------------------

    def evaluation(
        self,
        key: str,
        name: str,
        sampling: SamplingRequest | None = None,
        *,
        steps: int | None = None,
        scored: bool = True,
        samples: int | None = None,
        data: str | None = None,
    ) -> EvaluationResult:
        """Evaluates a system, by default as in the main table, unless the folder `key` already has the result.

        `steps` is T of the bound; without `scored`, only samples are evaluated. All systems share the noise of draws.
        """
        folder, scale, seed = self.output / "evaluations" / key, self.scale, self.request.evaluation_seed
        if not _agreed((folder / "evaluation.json").exists):
            engine = self.engine(name)
            engine = engine if steps is None else engine.with_steps(steps)
            budget = EstimationBudget(0.005, scale.max_draws, strata=min(16, scale.max_draws // 2), seed=seed)
            number, request = scale.samples if samples is None else samples, sampling or self.sampling(name)
            plan = Plan(request, number, scale.length, budget, scored=scored, seed=seed, shared_noise=True)
            logger.info("%s: evaluates", folder)
            with fast_products(engine.config.objective):
                result = evaluate(engine, self._evaluation_set(engine, data or self.test), plan)
            current().on_main(lambda: result.save(folder))
        return current().on_main(lambda: EvaluationResult.load(folder))

    def other_evaluation(self, name: str) -> EvaluationResult:
        """Evaluates a system on the corpus of another domain, by likelihoods only if it has one."""
        has_likelihood = bool(SYSTEMS[name].objective.scoring_quantities(SYSTEMS[name].time).available)
        samples = 0 if has_likelihood else 2
        return self.evaluation(f"{name}-other-text", name, samples=samples, data=self.request.other_test)

    def sampling(self, name: str) -> SamplingRequest:
        """The sampling settings of a system for the main table."""
        system = SYSTEMS[name]
        if not system.objective.has_word_vectors:
            return system.sampling
        return replace(system.sampling, config=replace(system.sampling.config, steps=self.scale.vector_steps))

    def _evaluation_set(self, engine: Engine, name: str) -> EvaluationSet:
        key = name, engine.vocabulary.fingerprint, engine.max_length
        if key not in self._evaluation_sets:
            self._evaluation_sets[key] = open_evaluation_set(engine, name, sentences=self.scale.sentences)
        return self._evaluation_sets[key]


def _agreed(is_so: Callable[[], bool]) -> bool:
    """What the main process finds on its disk, so that all processes of a launch act alike."""
    return current().on_main(is_so)


def is_finished(run: Path) -> bool:
    """Whether a directory contains a run that was trained and validated up to its last step."""
    folder = RunFolder(run)
    if not folder.config.exists():
        return False
    last = stored_config(run).training.steps
    return any(event.step >= last for event in events_of(folder.log, ValidationEvent))
