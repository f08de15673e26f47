"""Samplers as step machines: `start` makes a state, `query` says what to ask the network, `update` makes the next one.

A sampler is a frozen dataclass of its own settings and stores nothing about a call; everything that changes is in the
state. `sample` is the only loop. A server can drive many states with one forward pass: it joins their queries with
`concatenate_queries`, runs the network once and gives each state its part of the answer (`split_answer`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.diffusion.schedules import require_grid, uniform_grid
from diffusionbert.diffusion.shapes import (
    Batch,
    Counts,
    Flags,
    Grid,
    PerTarget,
    PositionMask,
    TargetIndices,
    TargetLogProbs,
    TargetTokens,
    Times,
    Tokens,
    TokenSet,
    Vectors,
)
from diffusionbert.diffusion.tokens import LogitsWarper, draw, in_parts, log_prob_of
from diffusionbert.networks.base import AnswersAt, Network
from diffusionbert.networks.causal import CausalNetwork, KeyValues
from diffusionbert.networks.embedding import VectorNetwork
from diffusionbert.registry import Registry
from diffusionbert.reporting import require_type

# ---- settings -------------------------------------------------------------------------------------------------------

MAX_STEPS: Final = 1_000_000
StateT = TypeVar("StateT", bound="State")


@dataclass(frozen=True)
class SamplerConfig:
    """The number of steps and the logits warper.

    Args:
        steps: The number of steps of the time grid, or of rounds if a sampler has no time grid.
        temperature: Divides the log-probabilities of p(x0 | x_t).
        top_k: Keeps the k most probable tokens; None keeps all.
        top_p: Keeps the smallest set of tokens whose probability reaches this value; None keeps all.
    """

    steps: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        require_type("steps", self.steps, Integral, "a whole number")
        require_type("temperature", self.temperature, Real, "a number")
        require_type("top_k", self.top_k, (Integral, type(None)), "a whole number or None")
        require_type("top_p", self.top_p, (Real, type(None)), "a number or None")
        if not 1 <= self.steps <= MAX_STEPS:
            raise ValueError(f"`steps` must be between 1 and {MAX_STEPS}, got {self.steps}; 128 is usual")
        self.warper()  # rejects an invalid temperature, top-k or top-p

    def warper(self, forbidden: tuple[int, ...] = ()) -> LogitsWarper:
        """The logits warper; `forbidden` tokens get probability 0."""
        return LogitsWarper(self.temperature, self.top_k, self.top_p, forbidden)

    @property
    def is_plain(self) -> bool:
        """Whether the distribution p(x0 | x_t) is used as it is."""
        return self.warper() == LogitsWarper()


# ---- queries --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Query:
    """Asks a network on tokens for log f(v | x_t) at the N target positions; the answer is [N, V]."""

    tokens: Tokens
    attention_mask: PositionMask
    t: Times
    positions: TargetIndices  # the targets, as indices into the flattened sequences; they may repeat
    is_padded: bool = True  # False if it is known that no position is padding

    @cached_property
    def targets(self) -> PositionMask:
        """The target positions as a mask."""
        mask = torch.zeros_like(self.attention_mask)
        mask.view(-1).index_fill_(0, self.positions, True)
        return mask

    @classmethod
    def of(cls, x_t: Batch, t: Times, targets: PositionMask) -> Query | None:
        """The query about these positions, or None if there are none.

        Sequences without a target position are left out, and the others are cut after the last attended position.
        """
        sequences = targets.any(dim=1).nonzero()[:, 0]
        if not len(sequences):
            return None
        sent = x_t.select(sequences)
        chosen = targets[sequences, : sent.tokens.shape[1]]
        return cls(sent.tokens, sent.attention_mask, t[sequences], chosen.flatten().nonzero()[:, 0])

    def run(self, network: Network) -> TargetLogProbs:
        if isinstance(network, AnswersAt):
            mask = self.attention_mask if self.is_padded else None
            return network.log_probs_at(self.tokens, mask, self.t, self.positions)
        answer = network(self.tokens, self.attention_mask, self.t, self.targets)
        return answer if self.is_in_order else answer.index_select(0, self.number)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the positions are known to be those of the mask, in its order; a GPU is not asked."""
        return not self.positions.is_cuda and bool((self.positions.diff() > 0).all())

    @cached_property
    def number(self) -> TargetIndices:
        """The number of each position among the targets of the mask, which do not repeat."""
        return self.targets.flatten().cumsum(dim=0)[self.positions] - 1


@dataclass(frozen=True, eq=False)
class VectorQuery:
    """Asks a network on word vectors for x̂0; the answer is [B, L, D]."""

    vectors: Vectors
    attention_mask: PositionMask
    t: Times

    def run(self, network: VectorNetwork) -> Vectors:
        return network(self.vectors, self.attention_mask, self.t)


@dataclass(frozen=True, eq=False)
class CausalQuery:
    """Asks a decoder for the distribution of the token after these; the answer is [B, V] and the longer cache."""

    tokens: Tokens  # the positions that follow those in the cache
    cache: KeyValues | None

    def run(self, network: CausalNetwork) -> tuple[TargetLogProbs, KeyValues]:
        return network.read(self.tokens, self.cache)


AnyQuery = Query | VectorQuery | CausalQuery


def concatenate_queries(queries: Sequence[Query]) -> Query:
    """Joins queries into one, padded at the end to the longest sequence."""
    lengths = [query.tokens.shape[1] for query in queries]
    length, first, positions = max(lengths), 0, []
    for query, own in zip(queries, lengths, strict=True):
        positions.append((first + query.positions // own) * length + query.positions % own)
        first += len(query.tokens)

    def padded(name: str) -> Any:
        parts = [getattr(query, name) for query in queries]
        return torch.cat([pad(part, (0, length - part.shape[1])) for part in parts])

    t = torch.cat([query.t for query in queries])
    is_padded = len(set(lengths)) > 1 or any(query.is_padded for query in queries)
    return Query(padded("tokens"), padded("attention_mask"), t, torch.cat(positions), is_padded)


def split_answer(answer: TargetLogProbs, queries: Sequence[Query]) -> list[Tensor]:
    """The parts of the answer to concatenated queries, one per query."""
    return list(torch.split(answer, [len(query.positions) for query in queries]))


# ---- context and state ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingContext:
    """What a sampler knows about the model and the request."""

    mask_id: int
    process: Process | Gaussian | None = None  # the forward process; None for models without one (SUNDAE, decoders)
    config: SamplerConfig = SamplerConfig()
    allowed_tokens: TokenSet | None = None  # the tokens that the network gives probability to
    forbidden: tuple[int, ...] = ()  # allowed tokens that must not be generated, such as `[UNK]`
    time_agnostic: bool = False
    start_time: float = 1.0
    """Where the time grid ends and sampling starts: 1 is pure noise, less continues from a partly masked text."""
    max_length: int | None = None  # how many positions the network can read at once
    word_vectors: VectorNetwork | None = None  # under Gaussian noise: embeds tokens and rounds vectors to tokens
    causal: bool = False  # whether the network is a decoder, which answers only `CausalQuery`
    time_grid: Grid | None = None  # a time grid other than `config.steps` equal steps up to `start_time`

    def __post_init__(self) -> None:
        if not 0 < self.start_time <= 1:
            raise ValueError(f"start_time must be above 0 and at most 1, got {self.start_time}; 1 is pure noise")
        if self.time_grid is not None:
            require_grid(self.time_grid, partial=True)

    @cached_property
    def grid(self) -> Grid:
        """The times 0 < … < start_time that bound the steps, in float64 on the CPU."""
        with torch.device("cpu"):  # whatever the default device: samplers read single times from it
            return uniform_grid(self.config.steps, self.start_time) if self.time_grid is None else self.time_grid.cpu()

    @property
    def warper(self) -> LogitsWarper:
        """Temperature, top-k and top-p for p(x0 | x_t); also excludes forbidden tokens."""
        return self.config.warper(self.forbidden)

    @property
    def exclusion(self) -> LogitsWarper:
        """Excludes forbidden tokens and changes nothing else."""
        return LogitsWarper(forbidden=self.forbidden)

    def tokens_process(self, sampler: Sampler) -> Process:
        """The forward process; raises ValueError if it does not act on tokens."""
        if isinstance(self.process, Process):
            return self.process
        raise ValueError(
            f"the sampler {sampler.name!r} needs a diffusion model on tokens, which this is not; leave it out"
        )

    def absorbing(self, sampler: Sampler) -> Absorbing:
        """The forward process; raises ValueError if it does not mask tokens."""
        if isinstance(self.process, Absorbing):
            return self.process
        raise ValueError(
            f"the sampler {sampler.name!r} needs a model whose noise is [MASK], which this is not; leave it out"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class State:
    """What has been generated so far. Subclasses add what one sampler needs for its next step."""

    context: SamplingContext
    canvas: Batch
    seed: int
    tokens: Tokens
    time: Times  # where each sequence is on its way from `context.start_time` to 0
    calls: Counts  # the number of network calls per sequence so far
    done: bool  # whether this is the last state

    @classmethod
    def begin(
        cls: type[StateT], context: SamplingContext, canvas: Batch, seed: int, tokens: Tokens, time: Times, **own: Any
    ) -> StateT:
        """The first state, before any call; it is also the last if nothing is editable."""
        shared: dict[str, Any] = {"calls": torch.zeros_like(canvas.example), "done": not bool(canvas.editable.any())}
        return cls(context=context, canvas=canvas, seed=seed, tokens=tokens, time=time, **(shared | own))

    def advance(self: StateT, tokens: Tokens, time: Times, called: Flags, done: bool, **own: Any) -> StateT:
        """The next state; `called` marks the sequences that the network was called for."""
        return replace(self, tokens=tokens, time=time, calls=self.calls + called, done=done, **own)

    @property
    def x(self) -> Batch:
        """The canvas with the tokens generated so far."""
        return replace(self.canvas, tokens=self.tokens)


# ---- samplers -------------------------------------------------------------------------------------------------------


class Sampler(ABC):
    """A sampling algorithm: a registered frozen dataclass of its settings.

    The draws of a sequence depend on the seed and its `canvas.example`, not on the other sequences of the batch.
    """

    registry: ClassVar[Registry[Sampler]] = Registry("sampler", "diffusionbert.samplers", "diffusionbert.samplers")

    @property
    def name(self) -> str:
        return self.registry.name_of(self)

    def resolve(self, context: SamplingContext) -> Sampler:
        """The sampler to use in a context; raises ValueError if it does not suit the model."""
        return self

    def keeps_tokens(self, context: SamplingContext) -> bool:
        """Whether a token never changes once it is unmasked."""
        return False

    @abstractmethod
    def start(self, context: SamplingContext, canvas: Batch, seed: int) -> State:
        """The first state; positions that are not editable never change."""

    @abstractmethod
    def query(self, state: Any) -> AnyQuery | None:
        """What to ask the network for the next step of a state that is not done; None to ask nothing."""

    @abstractmethod
    def update(self, state: Any, answer: Any) -> State:
        """The next state; `answer` is the network's answer to `query(state)`, None if that was None."""


def sample(sampler: Sampler, context: SamplingContext, network: Any, canvas: Batch, seed: int) -> Iterator[State]:
    """Yields every state from noise to text.

    Args:
        sampler: The algorithm.
        context: What it knows about the model and the request.
        network: A `Network`, or a `VectorNetwork` or `CausalNetwork` if the sampler queries one.
        canvas: The sequences, whose editable positions are generated.
        seed: The same seed gives the same text.

    Yields:
        The states. They may hold caches: to get the last one, use `last_state`, which does not keep the others.
    """
    # Gradients are off within a step only: a suspended generator must not switch them off for its caller.
    with torch.no_grad():
        sampler = sampler.resolve(context)
        state = sampler.start(context, canvas, seed)
    yield state
    while not state.done:
        with torch.no_grad():
            query = sampler.query(state)
            state = sampler.update(state, None if query is None else query.run(network))
        yield state


def last_state(states: Iterator[State]) -> State:
    """The last of all states, without keeping the others in memory."""
    state = next(states)
    for state in states:  # noqa: B007
        pass
    return state


# ---- for samplers that choose how many positions to unmask in each round --------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundState(State):
    """The masked positions and the number of rounds so far."""

    masked: PositionMask
    num_rounds: int


class RoundSampler(Sampler):
    """A sampler that queries all masked positions in every round.

    A time-conditioned network is given the masked fraction of the editable positions, times the start time.
    """

    def resolve(self, context: SamplingContext) -> Sampler:
        context.absorbing(self)
        return self

    def query(self, state: RoundState) -> Query | None:
        return Query.of(state.x, state.time, state.masked)


def draw_with_probability(
    context: SamplingContext, log_f: TargetLogProbs, uniform: PerTarget
) -> tuple[TargetTokens, PerTarget]:
    """Draws a token at each target position; returns the tokens and their probabilities.

    Probabilities are those before temperature, top-k and top-p: after `top_k=1`, every token would be certain.
    """

    def drawn(log_f: TargetLogProbs, uniform: PerTarget) -> tuple[Tensor, Tensor]:
        log_p = context.exclusion(log_f)
        tokens = draw(context.warper(log_p), uniform)
        return tokens, log_prob_of(log_p, tokens).exp()

    tokens, probability = in_parts(drawn, log_f, uniform)
    return tokens, probability


def masked_fraction(context: SamplingContext, x: Batch) -> Times:
    """The time that a network is given: the masked fraction of the editable positions, times the start time."""
    return context.start_time * x.fraction_of(x.tokens == context.mask_id)


def due_after(number: int, num_positions: Counts, num_rounds: int) -> Counts:
    """How many of n positions are to be unmasked after round k = 0, 1, …: ⌊(k + 1)·n / m⌋, m = min(n, rounds)."""
    due: Counts = (number + 1) * num_positions // num_positions.clamp(min=1, max=num_rounds)
    return due
