"""Shared by several commands: options for models and samplers, JSON output, and texts on a terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from diffusionbert.reporting import reason_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from diffusionbert.inference.tasks import StreamState
    from diffusionbert.model import Model
    from diffusionbert.samplers.config import SamplingRequest

RED_NATS = 10.0
"""Tokens with at least this many nats are fully red."""


def option(metavar: str, *aliases: str) -> Any:
    """How `--help` shows an option whose text already states the default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="", aliases=aliases or None)


OptionalText = Annotated[str | None, option("STR")]
OptionalInt = Annotated[int | None, option("INT")]
OptionalFloat = Annotated[float | None, option("FLOAT")]
OptionalPath = Annotated[Path | None, option("PATH")]
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
Capitalize = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
"""A switch that is on unless --no-capitalize is given."""
Words = Annotated[tuple[str, ...], option("[WORD ...]")]


@dataclass(frozen=True)
class ModelOptions:
    """The model, and the device it runs on."""

    model: OptionalText = None
    """A run directory, a model folder, or the Hub name of any masked or causal language model.
    Default: the bundled model."""
    device: OptionalText = None
    """The device: cpu, cuda, cuda:1, … Default: a GPU if there is one."""
    dtype: Annotated[Literal["float32", "bfloat16", "int8"] | None, option("{float32,bfloat16,int8}")] = None
    """The dtype of the network; int8 (CPUs only) is 2 to 3 times as fast and costs some thousandths of a nat per token.
    Default: float32, but text is generated in bfloat16 on a GPU, and in int8 on a CPU where that is faster."""

    @property
    def recorded(self) -> dict[str, str | None]:
        """What results depend on, for an output that is continued."""
        return {"model": self.model, "dtype": self.dtype}

    def loaded(self, *, compile: bool = False) -> Model:
        from diffusionbert.model import load

        require_device(self.device)
        return load(self.model, device=self.device, dtype=self.dtype, compile=compile)


@dataclass(frozen=True)
class GeneratingModel(ModelOptions):
    """The model, the device it runs on, and whether it is compiled."""

    compile: Flag = False
    """Compile the network for generation on a GPU: it starts some seconds later, and then runs faster."""


@dataclass(frozen=True)
class WithModel(ModelOptions):
    """Options of commands that use a model and print one result."""

    json: Flag = False
    """Print one JSON object per line, and nothing else, on standard output."""


@dataclass(frozen=True)
class SamplerOptions:
    """How tokens are sampled."""

    steps: int = 128
    """The number of steps of the time grid; most samplers make at most one network call per token."""
    sampler: OptionalText = None
    """A sampler by name, optionally with settings, such as remasking:eta=0.1.
    exact samples the model's distribution with the fewest network calls.
    Others are ancestral, entropy-bounded, confidence, margin, entropy and mask-predict.
    Also remasking, remasking-rescale, renoising, gibbs, gibbs-left-to-right, …
    Default: the model's own: exact for diffusion on masks and, after a prompt, entropy (the most certain first)."""
    temperature: float = 1.0
    """The sampling temperature; below 1, probable tokens become more probable."""
    top_k: int = 30
    """Sample from the k most probable tokens, 30 as in the paper; 0 keeps all."""
    top_p: OptionalFloat = None
    """Sample from the most probable tokens that together reach this probability. Default: keep all."""

    def request(self, block: int | None = None) -> SamplingRequest:
        from diffusionbert.model import sampling_request

        return sampling_request(self.sampler, self.steps, self.temperature, self.top_k, self.top_p, block)


@dataclass(frozen=True)
class GenerationOptions(SamplerOptions):
    """How tokens are sampled."""

    top_k: int = 0
    """Sample from the k most probable tokens; 0 keeps all."""
    top_p: OptionalFloat = 0.5
    """Sample from the most probable tokens that together reach this probability; 1 keeps all."""


def require_device(name: str | None) -> None:
    """Raises ValueError for a device that cannot be used."""
    import torch

    try:
        torch.zeros(1, device=name or None).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name} is not available ({reason_of(error)}); leave it out, or use cpu") from None


# ---- text -----------------------------------------------------------------------------------------------------------


def print_json(value: dict[str, Any]) -> None:
    """Prints one line of JSON and flushes it, so that a reader gets it at once."""
    print(json.dumps(finite(value), ensure_ascii=False, allow_nan=False), flush=True)


def finite(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON does not have, with null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- terminals ------------------------------------------------------------------------------------------------------


def show_generation(states: Iterable[StreamState], console: Console, num_lines: int | None = None) -> None:
    """Shows a text being generated: in place on a terminal, otherwise one line per state, at most `num_lines`."""
    if console.is_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            for state in states:
                live.update(line_of(state), refresh=True)
                time.sleep(0.04)  # slow enough to follow
        return
    changed = [next(same) for _, same in groupby(states, key=lambda state: state.pieces)]
    last, count = len(changed) - 1, min(num_lines or len(changed), len(changed))
    for index in sorted({round(last * step / max(1, count - 1)) for step in range(count)}):
        console.print(line_of(changed[index]), soft_wrap=True)


def line_of(state: StreamState) -> Text:
    """One state as one line: masked positions as dim bars, tokens as they are."""
    from rich.text import Text

    words = [piece and (piece[2:] if piece.startswith("##") else f" {piece}") for piece in state.pieces]
    parts = [(" ▁▁▁", "dim") if word is None else (word, "default") for word in words]
    return Text.assemble((f"t = {state.time:4.2f} ", "dim"), *parts)


def colored(tokens: Sequence[tuple[str, float]]) -> Text:
    """Tokens with their nats, on a color scale from green (few) to red (many)."""
    from rich.text import Text

    line = Text()
    for piece, nats in tokens:
        fraction = min(max(nats, 0.0) / RED_NATS, 1.0)
        red, green = int(80 + 175 * fraction), int(80 + 175 * (1 - fraction))
        space = "" if piece.startswith("##") or not line else " "
        line.append(f"{space}{piece.removeprefix('##')}", style=f"rgb({red},{green},80)")
        line.append(f"({round(nats, 1) + 0.0:.1f})", style="dim")
    return line
