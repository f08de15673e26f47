"""From settings to a method: the one place that names concrete classes.

`build` makes a network and an objective out of an `Experiment`; `build_sampler` the sampler of a request and its
context; `scoring` says by which objective its sentences are scored. Everything after this module knows
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
from diffusionbert.method import Estimator, Likelihood, LikelihoodDefinition, Method, Objective, TimeGrid
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
    load_legacy_checkpoint,
    load_masked_lm,
    make_room,
    new_decoder,
)
from diffusionbert.processes import Absorbing, Gaussian, LearnedExponents, Process, Uniform
from diffusionbert.samplers import Sampler, SamplingContext, SamplingRequest
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.samplers.exact import Exact
from diffusionbert.samplers.gaussian import GaussianAncestral
from diffusionbert.samplers.gibbs import Gibbs
from diffusionbert.samplers.left_to_right import LeftToRight
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.samplers.refinement import Refinement
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
    objective, _ = _objective(experiment.objective, lexicon)
    return Method(network, objective)


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
            return load_legacy_checkpoint(Path(name)) if name.endswith(".th") else load_masked_lm(name)


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
    experiment: Experiment,
    lexicon: Lexicon,
    request: SamplingRequest,
    network: Any,
    *,
    start_time: float = 1.0,
    max_length: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Sampler, SamplingContext]:
    """Makes the sampler of a request and its context; raises ValueError if the model cannot be sampled like this.

    Args:
        experiment: The model's settings.
        lexicon: Its token statistics, padded to the network's vocabulary.
        request: Which sampler, with which settings.
        network: The model's network.
        start_time: 1 starts from pure noise, less from a partly masked text.
        max_length: The number of positions that the network reads at once.
        device: Where the sequences are.
    """
    settings, (_, process) = experiment.objective, _objective(experiment.objective, lexicon)
    sampler = request.sampler
    if sampler is None or _is_own(sampler, process, settings):
        sampler = default_sampler(settings)
    if start_time < 1 and not isinstance(process, Process):
        raise ValueError("this model does not generate at [MASK], so it rewrites no text; use another model")
    if request.block is not None:
        sampler = Blocks(request.block, sampler)
    context = SamplingContext(
        mask_id=lexicon.mask_id,
        process=process.to(device) if isinstance(process, Process) else process,
        config=request.config,
        allowed_tokens=lexicon.writable.to(device),
        forbidden=lexicon.forbidden,
        time_agnostic=experiment.time is Time.NONE,
        start_time=start_time,
        max_length=max_length,
        word_vectors=network if isinstance(process, Gaussian) else None,
        causal=isinstance(settings, NextWord),
    )
    return sampler.resolve(context), context


def default_sampler(settings: Objectives) -> Sampler:
    """The sampler of an objective if none is asked for; diffusion on tokens is sampled exactly."""
    match settings:
        case MouthMasking():
            return Gibbs()
        case MaskPredicting():
            return MaskPredict()
        case StepUnrolling():
            return Refinement()
        case VectorDiffusion(clamped=clamped):
            return GaussianAncestral(clamped)
        case NextWord():
            return LeftToRight()
        case _:
            return Exact()


def resolved(request: SamplingRequest, experiment: Experiment) -> SamplingRequest:
    """The request with the objective's default sampler where it names none."""
    if request.sampler is not None:
        return request
    return dataclasses.replace(request, sampler=default_sampler(experiment.objective))


def _is_own(sampler: Sampler, process: Process | Gaussian | None, settings: Objectives) -> bool:
    """Whether a name for diffusion on tokens means the default sampler of a model that is none.

    That is also its exact sampler, if it has a distribution, and on vectors the ancestral one.
    """
    if isinstance(process, Process):
        return False
    is_exact = isinstance(sampler, Exact) and not isinstance(settings, StepUnrolling)
    return is_exact or (isinstance(sampler, Ancestral) and isinstance(process, Gaussian))
