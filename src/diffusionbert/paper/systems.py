"""Every system of the paper and its peers, by name: which method, which network, which way of writing.

A system is data. It turns a preset, which says how large and how long, into an experiment; so all systems of a table
have the same size, the same text and the same number of steps. Three of them are settings alone and have no code of
their own: multinomial diffusion (uniform noise), OA-ARDM (the order-agnostic objective) and DiffuSeq (Gaussian noise on
pairs, the source frozen).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from diffusionbert.experiments import (
    AnyOrderWriting,
    ContinuousDiffusion,
    Diffusion,
    Experiment,
    LearnedDiffusion,
    MaskPredicting,
    MouthMasking,
    NextWord,
    Objectives,
    Pretrained,
    StepUnrolling,
    Time,
    VectorDiffusion,
)
from diffusionbert.methods.discrete import Quantity
from diffusionbert.presets import as_decoder, as_new
from diffusionbert.proposals import Bell
from diffusionbert.samplers import SamplerConfig, SamplingRequest
from diffusionbert.samplers.gibbs import Gibbs
from diffusionbert.samplers.mask_predict import MaskPredict
from diffusionbert.schedules import Cosine, Linear, Mean, Spindle, Sqrt


class Start(Enum):
    """From which network a system starts."""

    SCRATCH = "scratch"
    MASKED = "masked"
    DECODER = "decoder"


_STARTS = {Start.MASKED: "masked language model", Start.DECODER: "causal language model"}


@dataclass(frozen=True)
class System:
    """One row of a table."""

    title: str
    """What its paper calls it."""
    objective: Objectives
    start: Start = Start.SCRATCH
    time: Time = Time.NONE
    sampling: SamplingRequest = SamplingRequest(config=SamplerConfig(top_k=30))
    """How the paper that compares it lets it write."""
    needs_pairs: bool = False

    def experiment(self, base: Experiment) -> Experiment:
        """This system with the size, the text, the training and the start of another experiment."""
        network = base.network
        if self.start is Start.SCRATCH:
            network = as_new(network)
        elif not isinstance(network, Pretrained):
            raise ValueError(f"{self.title} starts from a {_STARTS[self.start]}; give one by --start")
        if isinstance(self.objective, NextWord):
            network = as_decoder(network)
        objective = self.objective
        if isinstance(objective, Diffusion) and isinstance(base.objective, Diffusion):
            objective = replace(objective, num_steps=base.objective.num_steps)
        return replace(base, network=network, objective=objective, time=self.time)


_HYBRID = 0.01
"""The weight of D3PM's auxiliary cross-entropy, which DiffusionBERT's release has, too."""
_SPINDLE = Spindle(0.3, Mean.CORPUS)
_SENTENCE = Spindle(0.3, Mean.SENTENCE, floor=0.05)
_PAPER = Diffusion(Spindle(0.3, Mean.SENTENCE), quantity=Quantity.PAPER)
"""By which the paper's figures with the spindle are computed: no bound."""
_MOUTH = SamplingRequest(Gibbs(), SamplerConfig(64, top_k=30))
_VECTORS = SamplingRequest(config=SamplerConfig(2000))

SYSTEMS: dict[str, System] = {
    "diffusionbert-lte": System("DiffusionBERT", Diffusion(), Start.MASKED, Time.LAYERS),
    "diffusionbert-pte": System("DiffusionBERT", Diffusion(), Start.MASKED, Time.PREFIX),
    "diffusionbert": System("DiffusionBERT", Diffusion(), Start.MASKED),
    "diffusionbert-bell": System(
        "DiffusionBERT (bell-shaped steps)", Diffusion(proposal=Bell(0.8, weighted=False)), Start.MASKED
    ),
    "diffusionbert-spindle": System("DiffusionBERT", Diffusion(_SPINDLE), Start.MASKED),
    "diffusionbert-spindle-sentence": System("DiffusionBERT", Diffusion(_SENTENCE), Start.MASKED),
    "diffusionbert-spindle-paper": System("DiffusionBERT", _PAPER, Start.MASKED),
    "d3pm": System("D3PM", Diffusion(hybrid=_HYBRID), time=Time.LAYERS),
    "d3pm-tad": System("D3PM", Diffusion(hybrid=_HYBRID)),
    "d3pm-spindle": System("D3PM", Diffusion(_SPINDLE, hybrid=_HYBRID), time=Time.LAYERS),
    "d3pm-spindle-paper": System("D3PM", replace(_PAPER, hybrid=_HYBRID), time=Time.LAYERS),
    "d3pm-uniform": System("D3PM", Diffusion(uniform_noise=True, hybrid=_HYBRID), time=Time.LAYERS),
    "diffusion-lm": System("Diffusion-LM", VectorDiffusion(), sampling=_VECTORS),
    "diffusion-lm-sqrt": System("Diffusion-LM", VectorDiffusion(Sqrt(), floor=0.01), sampling=_VECTORS),
    "diffusion-lm-bert": System("Diffusion-LM", VectorDiffusion(width=None), Start.MASKED, sampling=_VECTORS),
    "bert-mouth": System("BERT-Mouth", MouthMasking(), Start.MASKED, sampling=_MOUTH),
    "sundae": System("SUNDAE", StepUnrolling(), sampling=SamplingRequest(config=SamplerConfig(64, temperature=0.8))),
    "decoder": System("Transformer decoder", NextWord()),
    "decoder-pretrained": System("GPT", NextWord(), Start.DECODER),
    "mdlm": System("MDLM", ContinuousDiffusion()),
    "mdlm-pretrained": System("MDLM", ContinuousDiffusion(), Start.MASKED),
    "genmd4": System("GenMD4", LearnedDiffusion(), Start.MASKED),
    "cmlm": System("CMLM", MaskPredicting(), sampling=SamplingRequest(MaskPredict(), SamplerConfig(10, top_k=30))),
    "multinomial": System("Multinomial diffusion", Diffusion(uniform_noise=True), time=Time.LAYERS),
    "oa-ardm": System("OA-ARDM", AnyOrderWriting()),
    "diffuseq": System("DiffuSeq", VectorDiffusion(Sqrt(), floor=0.01), needs_pairs=True),
}


def schedule_of(experiment: Experiment) -> str:
    """What a table says of an experiment's noise."""
    match experiment.objective:
        case Diffusion(schedule=schedule, quantity=quantity, uniform_noise=uniform):
            name = _name(schedule)
            return f"{name}, uniform noise" if uniform else f"{name}, {quantity.value}" if schedule.by_token else name
        case ContinuousDiffusion(schedule=schedule) | VectorDiffusion(schedule=schedule):
            return _name(schedule)
        case LearnedDiffusion():
            return "learned"
        case _:
            return "–"


def _name(schedule: object) -> str:
    match schedule:
        case Spindle(mean=mean):
            return f"spindle ({mean.value} mean)"
        case Linear() | Cosine() | Sqrt():
            return type(schedule).__name__.lower()
        case _:
            return str(schedule)


TIMES = {Time.NONE: "TAD", Time.PREFIX: "PTE", Time.LAYERS: "LTE", Time.LAYERS_LEARNED: "LTE (learned)"}
"""The paper's abbreviations."""


def time_of(experiment: Experiment) -> str:
    """What a table says of how the network is told the time."""
    match experiment.objective:
        case Diffusion() | ContinuousDiffusion() | LearnedDiffusion():
            return TIMES[experiment.time]
        case VectorDiffusion():
            return "input"
        case _:
            return "–"
