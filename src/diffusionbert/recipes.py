"""Ready-made configurations: presets by cost, and the paper's systems by name.

A preset sets the size of a run and how long it trains. A system sets what is trained: an objective, a start and a time
embedding. All systems of a table thus have the same size, text and number of steps. Three of them are settings of other
systems: multinomial diffusion (uniform noise), OA-ARDM (the order-agnostic objective) and DiffuSeq (Gaussian noise on
pairs, with the source not editable).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from diffusionbert.data.sources import Split
from diffusionbert.diffusion.schedules import Mean, NoiseSchedule, Spindle, Sqrt
from diffusionbert.diffusion.time_sampling import Bell
from diffusionbert.networks.loading import BackboneConfig, NewBert, NewModernBert, Pretrained
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.autoregressive import AutoregressiveConfig
from diffusionbert.objectives.base import ObjectiveConfig
from diffusionbert.objectives.continuous_time import ContinuousTimeConfig, LearnedScheduleConfig
from diffusionbert.objectives.discrete_time import DiscreteTimeConfig, Quantity
from diffusionbert.objectives.gaussian import GaussianConfig
from diffusionbert.objectives.masked_lm import BertMouthConfig, CMLMConfig, MaskedLMConfig
from diffusionbert.objectives.order_agnostic import OrderAgnosticConfig
from diffusionbert.objectives.sundae import SundaeConfig
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.samplers.gibbs import Gibbs
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.storage.schema import from_text
from diffusionbert.training.batches import FixedSequences, TokenBudget
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.model_folder import BUNDLED, is_diffusion_model
from diffusionbert.training.run import TrainingRun, open_corpus, stored_config
from diffusionbert.training.run import train as run_training
from diffusionbert.training.run_folder import RunFolder

T = TypeVar("T")

# ---- presets --------------------------------------------------------------------------------------------------------


def tiny(data: str) -> RunConfig:
    """Two CPU cores, about a minute: a BERT of 0.7M parameters, 800 steps of 1k tokens, T = 128."""
    training = TrainingConfig(
        steps=800, batching=TokenBudget(1024), learning_rate=2e-3, warmup=40,
        validate_every=200, validation_sentences=256, validation_draws=16, save_every=200,
    )  # fmt: skip
    config = RunConfig(DataConfig(data, vocabulary=2000, max_length=64), NewBert(layers=2, width=128, heads=4))
    return replace(config, objective=DiscreteTimeConfig(num_steps=128), training=training)


def small(data: str) -> RunConfig:
    """One GPU, minutes: a BERT of 35M parameters (6 layers, width 512), 5,000 steps of 32k tokens in bf16, T = 512."""
    training = TrainingConfig(
        steps=5000, batching=TokenBudget(32_768), learning_rate=5e-4, warmup=500, ema=0.996, precision="bf16",
        validate_every=500, save_every=1000, log_every=50,
    )  # fmt: skip
    config = RunConfig(DataConfig(data, vocabulary=16_000), NewBert(layers=6, width=512, heads=8))
    return replace(config, objective=DiscreteTimeConfig(num_steps=512), training=training)


def paper(data: str) -> RunConfig:
    """He et al. 2022: BERT-base, T = 2048, AdamW, 3e-6, 10k warm-up steps, batch 32, length 128, 1.9M steps.

    It sees 61 million sentences, about 1.9 billion tokens of LM1B. A batch of 32 is too small to keep a modern GPU
    busy; docs/scaling.md has the arithmetic.
    """
    training = TrainingConfig(
        steps=1_900_000, batching=FixedSequences(32), learning_rate=3e-6, warmup=10_000, decay="inverse_sqrt",
        precision="bf16", compile=True, validate_every=10_000, validation_sentences=2048, save_every=10_000,
        log_every=100,
    )  # fmt: skip
    config = RunConfig(DataConfig(data, vocabulary="bert-base-uncased"), Pretrained("bert-base-uncased"))
    return replace(config, objective=DiscreteTimeConfig(num_steps=2048, hybrid=0.01), training=training)


def wiki_small(data: str) -> RunConfig:
    """The first bundled model: 18.8M parameters (7 layers, width 384), 10,060 steps of 64k tokens.

    It starts from its own pretraining (`--start`) on English Wikipedia sentences. Of the recipes tried, this one had
    the lowest bound: bell-shaped times without importance weights, and a rather low learning rate.
    """
    training = TrainingConfig(
        steps=10_060, batching=TokenBudget(65_536), learning_rate=5e-4, warmup=500, ema=0.998, precision="bf16",
        compile=True, validate_every=1676, validation_sentences=2048, validation_draws=8, save_every=1676, log_every=50,
    )  # fmt: skip
    objective = DiscreteTimeConfig(num_steps=512, time_sampling=Bell(0.8, weighted=False))
    backbone = NewBert(layers=7, width=384, heads=6, dropout=0.0)
    return RunConfig(DataConfig(data, vocabulary=16_000), backbone, objective=objective, training=training)


def wiki_medium(data: str) -> RunConfig:
    """`wiki_small` with a network of 33.8M parameters (8 layers, width 512)."""
    return replace(wiki_small(data), backbone=NewBert(layers=8, width=512, heads=8, dropout=0.0))


def bundled(data: str) -> RunConfig:
    """The bundled model: a ModernBERT of 39.6M parameters (10 layers, width 512), stages of 14,000 steps.

    It uses Muon and a learning rate that stays at its peak, and exports weights in half precision. Further stages start
    from these, and the last one decays (`--decay wsd --decay-fraction 0.7`); see "Training in stages" in
    docs/training.md.
    """
    training = TrainingConfig(
        steps=14_000, batching=TokenBudget(98_304), optimizer="muon", learning_rate=2e-3, weight_decay=0.1, warmup=300,
        decay="constant_with_warmup", ema=0.999, precision="bf16", compile=True, packing=True, log_every=50,
        validate_every=2000, validation_sentences=4000, validation_draws=4, save_every=2000, export_precision="fp16",
    )  # fmt: skip
    objective = DiscreteTimeConfig(num_steps=512, time_sampling=Bell(0.8, weighted=False))
    backbone = NewModernBert(layers=10, width=512, heads=8, dropout=0.0)
    return RunConfig(DataConfig(data, vocabulary=16_000), backbone, objective=objective, training=training)


PRESETS: dict[str, Callable[[str], RunConfig]] = {
    "tiny": tiny, "small": small, "paper": paper, "wiki-small": wiki_small, "wiki-medium": wiki_medium,
    "bundled": bundled,
}  # fmt: skip


def _named(table: dict[str, T], name: str, what: str) -> T:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(table)}")
    return table[name]


# ---- pretraining and starts -----------------------------------------------------------------------------------------

_PRETRAINING_STEPS = {"wiki-small": (6953, 5000), "wiki-medium": (2600, 2600)}
"""The steps of the masked language model and of the decoder; each takes four to seven minutes on one H200."""
FINE_TUNING_RATE = 1e-4
"""The highest default learning rate of a run that starts from a trained network."""


def pretraining(name: str, data: str, *, decoder: bool = False) -> RunConfig:
    """The configuration of the masked language modeling that a preset's diffusion starts from, or of a decoder."""
    config = pretraining_of(_named(PRESETS, name, "preset")(data), decoder=decoder)
    if name not in _PRETRAINING_STEPS:
        return config
    steps = _PRETRAINING_STEPS[name][decoder]
    every = steps // 8
    training = replace(config.training, steps=steps, learning_rate=1.5e-3, validate_every=every, save_every=every)
    return replace(config, training=training)


def pretraining_of(config: RunConfig, *, decoder: bool = False) -> RunConfig:
    """The same network and data, trained by masked language modeling, or a decoder of the same size."""
    training, vocabulary = config.training, config.data.vocabulary
    if training.learning_rate < 1e-4:  # the paper's rate is for a pretrained network
        training = replace(training, learning_rate=1e-4, steps=1_000_000, decay="linear", batching=TokenBudget(131_072))
    data = replace(config.data, vocabulary=vocabulary if isinstance(vocabulary, int) else 30_000)
    backbone, objective = _as_new(config.backbone), AutoregressiveConfig() if decoder else MaskedLMConfig()
    backbone = backbone.as_causal() if decoder else backbone
    return replace(config, backbone=backbone, objective=objective, data=data, training=training)


def _as_new(backbone: BackboneConfig) -> BackboneConfig:
    """A backbone with random parameters; a BERT-base in place of a pretrained one."""
    return backbone if backbone.pretrained is None else NewBert(12, 768, 12)


def started_from(config: RunConfig, start: str) -> RunConfig:
    """The configuration with the network and vocabulary of a start, given as in `recipe`."""
    path = str(BUNDLED if start == "bundled" else RunFolder(Path(start)).find_model() or start)
    vocabulary = "bert-base-uncased" if path.endswith(".th") else path
    return replace(config, backbone=Pretrained(path), data=replace(config.data, vocabulary=vocabulary))


# ---- systems --------------------------------------------------------------------------------------------------------


class Start(Enum):
    """The network that a system starts from."""

    SCRATCH = "scratch"
    MASKED = "masked"
    DECODER = "decoder"


@dataclass(frozen=True)
class System:
    """A system of the paper or one of its peers."""

    title: str
    """Its name in the literature."""
    objective: ObjectiveConfig
    start: Start = Start.SCRATCH
    time: TimeEmbedding = TimeEmbedding.NONE
    sampling: SamplingRequest = SamplingRequest(config=SamplerConfig(top_k=30))
    """The sampling settings of the paper that compares it."""
    needs_pairs: bool = False

    def configure(self, base: RunConfig) -> RunConfig:
        """This system with the size, data, training settings and start of another configuration."""
        backbone = _as_new(base.backbone) if self.start is Start.SCRATCH else base.backbone
        if self.start is not Start.SCRATCH and backbone.pretrained is None:
            kind = "masked" if self.start is Start.MASKED else "causal"
            raise ValueError(f"{self.title} starts from a {kind} language model; give one by --start")
        if self.objective.is_causal:
            backbone = backbone.as_causal()
        objective, same = self.objective, type(self.objective) is type(base.objective)
        if same and base.objective.num_steps is not None:
            objective = objective.with_steps(base.objective.num_steps)
        return replace(base, backbone=backbone, objective=objective, time=self.time)


_HYBRID = 0.01
"""The weight of D3PM's auxiliary cross-entropy, which DiffusionBERT's release also uses."""
_SPINDLE = Spindle(0.3, Mean.CORPUS)
_SENTENCE = Spindle(0.3, Mean.SENTENCE, floor=0.05)
_PAPER = DiscreteTimeConfig(Spindle(0.3, Mean.SENTENCE), quantity=Quantity.PAPER)
"""The quantity behind the paper's spindle figures, which is not a bound."""
_MOUTH = SamplingRequest(Gibbs(), SamplerConfig(steps=64, top_k=30))
_VECTORS = SamplingRequest(config=SamplerConfig(steps=2000))
_SUNDAE = SamplingRequest(config=SamplerConfig(steps=64, temperature=0.8))
_LAYERS, _PREFIX = TimeEmbedding.LAYERS, TimeEmbedding.PREFIX

SYSTEMS: dict[str, System] = {
    "diffusionbert-lte": System("DiffusionBERT", DiscreteTimeConfig(), Start.MASKED, _LAYERS),
    "diffusionbert-pte": System("DiffusionBERT", DiscreteTimeConfig(), Start.MASKED, _PREFIX),
    "diffusionbert": System("DiffusionBERT", DiscreteTimeConfig(), Start.MASKED),
    "diffusionbert-bell": System(
        "DiffusionBERT (bell-shaped steps)", DiscreteTimeConfig(time_sampling=Bell(0.8, weighted=False)), Start.MASKED
    ),
    "diffusionbert-spindle": System("DiffusionBERT", DiscreteTimeConfig(_SPINDLE), Start.MASKED),
    "diffusionbert-spindle-sentence": System("DiffusionBERT", DiscreteTimeConfig(_SENTENCE), Start.MASKED),
    "diffusionbert-spindle-paper": System("DiffusionBERT", _PAPER, Start.MASKED),
    "d3pm": System("D3PM", DiscreteTimeConfig(hybrid=_HYBRID), time=_LAYERS),
    "d3pm-tad": System("D3PM", DiscreteTimeConfig(hybrid=_HYBRID)),
    "d3pm-spindle": System("D3PM", DiscreteTimeConfig(_SPINDLE, hybrid=_HYBRID), time=_LAYERS),
    "d3pm-spindle-paper": System("D3PM", replace(_PAPER, hybrid=_HYBRID), time=_LAYERS),
    "d3pm-uniform": System("D3PM", DiscreteTimeConfig(uniform_noise=True, hybrid=_HYBRID), time=_LAYERS),
    "diffusion-lm": System("Diffusion-LM", GaussianConfig(), sampling=_VECTORS),
    "diffusion-lm-sqrt": System("Diffusion-LM", GaussianConfig(Sqrt(), floor=0.01), sampling=_VECTORS),
    "diffusion-lm-tokens": System(
        "Diffusion-LM (predicting tokens)", GaussianConfig(predicts_tokens=True), sampling=_VECTORS
    ),
    "diffusion-lm-bert": System("Diffusion-LM", GaussianConfig(width=None), Start.MASKED, sampling=_VECTORS),
    "bert-mouth": System("BERT-Mouth", BertMouthConfig(), Start.MASKED, sampling=_MOUTH),
    "sundae": System("SUNDAE", SundaeConfig(), sampling=_SUNDAE),
    "decoder": System("Transformer decoder", AutoregressiveConfig()),
    "decoder-pretrained": System("GPT", AutoregressiveConfig(), Start.DECODER),
    "mdlm": System("MDLM", ContinuousTimeConfig()),
    "mdlm-pretrained": System("MDLM", ContinuousTimeConfig(), Start.MASKED),
    "genmd4": System("GenMD4", LearnedScheduleConfig(), Start.MASKED),
    "cmlm": System("CMLM", CMLMConfig(), sampling=SamplingRequest(MaskPredict(), SamplerConfig(steps=10, top_k=30))),
    "multinomial": System("Multinomial diffusion", DiscreteTimeConfig(uniform_noise=True), time=_LAYERS),
    "oa-ardm": System("OA-ARDM", OrderAgnosticConfig()),
    "diffuseq": System("DiffuSeq", GaussianConfig(Sqrt(), floor=0.01), needs_pairs=True),
}


# ---- the whole recipe -----------------------------------------------------------------------------------------------


def recipe(
    data: str, preset_name: str = "tiny", *, system_name: str | None = None, start: str | None = None
) -> RunConfig:
    """The configuration of a preset on a corpus, optionally as a named system and from a given start.

    Args:
        data: A text file, folder or glob; `pydoc`; `lm1b:FOLDER`; `hf:NAME`.
        preset_name: A name in `PRESETS`, which sets the size and length of the run.
        system_name: A name in `SYSTEMS`, which sets the objective, start and time embedding.
        start: A network to start from, whose vocabulary is used: "bundled", a run directory, a model folder, a Hub
            name, or a `.th` file of the original release. The learning rate is then at most `FINE_TUNING_RATE`, unless
            the preset's is meant for such a start.

    Returns:
        The configuration of the run.

    Examples:
        >>> recipe("pydoc", "tiny", system_name="mdlm").objective
        ContinuousTimeConfig(schedule=Linear(), time_sampling=UniformTimes())
    """
    config = _named(PRESETS, preset_name, "preset")(data)
    chosen = None if system_name is None else _named(SYSTEMS, system_name, "system")
    if start is not None:
        if chosen is not None and chosen.start is Start.SCRATCH:
            raise ValueError(
                f"{system_name} starts from random parameters, got the start {start!r}; leave it out, or take only its "
                "--vocabulary"
            )
        config = started_from(config, start)
        # The learning rates of all presets except tiny are for a start from a masked language model.
        if preset_name == "tiny" or is_diffusion_model(Path(str(config.backbone.pretrained))):
            training = config.training
            rate, warmup = min(training.learning_rate, FINE_TUNING_RATE), max(training.warmup, training.steps // 10)
            config = replace(config, training=replace(training, learning_rate=rate, warmup=warmup))
    return config if chosen is None else chosen.configure(config)


# ---- train ----------------------------------------------------------------------------------------------------------


def train(
    data: str | Path | None = None,
    output: str | Path = "runs/run",
    *,
    start: str | Path | None = None,
    preset: str = "tiny",
    system: str | None = None,
    objective: ObjectiveConfig | str | None = None,
    schedule: NoiseSchedule | str | None = None,
    time: TimeEmbedding | str | None = None,
    backbone: PreTrainedModel | None = None,
    config: RunConfig | None = None,
    resume: bool = False,
    auto: bool = False,
    cache: str | Path | None = None,
    **settings: Any,
) -> TrainingRun:
    """Trains a model.

    Args:
        data: A text file (may be compressed), folder, glob, JSON lines, TSV pairs, `lm1b:FOLDER`, `hf:NAME` or `pydoc`.
        output: The run directory, for configuration, log, checkpoints and finally the model.
        start: The network to start from: "bundled", a run directory, a model folder, a Hub name, or a `.th` file of the
            original release; None starts from random parameters.
        preset: The size and length of the run: tiny, small, paper, wiki-small, wiki-medium or bundled.
        system: A system of the paper or one of its peers, such as "d3pm"; None trains the preset's objective.
        objective: An objective, or its name with settings, instead of the system's.
        schedule: A noise schedule, or its name with settings such as "spindle:strength=0.5", instead of the
            objective's.
        time: The time conditioning of the network: none, prefix, layers, layers-random or layers-learned.
        backbone: A masked language model to train, given as an object.
        config: A complete configuration, instead of preset and system.
        resume: Whether to continue the run in `output`.
        auto: Whether to measure the machine first and choose the micro-batch size that fits.
        cache: The folder for encoded corpora; None is the user's cache folder.
        **settings: Fields of `TrainingConfig` and `DataConfig`, such as `steps`, `learning_rate`, `max_length`.

    Returns:
        The run: `run.path`, `run.history`, `run.config`.

    Examples:
        >>> import diffusionbert
        >>> run = diffusionbert.train("my.txt", "runs/mine", start="bundled", steps=500)  # doctest: +SKIP
        >>> model = diffusionbert.load(run.path)  # doctest: +SKIP
    """
    cache = None if cache is None else Path(cache)
    if resume and config is None and data is None:
        changed = _with_settings(stored_config(Path(output)), settings) if settings else None
        return run_training(changed, output, cache=cache, resume=True, auto=auto)
    if config is None:
        if data is None:
            raise ValueError("`data` is missing; give a text file, or pydoc for the English that ships with Python")
        config = recipe(str(data), preset, system_name=system, start=None if start is None else str(start))
    elif start is not None:
        config = started_from(config, str(start))
    if objective is not None:
        if isinstance(objective, str):
            objective = from_text(objective, ObjectiveConfig, "objective")  # type: ignore[type-abstract]
        config = replace(config, objective=objective)
    if schedule is not None:
        if isinstance(schedule, str):
            schedule = from_text(schedule, NoiseSchedule, "schedule")  # type: ignore[type-abstract]
        if config.objective.schedule is None:
            raise ValueError(f"the objective {config.objective} has no schedule; leave out `schedule`")
        config = replace(config, objective=replace(config.objective, schedule=schedule))  # type: ignore[type-var]
    if time is not None:
        config = replace(config, time=TimeEmbedding(time))
    config = _with_settings(config, settings)
    require_pairs(system, config)
    return run_training(config, output, cache=cache, resume=resume, auto=auto, backbone=backbone)


def require_pairs(system: str | None, config: RunConfig) -> None:
    """Raises ValueError if a system needs pairs and the corpus has none."""
    chosen = SYSTEMS.get(system or "")
    if chosen and chosen.needs_pairs and not open_corpus(config.data, Split.TRAIN).paired:
        raise ValueError(f"{chosen.title} needs pairs, but {config.data.corpus!r} has none; give a .tsv file")


def _with_settings(config: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """The configuration with fields of training and data replaced; raises TypeError for others."""
    training, data = ({field.name for field in fields(part)} for part in (config.training, config.data))
    for name in sorted(settings.keys() - training - data):
        close = difflib.get_close_matches(name, training | data, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"train() has no setting {name!r}{hint}")
    return replace(
        config,
        training=replace(config.training, **{name: settings[name] for name in settings.keys() & training}),
        data=replace(config.data, **{name: settings[name] for name in settings.keys() & data}),
    )
