"""Experiments as data: frozen settings that JSON can hold.

What an experiment is made of is said by types, not by strings: `Diffusion(Spindle(0.3))` and `AnyOrderWriting()`
are two values, and a run folder keeps them as JSON with their kinds. What they turn into, `building` says.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from diffusionbert.batches import FixedRows, TokenBudget
from diffusionbert.methods.discrete import Quantity
from diffusionbert.proposals import Bell, Even, TimeProposal
from diffusionbert.schedules import Cosine, Linear, NoiseSchedule, Power, Spindle, Sqrt
from diffusionbert.training.settings import Training


@dataclass(frozen=True)
class NewBert:
    """A BERT with random weights."""

    layers: int = 2
    width: int = 128
    heads: int = 2
    dropout: float = 0.1


@dataclass(frozen=True)
class NewDecoder:
    """A GPT-2 with random weights."""

    layers: int = 2
    width: int = 128
    heads: int = 2
    dropout: float = 0.1


@dataclass(frozen=True)
class Pretrained:
    """A masked (or, for writing from left to right, causal) language model from a folder or by its name on the Hub,
    or an original `.th` checkpoint.
    """

    name: str


class Time(Enum):
    """How the network is told the time."""

    NONE = "none"
    PREFIX = "prefix"
    LAYERS = "layers"
    LAYERS_LEARNED = "layers-learned"


def _require_steps(number: int) -> None:
    """Raises ValueError now, and not when all the text has been read."""
    if number < 1:
        raise ValueError(f"a diffusion has at least 1 step, given {number}; leave the number out for the usual one")


@dataclass(frozen=True)
class Diffusion:
    """D3PM and DiffusionBERT: the bound over a grid of steps."""

    schedule: NoiseSchedule = Linear()
    num_steps: int = 128
    quantity: Quantity = Quantity.STRICT
    hybrid: float = 0.0
    proposal: TimeProposal = Even()
    uniform_noise: bool = False

    def __post_init__(self) -> None:
        _require_steps(self.num_steps)


@dataclass(frozen=True)
class ContinuousDiffusion:
    """MDLM: the bound in continuous time."""

    schedule: NoiseSchedule = Linear()
    proposal: TimeProposal = Even()


@dataclass(frozen=True)
class LearnedDiffusion:
    """GenMD4: continuous time, and a rate of its own for every token, learned with the network."""


@dataclass(frozen=True)
class AnyOrderWriting:
    """OA-ARDM: one token at a time, in any order."""


@dataclass(frozen=True)
class Masking:
    """BERT: ordinary masked-language-model pretraining."""

    rate: float = 0.15


@dataclass(frozen=True)
class MouthMasking:
    """BERT-Mouth: ordinary masking goes on, and Gibbs sampling writes."""

    rate: float = 0.15


@dataclass(frozen=True)
class MaskPredicting:
    """CMLM: any number of places is hidden; mask-predict writes."""


@dataclass(frozen=True)
class StepUnrolling:
    """SUNDAE: learns to mend uniform noise and what it made of it itself."""

    unrolls: int = 2


@dataclass(frozen=True)
class VectorDiffusion:
    """Diffusion-LM: Gaussian noise on learned word vectors. On pairs, with the source frozen, it is DiffuSeq."""

    schedule: NoiseSchedule = Cosine()
    num_steps: int = 2000
    floor: float = 1e-4
    """The variance of a clean vector: 1e-4 with the cosine, 0.01 with the square root."""
    width: int | None = 128
    """Of a word's vector; None is that of the backbone's, whose own vectors are then the first ones."""
    clamped: float | None = None
    """Up to this time each step's guess is moved to the nearest word, in the bound as in writing; 0 is never, None as
    long as the noisy vectors themselves tell the word."""

    def __post_init__(self) -> None:
        _require_steps(self.num_steps)


@dataclass(frozen=True)
class NextWord:
    """A decoder: one token after another, from left to right."""


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


MaskObjectives = (
    Diffusion | ContinuousDiffusion | LearnedDiffusion | AnyOrderWriting | Masking | MouthMasking | MaskPredicting
)
"""Whose noise is `[MASK]`, unless it is said to be uniform."""
Objectives = MaskObjectives | StepUnrolling | VectorDiffusion | NextWord


@dataclass(frozen=True)
class Experiment:
    """Everything that determines a run."""

    data: Data
    network: NewBert | NewDecoder | Pretrained = NewBert()
    time: Time = Time.NONE
    objective: Objectives = Diffusion()
    training: Training = Training()


# ---- JSON -------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Experiment, Data, Training, NewBert, NewDecoder, Pretrained),
        *(Diffusion, ContinuousDiffusion, LearnedDiffusion, AnyOrderWriting, Masking, MouthMasking, MaskPredicting),
        *(StepUnrolling, VectorDiffusion, NextWord),
        *(TokenBudget, FixedRows, Linear, Cosine, Spindle, Sqrt, Power, Even, Bell),
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
        if not any(isinstance(member, type) and issubclass(kind, member) for member in _members(annotation)):
            raise ValueError(f"a setting is of the kind {kind.__name__}, but must be {annotation}")
        hints = typing.get_type_hints(kind)
        unknown = set(plain) - set(hints) - {"kind"}
        if unknown:
            raise ValueError(f"{kind.__name__} has no setting {sorted(unknown)[0]!r}; it has {', '.join(hints)}")
        return kind(**{name: from_json(plain[name], hints[name]) for name in hints if name in plain})
    if isinstance(plain, list | tuple) and typing.get_origin(annotation) is tuple:
        return tuple(from_json(each, typing.get_args(annotation)[0]) for each in plain)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation(plain)
    # The very type, because to Python a bool is an int; a whole number may stand for a float.
    if type(plain) not in _members(annotation) and not (float in _members(annotation) and type(plain) is int):
        raise ValueError(f"a setting has the value {plain!r}, but must be {annotation}")
    return plain


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if is_union else (annotation,)
