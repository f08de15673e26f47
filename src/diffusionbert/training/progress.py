"""A progress bar with figures beside it, on standard error and only on a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class ProgressLine:
    """A progress bar while its context is open; log messages appear above it.

    Args:
        total: The number of items.
        visible: Whether to show it if standard error is a terminal; False on all processes but the main one.
        completed: The number of items that are already done.
    """

    def __init__(self, total: int, visible: bool, completed: int = 0):
        console = Console(stderr=True, highlight=False)
        self.progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (visible and console.is_terminal),
        )
        self.task: TaskID = self.progress.add_task("", total=total, completed=completed)

    def __enter__(self) -> ProgressLine:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()

    def update(self, completed: int, description: str) -> None:
        """Moves the bar, and shows a text of figures beside it."""
        self.progress.update(self.task, completed=completed, description=description)
