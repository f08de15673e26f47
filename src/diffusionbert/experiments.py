"""Experiments as data: frozen settings that JSON can hold, and `build`, the one place that names concrete classes.

What an experiment is made of is said by types, not by strings: `Diffusion(Spindle(0.3))` and `AnyOrderWriting()`
are two values, and a run folder keeps them as JSON with their kinds.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedModel

from diffusionbert.batches import FixedRows, TokenBudget
from diffusionbert.conditioning import (
    LayerwiseTime,
    LearnedTime,
    PrefixTime,
    SinusoidalTime,
    TimeAgnostic,
    TimeConditioning,
)
from diffusionbert.method import Method, Objective, Sampler
from diffusionbert.methods.any_order import AnyOrder
from diffusionbert.methods.continuous_time import ContinuousTime
from diffusionbert.methods.discrete import DiscreteTime, Quantity
from diffusionbert.methods.masked_lm import MaskedLM
from diffusionbert.networks import Denoiser, Network, load_masked_lm
from diffusionbert.original import load_original
from diffusionbert.processes import Absorbing, Process, Uniform
from diffusionbert.proposals import Bell, Even, TimeProposal
from diffusionbert.sampling import Sampling
from diffusionbert.schedules import Cosine, Linear, NoiseSchedule, Spindle, TokenInformation, uniform_grid
from diffusionbert.settings import Training
from diffusionbert.shapes import TokenSet


@dataclass(frozen=True)
class NewBert:
    """A BERT with random weights."""

    layers: int = 2
    width: int = 128
    heads: int = 2
    dropout: float = 0.1


@dataclass(frozen=True)
class Pretrained:
    """A masked language model from a folder, by name from the Hub, or an original `.th` checkpoint."""

    name: str


class Time(Enum):
    """How the network is told the time."""

    NONE = "none"
    PREFIX = "prefix"
    LAYERS = "layers"
    LAYERS_LEARNED = "layers-learned"


@dataclass(frozen=True)
class Diffusion:
    """D3PM and DiffusionBERT: the bound over a grid of steps."""

    schedule: NoiseSchedule = Linear()
    num_steps: int = 128
    quantity: Quantity = Quantity.STRICT
    hybrid: float = 0.0
    proposal: TimeProposal = Even()
    uniform_noise: bool = False


@dataclass(frozen=True)
class ContinuousDiffusion:
    """MDLM: the bound in continuous time."""

    schedule: NoiseSchedule = Linear()
    proposal: TimeProposal = Even()


@dataclass(frozen=True)
class AnyOrderWriting:
    """OA-ARDM: one token at a time, in any order."""


@dataclass(frozen=True)
class Masking:
    """BERT: ordinary masked-language-model pretraining."""

    rate: float = 0.15


@dataclass(frozen=True)
class Data:
    """What is read, and how it becomes tokens."""

    corpus: str
    """A file, folder or glob; `pydoc`; `lm1b:FOLDER`; `hf:NAME`."""
    validation: str | None = None
    """A corpus of its own; else a share of the training corpus is held out."""
    vocabulary: str | int = 8000
    """A tokenizer's folder or name, or the size of a WordPiece to be trained on the corpus."""
    lower: bool = True
    detokenise: bool = False
    field: str | None = None
    """The field of JSON lines or of a dataset that holds the text."""
    target_field: str | None = None
    """For pairs in JSON lines: the field of the target."""
    max_length: int = 128


Objectives = Diffusion | ContinuousDiffusion | AnyOrderWriting | Masking


@dataclass(frozen=True)
class Experiment:
    """Everything that determines a run."""

    data: Data
    network: NewBert | Pretrained = NewBert()
    time: Time = Time.NONE
    objective: Objectives = Diffusion()
    training: Training = Training()


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


def build(experiment: Experiment, lexicon: Lexicon, sampling: Sampling | None = None) -> Method:
    """Makes the method of an experiment; new weights come from torch's global generator."""
    backbone = _backbone(experiment, lexicon)
    lexicon = lexicon.padded(backbone.config.vocab_size)
    objective, _ = _objective(experiment.objective, lexicon)
    network = Denoiser(backbone, _conditioning(experiment, backbone), lexicon.writable)
    if network.max_length < experiment.data.max_length:
        raise ValueError(
            f"sentences may have {experiment.data.max_length} tokens, but this network reads at most "
            f"{network.max_length}; set max_length (--max-length) to {network.max_length} or less"
        )
    sampling = sampling or Sampling(steps=_num_steps(experiment.objective))
    return Method(network, objective, build_sampler(experiment, lexicon, sampling))


def build_sampler(
    experiment: Experiment, lexicon: Lexicon, sampling: Sampling, end: float = 1.0, window: int | None = None
) -> Sampler[Network]:
    """Makes a sampler for the method of an experiment; the lexicon is padded to the network's vocabulary."""
    _, process = _objective(experiment.objective, lexicon)
    return sampling.sampler(
        process,
        forbidden=lexicon.forbidden,
        time_agnostic=experiment.time is Time.NONE,
        end=end,
        window=window,
    )


def scoring(experiment: Experiment, lexicon: Lexicon) -> tuple[Objective[Network], str]:
    """The objective by which sentences are scored, and what it is called.

    Under a schedule that treats all tokens alike a time-agnostic network has the same continuous-time bound as the
    order-agnostic one, whose estimate scatters least. All others are scored by what they are trained by.
    """
    settings = experiment.objective
    alike = not isinstance(settings, Diffusion | ContinuousDiffusion) or not settings.schedule.by_token
    absorbing = not (isinstance(settings, Diffusion) and settings.uniform_noise)
    if experiment.time is Time.NONE and alike and absorbing:
        return AnyOrder(lexicon.mask_id), "continuous time, estimated in any order"
    objective, _ = _objective(settings, lexicon)
    steps = f"{settings.num_steps} steps" if isinstance(settings, Diffusion) else "continuous time"
    return objective, f"{steps}, {getattr(settings, 'schedule', Linear())}"


def _backbone(experiment: Experiment, lexicon: Lexicon) -> PreTrainedModel:
    settings = experiment.network
    if isinstance(settings, NewBert):
        config = BertConfig(
            vocab_size=len(lexicon.writable),
            hidden_size=settings.width,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            intermediate_size=4 * settings.width,
            hidden_dropout_prob=settings.dropout,
            attention_probs_dropout_prob=settings.dropout,
            max_position_embeddings=experiment.data.max_length + 1,  # one for a prefix
            pad_token_id=lexicon.pad_id,
        )
        backbone: PreTrainedModel = AutoModelForMaskedLM.from_config(config)  # type: ignore[no-untyped-call]
        return backbone
    if settings.name.endswith(".th"):
        return load_original(Path(settings.name))
    return load_masked_lm(settings.name)


def _num_steps(settings: Objectives) -> int:
    return settings.num_steps if isinstance(settings, Diffusion) else 128


def _conditioning(experiment: Experiment, backbone: PreTrainedModel) -> TimeConditioning:
    num_steps, width = _num_steps(experiment.objective), backbone.config.hidden_size
    match experiment.time:
        case Time.NONE:
            return TimeAgnostic()
        case Time.PREFIX:
            return PrefixTime(backbone, num_steps)
        case Time.LAYERS:
            return LayerwiseTime(backbone, SinusoidalTime(width))
        case Time.LAYERS_LEARNED:
            return LayerwiseTime(backbone, LearnedTime(num_steps, width))


def _objective(settings: Objectives, lexicon: Lexicon) -> tuple[Objective[Network], Process]:
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
        case AnyOrderWriting():
            return AnyOrder(lexicon.mask_id), absorbing(Linear())
        case Masking():
            return MaskedLM(lexicon.mask_id, lexicon.writable, settings.rate), absorbing(Linear())


# ---- JSON -------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Experiment, Data, Training, NewBert, Pretrained, Diffusion, ContinuousDiffusion, AnyOrderWriting, Masking),
        *(TokenBudget, FixedRows, Linear, Cosine, Spindle, Even, Bell),
    )
}


def to_json(value: Any) -> Any:
    """Gives settings as plain JSON values; every dataclass says its kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    return value.value if isinstance(value, Enum) else value


def from_json(plain: Any, annotation: Any = Experiment) -> Any:
    """Reads what `to_json` gave, checking kinds, names and plain types."""
    if isinstance(plain, dict):
        kind = _KINDS.get(str(plain.get("kind")))
        if kind is None:
            raise ValueError(f"unknown kind {plain.get('kind')!r} in settings; known are {', '.join(sorted(_KINDS))}")
        hints = typing.get_type_hints(kind)
        unknown = set(plain) - set(hints) - {"kind"}
        if unknown:
            raise ValueError(f"{kind.__name__} has no setting {sorted(unknown)[0]!r}; it has {', '.join(hints)}")
        return kind(**{name: from_json(plain[name], hints[name]) for name in hints if name in plain})
    if isinstance(plain, list):
        return tuple(plain)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation(plain)
    plain_types = [kind for kind in _members(annotation) if kind in (str, int, float, bool, type(None))]
    if plain_types and not isinstance(plain, tuple(plain_types)) and not (float in plain_types and type(plain) is int):
        raise ValueError(f"a setting has the value {plain!r}, but must be {annotation}")
    return plain


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if is_union else (annotation,)
