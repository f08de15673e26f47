"""What several commands share: options for a model, lines of text, lines of JSON."""

from __future__ import annotations

import codecs
import io
import json
import math
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusionbert.reporting import reason_of

if TYPE_CHECKING:
    from diffusionbert.model import Model
    from diffusionbert.samplers.config import SamplingRequest
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from diffusionbert.inference.tasks import StreamState

LONGEST_LINE = 100_000
MOST_LINES = 1_000_000


@dataclass(frozen=True)
class WithModel:
    """Options of commands that use a model."""

    model: str | None = None
    """A run directory, a model folder, or any masked or causal language model on the Hub; by default the bundled
    model."""
    device: str | None = None
    """cpu, cuda, cuda:1, …; by default a GPU if there is one."""
    json: bool = False
    """Print one JSON object per line, and nothing else."""

    def loaded(self) -> Model:
        """Opens the model."""
        from diffusionbert.model import load

        require_device(self.device)
        return load(self.model, device=self.device)


@dataclass(frozen=True)
class SamplerOptions:
    """Options of commands that generate."""

    steps: int = 128
    """Steps of the time grid; more cost more only where the network must be called more often."""
    sampler: str | None = None
    """A sampler by name, with knobs such as remasking:eta=0.1; by default the model's own. exact (the model's own
    distribution with the fewest calls), ancestral, confidence, margin, entropy, mask-predict, remasking,
    remasking-rescale, renoising, gibbs, gibbs-left-to-right, …"""
    temperature: float = 1.0
    top_k: int | None = 30
    """Sample among the k most probable tokens; 0 keeps all."""
    top_p: float | None = None
    """Sample among the most probable tokens that together reach this probability."""

    def request(self, block: int | None = None) -> SamplingRequest:
        """The typed settings."""
        from diffusionbert.model import sampling_request

        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"--top-k must be >= 1, or 0 for all tokens, got {self.top_k}")
        return sampling_request(self.sampler, self.steps, self.temperature, self.top_k or None, self.top_p, block)


def require_device(name: str | None) -> None:
    """Refuses a device on which nothing can be computed."""
    import torch

    if not name:
        return
    try:
        torch.zeros(1, device=torch.device(name)).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name} is not to be had ({reason_of(error)}); leave it out, or try cpu") from None


def lines_of(texts: tuple[str, ...], file: Path | None, what: str) -> list[str]:
    """The texts given as words of the command line, or the lines of a file; `-` is the standard input."""
    if texts and file is not None:
        raise ValueError(f"{what} came as arguments and by --file; give one of the two")
    if file is None:
        if not texts:
            raise ValueError(f"there is no text; give {what} in quotes, or --file NAME (- is the standard input)")
        return list(texts)
    try:
        with nullcontext(_standard_input()) if str(file) == "-" else file.open("rb") as stream:
            lines = list(_lines(stream, str(file)))
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read ({error.strerror}); give a text file") from None
    if not lines:
        raise ValueError(f"{str(file)!r} is empty; give {what}, one a line")
    return lines


def _lines(stream: io.BufferedIOBase, name: str) -> Iterator[str]:
    """The lines of a stream that are not blank; raises ValueError as soon as it has too many, or one too long."""
    num_lines, most_bytes = 0, 4 * LONGEST_LINE
    for number, line in enumerate(iter(lambda: stream.readline(most_bytes + 1), b""), start=1):
        is_cut = len(line) > most_bytes
        try:
            read = [] if is_cut else line.removeprefix(codecs.BOM_UTF8).decode().split("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} of {name!r} is not UTF-8 ({error.reason}); convert it") from None
        texts = [text.strip() for text in read if text.strip()]
        num_lines += len(texts)
        if is_cut or num_lines > MOST_LINES or any(len(text) > LONGEST_LINE for text in texts):
            raise ValueError(
                f"{name!r} is too large at line {number}; at most {MOST_LINES} lines of {LONGEST_LINE} characters are "
                "read at a time, split it"
            )
        yield from texts


def _standard_input() -> io.BufferedIOBase:
    if sys.stdin is None:  # it was closed
        return io.BytesIO()
    own = getattr(sys.stdin, "buffer", None)
    return io.BytesIO(sys.stdin.read().encode()) if own is None else own


def printable(text: str) -> str:
    """A text as one line that cannot steer a terminal: control characters, line ends and turns of direction go."""
    steering = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    kinds = {"Cc", "Zl", "Zp", "Cs"}
    return "".join(" " if unicodedata.category(one) in kinds or one in steering else one for one in text)


def print_json(value: dict[str, Any]) -> None:
    """One line, at once: whoever reads need not wait for the next."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    """JSON has no infinity: null stands for it."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- terminal -------------------------------------------------------------------------------------------------------
#
# Terminal output: a text while it is being generated, and tokens coloured by their nats.


DEAR = 10.0
"""Nats from which a token is fully red."""


def show_generation(moments: Iterable[StreamState], console: Console, num_lines: int | None = None) -> None:
    """Shows a text being generated: in place on a terminal, else one line per state, at most `num_lines`."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for moment in moments:
                live.update(line_of(moment), refresh=True)
                time.sleep(0.04)  # slow enough to follow
        return
    changed: list[StreamState] = []
    for moment in moments:
        if not changed or moment.pieces != changed[-1].pieces:
            changed.append(moment)
    last = len(changed) - 1
    count = min(num_lines or len(changed), len(changed))
    for index in sorted({round(last * step / max(1, count - 1)) for step in range(count)}):
        console.print(line_of(changed[index]), soft_wrap=True)


def line_of(moment: StreamState) -> Text:
    """One state as one line: masked positions as dim bars, tokens as they are."""
    line = Text()
    line.append(f"t = {moment.time:4.2f} ", "dim")
    for piece in moment.pieces:
        if piece is None:
            line.append(" ▁▁▁", "dim")
        else:
            line.append(piece[2:] if piece.startswith("##") else f" {piece}", "default")
    return line


def coloured(surprise: Sequence[tuple[str, float]]) -> Text:
    """Tokens on a scale from green (few nats) to red (many), each with its nats."""
    line = Text()
    for piece, nats in surprise:
        warmth = min(max(nats, 0.0) / DEAR, 1.0)
        red, green = int(80 + 175 * warmth), int(80 + 175 * (1 - warmth))
        space = "" if piece.startswith("##") or not line else " "
        line.append(f"{space}{piece.removeprefix('##')}", style=f"rgb({red},{green},80)")
        line.append(f"({nats:.1f})", style="dim")
    return line
