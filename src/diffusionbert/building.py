"""From settings to a method: the one place that names concrete classes.

`build` makes a network, an objective and a sampler out of an `Experiment`; `build_sampler` another way of writing for
the same method; `scoring` says by which objective its sentences are scored. Everything after this module knows
methods by their contract alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedModel

from diffusionbert.conditioning import (
    LayerwiseTime,
    LearnedTime,
    PrefixTime,
    SinusoidalTime,
    TimeAgnostic,
    TimeConditioning,
)
from diffusionbert.experiments import (
    AnyOrderWriting,
    ContinuousDiffusion,
    Diffusion,
    Experiment,
    LearnedDiffusion,
    Masking,
    MaskObjectives,
    MaskPredicting,
    MouthMasking,
    NewBert,
    NewDecoder,
    NextWord,
    Objectives,
    Pretrained,
    StepUnrolling,
    Time,
    VectorDiffusion,
)
from diffusionbert.method import (
    Estimator,
    Likelihood,
    LikelihoodDefinition,
    Method,
    Objective,
    Sampler,
    TimeGrid,
)
from diffusionbert.methods.any_order import AnyOrder
from diffusionbert.methods.autoregressive import Autoregressive
from diffusionbert.methods.bert_mouth import BertMouth
from diffusionbert.methods.cmlm import ConditionalMaskedLM
from diffusionbert.methods.continuous_time import ContinuousTime
from diffusionbert.methods.discrete import DiscreteTime, Quantity
from diffusionbert.methods.gaussian import GaussianDiffusion
from diffusionbert.methods.learned_rates import LearnedRates
from diffusionbert.methods.masked_lm import MaskedLM
from diffusionbert.methods.sundae import StepUnrolled
from diffusionbert.networks import (
    CausalModel,
    Denoiser,
    EmbeddingDenoiser,
    load_causal_lm,
    load_masked_lm,
    make_room,
    new_decoder,
)
from diffusionbert.original import load_original
from diffusionbert.processes import Absorbing, Gaussian, LearnedExponents, Process, Uniform
from diffusionbert.samplers.gaussian import GaussianAncestral
from diffusionbert.samplers.left_to_right import LeftToRight
from diffusionbert.samplers.refining import Refining
from diffusionbert.sampling import Algorithm, Sampling
from diffusionbert.schedules import Linear, NoiseSchedule, Power, TokenInformation, uniform_grid
from diffusionbert.shapes import TokenSet
from diffusionbert.storage.component import Component


@dataclass(frozen=True, eq=False)
class Lexicon:
    """What a method must know of the vocabulary and the corpus: no strings."""

    mask_id: int
    pad_id: int
    writable: TokenSet
    forbidden: tuple[int, ...]
    """Ids that texts may contain but samplers never write: `[UNK]`."""
    counts: Tensor
    """How often each token occurs at editable places of the training corpus."""
    exponents: Tensor | None = None
    """The learned rate of each token, of a model that has learned them."""

    def padded(self, size: int) -> Lexicon:
        """The same for a network that knows more ids than the tokenizer; the further ones are never written."""
        more = size - len(self.writable)
        if more < 0:
            raise ValueError(
                f"the tokenizer knows {len(self.writable)} ids, the network only {size}; "
                "use the tokenizer that the network was trained with"
            )
        return dataclasses.replace(
            self, writable=functional.pad(self.writable, (0, more)), counts=functional.pad(self.counts, (0, more))
        )


# ---- methods --------------------------------------------------------------------------------------------------------


def build(
    experiment: Experiment,
    lexicon: Lexicon,
    sampling: Sampling | None = None,
    backbone: PreTrainedModel | None = None,
) -> Method:
    """Makes the method of an experiment; new weights come from torch's global generator.

    A `backbone` that is given takes the place of the one that the experiment names.
    """
    if experiment.time is not Time.NONE and not isinstance(experiment.objective, Diffusion | ContinuousDiffusion):
        raise ValueError(f"time {experiment.time.value!r} (--time) is not for this method; leave it out")
    backbone = backbone or _backbone(experiment, lexicon)
    lexicon = lexicon.padded(backbone.config.vocab_size)
    network = _network(experiment, backbone, lexicon)
    if network.max_length < experiment.data.max_length:
        raise ValueError(
            f"sentences may have {experiment.data.max_length} tokens, but this network reads at most "
            f"{network.max_length}; set max_length (--max-length) to {network.max_length} or less"
        )
    objective, process = _objective(experiment.objective, lexicon)
    sampling = sampling or Sampling(steps=num_steps(experiment.objective))
    return Method(network, objective, _sampler(experiment, process, lexicon, sampling))


def num_steps(settings: Objectives) -> int:
    """The T of a method that has one; else as many steps as are usual."""
    return settings.num_steps if isinstance(settings, Diffusion | VectorDiffusion) else 128


def writes_on_masks(experiment: Experiment) -> bool:
    """Whether the model's blank is `[MASK]`: it then fills blanks, and any sampler for masks writes with it."""
    settings = experiment.objective
    return isinstance(settings, MaskObjectives) and not (isinstance(settings, Diffusion) and settings.uniform_noise)


def scoring(experiment: Experiment, lexicon: Lexicon) -> tuple[Objective[Any], LikelihoodDefinition]:
    """The objective by which sentences are scored, and which number that gives.

    Under a schedule that treats all tokens alike a time-agnostic network has the same continuous-time bound as the
    order-agnostic one, whose estimate has the lowest variance. All others are scored by what they are trained by.
    """
    settings = experiment.objective
    if experiment.time is Time.NONE and writes_on_masks(experiment) and not _schedule(settings).by_token:
        return AnyOrder(lexicon.mask_id), LikelihoodDefinition(time=TimeGrid(), estimator=Estimator.ORDER_AGNOSTIC)
    objective, _ = _objective(settings, lexicon)
    if isinstance(settings, NextWord):
        return objective, LikelihoodDefinition("nll", estimator=Estimator.LEFT_TO_RIGHT)
    is_learned = isinstance(settings, LearnedDiffusion)
    schedule = Component("learned") if is_learned else Component.of(_schedule(settings))
    steps = settings.num_steps if isinstance(settings, Diffusion | VectorDiffusion) else None
    quantity = "paper" if objective.likelihood is Likelihood.PSEUDO else "strict"
    return objective, LikelihoodDefinition(quantity, TimeGrid(steps), Estimator.STRATIFIED_TIMES, schedule)


def own_objective(experiment: Experiment, lexicon: Lexicon) -> Objective[Any]:
    """The objective by which the model was trained."""
    return _objective(experiment.objective, lexicon)[0]


def _schedule(settings: Objectives) -> NoiseSchedule:
    if isinstance(settings, LearnedDiffusion):
        return Power()
    return settings.schedule if isinstance(settings, Diffusion | ContinuousDiffusion | VectorDiffusion) else Linear()


def _objective(settings: Objectives, lexicon: Lexicon) -> tuple[Objective[Any], Process | Gaussian | None]:
    def absorbing(schedule: NoiseSchedule, reweighted: bool = True) -> Absorbing:
        information = TokenInformation.from_counts(lexicon.counts, writable=lexicon.writable)
        return Absorbing(schedule, lexicon.mask_id, information, reweighted)

    process: Process
    match settings:
        case Diffusion():
            if settings.uniform_noise:
                process = Uniform(settings.schedule, lexicon.writable)
            else:
                process = absorbing(settings.schedule, reweighted=settings.quantity is Quantity.STRICT)
            grid = uniform_grid(settings.num_steps)
            return DiscreteTime(process, grid, settings.quantity, settings.hybrid, settings.proposal), process
        case ContinuousDiffusion():
            process = absorbing(settings.schedule)
            return ContinuousTime(process, settings.proposal), process
        case LearnedDiffusion():
            size = len(lexicon.writable)
            learned = torch.ones(size) if lexicon.exponents is None else lexicon.exponents
            process = Absorbing(_schedule(settings), lexicon.mask_id, LearnedExponents(learned))
            return LearnedRates(process), process
        case AnyOrderWriting():
            return AnyOrder(lexicon.mask_id), absorbing(Linear())
        case Masking():
            return MaskedLM(lexicon.mask_id, lexicon.writable, settings.rate), absorbing(Linear())
        case MouthMasking():
            masking = MaskedLM(lexicon.mask_id, lexicon.writable, settings.rate)
            return BertMouth(masking, lexicon.mask_id), absorbing(Linear())
        case MaskPredicting():
            return ConditionalMaskedLM(lexicon.mask_id), absorbing(Linear())
        case StepUnrolling():
            return StepUnrolled(lexicon.writable, settings.unrolls), None
        case VectorDiffusion():
            gaussian = Gaussian(settings.schedule, settings.floor)
            return GaussianDiffusion(gaussian, uniform_grid(settings.num_steps), settings.clamped), gaussian
        case NextWord():
            return Autoregressive(), None


# ---- networks -------------------------------------------------------------------------------------------------------


def _network(experiment: Experiment, backbone: PreTrainedModel, lexicon: Lexicon) -> Any:
    match experiment.objective:
        case NextWord():
            return CausalModel(backbone, lexicon.writable)
        case VectorDiffusion(width=width):
            return EmbeddingDenoiser(backbone, lexicon.writable, width)
        case _:
            return Denoiser(backbone, _conditioning(experiment, backbone), lexicon.writable)


def _backbone(experiment: Experiment, lexicon: Lexicon) -> PreTrainedModel:
    settings, is_causal = experiment.network, isinstance(experiment.objective, NextWord)
    positions = experiment.data.max_length + 1  # one for a prefix
    match settings:
        case NewDecoder():
            if not is_causal:
                raise ValueError("a decoder writes from left to right alone; give NextWord() (--system decoder)")
            size = len(lexicon.writable)
            return new_decoder(
                size, settings.layers, settings.width, settings.heads, settings.dropout, positions, lexicon.pad_id
            )
        case NewBert():
            if is_causal:
                raise ValueError("writing from left to right needs a decoder; give NewDecoder()")
            return _new_bert(settings, len(lexicon.writable), positions, lexicon.pad_id)
        case Pretrained(name):
            if is_causal:
                return make_room(load_causal_lm(name), len(lexicon.writable))
            return load_original(Path(name)) if name.endswith(".th") else load_masked_lm(name)


def _new_bert(settings: NewBert, vocabulary: int, positions: int, pad_id: int) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=4 * settings.width,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        max_position_embeddings=positions,
        pad_token_id=pad_id,
    )
    backbone: PreTrainedModel = AutoModelForMaskedLM.from_config(config)  # type: ignore[no-untyped-call]
    return backbone


def _conditioning(experiment: Experiment, backbone: PreTrainedModel) -> TimeConditioning:
    steps, width = num_steps(experiment.objective), backbone.config.hidden_size
    match experiment.time:
        case Time.NONE:
            return TimeAgnostic()
        case Time.PREFIX:
            return PrefixTime(backbone, steps)
        case Time.LAYERS:
            return LayerwiseTime(backbone, SinusoidalTime(width))
        case Time.LAYERS_LEARNED:
            return LayerwiseTime(backbone, LearnedTime(steps, width))


# ---- samplers -------------------------------------------------------------------------------------------------------


def build_sampler(
    experiment: Experiment, lexicon: Lexicon, sampling: Sampling, end: float = 1.0, window: int | None = None
) -> Sampler[Any]:
    """Makes a sampler for the method of an experiment; the lexicon is padded to the network's vocabulary."""
    _, process = _objective(experiment.objective, lexicon)
    return _sampler(experiment, process, lexicon, sampling, end, window)


_OWN: dict[type, Algorithm] = {
    MouthMasking: Algorithm.GIBBS,
    MaskPredicting: Algorithm.MASK_PREDICT,
    StepUnrolling: Algorithm.REFINING,
    VectorDiffusion: Algorithm.ANCESTRAL,
    NextWord: Algorithm.LEFT_TO_RIGHT,
}
"""How methods write that have a way of their own; diffusion on tokens writes by its own distribution."""


def _own_algorithm(experiment: Experiment) -> Algorithm:
    return _OWN.get(type(experiment.objective), Algorithm.EXACT)


def resolved(sampling: Sampling, experiment: Experiment) -> Sampling:
    """The same, its algorithm called by its name if it was to be the method's own."""
    if sampling.algorithm is not Algorithm.OWN:
        return sampling
    return dataclasses.replace(sampling, algorithm=_own_algorithm(experiment))


def _sampler(
    experiment: Experiment,
    process: Process | Gaussian | None,
    lexicon: Lexicon,
    sampling: Sampling,
    end: float = 1.0,
    window: int | None = None,
) -> Sampler[Any]:
    settings, own, sampling = experiment.objective, _own_algorithm(experiment), resolved(sampling, experiment)
    if isinstance(process, Process):
        agnostic = experiment.time is Time.NONE
        forbidden = lexicon.forbidden
        return sampling.sampler(process, forbidden=forbidden, time_agnostic=agnostic, end=end, window=window)
    has_law = not isinstance(settings, StepUnrolling)
    is_own = sampling.algorithm is own or (sampling.algorithm is Algorithm.EXACT and has_law)
    if not is_own or sampling.block is not None:
        what = "in blocks" if sampling.block is not None else f"by {sampling.algorithm.value!r}"
        raise ValueError(f"this model writes by {own.value!r} and not {what}; leave it out")
    if end < 1:
        raise ValueError("this model does not write on [MASK], so it rewrites no text; use another model")
    shaping = sampling.shaping(lexicon.forbidden)
    if isinstance(process, Gaussian):
        assert isinstance(settings, VectorDiffusion)
        return GaussianAncestral(process, uniform_grid(sampling.steps), shaping, clamped=settings.clamped)
    if isinstance(settings, StepUnrolling):
        return Refining(lexicon.writable, sampling.steps, shaping)
    return LeftToRight(lexicon.mask_id, shaping)
