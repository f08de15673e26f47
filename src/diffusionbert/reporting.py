"""How the package reports to its users: log messages with one verbosity switch, progress callbacks, one-line errors.

Messages go through the logger `diffusionbert`. Those below warnings are hidden until `set_verbosity("info")` is called,
as the command line does. Long work takes a progress callback; how it is displayed is up to the caller.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the number of items done, and their total (0 if unknown)."""

ShowProgress = Callable[..., None]
"""Called with the number of items done, a text and, if it changes, the total."""

logger = logging.getLogger("diffusionbert")


def no_progress(description: str, done: object, total: int) -> None:
    """Shows nothing."""


_shown: ContextVar[Callable[[str, int | Callable[[], int], int], None]] = ContextVar("shown", default=no_progress)
SECONDS_TO_SHOW, SECONDS_TO_ESTIMATE = 2.0, 10.0
"""Work that takes longer than the first gets a bar on a terminal; elsewhere, beyond the second, a line with an
estimate."""
SECONDS_BETWEEN = 0.1
"""The minimum time between two displayed counts if counting itself takes time."""


def report(description: str, done: int | Callable[[], int], total: int) -> None:
    """Reports the progress of work inside a call; it is displayed only within `shown_progress`.

    If `done` is a function, it is called only when its count is displayed: on a GPU, counting would wait for the work.
    """
    show = _shown.get()
    if show is not no_progress:
        show(description, done, total)


@contextmanager
def shown_progress(*, visible: bool = True) -> Iterator[None]:
    """Displays reported progress: on a terminal a bar with the remaining time, elsewhere one line if it takes long."""
    from rich.console import Console

    is_terminal = Console(stderr=True).is_terminal
    with ExitStack() as bar:
        began, bars = time.monotonic(), list[ShowProgress]()
        counted = began

        def show(description: str, done: int | Callable[[], int], total: int) -> None:
            nonlocal began, counted
            seconds = (now := time.monotonic()) - began
            if not isinstance(done, int):
                if seconds <= SECONDS_TO_SHOW or now - counted < SECONDS_BETWEEN:
                    return
                done, counted = done(), now
            if done >= total:  # later output may be printed where the bar was
                bar.close()
                bars.clear()
                began = time.monotonic()
            elif not is_terminal and done > 0 and seconds > SECONDS_TO_ESTIMATE:
                left = timedelta(seconds=round(seconds * (total - done) / done))
                logger.info(f"{description}: {done:,} of {total:,}, about {left} left")
                began = math.inf  # once
            elif is_terminal and seconds > SECONDS_TO_SHOW:
                if not bars:
                    bars.append(bar.enter_context(progress_line(total)))
                bars[0](done, description, total)

        token = _shown.set(show if visible else no_progress)
        try:
            yield
        finally:
            _shown.reset(token)


@contextmanager
def progress_line(total: int | None, *, visible: bool = True, done: int = 0) -> Iterator[ShowProgress]:
    """Shows a progress bar on standard error if that is a terminal; log messages appear above it.

    Args:
        total: The number of items; None if unknown.
        visible: Whether to show it, provided that messages are shown; False on all processes except the main one.
        done: The number of items already done.

    Yields:
        A function that sets the number of items done, the text next to the bar and, if given, the total.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    is_shown = visible and console.is_terminal and logger.isEnabledFor(logging.ERROR)
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda done, text, *total: progress.update(
            task, completed=done, description=text, total=(*total, None)[0]
        )


def set_verbosity(level: str | int) -> None:
    """Sets which messages of the package are shown on standard error.

    Args:
        level: "debug", "info", "warning" (the default) or "error", or a level of `logging`.

    Examples:
        >>> import diffusionbert
        >>> diffusionbert.set_verbosity("info")
    """
    known = ("debug", "info", "warning", "error")
    if isinstance(level, str) and level not in known:
        raise ValueError(f"`level` must be one of {', '.join(known)}, got {level!r}")
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        logger.propagate = False


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes plain lines to the current `sys.stderr`."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return prefix + printable(" ".join(record.getMessage().split()))


def printable(text: str) -> str:
    """A text as one line for a terminal, without control characters, line breaks and changes of text direction."""
    steering = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    kinds = {"Cc", "Zl", "Zp", "Cs"}
    return "".join(" " if unicodedata.category(one) in kinds or one in steering else one for one in text)


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def fault_of(error: BaseException) -> str:
    """What went wrong in the user's code, and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError | ImportError):  # their messages already say where
        where = ""
    return f"{type(error).__name__}: {reason_of(error)}{where}"


def require_type(name: str, value: object, types: type | tuple[type, ...], expected: str) -> None:
    """Raises TypeError unless a user's value has one of the types."""
    if not isinstance(value, types):
        shown = " ".join(repr(value).split())
        raise TypeError(f"{name} must be {expected}, got {shown[:40]} ({type(value).__name__})")
