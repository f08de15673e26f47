"""What the package tells its users: log messages with one verbosity switch, progress callbacks, one-line errors.

Messages go through the logger `diffusionbert` and are silent below warnings, unless `set_verbosity("info")` was called;
the command line does that. Long work takes a progress callback; what it draws is up to the caller.
"""

from __future__ import annotations

import logging
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the number of items done, and their total (0 if unknown)."""

logger = logging.getLogger("diffusionbert")


def no_progress(description: str, done: int, total: int) -> None:
    """Shows nothing."""


@contextmanager
def progress_line(total: int | None, *, visible: bool = True, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Shows a progress bar on standard error if that is a terminal; log messages appear above it.

    Args:
        total: The number of items; None if unknown.
        visible: Whether to show it at all, unless messages are not shown, either; False on all processes but the main
            one.
        done: The number of items that are already done.

    Yields:
        A function that sets the number of items done and the text beside the bar.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    is_shown = visible and console.is_terminal and logger.isEnabledFor(logging.ERROR)
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda done, text: progress.update(task, completed=done, description=text)


def set_verbosity(level: str | int) -> None:
    """Sets which messages of the package are shown on standard error.

    Args:
        level: "debug", "info", "warning" (the default) or "error", or a level of `logging`.

    Example:
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
    """Writes plain lines to what `sys.stderr` is at that moment."""

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
    """A text as one line without control characters, line ends and changes of direction, for a terminal."""
    steering = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    kinds = {"Cc", "Zl", "Zp", "Cs"}
    return "".join(" " if unicodedata.category(one) in kinds or one in steering else one for one in text)


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def require_type(name: str, value: object, types: type | tuple[type, ...], expected: str) -> None:
    """Raises TypeError unless a value of the user has one of the types."""
    if not isinstance(value, types):
        shown = " ".join(repr(value).split())
        raise TypeError(f"{name} must be {expected}, got {shown[:40]} ({type(value).__name__})")
