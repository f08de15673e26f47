"""Runs the paper's experiment: trains every system, evaluates it, and finds again what was done before.

    output/
      settings.json                what is reproduced: scale, data, seed; another call must ask for the same
      pretrained/masked, decoder   the networks that systems start from, unless given
      runs/NAME                    a run folder for each system
      evaluations/NAME             evaluation.json, scores and samples of each way in which a system is looked at

A run that was stopped goes on where it was, and what is finished is not done again: a run whose log reached its last
step is finished, even if its weights are gone. Tables and pictures are made from these folders alone (`targets`).
Knows systems by name and what `train` and `evaluate` do; no concrete method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from diffusionbert.evaluation.dataset import EvaluationSet
from diffusionbert.evaluation.evaluate import Plan, evaluate, open_evaluation_set
from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.inference.engine import Engine, load_engine
from diffusionbert.likelihood.estimate import EstimationBudget, fast_products
from diffusionbert.networks.config import NewBert
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig
from diffusionbert.recipes import (
    SYSTEMS,
    Start,
    decoder_pretraining,
    masked_pretraining,
    preset,
    pretraining,
    started_from,
    tiny,
)
from diffusionbert.reporting import logger
from diffusionbert.reproduce.request import Request
from diffusionbert.samplers import SamplingRequest
from diffusionbert.storage.files import read_json, require_writable, write_json
from diffusionbert.training.batches import TokenBudget
from diffusionbert.training.config import RunConfig, TrainingConfig
from diffusionbert.training.log import ValidationEvent, events_of
from diffusionbert.training.run import stored_config, train
from diffusionbert.training.run_folder import RunFolder


@dataclass(frozen=True)
class Scale:
    """How large and how long everything is."""

    preset: Callable[[str], RunConfig]
    """Size, text and training of every system."""
    pretrained: Callable[[str, bool], RunConfig]
    """Of the networks that some systems start from; for a decoder, if it is True."""
    sentences: int
    """Held-out sentences whose likelihood is found."""
    samples: int
    """For BLEU; as many again for self-BLEU."""
    length: int
    """Tokens of a sample."""
    max_draws: int
    vector_steps: int
    """Steps in which Diffusion-LM writes; it is trained with 2000."""
    budgets: tuple[int, ...]
    """Numbers of steps of the table of speeds."""
    timed_samples: int
    """For the table of speeds: written at once."""
    new_decoder: float = 1.0
    """How many times higher the learning rate of a decoder is that starts from random weights: it bears more."""


def _smallest(data: str) -> RunConfig:
    config = tiny(data)
    training = replace(
        config.training,
        steps=200,
        batching=TokenBudget(1024),
        warmup=20,
        validate_every=50,
        save_every=200,
        validation_sentences=32,
        validation_draws=8,
    )
    return replace(
        config,
        data=replace(config.data, vocabulary=1000, max_length=48),
        backbone=NewBert(layers=2, width=64, heads=2, dropout=0.0),
        objective=DiscreteTimeConfig(num_steps=64),
        training=training,
    )


def _smallest_pretraining(data: str, decoder: bool) -> RunConfig:
    """The same network and text, by masking or by next words."""
    config = (decoder_pretraining if decoder else masked_pretraining)(_smallest(data))
    return replace(config, training=replace(config.training, steps=150, validate_every=150, save_every=150))


def _briefly(config: RunConfig) -> RunConfig:
    """Trained for 2,000 steps of 16k tokens; docs/results.md says what they take and why so many.

    From random weights a BERT rests at the unigram's entropy for hundreds of steps, however large they are.
    """
    training = replace(
        config.training,
        steps=2000,
        batching=TokenBudget(16_384),
        learning_rate=4e-4,
        warmup=400,
        validate_every=250,
        validation_sentences=1024,
        validation_draws=8,
        save_every=2000,
    )
    return replace(config, training=training)


def _scale(preset_name: str) -> Scale:
    """The size and the pretraining of a preset."""
    return Scale(
        lambda data: _briefly(preset(preset_name, data)),
        lambda data, decoder: pretraining(preset_name, data, decoder=decoder),
        sentences=2000,
        samples=1000,
        length=64,
        max_draws=32,
        vector_steps=250,
        budgets=(2, 8, 16, 64, 128, 512),
        timed_samples=250,
        new_decoder=2.0,
    )


SCALES: dict[str, Scale] = {
    "smoke": Scale(
        _smallest,
        _smallest_pretraining,
        sentences=48,
        samples=40,
        length=16,
        max_draws=32,
        vector_steps=100,
        budgets=(2, 8, 16, 64),
        timed_samples=40,
    ),
    "19m": _scale("wiki-small"),
    "34m": _scale("wiki-medium"),
}


@final
class Reproduction:
    """One folder of runs and evaluations."""

    def __init__(self, output: Path, request: Request, cache: Path, device: str | None = None):
        if request.vocabulary and (request.masked or request.decoder):
            raise ValueError(
                f"the vocabulary {request.vocabulary!r} was asked for beside a network that has its own; give "
                "--vocabulary, or --masked and --decoder"
            )
        self.output, self.request, self.cache, self.device = output, request, cache, device
        self.scale = SCALES[request.scale]
        self._models: dict[str, Engine] = {}
        self._materials: dict[tuple[str, str, int], EvaluationSet] = {}
        _ = self._base  # refuses wrong settings before any file is written
        self._keep_settings()

    def _keep_settings(self) -> None:
        require_writable(self.output)
        settings, requested = self.output / "settings.json", asdict(self.request)
        # Settings alone are those of a call that failed before anything was trained: they bind nobody.
        is_begun = settings.exists() and any(path.name != settings.name for path in self.output.iterdir())
        stored = _upgraded(read_json(settings)) if is_begun else requested
        different = [name for name in requested if stored.get(name) != requested[name]]
        if different:
            name = different[0]
            raise ValueError(
                f"{str(self.output)!r} holds a reproduction with {name} {stored.get(name)!r}, not {requested[name]!r}; "
                "ask for the same, or choose another --output"
            )
        self.output.mkdir(parents=True, exist_ok=True)
        write_json(settings, requested)

    # ---- runs -------------------------------------------------------------------------------------------------------

    def run(self, name: str) -> Path:
        """The run folder of a system; it is trained first, or to its end, unless it has been."""
        output = self.output / "runs" / name
        self._ensure(output, lambda: self.planned(name))
        return output

    def config(self, name: str) -> RunConfig:
        """What a system's run is, once it has begun."""
        return stored_config(self.output / "runs" / name)

    def start(self, kind: Start) -> str:
        """The folder or name of the network that systems start from; it is pretrained first, unless it has been."""
        given = self.request.masked if kind is Start.MASKED else self.request.decoder
        if given is not None:
            return given
        output = self.output / "pretrained" / kind.value
        self._ensure(output, lambda: self._pretraining(kind))
        self._ensure_model(output)
        return str(output)

    def _pretraining(self, kind: Start) -> RunConfig:
        data = self.request.pretraining_data or self.request.data
        config = self._seeded(self.scale.pretrained(data, kind is Start.DECODER))
        if kind is Start.MASKED and self.request.vocabulary is None:
            return config  # its vocabulary becomes everybody's
        return self._with_vocabulary(config)

    def _with_vocabulary(self, config: RunConfig) -> RunConfig:
        """Every system has that of the masked network, or the one asked for, so that a token is a token."""
        owner = self.request.vocabulary or self.start(Start.MASKED)
        vocabulary = started_from(config, owner).data.vocabulary
        return replace(config, data=replace(config.data, vocabulary=vocabulary))

    def planned(self, name: str) -> RunConfig:
        """What a system's run will be; the network it starts from is pretrained first, unless it has been."""
        system, base = SYSTEMS[name], self._base
        if system.start is not Start.SCRATCH:
            return system.configure(started_from(base, self.start(system.start)))
        config = system.configure(self._with_vocabulary(base))
        if config.objective.is_causal:
            rate = self.scale.new_decoder * base.training.learning_rate
            config = replace(config, training=replace(config.training, learning_rate=rate))
        return config

    @cached_property
    def _base(self) -> RunConfig:
        config = self._seeded(self.scale.preset(self.request.data))
        data = replace(config.data, validation=self.request.validation)
        training = config.training
        if self.request.steps is not None:
            training = _shortened(training, self.request.steps)
        return replace(config, data=data, training=training)

    def _seeded(self, config: RunConfig) -> RunConfig:
        return replace(config, training=replace(config.training, seed=self.request.seed))

    def _ensure(self, output: Path, make: Callable[[], RunConfig]) -> None:
        if is_finished(output):
            return
        if RunFolder(output).config.exists():
            say(f"{output}: goes on")
            train(None, output, cache=self.cache, resume=True)
        else:
            config = make()
            say(f"{output}: {config.training.steps:,} steps")
            train(config, output, cache=self.cache)
        if not is_finished(output):  # a signal ends a training in good order; what needs it must not go on
            say(f"{output}: stopped; the same command goes on from there")
            raise KeyboardInterrupt

    def model(self, name: str) -> Engine:
        """The trained model of a system."""
        if name not in self._models:
            run = self.run(name)
            self._ensure_model(run)
            self._models = {name: load_engine(run, self.device)}  # one at a time
        return self._models[name]

    def _ensure_model(self, output: Path) -> None:
        run = RunFolder(output)
        if not run.model.exists() and run.read_pointer("last") is not None:  # stopped before the export
            train(None, output, cache=self.cache, resume=True)

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
    ) -> EvaluationResult:
        """How a system does: by its own way of writing or another, over its own grid of steps or another.

        `key` names its folder; not `scored`, samples alone are looked at; `samples` is how many, else the scale's.
        """
        plan = self._plan(sampling or self.sampling(name), scored)
        plan = plan if samples is None else replace(plan, samples=samples)
        return self._evaluation(key, name, plan, self.test, steps)

    @property
    def test(self) -> str:
        """The text that is assessed; of the training text itself, what was held out."""
        return self.request.test or self.request.validation or self.request.data

    def other_evaluation(self, name: str) -> EvaluationResult:
        """How likely a system finds the text of another kind; a few samples are written all the same."""
        assert self.request.other_test is not None
        plan = replace(self._plan(self.sampling(name), scored=True), samples=2)
        return self._evaluation(f"{name}-other-text", name, plan, self.request.other_test)

    def _evaluation(self, key: str, name: str, plan: Plan, text: str, steps: int | None = None) -> EvaluationResult:
        folder = self.output / "evaluations" / key
        if not (folder / "evaluation.json").exists():
            model = self.model(name)
            model = model if steps is None else model.with_steps(steps)
            say(f"{folder}: evaluates")
            with fast_products():
                evaluate(model, self._material(model, text), plan).save(folder)
        return EvaluationResult.load(folder)

    def sampling(self, name: str) -> SamplingRequest:
        """How a system writes for the main table."""
        system = SYSTEMS[name]
        if not system.objective.has_word_vectors:
            return system.sampling
        return replace(system.sampling, config=replace(system.sampling.config, steps=self.scale.vector_steps))

    def _plan(self, sampling: SamplingRequest, scored: bool) -> Plan:
        budget = EstimationBudget(
            0.005, self.scale.max_draws, strata=min(16, self.scale.max_draws // 2), seed=self.request.seed
        )
        return Plan(sampling, self.scale.samples, self.scale.length, budget, scored=scored, seed=self.request.seed)

    def _material(self, model: Engine, name: str) -> EvaluationSet:
        key = name, model.vocabulary.fingerprint, model.max_length
        if key not in self._materials:
            self._materials[key] = open_evaluation_set(model, name, sentences=self.scale.sentences)
        return self._materials[key]


def _upgraded(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of before scales had names of their own."""
    scale = {"tiny": "smoke", "small": "19m", "medium": "34m"}.get(settings.get("preset", ""))
    return settings if scale is None else settings | {"scale": scale}


def is_finished(run: Path) -> bool:
    """Whether there is a run here that was trained and validated to its last step."""
    folder = RunFolder(run)
    if not folder.config.exists():
        return False
    last = stored_config(run).training.steps
    return any(event.step >= last for event in events_of(folder.log, ValidationEvent))


def _shortened(training: TrainingConfig, steps: int) -> TrainingConfig:
    """The same in fewer (or more) steps: warm-up and validations keep their share."""
    share = steps / training.steps
    return replace(
        training,
        steps=steps,
        warmup=max(1, round(training.warmup * share)),
        validate_every=max(1, round(training.validate_every * share)),
        save_every=max(1, round(training.save_every * share)),
    )


def say(line: str) -> None:
    """Reports what is being done."""
    logger.info(line)
